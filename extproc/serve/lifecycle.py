"""Starting, ready, draining, stopped: when the service takes requests and when it ends.

The machine is pure; the shell is `heeding`, which listens for signals, and `run`, which stops the
servers.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class State(StrEnum):
    """Where the process is between its start and its end."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Timing:
    """How long an end may take.

    For `notice_seconds` after the first signal the service says that it is not ready and still
    takes requests, so that whoever asks for readiness can move away first; then running streams
    have `drain_seconds` to finish.
    """

    notice_seconds: float = 2.0
    drain_seconds: float = 20.0


class Lifecycle:
    """The state and what follows from it; times are monotonic seconds.

    Starting → ready → draining → stopped. A second request to terminate stops at once, and so does
    the first one before anything was served.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._state = State.STARTING
        self._closes_at: float | None = None
        self._watchers: list[Callable[[], None]] = []

    @property
    def state(self) -> State:
        """Where the process is."""
        return self._state

    @property
    def is_alive(self) -> bool:
        """Whether the process works; a draining one does."""
        return self._state is not State.STOPPED

    @property
    def is_ready(self) -> bool:
        """Whether new requests should come here."""
        return self._state is State.READY

    @property
    def closes_at(self) -> float | None:
        """The moment at which no new request is taken any more; None while no end is in sight."""
        return self._closes_at

    def grace_seconds(self, now: float) -> float:
        """What is left at `now` of the time that running streams have; 0 once stopped."""
        if self._closes_at is None or self._state is State.STOPPED:
            return 0.0
        return max(0.0, self._closes_at + self._timing.drain_seconds - now)

    def started(self) -> None:
        """Requests are taken, unless the end has already begun."""
        if self._state is State.STARTING:
            self._change(State.READY)

    def terminate(self, now: float) -> None:
        """The end has begun, or is now: see the class."""
        match self._state:
            case State.READY:
                self._closes_at = now + self._timing.notice_seconds
                self._change(State.DRAINING)
            case State.STARTING | State.DRAINING:
                self._closes_at = now
                self._change(State.STOPPED)
            case State.STOPPED:
                pass

    def drained(self) -> None:
        """Nothing runs any more."""
        if self._state is not State.STOPPED:
            self._change(State.STOPPED)

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """`changed` is called after every change of state, until the returned function is."""
        self._watchers.append(changed)

        def forget() -> None:
            if changed in self._watchers:
                self._watchers.remove(changed)

        return forget

    def _change(self, state: State) -> None:
        """The state is `state` and every watcher knows."""
        self._state = state
        for changed in tuple(self._watchers):
            changed()


SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def heeding(lifecycle: Lifecycle, clock: Callable[[], float]) -> Iterator[None]:
    """Inside, a signal asks for the end; for use in the running event loop."""
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, lambda: lifecycle.terminate(clock()))
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def run(
    lifecycle: Lifecycle, stop: Callable[[float], Awaitable[None]], clock: Callable[[], float]
) -> None:
    """Returns when somebody has asked for the end and everything has stopped.

    `stop(grace_seconds)` must refuse new streams at once and return within the grace, or soon after
    it is cancelled. It is called with 0 after a second request to terminate.
    """
    changed = asyncio.Event()
    forget = lifecycle.watch(changed.set)
    try:
        await _until_closing(lifecycle, changed, clock)
        await _until_stopped(lifecycle, changed, stop, clock)
    finally:
        forget()
        lifecycle.drained()


async def _until_closing(
    lifecycle: Lifecycle, changed: asyncio.Event, clock: Callable[[], float]
) -> None:
    """Returns at the moment from which no new request is taken."""
    while lifecycle.is_alive:
        closes_at = lifecycle.closes_at
        left = None if closes_at is None else closes_at - clock()
        if left is not None and left <= 0:
            return
        changed.clear()
        try:
            await asyncio.wait_for(changed.wait(), left)
        except TimeoutError:
            return


async def _until_stopped(
    lifecycle: Lifecycle,
    changed: asyncio.Event,
    stop: Callable[[float], Awaitable[None]],
    clock: Callable[[], float],
) -> None:
    """Everything has stopped, within the grace or at once after a second request."""
    grace_seconds = lifecycle.grace_seconds(clock())
    draining = asyncio.ensure_future(stop(grace_seconds))
    while lifecycle.is_alive and not draining.done():
        changed.clear()
        signalled = asyncio.ensure_future(changed.wait())
        await asyncio.wait({draining, signalled}, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
    if not draining.done() and grace_seconds > 0:
        await stop(0.0)
    await draining
