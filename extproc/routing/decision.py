"""What a request asks of the scheduler, what it gets, and why.

A decision holds little more than references, so it costs nothing to be able to explain it: the
rationale is worked out of the table's history when somebody asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from extproc.routing import scorers
from extproc.routing.endpoint import Info, Kind
from extproc.routing.filters import Filter, UnavailableKind
from extproc.routing.grid import SCORE_SCALE
from extproc.routing.live import Grant, Ticket
from extproc.routing.policy import UNRESTRICTED, Restriction
from extproc.routing.pool import Pool
from extproc.routing.rows import KV, LOAD, QUEUE, Row
from extproc.routing.strategy import Picker, Scorer
from extproc.routing.table import Table


# Structs where a request makes one: a frozen dataclass takes ten times as long to make.
class Query(msgspec.Struct, frozen=True):
    """What one request asks for.

    `session` is the session's hash under this model, None for no affinity. `content_length` is in
    bytes, 0 when unknown. `subset` limits the request to endpoints by authority (`host:port`) or
    id, `kinds` by kind, `upstream_name` to those that call the model so. `strategy` is by name,
    None or an unknown one means the default. `max_attempts` bounds the list, `lease_seconds` how
    long a probe may hold its slot.
    """

    model: str
    session: int | None = None
    content_length: int = 0
    restriction: Restriction = UNRESTRICTED
    subset: frozenset[str] | None = None
    strategy: str | None = None
    max_attempts: int = 3
    lease_seconds: float = 600.0
    upstream_name: str | None = None
    kinds: frozenset[Kind] | None = None

    def for_upstream_name(self, name: str) -> Query:
        """The same query, limited to endpoints that call the model `name`."""
        return msgspec.structs.replace(self, upstream_name=name)


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Where a request goes: the chosen endpoint first, then what stands behind it.

    `number` counts decisions from 1; 0 is a preview. `at` is when it was made. `positions` are the
    list's places in `table`, `tickets` whom to charge. `upstream_name` is
    what every endpoint of the list calls the model, `kind` whose they all are. `bonuses` are the
    session's targets and what each got, `table` and `change` where the rationale is found.
    """

    number: int
    model: str
    at: float
    positions: tuple[int, ...]
    tickets: tuple[Ticket, ...]
    upstream_name: str
    kind: Kind
    is_probe: bool
    bonuses: tuple[tuple[int, int], ...]
    table: Table
    change: int

    @property
    def chosen(self) -> Ticket:
        """The endpoint that the request goes to first."""
        return self.tickets[0]

    @property
    def alternatives(self) -> tuple[Ticket, ...]:
        """The endpoints that further attempts go to, in order."""
        return self.tickets[1:]

    @property
    def infos(self) -> tuple[Info, ...]:
        """The descriptions of the whole list, in order."""
        infos = self.table.infos
        return tuple([infos[position] for position in self.positions])

    @property
    def clusters(self) -> tuple[str, ...]:
        """Envoy's clusters for the whole list, in order."""
        clusters = self.table.clusters
        return tuple([clusters[position] for position in self.positions])

    @property
    def authorities(self) -> tuple[str, ...]:
        """Each endpoint of the list as `host:port`, in order."""
        authorities = self.table.authorities
        return tuple([authorities[position] for position in self.positions])

    @property
    def strategy(self) -> str:
        """The name of the strategy that it was made by."""
        return self.table.strategy.name


class Dispatch(msgspec.Struct, frozen=True, gc=False):
    """A decision that counts: `grant` holds the request's place at the chosen endpoint."""

    decision: Decision
    grant: Grant


@dataclass(frozen=True, slots=True)
class Unavailable:
    """No endpoint takes the request.

    `retry_after_seconds` is the time until the soonest moment that could change it, None when none
    is known. `dropped` counts, by filter, the endpoints of the model.
    """

    kind: UnavailableKind
    retry_after_seconds: float | None
    dropped: Mapping[Filter, int]


class Basis(StrEnum):
    """What a scorer's value rests on.

    OWN: the endpoint's own numbers. MEAN: it has none, so the mean of the candidates that do.
    STALE: its own are too old, so that mean less 0.01.
    """

    OWN = "own"
    MEAN = "mean"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Term:
    """What one scorer said: `value` is 0 to 1, `weight` as the strategy has it."""

    scorer: Scorer
    value: float
    weight: float
    basis: Basis


@dataclass(frozen=True, slots=True)
class Candidate:
    """One scored endpoint: `score` is the mean of the terms' values by their weights, 0 to 1.

    `requests` is its in-flight with long prompts counted as more; `age_seconds` the time since its
    last good scrape, None if there was none. A scorer of weight 0 is not asked and has no term.
    """

    id: str
    score: float
    terms: tuple[Term, ...]
    inflight: int
    requests: float
    age_seconds: float | None
    is_slow_start: bool


@dataclass(frozen=True, slots=True)
class Dropped:
    """One endpoint that was no candidate, and the first filter that it did not pass."""

    id: str
    filter: Filter


@dataclass(frozen=True, slots=True)
class Explanation:
    """The whole rationale of one decision.

    `candidates` are by falling score, then by id; `dropped` by id; `counts` the dropped by filter.
    A probe was sent by rule, so its endpoint is neither candidate nor dropped; `probing` are all
    the endpoints where a probe was due.
    """

    number: int
    model: str
    at: float
    strategy: str
    picker: Picker
    chosen: str
    alternatives: tuple[str, ...]
    is_probe: bool
    candidates: tuple[Candidate, ...]
    dropped: tuple[Dropped, ...]
    counts: Mapping[Filter, int]
    probing: tuple[str, ...]


def explain(decision: Decision) -> Explanation | None:
    """Why it was decided so, with the numbers as they were then; None when that is forgotten."""
    table = decision.table
    rows = table.rows_at(decision.change)
    if rows is None:
        return None
    pool = table.pooled(rows)
    candidates = [_candidate(decision, pool, rows[position]) for position in pool.usable]
    dropped = tuple(
        Dropped(name, row.dropped or Filter.PRIORITY)
        for name, row, own in zip(table.ids, rows, table.pool_of, strict=True)
        if row.dropped is not None or (row.is_candidate and own.priority != pool.priority)
    )
    counts: dict[Filter, int] = {}
    for drop in dropped:
        counts[drop.filter] = counts.get(drop.filter, 0) + 1
    return Explanation(
        number=decision.number,
        model=decision.model,
        at=decision.at,
        strategy=decision.strategy,
        picker=table.strategy.picker,
        chosen=decision.chosen.id,
        alternatives=tuple(ticket.id for ticket in decision.alternatives),
        is_probe=decision.is_probe,
        candidates=tuple(sorted(candidates, key=lambda c: (-c.score, c.id))),
        dropped=dropped,
        counts=counts,
        probing=tuple(name for name, row in zip(table.ids, rows, strict=True) if row.is_probe),
    )


def _candidate(decision: Decision, pool: Pool, row: Row) -> Candidate:
    table = decision.table
    strategy = table.strategy
    shares = table.scale.weights
    scores = table.scale.scores(row, table.rels[row.position])
    inflight = scores.inflight
    if row.slow_from is not None:
        inflight = table.slow_inflight(row, pool, decision.at)
    parts = {
        Scorer.QUEUE: scores.queue,
        Scorer.KV: scores.kv,
        Scorer.LOAD: scores.load,
        Scorer.INFLIGHT: inflight,
        Scorer.WEIGHT: table.scale.constant(table.rels[row.position]),
        Scorer.SESSION: dict(decision.bonuses).get(row.position, 0) / SCORE_SCALE,
    }
    bases = dict.fromkeys(Scorer, Basis.OWN)
    lacking = (Scorer.QUEUE, QUEUE), (Scorer.KV, KV), (Scorer.LOAD, LOAD)
    for (scorer, bit), mean in zip(lacking, pool.means(shares), strict=True):
        if scores.signature & bit:
            bases[scorer] = Basis.STALE if row.is_stale else Basis.MEAN
            share = getattr(shares, scorer)
            parts[scorer] = scorers.lacking(mean, share, is_stale=row.is_stale)
    asked = {scorer: share for scorer in Scorer if (share := getattr(shares, scorer))}
    return Candidate(
        id=table.ids[row.position],
        score=sum(parts[s] for s in asked) / sum(asked.values()) if asked else 0.0,
        terms=tuple(
            Term(scorer, parts[scorer] / share, getattr(strategy.weights, scorer), bases[scorer])
            for scorer, share in asked.items()
        ),
        inflight=row.inflight,
        requests=scorers.requests(row.inflight, row.inflight_tokens),
        age_seconds=None if row.scraped_at is None else decision.at - row.scraped_at,
        is_slow_start=row.slow_from is not None,
    )
