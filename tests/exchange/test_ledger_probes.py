"""How a probe comes back from a long answer, and endpoints from which Envoy does not go on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from world import World, breaker, live_of, names, request_log, rest, streak

from extproc.clusters import PICKED
from extproc.exchange.exchange import Exchange
from extproc.exchange.ledger import GRACE_SECONDS
from extproc.exchange.messages import AttemptLog, Steer
from extproc.exchange.outcome import Flag, Outcome
from extproc.routing.endpoint import BreakerState

UC = int(Flag.UPSTREAM_CONNECTION_TERMINATION)
UH = int(Flag.NO_HEALTHY_UPSTREAM)


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
    entry = AttemptLog(steer.decision_id, PICKED, 429, 0, "", "9")
    world.core.ledger.logged(entry, world.now)
    world.core.ledger.logged(replace(entry, status=500, retry_after=None), world.now)
    world.respond(exchange, attempts=3)
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    assert world.attempts_of(first) == [Outcome.BACKPRESSURE]
    assert world.attempts_of(second) == [Outcome.FAILURE]
    assert world.attempts_of(third) == [Outcome.SUCCESS]
