"""What a decision reads of one endpoint, and what a strategy makes of it.

A row holds what was read, not what was made of it, so that an old one costs next to nothing to keep
and says everything when a decision is explained.
"""

from __future__ import annotations

from typing import Final

import msgspec

from extproc.routing import scorers
from extproc.routing.endpoint import Stats
from extproc.routing.filters import Filter
from extproc.routing.grid import SCORE_SCALE, on_grid
from extproc.routing.strategy import Strategy

# What a candidate lacks, as bits of its signature.
QUEUE: Final = 1
KV: Final = 2
LOAD: Final = 4
STALE: Final = 8


class Row(msgspec.Struct, frozen=True, gc=False):
    """One endpoint at one moment.

    `dropped` is the filter that drops it, None for a candidate and for a probe. `slow_from` is set
    while it starts slowly. `own` is our dispatches less our ends since the scrape; the rest is the
    registry's (see `Live`).
    """

    position: int
    dropped: Filter | None
    is_probe: bool
    is_candidate: bool
    is_stale: bool
    slow_from: float | None
    inflight: int
    inflight_tokens: float
    own: int
    stats: Stats
    running_capacity: int
    drain_rate: float | None
    scraped_at: float | None


class Scores(msgspec.Struct, frozen=True, gc=False):
    """A candidate's weighted scores, each on the grid; 0 where `signature` says that it is lacking.

    `inflight` is 0 during a slow start, because it depends on the moment then. `total` is the sum.
    """

    signature: int
    queue: float
    kv: float
    load: float
    inflight: float
    total: float


class Scale:
    """A strategy made ready: `weights` are its own, scaled to a sum of 1, each on the grid."""

    __slots__ = ("strategy", "weights")

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.weights = scorers.shares(strategy.weights)

    def scores(self, row: Row, rel: float) -> Scores:
        """What every scorer but session makes of the candidate.

        A scorer of weight 0 is not asked. Of a stale endpoint only in-flight is its own, and the
        load score where it is 1 because there is no load.
        """
        strategy = self.strategy
        weights = self.weights
        signature = STALE if row.is_stale else 0
        queue = kv = load = inflight = 0.0
        if weights.queue:
            score = (
                None if row.is_stale else scorers.queue(self.backlog(row), rel, strategy.queue_knee)
            )
            if score is None:
                signature |= QUEUE
            else:
                queue = on_grid(weights.queue * score)
        if weights.kv:
            usage = None if row.is_stale else row.stats.kv_usage_ratio
            score = scorers.kv(usage, strategy.kv_knee_ratio, strategy.kv_ceiling_ratio)
            if score is None:
                signature |= KV
            else:
                kv = on_grid(weights.kv * score)
        n = scorers.requests(row.inflight, row.inflight_tokens)
        if weights.load:
            rate = None if row.is_stale else row.drain_rate
            score = scorers.load(n, rate, strategy.load_knee_seconds)
            if score is None:
                signature |= LOAD
            else:
                load = on_grid(weights.load * score)
        if row.slow_from is None:
            inflight = on_grid(weights.inflight * scorers.inflight(n / rel, strategy.inflight_knee))
        total = queue + kv + load + inflight + self.constant(rel)
        return Scores(signature, queue, kv, load, inflight, total)

    def backlog(self, row: Row) -> int | None:
        """Requests that wait at the engine, our own since the scrape included."""
        stats = row.stats
        return scorers.backlog(stats.waiting, stats.running, row.running_capacity, row.own)

    def constant(self, rel: float) -> float:
        """The weighted score that never changes: the weight scorer's."""
        return on_grid(self.weights.weight * scorers.weight(rel))

    def session_units(self, score: float) -> int:
        """What a session's target with this score gets, in units of 2⁻³⁰."""
        return int(on_grid(self.weights.session * score) * SCORE_SCALE)

    def slow_inflight(self, row: Row, rel: float, mean: float, now: float, ramp: float) -> float:
        """The weighted in-flight score of a candidate that starts slowly, on the grid.

        `mean` is the candidates' mean in-flight, `ramp` the slow start's length in seconds.
        """
        since = 0.0 if row.slow_from is None else now - row.slow_from
        x = scorers.requests(row.inflight, row.inflight_tokens) / rel
        x = scorers.slowed(x, mean, since, ramp)
        return on_grid(self.weights.inflight * scorers.inflight(x, self.strategy.inflight_knee))
