"""A raw HTTP/1.1 client: what is sent is sent as it is, and what comes back is shown as it came."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

import msgspec

from extproc.lab.wire import reset

SECONDS: Final = 10.0
CHAT: Final = "/v1/chat/completions"

Pair = tuple[str | bytes, str | bytes]
Pairs = Iterable[Pair]

_BODILESS: Final = frozenset({101, 204, 304})


class Framing(Enum):
    """How a body is delimited."""

    LENGTH = auto()
    CHUNKED = auto()


class Error(msgspec.Struct, forbid_unknown_fields=True):
    """The inside of OpenAI's error envelope."""

    message: str
    type: str
    param: str | None
    code: str | None


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    error: Error


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer as it came; header names are in lower case, values Latin-1.

    `cut` is true when the connection or stream ended before the answer did.
    """

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes = b""
    interim: tuple[int, ...] = ()
    trailers: Sequence[tuple[str, str]] = ()
    cut: bool = False

    def values(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value for key, value in self.headers if key == name]

    def header(self, name: str) -> str | None:
        """The value of a header that comes at most once."""
        found = self.values(name)
        assert len(found) <= 1, (name, found)
        return found[0] if found else None

    @property
    def served_by(self) -> str:
        """The engine that answered."""
        name = self.header("x-served-by")
        assert name, self
        return name

    @property
    def reason(self) -> str | None:
        """Why the gateway refused, None for an engine's own answer."""
        return self.header("x-llmgw-reason")

    @property
    def error(self) -> Error:
        """What is in OpenAI's error envelope; a body that is none is an error of the test."""
        assert self.header("content-type") == "application/json", self
        return msgspec.json.decode(self.body, type=_Envelope).error

    @property
    def anthropic_error(self) -> str:
        """The type of error in Anthropic's envelope."""
        assert self.header("content-type") == "application/json", self
        found = json.loads(self.body)
        assert found["type"] == "error", self
        kind = found["error"]["type"]
        assert isinstance(kind, str)
        return kind


def raw(text: str | bytes) -> bytes:
    """The bytes of a text in which each character is one byte."""
    return text if isinstance(text, bytes) else text.encode("latin-1")


def chunked(body: bytes, size: int = 16_384, trailers: Pairs = ()) -> bytes:
    """The body in chunks of `size` bytes, with its end and `trailers`."""
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return framed + b"0\r\n" + _lines(trailers) + b"\r\n"


def head(
    method: str,
    path: str,
    pairs: Pairs = (),
    *,
    length: int | None = None,
    framing: Framing = Framing.LENGTH,
) -> bytes:
    """The request line and headers; `length` None is a request without a body.

    A body is JSON unless `pairs` say otherwise.
    """
    own: list[Pair] = [("host", "gateway")]
    given = {raw(name).lower() for name, _ in pairs}
    if length is not None:
        if b"content-type" not in given:
            own.append(("content-type", "application/json"))
        if framing is Framing.CHUNKED:
            own.append(("transfer-encoding", "chunked"))
        else:
            own.append(("content-length", str(length)))
    return b"%b %b HTTP/1.1\r\n" % (raw(method), raw(path)) + _lines([*own, *pairs]) + b"\r\n"


def _lines(pairs: Pairs) -> bytes:
    return b"".join(b"%b: %b\r\n" % (raw(name), raw(value)) for name, value in pairs)


class Http1:
    """One connection, on which requests are made one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        """The bytes are on their way."""
        self._writer.write(data)
        await self._writer.drain()

    async def ask(
        self,
        method: str,
        path: str,
        pairs: Pairs = (),
        body: bytes | None = None,
        *,
        framing: Framing = Framing.LENGTH,
        seconds: float = SECONDS,
    ) -> Reply:
        """The answer to one request, whose body may be refused before all of it is sent."""
        listed = list(pairs)
        start = head(
            method, path, listed, length=None if body is None else len(body), framing=framing
        )
        wire = b"" if body is None else body if framing is Framing.LENGTH else chunked(body)
        return await self.exchange(start + wire, method, seconds)

    async def exchange(self, data: bytes, method: str = "POST", seconds: float = SECONDS) -> Reply:
        """The answer to the bytes of one request, read while they are still being sent."""
        sending = asyncio.create_task(self._try_to_send(data))
        try:
            return await self.answer(method, seconds)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def interim(self) -> int:
        """The status of the next head, which is to be an interim one."""
        async with asyncio.timeout(SECONDS):
            status, _ = await self._head()
        assert status < 200, status
        return status

    async def answer(self, method: str = "POST", seconds: float = SECONDS) -> Reply:
        """The next answer, in full or as far as it came."""
        async with asyncio.timeout(seconds):
            interim: list[int] = []
            status, headers = await self._head()
            while status < 200 and status != 101:
                interim.append(status)
                status, headers = await self._head()
            chunks: list[bytes] = []
            trailers: list[tuple[str, str]] = []
            is_cut = False
            try:
                if method != "HEAD" and status not in _BODILESS:
                    await self._body(dict(headers), chunks, trailers)
            except (OSError, EOFError):
                is_cut = True
            return Reply(status, headers, b"".join(chunks), tuple(interim), trailers, is_cut)

    async def start(self) -> Reply:
        """The next answer's status and headers; its body is read with `more`."""
        async with asyncio.timeout(SECONDS):
            status, headers = await self._head()
        return Reply(status, headers)

    async def rest_of(self, started: Reply, seconds: float = SECONDS) -> Reply:
        """The whole answer of which `start` gave the beginning."""
        chunks: list[bytes] = []
        async with asyncio.timeout(seconds):
            await self._body(dict(started.headers), chunks, [])
        return replace(started, body=b"".join(chunks))

    async def more(self, seconds: float = SECONDS) -> bytes:
        """Whatever bytes come next, chunk framing included; empty at the end."""
        async with asyncio.timeout(seconds):
            return await self._reader.read(65_536)

    async def until(self, mark: bytes, seconds: float = SECONDS) -> bytes:
        """All bytes up to and with `mark`."""
        found: list[bytes] = []
        async with asyncio.timeout(seconds):
            while True:
                try:
                    found.append(await self._reader.readuntil(mark))
                except asyncio.LimitOverrunError as full:  # a long stream, kept until now
                    found.append(await self._reader.readexactly(full.consumed))
                else:
                    return b"".join(found)

    def half_close(self) -> None:
        """Nothing more is sent: the other side sees the end."""
        self._writer.write_eof()

    def reset(self) -> None:
        """The other side gets a TCP reset."""
        transport = self._writer.transport
        assert isinstance(transport, asyncio.Transport)
        reset(transport)

    async def close(self) -> None:
        """The connection is closed, whatever was on it."""
        self._writer.close()
        with suppress(OSError):  # the other side may have been quicker
            await self._writer.wait_closed()

    async def _try_to_send(self, data: bytes) -> None:
        with suppress(OSError):  # an early answer may close the connection
            await self.send(data)

    async def _head(self) -> tuple[int, list[tuple[str, str]]]:
        text = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = text.removesuffix("\r\n\r\n").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        return int(first.split()[1]), [(name.lower(), value.strip()) for name, _, value in pairs]

    async def _body(
        self, headers: dict[str, str], chunks: list[bytes], trailers: list[tuple[str, str]]
    ) -> None:
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await self._reader.readuntil(b"\r\n"), 16):
                await self._exactly(size, chunks)
                await self._reader.readexactly(2)
            while line := (await self._reader.readuntil(b"\r\n")).strip():
                name, _, value = line.decode("latin-1").partition(":")
                trailers.append((name.lower(), value.strip()))
        elif "content-length" in headers:
            await self._exactly(int(headers["content-length"]), chunks)
        else:
            chunks.append(await self._reader.read())

    async def _exactly(self, size: int, chunks: list[bytes]) -> None:
        """So many bytes are in `chunks`, or those that came before the end."""
        while size:
            data = await self._reader.read(size)
            if not data:
                raise EOFError
            chunks.append(data)
            size -= len(data)
