"""Which endpoints a request may not go to, and until when.

An endpoint is dropped by the first filter that it does not pass; what a request itself rules out
comes after what the endpoint's own state does. Reading changes nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from math import inf, nextafter
from typing import Final

from extproc.routing.endpoint import Info, Kind
from extproc.routing.live import Live


class Filter(StrEnum):
    """Why an endpoint of the model is no candidate, in the order in which filters are asked.

    DRAINED: configured so. BREAKER: open, or every probe slot taken. QUARANTINE: Envoy cannot send
    there. DEMOTION: it refuses what another endpoint serves. BACKPRESSURE: it asked for a pause.
    SATURATED: more waiting than its `max_waiting`. POLICY: the request's restriction. SUBSET: not
    among the endpoints the request is limited to. KIND, UPSTREAM_NAME: of another kind, or calls
    the model otherwise, than the request demands. PRIORITY: a higher pool has a usable endpoint.
    """

    DRAINED = "drained"
    BREAKER = "breaker"
    QUARANTINE = "quarantine"
    DEMOTION = "demotion"
    BACKPRESSURE = "backpressure"
    SATURATED = "saturated"
    POLICY = "policy"
    SUBSET = "subset"
    KIND = "kind"
    UPSTREAM_NAME = "upstream_name"
    PRIORITY = "priority"


class UnavailableKind(StrEnum):
    """Why no endpoint takes a request.

    NO_MEMBERS: the model has none. SATURATED: some are alive and each is overloaded. RESTRICTED:
    only endpoints that the request's restriction forbids could serve it. NONE_ALIVE: the rest.
    """

    NO_MEMBERS = "no_members"
    SATURATED = "saturated"
    RESTRICTED = "restricted"
    NONE_ALIVE = "none_alive"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no endpoint takes a request, and from when on that may change.

    `moment` is None where none is known; `dropped` counts endpoints by filter.
    """

    kind: UnavailableKind
    moment: float | None
    dropped: Mapping[Filter, int]


OVERLOAD: Final = frozenset({Filter.BACKPRESSURE, Filter.SATURATED})
"""Filters that an endpoint is alive behind."""


def state(  # noqa: PLR0911 - one return for each filter
    live: Live, now: float, stale_after_seconds: float
) -> tuple[Filter | None, bool]:
    """The filter that the endpoint's own state drops it by, and whether a request there is a probe.

    None passes. A probe is due where a half-open breaker has a free slot, or where a demoted
    endpoint has waited long enough.
    """
    info = live.info
    if info.drained:
        return Filter.DRAINED, False
    is_probe = False
    breaker = live.breaker
    if breaker.open_until is not None:
        if not breaker.free_probes(now):
            return Filter.BREAKER, False
        is_probe = True
    if now < live.quarantined_until:
        return Filter.QUARANTINE, False
    demotion = live.demotion
    if demotion is not None:
        if not demotion.is_probe_due(now):
            return Filter.DEMOTION, False
        is_probe = True
    if now < live.backpressure_until:
        return Filter.BACKPRESSURE, False
    if info.max_waiting is not None:
        waiting = live.stats.waiting
        if (
            waiting is not None
            and waiting > info.max_waiting
            and not live.is_stale(now, stale_after_seconds)
        ):
            return Filter.SATURATED, False
    return None, is_probe


def next_change(
    live: Live, now: float, stale_after_seconds: float, slow_start_seconds: float
) -> float:
    """A moment after `now` before which time alone changes nothing here; infinity for never."""
    change = live.breaker.next_change(now)
    moment = inf if change is None else change
    if now < live.quarantined_until < moment:
        moment = live.quarantined_until
    if now < live.backpressure_until < moment:
        moment = live.backpressure_until
    demotion = live.demotion
    if demotion is not None and now < demotion.next_probe_at < moment:
        moment = demotion.next_probe_at
    scraped_at = live.scraped_at
    if scraped_at is not None and now - scraped_at <= stale_after_seconds:
        # It is stale when the time is past, not when it is reached.
        moment = min(moment, max(scraped_at + stale_after_seconds, nextafter(now, inf)))
    started = live.slow_start_from
    if started is not None and now < started + slow_start_seconds < moment:
        moment = started + slow_start_seconds
    return moment


def usable_from(live: Live, now: float, scrape_seconds: float) -> float | None:
    """The moment at which everything that keeps the endpoint away has ended; None if none is known.

    One with too many waiting may have fewer at its next scrape, `scrape_seconds` after its last.
    """
    if live.info.drained:
        return None
    moment = max(now, live.quarantined_until, live.backpressure_until)
    breaker = live.breaker
    if breaker.open_until is not None and not breaker.free_probes(now):
        moment = max(moment, breaker.next_change(now) or now)
    if live.demotion is not None:
        moment = max(moment, live.demotion.next_probe_at)
    limit = live.info.max_waiting
    if limit is not None and live.scraped_at is not None and (live.stats.waiting or 0) > limit:
        moment = max(moment, live.scraped_at + scrape_seconds)
    return moment


def excluded(
    infos: Sequence[Info],
    model: str,
    *,
    allows: Callable[[Info], bool],
    subset: AbstractSet[str] | None,
    kinds: AbstractSet[Kind] | None,
    upstream_name: str | None,
) -> tuple[Filter | None, ...]:
    """For each endpoint the filter by which the request rules it out, None where it does not.

    `allows` is the request's policy; `subset` holds authorities (`host:port`) or ids.
    """

    def reason(info: Info) -> Filter | None:
        if not allows(info):
            return Filter.POLICY
        if subset is not None and info.id not in subset and info.url.authority not in subset:
            return Filter.SUBSET
        if kinds is not None and info.kind not in kinds:
            return Filter.KIND
        if upstream_name is not None and info.upstream_name(model) != upstream_name:
            return Filter.UPSTREAM_NAME
        return None

    return tuple(map(reason, infos))
