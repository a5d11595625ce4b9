"""What an engine has done since its start: counts, token sums and histograms.

Values that grow; who reads them decides under which names they are shown.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

FIRST_TOKEN_BOUNDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BOUNDS: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
LENGTH_BOUNDS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0)


class FinishReason(StrEnum):
    """Why a generation ended: on its own, at its token limit, or because nobody waits for it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Histogram:
    """Counts of observations by upper bound, as Prometheus has them."""

    __slots__ = ("bounds", "count", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """The value is counted `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.count += times
        self.sum += value * times


@dataclass(slots=True)
class Totals:
    """Everything that only grows.

    `prompt_tokens` and `generation_tokens` move while requests run, the two `finished_` sums when
    one ends. `prefix_queries` and `prefix_hits` count tokens.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished_prompt_tokens: int = 0
    finished_generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: dict.fromkeys(FinishReason, 0)
    )
    first_token_seconds: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
    inter_token_seconds: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))
    request_seconds: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS))
    queue_seconds: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS))
    prompt_lengths: Histogram = field(default_factory=lambda: Histogram(LENGTH_BOUNDS))
    output_lengths: Histogram = field(default_factory=lambda: Histogram(LENGTH_BOUNDS))


@dataclass(frozen=True, slots=True)
class Reading:
    """What an engine shows of itself at one moment.

    `kv_usage_ratio` is 0 to 1, `block_count` blocks of `block_size_tokens` are the whole cache.
    """

    running: int
    waiting: int
    kv_usage_ratio: float
    kv_used_tokens: int
    block_size_tokens: int
    block_count: int
    max_running: int
    max_model_tokens: int
    totals: Totals

    @property
    def kv_tokens(self) -> int:
        """The size of the KV cache in tokens."""
        return self.block_size_tokens * self.block_count

    @property
    def finished(self) -> Mapping[FinishReason, int]:
        """How many generations ended, by reason."""
        return self.totals.finished

    @property
    def succeeded(self) -> int:
        """How many generations ended otherwise than by an abort."""
        return sum(n for reason, n in self.finished.items() if reason is not FinishReason.ABORT)
