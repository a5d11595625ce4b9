"""What a steering says, what it holds, and what a client's odd words do to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from world import CONFIG, World, engine, names, reason, rest, sent, status

from extproc import headers
from extproc.config.values import ClientPolicy, Federation, Listener
from extproc.errors import Reason
from extproc.exchange.ledger import GRACE_SECONDS
from extproc.exchange.messages import (
    Action,
    Immediate,
    NeedBody,
    Phase,
    RequestBody,
    RequestTrailers,
    Steer,
)
from extproc.exchange.outcome import Outcome
from extproc.routing.catalog import ModelEntry
from extproc.routing.endpoint import Info, Kind, Peer, Url
from extproc.serve.ext_proc_stream import ExchangeLike
from extproc.serve.replies import Renderer
from extproc.serve.steering import PriorityGroups


def rendered(action: Action, phase: Phase) -> bytes:
    """The reply that Envoy gets; raises for one that Envoy would refuse."""
    return Renderer(PriorityGroups()).render(action, phase)


def test_it_is_what_a_stream_carries(world: World) -> None:
    """The seam is kept: a stream ends it by the names that streams use."""
    exchange, _ = world.route()
    carried: ExchangeLike = exchange
    carried.end(world.now, owes_reply=False)
    assert world.inflight() == {}


@pytest.mark.parametrize("given", [b"x" * 17_000, b"x" * 257, b"a\x01b", b"\xff\xfe"])
def test_an_odd_request_id_stays_as_it_came(world: World, given: bytes) -> None:
    """Envoy would refuse to set some of them, which would cost the request."""
    _, action = world.ask(("x-llmgw-model", "m"), ("x-request-id", given))
    assert isinstance(action, Steer)
    assert headers.REQUEST_ID not in sent(action)
    assert rendered(action, Phase.REQUEST_HEADERS)


@pytest.mark.parametrize("given", [b"t" * 17_000, b"a\x01b"])
def test_tags_that_cannot_be_sent_on_are_left_out(world: World, given: bytes) -> None:
    """The client's own are ours and stay; the request is served."""
    exchange, _ = world.ask(
        ("x-llmgw-model", "x/m"), ("x-llmgw-client", "tagged"), ("x-llmgw-tags", given)
    )
    steer = exchange.receive(RequestBody(b'{"model":"x/m"}'), world.now)
    assert isinstance(steer, Steer)
    assert sent(steer)[headers.TAGS] == b"team=red"
    assert rendered(steer, Phase.REQUEST_BODY)


def a_peer(name: str, *, send_tags: bool) -> Info:
    """A peer that serves the model "shared"."""
    return Info(
        id=name,
        url=Url.parse(f"https://{name}.test"),
        models=("shared",),
        kind=Kind.PEER,
        peer=Peer(name, f"cluster-{name}", send_tags=send_tags),
    )


@pytest.mark.parametrize("second", [False, True])
def test_tags_go_only_where_every_peer_of_the_list_gets_them(*, second: bool) -> None:
    """A retry carries the headers of the first attempt."""
    world = World(
        replace(
            CONFIG,
            endpoints=(a_peer("p", send_tags=True), a_peer("q", send_tags=second)),
            models=(ModelEntry("shared"),),
        )
    )
    for _ in range(10):
        exchange, steer = world.route(("x-llmgw-tags", "job=7"), model="shared")
        assert len(steer.clusters) == 2
        assert (sent(steer).get(headers.TAGS) == b"job=7") is second
        assert steer.remove_headers == (() if second else (headers.TAGS,))
        exchange.end(world.now)


def test_an_announced_length_counts_for_no_more_than_the_body_limit(world: World) -> None:
    """Whatever a client announces, the count returns to zero and others are not held back."""
    limit = world.core.gateway.limits.body_limit_bytes
    registry = world.core.registry
    lengths = [10**15 - 1 - number for number in range(36)] + [1, 2, 3] * 12
    running = [world.route(("content-length", str(length)))[0] for length in lengths]
    for name in "abc":
        live = registry.live(name)
        assert live is not None
        assert 0 < live.inflight_tokens <= live.inflight * limit / 4
    world.respond(running[0], attempts=2)
    for exchange in running:
        exchange.end(world.now)
    for name in "abc":
        live = registry.live(name)
        assert live is not None
        assert live.inflight_tokens == 0


def test_a_rewrite_that_breaks_holds_nothing() -> None:
    """A name that cannot be written ends the stream with an error, and the place is free."""
    bad = engine("bad", 9001, "renamed", upstream_model="half a pair \ud800")
    world = World(replace(CONFIG, endpoints=(bad,), models=(ModelEntry("renamed"),)))
    live = world.core.registry.live("bad")
    assert live is not None
    live.breaker.hold(world.now + 1, world.now)
    live.touch()
    world.later(1.5)
    exchange, action = world.ask(("x-llmgw-model", "renamed"))
    assert action == NeedBody()
    with pytest.raises(UnicodeEncodeError):
        exchange.receive(RequestBody(b'{"model":"renamed"}'), world.now)
    exchange.end(world.now, owes_reply=True)
    assert world.inflight() == {}
    assert live.breaker.free_probes(world.now) == 1
    assert world.told.failed_opens == 0


def test_a_refusal_after_the_choice_gives_the_probe_back(world: World) -> None:
    """Its body cannot be rewritten, which is found only when the endpoint is known."""
    live = world.core.registry.live("renamed")
    assert live is not None
    live.breaker.hold(world.now + 1, world.now)
    live.touch()
    world.later(1.5)
    exchange, _ = world.ask(("x-llmgw-model", "renamed"))
    assert status(exchange.receive(RequestBody(b"junk"), world.now)) == 400
    assert live.breaker.free_probes(world.now) == 1


def test_trailers_in_place_of_a_body_do_not_unname_the_model(world: World) -> None:
    """The header names it; what is missing is the body to rename it in."""
    exchange, action = world.ask(("x-llmgw-model", "renamed"))
    assert action == NeedBody()
    answer = exchange.receive(RequestTrailers(), world.now)
    assert (status(answer), reason(answer)) == (400, "body_invalid")
    assert world.told.refusals == [(Reason.BODY_INVALID, "renamed")]


def test_an_upgrade_is_asked_for_no_body(world: World) -> None:
    """An upgrade has no end of a body to wait for, so the model cannot be renamed in it."""
    _, action = world.ask(("upgrade", "websocket"), method="GET", path="/v1/realtime?model=renamed")
    assert (status(action), reason(action)) == (503, "no_endpoint")


def test_without_a_rewrite_only_endpoints_that_need_none_are_used() -> None:
    """A model that some endpoints call otherwise is steered at once to one that does not."""
    world = World(
        replace(
            CONFIG,
            endpoints=(engine("same", 9001), engine("other", 9002, upstream_model="org/m")),
        )
    )
    seen = set()
    for _ in range(40):
        exchange, action = world.ask(("x-llmgw-model", "m"))
        seen.add(type(action))
        if isinstance(action, Steer):
            assert action.clusters == ("ep-same",)
        else:
            action = exchange.receive(RequestBody(b'{"model":"m"}'), world.now)
            assert isinstance(action, Steer)
            assert (action.body is None) == (action.clusters == ("ep-same",))
        exchange.end(world.now)
    assert seen == {Steer, NeedBody}


def test_a_session_is_one_only_under_one_model() -> None:
    """The same key under two models is placed twice, independently."""
    both = tuple(engine(name, 9001 + port, "m", "n") for port, name in enumerate("abc"))
    world = World(replace(CONFIG, endpoints=both, models=(ModelEntry("m"), ModelEntry("n"))))
    places = []
    for number in range(20):
        pair = []
        for model in "mn":
            exchange, steer = world.route(("x-session-id", f"s{number}"), model=model)
            pair.append(steer.clusters[0])
            exchange.end(world.now)
        places.append(pair)
    assert any(one != other for one, other in places)


def test_a_session_header_outranks_the_key_in_the_body(world: World) -> None:
    """The body's key is for clients that set no header."""
    clusters = set()
    for number in range(20):
        exchange, _ = world.ask(("x-session-id", "s"))
        body = b'{"model":"m","prompt_cache_key":"k%d"}' % number
        steer = exchange.receive(RequestBody(body), world.now)
        assert isinstance(steer, Steer)
        clusters.add(steer.clusters[0])
        exchange.end(world.now)
    assert len(clusters) == 1


@pytest.mark.parametrize(
    ("client", "expected"), [("batcher", "batch"), ("tagged", "long-context"), (None, "chat")]
)
def test_the_clients_strategy_comes_before_the_models(client: str | None, expected: str) -> None:
    """Without either it is the default."""
    world = World(
        replace(
            CONFIG,
            models=(ModelEntry("m", strategy=None if client is None else "long-context"),),
            clients={**CONFIG.clients, "batcher": ClientPolicy(strategy="batch")},
        )
    )
    pairs = () if client is None else (("x-llmgw-client", client),)
    world.route(*pairs)
    assert world.core.scheduler.decisions[-1].strategy == expected


def test_a_probe_that_hangs_frees_its_slot_at_the_header_deadline() -> None:
    """An answer that has not begun by then will not begin."""
    world = World(replace(CONFIG, listener=Listener(header_deadline_seconds=5)))
    rest(world, "a")
    world.later(1.5)
    _, steer = world.route()
    assert names(steer)[0] == "a"
    world.later(4.9)
    assert names(world.route()[1])[0] != "a"
    world.later(0.2)
    assert names(world.route()[1])[0] == "a"


def test_hops_are_passed_on_with_ours_behind_them() -> None:
    """Whoever comes next knows everybody that the request passed through."""
    world = World(replace(CONFIG, federation=Federation(forward_hopped_requests=True)))
    exchange, _ = world.ask(("x-llmgw-model", "x/m"), (headers.HOP, "cluster-z"))
    steer = exchange.receive(RequestBody(b'{"model":"x/m"}'), world.now)
    assert isinstance(steer, Steer)
    assert sent(steer)[headers.HOP] == b"cluster-z,home"


def test_a_peer_reads_its_models_name_in_the_header_that_was_used(world: World) -> None:
    """A second model header would make the peer refuse the request."""
    exchange, _ = world.ask(("x-gateway-model-name", "x/m"))
    steer = exchange.receive(RequestBody(b'{"model":"x/m"}'), world.now)
    assert isinstance(steer, Steer)
    assert sent(steer)["x-gateway-model-name"] == b"m"
    assert "x-llmgw-model" not in sent(steer)


def test_one_saturated_model_outweighs_a_dead_one(world: World) -> None:
    """Waiting helps, and the soonest moment of all is the one to come back at."""
    exchange, _ = world.route(model="outside")
    world.respond(exchange, 429, retry_after="9")
    exchange.end(world.now)
    for name in "abc":
        rest(world, name)
    _, action = world.ask(("x-llmgw-model", "outside"))
    assert isinstance(action, Immediate)
    assert (status(action), reason(action)) == (429, "saturated")
    assert dict(action.headers)["retry-after"] == b"1"


def test_one_forbidden_model_outweighs_a_dead_one(world: World) -> None:
    """The client is told of what it can change."""
    for name in "abc":
        rest(world, name)
    _, action = world.ask(("x-llmgw-model", "outside"), (headers.RESIDENCY, "us"))
    assert (status(action), reason(action)) == (503, "restricted")


def test_durations_count_from_the_requests_headers(world: World) -> None:
    """Also where the body had to be waited for."""
    exchange, _ = world.ask()
    world.later(1)
    exchange.receive(RequestBody(b'{"model":"m"}'), world.now)
    world.later(2)
    world.respond(exchange)
    world.later(4)
    exchange.end(world.now)
    assert world.told.seconds == [pytest.approx(3), pytest.approx(7)]


def test_a_late_reply_to_the_response_headers_is_no_failing_open(world: World) -> None:
    """The request ran where we sent it; only the end of its count comes early."""
    exchange, steer = world.route()
    world.respond(exchange)
    exchange.end(world.now, owes_reply=True)
    world.later(GRACE_SECONDS)
    assert world.told.failed_opens == 0
    assert world.told.attempts == [(names(steer)[0], Outcome.SUCCESS)]
