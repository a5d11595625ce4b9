"""The cluster in which the service names hosts by address: the endpoint-picker steering."""

from __future__ import annotations

from typing import Final

from extproc import clusters, headers
from extproc.config.reachable import steerable
from extproc.config.values import Config
from extproc.xds.endpoint_clusters import shared_cluster
from extproc.xds.tree import Tree, extension

_NOBODY_HAS: Final = "llmgw.picked-by-address-only"


def picked_cluster(config: Config) -> Tree:
    """The cluster of all that the service can pick.

    An address that is not a member finds no host, rather than any host: the policy that Envoy falls
    back to selects by metadata that no request has.
    """
    members = steerable(config)
    auth = members[0].auth if members else None
    nobody = extension(
        "envoy.load_balancing_policies.subset",
        "envoy.extensions.load_balancing_policies.subset.v3.Subset",
        {
            "fallback_policy": "NO_FALLBACK",
            "subset_selectors": [{"keys": [_NOBODY_HAS]}],
            "subset_lb_policy": {
                "policies": [
                    {
                        "typed_extension_config": extension(
                            "envoy.load_balancing_policies.round_robin",
                            "envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin",
                        )
                    }
                ]
            },
        },
    )
    picker = extension(
        "envoy.load_balancing_policies.override_host",
        "envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost",
        {
            "override_host_sources": [
                # Not the header of the same name: the route has removed it by now.
                {
                    "metadata": {
                        "key": headers.PICKER_NAMESPACE,
                        "path": [{"key": headers.DESTINATION}],
                    }
                },
            ],
            "fallback_policy": {"policies": [{"typed_extension_config": nobody}]},
        },
    )
    return {
        **shared_cluster(clusters.PICKED, members, auth, config),
        "load_balancing_policy": {"policies": [{"typed_extension_config": picker}]},
    }
