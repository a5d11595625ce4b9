"""Which endpoint serves a request: filter, score, pick, acquire.

What an outcome means is not its business; it only remembers where sessions are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from random import Random
from typing import Final

from extproc.routing import affinity
from extproc.routing.affinity import Bonus
from extproc.routing.decision import (
    Decision,
    Dispatch,
    Explanation,
    Query,
    Unavailable,
    explain,
)
from extproc.routing.filters import UnavailableKind
from extproc.routing.pickers import pick
from extproc.routing.pool import Pool
from extproc.routing.ranking import Ranking, leaders
from extproc.routing.refusal import refusal
from extproc.routing.registry import Registry
from extproc.routing.sessions import Sessions
from extproc.routing.strategy import Picker, Strategy
from extproc.routing.table import Table
from extproc.routing.tables import Tables

__all__ = ["Dispatch", "Query", "Scheduler", "Unavailable", "UnavailableKind"]

MAX_DECISIONS: Final = 1024
_NOBODY: Final[frozenset[int]] = frozenset()


class Scheduler:
    """Sends requests to the endpoints of a registry.

    `strategies` must hold the one named `default_strategy`. `sessions` is where sessions are
    remembered; `decisions` are the last 1024, oldest first. `scrape_seconds` is the usual time
    between two scrapes, read only where a client is told when to come back.
    """

    def __init__(
        self,
        registry: Registry,
        strategies: Mapping[str, Strategy],
        random: Random,
        sessions: Sessions,
        *,
        default_strategy: str = "chat",
        scrape_seconds: float = 2.0,
    ) -> None:
        self.decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        self._registry = registry
        self._random = random
        # A preview must not change what the next request draws.
        self._preview_random = Random(0)  # noqa: S311 - breaks ties, guards nothing
        self._sessions = sessions
        self._scrape_seconds = scrape_seconds
        self._tables = Tables(registry, strategies, default_strategy)
        self._number = 0

    def dispatch(self, query: Query, now: float) -> Dispatch | Unavailable:
        """The request counts at the best endpoint and its session is there, or nobody takes it.

        The endpoint's breaker has the last word: where it refuses, the next candidate is tried.
        """
        table = self._tables.of(query, now)
        if table is None:
            return Unavailable(UnavailableKind.NO_MEMBERS, None, {})
        table.refresh(now)
        refused: AbstractSet[int] = _NOBODY
        while True:
            decision = self._decide(table, query, now, random=self._random, refused=refused)
            if decision is None:
                return refusal(table, now, self._scrape_seconds)
            chosen = decision.tickets[0].id
            grant = self._registry.acquire(
                chosen,
                now,
                content_length=query.content_length,
                lease_seconds=query.lease_seconds,
            )
            if grant is not None:
                break
            refused = {*refused, table.position_of[chosen]}
        self._number = decision.number
        self.decisions.append(decision)
        if query.session is not None:
            self._sessions.remember(query.session, chosen, now)
        if table.strategy.picker is Picker.ROUND_ROBIN:
            self._tables.turns[query.model] = chosen
        return Dispatch(decision, grant)

    def preview(self, query: Query, now: float) -> Decision | Unavailable:
        """What `dispatch` would decide, up to how ties are drawn; nothing has changed.

        Its number is 0 and it is not among `decisions`.
        """
        table = self._tables.of(query, now)
        if table is None:
            return Unavailable(UnavailableKind.NO_MEMBERS, None, {})
        table.refresh(now)
        decision = self._decide(table, query, now, random=self._preview_random, number=0)
        return refusal(table, now, self._scrape_seconds) if decision is None else decision

    def explain(self, decision: Decision) -> Explanation | None:
        """The whole rationale, with the numbers as they were then; None when that is forgotten."""
        return explain(decision)

    def served(self, session: int, endpoint_id: str, now: float) -> None:
        """The session is where it was finally served."""
        self._sessions.remember(session, endpoint_id, now)

    def failed(self, session: int, endpoint_id: str) -> None:
        """The session is not at the endpoint that failed it."""
        self._sessions.forget(session, endpoint_id)

    def _decide(
        self,
        table: Table,
        query: Query,
        now: float,
        *,
        random: Random,
        refused: AbstractSet[int] = _NOBODY,
        number: int | None = None,
    ) -> Decision | None:
        """The decision by a fresh table, `refused` left out; None where nobody is left."""
        pool = table.candidates(refused)
        probe = table.due_probe(pool, refused) if table.probing else None
        bonuses: tuple[Bonus, ...] = ()
        if pool is None:
            if probe is None:
                return None
            positions = [probe]
        else:
            if query.session is not None:
                last = self._sessions.last(query.session, now)
                bonuses = affinity.bonuses(table, pool, query.session, last, self._tables.ring)
            others = max(0, query.max_attempts - 1)
            groups = pool.groups
            if (
                table.is_max_score
                and probe is None
                and not refused
                and not pool.slow
                and (len(groups) == 1 or not table.has_classes)
            ):
                if len(groups) > 1:
                    pool.set_offsets(table.scale.weights)
                positions = leaders(table, groups, bonuses, others + 1, random)
            else:
                ranking = Ranking(table, pool, bonuses, refused=refused, now=now, random=random)
                chosen = probe
                if chosen is None:
                    chosen = self._picked(table, pool, ranking, bonuses, random=random)
                positions = ranking.behind(chosen, others)
        chosen = positions[0]
        tickets = table.tickets
        return Decision(
            self._number + 1 if number is None else number,
            query.model,
            now,
            tuple(positions),
            tuple([tickets[position] for position in positions]),
            table.names[chosen],
            table.infos[chosen].kind,
            probe is not None,
            bonuses,
            table,
            table.changes,
        )

    def _picked(
        self,
        table: Table,
        pool: Pool,
        ranking: Ranking,
        bonuses: tuple[Bonus, ...],
        *,
        random: Random,
    ) -> int:
        usable = pool.usable
        if ranking.refused:
            usable = [position for position in usable if position not in ranking.refused]
        target = bonuses[0][0] if bonuses and bonuses[0][0] not in ranking.refused else None
        last = self._tables.turns.get(table.model, "")
        return pick(
            table.strategy,
            ranking,
            usable,
            target=target,
            after=bisect_right(table.ids, last),
            random=random,
        )
