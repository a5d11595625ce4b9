"""Takes in one request's body and hands out its answer, with whatever is to go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NoReturn

from aiohttp import web

from extproc.lab.asks import Problem
from extproc.lab.faults import CutBy, Fault, FaultKind
from extproc.lab.records import Outcome, Received
from extproc.lab.voice import error_body, json_bytes
from extproc.lab.wire import Answer, RawAnswer, Reply, head, reset

SERVED_BY: Final = "x-served-by"
JSON: Final[Mapping[str, str]] = MappingProxyType({"content-type": "application/json"})
MIDWAY: Final = frozenset({FaultKind.CUT, FaultKind.STALL, FaultKind.ERROR_EVENT})

_BODILESS: Final = frozenset({204, 205, 304})


class BadEndError(Exception):
    """A fault has ended the connection; nothing more can be sent."""


class Delivery:
    """One request's traffic.

    Every method raises OSError or CancelledError when the client is gone, and BadEndError when a
    fault has ended the connection.
    """

    def __init__(
        self, name: str, request: web.BaseRequest, received: Received, fault: Fault | None
    ) -> None:
        self.request = request
        self.received = received
        self.fault = fault
        self.kind = None if fault is None else fault.kind
        self.is_stream = False
        self._name = name
        received.fault = None if fault is None else fault.kind.value

    async def read(self, limit_bytes: int) -> bytes | None:
        """The whole body, recorded as it comes; None when it is longer than the limit."""
        received = self.received
        loop = asyncio.get_running_loop()
        if self.request.headers.get("expect", "").lower() == "100-continue":
            self._transport().write(head(100, {}))
        kept: list[bytes] = []
        async for chunk in self.request.content.iter_any():
            received.feed(chunk, loop.time())
            if received.body_bytes <= limit_bytes:
                kept.append(chunk)
        received.has_whole_body = True
        return b"".join(kept) if received.body_bytes <= limit_bytes else None

    async def reply(
        self, status: int, headers: Mapping[str, str], body: bytes
    ) -> web.StreamResponse:
        """An answer of known length; a fault that strikes midway does so at half of it."""
        length = None if status in _BODILESS else len(body)
        reply = await self.start(status, headers, length)
        if self.request.method != "HEAD" and length is not None:
            if self.kind in {FaultKind.CUT, FaultKind.STALL}:
                half = len(body) // 2
                await reply.write(body[:half])
                await self.cut_or_stall()
                body = body[half:]
            await reply.write(body)
        return await self.finish(reply, Outcome.ANSWERED)

    async def start(self, status: int, headers: Mapping[str, str], length: int | None) -> Reply:
        """The headers are sent; `length` None is a body of unknown length."""
        received = self.received
        received.status = status
        received.answer_seconds = asyncio.get_running_loop().time() - received.arrived_at
        reply = self._new_reply()
        await reply.start(status, {SERVED_BY: self._name, **headers}, length)
        return reply

    async def begin_stream(self) -> Reply:
        """The headers of an event stream are sent."""
        self.is_stream = True
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        return await self.start(200, headers, None)

    async def finish(self, reply: Reply, outcome: Outcome) -> web.StreamResponse:
        """The answer is complete."""
        # Before the last bytes are sent: whoever reads them may look at the outcome at once.
        self.received.outcome = outcome
        await reply.finish()
        return reply.response

    async def json(self, value: object) -> web.StreamResponse:
        """The value is the answer."""
        return await self.reply(200, JSON, json_bytes(value))

    async def fail(self, problem: Problem) -> web.StreamResponse:
        """The problem is the answer, in the envelope of the API that was called."""
        is_anthropic = self.request.path.startswith("/v1/messages")
        body = error_body(problem, is_anthropic=is_anthropic)
        return await self.reply(problem.status, JSON, body)

    async def planned(self) -> web.StreamResponse:
        """The answer that a status fault has in store."""
        fault = self.fault
        status = 503 if fault is None or fault.status is None else fault.status
        headers = {} if fault is None else fault.headers
        if fault is not None and fault.body is not None:
            return await self.reply(status, headers, fault.body.encode())
        problem = Problem(status, "ServiceUnavailableError", f"the engine answers {status}")
        is_anthropic = self.request.path.startswith("/v1/messages")
        body = error_body(problem, is_anthropic=is_anthropic)
        return await self.reply(status, {**JSON, **headers}, body)

    async def wait(self) -> None:
        """The time that the fault takes has passed: its seconds, 1 if it does not say."""
        seconds = None if self.fault is None else self.fault.seconds
        await asyncio.sleep(1.0 if seconds is None else seconds)

    def inform(self) -> None:
        """An interim answer is sent."""
        given = None if self.fault is None else self.fault.status
        status = given if given is not None and 100 < given < 200 else 103
        self._transport().write(head(status, {} if self.fault is None else self.fault.headers))

    async def cut_or_stall(self) -> None:
        """The fault strikes in the middle of an answer; after a stall that ends, all is well."""
        fault = self.fault
        if fault is not None and fault.kind is FaultKind.CUT:
            self.end_badly(fault.how)
        if fault is not None and fault.seconds is not None:
            await asyncio.sleep(fault.seconds)
        else:
            await forever()

    def end_badly(self, how: CutBy) -> NoReturn:
        """The connection is gone, and that is the fault's doing."""
        self.received.outcome = Outcome.FAULTED
        transport = self._transport()
        if how is CutBy.RST:
            reset(transport)
        else:
            transport.close()
        raise BadEndError

    def _new_reply(self) -> Reply:
        match self.kind:
            case FaultKind.TRAILERS:
                trailers = {} if self.fault is None else self.fault.headers
                return RawAnswer(self._transport(), trailers or {"x-lab-trailer": "end"})
            case FaultKind.CLOSE_DELIMITED:
                return RawAnswer(self._transport(), None)
            case _:
                return Answer(self.request)

    def _transport(self) -> asyncio.Transport:
        transport = self.request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        return transport


async def forever() -> None:
    """Never returns; a client that leaves, or the engine's end, cancels it."""
    await asyncio.get_running_loop().create_future()
