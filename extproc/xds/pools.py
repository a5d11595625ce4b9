"""Which endpoints may serve a model unseen, while the service is down.

Only our own engines: a provider or a peer would be sent what a rule may forbid, and two gateways
whose services are both down would loop. An engine that calls the model otherwise would need the
body rewritten, and engines with different keys cannot share a cluster, since Envoy injects one key
per cluster: the largest group with the same key is taken, of equal ones that with the first id.
Splits have no pool; an alias has one only where an engine serves that very name.
"""

from __future__ import annotations

from dataclasses import dataclass

from extproc.config.reachable import largest_group
from extproc.config.values import Config
from extproc.routing.endpoint import Auth, Info, Kind


@dataclass(frozen=True, slots=True)
class Pool:
    """The engines of one model that share credentials, highest priority first, then by id."""

    model: str
    auth: Auth | None
    members: tuple[Info, ...]


def pools(config: Config) -> tuple[Pool, ...]:
    """The pool of every model that has one, by model name."""
    names = {
        name for entry in config.models if not entry.split for name in (entry.name, *entry.aliases)
    }
    found = []
    for name in sorted(names):
        members = largest_group(
            endpoint
            for endpoint in config.endpoints
            if endpoint.kind is Kind.ENGINE
            and not endpoint.drained
            and name in endpoint.models
            and endpoint.upstream_name(name) == name
        )
        if members:
            found.append(Pool(name, members[0].auth, members))
    return tuple(found)
