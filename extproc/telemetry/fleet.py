"""What one endpoint is like at the moment of a scrape, read from the registry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from extproc.routing.endpoint import Snapshot
from extproc.routing.registry import Registry


class Exclusion(StrEnum):
    """Why an endpoint gets no requests, breakers aside."""

    DRAINED = "drained"
    QUARANTINED = "quarantined"
    BACKPRESSURE = "backpressure"
    DEMOTED = "demoted"


@dataclass(frozen=True, slots=True)
class Reading:
    """One endpoint as it is now; `misconfigured` counts its 401, 403, 404 and 405.

    `is_unreadable` is whether the last reading of its metrics page failed.
    """

    snapshot: Snapshot
    exclusions: frozenset[Exclusion]
    misconfigured: int
    is_unreadable: bool


def read_fleet(registry: Registry, now: float) -> Iterator[Reading]:
    """Every endpoint at `now`, sorted by id, read one at a time; nothing is changed.

    One that is dropped while this runs is left out.
    """
    for endpoint_id in registry.ids():
        live = registry.live(endpoint_id)
        if live is None:
            continue
        found = {
            Exclusion.DRAINED: live.info.drained,
            Exclusion.QUARANTINED: live.quarantined_until > now,
            Exclusion.BACKPRESSURE: live.backpressure_until > now,
            Exclusion.DEMOTED: live.demotion is not None,
        }
        yield Reading(
            live.snapshot(now, registry.settings.stale_after_seconds),
            frozenset(why for why, is_so in found.items() if is_so),
            live.misconfigured,
            live.scrape_error is not None,
        )
