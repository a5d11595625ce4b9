"""Each picker takes a candidate, by its rule."""

from __future__ import annotations

from collections import Counter
from math import exp
from random import Random

import pytest
from fleet import Fleet, an_engine
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.pickers import p2c, pick, round_robin, softmax
from extproc.routing.ranking import Ranking
from extproc.routing.strategy import Picker, Strategy

UNIT = 2**30
_SCORES = st.dictionaries(st.integers(0, 50), st.integers(0, UNIT), min_size=1, max_size=20)


@given(_SCORES, st.integers(0, 99))
def test_p2c_takes_a_candidate_and_never_the_worst_of_three(
    scores: dict[int, int], seed: int
) -> None:
    """The pick is a candidate that beats or equals another one, where there is another."""
    usable = sorted(scores)
    found = p2c(usable, None, scores.__getitem__, Random(seed))
    assert found in scores
    if len(usable) > 1:
        others = [scores[position] for position in usable if position != found]
        assert scores[found] >= min(others)


@given(_SCORES, st.integers(0, 99), st.data())
def test_p2c_always_has_the_sessions_target(
    scores: dict[int, int], seed: int, data: st.DataObject
) -> None:
    """What is taken is the target or something at least as good."""
    usable = sorted(scores)
    target = data.draw(st.sampled_from(usable))
    found = p2c(usable, target, scores.__getitem__, Random(seed))
    assert found == target or scores[found] >= scores[target]


def test_p2c_draws_a_tie() -> None:
    """Of two equals each is taken about half the time."""
    random = Random(1)
    counter = Counter(p2c([4, 7], None, lambda _: 5, random) for _ in range(2000))
    assert set(counter) == {4, 7}
    assert abs(counter[4] - counter[7]) < 200


@pytest.mark.parametrize("temperature", [0.5, 0.02])
def test_softmax_takes_by_the_exponential_of_the_score(temperature: float) -> None:
    """The shares are those of exp(score / temperature), also where rejection hardly ever ends."""
    scores = {0: 0, 1: UNIT // 10, 2: UNIT // 2, **dict.fromkeys(range(3, 40), 0)}
    weights = {position: exp(score / UNIT / temperature) for position, score in scores.items()}
    random = Random(5)
    rounds = 4000
    counter = Counter(
        softmax(sorted(scores), scores.__getitem__, UNIT // 2, temperature, random)
        for _ in range(rounds)
    )
    for position in (0, 1, 2):
        expected = rounds * weights[position] / sum(weights.values())
        assert abs(counter[position] - expected) < 5 * max(2.0, expected**0.5)


class Stuck(Random):
    """Always says the same."""

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self.value = value

    def random(self) -> float:
        """The same."""
        return self.value


def test_softmax_ends_whatever_is_drawn() -> None:
    """After 64 rejections it is one draw from the sum, and rounding cannot fall off its end."""
    scores = {0: 0, 1: UNIT, 2: 0}
    almost = 1.0 - 2.0**-53
    assert softmax([0, 1, 2], scores.__getitem__, UNIT, 0.01, Stuck(almost)) in {1, 2}
    assert softmax([0, 1, 2], scores.__getitem__, UNIT, 0.1, Stuck(0.3)) == 1
    beyond = Stuck(1.0)
    beyond_scores = {0: 0}
    assert softmax([0, 0], lambda _: beyond_scores[0], UNIT, 0.1, _Last(beyond)) == 0


class _Last(Random):
    """The first candidate, and then never accepted and just beyond the sum."""

    def __init__(self, beyond: Random) -> None:
        super().__init__(0)
        self.turn = 0
        self.beyond = beyond

    def random(self) -> float:
        """0 for the position, 1 for everything else."""
        self.turn += 1
        return 0.0 if self.turn % 2 and self.turn <= 128 else self.beyond.random()


@given(st.sets(st.integers(0, 30), min_size=1), st.integers(0, 31))
def test_round_robin_gives_everyone_a_turn(positions: set[int], after: int) -> None:
    """As many turns as candidates go once to each, in order."""
    usable = sorted(positions)
    turns = []
    for _ in usable:
        turns.append(round_robin(usable, after))
        after = turns[-1] + 1
    assert sorted(turns) == usable


@pytest.mark.parametrize(
    ("picker", "temperature", "expected"),
    [
        (Picker.MAX_SCORE, 0.1, 1),
        (Picker.SOFTMAX, 0.0, 1),
        (Picker.SOFTMAX, 1e-6, 1),
        (Picker.ROUND_ROBIN, 0.1, 2),
        (Picker.P2C, 0.1, 1),
    ],
)
def test_a_strategy_names_its_picker(picker: Picker, temperature: float, expected: int) -> None:
    """Each name leads to its rule."""
    fleet = Fleet(an_engine("a"), an_engine("b"), an_engine("c"))
    fleet.load("a", 3)
    fleet.load("c", 3)
    strategy = Strategy("s", picker=picker, temperature=temperature)
    table = fleet.table(strategy)
    pool = table.pools[0]
    ranking = Ranking(table, pool, (), refused=frozenset(), now=100.0, random=Random(1))
    found = pick(strategy, ranking, pool.usable, target=1, after=2, random=Random(1))
    assert found == expected
