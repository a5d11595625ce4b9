"""One endpoint's live state, and what one request holds of it.

The registry alone creates and changes it; the scheduler's tables read its attributes and are told
of changes through `watchers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from extproc.routing.breaker import Breaker, Permit
from extproc.routing.demotion import Demotion, Refusals
from extproc.routing.endpoint import Info, Snapshot, Stats

_TOKENS_PER_BYTE = 0.25


@dataclass(frozen=True, slots=True)
class Ticket:
    """Whom an attempt is charged to: an id, its generation, and its breaker's epoch."""

    id: str
    generation: int
    epoch: int


class Live:
    """Everything known about one endpoint now.

    `generation` tells an id from an earlier one that was removed. `inflight` is our requests
    there, `inflight_tokens` the sum of their content-length / 4; `dispatched` and `ended` count our
    requests since the last good scrape. `stats` are that scrape's, `scraped_at` its time (None:
    never), `drain_rate` completions per second (None: not learned), `most_running` the highest
    running count seen, `running_capacity` the same where requests were seen to wait at that count
    (0: not known). `quarantined_until` and `backpressure_until` are moments, 0.0 or past when not.
    `slow_start_from` is when it joined or came back, None if it never did.
    `misconfigured` counts its 401, 403, 404 and 405.

    `watchers` belongs to who watches: each pair is a set and what is added to it at every change.
    """

    __slots__ = (
        "backpressure_until",
        "breaker",
        "counted",
        "demotion",
        "dispatched",
        "drain_rate",
        "ended",
        "generation",
        "inflight",
        "inflight_tokens",
        "info",
        "last_used",
        "misconfigured",
        "most_running",
        "quarantined_until",
        "refusals",
        "running_capacity",
        "scrape_error",
        "scraped_at",
        "slow_start_from",
        "stats",
        "ticket",
        "watchers",
    )

    def __init__(
        self, info: Info, generation: int, breaker: Breaker, slow_start_from: float | None
    ) -> None:
        self.info = info
        self.generation = generation
        self.breaker = breaker
        self.slow_start_from = slow_start_from
        self.inflight = 0
        self.inflight_tokens = 0.0
        self.last_used: float | None = None
        self.quarantined_until = 0.0
        self.backpressure_until = 0.0
        self.demotion: Demotion | None = None
        self.misconfigured = 0
        self.refusals = Refusals()
        self.watchers: list[tuple[set[int], int]] = []
        # One object serves every attempt of an epoch.
        self.ticket = Ticket(info.id, generation, breaker.epoch)
        self.forget_scrapes()

    def touch(self) -> None:
        """Every watcher knows that something here has changed."""
        for dirty, position in self.watchers:
            dirty.add(position)

    def admit(self, permit: Permit | None, now: float, content_length: int) -> Grant:
        """The request counts here until its grant ends; a demoted endpoint's due probe is taken."""
        demotion = self.demotion
        if demotion is not None and demotion.is_probe_due(now):
            self.demotion = demotion.probed(now)
        ticket = self.ticket
        if ticket.epoch != self.breaker.epoch:
            ticket = Ticket(ticket.id, ticket.generation, self.breaker.epoch)
            self.ticket = ticket
        tokens = content_length * _TOKENS_PER_BYTE
        self.inflight += 1
        self.inflight_tokens += tokens
        self.dispatched += 1
        self.last_used = now
        for dirty, position in self.watchers:
            dirty.add(position)
        return Grant(self, ticket, permit, tokens)

    def describe(self, info: Info, now: float) -> None:
        """The description has changed, the live state stays; see `Registry.replace`."""
        before = self.info
        self.info = info
        if info.breaker != before.breaker:
            self.breaker.apply(info.breaker, now)
        if _numbers_from(info) != _numbers_from(before):
            self.forget_scrapes()
        if info.url != before.url:
            self.slow_start_from = now
        if self.demotion is not None:
            self.demotion = self.demotion.due(now)
        self.touch()

    def is_stale(self, now: float, stale_after_seconds: float) -> bool:
        """Whether its numbers are missing or too old; never so where there are none to read."""
        if not self.info.is_scraped:
            return False
        return self.scraped_at is None or now - self.scraped_at > stale_after_seconds

    def snapshot(self, now: float, stale_after_seconds: float) -> Snapshot:
        """The endpoint as it is at `now`; nothing is consumed."""
        return Snapshot(
            info=self.info,
            stats=self.stats,
            drain_rate=self.drain_rate,
            inflight=self.inflight,
            running_capacity=self.running_capacity,
            is_stale=self.is_stale(now, stale_after_seconds),
            age_seconds=None if self.scraped_at is None else now - self.scraped_at,
            breaker=self.breaker.state(now),
        )

    def forget_scrapes(self) -> None:
        """Nothing that scrapes said is known any more, as for an endpoint never scraped."""
        self.stats = Stats()
        self.scraped_at: float | None = None
        self.scrape_error: str | None = None
        self.drain_rate: float | None = None
        self.most_running = 0
        self.running_capacity = 0
        self.dispatched = 0
        self.ended = 0
        # The last known total of completions and when it was read.
        self.counted: tuple[float, float] | None = None

    def observe(self, stats: Stats, now: float, smoothing_ratio: float) -> None:
        """The scrape is the latest; what it teaches about capacity and drain rate is learned.

        Capacity: the highest running count, once requests waited while so many ran. A count
        without a queue says how much came, not how much fits: taken for a limit, it would make an
        engine that was nearly idle look full beside one that was never scraped at work.

        Drain rate: exponential smoothing of completed per second between scrapes, the first one
        whole; learned only while busy (waiting, or running above half the capacity, which must
        be known), so that idleness does not read as slowness. A total that went backwards is an
        engine that restarted: the rate is unknown again.
        """
        self._learn_capacity(stats)
        total = stats.success_total
        if total is not None and isfinite(total):
            self._count(total, now, smoothing_ratio, is_busy=self._is_busy(stats))
        self.stats = stats
        self.scraped_at = now
        self.scrape_error = None
        self.dispatched = 0
        self.ended = 0
        self.touch()

    def _learn_capacity(self, stats: Stats) -> None:
        running = stats.running
        if running is None or running < self.most_running:
            return
        if running > self.most_running:
            self.most_running = running
            self.running_capacity = 0  # what was taken for the limit was none
        if stats.waiting is not None and stats.waiting > 0:
            self.running_capacity = running

    def _is_busy(self, stats: Stats) -> bool:
        if stats.waiting is not None and stats.waiting > 0:
            return True
        capacity = self.running_capacity
        return stats.running is not None and 0 < capacity < 2 * stats.running

    def _count(self, total: float, now: float, smoothing_ratio: float, *, is_busy: bool) -> None:
        before = self.counted
        if before is None:
            self.counted = (total, now)
            return
        last_total, last_at = before
        if total < last_total:
            self.drain_rate = None
            self.counted = (total, now)
            return
        if now <= last_at:
            return  # two pages of one moment have no rate; the earlier pair stays the base
        self.counted = (total, now)
        if is_busy:
            rate = (total - last_total) / (now - last_at)
            if self.drain_rate is not None:
                rate = smoothing_ratio * rate + (1.0 - smoothing_ratio) * self.drain_rate
            self.drain_rate = rate


class Grant:
    """One request's place at an endpoint: it counts in-flight there until it ends.

    `ticket` is whom to charge; `permit` is the breaker's leave, None where Envoy moved the request
    here by itself; `ended_at` is None while it runs.
    """

    __slots__ = ("_live", "_tokens", "ended_at", "permit", "ticket")

    def __init__(self, live: Live, ticket: Ticket, permit: Permit | None, tokens: float) -> None:
        self._live = live
        self._tokens = tokens
        self.ticket = ticket
        self.permit = permit
        self.ended_at: float | None = None

    @property
    def is_probe(self) -> bool:
        """Whether it holds one of a half-open breaker's slots."""
        return self.permit is not None and self.permit.is_probe

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.ended_at is not None

    def end(self, now: float) -> bool:
        """The request counts no more; False where it had ended before, and nothing has changed.

        It changes the endpoint that granted it, also where the registry has dropped that one.
        """
        if self.ended_at is not None:
            return False
        self.ended_at = now
        live = self._live
        live.inflight -= 1
        live.inflight_tokens -= self._tokens
        live.ended += 1
        for dirty, position in live.watchers:
            dirty.add(position)
        return True


def _numbers_from(info: Info) -> tuple[object, ...]:
    """What decides whose numbers a scrape reads, and how."""
    return info.url, info.metrics_url, info.engine, info.metric_names, info.is_scraped
