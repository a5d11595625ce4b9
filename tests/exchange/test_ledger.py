"""Who is charged for which attempt, whichever feed tells it and in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world import CONFIG, World, attempt_log, breaker, decision_id, names, request_log, streak

from extproc.exchange.ledger import GRACE_SECONDS
from extproc.exchange.messages import AttemptLog, Steer
from extproc.exchange.outcome import Flag, Outcome
from extproc.routing.endpoint import BreakerState

UF = int(Flag.UPSTREAM_CONNECTION_FAILURE)
UC = int(Flag.UPSTREAM_CONNECTION_TERMINATION)
UH = int(Flag.NO_HEALTHY_UPSTREAM)
NC = int(Flag.NO_CLUSTER)
DC = int(Flag.DOWNSTREAM_TERMINATION)
URX = int(Flag.RETRY_LIMIT_EXCEEDED)


def test_a_clean_answer_is_a_success_only_after_the_grace(world: World) -> None:
    """The access log has a second to say that the stream was cut."""
    exchange, steer = world.route()
    world.respond(exchange)
    world.later(30)
    exchange.end(world.now)
    assert world.told.attempts == []
    world.later(GRACE_SECONDS)
    assert world.told.attempts == [(names(steer)[0], Outcome.SUCCESS)]
    assert (world.told.answers, world.told.ends) == (1, 1)
    assert len(world.core.ledger) == 0


def test_what_is_due_is_booked_as_others_end(world: World) -> None:
    """No tick has to find the verdicts of all requests since the last one."""
    exchange, steer = world.route()
    world.respond(exchange)
    exchange.end(world.now)
    other, _ = world.route()
    world.respond(other)
    world.now += GRACE_SECONDS
    other.end(world.now)
    assert world.told.attempts == [(names(steer)[0], Outcome.SUCCESS)]
    assert len(world.core.ledger) == 1


def test_a_stream_cut_by_the_engine_is_one_failure_and_no_success(world: World) -> None:
    """Both logs tell of the cut, and it counts once."""
    exchange, steer = world.route()
    world.respond(exchange)
    exchange.end(world.now)
    world.later(0.2)
    world.core.ledger.logged(attempt_log(steer, 0, 200, UC), world.now)
    world.core.ledger.logged(request_log(steer, 200, UC, steer.clusters[0]), world.now)
    world.later(5)
    assert world.told.attempts == [(names(steer)[0], Outcome.FAILURE)]


def test_an_engine_that_always_answers_200_and_cuts_opens_its_breaker(world: World) -> None:
    """Good headers do not hide a bad end."""
    opened = set()
    for _ in range(30):
        exchange, steer = world.route()
        world.respond(exchange)
        exchange.end(world.now)
        world.core.ledger.logged(request_log(steer, 200, UC), world.now)
        world.later(0.01)
        opened |= {name for name in "abc" if breaker(world, name) is BreakerState.OPEN}
        if opened == {"a", "b", "c"}:
            break
    assert opened == {"a", "b", "c"}


@pytest.mark.parametrize("with_headers", [False, True])
def test_a_caller_that_hangs_up_is_counted_and_charged_to_nobody(
    world: World, *, with_headers: bool
) -> None:
    """Before the headers or in the middle of the stream, an abort is an abort."""
    exchange, steer = world.route()
    if with_headers:
        world.respond(exchange)
    exchange.end(world.now)
    assert world.inflight() == {}
    if with_headers:
        world.core.ledger.logged(request_log(steer, 200, DC, steer.clusters[0]), world.now)
    world.later(GRACE_SECONDS)
    assert world.told.attempts == [(names(steer)[0], Outcome.ABORTED)]
    assert streak(world, names(steer)[0]) == 0


def test_hidden_attempts_are_failures_when_the_log_says_nothing(world: World) -> None:
    """The attempt count alone tells who failed, after the log had its chance."""
    exchange, steer = world.route()
    world.respond(exchange, attempts=3)
    first, second, third = names(steer)
    assert world.inflight() == {third: 1}
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    assert world.attempts_of(first) == [Outcome.FAILURE]
    assert world.attempts_of(second) == [Outcome.FAILURE]
    assert world.attempts_of(third) == [Outcome.SUCCESS]


def test_the_log_tells_what_a_hidden_attempt_really_was(world: World) -> None:
    """A 429 that a retry hid keeps its own retry-after and is no failure."""
    exchange, steer = world.route()
    world.respond(exchange, attempts=2)
    first, second, _ = names(steer)
    world.core.ledger.logged(attempt_log(steer, 0, 429, 0, "20"), world.now)
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    assert world.attempts_of(first) == [Outcome.BACKPRESSURE]
    assert world.attempts_of(second) == [Outcome.SUCCESS]
    live = world.core.registry.live(first)
    assert live is not None
    assert live.backpressure_until == pytest.approx(120)
    assert live.breaker.streak == 0


def test_the_log_moves_the_count_before_the_headers_do(world: World) -> None:
    """A failed attempt's entry is enough to know who has the request now."""
    exchange, steer = world.route()
    first, second, _ = names(steer)
    world.core.ledger.logged(attempt_log(steer, 0, 0, UF), world.now)
    assert world.inflight() == {second: 1}
    world.respond(exchange, attempts=2)
    assert world.inflight() == {second: 1}
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    assert world.attempts_of(first) == [Outcome.FAILURE]
    assert world.inflight() == {}


@pytest.mark.parametrize("log_first", [False, True])
def test_a_failed_last_attempt_counts_once(world: World, *, log_first: bool) -> None:
    """Whether inferred, logged or both, and in either order, one attempt is one failure."""
    exchange, steer = world.route()
    entries = [attempt_log(steer, index, 0, UF) for index in range(3)]
    if log_first:
        for entry in entries:
            world.core.ledger.logged(entry, world.now)
    world.respond(exchange, 503, attempts=3, flags=UF | URX, details="upstream_reset")
    exchange.end(world.now)
    for entry in entries:
        world.core.ledger.logged(entry, world.now)
    world.core.ledger.logged(request_log(steer, 503, UF | URX, steer.clusters[0]), world.now)
    world.later(GRACE_SECONDS)
    assert sorted(world.told.attempts) == [(name, Outcome.FAILURE) for name in "abc"]


def test_attempts_past_the_lists_end_are_the_last_elements(world: World) -> None:
    """Envoy repeats the last cluster, so the count runs on and the index does not."""
    exchange, steer = world.route()
    world.respond(exchange, 503, attempts=9, flags=UF, details="upstream_reset")
    assert world.inflight() == {names(steer)[2]: 1}
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    assert sorted(world.told.attempts) == [(name, Outcome.FAILURE) for name in "abc"]


def test_a_missing_cluster_is_quarantined_and_not_blamed(world: World) -> None:
    """A name that Envoy does not know ends a request, so it is not given out again at once."""
    exchange, steer = world.route()
    world.respond(exchange, 503, attempts=0, flags=NC, details="cluster_not_found")
    exchange.end(world.now)
    name = names(steer)[0]
    live = world.core.registry.live(name)
    assert live is not None
    assert live.quarantined_until == pytest.approx(world.now + 2)
    assert live.breaker.streak == 0
    for _ in range(10):
        assert names(world.route()[1])[0] != name
    world.later(2.1)
    assert name in {names(world.route()[1])[0] for _ in range(10)}


def test_a_request_entry_with_another_attempts_cluster_blames_nobody(world: World) -> None:
    """Envoy's entry of a request without a host names the attempt before."""
    exchange, steer = world.route()
    final = steer.clusters[1]
    world.respond(exchange, 503, attempts=2, flags=UH, details="no_healthy_upstream", cluster=final)
    exchange.end(world.now)
    world.core.ledger.logged(attempt_log(steer, 0, 429, 0, "1"), world.now)
    world.core.ledger.logged(request_log(steer, 503, UH, steer.clusters[0]), world.now)
    world.later(GRACE_SECONDS)
    assert world.attempts_of(names(steer)[0]) == [Outcome.BACKPRESSURE]
    assert world.attempts_of(names(steer)[1]) == [Outcome.FAILURE]


def test_envoys_own_refusal_is_charged_to_nobody(world: World) -> None:
    """A body over the limit says nothing about the endpoint, not even a success."""
    exchange, _ = world.route()
    world.respond(exchange, 413, details="request_payload_too_large")
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    assert world.told.attempts == []


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_client_errors_never_open_the_breaker(world: World, status: int) -> None:
    """Fifty bad prompts are fifty bad prompts."""
    for _ in range(50):
        exchange, _ = world.route()
        world.respond(exchange, status)
        exchange.end(world.now)
        world.later(0.1)
    assert {breaker(world, name) for name in "abc"} == {BreakerState.CLOSED}


def test_failures_in_a_row_open_the_breaker_and_a_success_closes_it(world: World) -> None:
    """An endpoint that fails leaves, is probed by rule, and comes back."""
    while breaker(world, "a") is BreakerState.CLOSED:
        exchange, steer = world.route()
        status = 500 if names(steer)[0] == "a" else 200
        world.respond(exchange, status)
        exchange.end(world.now)
        world.later(0.01)
    assert all(names(world.route()[1])[0] != "a" for _ in range(20))
    world.later(1.5)
    exchange, steer = world.route()
    assert names(steer)[0] == "a"
    assert names(world.route()[1])[0] != "a"
    world.respond(exchange)
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    assert breaker(world, "a") is BreakerState.CLOSED


@pytest.mark.parametrize("ending", ["abort", "client error", "fail open"])
def test_a_probe_that_proves_nothing_gives_its_slot_back(world: World, ending: str) -> None:
    """The next request may probe again within the grace, whatever became of the first."""
    live = world.core.registry.live("a")
    assert live is not None
    live.breaker.hold(world.now + 1, world.now)
    live.touch()
    world.later(1.5)
    exchange, steer = world.route()
    assert names(steer)[0] == "a"
    if ending == "client error":
        world.respond(exchange, 400)
    exchange.end(world.now, owes_reply=ending == "fail open")
    world.later(GRACE_SECONDS)
    assert breaker(world, "a") is BreakerState.HALF_OPEN
    assert names(world.route()[1])[0] == "a"


def test_a_retry_after_is_the_least_of_a_cooldown(world: World) -> None:
    """An endpoint that fails and says for how long is left alone that long."""
    live = world.core.registry.live("a")
    assert live is not None
    while live.breaker.state(world.now) is BreakerState.CLOSED:
        exchange, steer = world.route()
        bad = names(steer)[0] == "a"
        world.respond(exchange, 500 if bad else 200, retry_after="30" if bad else None)
        exchange.end(world.now)
    assert live.breaker.open_until == pytest.approx(world.now + 30)


def test_a_wrong_key_is_demoted_while_others_serve(world: World) -> None:
    """Five refusals in a row, on a path that another endpoint serves, and it is kept away."""
    for _ in range(60):
        exchange, steer = world.route()
        world.respond(exchange, 401 if names(steer)[0] == "a" else 200)
        exchange.end(world.now)
        world.later(0.01)
    assert len(world.attempts_of("a")) == 5
    assert set(world.attempts_of("a")) == {Outcome.MISCONFIGURED}


def test_a_session_moves_to_the_endpoint_that_served_it(world: World) -> None:
    """After a failover the next request of the session goes where its cache is now."""
    exchange, steer = world.route(("x-session-id", "s"))
    world.respond(exchange, attempts=2)
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    assert names(world.route(("x-session-id", "s"))[1])[0] == names(steer)[1]


def test_a_session_forgets_an_endpoint_that_fails_it(world: World) -> None:
    """After a failure the session goes where the ring puts it."""
    exchange, steer = world.route(("x-session-id", "s"))
    home = names(steer)[0]
    world.respond(exchange, attempts=2)
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    exchange, steer = world.route(("x-session-id", "s"))
    assert names(steer)[0] != home
    world.respond(exchange, 500)
    exchange.end(world.now)
    assert names(world.route(("x-session-id", "s"))[1])[0] == home


def test_entries_of_unknown_decisions_are_ignored(world: World) -> None:
    """A log entry from another process, or far too late, changes nothing."""
    world.core.ledger.logged(AttemptLog("other-1", "ep-a", 500, 0, "", None), world.now)
    exchange, steer = world.route()
    world.core.ledger.logged(
        AttemptLog(decision_id(steer), "ep-unheard-of", 500, 0, "", None), world.now
    )
    world.respond(exchange)
    exchange.end(world.now)
    world.later(GRACE_SECONDS)
    world.core.ledger.logged(attempt_log(steer, 0, 500), world.now)
    assert world.told.attempts == [(names(steer)[0], Outcome.SUCCESS)]


EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("respond"),
            st.sampled_from([200, 400, 401, 429, 500, 503, 508]),
            st.integers(0, 5),
            st.sampled_from([0, UF, UH, NC, URX, UF | URX]),
        ),
        st.tuples(
            st.just("attempt"),
            st.sampled_from([0, 200, 429, 500]),
            st.integers(0, 2),
            st.sampled_from([0, UF, UC, DC]),
        ),
        st.tuples(
            st.just("request"),
            st.sampled_from([0, 200, 503]),
            st.just(0),
            st.sampled_from([0, UC, DC, UH]),
        ),
        st.tuples(st.just("end"), st.just(0), st.just(0), st.just(0)),
        st.tuples(st.just("wait"), st.just(0), st.integers(0, 3), st.just(0)),
    ),
    max_size=8,
)


@settings(deadline=None, max_examples=200)
@given(requests=st.lists(EVENTS, max_size=5))
def test_whatever_the_feeds_say_every_attempt_has_one_outcome_at_most(
    requests: list[list[tuple[str, int, int, int]]],
) -> None:
    """In-flight never exceeds what runs and ends at zero; no attempt is booked twice."""
    world = World(CONFIG)
    for events in requests:
        exchange, action = world.ask(("x-llmgw-model", "m"))
        if not isinstance(action, Steer):
            world.later(1)
            continue
        before = len(world.told.attempts)
        for kind, code, number, flags in events:
            if kind == "respond":
                world.respond(exchange, code, attempts=number, flags=flags)
            elif kind == "attempt" and number < len(action.clusters):
                world.core.ledger.logged(attempt_log(action, number, code, flags), world.now)
            elif kind == "request":
                world.core.ledger.logged(request_log(action, code, flags), world.now)
            elif kind == "end":
                exchange.end(world.now)
                assert world.inflight() == {}
            elif kind == "wait":
                world.later(float(number))
            assert sum(world.inflight().values()) <= 1
        exchange.end(world.now)
        assert world.inflight() == {}
        world.later(GRACE_SECONDS)
        booked = world.told.attempts[before:]
        assert len({name for name, _ in booked}) == len(booked) <= len(action.clusters)
    world.later(GRACE_SECONDS)
    assert len(world.core.ledger) == 0
