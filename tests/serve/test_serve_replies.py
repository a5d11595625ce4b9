"""Actions as replies, read back with the protobuf library."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc import headers
from extproc.config.values import Steering
from extproc.exchange.messages import Action, Continue, Immediate, NeedBody, Phase, Steer
from extproc.serve import replies
from extproc.serve.mutations import InvalidAction
from extproc.serve.pb import base_pb2
from extproc.serve.pb import ext_proc_pb2 as pb
from extproc.serve.replies import Renderer, go_on
from extproc.serve.steering import channel

OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
SET = (
    (headers.CLUSTER, b"ep-a"),
    (headers.REQUEST_ID, b"3e6b8a3c"),
    (headers.HOP, b"gw-1,gw-2"),
    (headers.MAX_RETRIES, b"1"),
    (headers.DECISION, b"i1-1"),
)


def steer(
    phase: Phase = Phase.REQUEST_HEADERS,
    *,
    set_headers: tuple[tuple[str, bytes], ...] = SET,
    remove_headers: tuple[str, ...] = (),
    clusters: tuple[str, ...] = ("ep-a", "ep-b"),
    body: bytes | None = None,
) -> Steer:
    """A choice of two endpoints."""
    return Steer(
        phase=phase,
        clusters=clusters,
        set_headers=set_headers,
        remove_headers=remove_headers,
        destinations=("10.0.0.1:80", "10.0.0.2:80"),
        body=body,
    )


def render(
    action: Action, phase: Phase, steering: Steering = Steering.PRIORITY_GROUP
) -> pb.ProcessingResponse:
    """The reply, as the library reads it."""
    return pb.ProcessingResponse.FromString(Renderer(channel(steering)).render(action, phase))


def pairs(mutation: pb.HeaderMutation) -> list[tuple[str, bytes]]:
    """The headers that are set; each overwrites and has its value in `raw_value` alone."""
    for option in mutation.set_headers:
        assert option.append_action == OVERWRITE
        assert not option.header.value
    return [(option.header.key, option.header.raw_value) for option in mutation.set_headers]


def spaces(reply: pb.ProcessingResponse) -> Mapping[str, base_pb2.Value]:
    """The dynamic metadata by namespace."""
    return dict(reply.dynamic_metadata.fields.items())


def test_a_choice_sets_headers_clears_the_route_and_names_the_clusters() -> None:
    """Everything that moves the request to its endpoint is in the one reply."""
    reply = render(steer(remove_headers=("x-llmgw-tags",)), Phase.REQUEST_HEADERS)
    common = reply.request_headers.response
    assert pairs(common.header_mutation) == list(SET)
    assert list(common.header_mutation.remove_headers) == ["x-llmgw-tags"]
    assert common.clear_route_cache
    assert not common.HasField("body_mutation")
    assert not reply.HasField("mode_override")
    assert set(spaces(reply)) == {headers.ROUTE_NAMESPACE}
    groups = spaces(reply)[headers.ROUTE_NAMESPACE].struct_value.fields["priority_groups"]
    assert len(groups.list_value.values) == 2


def test_the_cluster_header_alone_steers() -> None:
    """With that steering no metadata is sent."""
    reply = render(steer(), Phase.REQUEST_HEADERS, Steering.CLUSTER_HEADER)
    assert pairs(reply.request_headers.response.header_mutation) == list(SET)
    assert not spaces(reply)


def test_an_endpoint_picker_sets_its_header() -> None:
    """With that steering the addresses are in a header and in the balancer's metadata."""
    reply = render(steer(), Phase.REQUEST_HEADERS, Steering.ENDPOINT_PICKER)
    told = pairs(reply.request_headers.response.header_mutation)
    assert told == [*SET, (headers.DESTINATION, b"10.0.0.1:80,10.0.0.2:80")]
    assert set(spaces(reply)) == {headers.PICKER_NAMESPACE}


def test_a_new_body_comes_with_its_length() -> None:
    """In answer to a body, a choice may replace it."""
    body = b'{"model":"m"}' * 30
    length = ("content-length", b"%d" % len(body))
    reply = render(
        steer(Phase.REQUEST_BODY, set_headers=(*SET, length), body=body), Phase.REQUEST_BODY
    )
    common = reply.request_body.response
    assert common.body_mutation.body == body
    assert common.clear_route_cache
    assert pairs(common.header_mutation)[-1] == length


def test_an_empty_body_can_replace_one() -> None:
    """Nothing is also a body: the mutation is there."""
    action = steer(Phase.REQUEST_BODY, set_headers=(*SET, ("content-length", b"0")), body=b"")
    common = render(action, Phase.REQUEST_BODY).request_body.response
    assert common.body_mutation.WhichOneof("mutation") == "body"


def test_a_choice_in_answer_to_a_body_may_leave_it() -> None:
    """Without a new body, the body goes on as it is."""
    common = render(steer(Phase.REQUEST_BODY), Phase.REQUEST_BODY).request_body.response
    assert not common.HasField("body_mutation")


def test_a_body_is_asked_for_by_an_override_of_two_fields() -> None:
    """With the trailers, which may be all that comes; other modes stay as configured."""
    reply = render(NeedBody(), Phase.REQUEST_HEADERS)
    assert reply.WhichOneof("response") == "request_headers"
    override = reply.mode_override
    assert [(field.name, value) for field, value in override.ListFields()] == [
        ("request_body_mode", pb.ProcessingMode.BUFFERED),
        ("request_trailer_mode", pb.ProcessingMode.SEND),
    ]


@pytest.mark.parametrize("phase", Phase)
def test_going_on_answers_the_phase_and_changes_nothing(phase: Phase) -> None:
    """Each phase has its own empty reply, whether an action says so or none."""
    reply = pb.ProcessingResponse.FromString(go_on(phase))
    assert reply.WhichOneof("response") == phase.value
    assert render(Continue(phase), phase) == reply
    assert not reply.HasField("dynamic_metadata")
    if phase not in {Phase.REQUEST_TRAILERS, Phase.RESPONSE_TRAILERS}:
        common = getattr(reply, phase).response
        assert common == pb.CommonResponse()


def test_going_on_may_change_headers() -> None:
    """Without a choice the route is left alone."""
    action = Continue(Phase.RESPONSE_HEADERS, (("x-a", b"1"),), ("x-b",))
    common = render(action, Phase.RESPONSE_HEADERS).response_headers.response
    assert pairs(common.header_mutation) == [("x-a", b"1")]
    assert list(common.header_mutation.remove_headers) == ["x-b"]
    assert not common.clear_route_cache


@pytest.mark.parametrize(
    "phase", [phase for phase in Phase if phase is not Phase.RESPONSE_TRAILERS]
)
def test_an_immediate_answer_is_whole(phase: Phase) -> None:
    """Status, headers, body and details reach Envoy in every phase that allows it."""
    body = b'{"error":{"message":"\xff"}}'
    told = (("content-type", b"application/json"), ("retry-after", b"2"))
    reply = render(Immediate(503, told, body, "no_endpoint"), phase)
    assert reply.WhichOneof("response") == "immediate_response"
    answer = reply.immediate_response
    assert answer.status.code == 503
    assert answer.body == body
    assert answer.details == "no_endpoint"
    assert pairs(answer.headers) == list(told)


INVALID: list[tuple[str, Action, Phase]] = [
    ("a choice for another phase", steer(Phase.REQUEST_BODY), Phase.REQUEST_HEADERS),
    ("a choice after the request", steer(Phase.RESPONSE_HEADERS), Phase.RESPONSE_HEADERS),
    ("a choice with trailers", steer(Phase.REQUEST_TRAILERS), Phase.REQUEST_TRAILERS),
    ("no clusters", steer(clusters=()), Phase.REQUEST_HEADERS),
    ("an empty cluster", steer(clusters=("a", "")), Phase.REQUEST_HEADERS),
    ("no header", steer(set_headers=()), Phase.REQUEST_HEADERS),
    ("a body with headers", steer(body=b"{}"), Phase.REQUEST_HEADERS),
    ("a body without length", steer(Phase.REQUEST_BODY, body=b"{}"), Phase.REQUEST_BODY),
    (
        "a length without body",
        steer(set_headers=(("content-length", b"2"),)),
        Phase.REQUEST_HEADERS,
    ),
    ("a line break", steer(set_headers=(("x-a", b"a\r\nb"),)), Phase.REQUEST_HEADERS),
    ("a pseudo-header", steer(set_headers=((":path", b"/"),)), Phase.REQUEST_HEADERS),
    ("a credential removed", steer(remove_headers=("authorization",)), Phase.REQUEST_HEADERS),
    ("twice", steer(set_headers=(("x-a", b"1"), ("x-a", b"2"))), Phase.REQUEST_HEADERS),
    ("set and removed", steer(remove_headers=(headers.CLUSTER,)), Phase.REQUEST_HEADERS),
    ("too large", steer(set_headers=(("x-a", b"a" * 17_000),)), Phase.REQUEST_HEADERS),
    ("a body asked for late", NeedBody(), Phase.REQUEST_BODY),
    ("another phase", Continue(Phase.REQUEST_BODY), Phase.REQUEST_HEADERS),
    (
        "headers with trailers",
        Continue(Phase.RESPONSE_TRAILERS, (("x-a", b"1"),)),
        Phase.RESPONSE_TRAILERS,
    ),
    ("an answer too late", Immediate(500, (), b"", ""), Phase.RESPONSE_TRAILERS),
    ("an unknown status", Immediate(299, (), b"", ""), Phase.REQUEST_HEADERS),
    ("details of two words", Immediate(500, (), b"", "a b"), Phase.REQUEST_HEADERS),
    ("a bad answer header", Immediate(500, (("x-a", b"\n"),), b"", ""), Phase.REQUEST_HEADERS),
]


@pytest.mark.parametrize(
    ("action", "phase"), [(a, p) for _, a, p in INVALID], ids=[name for name, _, _ in INVALID]
)
def test_what_envoy_would_refuse_is_not_written(action: Action, phase: Phase) -> None:
    """An action that cannot be a valid reply raises, and says why."""
    with pytest.raises(InvalidAction, match=r".+"):
        render(action, phase)


def test_what_is_kept_is_bounded() -> None:
    """Forgetting what was kept changes no reply."""
    renderer = Renderer(channel(Steering.CLUSTER_HEADER))
    before = renderer.render(steer(), Phase.REQUEST_HEADERS)
    for number in range(replies._MAX_KEPT + 100):
        action = Continue(Phase.REQUEST_HEADERS, ((f"x-{number}", b""),), (f"y-{number}",))
        renderer.render(action, Phase.REQUEST_HEADERS)
    assert len(renderer._openings) <= replies._MAX_KEPT
    assert len(renderer._removals) <= replies._MAX_KEPT
    assert renderer.render(steer(), Phase.REQUEST_HEADERS) == before


names = st.from_regex(r"x-[a-z0-9_-]{0,20}", fullmatch=True)
contents = st.binary(max_size=200).filter(lambda raw: not any(b < 32 or b == 127 for b in raw))


@given(
    st.dictionaries(names, contents, min_size=1, max_size=8),
    st.lists(st.from_regex(r"ep-[a-z]{1,40}", fullmatch=True), min_size=1, max_size=5),
)
def test_any_valid_choice_arrives_as_it_was_meant(
    set_headers: dict[str, bytes], clusters: list[str]
) -> None:
    """Whatever the lengths, the library reads back what was to be said."""
    action = Steer(Phase.REQUEST_HEADERS, tuple(clusters), tuple(set_headers.items()))
    reply = render(action, Phase.REQUEST_HEADERS)
    assert dict(pairs(reply.request_headers.response.header_mutation)) == set_headers
    groups = spaces(reply)[headers.ROUTE_NAMESPACE].struct_value.fields["priority_groups"]
    assert len(groups.list_value.values) == len(clusters)
