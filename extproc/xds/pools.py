"""Which endpoints may serve a model unseen, while the service is down.

Only our own engines: a provider or a peer would be sent what a rule may forbid, and two gateways
whose services are both down would loop. An engine that calls the model otherwise would need the
body rewritten, and engines with different keys cannot share a cluster, since Envoy injects one key
per cluster: the largest group with the same key is taken, of equal ones that with the first id.
Splits have no pool; an alias has one only where an engine serves that very name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from extproc.config.values import Config
from extproc.routing.endpoint import Auth, Info, Kind


@dataclass(frozen=True, slots=True)
class Pool:
    """The engines of one model that share credentials, highest priority first, then by id."""

    model: str
    auth: Auth | None
    members: tuple[Info, ...]


def largest_group(endpoints: Iterable[Info]) -> tuple[Info, ...]:
    """The most endpoints that share credentials, highest priority first, then by id."""
    groups: defaultdict[Auth | None, list[Info]] = defaultdict(list)
    for endpoint in sorted(endpoints, key=lambda info: info.id):
        groups[endpoint.auth].append(endpoint)
    if not groups:
        return ()
    largest = max(groups.values(), key=len)  # the first of equals, and they stand by first id
    return tuple(sorted(largest, key=lambda info: (-info.priority, info.id)))


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
