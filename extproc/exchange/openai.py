"""A refusal as the HTTP answer that a client's SDK understands.

The envelope is OpenAI's, or Anthropic's on its paths. A retry is asked for in the three headers
that the SDKs read: `retry-after-ms`, `retry-after`, `x-should-retry`.
"""

from __future__ import annotations

import math
import re
from types import MappingProxyType
from typing import Final

import msgspec

from extproc import headers
from extproc.errors import Reason, Rejection
from extproc.exchange.messages import Headers, Immediate
from extproc.paths import Flavour, find, flavour_of

JSON: Final = ("content-type", b"application/json")
_MAX_RETRY_AFTER_SECONDS: Final = 3_600.0
# A client chooses its request id, and what goes into a header and a body must be plain.
_PLAIN_ID: Final = re.compile(rb"[!-~]{1,128}")

_OPENAI_TYPES: Final = MappingProxyType({429: "rate_limit_error", 503: "service_unavailable_error"})
_ANTHROPIC_TYPES: Final = MappingProxyType(
    {
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)


def refuse(
    rejection: Rejection, *, method: str, path: str, request_id: bytes | None = None
) -> Immediate:
    """The answer that tells `rejection` to the client of `path` (without its query).

    `retry-after` is in whole seconds, at least 1, rounded up, at most an hour; `retry-after-ms` is
    the same moment in milliseconds. An answer to HEAD has no body. A 405 lists the path's methods.
    """
    flavour = flavour_of(path)
    plain_id = request_id if request_id and _PLAIN_ID.fullmatch(request_id) else None
    told = [JSON, (headers.REASON, rejection.reason.encode())]
    if rejection.reason is Reason.METHOD_NOT_ALLOWED:
        told.append(("allow", allowed(path)))
    if flavour is Flavour.ANTHROPIC and plain_id is not None:
        told.append(("request-id", plain_id))
    told.extend(_retry_headers(rejection))
    body = b"" if method == "HEAD" else _envelope(rejection, flavour, plain_id)
    return Immediate(rejection.status, told, body, str(rejection.reason))


def allowed(path: str) -> bytes:
    """The value of the `allow` header for `path`."""
    entry = find(path)
    return ", ".join((*(entry.methods if entry else ()), "OPTIONS")).encode()


def _retry_headers(rejection: Rejection) -> Headers:
    """The headers that say when and whether a retry helps.

    A status that SDKs do not retry by themselves (below 500, not 408, 409, 429) needs no word
    against it, but gets one: proxies and other clients have rules of their own.
    """
    after = rejection.retry_after_seconds
    wanted = rejection.should_retry
    told: list[tuple[str, bytes]] = []
    if after is not None and not math.isnan(after):
        seconds = min(max(after, 0.001), _MAX_RETRY_AFTER_SECONDS)
        told.append((headers.RETRY_AFTER, b"%d" % math.ceil(seconds)))
        told.append((headers.RETRY_AFTER_MS, b"%d" % math.ceil(seconds * 1000)))
    elif wanted is None and rejection.status < 500 and rejection.status not in {408, 409, 429}:
        wanted = False
    if wanted is not None:
        told.append((headers.SHOULD_RETRY, b"true" if wanted else b"false"))
    return told


def _envelope(rejection: Rejection, flavour: Flavour, request_id: bytes | None = None) -> bytes:
    """The JSON that the SDKs of `flavour` read an error from.

    `request_id` is visible ASCII; only Anthropic's envelope has a place for it.
    """
    # Half a surrogate pair cannot be encoded, and Envoy resets a stream over invalid UTF-8.
    message = rejection.message.encode("utf-8", "replace").decode()
    status = rejection.status
    if flavour is Flavour.ANTHROPIC:
        fallback = "api_error" if status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(status, fallback)
        anthropic: dict[str, object] = {
            "type": "error",
            "error": {"type": kind, "message": message},
        }
        if request_id is not None:
            anthropic["request_id"] = request_id.decode()
        return msgspec.json.encode(anthropic)
    fallback = "server_error" if status >= 500 else "invalid_request_error"
    error = {
        "message": message,
        "type": _OPENAI_TYPES.get(status, fallback),
        "param": rejection.param,
        "code": rejection.code,
    }
    return msgspec.json.encode({"error": error})
