"""Why no endpoint takes a request, and when it is worth coming back."""

from __future__ import annotations

from extproc.routing.decision import Unavailable
from extproc.routing.filters import OVERLOAD, Filter, Refusal, UnavailableKind, usable_from
from extproc.routing.table import Table


def refusal(table: Table, now: float, scrape_seconds: float) -> Unavailable:
    """What a request is told that found no candidate in a table refreshed at `now`.

    Worked out once per change of the table: an outage must not cost more than business as usual.
    """
    known = table.refused
    if known is None or known[0] != table.changes:
        known = table.refused = (table.changes, _worked_out(table, now, scrape_seconds))
    found = known[1]
    wait = None if found.moment is None else max(0.0, found.moment - now)
    return Unavailable(found.kind, wait, found.dropped)


def _worked_out(table: Table, now: float, scrape_seconds: float) -> Refusal:
    moments = [
        moment
        for live, left_out in zip(table.lives, table.excluded, strict=True)
        if left_out is None and (moment := usable_from(live, now, scrape_seconds)) is not None
    ]
    dropped: dict[Filter, int] = {}
    for row in table.rows:
        if row.dropped is not None:
            dropped[row.dropped] = dropped.get(row.dropped, 0) + 1
    return Refusal(_kind(table), min(moments, default=None), dropped)


def _kind(table: Table) -> UnavailableKind:
    is_restricted = False
    for row, left_out in zip(table.rows, table.excluded, strict=True):
        if left_out is None:
            if row.dropped in OVERLOAD:
                return UnavailableKind.SATURATED
        elif left_out is Filter.POLICY and (row.dropped is left_out or row.dropped in OVERLOAD):
            is_restricted = True
    return UnavailableKind.RESTRICTED if is_restricted else UnavailableKind.NONE_ALIVE
