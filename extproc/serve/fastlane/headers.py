"""Header blocks: decoded, judged by RFC 9113 section 8, and remembered when they leave no state."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from hpack import Decoder
from hpack.exceptions import HPACKError, OversizedHeaderListError

from extproc.serve.fastlane.frames import HEAD_BYTES, ConnectionBroken, ErrorCode, StreamFault

Fields = tuple[tuple[bytes, bytes], ...]
RouteT = TypeVar("RouteT")

_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_VALUE: Final = re.compile(rb"[\x00\r\n]|\A[ \t]|[ \t]\Z")
_PSEUDO: Final = frozenset({b":method", b":scheme", b":path", b":authority"})
_OF_THE_CONNECTION: Final = frozenset(
    {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
)

# Envoy's requests differ in little: one block, or one for each of its workers and traces.
_REMEMBERED_BLOCKS: Final = 64
_REMEMBERED_BYTES: Final = 2048


@dataclass(frozen=True, slots=True)
class Head:
    """A request's header section, which is well-formed.

    `fields` are those without a colon, in order; `content_length` is None when it is not told.
    """

    method: bytes
    scheme: bytes
    path: bytes
    authority: bytes
    fields: Fields
    content_length: int | None

    def first(self, name: bytes) -> bytes | None:
        """The first value of the field `name`, which is in lower case."""
        return next((value for known, value in self.fields if known == name), None)


class Request(Generic[RouteT]):
    """A head and what the application made of it."""

    __slots__ = ("head", "route")

    def __init__(self, head: Head, route: RouteT) -> None:
        self.head = head
        self.route = route


class HeaderReader(Generic[RouteT]):
    """Reads the header blocks of one connection, in the order in which they came.

    `route` is what an application makes of a head; it depends on nothing else, because its result
    is kept for the next block of the same bytes.
    """

    __slots__ = ("_decoder", "_known", "_route", "is_stateless")

    def __init__(self, route: Callable[[Head], RouteT], *, list_limit_bytes: int) -> None:
        self._route = route
        self._decoder = Decoder(max_header_list_size=list_limit_bytes)
        self._known: dict[bytes, Request[RouteT]] = {}
        # With a table of no size a block means the same whatever came before it.
        self.is_stateless = False

    def limit_table(self, size: int) -> None:
        """The peer has agreed to a dynamic table of `size` bytes and must now shrink it."""
        self._decoder.max_allowed_table_size = size

    def known(self, block: bytes) -> Request[RouteT] | None:
        """What `block` is known to say; None when it has to be read."""
        return self._known.get(block) if self.is_stateless else None

    def request(self, block: bytes) -> Request[RouteT]:
        """What `block`, which opens a stream, says.

        Raises:
            ConnectionBroken: it cannot be decoded.
            StreamFault: it is no request.
        """
        known = self.known(block)
        if known is not None:
            return known
        head = request_head(self.fields(block))
        request = Request(head, self._route(head))
        # A block that shrinks the table to nothing does so before its first field.
        if self.is_stateless and len(block) <= _REMEMBERED_BYTES:
            if len(self._known) >= _REMEMBERED_BLOCKS:
                del self._known[next(iter(self._known))]
            self._known[block] = request
        return request

    def fields(self, block: bytes) -> Fields:
        """The fields of `block`, not judged; its effect on later blocks is taken in.

        Raises:
            ConnectionBroken: it cannot be decoded.
        """
        try:
            found = self._decoder.decode(block, raw=True)
        except OversizedHeaderListError as error:
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, "too many headers") from error
        except (HPACKError, IndexError) as error:
            raise ConnectionBroken(ErrorCode.COMPRESSION_ERROR, "unreadable headers") from error
        self.is_stateless = self._decoder.header_table_size == 0
        return tuple((bytes(name), bytes(value)) for name, value in found)


class Block:
    """A header block of which more is to come; `flags` are those of its first frame."""

    __slots__ = ("_left", "_parts", "flags", "stream_id")

    def __init__(self, stream_id: int, flags: int, part: bytes, *, limit: int) -> None:
        self.stream_id = stream_id
        self.flags = flags
        self._parts = [part]
        self._left = limit - len(part)

    def add(self, part: bytes) -> None:
        """The block goes on with `part`.

        Raises:
            ConnectionBroken: it is larger than the limit.
        """
        # A frame counts for more than its bytes, since many of them may be empty.
        self._left -= len(part) + HEAD_BYTES
        if self._left < 0:
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, "too large a header block")
        self._parts.append(part)

    def joined(self) -> bytes:
        """All of the block."""
        return b"".join(self._parts)


def request_head(fields: Fields) -> Head:
    """The request that `fields` describe.

    Raises:
        StreamFault: they break a rule of RFC 9113 section 8.
    """
    pseudo: dict[bytes, bytes] = {}
    regular: list[tuple[bytes, bytes]] = []
    for name, value in fields:
        if name[:1] == b":":
            if regular or name in pseudo or name not in _PSEUDO:
                raise _malformed("pseudo-header fields")
            if _BAD_VALUE.search(value):
                raise _malformed("a pseudo-header field's value")
            pseudo[name] = value
        else:
            _judge(name, value)
            regular.append((name, value))
    method = pseudo.get(b":method")
    path = pseudo.get(b":path", b"")
    scheme = pseudo.get(b":scheme", b"")
    authority = pseudo.get(b":authority", b"")
    if not method:
        raise _malformed("no method")
    if method == b"CONNECT":
        if path or scheme or not authority:
            raise _malformed("CONNECT")
    elif not path or not scheme:
        raise _malformed("no path or no scheme")
    hosts = {value for name, value in regular if name == b"host"}
    if authority and hosts - {authority}:
        raise _malformed("two hosts")
    return Head(method, scheme, path, authority, tuple(regular), _content_length(regular))


def judge_trailers(fields: Fields) -> None:
    """`fields` may end a message.

    Raises:
        StreamFault: they may not.
    """
    for name, value in fields:
        if name[:1] == b":":
            raise _malformed("a pseudo-header field in the trailers")
        _judge(name, value)


def literal_block(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A header block that needs no table and leaves none: the RFC's plainest form."""
    return b"".join(
        b"\x00" + _length(name) + name + _length(value) + value for name, value in fields
    )


def _length(text: bytes) -> bytes:
    """The length of a string in a header block, as an integer with a prefix of seven bits."""
    left = len(text)
    if left < 127:
        return bytes((left,))
    left -= 127
    octets = bytearray((127,))
    while left >= 128:
        octets.append(left & 0x7F | 0x80)
        left >>= 7
    octets.append(left)
    return bytes(octets)


def _judge(name: bytes, value: bytes) -> None:
    """The field may be in a message."""
    if not _NAME.fullmatch(name):
        raise _malformed("a field's name")
    if _BAD_VALUE.search(value):
        raise _malformed("a field's value")
    if name in _OF_THE_CONNECTION or (name == b"te" and value.lower() != b"trailers"):
        raise _malformed("a field of the connection")


def _content_length(fields: Iterable[tuple[bytes, bytes]]) -> int | None:
    """The length that the body is to have."""
    told = {value for name, value in fields if name == b"content-length"}
    if not told:
        return None
    text = told.pop()
    if told or not text.isdigit() or len(text) > 18:
        raise _malformed("content-length")
    return int(text)


def _malformed(what: str) -> StreamFault:
    return StreamFault(ErrorCode.PROTOCOL_ERROR, f"malformed: {what}")
