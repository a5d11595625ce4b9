"""When the service takes requests and when it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

import pytest

from extproc.serve.lifecycle import Lifecycle, State, Timing, heeding, run

TIMING = Timing(notice_seconds=2.0, drain_seconds=20.0)


def test_it_starts_serves_drains_and_stops() -> None:
    """Each state says for itself whether the process lives and is ready."""
    lifecycle = Lifecycle(TIMING)
    seen: list[tuple[State, bool, bool]] = []

    def look() -> None:
        seen.append((lifecycle.state, lifecycle.is_alive, lifecycle.is_ready))

    look()
    lifecycle.watch(look)
    lifecycle.started()
    lifecycle.terminate(100.0)
    lifecycle.drained()
    assert seen == [
        (State.STARTING, True, False),
        (State.READY, True, True),
        (State.DRAINING, True, False),
        (State.STOPPED, False, False),
    ]


def test_requests_are_taken_for_the_notice_and_drain_for_the_grace() -> None:
    """The moments of an end follow from its first request."""
    lifecycle = Lifecycle(TIMING)
    lifecycle.started()
    assert (lifecycle.closes_at, lifecycle.grace_seconds(100.0)) == (None, 0)
    lifecycle.terminate(100.0)
    assert lifecycle.closes_at == 102.0
    assert lifecycle.grace_seconds(102.0) == 20.0
    assert lifecycle.grace_seconds(112.0) == 10.0
    assert lifecycle.grace_seconds(200.0) == 0.0


def test_a_second_request_stops_at_once() -> None:
    """Whoever asks twice does not want to wait."""
    lifecycle = Lifecycle(TIMING)
    lifecycle.started()
    lifecycle.terminate(100.0)
    lifecycle.terminate(101.0)
    assert lifecycle.state is State.STOPPED
    assert lifecycle.grace_seconds(101.0) == 0
    lifecycle.terminate(102.0)
    lifecycle.drained()
    assert lifecycle.state is State.STOPPED


def test_an_end_during_the_start_is_at_once() -> None:
    """Nobody was told that it is ready, so nobody has to move away; it never becomes ready."""
    lifecycle = Lifecycle(TIMING)
    lifecycle.terminate(100.0)
    lifecycle.started()
    assert lifecycle.state is State.STOPPED


def test_a_watcher_can_leave() -> None:
    """After leaving, twice if need be, it hears nothing."""
    lifecycle = Lifecycle(TIMING)
    seen: list[State] = []
    forget = lifecycle.watch(lambda: seen.append(lifecycle.state))
    forget()
    forget()
    lifecycle.started()
    assert not seen


class Server:
    """Records how it was stopped; a drain takes until it is released, or as long as its grace."""

    def __init__(self) -> None:
        self.graces: list[float] = []
        self.released = asyncio.Event()
        self.draining = asyncio.Event()

    async def stop(self, grace_seconds: float) -> None:
        self.graces.append(grace_seconds)
        self.draining.set()
        try:
            await asyncio.wait_for(self.released.wait(), grace_seconds)
        except TimeoutError:
            self.released.set()


def signalled(number: int = signal.SIGTERM) -> None:
    """The process gets a signal."""
    os.kill(os.getpid(), number)


async def heed(lifecycle: Lifecycle, server: Server) -> None:
    """The shell, as the service has it."""
    with heeding(lifecycle, time.monotonic):
        await run(lifecycle, server.stop, time.monotonic)


async def ended(lifecycle: Lifecycle, server: Server, act: Callable[[], None]) -> float:
    """How long the shell took after `act`."""
    task = asyncio.ensure_future(heed(lifecycle, server))
    await asyncio.sleep(0)
    began = time.monotonic()
    act()
    await asyncio.wait_for(task, 10)
    return time.monotonic() - began


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_gives_notice_then_drains(number: int) -> None:
    """It is not ready at once, serves on for the notice, and ends when the server has drained."""
    lifecycle = Lifecycle(Timing(notice_seconds=0.15, drain_seconds=5.0))
    lifecycle.started()
    server = Server()
    server.released.set()
    seconds = await ended(lifecycle, server, lambda: signalled(number))
    assert 0.15 <= seconds < 3
    assert len(server.graces) == 1
    assert 4 < server.graces[0] <= 5
    assert lifecycle.state is State.STOPPED


async def test_readiness_goes_before_the_server_does() -> None:
    """During the notice the service is alive, not ready, and still serving."""
    lifecycle = Lifecycle(Timing(notice_seconds=0.15, drain_seconds=5.0))
    lifecycle.started()
    server = Server()
    changed = asyncio.Event()
    lifecycle.watch(changed.set)
    task = asyncio.ensure_future(heed(lifecycle, server))
    await asyncio.sleep(0)
    signalled()
    await changed.wait()
    assert lifecycle.state is State.DRAINING
    assert not server.graces
    await server.draining.wait()
    assert lifecycle.is_alive
    server.released.set()
    await asyncio.wait_for(task, 5)


async def test_a_drain_has_an_end() -> None:
    """A server that never empties is stopped when the grace is over."""
    lifecycle = Lifecycle(Timing(notice_seconds=0.0, drain_seconds=0.2))
    lifecycle.started()
    server = Server()
    assert await ended(lifecycle, server, signalled) < 3
    assert len(server.graces) == 1


async def test_a_second_signal_during_the_drain_ends_it() -> None:
    """The server is stopped again, without any grace."""
    lifecycle = Lifecycle(Timing(notice_seconds=0.0, drain_seconds=60.0))
    lifecycle.started()
    server = Server()
    task = asyncio.ensure_future(heed(lifecycle, server))
    await asyncio.sleep(0)
    signalled()
    await server.draining.wait()
    signalled()
    await asyncio.wait_for(task, 5)
    assert len(server.graces) == 2
    assert server.graces[1] == 0


async def test_a_second_signal_during_the_notice_ends_it() -> None:
    """Neither notice nor grace is waited for."""
    lifecycle = Lifecycle(Timing(notice_seconds=60.0, drain_seconds=60.0))
    lifecycle.started()
    server = Server()

    def twice() -> None:
        signalled()
        lifecycle.terminate(time.monotonic())

    assert await ended(lifecycle, server, twice) < 3
    assert server.graces == [0]


async def test_a_signal_before_it_is_ready_ends_it() -> None:
    """A service that is still starting stops at once."""
    lifecycle = Lifecycle(Timing(notice_seconds=60.0, drain_seconds=60.0))
    server = Server()
    assert await ended(lifecycle, server, signalled) < 3
    assert server.graces == [0]


async def test_a_signal_is_heard_before_anything_runs() -> None:
    """What comes during the start ends what is started after it, at once."""
    lifecycle = Lifecycle(Timing(notice_seconds=60.0, drain_seconds=60.0))
    server = Server()
    with heeding(lifecycle, time.monotonic):
        stopped = asyncio.Event()
        lifecycle.watch(stopped.set)
        signalled()
        await asyncio.wait_for(stopped.wait(), 5)
        lifecycle.started()
        await asyncio.wait_for(run(lifecycle, server.stop, time.monotonic), 5)
    assert server.graces == [0]
    assert not lifecycle.is_alive


async def test_signals_are_heard_inside_alone() -> None:
    """Afterwards a signal does what the system has it do."""
    with heeding(Lifecycle(TIMING), time.monotonic):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
