"""The shell around the core: sockets, time, and peers that stop talking or reading."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import pytest
from fastlane_peer import CALL, data, headers, parsed

from extproc.serve.fastlane import frames
from extproc.serve.fastlane.headers import literal_block
from extproc.serve.fastlane.transport import FastlaneSettings, FastlaneTransport
from extproc.serve.stream import StreamEnd, StreamHandler

METHOD = b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"
REQUEST = [*CALL[:2], (b":path", METHOD), *CALL[3:]]


class Handler:
    """Answers each message with itself, as often as the service says."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.received = 0
        self.written_after: list[int] = []
        self.ends: list[StreamEnd] = []

    def receive(self, message: bytes) -> Sequence[bytes]:
        self.received += 1
        if message == b"defect":
            raise ZeroDivisionError
        return [message] * self.service.times

    def written(self) -> None:
        self.written_after.append(self.received)

    def end(self, why: StreamEnd) -> None:
        self.ends.append(why)


class Service:
    """A service of such handlers."""

    def __init__(self) -> None:
        self.times = 1
        self.streams: list[Handler] = []

    def ext_proc(self) -> StreamHandler:
        self.streams.append(Handler(self))
        return self.streams[-1]

    def access_log(self) -> StreamHandler:
        return self.ext_proc()

    def health(self, service: str) -> bool | None:
        return not service

    def watch_health(self, changed: Callable[[], None]) -> Callable[[], None]:
        return changed


class Caller:
    """A client on the `h2` package, whose reads are up to the test."""

    def __init__(self, link: socket.socket, window: int) -> None:
        self.link = link
        config = h2.config.H2Configuration(client_side=True, header_encoding=None)
        self.http2 = h2.connection.H2Connection(config)
        self.http2.local_settings = h2.settings.Settings(
            client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
        )
        self.http2.initiate_connection()
        self.events: list[h2.events.Event] = []
        self.is_cut = False

    async def send(self) -> None:
        await asyncio.get_running_loop().sock_sendall(self.link, self.http2.data_to_send())

    async def open(self, *more: tuple[bytes, bytes]) -> int:
        stream_id = self.http2.get_next_available_stream_id()
        self.http2.send_headers(stream_id, [*REQUEST, *more])
        await self.send()
        return stream_id

    async def say(self, stream_id: int, text: bytes, *, pads: bool = False) -> None:
        """Sends one message, as far as windows allow, which the test sees to."""
        wire = b"\x00" + len(text).to_bytes(4, "big") + text
        while wire:
            room = min(self.http2.local_flow_control_window(stream_id), 16_000)
            if room < 1000:
                await self.read()
                continue
            padding = 7 if pads else None
            self.http2.send_data(stream_id, wire[: room - 10], pad_length=padding)
            wire = wire[room - 10 :]
            await self.send()

    async def read(self) -> None:
        """Takes in what has come, and makes room for more of it."""
        received = await asyncio.get_running_loop().sock_recv(self.link, 65_536)
        if not received:
            self.is_cut = True
            return
        for event in self.http2.receive_data(received):
            self.events.append(event)
            if isinstance(event, h2.events.DataReceived) and event.flow_controlled_length:
                self.http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        await self.send()

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not is_so():
                await self.read()

    def body(self, stream_id: int) -> bytes:
        """The data that came on the stream so far."""
        return b"".join(
            event.data
            for event in self.events
            if isinstance(event, h2.events.DataReceived) and event.stream_id == stream_id
        )

    def trailers(self, stream_id: int) -> dict[bytes, bytes]:
        """The trailers of the stream, or its only headers."""
        return {
            name: value
            for event in self.events
            if isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived)
            and event.stream_id == stream_id
            for name, value in event.headers
        }


@pytest.fixture
async def service() -> Service:
    """The service that is carried."""
    return Service()


@asynccontextmanager
async def serving(
    service: Service, folder: Path, **settings: float
) -> AsyncIterator[FastlaneTransport]:
    """A started transport on a socket in `folder`."""
    transport = FastlaneTransport(
        service,
        FastlaneSettings(f"unix:{folder / 'socket'}", **settings),  # type: ignore[arg-type]  # times alone
    )
    await transport.start()
    try:
        yield transport
    finally:
        await transport.stop(0)


@asynccontextmanager
async def calling(folder: Path, *, window: int = 65_535) -> AsyncIterator[Caller]:
    """A client of the transport."""
    with socket.socket(socket.AF_UNIX) as link:
        link.setblocking(False)
        await asyncio.get_running_loop().sock_connect(link, str(folder / "socket"))
        caller = Caller(link, window)
        await caller.send()
        yield caller


async def settled(is_so: Callable[[], bool]) -> None:
    """Returns once something is so, which takes the other side a moment."""
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.01)


async def test_another_client_is_understood(service: Service, tmp_path: Path) -> None:
    """With padding, small windows, its own compression, and several calls at once."""
    async with serving(service, tmp_path), calling(tmp_path, window=3000) as caller:
        texts = {await caller.open((b"x-number", b"%d" % number)): number for number in range(5)}
        for stream_id, number in texts.items():
            await caller.say(stream_id, bytes(number * 9000), pads=number % 2 == 0)
            await caller.say(stream_id, b"last")
            caller.http2.end_stream(stream_id)
        await caller.send()
        await caller.until(lambda: all(caller.trailers(one).get(b"grpc-status") for one in texts))
        for stream_id, number in texts.items():
            assert caller.trailers(stream_id)[b"grpc-status"] == b"0"
            assert len(caller.body(stream_id)) == number * 9000 + 4 + 10
    assert [handler.ends for handler in service.streams] == [[StreamEnd.HALF_CLOSED]] * 5
    assert all(handler.written_after == [1, 2] for handler in service.streams)


async def test_resets_are_routine(service: Service, tmp_path: Path) -> None:
    """Thousands of them on one connection are no attack, and each is told."""
    async with serving(service, tmp_path), calling(tmp_path) as caller:
        for _ in range(3000):
            stream_id = caller.http2.get_next_available_stream_id()
            caller.http2.send_headers(stream_id, REQUEST)
            caller.http2.send_data(stream_id, b"\x00\x00\x00\x00\x01a")
            caller.http2.reset_stream(stream_id, h2.errors.ErrorCodes.CANCEL)
        await caller.send()
        last = await caller.open()
        await caller.say(last, b"still here")
        await caller.until(lambda: caller.body(last).endswith(b"still here"))
        assert len(service.streams) == 3001
        assert all(handler.ends == [StreamEnd.CANCELLED] for handler in service.streams[:-1])


async def test_a_silent_peer_is_noticed(service: Service, tmp_path: Path) -> None:
    """One that answers pings is kept, one that does not is lost, and its streams with it."""
    quick = {"keepalive_seconds": 0.2, "keepalive_timeout_seconds": 0.2}
    async with (
        serving(service, tmp_path, **quick),
        calling(tmp_path) as lively,
        calling(tmp_path) as mute,
    ):
        await mute.open()
        await lively.open()

        async def listen() -> None:
            while not lively.is_cut:
                await lively.read()

        listening = asyncio.create_task(listen())
        await settled(lambda: len(service.streams) == 2)
        await settled(lambda: any(handler.ends for handler in service.streams))
        await asyncio.sleep(0.5)  # longer than both times
        assert sorted(len(handler.ends) for handler in service.streams) == [0, 1]
        assert not listening.done()
        listening.cancel()


async def test_a_deadline_is_kept(service: Service, tmp_path: Path) -> None:
    """Though nothing is received when it comes."""
    async with serving(service, tmp_path), calling(tmp_path) as caller:
        stream_id = await caller.open((b"grpc-timeout", b"100m"))
        await caller.until(lambda: bool(caller.trailers(stream_id)))
        assert caller.trailers(stream_id)[b"grpc-status"] == b"4"
        assert service.streams[0].ends == [StreamEnd.CANCELLED]


async def test_a_defect_ends_one_call_and_is_told(service: Service, tmp_path: Path) -> None:
    """The event loop's handler of exceptions hears of it."""
    heard: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: heard.append(context["exception"]))
    async with serving(service, tmp_path), calling(tmp_path) as caller:
        stream_id = await caller.open()
        await caller.say(stream_id, b"defect")
        await caller.until(lambda: bool(caller.trailers(stream_id)))
        assert caller.trailers(stream_id)[b"grpc-status"] == b"2"
    assert [type(one) for one in heard] == [ZeroDivisionError]


async def test_a_peer_that_does_not_read_is_not_read(service: Service, tmp_path: Path) -> None:
    """What waits for it is bounded, though its windows are open; it gets all when it reads."""
    service.times = 50
    async with serving(service, tmp_path), calling(tmp_path, window=2**31 - 1) as caller:
        caller.http2.increment_flow_control_window(2**30)
        await caller.read()
        stream_id = await caller.open()
        said = 0

        async def flood() -> None:
            nonlocal said
            while caller.http2.local_flow_control_window(stream_id) > 1005:
                caller.http2.send_data(stream_id, b"\x00\x00\x00\x03\xe8" + bytes(1000))
                await caller.send()
                said += 1

        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                await flood()
        (handler,) = service.streams
        taken = handler.received
        assert taken < said
        assert taken * 50 * 1005 < 4_000_000
        assert handler.written_after[-1] == taken - 1
        await caller.until(lambda: len(caller.body(stream_id)) >= taken * 50 * 1005)
        await settled(lambda: handler.received > taken)


async def test_a_peer_that_does_not_read_does_not_delay_a_stop(
    service: Service, tmp_path: Path
) -> None:
    """After the grace and a moment its connection is cut."""
    service.times = 1000
    async with (
        serving(service, tmp_path) as transport,
        calling(tmp_path, window=2**31 - 1) as caller,
    ):
        caller.http2.increment_flow_control_window(2**30)
        stream_id = await caller.open()
        await caller.say(stream_id, bytes(10_000))
        await settled(lambda: bool(service.streams and service.streams[0].received))
        await asyncio.wait_for(transport.stop(0.1), 5)
        assert service.streams[0].ends == [StreamEnd.CANCELLED]


async def test_an_answer_on_its_way_arrives_during_the_grace(
    service: Service, tmp_path: Path
) -> None:
    """A stop waits for what is still being fetched."""
    text = b"\x00\x00\x03\x00\x00" + bytes(3 * 2**16)
    wire = frames.PREFACE + frames.settings_frame({}) + headers(1, literal_block(REQUEST))
    for at in range(0, len(text), 16_384):
        wire += data(1, text[at : at + 16_384])
    async with serving(service, tmp_path) as transport:
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "socket"))
        writer.write(wire + data(1, b"", ends=True))
        await settled(lambda: bool(service.streams and service.streams[0].received))
        stopping = asyncio.ensure_future(transport.stop(10))
        await asyncio.sleep(0.1)
        assert not stopping.done()
        writer.write(frames.window_frame(0, 2**20) + frames.window_frame(1, 2**20))
        answer = parsed(await asyncio.wait_for(reader.read(), 5))
        await stopping
        writer.close()
        await writer.wait_closed()
    body = b"".join(one.payload for one in answer if one.kind == frames.DATA)
    assert body == text
    assert [one.flags & frames.END_STREAM for one in answer if one.stream_id == 1][-1]
    assert service.streams[0].ends == [StreamEnd.HALF_CLOSED]


async def test_another_protocol_is_sent_away(service: Service, tmp_path: Path) -> None:
    """With a GOAWAY, and the connection closes."""
    async with serving(service, tmp_path):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "socket"))
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer.endswith(b"no preface")
        writer.close()
        await writer.wait_closed()
    assert not service.streams
