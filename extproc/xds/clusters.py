"""Where Envoy connects to: endpoints, one cluster each, pools of them, the service, and nobody."""

from __future__ import annotations

from itertools import pairwise
from types import MappingProxyType
from typing import Final

from extproc import clusters
from extproc.config.values import Config, Steering
from extproc.xds.endpoint_clusters import endpoint_cluster, shared_cluster
from extproc.xds.picked import picked_cluster
from extproc.xds.pools import Pool, pools
from extproc.xds.service_cluster import service_cluster
from extproc.xds.tree import Tree

_NONE: Final[Tree] = MappingProxyType(
    {
        "name": clusters.NONE,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": clusters.NONE},
    }
)


def all_clusters(config: Config, steering: Steering) -> list[Tree]:
    """Every cluster of the configuration: the service's, those of endpoints by id, the pools.

    Raises:
        ValueError: two endpoints have the same id.
    """
    endpoints = sorted(config.endpoints, key=lambda info: info.id)
    for one, other in pairwise(endpoints):
        if one.id == other.id:
            raise ValueError(f"two endpoints are called {one.id!r}")
    found = [service_cluster(clusters.EXT_PROC, config.service)]
    if config.service.access_log:
        # A cluster of its own is a connection of its own: decisions never queue behind the log.
        found.append(service_cluster(clusters.ACCESS_LOG, config.service))
    found.append(_NONE)
    if steering is Steering.ENDPOINT_PICKER:
        found.append(picked_cluster(config))
    found.extend(endpoint_cluster(info, config) for info in endpoints)
    found.extend(pool_cluster(pool, config) for pool in pools(config))
    return found


def pool_cluster(pool: Pool, config: Config) -> Tree:
    """The cluster of a model's pool: least requests, a dead member is ejected after 3 failures."""
    return {
        **shared_cluster(clusters.pool_name(pool.model), pool.members, pool.auth, config),
        "lb_policy": "LEAST_REQUEST",
        "outlier_detection": {
            "consecutive_gateway_failure": 3,
            "enforcing_consecutive_gateway_failure": 100,
            "interval": "2s",
            "base_ejection_time": "5s",
            "max_ejection_percent": 50,
        },
    }
