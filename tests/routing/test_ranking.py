"""Candidates come out by score, ties are drawn evenly, and both ways of ranking agree."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from fleet import NOW, Fleet, an_engine, an_external
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.routing.endpoint import Stats
from extproc.routing.ranking import Ranking, leaders
from extproc.routing.table import Table

NOBODY: frozenset[int] = frozenset()


def ranking_of(
    table: Table,
    *,
    bonuses: tuple[tuple[int, int], ...] = (),
    refused: frozenset[int] = NOBODY,
    random: Random | None = None,
    now: float = NOW,
) -> Ranking:
    """A ranking of the highest pool."""
    pool = table.candidates(NOBODY)
    assert pool is not None
    return Ranking(table, pool, bonuses, refused=refused, now=now, random=random or Random(1))


def loaded(*counts: int, taught: int | None = None) -> Table:
    """A table of engines with so many requests each, of which the first `taught` have a rate."""
    infos = [an_engine(f"e{number:02}") for number in range(len(counts))]
    fleet = Fleet(*infos)
    fleet.teach(*(info.id for info in infos[:taught]))
    for info, count in zip(infos, counts, strict=True):
        fleet.load(info.id, count)
    return fleet.table()


@given(
    counts=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    taught=st.none() | st.integers(0, 8),
    targets=st.lists(st.integers(0, 7), max_size=2, unique=True),
    amounts=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    count=st.integers(1, 9),
)
@settings(deadline=None)
def test_the_short_way_is_the_long_way(
    counts: list[int],
    taught: int | None,
    targets: list[int],
    amounts: tuple[int, int],
    count: int,
) -> None:
    """Where all stand in groups, both find the same list with the same draws."""
    table = loaded(*counts, taught=taught)
    pool = table.pools[0]
    pool.set_offsets(table.scale.weights)
    levels = sorted({ranking_of(table).score(position) for position in pool.usable})
    # Bonuses that lift a target just to another's level, so that ties come about.
    steps = [high - low for high in levels for low in levels if high >= low]
    bonuses = tuple(
        (target, steps[amount % len(steps)])
        for target, amount in zip(targets, amounts, strict=False)
        if target < len(counts)
    )
    short, long = Random(count), Random(count)
    found = leaders(table, pool.groups, bonuses, count, short)
    ranking = ranking_of(table, bonuses=bonuses, random=long)
    assert found == ranking.behind(ranking.best(), count - 1)
    assert short.getstate() == long.getstate()
    assert len(set(found)) == len(found) == min(count, len(counts))


@pytest.mark.parametrize("way", ["short", "long"])
def test_equals_are_drawn_evenly(way: str) -> None:
    """Each of four equals is first, second and third about as often; the loaded one never."""
    table = loaded(0, 0, 5, 0, 0)
    random = Random(7)
    places: list[Counter[int]] = [Counter(), Counter(), Counter()]
    for _ in range(4000):
        if way == "short":
            found = leaders(table, table.pools[0].groups, (), 3, random)
        else:
            ranking = ranking_of(table, random=random)
            found = ranking.behind(ranking.best(), 2)
        for counter, position in zip(places, found, strict=True):
            counter[position] += 1
    for counter in places:
        assert set(counter) == {0, 1, 3, 4}
        assert all(850 < times < 1150 for times in counter.values())


def test_one_best_draws_nothing() -> None:
    """Without a tie the Random is not touched."""
    table = loaded(3, 1, 2)
    random = Random(5)
    state = random.getstate()
    assert leaders(table, table.pools[0].groups, (), 3, random) == [1, 2, 0]
    assert ranking_of(table, random=random).best() == 1
    assert random.getstate() == state


def test_a_bonus_lifts_a_target() -> None:
    """The session's target comes first although another has less load, and only once."""
    table = loaded(0, 2, 4)
    bonuses = ((2, 2**29),)
    assert leaders(table, table.pools[0].groups, bonuses, 3, Random(1)) == [2, 0, 1]


def test_the_refused_are_never_taken() -> None:
    """Neither from a group nor for a bonus; without them nobody is left."""
    table = loaded(0, 2, 4)
    ranking = ranking_of(table, bonuses=((0, 2**29), (1, 2**28)), refused=frozenset({0}))
    assert ranking.best() == 1
    assert ranking.behind(1, 5) == [1, 2]
    assert ranking.best() == -1


def test_only_those_that_can_stand_in_come_behind() -> None:
    """Of two kinds, what comes behind one is of its kind, however good the other is."""
    fleet = Fleet(an_engine("a"), an_external("b"), an_engine("c"), an_external("d"))
    fleet.load("c", 9)
    fleet.load("d", 9)
    table = fleet.table()
    assert ranking_of(table).behind(0, 3) == [0, 2]
    assert ranking_of(table).behind(1, 3) == [1, 3]


def test_the_short_way_goes_through_several_groups() -> None:
    """Busy engines without a rate stand in a group of their own, between the others."""
    table = loaded(2, 0, 5, 1, 4, taught=2)
    pool = table.pools[0]
    pool.set_offsets(table.scale.weights)
    assert len(pool.groups) == 2
    found = leaders(table, pool.groups, (), 5, Random(1))
    scores = [ranking_of(table).score(position) for position in found]
    assert scores == sorted(scores, reverse=True)
    assert sorted(found) == [0, 1, 2, 3, 4]


def test_equals_in_several_groups_are_drawn_evenly() -> None:
    """Idle externals and idle engines tie, and each has its chance."""
    fleet = Fleet(*[an_engine(f"e{n}") for n in range(3)], an_external("x"), an_external("y"))
    table = fleet.table()
    assert len(table.pools[0].groups) == 2
    random = Random(3)
    counter = Counter(ranking_of(table, random=random).best() for _ in range(5000))
    assert set(counter) == {0, 1, 2, 3, 4}
    assert all(850 < times < 1150 for times in counter.values())


@pytest.mark.parametrize("count", [5, 40])
def test_slow_starts_stand_among_the_others(count: int) -> None:
    """Few or many, newcomers come behind a fresh idle endpoint and before a crowded one."""
    fleet = Fleet(an_engine("a"), an_engine("b"))
    fleet.load("a", 1)
    fleet.load("b", 60)
    names = [f"n{number:02}" for number in range(count)]
    newcomers = [an_engine(name) for name in names]
    fleet.registry.replace([an_engine("a"), an_engine("b"), *newcomers], NOW)
    fleet.scrape(Stats(running=0, waiting=0, kv_usage_ratio=0.0), *names)
    fleet.load(names[-1], 1)
    table = fleet.table()
    ranking = ranking_of(table)
    assert len(table.pools[0].slow) == count
    order = ranking.behind(ranking.best(), count + 2)
    assert table.ids[order[-1]] == "b"
    assert table.ids[order[-2]] == names[-1]
    assert len(set(order)) == count + 2
    assert ranking_of(table).highest() == ranking_of(table).score(order[0])
    assert ranking_of(table).score(order[0]) >= ranking_of(table).score(order[-2])


def test_a_slow_target_keeps_its_bonus() -> None:
    """A session's target that starts slowly is lifted like any other, few or many slow."""
    for count in (3, 30):
        fleet = Fleet(an_engine("a"))
        names = [f"n{number:02}" for number in range(count)]
        fleet.registry.replace([an_engine("a"), *map(an_engine, names)], NOW)
        table = fleet.table()
        ranking = ranking_of(table, bonuses=((2, 2**29),), refused=frozenset({1}))
        assert ranking.best() == 2
        assert 1 not in ranking.behind(2, count + 1)


def test_ties_of_slow_starts_are_drawn() -> None:
    """Forty equal newcomers all have their chance."""
    fleet = Fleet(an_engine("a"))
    names = [f"n{number:02}" for number in range(40)]
    fleet.registry.replace([an_engine("a"), *map(an_engine, names)], NOW)
    fleet.load("a", 50)
    table = fleet.table()
    random = Random(11)
    counter = Counter(ranking_of(table, random=random).best() for _ in range(2000))
    assert set(counter) == set(range(1, 41))
