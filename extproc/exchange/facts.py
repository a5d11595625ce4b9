"""What a request says about itself, read in one pass over its headers.

Nothing is judged here but the model's name: hops, residency and the like stay as the bytes that
came, and a header that is not UTF-8 is carried intact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final
from urllib.parse import unquote_to_bytes

from msgspec import Struct

from extproc import headers
from extproc.errors import Rejection
from extproc.exchange import refusals
from extproc.exchange.messages import BodyField, Headers, RequestHeaders
from extproc.exchange.names import checked_name, decoded_name

# Headers of which the last value counts are stored by position; from `_CLIENT` on each has a rule.
_METHOD: Final = 0
_PATH: Final = 1
_REQUEST_ID: Final = 2
_CONTENT_LENGTH: Final = 3
_CONTENT_TYPE: Final = 4
_CONTENT_ENCODING: Final = 5
_UPGRADE: Final = 6
_CLIENT: Final = 7
_HOP: Final = 8
_RESIDENCY: Final = 9
_NO_STORE: Final = 10
_TAGS: Final = 11
_MODEL: Final = 12
_SESSION: Final = 13  # and above: the rank of a session header

_FIXED: Final[Mapping[str, int]] = MappingProxyType(
    {
        ":method": _METHOD,
        ":path": _PATH,
        headers.REQUEST_ID: _REQUEST_ID,
        "content-length": _CONTENT_LENGTH,
        "content-type": _CONTENT_TYPE,
        "content-encoding": _CONTENT_ENCODING,
        "upgrade": _UPGRADE,
        headers.CLIENT: _CLIENT,
        headers.HOP: _HOP,
        headers.RESIDENCY: _RESIDENCY,
        headers.NO_STORE: _NO_STORE,
        headers.TAGS: _TAGS,
    }
)
_EMPTY: Final[tuple[bytes | None, ...]] = (None,) * _CLIENT
_SENTINELS: Final = frozenset({headers.BODY_MODEL_MISSING, headers.BODY_MODEL_UNREADABLE})
_FLAGS: Final[Mapping[str, bool]] = MappingProxyType({"true": True, "false": False})
_MAX_LENGTH_DIGITS: Final = 15


class ModelSource(StrEnum):
    """Where the model's name is.

    `BODY` means that only the body can tell: Envoy's filter did not read it, could not, or wrote
    one of its own two words, which a client's model may literally be. `QUERY` is for requests
    without a body, a websocket's say. `NONE` means that there is nothing left to look at.
    """

    HEADER = "header"
    METADATA = "metadata"
    QUERY = "query"
    BODY = "body"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Names:
    """The configurable header names, lower case, compiled for one look-up per header.

    `session` is in order of preference. A name that has a fixed meaning keeps it.
    """

    model: tuple[str, ...] = headers.MODEL
    session: tuple[str, ...] = headers.SESSION
    positions: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ranked = {name: _SESSION + rank for rank, name in enumerate(self.session)}
        positions = {**ranked, **dict.fromkeys(self.model, _MODEL), **_FIXED}
        object.__setattr__(self, "positions", MappingProxyType(positions))


class Facts(Struct, frozen=True, gc=False):
    """What one request says.

    `path` has no query. `model` is set unless the source is BODY or NONE; `model_header` is the
    header that carries it, also where Envoy wrote its own word there, so that it can be replaced.
    `session` is the raw key, any length. `hops`, `residency`, `no_store` and `tags` hold every
    value that came, in order; an empty tuple means that the header is absent. `content_length` is
    in bytes, 0 when absent or junk. `is_upgrade` means that no end of a body can be waited for.
    """

    # A struct rather than a dataclass: a frozen dataclass of this size takes 4 µs to make.
    method: str
    path: str
    model: str | None
    model_source: ModelSource
    model_header: str | None
    session: bytes | None
    stream: bool | None
    request_id: bytes | None
    client: str | None
    hops: tuple[bytes, ...]
    residency: tuple[bytes, ...]
    no_store: tuple[bytes, ...]
    tags: tuple[bytes, ...]
    content_length: int
    content_type: str | None
    content_encoding: str | None
    is_upgrade: bool
    end_of_stream: bool


NO_FACTS: Final = Facts(
    method="",
    path="",
    model=None,
    model_source=ModelSource.NONE,
    model_header=None,
    session=None,
    stream=None,
    request_id=None,
    client=None,
    hops=(),
    residency=(),
    no_store=(),
    tags=(),
    content_length=0,
    content_type=None,
    content_encoding=None,
    is_upgrade=False,
    end_of_stream=False,
)
"""What a request says before it has said anything."""


@dataclass(frozen=True, slots=True)
class Target:
    """A request's method and path, the query cut off; empty where a header is missing."""

    method: str
    path: str


def read_target(request_headers: Headers) -> Target:
    """The method and path alone: what a refusal's envelope needs when there are no facts."""
    found = {":method": b"", ":path": b""}
    for name, value in request_headers:
        if name in found:
            found[name] = value
    return Target(_text(found[":method"]), _text(found[":path"]).partition("?")[0])


def read_facts(  # noqa: C901, PLR0912 - one loop; a call per header would cost more than the rest
    message: RequestHeaders, names: Names
) -> Facts | Rejection:
    """The facts of one request, or why its model cannot be known.

    Refused: two model headers, whether or not they agree; a model that cannot be a name; two
    client identities. Several sources are not compared: the header counts, then the metadata,
    then the query of a request without a body.
    """
    position_of = names.positions.get
    last = [*_EMPTY]
    client: str | None = None
    raw_model: bytes | None = None
    model_header: str | None = None
    session: bytes | None = None
    session_rank = 1 << 30
    hops: tuple[bytes, ...] = ()
    residency: tuple[bytes, ...] = ()
    no_store: tuple[bytes, ...] = ()
    tags: tuple[bytes, ...] = ()
    for name, value in message.headers:
        position = position_of(name)
        if position is None:
            continue
        if position < _CLIENT:
            last[position] = value
        elif position >= _SESSION:
            if value and position < session_rank:
                session, session_rank = value, position
        elif position == _MODEL:
            if model_header is not None:
                return refusals.model_ambiguous("two model headers")
            raw_model, model_header = value, name
        elif position == _HOP:
            hops += (value,)
        elif position == _RESIDENCY:
            residency += (value,)
        elif position == _NO_STORE:
            no_store += (value,)
        elif position == _TAGS:
            tags += (value,)
        elif value:
            if client is not None:
                return refusals.client_ambiguous()
            client = value.decode("utf-8", "backslashreplace")

    method = _text(last[_METHOD])
    path = _text(last[_PATH])
    query = ""
    if "?" in path:
        path, _, query = path.partition("?")
    is_upgrade = bool(last[_UPGRADE]) or method == "CONNECT"
    metadata = message.metadata
    told = metadata.get(BodyField.MODEL) if metadata else None
    has_body = not (message.end_of_stream or is_upgrade)
    named = _find_model(raw_model, told, query, has_body=has_body)
    if isinstance(named, Rejection):
        return named
    content_type = last[_CONTENT_TYPE]
    content_encoding = last[_CONTENT_ENCODING]
    return Facts(
        method=method,
        path=path,
        model=named[0],
        model_source=named[1],
        model_header=model_header,
        session=session or (_session(metadata) if metadata else None),
        stream=_FLAGS.get(metadata.get(BodyField.STREAM, "")) if metadata else None,
        request_id=last[_REQUEST_ID] or None,
        client=client,
        hops=hops,
        residency=residency,
        no_store=no_store,
        tags=tags,
        content_length=_length(last[_CONTENT_LENGTH]),
        content_type=_text(content_type) if content_type else None,
        content_encoding=_text(content_encoding) if content_encoding else None,
        is_upgrade=is_upgrade,
        end_of_stream=message.end_of_stream,
    )


def _find_model(
    raw: bytes | None, told: str | None, query: str, *, has_body: bool
) -> tuple[str | None, ModelSource] | Rejection:
    """The model and where it was found, given the header's value and what Envoy's filter told."""
    if raw is None and told is None:
        return (None, ModelSource.BODY) if has_body else _model_in_query(query)
    if told in _SENTINELS and (raw is None or raw == told.encode()):
        # Envoy's own word, perhaps copied into the header; or a client's model that reads so.
        return None, ModelSource.BODY if has_body else ModelSource.NONE
    name = checked_name(told or "") if raw is None else decoded_name(raw)
    if isinstance(name, Rejection):
        return name
    return name, ModelSource.METADATA if raw is None else ModelSource.HEADER


def _model_in_query(query: str) -> tuple[str | None, ModelSource] | Rejection:
    """The model that a request without a body gives in its query."""
    values = [part[6:] for part in query.split("&") if part.startswith("model=")]
    if not values:
        return None, ModelSource.NONE
    if len(values) > 1:
        return refusals.model_ambiguous("two models in its query")
    raw = values[0].replace("+", " ").encode("latin-1")
    name = decoded_name(unquote_to_bytes(raw))
    return name if isinstance(name, Rejection) else (name, ModelSource.QUERY)


def _session(metadata: Mapping[str, str]) -> bytes | None:
    """The session key that the body gives, as Envoy's filter read it."""
    return metadata.get(BodyField.PROMPT_CACHE_KEY, "").encode("utf-8", "surrogatepass") or None


def _text(value: bytes | None) -> str:
    """`value` with one character per byte, which no byte can fail."""
    return value.decode("latin-1") if value else ""


def _length(value: bytes | None) -> int:
    """The length in bytes that a content-length value gives; 0 for anything but plain digits."""
    if not value or len(value) > _MAX_LENGTH_DIGITS or not value.isdigit():
        return 0
    return int(value)
