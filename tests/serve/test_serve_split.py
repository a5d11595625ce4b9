"""A message with headers, cut in two, is what protobuf reads of it, or left to protobuf."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.exchange.messages import Message, RequestHeaders, ResponseHeaders
from extproc.serve.pb import ext_proc_pb2 as pb
from extproc.serve.split import Splitter
from extproc.serve.wire import Reader, Unasked, Unreadable, parse

# What Envoy 1.40 sends: with the model in a header, with the model out of the body, an answer.
ASKED = (
    b"\x12\xcc\x01\n\xc9\x01\n\x1d\n\x05:path\x1a\x14/v1/chat/completions\n\x0f\n\x07:method\x1a\x04POST\n\x15"
    b"\n\rx-llmgw-model\x1a\x04demo\n \n\x0ccontent-type\x1a\x10application/json\n"
    b"\x12\n\x0cx-session-id\x1a\x02s1\n\x14\n\x0econtent-length\x1a\x0260\n4\n\x0cx-request-i"
    b"d\x1a$1165fda2-757c-4cdf-a88c-b0c44b17ea9cB\x00Z\x00"
)
READ = (
    b"\x12\xb8\x01\n\xb5\x01\n\x1d\n\x05:path\x1a\x14/v1/chat/completions\n\x0f\n\x07:method\x1a\x04POST"
    b"\n \n\x0ccontent-type\x1a\x10application/json\n\x14\n\x0econtent-length\x1a\x0260\n4"
    b"\n\x0cx-request-id\x1a$40ec274b-3202-404e-86fb-584c44880170\n\x15\n\r"
    b"x-llmgw-model\x1a\x04demoB!\n\x1f\n\nllmgw.body\x12\x11\n\x0f\n\x05model\x12\x06\x1a\x04demoZ\x00"
)
ANSWERED = (
    b"\x1aK\nI\n\x0e\n\x07:status\x1a\x03200\n \n\x0ccontent-type\x1a\x10application/json\n\x15"
    b"\n\x0econtent-length\x1a\x03393B\x00J\xaf\x01\n\x1benvoy.filters.http.ext_proc\x12"
    b"\x8f\x01\n\x1b\n\x0eresponse.flags\x12\t\x11\x00\x00\x00\x00\x00\x00\x00\x00\n'\n\x15response.code_details"
    b"\x12\x0e\x1a\x0cvia_upstream\n\x1a\n\x10xds.cluster_name\x12\x06\x1a\x04ep-a\n+\n\x1eupstream"
    b".request_attempt_count\x12\t\x11\x00\x00\x00\x00\x00\x00\xf0?"
)

Pairs = Sequence[tuple[str, bytes]]

names = st.text(
    st.characters(max_codepoint=0x17F, exclude_categories=["Cs"]), min_size=1, max_size=200
)
values = st.binary(max_size=300)
pairs = st.lists(st.tuples(names, values), max_size=12)


def headers_message(sent: Pairs, *, is_answer: bool = False, ends: bool = False) -> bytes:
    """A message with these headers and nothing else."""
    message = pb.ProcessingRequest()
    part = message.response_headers if is_answer else message.request_headers
    part.headers.SetInParent()
    for key, value in sent:
        part.headers.headers.add(key=key, raw_value=value)
    part.end_of_stream = ends
    return message.SerializeToString()


def read_by(reader: Reader | None, raw: bytes) -> Message | Unasked | None:
    """What is read, by protobuf where there is no reader; None for what cannot be read."""
    try:
        return parse(raw) if reader is None else reader.read(raw)
    except Unreadable:
        return None


@pytest.mark.parametrize("raw", [ASKED, READ, ANSWERED])
def test_what_envoy_sends_can_be_split(raw: bytes) -> None:
    """So that hardly any message has to be left to protobuf."""
    split = Splitter().split(raw)
    assert split is not None
    parsed = parse(raw)
    if isinstance(parsed, ResponseHeaders):
        assert split.is_answer
        assert (":status", b"%d" % parsed.status) in split.headers
    else:
        assert isinstance(parsed, RequestHeaders)
        assert (split.headers, split.ends) == (parsed.headers, parsed.end_of_stream)
    assert Reader().read(raw) == parsed


@given(sent=pairs, is_answer=st.booleans(), ends=st.booleans())
def test_every_header_is_read(sent: Pairs, is_answer: bool, ends: bool) -> None:  # noqa: FBT001 - drawn
    """In order, with its bytes, however long; names that are not ASCII are protobuf's."""
    raw = headers_message(sent, is_answer=is_answer, ends=ends)
    split = Splitter().split(raw)
    if all(key.isascii() for key, _ in sent):
        assert split is not None
        assert (split.headers, split.is_answer, split.ends) == (list(sent), is_answer, ends)
        assert split.rest == b""
    assert Reader().read(raw) == parse(raw)


@pytest.mark.parametrize("size", [127, 128, 16_000, 16_383, 16_384, 100_000])
def test_lengths_of_every_size_are_read(size: int) -> None:
    """Those of more than two bytes by protobuf."""
    raw = headers_message([(":path", b"/" * size)])
    assert Reader().read(raw) == parse(raw)


@given(
    whole=st.sampled_from([ASKED, READ, ANSWERED]),
    at=st.integers(0, 300),
    cut=st.integers(0, 12),
    new=st.binary(max_size=12),
)
@example(ASKED, 0, 0, ASKED)
@example(ASKED, 211, 0, ASKED)
def test_whatever_is_wrong_with_it_is_judged_alike(
    whole: bytes, at: int, cut: int, new: bytes
) -> None:
    """Truncated, changed, two in one: the reader takes and refuses what protobuf does."""
    raw = whole[:at] + new + whole[at + cut :]
    reader = Reader()
    assert read_by(reader, raw) == read_by(None, raw)
    assert read_by(reader, raw) == read_by(None, raw)  # and also where some of it is known


def test_names_that_all_differ_are_kept_in_a_bounded_number() -> None:
    """A configuration may have a header forwarded whose name is a client's."""
    splitter = Splitter()
    for number in range(1000):
        assert splitter.split(headers_message([(f"x-{number}", b"1")])) is not None
    assert len(splitter._names) <= 256
