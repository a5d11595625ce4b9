"""How Envoy reaches the service: one HTTP/2 connection per worker thread, TCP or a Unix socket."""

from __future__ import annotations

from extproc.config.grammar import host_and_port, is_ip
from extproc.config.values import Service
from extproc.xds.connect import LIMITS, PROTOCOL_OPTIONS, discovery, tls_socket
from extproc.xds.tree import Tree, address, typed

_UNIX = "unix:"


def may_be_several(service: Service) -> bool:
    """Whether a request that one process fails can go to another: the address is a name."""
    dialled = service.envoy_address or service.address
    return not dialled.startswith(_UNIX) and not is_ip(host_and_port(dialled)[0])


def service_cluster(name: str, service: Service) -> Tree:
    """The cluster `name`, which holds the service."""
    dialled = service.envoy_address or service.address
    if dialled.startswith(_UNIX):
        host = "localhost"
        where: Tree = {"pipe": {"path": dialled.removeprefix(_UNIX)}}
        found: Tree = {"type": "STATIC"}
    else:
        host, port = host_and_port(dialled)
        where = address(host, port)
        found = discovery([host])
    socket = (
        {"transport_socket": tls_socket(service.tls, host, alpn="h2")}
        if service.tls is not None
        else {}
    )
    http2: Tree = {
        "max_concurrent_streams": 10_000,  # one is open for each request in flight
        "connection_keepalive": {"interval": "10s", "timeout": "5s"},
    }
    return {
        "name": name,
        **found,
        "connect_timeout": "0.25s",
        "circuit_breakers": LIMITS,
        "typed_extension_protocol_options": {
            PROTOCOL_OPTIONS: typed(
                PROTOCOL_OPTIONS, {"explicit_http_config": {"http2_protocol_options": http2}}
            )
        },
        **socket,
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": where}}]}],
        },
    }
