"""A stream, the states it can be in, and what each frame means in each of them."""

from __future__ import annotations

from collections import deque
from enum import Enum, IntEnum, auto
from typing import Final, Protocol

from extproc.serve.fastlane import frames
from extproc.serve.fastlane.frames import ErrorCode

_REMEMBERED_CLOSED: Final = 4096
_REMEMBERED_RESETS: Final = 64


class State(IntEnum):
    """The states of RFC 9113 section 5.1 as a server without push sees them, and two of its own.

    A frame that belongs to no stream is in state CONNECTION, one that comes amid a header block in
    IN_BLOCK. Of a closed stream it matters who closed it, for as long as that is remembered.
    """

    CONNECTION = 0
    IDLE = 1
    OPEN = 2
    HALF_CLOSED = 3  # the peer has sent everything
    RESET_HERE = 4
    RESET_THERE = 5
    ENDED = 6
    FORGOTTEN = 7
    IN_BLOCK = 8


class Action(Enum):
    """What a frame makes a connection do."""

    TAKE_DATA = auto()
    DROP_DATA = auto()  # it counts against the connection's window all the same
    REFUSE_DATA = auto()
    BEGIN = auto()
    TRAIL = auto()
    DROP_HEADERS = auto()  # they are decoded all the same, for the sake of later ones
    REFUSE_HEADERS = auto()
    REFUSE_REOPENING = auto()
    CONTINUE = auto()
    JUDGE_PRIORITY = auto()
    END = auto()
    TAKE_SETTINGS = auto()
    TAKE_PING = auto()
    TAKE_GOAWAY = auto()
    GROW_CONNECTION = auto()
    GROW_STREAM = auto()
    IGNORE = auto()
    FORBID = auto()


def _row(actions: dict[int, Action]) -> tuple[Action, ...]:
    """The actions of one state by frame type; what is not named is forbidden."""
    return tuple(actions.get(kind, Action.FORBID) for kind in range(frames.UNKNOWN + 1))


def _closed(data: Action, headers: Action) -> tuple[Action, ...]:
    """The row of a closed stream: the peer may not know yet that it is."""
    return _row(
        {
            frames.DATA: data,
            frames.HEADERS: headers,
            frames.PRIORITY: Action.JUDGE_PRIORITY,
            frames.RST_STREAM: Action.IGNORE,
            frames.WINDOW_UPDATE: Action.IGNORE,
            frames.UNKNOWN: Action.IGNORE,
        }
    )


def _alive(data: Action, headers: Action) -> tuple[Action, ...]:
    """The row of a stream that is not closed."""
    return _row(
        {
            frames.DATA: data,
            frames.HEADERS: headers,
            frames.PRIORITY: Action.JUDGE_PRIORITY,
            frames.RST_STREAM: Action.END,
            frames.WINDOW_UPDATE: Action.GROW_STREAM,
            frames.UNKNOWN: Action.IGNORE,
        }
    )


# RULES[state][frame type] is what happens.
RULES: Final[tuple[tuple[Action, ...], ...]] = (
    # CONNECTION
    _row(
        {
            frames.SETTINGS: Action.TAKE_SETTINGS,
            frames.PING: Action.TAKE_PING,
            frames.GOAWAY: Action.TAKE_GOAWAY,
            frames.WINDOW_UPDATE: Action.GROW_CONNECTION,
            frames.UNKNOWN: Action.IGNORE,
        }
    ),
    # IDLE
    _row(
        {
            frames.HEADERS: Action.BEGIN,
            frames.PRIORITY: Action.JUDGE_PRIORITY,
            frames.UNKNOWN: Action.IGNORE,
        }
    ),
    # OPEN, HALF_CLOSED
    _alive(Action.TAKE_DATA, Action.TRAIL),
    _alive(Action.REFUSE_DATA, Action.REFUSE_HEADERS),
    # RESET_HERE, RESET_THERE, ENDED, FORGOTTEN
    _closed(Action.DROP_DATA, Action.DROP_HEADERS),
    _closed(Action.REFUSE_DATA, Action.REFUSE_HEADERS),
    _closed(Action.REFUSE_DATA, Action.REFUSE_REOPENING),
    _closed(Action.REFUSE_DATA, Action.FORBID),
    # IN_BLOCK
    _row({frames.CONTINUATION: Action.CONTINUE}),
)


class Sink(Protocol):
    """What takes a stream's request; every method may send."""

    def data(self, buffer: bytes, start: int, stop: int) -> None:
        """The bytes of `buffer` from `start` to `stop` came; they may be none."""
        ...

    def half_closed(self) -> None:
        """The peer has sent everything."""
        ...

    def written(self) -> None:
        """What was sent until now is out of the connection."""
        ...

    def ended(self) -> None:
        """The end of the answer is out of the connection; nothing is told after this."""
        ...

    def gone(self, code: ErrorCode) -> None:
        """The stream ended before its answer did; nothing is told after this."""
        ...


class Closed:
    """How streams were closed, as far as it is remembered.

    `resets` are the last ones that the peer reset: it knows, so that those only choose between two
    errors. Of the others it may not know yet.
    """

    __slots__ = ("_states", "resets")

    def __init__(self) -> None:
        self._states: dict[int, State] = {}
        self.resets: deque[int] = deque(maxlen=_REMEMBERED_RESETS)

    def remember(self, stream_id: int, state: State) -> None:
        """The stream was closed in such a way."""
        if len(self._states) >= _REMEMBERED_CLOSED:
            del self._states[next(iter(self._states))]
        self._states[stream_id] = state

    def state(self, stream_id: int) -> State:
        """How the stream was closed."""
        if stream_id in self.resets:
            return State.RESET_THERE
        return self._states.get(stream_id, State.FORGOTTEN)


class Piece:
    """Something that waits to be sent: a header block, or data from `offset` on."""

    __slots__ = ("ends", "is_block", "offset", "payload")

    def __init__(self, payload: bytes, *, is_block: bool, ends: bool) -> None:
        self.payload = payload
        self.is_block = is_block
        self.ends = ends
        self.offset = 0


class Stream:
    """One stream; `window` is what it may send, `credit` what the peer may.

    `queue` holds what a window keeps back, None when that is nothing. While `is_choked`, the peer
    gets no new credit for the stream.
    """

    __slots__ = (
        "credit",
        "id",
        "is_choked",
        "length_left",
        "queue",
        "sink",
        "state",
        "window",
    )

    sink: Sink

    def __init__(self, stream_id: int, window: int, credit: int, length: int | None) -> None:
        self.id = stream_id
        self.state = State.OPEN
        self.window = window
        self.credit = credit
        self.length_left = length
        self.queue: deque[Piece] | None = None
        self.is_choked = False
