"""How Envoy's clusters are named after what they hold, in one place for both sides of the wire."""

from __future__ import annotations

from typing import Final

_ENDPOINT: Final = "ep-"
_POOL: Final = "pool-"

# A cluster without hosts: what is sent there is refused within milliseconds.
NONE: Final = "none"

# Every endpoint that the endpoint-picker steering can name by its address.
PICKED: Final = "picked"

# The service itself: its decisions, and where Envoy sends its access log.
EXT_PROC: Final = "llmgw-ext-proc"
ACCESS_LOG: Final = "llmgw-access-log"


def cluster_name(endpoint: str) -> str:
    """The cluster that holds the endpoint with this id and nothing else."""
    return _ENDPOINT + endpoint


def endpoint_id(cluster: str) -> str | None:
    """The endpoint whose own cluster this is; None for any other cluster."""
    return cluster.removeprefix(_ENDPOINT) if cluster.startswith(_ENDPOINT) else None


def pool_name(model: str) -> str:
    """The cluster that serves this model while the service is down."""
    return _POOL + model
