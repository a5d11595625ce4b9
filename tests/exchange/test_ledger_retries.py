"""Whom a request's later attempts are charged to, and what an end that is not clean means."""

from __future__ import annotations

import pytest
from world import (
    CONFIG,
    World,
    attempt_log,
    breaker,
    live_of,
    names,
    open_breaker,
    request_log,
    rest,
    streak,
)

from extproc.exchange.exchange import Exchange
from extproc.exchange.ledger import GRACE_SECONDS, Flight
from extproc.exchange.messages import RequestBody, Steer
from extproc.exchange.outcome import Flag, Outcome
from extproc.routing.endpoint import BreakerState

UF = int(Flag.UPSTREAM_CONNECTION_FAILURE)
UC = int(Flag.UPSTREAM_CONNECTION_TERMINATION)
UH = int(Flag.NO_HEALTHY_UPSTREAM)
LR = int(Flag.LOCAL_RESET)
SI = int(Flag.STREAM_IDLE_TIMEOUT)
DC = int(Flag.DOWNSTREAM_TERMINATION)


def probing(world: World, name: str) -> tuple[Exchange, Steer]:
    """A request that is the probe of one endpoint's half-open breaker."""
    rest(world, name)
    world.later(1.5)
    exchange, steer = world.route()
    assert names(steer)[0] == name
    assert live_of(world, name).breaker.free_probes(world.now) == 0
    return exchange, steer


# An alternative is charged as of its own attempt.


@pytest.mark.parametrize("is_logged", [False, True])
@pytest.mark.parametrize(
    ("status", "expected"), [(200, BreakerState.CLOSED), (500, BreakerState.OPEN)]
)
def test_an_alternative_is_charged_in_the_epoch_of_its_attempt(
    world: World, status: int, expected: BreakerState, *, is_logged: bool
) -> None:
    """Its breaker may turn between the decision and the retry, and the verdict counts all the same.

    A success of an attempt from before its opening would close nothing.
    """
    exchange, steer = world.route()
    _, second, _ = names(steer)
    rest(world, second)
    world.later(1.5)
    assert breaker(world, second) is BreakerState.HALF_OPEN
    if is_logged:
        world.core.ledger.logged(attempt_log(steer, 0, 503), world.now)
    world.respond(exchange, status, attempts=2)
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    assert breaker(world, second) is expected


def test_an_alternative_that_was_added_anew_is_charged_as_what_it_is_now(world: World) -> None:
    """The count and the verdict go to the generation that the retry went to."""
    exchange, steer = world.route()
    _, second, _ = names(steer)
    others = [info for info in CONFIG.endpoints if info.id != second]
    world.core.registry.replace(others, world.now)
    world.core.registry.replace(CONFIG.endpoints, world.now)
    world.respond(exchange, 500, attempts=2)
    assert world.inflight() == {second: 1}
    assert streak(world, second) == 1
    exchange.end(world.now)
    assert world.inflight() == {}


def test_a_verdict_from_before_an_opening_closes_nothing(world: World) -> None:
    """The chosen endpoint's attempt began at the decision, whatever its breaker did since."""
    exchange, steer = world.route()
    first = names(steer)[0]
    rest(world, first)
    world.later(1.5)
    world.respond(exchange)
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    assert world.attempts_of(first) == [Outcome.SUCCESS]
    assert breaker(world, first) is BreakerState.HALF_OPEN


def test_a_retry_to_an_endpoint_that_is_gone_counts_nowhere(world: World) -> None:
    """Its cluster may outlive it in Envoy for a while."""
    exchange, steer = world.route()
    _, second, _ = names(steer)
    left = [info for info in CONFIG.endpoints if info.id != second]
    world.core.registry.replace(left, world.now)
    world.respond(exchange, attempts=2)
    assert world.inflight() == {}
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    assert world.inflight() == {}
    assert len(world.core.ledger) == 0


# Who answered, and how far the request came.


def test_envoys_cluster_name_outranks_the_attempt_count(world: World) -> None:
    """A retry on the same cluster is no move: who has the request is who is counted."""
    exchange, steer = world.route(("x-session-id", "s"))
    first = names(steer)[0]
    world.respond(exchange, attempts=3, cluster=steer.clusters[0])
    assert world.inflight() == {first: 1}
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    assert world.told.attempts == [(first, Outcome.SUCCESS)]
    assert names(world.route(("x-session-id", "s"))[1])[0] == first


def test_an_unlisted_cluster_leaves_the_attempt_count_to_tell(world: World) -> None:
    """All endpoints of an endpoint picker share one cluster."""
    exchange, steer = world.route()
    world.respond(exchange, attempts=2, cluster="picked")
    assert world.inflight() == {names(steer)[1]: 1}


def test_an_endpoint_that_serves_at_its_second_try_has_not_failed(world: World) -> None:
    """Past the list's end Envoy repeats the last element, which is judged by its answer."""
    for _ in range(5):
        exchange, steer = world.route(model="outside")
        assert names(steer) == ["provider"]
        world.respond(exchange, attempts=2)
        exchange.end(world.now)
        world.later(GRACE_SECONDS)
    assert world.told.attempts == [("provider", Outcome.SUCCESS)] * 5


def test_a_later_cluster_that_is_missing_is_quarantined(world: World) -> None:
    """Envoy shows it as no healthy host, and no cluster was found for the attempt."""
    exchange, steer = world.route()
    world.respond(exchange, 503, attempts=2, flags=UH, details="no_healthy_upstream")
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    assert world.attempts_of(names(steer)[1]) == [Outcome.QUARANTINED]
    assert streak(world, names(steer)[1]) == 0


@pytest.mark.parametrize("is_log_complete", [False, True])
def test_an_abort_during_a_retry_counts_where_the_request_was(
    world: World, *, is_log_complete: bool
) -> None:
    """The log comes after the end: one abort, and the attempt before it is the failure it was."""
    exchange, steer = world.route()
    exchange.end(world.now)
    world.later(0.2)
    first, second, _ = names(steer)
    if is_log_complete:
        world.core.ledger.logged(attempt_log(steer, 0, 503), world.now)
    world.core.ledger.logged(request_log(steer, 0, DC, attempts=2), world.now)
    world.later(GRACE_SECONDS)
    assert world.attempts_of(first) == [Outcome.FAILURE]
    assert world.attempts_of(second) == [Outcome.ABORTED]
    assert world.inflight() == {}


def test_an_abort_between_two_attempts_is_no_endpoints(world: World) -> None:
    """The log of the request says that the second attempt never began."""
    exchange, steer = world.route()
    world.core.ledger.logged(attempt_log(steer, 0, 503), world.now)
    exchange.end(world.now)
    world.core.ledger.logged(request_log(steer, 0, DC, attempts=1), world.now)
    world.later(GRACE_SECONDS)
    assert world.told.attempts == [(names(steer)[0], Outcome.FAILURE)]


def test_an_abort_that_is_logged_without_a_count_is_the_holders(world: World) -> None:
    """What the entry does not say is known from the attempts before."""
    exchange, steer = world.route()
    world.core.ledger.logged(attempt_log(steer, 0, 503), world.now)
    exchange.end(world.now)
    world.core.ledger.logged(request_log(steer, 0, DC, attempts=0), world.now)
    world.later(GRACE_SECONDS)
    assert world.attempts_of(names(steer)[1]) == [Outcome.ABORTED]


def test_attempts_logged_out_of_order_still_move_the_count(world: World) -> None:
    """The later entry tells that the earlier attempt failed too, and its own entry tells how."""
    exchange, steer = world.route()
    first, second, third = names(steer)
    world.core.ledger.logged(attempt_log(steer, 1, 0, UF), world.now)
    assert world.inflight() == {third: 1}
    world.core.ledger.logged(attempt_log(steer, 0, 429, 0, "5"), world.now)
    assert world.inflight() == {third: 1}
    world.respond(exchange, attempts=3)
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    assert world.attempts_of(first) == [Outcome.BACKPRESSURE]
    assert world.attempts_of(second) == [Outcome.FAILURE]
    assert world.attempts_of(third) == [Outcome.SUCCESS]


def test_a_log_entry_after_the_answer_does_not_move_the_count(world: World) -> None:
    """A cut is logged as an attempt too, and no attempt follows it."""
    exchange, steer = world.route()
    first = names(steer)[0]
    world.respond(exchange)
    world.core.ledger.logged(attempt_log(steer, 0, 200, UC), world.now)
    assert world.inflight() == {first: 1}
    exchange.end(world.now)


# What an end means.


def test_a_stream_that_envoy_cut_for_idleness_proves_nothing(world: World) -> None:
    """An engine that sends headers and then hangs has not succeeded; nor is it known to be bad."""
    exchange, steer = probing(world, "a")
    world.respond(exchange)
    exchange.end(world.now)
    world.core.ledger.logged(request_log(steer, 200, SI), world.now)
    world.later(GRACE_SECONDS)
    assert world.told.attempts == []
    assert breaker(world, "a") is BreakerState.HALF_OPEN
    assert names(world.route()[1])[0] == "a"


def test_an_attempt_that_envoy_ended_itself_is_no_hidden_failure(world: World) -> None:
    """The log says that nobody is to blame, which the attempt count alone could not tell."""
    exchange, steer = probing(world, "a")
    world.core.ledger.logged(attempt_log(steer, 0, 0, LR), world.now)
    assert live_of(world, "a").breaker.free_probes(world.now) == 1
    world.respond(exchange, attempts=2)
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    assert world.told.attempts == [(names(steer)[1], Outcome.SUCCESS)]
    assert breaker(world, "a") is BreakerState.HALF_OPEN


def test_a_listener_that_fails_leaves_nothing_behind(world: World) -> None:
    """A terminal that went away must not keep a request's books open for ever."""

    def gone(_flight: Flight, _now: float) -> None:
        raise BrokenPipeError

    world.core.ledger._on_ended = gone
    exchange, steer = world.route()
    world.respond(exchange)
    with pytest.raises(BrokenPipeError):
        exchange.end(world.now)
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    assert world.told.attempts == [(names(steer)[0], Outcome.SUCCESS)]
    assert world.inflight() == {}
    assert len(world.core.ledger) == 0


def test_a_508_is_a_loop_only_between_gateways(world: World) -> None:
    """From a peer it is nobody's fault; an engine that says so is as broken as with a 500."""
    exchange, steer = world.route()
    world.respond(exchange, 508)
    exchange.end(world.now)
    exchange, _ = world.ask(("x-llmgw-model", "x/m"))
    exchange.receive(RequestBody(b'{"model":"x/m"}'), world.now)
    world.respond(exchange, 508)
    exchange.end(world.now)
    assert world.told.attempts == [
        (names(steer)[0], Outcome.FAILURE),
        ("peer-x", Outcome.LOOP),
    ]
    assert streak(world, "peer-x") == 0


def test_a_dispatch_is_told_under_the_name_that_was_asked_for(world: World) -> None:
    """As every other event of the request is."""
    exchange, _ = world.ask(metadata={"model": "fast"})
    exchange.receive(RequestBody(b'{"model":"fast"}'), world.now)
    assert [model for _, model in world.told.dispatches] == ["fast"]


# An endpoint's own retry-after.


def test_a_late_failure_does_not_undo_a_probe(world: World) -> None:
    """A request from before the opening fails with a retry-after while the probe is on its way."""
    exchange, steer = world.route()
    name = names(steer)[0]
    open_breaker(world, name)
    world.later(1.5)
    probe, steer = world.route()
    assert names(steer)[0] == name
    world.respond(exchange, 500, retry_after="30")
    assert breaker(world, name) is BreakerState.HALF_OPEN
    assert live_of(world, name).breaker.openings == 1
    world.respond(probe)
    probe.end(world.now)
    world.later(GRACE_SECONDS)
    assert breaker(world, name) is BreakerState.CLOSED


@pytest.mark.parametrize("junk", ["Wed, 21 Oct 2026 07:28:00 GMT", "-5", "soon", ""])
def test_a_retry_after_that_is_junk_is_no_floor(world: World, junk: str) -> None:
    """The cooldown is the breaker's own: one second, give or take the jitter."""
    exchange, steer = world.route()
    name = names(steer)[0]
    open_breaker(world, name)
    world.respond(exchange, 500, retry_after=junk)
    until = live_of(world, name).breaker.open_until
    assert until is not None
    assert until - world.now <= 1.1


@pytest.mark.parametrize(("value", "seconds"), [(None, 2.0), ("junk", 2.0), ("7", 7.0)])
def test_a_429_without_a_readable_retry_after_rests_two_seconds(
    world: World, value: str | None, seconds: float
) -> None:
    """The default is short, because nobody asked for more."""
    exchange, steer = world.route()
    world.respond(exchange, 429, retry_after=value)
    exchange.end(world.now)
    live = live_of(world, names(steer)[0])
    assert live.backpressure_until == pytest.approx(world.now + seconds)


def test_a_429_whose_retry_after_is_zero_keeps_nobody_away(world: World) -> None:
    """0 is off."""
    exchange, steer = world.route()
    world.respond(exchange, 429, retry_after="0")
    exchange.end(world.now)
    assert live_of(world, names(steer)[0]).backpressure_until <= world.now


# Probes.


def test_a_probe_of_one_that_hides_behind_a_retry_reopens(world: World) -> None:
    """Only the attempt count tells of the failure, a grace later."""
    exchange, _ = probing(world, "a")
    world.respond(exchange, attempts=2)
    world.later(GRACE_SECONDS)
    assert breaker(world, "a") is BreakerState.OPEN
    exchange.end(world.now)


# What is booked, and when.


def test_a_success_is_booked_a_second_after_the_end(world: World) -> None:
    """Not sooner, because the log of a cut may still be on its way."""
    exchange, _ = world.route()
    world.respond(exchange)
    exchange.end(world.now)
    world.later(0.99)
    assert world.told.attempts == []
    world.later(0.02)
    assert len(world.told.attempts) == 1


def test_the_books_are_closed_once(world: World) -> None:
    """A second end is nothing, and the listener is told what became of the request."""
    ended: list[Flight] = []
    world.core.ledger._on_ended = lambda flight, _: ended.append(flight)
    exchange, _ = world.ask(("x-llmgw-model", "m"), path="/v1/completions?x=1")
    world.respond(exchange, 404)
    exchange.end(world.now)
    (flight,) = ended
    assert (flight.path, flight.model, flight.status) == ("/v1/completions", "m", 404)
    world.core.ledger.ended(flight, world.now)
    assert len(ended) == 1
    assert world.told.ends == 1
    assert len(world.core.ledger._due) == 1


def test_a_request_without_an_answer_has_no_duration(world: World) -> None:
    """How long a client waited before it went away says nothing about answers."""
    exchange, _ = world.route()
    exchange.end(world.now)
    assert (world.told.answers, world.told.ends) == (0, 0)


@pytest.mark.parametrize("status", [0, 200])
def test_an_attempts_entry_without_a_complaint_books_nothing(world: World, status: int) -> None:
    """A success is booked by the end of the request alone."""
    exchange, steer = world.route()
    world.core.ledger.logged(attempt_log(steer, 0, status), world.now)
    assert world.told.attempts == []
    assert world.inflight() == {names(steer)[0]: 1}
    exchange.end(world.now)


def test_a_request_entry_blames_nobody_for_envoys_own_refusal(world: World) -> None:
    """What no endpoint answered, a flag on the request does not make an endpoint's failure."""
    exchange, steer = world.route()
    world.respond(exchange, 413, details="request_payload_too_large")
    exchange.end(world.now)
    world.core.ledger.logged(request_log(steer, 413, UC), world.now)
    world.later(GRACE_SECONDS)
    assert world.told.attempts == []


def test_a_request_entry_alone_is_no_failure_of_an_unanswered_attempt(world: World) -> None:
    """It may name an earlier attempt; the attempt has an entry of its own."""
    exchange, steer = world.route()
    exchange.end(world.now)
    world.core.ledger.logged(request_log(steer, 503, UF), world.now)
    world.later(GRACE_SECONDS)
    assert Outcome.FAILURE not in world.attempts_of(names(steer)[0])


def test_a_requests_size_moves_with_it(world: World) -> None:
    """A long prompt weighs where it is, and nowhere when it is over."""
    exchange, steer = world.route(("content-length", "4000"))
    first, second, _ = names(steer)
    assert live_of(world, first).inflight_tokens == 1000
    world.core.ledger.logged(attempt_log(steer, 0, 503), world.now)
    assert live_of(world, first).inflight_tokens == 0
    assert live_of(world, second).inflight_tokens == 1000
    exchange.end(world.now)
    assert live_of(world, second).inflight_tokens == 0


def test_a_redirect_is_no_evidence_against_others(world: World) -> None:
    """Only a 2xx shows that a path is served."""
    for _ in range(60):
        exchange, steer = world.route()
        world.respond(exchange, 401 if names(steer)[0] == "a" else 307)
        exchange.end(world.now)
        world.later(0.01)
    assert live_of(world, "a").misconfigured > 5
    assert live_of(world, "a").demotion is None


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 408, 413, 422, 429])
def test_what_is_ignored_neither_breaks_nor_lengthens_a_row(world: World, status: int) -> None:
    """The engine is alive, which says nothing of the failures before."""
    exchange, steer = world.route(model="outside")
    world.respond(exchange, 500)
    exchange.end(world.now)
    exchange, steer = world.route(model="outside")
    world.respond(exchange, status, retry_after="0")
    exchange.end(world.now)
    assert names(steer) == ["provider"]
    assert streak(world, "provider") == 1


@pytest.mark.parametrize("status", [400, 401, 404, 429, 503])
def test_a_probe_that_is_ignored_neither_closes_nor_wedges(world: World, status: int) -> None:
    """The next request is the next probe."""
    exchange, _ = probing(world, "a")
    world.respond(exchange, status, retry_after="0")
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    assert breaker(world, "a") is BreakerState.HALF_OPEN
    assert names(world.route()[1])[0] == "a"
