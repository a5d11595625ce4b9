"""The other side of a connection, byte for byte: makes frames, and reads what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from hpack import Decoder

from extproc.serve.fastlane import frames
from extproc.serve.fastlane.connection import Application, Connection
from extproc.serve.fastlane.frames import ErrorCode, Setting, frame, settings_frame
from extproc.serve.fastlane.grpc import CallRefused, Calls, Ends, Method, Route, Workload
from extproc.serve.fastlane.headers import Head, Request, literal_block
from extproc.serve.fastlane.messages import Status
from extproc.serve.fastlane.settings import Settings
from extproc.serve.fastlane.streams import Stream

GET = ((b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"h"))
POST = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/echo"), (b":authority", b"h"))
CALL = (*POST, (b"content-type", b"application/grpc"), (b"te", b"trailers"))
RouteT = TypeVar("RouteT")
NO_ROOM = b"\x20"  # the table's size update that a peer owes once it is told a size of 0


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame as it came."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes

    @property
    def code(self) -> ErrorCode:
        """The error of a RST_STREAM or GOAWAY frame."""
        at = 4 if self.kind == frames.GOAWAY else 0
        return ErrorCode(int.from_bytes(self.payload[at : at + 4], "big"))


def parsed(data: bytes) -> list[Frame]:
    """The frames in `data`, all of them complete."""
    found = []
    while data:
        size = int.from_bytes(data[:3], "big")
        assert len(data) >= 9 + size
        stream_id = int.from_bytes(data[5:9], "big")
        found.append(Frame(data[3], data[4], stream_id, data[9 : 9 + size]))
        data = data[9 + size :]
    return found


def headers(stream_id: int, block: bytes, *, ends: bool = False) -> bytes:
    """A HEADERS frame."""
    flags = frames.END_HEADERS | (frames.END_STREAM if ends else 0)
    return frame(frames.HEADERS, flags, stream_id, block)


def data(stream_id: int, payload: bytes, *, ends: bool = False) -> bytes:
    """A DATA frame."""
    return frame(frames.DATA, frames.END_STREAM if ends else 0, stream_id, payload)


def reset(stream_id: int) -> bytes:
    """A RST_STREAM frame as Envoy sends it."""
    return frames.reset_frame(stream_id, ErrorCode.CANCEL)


def message(payload: bytes, mark: int = 0) -> bytes:
    """A gRPC message."""
    return bytes((mark,)) + len(payload).to_bytes(4, "big") + payload


class Peer(Generic[RouteT]):
    """A client of one connection; `shake` opens it."""

    def __init__(self, application: Application[RouteT], settings: Settings | None = None) -> None:
        self.woken = 0
        self.connection = Connection(application, settings or Settings(), now=0.0, wake=self._woken)
        self.decoder = Decoder()

    def _woken(self) -> None:
        self.woken += 1

    def shake(self, values: dict[Setting, int] | None = None) -> list[Frame]:
        """What is answered to a client's first bytes; stream 1 is used up, to shrink the table."""
        opening = (
            frames.PREFACE + settings_frame(values or {}) + frame(frames.SETTINGS, frames.ACK, 0)
        )
        return self.send(opening + headers(1, NO_ROOM + literal_block(GET)) + reset(1))

    def send(self, received: bytes, now: float = 0.0) -> list[Frame]:
        """The frames with which the bytes are answered."""
        self.connection.receive(received, now)
        return self.fetch()

    def fetch(self) -> list[Frame]:
        """The frames that are to be sent."""
        return parsed(self.fetched())

    def fetched(self) -> bytes:
        """The bytes that are to be sent, all of which are."""
        out = self.connection.take()
        while self.connection.written():
            out += self.connection.take()
        return out + self.connection.take()

    def fields(self, block: bytes) -> dict[bytes, bytes]:
        """The fields of a header block."""
        return {bytes(name): bytes(value) for name, value in self.decoder.decode(block, raw=True)}


@dataclass
class Taken:
    """A sink that keeps what it is told, and answers nothing."""

    connection: Connection[None]
    stream: Stream
    head: Head
    chunks: list[bytes] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    codes: list[ErrorCode] = field(default_factory=list)

    def data(self, buffer: bytes, start: int, stop: int) -> None:
        self.chunks.append(buffer[start:stop])

    def half_closed(self) -> None:
        self.told.append("half_closed")

    def written(self) -> None:
        self.told.append("written")

    def ended(self) -> None:
        self.told.append("ended")

    def gone(self, code: ErrorCode) -> None:
        self.told.append("gone")
        self.codes.append(code)


class Taking:
    """Takes every request."""

    def __init__(self) -> None:
        self.taken: list[Taken] = []
        self.routed = 0

    def route(self, head: Head) -> None:
        self.routed += 1

    def begin(self, connection: Connection[None], stream: Stream, request: Request[None]) -> Taken:
        self.taken.append(Taken(connection, stream, request.head))
        return self.taken[-1]


class Broken(Exception):  # noqa: N818 - reads as what it is at the place it is raised
    """A handler's way to give up."""


class Echo:
    """Answers each message with itself; some messages are orders."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.written_after: list[int] = []
        self.ends: list[str] = []

    def receive(self, message: bytes) -> Sequence[bytes]:
        self.received.append(message)
        if message == b"break":
            raise Broken("cannot go on")
        if message == b"refuse":
            raise CallRefused(Status.NOT_FOUND, "100 % nö")
        if message == b"defect":
            raise ZeroDivisionError
        if message == b"mute":
            return ()
        return (message,)

    def written(self) -> None:
        self.written_after.append(len(self.received))

    def end(self, why: str) -> None:
        self.ends.append(why)


class Echoing:
    """A gRPC server of echoes."""

    def __init__(self, limit: int = 1_000_000, large: int = 100_000) -> None:
        self.echoes: list[Echo] = []
        self.defects: list[Exception] = []
        self.alarms: list[float] = []
        self.workload: Workload[str] = Workload(
            report=self.defects.append, alarm=self.alarms.append
        )
        self.calls: Calls[str] = Calls(
            {
                b"/echo": Method(self._echo, is_awaited=True),
                b"/log": Method(self._echo, farewell=b""),
                b"/watch": Method(self._echo, is_endless=True),
            },
            self.workload,
            Ends(half_closed="half_closed", cancelled="cancelled", failed="failed", broken=Broken),
            message_limit_bytes=limit,
            large_bytes=large,
        )

    def _echo(self, _line: object) -> Echo:
        self.echoes.append(Echo())
        return self.echoes[-1]


GrpcPeer = Peer[Route[str]]
WebPeer = Peer[None]
