"""Envoy's messages to an external processor as values; nothing here decides anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from google.protobuf.message import DecodeError

from extproc import headers as names
from extproc.errors import LlmgwError
from extproc.exchange.messages import (
    Message,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseHeaders,
    ResponseTrailers,
)
from extproc.serve.pb.base_pb2 import HeaderMap, Metadata, Value
from extproc.serve.pb.ext_proc_pb2 import ProcessingRequest
from extproc.serve.replies import GO_ON_RESPONSE_BODY
from extproc.serve.split import Splitter

# Envoy counts attempts and flags in 32 bits; anything beyond is noise.
_MAX_NUMBER: Final = float(2**32)
_EXACT_INTEGER: Final = float(2**53)

_LONGEST_KEPT_BYTES: Final = 512
_MOST_KEPT: Final = 4096

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"


class Unreadable(LlmgwError):  # noqa: N818 - reads as what it is at the place it is caught
    """Bytes that are no message of Envoy's."""


@dataclass(frozen=True, slots=True)
class Unasked:
    """A message that nobody asks for; `reply` lets Envoy go on, None where no reply would."""

    reply: bytes | None


def parse(raw: bytes) -> Message | Unasked:
    """The message in `raw`, header names in lower case as Envoy sends them.

    Raises:
        Unreadable: `raw` is no message of Envoy's.
    """
    try:
        request = ProcessingRequest.FromString(raw)
    except DecodeError as error:
        raise Unreadable("not a processing request") from error
    kind = request.WhichOneof("request")
    return Unasked(None) if kind is None else _READERS[kind](request)


class Reader:
    """Reads messages as `parse` does, and what Envoy says beside the headers only once.

    Flags, clusters and the models of bodies are few; what is kept of them is short.
    """

    __slots__ = ("_asides", "_splitter")

    def __init__(self) -> None:
        self._splitter = Splitter()
        self._asides: dict[bytes, Aside] = {}

    def read(self, raw: bytes) -> Message | Unasked:
        """The message in `raw`.

        Raises:
            Unreadable: `raw` is no message of Envoy's.
        """
        split = self._splitter.split(raw)
        if split is None:
            return parse(raw)
        aside = self._asides.get(split.rest) or self._aside(split.rest)
        if aside is None:
            return parse(raw)
        if split.is_answer:
            return _answer(split.headers, aside, ends=split.ends)
        return RequestHeaders(split.headers, split.ends, aside.body_facts, aside.subset)

    def _aside(self, rest: bytes) -> Aside | None:
        """What is in `rest`; None where that is no message, or one with headers of its own."""
        try:
            request = ProcessingRequest.FromString(rest)
        except DecodeError:
            return None
        if request.WhichOneof("request") is not None:
            return None
        aside = Aside(request)
        if len(rest) <= _LONGEST_KEPT_BYTES:
            if len(self._asides) >= _MOST_KEPT:
                self._asides.clear()
            self._asides[rest] = aside
        return aside


class Aside:
    """What Envoy says of a request beside its headers; see `RequestHeaders`, `ResponseHeaders`."""

    __slots__ = ("attempts", "body_facts", "cluster", "details", "flags", "subset")

    def __init__(self, request: ProcessingRequest) -> None:
        spaces = request.metadata_context
        self.body_facts = _body_facts(spaces)
        self.subset = _subset(spaces)
        self.flags = self.attempts = 0
        self.details = self.cluster = ""
        for space in request.attributes.values():
            fields = space.fields
            self.flags = _count(fields.get("response.flags"), self.flags)
            self.attempts = _count(fields.get("upstream.request_attempt_count"), self.attempts)
            if (value := fields.get("response.code_details")) is not None:
                self.details = _text(value)
            if (value := fields.get("xds.cluster_name")) is not None:
                self.cluster = _text(value)


def _headers(sent: HeaderMap) -> list[tuple[str, bytes]]:
    """The headers in order; Envoy fills `raw_value`, and `value` where it is told to."""
    return [(header.key, header.raw_value or header.value) for header in sent.headers]


def _body_facts(spaces: Metadata) -> dict[str, str]:
    """What Envoy's JSON filter read out of the body, as text."""
    space = spaces.filter_metadata.get(names.BODY_NAMESPACE)
    return {} if space is None else {key: _text(value) for key, value in space.fields.items()}


def _subset(spaces: Metadata) -> tuple[str, ...] | None:
    """The endpoints that a request is limited to, None where it is not limited.

    The hint is a list, or one string with commas.
    """
    space = spaces.filter_metadata.get(names.SUBSET_NAMESPACE)
    value = None if space is None else space.fields.get(names.SUBSET)
    if value is None:
        return None
    if value.WhichOneof("kind") == "list_value":
        parts: Iterable[str] = (_text(item) for item in value.list_value.values)
    else:
        parts = _text(value).split(",")
    return tuple(stripped for part in parts if (stripped := part.strip()))


def _request_headers(request: ProcessingRequest) -> RequestHeaders:
    """The request's headers, joined with what Envoy's filters have learned."""
    sent = request.request_headers
    aside = Aside(request)
    return RequestHeaders(
        _headers(sent.headers), sent.end_of_stream, aside.body_facts, aside.subset
    )


def _response_headers(request: ProcessingRequest) -> ResponseHeaders:
    """The answer's headers, joined with what the attributes say of it."""
    sent = request.response_headers
    return _answer(_headers(sent.headers), Aside(request), ends=sent.end_of_stream)


def _answer(sent: list[tuple[str, bytes]], aside: Aside, *, ends: bool) -> ResponseHeaders:
    """What counts of an answer."""
    status = 0
    retry_after: str | None = None
    for name, text in sent:
        if name == ":status" and text.isdigit() and len(text) <= 3:
            status = int(text)
        elif name == "retry-after" and retry_after is None:
            retry_after = text.decode("latin-1")
    return ResponseHeaders(
        status, retry_after, ends, aside.flags, aside.details, aside.cluster, aside.attempts
    )


def _count(value: Value | None, otherwise: int) -> int:
    """`value` as a number that is not negative, `otherwise` when it is none."""
    if value is None or not 0 <= value.number_value < _MAX_NUMBER:
        return otherwise
    return int(value.number_value)


def _text(value: Value) -> str:
    """A string as it is, anything else as JSON; bytes that are not UTF-8 become U+FFFD."""
    if value.WhichOneof("kind") == "string_value":
        return value.string_value.decode(errors="replace")
    return json.dumps(_plain(value), separators=(",", ":"), ensure_ascii=False)


def _plain(value: Value) -> Plain:
    """`value` as what the JSON encoder takes; whole numbers without a fraction."""
    match value.WhichOneof("kind"):
        case "string_value":
            return value.string_value.decode(errors="replace")
        case "bool_value":
            return value.bool_value
        case "number_value":
            real = value.number_value
            return int(real) if abs(real) <= _EXACT_INTEGER and real.is_integer() else real
        case "struct_value":
            return {key: _plain(item) for key, item in value.struct_value.fields.items()}
        case "list_value":
            return [_plain(item) for item in value.list_value.values]
        case _:
            return None


_READERS: Final[Mapping[str, Callable[[ProcessingRequest], Message | Unasked]]] = MappingProxyType(
    {
        "request_headers": _request_headers,
        "request_body": lambda request: RequestBody(
            request.request_body.body, request.request_body.end_of_stream
        ),
        "request_trailers": lambda _: RequestTrailers(),
        "response_headers": _response_headers,
        "response_body": lambda _: Unasked(GO_ON_RESPONSE_BODY),
        "response_trailers": lambda _: ResponseTrailers(),
    }
)
