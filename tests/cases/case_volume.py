"""Requests by the thousand at little cost: fixed bytes, few connections, an engine of two lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from case_http1 import CHAT, Pair, head
from case_world import World

ANSWER: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
_END: Final = b"\r\n\r\n"


class _Answering(asyncio.Protocol):
    """Answers every request of a connection that has `mute` nowhere in it."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._held += data
        assert self._transport is not None
        # The bodies of the requests here are `{}`, which are whole when their head's segment is.
        while _END in self._held:
            start, _, rest = self._held.partition(_END)
            if len(rest) < 2:
                return
            self._held = rest[2:]
            if b"x-mute:" not in start:
                self._transport.write(ANSWER)


@asynccontextmanager
async def answering() -> AsyncIterator[str]:
    """The URL of an engine that answers everything with `{}`, and nothing that has `x-mute`."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Answering, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def request(*pairs: Pair) -> bytes:
    """A small POST."""
    return head("POST", CHAT, pairs, length=2) + b"{}"


class _Asking(asyncio.Protocol):
    """Sends the same requests in turn on one connection, each after the answer to the last."""

    def __init__(self, requests: Sequence[bytes], number: int) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.good = 0
        self._requests = requests
        self._left = number
        self._held = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._next()

    def data_received(self, data: bytes) -> None:
        self._held += data
        start, end, body = self._held.partition(_END)
        if not end or len(body) < 2:
            return
        if start.startswith(b"HTTP/1.1 200 ") and body == b"{}":
            self.good += 1
        self._held = b""
        self._next()

    def connection_lost(self, _error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def _next(self) -> None:
        assert self._transport is not None
        if self._left == 0:
            self._transport.close()
            return
        self._left -= 1
        self._transport.write(self._requests[self._left % len(self._requests)])


async def ask(world: World, number: int, requests: Sequence[bytes], *, clients: int = 20) -> int:
    """How many of `number` requests were answered with 200 and `{}`."""
    loop = asyncio.get_running_loop()
    listener = world.stack.config.listener
    asking: list[_Asking] = []
    for index in range(clients):
        share = number // clients + (index < number % clients)
        _, one = await loop.create_connection(
            lambda share=share: _Asking(requests, share),  # type: ignore[misc]  # this round's
            listener.host,
            listener.port,
        )
        asking.append(one)
    await asyncio.gather(*(one.done for one in asking))
    return sum(one.good for one in asking)
