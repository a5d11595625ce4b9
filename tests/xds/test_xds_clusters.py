"""The clusters as rendered: names, discovery, TLS, limits, and what is cleaned on the way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from xds_world import config, endpoint, rendered

from extproc import headers
from extproc.clusters import ACCESS_LOG, EXT_PROC, NONE, PICKED
from extproc.config.reachable import steerable
from extproc.config.values import Config, Service, ServiceTls, Steering
from extproc.routing.endpoint import Auth, Info, Kind, SecretKind, SecretRef, Tls, Url
from extproc.xds.connect import host_header

Node = dict[str, object]


def clusters(configuration: Config, steering: Steering | None = None) -> dict[str, Node]:
    """Every rendered cluster by its name."""
    tree = rendered(configuration, steering)
    found = tree["static_resources"]["clusters"]
    return {one["name"]: one for one in found}


def at(node: object, *keys: str | int) -> object:
    """What is found in `node` along the path `keys`."""
    for key in keys:
        assert isinstance(node, dict | list)
        node = node[key]  # type: ignore[index]  # lists get numbers, mappings text
    return node


def removed(cluster: Node) -> list[str]:
    """The request headers that the cluster removes: names, and prefixes with a star."""
    options = at(cluster, "typed_extension_protocol_options")
    assert isinstance(options, dict)
    (only,) = options.values()
    mutations = at(only, "http_filters", 0, "typed_config", "mutations", "request_mutations")
    assert isinstance(mutations, list)
    return [
        one["remove"] if "remove" in one else f"{one['remove_on_match']['key_matcher']['prefix']}*"
        for one in mutations
    ]


def test_every_endpoint_has_its_own_cluster_and_every_model_its_pool() -> None:
    """Beside the service's, and the one without hosts."""
    infos = (
        endpoint("a", "http://192.0.2.1:80", "m"),
        endpoint("x", "https://x.test", "m", "n", kind=Kind.EXTERNAL),
    )
    names = [EXT_PROC, ACCESS_LOG, NONE, "ep-a", "ep-x", "pool-m"]
    assert list(clusters(config(*infos))) == names
    assert list(clusters(config(*infos), Steering.ENDPOINT_PICKER)) == [
        *names[:3],
        PICKED,
        *names[3:],
    ]
    silent = replace(config(*infos), service=Service(access_log=False))
    assert ACCESS_LOG not in clusters(silent)
    assert "endpoints" not in at(clusters(silent), NONE, "load_assignment")  # type: ignore[operator]  # a mapping


@pytest.mark.parametrize(
    ("url", "is_name", "host"),
    [
        ("http://192.0.2.1:80", False, "192.0.2.1"),
        ("http://[2001:db8::1]:8000", False, "[2001:db8::1]:8000"),
        ("http://engine:8000", True, "engine:8000"),
        ("https://api.test", True, "api.test"),
        ("https://api.test:80", True, "api.test:80"),
        ("http://api.test:443", True, "api.test:443"),
    ],
)
def test_names_are_resolved_and_addresses_are_not(url: str, is_name: bool, host: str) -> None:  # noqa: FBT001 - a column of the table
    """The Host header has the port unless it is the scheme's own."""
    cluster = clusters(config(endpoint("a", url, "m")))["ep-a"]
    assert cluster.get("type") == (None if is_name else "STATIC")
    assert ("cluster_type" in cluster) == is_name
    member = at(cluster, "load_assignment", "endpoints", 0, "lb_endpoints", 0, "endpoint")
    assert at(member, "hostname") == host == host_header(Url.parse(url))


def test_tls_verifies_name_and_authority() -> None:
    """By default against the system's roots and the URL's host."""
    cluster = clusters(config(endpoint("a", "https://a.test", "m")))["ep-a"]
    context = at(cluster, "transport_socket", "typed_config")
    assert at(context, "sni") == "a.test"
    assert at(context, "common_tls_context", "validation_context") == {
        "trusted_ca": {"filename": "/etc/ssl/certs/ca-certificates.crt"},
        "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": "a.test"}}],
    }
    assert at(context, "common_tls_context", "alpn_protocols") == ["http/1.1"]


def test_tls_can_be_told_otherwise() -> None:
    """Name, authority, our own certificate; an address is no server name."""
    tls = Tls(sni="b.test", ca_file="/ca", client_cert_file="/cert", client_key_file="/key")
    info = replace(endpoint("a", "https://192.0.2.1", "m"), tls=tls)
    context = at(clusters(config(info)), "ep-a", "transport_socket", "typed_config")
    assert at(context, "sni") == "b.test"
    common = at(context, "common_tls_context")
    assert at(common, "validation_context", "trusted_ca") == {"filename": "/ca"}
    assert at(common, "tls_certificates", 0, "certificate_chain") == {"filename": "/cert"}
    bare = endpoint("a", "https://192.0.2.1", "m")
    context = at(clusters(config(bare)), "ep-a", "transport_socket", "typed_config")
    assert "sni" not in context  # type: ignore[operator]  # a mapping
    names = at(context, "common_tls_context", "validation_context", "match_typed_subject_alt_names")
    assert names == [{"san_type": "IP_ADDRESS", "matcher": {"exact": "192.0.2.1"}}]
    blind = replace(bare, tls=Tls(verify=False))
    context = at(clusters(config(blind)), "ep-a", "transport_socket", "typed_config")
    assert "validation_context" not in at(context, "common_tls_context")  # type: ignore[operator]  # a mapping


def test_every_cluster_removes_every_header_that_may_hold_a_key() -> None:
    """Also one that only another endpoint uses."""
    odd = Auth(SecretRef(SecretKind.ENV, "K"), "X-Odd-Key", "")
    infos = (
        endpoint("a", "http://192.0.2.1:80", "m"),
        replace(endpoint("x", "https://x.test", "n", kind=Kind.EXTERNAL), auth=odd),
        endpoint("p", "https://p.test", "p/m", kind=Kind.PEER),
    )
    found = clusters(config(*infos))
    keys = [*headers.CREDENTIALS, "x-odd-key"]
    for name in ("ep-a", "ep-p", "pool-m"):
        assert removed(found[name]) == [*keys, headers.CLIENT]
    assert removed(found["ep-x"]) == [
        *keys,
        "x-llmgw-*",
        "x-forwarded-*",
        "x-envoy-*",
        *headers.MODEL[1:],
    ]


def test_a_pool_has_weights_priorities_and_each_members_tls() -> None:
    """Levels are numbered from the highest priority; 0 stands for a weight of 1."""
    infos = (
        replace(endpoint("a", "http://192.0.2.1:80", "m"), priority=5, weight=0.25),
        replace(endpoint("b", "https://b.test", "m"), priority=9),
        replace(endpoint("c", "http://192.0.2.3:80", "m"), priority=5),
    )
    pool = clusters(config(*infos))["pool-m"]
    levels = at(pool, "load_assignment", "endpoints")
    assert isinstance(levels, list)
    shown = [
        (level["priority"], [one["load_balancing_weight"] for one in level["lb_endpoints"]])
        for level in levels
    ]
    assert shown == [(0, [100]), (1, [25, 100])]
    matches = at(pool, "transport_socket_matches")
    assert isinstance(matches, list)
    assert [one["match"] for one in matches] == [{"endpoint": "b"}]
    metadata = levels[0]["lb_endpoints"][0]["metadata"]["filter_metadata"]
    assert metadata == {"envoy.transport_socket_match": {"endpoint": "b"}}
    assert "cluster_type" in pool
    assert "outlier_detection" in pool


def test_limits_do_not_break_long_streams() -> None:
    """Envoy's own defaults are 1024 requests and 3 retries a cluster."""
    infos = (endpoint("a", "http://192.0.2.1:80", "m"),)
    for name, cluster in clusters(config(*infos)).items():
        if name != NONE:
            limits = at(cluster, "circuit_breakers", "thresholds", 0)
            assert at(limits, "max_requests") == 100_000
            assert at(limits, "retry_budget", "min_retry_concurrency") == 1000


@pytest.mark.parametrize(
    ("service", "expected"),
    [
        (Service(address="unix:/run/s"), {"pipe": {"path": "/run/s"}}),
        (
            Service(address="127.0.0.1:9002"),
            {"socket_address": {"address": "127.0.0.1", "port_value": 9002}},
        ),
        (
            Service(address="[::1]:9002"),
            {"socket_address": {"address": "::1", "port_value": 9002}},
        ),
        (
            Service(address="0.0.0.0:9002", envoy_address="llmgw:9003"),
            {"socket_address": {"address": "llmgw", "port_value": 9003}},
        ),
    ],
)
def test_the_service_is_dialled_where_it_says(service: Service, expected: Node) -> None:
    """By a name of its own for Envoy where there is one."""
    found = clusters(replace(config(), service=service))
    for name in (EXT_PROC, ACCESS_LOG):
        place = at(found[name], "load_assignment", "endpoints", 0, "lb_endpoints", 0, "endpoint")
        assert at(place, "address") == expected


def test_the_service_can_be_dialled_by_tls() -> None:
    """As HTTP/2, under the host's name."""
    tls = ServiceTls(ca_file="/ca", cert_file="/c", key_file="/k")
    service = Service(address="0.0.0.0:9002", envoy_address="llmgw:9002", tls=tls)
    context = at(
        clusters(replace(config(), service=service)), EXT_PROC, "transport_socket", "typed_config"
    )
    assert at(context, "sni") == "llmgw"
    assert at(context, "common_tls_context", "alpn_protocols") == ["h2"]


def test_only_engines_with_an_address_and_one_key_can_be_picked() -> None:
    """They share a cluster, and are named by address."""
    keyed = Auth(SecretRef(SecretKind.ENV, "K"))
    infos: tuple[Info, ...] = (
        endpoint("a", "http://192.0.2.1:80", "m"),
        endpoint("b", "http://192.0.2.2:80", "n"),
        replace(endpoint("c", "http://192.0.2.3:80", "m"), auth=keyed),
        endpoint("d", "http://d.test:80", "m"),
        endpoint("x", "http://192.0.2.4:80", "m", kind=Kind.EXTERNAL),
    )
    assert [info.id for info in steerable(config(*infos))] == ["a", "b"]
    assert at(clusters(config(), Steering.ENDPOINT_PICKER), PICKED, "load_assignment") == {
        "cluster_name": PICKED,
        "endpoints": [],
    }
