"""Clusters of endpoints: one alone, or several engines that share credentials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final

from extproc import clusters
from extproc.config.values import Config
from extproc.routing.endpoint import Auth, Info, Kind
from extproc.xds.connect import (
    KEEPALIVE,
    LIMITS,
    PROTOCOL_OPTIONS,
    discovery,
    host_header,
    tls_socket,
)
from extproc.xds.tree import Json, Tree, address, seconds, typed
from extproc.xds.upstream_filters import upstream_filters

_OWN_CONNECT_SECONDS: Final = 1.0
_FOREIGN_CONNECT_SECONDS: Final = 2.0

# Below the servers' own limits, so that they never close a connection that is being reused:
# uvicorn and llama.cpp close after 5 s, the usual cloud load balancers after 60 s.
_OWN_IDLE_SECONDS: Final = 4.0
_FOREIGN_IDLE_SECONDS: Final = 50.0

_SOCKET_MATCH: Final = "envoy.transport_socket_match"
_HTTPS: Final = "https"


def endpoint_cluster(info: Info, config: Config) -> Tree:
    """The cluster of one endpoint: its own DNS, TLS, Host, key and header hygiene."""
    name = clusters.cluster_name(info.id)
    socket = (
        {"transport_socket": tls_socket(info.tls, info.url.host, alpn="http/1.1")}
        if info.url.scheme == _HTTPS
        else {}
    )
    return {
        "name": name,
        **discovery([info.url.host]),
        "connect_timeout": _connect_timeout(info.kind),
        "circuit_breakers": LIMITS,
        "upstream_connection_options": KEEPALIVE,
        "typed_extension_protocol_options": _protocol(info.kind, info.auth, config),
        **socket,
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [_alone(info)]}],
        },
    }


def shared_cluster(name: str, members: Sequence[Info], auth: Auth | None, config: Config) -> Tree:
    """The cluster of engines that share credentials, highest priority first; no balancing yet."""
    secured: list[Json] = [
        {
            "name": info.id,
            "match": {"endpoint": info.id},
            "transport_socket": tls_socket(info.tls, info.url.host, alpn="http/1.1"),
        }
        for info in members
        if info.url.scheme == _HTTPS
    ]
    by_priority = groupby(members, key=lambda info: info.priority)
    return {
        "name": name,
        **discovery([info.url.host for info in members]),
        "connect_timeout": _connect_timeout(Kind.ENGINE),
        "circuit_breakers": LIMITS,
        "upstream_connection_options": KEEPALIVE,
        "typed_extension_protocol_options": _protocol(Kind.ENGINE, auth, config),
        **({"transport_socket_matches": secured} if secured else {}),
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [
                {"priority": level, "lb_endpoints": [_shared_member(info) for info in group]}
                for level, (_, group) in enumerate(by_priority)
            ],
        },
    }


def _alone(info: Info) -> Tree:
    return {
        "endpoint": {
            "hostname": host_header(info.url),
            "address": address(info.url.host, info.url.port),
        }
    }


def _shared_member(info: Info) -> Tree:
    member: dict[str, Json] = {
        **_alone(info),
        # Whole numbers from 1; hundredths keep the ratios of weights such as 0.25.
        "load_balancing_weight": max(1, round(info.relative_weight * 100)),
    }
    if info.url.scheme == _HTTPS:
        member["metadata"] = {"filter_metadata": {_SOCKET_MATCH: {"endpoint": info.id}}}
    return member


def _connect_timeout(kind: Kind) -> str:
    own = kind is Kind.ENGINE
    return seconds(_OWN_CONNECT_SECONDS if own else _FOREIGN_CONNECT_SECONDS)


def _protocol(kind: Kind, auth: Auth | None, config: Config) -> Mapping[str, Tree]:
    own = kind is Kind.ENGINE
    idle = seconds(_OWN_IDLE_SECONDS if own else _FOREIGN_IDLE_SECONDS)
    options: Tree = {
        "common_http_protocol_options": {"idle_timeout": idle},
        "explicit_http_config": {"http_protocol_options": {}},
        "http_filters": upstream_filters(kind, auth, config),
    }
    return {PROTOCOL_OPTIONS: typed(PROTOCOL_OPTIONS, options)}
