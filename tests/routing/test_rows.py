"""A strategy makes weighted scores of what was read of an endpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fleet import EVEN, ROW, a_row

from extproc.routing.endpoint import Stats
from extproc.routing.rows import KV, LOAD, QUEUE, STALE, Scale
from extproc.routing.strategy import Strategy, Weights


def test_every_scorer_gets_its_share() -> None:
    """Four even scorers at their knees are worth an eighth each, half in all."""
    scores = EVEN.scores(ROW, 1.0)
    parts = (scores.queue, scores.kv, scores.load, scores.inflight)
    assert parts == pytest.approx((0.125,) * 4, abs=1e-9)
    assert scores.total == sum(parts)
    assert scores.signature == 0


@pytest.mark.parametrize(
    ("stats", "signature"),
    [
        (Stats(running=8, kv_usage_ratio=0.7), QUEUE),
        (Stats(running=8, waiting=8), KV),
        (Stats(), QUEUE | KV),
    ],
)
def test_what_a_scrape_does_not_say_is_lacking(stats: Stats, signature: int) -> None:
    """An unknown signal is worth nothing by itself and is marked."""
    scores = EVEN.scores(a_row(stats=stats), 1.0)
    assert scores.signature == signature
    assert (scores.queue == 0.0) is bool(signature & QUEUE)
    assert (scores.kv == 0.0) is bool(signature & KV)


def test_a_load_without_a_rate_is_lacking_and_no_load_is_not() -> None:
    """The load score is 1 where nothing runs, before anything else."""
    assert EVEN.scores(a_row(drain_rate=None), 1.0).signature == LOAD
    idle = EVEN.scores(a_row(drain_rate=None, inflight=0), 1.0)
    assert idle.signature == 0
    assert idle.load == 0.25


def test_a_stale_endpoint_has_only_what_is_ours() -> None:
    """Queue, KV and load are lacking and stale; in-flight is not."""
    scores = EVEN.scores(a_row(is_stale=True), 1.0)
    assert scores.signature == QUEUE | KV | LOAD | STALE
    assert scores.total == scores.inflight == pytest.approx(0.125, abs=1e-9)
    assert EVEN.scores(a_row(is_stale=True, inflight=0), 1.0).load == 0.25


def test_a_scorer_of_weight_0_is_not_asked() -> None:
    """What nobody asks for is not lacking."""
    scale = Scale(Strategy("inflight", Weights(0.0, 0.0, 1.0, 0.0, 0.0, 0.0)))
    scores = scale.scores(a_row(stats=Stats(), drain_rate=None), 1.0)
    assert scores.signature == 0
    assert scores.total == 0.5


def test_the_load_is_relative_to_the_weight() -> None:
    """Half the weight with half the load scores the same."""
    whole = EVEN.scores(a_row(stats=Stats(waiting=8)), 1.0)
    half = EVEN.scores(a_row(stats=Stats(waiting=4), inflight=4), 0.5)
    assert (half.queue, half.inflight) == (whole.queue, whole.inflight)


def test_the_weight_scorer_is_a_constant() -> None:
    """It is the relative weight, whatever happens."""
    scale = Scale(Strategy("weight", Weights(0.0, 0.0, 0.0, 0.0, 1.0, 0.0)))
    assert scale.constant(0.25) == 0.25
    assert scale.scores(ROW, 0.25).total == 0.25


def test_a_slow_start_takes_the_load_score_out_of_the_sum() -> None:
    """What depends on the moment is scored at the moment."""
    slow = a_row(slow_from=100.0)
    scores = EVEN.scores(slow, 1.0)
    assert scores.inflight == 0.0
    at_once = EVEN.slow_inflight(slow, 1.0, 4.0, 100.0, 5.0)
    later = EVEN.slow_inflight(slow, 1.0, 4.0, 104.0, 5.0)
    assert at_once < later < EVEN.scores(ROW, 1.0).inflight
    assert EVEN.slow_inflight(slow, 1.0, 4.0, 105.0, 5.0) == EVEN.scores(ROW, 1.0).inflight


def test_a_sessions_bonus_is_its_score_by_its_weight() -> None:
    """The second target gets 0.7 of the first one's."""
    scale = Scale(replace(EVEN.strategy, weights=Weights(session=2.0)))
    first, second = scale.session_units(1.0), scale.session_units(0.7)
    assert first == round(2 / 7 * 2**30)
    assert second == pytest.approx(0.7 * first, abs=1)
