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
    table: Table,
    groups: Sequence[Group],
    bonuses: Sequence[Bonus],
    count: int,
    random: Random,
) -> list[int]:
    """The `count` best by score where all candidates stand in groups, ties drawn one by one.

    It is what a `Ranking` finds, in fewer steps, of candidates that can all stand in for each
    other: each group's keys are walked down, with the session's targets put in where their bonus
    takes them. The groups' offsets must be right if there are several.
    """
    levels = [(_level(table, place) + bonus, place) for place, bonus in bonuses]
    levels.sort(reverse=True)
    first = bonuses[0][0] if bonuses else -1
    second = bonuses[1][0] if len(bonuses) > 1 else -1
    ends = [len(group.keys) for group in groups]
    scores = [_score(group, end) for group, end in zip(groups, ends, strict=True)]
    found: list[int] = []
    while len(found) < count:
        best = max(scores)
        if levels and levels[0][0] >= best:
            if levels[0][0] > best and (len(levels) == 1 or levels[1][0] != levels[0][0]):
                found.append(levels.pop(0)[1])
                continue
            best = levels[0][0]
        elif best < 0:
            break
        else:
            index = scores.index(best)
            end = ends[index]
            below = _score(groups[index], end - 1)
            if below != best and scores.count(best) == 1:
                ends[index] = end - 1
                scores[index] = below
                position = groups[index].keys[end - 1] & POSITION_MASK
                if position != first and position != second:  # noqa: PLR1714 - a set takes longer
                    found.append(position)
                continue
        tied = sorted(position for level, position in levels if level == best)
        del levels[: len(tied)]
        wanted = [table.keys[position] for position, _ in bonuses]
        runs: list[Run] = []
        for index, group in enumerate(groups):
            if scores[index] == best:
                begin = bisect_left(
                    group.keys, (best - group.offset) << POSITION_BITS, 0, ends[index]
                )
                runs.append(_run(group.keys, begin, ends[index], wanted))
                ends[index] = begin
                scores[index] = _score(group, begin)
        while len(found) < count and (position := _drawn(runs, tied, random)) >= 0:
            found.append(position)
    return found


def _level(table: Table, position: int) -> int:
    """The score of a candidate that stands in a group, without its bonus."""
    group = table.groups[position]
    return (table.keys[position] >> POSITION_BITS) + (0 if group is None else group.offset)


def _score(group: Group, end: int) -> int:
    """The score of the last of the group's first `end` candidates; -1 where `end` is 0."""
    return (group.keys[end - 1] >> POSITION_BITS) + group.offset if end else -1


Run = tuple[list[int], int, list[int], int]
"""Equals in one group: its keys, the first one's place, the places left out, how many are left."""


def _run(keys: list[int], begin: int, end: int, hidden: Iterable[int]) -> Run:
    """The equals from `begin` to `end` but those whose keys are hidden."""
    holes = _places(hidden, keys, begin, end)
    return keys, begin, holes, end - begin - len(holes)


def _places(wanted: Iterable[int], keys: list[int], begin: int, end: int) -> list[int]:
    """Where the wanted keys stand between `begin` and `end`, sorted; those elsewhere left out."""
    places = []
    for key in wanted:
        place = bisect_left(keys, key, begin, end)
        if place < end and keys[place] == key:
            places.append(place)
    places.sort()
    return places


def _drawn(runs: list[Run], others: list[int], random: Random) -> int:
    """One of the tied, which is then not among them: those of each run by position, then others.

    -1 where there is none left.
    """
    total = len(others)
    for run in runs:
        total += run[3]
    if not total:
        return -1
    number = int(random.random() * total) if total > 1 else 0
    for index, (keys, begin, holes, left) in enumerate(runs):
        if number < left:
            place = _passed(begin + number, holes)
            insort(holes, place)
            runs[index] = (keys, begin, holes, left - 1)
            return keys[place] & POSITION_MASK
        number -= left
    return others.pop(number)


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
        wanted = [self._table.keys[position] for position in self._hidden]
        tied: list[Run] = []
        for keys, last in runs:
            floor = keys[last] >> POSITION_BITS << POSITION_BITS
            tied.append(_run(keys, bisect_left(keys, floor, 0, last + 1), last + 1, wanted))
        return _drawn(tied, sorted(equals), self._random)

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
