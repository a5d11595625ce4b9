"""How Envoy reaches a server: its address or name, TLS, and limits that streams do not run into."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Final

from extproc.config.grammar import is_ip
from extproc.routing.endpoint import Tls, Url
from extproc.xds.tree import Json, Tree, extension

PROTOCOL_OPTIONS: Final = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"

_ROOTS: Final = "/etc/ssl/certs/ca-certificates.crt"

# Envoy's own defaults (1024 requests, 3 retries) break under long streams: a retried request holds
# its retry until the end of its answer.
LIMITS: Final[Tree] = MappingProxyType(
    {
        "thresholds": [
            {
                "max_connections": 100_000,
                "max_pending_requests": 100_000,
                "max_requests": 100_000,
                "retry_budget": {"budget_percent": {"value": 100}, "min_retry_concurrency": 1000},
            }
        ]
    }
)

# A host that vanishes during a long silence is noticed after 90 s instead of never.
KEEPALIVE: Final[Tree] = MappingProxyType(
    {"tcp_keepalive": {"keepalive_time": 60, "keepalive_interval": 10, "keepalive_probes": 3}}
)

# For retries. Least requests prefers a dead host, which is idle, and taking turns comes back to it:
# a retry must go elsewhere.
OTHER_HOST: Final[Tree] = MappingProxyType(
    {
        "retry_host_predicate": [
            extension(
                "envoy.retry_host_predicates.previous_hosts",
                "envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate",
            )
        ],
        "host_selection_retry_max_attempts": 5,
    }
)


def host_header(url: Url) -> str:
    """What the endpoint expects as its Host: the port only where it is not the scheme's own."""
    default = 443 if url.scheme == "https" else 80
    return url.authority.removesuffix(f":{url.port}") if url.port == default else url.authority


def tls_socket(tls: Tls, host: str, *, alpn: str) -> Tree:
    """A TLS transport socket that verifies the server's name unless told not to."""
    name = tls.sni or host
    context: dict[str, Json] = {"alpn_protocols": [alpn]}
    if tls.verify:
        context["validation_context"] = {
            "trusted_ca": {"filename": tls.ca_file or _ROOTS},
            "match_typed_subject_alt_names": [
                {"san_type": "IP_ADDRESS" if is_ip(name) else "DNS", "matcher": {"exact": name}}
            ],
        }
    if tls.client_cert_file is not None and tls.client_key_file is not None:
        context["tls_certificates"] = [
            {
                "certificate_chain": {"filename": tls.client_cert_file},
                "private_key": {"filename": tls.client_key_file},
            }
        ]
    return extension(
        "envoy.transport_sockets.tls",
        "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        {**({} if is_ip(name) else {"sni": name}), "common_tls_context": context},
    )


def discovery(hosts: Iterable[str]) -> Tree:
    """How a cluster finds `hosts`: not at all when all are addresses, else by DNS."""
    if all(is_ip(host) for host in hosts):
        return {"type": "STATIC"}
    return {
        "cluster_type": extension(
            "envoy.clusters.dns",
            "envoy.extensions.clusters.dns.v3.DnsCluster",
            {
                # Every address of the name is a host: STRICT_DNS in Envoy's older words.
                "all_addresses_in_single_endpoint": False,
                # A name with both kinds of address, as localhost has, is mostly served on IPv4.
                "dns_lookup_family": "V4_PREFERRED",
                # A name that does not exist yet is no failure to Envoy, and resolvers of container
                # networks give names a time to live of hours: both are asked again soon.
                "dns_refresh_rate": "5s",
                "dns_failure_refresh_rate": {"base_interval": "1s", "max_interval": "10s"},
            },
        )
    }
