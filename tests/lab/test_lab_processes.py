"""Child processes: started, watched, stopped, and never left behind."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from extproc.lab.processes import Child, ChildFailed, free_port

PATIENT = "import signal, time; print('up', flush=True); time.sleep(60)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('up', flush=True); time.sleep(60)"
)


def is_alive(pid: int) -> bool:
    """Whether a process with that id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def child(code: str, said: list[str] | None = None) -> Child:
    """A Python child that runs `code`."""
    return Child("child", [sys.executable, "-c", code], None if said is None else said.append)


async def test_a_child_is_started_heard_and_stopped() -> None:
    """Its lines arrive as it writes them, and nothing is left."""
    said: list[str] = []
    one = child(PATIENT, said)
    await one.start()
    await one.until(lambda: said == ["up"], 20)
    pid = one.pid
    running_before = one.is_running
    await one.stop()
    assert (running_before, one.is_running) == (True, False)
    assert not is_alive(pid)


async def test_a_child_that_ignores_the_request_is_killed() -> None:
    """The grace is over and so is the child."""
    one = child(STUBBORN)
    await one.start()
    await one.until(lambda: bool(one.lines), 20)
    await one.stop(grace_seconds=0.05)
    assert not one.is_running


async def test_a_stopped_child_can_be_stopped_again_and_started_anew() -> None:
    """Stopping twice is stopping once."""
    one = child(PATIENT)
    await one.stop()
    for _ in range(2):
        await one.start()
        await one.stop()
        await one.stop()
        assert not one.is_running


async def test_a_child_that_ends_early_is_told_with_its_last_words() -> None:
    """The error has what the child wrote."""
    one = child("import sys; print('no such thing'); sys.exit(3)")
    await one.start()
    with pytest.raises(ChildFailed, match="no such thing"):
        await one.until(lambda: False, 20)
    assert await one.wait() == 3


async def test_a_child_that_never_gets_ready_is_told() -> None:
    """Waiting has an end."""
    one = child(PATIENT)
    await one.start()
    with pytest.raises(ChildFailed, match=r"not ready within 0\.05 s"):
        await one.until(lambda: False, 0.05)
    await one.kill()


async def test_a_frozen_child_can_still_be_stopped() -> None:
    """SIGSTOP does not keep it."""
    one = child(PATIENT)
    await one.start()
    await one.until(lambda: bool(one.lines), 20)
    one.send(signal.SIGSTOP)
    await one.stop()
    assert not one.is_running


def test_a_free_port_can_be_listened_on() -> None:
    """The port that is given is free."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))


def test_no_connection_is_given_a_free_port() -> None:
    """It is outside of the kernel's range, so that it is still free when a child gets to it."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 < free_port() < first for _ in range(100))
