"""Who is refused is told why, and when it is worth coming back."""

from __future__ import annotations

import pytest
from fleet import NOW, Fleet, an_engine, an_external

from extproc.routing.decision import Query, Unavailable
from extproc.routing.endpoint import Stats
from extproc.routing.filters import Filter, UnavailableKind
from extproc.routing.policy import Restriction
from extproc.routing.scheduler import Scheduler

MODEL = "m"
NO_STORE = Query(MODEL, restriction=Restriction(no_store=True))


def told(result: Unavailable) -> tuple[UnavailableKind, float | None, dict[Filter, int]]:
    """Everything that is said."""
    return result.kind, result.retry_after_seconds, dict(result.dropped)


def press(fleet: Fleet, name: str, seconds: float) -> None:
    """The endpoint asked for a pause."""
    fleet.registry.backpressure(fleet.live(name).ticket, NOW + seconds, NOW)


def test_nobody_alive() -> None:
    """All open: none alive, until the first turns half-open."""
    fleet = Fleet(an_engine("a"), an_engine("b"), an_engine("c", drained=True))
    fleet.break_until("a", NOW + 7)
    fleet.break_until("b", NOW + 3)
    dropped = {Filter.BREAKER: 2, Filter.DRAINED: 1}
    assert told(fleet.refusal()) == (UnavailableKind.NONE_ALIVE, 3.0, dropped)
    assert told(fleet.refusal(now=NOW + 1)) == (UnavailableKind.NONE_ALIVE, 2.0, dropped)
    assert fleet.chosen(now=NOW + 3) == "b"


def test_all_drained_may_never_change() -> None:
    """Where no moment is known, none is told."""
    fleet = Fleet(an_engine("a", drained=True))
    assert told(fleet.refusal()) == (UnavailableKind.NONE_ALIVE, None, {Filter.DRAINED: 1})


def test_any_alive_but_all_overloaded_is_saturated() -> None:
    """One open and one in backpressure is saturated; the soonest of both moments is told."""
    fleet = Fleet(an_engine("a"), an_engine("b"))
    fleet.break_until("a", NOW + 5)
    press(fleet, "b", 9)
    dropped = {Filter.BREAKER: 1, Filter.BACKPRESSURE: 1}
    assert told(fleet.refusal()) == (UnavailableKind.SATURATED, 5.0, dropped)


def test_open_and_in_backpressure_is_not_alive() -> None:
    """Who is dropped by the breaker first is not alive, and comes back when both have ended."""
    fleet = Fleet(an_engine("a"))
    fleet.break_until("a", NOW + 5)
    press(fleet, "a", 9)
    assert told(fleet.refusal()) == (UnavailableKind.NONE_ALIVE, 9.0, {Filter.BREAKER: 1})


def test_too_many_waiting_everywhere_is_saturated() -> None:
    """Until the next scrape, that is."""
    fleet = Fleet(an_engine("a", max_waiting=2), an_engine("b", max_waiting=2))
    fleet.scrape(Stats(running=8, waiting=3), "a", "b")
    dropped = {Filter.SATURATED: 2}
    assert told(fleet.refusal(now=NOW + 0.5)) == (UnavailableKind.SATURATED, 1.5, dropped)


def test_max_waiting_is_off_by_default() -> None:
    """However many wait, the endpoint is used."""
    fleet = Fleet(an_engine("a"))
    fleet.scrape(Stats(running=8, waiting=10_000), "a")
    assert fleet.chosen() == "a"


def test_only_forbidden_endpoints_could_serve() -> None:
    """What policy alone keeps from the request is restricted, overloaded or not."""
    fleet = Fleet(an_engine("a"), an_external("x"), an_external("y"))
    fleet.break_until("a", NOW + 5)
    press(fleet, "y", 2)
    dropped = {Filter.BREAKER: 1, Filter.POLICY: 1, Filter.BACKPRESSURE: 1}
    assert told(fleet.refusal(NO_STORE)) == (UnavailableKind.RESTRICTED, 5.0, dropped)
    assert fleet.chosen() == "x"


def test_a_restriction_to_nobody_knows_no_moment() -> None:
    """Where no allowed endpoint exists, waiting does not help."""
    fleet = Fleet(an_external("x"))
    dropped = {Filter.POLICY: 1}
    assert told(fleet.refusal(NO_STORE)) == (UnavailableKind.RESTRICTED, None, dropped)


def test_a_forbidden_endpoint_that_is_down_is_not_the_reason() -> None:
    """With everything down it is not the restriction that refuses."""
    fleet = Fleet(an_engine("a"), an_external("x"))
    fleet.break_until("a", NOW + 5)
    fleet.break_until("x", NOW + 5)
    assert fleet.refusal(NO_STORE).kind is UnavailableKind.NONE_ALIVE


def test_an_allowed_overloaded_endpoint_is_worth_waiting_for() -> None:
    """Saturated comes before restricted: the engine will take it in two seconds."""
    fleet = Fleet(an_engine("a"), an_external("x"))
    press(fleet, "a", 2)
    result = fleet.refusal(NO_STORE)
    assert (result.kind, result.retry_after_seconds) == (UnavailableKind.SATURATED, 2.0)


def test_a_subset_without_members_is_not_a_restriction() -> None:
    """Nobody of the subset is there."""
    fleet = Fleet(an_engine("a"))
    result = fleet.refusal(Query(MODEL, subset=frozenset({"elsewhere:1"})))
    assert told(result) == (UnavailableKind.NONE_ALIVE, None, {Filter.SUBSET: 1})


def test_a_taken_probe_is_awaited_until_its_lease_ends() -> None:
    """Half-open with every slot taken, the soonest change is the lease's end."""
    fleet = Fleet(an_engine("a"))
    fleet.break_until("a", NOW + 5)
    fleet.dispatch(Query(MODEL, lease_seconds=4.0), NOW + 5)
    assert fleet.refusal(now=NOW + 6).retry_after_seconds == 3.0
    assert fleet.dispatch(now=NOW + 9).decision.is_probe


def test_a_demoted_endpoint_is_tried_when_its_probe_is_due() -> None:
    """Demoted is not alive, and its moment is the next probe."""
    fleet = Fleet(an_engine("a"), an_engine("b"))
    fleet.registry.answered(fleet.live("b").ticket, "/p", MODEL, NOW)
    for _ in range(5):
        fleet.registry.misconfigured(fleet.live("a").ticket, 404, "/p", NOW)
    fleet.break_until("b", NOW + 50)
    dropped = {Filter.DEMOTION: 1, Filter.BREAKER: 1}
    assert told(fleet.refusal()) == (UnavailableKind.NONE_ALIVE, 30.0, dropped)


@pytest.mark.parametrize("model", ["other", ""])
def test_a_model_without_members(model: str) -> None:
    """Nobody serves it, so there is nothing to count."""
    fleet = Fleet(an_engine("a"))
    assert told(fleet.refusal(Query(model))) == (UnavailableKind.NO_MEMBERS, None, {})
    assert fleet.scheduler.preview(Query(model), NOW) == fleet.refusal(Query(model))


def test_an_outage_is_worked_out_once_per_change() -> None:
    """Between two changes refusals share what they count."""
    fleet = Fleet(an_engine("a"), an_engine("b"))
    fleet.break_until("a", NOW + 5)
    fleet.break_until("b", NOW + 5)
    first, second = fleet.refusal(), fleet.refusal(now=NOW + 1)
    assert first.dropped is second.dropped
    fleet.break_until("b", NOW + 8)
    assert fleet.refusal(now=NOW + 1).dropped is not first.dropped


def test_the_scheduler_is_told_how_often_engines_are_scraped() -> None:
    """A longer interval is a longer wait."""
    fleet = Fleet(an_engine("a", max_waiting=2))
    fleet.scrape(Stats(running=8, waiting=3), "a")
    scheduler = Scheduler(
        fleet.registry,
        {"chat": fleet.table().strategy},
        fleet.random,
        fleet.sessions,
        scrape_seconds=7.0,
    )
    result = scheduler.dispatch(Query(MODEL), NOW)
    assert isinstance(result, Unavailable)
    assert result.retry_after_seconds == 7.0
