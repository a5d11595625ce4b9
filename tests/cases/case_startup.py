"""Code that the service runs before its own: a wall clock that jumps, a name that never resolves.

The service is another process, so it is reached by Python's `sitecustomize`, which its interpreter
imports first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_WALL_CLOCK = """
import time

real, real_ns = time.time, time.time_ns

def shift():
    with open({file!r}) as file:
        return int(file.read() or 0)

time.time = lambda: real() + shift()
time.time_ns = lambda: real_ns() + shift() * 1_000_000_000
"""
_NAME_SERVICE = """
import socket, threading

real = socket.getaddrinfo

def getaddrinfo(host, *rest, **named):
    if host == {host!r}:
        threading.Event().wait()
    return real(host, *rest, **named)

socket.getaddrinfo = getaddrinfo
"""


@contextmanager
def _first(folder: Path, code: str) -> Iterator[None]:
    """Every Python that is started meanwhile runs `code` before anything else."""
    (folder / "sitecustomize.py").write_text(code)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{before}" if before else str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@dataclass(frozen=True, slots=True)
class WallClock:
    """The wall clock of the processes that were started under it."""

    file: Path

    def jump(self, seconds: int) -> None:
        """It is so far from the true one, from now on."""
        # Never seen empty: the new text takes the old one's place.
        fresh = self.file.with_suffix(".new")
        fresh.write_text(str(seconds))
        fresh.replace(self.file)


@contextmanager
def wall_clock(folder: Path) -> Iterator[WallClock]:
    """A wall clock for every Python that is started meanwhile; monotonic time is the true one."""
    clock = WallClock(folder / "seconds")
    clock.jump(0)
    with _first(folder, _WALL_CLOCK.format(file=str(clock.file))):
        yield clock


@contextmanager
def unresolvable(folder: Path, host: str) -> Iterator[None]:
    """No Python that is started meanwhile ever gets an answer about this host's address."""
    with _first(folder, _NAME_SERVICE.format(host=host)):
        yield
