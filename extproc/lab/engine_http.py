"""A simulated engine behind HTTP, in this process.

async with LabEngine(name="a", models=("m",)) as engine:
    ...  # engine.url answers; engine.counters and engine.requests tell what it saw
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from types import TracebackType
from typing import Self

from aiohttp import web

from extproc.lab.control import PREFIX, control
from extproc.lab.delivery import Delivery
from extproc.lab.desk import Desk, Options, Shown
from extproc.lab.engine import Engine, EngineSettings
from extproc.lab.faults import Fault, FaultKind, Faults
from extproc.lab.listener import Listener
from extproc.lab.metrics_page import serve_page
from extproc.lab.pages import Dialect
from extproc.lab.pump import Pump
from extproc.lab.records import Counters, Outcome, Received, Records
from extproc.lab.visit import KNOWN_PATHS, PROBES, Visit
from extproc.lab.wire import Slammed, Spent, reset

_POLL_SECONDS = 0.002
_STOP_SECONDS = 2.0
_LONGEST_LINE_BYTES = 1024 * 1024


class LabEngine:
    """One simulated engine at one address.

    Args:
        name: in every answer's `x-served-by` header, and the system fingerprint.
        models: what it serves; the first is what a request without a model gets.
        port: 0 takes a free one; after the first start it stays the same.
        control_port: where the `/lab/` pages are too, even while connections are refused.
        faults: what goes wrong from the start.
        random: decides on faults that have a probability.
        log: is given a line per API request.
        others: as in `Options`.
    """

    def __init__(
        self,
        name: str = "engine",
        models: Sequence[str] = ("m",),
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        control_port: int | None = None,
        tls: ssl.SSLContext | None = None,
        dialect: Dialect | str = Dialect.VLLM,
        settings: EngineSettings | None = None,
        ranks: int = 1,
        output_tokens: int = 16,
        token_bytes: int = 4,
        stamps: bool = False,
        headers_at_once: bool = True,
        key: str | None = None,
        key_header: str = "authorization",
        echo: bool = False,
        is_bulky: bool = False,
        faults: Sequence[Fault] = (),
        random: Random | None = None,
        keep_requests: int = 200,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.options = Options(
            name=name,
            models=tuple(models),
            dialect=Dialect(dialect),
            settings=settings or EngineSettings(),
            ranks=ranks,
            output_tokens=output_tokens,
            token_bytes=token_bytes,
            stamps=stamps,
            headers_at_once=headers_at_once,
            key=key,
            key_header=key_header,
            echo=echo,
            is_bulky=is_bulky,
        )
        self.name = name
        self.host = host
        self.faults = Faults(random or Random())  # noqa: S311 - not for secrets
        self.records = Records(keep=keep_requests)
        self._port = port
        self._control_port = control_port
        self._tls = tls
        self._log = log
        self._first_faults = tuple(faults)
        self._desk: Desk | None = None
        self._server: web.Server | None = None
        self._listener: Listener | None = None
        self._control: Listener | None = None
        self._busy: set[object] = set()
        self._reopening: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port; 0 before the first start if it was not given."""
        return self._port

    @property
    def control_port(self) -> int | None:
        """The port of the `/lab/` pages alone, if there is one."""
        return self._control_port

    @property
    def authority(self) -> str:
        """`host:port`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self._port}"

    @property
    def url(self) -> str:
        """Scheme, host and port, without a slash at the end."""
        return f"{'http' if self._tls is None else 'https'}://{self.authority}"

    @property
    def counters(self) -> Counters:
        """The counts since the start or the last reset."""
        return self.records.counters

    @property
    def requests(self) -> deque[Received]:
        """The last API requests, oldest first."""
        return self.records.requests

    @property
    def probes(self) -> deque[Received]:
        """The last scrapes and health checks, oldest first."""
        return self.records.probes

    @property
    def desk(self) -> Desk:
        """The state that the handlers share; there is none before the start."""
        if self._desk is None:
            raise RuntimeError("the engine is not started")
        return self._desk

    @property
    def engines(self) -> Sequence[Engine]:
        """The engine models, one per rank."""
        return self.desk.pump.engines

    @property
    def running(self) -> int:
        """How many requests are in a batch."""
        return sum(len(engine.running) for engine in self.engines)

    @property
    def waiting(self) -> int:
        """How many requests are in a queue."""
        return sum(len(engine.waiting) for engine in self.engines)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """The engine answers, with an empty cache and an idle batch; counts go on."""
        loop = asyncio.get_running_loop()
        options = self.options
        models = [Engine(options.settings) for _ in range(options.ranks)]
        self._desk = Desk(options, Pump(models, loop), self.records, self.faults)
        # A handler is cancelled when its client leaves; bodies come as they were sent.
        self._server = web.Server(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            lingering_time=2.0,
            auto_decompress=False,
            max_line_size=_LONGEST_LINE_BYTES,
            max_field_size=_LONGEST_LINE_BYTES,
            max_headers=4096,
        )
        self._listener = Listener(self.host, self._port)
        self._port = self._listener.port
        if self._control_port is not None:
            self._control = Listener(self.host, self._control_port)
            self._control_port = self._control.port
            await self._control.open(self._server)
        first, self._first_faults = self._first_faults, ()
        self.faults.add(*(f for f in first if not f.kind.is_about_listening))
        closing = [f for f in first if f.kind.is_about_listening]
        if closing:
            self.inject(*closing)
        else:
            await self.accept()

    async def stop(self) -> None:
        """Nothing is left of the engine but what it recorded."""
        if self._server is None or self._listener is None:
            return
        self._cancel_reopening()
        self._listener.dispose()
        if self._control is not None:
            self._control.dispose()
            self._control = None
        for connection in self._server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await self._server.shutdown(_STOP_SECONDS)
        self.desk.pump.stop()
        self._server = self._listener = None

    def inject(self, *faults: Fault) -> None:
        """The faults go wrong from now on, after those that already do."""
        for fault in faults:
            if fault.kind.is_about_listening:
                self.refuse(fault.seconds, is_abrupt=fault.kind is FaultKind.KILL)
            else:
                self.faults.add(fault)

    async def heal(self) -> None:
        """Nothing goes wrong any more; connections are accepted."""
        self.faults.clear()
        await self.accept()

    def refuse(self, seconds: float | None = None, *, is_abrupt: bool = False) -> None:
        """Connections are refused, for so long or until `accept`; idle ones are closed.

        Busy ones are left to end, unless it is abrupt: then every connection is reset.
        """
        if self._server is None or self._listener is None:
            raise RuntimeError("the engine is not started")
        self._cancel_reopening()
        self._listener.close()
        for connection in self._server.connections:
            if is_abrupt and connection.transport is not None:
                reset(connection.transport)
            elif connection not in self._busy:
                connection.force_close()
        if seconds is not None:
            self._reopening = asyncio.get_running_loop().create_task(self._reopen(seconds))

    async def accept(self) -> None:
        """Connections are accepted."""
        self._cancel_reopening()
        if self._listener is not None:
            await self._listener.open(self._connect, self._tls)

    def hold(self) -> None:
        """No token comes any more; requests are still admitted and queued."""
        self.desk.pump.hold()

    def release(self) -> None:
        """Tokens come again."""
        self.desk.pump.release()

    def show(
        self,
        *,
        running: int | None = None,
        waiting: int | None = None,
        kv_usage_ratio: float | None = None,
    ) -> None:
        """The metrics page shows these numbers on every rank; None shows the truth."""
        self.desk.shown = Shown(running, waiting, kv_usage_ratio)

    async def until(self, holds: Callable[[], bool], *, seconds: float = 5.0) -> None:
        """The condition holds.

        Raises:
            TimeoutError: it did not within `seconds`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not holds():
            if loop.time() > deadline:
                raise TimeoutError(f"{self.name}: not within {seconds} s; {self.counters}")
            await asyncio.sleep(_POLL_SECONDS)

    def _connect(self) -> asyncio.BaseProtocol:
        self.counters.connections += 1
        if self._server is None or self.faults.for_connection() is not None:
            return Slammed()
        return self._server()

    async def _reopen(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._reopening = None
        await self.accept()

    def _cancel_reopening(self) -> None:
        if self._reopening is not None:
            self._reopening.cancel()
            self._reopening = None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path.startswith(PREFIX):
            return await control(self, request)
        is_metrics = request.path == self.options.dialect.metrics_path
        is_api = not is_metrics and request.path not in PROBES
        loop = asyncio.get_running_loop()
        received = self.records.arrive(
            request.method,
            request.raw_path,
            tuple(request.raw_headers),
            loop.time(),
            family=request.path if is_metrics or request.path in KNOWN_PATHS else "other",
            is_api=is_api,
        )
        if is_metrics:
            fault = self.faults.for_metrics()
        else:
            fault = self.faults.for_request(request.path, is_api=is_api)
        delivery = Delivery(self.name, request, received, fault)
        self._busy.add(request.protocol)
        try:
            if is_metrics:
                return await serve_page(self.desk, delivery)
            return await Visit(self.desk, delivery).serve()
        except asyncio.CancelledError:
            _left(received)
            raise
        except (OSError, web.RequestPayloadError):
            _left(received)
            return Spent()
        finally:
            self._busy.discard(request.protocol)
            self.records.end(received, loop.time(), is_api=is_api, is_stream=delivery.is_stream)
            if self._log is not None and is_api:
                self._log(_line(self.name, received))


def _left(received: Received) -> None:
    if received.outcome is Outcome.ACTIVE:
        received.outcome = Outcome.ABORTED


def _line(name: str, received: Received) -> str:
    status = "-" if received.status is None else str(received.status)
    seconds = received.end_seconds or 0.0
    fault = f" fault={received.fault}" if received.fault else ""
    return (
        f"{name} {received.method} {received.path} {status} {received.outcome} "
        f"tokens={received.tokens_sent} seconds={seconds:.3f}{fault}"
    )
