"""Many slow starts are scored as one is, bit for bit."""

from __future__ import annotations

from fleet import EVEN, a_row
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.grid import SCORE_SCALE
from extproc.routing.slow import SlowStarts

_ROWS = st.tuples(
    st.integers(0, 500),
    st.sampled_from((0.0, 1000.0, 22_500.25)),
    st.floats(90.0, 110.0),
    st.sampled_from((1.0, 0.7, 0.01)),
    st.sampled_from((0, 3, 8)),
)


@given(st.lists(_ROWS, min_size=1, max_size=20), st.floats(0.0, 100.0), st.floats(100.0, 120.0))
def test_arrays_score_as_scalars(
    loads: list[tuple[int, float, float, float, int]], mean: float, now: float
) -> None:
    """Every total is that of the candidate alone, plus what it lacks."""
    slow = SlowStarts(len(loads) + 1)
    offsets = {0: 0, 3: 12_345, 8: 7}
    expected = {}
    for position, (inflight, tokens, started, rel, signature) in enumerate(loads):
        row = a_row(position=position, inflight=inflight, inflight_tokens=tokens, slow_from=started)
        slow.put(row, 1000 + position, signature, rel)
        own = EVEN.slow_inflight(row, rel, mean, now, 5.0)
        expected[position] = 1000 + position + int(own * SCORE_SCALE) + offsets[signature]
    totals = slow.totals(EVEN, mean, now, 5.0, offsets).tolist()
    assert dict(enumerate(totals[:-1])) == expected
    assert totals[-1] < 0


def test_who_is_not_slow_any_more_has_no_score() -> None:
    """A removed candidate is negative, and its signature is not counted."""
    slow = SlowStarts(2)
    slow.put(a_row(position=0, slow_from=1.0), 10, 3, 1.0)
    slow.put(a_row(position=1, slow_from=1.0), 10, 3, 1.0)
    assert slow.counts == {3: 2}
    slow.remove(0)
    assert slow.counts == {3: 1}
    assert slow.totals(EVEN, 0.0, 2.0, 5.0, {3: 0})[0] < 0
    slow.remove(1)
    assert slow.counts == {}
    assert not slow
