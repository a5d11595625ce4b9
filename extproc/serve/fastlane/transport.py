"""The transport on this package's own HTTP/2: Unix sockets and loopback TCP, without TLS."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, cast

from extproc.serve.fastlane.connection import Connection
from extproc.serve.fastlane.grpc import Call, Calls, Ends, Method, Route, Workload
from extproc.serve.fastlane.health import Check, Watch
from extproc.serve.fastlane.messages import Status
from extproc.serve.fastlane.settings import Settings
from extproc.serve.sockets import (
    Address,
    AddressUnavailable,
    TcpAddress,
    UnixAddress,
    bindable,
    parse_address,
)
from extproc.serve.stream import Service, StreamBroken, StreamEnd

_EXT_PROC: Final = b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_ACCESS_LOG: Final = b"/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
_HEALTH_CHECK: Final = b"/grpc.health.v1.Health/Check"
_HEALTH_WATCH: Final = b"/grpc.health.v1.Health/Watch"

# Headers, metadata and attributes come in the same message as a body of the largest size.
_MESSAGE_MARGIN_BYTES: Final = 1024 * 1024
# A message of this size holds a body, and takes milliseconds. Many that come together are taken one
# in each turn of the event loop, so that what is small never waits for more than one of them.
_LARGE_BYTES: Final = 256 * 1024
_BACKLOG: Final = 1024
_WRITE_BUFFER_BYTES: Final = 256 * 1024
# How long a peer may take to fetch the last bytes when its connection is closed.
_LINGER_SECONDS: Final = 1.0

_ENDS: Final = Ends(
    half_closed=StreamEnd.HALF_CLOSED,
    cancelled=StreamEnd.CANCELLED,
    failed=StreamEnd.FAILED,
    broken=StreamBroken,
)


@dataclass(frozen=True, slots=True)
class FastlaneSettings:
    """Where to listen (`unix:/path` or `host:port`), and the largest body that may arrive."""

    address: str
    body_limit_bytes: int = 32 * 1024 * 1024
    keepalive_seconds: float = 10.0
    keepalive_timeout_seconds: float = 5.0


class FastlaneTransport:
    """Serves a `Service` over gRPC; see `Transport` for start and stop.

    Its connections see `workload`, and whether it `is_stopping`.
    """

    def __init__(self, service: Service, settings: FastlaneSettings) -> None:
        self._address = parse_address(settings.address)
        self._keepalive_seconds = min(
            settings.keepalive_seconds, settings.keepalive_timeout_seconds
        )
        self._http2 = Settings(
            keepalive_seconds=settings.keepalive_seconds,
            keepalive_timeout_seconds=settings.keepalive_timeout_seconds,
        )
        self.workload: Workload[StreamEnd] = Workload(report=self._report, alarm=self._set_alarm)
        self._calls = Calls(
            _methods(service),
            self.workload,
            _ENDS,
            message_limit_bytes=settings.body_limit_bytes + _MESSAGE_MARGIN_BYTES,
            large_bytes=_LARGE_BYTES,
        )
        self._links: set[_Link] = set()
        self._loop: asyncio.AbstractEventLoop
        self._server: asyncio.Server | None = None
        self._heartbeat: asyncio.TimerHandle | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self.is_stopping = False
        self._takes_turns = False
        self._idle = asyncio.Event()
        self._empty = asyncio.Event()

    @property
    def address(self) -> Address:
        """Where it listens; after `start`, with the port that port 0 became."""
        return self._address

    async def start(self) -> None:
        """Streams are accepted.

        Raises:
            AddressUnavailable: the address cannot be bound.
        """
        self._loop = asyncio.get_running_loop()
        address = self._address
        with bindable(address):
            try:
                if isinstance(address, UnixAddress):
                    self._server = await self._loop.create_unix_server(
                        self._link, str(address.path), backlog=_BACKLOG
                    )
                else:
                    self._server = await self._loop.create_server(
                        self._link, address.host, address.port, backlog=_BACKLOG
                    )
                    port = int(self._server.sockets[0].getsockname()[1])
                    self._address = TcpAddress(address.host, port)
            except OSError as error:
                raise AddressUnavailable(f"cannot listen on {address}: {error}") from error
        self._beat()

    async def stop(self, grace_seconds: float) -> None:
        """No stream is accepted any more; external-processor streams had the grace to finish.

        Access logs and health watches never finish by themselves and are not waited for. A second
        call with a shorter grace makes the first one return.
        """
        if self._server is None:
            return
        self.is_stopping = True
        self._server.close()
        for link in tuple(self._links):
            link.drain()
        self._settle()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await self._idle.wait()
        for link in tuple(self._links):
            link.cut()
        self._settle()
        try:
            async with asyncio.timeout(_LINGER_SECONDS):
                await self._empty.wait()
        except TimeoutError:
            for link in tuple(self._links):
                link.abort()
        for handle in (self._heartbeat, self._alarm):
            if handle is not None:
                handle.cancel()
        if isinstance(self._address, UnixAddress):
            self._address.path.unlink(missing_ok=True)

    def _link(self) -> _Link:
        return _Link(self)

    # What links call.

    def opened(self, link: _Link) -> Connection[Route[StreamEnd]]:
        """The state of a new connection."""
        self._links.add(link)
        self._empty.clear()
        return Connection(self._calls, self._http2, now=self._loop.time(), wake=link.flush)

    def closed(self, link: _Link) -> None:
        """The connection is gone."""
        self._links.discard(link)
        self._settle()

    def settle(self) -> None:
        """What the last frames left to do later is seen to."""
        if self.workload.large and not self._takes_turns:
            self._takes_turns = True
            self._loop.call_soon(self._turn)
        if self.is_stopping:
            self._settle()

    def _settle(self) -> None:
        """A stop goes on once nothing is left that it waits for."""
        if not self.is_stopping:
            return
        if not self.workload.running:
            self._idle.set()
        if not self._links:
            self._empty.set()

    def _turn(self) -> None:
        """One large message is taken, the next one in the next turn of the event loop."""
        large = self.workload.large
        while large:
            call = large.popleft()
            if not call.is_over:
                call.take_large()
                call.connection.wake()
                break
        self._takes_turns = bool(large)
        if large:
            self._loop.call_soon(self._turn)

    def _beat(self) -> None:
        """Silent peers are looked at, now and again after a while."""
        now = self._loop.time()
        for link in tuple(self._links):
            link.tick(now)
        self._heartbeat = self._loop.call_later(self._keepalive_seconds / 2, self._beat)

    def _set_alarm(self, moment: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(moment, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self.workload.end_expired(self._loop.time())

    def _report(self, error: Exception) -> None:
        self._loop.call_exception_handler(
            {"message": "a stream's handler failed", "exception": error}
        )


class _Link(asyncio.Protocol):
    """Moves the bytes of one connection."""

    __slots__ = ("_connection", "_is_paused", "_network", "_time", "_transport", "_workload")

    _connection: Connection[Route[StreamEnd]]
    _network: asyncio.Transport

    def __init__(self, transport: FastlaneTransport) -> None:
        self._transport = transport
        self._workload = transport.workload
        self._is_paused = False
        self._time = asyncio.get_running_loop().time

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection's state is there, and its settings are sent."""
        # What uvloop gives is one in all but its class.
        self._network = cast("asyncio.Transport", transport)
        self._network.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        self._connection = self._transport.opened(self)
        if self._transport.is_stopping:  # it came at the last moment
            self._connection.drain()
        self.flush()

    def data_received(self, data: bytes) -> None:
        """The frames in `data` have had their effect, and the answers are written."""
        connection = self._connection
        connection.receive(data, self._time())
        # The commonest case of `flush`, without its loop.
        out = connection.out
        if out and not self._is_paused:
            self._network.write(b"".join(out))
            out.clear()
        if self._is_paused or connection.written() or connection.is_over:
            self.flush()
        elif self._workload.large or self._transport.is_stopping:
            self._transport.settle()

    def eof_received(self) -> None:
        """The peer is done; so is the connection."""

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - every loss is the same
        """The streams have ended."""
        self._connection.lost()
        self._transport.closed(self)

    def pause_writing(self) -> None:
        """Nothing is read, so that nothing is to be written, until the peer has read."""
        self._is_paused = True
        self._network.pause_reading()

    def resume_writing(self) -> None:
        """What was waiting goes on."""
        self._is_paused = False
        if not self._network.is_closing():
            self._network.resume_reading()
            self.flush()

    def flush(self) -> None:
        """Everything that is to be sent is written, and whoever waits for that is told."""
        connection = self._connection
        while self._write() and connection.written():
            pass
        if connection.is_over:
            if connection.out:
                self._network.write(connection.take())
            self._network.close()
        self._transport.settle()

    def _write(self) -> bool:
        """Whether everything that is to be sent is on its way."""
        if not self._is_paused and self._connection.out:
            self._network.write(self._connection.take())
        return not self._is_paused

    def drain(self) -> None:
        """The peer is asked to begin no more streams."""
        self._connection.drain()
        self.flush()

    def cut(self) -> None:
        """Every call has ended with an error, and the connection closes."""
        for stream in tuple(self._connection.streams.values()):
            if isinstance(stream.sink, Call):
                stream.sink.cut(Status.UNAVAILABLE, "the server stops")
        self._connection.close()
        self.flush()

    def abort(self) -> None:
        """The connection is gone, whatever was to be written."""
        self._network.abort()

    def tick(self, now: float) -> None:
        """A lost peer has been noticed."""
        self._connection.tick(now)
        if self._connection.is_over:
            self._network.abort()
        else:
            self.flush()


def _methods(service: Service) -> dict[bytes, Method[StreamEnd]]:
    """The calls that are served, by path."""
    return {
        _EXT_PROC: Method(lambda _: service.ext_proc(), is_awaited=True),
        _ACCESS_LOG: Method(lambda _: service.access_log(), farewell=b""),
        _HEALTH_CHECK: Method(lambda _: Check(service)),
        _HEALTH_WATCH: Method(lambda line: Watch(service, line), is_endless=True),
    }
