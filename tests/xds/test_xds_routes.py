"""The routes and filters as rendered: order, what is closed, what is read, what is configurable."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xds_world import config, endpoint, rendered

from extproc import headers
from extproc.config.values import ClientPolicy, Config, HeaderNames, Listener, Service, Steering
from extproc.paths import PATHS
from extproc.xds.render import render
from extproc.xds.routes import RETRIABLE, restricted_clients

Node = dict[str, object]

ENGINE = endpoint("a", "http://192.0.2.1:80", "m", "n")


def manager(configuration: Config, steering: Steering | None = None) -> dict[str, object]:
    """The rendered connection manager."""
    tree = rendered(configuration, steering)
    (listener,) = tree["static_resources"]["listeners"]
    (found,) = listener["filter_chains"][0]["filters"]
    config_node = found["typed_config"]
    assert isinstance(config_node, dict)
    return config_node


def host(configuration: Config, steering: Steering | None = None) -> dict[str, object]:
    """The rendered virtual host."""
    routes = manager(configuration, steering)["route_config"]
    assert isinstance(routes, dict)
    (only,) = routes["virtual_hosts"]
    assert isinstance(only, dict)
    return only


def routes(configuration: Config, steering: Steering | None = None) -> list[dict[str, object]]:
    """The rendered routes in order."""
    found = host(configuration, steering)["routes"]
    assert isinstance(found, list)
    return found


def filters(configuration: Config) -> dict[str, dict[str, object]]:
    """The rendered HTTP filters by name, in order."""
    found = manager(configuration)["http_filters"]
    assert isinstance(found, list)
    return {one["name"]: one for one in found}


def test_the_order_of_the_routes_is_the_policy() -> None:
    """Restricted before models, models before the rest, everything unlisted last."""
    names = [str(route["name"]) for route in routes(config(ENGINE))]
    refusing = [name for name in names if name.startswith(("method-", "no-upgrade-"))]
    assert names == [
        "steered",
        *refusing,
        "own",
        "options",
        "model-from-large-body",
        "model-from-body",
        "restricted-hop",
        "restricted-residency",
        "restricted-no-store",
        *("model-m", "model-n") * len(headers.MODEL),
        "closed",
        "unlisted-anthropic",
        "unlisted",
    ]


@pytest.mark.parametrize("steering", Steering)
def test_only_a_models_route_leads_to_a_pool(steering: Steering) -> None:
    """Every other waits for the service's word."""
    for route in routes(config(ENGINE), steering):
        leads = route["name"] in {"model-m", "model-n"}
        assert ("pool-" in repr(route)) == leads


@pytest.mark.parametrize("steering", Steering)
def test_no_answer_is_cut_by_a_route(steering: Steering) -> None:
    """The default would be 15 seconds."""
    for route in routes(config(ENGINE), steering):
        action = route.get("route")
        if action is not None:
            assert isinstance(action, dict)
            assert action["timeout"] == "0s"
            assert action["auto_host_rewrite"] is True


def test_limits_and_retries_come_from_the_configuration() -> None:
    """Body, attempts, deadline; the steering headers are removed again."""
    limits = Listener(body_limit_bytes=4096, header_deadline_seconds=2.5)
    found = host(replace(config(ENGINE), listener=limits, max_attempts=4))
    # With room for a longer name of the model.
    assert found["request_body_buffer_limit"] == 4096 + 4096
    assert found["request_headers_to_remove"] == list(headers.REMOVED_BY_THE_ROUTE)
    retries = found["retry_policy"]
    assert isinstance(retries, dict)
    assert (retries["num_retries"], retries["per_try_timeout"]) == (3, "2.5s")
    assert retries["retriable_status_codes"] == list(RETRIABLE) == [429, 500, 502, 503, 504, 508]


def test_the_configured_model_headers_are_the_ones_on_the_routes() -> None:
    """The body is read only where none of them is; the first is what Envoy sets."""
    names = HeaderNames(model=("x-one", "x-two"))
    configuration = replace(config(ENGINE), headers=names)
    by_name = {str(route["name"]): route for route in routes(configuration)}
    text = repr(by_name["model-from-body"])
    assert "x-one" in text
    assert "x-two" in text
    assert headers.MODEL[0] not in repr(routes(configuration))
    assert "'key': 'x-one'" in repr(filters(configuration)["llmgw.model-header"])
    assert forwarded(configuration).fullmatch("x-two")
    assert not forwarded(configuration).fullmatch(headers.MODEL[0])


def test_no_store_is_off_for_two_words_only() -> None:
    """The expression matches whatever restricts; RE2 and Python read it alike."""
    (route,) = (one for one in routes(config(ENGINE)) if one["name"] == "restricted-no-store")
    match = route["match"]
    assert isinstance(match, dict)
    pattern = re.compile(match["headers"][0]["string_match"]["safe_regex"]["regex"])

    @settings(deadline=None)
    @given(st.text(alphabet="false0 Tru1,x", max_size=8) | st.sampled_from(["false", "0"]))
    def law(value: str) -> None:
        assert (pattern.fullmatch(value) is not None) == (value not in {"false", "0"})

    law()


def test_clients_with_a_restriction_are_routed_as_restricted() -> None:
    """After a filter that authenticates, the route is looked up again."""
    clients = {
        "b": ClientPolicy(no_store=True),
        "a": ClientPolicy(residency="eu"),
        "c": ClientPolicy(),
    }
    configuration = replace(config(ENGINE), clients=clients)
    assert restricted_clients(configuration) == ("a", "b")
    assert "restricted-client" in [route["name"] for route in routes(configuration)]
    assert "llmgw.fresh-route" not in filters(configuration)
    own: dict[str, object] = {"name": "auth", "typed_config": {"@type": "x"}}
    configuration = replace(configuration, listener=Listener(http_filters=(own,)))
    assert list(filters(configuration)) == [
        "auth",
        "llmgw.fresh-route",
        "llmgw.whole-bodies",
        "llmgw.model-from-body",
        "llmgw.model-header",
        "llmgw.ext-proc",
        "llmgw.model-from-large-body",
        "llmgw.model-header-of-large-body",
        "envoy.filters.http.router",
    ]


def test_a_large_body_is_left_to_the_service() -> None:
    """From a megabyte on; Envoy reads its model behind the service, where that has not decided."""
    by_name = {str(route["name"]): route for route in routes(config(ENGINE))}
    large, small = by_name["model-from-large-body"], by_name["model-from-body"]
    match = large["match"]
    assert isinstance(match, dict)
    *others, length = match["headers"]
    assert small["match"] == {**match, "headers": others}
    assert length["name"] == "content-length"
    pattern = re.compile(length["string_match"]["safe_regex"]["regex"])
    assert pattern.fullmatch("1000000")
    assert not pattern.fullmatch("999999")

    found = filters(config(ENGINE))
    names = list(found)
    switched_on = large["typed_per_filter_config"]
    assert isinstance(switched_on, dict)
    for name in switched_on:
        assert found[name]["disabled"] is True
        assert names.index(name) > names.index("llmgw.ext-proc")
    skipping = repr(found["llmgw.model-from-large-body"]["typed_config"])
    assert f"'header_name': '{headers.CLUSTER}'" in skipping
    assert "SkipFilter" in skipping


def test_a_service_that_ends_is_left_for_another() -> None:
    """A stream that it refuses is tried again, and not with the same host where there are two."""
    policy = asked_at("llmgw:9002")["retry_policy"]
    assert isinstance(policy, dict)
    assert {"connect-failure", "unavailable", "cancelled"} <= set(policy["retry_on"].split(","))
    assert "previous_hosts" in policy["retry_host_predicate"][0]["name"]
    assert policy["host_selection_retry_max_attempts"] > 1


@pytest.mark.parametrize(
    "address", ["unix:/run/llmgw.sock", "127.0.0.1:9002", "10.0.0.7:9002", "[::1]:9002"]
)
def test_a_service_that_is_one_process_is_asked_once(address: str) -> None:
    """There is nobody else to ask, and what could be asked again costs every request."""
    assert "retry_policy" not in asked_at(address)


def asked_at(address: str) -> Node:
    """How the filter asks a service at this address."""
    service = Service(address="0.0.0.0:9002", envoy_address=address)
    settings = filters(replace(config(ENGINE), service=service))["llmgw.ext-proc"]["typed_config"]
    assert isinstance(settings, dict)
    asked = settings["grpc_service"]
    assert isinstance(asked, dict)
    return asked


def forwarded(configuration: Config) -> re.Pattern[str]:
    """The names of the headers that the service is sent."""
    settings = filters(configuration)["llmgw.ext-proc"]["typed_config"]
    assert isinstance(settings, dict)
    (pattern,) = settings["forward_rules"]["allowed_headers"]["patterns"]
    return re.compile(pattern["safe_regex"]["regex"])


def test_the_service_is_never_told_a_key() -> None:
    """Nor could it change one."""
    configuration = config(ENGINE)
    settings = filters(configuration)["llmgw.ext-proc"]["typed_config"]
    assert isinstance(settings, dict)
    allowed = forwarded(configuration)
    assert not any(map(allowed.fullmatch, headers.CREDENTIALS))
    read = {":path", headers.HOP, headers.CLIENT, *headers.MODEL, *headers.SESSION}
    assert all(map(allowed.fullmatch, read))
    forbidden = re.compile(settings["mutation_rules"]["disallow_expression"]["regex"])
    assert all(forbidden.search(name) for name in headers.CREDENTIALS)
    assert settings["failure_mode_allow"] is True


@pytest.mark.parametrize(
    ("steering", "received", "given"),
    [
        (Steering.PRIORITY_GROUP, [headers.ROUTE_NAMESPACE], []),
        (Steering.CLUSTER_HEADER, [], []),
        (Steering.ENDPOINT_PICKER, [headers.PICKER_NAMESPACE], ["envoy.lb.subset_hint"]),
    ],
)
def test_only_the_metadata_of_the_steering_is_taken(
    steering: Steering, received: list[str], given: list[str]
) -> None:
    """And the body's is given, with a picker also what limits its choice."""
    settings = filters(replace(config(ENGINE), steering=steering))["llmgw.ext-proc"]["typed_config"]
    assert isinstance(settings, dict)
    assert settings["metadata_options"] == {
        "forwarding_namespaces": {"untyped": [headers.BODY_NAMESPACE, *given]},
        "receiving_namespaces": {"untyped": [*received]},
    }


def test_the_access_log_can_be_switched_off() -> None:
    """Both of its halves, and the cluster."""
    assert "access_log" in render(config(ENGINE))
    silent = replace(config(ENGINE), service=Service(access_log=False))
    text = render(silent)
    assert "access_log:" not in text
    assert "upstream_log:" not in text


def test_every_listed_path_is_in_one_expression_or_another() -> None:
    """And those alone are let through to an endpoint or the service."""
    by_name = {str(route["name"]): route for route in routes(config(ENGINE))}
    patterns = []
    for name in ("own", "closed"):
        match = by_name[name]["match"]
        assert isinstance(match, dict)
        patterns.append(re.compile(match["safe_regex"]["regex"]))
    for entry in PATHS:
        path = f"{entry.path}/x/y" if entry.takes_id else entry.path
        assert sum(pattern.fullmatch(path) is not None for pattern in patterns) == 1
    for path in ("/metrics", "/v1/models/", "/v1/chat/completions/x", "/v1/chatXcompletions"):
        assert not any(pattern.fullmatch(path) for pattern in patterns)


def test_tls_is_served_where_a_certificate_is_given() -> None:
    """With HTTP/2 offered."""
    listener = Listener(tls_cert_file="/cert", tls_key_file="/key")
    tree = rendered(replace(config(ENGINE), listener=listener))
    socket = tree["static_resources"]["listeners"][0]["filter_chains"][0]["transport_socket"]
    context = socket["typed_config"]["common_tls_context"]
    assert context["alpn_protocols"] == ["h2", "http/1.1"]
    assert context["tls_certificates"][0]["private_key"] == {"filename": "/key"}
