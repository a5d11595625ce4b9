"""Everything that the conversations of one configuration share; replaced whole on a reload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

from extproc.exchange.facts import Names
from extproc.exchange.ledger import Ledger
from extproc.exchange.listing import Listing
from extproc.exchange.observer import Observer
from extproc.routing.catalog import Catalog
from extproc.routing.policy import UNRESTRICTED, Restriction
from extproc.routing.registry import Registry
from extproc.routing.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class ClientRules:
    """What hangs on one client identity, in the form that requests need."""

    restriction: Restriction
    tags: str
    strategy: str | None


NO_RULES: Final = ClientRules(UNRESTRICTED, "", None)


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers that every request is held to.

    `header_deadline_seconds` is how long one attempt may take to begin its answer, `max_attempts`
    how many endpoints may be tried, `route_attempts` how many attempts Envoy makes unless told
    otherwise.
    """

    body_limit_bytes: int
    header_deadline_seconds: float
    max_attempts: int
    route_attempts: int
    max_hops: int


@dataclass(frozen=True, slots=True)
class Gateway:
    """The collaborators and settings of an exchange.

    `instance` makes decision ids of several processes differ; `foreign_names` are the models that
    at least one endpoint calls otherwise, so that their body may have to be rewritten.
    """

    cluster_id: str
    instance: str
    registry: Registry
    scheduler: Scheduler
    ledger: Ledger
    catalog: Catalog
    listing: Listing
    observer: Observer
    random: Random
    limits: Limits
    names: Names
    clients: Mapping[str, ClientRules]
    foreign_names: frozenset[str]
    forward_hopped_requests: bool
    is_ready: Callable[[], bool]
