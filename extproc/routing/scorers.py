"""The formulas that say how well an endpoint suits a request, each a pure function to 0 … 1.

Scales are absolute with a soft knee, never relative to the other candidates: a queue of 3 against
4 must not become 1 against 0. What is unknown is None here; what an unknown signal counts for is
the table's.
"""

from __future__ import annotations

from typing import Final

from extproc.routing.grid import on_grid
from extproc.routing.strategy import Scorer, Weights

TOKENS_PER_REQUEST: Final = 4000.0
FIRST_TARGET: Final = 1.0
SECOND_TARGET: Final = 0.7
UNKNOWN: Final = 0.5
STALE_PENALTY: Final = 0.01
SLOWEST_START_RATIO: Final = 0.1


def shares(weights: Weights) -> Weights:
    """The weights scaled to a sum of 1, each on the grid; all 0 where all are 0."""
    by_scorer: dict[str, float] = {scorer: getattr(weights, scorer) for scorer in Scorer}
    total = sum(by_scorer.values()) or 1.0
    return Weights(**{name: on_grid(weight / total) for name, weight in by_scorer.items()})


def requests(inflight: int, inflight_tokens: float) -> float:
    """The load n in requests: `inflight` + `inflight_tokens` / 4000, as long prompts weigh more."""
    return inflight + inflight_tokens / TOKENS_PER_REQUEST


def backlog(
    waiting: int | None, running: int | None, running_capacity: int, own: int
) -> int | None:
    """Requests that wait at the engine now: waiting + `own` - free slots, negative for free ones.

    `own` is our dispatches less our ends since the scrape: without the ends, a scrape interval
    looks like a queue. Free slots = max(0, capacity - running). With the capacity (0) or the
    running count unknown, waiting alone. None where waiting is unknown.
    """
    if waiting is None or running is None or not running_capacity:
        return waiting
    return waiting + own - max(0, running_capacity - running)


def queue(waiting: int | None, rel: float, knee: float) -> float | None:
    """1 / (1 + q / `knee`), q = max(0, `waiting`) / rel; None where the backlog is unknown."""
    if waiting is None:
        return None
    return 1.0 / (1.0 + waiting / rel / knee) if waiting > 0 else 1.0


def kv(usage_ratio: float | None, knee_ratio: float, ceiling_ratio: float) -> float | None:
    """1 up to the knee, then linear to 0 at the ceiling, and 0 from there on.

    None where the usage is unknown.
    """
    if usage_ratio is None:
        return None
    if usage_ratio >= ceiling_ratio:
        return 0.0
    if usage_ratio <= knee_ratio:
        return 1.0
    return (ceiling_ratio - usage_ratio) / (ceiling_ratio - knee_ratio)


def inflight(x: float, knee: float) -> float:
    """1 / (1 + x / `knee`), x = n / rel."""
    return 1.0 / (1.0 + x / knee)


def slowed(x: float, mean_inflight: float, since_seconds: float, ramp_seconds: float) -> float:
    """The x that an endpoint which came `since_seconds` ago is scored by: x/r + (1 - r) · mean.

    The mean is the candidates' in-flight; r = max(0.1, since / ramp), 1 from the ramp's end on.
    """
    r = since_seconds / ramp_seconds
    if r >= 1.0:
        return x
    r = max(r, SLOWEST_START_RATIO)
    return x / r + (1.0 - r) * mean_inflight


def load(n: float, drain_rate: float | None, knee_seconds: float) -> float | None:
    """1 / (1 + W / `knee_seconds`), W = n / drain rate, the expected wait; 1 where n is 0.

    None where there is load and the rate is unknown or 0.
    """
    if n <= 0:
        return 1.0
    if not drain_rate:
        return None
    return 1.0 / (1.0 + n / drain_rate / knee_seconds)


def weight(rel: float) -> float:
    """The endpoint's weight over the model's largest, as it is."""
    return rel


def lacking(mean: float, weight: float, *, is_stale: bool) -> float:
    """What a missing signal counts for: `mean`, or where it is stale 0.01 of the weight less.

    Scored down so that a fresh equal wins, and by no more: a factor would be a drain.
    """
    return max(0.0, mean - on_grid(weight * STALE_PENALTY)) if is_stale else mean
