"""One decision's candidates in order of score, session terms and slow starts included.

Ties are drawn with the passed Random, one by one, and nothing else draws from it: of the equals in
each group by position, the groups in order, and then of those that stand in none. A draw costs the
same for two equals and for a thousand, because an idle fleet is all equals.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from random import Random
from typing import Final

import numpy as np
from numpy.typing import NDArray

from extproc.routing.affinity import Bonus
from extproc.routing.grid import SCORE_SCALE
from extproc.routing.pool import POSITION_BITS, POSITION_MASK, Group, Pool
from extproc.routing.table import Table

_FEW_SLOW: Final = 16


def leaders(
    table: Table, group: Group, bonuses: Sequence[Bonus], count: int, random: Random
) -> list[int]:
    """The `count` best by score where all candidates stand in one group, ties drawn one by one.

    It is what a `Ranking` finds, in fewer steps: the keys are walked down, with the session's
    targets put in where their bonus takes them.
    """
    keys = group.keys
    levels = [((table.keys[place] >> POSITION_BITS) + bonus, place) for place, bonus in bonuses]
    levels.sort(reverse=True)
    first = bonuses[0][0] if bonuses else -1
    second = bonuses[1][0] if len(bonuses) > 1 else -1
    found: list[int] = []
    end = len(keys)
    score = keys[-1] >> POSITION_BITS
    while len(found) < count and (end or levels):
        best = levels[0][0] if levels else -1
        if score > best:
            below = keys[end - 2] >> POSITION_BITS if end > 1 else -1
            if below != score:
                end -= 1
                score = below
                position = keys[end] & POSITION_MASK
                if position != first and position != second:  # noqa: PLR1714 - a set takes longer
                    found.append(position)
                continue
        elif score < best and (len(levels) == 1 or levels[1][0] != best):
            found.append(levels.pop(0)[1])
            continue
        begin = end
        if score >= best:
            best = score
            begin = bisect_left(keys, score << POSITION_BITS, 0, end)
        tied = sorted(position for level, position in levels if level == best)
        del levels[: len(tied)]
        holes = _places([table.keys[position] for position, _ in bonuses], keys, begin, end)
        found += _drawn(keys, (begin, end), holes, tied, random, count - len(found))
        end = begin
        score = keys[end - 1] >> POSITION_BITS if end else -1
    return found


def _places(wanted: Iterable[int], keys: list[int], begin: int, end: int) -> list[int]:
    """Where the wanted keys stand between `begin` and `end`, sorted; those elsewhere left out."""
    places = []
    for key in wanted:
        place = bisect_left(keys, key, begin, end)
        if place < end and keys[place] == key:
            places.append(place)
    places.sort()
    return places


def _drawn(  # noqa: PLR0917 - one call, with names that say what they are
    keys: list[int],
    run: tuple[int, int],
    holes: list[int],
    tied: list[int],
    random: Random,
    count: int,
) -> list[int]:
    """At most `count` positions, drawn one by one from the run's but its holes and from `tied`."""
    begin, end = run
    left = end - begin - len(holes)
    found: list[int] = []
    while len(found) < count and left + len(tied):
        total = left + len(tied)
        number = int(random.random() * total) if total > 1 else 0
        if number >= left:
            found.append(tied.pop(number - left))
            continue
        place = _passed(begin + number, holes)
        insort(holes, place)
        found.append(keys[place] & POSITION_MASK)
        left -= 1
    return found


def _passed(place: int, holes: list[int]) -> int:
    """The place counted on past the holes before and at it."""
    for hole in holes:
        if place >= hole:
            place += 1
    return place


class Ranking:
    """The candidates of a pool, for any number of groups.

    Scores are in units of 2⁻³⁰ of the whole; where every candidate lacks the same signals, what
    those count for is left out, because it orders nothing. `refused` are positions that are not to
    be taken.
    """

    __slots__ = ("_extras", "_groups", "_hidden", "_lane", "_random", "_table", "refused")

    def __init__(
        self,
        table: Table,
        pool: Pool,
        bonuses: Sequence[Bonus],
        *,
        refused: AbstractSet[int],
        now: float,
        random: Random,
    ) -> None:
        self._table = table
        self._groups: Sequence[Group] = pool.groups
        self._random = random
        self.refused = refused
        # Candidates that do not stand at their place in a group, with their scores; where many
        # start slowly, those are in the lane instead, by position, negative for all others.
        self._extras: dict[int, int] = {}
        self._lane: NDArray[np.int64] | None = None
        self._hidden = set(refused)
        if len(pool.groups) > 1 or pool.slow:
            offsets = pool.set_offsets(table.scale.weights)
            if len(pool.slow) > _FEW_SLOW:
                self._lane = table.slow_totals(pool, offsets, now)
            elif pool.slow:
                self._add_slow(pool, offsets, now)
        for position, bonus in bonuses:
            self._extras[position] = self.score(position) + bonus
        self._hidden.update(self._extras)
        for position in refused:
            self._extras.pop(position, None)
        if self._lane is not None:
            self._lane[list(self._hidden)] = -1

    def _add_slow(self, pool: Pool, offsets: dict[int, int], now: float) -> None:
        slow = pool.slow
        for position, (row, units) in slow.entries.items():
            inflight = int(self._table.slow_inflight(row, pool, now) * SCORE_SCALE)
            self._extras[position] = units + inflight + offsets[int(slow.signatures[position])]

    def score(self, position: int) -> int:
        """The candidate's score."""
        score = self._extras.get(position)
        if score is not None:
            return score
        group = self._table.groups[position]
        if group is not None:
            return (self._table.keys[position] >> POSITION_BITS) + group.offset
        # Candidates without a group start slowly, and are extras where there is no lane.
        return -1 if self._lane is None else int(self._lane[position])

    def highest(self) -> int:
        """The highest score of all candidates; -1 where there is none."""
        heads = [(group.keys[-1] >> POSITION_BITS) + group.offset for group in self._groups]
        if self._lane is not None:
            heads.append(int(self._lane.max()))
        return max(-1, *heads, *self._extras.values())

    def best(self) -> int:
        """A candidate that no other beats, drawn among its equals; -1 where there is none left.

        O(groups + extras + log candidates).
        """
        level, runs = self._best_runs()
        top, equals = self._best_elsewhere(level)
        if top > level:
            runs = []
        if not equals:
            if not runs:
                return -1
            if len(runs) == 1:
                keys, last = runs[0]
                key = keys[last]
                if not last or keys[last - 1] >> POSITION_BITS != key >> POSITION_BITS:
                    return key & POSITION_MASK
        elif not runs and len(equals) == 1:
            return equals[0]
        return self._drawn(runs, sorted(equals))

    def _best_elsewhere(self, level: int) -> tuple[int, list[int]]:
        """The highest score outside the groups and who has it; `level` and nobody if below that."""
        top = level
        equals: list[int] = []
        for position, score in self._extras.items():
            if score > top:
                top = score
                equals = [position]
            elif score == top:
                equals.append(position)
        lane = self._lane
        if lane is not None and (highest := int(lane.max())) >= max(top, 0):
            if highest > top:
                top = highest
                equals = []
            equals += np.flatnonzero(lane == highest).tolist()
        return top, equals

    def _best_runs(self) -> tuple[int, list[tuple[list[int], int]]]:
        """The highest score in a group, and each group that has it with the place where it ends."""
        top = -1
        hidden = self._hidden
        runs: list[tuple[list[int], int]] = []
        for group in self._groups:
            keys = group.keys
            last = len(keys) - 1
            while last >= 0 and keys[last] & POSITION_MASK in hidden:
                last -= 1
            if last < 0:
                continue
            score = (keys[last] >> POSITION_BITS) + group.offset
            if score > top:
                top = score
                runs = [(keys, last)]
            elif score == top:
                runs.append((keys, last))
        return top, runs

    def _drawn(self, runs: list[tuple[list[int], int]], equals: list[int]) -> int:
        """One of the tied: those of each run in order of position, then the equals."""
        table_keys = self._table.keys
        stretches: list[tuple[list[int], int, int, list[int]]] = []
        total = len(equals)
        for keys, last in runs:
            first = bisect_left(keys, keys[last] >> POSITION_BITS << POSITION_BITS, 0, last + 1)
            wanted = [table_keys[position] for position in self._hidden]
            holes = _places(wanted, keys, first, last + 1)
            count = last + 1 - first - len(holes)
            total += count
            stretches.append((keys, first, count, holes))
        number = int(self._random.random() * total) if total > 1 else 0
        for keys, first, count, holes in stretches:
            if number < count:
                return keys[_passed(first + number, holes)] & POSITION_MASK
            number -= count
        return equals[number]

    def behind(self, chosen: int, count: int) -> list[int]:
        """The chosen one and, by score, at most `count` others that can stand in for it.

        The ranking is used up by this.
        """
        table = self._table
        if table.has_classes:
            self._keep_class(table.class_of[chosen])
        positions = [chosen]
        self._drop(chosen)
        while len(positions) <= count:
            position = self.best()
            if position < 0:
                break
            positions.append(position)
            self._drop(position)
        return positions

    def _keep_class(self, class_id: int) -> None:
        """Only endpoints of this class are left."""
        table = self._table
        self._groups = [group for group in self._groups if group.class_id == class_id]
        self._extras = {p: s for p, s in self._extras.items() if table.class_of[p] == class_id}
        if self._lane is not None:
            self._lane = np.where(table.classes == class_id, self._lane, -1)

    def _drop(self, position: int) -> None:
        self._hidden.add(position)
        self._extras.pop(position, None)
        if self._lane is not None:
            self._lane[position] = -1
