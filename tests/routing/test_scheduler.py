"""The scheduler filters, scores, picks and acquires by the rules."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from histories import STEPS, History, Step


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 5), min_size=1, max_size=7), st.integers(0, 99), st.data())
def test_it_decides_as_the_reference_over_any_history(
    kinds: list[int], seed: int, data: st.DataObject
) -> None:
    """Whatever has happened, list, scores, filters, refusals and draws are the reference's."""
    history = History(kinds, seed)
    steps = data.draw(st.lists(STEPS, max_size=60))
    for step in steps:
        step(history)
    history.check_memory()
