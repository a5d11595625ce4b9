"""What is known about one endpoint: its description, its engine's numbers, its state at a moment.

Values only; the registry is where they change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit


class Kind(StrEnum):
    """Whose endpoint it is: one of our engines, an external provider, a federated peer."""

    ENGINE = "engine"
    EXTERNAL = "external"
    PEER = "peer"


class BreakerState(StrEnum):
    """Closed takes every request, open none, half-open a bounded number of probes."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When an endpoint's breaker opens and for how long.

    It opens after `threshold` consecutive failures (1 is a plain cooldown) for
    min(`base_seconds`·2ⁿ, `max_seconds`), n counting the openings without a success between them,
    times a random factor in 1 ± `jitter_ratio`. Then at most `probes` attempts at a time pass.
    """

    threshold: int = 5
    base_seconds: float = 1.0
    max_seconds: float = 60.0
    jitter_ratio: float = 0.1
    probes: int = 1


@dataclass(frozen=True, slots=True)
class Url:
    """An endpoint's address: scheme, host and port, never a path."""

    scheme: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Url:
        """The address that `text` names.

        Raises:
            ValueError: a scheme other than http and https, user info, a path, a query, a fragment,
                a missing host or a port outside 1 to 65535; the text says which.
        """
        parts = urlsplit(text)
        if parts.scheme not in {"http", "https"}:
            raise ValueError(f"scheme {parts.scheme!r} is not http or https")
        if parts.username is not None or parts.password is not None:
            raise ValueError("user info is not allowed in a URL")
        if parts.path not in {"", "/"} or parts.query or parts.fragment:
            raise ValueError("a path, query or fragment is not allowed; give scheme, host and port")
        if not parts.hostname:
            raise ValueError("the host is missing")
        port = parts.port  # urlsplit raises ValueError for one that is out of range
        if port == 0:
            raise ValueError("port 0 is not a port to connect to")
        if port is None:
            port = 443 if parts.scheme == "https" else 80
        return cls(parts.scheme, parts.hostname, port)

    @property
    def authority(self) -> str:
        """`host:port`, an IPv6 host in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


class SecretKind(StrEnum):
    """Where a secret is read from."""

    ENV = "env"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class SecretRef:
    """Where a secret is, never what it is."""

    kind: SecretKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


@dataclass(frozen=True, slots=True)
class Auth:
    """The key that an endpoint demands: the header that carries it and what precedes it there."""

    key: SecretRef
    header: str = "authorization"
    prefix: str = "Bearer "


@dataclass(frozen=True, slots=True)
class Tls:
    """How an https endpoint is verified.

    `sni` defaults to the URL's host; `ca_file` to the system's roots. `client_cert_file` and
    `client_key_file` come together.
    """

    sni: str | None = None
    ca_file: str | None = None
    verify: bool = True
    client_cert_file: str | None = None
    client_key_file: str | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """The federated gateway behind an endpoint of kind peer.

    `cluster_id` is its own id, which a request that passed through it carries in its hop header;
    `send_tags` is whether requests sent there carry the attribution tags.
    """

    name: str
    cluster_id: str
    send_tags: bool = False


@dataclass(frozen=True, slots=True)
class Info:
    """An endpoint's description, as configured.

    `engine` is the dialect of its metrics; "none" is never scraped. `weight` is its relative
    capacity (0 means 1), `priority` prefers higher pools. `upstream_model` is what the endpoint
    calls its model when that differs from the catalog's name. `residency` and `no_store_allowed`
    say what an external provider may be sent; `max_waiting` above which it counts as saturated
    (None: never). `metric_names` overrides the dialect's names, signal to candidates.
    """

    id: str
    url: Url
    models: tuple[str, ...]
    kind: Kind = Kind.ENGINE
    engine: str = "vllm"
    auth: Auth | None = None
    metrics_url: str | None = None
    metric_names: tuple[tuple[str, tuple[str, ...]], ...] = ()
    pool: str = ""
    weight: float = 0.0
    priority: int = 0
    upstream_model: str | None = None
    drained: bool = False
    residency: str | None = None
    no_store_allowed: bool = False
    tls: Tls = field(default_factory=Tls)
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    max_waiting: int | None = None
    peer: Peer | None = None

    @property
    def relative_weight(self) -> float:
        """The weight with 0 read as 1."""
        return self.weight or 1.0

    @property
    def is_scraped(self) -> bool:
        """Whether the endpoint publishes metrics that we read."""
        return self.kind is Kind.ENGINE and self.engine != "none"

    def upstream_name(self, model: str) -> str:
        """What this endpoint calls `model`."""
        return self.upstream_model or model


@dataclass(frozen=True, slots=True)
class Stats:
    """One scrape of an engine. None is unknown, and unknown is never zero.

    `running`, `waiting`: requests; `kv_usage_ratio`: 0 to 1; `block_size_tokens`, `block_count`:
    of the KV cache; the three totals are counters since the engine's start.
    """

    running: int | None = None
    waiting: int | None = None
    kv_usage_ratio: float | None = None
    block_size_tokens: int | None = None
    block_count: int | None = None
    prompt_tokens_total: float | None = None
    generation_tokens_total: float | None = None
    success_total: float | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One endpoint at one moment.

    `drain_rate` is completed requests per second (None: not learned); `running_capacity` the
    highest running count ever seen, if requests waited beside it (0: not known yet);
    `age_seconds` the time since the last good scrape (None: never).
    """

    info: Info
    stats: Stats
    drain_rate: float | None
    inflight: int
    running_capacity: int
    is_stale: bool
    age_seconds: float | None
    breaker: BreakerState
