"""Drives engine models by the event loop's clock and wakes whoever waits for their tokens.

An idle engine has no timer and costs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from extproc.lab.engine import Engine, Generation, Refusal
from extproc.lab.tally import FinishReason


class Run:
    """One generation as the request that asked for it sees it."""

    __slots__ = ("_fresh", "_has_ended", "_wake", "engine", "generation")

    def __init__(self, engine: Engine, generation: Generation) -> None:
        self.engine = engine
        self.generation = generation
        self._fresh = 0
        self._has_ended = False
        self._wake: asyncio.Future[None] | None = None

    def push(self, tokens: int, *, has_ended: bool) -> None:
        """The tokens wait to be fetched."""
        self._fresh += tokens
        self._has_ended = self._has_ended or has_ended
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def tokens(self) -> tuple[int, bool]:
        """How many tokens came since the last call (0 only at the end); whether it ended."""
        while not self._fresh and not self._has_ended:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        fresh, self._fresh = self._fresh, 0
        return fresh, self._has_ended


class Pump:
    """The engines of one server, one per data-parallel rank; a request goes to the emptiest."""

    def __init__(self, engines: Sequence[Engine], loop: asyncio.AbstractEventLoop) -> None:
        self.engines = tuple(engines)
        self._loop = loop
        self._runs: dict[Generation, Run] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for = 0.0
        self._held_at: float | None = None
        self._behind_seconds = 0.0

    @property
    def is_held(self) -> bool:
        """Whether the engines' time stands still."""
        return self._held_at is not None

    def now(self) -> float:
        """The engines' time: the loop's, less all the time that it was held."""
        if self._held_at is not None:
            return self._held_at
        return self._loop.time() - self._behind_seconds

    def submit(
        self,
        prompt_tokens: int,
        output_tokens: int,
        *,
        reason: FinishReason = FinishReason.LENGTH,
        blocks: Sequence[int] = (),
    ) -> Run | Refusal:
        """The request is in an engine's batch or queue, or refused."""
        engine = min(self.engines, key=lambda e: len(e.running) + len(e.waiting))
        generation = engine.submit(
            prompt_tokens, output_tokens, self.now(), reason=reason, blocks=blocks
        )
        if isinstance(generation, Refusal):
            return generation
        run = self._runs[generation] = Run(engine, generation)
        self._arm()
        return run

    def abort(self, run: Run) -> bool:
        """The run holds no slot any more; False when it had ended before."""
        self._runs.pop(run.generation, None)
        was_running = run.engine.abort(run.generation, self.now())
        self._arm()
        return was_running

    def hold(self) -> None:
        """The engines' time stands still: requests are admitted, no token comes."""
        if self._held_at is None:
            self._held_at = self.now()
            self._arm()

    def release(self) -> None:
        """The engines go on where they were."""
        if self._held_at is not None:
            self._behind_seconds = self._loop.time() - self._held_at
            self._held_at = None
            self._arm()

    def stop(self) -> None:
        """No timer is left."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        due = min((e.next_at for e in self.engines if e.next_at is not None), default=None)
        if due is None or self.is_held:
            self.stop()
            return
        if self._timer is not None:
            if self._armed_for == due:
                return
            self._timer.cancel()
        self._armed_for = due
        self._timer = self._loop.call_at(due + self._behind_seconds, self._tick)

    def _tick(self) -> None:
        self._timer = None
        # The loop may wake a clock tick early; what was armed for is due all the same.
        now = max(self.now(), self._armed_for)
        for engine in self.engines:
            for progress in engine.advance(now):
                run = self._runs.get(progress.generation)
                if run is not None:
                    run.push(progress.tokens, has_ended=progress.has_ended)
                    if progress.has_ended:
                        del self._runs[progress.generation]
        self._arm()
