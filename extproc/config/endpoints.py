"""The `endpoints` of a configuration: each one read by itself, then all held together."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from extproc.config import grammar
from extproc.config.fields import Section
from extproc.config.values import ENGINES, SIGNALS, UNSCRAPED
from extproc.config.yaml_lines import Scalar
from extproc.routing.endpoint import Auth, BreakerSettings, Info, Kind, Peer, Tls, Url
from extproc.routing.policy import residency_label

MAX_PRIORITY: Final = 1_000_000
MAX_BREAKER_COUNT: Final = 1_000_000
MAX_WAITING: Final = 1_000_000_000
SECRET_EXPECTED: Final = "give env:NAME or file:/absolute/path; a key itself never stands here"  # noqa: S105 - an error's text

_NOT_FOR_KEYS: Final = frozenset(
    {"host", "content-length", "content-type", "transfer-encoding", "connection", "upgrade", "te"}
)
_NOWHERE: Final = Url("http", "invalid", 80)


def read_endpoint(section: Section, breaker: BreakerSettings) -> Info:
    """The endpoint that a mapping describes; `breaker` holds the defaults of its breaker.

    Mistakes are in the section's problems; the value means nothing when there are any.
    """
    endpoint_id = section.required("id", grammar.ENDPOINT_ID)
    url = _url(section)
    kind = section.member("kind", Kind.ENGINE, "kind")
    engine = _engine(section, kind)
    metrics_url, metric_names = _metrics(section, is_scraped=engine != UNSCRAPED)
    models = _models(section)
    peer = _peer(section.section("peer")) if section.has("peer") else None
    section.node("peer")
    if kind is Kind.PEER and peer is None:
        section.error("peer", "is missing", "a peer needs name and cluster_id")
    if kind is not Kind.PEER and peer is not None:
        section.error("peer", f"does not go with kind {kind}", "only kind peer has it")
    info = Info(
        id=endpoint_id,
        url=url,
        models=models,
        kind=kind,
        engine=engine,
        auth=_auth(section),
        metrics_url=metrics_url,
        metric_names=metric_names,
        pool=section.text("pool", grammar.POOL, ""),
        weight=section.number("weight", 0.0),
        priority=section.integer("priority", 0, -MAX_PRIORITY, MAX_PRIORITY),
        upstream_model=_upstream_model(section, models, peer),
        drained=section.boolean("drained", default=False),
        residency=_residency(section),
        no_store_allowed=section.boolean("no_store_allowed", default=False),
        tls=_tls(section, is_https=url.scheme == "https"),
        breaker=read_breaker(section.section("breaker"), breaker),
        max_waiting=section.integer("max_waiting", None, 0, MAX_WAITING),
        peer=peer,
    )
    section.close()
    _warn(section, info)
    return info


def read_breaker(section: Section, defaults: BreakerSettings) -> BreakerSettings:
    """The breaker settings of a mapping, each left out taken from the defaults."""
    settings = BreakerSettings(
        threshold=section.integer("threshold", defaults.threshold, 0, MAX_BREAKER_COUNT),
        base_seconds=section.number("base_seconds", defaults.base_seconds, high=86_400),
        max_seconds=section.number("max_seconds", defaults.max_seconds, high=86_400),
        jitter_ratio=section.number("jitter_ratio", defaults.jitter_ratio, high=1),
        probes=section.integer("probes", defaults.probes, 1, MAX_BREAKER_COUNT),
    )
    section.close()
    if 0 < settings.max_seconds < settings.base_seconds:
        section.error(
            "max_seconds" if section.has("max_seconds") else "base_seconds",
            f"a maximum of {settings.max_seconds:g} is below the base {settings.base_seconds:g}",
            "let max_seconds be at least base_seconds, or 0 to switch the breaker off",
        )
    return settings


def read_tls(section: Section) -> Tls:
    """How the other side of a TLS connection is verified; the caller closes the section."""
    tls = Tls(
        sni=section.text("sni", grammar.HOST, None),
        ca_file=section.text("ca_file", grammar.FILE, None),
        verify=section.boolean("verify", default=True),
        client_cert_file=section.text("client_cert_file", grammar.FILE, None),
        client_key_file=section.text("client_key_file", grammar.FILE, None),
    )
    section.both("client_cert_file", "client_key_file")
    if not tls.verify:
        section.warn("verify", "whoever answers is believed")
        if tls.ca_file is not None:
            section.error("ca_file", "is not read while verify is false", "leave out one of them")
    return tls


def check_together(
    sections: Sequence[Section], infos: Sequence[Info], cluster_id: str, *, is_default_id: bool
) -> None:
    """Mistakes between endpoints are in the problems: ids, addresses, the names of peers."""
    owners: dict[str, int] = {}
    addresses: dict[Url, Info] = {}
    own = {m for info in infos if info.kind is not Kind.PEER for m in info.models if "/" in m}
    segments = {model.partition("/")[0] for model in own}
    for section, info in zip(sections, infos, strict=True):
        if info.id in owners:
            problem = f"{info.id!r} is taken, first in line {owners[info.id]}"
            section.error("id", problem, "every endpoint has an id of its own")
        elif info.id:
            owners[info.id] = section.line
        twin = addresses.setdefault(info.url, info)
        if (
            twin is not info
            and info.url != _NOWHERE
            and not set(twin.models).isdisjoint(info.models)
        ):
            section.warn("url", f"is the address of {twin.id!r} too: its load is seen in halves")
        if info.peer is not None:
            _check_peer(section.section("peer"), info.peer, cluster_id, segments)
            if is_default_id:
                section.warn("peer", "set cluster_id: gateways with the same id refuse each other")


def _check_peer(section: Section, peer: Peer, cluster_id: str, segments: AbstractSet[str]) -> None:
    if peer.cluster_id == cluster_id:
        section.error("cluster_id", "is our own cluster_id", "give the peer's")
    if peer.name in segments:
        section.error(
            "name",
            f"{peer.name!r} is the first segment of a model that is served here",
            "choose another name for the peer",
        )


def _url(section: Section) -> Url:
    rule = grammar.Rule(lambda _: True, "give http:// or https://, a host and a port if need be")
    text = section.required("url", rule)
    problem = grammar.url_problem(text) if text else None
    if problem is not None:
        section.error("url", problem, rule.expected)
    return Url.parse(text) if text and problem is None else _NOWHERE


def _models(section: Section) -> tuple[str, ...]:
    models = section.texts("models", grammar.MODEL)
    if not section.has("models"):
        section.error("models", "is missing", "list the models that the endpoint serves")
    elif section.is_empty("models"):
        section.error("models", "is empty", "list the models that the endpoint serves")
    return models


def _engine(section: Section, kind: Kind) -> str:
    default = ENGINES[0] if kind is Kind.ENGINE else UNSCRAPED
    engine = section.choice("engine", ENGINES, default, "engine")
    if kind is not Kind.ENGINE and engine != UNSCRAPED:
        section.error("engine", f"does not go with kind {kind}", "only our own engines are scraped")
        return UNSCRAPED
    return engine


def _metrics(
    section: Section, *, is_scraped: bool
) -> tuple[str | None, tuple[tuple[str, tuple[str, ...]], ...]]:
    """The metrics page, and the names that replace the dialect's, by signal."""
    metrics = section.section("metrics")
    if section.has("metrics") and not is_scraped:
        section.error("metrics", "belongs to an endpoint that is never scraped", "leave it out")
    url = metrics.text("url", grammar.METRICS_URL, None)
    names = metrics.section("names")
    found = [(signal, names.texts(signal, grammar.METRIC)) for signal in SIGNALS]
    names.close()
    metrics.close()
    return url, tuple((signal, candidates) for signal, candidates in found if candidates)


def _auth(section: Section) -> Auth | None:
    """The key's place and its header; an error here never shows what stands in the file."""
    node = section.node("api_key")
    header = section.text("api_key_header", grammar.HEADER, "authorization").lower()
    default_prefix = "Bearer " if header == "authorization" else ""
    prefix = section.text("api_key_prefix", grammar.HEADER_PREFIX, default_prefix)
    if header in _NOT_FOR_KEYS or header.startswith(("x-llmgw-", "x-gateway-")):
        section.error("api_key_header", "carries something else", "give the header of the key")
    if node is None:
        for name in ("api_key_header", "api_key_prefix"):
            if section.has(name):
                section.error(name, "goes with api_key only", "give api_key, or leave it out")
        return None
    text = node.value if isinstance(node, Scalar) and isinstance(node.value, str) else ""
    reference = grammar.secret_ref(text)
    if reference is None:
        section.error("api_key", "is no reference to a secret", SECRET_EXPECTED)
        return None
    return Auth(reference, header, prefix)


def _upstream_model(section: Section, models: Sequence[str], peer: Peer | None) -> str | None:
    """What the endpoint calls its model; a peer's model loses the peer's name unless told."""
    upstream = section.text("upstream_model", grammar.MODEL, None)
    if upstream is not None and len(models) > 1:
        section.error(
            "upstream_model",
            f"is one name for {len(models)} models",
            "give the endpoint one model, or leave it out",
        )
    prefix = f"{peer.name}/" if peer is not None else ""
    if upstream is not None or not prefix or not any(m.startswith(prefix) for m in models):
        return upstream
    if len(models) > 1:
        section.error(
            "models",
            "a peer's endpoint has several models, some with the peer's name before them",
            "give every such model an endpoint of its own",
        )
    return models[0].removeprefix(prefix) or None


def _residency(section: Section) -> str | None:
    text = section.text("residency", grammar.RESIDENCY, None)
    return None if text is None else residency_label(text)


def _tls(section: Section, *, is_https: bool) -> Tls:
    tls = section.section("tls")
    if section.has("tls") and not is_https:
        section.error(
            "tls", "goes with an https:// url only", "make the url https, or leave it out"
        )
    settings = read_tls(tls)
    tls.close()
    return settings


def _peer(section: Section) -> Peer:
    peer = Peer(
        name=section.required("name", grammar.NAME),
        cluster_id=section.required("cluster_id", grammar.CLUSTER_ID),
        send_tags=section.boolean("send_tags", default=False),
    )
    section.close()
    return peer


def _warn(section: Section, info: Info) -> None:
    """What is allowed for this endpoint and has no effect, or an unsafe one, is warned of."""
    if info.auth is not None and info.kind is not Kind.ENGINE and info.url.scheme == "http":
        section.warn("url", "the key is sent in the clear; https:// would hide it")
    if info.kind is not Kind.EXTERNAL:
        for name in ("residency", "no_store_allowed"):
            if section.has(name):
                section.warn(name, f"has no effect on kind {info.kind}, only on external")
    if info.max_waiting is not None and not info.is_scraped:
        section.warn("max_waiting", "has no effect on an endpoint that is never scraped")
