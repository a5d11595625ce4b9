"""A session prefers where it was, then where the ring puts it, within limits."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from fleet import NOW, Fleet, an_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.routing.affinity import bonuses
from extproc.routing.ring import Ring, bounded_target, session_hash
from extproc.routing.strategy import Strategy, Weights
from extproc.routing.table import Table

NOBODY: frozenset[int] = frozenset()
CHAT = Strategy("chat")
SESSION = session_hash("m", b"s")


def targets(table: Table, session: int = SESSION, last: str | None = None) -> list[str]:
    """The ids of the session's targets."""
    pool = table.candidates(NOBODY)
    assert pool is not None
    found = bonuses(table, pool, session, last, lambda t: Ring(t.ids))
    return [table.ids[position] for position, _ in found]


def fleet_of(loads: Mapping[str, int], strategy: Strategy = CHAT) -> Table:
    """A table with so many requests at each."""
    fleet = Fleet(*map(an_engine, loads))
    for name, count in loads.items():
        fleet.load(name, count)
    return fleet.table(strategy)


def test_a_new_session_has_two_targets_of_the_ring() -> None:
    """The first gets the whole bonus, the second 0.7 of it."""
    table = fleet_of(dict.fromkeys("abcde", 0))
    walk = [table.ids[position] for position in Ring(table.ids).targets(SESSION)]
    assert targets(table) == walk[:2]
    found = bonuses(table, table.pools[0], SESSION, None, lambda t: Ring(t.ids))
    assert [bonus for _, bonus in found] == [table.first_bonus, table.second_bonus]


def test_a_remembered_endpoint_is_the_only_target() -> None:
    """Where the session was is where it wants to be."""
    table = fleet_of(dict.fromkeys("abcde", 0))
    assert all(targets(table, last=name) == [name] for name in "abcde")


def test_a_remembered_endpoint_over_its_limit_gives_no_preference() -> None:
    """Load decides then; the ring is not asked."""
    table = fleet_of({"a": 9, "b": 1, "c": 1})
    assert targets(table, last="a") == []
    assert targets(table, last="b") == ["b"]


@pytest.mark.parametrize(("count", "expected"), [(5, ["a"]), (6, [])])
def test_the_limit_has_a_slack_of_four(count: int, expected: list[str]) -> None:
    """On an idle pool an endpoint may have max(1, 1.25 · mean) + 4."""
    table = fleet_of({"a": count, **dict.fromkeys("bcdefghijklm", 0)})
    assert targets(table, last="a") == expected


def test_the_limit_is_by_weight() -> None:
    """A small endpoint is over its limit where a large one is not."""
    fleet = Fleet(an_engine("a", weight=0.25), an_engine("b", weight=1.0))
    fleet.load("a", 16)
    fleet.load("b", 16)
    table = fleet.table()
    assert targets(table, last="a") == []
    assert targets(table, last="b") == ["b"]


def test_who_is_no_candidate_is_no_target() -> None:
    """Remembered at one that is open, the session goes where the ring puts it."""
    fleet = Fleet(*map(an_engine, "abcde"))
    table = fleet.table()
    first, second, third = targets(table)[0], targets(table)[1], None
    fleet.break_until(first, NOW + 5)
    table.refresh(NOW)
    third = targets(table, last=first)
    assert third[0] == second
    assert first not in third
    assert targets(table, last="unheard of") == third


def test_a_lower_pool_has_no_targets() -> None:
    """What is remembered in a pool that does not serve is as if forgotten."""
    fleet = Fleet(an_engine("a"), an_engine("b", priority=1), an_engine("c", priority=1))
    assert set(targets(fleet.table(), last="a")) == {"b", "c"}


def test_one_candidate_needs_no_preference() -> None:
    """Nor does a strategy that does not ask."""
    assert targets(fleet_of({"a": 0})) == []
    indifferent = Strategy("s", Weights(session=0.0))
    assert targets(fleet_of({"a": 0, "b": 0}, indifferent)) == []


def test_all_over_the_limit_means_the_first_target() -> None:
    """Insisting beats losing affinity where everyone is as loaded."""
    strict = Strategy("s", session_bound_factor=0.1, session_bound_slack=0.0)
    table = fleet_of(dict.fromkeys("abcd", 9), strict)
    walk = [table.ids[position] for position in Ring(table.ids).targets(SESSION)]
    assert targets(table) == walk[:1]


def test_one_within_the_limit_is_the_only_target() -> None:
    """The walk ends when every candidate was seen."""
    strict = Strategy("s", session_bound_factor=1.0, session_bound_slack=0.0)
    table = fleet_of({"a": 9, "b": 9, "c": 0, "d": 9}, strict)
    assert targets(table) == ["c"]


@settings(deadline=None)
@given(
    loads=st.lists(st.integers(0, 12), min_size=2, max_size=8),
    session=st.integers(0, 2**64 - 1),
    weights=st.lists(st.sampled_from((0.25, 0.5, 1.0)), min_size=8, max_size=8),
)
def test_the_first_target_is_that_of_the_bounded_ring(
    loads: list[int], session: int, weights: list[float]
) -> None:
    """Without memory the first target is the ring's bounded one, whatever the slack."""
    for slack in (0.0, 4.0):
        infos = [
            an_engine(f"e{number}", weight=weight)
            for number, weight in zip(range(len(loads)), weights, strict=False)
        ]
        fleet = Fleet(*infos)
        for info, count in zip(infos, loads, strict=True):
            fleet.load(info.id, count)
        table = fleet.table(Strategy("s", session_bound_slack=slack))
        expected = bounded_target(Ring(table.ids), session, loads, weights=table.rels, slack=slack)
        assert expected is not None
        assert targets(table, session)[0] == table.ids[expected]
