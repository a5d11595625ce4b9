"""How a probe comes back from a long answer, and endpoints from which Envoy does not go on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from world import CONFIG, World, breaker, decision_id, live_of, names, request_log, rest, streak

from extproc.clusters import PICKED
from extproc.exchange.exchange import Exchange
from extproc.exchange.ledger import GRACE_SECONDS
from extproc.exchange.messages import AttemptLog, Steer
from extproc.exchange.outcome import Flag, Outcome
from extproc.routing.breaker import Verdict
from extproc.routing.endpoint import BreakerState

UC = int(Flag.UPSTREAM_CONNECTION_TERMINATION)
UH = int(Flag.NO_HEALTHY_UPSTREAM)
DC = int(Flag.DOWNSTREAM_TERMINATION)
SI = int(Flag.STREAM_IDLE_TIMEOUT)


def answered_probe(world: World) -> tuple[Exchange, Steer]:
    """A probe of endpoint a whose answer has begun well and goes on."""
    rest(world, "a")
    world.later(1.5)
    exchange, steer = world.route()
    assert names(steer)[0] == "a"
    world.respond(exchange)
    assert breaker(world, "a") is BreakerState.HALF_OPEN
    return exchange, steer


def test_a_probe_that_streams_for_minutes_closes_its_breaker_after_the_grace(
    world: World,
) -> None:
    """A model whose last endpoint comes back is not down until its first stream has ended."""
    exchange, _ = answered_probe(world)
    world.later(GRACE_SECONDS)
    assert breaker(world, "a") is BreakerState.CLOSED
    assert world.inflight() == {"a": 1}
    world.later(300)
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    assert world.attempts_of("a") == [Outcome.SUCCESS]
    assert streak(world, "a") == 0


def test_a_probe_that_is_cut_within_the_grace_opens_its_breaker_again(world: World) -> None:
    """Good headers alone prove nothing."""
    exchange, steer = answered_probe(world)
    exchange.end(world.now)
    world.core.ledger.logged(request_log(steer, 200, UC), world.now)
    world.later(GRACE_SECONDS)
    assert breaker(world, "a") is BreakerState.OPEN
    assert world.attempts_of("a") == [Outcome.FAILURE]


def test_a_cut_after_the_closing_counts_as_a_failure(world: World) -> None:
    """An engine that cuts every stream late opens like any other."""
    exchange, steer = answered_probe(world)
    world.later(GRACE_SECONDS + 5)
    exchange.end(world.now)
    world.core.ledger.logged(request_log(steer, 200, UC), world.now)
    assert world.attempts_of("a") == [Outcome.FAILURE]
    assert breaker(world, "a") is BreakerState.CLOSED
    assert streak(world, "a") == 1


def test_a_clean_end_within_the_grace_closes_once(world: World) -> None:
    """A short answer is proof as well, and one success."""
    exchange, _ = answered_probe(world)
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    assert breaker(world, "a") is BreakerState.CLOSED
    assert world.attempts_of("a") == [Outcome.SUCCESS]
    epoch = live_of(world, "a").breaker.epoch
    world.later(5)
    assert live_of(world, "a").breaker.epoch == epoch


def test_an_endpoint_without_a_host_fails_and_is_left_alone(world: World) -> None:
    """Envoy ends a request there and tries no other, so the next one must not meet it."""
    exchange, steer = world.route()
    first = names(steer)[0]
    message_cluster = steer.clusters[0]
    world.respond(exchange, 503, flags=UH, details="no_healthy_upstream", cluster=message_cluster)
    exchange.end(world.now)
    assert world.attempts_of(first) == [Outcome.FAILURE]
    assert live_of(world, first).quarantined_until == pytest.approx(world.now + 2)
    assert all(names(world.route()[1])[0] != first for _ in range(10))


def test_attempts_in_the_pickers_one_cluster_follow_the_list(world: World) -> None:
    """What the log says of each is booked for the element whose turn it was."""
    exchange, steer = world.route()
    first, second, third = names(steer)
    entry = AttemptLog(decision_id(steer), PICKED, 429, 0, "", "9")
    world.core.ledger.logged(entry, world.now)
    world.core.ledger.logged(replace(entry, status=500, retry_after=None), world.now)
    world.respond(exchange, attempts=3)
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    assert world.attempts_of(first) == [Outcome.BACKPRESSURE]
    assert world.attempts_of(second) == [Outcome.FAILURE]
    assert world.attempts_of(third) == [Outcome.SUCCESS]


def test_the_last_attempt_in_the_pickers_cluster_is_charged_once(world: World) -> None:
    """Its entry comes after its answer, and is no attempt at the next element."""
    exchange, steer = world.route()
    first, second, _ = names(steer)
    world.respond(exchange, 500, attempts=2, cluster=PICKED)
    exchange.end(world.now)
    for _ in range(2):
        world.core.ledger.logged(
            AttemptLog(decision_id(steer), PICKED, 500, 0, "", None), world.now
        )
    world.later(GRACE_SECONDS)
    assert sorted(world.told.attempts) == sorted(
        [(first, Outcome.FAILURE), (second, Outcome.FAILURE)]
    )


def test_a_probe_that_ends_within_the_grace_waits_for_the_log_of_its_end(world: World) -> None:
    """A cut just before the grace is over is logged just after it."""
    exchange, steer = answered_probe(world)
    world.later(GRACE_SECONDS - 0.1)
    exchange.end(world.now)
    world.later(0.2)
    assert breaker(world, "a") is BreakerState.HALF_OPEN
    world.core.ledger.logged(request_log(steer, 200, UC), world.now)
    assert breaker(world, "a") is BreakerState.OPEN
    assert world.attempts_of("a") == [Outcome.FAILURE]


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_probe_of_an_earlier_turn_has_no_say(world: World, *, is_cut: bool) -> None:
    """Another request's failure re-opened the breaker while the probe ran."""
    exchange, steer = answered_probe(world)
    breaker_of = live_of(world, "a").breaker
    breaker_of.judge(breaker_of.epoch, Verdict.FAILURE, world.now)
    live_of(world, "a").touch()
    openings, epoch = breaker_of.openings, breaker_of.epoch
    world.later(30)
    assert breaker(world, "a") is BreakerState.HALF_OPEN
    exchange.end(world.now)
    if is_cut:
        world.core.ledger.logged(request_log(steer, 200, UC), world.now)
    world.later(GRACE_SECONDS)
    assert breaker(world, "a") is BreakerState.HALF_OPEN
    assert (breaker_of.openings, breaker_of.epoch) == (openings, epoch)


def test_a_probe_of_an_endpoint_that_is_gone_closes_nothing(world: World) -> None:
    """One that took its id since is another endpoint."""
    exchange, _ = answered_probe(world)
    others = [info for info in CONFIG.endpoints if info.id != "a"]
    world.core.registry.replace(others, world.now)
    world.core.registry.replace(CONFIG.endpoints, world.now)
    rest(world, "a")
    world.later(GRACE_SECONDS + 0.5)
    assert breaker(world, "a") is BreakerState.HALF_OPEN
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    assert breaker(world, "a") is BreakerState.HALF_OPEN


@pytest.mark.parametrize("flags", [DC, SI])
def test_a_probe_whose_log_comes_before_its_end_proves_nothing(world: World, flags: int) -> None:
    """The stream of the log may be quicker than the one of the request."""
    exchange, steer = answered_probe(world)
    world.core.ledger.logged(request_log(steer, 200, flags), world.now)
    world.later(GRACE_SECONDS)
    assert breaker(world, "a") is BreakerState.HALF_OPEN
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    assert breaker(world, "a") is BreakerState.HALF_OPEN
