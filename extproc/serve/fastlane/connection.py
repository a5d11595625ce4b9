"""One HTTP/2 connection as a server sees it: bytes in, calls of an application, bytes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Final, Generic, Protocol, TypeVar

from extproc.serve.fastlane import frames
from extproc.serve.fastlane.flow import Sender
from extproc.serve.fastlane.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    HEAD,
    HEAD_BYTES,
    MAX_STREAM_ID,
    MAX_WINDOW,
    WORD,
    ConnectionBroken,
    ErrorCode,
    StreamFault,
    unpadded,
)
from extproc.serve.fastlane.headers import Block, Head, HeaderReader, Request, judge_trailers
from extproc.serve.fastlane.settings import Keepalive, Settings, read_settings
from extproc.serve.fastlane.streams import RULES, Action, Closed, Sink, State, Stream

RouteT = TypeVar("RouteT")

# An enumeration's members cost a lookup each, which is felt where every frame passes.
_OPEN: Final = State.OPEN
_CANCEL: Final = ErrorCode.CANCEL
_RST_STREAM: Final = frames.RST_STREAM
_HEADERS: Final = frames.HEADERS

_PING_ALIVE: Final = b"is-alive"
_PING_DRAIN: Final = b"draining"


class Application(Protocol[RouteT]):
    """What answers the requests of a connection."""

    def route(self, head: Head) -> RouteT:
        """What `head` asks for; the same for equal heads, since it is kept for the next one."""
        ...

    def begin(
        self, connection: Connection[RouteT], stream: Stream, request: Request[RouteT]
    ) -> Sink:
        """What takes the stream that `request` opens; `stream.sink` if it answers at once."""
        ...


class _Farewell(Enum):
    """How far a connection has come with its orderly end."""

    NOT_YET = auto()
    ANNOUNCED = auto()  # streams that the peer began before it knew are still taken
    SAID = auto()


class Connection(Generic[RouteT]):
    """The state of one connection. Whoever owns it moves bytes, and calls it as they move.

    The owner gives what it receives to `receive`, takes `take()` to the network and then calls
    `written`, again and again until that is False. When `is_over`, it closes the network side after
    that and calls `lost`. `wake` is called when there is something to take though nothing was
    received. `now` is in seconds of any clock that only grows.
    """

    __slots__ = (
        "_application",
        "_block",
        "_buffer",
        "_closed",
        "_credit",
        "_farewell",
        "_has_preface",
        "_has_settings",
        "_is_heard",
        "_is_leaving",
        "_keepalive",
        "_marks",
        "_reader",
        "_settings",
        "_start",
        "held",
        "is_held",
        "is_over",
        "last_id",
        "now",
        "out",
        "owing",
        "sender",
        "streams",
        "wake",
    )

    def __init__(
        self,
        application: Application[RouteT],
        settings: Settings,
        *,
        now: float,
        wake: Callable[[], None],
    ) -> None:
        self._application = application
        self._settings = settings
        self._reader = HeaderReader(application.route, list_limit_bytes=settings.header_bytes)
        self.wake = wake
        self.streams: dict[int, Stream] = {}
        self.sender = Sender(drained=self._drained, ended=self._ended)
        self.out = self.sender.out
        # Sinks that are told when what they sent is out, and whether one of them must be told
        # before the next frame is looked at.
        self.owing: list[Sink] = []
        self.is_held = False
        self.is_over = False
        self.held = 0
        self.last_id = 0
        self.now = now
        self._keepalive = Keepalive(settings, now)
        self._buffer = b""
        self._start = 0
        self._has_preface = False
        self._has_settings = False
        self._credit = settings.connection_window
        # The largest frame, and how low a stream's credit and the connection's may get.
        half = (settings.stream_window >> 1, settings.connection_window >> 1)
        self._marks = (settings.frame_bytes, *half)
        self._closed = Closed()
        self._farewell = _Farewell.NOT_YET
        self._is_leaving = False
        self._is_heard = True
        self._block: Block | None = None
        self.out.append(settings.frame())
        self.out.append(frames.window_frame(0, settings.connection_window - frames.DEFAULT_WINDOW))

    # What the owner calls.

    def receive(self, data: bytes, now: float) -> None:
        """The frames that `data` completes have had their effect, up to one that holds the rest."""
        if self.is_over:
            return
        self.now = now
        self._is_heard = True
        self._buffer = self._buffer[self._start :] + data if self._buffer else data
        self._start = 0
        if not self.is_held:
            self._run()

    def take(self) -> bytes:
        """Everything that is to be sent now, which is not given again."""
        data = b"".join(self.out)
        self.out.clear()
        return data

    def written(self) -> bool:
        """What was taken is on its way; True when that made more to take, or to tell."""
        if not self.owing and not self.is_held:
            return False
        owing, self.owing = self.owing, []
        was_held, self.is_held = self.is_held, False
        for sink in owing:
            sink.written()
        if was_held and not self.is_held and self._buffer:
            self._run()
        return bool(self.out or self.owing or self.is_held)

    def tick(self, now: float) -> None:
        """A silent peer has been pinged, one that stays silent is given up; call it now and then.

        Twice within the shorter of the two keepalive times is often enough.
        """
        if self._is_heard:
            self._is_heard = False
            self._keepalive.heard(self.now)
        self.now = now
        if self._keepalive.is_lost(now):
            self.is_over = True
        elif self._keepalive.must_ping(now):
            self.out.append(frames.frame(frames.PING, 0, 0, _PING_ALIVE))

    def drain(self) -> None:
        """The peer is asked to begin no more streams; `is_over` once those that run have ended."""
        if self._farewell is _Farewell.NOT_YET and not self.is_over:
            self._farewell = _Farewell.ANNOUNCED
            self._is_leaving = True
            self.out.append(frames.goaway_frame(MAX_STREAM_ID, ErrorCode.NO_ERROR))
            self.out.append(frames.frame(frames.PING, 0, 0, _PING_DRAIN))

    def close(self, code: ErrorCode = ErrorCode.NO_ERROR, why: str = "") -> None:
        """The connection is over, and its streams with it; the peer is told `code`."""
        if self.is_over:
            return
        self.out.append(frames.goaway_frame(self.last_id, code, why))
        self.lost()

    def lost(self) -> None:
        """The connection is over, and its streams with it."""
        self.is_over = True
        self._buffer = b""
        self.is_held = False
        while self.streams:
            _, stream = self.streams.popitem()
            self.sender.drop(stream)
            stream.sink.gone(ErrorCode.CANCEL)
        self.owing.clear()

    # What sinks call.

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """The stream is over without an answer; its sink, which asked for it, is not told."""
        if self.streams.pop(stream.id, None) is not None:
            self.out.append(frames.reset_frame(stream.id, code))
            self.sender.drop(stream)
            self._closed.remember(stream.id, State.RESET_HERE)
            self._rest()

    @property
    def is_overfull(self) -> bool:
        """Whether more is kept than may be, of messages or of replies."""
        limit = self._settings.held_bytes
        return self.held > limit or self.sender.held > limit

    def replenish(self, stream: Stream) -> None:
        """The peer may send on the stream again, if it could not send much more."""
        full = self._settings.stream_window
        if stream.state is State.OPEN and stream.credit <= full >> 1:
            self.out.append(frames.window_frame(stream.id, full - stream.credit))
            stream.credit = full

    # Frames.

    def _run(self) -> None:
        """The frames in the buffer have had their effect, up to one that holds the rest."""
        try:
            if self._has_preface or self._is_begun():
                self._walk()
        except ConnectionBroken as error:
            self.close(error.code, str(error))

    def _is_begun(self) -> bool:
        """Whether the preface is there."""
        start = self._buffer[: len(frames.PREFACE)]
        if not frames.PREFACE.startswith(start):
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "no preface")
        if len(start) < len(frames.PREFACE):
            return False
        self._has_preface = True
        self._start = len(frames.PREFACE)
        return True

    def _walk(self) -> None:  # noqa: C901, PLR0912, PLR0915 - a call for each part would cost more
        """Frame by frame; the commonest ones are handled here, by the rules of all others."""
        buffer = self._buffer
        end = len(buffer)
        start = self._start
        streams = self.streams
        limit, low_stream, low_credit = self._marks
        while end - start >= HEAD_BYTES:
            word, flags, stream_id = HEAD.unpack_from(buffer, start)
            size = word >> 8
            kind = word & 0xFF
            if size > limit:
                raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, "too large a frame")
            first = start + HEAD_BYTES
            stop = first + size
            if stop > end:
                break
            start = stop
            if self._block is not None:
                pass
            elif not kind and not flags:
                stream = streams.get(stream_id)
                if (
                    stream is not None
                    and stream.state is _OPEN
                    and stream.length_left is None
                    and stream.credit - size > low_stream
                    and self._credit - size > low_credit
                ):
                    stream.credit -= size
                    self._credit -= size
                    stream.sink.data(buffer, first, stop)
                    if self.is_held or self.is_over:
                        break
                    continue
            elif kind == _RST_STREAM:
                stream = streams.pop(stream_id, None) if size == 4 else None
                if stream is not None:
                    self._closed.resets.append(stream_id)
                    if stream.queue is not None:
                        self.sender.drop(stream)
                    stream.sink.gone(_CANCEL)
                    if not self._is_leaving:
                        continue
                    self._rest()
                    if not self.is_over:
                        continue
                    break
            elif (
                kind == _HEADERS
                and flags == END_HEADERS
                and stream_id > self.last_id
                and stream_id & 1
                and stream_id <= MAX_STREAM_ID
                and not self._is_leaving
                and len(streams) < self._settings.max_streams
            ):
                request = self._reader.known(buffer[first:stop])
                if request is not None:
                    self.last_id = stream_id
                    stream = Stream(
                        stream_id,
                        self.sender.initial_window,
                        self._settings.stream_window,
                        request.head.content_length,
                    )
                    streams[stream_id] = stream
                    stream.sink = self._application.begin(self, stream, request)
                    continue
            self._act(kind, flags, stream_id & MAX_STREAM_ID, first, stop)
            if self.is_held or self.is_over:
                break
        if start == end or self.is_over:
            self._buffer = b""
            start = 0
        self._start = start

    def _act(self, kind: int, flags: int, stream_id: int, start: int, stop: int) -> None:
        """The frame has had the effect that the rules give it."""
        if not self._has_settings and (kind != frames.SETTINGS or flags & ACK):
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "no settings at the beginning")
        action = RULES[self._state(stream_id)][min(kind, frames.UNKNOWN)]
        wanted = frames.FIXED_SIZES.get(kind)
        try:
            if wanted is not None and stop - start != wanted:
                raise frames.wrong_size(kind)
            _ON_FRAME[action](self, flags, stream_id, start, stop)
        except StreamFault as fault:
            self._fail(stream_id, fault)

    def _state(self, stream_id: int) -> State:
        """The state that a frame finds."""
        if self._block is not None:
            return State.IN_BLOCK
        if not stream_id:
            return State.CONNECTION
        stream = self.streams.get(stream_id)
        if stream is not None:
            return stream.state
        if stream_id > self.last_id or not stream_id & 1:
            return State.IDLE
        return self._closed.state(stream_id)

    def _take_data(self, flags: int, stream_id: int, start: int, stop: int) -> None:
        stream = self.streams[stream_id]
        self._spend(stop - start)
        stream.credit -= stop - start
        if stream.credit < 0:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, "more than the window")
        start, stop = unpadded(self._buffer, flags, start, stop)
        if stream.length_left is not None:
            stream.length_left -= stop - start
            if stream.length_left < 0:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, "more than the content-length")
        if flags & END_STREAM:
            self._half_close(stream, start, stop)
            return
        stream.sink.data(self._buffer, start, stop)
        if not stream.is_choked and stream_id in self.streams:
            self.replenish(stream)

    def _half_close(self, stream: Stream, start: int = 0, stop: int = 0) -> None:
        """The stream's last bytes are taken, and it is known that they were the last."""
        if stream.length_left:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "less than the content-length")
        stream.state = State.HALF_CLOSED
        if stop > start:
            stream.sink.data(self._buffer, start, stop)
        if stream.id in self.streams:
            stream.sink.half_closed()

    def _drop_data(self, flags: int, _stream_id: int, start: int, stop: int) -> None:
        self._spend(stop - start)
        unpadded(self._buffer, flags, start, stop)

    def _refuse_data(self, flags: int, stream_id: int, start: int, stop: int) -> None:
        self._drop_data(flags, stream_id, start, stop)
        raise StreamFault(ErrorCode.STREAM_CLOSED, "data on a closed stream")

    def _spend(self, size: int) -> None:
        """The connection's window has paid for `size` bytes, and is filled up when it is low."""
        self._credit -= size
        if self._credit < 0:
            raise ConnectionBroken(ErrorCode.FLOW_CONTROL_ERROR, "more than the window")
        full = self._settings.connection_window
        if self._credit <= full >> 1:
            self.out.append(frames.window_frame(0, full - self._credit))
            self._credit = full

    def _continue(self, flags: int, stream_id: int, start: int, stop: int) -> None:
        block = self._block
        if block is None or stream_id != block.stream_id:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "a header block is not complete")
        block.add(self._buffer[start:stop])
        if flags & END_HEADERS:
            self._block = None
            self._take_block(block.joined(), stream_id, block.flags)

    def _take_block(self, block: bytes, stream_id: int, flags: int) -> None:
        """A complete header block has had the effect that the rules give it."""
        action = RULES[self._state(stream_id)][frames.HEADERS]
        _ON_BLOCK[action](self, block, stream_id, flags)

    def _headers(self, flags: int, stream_id: int, start: int, stop: int) -> None:
        start, stop = unpadded(self._buffer, flags, start, stop)
        if flags & frames.HAS_PRIORITY:
            if stop - start < 5:
                raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, "no room for the priority")
            (word,) = WORD.unpack_from(self._buffer, start)
            if word & MAX_STREAM_ID == stream_id:
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "a stream depends on itself")
            start += 5
        block = self._buffer[start:stop]
        if flags & END_HEADERS:
            self._take_block(block, stream_id, flags)
            return
        self._block = Block(stream_id, flags, block, limit=self._settings.header_bytes)

    def _begin(self, block: bytes, stream_id: int, flags: int) -> None:
        if not stream_id & 1:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "an even stream")
        self.last_id = stream_id
        request = self._reader.request(block)
        if self._farewell is _Farewell.SAID or len(self.streams) >= self._settings.max_streams:
            raise StreamFault(ErrorCode.REFUSED_STREAM, "too many streams")
        stream = Stream(
            stream_id,
            self.sender.initial_window,
            self._settings.stream_window,
            request.head.content_length,
        )
        if flags & END_STREAM and stream.length_left:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "less than the content-length")
        if flags & END_STREAM:
            stream.state = State.HALF_CLOSED
        self.streams[stream_id] = stream
        stream.sink = self._application.begin(self, stream, request)
        if flags & END_STREAM and stream_id in self.streams:
            self._half_close(stream)

    def _trail(self, block: bytes, stream_id: int, flags: int) -> None:
        judge_trailers(self._reader.fields(block))
        if not flags & END_STREAM:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "trailers that do not end the stream")
        self._half_close(self.streams[stream_id])

    def _drop_headers(self, block: bytes, _stream_id: int, _flags: int) -> None:
        self._reader.fields(block)

    def _refuse_headers(self, block: bytes, _stream_id: int, _flags: int) -> None:
        self._reader.fields(block)
        raise StreamFault(ErrorCode.STREAM_CLOSED, "headers on a closed stream")

    def _refuse_reopening(self, _block: bytes, _stream_id: int, _flags: int) -> None:
        raise ConnectionBroken(ErrorCode.STREAM_CLOSED, "headers on a closed stream")

    def _judge_priority(self, _flags: int, stream_id: int, start: int, _stop: int) -> None:
        (word,) = WORD.unpack_from(self._buffer, start)
        if word & MAX_STREAM_ID == stream_id:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a stream depends on itself")

    def _end(self, _flags: int, stream_id: int, _start: int, _stop: int) -> None:
        stream = self.streams.pop(stream_id)
        self._closed.resets.append(stream_id)
        self.sender.drop(stream)
        stream.sink.gone(ErrorCode.CANCEL)
        self._rest()

    def _take_settings(self, flags: int, _stream_id: int, start: int, stop: int) -> None:
        self._has_settings = True
        if flags & ACK:
            if stop > start:
                raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, "settings of another size")
            self._reader.limit_table(self._settings.table_bytes)
            return
        wishes = read_settings(self._buffer[start:stop])
        if wishes.frame_bytes is not None:
            self.sender.frame_bytes = wishes.frame_bytes
        if wishes.initial_window is not None:
            self.sender.resize(wishes.initial_window, self.streams.values())
        self.out.append(frames.frame(frames.SETTINGS, ACK, 0))
        if wishes.initial_window is not None:
            self.sender.push(tuple(self.streams.values()))

    def _take_ping(self, flags: int, _stream_id: int, start: int, stop: int) -> None:
        payload = self._buffer[start:stop]
        if not flags & ACK:
            self.out.append(frames.frame(frames.PING, ACK, 0, payload))
        elif payload == _PING_DRAIN and self._farewell is _Farewell.ANNOUNCED:
            # The peer has had the announcement, so what it began before is here by now.
            self._farewell = _Farewell.SAID
            self.out.append(frames.goaway_frame(self.last_id, ErrorCode.NO_ERROR))
            self._rest()

    def _take_goaway(self, _flags: int, _stream_id: int, start: int, stop: int) -> None:
        if stop - start < 8:
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, "a goaway of another size")

    def _grow_connection(self, _flags: int, _stream_id: int, start: int, _stop: int) -> None:
        by = WORD.unpack_from(self._buffer, start)[0] & MAX_WINDOW
        if not by:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "a window grows by nothing")
        self.sender.grow(by)

    def _grow_stream(self, _flags: int, stream_id: int, start: int, _stop: int) -> None:
        by = WORD.unpack_from(self._buffer, start)[0] & MAX_WINDOW
        if not by:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a window grows by nothing")
        self.sender.grow_stream(self.streams[stream_id], by)

    def _ignore(self, _flags: int, _stream_id: int, _start: int, _stop: int) -> None:
        pass

    def _forbid(self, _flags: int, _stream_id: int, _start: int, _stop: int) -> None:
        raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "a frame out of place")

    # Streams that end.

    def _fail(self, stream_id: int, fault: StreamFault) -> None:
        """The peer is told what it did wrong on the stream, which is over."""
        stream = self.streams.pop(stream_id, None)
        state = self._state(stream_id)
        if state is State.IDLE:
            raise ConnectionBroken(fault.code, str(fault))
        self.out.append(frames.reset_frame(stream_id, fault.code))
        if stream is not None:
            self.sender.drop(stream)
            stream.sink.gone(fault.code)
        if state is State.FORGOTTEN:
            self._closed.remember(stream_id, State.RESET_HERE)
        self._rest()

    def _drained(self, stream: Stream) -> None:
        """All that was sent on the stream is ready to be taken."""
        self.owing.append(stream.sink)

    def _ended(self, stream: Stream) -> None:
        """The end of the stream's answer is ready to be taken."""
        if self.streams.pop(stream.id, None) is None:
            return
        if stream.state is State.OPEN:
            # The answer does not depend on the rest of the request, which need not be sent.
            self.out.append(frames.reset_frame(stream.id, ErrorCode.NO_ERROR))
            self._closed.remember(stream.id, State.RESET_HERE)
        else:
            self._closed.remember(stream.id, State.ENDED)
        stream.sink.ended()
        self._rest()

    def _rest(self) -> None:
        """Without streams, a connection that has said farewell is over."""
        if self._farewell is _Farewell.SAID and not self.streams:
            self.is_over = True


# What the rules' actions are here.
_ON_BLOCK: Final[Mapping[Action, Callable[..., None]]] = MappingProxyType(
    {
        Action.BEGIN: Connection._begin,
        Action.TRAIL: Connection._trail,
        Action.DROP_HEADERS: Connection._drop_headers,
        Action.REFUSE_HEADERS: Connection._refuse_headers,
        Action.REFUSE_REOPENING: Connection._refuse_reopening,
    }
)
_ON_FRAME: Final[Mapping[Action, Callable[..., None]]] = MappingProxyType(
    {
        **dict.fromkeys(_ON_BLOCK, Connection._headers),
        Action.TAKE_DATA: Connection._take_data,
        Action.DROP_DATA: Connection._drop_data,
        Action.REFUSE_DATA: Connection._refuse_data,
        Action.CONTINUE: Connection._continue,
        Action.JUDGE_PRIORITY: Connection._judge_priority,
        Action.END: Connection._end,
        Action.TAKE_SETTINGS: Connection._take_settings,
        Action.TAKE_PING: Connection._take_ping,
        Action.TAKE_GOAWAY: Connection._take_goaway,
        Action.GROW_CONNECTION: Connection._grow_connection,
        Action.GROW_STREAM: Connection._grow_stream,
        Action.IGNORE: Connection._ignore,
        Action.FORBID: Connection._forbid,
    }
)
