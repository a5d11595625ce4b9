"""Names the keys that Envoy injects, without ever reading one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from extproc.routing.endpoint import Auth, Info, SecretKind, SecretRef
from extproc.xds.tree import Tree


def secret(ref: SecretRef) -> Tree:
    """The secret that Envoy itself reads from its environment or from a file."""
    match ref.kind:
        case SecretKind.ENV:
            source = {"environment_variable": ref.name}
        case SecretKind.FILE:
            source = {"filename": ref.name}
        case _:
            assert_never(ref.kind)
    return {"name": str(ref), "generic_secret": {"secret": source}}


def secrets(endpoints: Iterable[Info]) -> list[Tree]:
    """Every key that one of `endpoints` demands, each once, by name."""
    refs = {endpoint.auth.key for endpoint in endpoints if endpoint.auth is not None}
    return [secret(ref) for ref in sorted(refs, key=str)]


def credential_headers(endpoints: Iterable[Info], known: Iterable[str]) -> tuple[str, ...]:
    """Every header that may hold a key: the `known` ones and those that `endpoints` use."""
    used = {endpoint.auth.header.lower() for endpoint in endpoints if endpoint.auth is not None}
    return (*known, *sorted(used - set(known)))


def injected(auth: Auth) -> Tree:
    """The settings of the filter that puts the key where the endpoint demands it."""
    return {
        "credential": {"name": str(auth.key)},
        "header": auth.header,
        "header_value_prefix": auth.prefix,
    }
