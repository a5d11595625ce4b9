"""Brings the answers that Envoy makes itself into the envelope that the path's clients can read.

Each is matched by Envoy's own word for it (the response code details), never by its status or
flags: the service's immediate responses and an endpoint's real answers carry other words and stay
untouched, also one that the service gives after every attempt has failed. The bodies of refusals
that routes give directly are made here as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from extproc.errors import Reason, Rejection
from extproc.exchange import refusals
from extproc.exchange.openai import refuse
from extproc.paths import Flavour
from extproc.xds.tree import Tree, extension, header_options

_CEL: Final = "envoy.extensions.access_loggers.filters.cel.v3.ExpressionFilter"
_SOON_SECONDS: Final = 1.0

# A path of each flavour, for the envelope alone.
_EXAMPLES: Final = MappingProxyType(
    {Flavour.OPENAI: "/v1/chat/completions", Flavour.ANTHROPIC: "/v1/messages"}
)

_ANTHROPIC_PATHS: Final = (
    "(request.url_path == '/v1/messages' || request.url_path.startsWith('/v1/messages/'))"
)

NO_ENDPOINT: Final = Rejection(
    503,
    Reason.NO_ENDPOINT,
    "No endpoint can serve this request at the moment.",
    code="no_endpoint",
    retry_after_seconds=_SOON_SECONDS,
)
OVERLOADED: Final = Rejection(
    503,
    Reason.SATURATED,
    "The gateway has too many requests in progress.",
    code="overloaded",
    retry_after_seconds=_SOON_SECONDS,
)
REQUEST_TIMEOUT: Final = Rejection(
    408,
    Reason.BODY_INVALID,
    "The request did not arrive in time.",
    code="request_timeout",
)
MALFORMED: Final = Rejection(
    400,
    Reason.BODY_INVALID,
    "The request is not valid HTTP.",
    code="request_invalid",
    should_retry=False,
)
UPGRADE_REFUSED: Final = Rejection(
    400,
    Reason.BODY_INVALID,
    "This path does not upgrade connections: send the request without the upgrade header.",
    code="upgrade_refused",
    should_retry=False,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A rejection as text: headers and a JSON body."""

    headers: tuple[tuple[str, str], ...]
    body: str


def answer(rejection: Rejection, flavour: Flavour, path: str | None = None) -> Answer:
    """What the service itself would answer; `path` matters for a 405, which lists its methods."""
    made = refuse(rejection, method="POST", path=path or _EXAMPLES[flavour])
    told = tuple((name, value.decode("latin-1")) for name, value in made.headers)
    return Answer(told, made.body.decode())


@dataclass(frozen=True, slots=True)
class LocalReply:
    """One kind of answer that Envoy makes itself, and what is told instead.

    `words` are whole response code details, `beginnings` what longer ones start with. `status`
    and `path` narrow it further.
    """

    told: Rejection
    words: tuple[str, ...] = ()
    beginnings: tuple[str, ...] = ()
    status: int | None = None
    path: str | None = None


def local_replies(body_limit_bytes: int) -> tuple[LocalReply, ...]:
    """Every answer of Envoy's own that is put into an envelope; the first that matches counts."""
    return (
        LocalReply(refusals.body_too_large(body_limit_bytes), words=("request_payload_too_large",)),
        LocalReply(refusals.not_ready(), words=("no_healthy_upstream",), path="/ready"),
        LocalReply(
            NO_ENDPOINT, words=("no_healthy_upstream", "cluster_not_found", "maintenance_mode")
        ),
        LocalReply(
            OVERLOADED,
            words=("upstream_reset_before_response_started{overflow}",),
            beginnings=("overload",),
        ),
        LocalReply(
            refusals.upstream_failed(503, _SOON_SECONDS),
            beginnings=("upstream_reset_before_response_started",),
        ),
        LocalReply(
            # Cut so soon after its headers that the client has not been sent them.
            refusals.upstream_failed(502, _SOON_SECONDS),
            beginnings=("upstream_reset_after_response_started",),
        ),
        LocalReply(
            REQUEST_TIMEOUT,
            words=("request_header_timeout", "request_overall_timeout", "stream_idle_timeout"),
            status=408,
        ),
        LocalReply(
            refusals.upstream_failed(504),
            words=(
                "stream_idle_timeout",
                "upstream_per_try_timeout",
                "upstream_per_try_idle_timeout",
                "upstream_response_timeout",
            ),
        ),
        LocalReply(refusals.path_not_found(), words=("route_not_found", "absolute_path_rejected")),
        LocalReply(UPGRADE_REFUSED, words=("upgrade_failed",)),
        LocalReply(
            MALFORMED,
            words=("missing_host_header", "path_normalization_failed", "low_version"),
            beginnings=("http1.", "http2."),
            status=400,
        ),
        LocalReply(
            refusals.internal(),
            # A header that cannot be sent on, or a reply of the service that cannot be followed.
            beginnings=("filter_removed_required", "header_mutation_", "ext_proc_"),
        ),
    )


def _expression(reply: LocalReply, flavour: Flavour) -> str:
    """A CEL expression; every text in it is a constant of this module."""
    terms = [f"response.code_details == '{word}'" for word in reply.words]
    terms += [f"response.code_details.startsWith('{word}')" for word in reply.beginnings]
    parts = [f"({' || '.join(terms)})"]
    if reply.status is not None:
        parts.append(f"response.code == {reply.status}")
    if reply.path is not None:
        parts.append(f"request.url_path == '{reply.path}'")
    if flavour is Flavour.ANTHROPIC:
        parts.append(_ANTHROPIC_PATHS)
    return " && ".join(parts)


def _mapper(reply: LocalReply, flavour: Flavour) -> Tree:
    told = answer(reply.told, flavour)
    return {
        "filter": {
            "extension_filter": extension(
                "envoy.access_loggers.extension_filters.cel",
                _CEL,
                {"expression": _expression(reply, flavour)},
            )
        },
        "status_code": reply.told.status,
        "headers_to_add": header_options(
            (name, value) for name, value in told.headers if name != "content-type"
        ),
        "body_format_override": {
            "text_format_source": {"inline_string": told.body.replace("%", "%%")},
            "content_type": "application/json",
        },
    }


def local_reply_config(body_limit_bytes: int) -> Tree:
    """The connection manager's setting that rewrites Envoy's own answers."""
    return {
        "mappers": [
            _mapper(reply, flavour)
            for reply in local_replies(body_limit_bytes)
            for flavour in (Flavour.ANTHROPIC, Flavour.OPENAI)
            if reply.path is None or flavour is Flavour.OPENAI
        ]
    }
