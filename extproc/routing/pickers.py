"""How one candidate is taken from the scored ones; a pick is always a candidate.

Best of all in every simulation is to take the best. The others are for who wants them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import exp
from random import Random
from typing import Final, assert_never

from extproc.routing.grid import SCORE_SCALE
from extproc.routing.ranking import Ranking
from extproc.routing.strategy import Picker, Strategy

_REJECTIONS: Final = 64


def pick(
    strategy: Strategy,
    ranking: Ranking,
    usable: Sequence[int],
    *,
    target: int | None,
    after: int,
    random: Random,
) -> int:
    """The candidate that the strategy's picker takes; there must be one.

    `usable` are the candidates' positions, sorted. `target` is the session's, if it has one.
    `after` is the position behind the one that had the last turn. A temperature of 0 is max-score.
    """
    match strategy.picker:
        case Picker.MAX_SCORE:
            return ranking.best()
        case Picker.P2C:
            return p2c(usable, target, ranking.score, random)
        case Picker.SOFTMAX:
            if strategy.temperature <= 0:
                return ranking.best()
            top = ranking.highest()
            return softmax(usable, ranking.score, top, strategy.temperature, random)
        case Picker.ROUND_ROBIN:
            return round_robin(usable, after)
    assert_never(strategy.picker)


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
