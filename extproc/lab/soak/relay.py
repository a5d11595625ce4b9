"""A Unix socket in front of another, which can be lost and found again."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path


class Relay:
    """Carries connections from `path` to `target` while it is open."""

    def __init__(self, path: Path, target: Path) -> None:
        self._path = path
        self._target = target
        self._server: asyncio.Server | None = None
        self._carrying: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Connections are taken."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._take, self._path)

    async def lose(self) -> None:
        """Every connection is broken, and none is taken."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._path.unlink(missing_ok=True)
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            return
        self._carrying.add(task)
        try:
            with suppress(OSError):
                onward = await asyncio.open_unix_connection(self._target)
                try:
                    await _both(reader, writer, *onward)
                finally:
                    onward[1].close()
        except asyncio.CancelledError:
            pass  # lost on purpose; the stream server would log it as an error
        finally:
            self._carrying.discard(task)
            writer.transport.abort()


async def _both(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Bytes go both ways until either side ends."""
    ways = [
        asyncio.create_task(_copy(reader, far_writer)),
        asyncio.create_task(_copy(far_reader, writer)),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
