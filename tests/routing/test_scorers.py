"""The formulas are what their docstrings say, from 0 to 1, and exact on the grid."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing import scorers
from extproc.routing.strategy import BUILT_IN, Weights

_COUNTS = st.none() | st.integers(0, 10**6)
_RELS = st.floats(2**-30, 1.0)
_KNEES = st.floats(0.01, 1e6)
_LOADS = st.floats(0.0, 1e9)


@pytest.mark.parametrize(
    ("waiting", "score"), [(None, None), (-3, 1.0), (0, 1.0), (8, 0.5), (24, 0.25)]
)
def test_queue_halves_at_the_knee(waiting: int | None, score: float | None) -> None:
    """1 / (1 + q/8), free slots score 1, and unknown stays unknown."""
    assert scorers.queue(waiting, 1.0, 8.0) == score


def test_queue_counts_more_at_a_small_endpoint() -> None:
    """The queue is taken relative to the endpoint's weight."""
    assert scorers.queue(4, 0.5, 8.0) == scorers.queue(8, 1.0, 8.0)


@pytest.mark.parametrize(
    ("waiting", "running", "capacity", "own", "expected"),
    [
        (None, 3, 8, 5, None),
        (2, 8, 8, 3, 5),
        (2, 6, 8, 3, 3),
        (0, 2, 8, 3, -3),
        (2, 9, 8, 0, 2),
        (2, 6, 8, -4, -4),
        (2, None, 8, 3, 2),
        (2, 6, 0, 3, 2),
    ],
)
def test_backlog_nets_our_own_requests_with_the_free_slots(
    waiting: int | None, running: int | None, capacity: int, own: int, expected: int | None
) -> None:
    """Waiting + own - free slots; without a capacity or a running count, waiting alone."""
    assert scorers.backlog(waiting, running, capacity, own) == expected


@pytest.mark.parametrize(
    ("usage", "score"),
    [(None, None), (0.0, 1.0), (0.5, 1.0), (0.7, 0.5), (0.9, 0.0), (0.95, 0.0), (1.5, 0.0)],
)
def test_kv_falls_from_the_knee_to_the_ceiling(usage: float | None, score: float | None) -> None:
    """1 up to 0.5, linear to 0 at 0.9, 0 above."""
    found = scorers.kv(usage, 0.5, 0.9)
    assert found == (None if score is None else pytest.approx(score))


@pytest.mark.parametrize(("x", "score"), [(0.0, 1.0), (8.0, 0.5), (24.0, 0.25)])
def test_inflight_halves_at_the_knee(x: float, score: float) -> None:
    """1 / (1 + x/8)."""
    assert scorers.inflight(x, 8.0) == score


@pytest.mark.parametrize(
    ("n", "rate", "score"),
    [
        (0.0, None, 1.0),
        (0.0, 0.0, 1.0),
        (1.0, None, None),
        (1.0, 0.0, None),
        (6.0, 2.0, 0.5),
        (18.0, 2.0, 0.25),
    ],
)
def test_load_is_the_expected_wait(n: float, rate: float | None, score: float | None) -> None:
    """No load is 1 before anything else; a rate of 0 or none is unknown; else 1 / (1 + W/3)."""
    assert scorers.load(n, rate, 3.0) == score


def test_long_prompts_count_as_more_requests() -> None:
    """4000 tokens are one request more."""
    assert scorers.requests(2, 6000.0) == 3.5


@pytest.mark.parametrize(
    ("since", "x"),
    [(0.0, 30.0 + 0.9 * 4), (0.5, 30.0 + 0.9 * 4), (2.5, 6.0 + 0.5 * 4), (5.0, 3.0), (9.0, 3.0)],
)
def test_a_slow_start_inflates_the_load(since: float, x: float) -> None:
    """x/r + (1 - r) · mean, r = max(0.1, t/5), and x itself from the end on."""
    assert scorers.slowed(3.0, 4.0, since, 5.0) == pytest.approx(x)


def test_weight_is_the_relative_weight() -> None:
    """The scorer that is off by default says the weight over the largest."""
    assert scorers.weight(0.25) == 0.25


def test_a_stale_signal_is_the_mean_less_a_hundredth() -> None:
    """Unknown counts for the mean; stale for 0.01 of the weight less, and never below 0."""
    assert scorers.lacking(0.3, 0.5, is_stale=False) == 0.3
    assert scorers.lacking(0.3, 0.5, is_stale=True) == pytest.approx(0.295, abs=1e-9)
    assert scorers.lacking(0.001, 0.5, is_stale=True) == 0.0


@given(
    waiting=_COUNTS,
    running=_COUNTS,
    capacity=st.integers(0, 10**6),
    own=st.integers(-1000, 10**6),
    rel=_RELS,
    knee=_KNEES,
)
def test_queue_is_a_score(
    *, waiting: int | None, running: int | None, capacity: int, own: int, rel: float, knee: float
) -> None:
    """Any queue scores from 0 to 1."""
    score = scorers.queue(scorers.backlog(waiting, running, capacity, own), rel, knee)
    assert score is None or 0.0 <= score <= 1.0


@given(n=_LOADS, rate=st.none() | st.floats(0.0, 1e6), knee=_KNEES, rel=_RELS)
def test_loads_are_scores(n: float, rate: float | None, knee: float, rel: float) -> None:
    """Any load scores from 0 to 1."""
    score = scorers.load(n, rate, knee)
    assert score is None or 0.0 <= score <= 1.0
    assert 0.0 <= scorers.inflight(n / rel, knee) <= 1.0


@given(usage=st.floats(-1.0, 2.0), knee=st.floats(0.0, 1.0), ceiling=st.floats(0.0, 1.0))
def test_kv_is_a_score(usage: float, knee: float, ceiling: float) -> None:
    """Any usage scores from 0 to 1, whatever the knee and the ceiling are."""
    score = scorers.kv(usage, knee, ceiling)
    assert score is not None
    assert 0.0 <= score <= 1.0


@given(x=_LOADS, mean=st.floats(0.0, 1e6), since=st.floats(0.0, 10.0))
def test_a_slow_start_never_helps(x: float, mean: float, since: float) -> None:
    """An endpoint that starts slowly counts as at least as loaded as it is."""
    assert scorers.slowed(x, mean, since, 5.0) >= x


def test_shares_add_up_to_the_whole() -> None:
    """A strategy's weights are scaled to a sum of 1 and keep their proportions."""
    shares = scorers.shares(BUILT_IN["chat"].weights)
    assert shares.queue == shares.inflight == shares.session
    assert shares.queue == pytest.approx(2 / 7, abs=1e-9)
    assert shares.weight == 0.0


def test_no_weights_have_no_shares() -> None:
    """Where every weight is 0, every share is."""
    nothing = Weights(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert scorers.shares(nothing) == nothing
