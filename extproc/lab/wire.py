"""Ways to put an answer on the wire, and to leave a connection badly.

`Answer` is an ordinary one; `RawAnswer` writes what the HTTP library would not: trailers, or a
body that ends with the connection.
"""

from __future__ import annotations

import asyncio
import http
import socket
import struct
from collections.abc import Mapping
from typing import Protocol, cast

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter


class Reply(Protocol):
    """One answer: a start, bytes, an end, and what the HTTP library is then given."""

    response: web.StreamResponse

    async def start(self, status: int, headers: Mapping[str, str], length: int | None) -> None:
        """The headers are sent; `length` None is a body of unknown length."""
        ...

    async def write(self, data: bytes) -> None:
        """The bytes are on their way.

        Raises:
            ConnectionError: the client is gone.
        """
        ...

    async def finish(self) -> None:
        """The answer is complete."""
        ...


class Answer:
    """An answer by the HTTP library, on a connection that goes on afterwards."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self.response = web.StreamResponse()

    async def start(self, status: int, headers: Mapping[str, str], length: int | None) -> None:
        """The headers are sent."""
        self.response = web.StreamResponse(status=status, headers=headers)
        if length is not None:
            self.response.content_length = length
        await self.response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        """The bytes are on their way."""
        await self.response.write(data)

    async def finish(self) -> None:
        """The answer is complete."""
        await self.response.write_eof()


class RawAnswer:
    """An answer in hand-written HTTP/1.1, on a connection that ends with it.

    With trailers it is chunked, without it ends when the connection does.
    """

    def __init__(self, transport: asyncio.Transport, trailers: Mapping[str, str] | None) -> None:
        self._transport = transport
        self._trailers = trailers
        self.response: web.StreamResponse = Spent()

    async def start(self, status: int, headers: Mapping[str, str], length: int | None) -> None:
        """The headers are sent; the length is not."""
        del length
        framing = {"connection": "close"}
        if self._trailers is not None:
            framing = {"transfer-encoding": "chunked", "trailer": ", ".join(self._trailers)}
        self._send(head(status, {**headers, **framing}))

    async def write(self, data: bytes) -> None:
        """The bytes are on their way."""
        if data:
            chunked = self._trailers is not None
            self._send(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)

    async def finish(self) -> None:
        """The answer is complete, and the connection with it."""
        if self._trailers is not None:
            self._send(b"0\r\n" + _lines(self._trailers) + b"\r\n")
        self._transport.close()

    def _send(self, data: bytes) -> None:
        if self._transport.is_closing():
            raise ConnectionResetError("the client is gone")
        self._transport.write(data)


class Spent(web.StreamResponse):
    """What the HTTP library is given when there is nothing left for it to send."""

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Nothing is sent."""
        del request
        self.force_close()
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is sent."""
        del data


class Slammed(asyncio.Protocol):
    """A connection that is reset as soon as it is there."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is reset."""
        # By type neither loop's transports say so; a TCP connection's always is one.
        reset(cast(asyncio.Transport, transport))


def head(status: int, headers: Mapping[str, str]) -> bytes:
    """A status line and headers."""
    phrase = http.HTTPStatus(status).phrase if status in _STATUSES else ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode() + _lines(headers) + b"\r\n"


def reset(transport: asyncio.Transport) -> None:
    """The connection is gone, and its peer gets a TCP reset."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        linger = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    transport.abort()


def _lines(headers: Mapping[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")


_STATUSES = frozenset(status.value for status in http.HTTPStatus)
