"""The transport on grpc.aio: TCP with or without TLS, and Unix sockets.

Streams are bytes on both sides; protobuf is the handlers' business. The reader style is used
because an asynchronous generator may be finished by the garbage collector, long after its stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from extproc.config.values import ServiceTls
from extproc.serve.pb.health_pb2 import HealthCheckRequest, HealthCheckResponse
from extproc.serve.sockets import (
    Address,
    AddressUnavailable,
    TcpAddress,
    UnixAddress,
    bindable,
    parse_address,
    why_not,
)
from extproc.serve.stream import Service, StreamBroken, StreamEnd, StreamHandler

EXT_PROC_METHOD: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
ACCESS_LOG_METHOD: Final = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
HEALTH_CHECK_METHOD: Final = "/grpc.health.v1.Health/Check"
HEALTH_WATCH_METHOD: Final = "/grpc.health.v1.Health/Watch"

# Headers, metadata and attributes come in the same message as a body of the largest size.
_MESSAGE_MARGIN_BYTES: Final = 1024 * 1024

# Envoy closes its side of a stream and resets it a moment later. A status that is being sent when
# the reset comes costs time, and leaks the memory of the operation; so the reset is waited for.
_LINGER_SECONDS: Final = 0.05

# How much longer than the grace the library may take to end what this module could not.
_ESCAPE_SECONDS: Final = 1.0

# A burst of streams may wait for the event loop; one that waits longer than Envoy's message timeout
# is gone by then.
_MAX_PENDING_STREAMS: Final = 10_000

# A message of this size holds a body, and takes milliseconds. Many that come together are taken one
# in each turn of the event loop, so that what is small never waits for more than one of them.
_LARGE_BYTES: Final = 256 * 1024

# Reading gives the library's end mark after the last message, which its stubs do not know.
_Context = grpc.aio.ServicerContext[bytes | None, bytes]


@dataclass(frozen=True, slots=True)
class GrpcSettings:
    """Where to listen (`unix:/path` or `host:port`), and the largest body that may arrive."""

    address: str
    body_limit_bytes: int = 32 * 1024 * 1024
    tls: ServiceTls | None = None
    keepalive_seconds: float = 10.0
    keepalive_timeout_seconds: float = 5.0


class GrpcTransport:
    """Serves a `Service` over gRPC; see `Transport` for start and stop."""

    def __init__(self, service: Service, settings: GrpcSettings) -> None:
        self._service = service
        self._settings = settings
        self._server: grpc.aio.Server | None = None
        self._address = parse_address(settings.address)
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._shutdown: asyncio.Future[None] | None = None
        self._one_large = asyncio.Lock()
        self._cut = asyncio.Event()

    @property
    def address(self) -> Address:
        """Where it listens; after `start`, with the port that port 0 became."""
        return self._address

    async def start(self) -> None:
        """Streams are accepted.

        Raises:
            AddressUnavailable: the address cannot be bound, or a TLS file cannot be read.
        """
        server = grpc.aio.server(
            handlers=(_Methods(self),), options=_options(self._settings), compression=None
        )
        with bindable(self._address):
            port = self._bind(server)
            await server.start()
        self._server = server
        if isinstance(self._address, TcpAddress):
            self._address = TcpAddress(self._address.host, port)

    async def stop(self, grace_seconds: float) -> None:
        """No stream is accepted any more; external-processor streams had the grace to finish.

        Access logs and health watches never finish by themselves and are not waited for. A second
        call with a shorter grace makes the first one return.
        """
        server = self._server
        if server is None:
            return
        # Stopping the library's server twice at a time is a crash, so it is told once, and what is
        # left after the grace is ended here; its own grace is only for streams that escape that.
        if self._shutdown is None:
            self._shutdown = asyncio.ensure_future(server.stop(grace_seconds + _ESCAPE_SECONDS))
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await self._idle.wait()
        self._cut.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.shield(self._shutdown)
        if isinstance(self._address, UnixAddress):
            self._address.path.unlink(missing_ok=True)

    async def ext_proc(self, _requests: AsyncIterator[bytes], context: _Context) -> None:
        """One external-processor stream, carried to its end."""
        self._running += 1
        self._idle.clear()
        try:
            await self._until_cut(_carry(self._service.ext_proc, context, self._one_large), context)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def access_log(self, _requests: AsyncIterator[bytes], context: _Context) -> None:
        """One access-log stream; its single reply, which is empty, comes after its last message."""
        carried = _carry(self._service.access_log, context, self._one_large, farewell=b"")
        await self._until_cut(carried, context)

    async def check(self, request: bytes, context: _Context) -> bytes:
        """The health of one service, now."""
        name = _service_name(request)
        health = None if name is None else self._service.health(name)
        if health is None:
            is_malformed = name is None
            context.set_code(
                grpc.StatusCode.INVALID_ARGUMENT if is_malformed else grpc.StatusCode.NOT_FOUND
            )
            context.set_details("not a request" if is_malformed else "unknown service")
            return b""
        return _health_reply(health)

    async def watch(self, request: bytes, context: _Context) -> None:
        """The health of one service, now and after every change."""
        name = _service_name(request)
        if name is None:
            context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
            return
        await self._until_cut(self._tell_health(name, context), context)

    async def _tell_health(self, name: str, context: _Context) -> None:
        """Writes the health of `name` whenever it differs from what was written last."""
        changed = asyncio.Event()
        forget = self._service.watch_health(changed.set)
        last: bytes | None = None
        try:
            while True:
                reply = _health_reply(self._service.health(name))
                if reply != last:
                    await context.write(reply)
                    last = reply
                await changed.wait()
                changed.clear()
        finally:
            forget()

    async def _until_cut(self, work: Coroutine[None, None, None], context: _Context) -> None:
        """`work` is done, or was ended because the transport stops.

        Any other cancellation is passed on: a handler that swallows it leaks memory in the library.
        """
        task = asyncio.current_task()
        if task is None or self._cut.is_set():
            work.close()
            context.set_code(grpc.StatusCode.UNAVAILABLE)
            return
        self._tasks.add(task)
        try:
            await work
        except asyncio.CancelledError:
            if not self._cut.is_set():
                raise
            context.set_code(grpc.StatusCode.UNAVAILABLE)
        finally:
            self._tasks.discard(task)

    def _bind(self, server: grpc.aio.Server) -> int:
        """The server has its address, and its port is returned."""
        tls = self._settings.tls
        address = str(self._address)
        try:
            if tls is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, _credentials(tls))
        except (RuntimeError, OSError) as error:
            # The library does not say why; a socket of our own does.
            reason = why_not(self._address) or error
            raise AddressUnavailable(f"cannot listen on {address}: {reason}") from error


class _Methods(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """Finds a transport's method by its path."""

    def __init__(self, transport: GrpcTransport) -> None:
        self._handlers = {
            EXT_PROC_METHOD: grpc.stream_stream_rpc_method_handler(transport.ext_proc),
            ACCESS_LOG_METHOD: grpc.stream_stream_rpc_method_handler(transport.access_log),
            HEALTH_CHECK_METHOD: grpc.unary_unary_rpc_method_handler(transport.check),
            HEALTH_WATCH_METHOD: grpc.unary_stream_rpc_method_handler(transport.watch),
        }

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """The method's handler, None for one that is not served."""
        return self._handlers.get(handler_call_details.method)


async def _carry(
    make_handler: Callable[[], StreamHandler],
    context: _Context,
    one_large: asyncio.Lock,
    *,
    farewell: bytes | None = None,
) -> None:
    """One stream, from its first message to its end, which its handler is told once.

    `farewell` is written when the peer has sent everything.
    """
    handler = make_handler()
    why = StreamEnd.CANCELLED
    try:
        why = await _converse(handler, context, one_large)
    except grpc.aio.BaseError:
        return  # the call is gone: that is an end like any other
    finally:
        handler.end(why)
    if why is StreamEnd.HALF_CLOSED:
        if farewell is not None:
            await context.write(farewell)
        else:
            await asyncio.sleep(_LINGER_SECONDS)


async def _converse(
    handler: StreamHandler, context: _Context, one_large: asyncio.Lock
) -> StreamEnd:
    """Messages and replies in turn, until the peer has no more or the handler gives up."""
    while True:
        message = await context.read()
        if not isinstance(message, bytes):
            return StreamEnd.HALF_CLOSED
        try:
            if len(message) < _LARGE_BYTES:
                replies = handler.receive(message)
            else:
                async with one_large:
                    await asyncio.sleep(0)
                    replies = handler.receive(message)
        except StreamBroken as error:
            context.set_code(grpc.StatusCode.INTERNAL)
            context.set_details(str(error))
            return StreamEnd.FAILED
        for reply in replies:
            await context.write(reply)
        handler.written()


def _service_name(request: bytes) -> str | None:
    """The service that a health request asks about, None when it cannot be read."""
    try:
        return HealthCheckRequest.FromString(request).service
    except DecodeError:
        return None


def _health_reply(health: bool | None) -> bytes:  # noqa: FBT001 - the seam's own value
    """The health reply for what the service says of itself."""
    if health is None:
        status = HealthCheckResponse.SERVICE_UNKNOWN
    else:
        status = HealthCheckResponse.SERVING if health else HealthCheckResponse.NOT_SERVING
    return HealthCheckResponse(status=status).SerializeToString()


def _credentials(tls: ServiceTls) -> grpc.ServerCredentials:
    """The server's identity, and whom it demands one from."""
    identity = (Path(tls.key_file).read_bytes(), Path(tls.cert_file).read_bytes())
    ca_file = tls.client_ca_file
    return grpc.ssl_server_credentials(
        [identity],
        root_certificates=None if ca_file is None else Path(ca_file).read_bytes(),
        require_client_auth=ca_file is not None,
    )


def _options(settings: GrpcSettings) -> list[tuple[str, int]]:
    """The library's options.

    Envoy keeps its connection alive with pings, also when it has nothing to send; this side pings
    too, so that the streams of a lost Envoy do not count as running for ever. A second process on
    the same port must fail rather than take half of the connections.
    """
    limit = settings.body_limit_bytes + _MESSAGE_MARGIN_BYTES
    return [
        ("grpc.max_receive_message_length", limit),
        ("grpc.max_send_message_length", limit),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", round(settings.keepalive_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", round(settings.keepalive_timeout_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server.max_pending_requests", _MAX_PENDING_STREAMS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * _MAX_PENDING_STREAMS),
    ]
