"""Envoy's messages to an external processor, as values."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc import headers
from extproc.exchange.messages import (
    Message,
    Phase,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseHeaders,
    ResponseTrailers,
)
from extproc.serve.pb import base_pb2
from extproc.serve.pb import ext_proc_pb2 as pb
from extproc.serve.replies import GO_ON_RESPONSE_BODY
from extproc.serve.wire import Reader, Unasked, Unreadable, parse

ATTRIBUTES = "envoy.filters.http.ext_proc"


def header_map(*pairs: tuple[str, bytes]) -> base_pb2.HeaderMap:
    """Headers as Envoy sends them."""
    return base_pb2.HeaderMap(
        headers=[base_pb2.HeaderValue(key=key, raw_value=value) for key, value in pairs]
    )


def asked(message: pb.ProcessingRequest) -> RequestHeaders:
    """`message` with request headers, read."""
    message.request_headers.SetInParent()
    parsed = parse(message.SerializeToString())
    assert isinstance(parsed, RequestHeaders)
    return parsed


def answered(message: pb.ProcessingRequest) -> ResponseHeaders:
    """`message` with response headers, read."""
    message.response_headers.SetInParent()
    parsed = parse(message.SerializeToString())
    assert isinstance(parsed, ResponseHeaders)
    return parsed


def test_headers_keep_their_order_and_bytes() -> None:
    """Every header arrives, duplicates and bytes that are no UTF-8 included."""
    message = pb.ProcessingRequest()
    pairs = ((":method", b"POST"), ("x-a", b"\xff\xfe"), ("x-a", b"2"), ("x-b", b""))
    message.request_headers.headers.CopyFrom(header_map(*pairs))
    message.request_headers.end_of_stream = True
    assert asked(message) == RequestHeaders(list(pairs), end_of_stream=True)


def test_the_other_value_field_is_read_too() -> None:
    """An Envoy that is told to fills `value` instead of `raw_value`."""
    message = pb.ProcessingRequest()
    message.request_headers.headers.headers.add(key="x-a", value=b"Espa\xf1a")
    assert asked(message).headers == [("x-a", b"Espa\xf1a")]


def test_what_envoy_read_out_of_the_body_is_text() -> None:
    """Strings stay as they are, anything else is JSON."""
    message = pb.ProcessingRequest()
    fields = message.metadata_context.filter_metadata[headers.BODY_NAMESPACE].fields
    fields["model"].string_value = b"gpt-9"
    fields["stream"].bool_value = True
    fields["user"].number_value = 12345.0
    fields["half"].number_value = 0.5
    fields["huge"].number_value = 1e300
    fields["none"].null_value = base_pb2.Value.NULL_VALUE
    fields["list"].list_value.values.add(string_value=b"a")
    fields["map"].struct_value.fields["k"].number_value = -1
    fields["junk"].string_value = b"a\xffb"
    message.metadata_context.filter_metadata["another"].fields["model"].string_value = b"no"
    assert asked(message).metadata == {
        "model": "gpt-9",
        "stream": "true",
        "user": "12345",
        "half": "0.5",
        "huge": "1e+300",
        "none": "null",
        "list": '["a"]',
        "map": '{"k":-1}',
        "junk": "a\ufffdb",
    }


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (base_pb2.Value(string_value=b"10.0.0.1:80, 10.0.0.2:80,"), ("10.0.0.1:80", "10.0.0.2:80")),
        (base_pb2.Value(string_value=b""), ()),
        (
            base_pb2.Value(
                list_value=base_pb2.ListValue(
                    values=[
                        base_pb2.Value(string_value=b"10.0.0.1:80"),
                        base_pb2.Value(string_value=b"b"),
                    ]
                )
            ),
            ("10.0.0.1:80", "b"),
        ),
        (base_pb2.Value(list_value=base_pb2.ListValue()), ()),
    ],
    ids=["text", "empty text", "list", "empty list"],
)
def test_a_subset_hint_is_a_list_or_a_text(hint: base_pb2.Value, expected: tuple[str, ...]) -> None:
    """Both forms of the hint are read, and an empty hint allows nothing."""
    message = pb.ProcessingRequest()
    fields = message.metadata_context.filter_metadata[headers.SUBSET_NAMESPACE].fields
    fields[headers.SUBSET].CopyFrom(hint)
    assert asked(message).subset == expected


def test_without_a_hint_there_is_no_subset() -> None:
    """No namespace, or one without the key, limits nothing."""
    message = pb.ProcessingRequest()
    assert asked(message).subset is None
    message.metadata_context.filter_metadata[headers.SUBSET_NAMESPACE].SetInParent()
    assert asked(message).subset is None


def test_an_answer_is_joined_with_its_attributes() -> None:
    """Flags, details, cluster and attempts come from the attributes, the status from its header."""
    message = pb.ProcessingRequest()
    message.response_headers.headers.CopyFrom(
        header_map((":status", b"503"), ("retry-after", b"2"))
    )
    message.response_headers.end_of_stream = True
    fields = message.attributes[ATTRIBUTES].fields
    fields["response.flags"].number_value = 32800
    fields["response.code_details"].string_value = b"via_upstream"
    fields["xds.cluster_name"].string_value = b"ep-a"
    fields["upstream.request_attempt_count"].number_value = 2
    assert answered(message) == ResponseHeaders(
        status=503,
        retry_after="2",
        end_of_stream=True,
        flags=32800,
        details="via_upstream",
        cluster="ep-a",
        attempts=2,
    )


def test_the_first_retry_after_counts() -> None:
    """It is found among all other headers, and one that is not UTF-8 is read as Latin-1."""
    message = pb.ProcessingRequest()
    message.response_headers.headers.CopyFrom(header_map((":status", b"503"), ("age", b"40")))
    assert answered(message).retry_after is None
    message.response_headers.headers.MergeFrom(
        header_map(("retry-after", b"7\xe9"), ("retry-after", b"8"))
    )
    assert answered(message).retry_after == "7\xe9"


def test_a_status_that_is_no_number_is_none() -> None:
    """It reads as 0."""
    message = pb.ProcessingRequest()
    message.response_headers.headers.CopyFrom(header_map((":status", b"20x")))
    assert answered(message).status == 0


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_number_that_counts_nothing_is_left_out(junk: float) -> None:
    """A number outside what Envoy counts in is read as absent."""
    message = pb.ProcessingRequest()
    message.attributes[ATTRIBUTES].fields["response.flags"].number_value = junk
    assert answered(message).flags == 0


@pytest.mark.parametrize(
    ("message", "expected", "phase"),
    [
        (
            pb.ProcessingRequest(request_body=pb.HttpBody(body=b"{}", end_of_stream=True)),
            RequestBody(b"{}", end_of_stream=True),
            Phase.REQUEST_BODY,
        ),
        (
            pb.ProcessingRequest(request_body=pb.HttpBody(body=b"{}")),
            RequestBody(b"{}", end_of_stream=False),
            Phase.REQUEST_BODY,
        ),
        (
            pb.ProcessingRequest(request_trailers=pb.HttpTrailers()),
            RequestTrailers(),
            Phase.REQUEST_TRAILERS,
        ),
        (
            pb.ProcessingRequest(response_headers=pb.HttpHeaders()),
            ResponseHeaders(0),
            Phase.RESPONSE_HEADERS,
        ),
        (
            pb.ProcessingRequest(response_trailers=pb.HttpTrailers()),
            ResponseTrailers(),
            Phase.RESPONSE_TRAILERS,
        ),
        (
            pb.ProcessingRequest(request_headers=pb.HttpHeaders()),
            RequestHeaders([]),
            Phase.REQUEST_HEADERS,
        ),
    ],
)
def test_every_kind_of_message_has_its_phase(
    message: pb.ProcessingRequest, expected: Message, phase: Phase
) -> None:
    """Each message becomes its value, and is answered in its phase."""
    parsed = parse(message.SerializeToString())
    assert parsed == expected
    assert not isinstance(parsed, Unasked)
    assert parsed.phase is phase


def test_a_response_body_is_let_through() -> None:
    """Nobody asks for the answer's body, and whoever sends it is told to go on."""
    message = pb.ProcessingRequest(response_body=pb.HttpBody(body=b"x"))
    assert parse(message.SerializeToString()) == Unasked(GO_ON_RESPONSE_BODY)


def test_an_unknown_kind_of_message_has_no_answer() -> None:
    """A message without any of the known kinds is recognised as such."""
    assert parse(b"") == Unasked(None)


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    """Reading raises nothing but its own error."""
    with suppress(Unreadable):
        parse(raw)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


def as_value(plain: object) -> base_pb2.Value:
    """A JSON value as protobuf has it."""
    match plain:
        case bool():
            return base_pb2.Value(bool_value=plain)
        case int():
            return base_pb2.Value(number_value=plain)
        case str():
            return base_pb2.Value(string_value=plain.encode())
        case list():
            items = [as_value(item) for item in plain]
            return base_pb2.Value(list_value=base_pb2.ListValue(values=items))
        case dict():
            fields = {key: as_value(item) for key, item in plain.items()}
            return base_pb2.Value(struct_value=base_pb2.Struct(fields=fields))
        case _:
            return base_pb2.Value(null_value=base_pb2.Value.NULL_VALUE)


@given(values)
def test_what_is_not_text_comes_as_its_json(plain: object) -> None:
    """Reading the JSON again gives the value that Envoy had."""
    message = pb.ProcessingRequest()
    fields = message.metadata_context.filter_metadata[headers.BODY_NAMESPACE].fields
    fields["user"].CopyFrom(as_value(plain))
    text = asked(message).metadata["user"]
    assert text == plain if isinstance(plain, str) else json.loads(text) == plain


def test_what_is_said_beside_the_headers_is_kept_in_a_bounded_number() -> None:
    """Bodies may name a user each."""
    reader = Reader()
    for number in range(10_000):
        message = pb.ProcessingRequest()
        message.response_headers.headers.CopyFrom(header_map((":status", b"200")))
        space = message.metadata_context.filter_metadata[headers.BODY_NAMESPACE]
        space.fields["user"].string_value = b"%d" % number
        message.attributes[ATTRIBUTES].fields["xds.cluster_name"].string_value = b"%d" % number
        answer = reader.read(message.SerializeToString())
        assert isinstance(answer, ResponseHeaders)
        assert answer.cluster == str(number)
    assert len(reader._asides) <= 4096


def test_only_what_is_short_is_kept() -> None:
    """And nothing of a request's or an answer's headers."""
    reader = Reader()
    for size, kept in ((600, 0), (6, 1)):
        message = pb.ProcessingRequest()
        message.response_headers.headers.CopyFrom(header_map(("retry-after", b"1" * 600)))
        message.attributes[ATTRIBUTES].fields["xds.cluster_name"].string_value = b"c" * size
        raw = message.SerializeToString()
        assert reader.read(raw) == reader.read(raw) == parse(raw)
        assert len(reader._asides) == kept
    assert all(len(rest) < 512 and b"1" * 600 not in rest for rest in reader._asides)
