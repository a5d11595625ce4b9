"""Which endpoints a session prefers, and by how much.

Bounded-load consistent hashing, and a memory that only ever improves on it: what is not remembered
here, or was remembered by another replica, the ring still places well.
"""

from __future__ import annotations

from collections.abc import Callable

from extproc.routing.pool import Pool
from extproc.routing.ring import Ring, load_limit
from extproc.routing.table import Table

Bonus = tuple[int, int]
"""A position and what its session term adds, in units of 2⁻³⁰."""


def bonuses(
    table: Table, pool: Pool, session: int, last: str | None, ring: Callable[[Table], Ring]
) -> tuple[Bonus, ...]:
    """The session's targets among the candidates, the first one first; none for no preference.

    `last` is the endpoint that it is remembered at. If that is a candidate it is the only target,
    and none when it is over its load limit: then load decides, and is remembered. Otherwise the
    targets are the ring's first candidate within its limit (score 1) and its second (0.7); with
    none within, the ring's first. A single candidate needs no preference.
    """
    candidates = len(pool.usable)
    if candidates < 2 or not table.first_bonus:
        return ()
    rows = table.rows
    rels = table.rels
    pool_of = table.pool_of
    factor = table.strategy.session_bound_factor
    slack = table.strategy.session_bound_slack
    mean = pool.inflight / candidates
    mean_rel = pool.rel / candidates
    if last is not None:
        position = table.position_of.get(last, -1)
        row = rows[position]
        if position >= 0 and row.is_candidate and pool_of[position] is pool:
            limit = load_limit(mean, rels[position] / mean_rel, factor, slack)
            return ((position, table.first_bonus),) if row.inflight <= limit else ()
    first = target = -1
    for position in ring(table).targets(session):
        row = rows[position]
        if not row.is_candidate or pool_of[position] is not pool:
            continue
        if first < 0:
            first = position
        if row.inflight <= load_limit(mean, rels[position] / mean_rel, factor, slack):
            if target >= 0:
                return (target, table.first_bonus), (position, table.second_bonus)
            target = position
        candidates -= 1
        if not candidates:
            break
    return ((first if target < 0 else target, table.first_bonus),)
