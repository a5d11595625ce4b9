"""The grpc.aio transport, with a real client on a real socket."""

from __future__ import annotations

import asyncio
import socket
import stat
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc.aio import EOF  # type: ignore[attr-defined]  # the stubs leave it out

from extproc.config.values import ServiceTls
from extproc.serve.grpcio import (
    ACCESS_LOG_METHOD,
    EXT_PROC_METHOD,
    HEALTH_CHECK_METHOD,
    HEALTH_WATCH_METHOD,
    GrpcSettings,
    GrpcTransport,
)
from extproc.serve.pb.health_pb2 import HealthCheckRequest, HealthCheckResponse
from extproc.serve.sockets import AddressUnavailable
from extproc.serve.stream import StreamBroken, StreamEnd, StreamHandler

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


@asynccontextmanager
async def serving(
    service: Echoes, *, address: str = "127.0.0.1:0", tls: ServiceTls | None = None
) -> AsyncIterator[GrpcTransport]:
    """A started transport, stopped at the end."""
    settings = GrpcSettings(address=address, body_limit_bytes=6 * 1024 * 1024, tls=tls)
    transport = GrpcTransport(service, settings)
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


def is_listening(transport: GrpcTransport) -> bool:
    """Whether a connection to the transport is accepted."""
    host, _, port = str(transport.address).rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.fixture
async def echoes() -> Echoes:
    """The service that is carried."""
    return Echoes()


@pytest.fixture
async def transport(echoes: Echoes) -> AsyncIterator[GrpcTransport]:
    """A started transport on a free port."""
    async with serving(echoes) as started:
        yield started


@pytest.fixture
async def client(transport: GrpcTransport) -> AsyncIterator[Client]:
    """A client of the transport."""
    async with client_of(str(transport.address)) as connected:
        yield connected


async def told(echo: Echo) -> StreamEnd:
    """How the stream ended, once it has; nothing may have been told twice."""
    await asyncio.wait_for(echo.over.wait(), 5)
    await asyncio.sleep(0.1)  # longer than any straggler takes, so that a second end would show
    assert len(echo.ends) == 1
    return echo.ends[0]


async def test_messages_and_replies_take_turns(echoes: Echoes, client: Client) -> None:
    """Each message gets its replies, in order, before the next one is taken up."""
    call = client.process()
    for message in (b"a", b"3b", b"c"):
        await call.write(message)
    replies = [await call.read() for _ in range(5)]
    assert replies == [b"a", b"3b", b"3b", b"3b", b"c"]
    await call.done_writing()
    assert await call.read() is EOF
    assert await call.code() is grpc.StatusCode.OK
    assert echoes.streams[0].written_after == [1, 2, 3]
    assert await told(echoes.streams[0]) is StreamEnd.HALF_CLOSED


async def test_a_stream_without_messages_ends_too(echoes: Echoes, client: Client) -> None:
    """Closing at once is an end like any other."""
    call = client.process()
    await call.done_writing()
    assert await call.read() is EOF
    assert await told(echoes.streams[0]) is StreamEnd.HALF_CLOSED


async def test_a_reset_is_told_once(echoes: Echoes, client: Client) -> None:
    """A cancelled stream ends once, with or without a half-close before it."""
    for closes_first in (False, True):
        call = client.process()
        await call.write(b"a")
        await call.read()
        if closes_first:
            await call.done_writing()
        call.cancel()
        assert await told(echoes.streams[-1]) in ENDED_BY_PEER


async def test_many_resets_are_all_told(echoes: Echoes, client: Client) -> None:
    """Resets at every moment, as Envoy sends them by routine, lose no end."""

    async def one(number: int) -> None:
        call = client.process()
        await call.write(b"a")
        if number % 3:
            await call.read()
        if number % 2:
            await call.done_writing()
        call.cancel()

    await asyncio.gather(*(one(number) for number in range(100)))
    for echo in echoes.streams:
        await asyncio.wait_for(echo.over.wait(), 5)
    await asyncio.sleep(0.1)  # longer than any straggler takes
    assert all(len(echo.ends) == 1 for echo in echoes.streams)


async def test_a_lost_connection_ends_its_streams(echoes: Echoes, transport: GrpcTransport) -> None:
    """A connection that breaks without a word ends every stream on it, once."""
    port = int(str(transport.address).rpartition(":")[2])
    links: list[asyncio.StreamWriter] = []

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        links.extend((writer, far_writer))
        await asyncio.gather(
            copy(reader, far_writer), copy(far_reader, writer), return_exceptions=True
        )

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with client_of(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        for _ in range(3):
            call = client.process()
            await call.write(b"a")
            await call.read()
        for link in links:
            link.transport.abort()
        for echo in echoes.streams:
            assert await told(echo) in ENDED_BY_PEER
    server.close()


async def test_a_broken_stream_ends_with_an_error_status(echoes: Echoes, client: Client) -> None:
    """The peer sees an error at once, so that it can fail open."""
    call = client.process()
    await call.write(b"!")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == "cannot go on"
    assert await told(echoes.streams[0]) is StreamEnd.FAILED


async def test_a_body_of_the_limit_fits_into_a_message(client: Client) -> None:
    """The receive limit is the body limit plus room for the rest, not the library's 4 MiB."""
    call = client.process()
    message = b"x" * (6 * 1024 * 1024 + 1000)
    await call.write(message)
    assert await call.read() == message


async def test_large_messages_are_taken_one_in_a_turn(echoes: Echoes, client: Client) -> None:
    """However many come together: what is small is taken in between."""
    turn = 0
    taken: list[int] = []

    class Noting(Echo):
        """Notes the turn of the event loop in which it got a message."""

        def receive(self, message: bytes) -> Sequence[bytes]:
            taken.append(turn)
            return super().receive(message[:1])

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    echoes.ext_proc = Noting  # type: ignore[method-assign]  # another echo for this test
    counting = asyncio.create_task(count())
    calls = [client.process() for _ in range(12)]
    await asyncio.gather(*(call.write(b"x" * 1_000_000) for call in calls))
    assert await asyncio.gather(*(call.read() for call in calls)) == [b"x"] * len(calls)
    counting.cancel()
    assert len(set(taken)) == len(calls)


async def test_a_larger_message_is_refused(echoes: Echoes, client: Client) -> None:
    """Beyond the limit the stream ends, and that end is told as well."""
    call = client.process()
    await call.write(b"x" * (8 * 1024 * 1024))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await told(echoes.streams[0]) in ENDED_BY_PEER
    assert not echoes.streams[0].received


async def test_an_access_log_gets_its_one_reply_at_the_end(echoes: Echoes, client: Client) -> None:
    """A client-streaming call is answered once, with an empty message."""
    call = client.channel.stream_unary(ACCESS_LOG_METHOD, bytes, bytes)(None)
    await call.write(b"a")
    await call.write(b"b")
    await call.done_writing()
    assert await call == b""
    assert echoes.logs[0].received == [b"a", b"b"]
    assert await told(echoes.logs[0]) is StreamEnd.HALF_CLOSED


async def test_an_unknown_method_is_not_implemented(client: Client) -> None:
    """What is not served says so."""
    call = client.process("/envoy.service.ext_proc.v3.ExternalProcessor/Other")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_is_checked_by_name(echoes: Echoes, client: Client) -> None:
    """A known service says how it is, an unknown one is not found, junk is refused."""
    assert await client.check(asking("here")) == SERVING
    echoes.is_well = False
    assert await client.check(asking("here")) == NOT_SERVING
    for request, code in (
        (asking("elsewhere"), grpc.StatusCode.NOT_FOUND),
        (b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.check(request)
        assert caught.value.code() is code


async def test_a_watch_tells_every_change_once(echoes: Echoes, client: Client) -> None:
    """The first answer comes at once, another one only when it differs."""
    call = client.watch(asking("here"))
    assert await call.read() == SERVING
    echoes.set_health(is_well=True)
    echoes.set_health(is_well=False)
    assert await call.read() == NOT_SERVING
    echoes.set_health(is_well=True)
    assert await call.read() == SERVING
    call.cancel()
    await until(lambda: not echoes.watchers)


async def test_a_watch_of_an_unknown_service_stays_open(client: Client) -> None:
    """As the protocol has it: the service may become known."""
    call = client.watch(asking("elsewhere"))
    assert await call.read() == UNKNOWN
    call.cancel()
    junk = client.watch(b"\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await junk.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stop_waits_for_running_requests(
    echoes: Echoes, transport: GrpcTransport, client: Client
) -> None:
    """A running stream goes on during the grace, new ones are refused, and the stop ends early."""
    call = client.process()
    await call.write(b"a")
    await call.read()
    stopping = asyncio.ensure_future(transport.stop(30))
    await until(lambda: not is_listening(transport))
    with pytest.raises(grpc.aio.AioRpcError):
        await client.process().read()
    await call.write(b"b")
    assert await call.read() == b"b"
    await call.done_writing()
    await asyncio.wait_for(stopping, 5)
    assert await told(echoes.streams[0]) is StreamEnd.HALF_CLOSED


async def test_a_stop_does_not_wait_for_endless_streams(
    echoes: Echoes, transport: GrpcTransport, client: Client
) -> None:
    """Access logs and health watches never end by themselves."""
    log = client.process(ACCESS_LOG_METHOD)
    await log.write(b"a")
    watch = client.watch(asking("here"))
    await watch.read()
    await until(lambda: bool(echoes.logs and echoes.logs[0].received))
    await asyncio.wait_for(transport.stop(30), 5)
    assert await told(echoes.logs[0]) in ENDED_BY_PEER


async def test_the_grace_has_an_end(
    echoes: Echoes, transport: GrpcTransport, client: Client
) -> None:
    """Whatever still runs after the grace is cut, and its end is told."""
    call = client.process()
    await call.write(b"a")
    await call.read()
    await asyncio.wait_for(transport.stop(0.2), 5)
    assert await told(echoes.streams[0]) in ENDED_BY_PEER


async def test_a_second_stop_cuts_the_first_short(
    echoes: Echoes, transport: GrpcTransport, client: Client
) -> None:
    """Who is in a hurry need not wait for the first grace."""
    call = client.process()
    await call.write(b"a")
    await call.read()
    first = asyncio.ensure_future(transport.stop(30))
    await asyncio.sleep(0)
    await asyncio.wait_for(transport.stop(0), 5)
    await asyncio.wait_for(first, 5)
    assert await told(echoes.streams[0]) in ENDED_BY_PEER


async def test_a_transport_that_never_started_stops(echoes: Echoes) -> None:
    """Stopping what does not run is nothing."""
    await GrpcTransport(echoes, GrpcSettings("127.0.0.1:0")).stop(1)


async def test_a_unix_socket_is_for_owner_and_group(echoes: Echoes, tmp_path: Path) -> None:
    """The socket file has mode 0660 while it serves and is gone afterwards."""
    path = tmp_path / "llmgw.sock"
    async with serving(echoes, address=f"unix:{path}") as transport:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        async with client_of(str(transport.address)) as client:
            call = client.process()
            await call.write(b"a")
            assert await call.read() == b"a"
    assert not path.exists()


async def test_a_dead_processs_socket_is_taken_over(echoes: Echoes, tmp_path: Path) -> None:
    """A socket file that nobody listens on does not keep the service from starting."""
    path = tmp_path / "llmgw.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with (
        serving(echoes, address=f"unix:{path}"),
        client_of(f"unix:{path}") as client,
    ):
        assert await client.check(asking("here")) == SERVING


async def test_a_living_processs_socket_is_left_alone(echoes: Echoes, tmp_path: Path) -> None:
    """A second service on the same socket fails to start, and the first one goes on."""
    address = f"unix:{tmp_path / 'llmgw.sock'}"
    async with serving(echoes, address=address), client_of(address) as client:
        with pytest.raises(AddressUnavailable, match="listens"):
            await GrpcTransport(echoes, GrpcSettings(address)).start()
        assert await client.check(asking("here")) == SERVING


async def test_a_port_is_not_shared(echoes: Echoes, transport: GrpcTransport) -> None:
    """A second service on the same port fails to start instead of taking half the connections."""
    with pytest.raises(AddressUnavailable, match="cannot listen"):
        await GrpcTransport(echoes, GrpcSettings(str(transport.address))).start()


class DeadContext:
    """The context of a call that is already gone, but for one message."""

    def __init__(self) -> None:
        self.codes: list[grpc.StatusCode] = []

    async def read(self) -> bytes:
        return b"a"

    async def write(self, message: bytes) -> None:
        raise grpc.aio.UsageError(message)

    def set_code(self, code: grpc.StatusCode) -> None:
        self.codes.append(code)


async def test_a_reply_to_a_dead_call_is_an_end(echoes: Echoes, transport: GrpcTransport) -> None:
    """A write that the library refuses ends the stream with its reply unwritten."""
    await transport.ext_proc(empty(), DeadContext())  # type: ignore[arg-type]  # a stand-in
    assert echoes.streams[0].ends == [StreamEnd.CANCELLED]
    assert not echoes.streams[0].written_after


async def test_a_stream_that_comes_too_late_is_refused(
    echoes: Echoes, transport: GrpcTransport
) -> None:
    """What the library had accepted and not begun when it stopped gets no handler."""
    await transport.stop(0)
    context = DeadContext()
    await transport.ext_proc(empty(), context)  # type: ignore[arg-type]  # a stand-in
    assert context.codes == [grpc.StatusCode.UNAVAILABLE]
    assert not echoes.streams


async def empty() -> AsyncIterator[bytes]:
    """No messages: the transport reads from the context."""
    messages: list[bytes] = []
    for message in messages:
        yield message


PING, GOAWAY = 6, 7


def frame(kind: int, payload: bytes) -> bytes:
    """An HTTP/2 frame of the connection."""
    return len(payload).to_bytes(3, "big") + bytes((kind, 0)) + bytes(4) + payload


async def test_frequent_pings_are_welcome(transport: GrpcTransport) -> None:
    """Envoy's keepalive on an idle connection is answered, never punished with a GOAWAY."""
    host, _, port = str(transport.address).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, b""))
    async with asyncio.timeout(5):
        for number in range(10):
            ping = number.to_bytes(8, "big")
            writer.write(frame(PING, ping))
            kind, payload = 0, b""
            while (kind, payload) != (PING, ping):
                head = await reader.readexactly(9)
                kind, payload = head[3], await reader.readexactly(int.from_bytes(head[:3], "big"))
                assert kind != GOAWAY
    writer.close()


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority, a server's identity and a client's."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(
        *("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2"),
        *("-subj", "/CN=authority"),
    )
    for name in ("server", "client"):
        openssl(
            *("req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem"),
            *("-days", "2", "-subj", f"/CN={name}", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
        )
    return folder


def trusting(folder: Path, *, has_identity: bool) -> grpc.ChannelCredentials:
    """A client's side of TLS, with an identity of its own or without."""
    if not has_identity:
        return grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
    return grpc.ssl_channel_credentials(
        (folder / "ca.pem").read_bytes(),
        (folder / "client.key").read_bytes(),
        (folder / "client.pem").read_bytes(),
    )


async def test_tls_shows_the_servers_identity(echoes: Echoes, identities: Path) -> None:
    """A client that trusts the authority is served without an identity of its own."""
    tls = ServiceTls(
        cert_file=str(identities / "server.pem"), key_file=str(identities / "server.key")
    )
    async with (
        serving(echoes, tls=tls) as transport,
        client_of(str(transport.address), trusting(identities, has_identity=False)) as client,
    ):
        assert await client.check(asking("here")) == SERVING


async def test_mtls_demands_the_clients_identity(echoes: Echoes, identities: Path) -> None:
    """With a client authority, only a client with an identity of it is served."""
    tls = ServiceTls(
        cert_file=str(identities / "server.pem"),
        key_file=str(identities / "server.key"),
        client_ca_file=str(identities / "ca.pem"),
    )
    async with serving(echoes, tls=tls) as transport:
        address = str(transport.address)
        async with client_of(address, trusting(identities, has_identity=True)) as known:
            assert await known.check(asking("here")) == SERVING
        async with client_of(address, trusting(identities, has_identity=False)) as stranger:
            with pytest.raises(grpc.aio.AioRpcError):
                await stranger.check(asking("here"))


async def test_a_missing_certificate_is_named(echoes: Echoes) -> None:
    """A file that cannot be read keeps the service from starting, and the text says which."""
    tls = ServiceTls(cert_file="/nowhere/cert.pem", key_file="/nowhere/key.pem")
    with pytest.raises(AddressUnavailable, match=r"/nowhere/key\.pem"):
        await GrpcTransport(echoes, GrpcSettings("127.0.0.1:0", tls=tls)).start()
