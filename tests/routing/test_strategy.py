"""The three built-in strategies are the ones that were measured."""

from __future__ import annotations

from dataclasses import fields

import pytest

from extproc.routing.strategy import BUILT_IN, Picker, Scorer, Weights


@pytest.mark.parametrize(
    ("name", "weights", "inflight_knee"),
    [
        ("chat", (2, 0.5, 2, 0.5, 2), 8),
        ("long-context", (2, 1, 2, 0.25, 2), 16),
        ("batch", (2, 1, 2, 2, 1), 8),
    ],
)
def test_the_built_in_strategies_differ_in_weights(
    name: str, weights: tuple[float, ...], inflight_knee: float
) -> None:
    """Queue, KV, in-flight, load and session as measured; the weight scorer is off."""
    strategy = BUILT_IN[name]
    found = strategy.weights
    assert (found.queue, found.kv, found.inflight, found.load, found.session) == weights
    assert found.weight == 0
    assert strategy.inflight_knee == inflight_knee
    assert strategy.picker is Picker.MAX_SCORE
    assert strategy.name == name


def test_every_scorer_has_a_weight() -> None:
    """A scorer's name is the name of its weight."""
    assert {scorer.value for scorer in Scorer} == {field.name for field in fields(Weights)}
