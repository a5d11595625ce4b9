"""What a request body asks of an engine: the model, the prompt's length, the tokens to produce.

Reads the bodies of the OpenAI and Anthropic APIs as leniently as engines do. Tokens are guessed at
four characters each; no tokenizer is involved.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import StrEnum

import xxhash

CHARACTERS_PER_TOKEN = 4


class Api(StrEnum):
    """The API calls that run a model, by path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    COUNT_TOKENS = "/v1/messages/count_tokens"

    @property
    def is_anthropic(self) -> bool:
        """Whether errors come in Anthropic's envelope."""
        return self in {Api.MESSAGES, Api.COUNT_TOKENS}


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that an engine can run.

    `texts` are the prompts, more than one only for embeddings; `output_tokens` is None when the
    request sets no limit. `base64` is whether embeddings are wanted as base64.
    """

    api: Api
    model: str
    texts: tuple[str, ...]
    prompt_tokens: int
    output_tokens: int | None = None
    is_stream: bool = False
    include_usage: bool = False
    base64: bool = False
    dimensions: int = 8

    def blocks(self, block_size_tokens: int) -> tuple[int, ...]:
        """One hash per whole block of the prompt, each covering all that precedes it."""
        text = "".join(self.texts).encode("utf-8", "surrogatepass")
        size = block_size_tokens * CHARACTERS_PER_TOKEN
        running = xxhash.xxh64(self.model.encode("utf-8", "surrogatepass"))
        hashes: list[int] = []
        for start in range(0, len(text) - size + 1, size):
            running.update(text[start : start + size])
            hashes.append(running.intdigest())
        return tuple(hashes)


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a request is answered with an error: vLLM's status, type, sentence and parameter."""

    status: int
    type: str
    message: str
    param: str | None = None


class _BadRequestError(Exception):
    """A field is missing or of the wrong kind."""

    def __init__(self, message: str, param: str | None = None) -> None:
        self.message = message
        self.param = param
        super().__init__(message)


def tokens_of(text: str) -> int:
    """How many tokens the text counts as."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def decoded(body: bytes, encoding: str, limit_bytes: int) -> bytes | Problem:
    """The body without its content encoding: identity, gzip or deflate, up to `limit_bytes`."""
    name = encoding.strip().lower()
    if name in {"", "identity"}:
        return body
    if name not in {"gzip", "x-gzip", "deflate"}:
        return Problem(415, "Unsupported Media Type", f"content-encoding {name} is not supported")
    window = zlib.MAX_WBITS if name == "deflate" else zlib.MAX_WBITS | 16
    inflater = zlib.decompressobj(window)
    try:
        plain = inflater.decompress(body, limit_bytes)
    except zlib.error:
        return Problem(400, "Bad Request", f"the body is not {name}")
    if inflater.unconsumed_tail:
        return Problem(413, "Request Entity Too Large", "the decoded body is too large")
    if not inflater.eof:
        return Problem(400, "Bad Request", f"the body is not {name}")
    return plain


def understand(api: Api, body: bytes, models: Container[str], default_model: str) -> Ask | Problem:
    """What the body asks for, or the error that an engine answers.

    A body without a model gets the engine's own.
    """
    try:
        fields: object = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Problem(400, "Bad Request", f"the body is not JSON: {error}")
    if not isinstance(fields, dict):
        return Problem(400, "BadRequestError", "the body is not a JSON object")
    try:
        return _understand(api, fields, models, default_model)
    except _BadRequestError as error:
        return Problem(400, "BadRequestError", error.message, error.param)


def _understand(
    api: Api, fields: Mapping[str, object], models: Container[str], default_model: str
) -> Ask | Problem:
    model = fields.get("model")
    if model is None:
        model = default_model
    if not isinstance(model, str):
        raise _BadRequestError("model is not a string", "model")
    if model not in models:
        message = f"The model `{model}` does not exist."
        return Problem(404, "NotFoundError", message, "model")
    texts = _texts(api, fields)
    options = fields.get("stream_options")
    include_usage = isinstance(options, Mapping) and options.get("include_usage") is True
    dimensions = _whole(fields, "dimensions")
    return Ask(
        api=api,
        model=model,
        texts=texts,
        prompt_tokens=max(1, sum(map(tokens_of, texts))),
        output_tokens=_output_tokens(api, fields),
        is_stream=_flag(fields, "stream"),
        include_usage=include_usage,
        base64=fields.get("encoding_format") == "base64",
        dimensions=8 if dimensions is None else min(max(1, dimensions), 4096),
    )


def _texts(api: Api, fields: Mapping[str, object]) -> tuple[str, ...]:
    match api:
        case Api.CHAT:
            return (_conversation(fields, "messages"),)
        case Api.MESSAGES | Api.COUNT_TOKENS:
            return (_content(fields.get("system")) + _conversation(fields, "messages"),)
        case Api.RESPONSES:
            asked = fields.get("input")
            text = asked if isinstance(asked, str) else _conversation(fields, "input")
            return (_content(fields.get("instructions")) + text,)
        case Api.COMPLETIONS:
            return ("".join(_prompts(fields, "prompt")),)
        case Api.EMBEDDINGS:
            return _prompts(fields, "input")


def _conversation(fields: Mapping[str, object], name: str) -> str:
    turns = fields.get(name)
    if not isinstance(turns, list) or not turns:
        raise _BadRequestError(f"{name} is missing, empty or not a list", name)
    lines: list[str] = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise _BadRequestError(f"{name} holds something that is not an object", name)
        lines.append(f"{turn.get('role', '')}:{_content(turn.get('content'))}\n")
    return "".join(lines)


def _content(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_content(part.get("text")) for part in content if isinstance(part, dict))
    return ""


def _prompts(fields: Mapping[str, object], name: str) -> tuple[str, ...]:
    match fields.get(name):
        case str(text):
            return (text,)
        case [int(), *_] as tokens:
            return (_spoken(tokens),)
        case [_, *_] as several:
            return tuple(one if isinstance(one, str) else _spoken(one) for one in several)
        case _:
            raise _BadRequestError(f"{name} is missing or empty", name)


def _spoken(tokens: object) -> str:
    """A text that counts as many tokens as the list of token numbers has."""
    if not isinstance(tokens, list):
        raise _BadRequestError("a prompt is neither text nor a list of tokens")
    return "".join(f"{token!s:>{CHARACTERS_PER_TOKEN}.{CHARACTERS_PER_TOKEN}}" for token in tokens)


def _output_tokens(api: Api, fields: Mapping[str, object]) -> int | None:
    match api:
        case Api.EMBEDDINGS | Api.COUNT_TOKENS:
            return 0
        case Api.RESPONSES:
            names = ["max_output_tokens"]
        case _:
            names = ["max_completion_tokens", "max_tokens"]
    for name in names:
        limit = _whole(fields, name)
        if limit is not None:
            if limit < 1:
                raise _BadRequestError(f"{name} is at least 1, got {limit}.", name)
            return limit
    if api is Api.MESSAGES:
        raise _BadRequestError("max_tokens is missing", "max_tokens")
    return None


def _whole(fields: Mapping[str, object], name: str) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise _BadRequestError(f"{name} is not a whole number", name)
    return value


def _flag(fields: Mapping[str, object], name: str) -> bool:
    value = fields.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _BadRequestError(f"{name} is not true or false", name)
    return value
