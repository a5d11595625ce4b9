"""The smoke test's verdict: what counts as good, and how it is said."""

from __future__ import annotations

import pytest

from extproc.lab.smoke import Verdict


def verdict(failed: int = 0, inflight: int = 0, **spread: int) -> Verdict:
    """A verdict on 200 requests; engine a is broken where it has no share."""
    sound = frozenset(name for name in spread if spread[name] or name != "a")
    return Verdict(200, failed, spread, inflight, sound)


def test_the_line_says_it_all() -> None:
    """The last line has a fixed form."""
    good = verdict(a=70, b=60, c=70)
    assert str(good) == "smoke: 200 sent, 0 failed, spread 70/60/70, in-flight 0"
    assert good.is_good


def test_a_broken_engine_needs_no_share() -> None:
    """The others' counters must still add up."""
    assert verdict(a=0, b=100, c=100).is_good


@pytest.mark.parametrize(
    "bad",
    [
        verdict(failed=1, a=70, b=60, c=70),
        verdict(inflight=1, a=70, b=60, c=70),
        verdict(a=70, b=60, c=69),
        verdict(a=70, b=60, c=71),
        verdict(a=121, b=40, c=39),
    ],
    ids=["failed", "in flight", "too few", "too many", "uneven"],
)
def test_anything_else_is_not_good(bad: Verdict) -> None:
    """A failure, a leftover, a wrong sum or a starved engine is a failure."""
    assert not bad.is_good
