"""The whole configuration as values; every default that a user can change stands here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from extproc import headers
from extproc.routing.catalog import ModelEntry
from extproc.routing.endpoint import BreakerSettings, Info, Tls
from extproc.routing.policy import DEFAULT_MAX_HOPS, Restriction, client_restriction
from extproc.routing.strategy import BUILT_IN, Strategy

UNSCRAPED: Final = "none"
ENGINES: Final = ("vllm", "sglang", "tgi", "trtllm", "triton", "lmdeploy", "llamacpp", UNSCRAPED)
SIGNALS: Final = (
    "running",
    "waiting",
    "kv_usage",
    "block_size",
    "block_count",
    "prompt_tokens",
    "generation_tokens",
    "success",
)
DEFAULT_CLUSTER_ID: Final = "llmgw"


class Steering(StrEnum):
    """How Envoy is told where a request goes."""

    PRIORITY_GROUP = "priority-group"
    CLUSTER_HEADER = "cluster-header"
    ENDPOINT_PICKER = "endpoint-picker"


class Transport(StrEnum):
    """Which implementation serves the ext_proc stream."""

    FASTLANE = "fastlane"
    GRPCIO = "grpcio"


@dataclass(frozen=True, slots=True)
class Listener:
    """Where Envoy listens, and its limits.

    `body_limit_bytes` is shared by Envoy's buffer, the gRPC receive limit and our parser.
    `http_filters` are Envoy HTTP filters, verbatim, placed before ours: authentication that sets
    the trusted client header.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    admin_host: str = "127.0.0.1"
    admin_port: int = 9901
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    body_limit_bytes: int = 32 * 1024 * 1024
    header_deadline_seconds: float = 600.0
    idle_timeout_seconds: float = 660.0
    http_filters: tuple[Mapping[str, object], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTls(Tls):
    """TLS between Envoy and the service: what is inherited is Envoy's side, the rest the service's.

    The service shows `cert_file` and `key_file`; with `client_ca_file` it demands a certificate of
    Envoy, which is then `client_cert_file`.
    """

    cert_file: str
    key_file: str
    client_ca_file: str | None = None


@dataclass(frozen=True, slots=True)
class Service:
    """How Envoy reaches the service and how the service ends.

    `address` is `unix:/path` or `host:port`; `envoy_address` is what Envoy dials when that differs
    (a container's name, say). `http_address` serves /healthz, /ready and /metrics.
    """

    transport: Transport = Transport.FASTLANE
    address: str = "127.0.0.1:9002"
    envoy_address: str | None = None
    http_address: str = "127.0.0.1:9090"
    tls: ServiceTls | None = None
    message_timeout_seconds: float = 1.0
    drain_seconds: float = 20.0
    access_log: bool = True


@dataclass(frozen=True, slots=True)
class Scrape:
    """How engines' metrics are read; all times in seconds."""

    interval_seconds: float = 2.0
    timeout_seconds: float = 1.5
    body_limit_bytes: int = 8 * 1024 * 1024
    stale_after_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class HeaderNames:
    """Which request headers are read, first match wins; lower case."""

    model: tuple[str, ...] = headers.MODEL
    session: tuple[str, ...] = headers.SESSION


@dataclass(frozen=True, slots=True)
class ClientPolicy:
    """What hangs on one client identity: it can only restrict, tag and choose a strategy."""

    residency: str | None = None
    no_store: bool = False
    tags: tuple[tuple[str, str], ...] = ()
    strategy: str | None = None

    @property
    def restriction(self) -> Restriction:
        """What this policy keeps the client's requests off."""
        return client_restriction(self.residency, no_store=self.no_store)


@dataclass(frozen=True, slots=True)
class Federation:
    """Limits on requests that pass through several gateways."""

    max_hops: int = DEFAULT_MAX_HOPS
    forward_hopped_requests: bool = False


@dataclass(frozen=True, slots=True)
class ConfigWarning:
    """Something that is allowed and probably not meant; `line` is 1-based, 0 for no line."""

    line: int
    key: str
    text: str


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that `llmgw.yaml` says; `file` is where it was read from.

    `models` has an entry for every name that an endpoint serves. `strategies` holds the built-in
    ones too. Two configurations that differ in their warnings only are equal.
    """

    cluster_id: str
    endpoints: tuple[Info, ...]
    models: tuple[ModelEntry, ...]
    file: str = "llmgw.yaml"
    listener: Listener = field(default_factory=Listener)
    service: Service = field(default_factory=Service)
    steering: Steering = Steering.PRIORITY_GROUP
    strategies: Mapping[str, Strategy] = field(default_factory=lambda: BUILT_IN)
    default_strategy: str = "chat"
    headers: HeaderNames = field(default_factory=HeaderNames)
    clients: Mapping[str, ClientPolicy] = field(default_factory=dict)
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    scrape: Scrape = field(default_factory=Scrape)
    federation: Federation = field(default_factory=Federation)
    max_attempts: int = 3
    warnings: tuple[ConfigWarning, ...] = field(default=(), compare=False)
