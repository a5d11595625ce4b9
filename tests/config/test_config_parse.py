"""`llmgw.yaml` is read strictly: every mistake is told with its line, its key and what is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc import headers
from extproc.config.parse import parse
from extproc.config.problems import ConfigErrors, joined, shown
from extproc.config.values import Config, Federation, Listener, Scrape, Service, Steering, Transport
from extproc.config.yaml_lines import MAX_DEPTH, compose
from extproc.engines.candidate import parse_candidate
from extproc.errors import ConfigError
from extproc.routing.catalog import Catalog, ModelEntry
from extproc.routing.endpoint import BreakerSettings, Info, Kind, SecretKind, SecretRef, Tls, Url
from extproc.routing.strategy import BUILT_IN, Picker

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "llmgw.yaml"
SECRET = "sk-live-5up3rs3cret"


def refused(text: str) -> list[ConfigError]:
    """The errors of a text that must be refused."""
    with pytest.raises(ConfigErrors) as caught:
        parse(text)
    return list(caught.value.errors)


def mistakes(text: str) -> tuple[ConfigError, ...]:
    """The errors of a text that may be right."""
    try:
        parse(text)
    except ConfigErrors as error:
        return error.errors
    return ()


def told(text: str) -> list[str]:
    """The errors as `line key: problem`."""
    return [f"{error.line} {error.key}: {error.problem}" for error in refused(text)]


def warned(text: str) -> list[str]:
    """The warnings as `line key: text`."""
    return [f"{warning.line} {warning.key}: {warning.text}" for warning in parse(text).warnings]


def endpoint(extra: str = "", *, url: str = "http://h:1", models: str = "[m]") -> str:
    """A file with one endpoint; `extra` are lines of it, which begin in line 5."""
    lines = ["endpoints:", "- id: e", f"  url: {url}", f"  models: {models}"]
    return "\n".join([*lines, *(f"  {line}" for line in extra.splitlines())])


def one(extra: str = "", *, url: str = "http://h:1", models: str = "[m]") -> Info:
    """The endpoint of a file that has one."""
    return parse(endpoint(extra, url=url, models=models)).endpoints[0]


class TestWhole:
    def test_the_example_of_the_documentation_is_right(self) -> None:
        """It uses every section and gives no warning."""
        config = parse(EXAMPLE.read_text(encoding="utf-8"), "example.yaml")
        assert config.warnings == ()
        assert config.file == "example.yaml"
        assert config.cluster_id == "edge-1"
        assert [info.id for info in config.endpoints if info.kind is Kind.ENGINE] == [
            "h100-1",
            "h100-2",
            "l40s-1",
            "laptop",
        ]
        assert config.clients["team-legal"].tags == (("team", "legal"), ("cost-centre", "4711"))
        assert Catalog(config.models).listed()[:3] == ("llama-3.3-70b", "llama", "default")

    def test_what_is_not_said_has_its_default(self) -> None:
        """An endpoint is all that a file needs."""
        expected = Config(
            cluster_id="llmgw",
            endpoints=(Info("e", Url("http", "h", 1), ("m",)),),
            models=(ModelEntry("m"),),
        )
        assert parse(endpoint()) == expected

    def test_defaults_of_every_section_are_the_values_defaults(self) -> None:
        """An empty section is no section."""
        text = endpoint() + "\nlistener:\nservice: {}\nscrape:\nfederation:\nbreaker:\nheaders:\n"
        assert parse(text) == parse(endpoint())
        config = parse(text)
        assert (config.listener, config.service) == (Listener(), Service())
        assert (config.scrape, config.federation) == (Scrape(), Federation())
        assert config.breaker == BreakerSettings()
        assert dict(config.strategies) == dict(BUILT_IN)

    def test_json_is_read_too(self) -> None:
        """It is YAML."""
        text = json.dumps({"endpoints": [{"id": "e", "url": "http://h:1", "models": ["m"]}]})
        assert parse(text) == parse(endpoint())

    def test_all_mistakes_are_told_at_once_in_the_order_of_lines(self) -> None:
        """One run shows everything there is to correct."""
        text = "max_attempts: 0\nsteering: none\n" + endpoint("weight: -1\ndrained: no\nfoo: 1")
        errors = refused(text)
        assert [error.line for error in errors] == [1, 2, 7, 8, 9]
        assert {error.file for error in errors} == {"llmgw.yaml"}
        assert all(error.expected for error in errors)

    def test_one_error_stands_for_the_first(self) -> None:
        """Who catches ConfigError alone sees a place, and all of the text."""
        with pytest.raises(ConfigError) as caught:
            parse("a: 1\nb: 2", "x.yaml")
        assert (caught.value.line, caught.value.key) == (1, "a")
        assert str(caught.value).splitlines()[0].startswith("x.yaml:1: a: unknown key")
        assert len(str(caught.value).splitlines()) == 2

    def test_a_long_list_of_mistakes_is_cut(self) -> None:
        """The text has fifty; the errors are all there."""
        with pytest.raises(ConfigErrors) as caught:
            parse("\n".join(f"key{n}: 1" for n in range(60)))
        assert len(caught.value.errors) == 60
        assert str(caught.value).splitlines()[-1] == "and 10 more"

    @pytest.mark.parametrize("text", ["- a", "text", "42", "~"])
    def test_a_file_that_is_no_mapping_is_refused(self, text: str) -> None:
        """Its keys are sections."""
        assert told(text) == ["1 (file): is no mapping"]

    def test_a_file_without_endpoints_is_allowed_and_warned_of(self) -> None:
        """Endpoints may come from elsewhere."""
        assert warned("cluster_id: edge") == [
            "1 endpoints: there is none: requests are refused until one is added"
        ]
        assert warned("endpoints: []") == []

    def test_ten_thousand_endpoints_are_read(self) -> None:
        """A large fleet fits into one file."""
        text = "endpoints:\n" + "".join(
            f"- {{id: e{n}, url: 'http://10.{n >> 8}.0.{n & 255}:80', models: [a, m{n}]}}\n"
            for n in range(10_000)
        )
        config = parse(text)
        assert len(config.endpoints) == 10_000
        assert len(config.models) == 10_001


class TestKeysAndTypes:
    def test_an_unknown_key_is_refused_with_the_nearest_one(self) -> None:
        """And with what is known at that place."""
        (error,) = refused("cluster_id: e\nlisener: {}")
        assert (error.line, error.key) == (2, "lisener")
        assert error.problem == "unknown key, did you mean listener?"
        assert "service" in error.expected

    def test_an_unknown_key_far_from_all_is_refused_without_a_guess(self) -> None:
        """Nothing is suggested then."""
        assert told("zzzzzz: 1") == ["1 zzzzzz: unknown key"]

    @pytest.mark.parametrize(
        "text",
        [
            "listener:\n  prot: 1",
            "service:\n  adress: 1",
            "service: {tls: {\n  certfile: x, cert_file: /c, key_file: /k}}",
            "listener: {tls: {\n  certfile: x}}",
            "breaker:\n  treshold: 1",
            "scrape:\n  every: 1",
            "federation:\n  hops: 1",
            "headers:\n  sessions: []",
            "models: {m: {\n  alias: []}}",
            "clients: {c: {\n  tag: 1}}",
            "strategies: {s: {\n  pickr: p2c}}",
            "strategies: {s: {weights: {\n  que: 1}}}",
        ],
    )
    def test_every_section_refuses_unknown_keys(self, text: str) -> None:
        """The line is the key's own."""
        assert any(e.line == 2 and e.problem.startswith("unknown key") for e in refused(text))

    @pytest.mark.parametrize(
        "extra",
        [
            "wieght: 1",
            "metrics:\n  names:\n    runing: [a]",
            "metrics:\n  nmes: {}",
            "breaker:\n  probe: 1",
            "peer: {name: p, cluster_id: c, tags: true}",
        ],
    )
    def test_every_part_of_an_endpoint_refuses_unknown_keys(self, extra: str) -> None:
        """Also the ones inside."""
        assert any(e.problem.startswith("unknown key") for e in refused(endpoint(extra)))

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("cluster_id: 1", "1 cluster_id: is a number, not text"),
            ("cluster_id: [a]", "1 cluster_id: is a list, not text"),
            ("cluster_id: {a: b}", "1 cluster_id: is a mapping, not text"),
            ("cluster_id:", "1 cluster_id: is empty, not text"),
            ("cluster_id: true", "1 cluster_id: is a truth value, not text"),
            ("max_attempts: two", "1 max_attempts: is text, not a whole number"),
            ("max_attempts: true", "1 max_attempts: is a truth value, not a whole number"),
            ("max_attempts: 1.5", "1 max_attempts: is a number, not a whole number"),
            ("max_attempts: '2'", "1 max_attempts: is text, not a whole number"),
            ("max_attempts: 010", "1 max_attempts: is text, not a whole number"),
            ("listener: []", "1 listener: is a list, not a mapping"),
            ("endpoints: {}", "1 endpoints: is a mapping, not a list"),
            ("endpoints: [a]", "1 endpoints[0]: is text, not a mapping"),
            ("models: [m]", "1 models: is a list, not a mapping"),
            ("headers: {model: x}", "1 headers.model: is text, not a list"),
            ("headers: {model: [1]}", "1 headers.model[0]: is a number, not text"),
            ("headers: {session: [a, a]}", "1 headers.session[1]: is given twice"),
            ("service: {access_log: yes}", "1 service.access_log: is text, not a truth value"),
            ("service: {access_log: 1}", "1 service.access_log: is a number, not a truth value"),
            ("scrape: {interval_seconds: x}", "1 scrape.interval_seconds: is text, not a number"),
            (
                "scrape: {interval_seconds: true}",
                "1 scrape.interval_seconds: is a truth value, not a number",
            ),
            ("scrape: {interval_seconds: .nan}", "1 scrape.interval_seconds: nan is out of range"),
            ("scrape: {interval_seconds: .inf}", "1 scrape.interval_seconds: inf is out of range"),
            ("scrape: {interval_seconds: 0}", "1 scrape.interval_seconds: 0 is out of range"),
            ("scrape: {interval_seconds: -1}", "1 scrape.interval_seconds: -1 is out of range"),
            ("max_attempts: 0", "1 max_attempts: 0 is out of range"),
            ("max_attempts: 99", "1 max_attempts: 99 is out of range"),
        ],
    )
    def test_a_value_of_the_wrong_type_or_size_is_refused(self, text: str, problem: str) -> None:
        """The error says what it is and what it should be."""
        assert told(text) == [problem]

    @pytest.mark.parametrize("value", ["Edge_1.b", "a", "1a"])
    def test_a_cluster_id_is_what_a_hop_list_can_carry(self, value: str) -> None:
        """Letters, digits, dots, underscores and hyphens."""
        assert parse(f"cluster_id: '{value}'").cluster_id == value

    @pytest.mark.parametrize("value", ["42", "a b", "a,b", "-a", "", "ä"])
    def test_a_cluster_id_that_no_peer_would_accept_is_refused(self, value: str) -> None:
        """A bare number reads as a hop count."""
        (error,) = refused(f"cluster_id: '{value}'")
        assert error.key == "cluster_id"
        assert "at least one letter" in error.expected

    @pytest.mark.parametrize("word", ["priority-group", "cluster-header", "endpoint-picker"])
    def test_steering_is_one_of_three(self, word: str) -> None:
        """A fourth is refused with the nearest."""
        assert parse(f"steering: {word}").steering is Steering(word)
        (error,) = refused(f"steering: {word}s")
        assert error.problem == f"'{word}s' is no steering, did you mean {word}?"


class TestListenerAndService:
    def test_a_listener_is_read_whole(self) -> None:
        """Every key has its place."""
        text = (
            "listener: {host: '::', port: 1, admin_host: 10.0.0.1, admin_port: 2,"
            " tls: {cert_file: /c, key_file: /k}, body_limit_bytes: 1024,"
            " header_deadline_seconds: 5, idle_timeout_seconds: 6.5,"
            " http_filters: [{name: f, typed_config: {a: [1, {b: null}]}}]}"
        )
        filters = ({"name": "f", "typed_config": {"a": [1, {"b": None}]}},)
        assert parse(text).listener == Listener(
            "::", 1, "10.0.0.1", 2, "/c", "/k", 1024, 5.0, 6.5, filters
        )

    @pytest.mark.parametrize(
        ("listener", "problem"),
        [
            ("host: localhost", "host: the value is not allowed"),
            ("port: 0", "port: 0 is out of range"),
            ("port: 65536", "port: 65536 is out of range"),
            ("admin_port: 8080", "admin_port: is the listener's own port"),
            ("tls: {cert_file: /c}", "tls.cert_file: stands without key_file"),
            ("tls: {key_file: /c}", "tls.key_file: stands without cert_file"),
            ("tls: {cert_file: c, key_file: /k}", "tls.cert_file: the value is not allowed"),
            ("body_limit_bytes: 1", "body_limit_bytes: 1 is out of range"),
            ("header_deadline_seconds: 0", "header_deadline_seconds: 0 is out of range"),
            ("http_filters: {}", "http_filters: is no list"),
            (
                "http_filters: [{name: f}]",
                "http_filters: the filter in line 1 has no name or no typed_config",
            ),
            (
                "http_filters: [a]",
                "http_filters: the filter in line 1 has no name or no typed_config",
            ),
        ],
    )
    def test_a_wrong_listener_is_refused(self, listener: str, problem: str) -> None:
        """Ports, addresses, files and filters are checked."""
        assert told(f"listener: {{{listener}}}") == [f"1 listener.{problem}"]

    def test_an_idle_timeout_that_cuts_waiting_requests_is_warned_of(self) -> None:
        """An engine may think for as long as the header deadline."""
        assert warned("endpoints: []\nlistener: {idle_timeout_seconds: 60}") == [
            (
                "2 listener.idle_timeout_seconds: is not above header_deadline_seconds:"
                " it cuts a request before it can be retried"
            )
        ]

    def test_a_service_is_read_whole(self) -> None:
        """Every key has its place."""
        text = (
            "service: {transport: grpcio, address: 'h:1', envoy_address: '[::1]:2',"
            " http_address: 'h:3', message_timeout_seconds: 2, drain_seconds: 0,"
            " access_log: false, tls: {cert_file: /c, key_file: /k, client_ca_file: /a,"
            " ca_file: /b, sni: s, client_cert_file: /d, client_key_file: /e}}"
        )
        service = parse(text).service
        assert (service.address, service.envoy_address, service.http_address) == (
            "h:1",
            "[::1]:2",
            "h:3",
        )
        assert (service.message_timeout_seconds, service.drain_seconds) == (2.0, 0.0)
        assert service.access_log is False
        assert service.tls is not None
        assert (service.tls.cert_file, service.tls.key_file) == ("/c", "/k")
        assert (service.tls.client_ca_file, service.tls.ca_file) == ("/a", "/b")
        assert (service.tls.client_cert_file, service.tls.client_key_file) == ("/d", "/e")
        assert service.tls.sni == "s"

    @pytest.mark.parametrize(
        "address", ["unix:/run/x", "127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"]
    )
    def test_the_fast_lane_is_on_this_machine(self, address: str) -> None:
        """Unix sockets and loopback addresses."""
        text = f"service: {{transport: fastlane, address: '{address}'}}"
        assert parse(text).service.transport is Transport.FASTLANE

    def test_tls_is_carried_without_being_asked_for_a_transport(self) -> None:
        """The transport that has TLS is taken for it, whatever the default is."""
        text = "service: {tls: {cert_file: /c, key_file: /k}}"
        assert parse(text).service.transport is Transport.GRPCIO

    def test_a_socket_is_an_address(self) -> None:
        """With an absolute path."""
        assert parse("service: {address: 'unix:/run/x'}").service.address == "unix:/run/x"

    @pytest.mark.parametrize(
        ("service", "problem"),
        [
            ("transport: tcp", "transport: 'tcp' is no transport"),
            ("address: nowhere", "address: the value is not allowed"),
            ("address: 'h:0'", "address: the value is not allowed"),
            ("address: 'h:65536'", "address: the value is not allowed"),
            ("address: 'h:\uff11'", "address: the value is not allowed"),
            ("address: '[h]:1'", "address: the value is not allowed"),
            ("address: 'unix:run'", "address: the value is not allowed"),
            ("http_address: 'unix:/run'", "http_address: the value is not allowed"),
            ("http_address: '127.0.0.1:9002'", "http_address: is the address of the service"),
            ("drain_seconds: -1", "drain_seconds: -1 is out of range"),
            ("tls: {cert_file: /c}", "tls.key_file: is missing"),
            (
                "tls: {cert_file: /c, key_file: /k, client_ca_file: /a}",
                "tls.client_ca_file: demands a certificate of Envoy, and it has none",
            ),
            (
                "address: 'unix:/x', tls: {cert_file: /c, key_file: /k}",
                "tls: goes with host:port only",
            ),
            (
                "transport: fastlane, tls: {cert_file: /c, key_file: /k}",
                "transport: fastlane has no TLS and serves this machine only",
            ),
            (
                "transport: fastlane, address: '0.0.0.0:9002'",
                "transport: fastlane has no TLS and serves this machine only",
            ),
        ],
    )
    def test_a_wrong_service_is_refused(self, service: str, problem: str) -> None:
        """Addresses and TLS are checked."""
        assert told(f"service: {{{service}}}") == [f"1 service.{problem}"]


class TestEndpoints:
    def test_an_engine_is_read_whole(self) -> None:
        """Every key has its place."""
        info = one(
            "kind: engine\nengine: sglang\napi_key: env:KEY\npool: h100\nweight: 2\npriority: -3\n"
            "upstream_model: other\ndrained: true\nmax_waiting: 5\n"
            "metrics:\n  url: http://h:2/metrics?x=1\n  names: {running: [a, 'b{c=\"d\"}']}\n"
            "breaker: {threshold: 1, probes: 2}\n"
            "tls: {sni: s, ca_file: /ca, client_cert_file: /c, client_key_file: /k}",
            url="https://h",
        )
        assert info.url == Url("https", "h", 443)
        assert info.auth is not None
        assert info.auth.key == SecretRef(SecretKind.ENV, "KEY")
        assert (info.auth.header, info.auth.prefix) == ("authorization", "Bearer ")
        assert (info.engine, info.pool, info.weight, info.priority) == ("sglang", "h100", 2.0, -3)
        assert (info.upstream_model, info.drained, info.max_waiting) == ("other", True, 5)
        assert info.metrics_url == "http://h:2/metrics?x=1"
        assert info.metric_names == (("running", ("a", 'b{c="d"}')),)
        assert info.breaker == BreakerSettings(threshold=1, probes=2)
        assert info.tls == Tls("s", "/ca", client_cert_file="/c", client_key_file="/k")

    def test_a_provider_is_read_whole(self) -> None:
        """It is never scraped; its label is trimmed and lowered."""
        info = one(
            "kind: external\napi_key: file:/run/key\napi_key_header: X-API-Key\n"
            "residency: ' EU '\nno_store_allowed: true",
            url="https://p",
        )
        assert (info.kind, info.engine, info.is_scraped) == (Kind.EXTERNAL, "none", False)
        assert (info.residency, info.no_store_allowed) == ("eu", True)
        assert info.auth is not None
        assert info.auth.key == SecretRef(SecretKind.FILE, "/run/key")
        assert (info.auth.header, info.auth.prefix) == ("x-api-key", "")

    def test_a_peer_is_read_whole(self) -> None:
        """Its model loses the peer's name on the way there."""
        info = one(
            "kind: peer\npeer: {name: p, cluster_id: p-1, send_tags: true}", models="[p/x/y]"
        )
        assert info.peer is not None
        assert (info.peer.name, info.peer.cluster_id, info.peer.send_tags) == ("p", "p-1", True)
        assert info.upstream_model == "x/y"
        assert info.engine == "none"

    def test_a_peers_model_may_be_named_otherwise(self) -> None:
        """Told names win, and names without the peer's stay."""
        peer = "kind: peer\npeer: {name: p, cluster_id: p-1}\n"
        assert one(peer + "upstream_model: z", models="[p/x]").upstream_model == "z"
        assert one(peer, models="[x, y]").upstream_model is None

    def test_the_files_breaker_is_every_endpoints_default(self) -> None:
        """An endpoint changes what it names."""
        text = "breaker: {threshold: 9, max_seconds: 30}\n" + endpoint("breaker: {threshold: 2}")
        assert parse(text).endpoints[0].breaker == BreakerSettings(2, max_seconds=30.0)
        assert parse(text).breaker == BreakerSettings(9, max_seconds=30.0)

    @pytest.mark.parametrize(
        ("text", "url"),
        [
            ("http://h", Url("http", "h", 80)),
            ("https://h:8443/", Url("https", "h", 8443)),
            ("http://[::1]:8000", Url("http", "::1", 8000)),
            ("http://10.0.0.1:8000", Url("http", "10.0.0.1", 8000)),
            ("http://my_engine.svc:8000", Url("http", "my_engine.svc", 8000)),
        ],
    )
    def test_a_url_is_scheme_host_and_port(self, text: str, url: Url) -> None:
        """The port has the scheme's default."""
        assert one(url=f"'{text}'").url == url

    @pytest.mark.parametrize(
        ("url", "problem"),
        [
            ("h:1", "is not http:// or https://"),
            ("ftp://h", "is not http:// or https://"),
            ("http://h/v1", "a path, query or fragment is not allowed"),
            ("http://h?a=1", "a path, query or fragment is not allowed"),
            ("http://u:p@h", "user info is not allowed in a URL"),
            ("http://", "the host is missing"),
            ("http://h:0", "port 0 is not a port to connect to"),
            ("http://h:99999", "the port is no number from 1 to 65535"),
            ("http://h:x", "the port is no number from 1 to 65535"),
            ("http://[::1", "is no URL"),
            ("http://a b", "is no URL"),
            ("http://ä", "is no URL"),
            ("http://-h-", "the host is no name"),
        ],
    )
    def test_a_bad_url_is_refused(self, url: str, problem: str) -> None:
        """The error says why, and does not show it."""
        (error,) = refused(endpoint(url=f"'{url}'"))
        assert (error.line, error.key) == (3, "endpoints[0].url")
        assert error.problem.startswith(problem)

    @pytest.mark.parametrize("value", ["", "A", "-a", "a b", "a/b", "ä", "a" * 64])
    def test_an_id_is_what_names_a_cluster(self, value: str) -> None:
        """Lower-case letters, digits, dots, underscores and hyphens, 63 at most."""
        text = f"endpoints:\n- {{id: '{value}', url: 'http://h', models: [m]}}"
        (error,) = refused(text)
        assert error.key == "endpoints[0].id"
        assert error.problem.endswith("is not allowed")

    def test_an_id_given_twice_is_refused(self) -> None:
        """The error names the line of the first."""
        text = "endpoints:\n- {id: a, url: 'http://h', models: [m]}\n"
        text += "- {id: a, url: 'http://i', models: [m]}"
        assert told(text) == ["3 endpoints[1].id: 'a' is taken, first in line 2"]

    def test_what_every_endpoint_needs_is_demanded(self) -> None:
        """Id, url and models."""
        assert told("endpoints:\n- weight: 1") == [
            "2 endpoints[0].id: is missing",
            "2 endpoints[0].url: is missing",
            "2 endpoints[0].models: is missing",
        ]

    @pytest.mark.parametrize(
        ("extra", "problem"),
        [
            ("weight: -1", "weight: -1 is out of range"),
            ("weight: .nan", "weight: nan is out of range"),
            ("weight: -.inf", "weight: -inf is out of range"),
            ("weight: heavy", "weight: is text, not a number"),
            ("priority: 1.5", "priority: is a number, not a whole number"),
            ("kind: local", "kind: 'local' is no kind"),
            ("engine: vlm", "engine: 'vlm' is no engine, did you mean vllm?"),
            ("drained: no", "drained: is text, not a truth value"),
            ("max_waiting: -1", "max_waiting: -1 is out of range"),
            ("breaker: {threshold: -1}", "breaker.threshold: -1 is out of range"),
            ("breaker: {probes: 0}", "breaker.probes: 0 is out of range"),
            ("breaker: {jitter_ratio: 2}", "breaker.jitter_ratio: 2 is out of range"),
            (
                "breaker: {max_seconds: 0.5}",
                "breaker.max_seconds: a maximum of 0.5 is below the base 1",
            ),
            (
                "breaker: {base_seconds: 90}",
                "breaker.base_seconds: a maximum of 60 is below the base 90",
            ),
            ("tls: {sni: s}", "tls: goes with an https:// url only"),
            ("peer: {name: p, cluster_id: c}", "peer: does not go with kind engine"),
            ("kind: peer", "peer: is missing"),
            ("kind: peer\npeer: {name: p}", "peer.cluster_id: is missing"),
            ("kind: peer\npeer: {name: p, cluster_id: '1'}", "peer.cluster_id: '1' is not allowed"),
            (
                "kind: peer\npeer: {name: p, cluster_id: llmgw}",
                "peer.cluster_id: is our own cluster_id",
            ),
            ("kind: peer\npeer: text", "peer: is text, not a mapping"),
            ("kind: external\nengine: vllm", "engine: does not go with kind external"),
            (
                "kind: external\nmetrics: {url: 'http://h/m'}",
                "metrics: belongs to an endpoint that is never scraped",
            ),
            (
                "engine: none\nmetrics: {}",
                "metrics: belongs to an endpoint that is never scraped",
            ),
            ("metrics: {url: 'ftp://h'}", "metrics.url: the value is not allowed"),
            ("metrics: {url: 'http://u@h/m'}", "metrics.url: the value is not allowed"),
            ("metrics: {url: 'http://h:x/m'}", "metrics.url: the value is not allowed"),
            ("metrics: {url: 'http://h/ m'}", "metrics.url: the value is not allowed"),
            (
                "metrics: {names: {running: ['a b']}}",
                "metrics.names.running[0]: 'a b' is not allowed",
            ),
            ("metrics: {names: {running: a}}", "metrics.names.running: is text, not a list"),
            ("residency: 'eu,us'", "residency: 'eu,us' is not allowed"),
            ("residency: ''", "residency: '' is not allowed"),
            ("residency:", "residency: is empty, not text"),
            ("upstream_model: ' x'", "upstream_model: ' x' is not allowed"),
        ],
    )
    def test_a_wrong_endpoint_is_refused(self, extra: str, problem: str) -> None:
        """The error names the key inside the endpoint."""
        assert f"endpoints[0].{problem}" in [
            line.partition(" ")[2] for line in told(endpoint(extra))
        ]

    @pytest.mark.parametrize(
        ("models", "problem"),
        [
            ("[]", "models: is empty"),
            ("m", "models: is text, not a list"),
            ("[m, m]", "models[1]: is given twice"),
            ("['']", "models[0]: '' is not allowed"),
            ('["a\\u0007"]', "models[0]: 'a\\x07' is not allowed"),
        ],
    )
    def test_wrong_models_are_refused(self, models: str, problem: str) -> None:
        """An endpoint serves at least one, and none twice."""
        assert told(endpoint(models=models)) == [f"4 endpoints[0].{problem}"]

    def test_one_upstream_name_for_several_models_is_refused(self) -> None:
        """It could only be right for one of them."""
        assert told(endpoint("upstream_model: x", models="[a, b]")) == [
            "5 endpoints[0].upstream_model: is one name for 2 models"
        ]

    def test_several_prefixed_models_of_a_peer_are_refused(self) -> None:
        """Each has another name there."""
        text = endpoint("kind: peer\npeer: {name: p, cluster_id: c}", models="[p/a, p/b]")
        (error,) = refused("cluster_id: own\n" + text)
        assert error.key == "endpoints[0].models"

    def test_a_peer_may_not_be_called_like_a_models_first_segment(self) -> None:
        """Its models could not be told from ours."""
        text = (
            "cluster_id: own\nendpoints:\n"
            "- {id: a, url: 'http://a', models: [meta/llama]}\n"
            "- {id: b, url: 'http://b', models: [meta/x], kind: peer,\n"
            "   peer: {name: meta, cluster_id: c}}"
        )
        (error,) = refused(text)
        assert (error.line, error.key) == (5, "endpoints[1].peer.name")

    def test_tls_files_come_together(self) -> None:
        """And a root that is not read is refused."""
        assert told(endpoint("tls: {client_cert_file: /c}", url="https://h")) == [
            "5 endpoints[0].tls.client_cert_file: stands without client_key_file"
        ]
        assert told(endpoint("tls: {verify: false, ca_file: /c}", url="https://h")) == [
            "5 endpoints[0].tls.ca_file: is not read while verify is false"
        ]

    @pytest.mark.parametrize(
        ("extra", "url", "warning"),
        [
            ("kind: external\napi_key: env:K", "http://h", "3 endpoints[0].url: the key is sent"),
            ("tls: {verify: false}", "https://h", "5 endpoints[0].tls.verify: whoever answers"),
            ("residency: eu", "http://h", "5 endpoints[0].residency: has no effect"),
            ("no_store_allowed: true", "http://h", "5 endpoints[0].no_store_allowed: has no eff"),
            ("engine: none\nmax_waiting: 1", "http://h", "6 endpoints[0].max_waiting: has no"),
            ("kind: peer\npeer: {name: p, cluster_id: c}", "http://h", "6 endpoints[0].peer: set"),
        ],
    )
    def test_what_is_probably_not_meant_is_warned_of(
        self, extra: str, url: str, warning: str
    ) -> None:
        """The file is accepted."""
        (text,) = warned(endpoint(extra, url=url))
        assert text.startswith(warning)

    def test_one_address_under_two_ids_is_warned_of(self) -> None:
        """Each would see a part of its load; other models at that address are fine."""
        text = "endpoints:\n- {id: a, url: 'http://h', models: [m]}\n"
        assert warned(text + "- {id: b, url: 'http://h:80', models: [m]}") == [
            "3 endpoints[1].url: is the address of 'a' too: its load is seen in halves"
        ]
        assert warned(text + "- {id: b, url: 'http://h:80', models: [n]}") == []

    @given(st.from_regex(r'[a-z:]{1,4}(\{[a-z]="[a-z\\n"]{0,4}",?\})?', fullmatch=True))
    def test_a_metric_name_that_is_accepted_can_be_read(self, name: str) -> None:
        """Whoever scrapes reads every name that configuration lets pass."""
        text = json.dumps(
            {
                "endpoints": [
                    {
                        "id": "e",
                        "url": "http://h",
                        "models": ["m"],
                        "metrics": {"names": {"running": [name]}},
                    }
                ]
            }
        )
        if not mistakes(text):
            assert parse_candidate(name).name == name.partition("{")[0]


class TestKeys:
    @pytest.mark.parametrize(
        "value",
        [
            SECRET,
            f"Bearer {SECRET}",
            f"env:{SECRET}",
            f"file:{SECRET}",
            f"env: {SECRET}",
            f"[{SECRET}]",
            f"{{{SECRET}: {SECRET}}}",
            f"{{a: {SECRET}, a: b}}",
            f"{{{SECRET}: 1, {SECRET}: 2}}",
            f"[{{{SECRET}: 1, {SECRET}: 2}}]",
            f"*{SECRET}",
            f"!{SECRET} x",
            f"!{SECRET}!x y",
            f"@{SECRET}",
            f"'{SECRET}",
            f'"\\{SECRET}"',
            f"|{SECRET}",
            f"{SECRET}: {SECRET}",
            f"&{SECRET} ''",
            f"[{SECRET}",
            "",
            "''",
            "env:",
            "file:relative",
            "42",
            "~",
        ],
    )
    def test_a_key_in_the_file_is_refused_and_not_shown(self, value: str) -> None:
        """Whatever form it has, the error does not repeat it."""
        with pytest.raises(ConfigErrors) as caught:
            parse(endpoint(f"api_key: {value}"))
        assert SECRET not in str(caught.value)
        assert caught.value.line >= 5

    @given(st.text(alphabet=st.characters(codec="ascii", categories=["L", "N", "P", "S", "Zs"])))
    def test_no_text_of_a_key_is_ever_shown(self, noise: str) -> None:
        """Not even as part of YAML that cannot be read."""
        for value in (noise + SECRET, SECRET + noise, json.dumps(noise + SECRET)):
            assert SECRET not in "".join(map(str, mistakes(endpoint(f"api_key: {value}"))))

    @pytest.mark.parametrize(
        "extra",
        [
            f"api_key: env:K\napi_key_prefix: '{SECRET}\\n'",
            f"api_key: env:K\napi_key_prefix: ['{SECRET}']",
            f'api_key: env:K\napi_key_prefix: "{SECRET}\\t"',
            f"api_key: env:K\napi_key_header: '{SECRET} x'",
            f"metrics: {{url: 'http://u:{SECRET}@h/m'}}",
            f"metrics: {{url: '{SECRET}'}}",
            f"tls: {{client_key_file: '{SECRET}'}}",
        ],
    )
    def test_secrets_in_the_wrong_place_are_not_shown(self, extra: str) -> None:
        """Values that may hold one are never repeated."""
        with pytest.raises(ConfigErrors) as caught:
            parse(endpoint(extra) + "\nunknown_so_that_it_fails: 1")
        assert SECRET not in str(caught.value)

    @pytest.mark.parametrize(
        "url",
        [
            f"http://u:{SECRET}@h",
            f"http://{SECRET}@h",
            SECRET,
            f"{SECRET}://h",
            f"http://h:{SECRET}",
        ],
    )
    def test_a_url_is_not_shown(self, url: str) -> None:
        """Its user info may be a secret."""
        with pytest.raises(ConfigErrors) as caught:
            parse(endpoint(url=f"'{url}'"))
        assert SECRET not in str(caught.value)

    @pytest.mark.parametrize(
        ("extra", "key"),
        [
            ("api_key_header: x-key", "api_key_header"),
            ("api_key_prefix: 'Key '", "api_key_prefix"),
            ("api_key: env:K\napi_key_header: 'a b'", "api_key_header"),
            ("api_key: env:K\napi_key_header: host", "api_key_header"),
            ("api_key: env:K\napi_key_header: x-llmgw-hop", "api_key_header"),
        ],
    )
    def test_a_wrong_header_for_a_key_is_refused(self, extra: str, key: str) -> None:
        """And one without a key."""
        (error,) = refused(endpoint(extra))
        assert error.key == f"endpoints[0].{key}"


class TestModels:
    def test_models_that_are_only_served_are_offered(self) -> None:
        """After the ones that the file lists."""
        text = endpoint(models="[a, b]") + "\nmodels: {b: {aliases: [c], strategy: batch}}"
        assert parse(text).models == (
            ModelEntry("b", aliases=("c",), strategy="batch"),
            ModelEntry("a"),
        )

    def test_a_split_is_read_in_order(self) -> None:
        """Whole weights and fractions."""
        text = endpoint(models="[a, b]") + "\nmodels: {s: {split: {a: 1, b: 0.5}}}"
        assert parse(text).models[0] == ModelEntry("s", split=(("a", 1.0), ("b", 0.5)))

    @pytest.mark.parametrize(
        ("models", "problem"),
        [
            ("a: {fallbacks: [b]}, b: {fallbacks: [a]}", "a.fallbacks[0]: a circle: a -> b -> a"),
            ("a: {fallbacks: [a]}", "a.fallbacks[0]: a circle: a -> a"),
            ("a: {fallbacks: [x]}", "a.fallbacks[0]: 'x' is no model"),
            ("a: {fallbacks: b}", "a.fallbacks: is text, not a list"),
            ("a: {aliases: [b]}", "a.aliases[0]: 'b' is a model's name"),
            ("a: {aliases: [x]}, b: {aliases: [x]}", "b.aliases[0]: 'x' already stands for 'a'"),
            ("a: {strategy: chta}", "a.strategy: 'chta' is no strategy, did you mean chat?"),
            ("s: {split: {a: -1}}", "s.split.a: -1 is out of range"),
            ("s: {split: {a: .nan}}", "s.split.a: nan is out of range"),
            ("s: {split: {a: x}}", "s.split.a: is text, not a number"),
            ("s: {split: {a: 0}}", "s.split: every weight is 0"),
            ("s: {split: {}}", "s.split: is empty"),
            ("s: {split: [a]}", "s.split: is a list, not a mapping"),
            ("s: {split: {x: 1}}", "s.split.x: 'x' is no model"),
            ("a: {split: {b: 1}}", "a.split: an endpoint serves this name"),
            ("a: []", "a: is a list, not a mapping"),
            ("'': {}", "'' is not allowed"),
        ],
    )
    def test_wrong_models_are_refused(self, models: str, problem: str) -> None:
        """Every reference leads somewhere, and none of them back."""
        errors = told(endpoint(models="[a, b]") + f"\nmodels: {{{models}}}")
        assert len(errors) == 1
        assert errors[0].startswith("5 models")
        assert errors[0].endswith(problem)

    def test_the_line_of_a_reference_is_its_own(self) -> None:
        """Not the model's."""
        text = endpoint(models="[a]") + "\nmodels:\n  a:\n    fallbacks:\n    - x\n    - y"
        assert [error.line for error in refused(text)] == [8, 9]

    def test_a_model_that_nobody_serves_is_warned_of(self) -> None:
        """It may be served later, by a peer."""
        text = endpoint(models="[a]") + "\nmodels:\n  a: {fallbacks: [p/x]}\n  p/x:"
        assert warned(text) == ["7 models.p/x: no endpoint serves this model"]


class TestClientsAndStrategies:
    def test_a_client_without_a_filter_that_names_it_is_warned_of(self) -> None:
        """Its policy would never apply."""
        assert warned("endpoints: []\nclients: {a: {no_store: true}}") == [
            f"2 clients: no listener.http_filters: nothing sets {headers.CLIENT}"
        ]

    @pytest.mark.parametrize(
        ("client", "problem"),
        [
            ("residency: ''", "residency: '' is not allowed"),
            ("residency: [eu]", "residency: is a list, not text"),
            ("residency: ~", "residency: is empty, not text"),
            ("no_store: 'true'", "no_store: is text, not a truth value"),
            ("no_store: ~", "no_store: is empty, not a truth value"),
            ("tags: {a: 1}", "tags.a: is a number, not text"),
            ("tags: {a: 'b,c'}", "tags.a: the value is not allowed"),
            ("tags: {a: ''}", "tags.a: the value is not allowed"),
            ("tags: {'a=b': c}", "tags.'a=b': 'a=b' is not allowed"),
            ("strategy: x", "strategy: 'x' is no strategy"),
        ],
    )
    def test_a_wrong_client_is_refused(self, client: str, problem: str) -> None:
        """A restriction that cannot be read never becomes none."""
        assert told(f"clients: {{c: {{{client}}}}}") == [f"1 clients.c.{problem}"]

    def test_a_strategy_changes_what_it_names(self) -> None:
        """The rest is its base's, which is chat unless told."""
        text = "strategies: {mine: {weights: {kv: 3}, picker: p2c}, long: {base: long-context}}"
        strategies = parse(text).strategies
        assert strategies["mine"].weights.kv == 3.0
        assert strategies["mine"].weights.queue == BUILT_IN["chat"].weights.queue
        assert strategies["mine"].picker is Picker.P2C
        assert strategies["long"].inflight_knee == 16.0
        assert strategies["long"].name == "long"
        assert set(strategies) == {*BUILT_IN, "mine", "long"}

    def test_a_built_in_strategy_can_be_adjusted(self) -> None:
        """Its base is itself as it is built in."""
        config = parse("strategies: {batch: {queue_knee: 4}}\ndefault_strategy: batch")
        assert config.strategies["batch"].queue_knee == 4.0
        assert config.strategies["batch"].weights == BUILT_IN["batch"].weights
        assert config.default_strategy == "batch"

    @pytest.mark.parametrize(
        ("strategy", "problem"),
        [
            ("base: x", "base: 'x' is no base"),
            ("picker: maxscore", "picker: 'maxscore' is no picker, did you mean max-score?"),
            ("weights: {queue: -1}", "weights.queue: -1 is out of range"),
            (
                "weights: {queue: 0, kv: 0, inflight: 0, load: 0, session: 0}",
                "weights: every weight is 0",
            ),
            ("temperature: 0", "temperature: 0 is out of range"),
            ("queue_knee: 0", "queue_knee: 0 is out of range"),
            ("session_bound_factor: 0.5", "session_bound_factor: 0.5 is out of range"),
            ("session_bound_slack: -1", "session_bound_slack: -1 is out of range"),
            ("kv_knee_ratio: 0.95", "kv_knee_ratio: a knee of 0.95 is not below the ceiling 0.9"),
            (
                "kv_ceiling_ratio: 0.4",
                "kv_ceiling_ratio: a knee of 0.5 is not below the ceiling 0.4",
            ),
        ],
    )
    def test_a_wrong_strategy_is_refused(self, strategy: str, problem: str) -> None:
        """Knees, weights and words are checked."""
        assert told(f"strategies: {{s: {{{strategy}}}}}") == [f"1 strategies.s.{problem}"]

    def test_an_unknown_default_strategy_is_refused(self) -> None:
        """The nearest is suggested."""
        assert told("default_strategy: chatt") == [
            "1 default_strategy: 'chatt' is no strategy, did you mean chat?"
        ]


class TestHeadersScrapeFederation:
    def test_header_names_are_lowered(self) -> None:
        """Envoy sends them so."""
        config = parse("headers: {model: [X-Model], session: []}")
        assert (config.headers.model, config.headers.session) == (("x-model",), ())

    @pytest.mark.parametrize(
        ("names", "problem"),
        [
            ("model: []", "model: is empty"),
            ("model: [':path']", "model[0]: the value is not allowed"),
            ("model: [x-llmgw-cluster]", "model: x-llmgw-cluster has another meaning"),
            ("session: [cookie]", "session: cookie has another meaning"),
            ("session: [X-LLMGW-Hop]", "session: x-llmgw-hop has another meaning"),
            ("session: [x-llmgw-model]", "session: x-llmgw-model is a model header"),
        ],
    )
    def test_wrong_header_names_are_refused(self, names: str, problem: str) -> None:
        """A header has one meaning."""
        assert told(f"headers: {{{names}}}") == [f"1 headers.{problem}"]

    @pytest.mark.parametrize(
        ("scrape", "key"),
        [("interval_seconds: 10", "interval_seconds"), ("stale_after_seconds: 2", "stale_after_s")],
    )
    def test_scrapes_that_are_always_stale_are_warned_of(self, scrape: str, key: str) -> None:
        """The interval must be below the age at which a scrape counts no more."""
        (warning,) = warned(f"endpoints: []\nscrape: {{{scrape}}}")
        assert warning.startswith(f"2 scrape.{key}")

    def test_federation_is_read_whole(self) -> None:
        """Both keys have their place."""
        config = parse("federation: {max_hops: 3, forward_hopped_requests: true}")
        assert config.federation == Federation(3, forward_hopped_requests=True)
        assert told("federation: {max_hops: 0}") == ["1 federation.max_hops: 0 is out of range"]


class TestYaml:
    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("", "0 (file): the file is empty"),
            ("# nothing\n", "0 (file): the file is empty"),
            ("a: 1\n---\nb: 2", "2 (file): a second document begins here"),
            (
                "cluster_id: a\ncluster_id: b",
                "2 cluster_id: the key is given twice, first in line 1",
            ),
            ("listener:\n  port: 1\n  port: 2", "3 listener.port: the key is given twice"),
            ("endpoints:\n- id: a\n  id: b", "3 endpoints[0].id: the key is given twice"),
            ("a: *b", "1 a: an alias of no anchor before it"),
            ("a: &b [*b]", "1 a[0]: an alias of no anchor before it"),
            ("a: !!str b", "1 a: a tag"),
            ("a: !x [b]", "1 a: a tag"),
            ("? [a]\n: b", "1 (file): a key that is a list or a mapping"),
            ("a: {b", "1 a: not YAML: "),
            ("a:\n\tb: 1", "2 a: not YAML: "),
            ("a: b\0", "0 (file): not YAML: a character that it does not allow"),
            ("a: \ud800", "0 (file): not YAML: a character that it does not allow"),
        ],
    )
    def test_text_that_means_nothing_is_refused_with_its_line(
        self, text: str, problem: str
    ) -> None:
        """One error, because the rest cannot be judged."""
        (error,) = told(text)
        assert error.startswith(problem)

    def test_a_merge_key_is_a_key_like_any_other(self) -> None:
        """Nothing is merged behind the reader's back."""
        text = "breaker: &b {probes: 1}\nscrape: {<<: *b}"
        assert told(text) == ["2 scrape.'<<': unknown key"]

    def test_an_alias_stands_for_what_it_names(self) -> None:
        """The value is read at each place."""
        text = "breaker: &b {threshold: 7}\n" + endpoint("breaker: *b")
        assert parse(text).endpoints[0].breaker.threshold == 7

    def test_a_short_text_cannot_mean_a_huge_tree(self) -> None:
        """Aliases count as what they stand for."""
        lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
        lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
        (error,) = refused("\n".join(lines))
        assert "aliases spelled out" in error.problem

    def test_nesting_is_bounded(self) -> None:
        """By itself, and by aliases inside each other."""
        assert "nested more than" in told("[" * 100)[0]
        assert "nested more than" in told("{a: " * 100)[0]
        assert "nest" in told("[" * 10_000)[0]
        lines = ["a0: &a0 []"]
        lines += [f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, MAX_DEPTH + 1)]
        assert "nested more than" in told("\n".join(lines))[0]

    @pytest.mark.parametrize(
        ("word", "kind"),
        [
            ("no", str),
            ("on", str),
            ("010", str),
            ("1_000", str),
            ("1:30", str),
            ("0x10", str),
            ("2024-01-01", str),
            ("9" * 19, float),
            ("9" * 99, str),
            ("'1'", str),
            ("-7", int),
            ("1e3", float),
            (".5", float),
            (".inf", float),
            ("true", bool),
            ("~", type(None)),
        ],
    )
    def test_words_are_what_they_look_like(self, word: str, kind: type) -> None:
        """YAML 1.1's surprises are text."""
        node = compose(word, "f")
        assert type(getattr(node, "value", None)) is kind

    def test_keys_are_shown_as_one_line(self) -> None:
        """Odd names are quoted, long ones cut."""
        assert joined("models", "meta/llama") == "models.meta/llama"
        assert joined("models", "a.b\n") == "models.'a.b\\n'"
        assert joined("", "a") == "a"
        assert len(shown("x" * 500)) == 62


yaml_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["m", "chat", "http://h", "engine", "peer", "env:K", "eu"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *(
                        "id",
                        "url",
                        "kind",
                        "models",
                        "peer",
                        "name",
                        "cluster_id",
                        "tls",
                        "metrics",
                    ),
                    *("names", "running", "split", "aliases", "fallbacks", "weights", "m", "tags"),
                ]
            )
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
sections = st.sampled_from(
    [
        *("cluster_id", "listener", "service", "steering", "endpoints", "models", "clients"),
        *("strategies", "default_strategy", "headers", "breaker", "scrape", "federation"),
    ]
)


class TestNothingElseIsRaised:
    @given(st.text())
    def test_any_text_is_a_configuration_or_refused(self, text: str) -> None:
        """No other error leaves the parser."""
        assert all(isinstance(error, ConfigError) for error in mistakes(text))

    @given(st.text(alphabet="ab:[]{}-&*!|>'\"%@`#,? \n\t0.~<\\", max_size=60))
    def test_any_yaml_like_text_is_a_configuration_or_refused(self, text: str) -> None:
        """Punctuation in any order."""
        assert all(isinstance(error, ConfigError) for error in mistakes(text))

    @given(st.dictionaries(sections, yaml_values, max_size=4))
    def test_any_tree_is_a_configuration_or_refused(self, tree: dict[str, object]) -> None:
        """Values of every type in every place; what is accepted makes a catalog."""
        text = json.dumps(tree)
        found = mistakes(text)
        assert all(error.problem and error.expected and error.key for error in found)
        assert not any("\n" in str(error) for error in found)
        if not found:
            Catalog(parse(text).models)
