"""The model in a body: every way of giving none, two or a wrong one, and the rewrite."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from extproc.errors import Reason, Rejection
from extproc.exchange.body import BodyFacts, read_model, replace_model, unreadable

# The first text that hypothesis draws reads its character tables, which may take a second.
LAW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
JSON = "application/json"
FORM = "multipart/form-data; boundary=b0"
LIMIT = 32 * 1024 * 1024
BOM = b"\xef\xbb\xbf"


def read(body: bytes, content_type: str | None = JSON, encoding: str | None = None) -> BodyFacts:
    """The facts of a body that must not be refused."""
    found = read_model(body, content_type, encoding, LIMIT)
    assert isinstance(found, BodyFacts)
    return found


def refused(body: bytes, content_type: str | None = JSON, encoding: str | None = None) -> Rejection:
    """The refusal of a body, the same for reading and for rewriting."""
    found = read_model(body, content_type, encoding, LIMIT)
    assert isinstance(found, Rejection)
    assert replace_model(body, content_type, "new", encoding) == found
    assert found.message.isprintable()
    assert found.should_retry is False
    return found


def form(*fields: tuple[bytes, bytes]) -> bytes:
    """A form whose fields are a content-disposition's parameters and a value."""
    parts = b"".join(
        b"--b0\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % field for field in fields
    )
    return parts + b"--b0--\r\n"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a"}',
        b' \n{ "x" : 1 , "model"\t:\r\n "a" } ',
        b'{"messages":[{"model":"b"},"model",{"model":["c"]}],"model":"a"}',
        b'{"messages":"\\"model\\":\\"b\\"","model":"a"}',
        b'{"model":"a","nested":{"model":"b"}}',
        b'{"mo\\u0064el":"a"}',
        b'{"model":"\\u0061"}',
        b'{"Model":"b","MODEL":"c"," model":"d","model":"a"}',
        b'{"seed":123456789012345678901234567890,"x":1e999,"model":"a"}',
        b'{"x":18446744073709551615,"model":"a"}',
        b'{"x":"\xff\xfe","model":"a"}',
        BOM + b'{"model":"a"}',
    ],
)
def test_the_top_level_model_is_read(body: bytes) -> None:
    """Only the top-level member named model counts, however it is written."""
    assert read(body).model == "a"


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "",
        "application/json",
        "Application/JSON; charset=utf-8",
        "application/vnd.api+json",
        "application/x+json ; v=1",
    ],
)
def test_json_types_and_no_type_are_json(content_type: str | None) -> None:
    """A missing content type counts as JSON, as in Envoy's filter."""
    assert read(b'{"model":"a"}', content_type).model == "a"


@pytest.mark.parametrize("body", [b"", b" ", b"\r\n\t", b"{}", b'{"messages":[]}', BOM + b"{}"])
def test_a_body_without_a_model_says_so(body: bytes) -> None:
    """Nothing, blanks and an object without the member are the same mistake."""
    found = refused(body)
    assert (found.status, found.reason) == (400, Reason.MODEL_MISSING)
    assert found.param == "model"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","model":"b"}',
        b'{"model":"a","model":"a"}',
        b'{"model":"a","mo\\u0064el":"b"}',
        b'{"mo\\u0064el":"a","model":"b"}',
        b'{"model":null,"x":[1,{"y":2}],"model" : "b"}',
        b'{ "x":1 , "model":"a" , "y":{"model":1},\n"model":"b", "z":0}',
        b'{"model":"a","model":"b","model":"c"}',
        BOM + b'{"model":"a","model":"b"}',
        b'{"x":"\\ud83d","model":"a","model":"b"}',
    ],
)
def test_two_models_are_ambiguous(body: bytes) -> None:
    """A repeated member is refused, also where one of the two is escaped or they agree."""
    found = refused(body)
    assert (found.status, found.reason) == (400, Reason.MODEL_AMBIGUOUS)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b"123", "must be a string, not a number"),
        (b"-1.5e9", "must be a string, not a number"),
        (b"null", "must be a string, not null"),
        (b"true", "must be a string, not a boolean"),
        (b"false", "must be a string, not a boolean"),
        (b'["x"]', "must be a string, not a list"),
        (b'{"a":"x"}', "must be a string, not an object"),
        (b'""', "is empty"),
        (b'"  "', "is empty"),
        (b'"' + b"m" * 257 + b'"', "is longer than 256 characters"),
        (b'"' + b"m" * 100_000 + b'"', "is longer than 256 characters"),
        (b'"m\\r\\nx-evil: 1"', "has a character that is not printable"),
        (b'"a\\u0000b"', "has a character that is not printable"),
        (b'"\\ud800"', "is not valid Unicode"),
        (b'"a\\udc00b"', "is not valid Unicode"),
        (b'"\xff"', "is not valid Unicode"),
    ],
)
def test_a_wrong_model_is_named_without_an_echo(value: bytes, problem: str) -> None:
    """Each wrong type or text has its sentence, and nothing of the value is in it."""
    found = refused(b'{"messages":[],"model":' + value + b',"stream":true}')
    assert (found.status, found.reason) == (400, Reason.MODEL_INVALID)
    assert found.message == f"The model {problem}."


def test_a_name_may_be_all_escapes() -> None:
    """The longest name is taken also when every character is written as two escapes."""
    assert read(b'{"model":"' + b"\\ud83d\\ude00" * 256 + b'"}').model == "😀" * 256


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b'{"model":"a"', "The body ends in the middle of its JSON."),
        (b'{"model":"a', "The body ends in the middle of its JSON."),
        (b"{", "The body ends in the middle of its JSON."),
        (b'{"x":"\\ud83d","model":"a"', "The body ends in the middle of its JSON."),
        (b'{"model":"a"} x', "The body is not valid JSON."),
        (b'{"model":"a"}{"model":"b"}', "The body is not valid JSON."),
        (b'{"model":"a",}', "The body is not valid JSON."),
        (b"{'model':'a'}", "The body is not valid JSON."),
        (b'{"x":NaN,"model":"a"}', "The body is not valid JSON."),
        (b'{"x":"\\q","model":"a"}', "The body is not valid JSON."),
        (b'{"x":"\x01","model":"a"}', "The body is not valid JSON."),
        (b"\x1f\x8b\x08binary", "The body is not valid JSON."),
        (b'[{"model":"a"}]', "The body must be a JSON object."),
        (b'"model"', "The body must be a JSON object."),
        (b"null", "The body must be a JSON object."),
        (b"1", "The body must be a JSON object."),
        ('{"model":"a"}'.encode("utf-16"), "The body must be UTF-8."),
        ('{"model":"a"}'.encode("utf-16-be"), "The body must be UTF-8."),
        ('{"model":"a"}'.encode("utf-16-le"), "The body must be UTF-8."),
        ('{"model":"a"}'.encode("utf-32"), "The body must be UTF-8."),
        (b'{"x":' + b"[" * 5_000 + b"]" * 5_000 + b"}", "The body's JSON is nested too deeply."),
        (b'{"model":' + b"[" * 100_000, "The body's JSON is nested too deeply."),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes, problem: str) -> None:
    """Truncation, syntax, top level, encoding and depth have a sentence each."""
    found = refused(body)
    assert (found.status, found.reason) == (400, Reason.BODY_INVALID)
    assert found.message == problem


@pytest.mark.parametrize("text", [b"\\ud83d", b"a\\ude00\\ud83d", b"\\\\ud83d", b"\\ud83d\\n"])
def test_half_a_surrogate_pair_elsewhere_does_not_matter(text: bytes) -> None:
    """A text cut inside an emoji is the engine's business; the model beside it is read."""
    body = b'{"messages":"' + text + b'","model":"a","prompt_cache_key":"k"}'
    assert read(body) == BodyFacts("a", None, b"k")
    assert replace_model(body, JSON, "b") == body.replace(b'"a"', b'"b"')


def test_what_lies_beyond_ten_thousand_surrogates_is_not_searched() -> None:
    """A body made of broken escapes costs a bounded time and is refused."""
    found = refused(b'{"x":"' + b"\\ud83d" * 1_000_000 + b'","model":"a"}')
    assert found.message == "The body is not valid JSON."


@pytest.mark.parametrize(
    ("stream", "wanted"),
    [(b"true", True), (b"false", False), (b"null", None), (b'"true"', None), (b"1", None)],
)
def test_the_stream_flag_is_read(stream: bytes, wanted: bool | None) -> None:  # noqa: FBT001 - a value under test
    """Only JSON's booleans say whether a stream is wanted."""
    assert read(b'{"model":"a","stream":%b}' % stream).stream is wanted


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (b'"k"', b"k"),
        (b'"k\\u00fc"', "kü".encode()),
        (b'"\\ud800"', b'"\\ud800"'),
        (b'"' + b"k" * 100_000 + b'"', b"k" * 100_000),
        (b'""', None),
        (b"null", None),
        (b"123", b"123"),
        (b'{"a":1}', b'{"a":1}'),
    ],
)
def test_the_prompt_cache_key_is_opaque(value: bytes, key: bytes | None) -> None:
    """A string counts by its text, anything else as written, and nothing is refused."""
    assert read(b'{"prompt_cache_key":%b,"model":"a"}' % value).prompt_cache_key == key
    assert read(BOM + b'{"prompt_cache_key":%b,"model":"a"}' % value).prompt_cache_key == key


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "x\xf1", ","])
def test_a_compressed_body_is_never_inflated(encoding: str) -> None:
    """Compression is 415 and tells about the header, whatever the bytes are."""
    found = refused(b"\x1f\x8b" + b"\0" * 1_000, JSON, encoding)
    assert (found.status, found.reason) == (415, Reason.BODY_ENCODING)
    assert "x-llmgw-model" in found.message


@pytest.mark.parametrize("encoding", [None, "", "identity", " Identity "])
def test_no_compression_may_be_declared(encoding: str | None) -> None:
    """The identity encoding is none."""
    assert read(b'{"model":"a"}', JSON, encoding).model == "a"


@pytest.mark.parametrize(
    "content_type",
    [
        "application/x-www-form-urlencoded",
        "text/plain",
        "application/octet-stream",
        "multipart/mixed; boundary=b0",
        "application/jsonl",
        "json",
        "\xff",
    ],
)
def test_other_types_are_not_searched(content_type: str) -> None:
    """A type in which no model is looked for is 415 and tells about the header."""
    found = refused(b'{"model":"a"}', content_type)
    assert (found.status, found.reason) == (415, Reason.BODY_ENCODING)
    assert "x-llmgw-model" in found.message


def test_the_limit_is_the_last_size_that_is_read() -> None:
    """A body of exactly the limit is read, one byte more is 413 before anything is parsed."""
    body = b'{"messages":"' + b"x" * 1_000 + b'","model":"a"}'
    for limit, is_read in ((len(body) + 1, True), (len(body), True), (len(body) - 1, False)):
        found = read_model(body, JSON, None, limit)
        assert isinstance(found, BodyFacts) is is_read
    found = read_model(b"\x1f\x8b" * 10, JSON, "gzip", 10)
    assert isinstance(found, Rejection)
    assert (found.status, found.reason) == (413, Reason.BODY_TOO_LARGE)


def test_a_forms_model_is_read_behind_its_file() -> None:
    """A transcription names its model after the recording; other fields are read too."""
    body = form(
        (b'name="file"; filename="a.wav"', b"\r\n--b1\x00\xff" * 10_000),
        (b'name="model"', b"whisper-1"),
        (b'name="stream"', b"true"),
        (b'name="prompt_cache_key"', b"k"),
    )
    assert read(body, FORM) == BodyFacts("whisper-1", stream=True, prompt_cache_key=b"k")
    rewritten = replace_model(body, FORM, "large-v3/ü")
    assert rewritten == body.replace(b"whisper-1", "large-v3/ü".encode())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (form((b'name="x"', b"y")), Reason.MODEL_MISSING),
        (form((b'name="model"', b"a"), (b'name="model"', b"a")), Reason.MODEL_AMBIGUOUS),
        (form((b'name="model"; filename="a"', b"a")), Reason.MODEL_INVALID),
        (form((b'name="model"', b"")), Reason.MODEL_INVALID),
        (form((b'name="model"', b"\xff")), Reason.MODEL_INVALID),
        (form((b'name="model"', b"a\r\nb")), Reason.MODEL_INVALID),
        (form((b'name="model"', b"m" * 100_000)), Reason.MODEL_INVALID),
        (form((b'name="model"', b"a"))[:-8], Reason.BODY_INVALID),
        (b'{"model":"a"}', Reason.BODY_INVALID),
    ],
)
def test_a_forms_mistakes_are_400(body: bytes, reason: Reason) -> None:
    """A form is held to the same rules as JSON."""
    found = refused(body, FORM)
    assert (found.status, found.reason) == (400, reason)


def test_a_form_without_a_boundary_is_refused() -> None:
    """The content type must say how the form is divided."""
    found = refused(form((b'name="model"', b"a")), "multipart/form-data")
    assert found.message == "The form's content-type has no usable boundary."


@pytest.mark.parametrize(
    ("body", "rewritten"),
    [
        (b'{"model":"a"}', b'{"model":"b\\"\\n"}'),
        (BOM + b' { "mo\\u0064el" :\n"\\u0061" }\n', BOM + b' { "mo\\u0064el" :\n"b\\"\\n" }\n'),
        (
            b'{"messages":[{"model":"a"}],"model":"a","n":{"model":"a"},"x":1.0e2}',
            b'{"messages":[{"model":"a"}],"model":"b\\"\\n","n":{"model":"a"},"x":1.0e2}',
        ),
        (b'{"x":"\xff","model":"a"}', b'{"x":"\xff","model":"b\\"\\n"}'),
    ],
)
def test_only_the_bytes_of_the_value_change(body: bytes, rewritten: bytes) -> None:
    """Blanks, key spelling, number spelling and odd bytes stay; the new name is escaped."""
    assert replace_model(body, None, 'b"\n') == rewritten


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["model", "x", 'a"model', "\\"]), inner, max_size=3)
    ),
    max_leaves=12,
)
NAMES = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=20)
KEYS = st.sampled_from(["x", "messages", "model\\", '"model', "model ", "stream", ""])
STYLES: st.SearchStrategy[Callable[[object], str]] = st.sampled_from(
    [
        json.dumps,
        lambda value: json.dumps(value, ensure_ascii=False),
        lambda value: json.dumps(value, indent=2),
        lambda value: json.dumps(value, separators=(",", ":")),
    ]
)


@st.composite
def documents(draw: st.DrawFn) -> tuple[dict[str, object], bytes, str]:
    """An object with a model somewhere among its members, its text, and the model."""
    before = draw(st.dictionaries(KEYS, VALUES, max_size=3))
    after = draw(st.dictionaries(KEYS, VALUES, max_size=3))
    model = draw(NAMES)
    document: dict[str, object] = {**before, "model": model, **after}
    text = draw(STYLES)(document)
    assume("Infinity" not in text)
    escaped = draw(st.sampled_from(["model", "mod\\u0065l", "\\u006d\\u006F\\u0064\\u0065\\u006c"]))
    spelled = text.replace('"model":', f'"{escaped}":')
    return document, spelled.encode("utf-8", "surrogatepass"), model


@LAW
@given(documents(), NAMES)
def test_a_rewrite_changes_the_model_and_nothing_else(
    drawn: tuple[dict[str, object], bytes, str], new_model: str
) -> None:
    """The new text parses to the old document with the model replaced, other bytes identical."""
    document, body, model = drawn
    assert read(body).model == model
    rewritten = replace_model(body, JSON, new_model)
    assert isinstance(rewritten, bytes)
    expected = json.loads(body)
    assert expected == document
    expected["model"] = new_model
    assert json.loads(rewritten) == expected
    back = replace_model(rewritten, JSON, model)
    assert isinstance(back, bytes)
    assert json.loads(back) == document
    written = json.dumps(new_model, ensure_ascii=False).encode()
    assert rewritten.count(written) >= 1
    assert any(
        body.startswith(rewritten[:at]) and body.endswith(rewritten[at + len(written) :])
        for at in range(len(rewritten))
        if rewritten.startswith(written, at)
    )


@LAW
@given(st.lists(st.tuples(st.sampled_from(["model", "x", "y"]), VALUES), max_size=5))
def test_repetition_is_found_wherever_it_is(members: list[tuple[str, object]]) -> None:
    """None, one and more members named model are told apart in any company."""
    text = ",".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in members)
    assume("Infinity" not in text)
    body = f"{{{text}}}".encode()
    models = [value for key, value in members if key == "model"]
    found = read_model(body, JSON, None, LIMIT)
    if len(models) != 1:
        assert isinstance(found, Rejection)
        expected = Reason.MODEL_AMBIGUOUS if models else Reason.MODEL_MISSING
        assert found.reason is expected
    elif isinstance(found, BodyFacts):
        assert found.model == models[0]
    else:
        assert found.reason is Reason.MODEL_INVALID


@LAW
@given(
    st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)),
    st.sampled_from([None, JSON, FORM, "text/plain"]),
)
def test_any_bytes_give_facts_or_a_refusal(body: bytes, content_type: str | None) -> None:
    """Nothing that a client sends raises."""
    found = read_model(body, content_type, None, LIMIT)
    assert isinstance(found, BodyFacts) or found.status in {400, 413, 415}


@LAW
@given(st.data())
def test_a_damaged_document_is_read_or_refused(data: st.DataObject) -> None:
    """Cut or overwritten bytes never raise, and what is read is what a strict reader reads."""
    body = b'{"messages":[{"content":"\\u00fc \\"x\\""}],"model":"a","stream":true,"x":1.5}'
    start = data.draw(st.integers(0, len(body)))
    end = data.draw(st.integers(start, min(len(body), start + 6)))
    damaged = body[:start] + data.draw(st.binary(max_size=3)) + body[end:]
    found = read_model(damaged, JSON, None, LIMIT)
    if isinstance(found, BodyFacts):
        assert json.loads(damaged.decode("utf-8-sig", "replace"))["model"] == found.model


@pytest.mark.parametrize(
    ("content_type", "encoding", "length", "status"),
    [
        (JSON, None, LIMIT, None),
        (None, "identity", 0, None),
        ("multipart/form-data; boundary=x", " ", LIMIT, None),
        (JSON, None, LIMIT + 1, 413),
        (JSON, "gzip", 0, 415),
        ("text/plain", None, 0, 415),
        ("text/plain", None, LIMIT + 1, 415),
    ],
)
def test_headers_can_tell_that_a_body_is_not_worth_reading(
    content_type: str | None, encoding: str | None, length: int, status: int | None
) -> None:
    """Its type, its encoding or its length; a length that is not known is none."""
    refused = unreadable(content_type, encoding, length, LIMIT)
    assert (None if refused is None else refused.status) == status


@pytest.mark.parametrize(
    "filling",
    [
        pytest.param(b'"' + b"hello world " * 850_000 + b'"', id="text"),
        pytest.param(b"[" + b"1.25," * 2_000_000 + b"1]", id="numbers"),
        pytest.param(b'{"model":"x"},' * 700_000 + b"0", id="objects"),
        pytest.param(b'"' + "你好".encode() * 1_700_000 + b'"', id="wide"),
    ],
)
def test_the_model_behind_ten_megabytes_is_read_and_replaced(filling: bytes) -> None:
    """How large a body is and what it is made of does not matter."""
    body = b'{"messages":[' + filling + b'],"model":"a"}'
    assert len(body) > 9_000_000
    assert read(body).model == "a"
    rewritten = replace_model(body, JSON, "new")
    assert isinstance(rewritten, bytes)
    assert rewritten == body.removesuffix(b'"a"}') + b'"new"}'
