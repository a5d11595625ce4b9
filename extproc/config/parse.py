"""The text of `llmgw.yaml` to a `Config`, or everything that is wrong with it.

No I/O: files that the text names are not looked for, and secrets are references to the end.
"""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType
from typing import Final

from extproc import headers
from extproc.config import grammar
from extproc.config.endpoints import check_together, read_breaker, read_endpoint, read_tls
from extproc.config.fields import Section, plain
from extproc.config.names import read_clients, read_models, read_strategies
from extproc.config.problems import ConfigErrors, Problems
from extproc.config.values import (
    DEFAULT_CLUSTER_ID,
    Config,
    Federation,
    HeaderNames,
    Listener,
    Scrape,
    Service,
    ServiceTls,
    Steering,
    Transport,
)
from extproc.config.yaml_lines import Entries, Items, compose
from extproc.errors import ConfigError
from extproc.routing.endpoint import BreakerSettings

MIN_BODY_BYTES: Final = 1024
# Envoy's and gRPC's own limits are 32-bit numbers; half of that leaves room for framing.
MAX_BODY_BYTES: Final = 1024 * 1024 * 1024
MAX_HOPS: Final = 64
MAX_ATTEMPTS: Final = 10
DAY_SECONDS: Final = 86_400.0

_MEANT_OTHERWISE: Final = (
    headers.HOP,
    headers.RESIDENCY,
    headers.NO_STORE,
    headers.TAGS,
    headers.REQUEST_ID,
    "content-length",
    "content-type",
    "content-encoding",
    "host",
    "upgrade",
)


def parse(text: str, file: str = "llmgw.yaml") -> Config:
    """The configuration that `text` describes; `file` is its name in errors.

    Raises:
        ConfigErrors: every mistake that can be told at once, in the order of the lines. None of
            them shows a secret, a URL or the path of a file.
    """
    root = compose(text, file)
    if not isinstance(root, Entries):
        error = ConfigError(file, root.line, "(file)", "is no mapping", "give keys with values")
        raise ConfigErrors([error])
    problems = Problems(file)
    config = _config(Section(root, "", problems), file)
    problems.raise_if_any()
    return config


def _config(top: Section, file: str) -> Config:
    cluster_id = top.text("cluster_id", grammar.CLUSTER_ID, DEFAULT_CLUSTER_ID)
    breaker = read_breaker(top.section("breaker"), BreakerSettings())
    sections = list(top.sections("endpoints"))
    if not sections and not top.has("endpoints"):
        top.warn("endpoints", "there is none: requests are refused until one is added")
    infos = tuple(read_endpoint(section, breaker) for section in sections)
    check_together(sections, infos, cluster_id, is_default_id=not top.has("cluster_id"))
    strategies = read_strategies(top)
    listener = _listener(top.section("listener"))
    clients = read_clients(top, strategies)
    if clients and not listener.http_filters:
        top.warn("clients", f"no listener.http_filters: nothing sets {headers.CLIENT}")
    config = Config(
        cluster_id=cluster_id,
        endpoints=infos,
        models=read_models(top, infos, strategies),
        file=file,
        listener=listener,
        service=_service(top.section("service")),
        steering=top.member("steering", Steering.PRIORITY_GROUP, "steering"),
        strategies=MappingProxyType(strategies),
        default_strategy=top.choice("default_strategy", strategies, "chat", "strategy"),
        headers=_headers(top.section("headers")),
        clients=MappingProxyType(clients),
        breaker=breaker,
        scrape=_scrape(top.section("scrape")),
        federation=_federation(top.section("federation")),
        max_attempts=top.integer("max_attempts", 3, 1, MAX_ATTEMPTS),
        warnings=top.problems.warnings,
    )
    top.close()
    return config


def _listener(section: Section) -> Listener:
    default = Listener()
    tls = section.section("tls")
    listener = Listener(
        host=section.text("host", grammar.LISTEN_IP, default.host),
        port=section.integer("port", default.port, 1, grammar.MAX_PORT),
        admin_host=section.text("admin_host", grammar.LISTEN_IP, default.admin_host),
        admin_port=section.integer("admin_port", default.admin_port, 1, grammar.MAX_PORT),
        tls_cert_file=tls.text("cert_file", grammar.FILE, None),
        tls_key_file=tls.text("key_file", grammar.FILE, None),
        body_limit_bytes=section.integer(
            "body_limit_bytes", default.body_limit_bytes, MIN_BODY_BYTES, MAX_BODY_BYTES
        ),
        header_deadline_seconds=section.positive(
            "header_deadline_seconds", default.header_deadline_seconds, DAY_SECONDS
        ),
        idle_timeout_seconds=section.positive(
            "idle_timeout_seconds", default.idle_timeout_seconds, DAY_SECONDS
        ),
        http_filters=_http_filters(section),
    )
    tls.close()
    tls.both("cert_file", "key_file")
    section.close()
    if listener.port == listener.admin_port:
        section.error("admin_port", "is the listener's own port", "choose another port")
    if listener.idle_timeout_seconds <= listener.header_deadline_seconds:
        section.warn(
            "idle_timeout_seconds",
            "is not above header_deadline_seconds: it cuts a request before it can be retried",
        )
    return listener


def _http_filters(section: Section) -> tuple[dict[str, object], ...]:
    """Envoy filters as they stand in the file; Envoy judges what is in them."""
    node = section.node("http_filters")
    if node is None:
        return ()
    if not isinstance(node, Items):
        section.error("http_filters", "is no list", "give a list of Envoy HTTP filters")
        return ()
    filters: list[dict[str, object]] = []
    for item in node.items:
        value = plain(item)
        if (
            isinstance(value, dict)
            and isinstance(value.get("name"), str)
            and "typed_config" in value
        ):
            filters.append(value)
        else:
            section.error(
                "http_filters",
                f"the filter in line {item.line} has no name or no typed_config",
                "give every filter both, as Envoy has them",
            )
    return tuple(filters)


def _service(section: Section) -> Service:
    default = Service()
    address = section.text("address", grammar.SERVICE_ADDRESS, default.address)
    is_local = grammar.is_on_this_machine(address) and not section.has("tls")
    service = Service(
        transport=section.member(
            "transport", default.transport if is_local else Transport.GRPCIO, "transport"
        ),
        address=address,
        envoy_address=section.text("envoy_address", grammar.SERVICE_ADDRESS, None),
        http_address=section.text("http_address", grammar.ADDRESS, default.http_address),
        tls=_service_tls(section.section("tls")) if section.has("tls") else None,
        message_timeout_seconds=section.positive(
            "message_timeout_seconds", default.message_timeout_seconds, DAY_SECONDS
        ),
        drain_seconds=section.number("drain_seconds", default.drain_seconds, high=DAY_SECONDS),
        access_log=section.boolean("access_log", default=default.access_log),
    )
    section.node("tls")
    section.close()
    if service.http_address == service.address:
        section.error("http_address", "is the address of the service", "choose another port")
    if service.tls is not None and service.address.startswith("unix:"):
        section.error("tls", "goes with host:port only", "a Unix socket needs no TLS; leave it out")
    elif service.transport is Transport.FASTLANE and not is_local:
        section.error(
            "transport",
            "fastlane has no TLS and serves this machine only",
            "set transport: grpcio, or listen on unix:/path or 127.0.0.1 without tls",
        )
    return service


def _service_tls(section: Section) -> ServiceTls:
    envoy = read_tls(section)
    tls = ServiceTls(
        sni=envoy.sni,
        ca_file=envoy.ca_file,
        verify=envoy.verify,
        client_cert_file=envoy.client_cert_file,
        client_key_file=envoy.client_key_file,
        cert_file=section.required("cert_file", grammar.FILE),
        key_file=section.required("key_file", grammar.FILE),
        client_ca_file=section.text("client_ca_file", grammar.FILE, None),
    )
    section.close()
    if tls.client_ca_file is not None and tls.client_cert_file is None:
        section.error(
            "client_ca_file",
            "demands a certificate of Envoy, and it has none",
            "give client_cert_file and client_key_file",
        )
    return tls


def _headers(section: Section) -> HeaderNames:
    default = HeaderNames()
    model = section.texts("model", grammar.HEADER, default.model)
    session = section.texts("session", grammar.HEADER, default.session)
    section.close()
    names = HeaderNames(_lowered(model), _lowered(session))
    if section.is_empty("model"):
        section.error("model", "is empty", "name at least one header")
    taken = {*headers.STRIPPED_AT_THE_EDGE, *headers.CREDENTIALS, *_MEANT_OTHERWISE}
    _refuse(section, "model", names.model, taken, "has another meaning")
    _refuse(section, "session", names.session, taken, "has another meaning")
    _refuse(section, "session", names.session, set(names.model), "is a model header")
    return names


def _refuse(
    section: Section, name: str, listed: Collection[str], taken: Collection[str], why: str
) -> None:
    for header in listed:
        if header in taken:
            section.error(name, f"{header} {why}", "name another header")


def _lowered(names: Collection[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.lower() for name in names))


def _scrape(section: Section) -> Scrape:
    default = Scrape()
    scrape = Scrape(
        interval_seconds=section.positive("interval_seconds", default.interval_seconds),
        timeout_seconds=section.positive("timeout_seconds", default.timeout_seconds),
        body_limit_bytes=section.integer(
            "body_limit_bytes", default.body_limit_bytes, MIN_BODY_BYTES, MAX_BODY_BYTES
        ),
        stale_after_seconds=section.positive("stale_after_seconds", default.stale_after_seconds),
    )
    section.close()
    if scrape.interval_seconds >= scrape.stale_after_seconds:
        name = "interval_seconds" if section.has("interval_seconds") else "stale_after_seconds"
        section.warn(
            name,
            f"scrapes every {scrape.interval_seconds:g} s are stale after"
            f" {scrape.stale_after_seconds:g} s: load is never known",
        )
    return scrape


def _federation(section: Section) -> Federation:
    default = Federation()
    federation = Federation(
        max_hops=section.integer("max_hops", default.max_hops, 1, MAX_HOPS),
        forward_hopped_requests=section.boolean(
            "forward_hopped_requests", default=default.forward_hopped_requests
        ),
    )
    section.close()
    return federation
