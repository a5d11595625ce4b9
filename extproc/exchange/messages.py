"""What Envoy says about one request, and what it is told to do: values without a wire format.

The transport turns bytes into these messages and these actions into bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct, field

Headers = Sequence[tuple[str, bytes]]


class BodyField(StrEnum):
    """What Envoy's JSON filter reads out of a request body, by metadata key."""

    MODEL = "model"
    STREAM = "stream"
    PROMPT_CACHE_KEY = "prompt_cache_key"
    USER = "user"


class Phase(StrEnum):
    """The message that an action answers; Envoy resets a stream that is answered otherwise."""

    REQUEST_HEADERS = "request_headers"
    REQUEST_BODY = "request_body"
    REQUEST_TRAILERS = "request_trailers"
    RESPONSE_HEADERS = "response_headers"
    RESPONSE_TRAILERS = "response_trailers"


# Structs where every request makes one: a frozen dataclass takes ten times as long to make.
class RequestHeaders(Struct, frozen=True):
    """The first message of a request: its headers in order, names in lower case.

    `metadata` is what Envoy's JSON filter read out of the body, by `BodyField` value; a value that
    is not text arrives as Envoy's JSON rendering of it. `end_of_stream` means that no body comes.
    """

    headers: Headers
    end_of_stream: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    subset: tuple[str, ...] | None = None

    @property
    def phase(self) -> Phase:
        """The phase in which it is answered."""
        return Phase.REQUEST_HEADERS


class RequestBody(Struct, frozen=True):
    """The whole body of a request, asked for by `NeedBody`."""

    body: bytes
    end_of_stream: bool = True

    @property
    def phase(self) -> Phase:
        """The phase in which it is answered."""
        return Phase.REQUEST_BODY


class RequestTrailers(Struct, frozen=True):
    """The request ended in trailers."""

    @property
    def phase(self) -> Phase:
        """The phase in which it is answered."""
        return Phase.REQUEST_TRAILERS


class ResponseHeaders(Struct, frozen=True):
    """The answer's headers have arrived at Envoy, or Envoy made the answer itself.

    `retry_after` is that header's first value, None without one; `flags` Envoy's response flag bit
    mask, `details` its response code details, `cluster` the final attempt's cluster ("" when there
    was none), `attempts` how many attempts were made.
    """

    status: int
    retry_after: str | None = None
    end_of_stream: bool = False
    flags: int = 0
    details: str = ""
    cluster: str = ""
    attempts: int = 0

    @property
    def phase(self) -> Phase:
        """The phase in which it is answered."""
        return Phase.RESPONSE_HEADERS


class ResponseTrailers(Struct, frozen=True):
    """The answer ended in trailers."""

    @property
    def phase(self) -> Phase:
        """The phase in which it is answered."""
        return Phase.RESPONSE_TRAILERS


Message = RequestHeaders | RequestBody | RequestTrailers | ResponseHeaders | ResponseTrailers


@dataclass(frozen=True, slots=True)
class Continue:
    """Envoy goes on; `set_headers` overwrite and `remove_headers` are taken away."""

    phase: Phase
    set_headers: Headers = ()
    remove_headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NeedBody:
    """Envoy is to buffer the whole request body and send it (answers REQUEST_HEADERS only)."""


class Steer(Struct, frozen=True):
    """Envoy sends the request to `clusters[0]`, then on a retry to `clusters[1]`, and so on.

    `set_headers` already holds the cluster header, the decision's id, and where they are needed the
    request id, the hop list and the retry count. `destinations` are the same endpoints as
    host:port, for the endpoint-picker steering. `body` replaces the request body (answers
    REQUEST_BODY only).
    """

    phase: Phase
    clusters: tuple[str, ...]
    set_headers: Headers
    remove_headers: tuple[str, ...] = ()
    destinations: tuple[str, ...] = ()
    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class Immediate:
    """Envoy answers the client itself with this; the request goes nowhere.

    `details` is a word for Envoy's access log.
    """

    status: int
    headers: Headers
    body: bytes
    details: str


Action = Continue | NeedBody | Steer | Immediate


@dataclass(frozen=True, slots=True)
class AttemptLog:
    """One failed attempt, from Envoy's upstream access log."""

    decision_id: str
    cluster: str
    status: int
    flags: int
    details: str
    retry_after: str | None


@dataclass(frozen=True, slots=True)
class RequestLog:
    """One request that ended with a response flag, from Envoy's access log."""

    decision_id: str
    cluster: str
    status: int
    flags: int
    details: str
    attempts: int


LogEntry = AttemptLog | RequestLog
