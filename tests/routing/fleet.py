"""Small fleets for the scheduler's tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import TypedDict, Unpack

import msgspec

from extproc.routing.decision import Decision, Dispatch, Query, Unavailable
from extproc.routing.endpoint import BreakerSettings, Info, Kind, Stats, Url
from extproc.routing.filters import Filter
from extproc.routing.live import Live
from extproc.routing.registry import Registry, RegistrySettings
from extproc.routing.rows import Row, Scale
from extproc.routing.scheduler import Scheduler
from extproc.routing.sessions import Sessions
from extproc.routing.strategy import BUILT_IN, Strategy, Weights
from extproc.routing.table import Table, TableSettings

MODEL = "m"
IDLE = Stats(running=0, waiting=0, kv_usage_ratio=0.0)
NOW = 100.0


EVEN = Scale(Strategy("even", Weights(1.0, 1.0, 1.0, 1.0, 0.0, 0.0)))
ROW = Row(
    position=0,
    dropped=None,
    is_probe=False,
    is_candidate=True,
    is_stale=False,
    slow_from=None,
    inflight=8,
    inflight_tokens=0.0,
    own=0,
    stats=Stats(running=8, waiting=8, kv_usage_ratio=0.7),
    running_capacity=8,
    drain_rate=8 / 3,
    scraped_at=0.0,
)


def a_row(**changed: object) -> Row:
    """The row with something else in it."""
    return msgspec.structs.replace(ROW, **changed)


class Described(TypedDict, total=False):
    """What an endpoint may be described by."""

    kind: Kind
    engine: str
    priority: int
    weight: float
    upstream_model: str | None
    drained: bool
    residency: str | None
    max_waiting: int | None
    breaker: BreakerSettings


def an_engine(name: str, **described: Unpack[Described]) -> Info:
    """An engine of the model whose breaker opens at the first failure for 1 s, without jitter."""
    info = Info(
        id=name,
        url=Url("http", f"{name}.local", 8000),
        models=(MODEL,),
        breaker=BreakerSettings(threshold=1, jitter_ratio=0.0),
    )
    return replace(info, **described)


def an_external(name: str, **described: Unpack[Described]) -> Info:
    """A provider, which is never scraped."""
    return replace(an_engine(name, **described), kind=Kind.EXTERNAL, engine="none")


class Fleet:
    """A registry at NOW whose engines were just scraped idle, and a scheduler on it."""

    def __init__(
        self,
        *infos: Info,
        strategies: Mapping[str, Strategy] = BUILT_IN,
        default: str = "chat",
        seed: int = 1,
    ) -> None:
        self.random = Random(seed)
        self.sessions = Sessions()
        self.registry = Registry(RegistrySettings(), Random(seed))
        self.registry.replace(infos, NOW)
        self.scrape(IDLE, *(info.id for info in infos if info.is_scraped))
        self.scheduler = Scheduler(
            self.registry, strategies, self.random, self.sessions, default_strategy=default
        )

    def live(self, name: str) -> Live:
        """The endpoint's live state."""
        live = self.registry.live(name)
        assert live is not None
        return live

    def scrape(self, stats: Stats, *names: str, now: float = NOW) -> None:
        """The engines say this."""
        for name in names:
            self.registry.observe(name, stats, now)

    def teach(self, *names: str, rate: float = 2.0) -> None:
        """The engines have completed so many requests a second while busy, and are idle now."""
        busy = Stats(running=1, waiting=1, success_total=0.0)
        for name in names:
            self.registry.observe(name, busy, NOW - 2)
            self.registry.observe(name, replace(busy, success_total=rate), NOW - 1)
        self.scrape(IDLE, *names)

    def load(self, name: str, count: int, now: float = NOW) -> None:
        """So many requests run at the endpoint."""
        for _ in range(count):
            assert self.registry.follow(name, now) is not None

    def break_until(self, name: str, until: float, now: float = NOW) -> None:
        """The endpoint's breaker is open."""
        self.registry.hold(self.live(name).ticket, until, now)

    def dispatch(self, query: Query | None = None, now: float = NOW) -> Dispatch:
        """A dispatch that must succeed."""
        result = self.scheduler.dispatch(query or Query(MODEL), now)
        assert isinstance(result, Dispatch), result
        return result

    def decide(self, query: Query | None = None, now: float = NOW) -> Decision:
        """What is decided, without a request running on."""
        result = self.dispatch(query, now)
        result.grant.end(now)
        return result.decision

    def chosen(self, query: Query | None = None, now: float = NOW) -> str:
        """The id that is chosen."""
        return self.decide(query, now).chosen.id

    def refusal(self, query: Query | None = None, now: float = NOW) -> Unavailable:
        """A dispatch that must be refused."""
        result = self.scheduler.dispatch(query or Query(MODEL), now)
        assert isinstance(result, Unavailable), result
        return result

    def table(self, strategy: Strategy | None = None, now: float = NOW) -> Table:
        """A table of its own over all endpoints."""
        lives = self.registry.members(MODEL)
        left_out: tuple[Filter | None, ...] = (None,) * len(lives)
        return Table(
            MODEL,
            lives,
            strategy or BUILT_IN["chat"],
            excluded=left_out,
            settings=TableSettings(10.0, 5.0),
            now=now,
        )
