"""A request's conversation, message by message, in any order."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world import CONFIG, World, decision_id, error, reason, sent, status

from extproc import headers
from extproc.errors import Reason
from extproc.exchange.exchange import State
from extproc.exchange.messages import (
    Continue,
    Immediate,
    Message,
    NeedBody,
    Phase,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseHeaders,
    ResponseTrailers,
    Steer,
)
from extproc.exchange.outcome import Outcome


def test_a_request_is_steered_with_everything_that_envoy_needs(world: World) -> None:
    """The reply names the clusters in order and the decision; what is so already is not said."""
    exchange, steer = world.route(("x-request-id", "r-1"))
    told = sent(steer)
    assert len(steer.clusters) == 3
    assert told[headers.CLUSTER] == steer.clusters[0].encode()
    assert told.keys() == {headers.CLUSTER, headers.DECISION}
    assert exchange.state is State.ROUTED


def test_a_list_that_is_shorter_than_usual_says_how_many_retries_are_left(world: World) -> None:
    """Past its end, Envoy would try the last endpoint again."""
    registry = world.core.registry
    for left, retries in ((3, None), (2, b"1"), (1, b"0")):
        registry.replace(registry.infos()[:left], world.now)
        assert sent(world.route()[1]).get(headers.MAX_RETRIES) == retries


def test_a_request_without_an_id_gets_one(world: World) -> None:
    """Every request can be found again."""
    _, steer = world.route()
    assert sent(steer)[headers.REQUEST_ID]


def test_decision_ids_are_never_the_same(world: World) -> None:
    """An id names one decision."""
    ids = {decision_id(world.route()[1]) for _ in range(50)}
    assert len(ids) == 50


def test_inflight_is_held_until_the_end_and_not_the_headers(world: World) -> None:
    """A stream counts for as long as it runs."""
    exchange, steer = world.route()
    name = steer.clusters[0].removeprefix("ep-")
    assert world.inflight() == {name: 1}
    world.respond(exchange)
    world.later(30)
    assert world.inflight() == {name: 1}
    exchange.end(world.now)
    assert world.inflight() == {}


def test_a_second_end_changes_nothing(world: World) -> None:
    """However often a transport tells the end, it counts once."""
    exchange, _ = world.route()
    exchange.end(world.now)
    exchange.end(world.now)
    exchange.end(world.now, owes_reply=True)
    assert world.inflight() == {}
    assert world.told.failed_opens == 0


def test_an_answer_that_was_never_written_counts_nowhere(world: World) -> None:
    """Envoy went on without us, so the endpoint that we chose has nothing to do with it."""
    exchange, _ = world.route()
    exchange.end(world.now, owes_reply=True)
    world.later(5)
    assert world.inflight() == {}
    assert world.told.attempts == []
    assert world.told.failed_opens == 1
    assert len(world.core.ledger) == 0


def test_the_model_can_come_from_envoys_filter(world: World) -> None:
    """What Envoy read out of the body needs no header and no body here."""
    _, action = world.ask(metadata={"model": "m"})
    assert isinstance(action, Steer)


def test_a_body_that_envoy_could_not_read_is_read_here(world: World) -> None:
    """Valid JSON that the filter refuses is routed by a buffered parse."""
    exchange, action = world.ask(metadata={"model": "_error"})
    assert action == NeedBody()
    body = b'{"seed":12345678901234567890,"model":"m"}'
    steer = exchange.receive(RequestBody(body), world.now)
    assert isinstance(steer, Steer)
    assert steer.phase is Phase.REQUEST_BODY
    assert steer.body is None


@pytest.mark.parametrize("pairs", [[], [("x-llmgw-model", "renamed")]], ids=["body", "header"])
def test_a_body_above_the_limit_is_not_asked_for(
    world: World, pairs: list[tuple[str, str]]
) -> None:
    """Envoy would wait for the end of what it cannot hold; nothing is in flight."""
    limit = world.core.gateway.limits.body_limit_bytes
    exchange, action = world.ask(*pairs, ("content-length", str(limit + 1)))
    assert (status(action), reason(action)) == (413, Reason.BODY_TOO_LARGE)
    assert exchange.state is State.LOCAL
    assert world.inflight() == {}
    _, action = world.ask(*pairs, ("content-length", str(limit)))
    assert action == NeedBody()


def test_a_body_above_the_limit_is_refused_though_envoy_has_read_it(world: World) -> None:
    """Envoy holds a little more than the limit, for bodies that become longer."""
    limit = world.core.gateway.limits.body_limit_bytes
    read = {"model": "m"}
    _, action = world.ask(("content-length", str(limit + 1)), metadata=read)
    assert (status(action), reason(action)) == (413, Reason.BODY_TOO_LARGE)
    assert world.inflight() == {}
    _, action = world.ask(("content-length", str(limit)), metadata=read)
    assert isinstance(action, Steer)


def test_a_body_of_the_wrong_kind_is_not_asked_for(world: World) -> None:
    """Its headers say enough."""
    for pair in (("content-encoding", "gzip"), ("content-type", "text/plain")):
        _, action = world.ask(pair)
        assert (status(action), reason(action)) == (415, Reason.BODY_ENCODING)


def test_without_metadata_the_body_is_asked_for(world: World) -> None:
    """An Envoy without the JSON filter works too."""
    exchange, action = world.ask()
    assert action == NeedBody()
    assert isinstance(exchange.receive(RequestBody(b'{"model":"m"}'), world.now), Steer)
    assert world.told.dispatches


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", (400, "model_missing")),
        (b"{}", (400, "model_missing")),
        (b"{", (400, "body_invalid")),
        (b'{"model":1}', (400, "model_invalid")),
        (b'{"model":"m","model":"m"}', (400, "model_ambiguous")),
        (b'{"model":"nope"}', (404, "model_not_found")),
    ],
)
def test_a_body_that_names_no_model_is_refused(
    world: World, body: bytes, expected: tuple[int, str]
) -> None:
    """Each mistake has its own answer."""
    exchange, _ = world.ask()
    answer = exchange.receive(RequestBody(body), world.now)
    assert (status(answer), reason(answer)) == expected
    assert world.inflight() == {}


def test_trailers_in_place_of_a_body_are_answered(world: World) -> None:
    """Nothing waits for a body that will not come."""
    exchange, _ = world.ask()
    assert status(exchange.receive(RequestTrailers(), world.now)) == 400


def test_a_body_key_is_a_session_when_no_header_is(world: World) -> None:
    """The prompt cache key of a body that is read here keeps its endpoint."""
    body = b'{"model":"m","prompt_cache_key":"k"}'
    clusters = set()
    for _ in range(10):
        exchange, _ = world.ask()
        steer = exchange.receive(RequestBody(body), world.now)
        assert isinstance(steer, Steer)
        clusters.add(steer.clusters[0])
        exchange.end(world.now)
    assert len(clusters) == 1


def test_sessions_stick(world: World) -> None:
    """Requests of one session go to one endpoint."""
    first = world.route(("x-session-id", "s"))[1].clusters[0]
    assert {world.route(("x-session-id", "s"))[1].clusters[0] for _ in range(3)} == {first}


def test_a_model_that_the_endpoint_calls_otherwise_has_its_body_rewritten(world: World) -> None:
    """Steering waits for the body reply, where only the model's bytes change."""
    exchange, action = world.ask(("x-llmgw-model", "renamed"))
    assert action == NeedBody()
    assert world.inflight() == {}
    steer = exchange.receive(RequestBody(b'{ "model" : "renamed", "n":1 }'), world.now)
    assert isinstance(steer, Steer)
    assert steer.phase is Phase.REQUEST_BODY
    assert steer.body == b'{ "model" : "org/Renamed-7B", "n":1 }'
    assert sent(steer)["content-length"] == b"%d" % len(steer.body)
    assert world.inflight() == {"renamed": 1}


def test_a_body_that_cannot_be_rewritten_holds_nothing(world: World) -> None:
    """A refusal after the choice gives the place back."""
    exchange, _ = world.ask(("x-llmgw-model", "renamed"))
    assert status(exchange.receive(RequestBody(b"junk"), world.now)) == 400
    exchange.end(world.now)
    world.later(5)
    assert world.inflight() == {}
    assert world.told.attempts == []


def test_an_alias_reaches_the_model_under_its_own_name(world: World) -> None:
    """The engine is asked for the model that it knows."""
    exchange, action = world.ask(metadata={"model": "fast"})
    assert action == NeedBody()
    steer = exchange.receive(RequestBody(b'{"model":"fast"}'), world.now)
    assert isinstance(steer, Steer)
    assert steer.body == b'{"model":"m"}'


def test_a_bodyless_request_goes_only_where_no_rewrite_is_needed(world: World) -> None:
    """Without a body there is nothing to rename the model in."""
    _, action = world.ask(("x-llmgw-model", "renamed"), end_of_stream=True)
    assert status(action) == 503
    _, action = world.ask(("x-llmgw-model", "m"), end_of_stream=True)
    assert isinstance(action, Steer)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ((("x-llmgw-model", "m"), ("x-gateway-model-name", "m")), (400, "model_ambiguous")),
        ((("x-llmgw-model", "m"), ("x-llmgw-model", "m")), (400, "model_ambiguous")),
        ((("x-llmgw-model", ""),), (400, "model_invalid")),
        ((("x-llmgw-model", b"\xff"),), (400, "model_invalid")),
        ((("x-llmgw-model", "nope"),), (404, "model_not_found")),
        ((("x-llmgw-model", "m"), ("x-llmgw-hop", "home")), (508, "loop")),
        ((("x-llmgw-model", "m"), ("x-llmgw-hop", "other,home")), (508, "loop")),
        ((("x-llmgw-model", "m"), ("x-llmgw-hop", "-1")), (508, "hop_invalid")),
        ((("x-llmgw-model", "m"), ("x-llmgw-hop", "")), (508, "hop_invalid")),
        (
            (("x-llmgw-model", "m"), ("x-llmgw-hop", "a,b,c,d,e,f,g,h,i")),
            (508, "too_many_hops"),
        ),
    ],
)
def test_headers_that_cannot_be_routed_are_refused(
    world: World, pairs: tuple[tuple[str, str | bytes], ...], expected: tuple[int, str]
) -> None:
    """Ambiguity, unknown models and loops have answers of their own."""
    _, action = world.ask(*pairs)
    assert (status(action), reason(action)) == expected
    assert [told[0] for told in world.told.refusals] == [Reason(expected[1])]


def test_a_get_without_a_model_is_told_to_name_one(world: World) -> None:
    """A request that has no body cannot name its model there."""
    _, action = world.ask(end_of_stream=True)
    assert (status(action), reason(action)) == (400, "model_missing")


def test_models_and_readiness_are_answered_here(world: World) -> None:
    """No endpoint is asked for what the gateway knows."""
    _, action = world.ask(method="GET", path="/v1/models", end_of_stream=True)
    assert isinstance(action, Immediate)
    names = [card["id"] for card in json.loads(action.body)["data"]]
    assert {"m", "fast", "renamed", "outside", "x/m", "y/m"} == set(names)
    _, action = world.ask(method="GET", path="/ready", end_of_stream=True)
    assert status(action) == 200
    world.is_ready = False
    _, action = world.ask(method="GET", path="/ready", end_of_stream=True)
    assert status(action) == 503


def test_a_peer_is_listed_our_own_models_only(world: World) -> None:
    """What a peer offers us is not offered back to peers."""
    exchange, action = world.ask(
        (headers.HOP, "cluster-z"), method="GET", path="/v1/models", end_of_stream=True
    )
    assert isinstance(action, Immediate)
    names = {card["id"] for card in json.loads(action.body)["data"]}
    assert names == {"m", "fast", "renamed", "outside"}
    assert exchange.state is State.LOCAL


@pytest.mark.parametrize("path", ["/metrics", "/v1/load_lora_adapter", "/", "/v1/chat"])
def test_unlisted_paths_are_not_found(world: World, path: str) -> None:
    """No path reaches an engine that is not meant to."""
    _, action = world.ask(("x-llmgw-model", "m"), path=path)
    assert status(action) == 404


def test_a_peer_gets_the_hop_list_and_its_own_name_of_the_model(world: World) -> None:
    """A federated request says where it has been, and asks the peer for the peer's model."""
    exchange, action = world.ask(
        ("x-llmgw-model", "x/m"), ("x-llmgw-client", "tagged"), ("x-llmgw-tags", "job=7")
    )
    assert action == NeedBody()
    steer = exchange.receive(RequestBody(b'{"model":"x/m"}'), world.now)
    assert isinstance(steer, Steer)
    told = sent(steer)
    assert told[headers.HOP] == b"home"
    assert told["x-llmgw-model"] == b"m"
    assert told[headers.TAGS] == b"team=red,job=7"
    assert steer.body == b'{"model":"m"}'


def test_a_peer_without_send_tags_gets_none(world: World) -> None:
    """Who sent a request is told to no one who was not meant to know."""
    exchange, _ = world.ask(("x-llmgw-model", "y/m"), ("x-llmgw-tags", "job=7"))
    steer = exchange.receive(RequestBody(b'{"model":"y/m"}'), world.now)
    assert isinstance(steer, Steer)
    assert headers.TAGS not in sent(steer)
    assert steer.remove_headers == (headers.TAGS,)


@pytest.mark.parametrize(
    "pairs",
    [
        ((headers.NO_STORE, "true"),),
        ((headers.NO_STORE, ""),),
        ((headers.RESIDENCY, "us"),),
        ((headers.RESIDENCY, ""),),
        ((headers.HOP, "cluster-z"),),
        ((headers.CLIENT, "strict"),),
    ],
)
def test_a_restricted_request_never_leaves_for_a_peer(
    world: World, pairs: tuple[tuple[str, str], ...]
) -> None:
    """Fails closed: with nothing else to serve it, the answer says so."""
    _, action = world.ask(("x-llmgw-model", "x/m"), *pairs)
    assert (status(action), reason(action)) == (503, "restricted")
    assert error(action)["code"] == "restricted"


def test_a_restriction_that_is_switched_off_restricts_nothing(world: World) -> None:
    """`false` and `0` are the only words that switch no-store off."""
    for word in ("false", "0"):
        _, action = world.ask(("x-llmgw-model", "outside"), (headers.NO_STORE, word))
        assert isinstance(action, Steer)
        assert action.clusters == ("ep-provider",)


def test_residency_is_kept_by_falling_back_to_our_own(world: World) -> None:
    """A model with a fallback is served where the request may go."""
    exchange, action = world.ask(("x-llmgw-model", "outside"), (headers.RESIDENCY, "us"))
    assert action == NeedBody()
    steer = exchange.receive(RequestBody(b'{"model":"outside"}'), world.now)
    assert isinstance(steer, Steer)
    assert steer.body == b'{"model":"m"}'
    _, action = world.ask(("x-llmgw-model", "outside"), (headers.RESIDENCY, "eu"))
    assert isinstance(action, Steer)
    assert action.clusters == ("ep-provider",)


def test_a_subset_limits_the_choice(world: World) -> None:
    """An endpoint picker's caller may name the endpoints that are allowed."""
    for _ in range(5):
        _, action = world.ask(("x-llmgw-model", "m"), subset=("127.0.0.1:9002",))
        assert isinstance(action, Steer)
        assert action.clusters == ("ep-b",)
        assert action.destinations == ("127.0.0.1:9002",)


def test_saturation_is_429_and_says_when_to_come_back(world: World) -> None:
    """Endpoints that asked for a pause are alive: the client is told to wait for the first."""
    for _ in range(3):
        exchange, steer = world.route()
        world.respond(exchange, 429, retry_after="7")
        exchange.end(world.now)
        assert steer.clusters
    _, action = world.ask(("x-llmgw-model", "m"))
    assert (status(action), reason(action)) == (429, "saturated")
    assert isinstance(action, Immediate)
    assert dict(action.headers)["retry-after"] == b"7"


def test_a_response_without_a_request_is_let_through(world: World) -> None:
    """Envoy may refuse a body before we were asked anything."""
    exchange = world.core.exchange()
    assert exchange.receive(ResponseHeaders(413), world.now) == Continue(Phase.RESPONSE_HEADERS)
    exchange.end(world.now)
    assert world.told.attempts == []


def test_envoys_refusal_while_we_wait_for_the_body_concerns_nobody(world: World) -> None:
    """A body over the limit ends the request before any choice."""
    exchange, _ = world.ask()
    assert exchange.receive(ResponseHeaders(413), world.now) == Continue(Phase.RESPONSE_HEADERS)
    assert exchange.state is State.LOCAL
    exchange.end(world.now)
    assert world.told.attempts == []


def test_late_messages_change_nothing(world: World) -> None:
    """A message after the end is answered and ignored."""
    exchange, _ = world.route()
    exchange.end(world.now)
    assert exchange.receive(ResponseHeaders(200), world.now) == Continue(Phase.RESPONSE_HEADERS)
    world.later(5)
    assert world.inflight() == {}


MESSAGES: list[Message] = [
    RequestHeaders([(":method", b"POST"), (":path", b"/v1/completions"), ("x-llmgw-model", b"m")]),
    RequestHeaders([(":method", b"POST"), (":path", b"/v1/completions")]),
    RequestHeaders(
        [(":method", b"POST"), (":path", b"/v1/completions"), ("x-llmgw-model", b"renamed")]
    ),
    RequestHeaders([]),
    RequestBody(b'{"model":"m"}'),
    RequestBody(b'{"model":"renamed"}', end_of_stream=False),
    RequestBody(b""),
    RequestTrailers(),
    ResponseHeaders(200, details="via_upstream", attempts=1),
    ResponseHeaders(503, flags=2, attempts=3),
    ResponseHeaders(101, attempts=0),
    ResponseTrailers(),
]
PHASES = {
    RequestHeaders: Phase.REQUEST_HEADERS,
    RequestBody: Phase.REQUEST_BODY,
    RequestTrailers: Phase.REQUEST_TRAILERS,
    ResponseHeaders: Phase.RESPONSE_HEADERS,
    ResponseTrailers: Phase.RESPONSE_TRAILERS,
}


@settings(deadline=None, max_examples=150)
@given(
    conversations=st.lists(
        st.tuples(st.lists(st.sampled_from(MESSAGES), max_size=6), st.booleans()), max_size=6
    )
)
def test_any_messages_in_any_order_leave_nothing_behind(
    conversations: list[tuple[list[Message], bool]],
) -> None:
    """Every message gets the answer of its phase, no request counts twice, and all end at zero."""
    world = World(CONFIG)
    for messages, owes_reply in conversations:
        exchange = world.core.exchange()
        for message in messages:
            action = exchange.receive(message, world.now)
            if isinstance(action, Continue | Steer):
                assert action.phase is PHASES[type(message)]
            if isinstance(action, NeedBody):
                assert isinstance(message, RequestHeaders)
            assert sum(world.inflight().values()) <= 1
        exchange.end(world.now, owes_reply=owes_reply)
        assert world.inflight() == {}
        world.later(0.1)
    world.later(5)
    assert len(world.core.ledger) == 0
    assert all(outcome in Outcome for _, outcome in world.told.attempts)
