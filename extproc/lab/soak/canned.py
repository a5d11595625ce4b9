"""An engine that costs next to nothing: one protocol, two answers, no clock."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final, Self, cast

from extproc.lab.soak.asking import MUTE

_END: Final = b"\r\n\r\n"
_EVENT: Final = (
    b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    b'[{"index":0,"delta":{"content":"word "},"finish_reason":null}]}\n\n'
)
_DONE: Final = b"data: [DONE]\n\n"
_ANSWER: Final = (
    b'{"id":"1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"word"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3}}'
)


@dataclass(slots=True)
class _Request:
    """What the answer depends on, and how much of the body is still to come."""

    left: int
    is_stream: bool = False
    is_mute: bool = False


class Canned:
    """Serves on a free port while entered; a held one answers nothing until it is released."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests = 0
        self._server: asyncio.Server | None = None
        self._held: list[_Connection] = []
        self._is_holding = False

    @property
    def url(self) -> str:
        """Where it serves."""
        if self._server is None:
            raise RuntimeError(f"{self.name} is not started")
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def hold(self) -> None:
        """Requests wait for their answers."""
        self._is_holding = True

    def release(self) -> None:
        """What waited is answered, and everything after it at once."""
        self._is_holding = False
        waiting, self._held = self._held, []
        for one in waiting:
            one.answer()

    def take(self, connection: _Connection) -> None:
        """A request is there: it is answered, unless the engine is held."""
        self.requests += 1
        if self._is_holding:
            self._held.append(connection)
        else:
            connection.answer()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self), "127.0.0.1", 0, backlog=1024
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


@dataclass(slots=True, weakref_slot=True)
class _Connection(asyncio.Protocol):
    """One connection of Envoy's, with one request at a time."""

    engine: Canned
    _buffer: bytearray = field(default_factory=bytearray)
    _transport: asyncio.Transport | None = None
    _request: _Request | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        # That of uvloop is one by its methods, not by its class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """A whole request is passed on to the engine."""
        self._buffer += data
        if self._request is None:
            end = self._buffer.find(_END)
            if end < 0:
                return
            self._request = _read(bytes(self._buffer[:end]))
            del self._buffer[: end + len(_END)]
        if len(self._buffer) < self._request.left:
            return
        body = bytes(self._buffer[: self._request.left])
        del self._buffer[: self._request.left]
        self._request.is_stream = b'"stream": true' in body
        self.engine.take(self)

    def answer(self) -> None:
        """The answer is on its way; a mute one stops at once, or after its first event."""
        request, self._request = self._request, None
        if request is None or self._transport is None or self._transport.is_closing():
            return
        start = b"HTTP/1.1 200 OK\r\nx-served-by: %b\r\n" % self.engine.name.encode()
        if not request.is_stream:
            if not request.is_mute:
                head = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
                self._transport.write(start + head % len(_ANSWER) + _ANSWER)
            return
        start += b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        if request.is_mute:
            self._transport.write(start + _chunk(_EVENT))
            return
        self._transport.write(start + _chunk(_EVENT) + _chunk(_EVENT + _DONE) + b"0\r\n\r\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _read(head: bytes) -> _Request:
    """What a request's head says; Envoy writes names in lower case."""
    length = 0
    is_mute = False
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name == b"content-length":
            length = int(value)
        elif name == MUTE.encode():
            is_mute = True
    return _Request(length, is_mute=is_mute)
