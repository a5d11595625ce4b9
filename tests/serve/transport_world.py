"""What tests of transports share: a service of echoes, a client, and both transports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Protocol

import grpc
import grpc.aio

from extproc.config.values import ServiceTls
from extproc.serve.fastlane.transport import FastlaneSettings, FastlaneTransport
from extproc.serve.grpcio import (
    EXT_PROC_METHOD,
    HEALTH_CHECK_METHOD,
    HEALTH_WATCH_METHOD,
    GrpcSettings,
    GrpcTransport,
)
from extproc.serve.pb.health_pb2 import HealthCheckRequest, HealthCheckResponse
from extproc.serve.sockets import Address
from extproc.serve.stream import StreamBroken, StreamEnd, StreamHandler, Transport


class Kind(StrEnum):
    """Which transport."""

    GRPCIO = "grpcio"
    FASTLANE = "fastlane"


BODY_LIMIT = 6 * 1024 * 1024
SERVING = HealthCheckResponse(status=HealthCheckResponse.SERVING).SerializeToString()
NOT_SERVING = HealthCheckResponse(status=HealthCheckResponse.NOT_SERVING).SerializeToString()
UNKNOWN = HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN).SerializeToString()
ENDED_BY_PEER = {StreamEnd.HALF_CLOSED, StreamEnd.CANCELLED}


class Echo:
    """Answers a message with itself, as often as its first byte says; "!" breaks the stream."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.written_after: list[int] = []
        self.ends: list[StreamEnd] = []
        self.over = asyncio.Event()

    def receive(self, message: bytes) -> Sequence[bytes]:
        self.received.append(message)
        if message == b"!":
            raise StreamBroken("cannot go on")
        times = int(message[:1]) if message[:1].isdigit() else 1
        return [message] * times

    def written(self) -> None:
        self.written_after.append(len(self.received))

    def end(self, why: StreamEnd) -> None:
        self.ends.append(why)
        self.over.set()


class Echoes:
    """A service of echoes whose health can be set."""

    def __init__(self) -> None:
        self.streams: list[Echo] = []
        self.logs: list[Echo] = []
        self.is_well = True
        self.watchers: list[Callable[[], None]] = []

    def ext_proc(self) -> StreamHandler:
        self.streams.append(Echo())
        return self.streams[-1]

    def access_log(self) -> StreamHandler:
        self.logs.append(Mute())
        return self.logs[-1]

    def health(self, service: str) -> bool | None:
        return self.is_well if service == "here" else None

    def watch_health(self, changed: Callable[[], None]) -> Callable[[], None]:
        self.watchers.append(changed)
        return lambda: self.watchers.remove(changed)

    def set_health(self, *, is_well: bool) -> None:
        self.is_well = is_well
        for changed in self.watchers:
            changed()


class Mute(Echo):
    """Takes everything and answers nothing."""

    def receive(self, message: bytes) -> Sequence[bytes]:
        super().receive(message)
        return ()


class Client:
    """A channel to the transport with its calls; every open call is cancelled at the end."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.calls: list[grpc.aio.RpcContext] = []

    def process(self, method: str = EXT_PROC_METHOD) -> grpc.aio.StreamStreamCall[bytes, bytes]:
        call = self.channel.stream_stream(method, bytes, bytes)(None)
        self.calls.append(call)
        return call

    def watch(self, request: bytes) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
        call = self.channel.unary_stream(HEALTH_WATCH_METHOD, bytes, bytes)(request)
        self.calls.append(call)
        return call

    async def check(self, request: bytes) -> bytes:
        reply = await self.channel.unary_unary(HEALTH_CHECK_METHOD, bytes, bytes)(request)
        assert isinstance(reply, bytes)
        return reply


def asking(service: str) -> bytes:
    """A health request."""
    return HealthCheckRequest(service=service).SerializeToString()


@asynccontextmanager
async def client_of(
    target: str, credentials: grpc.ChannelCredentials | None = None
) -> AsyncIterator[Client]:
    """A client whose calls and channel are closed at the end."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    if credentials is None:
        channel = grpc.aio.insecure_channel(target, options=options)
    else:
        channel = grpc.aio.secure_channel(target, credentials, options=options)
    client = Client(channel)
    try:
        yield client
    finally:
        for call in client.calls:
            call.cancel()
        await channel.close(None)


class Listening(Transport, Protocol):
    """A transport that says where it listens."""

    @property
    def address(self) -> Address: ...


def made(service: Echoes, kind: Kind, address: str, *, tls: ServiceTls | None = None) -> Listening:
    """A transport that is not started, for bodies of up to 6 MiB."""
    if kind is Kind.GRPCIO:
        return GrpcTransport(
            service, GrpcSettings(address=address, body_limit_bytes=BODY_LIMIT, tls=tls)
        )
    assert tls is None
    return FastlaneTransport(
        service, FastlaneSettings(address=address, body_limit_bytes=BODY_LIMIT)
    )


@asynccontextmanager
async def serving(
    service: Echoes,
    kind: Kind,
    *,
    address: str = "127.0.0.1:0",
    tls: ServiceTls | None = None,
) -> AsyncIterator[Listening]:
    """A started transport, stopped at the end."""
    transport = made(service, kind, address, tls=tls)
    await transport.start()
    try:
        yield transport
    finally:
        await transport.stop(0)


async def until(is_so: Callable[[], bool]) -> None:
    """Returns once something is so, which takes the other side a moment."""
    async with asyncio.timeout(5):
        while not is_so():
            await asyncio.sleep(0.01)


def is_listening(transport: Listening) -> bool:
    """Whether a connection to the transport is accepted."""
    host, _, port = str(transport.address).rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


async def told(echo: Echo) -> StreamEnd:
    """How the stream ended, once it has; nothing may have been told twice."""
    await asyncio.wait_for(echo.over.wait(), 5)
    await asyncio.sleep(0.1)  # longer than any straggler takes, so that a second end would show
    assert len(echo.ends) == 1
    return echo.ends[0]
