"""The whole of Envoy's static configuration."""

from __future__ import annotations

from typing import Final

from extproc.config.values import Config, Steering
from extproc.xds.clusters import all_clusters
from extproc.xds.listener import listener
from extproc.xds.secrets import secrets
from extproc.xds.tree import Tree, address, extension

# A name server that does not answer holds up the start by seconds, not by minutes.
_RESOLVER: Final = extension(
    "envoy.network.dns_resolver.cares",
    "envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig",
    {"query_timeout_seconds": 2, "query_tries": 2},
)

_CONNECTIONS: Final = extension(
    "envoy.resource_monitors.global_downstream_max_connections",
    "envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
    {"max_active_downstream_connections": 100_000},
)


def bootstrap(config: Config, steering: Steering | None = None) -> Tree:
    """A complete Envoy 1.40 bootstrap for `config`; `steering` stands in for the configured one.

    Raises:
        ValueError: two endpoints would get the same cluster.
    """
    chosen = steering or config.steering
    return {
        "node": {"id": config.cluster_id, "cluster": config.cluster_id},
        "admin": {"address": address(config.listener.admin_host, config.listener.admin_port)},
        "typed_dns_resolver_config": _RESOLVER,
        "layered_runtime": {
            "layers": [
                # The allow-list of paths and the restricted clients are one expression each,
                # longer than Envoy's default limit of 100.
                {"name": "static", "static_layer": {"re2.max_program_size.error_level": 100_000}}
            ]
        },
        "overload_manager": {"resource_monitors": [_CONNECTIONS]},
        "static_resources": {
            "listeners": [listener(config, chosen)],
            "clusters": all_clusters(config, chosen),
            "secrets": secrets(config.endpoints),
        },
    }
