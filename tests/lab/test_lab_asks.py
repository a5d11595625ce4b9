"""Request bodies of every API, good and bad."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.lab.asks import Api, Ask, Problem, decoded, tokens_of, understand

USER = [{"role": "user", "content": "12345678"}]  # "user:12345678\n" is 14 characters


def asked(api: Api, **fields: object) -> Ask:
    """What the fields ask for."""
    ask = understand(api, json.dumps(fields).encode(), {"m", "n"}, "m")
    assert isinstance(ask, Ask), ask
    return ask


def refused(api: Api, **fields: object) -> Problem:
    """What is wrong with the fields."""
    problem = understand(api, json.dumps(fields).encode(), {"m", "n"}, "m")
    assert isinstance(problem, Problem), problem
    return problem


@pytest.mark.parametrize(
    ("api", "fields", "tokens"),
    [
        (Api.CHAT, {"messages": USER}, 4),
        (Api.CHAT, {"messages": [{"role": "user", "content": [{"text": "1234"}, 5]}]}, 3),
        (Api.CHAT, {"messages": [{"role": "tool", "content": None}]}, 2),
        (Api.COMPLETIONS, {"prompt": "12345"}, 2),
        (Api.COMPLETIONS, {"prompt": ["1234", "5678"]}, 2),
        (Api.COMPLETIONS, {"prompt": [100000, 2, 3]}, 3),
        (Api.COMPLETIONS, {"prompt": ""}, 1),
        (Api.EMBEDDINGS, {"input": [[1, 2], [3]]}, 3),
        (Api.EMBEDDINGS, {"input": "1234"}, 1),
        (Api.RESPONSES, {"input": "12345678", "instructions": "1234"}, 3),
        (Api.RESPONSES, {"input": USER}, 4),
        (Api.MESSAGES, {"messages": USER, "max_tokens": 1, "system": "12345678"}, 6),
        (Api.COUNT_TOKENS, {"messages": USER, "system": [{"text": "1234"}]}, 5),
    ],
)
def test_prompts_are_four_characters_a_token(
    api: Api, fields: dict[str, object], tokens: int
) -> None:
    """Wherever an API puts its text, all of it counts."""
    assert asked(api, **fields).prompt_tokens == tokens


def test_limits_and_flags_are_read() -> None:
    """Output limit, stream and usage options are those of the body."""
    ask = asked(
        Api.CHAT,
        model="n",
        messages=USER,
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=5,
        max_completion_tokens=7,
    )
    assert (ask.model, ask.is_stream, ask.include_usage, ask.output_tokens) == ("n", True, True, 7)
    assert asked(Api.CHAT, messages=USER, max_tokens=5).output_tokens == 5
    assert asked(Api.CHAT, messages=USER, max_tokens=None, stream=None).output_tokens is None
    assert asked(Api.RESPONSES, input="x", max_output_tokens=9).output_tokens == 9
    assert asked(Api.EMBEDDINGS, input="x").output_tokens == 0
    assert asked(Api.EMBEDDINGS, input="x", encoding_format="base64", dimensions=3).base64
    assert asked(Api.EMBEDDINGS, input="x", dimensions=10**9).dimensions == 4096


@pytest.mark.parametrize(
    ("api", "fields", "param"),
    [
        (Api.CHAT, {}, "messages"),
        (Api.CHAT, {"messages": []}, "messages"),
        (Api.CHAT, {"messages": ["hi"]}, "messages"),
        (Api.CHAT, {"messages": USER, "stream": "yes"}, "stream"),
        (Api.CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens"),
        (Api.CHAT, {"messages": USER, "max_tokens": True}, "max_tokens"),
        (Api.CHAT, {"messages": USER, "max_tokens": 1.5}, "max_tokens"),
        (Api.CHAT, {"messages": USER, "model": 3}, "model"),
        (Api.COMPLETIONS, {"prompt": []}, "prompt"),
        (Api.COMPLETIONS, {"prompt": [{}]}, None),
        (Api.EMBEDDINGS, {}, "input"),
        (Api.MESSAGES, {"messages": USER}, "max_tokens"),
        (Api.RESPONSES, {}, "input"),
    ],
)
def test_wrong_fields_are_named(api: Api, fields: dict[str, object], param: str | None) -> None:
    """A field that is missing or of the wrong kind is 400 and named."""
    problem = refused(api, **fields)
    assert (problem.status, problem.param) == (400, param)


def test_an_unknown_model_is_404() -> None:
    """Only served names are known."""
    assert refused(Api.CHAT, model="x", messages=USER).status == 404


def test_the_last_of_two_models_counts() -> None:
    """A repeated key has its last value, as in Python engines."""
    ask = understand(Api.COMPLETIONS, b'{"model":"x","model":"n","prompt":"p"}', {"n"}, "n")
    assert isinstance(ask, Ask)
    assert ask.model == "n"


def test_malformed_json_is_a_bad_request() -> None:
    """The type is vLLM's for a body that cannot be read."""
    for body in (b"", b"{", b"\xff\xfe", b"[" * 100_000):
        problem = understand(Api.CHAT, body, {"m"}, "m")
        assert isinstance(problem, Problem)
        assert (problem.status, problem.type) == (400, "Bad Request")
    assert refused(Api.CHAT).type == "BadRequestError"


def test_blocks_grow_with_the_prompt() -> None:
    """A longer prompt begins with the blocks of a shorter one; another model's differ."""
    short = asked(Api.COMPLETIONS, prompt="a" * 64).blocks(4)
    long = asked(Api.COMPLETIONS, prompt="a" * 64 + "b" * 40).blocks(4)
    assert len(short) == 4
    assert len(long) == 6
    assert long[:4] == short
    assert len(set(long)) == 6
    assert asked(Api.COMPLETIONS, prompt="a" * 64, model="n").blocks(4)[0] != short[0]
    assert asked(Api.COMPLETIONS, prompt="a" * 15).blocks(4) == ()


def test_a_lone_surrogate_is_text() -> None:
    """What JSON can say can be hashed."""
    ask = understand(Api.COMPLETIONS, b'{"prompt":"\\ud800abcdefghijklmnop"}', {"m"}, "m")
    assert isinstance(ask, Ask)
    assert len(ask.blocks(1)) == 4


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("", b"plain"),
        ("identity", b"plain"),
        (" GZIP ", gzip.compress(b"plain", mtime=0)),
        ("x-gzip", gzip.compress(b"plain", mtime=0)),
        ("deflate", zlib.compress(b"plain")),
    ],
)
def test_known_encodings_are_undone(encoding: str, body: bytes) -> None:
    """The plain body comes back."""
    assert decoded(body, encoding, 100) == b"plain"


def test_encodings_that_cannot_be_undone_are_problems() -> None:
    """Unknown is 415, corrupt or cut is 400, a bomb is 413."""
    bomb = gzip.compress(bytes(10_000_000))
    for body, encoding, status in (
        (b"x", "br", 415),
        (b"x", "gzip, gzip", 415),
        (b"x", "gzip", 400),
        (gzip.compress(b"plain", mtime=0)[:-4], "gzip", 400),
        (bomb, "gzip", 413),
    ):
        problem = decoded(body, encoding, 1000)
        assert isinstance(problem, Problem)
        assert problem.status == status


@given(st.binary(max_size=200), st.sampled_from(list(Api)))
def test_any_bytes_are_an_ask_or_a_problem(body: bytes, api: Api) -> None:
    """Nothing that comes over the wire raises."""
    assert isinstance(understand(api, body, {"m"}, "m"), Ask | Problem)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
FIELDS = ["model", "messages", "prompt", "input", "stream", "max_tokens", "system", "dimensions"]


@given(st.dictionaries(st.sampled_from(FIELDS), JSON), st.sampled_from(list(Api)))
def test_any_fields_are_an_ask_or_a_problem(fields: dict[str, object], api: Api) -> None:
    """Nor does any JSON under the names that are read."""
    ask = understand(api, json.dumps(fields).encode(), {"m"}, "m")
    assert isinstance(ask, Ask | Problem)
    if isinstance(ask, Ask):
        assert ask.prompt_tokens >= 1
        ask.blocks(1)


def test_tokens_are_rounded_up() -> None:
    """Nothing is no token, anything is at least one."""
    assert [tokens_of("x" * n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
