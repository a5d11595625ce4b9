"""gRPC over the streams of a connection: messages, statuses, deadlines and the life of a call."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from heapq import heapify, heappop, heappush
from struct import Struct
from types import MappingProxyType
from typing import Final, Generic, Protocol, TypeVar

from extproc.serve.fastlane.connection import Connection
from extproc.serve.fastlane.frames import END_HEADERS, HEADERS, ErrorCode
from extproc.serve.fastlane.headers import Head, Request, literal_block
from extproc.serve.fastlane.messages import Inbox, Malformed, Status
from extproc.serve.fastlane.streams import Stream

EndT = TypeVar("EndT")
EndT_contra = TypeVar("EndT_contra", contravariant=True)

_PREFIX: Final = Struct(">BI")
_PREFIX_BYTES: Final = 5
_MAX_TEXT_BYTES: Final = 1024
_TIMEOUT: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNITS: Final = MappingProxyType(
    {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
)
_CONTENT_TYPE: Final = (b"content-type", b"application/grpc")
_OK_BLOCK: Final = b"\x88"  # the static table's `:status: 200`
_RESPONSE: Final = _OK_BLOCK + literal_block([_CONTENT_TYPE])
_TRAILERS_OK: Final = literal_block([(b"grpc-status", b"0")])
_NOT_GRPC: Final = literal_block([(b":status", b"415"), (b"content-length", b"0")])
_NOT_POST: Final = literal_block(
    [(b":status", b"405"), (b"allow", b"POST"), (b"content-length", b"0")]
)

# The response's headers and the head of its first message, of which only numbers vary: stream,
# length of the DATA frame (its type is 0), stream, length of the message.
_OPENING: Final = Struct(f">5sI{len(_RESPONSE)}sIBIBI")
_OPENING_HEAD: Final = Struct(">IB").pack(len(_RESPONSE) << 8 | HEADERS, END_HEADERS)
_FOLLOWING: Final = Struct(">IBIBI")


class CallRefused(Exception):  # noqa: N818 - reads as what it is at the place it is raised
    """A handler's way to end its call with a status of its choice."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status


class Handler(Protocol[EndT_contra]):
    """One call, from its first message to its end."""

    def receive(self, message: bytes) -> Sequence[bytes]:
        """The messages to write, in order, in answer to `message`."""
        ...

    def written(self) -> None:
        """Everything that the last `receive` returned has been handed to the network."""
        ...

    def end(self, why: EndT_contra) -> None:
        """The call is over; told exactly once, and nothing is told after it."""
        ...


class Line(Protocol):
    """A call as its handler sees it."""

    def push(self, message: bytes) -> None:
        """`message` is sent, though nothing asked for it; not while an earlier one is unwritten."""
        ...


class Method(Generic[EndT]):
    """How the calls of one method are handled.

    `farewell` is written when the peer has sent everything. A call that `is_endless` goes on after
    that. One that `is_awaited` counts as running.
    """

    __slots__ = ("farewell", "handler", "is_awaited", "is_endless")

    def __init__(
        self,
        handler: Callable[[Line], Handler[EndT]],
        *,
        is_awaited: bool = False,
        is_endless: bool = False,
        farewell: bytes | None = None,
    ) -> None:
        self.handler = handler
        self.is_awaited = is_awaited
        self.is_endless = is_endless
        self.farewell = farewell


class Ends(Generic[EndT]):
    """What a handler is told at each kind of end, and the error with which it breaks a call."""

    __slots__ = ("broken", "cancelled", "failed", "half_closed")

    def __init__(
        self, *, half_closed: EndT, cancelled: EndT, failed: EndT, broken: type[Exception]
    ) -> None:
        self.half_closed = half_closed
        self.cancelled = cancelled
        self.failed = failed
        self.broken = broken


class Route(Generic[EndT]):
    """What a request is for: a method's call, or a refusal whose header block is the answer."""

    __slots__ = ("method", "refusal", "timeout_seconds")

    def __init__(
        self, method: Method[EndT] | None, refusal: bytes, timeout_seconds: float | None
    ) -> None:
        self.method = method
        self.refusal = refusal
        self.timeout_seconds = timeout_seconds


class Workload(Generic[EndT]):
    """What the calls of all connections share.

    `large` are calls whose next message is so large that only one of them is taken in a turn;
    `report` is told of handlers' defects, `alarm` of the moment at which `end_expired` is due.
    """

    __slots__ = ("_deadlines", "_number", "alarm", "large", "report", "running")

    def __init__(
        self, *, report: Callable[[Exception], None], alarm: Callable[[float], None]
    ) -> None:
        self.report = report
        self.alarm = alarm
        self.running = 0
        self.large: deque[Call[EndT]] = deque()
        self._deadlines: list[tuple[float, int, Call[EndT]]] = []
        self._number = 0

    def expire(self, call: Call[EndT], deadline: float) -> None:
        """The call ends at `deadline` unless it ended before."""
        self._number += 1
        heappush(self._deadlines, (deadline, self._number, call))
        if self._deadlines[0][2] is call:
            self.alarm(deadline)
        # Nearly all calls end early: what they leave here is swept out when it is the larger part.
        if not self._number & 1023:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].is_over]
            heapify(self._deadlines)

    def end_expired(self, now: float) -> None:
        """Calls whose deadline has passed are over."""
        deadlines = self._deadlines
        while deadlines:
            deadline, _, call = deadlines[0]
            if deadline > now and not call.is_over:
                self.alarm(deadline)
                return
            heappop(deadlines)
            if not call.is_over:
                call.cut(Status.DEADLINE_EXCEEDED, "deadline exceeded")
                call.connection.wake()


class Calls(Generic[EndT]):
    """The application that serves `methods`, by path, on any number of connections."""

    __slots__ = ("_methods", "ends", "large_bytes", "message_limit_bytes", "workload")

    def __init__(
        self,
        methods: Mapping[bytes, Method[EndT]],
        workload: Workload[EndT],
        ends: Ends[EndT],
        *,
        message_limit_bytes: int,
        large_bytes: int,
    ) -> None:
        self._methods = methods
        self.workload = workload
        self.ends = ends
        self.message_limit_bytes = message_limit_bytes
        self.large_bytes = large_bytes

    def route(self, head: Head) -> Route[EndT]:
        """The method that `head` calls, or how it is refused."""
        kind = head.first(b"content-type") or b""
        if kind != b"application/grpc" and not kind.startswith(
            (b"application/grpc+", b"application/grpc;")
        ):
            return Route(None, _NOT_GRPC, None)
        if head.method != b"POST":
            return Route(None, _NOT_POST, None)
        timeout = head.first(b"grpc-timeout")
        seconds = None if timeout is None else _seconds(timeout)
        if timeout is not None and seconds is None:
            return Route(None, _refusal(Status.INTERNAL, "unreadable grpc-timeout"), None)
        method = self._methods.get(head.path)
        if method is None:
            return Route(None, _refusal(Status.UNIMPLEMENTED, "unknown method"), None)
        return Route(method, b"", seconds)

    def begin(
        self,
        connection: Connection[Route[EndT]],
        stream: Stream,
        request: Request[Route[EndT]],
    ) -> Call[EndT] | Refused:
        """What takes the stream: a call, or nothing."""
        route = request.route
        method = route.method
        if method is None:
            stream.sink = refused = Refused()
            connection.sender.headers(stream, route.refusal, ends=True)
            return refused
        call = Call(self, connection, stream, method)
        if route.timeout_seconds is not None:
            self.workload.expire(call, connection.now + route.timeout_seconds)
        return call


class Refused:
    """Takes what comes on a stream that was answered before it began."""

    __slots__ = ()

    def data(self, buffer: bytes, start: int, stop: int) -> None:
        """Nothing is done."""

    def half_closed(self) -> None:
        """Nothing is done."""

    def written(self) -> None:
        """Nothing is done."""

    def ended(self) -> None:
        """Nothing is done."""

    def gone(self, code: ErrorCode) -> None:
        """Nothing is done."""


_NOBODY: Final = Refused()


class _Busy(IntEnum):
    """Why a call does not take its next message."""

    NOT = 0
    WRITING = 1  # the answer to the last one is not out
    QUEUED = 2  # it is a large one, and has to wait for its turn


# An enumeration's members cost a lookup each, which is felt where every message passes.
_NOT_BUSY: Final = _Busy.NOT
_WRITING: Final = _Busy.WRITING


class Call(Generic[EndT]):
    """One call: a stream on one side, a handler on the other."""

    __slots__ = (
        "_busy",
        "_calls",
        "_handler",
        "_has_head",
        "_inbox",
        "_is_half_closed",
        "_is_told",
        "_large",
        "_method",
        "_stream",
        "connection",
        "is_over",
    )

    def __init__(
        self,
        calls: Calls[EndT],
        connection: Connection[Route[EndT]],
        stream: Stream,
        method: Method[EndT],
    ) -> None:
        self._calls = calls
        self.connection = connection
        self._stream = stream
        self._method = method
        self._inbox: Inbox | None = None
        self._large: list[bytes] | None = None
        self._busy: _Busy = _NOT_BUSY
        self._has_head = False
        self._is_half_closed = False
        self._is_told = False
        self.is_over = False
        self._handler = method.handler(self)
        if method.is_awaited:
            calls.workload.running += 1

    # What the connection calls.

    def data(self, buffer: bytes, start: int, stop: int) -> None:
        """The messages that these bytes complete are taken, as soon as it is their turn."""
        size = stop - start - _PREFIX_BYTES
        if size >= 0 and self._inbox is None and not self._busy:
            mark, told = _PREFIX.unpack_from(buffer, start)
            if told == size and not mark and size < self._calls.large_bytes:
                self._take(buffer[start + _PREFIX_BYTES : stop])
                return
        if stop > start:
            self._keep(buffer[start:stop])

    def half_closed(self) -> None:
        """The call ends when the messages that are here have been taken."""
        self._is_half_closed = True
        self._go_on()

    def written(self) -> None:
        """The handler is told, and the next message is taken."""
        stream = self._stream
        if self.is_over or stream.queue is not None:
            return
        self._busy = _NOT_BUSY
        if not self._is_told:
            try:
                self._handler.written()
            except Exception as error:  # noqa: BLE001 - one call's defect must not end the others
                self._calls.workload.report(error)
        if stream.is_choked:
            stream.is_choked = False
            self.connection.replenish(stream)
        if self._inbox is not None or self._is_half_closed:
            self._go_on()

    def ended(self) -> None:
        """The call is over, since its status is out."""
        self._close()

    def gone(self, code: ErrorCode) -> None:  # noqa: ARG002 - the handler's ends know no codes
        """The call is over without a status."""
        self._close()
        self._tell(self._calls.ends.cancelled)

    # What others call.

    def push(self, message: bytes) -> None:
        """`message` is sent, though nothing asked for it; not while an earlier one is unwritten."""
        if not self.is_over and not self._is_told:
            self._send(message)
            self._await_written()
            self.connection.wake()

    def take_large(self) -> None:
        """The large message that waited for its turn is taken."""
        if self.is_over or self._large is None:
            return
        message = b"".join(self._large)
        self._large = None
        self.connection.held -= len(message)
        self._busy = _NOT_BUSY
        self._take(message)

    def cut(self, status: Status, text: str) -> None:
        """The call ends with `status`, whatever it was at."""
        self._fail(status, text, self._calls.ends.cancelled)

    # Messages in.

    def _keep(self, chunk: bytes) -> None:
        """The bytes are kept until they make messages whose turn has come."""
        calls = self._calls
        if self._inbox is None:
            self._inbox = Inbox(calls.message_limit_bytes, calls.large_bytes)
        before = self._inbox.size
        self._inbox.feed(chunk)
        self.connection.held += self._inbox.size - before
        if self.connection.is_overfull:
            self.cut(Status.RESOURCE_EXHAUSTED, "too much at a time")
            return
        self._go_on()

    def _go_on(self) -> None:
        """The next message is taken, or the end, if nothing else comes first."""
        while not self.is_over:
            if self._busy:
                self._wait()
                return
            inbox = self._inbox
            if inbox is None:
                if self._is_half_closed:
                    self._finish()
                return
            message = inbox.next()
            if isinstance(message, Malformed):
                self.cut(message.status, message.text)
                return
            if message is None:
                if inbox.size:
                    if self._is_half_closed:
                        self.cut(Status.INTERNAL, "the last message is not complete")
                    return
                self._inbox = None
            elif isinstance(message, bytes):
                self.connection.held -= len(message)
                self._take(message)
            else:
                self._large = message
                self._busy = _Busy.QUEUED
                self._calls.workload.large.append(self)

    def _wait(self) -> None:
        """There is more to take, and it is not its turn."""
        if self._busy is _WRITING and self._stream.queue is None:
            self.connection.is_held = True
        else:
            self._stream.is_choked = True

    def _take(self, message: bytes) -> None:
        """The handler has had `message`, and its answer is on its way."""
        ends = self._calls.ends
        try:
            replies = self._handler.receive(message)
        except CallRefused as refusal:
            self._fail(refusal.status, str(refusal), ends.failed)
            return
        except Exception as error:  # noqa: BLE001 - one call's defect must not end the others
            if isinstance(error, ends.broken):
                self._fail(Status.INTERNAL, str(error), ends.failed)
            else:
                self._calls.workload.report(error)
                self._fail(Status.UNKNOWN, "internal error", ends.cancelled)
            return
        for reply in replies:
            self._send(reply)
        if self._stream.queue is None:
            self._busy = _WRITING
            self.connection.owing.append(self)
        else:
            self._await_written()

    # Messages out.

    def _send(self, message: bytes) -> None:
        """`message` goes out, after the response's headers if it is the first one."""
        stream = self._stream
        sender = self.connection.sender
        size = len(message)
        framed = size + _PREFIX_BYTES
        if (
            stream.queue is None
            and framed <= sender.frame_bytes
            and framed <= sender.window
            and framed <= stream.window
        ):
            sender.window -= framed
            stream.window -= framed
            number = stream.id
            if self._has_head:
                sender.out.append(_FOLLOWING.pack(framed << 8, 0, number, 0, size))
            else:
                self._has_head = True
                sender.out.append(
                    _OPENING.pack(_OPENING_HEAD, number, _RESPONSE, framed << 8, 0, number, 0, size)
                )
            sender.out.append(message)
            return
        if not self._has_head:
            self._has_head = True
            sender.headers(stream, _RESPONSE)
        sender.data(stream, _PREFIX.pack(0, size) + message)

    def _await_written(self) -> None:
        """The next message waits until what was sent is out."""
        self._busy = _WRITING
        if self._stream.queue is None:
            self.connection.owing.append(self)
        elif self.connection.is_overfull:
            self.connection.reset(self._stream, ErrorCode.ENHANCE_YOUR_CALM)
            self.gone(ErrorCode.ENHANCE_YOUR_CALM)
        else:
            self._stream.is_choked = True

    # The end.

    def _finish(self) -> None:
        """The peer has sent everything and had every answer."""
        method = self._method
        if method.is_endless or self._is_told:
            return
        self._tell(self._calls.ends.half_closed)
        if method.farewell is not None:
            self._send(method.farewell)
        block = _TRAILERS_OK if self._has_head else _RESPONSE + _TRAILERS_OK
        self.connection.sender.headers(self._stream, block, ends=True)

    def _fail(self, status: Status, text: str, end: EndT) -> None:
        """The peer is told why the call is over, unless an answer is in the way."""
        if self.is_over:
            return
        if self._stream.queue is not None:
            self.connection.reset(self._stream, ErrorCode.CANCEL)
            self._close()
        else:
            block = _status_block(status, text)
            if not self._has_head:
                block = _RESPONSE + block
            self.connection.sender.headers(self._stream, block, ends=True)
        self._tell(end)

    def _close(self) -> None:
        """The call is over and holds nothing."""
        if self.is_over:
            return
        self.is_over = True
        # Stream and call hold each other, and a cycle is left to the garbage collector.
        self._stream.sink = _NOBODY
        if self._inbox is not None:
            self.connection.held -= self._inbox.size
            self._inbox = None
        if self._large is not None:
            self.connection.held -= sum(map(len, self._large))
            self._large = None
        if self._method.is_awaited:
            self._calls.workload.running -= 1

    def _tell(self, end: EndT) -> None:
        """The handler is told of the end, unless it was."""
        if self._is_told:
            return
        self._is_told = True
        try:
            self._handler.end(end)
        except Exception as error:  # noqa: BLE001 - one call's defect must not end the others
            self._calls.workload.report(error)


def _status_block(status: Status, text: str) -> bytes:
    """The trailers that tell `status`; the text is in the form that gRPC gives it."""
    told = "".join(
        character if " " <= character <= "~" and character != "%" else _percent(character)
        for character in text
    ).encode()[:_MAX_TEXT_BYTES]
    return literal_block([(b"grpc-status", b"%d" % status), (b"grpc-message", told)])


def _percent(character: str) -> str:
    return "".join(f"%{octet:02X}" for octet in character.encode(errors="replace"))


def _refusal(status: Status, text: str) -> bytes:
    """The header block of an answer that is a status and nothing else."""
    return _RESPONSE + _status_block(status, text)


def _seconds(timeout: bytes) -> float | None:
    """The seconds of a grpc-timeout, None when it is none."""
    match = _TIMEOUT.fullmatch(timeout)
    return None if match is None else int(match[1]) * _UNITS[match[2]]
