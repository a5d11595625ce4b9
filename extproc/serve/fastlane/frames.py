"""The layout of HTTP/2 frames, the numbers of RFC 9113, and how a server's own frames are made."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from types import MappingProxyType
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES: Final = 9
DEFAULT_WINDOW: Final = 65_535
DEFAULT_TABLE_BYTES: Final = 4096
MAX_WINDOW: Final = 2**31 - 1
MIN_FRAME_BYTES: Final = 2**14
MAX_FRAME_BYTES: Final = 2**24 - 1
MAX_STREAM_ID: Final = 2**31 - 1

# Frame types. Plain numbers, because they are compared for every frame.
DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9
UNKNOWN: Final = 10  # stands for every type that is not in the RFC

# Frames of which every one has the same size.
FIXED_SIZES: Final = MappingProxyType({PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4})

# Flags.
ACK: Final = 0x1
END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

# A frame's head: length and type in one word, flags, stream.
HEAD: Final = Struct(">IBI")
WORD: Final = Struct(">I")
SETTING: Final = Struct(">HI")


class Setting(IntEnum):
    """The settings that a peer may announce."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    """Why a stream was reset or a connection ended."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class ConnectionBroken(Exception):  # noqa: N818 - reads as what it is at the place it is caught
    """The peer did what ends a connection; `code` is what it is told."""

    def __init__(self, code: ErrorCode, why: str) -> None:
        super().__init__(why)
        self.code = code


class StreamFault(Exception):  # noqa: N818 - as above
    """The peer did what ends one stream; `code` is what it is told."""

    def __init__(self, code: ErrorCode, why: str) -> None:
        super().__init__(why)
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One frame; `payload` has at most 2**24 - 1 bytes."""
    return HEAD.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def settings_frame(values: dict[Setting, int]) -> bytes:
    """A SETTINGS frame that announces `values`."""
    payload = b"".join(SETTING.pack(name, value) for name, value in values.items())
    return frame(SETTINGS, 0, 0, payload)


def reset_frame(stream_id: int, code: ErrorCode) -> bytes:
    """A RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, WORD.pack(code))


def goaway_frame(last_id: int, code: ErrorCode, why: str = "") -> bytes:
    """A GOAWAY frame; streams above `last_id` were not begun."""
    return frame(GOAWAY, 0, 0, WORD.pack(last_id) + WORD.pack(code) + why.encode())


def window_frame(stream_id: int, grown_by: int) -> bytes:
    """A WINDOW_UPDATE frame; `stream_id` 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, WORD.pack(grown_by))


def wrong_size(kind: int) -> ConnectionBroken | StreamFault:
    """The error of a frame that has not the size that its type has."""
    error = StreamFault if kind == PRIORITY else ConnectionBroken
    return error(ErrorCode.FRAME_SIZE_ERROR, "a frame of another size")


def unpadded(buffer: bytes, flags: int, start: int, stop: int) -> tuple[int, int]:
    """Where the payload of a DATA or HEADERS frame is without its padding.

    Raises:
        ConnectionBroken: the padding does not fit.
    """
    if not flags & PADDED:
        return start, stop
    if start == stop:
        raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, "no room for the padding's length")
    padding = buffer[start]
    if padding > stop - start - 1:
        raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "the padding is longer than the frame")
    return start + 1, stop - padding
