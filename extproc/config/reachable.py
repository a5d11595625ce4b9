"""Which endpoints the configured steering can send a request to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from extproc.config.grammar import is_ip
from extproc.config.values import Config, Steering
from extproc.routing.endpoint import Auth, Info, Kind


def largest_group(endpoints: Iterable[Info]) -> tuple[Info, ...]:
    """The most endpoints that share credentials, highest priority first, then by id."""
    groups: defaultdict[Auth | None, list[Info]] = defaultdict(list)
    for endpoint in sorted(endpoints, key=lambda info: info.id):
        groups[endpoint.auth].append(endpoint)
    if not groups:
        return ()
    largest = max(groups.values(), key=len)  # the first of equals, and they stand by first id
    return tuple(sorted(largest, key=lambda info: (-info.priority, info.id)))


def steerable(config: Config) -> tuple[Info, ...]:
    """The endpoints that the endpoint-picker steering can reach.

    One Envoy cluster holds them all, so they are our own engines with the same key; they are named
    by address, so a DNS name cannot be one.
    """
    return largest_group(
        info for info in config.endpoints if info.kind is Kind.ENGINE and is_ip(info.url.host)
    )


def reachable(config: Config) -> tuple[Info, ...]:
    """The endpoints that requests can be sent to, whatever their state."""
    return steerable(config) if config.steering is Steering.ENDPOINT_PICKER else config.endpoints
