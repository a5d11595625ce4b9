"""What the service answers itself: the list of models, readiness, and misplaced methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_to_bytes

import msgspec

from extproc.exchange import refusals
from extproc.exchange.messages import Immediate
from extproc.exchange.openai import JSON, allowed, refuse
from extproc.paths import Route, find

_ID_PREFIX: Final = "/v1/models/"
_READY: Final = b'{"status":"ready"}'


@dataclass(frozen=True, slots=True)
class Listed:
    """One name that clients may ask for; `is_own` is false for a peer's model."""

    name: str
    owned_by: str = "llmgw"
    is_own: bool = True


class Listing:
    """The models of one configuration, rendered once.

    A name that is given twice is listed once, as it first came. `created` is in Unix seconds and
    the same for all.
    """

    __slots__ = ("_all", "_own")

    def __init__(self, models: Iterable[Listed], created: int) -> None:
        first: dict[str, Listed] = {}
        for model in models:
            first.setdefault(model.name, model)
        listed = tuple(first.values())
        self._all = _Rendered.of(listed, created)
        self._own = _Rendered.of([model for model in listed if model.is_own], created)

    def answer(
        self, method: str, path: str, *, own_only: bool = False, request_id: bytes | None = None
    ) -> Immediate:
        """The answer to a GET or HEAD of `/v1/models` or of one model below it.

        A model's id may hold slashes, plain or percent-encoded. `own_only` leaves the peers'
        models out, which is what a peer that lists us is shown.
        """
        rendered = self._own if own_only else self._all
        if not path.startswith(_ID_PREFIX):
            return _ok(method, rendered.whole)
        raw = unquote_to_bytes(path[len(_ID_PREFIX) :].encode("latin-1", "replace"))
        name = raw.decode("utf-8", "replace")
        one = rendered.each.get(name)
        if one is not None:
            return _ok(method, one)
        missing = refusals.model_not_found(name)
        return refuse(missing, method=method, path=path, request_id=request_id)


def local_answer(
    method: str,
    path: str,
    listing: Listing,
    *,
    is_ready: Callable[[], bool],
    own_only: bool = False,
    request_id: bytes | None = None,
) -> Immediate | None:
    """The service's own answer to a request; None for one that an endpoint is to serve.

    Unknown paths are 404, wrong methods 405. OPTIONS is 204 with `allow` and without permission
    for any origin: a browser's preflight is answered by Envoy's CORS filter where one is set up.
    """
    entry = find(path)
    if entry is None:
        rejection = refusals.path_not_found()
    elif method not in entry.methods:
        if method == "OPTIONS":
            return Immediate(204, [("allow", allowed(path))], b"", "options")
        rejection = refusals.method_not_allowed()
    elif entry.route is Route.INFERENCE:
        return None
    elif entry.route is Route.MODELS:
        return listing.answer(method, path, own_only=own_only, request_id=request_id)
    elif is_ready():
        return _ok(method, _READY)
    else:
        rejection = refusals.not_ready()
    return refuse(rejection, method=method, path=path, request_id=request_id)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """The JSON of a whole list and of each of its models."""

    whole: bytes
    each: Mapping[str, bytes]

    @classmethod
    def of(cls, models: Iterable[Listed], created: int) -> _Rendered:
        """The rendering of `models`."""
        cards = {
            model.name: {
                "id": model.name,
                "object": "model",
                "created": created,
                "owned_by": model.owned_by,
            }
            for model in models
        }
        whole = msgspec.json.encode({"object": "list", "data": list(cards.values())})
        return cls(whole, {name: msgspec.json.encode(card) for name, card in cards.items()})


def _ok(method: str, body: bytes) -> Immediate:
    """A 200 with `body`, left out for HEAD."""
    return Immediate(200, [JSON], b"" if method == "HEAD" else body, "answered")
