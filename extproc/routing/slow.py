"""Candidates that start slowly, whose scores change from moment to moment.

Mostly there are none or few. After a list that brought a thousand there are a thousand, for some
seconds; those are scored as arrays, by the operations that score one alone, in the same order.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from extproc.routing.grid import SCORE_SCALE, SHIFT
from extproc.routing.rows import Row, Scale
from extproc.routing.scorers import SLOWEST_START_RATIO, requests

SIGNATURES: Final = 16
_NOBODY: Final = -(1 << 62)


class SlowStarts:
    """The slow candidates of one pool: by position their row, and the units of its other scores.

    `counts` is how many there are of each signature. `size` is how many positions there are.
    """

    __slots__ = ("_froms", "_size", "_units", "_xs", "counts", "entries", "signatures")

    def __init__(self, size: int) -> None:
        self.entries: dict[int, tuple[Row, int]] = {}
        self.counts: dict[int, int] = {}
        self._size = size
        self._units: NDArray[np.int64] = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self.entries)

    def put(self, row: Row, units: int, signature: int, rel: float) -> None:
        """The candidate starts slowly; `units` and `signature` are of its other scores."""
        if not len(self._units):
            self._units = np.full(self._size, _NOBODY, np.int64)
            self._xs = np.zeros(self._size)
            self._froms = np.zeros(self._size)
            self.signatures: NDArray[np.intp] = np.zeros(self._size, np.intp)
        position = row.position
        self.counts[signature] = self.counts.get(signature, 0) + 1
        self.entries[position] = row, units
        self._units[position] = units
        self._xs[position] = requests(row.inflight, row.inflight_tokens) / rel
        self._froms[position] = row.slow_from
        self.signatures[position] = signature

    def remove(self, position: int) -> None:
        """The candidate does not start slowly any more."""
        del self.entries[position]
        signature = int(self.signatures[position])
        self.counts[signature] -= 1
        if not self.counts[signature]:
            del self.counts[signature]
        self._units[position] = _NOBODY

    def totals(
        self, scale: Scale, mean: float, now: float, ramp: float, offsets: dict[int, int]
    ) -> NDArray[np.int64]:
        """By position the candidates' scores without session, in units of 2⁻³⁰; the rest negative.

        `mean` is the mean in-flight, `ramp` the slow start's length in seconds, `offsets` what the
        lacking signals of each signature count for.
        """
        r = np.clip((now - self._froms) / ramp, SLOWEST_START_RATIO, 1.0)
        x = self._xs / r + (1.0 - r) * mean
        score = 1.0 / (1.0 + x / scale.strategy.inflight_knee)
        own = (scale.weights.inflight * score + SHIFT) - SHIFT
        by_signature = np.zeros(SIGNATURES, np.int64)
        for signature, offset in offsets.items():
            by_signature[signature] = offset
        units: NDArray[np.int64] = self._units + (own * SCORE_SCALE).astype(np.int64)
        return units + by_signature[self.signatures]
