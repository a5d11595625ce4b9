"""One inference engine as a model: batch, queue, prefill, decode and KV cache.

No I/O and no clock: the caller passes `now` and asks when the next thing happens. Work goes in
steps, as in continuous batching. A step with n decoding requests that also computes p tokens of
prompts takes

    p / prefill rate + k · (1 + slowdown · (n - 1)) / decode rate      seconds

and gives each of the n requests k tokens. k is 1 unless a step would be shorter than
`shortest_step_seconds`; then a step carries as many tokens as fit, so that a fast engine costs
its process no more wake-ups than a slow one.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from extproc.lab.tally import FinishReason, Reading, Totals


class Refusal(StrEnum):
    """Why a request is not taken."""

    QUEUE_FULL = "queue_full"
    TOO_LONG = "too_long"


class Phase(StrEnum):
    """Where a generation is."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How big and how fast an engine is; rates may be infinite.

    `decode_tokens_per_second` is the rate of one request alone; every further one lengthens the
    step by `decode_slowdown_ratio`. `max_waiting` None is an unbounded queue. `prefix_cache`
    keeps the blocks of ended prompts, least recently used first out, in what the running requests
    leave of the KV cache.
    """

    max_running: int = 8
    max_waiting: int | None = None
    prefill_tokens_per_second: float = 20_000.0
    prefill_budget_tokens: int = 2048
    decode_tokens_per_second: float = 500.0
    decode_slowdown_ratio: float = 0.01
    kv_tokens: int = 131_072
    block_size_tokens: int = 16
    max_model_tokens: int = 32_768
    prefix_cache: bool = False
    shortest_step_seconds: float = 0.004

    def __post_init__(self) -> None:
        """Refuses sizes and rates that can never make progress."""
        if min(self.max_running, self.prefill_budget_tokens, self.block_size_tokens) < 1:
            raise ValueError("max_running, prefill_budget_tokens and block_size_tokens start at 1")
        if min(self.prefill_tokens_per_second, self.decode_tokens_per_second) <= 0:
            raise ValueError("rates are above 0")
        if self.kv_tokens < self.block_size_tokens:
            raise ValueError("the KV cache holds at least one block")

    @property
    def longest_request_tokens(self) -> int:
        """The most tokens, prompt and output together, that one request may have."""
        return min(self.max_model_tokens, self.kv_tokens)


@dataclass(slots=True, eq=False)
class Generation:
    """One request inside the engine.

    `reason` is how it ends when nothing interferes; `blocks` are the hashes of its prompt's
    blocks, each covering all that precedes it. `held_tokens` is its share of the KV cache.
    """

    number: int
    prompt_tokens: int
    output_tokens: int
    reason: FinishReason
    blocks: tuple[int, ...]
    arrived_at: float
    phase: Phase = Phase.WAITING
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0
    ended_at: float | None = None
    cached_tokens: int = 0
    to_prefill: int = 0
    produced: int = 0
    held_tokens: int = 0

    @property
    def remaining(self) -> int:
        """How many tokens are still to be produced."""
        return self.output_tokens - self.produced


@dataclass(frozen=True, slots=True)
class Progress:
    """A generation has `tokens` new ones, and perhaps ended with them."""

    generation: Generation
    tokens: int
    has_ended: bool


@dataclass(frozen=True, slots=True)
class _Step:
    ends_at: float
    decoding: tuple[Generation, ...]
    tokens_each: int
    prefills: tuple[tuple[Generation, int], ...]


class Engine:
    """The engine's state; every method takes the moment at which it happens, never an earlier one.

    Whoever drives it calls `advance` at `next_at`.
    """

    def __init__(self, settings: EngineSettings | None = None) -> None:
        self.settings = settings or EngineSettings()
        self.totals = Totals()
        self.running: list[Generation] = []
        self.waiting: deque[Generation] = deque()
        self.kv_used_tokens = 0
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._step: _Step | None = None
        self._submitted = 0

    @property
    def next_at(self) -> float | None:
        """The moment at which the step in progress ends; None while there is nothing to do."""
        return None if self._step is None else self._step.ends_at

    def reading(self) -> Reading:
        """What a metrics page says now."""
        settings = self.settings
        return Reading(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_usage_ratio=self.kv_used_tokens / settings.kv_tokens,
            kv_used_tokens=self.kv_used_tokens,
            block_size_tokens=settings.block_size_tokens,
            block_count=settings.kv_tokens // settings.block_size_tokens,
            max_running=settings.max_running,
            max_model_tokens=settings.longest_request_tokens,
            totals=self.totals,
        )

    def submit(
        self,
        prompt_tokens: int,
        output_tokens: int,
        now: float,
        *,
        reason: FinishReason = FinishReason.LENGTH,
        blocks: Sequence[int] = (),
    ) -> Generation | Refusal:
        """The request is in the batch, or last in the queue, or refused.

        `output_tokens` 0 ends with the prefill, as embeddings do.
        """
        settings = self.settings
        prompt_tokens = max(1, prompt_tokens)
        if prompt_tokens + output_tokens > settings.longest_request_tokens:
            return Refusal.TOO_LONG
        has_slot = not self.waiting and len(self.running) < settings.max_running
        if (
            settings.max_waiting is not None
            and not has_slot
            and len(self.waiting) >= settings.max_waiting
        ):
            return Refusal.QUEUE_FULL
        self._submitted += 1
        generation = Generation(
            number=self._submitted,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            reason=reason,
            blocks=tuple(blocks),
            arrived_at=now,
        )
        self.waiting.append(generation)
        self._admit(now)
        if self._step is None:
            self._begin(now)
        return generation

    def abort(self, generation: Generation, now: float) -> bool:
        """The generation holds nothing any more; False when it had ended before."""
        if generation.phase is Phase.ENDED:
            return False
        if generation.phase is Phase.WAITING:
            self.waiting.remove(generation)
        self._end(generation, FinishReason.ABORT, now)
        self._admit(now)
        # Others' step goes on to its end; a step that computes for nobody is dropped.
        if self._step is not None and not self._works_for_anybody(self._step):
            self._begin(now)
        return True

    def advance(self, now: float) -> list[Progress]:
        """Every step that ends by `now` has ended; what came out of them, in order."""
        progress: list[Progress] = []
        while (step := self._step) is not None and step.ends_at <= now:
            progress += self._finish(step)
            self._begin(step.ends_at)
        return progress

    def _works_for_anybody(self, step: _Step) -> bool:
        return any(g.phase is Phase.DECODE for g in step.decoding) or any(
            g.phase is Phase.PREFILL for g, _ in step.prefills
        )

    def _admit(self, now: float) -> None:
        settings = self.settings
        # A margin keeps a request that was just preempted from coming straight back.
        margin = settings.kv_tokens // 100
        while self.waiting and len(self.running) < settings.max_running:
            generation = self.waiting[0]
            needed = generation.prompt_tokens + generation.produced + min(1, generation.remaining)
            if self.running and self.kv_used_tokens + needed + margin > settings.kv_tokens:
                return
            self.waiting.popleft()
            self.running.append(generation)
            if generation.started_at is None:
                generation.started_at = now
                self.totals.queue_seconds.observe(now - generation.arrived_at)
                self.totals.prompt_tokens += generation.prompt_tokens
            generation.phase = Phase.PREFILL
            generation.cached_tokens = self._lookup(generation)
            generation.to_prefill = (
                generation.prompt_tokens + generation.produced - generation.cached_tokens
            )
            generation.held_tokens = needed
            self.kv_used_tokens += needed
            self._trim_cache()

    def _begin(self, now: float) -> None:
        self._admit(now)
        if not self.running:
            self._step = None
            return
        settings = self.settings
        decoding, each, seconds = self._decode_plan()
        while (
            self.kv_used_tokens + sum(min(each, g.remaining) for g in decoding) > settings.kv_tokens
            and len(self.running) > 1
        ):
            self._preempt(self.running[-1])
            decoding, each, seconds = self._decode_plan()
        budget = settings.prefill_budget_tokens
        prefills: list[tuple[Generation, int]] = []
        for generation in self.running:
            if generation.phase is Phase.PREFILL and budget:
                tokens = min(budget, generation.to_prefill)
                budget -= tokens
                seconds += tokens / settings.prefill_tokens_per_second
                prefills.append((generation, tokens))
        self._step = _Step(now + seconds, tuple(decoding), each, tuple(prefills))

    def _decode_plan(self) -> tuple[list[Generation], int, float]:
        settings = self.settings
        decoding = [g for g in self.running if g.phase is Phase.DECODE]
        if not decoding:
            return decoding, 0, 0.0
        slowdown = 1.0 + settings.decode_slowdown_ratio * (len(decoding) - 1)
        seconds = slowdown / settings.decode_tokens_per_second
        each = 1
        if seconds < settings.shortest_step_seconds:
            longest = max(g.remaining for g in decoding)
            fitting = math.ceil(settings.shortest_step_seconds / seconds) if seconds else longest
            each = min(fitting, longest)
        return decoding, each, each * seconds

    def _finish(self, step: _Step) -> list[Progress]:
        progress: list[Progress] = []
        for generation in step.decoding:
            if generation.phase is Phase.DECODE:
                tokens = min(step.tokens_each, generation.remaining)
                generation.held_tokens += tokens
                self.kv_used_tokens += tokens
                progress.append(self._produce(generation, tokens, step.ends_at))
        for generation, tokens in step.prefills:
            if generation.phase is Phase.PREFILL:
                generation.to_prefill -= tokens
                if not generation.to_prefill:
                    generation.phase = Phase.DECODE
                    # Room for the token that a prefill ends with is held since admission.
                    first = min(1, generation.remaining)
                    progress.append(self._produce(generation, first, step.ends_at))
        return progress

    def _produce(self, generation: Generation, tokens: int, now: float) -> Progress:
        generation.produced += tokens
        self.totals.generation_tokens += tokens
        if tokens and generation.first_token_at is None:
            generation.first_token_at = now
            self.totals.first_token_seconds.observe(now - generation.arrived_at)
        elif tokens:
            gap = (now - generation.last_token_at) / tokens
            self.totals.inter_token_seconds.observe(gap, tokens)
        generation.last_token_at = now
        has_ended = not generation.remaining
        if has_ended:
            self._end(generation, generation.reason, now)
        return Progress(generation, tokens, has_ended)

    def _end(self, generation: Generation, reason: FinishReason, now: float) -> None:
        if generation.phase is not Phase.WAITING:
            self.running.remove(generation)
            self.kv_used_tokens -= generation.held_tokens
            generation.held_tokens = 0
            self._remember(generation)
        generation.phase = Phase.ENDED
        generation.reason = reason
        generation.ended_at = now
        totals = self.totals
        totals.finished[reason] += 1
        if reason is not FinishReason.ABORT:
            totals.finished_prompt_tokens += generation.prompt_tokens
            totals.finished_generation_tokens += generation.produced
            totals.request_seconds.observe(now - generation.arrived_at)
            totals.prompt_lengths.observe(generation.prompt_tokens)
            totals.output_lengths.observe(generation.produced)

    def _preempt(self, generation: Generation) -> None:
        self.running.remove(generation)
        self.kv_used_tokens -= generation.held_tokens
        generation.held_tokens = 0
        generation.phase = Phase.WAITING
        self.waiting.appendleft(generation)
        self.totals.preemptions += 1

    def _lookup(self, generation: Generation) -> int:
        """How many leading tokens of the prompt are cached; the last is always computed."""
        if not self.settings.prefix_cache:
            return 0
        known = 0
        for block in generation.blocks:
            if block not in self._cached:
                break
            self._cached.move_to_end(block)
            known += 1
        hits = min(known * self.settings.block_size_tokens, generation.prompt_tokens - 1)
        self.totals.prefix_queries += generation.prompt_tokens
        self.totals.prefix_hits += hits
        return hits

    def _remember(self, generation: Generation) -> None:
        if self.settings.prefix_cache and not generation.to_prefill:
            # Tail first, so that eviction takes the end of a prompt before its beginning.
            for block in reversed(generation.blocks):
                self._cached[block] = None
                self._cached.move_to_end(block)
            self._trim_cache()

    def _trim_cache(self) -> None:
        settings = self.settings
        room = (settings.kv_tokens - self.kv_used_tokens) // settings.block_size_tokens
        while len(self._cached) > room:
            self._cached.popitem(last=False)
