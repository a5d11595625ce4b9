"""Crowds of clients that begin a request and leave before its end, each in one of several ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from enum import StrEnum
from typing import Protocol

from case_http1 import CHAT, Http1, Pair, head
from case_http2 import Http2
from case_world import World


class Way(StrEnum):
    """How a client leaves."""

    FIN = "fin"
    RST = "rst"
    H2_RESET = "h2-reset"
    H2_FIN = "h2-fin"  # with the connection, all of its requests at once


class Crowd(Protocol):
    """Clients with a request each."""

    async def started(self) -> None:
        """Each has the headers of its answer."""
        ...

    async def heard(self) -> None:
        """Each has some of its answer's body."""
        ...

    async def leave(self) -> None:
        """All are gone."""
        ...


class _Http1Crowd:
    def __init__(self, connections: list[Http1], *, is_abrupt: bool) -> None:
        self._connections = connections
        self._is_abrupt = is_abrupt

    async def started(self) -> None:
        replies = await asyncio.gather(*(one.start() for one in self._connections))
        assert {reply.status for reply in replies} == {200}

    async def heard(self) -> None:
        await asyncio.gather(*(one.until(b"data: ") for one in self._connections))

    async def leave(self) -> None:
        for connection in self._connections:
            if self._is_abrupt:
                connection.reset()
            else:
                await connection.close()


class _Http2Crowd:
    def __init__(self, connection: Http2, streams: list[int], *, is_closing: bool) -> None:
        self._connection = connection
        self._streams = streams
        self._is_closing = is_closing

    async def started(self) -> None:
        replies = await asyncio.gather(*(self._connection.started(one) for one in self._streams))
        assert {reply.status for reply in replies} == {200}

    async def heard(self) -> None:
        await asyncio.gather(*(self._connection.heard(one, 1) for one in self._streams))

    async def leave(self) -> None:
        if self._is_closing:
            await self._connection.close()
            return
        for stream in self._streams:
            await self._connection.reset(stream)


@asynccontextmanager
async def crowd(
    world: World,
    way: Way,
    number: int,
    body: bytes,
    pairs: Iterable[Pair] = (),
    *,
    sent: int | None = None,
    path: str = CHAT,
) -> AsyncIterator[Crowd]:
    """So many clients have sent a request; of its body the first `sent` bytes, None for all."""
    listed = list(pairs)
    part = body if sent is None else body[:sent]
    async with AsyncExitStack() as exits:
        if way in {Way.FIN, Way.RST}:
            connections = [await exits.enter_async_context(world.http1()) for _ in range(number)]
            for connection in connections:
                await connection.send(head("POST", path, listed, length=len(body)) + part)
            yield _Http1Crowd(connections, is_abrupt=way is Way.RST)
            return
        connection2 = await exits.enter_async_context(world.http2())
        streams = []
        for _ in range(number):
            stream = await connection2.begin("POST", path, listed)
            await connection2.data(stream, part, ends=sent is None)
            streams.append(stream)
        yield _Http2Crowd(connection2, streams, is_closing=way is Way.H2_FIN)
