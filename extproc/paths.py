"""Every path that clients may ask for, once: what Envoy lets through and the exchange understands.

An engine's other paths (/metrics, /v1/load_lora_adapter, /flush_cache) are not here, and so no
client reaches them, also while the service is down.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Flavour(StrEnum):
    """Whose error envelope the clients of a path can read."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class Route(StrEnum):
    """Who answers a path: an endpoint, or the service itself."""

    INFERENCE = "inference"
    MODELS = "models"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class ApiPath:
    """One path of the API.

    `methods` are the ones that it takes. `has_json_model` is whether the body is JSON and names
    the model; elsewhere the model comes in a header or in the query. `takes_id` is whether
    anything may follow after a slash, slashes included, because model names have them.
    `may_upgrade` is whether a websocket is opened there.
    """

    path: str
    methods: tuple[str, ...] = ("POST",)
    flavour: Flavour = Flavour.OPENAI
    route: Route = Route.INFERENCE
    has_json_model: bool = True
    takes_id: bool = False
    may_upgrade: bool = False


_READ: Final = ("GET", "HEAD")
_ANTHROPIC: Final = "/v1/messages"

PATHS: Final = (
    ApiPath("/v1/chat/completions"),
    ApiPath("/v1/completions"),
    ApiPath("/v1/embeddings"),
    ApiPath("/v1/responses"),
    ApiPath("/v1/audio/transcriptions", has_json_model=False),
    ApiPath("/v1/audio/translations", has_json_model=False),
    ApiPath("/v1/audio/speech"),
    ApiPath("/v1/images/generations"),
    ApiPath("/v1/moderations"),
    ApiPath("/v1/rerank"),
    ApiPath("/v1/score"),
    ApiPath("/v1/realtime", ("GET",), has_json_model=False, may_upgrade=True),
    ApiPath(_ANTHROPIC, flavour=Flavour.ANTHROPIC),
    ApiPath(f"{_ANTHROPIC}/count_tokens", flavour=Flavour.ANTHROPIC),
    ApiPath("/v1/models", _READ, route=Route.MODELS, has_json_model=False),
    ApiPath("/v1/models", _READ, route=Route.MODELS, has_json_model=False, takes_id=True),
    ApiPath("/ready", _READ, route=Route.READY, has_json_model=False),
)

_EXACT: Final = MappingProxyType({entry.path: entry for entry in PATHS if not entry.takes_id})
_WITH_ID: Final = tuple((f"{entry.path}/", entry) for entry in PATHS if entry.takes_id)


def find(path: str) -> ApiPath | None:
    """The entry that `path` (without its query) belongs to; None when no client may ask for it."""
    found = _EXACT.get(path)
    if found is not None:
        return found
    for prefix, entry in _WITH_ID:
        if path.startswith(prefix) and len(path) > len(prefix):
            return entry
    return None


def flavour_of(path: str) -> Flavour:
    """Whose error envelope answers `path`, listed or not; a query does not matter."""
    is_anthropic = path.startswith(_ANTHROPIC) and path[len(_ANTHROPIC) :][:1] in {"", "/", "?"}
    return Flavour.ANTHROPIC if is_anthropic else Flavour.OPENAI
