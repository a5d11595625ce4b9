"""Filters drop what a request may not go to, name the reason, and know when it ends."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nextafter

import pytest
from fleet import IDLE, MODEL, NOW, Fleet, an_engine, an_external

from extproc.routing.breaker import Verdict
from extproc.routing.endpoint import BreakerSettings, Info, Kind, Stats
from extproc.routing.filters import Filter, excluded, next_change, state, usable_from
from extproc.routing.policy import UNRESTRICTED, Restriction

STALE_AFTER = 10.0
PATH = "/v1/chat/completions"


def demote(fleet: Fleet, name: str, other: str, now: float = NOW) -> None:
    """The endpoint refuses what the other one serves."""
    fleet.registry.answered(fleet.live(other).ticket, PATH, MODEL, now)
    for _ in range(5):
        fleet.registry.misconfigured(fleet.live(name).ticket, 401, PATH, now)
    assert fleet.live(name).demotion is not None


def nothing(fleet: Fleet) -> None:
    """All is well."""


def open_breaker(fleet: Fleet) -> None:
    """The breaker is open for 5 s."""
    fleet.break_until("a", NOW + 5)


def quarantined(fleet: Fleet) -> None:
    """Envoy cannot send there for 5 s."""
    fleet.registry.quarantine(fleet.live("a").ticket, NOW + 5, NOW)


def pressed(fleet: Fleet) -> None:
    """It asked for a pause of 5 s."""
    fleet.registry.backpressure(fleet.live("a").ticket, NOW + 5, NOW)


def demoted(fleet: Fleet) -> None:
    """It refuses what b serves."""
    demote(fleet, "a", "b")


def crowded(fleet: Fleet) -> None:
    """Four wait there."""
    fleet.scrape(Stats(running=9, waiting=4), "a")


@pytest.mark.parametrize(
    ("info", "event", "reason", "until"),
    [
        (an_engine("a"), nothing, None, inf),
        (an_engine("a", drained=True), nothing, Filter.DRAINED, inf),
        (an_engine("a"), open_breaker, Filter.BREAKER, 5.0),
        (an_engine("a"), quarantined, Filter.QUARANTINE, 5.0),
        (an_engine("a"), demoted, Filter.DEMOTION, 30.0),
        (an_engine("a"), pressed, Filter.BACKPRESSURE, 5.0),
        (an_engine("a", max_waiting=3), crowded, Filter.SATURATED, inf),
        (an_engine("a", max_waiting=4), crowded, None, inf),
        (an_engine("a"), crowded, None, inf),
    ],
)
def test_an_endpoints_own_state_drops_it(
    info: Info, event: Callable[[Fleet], None], reason: Filter | None, until: float
) -> None:
    """Each filter drops what it is for, and what ends by time ends at its moment."""
    fleet = Fleet(info, an_engine("b"))
    event(fleet)
    live = fleet.live("a")
    assert state(live, NOW, STALE_AFTER) == (reason, False)
    assert next_change(live, NOW, STALE_AFTER, 5.0) == NOW + min(until, STALE_AFTER)
    if until < inf:
        dropped, _ = state(live, NOW + until, STALE_AFTER)
        assert dropped is None


def test_the_first_filter_that_is_not_passed_drops() -> None:
    """Who is drained, open and in backpressure is counted as drained."""
    fleet = Fleet(an_engine("a", drained=True))
    open_breaker(fleet)
    pressed(fleet)
    assert state(fleet.live("a"), NOW, STALE_AFTER) == (Filter.DRAINED, False)


def test_a_stale_queue_does_not_saturate() -> None:
    """How many waited ten seconds ago drops nobody."""
    fleet = Fleet(an_engine("a", max_waiting=3))
    crowded(fleet)
    assert state(fleet.live("a"), NOW + STALE_AFTER + 0.5, STALE_AFTER) == (None, False)


def test_a_half_open_endpoint_is_a_probe_until_its_slots_are_taken() -> None:
    """Open, then a probe; with the slot leased it is dropped until the lease ends."""
    fleet = Fleet(an_engine("a"))
    open_breaker(fleet)
    live = fleet.live("a")
    assert state(live, NOW + 5, STALE_AFTER) == (None, True)
    assert fleet.registry.acquire("a", NOW + 5, lease_seconds=3.0) is not None
    assert state(live, NOW + 5, STALE_AFTER) == (Filter.BREAKER, False)
    assert next_change(live, NOW + 5, STALE_AFTER, 5.0) == NOW + 8
    assert state(live, NOW + 8, STALE_AFTER) == (None, True)


def test_a_demoted_endpoint_is_a_probe_every_30_seconds() -> None:
    """The due probe is taken by one request, and the next comes 30 s later."""
    fleet = Fleet(an_engine("a"), an_engine("b"))
    demoted(fleet)
    live = fleet.live("a")
    assert state(live, NOW + 30, STALE_AFTER) == (None, True)
    fleet.load("a", 1, NOW + 30)
    assert state(live, NOW + 30, STALE_AFTER) == (Filter.DEMOTION, False)


def test_a_probe_keeps_away_from_who_asked_for_a_pause() -> None:
    """Half-open and in backpressure is backpressure."""
    fleet = Fleet(an_engine("a"))
    fleet.break_until("a", NOW + 1)
    pressed(fleet)
    assert state(fleet.live("a"), NOW + 2, STALE_AFTER) == (Filter.BACKPRESSURE, False)


def test_numbers_become_stale_just_after_their_time() -> None:
    """At exactly ten seconds they still count, so the moment is the next one there is."""
    fleet = Fleet(an_engine("a"))
    live = fleet.live("a")
    assert next_change(live, NOW + 1, STALE_AFTER, 5.0) == NOW + 10
    assert next_change(live, NOW + 10, STALE_AFTER, 5.0) == nextafter(NOW + 10, inf)
    assert next_change(live, NOW + 11, STALE_AFTER, 5.0) == inf


def test_a_slow_start_ends_by_time() -> None:
    """An endpoint that came back changes again when its slow start is over."""
    fleet = Fleet(an_external("a"))
    fleet.break_until("a", NOW + 1)
    grant = fleet.registry.acquire("a", NOW + 1, lease_seconds=9.0)
    assert grant is not None
    fleet.registry.verdict(grant.ticket, Verdict.SUCCESS, NOW + 2, grant.permit)
    live = fleet.live("a")
    assert next_change(live, NOW + 2, STALE_AFTER, 5.0) == NOW + 7
    assert next_change(live, NOW + 7, STALE_AFTER, 5.0) == inf


def test_usable_again_is_when_everything_is_over() -> None:
    """The moment is the last of what keeps it away, now if nothing does, none if drained."""
    fleet = Fleet(an_engine("a"), an_engine("b", drained=True), an_engine("c"))
    live = fleet.live("a")
    assert usable_from(live, NOW, 2.0) == NOW
    open_breaker(fleet)
    assert usable_from(live, NOW, 2.0) == NOW + 5
    fleet.registry.backpressure(live.ticket, NOW + 7, NOW)
    assert usable_from(live, NOW, 2.0) == NOW + 7
    fleet.registry.quarantine(live.ticket, NOW + 9, NOW)
    assert usable_from(live, NOW, 2.0) == NOW + 9
    demote(fleet, "a", "c")
    assert usable_from(live, NOW, 2.0) == NOW + 30
    assert usable_from(fleet.live("b"), NOW, 2.0) is None


def test_a_taken_probe_is_usable_again_when_its_lease_ends() -> None:
    """The lease of a probe that never reports frees its slot."""
    fleet = Fleet(an_engine("a", breaker=BreakerSettings(threshold=1, max_seconds=60.0)))
    fleet.break_until("a", NOW + 5)
    assert fleet.registry.acquire("a", NOW + 5, lease_seconds=20.0) is not None
    assert usable_from(fleet.live("a"), NOW + 6, 2.0) == NOW + 25


def test_a_crowded_endpoint_may_be_usable_at_its_next_scrape() -> None:
    """Too many waiting are told to come back when the next numbers are due."""
    fleet = Fleet(an_engine("a", max_waiting=3))
    crowded(fleet)
    assert usable_from(fleet.live("a"), NOW + 0.5, 2.0) == NOW + 2
    fleet.scrape(IDLE, "a", now=NOW + 1)
    assert usable_from(fleet.live("a"), NOW + 1, 2.0) == NOW + 1


def test_a_request_rules_endpoints_out() -> None:
    """Policy, subset by id or authority, kind and the model's name upstream, in that order."""
    infos = (
        an_engine("a"),
        an_engine("b"),
        an_external("c", residency="eu"),
        an_external("d", residency="us", upstream_model="gpt"),
    )

    def found(
        restriction: Restriction = UNRESTRICTED,
        subset: frozenset[str] | None = None,
        kinds: frozenset[Kind] | None = None,
        upstream_name: str | None = None,
    ) -> tuple[Filter | None, ...]:
        return excluded(
            infos,
            MODEL,
            allows=restriction.allows,
            subset=subset,
            kinds=kinds,
            upstream_name=upstream_name,
        )

    policy, subset = Filter.POLICY, Filter.SUBSET
    assert found() == (None, None, None, None)
    assert found(Restriction(residency=frozenset({"eu"}))) == (None, None, None, policy)
    assert found(subset=frozenset({"a", "c.local:8000"})) == (None, subset, None, subset)
    assert found(kinds=frozenset({Kind.EXTERNAL})) == (Filter.KIND, Filter.KIND, None, None)
    name = Filter.UPSTREAM_NAME
    assert found(upstream_name="gpt") == (name, name, name, None)
    assert found(upstream_name=MODEL) == (None, None, None, name)
    assert found(Restriction(own_only=True), subset=frozenset({"b"})) == (
        subset,
        None,
        policy,
        policy,
    )
