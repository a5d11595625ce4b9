"""What scrapes teach about one endpoint, when its numbers are stale, and what a grant holds."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.routing.breaker import Breaker
from extproc.routing.endpoint import BreakerState, Info, Kind, Snapshot, Stats, Url
from extproc.routing.live import Live

INFO = Info("a", Url("http", "a", 8000), ("m",))


def a_live(info: Info = INFO) -> Live:
    """A fresh endpoint."""
    return Live(info, 1, Breaker(info.breaker, Random(0)), None)


def scrape(
    live: Live,
    now: float,
    total: float | None,
    *,
    running: int | None = 0,
    waiting: int | None = 0,
) -> None:
    """The endpoint was scraped."""
    live.observe(Stats(running=running, waiting=waiting, success_total=total), now, 0.3)


def rate(live: Live) -> float | None:
    """The drain rate as it is now."""
    return live.drain_rate


# Drain rate and capacity.


def test_the_drain_rate_is_smoothed_completions_per_second() -> None:
    """The first rate counts whole, each later one three tenths."""
    live = a_live()
    scrape(live, 0.0, 100.0, waiting=1)
    assert rate(live) is None
    scrape(live, 2.0, 120.0, waiting=1)
    assert rate(live) == 10.0
    scrape(live, 4.0, 160.0, waiting=1)
    assert rate(live) == pytest.approx(0.3 * 20.0 + 0.7 * 10.0)


def test_an_idle_scrape_teaches_no_rate() -> None:
    """Only waiting requests, or more than half the capacity running, make a scrape busy."""
    live = a_live()
    scrape(live, 0.0, 0.0, running=10, waiting=1)
    scrape(live, 1.0, 5.0, running=5)
    assert rate(live) is None
    scrape(live, 2.0, 11.0, running=6)
    assert rate(live) == 6.0
    scrape(live, 3.0, 11.0, running=0)
    assert rate(live) == 6.0
    scrape(live, 4.0, 13.0, running=0, waiting=3)
    assert rate(live) == pytest.approx(0.3 * 2.0 + 0.7 * 6.0)


def test_without_a_known_capacity_only_a_queue_is_busy() -> None:
    """The most that ever ran may have been one request of an engine that fits a hundred."""
    live = a_live()
    for now in range(5):
        scrape(live, float(now), 10.0 * now, running=1)
    assert rate(live) is None
    scrape(live, 5.0, 60.0, running=1, waiting=1)
    assert rate(live) == 20.0


def test_busy_is_unknown_when_the_engine_says_neither() -> None:
    """Unknown running and waiting teach nothing."""
    live = a_live()
    for now in range(5):
        scrape(live, float(now), 10.0 * now, running=None, waiting=None)
    assert rate(live) is None


def test_a_busy_engine_that_completes_nothing_has_a_rate_of_zero() -> None:
    """Zero is learned like any other rate; it is the scorer that calls it unknown."""
    live = a_live()
    scrape(live, 0.0, 7.0, waiting=1)
    scrape(live, 2.0, 7.0, waiting=1)
    assert rate(live) == 0.0


def test_a_restarted_engine_has_no_known_rate() -> None:
    """A total that went backwards skips the derivative and forgets the rate, not the capacity."""
    live = a_live()
    scrape(live, 0.0, 100.0, running=8, waiting=1)
    scrape(live, 2.0, 120.0, running=8)
    assert rate(live) == 10.0
    scrape(live, 4.0, 3.0, running=8)
    assert rate(live) is None
    assert live.running_capacity == 8
    scrape(live, 6.0, 13.0, running=8)
    assert rate(live) == 5.0


def test_a_page_without_the_total_bridges_to_the_next() -> None:
    """An unknown total is never zero: the rate is over the time between the two known ones."""
    live = a_live()
    scrape(live, 0.0, 100.0, waiting=1)
    scrape(live, 2.0, None, waiting=1)
    scrape(live, 3.0, float("nan"), waiting=1)
    assert rate(live) is None
    scrape(live, 4.0, 140.0, waiting=1)
    assert rate(live) == 10.0


def test_two_pages_of_one_moment_have_no_rate() -> None:
    """No time between them, no derivative, and none is lost."""
    live = a_live()
    scrape(live, 0.0, 0.0, waiting=1)
    scrape(live, 0.0, 5.0, waiting=1)
    assert rate(live) is None
    scrape(live, 1.0, 10.0, waiting=1)
    assert rate(live) == 10.0


def test_what_runs_without_a_queue_is_no_capacity() -> None:
    """It tells how much came; beside a queue it tells how much fits, until more is seen to fit."""
    live = a_live()
    scrape(live, 0.0, None, running=3)
    assert (live.most_running, live.running_capacity) == (3, 0)
    scrape(live, 1.0, None, running=2, waiting=4)
    assert live.running_capacity == 0
    scrape(live, 2.0, None, running=3, waiting=1)
    assert live.running_capacity == 3
    scrape(live, 3.0, None, running=3)
    assert live.running_capacity == 3
    scrape(live, 4.0, None, running=5)
    assert (live.most_running, live.running_capacity) == (5, 0)
    scrape(live, 5.0, None, running=8, waiting=1)
    assert (live.most_running, live.running_capacity) == (8, 8)


@settings(deadline=None)
@given(
    pages=st.lists(
        st.tuples(st.none() | st.integers(0, 9), st.none() | st.integers(0, 2)), max_size=20
    )
)
def test_the_capacity_is_the_highest_count_that_had_a_queue_beside_it(
    pages: list[tuple[int | None, int | None]],
) -> None:
    """In whatever order they came; unknown counts teach nothing; zero where it is not known."""
    live = a_live()
    for now, (running, waiting) in enumerate(pages):
        scrape(live, float(now), None, running=running, waiting=waiting)
    highest = max((running or 0 for running, _ in pages), default=0)
    assert live.most_running == highest
    has_queued = any(running == highest and waiting for running, waiting in pages)
    assert live.running_capacity == (highest if has_queued else 0)


@settings(deadline=None)
@given(
    pages=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.5, 2.0]),
            st.one_of(st.none(), st.floats(0.0, 1000.0)),
            st.integers(0, 9),
            st.integers(0, 2),
        ),
        max_size=30,
    )
)
def test_a_rate_is_unknown_or_between_the_rates_seen(
    pages: list[tuple[float, float | None, int, int]],
) -> None:
    """Smoothing never leaves the range of what was measured, and is never negative."""
    live, now, seen = a_live(), 0.0, [0.0]
    base: tuple[float, float] | None = None
    for seconds, total, running, waiting in pages:
        now += seconds
        if total is not None:
            if base is not None and now > base[1]:
                seen.append((total - base[0]) / (now - base[1]))
            if base is None or now > base[1] or total < base[0]:
                base = (total, now)
        scrape(live, now, total, running=running, waiting=waiting)
        assert live.drain_rate is None or 0.0 <= live.drain_rate <= max(seen) + 1e-9


def test_a_good_scrape_starts_the_counts_since_it_anew() -> None:
    """Dispatched and ended are since the last good scrape; in-flight is not theirs to change."""
    live = a_live()
    grants = [live.admit(None, 0.0, 0) for _ in range(3)]
    grants[0].end(1.0)
    assert (live.dispatched, live.ended, live.inflight) == (3, 1, 2)
    live.scrape_error = "timeout"
    scrape(live, 2.0, None)
    assert (live.dispatched, live.ended, live.inflight) == (0, 0, 2)
    assert not live.scrape_error
    grants[1].end(3.0)
    assert (live.dispatched, live.ended, live.inflight) == (0, 1, 1)


# Staleness.


def test_numbers_are_stale_after_ten_seconds_without_a_good_scrape() -> None:
    """A never-scraped engine is stale; exactly the limit is not yet."""
    live = a_live()
    assert live.is_stale(0.0, 10.0)
    scrape(live, 5.0, None)
    assert not live.is_stale(15.0, 10.0)
    assert live.is_stale(15.1, 10.0)


@pytest.mark.parametrize(
    "info",
    [
        replace(INFO, kind=Kind.EXTERNAL),
        replace(INFO, kind=Kind.PEER),
        replace(INFO, engine="none"),
    ],
)
def test_what_is_never_scraped_is_never_stale(info: Info) -> None:
    """Providers, peers and engines without metrics have no numbers that could be old."""
    assert not a_live(info).is_stale(1e6, 10.0)


def test_a_snapshot_is_the_endpoint_at_a_moment() -> None:
    """Everything known, the age of the numbers, and None where nothing is."""
    live = a_live()
    assert live.snapshot(3.0, 10.0) == Snapshot(
        INFO, Stats(), None, 0, 0, is_stale=True, age_seconds=None, breaker=BreakerState.CLOSED
    )
    live.admit(None, 3.0, 0)
    scrape(live, 4.0, 9.0, running=2, waiting=1)
    assert live.snapshot(5.5, 10.0) == Snapshot(
        INFO,
        Stats(running=2, waiting=1, success_total=9.0),
        None,
        1,
        2,
        is_stale=False,
        age_seconds=1.5,
        breaker=BreakerState.CLOSED,
    )


# Grants.


def test_a_grant_holds_its_place_and_its_size_until_it_ends_once() -> None:
    """A thirty-second stream counts one for thirty seconds; a second end changes nothing."""
    live = a_live()
    grant = live.admit(None, 0.0, 1000)
    assert (live.inflight, live.inflight_tokens) == (1, 250.0)
    assert (grant.ended, grant.ended_at) == (False, None)
    assert grant.end(30.0)
    assert (grant.ended, grant.ended_at) == (True, 30.0)
    assert not grant.end(31.0)
    assert grant.ended_at == 30.0
    assert (live.inflight, live.inflight_tokens, live.ended) == (0, 0.0, 1)


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 2**40), max_size=40), random=st.randoms(use_true_random=False))
def test_sizes_leave_no_remainder(sizes: list[int], random: Random) -> None:
    """Ended in any order, the sum of the sizes is exactly zero again."""
    live = a_live()
    grants = [live.admit(None, 0.0, size) for size in sizes]
    assert live.inflight_tokens == sum(sizes) / 4
    random.shuffle(grants)
    for grant in grants:
        grant.end(1.0)
    assert live.inflight_tokens == 0.0


def test_a_grant_is_charged_to_the_epoch_it_was_given_in() -> None:
    """One ticket serves an epoch; the next epoch has another."""
    live = a_live()
    first, second = live.admit(None, 0.0, 0), live.admit(None, 0.0, 0)
    assert first.ticket is second.ticket
    live.breaker.hold(5.0, 0.0)
    assert live.admit(None, 1.0, 0).ticket.epoch == first.ticket.epoch + 1


def test_watchers_are_told_of_every_change() -> None:
    """Each adds its position to its own set."""
    live = a_live()
    first: set[int] = set()
    second: set[int] = set()
    live.watchers += [(first, 4), (second, 9)]

    def told() -> bool:
        was = first == {4} and second == {9}
        first.clear()
        second.clear()
        return was

    grant = live.admit(None, 0.0, 0)
    assert told()
    grant.end(1.0)
    assert told()
    grant.end(1.0)
    assert not told()
    scrape(live, 2.0, None)
    assert told()
