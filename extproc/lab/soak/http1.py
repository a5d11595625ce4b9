"""A client on HTTP/1.1 that keeps its connection, or drops it where the plan says so."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Final, cast

from extproc.lab.soak.asking import Leaving, Plan, Result
from extproc.lab.wire import reset

# Longer than any trouble, with three attempts up to the header deadline.
ANSWER_SECONDS: Final = 30.0
_LAST_EVENT: Final = b"data: [DONE]\n\n"


class Http1:
    """One client; a connection is made whenever there is none."""

    def __init__(self, host: str, port: int, random: Random) -> None:
        self._host = host
        self._port = port
        self._random = random
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, plan: Plan) -> Result:
        """What came of one request."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        answer = _Answer()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._exchange(plan, answer)
        except (OSError, EOFError, TimeoutError, ValueError):
            answer.is_whole = False
            self.drop()
        return Result(
            plan,
            began,
            loop.time(),
            answer.status,
            answer.headers.get("x-llmgw-reason"),
            answer.headers.get("x-served-by"),
            is_whole=answer.is_whole,
            has_left=answer.has_left,
        )

    def drop(self, *, is_abrupt: bool = False) -> None:
        """The connection is gone, by a reset if `is_abrupt`."""
        writer, self._reader, self._writer = self._writer, None, None
        if writer is None:
            return
        if is_abrupt and not writer.is_closing():
            # That of uvloop is one by its methods, not by its class.
            reset(cast(asyncio.Transport, writer.transport))
        writer.close()

    async def _exchange(self, plan: Plan, answer: _Answer) -> None:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._reader, self._writer
        wire = _head(plan) + plan.body
        if plan.leaving is Leaving.UPLOADING:
            wire = wire[: -len(plan.body) // 2]
        writer.write(wire)
        await writer.drain()
        if plan.leaving in {Leaving.UPLOADING, Leaving.WAITING}:
            # The moment is what differs: before the service is asked, meanwhile, or after.
            await asyncio.sleep(self._random.uniform(0.0, 0.05))
            self._leave(answer)
            return
        text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = text.removesuffix("\r\n\r\n").split("\r\n")
        answer.status = int(first.split()[1])
        for line in lines:
            name, _, value = line.partition(":")
            answer.headers[name.lower()] = value.strip()
        if plan.leaving is Leaving.STARTED:
            self._leave(answer)
            return
        await self._body(plan, answer, reader)
        if answer.headers.get("connection") == "close":
            self.drop()

    async def _body(self, plan: Plan, answer: _Answer, reader: asyncio.StreamReader) -> None:
        if answer.headers.get("transfer-encoding") != "chunked":
            await reader.readexactly(int(answer.headers.get("content-length", "0")))
            return
        end = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            chunk = await reader.readexactly(size + 2)
            end = (end + chunk[:-2])[-len(_LAST_EVENT) :]
            if plan.leaving is not None:
                self._leave(answer)
                return
        await reader.readuntil(b"\r\n")
        if answer.status == 200 and plan.is_stream and end != _LAST_EVENT:
            answer.is_whole = False

    def _leave(self, answer: _Answer) -> None:
        answer.has_left = True
        self.drop(is_abrupt=self._random.random() < 0.5)


class _Answer:
    """What has come so far."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.is_whole = True
        self.has_left = False


def _head(plan: Plan) -> bytes:
    lines = [f"{plan.method} {plan.path} HTTP/1.1", "host: gateway"]
    lines += [f"{name}: {value}" for name, value in plan.headers]
    if plan.body:
        lines.append(f"content-length: {len(plan.body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
