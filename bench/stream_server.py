"""An engine that only streams: 500 chunks, one every few milliseconds, at little CPU of its own.

`python stream_server.py PORT CHUNKS MILLISECONDS HOST...` prints `ready` and serves until it is
told to stop. A body with `"stream":true` is answered with a stream, any other one and every GET
with a chat completion at once.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Final, cast

import load
import uvloop

_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: "
_JSON: Final = b"application/json\r\ncontent-length: %d\r\n\r\n%s"
_STREAM: Final = b"text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_LENGTH: Final = b"\r\ncontent-length:"


def event(delta: str, reason: str = "null") -> bytes:
    """One event of a chat completion's stream, as a chunk of HTTP/1.1."""
    data = (
        '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"bench",'
        f'"choices":[{{"index":0,"delta":{delta},"finish_reason":{reason}}}]}}'
    )
    return chunk(f"data: {data}\n\n".encode())


def chunk(data: bytes) -> bytes:
    """A chunk of HTTP/1.1."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def word(number: int) -> str:
    """What chunk `number` says: routers may end a stream that repeats itself."""
    return f"word-{number} "


_END: Final = event("{}", '"stop"') + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Engine(asyncio.Protocol):
    """One connection: requests one after the other, none before the last one's answer."""

    def __init__(self, chunks: Sequence[bytes], interval_seconds: float) -> None:
        self._chunks = chunks
        self._interval_seconds = interval_seconds
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is kept."""
        self._transport = cast("asyncio.Transport", transport)  # a TCP connection's is one

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """The stream, if there was one, ends with its connection."""
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """A request that is complete is being answered."""
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        _, found, rest = head.lower().partition(_LENGTH)
        if len(body) < (int(rest.partition(b"\r\n")[0]) if found else 0):
            return
        self._received = b""
        if b'"stream":true' in body.replace(b" ", b""):
            self._write(_HEAD + _STREAM)
            self._next(0, self._loop.time() + self._interval_seconds)
        else:
            answer = (load.MODELS if b" /v1/models " in head else load.ANSWER).encode()
            self._write(_HEAD + _JSON % (len(answer), answer))

    def _next(self, sent: int, due: float) -> None:
        self._loop.call_at(due, self._send, sent, due)

    def _send(self, sent: int, due: float) -> None:
        if self._transport is None:
            return
        if sent == len(self._chunks):
            self._write(_END)
            return
        self._write(self._chunks[sent])
        self._next(sent + 1, due + self._interval_seconds)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


async def main(port: int, chunks: int, milliseconds: float, hosts: list[str]) -> None:
    """The engine has served until the process was ended."""
    loop = asyncio.get_running_loop()
    said = [event(f'{{"content":"{word(number)}"}}') for number in range(chunks)]
    server = await loop.create_server(
        lambda: Engine(said, milliseconds / 1e3), hosts, port, backlog=1024
    )
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
