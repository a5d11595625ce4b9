"""Alarms go off at their moment, once, and do not pile up."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.alarms import Alarms


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), max_size=30))
def test_everyone_is_due_at_the_earliest_moment_set(moments: list[tuple[int, int]]) -> None:
    """Whatever the order, a position is due at the smallest of its moments, and once."""
    alarms = Alarms(4)
    earliest: dict[int, int] = {}
    for position, moment in moments:
        alarms.set(position, moment)
        earliest[position] = min(moment, earliest.get(position, moment))
    assert alarms.first == min(earliest.values(), default=inf)
    found = {}
    for now in range(22):
        for position in alarms.due(now):
            assert position not in found
            found[position] = now
    assert found == earliest
    assert alarms.first == inf
    assert len(alarms) == 0


def test_a_later_moment_is_set_by_who_is_woken() -> None:
    """Moving on makes no second alarm."""
    alarms = Alarms(1)
    for moment in range(10, 1000):
        alarms.set(0, moment)
    assert len(alarms) == 1
    assert alarms.due(9.9) == []
    assert alarms.due(10) == [0]
    alarms.set(0, 12)
    assert alarms.first == 12


def test_never_is_no_moment() -> None:
    """Infinity sets nothing."""
    alarms = Alarms(1)
    alarms.set(0, inf)
    assert len(alarms) == 0
