"""Clients on HTTP/2 that share a connection; one that leaves resets its stream."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)
from h2.exceptions import ProtocolError

from extproc.lab.soak.asking import Leaving, Plan, Result
from extproc.lab.soak.http1 import ANSWER_SECONDS

_WINDOW: Final = 2**24


@dataclass(slots=True)
class _Stream:
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    is_over: bool = False
    is_cut: bool = False
    has_body: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Http2:
    """One connection for any number of requests at once; it is made anew when it is lost."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._dialling = asyncio.Lock()
        self._link: _Link | None = None

    async def ask(self, plan: Plan) -> Result:
        """What came of one request."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        stream = _Stream()
        has_left = False
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                link = await self._connected()
                has_left = await link.carry(plan, stream)
        except (OSError, TimeoutError, ProtocolError):
            stream.is_cut = True
        return Result(
            plan,
            began,
            loop.time(),
            stream.status,
            stream.headers.get("x-llmgw-reason"),
            stream.headers.get("x-served-by"),
            is_whole=not stream.is_cut,
            has_left=has_left,
        )

    def drop(self) -> None:
        """The connection is gone."""
        if self._link is not None:
            self._link.close()
            self._link = None

    async def _connected(self) -> _Link:
        async with self._dialling:
            if self._link is None or self._link.is_lost:
                loop = asyncio.get_running_loop()
                _, self._link = await loop.create_connection(_Link, self._host, self._port)
            return self._link


class _Link(asyncio.Protocol):
    """One connection and the streams on it."""

    def __init__(self) -> None:
        self.is_lost = False
        self._streams: dict[int, _Stream] = {}
        self._transport: asyncio.Transport | None = None
        config = H2Configuration(client_side=True, header_encoding="utf-8")
        self._connection = H2Connection(config)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The preface is on its way."""
        # That of uvloop is one by its methods, not by its class.
        self._transport = cast(asyncio.Transport, transport)
        self._connection.initiate_connection()
        self._connection.increment_flow_control_window(_WINDOW)
        self._flush()

    def data_received(self, data: bytes) -> None:
        """What came is where its stream is."""
        try:
            events = self._connection.receive_data(data)
        except ProtocolError:
            self.close()
            return
        for event in events:
            self._take(event)
        self._flush()

    def connection_lost(self, _error: Exception | None) -> None:
        """Every stream is cut."""
        self.is_lost = True
        for stream in self._streams.values():
            stream.is_cut = stream.is_over = True
            stream.changed.set()
        self._streams.clear()

    def close(self) -> None:
        """The connection is closed, whatever is on it."""
        self.is_lost = True
        if self._transport is not None:
            self._transport.close()

    async def carry(self, plan: Plan, stream: _Stream) -> bool:
        """The answer is in `stream`; whether the client has left before its end."""
        number = self._connection.get_next_available_stream_id()
        self._streams[number] = stream
        pairs = [
            (":method", plan.method),
            (":scheme", "http"),
            (":authority", "gateway"),
            (":path", plan.path),
            *plan.headers,
            *([("content-length", str(len(plan.body)))] if plan.body else []),
        ]
        self._connection.send_headers(number, pairs, end_stream=not plan.body)
        if plan.body:
            is_partial = plan.leaving is Leaving.UPLOADING
            body = plan.body[: len(plan.body) // 2] if is_partial else plan.body
            self._connection.send_data(number, body, end_stream=not is_partial)
        self._flush()
        if plan.leaving in {Leaving.UPLOADING, Leaving.WAITING}:
            await asyncio.sleep(0.02)
            return self._leave(number)
        while not stream.is_over:
            await stream.changed.wait()
            stream.changed.clear()
            if _has_come(stream, plan.leaving):
                return self._leave(number)
        return False

    def _leave(self, number: int) -> bool:
        """The stream is reset."""
        self._streams.pop(number, None)
        with suppress(ProtocolError):  # the other side was quicker
            self._connection.reset_stream(number, ErrorCodes.CANCEL)
        self._flush()
        return True

    def _flush(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._connection.data_to_send())

    def _take(self, event: Event) -> None:
        number = getattr(event, "stream_id", None)
        if isinstance(event, DataReceived):
            with suppress(ProtocolError):
                self._connection.acknowledge_received_data(
                    event.flow_controlled_length, event.stream_id
                )
        stream = self._streams.get(number) if isinstance(number, int) else None
        if stream is None:
            return
        match event:
            case ResponseReceived():
                stream.headers = {str(name): str(value) for name, value in event.headers}
                stream.status = int(stream.headers[":status"])
            case DataReceived():
                stream.has_body = True
            case StreamEnded() | StreamReset():
                stream.is_cut = isinstance(event, StreamReset)
                stream.is_over = True
                self._streams.pop(event.stream_id, None)
            case _:
                return
        stream.changed.set()


def _has_come(stream: _Stream, leaving: Leaving | None) -> bool:
    """Whether the moment is there at which the client leaves."""
    if leaving is Leaving.STARTED:
        return stream.status is not None
    return leaving is Leaving.STREAMING and stream.has_body
