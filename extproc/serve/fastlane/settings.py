"""What the two sides of a connection have agreed on: settings, and whether the peer is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from extproc.serve.fastlane.frames import (
    MAX_FRAME_BYTES,
    MAX_WINDOW,
    MIN_FRAME_BYTES,
    SETTING,
    ConnectionBroken,
    ErrorCode,
    Setting,
    settings_frame,
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What a peer may do; sizes in bytes, times in seconds.

    With a `table_bytes` of 0, which Envoy keeps to, header blocks that come again need not be read
    again. `held_bytes` bounds what one connection keeps: messages that are not complete or not yet
    taken, and as much again of replies that the peer does not fetch.
    """

    max_streams: int = 65_536
    frame_bytes: int = MIN_FRAME_BYTES
    stream_window: int = 1024 * 1024
    connection_window: int = 16 * 1024 * 1024
    table_bytes: int = 0
    header_bytes: int = 64 * 1024
    held_bytes: int = 512 * 1024 * 1024
    keepalive_seconds: float = 10.0
    keepalive_timeout_seconds: float = 5.0

    def frame(self) -> bytes:
        """The frame that tells the peer."""
        return settings_frame(
            {
                Setting.HEADER_TABLE_SIZE: self.table_bytes,
                Setting.MAX_CONCURRENT_STREAMS: self.max_streams,
                Setting.INITIAL_WINDOW_SIZE: self.stream_window,
                Setting.MAX_FRAME_SIZE: self.frame_bytes,
                Setting.MAX_HEADER_LIST_SIZE: self.header_bytes,
            }
        )


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a SETTINGS frame of the peer's asks for; None is no change."""

    initial_window: int | None
    frame_bytes: int | None


# What a value may be, and how the peer is told that it is something else. Others are taken as told.
_RANGES: Final = (
    (Setting.ENABLE_PUSH, range(2), ErrorCode.PROTOCOL_ERROR),
    (Setting.INITIAL_WINDOW_SIZE, range(MAX_WINDOW + 1), ErrorCode.FLOW_CONTROL_ERROR),
    (
        Setting.MAX_FRAME_SIZE,
        range(MIN_FRAME_BYTES, MAX_FRAME_BYTES + 1),
        ErrorCode.PROTOCOL_ERROR,
    ),
)


def read_settings(payload: bytes) -> Wishes:
    """What the payload of a SETTINGS frame asks for; the last of several values counts.

    Raises:
        ConnectionBroken: a value is out of range, or the frame has another size.
    """
    if len(payload) % SETTING.size:
        raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, "settings of another size")
    told: dict[int, int] = {}
    for name, value in SETTING.iter_unpack(payload):
        for ranged, allowed, code in _RANGES:
            if name == ranged and value not in allowed:
                raise ConnectionBroken(code, "a setting out of range")
        told[name] = value
    return Wishes(told.get(Setting.INITIAL_WINDOW_SIZE), told.get(Setting.MAX_FRAME_SIZE))


class Keepalive:
    """Notices a peer that is not there any more. Times are seconds of any clock that only grows."""

    __slots__ = ("_heard_at", "_pinged_at", "_settings")

    def __init__(self, settings: Settings, now: float) -> None:
        self._settings = settings
        self._heard_at = now
        self._pinged_at: float | None = None

    def heard(self, now: float) -> None:
        """The peer is there."""
        self._heard_at = now
        self._pinged_at = None

    def must_ping(self, now: float) -> bool:
        """Whether the peer is to be pinged now, which counts as done."""
        is_due = now - self._heard_at >= self._settings.keepalive_seconds
        if not is_due or self._pinged_at is not None:
            return False
        self._pinged_at = now
        return True

    def is_lost(self, now: float) -> bool:
        """Whether the peer has let a ping go unanswered, and was silent otherwise."""
        pinged_at = self._pinged_at
        return pinged_at is not None and now - pinged_at >= self._settings.keepalive_timeout_seconds
