"""When time alone will change something, by position."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf


class Alarms:
    """One moment for each of `size` positions, the earliest it was set to; `first` of all of them.

    A later moment than the one set is not kept: who is woken sets the next. So an endpoint whose
    moment moves on with every scrape has one alarm and not a thousand.
    """

    __slots__ = ("_heap", "_moments", "first")

    def __init__(self, size: int) -> None:
        self.first = inf
        self._moments = [inf] * size
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, position: int, moment: float) -> None:
        """The position is due at `moment` at the latest; infinity is no moment."""
        if moment < self._moments[position]:
            self._moments[position] = moment
            heappush(self._heap, (moment, position))
            self.first = self._heap[0][0]

    def due(self, now: float) -> list[int]:
        """The positions that are due, none of which has an alarm any more."""
        heap = self._heap
        found = []
        while heap and heap[0][0] <= now:
            moment, position = heappop(heap)
            # What was set earlier since has been due already.
            if self._moments[position] == moment:
                self._moments[position] = inf
                found.append(position)
        self.first = heap[0][0] if heap else inf
        return found
