"""Facts: one pass over a request's headers, and the refusals that pass can make."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc import headers as names_of
from extproc.errors import Reason, Rejection
from extproc.exchange.facts import Facts, ModelSource, Names, Target, read_facts, read_target
from extproc.exchange.messages import RequestHeaders

NAMES = Names()
POST = [(":method", b"POST"), (":path", b"/v1/chat/completions?x=1")]


def facts(*headers: tuple[str, bytes], names: Names = NAMES, **more: object) -> Facts:
    """The facts of a POST with `headers`, which must not be refused."""
    found = read(*headers, names=names, **more)
    assert isinstance(found, Facts)
    return found


def read(
    *headers: tuple[str, bytes],
    names: Names = NAMES,
    metadata: object = None,
    end_of_stream: object = False,
) -> Facts | Rejection:
    """What is read from a POST with `headers`."""
    told = {str(k): str(v) for k, v in metadata.items()} if isinstance(metadata, dict) else {}
    message = RequestHeaders([*POST, *headers], bool(end_of_stream), told)
    return read_facts(message, names)


def refused(*headers: tuple[str, bytes], **more: object) -> Rejection:
    """The refusal of a POST with `headers`."""
    found = read(*headers, **more)  # type: ignore[arg-type]  # `more` holds read's own options
    assert isinstance(found, Rejection)
    return found


def test_the_request_line_is_read_and_the_query_cut_off() -> None:
    """Method and path come as text, without the query."""
    found = facts(("x-llmgw-model", b"m"))
    assert (found.method, found.path) == ("POST", "/v1/chat/completions")


def test_a_target_is_read_without_facts() -> None:
    """Method and path are known also of a request whose facts are refused."""
    assert read_target([*POST, ("x-llmgw-model", b"")]) == Target("POST", "/v1/chat/completions")
    assert read_target([]) == Target("", "")


@pytest.mark.parametrize("name", names_of.MODEL)
def test_every_model_header_counts(name: str) -> None:
    """Each configured name carries the model, and the facts tell which one did."""
    found = facts((name, b"org/model-7B:q4@main"))
    assert found.model == "org/model-7B:q4@main"
    assert found.model_source is ModelSource.HEADER
    assert found.model_header == name


def test_configured_names_replace_the_defaults() -> None:
    """Only the configured names count as model and session headers."""
    names = Names(model=("model",), session=("x-user-id",))
    found = facts(("model", b"m"), ("x-llmgw-model", b"n"), ("x-llmgw-session", b"s"), names=names)
    assert (found.model, found.session) == ("m", None)


def test_a_fixed_name_keeps_its_meaning_when_configured_as_another() -> None:
    """A hop header stays the hop header, whatever the configuration calls the session."""
    found = facts(
        ("x-llmgw-hop", b"a"), ("x-llmgw-model", b"m"), names=Names(session=("x-llmgw-hop",))
    )
    assert (found.hops, found.session) == ((b"a",), None)


@pytest.mark.parametrize("second", [b"a", b"b", b""])
@pytest.mark.parametrize("name", ["x-llmgw-model", "x-ai-eg-model"])
def test_two_model_headers_are_refused(name: str, second: bytes) -> None:
    """Two model headers are 400, under one name or two, in agreement or not."""
    found = refused(("x-llmgw-model", b"a"), (name, second))
    assert (found.status, found.reason) == (400, Reason.MODEL_AMBIGUOUS)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b" ",
        b"\x80",
        b"\xff\xfe",
        b"m\r\nx-evil: 1",
        b"a\x00b",
        b"a\tb",
        b"a\x7fb",
        "a\u0085b".encode(),
        "a\u2028b".encode(),
        b"m" * 257,
        "ü".encode() * 257,
        b"m" * 100_000,
    ],
)
def test_a_header_that_cannot_be_a_name_is_refused(value: bytes) -> None:
    """Empty, over-long, unprintable and non-UTF-8 models are 400, and nothing raw is echoed."""
    found = refused(("x-llmgw-model", value))
    assert (found.status, found.reason) == (400, Reason.MODEL_INVALID)
    assert found.message.isprintable()
    assert "evil" not in found.message


def test_a_name_is_taken_as_it_is() -> None:
    """Nothing is trimmed or folded: blanks around a name and its case belong to it."""
    assert facts(("x-llmgw-model", b" Ab ")).model == " Ab "
    assert facts(("x-llmgw-model", ("ü" * 256).encode())).model == "ü" * 256


def test_the_metadata_names_the_model() -> None:
    """Without a header the model, stream flag and session come from what Envoy read."""
    told = {"model": "m", "stream": "true", "prompt_cache_key": "k\u00fc", "user": "u"}
    found = facts(metadata=told)
    assert (found.model, found.model_source, found.model_header) == (
        "m",
        ModelSource.METADATA,
        None,
    )
    assert (found.stream, found.session) == (True, "k\u00fc".encode())


def test_the_header_counts_before_the_metadata() -> None:
    """A header and a body that disagree are served by the header."""
    found = facts(("x-llmgw-model", b"a"), metadata={"model": "b"})
    assert (found.model, found.model_source) == ("a", ModelSource.HEADER)


def test_a_model_that_the_metadata_gives_is_checked() -> None:
    """A control character that came through the body is refused like one in a header."""
    assert refused(metadata={"model": "m\r\nx-evil: 1"}).reason is Reason.MODEL_INVALID
    assert refused(metadata={"model": ""}).reason is Reason.MODEL_INVALID


@pytest.mark.parametrize("word", ["_missing", "_error"])
def test_the_filters_own_words_send_the_reader_to_the_body(word: str) -> None:
    """Envoy's words never become a model: only the body can tell them from a model so called."""
    found = facts(metadata={"model": word})
    assert (found.model, found.model_source) == (None, ModelSource.BODY)
    copied = facts(("x-llmgw-model", word.encode()), metadata={"model": word})
    assert (copied.model, copied.model_source) == (None, ModelSource.BODY)
    assert copied.model_header == "x-llmgw-model"


@pytest.mark.parametrize("word", ["_missing", "_error"])
def test_a_header_that_reads_like_the_filters_words_is_a_name(word: str) -> None:
    """A header that Envoy did not write is a model, whatever it reads."""
    assert facts(("x-llmgw-model", word.encode())).model == word
    found = facts(("x-llmgw-model", word.encode()), metadata={"model": "other"})
    assert (found.model, found.model_source) == (word, ModelSource.HEADER)


def test_without_a_model_the_body_is_left_to_be_read() -> None:
    """No header and no metadata: the body, or nothing when none comes."""
    assert facts().model_source is ModelSource.BODY
    assert facts(end_of_stream=True).model_source is ModelSource.NONE
    assert facts(("upgrade", b"h2c")).model_source is ModelSource.NONE
    told = {"model": "_missing"}
    assert facts(metadata=told, end_of_stream=True).model_source is ModelSource.NONE


def get(path: bytes, *headers: tuple[str, bytes]) -> Facts | Rejection:
    """What is read from a websocket request for `path`."""
    line = [(":method", b"GET"), (":path", path), ("upgrade", b"websocket"), *headers]
    return read_facts(RequestHeaders(line), NAMES)


def test_a_request_without_a_body_names_its_model_in_the_query() -> None:
    """A websocket's model is read from its query, percent-encoding undone."""
    found = get(b"/v1/realtime?intent=x&model=org%2Fm+1")
    assert isinstance(found, Facts)
    assert (found.model, found.model_source) == ("org/m 1", ModelSource.QUERY)
    assert found.is_upgrade
    assert found.path == "/v1/realtime"


def test_a_query_is_held_to_the_same_rules() -> None:
    """Two models, an empty one and broken UTF-8 are refused; a header counts before the query."""
    two = get(b"/v1/realtime?model=a&model=a")
    assert isinstance(two, Rejection)
    assert two.reason is Reason.MODEL_AMBIGUOUS
    for query in (b"model=", b"model=%FF", b"model=\xff", b"model=a%0Ab"):
        found = get(b"/v1/realtime?" + query)
        assert isinstance(found, Rejection)
        assert found.reason is Reason.MODEL_INVALID
    found = get(b"/v1/realtime?model=a&model=b", ("x-llmgw-model", b"c"))
    assert isinstance(found, Facts)
    assert found.model == "c"


def test_the_query_of_a_request_with_a_body_is_not_looked_at() -> None:
    """A POST's model is in its body, also when a query names another."""
    line = [(":method", b"POST"), (":path", b"/v1/completions?model=a")]
    found = read_facts(RequestHeaders(line), NAMES)
    assert isinstance(found, Facts)
    assert found.model_source is ModelSource.BODY


def test_the_preferred_session_header_wins_in_any_order() -> None:
    """The order of the configuration counts, not the order on the wire; empty ones are absent."""
    model = ("x-llmgw-model", b"m")
    found = facts(model, ("session_id", b"c"), ("x-session-id", b"b"), ("x-llmgw-session", b""))
    assert found.session == b"b"
    found = facts(model, ("x-session-id", b"b"), ("session_id", b"c"))
    assert found.session == b"b"
    found = facts(model, ("x-session-id", b"b"), ("x-session-id", b"second"))
    assert found.session == b"b"


def test_a_session_header_counts_before_the_prompt_cache_key() -> None:
    """The body's key is used only when no header has one, and an empty one is none."""
    told = {"model": "m", "prompt_cache_key": "k"}
    assert facts(("x-session-id", b"h"), metadata=told).session == b"h"
    assert facts(("x-session-id", b""), metadata=told).session == b"k"
    assert facts(metadata={"model": "m", "prompt_cache_key": ""}).session is None


@pytest.mark.parametrize("value", [b"\xff\xfe", b"Espa\xf1a", b"x" * 100_000])
def test_a_session_of_any_bytes_and_length_is_carried(value: bytes) -> None:
    """A session key is opaque bytes."""
    assert facts(("x-llmgw-model", b"m"), ("x-llmgw-session", value)).session == value


@pytest.mark.parametrize(
    ("told", "stream"), [("true", True), ("false", False), ("1", None), ("", None)]
)
def test_the_stream_flag_is_a_boolean_or_unknown(told: str, stream: bool | None) -> None:  # noqa: FBT001 - a value under test
    """Only JSON's two booleans say whether a stream is wanted."""
    assert facts(metadata={"model": "m", "stream": told}).stream is stream


def test_repeatable_headers_keep_every_value_in_order() -> None:
    """Restrictions and hops are carried raw, empty values included, and absence is no value."""
    found = facts(
        ("x-llmgw-model", b"m"),
        ("x-llmgw-hop", b"a"),
        ("x-llmgw-hop", b"\xff"),
        ("x-llmgw-residency", b""),
        ("x-llmgw-no-store", b"0"),
        ("x-llmgw-tags", b"team=x"),
        ("x-llmgw-tags", b"y"),
    )
    assert found.hops == (b"a", b"\xff")
    assert found.residency == (b"",)
    assert found.no_store == (b"0",)
    assert found.tags == (b"team=x", b"y")
    plain = facts(("x-llmgw-model", b"m"))
    assert (plain.hops, plain.residency, plain.no_store, plain.tags) == ((), (), (), ())


def test_the_client_identity_is_text() -> None:
    """A client is named by its header; an empty one is none; odd bytes stay distinguishable."""
    model = ("x-llmgw-model", b"m")
    assert facts(model, ("x-llmgw-client", b"team-a")).client == "team-a"
    assert facts(model, ("x-llmgw-client", b"")).client is None
    assert facts(model, ("x-llmgw-client", b"a\xff")).client == "a\\xff"


def test_two_client_identities_fail_closed() -> None:
    """Choosing one of two identities could drop a restriction, so neither is chosen."""
    found = refused(("x-llmgw-client", b"a"), ("x-llmgw-client", b"b"))
    assert (found.status, found.reason) == (500, Reason.INTERNAL)


@pytest.mark.parametrize(
    ("value", "length"),
    [
        (b"900", 900),
        (b"0", 0),
        (b"", 0),
        (b"abc", 0),
        (b"-1", 0),
        (b"+1", 0),
        (b"1_000", 0),
        (b"1,1", 0),
        (b"1.5", 0),
        (b"\xb2", 0),
        (b"9" * 5_000, 0),
    ],
)
def test_a_content_length_is_plain_digits_or_zero(value: bytes, length: int) -> None:
    """Junk and absurd lengths count as unknown."""
    assert facts(("x-llmgw-model", b"m"), ("content-length", value)).content_length == length


def test_what_describes_the_body_is_carried() -> None:
    """Content type, encoding, request id and the end of the stream are passed on."""
    found = facts(
        ("x-llmgw-model", b"m"),
        ("content-type", b"text/x\xf1"),
        ("content-encoding", b"gzip"),
        ("x-request-id", b"\xffid"),
        end_of_stream=True,
    )
    assert (found.content_type, found.content_encoding) == ("text/x\xf1", "gzip")
    assert found.request_id == b"\xffid"
    assert found.end_of_stream
    bare = facts(("x-llmgw-model", b"m"), ("x-request-id", b""))
    assert (bare.content_type, bare.content_encoding, bare.request_id) == (None, None, None)
    assert not bare.is_upgrade


def test_a_tunnel_counts_as_an_upgrade() -> None:
    """CONNECT has no end of a body either."""
    found = read_facts(RequestHeaders([(":method", b"CONNECT")]), NAMES)
    assert isinstance(found, Facts)
    assert found.is_upgrade
    assert found.path == ""


# The first text that hypothesis draws reads its character tables, which may take a second.
LAW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
PLAIN = [":method", ":path", "upgrade", "content-length", "content-type", "host", "x-llmgw-hop"]
HEADER_NAMES = st.sampled_from([*PLAIN, *names_of.MODEL, *names_of.SESSION, "x-llmgw-client"])
METADATA = st.dictionaries(
    st.sampled_from(["model", "stream", "prompt_cache_key"]),
    st.one_of(st.text(), st.sampled_from(["_missing", "_error", "true"])),
)


@LAW
@given(
    st.lists(st.tuples(HEADER_NAMES, st.binary(max_size=30)), max_size=12),
    METADATA,
    st.booleans(),
)
def test_any_headers_give_facts_or_a_refusal(
    headers: list[tuple[str, bytes]],
    metadata: dict[str, str],
    end_of_stream: bool,  # noqa: FBT001 - a drawn value
) -> None:
    """Nothing that a client sends raises, and a model is there exactly when its source says so."""
    message = RequestHeaders(headers, end_of_stream, metadata)
    found = read_facts(message, NAMES)
    if isinstance(found, Rejection):
        assert found.status in {400, 500}
        return
    unread = found.model_source in {ModelSource.BODY, ModelSource.NONE}
    assert (found.model is None) == unread
    assert found.model is None or (found.model.isprintable() and len(found.model) <= 256)
    waits = not (found.end_of_stream or found.is_upgrade)
    assert found.model_source is not ModelSource.BODY or waits
