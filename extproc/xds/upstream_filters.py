"""What is done to a request's headers on the way to one cluster.

What one attempt's cluster does to them stays done for the next attempt, so each cluster first
removes every header that may hold a key and then adds its own: no order of attempts can carry one
endpoint's key, or the client's, to another endpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from extproc import headers
from extproc.config.values import Config
from extproc.routing.endpoint import Auth, Kind
from extproc.xds.secrets import credential_headers, injected
from extproc.xds.tree import Json, Tree, extension

_INTERNAL_PREFIXES = ("x-llmgw-", "x-forwarded-", "x-envoy-")


def upstream_filters(kind: Kind, auth: Auth | None, config: Config) -> Sequence[Tree]:
    """The HTTP filters of a cluster of `kind` whose endpoints demand `auth`."""
    removals = [*_credentials(config), *_private(kind, config)]
    filters = [
        extension(
            "envoy.filters.http.header_mutation",
            "envoy.extensions.filters.http.header_mutation.v3.HeaderMutation",
            {"mutations": {"request_mutations": removals}},
        )
    ]
    if auth is not None:
        filters.append(_key(auth))
    codec = extension(
        "envoy.filters.http.upstream_codec",
        "envoy.extensions.filters.http.upstream_codec.v3.UpstreamCodec",
    )
    return [*filters, codec]


def _key(auth: Auth) -> Tree:
    return extension(
        "envoy.filters.http.credential_injector",
        "envoy.extensions.filters.http.credential_injector.v3.CredentialInjector",
        {
            "overwrite": True,
            "credential": extension(
                "envoy.http.injected_credentials.generic",
                "envoy.extensions.http.injected_credentials.generic.v3.Generic",
                injected(auth),
            ),
        },
    )


def _credentials(config: Config) -> list[Json]:
    """Removes every header that may hold a key."""
    names = credential_headers(config.endpoints, headers.CREDENTIALS)
    return [{"remove": name} for name in names]


def _private(kind: Kind, config: Config) -> list[Json]:
    """Removes what is nobody's business there."""
    match kind:
        case Kind.ENGINE | Kind.PEER:
            # A peer reads the other x-llmgw headers; who the client is stays here.
            return [{"remove": headers.CLIENT}]
        case Kind.EXTERNAL:
            return [
                *(
                    {"remove_on_match": {"key_matcher": {"prefix": prefix}}}
                    for prefix in _INTERNAL_PREFIXES
                ),
                *(
                    {"remove": name}
                    for name in config.headers.model
                    if not name.startswith(_INTERNAL_PREFIXES)
                ),
            ]
        case _:
            assert_never(kind)
