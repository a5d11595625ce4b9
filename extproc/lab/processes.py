"""Child processes that end with us, and the ports that they need."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from extproc.errors import LlmgwError

# Runs in a Python of its own, between fork and exec: nothing may run in a fork of a process that
# has threads. 1 is PR_SET_PDEATHSIG, 9 is SIGKILL; the parent may have died before the call.
_TRAMPOLINE: Final = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""
_KEPT_LINES: Final = 200

# Linux gives connections ports from 32768 on, other systems from 49152 on.
_FIRST_PORT: Final = 20_000
_PORTS: Final = 12_000

Say = Callable[[str], None]


class ChildFailed(LlmgwError):  # noqa: N818 - reads as what it is at the place it is caught
    """A child process did not start, or ended; the text has its last lines."""


class Child:
    """One child process. Its output goes line by line to `say`; the last 200 lines are kept.

    It runs in a session of its own, so that Ctrl-C reaches it through us and in order; the kernel
    ends it when we die without having done so.
    """

    def __init__(self, name: str, command: Sequence[str], say: Say | None = None) -> None:
        self.name = name
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._command = tuple(command)
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The process id of the running child."""
        if self._process is None:
            raise ChildFailed(f"{self.name} is not running")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """The process runs; whether it is ready is another question."""
        self._process = await asyncio.create_subprocess_exec(
            *mortal(self._command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._reader = asyncio.create_task(self._read(self._process))

    async def until(self, is_ready: Callable[[], bool], seconds: float) -> None:
        """`is_ready` has become true.

        Raises:
            ChildFailed: the process ended first, or `seconds` have passed.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        while not is_ready():
            if not self.is_running:
                raise ChildFailed(self._failure("ended"))
            if asyncio.get_running_loop().time() > deadline:
                raise ChildFailed(self._failure(f"was not ready within {seconds:g} s"))
            await asyncio.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        """The signal has been sent, if the process still runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def stop(self, grace_seconds: float = 10.0) -> None:
        """The process has ended: by SIGTERM within the grace, by SIGKILL after it."""
        process = self._process
        if process is None:
            return
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), grace_seconds)
        except TimeoutError:
            self.send(signal.SIGKILL)
            await process.wait()
        await self._drained()

    async def kill(self) -> None:
        """The process is gone at once."""
        self.send(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()
        await self._drained()

    async def wait(self) -> int:
        """The exit status, once the process has ended."""
        if self._process is None:
            raise ChildFailed(f"{self.name} is not running")
        status = await self._process.wait()
        await self._drained()
        return status

    async def _drained(self) -> None:
        if self._reader is not None:
            await self._reader
            self._reader = None

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        stream = process.stdout
        while stream is not None:
            try:
                raw = await stream.readline()
            except ValueError:
                continue  # a line longer than the buffer; the next one starts after it
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip("\n")
            self.lines.append(line)
            if self._say is not None:
                self._say(line)

    def _failure(self, what: str) -> str:
        tail = "\n".join(self.lines)
        return f"{self.name} {what}; its last lines:\n{tail}"


def mortal(command: Sequence[str]) -> list[str]:
    """The command that runs `command` in its own place and is killed when this process is gone.

    Linux only; elsewhere it outlives us. The parent is the thread that starts it, so start it from
    one that lives as long as the process.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _TRAMPOLINE, str(os.getpid()), *command]


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nothing listens on at the moment.

    It is below those that the kernel gives to connections: until it is listened on, none of them
    takes it.
    """
    while True:
        port = _FIRST_PORT + secrets.randbelow(_PORTS)
        with contextlib.closing(socket.socket()) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
