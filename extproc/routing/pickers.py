"""How one candidate is taken from the scored ones, and in which order the others stand behind it.

A pick is always a candidate. Ties are drawn with the passed Random, and only ties draw from it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from math import exp
from random import Random
from typing import Final

from extproc.routing.affinity import Bonus
from extproc.routing.pool import POSITION_BITS, POSITION_MASK, Group, Pool
from extproc.routing.scorers import SCORE_SCALE
from extproc.routing.table import Table

ANY_CLASS: Final = -1
_REJECTIONS: Final = 64


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
    while len(found) < count and (end or levels):
        best = levels[0][0] if levels else -1
        score = keys[end - 1] >> POSITION_BITS if end else -1
        if score > best:
            if end == 1 or keys[end - 2] >> POSITION_BITS != score:
                end -= 1
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
        _draw(found, count, keys, (begin, end), holes, tied, random)
        end = begin
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


def _draw(
    found: list[int],
    count: int,
    keys: list[int],
    run: tuple[int, int],
    holes: list[int],
    tied: list[int],
    random: Random,
) -> None:
    """Positions of the run's keys but the holes, and of `tied`, are found until it is `count`."""
    begin, end = run
    left = end - begin - len(holes)
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


def _passed(place: int, holes: list[int]) -> int:
    """The place counted on past the holes before and at it."""
    for hole in holes:
        if place >= hole:
            place += 1
    return place


class Ranking:
    """One decision's candidates by score, session terms and slow starts included.

    Scores are in units of 2⁻³⁰ of the whole; where every candidate lacks the same signals, what
    those count for is left out, because it orders nothing. `refused` are positions that are not to
    be taken.
    """

    __slots__ = ("_groups", "_hidden", "_random", "_rows", "_table", "extras")

    def __init__(
        self,
        table: Table,
        pool: Pool,
        bonuses: Sequence[Bonus],
        refused: AbstractSet[int],
        now: float,
        random: Random,
    ) -> None:
        self._table = table
        self._groups = pool.groups
        self._random = random
        self._hidden = set(refused)
        # Candidates that do not stand at their place in a group, with their scores.
        self.extras: dict[int, int] = {}
        if len(pool.groups) > 1 or pool.slow:
            offsets = pool.set_offsets(table.scale.weights)
            for position in sorted(pool.slow):
                row, signature, key = pool.slow[position]
                inflight = int(table.slow_inflight(row, pool, now) * SCORE_SCALE)
                self.extras[position] = (key >> POSITION_BITS) + inflight + offsets[signature]
        for position, bonus in bonuses:
            self.extras[position] = self.score(position) + bonus
        for position in refused:
            self.extras.pop(position, None)
        self._hidden.update(self.extras)

    def score(self, position: int) -> int:
        """The candidate's score."""
        score = self.extras.get(position)
        if score is None:
            group = self._table.groups[position]
            assert group is not None  # a candidate that is not in a group is an extra
            score = (self._table.keys[position] >> POSITION_BITS) + group.offset
        return score

    def highest(self) -> int:
        """The highest score of all candidates; -1 where there is none."""
        heads = [(group.keys[-1] >> POSITION_BITS) + group.offset for group in self._groups]
        return max(*heads, *self.extras.values(), -1, -1)

    def drop(self, position: int) -> None:
        """The candidate stands in the ranking no more."""
        self._hidden.add(position)
        self.extras.pop(position, None)

    def best(self, class_id: int = ANY_CLASS) -> int | None:
        """A candidate that no other of the class beats, drawn among its equals; None for no one.

        O(groups + extras + log candidates).
        """
        top = -1
        hidden = self._hidden
        runs: list[tuple[list[int], int]] = []
        for group in self._groups:
            if class_id not in {ANY_CLASS, group.class_id}:
                continue
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
        equals: list[int] = []
        class_of = self._table.class_of
        for position, score in self.extras.items():
            if score < top or class_id not in {ANY_CLASS, class_of[position]}:
                continue
            if score > top:
                top = score
                runs = []
                equals = []
            equals.append(position)
        if not runs:
            if len(equals) < 2:
                return equals[0] if equals else None
        elif not equals and len(runs) == 1:
            keys, last = runs[0]
            key = keys[last]
            if not last or keys[last - 1] >> POSITION_BITS != key >> POSITION_BITS:
                return key & POSITION_MASK
        return self._drawn(runs, sorted(equals))

    def _drawn(self, runs: list[tuple[list[int], int]], equals: list[int]) -> int:
        """One of the tied: those of each run in order of position, then the extras."""
        hidden = self._hidden
        table_keys = self._table.keys
        stretches: list[tuple[list[int], int, list[int]]] = []
        total = len(equals)
        for keys, last in runs:
            first = bisect_left(keys, keys[last] >> POSITION_BITS << POSITION_BITS, 0, last + 1)
            wanted = [table_keys[position] for position in hidden]
            holes = _places(wanted, keys, first, last + 1)
            total += last + 1 - first - len(holes)
            stretches.append((keys, first, holes))
        number = int(self._random.random() * total) if total > 1 else 0
        for (keys, first, holes), (_, last) in zip(stretches, runs, strict=True):
            count = last + 1 - first - len(holes)
            if number < count:
                return keys[_passed(first + number, holes)] & POSITION_MASK
            number -= count
        return equals[number]

    def behind(self, chosen: int, count: int) -> list[int]:
        """The chosen one and, by score, at most `count` others of its class."""
        positions = [chosen]
        class_id = self._table.class_of[chosen]
        self.drop(chosen)
        while count:
            position = self.best(class_id)
            if position is None:
                break
            positions.append(position)
            self.drop(position)
            count -= 1
        return positions


def p2c(
    usable: Sequence[int], target: int | None, score: Callable[[int], int], random: Random
) -> int:
    """The better of two different candidates, one of them the session's target where there is one.

    Two random ones would destroy affinity. A tie is drawn.
    """
    count = len(usable)
    first = int(random.random() * count) if target is None else bisect_left(usable, target)
    if count == 1:
        return usable[first]
    second = int(random.random() * (count - 1))
    if second >= first:
        second += 1
    one, other = usable[first], usable[second]
    difference = score(one) - score(other)
    if not difference:
        return one if random.random() < 0.5 else other
    return one if difference > 0 else other


def softmax(
    usable: Sequence[int],
    score: Callable[[int], int],
    top: int,
    temperature: float,
    random: Random,
) -> int:
    """A candidate with probability proportional to exp(score / `temperature`), scores from 0 to 1.

    `top` is the largest score. Drawn by rejection, so it costs the same for any number of
    candidates unless few of many are any good; after 64 rejections the probabilities are summed.
    """
    scale = 1.0 / (SCORE_SCALE * temperature)
    for _ in range(_REJECTIONS):
        position = usable[int(random.random() * len(usable))]
        if random.random() < exp((score(position) - top) * scale):
            return position
    weights = [exp((score(position) - top) * scale) for position in usable]
    left = random.random() * sum(weights)
    for position, weight in zip(usable, weights, strict=True):
        left -= weight
        if left < 0:
            return position
    return usable[-1]


def round_robin(usable: Sequence[int], after: int) -> int:
    """The first candidate at position `after` or behind it, around the end."""
    place = bisect_left(usable, after)
    return usable[place if place < len(usable) else 0]
