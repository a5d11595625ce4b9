"""A small HTTP/1.1 client that shows what is on the wire, for the tests of simulated engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from extproc.lab.engine_http import LabEngine

SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer as it came; `error` is how the connection ended if not well."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    error: type[Exception] | None = None
    interim: tuple[int, ...] = ()
    trailers: Mapping[str, str] = field(default_factory=dict)

    @property
    def json(self) -> Any:
        """The body, which is JSON of whatever shape."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The JSON of every data event, the end mark left out."""
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]


class Connection:
    """One connection, on which requests are made one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send_head(
        self, method: str, path: str, headers: Mapping[str, str], length: int | None
    ) -> None:
        """The request line and headers are sent."""
        own = {"host": "lab"} | ({} if length is None else {"content-length": str(length)})
        lines = "".join(f"{name}: {value}\r\n" for name, value in {**own, **headers}.items())
        self.writer.write(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1"))

    async def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """The answer to one request."""
        self.send_head(method, path, headers or {}, None if body is None else len(body))
        if body:
            self.writer.write(body)
        return await self.answer(method)

    async def answer(self, method: str = "POST") -> Reply:
        """The next answer on the connection."""
        async with asyncio.timeout(SECONDS):
            interim: list[int] = []
            status, headers = await self.head()
            while status < 200 and status != 101:
                interim.append(status)
                status, headers = await self.head()
            chunks: list[bytes] = []
            trailers: dict[str, str] = {}
            error: type[Exception] | None = None
            try:
                if method != "HEAD" and status not in {101, 204, 304}:
                    await self._body(headers, chunks, trailers)
            except (OSError, EOFError) as problem:
                error = type(problem)
                chunks.append(getattr(problem, "partial", b""))
            return Reply(status, headers, b"".join(chunks), error, tuple(interim), trailers)

    async def head(self) -> tuple[int, dict[str, str]]:
        """The next status and headers."""
        raw = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = raw.strip().split("\r\n")
        pairs = (line.partition(":") for line in lines)
        return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}

    async def _body(
        self, headers: Mapping[str, str], chunks: list[bytes], trailers: dict[str, str]
    ) -> None:
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                chunks.append(await self.reader.readexactly(size))
                await self.reader.readexactly(2)
            while line := (await self.reader.readuntil(b"\r\n")).strip():
                name, _, value = line.decode().partition(":")
                trailers[name] = value.strip()
        elif "content-length" in headers:
            chunks.append(await self.reader.readexactly(int(headers["content-length"])))
        else:
            chunks.append(await self.reader.read())

    async def close(self) -> None:
        """The connection is closed."""
        self.writer.close()
        with suppress(OSError):  # the peer may have been quicker
            await self.writer.wait_closed()


@asynccontextmanager
async def connected(engine: LabEngine, port: int | None = None) -> AsyncIterator[Connection]:
    """A connection to the engine."""
    reader, writer = await asyncio.open_connection(engine.host, port or engine.port)
    connection = Connection(reader, writer)
    try:
        yield connection
    finally:
        await connection.close()


async def call(
    engine: LabEngine,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    port: int | None = None,
) -> Reply:
    """The answer to one request on a connection of its own."""
    async with connected(engine, port) as connection:
        return await connection.call(method, path, body, headers)


def chat(**more: object) -> bytes:
    """The body of a chat completion for model "m"."""
    messages = [{"role": "user", "content": "hello"}]
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


CHAT = "/v1/chat/completions"
