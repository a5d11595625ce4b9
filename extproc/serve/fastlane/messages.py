"""Messages of gRPC out of bytes that come in pieces, and the statuses of calls."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Final

_PREFIX: Final = Struct(">BI")
_PREFIX_BYTES: Final = 5


class Status(IntEnum):
    """The statuses that a server gives by itself."""

    OK = 0
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


@dataclass(frozen=True, slots=True)
class Malformed:
    """The bytes are no message that is taken, and nothing after them is."""

    status: Status
    text: str


class Inbox:
    """Messages of one call that are not complete, or not taken yet.

    A message from `large_bytes` on is given as its pieces, since joining them takes a while. `size`
    is how many bytes are kept. Every byte is copied a fixed number of times, however they come.
    """

    __slots__ = (
        "_is_broken",
        "_large",
        "_limit",
        "_missing",
        "_pieces",
        "_prefix",
        "_ready",
        "size",
    )

    def __init__(self, limit_bytes: int, large_bytes: int) -> None:
        self._limit = limit_bytes
        self._large = large_bytes
        self._ready: deque[bytes | list[bytes] | Malformed] = deque()
        self._prefix = b""
        self._pieces: list[bytes] = []
        self._missing: int | None = None  # of the message in `_pieces`; None while in the prefix
        self._is_broken = False
        self.size = 0

    def feed(self, chunk: bytes) -> None:
        """The bytes of `chunk` come after all others."""
        if self._is_broken:
            return
        start = 0
        end = len(chunk)
        while start < end or self._missing == 0:
            if self._missing is None:
                start = self._read_prefix(chunk, start)
            else:
                part = chunk[start : start + self._missing]
                start += len(part)
                self._missing -= len(part)
                self._pieces.append(part)
                self.size += len(part)
                if not self._missing:
                    self._complete()

    def next(self) -> bytes | list[bytes] | Malformed | None:
        """The next message, which is not kept any more; None when none is complete."""
        if not self._ready:
            return None
        message = self._ready.popleft()
        if isinstance(message, bytes):
            self.size -= len(message)
        elif isinstance(message, list):
            self.size -= sum(map(len, message))
        return message

    def _read_prefix(self, chunk: bytes, start: int) -> int:
        """Where the chunk goes on after as much of a message's prefix as is in it."""
        stop = start + _PREFIX_BYTES - len(self._prefix)
        self.size += len(chunk[start:stop])
        self._prefix += chunk[start:stop]
        if len(self._prefix) == _PREFIX_BYTES:
            mark, length = _PREFIX.unpack(self._prefix)
            self._prefix = b""
            self.size -= _PREFIX_BYTES
            problem = self._problem(mark, length)
            if problem is not None:
                self._ready.append(problem)
                self._is_broken = True
                return len(chunk)
            self._missing = length
        return stop

    def _problem(self, mark: int, length: int) -> Malformed | None:
        """Why a message with this prefix is not taken."""
        if mark == 1:
            return Malformed(Status.UNIMPLEMENTED, "compressed messages are not taken")
        if mark:
            return Malformed(Status.INTERNAL, "no message")
        if length > self._limit:
            return Malformed(Status.RESOURCE_EXHAUSTED, "too large a message")
        return None

    def _complete(self) -> None:
        """The message in `_pieces` can be taken."""
        pieces, self._pieces = self._pieces, []
        self._missing = None
        if sum(map(len, pieces)) >= self._large:
            self._ready.append(pieces)
        else:
            self._ready.append(b"".join(pieces))
