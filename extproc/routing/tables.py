"""Which table serves which requests, and when one is made or let go.

Most requests may go to every endpoint of their model and share one table per strategy. Those that
may not are served by tables of their own: what limits them decides which endpoints they leave out,
and equal choices share a table, so that what clients write does not decide how many there are.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Final

from extproc.routing.decision import Query
from extproc.routing.endpoint import Info
from extproc.routing.filters import Filter, excluded
from extproc.routing.policy import UNRESTRICTED
from extproc.routing.registry import Registry
from extproc.routing.ring import Ring
from extproc.routing.strategy import Strategy
from extproc.routing.table import Table, TableSettings

MAX_LIMITED_TABLES: Final = 32
MAX_LIMITS: Final = 1024
MAX_CLOSED_TABLES: Final = 8


class Tables:
    """The tables of a registry's models, made when first asked for.

    A strategy that is not among `strategies` is the one named `default`. At most 32 tables for
    limited requests are kept, the one used longest ago gives way. `turns` names, by model, the
    endpoint that had the last turn of a round-robin. A closed table's decisions can
    be explained until eight others have been closed.
    """

    def __init__(
        self, registry: Registry, strategies: Mapping[str, Strategy], default: str
    ) -> None:
        self._registry = registry
        self._strategies = dict(strategies)
        self._default = strategies[default]
        self._settings = TableSettings(
            registry.settings.stale_after_seconds, registry.settings.slow_start_seconds
        )
        self._version = registry.membership_version
        self._labels, self._clusters = _labels_and_clusters(registry.infos())
        self._plain: dict[tuple[str, str], Table] = {}
        self._limited: OrderedDict[Table, None] = OrderedDict()
        self._limits: OrderedDict[tuple[object, ...], Table] = OrderedDict()
        self._rings: dict[str, Ring] = {}
        self.turns: dict[str, str] = {}
        self._closed: deque[Table] = deque()

    def of(self, query: Query, now: float) -> Table | None:
        """The table for the query, maybe in need of a refresh; None where nobody has the model."""
        if self._registry.membership_version != self._version:
            self._reconcile()
        strategy = self._default
        if query.strategy is not None:
            strategy = self._strategies.get(query.strategy, strategy)
        if (
            query.subset is None
            and query.upstream_name is None
            and query.kinds is None
            and (query.restriction is UNRESTRICTED or not query.restriction.is_restricted)
        ):
            table = self._plain.get((query.model, strategy.name))
            if table is not None:
                return table
            return self._made_plain(query.model, strategy, now)
        return self._for_limited(query, strategy, now)

    def ring(self, table: Table) -> Ring:
        """The ring of all endpoints of the table's model, by the table's positions."""
        ring = self._rings.get(table.model)
        if ring is None or (ring.ids is not table.ids and ring.ids != table.ids):
            ring = self._rings[table.model] = Ring(table.ids)
        return ring

    def _made_plain(self, model: str, strategy: Strategy, now: float) -> Table | None:
        lives = self._registry.members(model)
        if not lives:
            return None
        table = self._table(model, strategy, (None,) * len(lives), now)
        self._plain[model, strategy.name] = table
        return table

    def _for_limited(self, query: Query, strategy: Strategy, now: float) -> Table | None:
        limit = (
            query.model,
            strategy.name,
            # Clients choose labels and hops freely; reduced, there are few.
            query.restriction.reduced(self._labels, self._clusters),
            query.subset,
            query.kinds,
            query.upstream_name,
        )
        table = self._limits.get(limit)
        if table is None:
            table = self._made_limited(query, strategy, now)
            if table is None:
                return None
            if len(self._limits) >= MAX_LIMITS:
                self._limits.popitem(last=False)
            self._limits[limit] = table
        if table in self._limited:
            self._limited.move_to_end(table)
        return table

    def _made_limited(self, query: Query, strategy: Strategy, now: float) -> Table | None:
        lives = self._registry.members(query.model)
        left_out = excluded(
            [live.info for live in lives],
            query.model,
            allows=query.restriction.allows,
            subset=query.subset,
            kinds=query.kinds,
            upstream_name=query.upstream_name,
        )
        if not any(left_out):
            plain = self._plain.get((query.model, strategy.name))
            return plain or self._made_plain(query.model, strategy, now)
        for table in self._limited:
            if (
                table.model == query.model
                and table.strategy.name == strategy.name
                and table.excluded == left_out
            ):
                return table
        if len(self._limited) >= MAX_LIMITED_TABLES:
            self._close(next(iter(self._limited)))
        table = self._table(query.model, strategy, left_out, now)
        self._limited[table] = None
        return table

    def _table(
        self, model: str, strategy: Strategy, left_out: tuple[Filter | None, ...], now: float
    ) -> Table:
        lives = self._registry.members(model)
        settings = self._settings
        return Table(model, lives, strategy, excluded=left_out, settings=settings, now=now)

    def _reconcile(self) -> None:
        """The tables that a change of membership has made wrong are closed."""
        registry = self._registry
        self._version = registry.membership_version
        self._labels, self._clusters = _labels_and_clusters(registry.infos())
        self._limits.clear()
        for table in [*self._plain.values(), *self._limited]:
            if not table.describes(registry.members(table.model)):
                self._close(table)
        for model in self._rings.keys() | self.turns.keys():
            if not registry.members(model):
                self._rings.pop(model, None)
                self.turns.pop(model, None)

    def _close(self, table: Table) -> None:
        table.close()
        self._plain = {key: kept for key, kept in self._plain.items() if kept is not table}
        self._limited.pop(table, None)
        for limit in [limit for limit, kept in self._limits.items() if kept is table]:
            del self._limits[limit]
        self._closed.append(table)
        if len(self._closed) > MAX_CLOSED_TABLES:
            self._closed.popleft().forget()


def _labels_and_clusters(infos: Iterable[Info]) -> tuple[frozenset[str], frozenset[str]]:
    """The residency labels that endpoints have, and the clusters behind those that are peers."""
    labels = set()
    clusters = set()
    for info in infos:
        if info.residency is not None:
            labels.add(info.residency)
        if info.peer is not None:
            clusters.add(info.peer.cluster_id)
    return frozenset(labels), frozenset(clusters)
