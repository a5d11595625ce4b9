"""A raw HTTP/2 client without TLS: trailers, resets and headers that no library would send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from case_http1 import SECONDS, Pair, Pairs, Reply, raw
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    InformationalResponseReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from h2.exceptions import StreamClosedError

# No limit of ours is ever in the way of an answer.
_WINDOW: Final = 2**24


@dataclass(slots=True)
class _Stream:
    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    trailers: list[tuple[str, str]] = field(default_factory=list)
    interim: list[int] = field(default_factory=list)
    body: list[bytes] = field(default_factory=list)
    is_over: bool = False
    is_reset: bool = False


class Http2:
    """One connection with any number of streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        config = H2Configuration(
            client_side=True,
            header_encoding=None,
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
            validate_inbound_headers=False,
        )
        self._connection = H2Connection(config)
        self._reader = reader
        self._writer = writer
        self._streams: dict[int, _Stream] = {}
        self._changed = asyncio.Condition()
        self._is_over = False
        self._connection.initiate_connection()
        self._connection.increment_flow_control_window(_WINDOW)
        self._reading = asyncio.create_task(self._read())

    async def ask(
        self,
        method: str,
        path: str,
        pairs: Pairs = (),
        body: bytes | None = None,
        *,
        trailers: Pairs | None = None,
        seconds: float = SECONDS,
    ) -> Reply:
        """The answer to one request; a body is JSON unless `pairs` say otherwise."""
        stream = await self.begin(
            method, path, pairs, ends=body is None and trailers is None, is_json=body is not None
        )
        if body is not None:
            await self.data(stream, body, ends=trailers is None)
        if trailers is not None:
            await self.trail(stream, trailers)
        return await self.answer(stream, seconds)

    async def begin(
        self,
        method: str,
        path: str,
        pairs: Pairs = (),
        *,
        ends: bool = False,
        is_json: bool = True,
    ) -> int:
        """A new stream, with its headers sent; they end it if `ends`."""
        listed: list[Pair] = [
            (":method", method),
            (":scheme", "http"),
            (":authority", "gateway"),
            (":path", path),
        ]
        given = list(pairs)
        if is_json and b"content-type" not in {raw(name) for name, _ in given}:
            listed.append(("content-type", "application/json"))
        number = self._connection.get_next_available_stream_id()
        self._streams[number] = _Stream()
        self._connection.send_headers(number, _encoded([*listed, *given]), end_stream=ends)
        self._connection.increment_flow_control_window(_WINDOW, number)
        await self._flush()
        return number

    async def data(self, stream: int, body: bytes, *, ends: bool = True) -> None:
        """The bytes are sent as the window allows; an early end of the stream is the end here."""
        left = memoryview(body)
        async with asyncio.timeout(SECONDS):
            while left:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._may_send(stream))
                if self._has_ended(stream):
                    return
                size = min(
                    len(left),
                    self._connection.local_flow_control_window(stream),
                    self._connection.max_outbound_frame_size,
                )
                self._connection.send_data(stream, bytes(left[:size]))
                left = left[size:]
                await self._flush()
        if ends and not self._has_ended(stream):
            self._connection.end_stream(stream)
            await self._flush()

    async def trail(self, stream: int, pairs: Pairs) -> None:
        """The trailers are sent, and end the request."""
        self._connection.send_headers(stream, _encoded(pairs), end_stream=True)
        await self._flush()

    async def reset(self, stream: int, code: ErrorCodes = ErrorCodes.CANCEL) -> None:
        """The stream is reset."""
        with suppress(StreamClosedError):  # the other side was quicker
            self._connection.reset_stream(stream, code)
        await self._flush()

    async def started(self, stream: int) -> Reply:
        """The answer's status and headers, as soon as they are there."""
        found = self._streams[stream]
        await self._until(lambda: bool(found.status) or found.is_over)
        return Reply(found.status, list(found.headers))

    async def heard(self, stream: int, count: int) -> None:
        """So many bytes of the answer's body have come."""
        found = self._streams[stream]
        await self._until(lambda: sum(map(len, found.body)) >= count)

    async def answer(self, stream: int, seconds: float = SECONDS) -> Reply:
        """The whole answer, or as far as it came."""
        found = self._streams[stream]
        await self._until(lambda: found.is_over, seconds)
        return Reply(
            found.status,
            found.headers,
            b"".join(found.body),
            tuple(found.interim),
            found.trailers,
            found.is_reset,
        )

    async def close(self) -> None:
        """The connection is closed, whatever was on it."""
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    def _may_send(self, stream: int) -> bool:
        return self._has_ended(stream) or self._connection.local_flow_control_window(stream) > 0

    def _has_ended(self, stream: int) -> bool:
        return self._is_over or self._streams[stream].is_over

    async def _until(self, holds: Callable[[], bool], seconds: float = SECONDS) -> None:
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(lambda: holds() or self._is_over)

    async def _flush(self) -> None:
        self._writer.write(self._connection.data_to_send())
        with suppress(OSError):
            await self._writer.drain()

    async def _read(self) -> None:
        try:
            while data := await self._received():
                events = self._connection.receive_data(data)
                async with self._changed:
                    for event in events:
                        self._take(event)
                    self._changed.notify_all()
                await self._flush()
        finally:
            async with self._changed:
                self._is_over = True
                for stream in self._streams.values():
                    stream.is_reset |= not stream.is_over
                    stream.is_over = True
                self._changed.notify_all()

    async def _received(self) -> bytes:
        try:
            return await self._reader.read(65_536)
        except OSError:
            return b""

    def _take(self, event: Event) -> None:
        match event:
            case ConnectionTerminated():
                self._is_over = True
            case ResponseReceived():
                stream = self._streams[event.stream_id]
                pairs = _decoded(event.headers)
                stream.status = int(dict(pairs)[":status"])
                stream.headers = pairs[1:]
            case InformationalResponseReceived():
                status = dict(_decoded(event.headers))[":status"]
                self._streams[event.stream_id].interim.append(int(status))
            case DataReceived():
                self._streams[event.stream_id].body.append(event.data)
                self._connection.acknowledge_received_data(
                    event.flow_controlled_length, event.stream_id
                )
            case TrailersReceived():
                self._streams[event.stream_id].trailers = _decoded(event.headers)
            case StreamEnded():
                self._streams[event.stream_id].is_over = True
            case StreamReset():
                stream = self._streams[event.stream_id]
                # An answer before the request's end is followed by a reset without an error.
                stream.is_reset = not stream.is_over
                stream.is_over = True
            case WindowUpdated():
                pass
            case _:
                pass


def _encoded(pairs: Pairs) -> list[tuple[bytes, bytes]]:
    return [(raw(name), raw(value)) for name, value in pairs]


def _decoded(pairs: object) -> list[tuple[str, str]]:
    assert isinstance(pairs, list)
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in pairs]
