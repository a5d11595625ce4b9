"""What one attempt says about the endpoint that took it, from its status and Envoy's flags.

Pure classification; who is charged, and when, is the ledger's.
"""

from __future__ import annotations

from enum import IntFlag, StrEnum
from typing import Final


class Flag(IntFlag):
    """Envoy's response flags, as the bit mask of the attribute `response.flags`.

    The comment on each is the short name in Envoy's own access log.
    """

    NO_HEALTHY_UPSTREAM = 1 << 1  # UH
    UPSTREAM_TIMEOUT = 1 << 2  # UT
    LOCAL_RESET = 1 << 3  # LR
    UPSTREAM_RESET = 1 << 4  # UR
    UPSTREAM_CONNECTION_FAILURE = 1 << 5  # UF
    UPSTREAM_CONNECTION_TERMINATION = 1 << 6  # UC
    UPSTREAM_OVERFLOW = 1 << 7  # UO
    NO_ROUTE = 1 << 8  # NR
    DOWNSTREAM_TERMINATION = 1 << 14  # DC
    RETRY_LIMIT_EXCEEDED = 1 << 15  # URX
    STREAM_IDLE_TIMEOUT = 1 << 16  # SI
    DOWNSTREAM_PROTOCOL_ERROR = 1 << 18  # DPE
    MAX_STREAM_DURATION = 1 << 19  # UMSDR
    DURATION_TIMEOUT = 1 << 22  # DT
    UPSTREAM_PROTOCOL_ERROR = 1 << 23  # UPE
    NO_CLUSTER = 1 << 24  # NC
    DNS_FAILURE = 1 << 26  # DF
    DOWNSTREAM_RESET = 1 << 28  # DR


class Outcome(StrEnum):
    """What an attempt means for its endpoint."""

    SUCCESS = "success"
    FAILURE = "failure"
    BACKPRESSURE = "backpressure"
    MISCONFIGURED = "misconfigured"
    CLIENT_ERROR = "client_error"
    LOOP = "loop"
    QUARANTINED = "quarantined"
    ABORTED = "aborted"
    NOBODY = "nobody"


DEFAULT_BACKPRESSURE_SECONDS: Final = 2.0

_GONE_CLIENT: Final = int(
    Flag.DOWNSTREAM_TERMINATION | Flag.DOWNSTREAM_RESET | Flag.DOWNSTREAM_PROTOCOL_ERROR
)
_BROKEN_ENDPOINT: Final = int(
    Flag.NO_HEALTHY_UPSTREAM
    | Flag.UPSTREAM_TIMEOUT
    | Flag.UPSTREAM_RESET
    | Flag.UPSTREAM_CONNECTION_FAILURE
    | Flag.UPSTREAM_CONNECTION_TERMINATION
    | Flag.UPSTREAM_PROTOCOL_ERROR
    | Flag.DNS_FAILURE
)
_NO_CLUSTER: Final = int(Flag.NO_CLUSTER)
_OVERFLOW: Final = int(Flag.UPSTREAM_OVERFLOW)
_IDLE: Final = int(Flag.STREAM_IDLE_TIMEOUT)
_CONNECTION_ENDED: Final = int(Flag.UPSTREAM_CONNECTION_TERMINATION)
# They say that Envoy stopped, not why the last attempt failed: no retry was left, or no room.
_NO_BLAME: Final = int(Flag.RETRY_LIMIT_EXCEEDED | Flag.UPSTREAM_OVERFLOW)

_SWITCHED: Final = 101
_FROM_ENDPOINT: Final = "via_upstream"
_MISCONFIGURED: Final = frozenset({401, 403, 404, 405})


def classify(status: int, flags: int, details: str, retry_after: str | None) -> Outcome:
    """What an attempt that got `status` means for its endpoint.

    `flags` is Envoy's bit mask and `details` its response code details: `via_upstream` marks the
    endpoint's own answer. A flag outranks the status, because a stream that was cut after its
    headers keeps the status of those headers. An idle stream is the endpoint's failure where Envoy
    answered 504: the whole request was there and no answer began.
    """
    if status == _SWITCHED and flags & _BROKEN_ENDPOINT == _CONNECTION_ENDED:
        # An upgraded connection has no other end, whoever closes it.
        flags &= ~_CONNECTION_ENDED
        details = _FROM_ENDPOINT
    if flags & _GONE_CLIENT:
        return Outcome.ABORTED
    if flags & _NO_CLUSTER:
        return Outcome.QUARANTINED
    if flags & _BROKEN_ENDPOINT or (flags & _IDLE and status == 504):
        return Outcome.FAILURE
    if flags & _OVERFLOW and details != _FROM_ENDPOINT:
        return Outcome.QUARANTINED
    if flags & ~_NO_BLAME or (details and details != _FROM_ENDPOINT):
        return Outcome.NOBODY
    return _answered(status, retry_after)


def _answered(status: int, retry_after: str | None) -> Outcome:
    """What the endpoint's own answer with `status` means."""
    if status < 400:
        return Outcome.SUCCESS
    if status == 429 or (status == 503 and retry_after is not None):
        return Outcome.BACKPRESSURE
    if status in _MISCONFIGURED:
        return Outcome.MISCONFIGURED
    if status == 508:
        return Outcome.LOOP
    return Outcome.CLIENT_ERROR if status < 500 else Outcome.FAILURE


def retry_after_seconds(text: str | None) -> float | None:
    """The time that a `retry-after` value gives; None for none, a date, a negative one or junk."""
    stripped = "" if text is None else text.strip()
    if len(stripped) <= 9 and stripped.isascii() and stripped.replace(".", "", 1).isdigit():
        return float(stripped)
    return None


def backpressure_seconds(retry_after: str | None) -> float:
    """How long an endpoint asked to be left alone; 0 means not at all.

    What is no count of seconds gives `DEFAULT_BACKPRESSURE_SECONDS`.
    """
    seconds = retry_after_seconds(retry_after)
    return DEFAULT_BACKPRESSURE_SECONDS if seconds is None else seconds
