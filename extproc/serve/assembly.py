"""From a configuration to the core that serves it; everything but the sockets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from extproc.config.reachable import reachable
from extproc.config.values import ClientPolicy, Config, Steering
from extproc.exchange.exchange import Exchange
from extproc.exchange.facts import Names
from extproc.exchange.gateway import ClientRules, Gateway, Limits
from extproc.exchange.ledger import Flight, Ledger
from extproc.exchange.listing import Listed, Listing
from extproc.exchange.observer import Observer
from extproc.routing.catalog import Catalog
from extproc.routing.endpoint import Info, Kind
from extproc.routing.policy import client_restriction
from extproc.routing.registry import Registry, RegistrySettings
from extproc.routing.scheduler import Scheduler
from extproc.routing.sessions import Sessions


@dataclass(frozen=True, slots=True)
class Core:
    """One configuration at work: the registry that it feeds and the gateway that requests ask."""

    registry: Registry
    scheduler: Scheduler
    ledger: Ledger
    gateway: Gateway

    def exchange(self) -> Exchange:
        """A new conversation."""
        return Exchange(self.gateway)


def assemble(
    config: Config,
    *,
    observer: Observer,
    random: Random,
    is_ready: Callable[[], bool],
    now: float,
    created: int,
    on_ended: Callable[[Flight, float], None] | None = None,
) -> Core:
    """The core that serves `config`, its registry filled at `now` (monotonic seconds).

    `created` is the Unix time that the model list shows; `on_ended` is told of every request that
    is over.
    """
    registry = Registry(
        RegistrySettings(stale_after_seconds=config.scrape.stale_after_seconds), random
    )
    # An endpoint that the steering cannot name would end every request sent there.
    registry.replace(reachable(config), now)
    scheduler = Scheduler(
        registry,
        config.strategies,
        random,
        Sessions(),
        default_strategy=config.default_strategy,
        scrape_seconds=config.scrape.interval_seconds,
    )
    ledger = Ledger(registry, scheduler, observer, on_ended)
    catalog = Catalog(config.models)
    gateway = Gateway(
        cluster_id=config.cluster_id,
        instance=f"{random.getrandbits(32):08x}",
        registry=registry,
        scheduler=scheduler,
        ledger=ledger,
        catalog=catalog,
        listing=Listing(_listed(config, catalog), created),
        observer=observer,
        random=random,
        limits=Limits(
            body_limit_bytes=config.listener.body_limit_bytes,
            header_deadline_seconds=config.listener.header_deadline_seconds,
            # The cluster header names one cluster: a retry would go to the same endpoint again.
            max_attempts=1 if config.steering is Steering.CLUSTER_HEADER else config.max_attempts,
            route_attempts=config.max_attempts,
            max_hops=config.federation.max_hops,
        ),
        names=Names(model=config.headers.model, session=config.headers.session),
        clients=_client_rules(config.clients),
        foreign_names=_foreign_names(config.endpoints),
        forward_hopped_requests=config.federation.forward_hopped_requests,
        is_ready=is_ready,
    )
    return Core(registry, scheduler, ledger, gateway)


def _listed(config: Config, catalog: Catalog) -> list[Listed]:
    """What the model list offers; what peers alone serve is theirs, a split of such models too."""
    own = {
        model for info in config.endpoints if info.kind is not Kind.PEER for model in info.models
    }
    served = {model for info in config.endpoints for model in info.models}

    def is_own(name: str) -> bool:
        entry = catalog.entry(name)
        if entry is not None and entry.split:
            return any(is_own(member) for member, _ in entry.split)
        model = name if entry is None else entry.name
        return model in own or model not in served

    return [Listed(name, is_own=is_own(name)) for name in catalog.listed()]


def _client_rules(clients: Mapping[str, ClientPolicy]) -> dict[str, ClientRules]:
    return {
        name: ClientRules(
            restriction=client_restriction(policy.residency, no_store=policy.no_store),
            tags=",".join(f"{key}={value}" for key, value in policy.tags),
            strategy=policy.strategy,
        )
        for name, policy in clients.items()
    }


def _foreign_names(endpoints: tuple[Info, ...]) -> frozenset[str]:
    """The models that at least one endpoint calls otherwise."""
    return frozenset(
        model for info in endpoints for model in info.models if info.upstream_name(model) != model
    )
