"""Both transports, with a real client on a real socket: they do not differ in what is seen."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc.aio import EOF  # type: ignore[attr-defined]  # the stubs leave it out
from transport_world import (
    ENDED_BY_PEER,
    NOT_SERVING,
    SERVING,
    UNKNOWN,
    Client,
    Echo,
    Echoes,
    Kind,
    Listening,
    asking,
    client_of,
    is_listening,
    made,
    serving,
    told,
    until,
)

from extproc.serve.grpcio import ACCESS_LOG_METHOD
from extproc.serve.sockets import AddressUnavailable
from extproc.serve.stream import StreamEnd


@pytest.fixture(params=list(Kind))
async def kind(request: pytest.FixtureRequest) -> Kind:
    """Which transport the test is about."""
    return Kind(request.param)


@pytest.fixture
async def echoes() -> Echoes:
    """The service that is carried."""
    return Echoes()


@pytest.fixture
async def transport(echoes: Echoes, kind: Kind) -> AsyncIterator[Listening]:
    """A started transport on a free port."""
    async with serving(echoes, kind) as started:
        yield started


@pytest.fixture
async def client(transport: Listening) -> AsyncIterator[Client]:
    """A client of the transport."""
    async with client_of(str(transport.address)) as connected:
        yield connected


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


async def test_a_lost_connection_ends_its_streams(echoes: Echoes, transport: Listening) -> None:
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
    echoes: Echoes, transport: Listening, client: Client
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
    echoes: Echoes, transport: Listening, client: Client
) -> None:
    """Access logs and health watches never end by themselves."""
    log = client.process(ACCESS_LOG_METHOD)
    await log.write(b"a")
    watch = client.watch(asking("here"))
    await watch.read()
    await until(lambda: bool(echoes.logs and echoes.logs[0].received))
    await asyncio.wait_for(transport.stop(30), 5)
    assert await told(echoes.logs[0]) in ENDED_BY_PEER


async def test_the_grace_has_an_end(echoes: Echoes, transport: Listening, client: Client) -> None:
    """Whatever still runs after the grace is cut, and its end is told."""
    call = client.process()
    await call.write(b"a")
    await call.read()
    await asyncio.wait_for(transport.stop(0.2), 5)
    assert await told(echoes.streams[0]) in ENDED_BY_PEER


async def test_a_second_stop_cuts_the_first_short(
    echoes: Echoes, transport: Listening, client: Client
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


async def test_a_transport_that_never_started_stops(echoes: Echoes, kind: Kind) -> None:
    """Stopping what does not run is nothing."""
    await made(echoes, kind, "127.0.0.1:0").stop(1)


async def test_a_unix_socket_is_for_owner_and_group(
    echoes: Echoes, kind: Kind, tmp_path: Path
) -> None:
    """The socket file has mode 0660 while it serves and is gone afterwards."""
    path = tmp_path / "llmgw.sock"
    async with serving(echoes, kind, address=f"unix:{path}") as transport:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        async with client_of(str(transport.address)) as client:
            call = client.process()
            await call.write(b"a")
            assert await call.read() == b"a"
    assert not path.exists()


async def test_a_dead_processs_socket_is_taken_over(
    echoes: Echoes, kind: Kind, tmp_path: Path
) -> None:
    """A socket file that nobody listens on does not keep the service from starting."""
    path = tmp_path / "llmgw.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with (
        serving(echoes, kind, address=f"unix:{path}"),
        client_of(f"unix:{path}") as client,
    ):
        assert await client.check(asking("here")) == SERVING


async def test_a_living_processs_socket_is_left_alone(
    echoes: Echoes, kind: Kind, tmp_path: Path
) -> None:
    """A second service on the same socket fails to start, and the first one goes on."""
    address = f"unix:{tmp_path / 'llmgw.sock'}"
    async with serving(echoes, kind, address=address), client_of(address) as client:
        with pytest.raises(AddressUnavailable, match="listens"):
            await made(echoes, kind, address).start()
        assert await client.check(asking("here")) == SERVING


async def test_a_port_is_not_shared(echoes: Echoes, kind: Kind, transport: Listening) -> None:
    """A second service on the same port fails to start instead of taking half the connections."""
    with pytest.raises(AddressUnavailable, match="cannot listen"):
        await made(echoes, kind, str(transport.address)).start()


PING, GOAWAY = 6, 7


def frame(kind: int, payload: bytes) -> bytes:
    """An HTTP/2 frame of the connection."""
    return len(payload).to_bytes(3, "big") + bytes((kind, 0)) + bytes(4) + payload


async def test_frequent_pings_are_welcome(transport: Listening) -> None:
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
