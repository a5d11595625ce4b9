"""Every endpoint's live state, in memory, owned by one event loop.

Lists come in whole, observations one by one; requests acquire and end. Choosing between endpoints
is the scheduler's, deciding what an outcome means the exchange's. Nothing here waits or locks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from extproc.routing.breaker import Breaker, Permit, Verdict
from extproc.routing.demotion import (
    CONVICTING,
    COUNTED,
    Answers,
    Demotion,
    DemotionSettings,
    folded,
)
from extproc.routing.endpoint import Info, Snapshot, Stats
from extproc.routing.live import Grant, Live, Ticket

__all__ = ["Grant", "Live", "Registry", "RegistrySettings", "Ticket"]


@dataclass(frozen=True, slots=True)
class RegistrySettings:
    """When numbers are stale, how long a slow start takes, how the drain rate is smoothed.

    `drain_smoothing_ratio` is the weight of the newest rate.
    """

    stale_after_seconds: float = 10.0
    slow_start_seconds: float = 5.0
    drain_smoothing_ratio: float = 0.3
    demotion: DemotionSettings = field(default_factory=DemotionSettings)


class Registry:
    """The endpoints that there are, each with its live state.

    `membership_version` grows whenever `replace` changed anything about who is there or how it is
    described; `settings` are for reading. `random` jitters the breakers' cooldowns.
    """

    def __init__(self, settings: RegistrySettings, random: Random) -> None:
        self.settings = settings
        self.membership_version = 0
        self._random = random
        self._lives: dict[str, Live] = {}
        self._members: dict[str, tuple[Live, ...]] = {}
        self._generations = 0
        self._answers = Answers(settings.demotion.max_entries)

    # Who is there.

    def replace(self, infos: Iterable[Info], now: float) -> None:
        """Exactly these endpoints are there; of one id twice, the last counts.

        A remaining id keeps its live state, and changed breaker settings take effect on it. Where
        its address, or where and how its metrics are read, has changed, the numbers scraped so far
        are another engine's: they are forgotten, and a new address starts slowly. A demoted one
        that is described anew may be probed at once. A new id, also one that was there before, is
        a new generation, and starts slowly unless the registry was empty.
        """
        wanted = {info.id: info for info in infos}
        is_first = not self._lives
        changed = False
        for gone in self._lives.keys() - wanted.keys():
            del self._lives[gone]
            changed = True
        for info in wanted.values():
            live = self._lives.get(info.id)
            if live is None:
                self._generations += 1
                self._lives[info.id] = Live(
                    info,
                    self._generations,
                    Breaker(info.breaker, self._random),
                    None if is_first else now,
                )
                changed = True
            elif live.info != info:
                live.describe(info, now)
                changed = True
        if changed:
            self._index()

    def _index(self) -> None:
        self._lives = dict(sorted(self._lives.items()))
        members: dict[str, list[Live]] = {}
        for live in self._lives.values():
            for model in dict.fromkeys(live.info.models):
                members.setdefault(model, []).append(live)
        self._members = {model: tuple(lives) for model, lives in members.items()}
        self.membership_version += 1

    def ids(self) -> tuple[str, ...]:
        """Every endpoint's id, sorted."""
        return tuple(self._lives)

    def infos(self) -> tuple[Info, ...]:
        """Every endpoint's description, sorted by id."""
        return tuple(live.info for live in self._lives.values())

    def live(self, endpoint_id: str) -> Live | None:
        """The endpoint's live state, to read; None for an unknown id."""
        return self._lives.get(endpoint_id)

    def members(self, model: str) -> tuple[Live, ...]:
        """The endpoints that serve `model`, sorted by id; the same tuple until `replace`."""
        return self._members.get(model, ())

    def inflight(self, endpoint_id: str) -> int:
        """How many requests the endpoint holds now; 0 for an unknown id."""
        live = self._lives.get(endpoint_id)
        return 0 if live is None else live.inflight

    def last_used(self) -> dict[str, float]:
        """When each endpoint was last sent a request; those that never were are absent."""
        return {
            live.info.id: live.last_used
            for live in self._lives.values()
            if live.last_used is not None
        }

    def snapshots(self, model: str | None, now: float) -> list[Snapshot]:
        """The endpoints that serve `model` (None: all) as they are at `now`, sorted by id."""
        lives = self._lives.values() if model is None else self.members(model)
        return [live.snapshot(now, self.settings.stale_after_seconds) for live in lives]

    # What engines say.

    def observe(self, endpoint_id: str, stats: Stats, now: float) -> None:
        """The endpoint's numbers are these, as read at `now`; an unknown id changes nothing."""
        live = self._lives.get(endpoint_id)
        if live is not None:
            live.observe(stats, now, self.settings.drain_smoothing_ratio)

    def scrape_failed(self, endpoint_id: str, problem: str, now: float) -> None:  # noqa: ARG002 - time makes stale by itself; the signature is that of every event
        """The problem is shown; the last numbers stay until they are stale, the breaker untouched.

        An engine may serve well while only its metrics page is down.
        """
        live = self._lives.get(endpoint_id)
        if live is not None:
            live.scrape_error = problem
            live.touch()

    # What requests do.

    def acquire(
        self, endpoint_id: str, now: float, *, content_length: int = 0, lease_seconds: float
    ) -> Grant | None:
        """The request counts at the endpoint; None for an unknown id or when the breaker refuses.

        `content_length` is the request's size in bytes, 0 when unknown. `lease_seconds` bounds how
        long a probe may hold its slot. A demoted endpoint does not refuse: filtering it is the
        caller's, and taking its due probe puts the next one off.
        """
        live = self._lives.get(endpoint_id)
        if live is None:
            return None
        permit = live.breaker.allow(now, lease_seconds)
        if permit is None:
            return None
        return live.admit(permit, now, content_length)

    def follow(self, endpoint_id: str, now: float, *, content_length: int = 0) -> Grant | None:
        """The request that Envoy itself moved here counts, whatever the breaker says.

        None for an unknown id alone.
        """
        live = self._lives.get(endpoint_id)
        return None if live is None else live.admit(None, now, content_length)

    def verdict(
        self, ticket: Ticket, verdict: Verdict, now: float, permit: Permit | None = None
    ) -> None:
        """The endpoint's breaker knows how the attempt went; another generation's does not.

        With the grant's `permit` the probe's slot is free again. An endpoint whose breaker closes
        starts slowly.
        """
        live = self._charged(ticket)
        if live is None:
            return
        breaker = live.breaker
        epoch = breaker.epoch
        if permit is not None:
            breaker.record(permit, verdict, now)
        else:
            breaker.judge(ticket.epoch, verdict, now)
        if breaker.epoch != epoch:
            if breaker.open_until is None:
                live.slow_start_from = now
            live.touch()
        elif permit is not None and permit.is_probe:
            live.touch()

    def hold(self, ticket: Ticket, until: float, now: float) -> None:
        """The breaker is open until `until` at least: an endpoint's own retry-after as a floor.

        Later extends, earlier never shortens, at most the maximum cooldown from now. What an
        endpoint asks for counts whichever epoch the request is from.
        """
        live = self._charged(ticket)
        if live is not None:
            live.breaker.hold(until, now)
            live.touch()

    def backpressure(self, ticket: Ticket, until: float, now: float) -> None:
        """The endpoint wants no requests until `until`, at most for the maximum cooldown from now.

        A later moment extends, an earlier one never shortens.
        """
        live = self._charged(ticket)
        if live is None:
            return
        until = min(until, now + live.info.breaker.max_seconds)
        if until > max(now, live.backpressure_until):
            live.backpressure_until = until
            live.touch()

    def quarantine(self, ticket: Ticket, until: float, now: float) -> None:
        """Envoy cannot send to the endpoint, so nothing goes there until `until`.

        A later moment extends, an earlier one never shortens.
        """
        live = self._charged(ticket)
        if live is not None and until > max(now, live.quarantined_until):
            live.quarantined_until = until
            live.touch()

    def misconfigured(
        self, ticket: Ticket, status: int, path: str, now: float, *, model: str | None = None
    ) -> None:
        """The refusal is counted; the fifth in a row on a path that another one serves demotes.

        401, 403, 404 and 405 are counted and all but 405 can demote; another status is nothing.
        With `model`, only an answer under the same model is evidence, else one under any that the
        endpoint serves.
        """
        live = self._charged(ticket)
        if live is None or status not in COUNTED:
            return
        live.misconfigured += 1
        if status in CONVICTING and live.demotion is None:
            rule = self.settings.demotion
            path = folded(path)
            models = live.info.models if model is None else (model,)
            row = live.refusals.add(model or "", path)
            if row >= rule.threshold and self._answers.by_another(
                models,
                path,
                ticket.id,
                now - rule.evidence_seconds,
                is_witness=self._is_witness,
            ):
                live.demotion = Demotion(now, now + rule.probe_seconds, rule.probe_seconds)
        live.touch()

    def answered(self, ticket: Ticket, path: str, model: str, now: float) -> None:
        """The endpoint answered with 2xx: it is not demoted, and is evidence against others."""
        live = self._charged(ticket)
        if live is None:
            return
        self._answers.note(model, folded(path), ticket.id, now)
        live.refusals.end()
        if live.demotion is not None:
            live.demotion = None
            live.touch()

    def _is_witness(self, endpoint_id: str) -> bool:
        live = self._lives.get(endpoint_id)
        return live is not None and live.demotion is None

    def _charged(self, ticket: Ticket) -> Live | None:
        live = self._lives.get(ticket.id)
        return live if live is not None and live.generation == ticket.generation else None
