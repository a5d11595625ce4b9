"""Consistent hashing: which endpoints a session's key prefers, in order.

The ring knows ids alone; load and health are the caller's, who walks it past what it does not want.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from xxhash import xxh64_intdigest

VIRTUAL_NODES: Final = 64
_SUFFIXES: Final = tuple(f"#{number:02d}".encode() for number in range(VIRTUAL_NODES))


def session_hash(model: str, key: bytes) -> int:
    """The session's place on the ring: xxh64 of the resolved model, a NUL and the key.

    The same key under two models is two sessions.
    """
    return xxh64_intdigest(model.encode() + b"\0" + key)


class Ring:
    """A circle of 64-bit hashes on which each id has 64 virtual nodes, `<id>#00` to `<id>#63`.

    Built when membership changes, in O(n log n): 0.2 s for 10,000 ids. Positions are indexes into
    `ids`, which are distinct.
    """

    __slots__ = ("_hashes", "_owners", "ids")

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = tuple(ids)
        points = np.empty((len(self.ids), VIRTUAL_NODES), np.uint64)
        for position, name in enumerate(self.ids):
            stem = name.encode()
            points[position] = [xxh64_intdigest(stem + suffix) for suffix in _SUFFIXES]
        flat = points.reshape(-1)
        order = flat.argsort(kind="stable")
        # Arrays, not lists: 8 bytes a node instead of 40, and a bisection that stays in the cache.
        self._hashes = array("Q", flat[order].tobytes())
        self._owners = array("I", (order // VIRTUAL_NODES).astype(np.uintc).tobytes())

    def __len__(self) -> int:
        return len(self.ids)

    def targets(self, key_hash: int) -> Iterator[int]:
        """Every position once, in the order that a clockwise walk from `key_hash` meets them."""
        owners = self._owners
        nodes = len(owners)
        if not nodes:
            return
        start = bisect_left(self._hashes, key_hash)
        # Most walks end at the first, so what the rest of the walk needs is made after it.
        owner = owners[start if start < nodes else 0]
        yield owner
        wanted = len(self.ids)
        seen = {owner}
        number = start
        while len(seen) < wanted:
            number += 1
            owner = owners[number % nodes]
            if owner not in seen:
                seen.add(owner)
                yield owner


def load_limit(mean_inflight: float, share: float, factor: float, slack: float) -> float:
    """How many requests an endpoint may have and still be a session's target.

    max(1, `factor` · `mean_inflight` · `share`) + `slack`, where `share` is the endpoint's weight
    over the mean weight. The 1 keeps affinity alive on an idle pool, the slack at small counts.
    """
    return max(1.0, factor * mean_inflight * share) + slack


def bounded_target(
    ring: Ring,
    key_hash: int,
    inflight: Sequence[int],
    *,
    weights: Sequence[float] | None = None,
    factor: float = 1.25,
    slack: float = 4.0,
) -> int | None:
    """The first position clockwise that is within its load limit; the first of all if none is.

    `inflight` and `weights` (None: all equal) are by position. None only for an empty ring.
    """
    count = len(ring)
    if count <= 1:
        return 0 if count else None
    mean = sum(inflight) / count
    mean_weight = 1.0 if weights is None else sum(weights) / count
    first: int | None = None
    for position in ring.targets(key_hash):
        if first is None:
            first = position
        share = 1.0 if weights is None else weights[position] / mean_weight
        if inflight[position] <= load_limit(mean, share, factor, slack):
            return position
    return first
