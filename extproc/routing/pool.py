"""The candidates of one priority in order of score, and what must be known of all of them together.

What an unknown signal counts for is the mean of the candidates that have it, which would change
every score at every change. So candidates that lack the same signals share a list, and the mean is
one offset per list.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

from extproc.routing import scorers
from extproc.routing.grid import SCORE_SCALE, on_grid
from extproc.routing.rows import KV, LOAD, QUEUE, STALE, Row, Scores
from extproc.routing.slow import SlowStarts
from extproc.routing.strategy import Weights

POSITION_BITS: Final = 20
POSITION_MASK: Final = (1 << POSITION_BITS) - 1


def key_of(total: float, position: int) -> int:
    """A score and whose it is in one number that sorts by score, then by position."""
    return int(total * SCORE_SCALE) << POSITION_BITS | position


class Group:
    """Candidates that lack the same signals and can stand in for each other, as sorted keys.

    `offset` is what the lacking signals count for, in units of 2⁻³⁰; valid after
    `Pool.set_offsets`.
    """

    __slots__ = ("class_id", "keys", "offset", "signature")

    def __init__(self, class_id: int, signature: int) -> None:
        self.class_id = class_id
        self.signature = signature
        self.keys: list[int] = []
        self.offset = 0

    def move(self, old: int, new: int) -> None:
        """The old key has become the new one."""
        keys = self.keys
        del keys[bisect_left(keys, old)]
        insort(keys, new)


class Pool:
    """The candidates of one priority.

    `usable` are their positions, sorted; `slow` those that start slowly, which stand in no group.
    `inflight`, `rel`, `queue`, `kv` and `load` are sums over the candidates, exact in any order of
    changes.
    """

    __slots__ = (
        "_by_kind",
        "_size",
        "groups",
        "inflight",
        "kv",
        "load",
        "priority",
        "queue",
        "rel",
        "slow",
        "usable",
    )

    def __init__(self, priority: int, size: int) -> None:
        """Of a table with `size` positions."""
        self.priority = priority
        self._size = size
        self.clear()

    def clear(self) -> None:
        """There are no candidates."""
        self.usable: list[int] = []
        self.groups: list[Group] = []
        self.slow = SlowStarts(self._size)
        self._by_kind: dict[tuple[int, int], Group] = {}
        self.inflight = 0
        self.rel = 0.0
        self.queue = 0.0
        self.kv = 0.0
        self.load = 0.0

    def append(self, row: Row, scores: Scores, rel: float, class_id: int) -> Group | None:
        """The candidate is behind all others, and its group's keys need `sort`; None if slow."""
        self.count(row.inflight, scores.queue, scores.kv, scores.load)
        self.rel += rel
        self.usable.append(row.position)
        key = key_of(scores.total, row.position)
        if row.slow_from is not None:
            self.slow.put(row, key >> POSITION_BITS, scores.signature, rel)
            return None
        group = self._group(class_id, scores.signature)
        group.keys.append(key)
        return group

    def sort(self) -> None:
        """Every group's keys are in order."""
        for group in self.groups:
            group.keys.sort()

    def add(self, row: Row, scores: Scores, rel: float, class_id: int) -> Group | None:
        """The candidate is in its place, and in the returned group; None if slow."""
        self.count(row.inflight, scores.queue, scores.kv, scores.load)
        self.rel += rel
        insort(self.usable, row.position)
        key = key_of(scores.total, row.position)
        if row.slow_from is not None:
            self.slow.put(row, key >> POSITION_BITS, scores.signature, rel)
            return None
        group = self._group(class_id, scores.signature)
        insort(group.keys, key)
        return group

    def remove(self, position: int, key: int, rel: float, group: Group | None) -> None:
        """The candidate is gone, and with its last candidate the group; `count` is the caller's."""
        self.rel -= rel
        del self.usable[bisect_left(self.usable, position)]
        if group is None:
            self.slow.remove(position)
            return
        self._take_out(group, key)

    def regroup(self, group: Group, old: int, new: int, signature: int) -> Group:
        """The candidate lacks other signals now: its key has left its group for that of those."""
        joined = self._group(group.class_id, signature)
        insort(joined.keys, new)
        self._take_out(group, old)
        return joined

    def _take_out(self, group: Group, key: int) -> None:
        keys = group.keys
        del keys[bisect_left(keys, key)]
        if not keys:
            del self._by_kind[group.class_id, group.signature]
            self.groups.remove(group)

    def count(self, inflight: int, queue: float, kv: float, load: float) -> None:
        """The sums are larger by these."""
        self.inflight += inflight
        self.queue += queue
        self.kv += kv
        self.load += load

    def means(self, weights: Weights) -> tuple[float, float, float]:
        """What queue, KV and load of a candidate that lacks them count for, on the grid.

        The mean over the candidates that have the signal, half the weight where none has.
        """
        counts = self._counts()
        return (
            self._mean(QUEUE, self.queue, weights.queue, counts),
            self._mean(KV, self.kv, weights.kv, counts),
            self._mean(LOAD, self.load, weights.load, counts),
        )

    def set_offsets(self, weights: Weights) -> dict[int, int]:
        """The groups' offsets are right; they are returned by signature, of slow candidates too."""
        counts = self._counts()
        offsets: dict[int, int] = {}
        for signature in counts:
            offset = 0
            if signature & QUEUE:
                offset += self._offset(QUEUE, self.queue, weights.queue, signature, counts)
            if signature & KV:
                offset += self._offset(KV, self.kv, weights.kv, signature, counts)
            if signature & LOAD:
                offset += self._offset(LOAD, self.load, weights.load, signature, counts)
            offsets[signature] = offset
        for group in self.groups:
            group.offset = offsets[group.signature]
        return offsets

    def _offset(
        self, bit: int, known: float, weight: float, signature: int, counts: dict[int, int]
    ) -> int:
        """What one signal that candidates of this signature lack counts for."""
        mean = self._mean(bit, known, weight, counts)
        return int(scorers.lacking(mean, weight, is_stale=signature >= STALE) * SCORE_SCALE)

    def _counts(self) -> dict[int, int]:
        """How many candidates there are of each signature."""
        counts = dict(self.slow.counts)
        for group in self.groups:
            counts[group.signature] = counts.get(group.signature, 0) + len(group.keys)
        return counts

    def _mean(self, bit: int, known: float, weight: float, counts: dict[int, int]) -> float:
        having = len(self.usable)
        for signature, count in counts.items():
            if signature & bit:
                having -= count
        return on_grid(known / having if having else weight * scorers.UNKNOWN)

    def _group(self, class_id: int, signature: int) -> Group:
        kind = (class_id, signature)
        group = self._by_kind.get(kind)
        if group is None:
            group = self._by_kind[kind] = Group(class_id, signature)
            insort(self.groups, group, key=lambda g: (g.class_id, g.signature))
        return group
