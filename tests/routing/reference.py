"""The scheduler's rules in plain loops over the registry, with nothing kept between decisions.

It is the rules' second statement, slow and straight, that tests hold the scheduler equal to: which
endpoint and which alternatives, every score, every filter, and every draw from the Random.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from math import exp
from random import Random

from xxhash import xxh64_intdigest

from extproc.routing.decision import Query
from extproc.routing.endpoint import BreakerState, Kind
from extproc.routing.filters import Filter, UnavailableKind
from extproc.routing.live import Live
from extproc.routing.registry import Registry
from extproc.routing.sessions import Sessions
from extproc.routing.strategy import Picker, Strategy

UNIT = 2**30
SCRAPE_SECONDS = 2.0


@dataclass
class Outcome:
    """What must come out: a list of ids, or a refusal; `scores` are of the candidates, 0 to 1."""

    ids: list[str] = field(default_factory=list)
    is_probe: bool = False
    scores: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, Filter] = field(default_factory=dict)
    refusal: UnavailableKind | None = None
    retry_after_seconds: float | None = None


@dataclass
class Scored:
    """One candidate: its parts in units of 2⁻³⁰ of the whole, None where lacking."""

    position: int
    live: Live
    rel: float
    is_stale: bool
    parts: dict[str, int | None]
    bonus: int = 0
    is_slow: bool = False
    total: int = 0


def units(value: float) -> int:
    """The value in units of 2⁻³⁰, half to even."""
    return round(value * UNIT)


def shares(strategy: Strategy) -> dict[str, float]:
    """The weights scaled to a sum of 1, on the grid."""
    names = ("queue", "kv", "inflight", "load", "weight", "session")
    weights = {name: getattr(strategy.weights, name) for name in names}
    total = sum(weights.values())
    return {name: units(w / total) / UNIT if total else 0.0 for name, w in weights.items()}


def own_filter(live: Live, now: float, stale_after: float) -> Filter | None:
    """The first filter that the endpoint's own state does not pass."""
    breaker = live.breaker
    waiting, limit = live.stats.waiting, live.info.max_waiting
    checks = (
        (Filter.DRAINED, live.info.drained),
        (
            Filter.BREAKER,
            breaker.state(now) is BreakerState.OPEN
            or (breaker.state(now) is BreakerState.HALF_OPEN and breaker.free_probes(now) == 0),
        ),
        (Filter.QUARANTINE, live.quarantined_until > now),
        (Filter.DEMOTION, live.demotion is not None and now < live.demotion.next_probe_at),
        (Filter.BACKPRESSURE, live.backpressure_until > now),
        (
            Filter.SATURATED,
            limit is not None
            and waiting is not None
            and waiting > limit
            and not live.is_stale(now, stale_after),
        ),
    )
    return next((name for name, holds in checks if holds), None)


def query_filter(live: Live, query: Query) -> Filter | None:
    """The first filter by which the request itself rules the endpoint out."""
    info = live.info
    checks = (
        (Filter.POLICY, not query.restriction.allows(info)),
        (
            Filter.SUBSET,
            query.subset is not None and not {info.id, info.url.authority} & query.subset,
        ),
        (Filter.KIND, query.kinds is not None and info.kind not in query.kinds),
        (
            Filter.UPSTREAM_NAME,
            query.upstream_name is not None
            and info.upstream_name(query.model) != query.upstream_name,
        ),
    )
    return next((name for name, holds in checks if holds), None)


def ring_order(ids: list[str], key_hash: int) -> list[int]:
    """The positions as a clockwise walk from the key meets them."""
    nodes = ring_nodes(tuple(ids))
    start = bisect_left(nodes, (key_hash, -1))
    walk = [position for _, position in nodes[start:] + nodes[:start]]
    return list(dict.fromkeys(walk))


@lru_cache(maxsize=64)
def ring_nodes(ids: tuple[str, ...]) -> list[tuple[int, int]]:
    """Every virtual node's hash and position, sorted."""
    return sorted(
        (xxh64_intdigest(f"{name}#{number:02d}".encode()), position)
        for position, name in enumerate(ids)
        for number in range(64)
    )


class Reference:
    """Decides as the scheduler must, from the same registry, sessions and Random."""

    def __init__(
        self, registry: Registry, strategies: Mapping[str, Strategy], sessions: Sessions
    ) -> None:
        self.registry = registry
        self.strategies = strategies
        self.sessions = sessions
        self.turns: dict[str, str] = {}

    def decide(self, query: Query, now: float, random: Random) -> Outcome:
        """What `dispatch` must come to at `now`."""
        strategy = self.strategies.get(query.strategy or "chat", self.strategies["chat"])
        lives = list(self.registry.members(query.model))
        if not lives:
            return Outcome(refusal=UnavailableKind.NO_MEMBERS)
        outcome = Outcome()
        stale_after = self.registry.settings.stale_after_seconds
        usable: list[int] = []
        probing: list[int] = []
        for position, live in enumerate(lives):
            reason = own_filter(live, now, stale_after) or query_filter(live, query)
            if reason is not None:
                outcome.dropped[live.info.id] = reason
            elif live.breaker.open_until is not None or live.demotion is not None:
                probing.append(position)
            else:
                usable.append(position)
        top = max((lives[p].info.priority for p in usable), default=None)
        for position in usable:
            if lives[position].info.priority != top:
                outcome.dropped[lives[position].info.id] = Filter.PRIORITY
        usable = [p for p in usable if lives[p].info.priority == top]
        probes = [p for p in probing if top is None or lives[p].info.priority >= top]
        scored = self.score(lives, usable, strategy, query, now)
        outcome.scores = {one.live.info.id: one.total for one in scored.values()}
        whole = sum(map(units, shares(strategy).values()))
        outcome.scores = {name: total / (whole or 1) for name, total in outcome.scores.items()}
        ranked = [*scored.values()]
        if probes:
            chosen = min(probes, key=lambda p: (-lives[p].info.priority, p))
            outcome.is_probe = True
        elif ranked:
            chosen = self.pick(ranked, lives, strategy, query, random)
        else:
            return self.refuse(outcome, lives, query, now)
        outcome.ids = [lives[chosen].info.id]
        rest = [
            one
            for one in ranked
            if one.position != chosen
            and one.live.info.kind is lives[chosen].info.kind
            and one.live.info.upstream_name(query.model)
            == lives[chosen].info.upstream_name(query.model)
        ]
        while rest and len(outcome.ids) < query.max_attempts:
            best = self.best(rest, lives, query.model, random)
            outcome.ids.append(best.live.info.id)
            rest.remove(best)
        return outcome

    def score(
        self, lives: list[Live], usable: list[int], strategy: Strategy, query: Query, now: float
    ) -> dict[int, Scored]:
        """Every candidate with its total."""
        share = shares(strategy)
        heaviest = max(live.info.relative_weight for live in lives)
        rels = [max(1, units(live.info.relative_weight / heaviest)) / UNIT for live in lives]
        settings = self.registry.settings
        mean_inflight = sum(lives[p].inflight for p in usable) / len(usable) if usable else 0.0
        found: dict[int, Scored] = {}
        for position in usable:
            live = lives[position]
            rel = rels[position]
            is_stale = live.is_stale(now, settings.stale_after_seconds)
            n = live.inflight + live.inflight_tokens / 4000
            x = n / rel
            started = live.slow_start_from
            is_slow = started is not None and now < started + settings.slow_start_seconds
            if is_slow:
                assert started is not None
                r = (now - started) / settings.slow_start_seconds
                if r < 1.0:
                    r = max(r, 0.1)
                    x = x / r + (1.0 - r) * mean_inflight
            values = {
                "queue": None if is_stale else self.queue(live, rel, strategy),
                "kv": None if is_stale else self.kv(live, strategy),
                "load": self.load(live, n, strategy, is_stale=is_stale),
                "inflight": 1.0 / (1.0 + x / strategy.inflight_knee),
                "weight": rel,
            }
            parts = {
                name: None if value is None and share[name] else units(share[name] * (value or 0.0))
                for name, value in values.items()
            }
            found[position] = Scored(position, live, rel, is_stale, parts, is_slow=is_slow)
        for position, score in self.targets(lives, found, rels, strategy, query, now).items():
            found[position].bonus = units(share["session"] * score)
        for one in found.values():
            one.total = one.bonus
            for name, part in one.parts.items():
                one.total += self.lacking(found, one, name, share) if part is None else part
        return found

    def queue(self, live: Live, rel: float, strategy: Strategy) -> float | None:
        """The queue score."""
        stats = live.stats
        if stats.waiting is None:
            return None
        q: float = stats.waiting
        if live.running_capacity > 0 and stats.running is not None:
            free = max(0, live.running_capacity - stats.running)
            q = stats.waiting + live.dispatched - live.ended - free
        return 1.0 / (1.0 + max(0.0, q) / rel / strategy.queue_knee)

    def kv(self, live: Live, strategy: Strategy) -> float | None:
        """The KV score."""
        usage = live.stats.kv_usage_ratio
        knee, ceiling = strategy.kv_knee_ratio, strategy.kv_ceiling_ratio
        if usage is None:
            return None
        if usage >= ceiling:
            return 0.0
        return 1.0 if usage <= knee else (ceiling - usage) / (ceiling - knee)

    def load(self, live: Live, n: float, strategy: Strategy, *, is_stale: bool) -> float | None:
        """The load score."""
        if n == 0:
            return 1.0
        if is_stale or not live.drain_rate:
            return None
        return 1.0 / (1.0 + n / live.drain_rate / strategy.load_knee_seconds)

    def lacking(
        self, found: dict[int, Scored], one: Scored, name: str, share: dict[str, float]
    ) -> int:
        """What a signal that the candidate lacks counts for."""
        having = [part for other in found.values() if (part := other.parts[name]) is not None]
        mean = units(share[name] * 0.5)
        if having:
            # The exact mean, as a double, as the scheduler's exact sum by the count is.
            mean = units(float(Fraction(sum(having), UNIT)) / len(having))
        return max(0, mean - units(share[name] * 0.01)) if one.is_stale else mean

    def targets(  # noqa: PLR0917 - a private step of one algorithm
        self,
        lives: list[Live],
        found: dict[int, Scored],
        rels: list[float],
        strategy: Strategy,
        query: Query,
        now: float,
    ) -> dict[int, float]:
        """The session's targets and their scores."""
        if query.session is None or len(found) < 2 or not strategy.weights.session:
            return {}
        mean = sum(one.live.inflight for one in found.values()) / len(found)
        mean_rel = sum(one.rel for one in found.values()) / len(found)

        def is_within(position: int) -> bool:
            limit = max(1.0, strategy.session_bound_factor * mean * (rels[position] / mean_rel))
            return lives[position].inflight <= limit + strategy.session_bound_slack

        last = self.sessions.last(query.session, now)
        for position in found:
            if lives[position].info.id == last:
                return {position: 1.0} if is_within(position) else {}
        walk = [p for p in ring_order([x.info.id for x in lives], query.session) if p in found]
        within = [p for p in walk if is_within(p)][:2]
        return dict(zip(within or walk[:1], (1.0, 0.7), strict=False))

    def pick(
        self,
        scored: list[Scored],
        lives: list[Live],
        strategy: Strategy,
        query: Query,
        random: Random,
    ) -> int:
        """The position that the strategy's picker takes."""
        if strategy.picker is Picker.ROUND_ROBIN:
            last = self.turns.get(query.model, "")
            return min(scored, key=lambda s: (s.live.info.id <= last, s.live.info.id)).position
        if strategy.picker is Picker.P2C:
            return self.pick_p2c(scored, random).position
        if strategy.picker is Picker.SOFTMAX and strategy.temperature > 0:
            return self.pick_softmax(scored, strategy.temperature, random).position
        return self.best(scored, lives, query.model, random).position

    def pick_p2c(self, scored: list[Scored], random: Random) -> Scored:
        """The better of two."""
        first = max(scored, key=lambda one: one.bonus)
        if not first.bonus:
            first = scored[int(random.random() * len(scored))]
        others = [one for one in scored if one is not first]
        if not others:
            return first
        second = others[int(random.random() * len(others))]
        if first.total == second.total:
            return first if random.random() < 0.5 else second
        return max(first, second, key=lambda one: one.total)

    def pick_softmax(self, scored: list[Scored], temperature: float, random: Random) -> Scored:
        """One by rejection, or by the sum of all after 64 rejections."""
        top = max(one.total for one in scored)

        def chance(one: Scored) -> float:
            return exp((one.total - top) * (1.0 / (float(UNIT) * temperature)))

        for _ in range(64):
            one = scored[int(random.random() * len(scored))]
            if random.random() < chance(one):
                return one
        left = random.random() * sum(chance(one) for one in scored)
        for one in scored:
            left -= chance(one)
            if left < 0:
                return one
        return scored[-1]

    def best(self, scored: list[Scored], lives: list[Live], model: str, random: Random) -> Scored:
        """The best by score; of several, one drawn from a fixed order."""
        top = max(one.total for one in scored)
        tied = [one for one in scored if one.total == top]
        if len(tied) == 1:
            return tied[0]
        classes: dict[tuple[Kind, str], int] = {}
        for live in lives:
            classes.setdefault((live.info.kind, live.info.upstream_name(model)), len(classes))

        def order(one: Scored) -> tuple[int, ...]:
            if one.bonus or one.is_slow:
                return (1, one.position)
            info = one.live.info
            lacks = [one.parts[name] is None for name in ("queue", "kv", "load")]
            signature = sum(bit << number for number, bit in enumerate([*lacks, one.is_stale]))
            return (0, classes[info.kind, info.upstream_name(model)], signature, one.position)

        return sorted(tied, key=order)[int(random.random() * len(tied))]

    def refuse(self, outcome: Outcome, lives: list[Live], query: Query, now: float) -> Outcome:
        """Why nobody takes the request, and when somebody may."""
        stale_after = self.registry.settings.stale_after_seconds
        moments = []
        kind = UnavailableKind.NONE_ALIVE
        overload = {Filter.BACKPRESSURE, Filter.SATURATED}
        for live in lives:
            own, asked = own_filter(live, now, stale_after), query_filter(live, query)
            if asked is Filter.POLICY and own in {None, *overload}:
                kind = UnavailableKind.RESTRICTED
            if asked is None and not live.info.drained:
                moments.append(self.usable_from(live, now))
        for live in lives:
            if query_filter(live, query) is None and own_filter(live, now, stale_after) in overload:
                kind = UnavailableKind.SATURATED
        outcome.refusal = kind
        if moments:
            outcome.retry_after_seconds = max(0.0, min(moments) - now)
        return outcome

    def usable_from(self, live: Live, now: float) -> float:
        """When everything that keeps the endpoint away is over."""
        moments = [now, live.quarantined_until, live.backpressure_until]
        if live.demotion is not None:
            moments.append(live.demotion.next_probe_at)
        if live.breaker.open_until is not None and not live.breaker.free_probes(now):
            change = live.breaker.next_change(now)
            assert change is not None
            moments.append(change)
        limit = live.info.max_waiting
        if limit is not None and (live.stats.waiting or 0) > limit and live.scraped_at is not None:
            moments.append(live.scraped_at + SCRAPE_SECONDS)
        return max(moments)
