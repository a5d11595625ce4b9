"""Random histories of a registry with a scheduler on it, held to the reference step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from reference import SCRAPE_SECONDS, Outcome, Reference

from extproc.routing.breaker import Verdict
from extproc.routing.decision import Decision, Explanation, Query, Unavailable
from extproc.routing.endpoint import BreakerSettings, Info, Kind, Peer, Stats, Url
from extproc.routing.live import Grant
from extproc.routing.policy import Restriction
from extproc.routing.registry import Registry, RegistrySettings
from extproc.routing.scheduler import Scheduler
from extproc.routing.sessions import Sessions
from extproc.routing.strategy import BUILT_IN, Picker, Strategy, Weights

MODEL = "m"
STRATEGIES = {
    **BUILT_IN,
    "all": Strategy(
        "all",
        Weights(1.0, 0.7, 1.3, 0.9, 0.4, 1.1),
        queue_knee=7.0,
        inflight_knee=9.3,
        load_knee_seconds=2.7,
        kv_knee_ratio=0.4,
    ),
    "nothing": Strategy("nothing", Weights(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)),
    "flat": Strategy("flat", Weights(1.0, 0.0, 0.0, 0.0, 0.0, 1.0), session_bound_slack=0.0),
    "p2c": Strategy("p2c", picker=Picker.P2C),
    "softmax": Strategy("softmax", picker=Picker.SOFTMAX),
    "cold": Strategy("cold", picker=Picker.SOFTMAX, temperature=0.001),
    "turns": Strategy("turns", picker=Picker.ROUND_ROBIN),
}
RESTRICTIONS = (
    Restriction(),
    Restriction(own_only=True),
    Restriction(residency=frozenset({"eu"})),
    Restriction(no_store=True),
)
SUBSETS = (
    None,
    None,
    None,
    None,
    frozenset({"e1", "e3"}),
    frozenset({"host-2:8000"}),
    frozenset({"x"}),
)
PATH = "/v1/chat/completions"


def an_info(number: int, kind: int, *, variant: int = 0) -> Info:
    """An endpoint of one of six sorts; its variants are described a little differently."""
    info = Info(
        id=f"e{number}",
        url=Url("http", f"host-{number}", 8000),
        models=(MODEL,),
        breaker=BreakerSettings(threshold=2, base_seconds=1.0, max_seconds=8.0),
        weight=(0.0, 1.0, 0.7)[(number + variant) % 3],
    )
    sorts = (
        info,
        info,
        replace(info, max_waiting=3),
        replace(info, priority=1),
        replace(info, kind=Kind.EXTERNAL, engine="none", residency="eu", upstream_model="gpt"),
        replace(
            info, kind=Kind.PEER, engine="none", peer=Peer("p", "cluster-p"), upstream_model="gpt"
        ),
    )
    return replace(sorts[kind], drained=variant == 3)


class History:
    """A registry, a scheduler and the reference, moved together.

    `kinds` are the endpoints' sorts, see `an_info`.
    """

    def __init__(self, kinds: list[int], seed: int) -> None:
        self.registry = Registry(RegistrySettings(), Random(seed))
        self.random = Random(seed + 1)
        self.sessions = Sessions(max_entries=4, ttl_seconds=20.0)
        self.scheduler = Scheduler(
            self.registry,
            STRATEGIES,
            self.random,
            self.sessions,
            scrape_seconds=SCRAPE_SECONDS,
        )
        self.reference = Reference(self.registry, STRATEGIES, self.sessions)
        self.infos = {f"e{n}": an_info(n, kind) for n, kind in enumerate(kinds)}
        self.now = 100.0
        self.replace()
        self.grants: list[tuple[Grant, Decision]] = []
        self.explained: list[tuple[Decision, Explanation]] = []

    def replace(self) -> None:
        """The registry has exactly the infos."""
        self.registry.replace(self.infos.values(), self.now)

    def an_id(self, number: int) -> str | None:
        """One of the ids there are."""
        ids = self.registry.ids()
        return ids[number % len(ids)] if ids else None

    def dispatch(self, query: Query) -> None:
        """The scheduler decides as the reference does, and explains itself with its numbers."""
        random = Random()
        random.setstate(self.random.getstate())
        expected = self.reference.decide(query, self.now, random)
        preview = self.scheduler.preview(query, self.now)
        result = self.scheduler.dispatch(query, self.now)
        assert self.random.getstate() == random.getstate()
        if isinstance(result, Unavailable):
            self.check_refusal(expected, result)
            assert preview == result
            return
        assert isinstance(preview, Decision)
        decision = result.decision
        assert [ticket.id for ticket in decision.tickets] == expected.ids
        assert result.grant.ticket == decision.chosen
        assert decision.is_probe is expected.is_probe is preview.is_probe
        for ticket in decision.tickets:
            live = self.registry.live(ticket.id)
            assert live is not None
            assert (ticket.generation, ticket.epoch) == (live.generation, live.breaker.epoch)
        explanation = self.scheduler.explain(decision)
        assert explanation is not None
        self.check_explanation(expected, explanation)
        self.grants.append((result.grant, decision))
        self.explained.append((decision, explanation))
        if decision.table.strategy.picker is Picker.ROUND_ROBIN:
            self.reference.turns[query.model] = decision.chosen.id

    def check_refusal(self, expected: Outcome, result: Unavailable) -> None:
        """The refusal is the reference's."""
        assert result.kind is expected.refusal
        assert result.retry_after_seconds == expected.retry_after_seconds
        counts = {name: [*expected.dropped.values()].count(name) for name in result.dropped}
        assert result.dropped == counts
        assert sum(counts.values()) == len(expected.dropped)

    def check_explanation(self, expected: Outcome, explanation: Explanation) -> None:
        """The rationale has the reference's scores and filters."""
        assert {c.id: c.score for c in explanation.candidates} == expected.scores
        assert all(0.0 <= c.score <= 1.0 for c in explanation.candidates)
        assert all(0.0 <= t.value <= 1.0 for c in explanation.candidates for t in c.terms)
        assert {drop.id: drop.filter for drop in explanation.dropped} == expected.dropped
        assert explanation.chosen == expected.ids[0]
        names = {c.id for c in explanation.candidates} | set(explanation.probing)
        assert names.issuperset(expected.ids)

    def check_memory(self) -> None:
        """Every decision is explained as it was when it was made, or not at all."""
        for decision, explanation in self.explained:
            is_forgotten = not decision.table.rows
            assert self.scheduler.explain(decision) == (None if is_forgotten else explanation)


Step = Callable[[History], None]


def advance(seconds: float) -> Step:
    """Time passes."""

    def step(history: History) -> None:
        history.now += seconds

    return step


def observe(number: int, stats: Stats) -> Step:
    """An engine is scraped."""

    def step(history: History) -> None:
        name = history.an_id(number)
        if name is not None and history.infos[name].is_scraped:
            history.registry.observe(name, stats, history.now)

    return step


def dispatch(query: Query) -> Step:
    """A request is decided on."""
    return lambda history: history.dispatch(query)


def end(number: int) -> Step:
    """A request ends."""

    def step(history: History) -> None:
        if history.grants:
            history.grants[number % len(history.grants)][0].end(history.now)

    return step


def judge(number: int, verdict: Verdict, *, with_permit: bool) -> Step:
    """An attempt's verdict comes in."""

    def step(history: History) -> None:
        if history.grants:
            grant, _ = history.grants[number % len(history.grants)]
            permit = grant.permit if with_permit else None
            history.registry.verdict(grant.ticket, verdict, history.now, permit)

    return step


def trouble(number: int, what: str, seconds: float) -> Step:
    """An endpoint is to be left alone for a while."""

    def step(history: History) -> None:
        name = history.an_id(number)
        live = None if name is None else history.registry.live(name)
        if live is not None:
            call = getattr(history.registry, what)
            call(live.ticket, history.now + seconds, history.now)

    return step


def misconfigure(number: int, times: int) -> Step:
    """An endpoint answers 401 where its neighbour answers 200."""

    def step(history: History) -> None:
        name, other = history.an_id(number), history.an_id(number + 1)
        if name is None or other is None:
            return
        live, neighbour = history.registry.live(name), history.registry.live(other)
        assert live is not None
        assert neighbour is not None
        history.registry.answered(neighbour.ticket, PATH, MODEL, history.now)
        for _ in range(times):
            history.registry.misconfigured(live.ticket, 401, PATH, history.now)

    return step


def answer(number: int) -> Step:
    """An endpoint answers 200."""

    def step(history: History) -> None:
        name = history.an_id(number)
        live = None if name is None else history.registry.live(name)
        if live is not None:
            history.registry.answered(live.ticket, PATH, MODEL, history.now)

    return step


def change(number: int, kind: int | None, variant: int) -> Step:
    """The list changes: an endpoint goes, comes, or is described anew."""

    def step(history: History) -> None:
        if kind is None:
            history.infos.pop(f"e{number}", None)
        else:
            history.infos[f"e{number}"] = an_info(number, kind, variant=variant)
        history.replace()

    return step


def relaunch(number: int) -> Step:
    """All endpoints but one go, and come back as new ones."""

    def step(history: History) -> None:
        name = history.an_id(number)
        if name is not None:
            history.registry.replace([history.infos[name]], history.now)
            history.replace()

    return step


def follow(number: int) -> Step:
    """Envoy moves a request to an endpoint by itself."""

    def step(history: History) -> None:
        name = history.an_id(number)
        grant = None if name is None else history.registry.follow(name, history.now)
        if grant is not None and history.explained:
            history.grants.append((grant, history.explained[-1][0]))

    return step


def forget(number: int, session: int) -> Step:
    """A session's endpoint failed it, or another one served it."""

    def step(history: History) -> None:
        name = history.an_id(number)
        if name is not None:
            history.scheduler.failed(session, name)
            if number % 2:
                history.scheduler.served(session, name, history.now)

    return step


def several_observed(stats: Stats) -> Step:
    """Every engine is scraped."""

    def step(history: History) -> None:
        for name, info in history.infos.items():
            if info.is_scraped:
                history.registry.observe(name, stats, history.now)

    return step


def a_query(random: Random) -> Query:
    """Any query; most of them plain."""
    session = random.choice((None, *range(6)))
    query = Query(MODEL, None if session is None else session * 2**61)
    if random.random() < 0.6:
        return query
    return Query(
        MODEL,
        query.session,
        content_length=random.choice((0, 0, 4000, 90_001)),
        restriction=random.choice(RESTRICTIONS),
        subset=random.choice(SUBSETS),
        strategy=random.choice((None, *STRATEGIES, "unheard of")),
        max_attempts=random.randint(1, 4),
        lease_seconds=random.choice((0.5, 3.0, 600.0)),
        upstream_name=random.choice((None, None, None, None, "gpt", "other")),
        kinds=random.choice((None, None, None, None, frozenset({Kind.ENGINE}))),
    )


def some_stats(random: Random) -> Stats:
    """Any scrape; a signal is unknown now and then."""
    counts = (None, *range(13))
    return Stats(
        running=random.choice(counts),
        waiting=random.choice((0, *counts)),
        kv_usage_ratio=random.choice((None, 0.0, 0.3, 0.3, 0.55, 0.8, 0.9, 1.0)),
        success_total=random.choice((None, *map(float, range(0, 100, 9)))),
    )


def a_step(random: Random) -> Step:
    """Any step; decisions and their ends are the most frequent."""
    number = random.randrange(16)
    chance = random.random()
    if chance < 0.45:
        return dispatch(a_query(random))
    if chance < 0.6:
        return end(random.randrange(64))
    seconds = random.choice((0.0, 0.25, 0.5, 1.0, 2.0, 4.9, 5.0, 10.0, 31.0))
    verdict = random.choice((*Verdict, Verdict.FAILURE))
    kind = random.choice((None, *range(6)))
    return random.choice(
        (
            advance(seconds),
            advance(random.random()),
            observe(number, some_stats(random)),
            observe(number, some_stats(random)),
            several_observed(some_stats(random)),
            judge(-1 - random.randrange(4), verdict, with_permit=random.random() < 0.8),
            trouble(number, random.choice(("backpressure", "quarantine", "hold")), seconds),
            misconfigure(number, random.choice((1, 5))),
            answer(number),
            follow(number),
            forget(number, random.randrange(6) * 2**61),
            relaunch(number) if random.random() < 0.2 else advance(0.5),
            change(random.randrange(8), kind, random.randrange(4))
            if random.random() < 0.3
            else advance(0.1),
        )
    )


def steps(seed: int, count: int) -> Iterator[Step]:
    """A history's steps."""
    random = Random(seed)
    return (a_step(random) for _ in range(count))
