"""A web server of one page on the protocol core, for tools that speak plain HTTP/2."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from extproc.serve.fastlane.connection import Connection
from extproc.serve.fastlane.frames import ErrorCode
from extproc.serve.fastlane.headers import Head, Request, literal_block
from extproc.serve.fastlane.settings import Settings
from extproc.serve.fastlane.streams import Stream

PAGE = b"x" * 2000
BLOCK = b"\x88" + literal_block([(b"content-type", b"text/plain")])


# h2spec compresses with a table of the default size, whatever it is told.
SETTINGS = Settings(max_streams=100, table_bytes=4096)


class Visit:
    """Takes a request and answers it with the page."""

    def __init__(self, connection: Connection[None], stream: Stream) -> None:
        self.connection = connection
        self.stream = stream

    def data(self, buffer: bytes, start: int, stop: int) -> None: ...

    def half_closed(self) -> None:
        self.connection.sender.headers(self.stream, BLOCK)
        self.connection.sender.data(self.stream, PAGE, ends=True)

    def written(self) -> None: ...

    def ended(self) -> None: ...

    def gone(self, code: ErrorCode) -> None: ...


class Pages:
    """Answers every request with the same page."""

    def route(self, head: Head) -> None: ...

    def begin(self, connection: Connection[None], stream: Stream, request: Request[None]) -> Visit:
        return Visit(connection, stream)


class Link(asyncio.Protocol):
    """Moves the bytes of one connection."""

    network: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.network = transport
        self.connection = Connection(Pages(), SETTINGS, now=0.0, wake=self.flush)
        self.flush()

    def data_received(self, data: bytes) -> None:
        self.connection.receive(data, 0.0)
        self.flush()

    def flush(self) -> None:
        more = True
        while more:
            self.network.write(self.connection.take())
            more = self.connection.written()
        if self.connection.is_over:
            self.network.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.connection.lost()


@asynccontextmanager
async def pages() -> AsyncIterator[int]:
    """The port on which the page is served."""
    server = await asyncio.get_running_loop().create_server(Link, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
