"""The registry keeps each endpoint's live state exact, whatever the order of events."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from extproc.routing.breaker import Verdict
from extproc.routing.endpoint import BreakerSettings, BreakerState, Info, Kind, Stats, Url
from extproc.routing.registry import Grant, Live, Registry, RegistrySettings, Ticket

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
SUCCESS, FAILURE, IGNORED = Verdict.SUCCESS, Verdict.FAILURE, Verdict.IGNORED
COOLDOWN = BreakerSettings(threshold=1, jitter_ratio=0.0)
LEASE = 600.0
PATH = "/v1/chat/completions"


def an_info(name: str, *models: str) -> Info:
    """An engine with a plain cooldown that serves the models ("m" when none is given)."""
    return Info(name, Url("http", name, 8000), models or ("m",), breaker=COOLDOWN)


def a_registry(*infos: Info) -> Registry:
    """A registry that has had its first list at 0 ("a" and "b" when none is given)."""
    registry = Registry(RegistrySettings(), Random(0))
    registry.replace(infos or (an_info("a"), an_info("b")), 0.0)
    return registry


def live_of(registry: Registry, name: str) -> Live:
    """The endpoint's live state, which must be there."""
    live = registry.live(name)
    assert live is not None
    return live


def granted(registry: Registry, name: str, now: float) -> Grant:
    """The grant of a request that must pass."""
    grant = registry.acquire(name, now, lease_seconds=LEASE)
    assert grant is not None
    return grant


def attempt(registry: Registry, name: str, verdict: Verdict, now: float) -> None:
    """One request has passed, ended and been judged at once."""
    grant = granted(registry, name, now)
    grant.end(now)
    registry.verdict(grant.ticket, verdict, now, grant.permit)


def state_of(registry: Registry, name: str, now: float) -> BreakerState:
    """The endpoint's breaker state."""
    return live_of(registry, name).breaker.state(now)


# Who is there.


def test_the_list_is_exactly_the_last_one_sorted_by_id() -> None:
    """Ids, descriptions, members and snapshots all follow it, sorted; of one id the last counts."""
    registry = a_registry(an_info("c", "m"), an_info("a", "m", "n", "m"), an_info("b", "n"))
    assert registry.ids() == ("a", "b", "c")
    assert [info.id for info in registry.infos()] == ["a", "b", "c"]
    assert [live.info.id for live in registry.members("m")] == ["a", "c"]
    assert [live.info.id for live in registry.members("n")] == ["a", "b"]
    assert registry.members("nobody's") == ()
    assert [snapshot.info.id for snapshot in registry.snapshots("m", 0.0)] == ["a", "c"]
    assert [snapshot.info.id for snapshot in registry.snapshots(None, 0.0)] == ["a", "b", "c"]
    registry.replace((an_info("b", "m"), an_info("b", "x")), 1.0)
    assert registry.infos() == (an_info("b", "x"),)
    assert registry.members("m") == ()
    assert registry.live("a") is None


def test_the_membership_version_grows_only_when_something_changed() -> None:
    """The same list again, in any order, is no change; a word in a description is."""
    registry = a_registry()
    version, members = registry.membership_version, registry.members("m")
    registry.replace((an_info("b"), an_info("a")), 1.0)
    assert registry.membership_version == version
    assert registry.members("m") is members
    registry.replace((an_info("a"), replace(an_info("b"), drained=True)), 2.0)
    assert registry.membership_version == version + 1
    registry.replace((an_info("a"),), 3.0)
    assert registry.membership_version == version + 2
    registry.replace((an_info("a"), an_info("c")), 4.0)
    assert registry.membership_version == version + 3


def test_a_remaining_endpoint_keeps_its_live_state_though_its_description_changed() -> None:
    """In-flight, breaker, learned numbers, last use and misconfiguration survive a reload."""
    registry = a_registry()
    grant = granted(registry, "a", 1.0)
    registry.observe("a", Stats(running=3, waiting=1, success_total=5.0), 1.0)
    registry.observe("a", Stats(running=3, waiting=1, success_total=9.0), 2.0)
    registry.misconfigured(grant.ticket, 401, PATH, 2.0)
    registry.verdict(grant.ticket, FAILURE, 2.0, grant.permit)
    live = live_of(registry, "a")
    registry.replace((replace(an_info("a", "n"), weight=3.0), an_info("b")), 2.5)
    assert live_of(registry, "a") is live
    assert live.info.models == ("n",)
    assert (live.inflight, live.drain_rate, live.running_capacity) == (1, 4.0, 3)
    assert (live.last_used, live.misconfigured, live.scraped_at) == (1.0, 1, 2.0)
    assert live.breaker.state(2.5) is OPEN
    assert grant.end(3.0)
    assert live.inflight == 0


@pytest.mark.parametrize(
    "change",
    [
        {"url": Url("http", "a", 9000)},
        {"engine": "sglang"},
        {"metrics_url": "http://a:9100/metrics"},
        {"metric_names": (("running", ("x",)),)},
        {"kind": Kind.EXTERNAL},
    ],
)
def test_numbers_of_another_engine_are_forgotten(change: dict[str, object]) -> None:
    """A new address or metrics page keeps our own counts and the breaker, not the scrapes."""
    registry = a_registry()
    attempt(registry, "a", FAILURE, 0.0)
    grant = registry.follow("a", 0.5)
    registry.observe("a", Stats(running=3, waiting=1, success_total=5.0), 0.5)
    registry.observe("a", Stats(running=3, waiting=1, success_total=9.0), 1.0)
    registry.replace((replace(an_info("a"), **change), an_info("b")), 1.5)  # type: ignore[arg-type]  # each value has its field's type
    live = live_of(registry, "a")
    assert live.stats == Stats()
    assert (live.scraped_at, live.drain_rate, live.running_capacity) == (None, None, 0)
    assert live.inflight == 1
    assert live.breaker.open_until == 1.0
    assert live.slow_start_from == (1.5 if "url" in change else None)
    registry.observe("a", Stats(running=1, waiting=1, success_total=1000.0), 2.0)
    assert live.drain_rate is None
    assert grant is not None


def test_changed_breaker_settings_take_effect_on_a_remaining_endpoint() -> None:
    """An open breaker that is switched off takes requests at once."""
    registry = a_registry()
    attempt(registry, "a", FAILURE, 0.0)
    assert registry.acquire("a", 0.5, lease_seconds=LEASE) is None
    off = replace(an_info("a"), breaker=BreakerSettings(threshold=0))
    registry.replace((off, an_info("b")), 0.5)
    attempt(registry, "a", FAILURE, 0.5)
    attempt(registry, "a", FAILURE, 0.5)
    assert state_of(registry, "a", 0.5) is CLOSED


def test_a_late_end_of_a_removed_generation_never_touches_the_new_one() -> None:
    """Nor do its verdict, backpressure, quarantine or hold."""
    registry = a_registry()
    old = granted(registry, "a", 0.0)
    registry.replace((an_info("b"),), 1.0)
    assert registry.inflight("a") == 0
    registry.replace((an_info("a"), an_info("b")), 2.0)
    new = granted(registry, "a", 2.0)
    assert new.ticket.generation != old.ticket.generation
    assert old.end(3.0)
    assert not old.end(3.0)
    registry.verdict(old.ticket, FAILURE, 3.0, old.permit)
    registry.backpressure(old.ticket, 9.0, 3.0)
    registry.quarantine(old.ticket, 9.0, 3.0)
    registry.hold(old.ticket, 9.0, 3.0)
    live = live_of(registry, "a")
    assert (live.inflight, live.ended) == (1, 0)
    assert live.breaker.state(3.0) is CLOSED
    assert (live.backpressure_until, live.quarantined_until) == (0.0, 0.0)


def test_unknown_ids_change_nothing_and_are_granted_nothing() -> None:
    """Events about endpoints that are gone are routine."""
    registry = a_registry()
    stranger = Ticket("x", 1, 0)
    registry.observe("x", Stats(), 0.0)
    registry.scrape_failed("x", "timeout", 0.0)
    registry.verdict(stranger, FAILURE, 0.0)
    registry.backpressure(stranger, 9.0, 0.0)
    registry.quarantine(stranger, 9.0, 0.0)
    registry.hold(stranger, 9.0, 0.0)
    registry.misconfigured(stranger, 401, PATH, 0.0)
    registry.answered(stranger, PATH, "m", 0.0)
    assert registry.acquire("x", 0.0, lease_seconds=LEASE) is None
    assert registry.follow("x", 0.0) is None
    assert registry.inflight("x") == 0
    assert registry.ids() == ("a", "b")


def test_newly_added_endpoints_start_slowly_and_the_first_list_does_not() -> None:
    """Where all are new, nobody has to be spared; an empty list before it is no list."""
    registry = Registry(RegistrySettings(), Random(0))
    registry.replace((), 0.0)
    registry.replace((an_info("a"),), 5.0)
    assert live_of(registry, "a").slow_start_from is None
    registry.replace((an_info("a"), an_info("b")), 7.0)
    assert live_of(registry, "a").slow_start_from is None
    assert live_of(registry, "b").slow_start_from == 7.0


# What requests do.


def test_in_flight_counts_from_grant_to_end() -> None:
    """A stream counts one all along; ids are counted apart; the size is the content length / 4."""
    registry = a_registry()
    first = registry.acquire("a", 0.0, content_length=4000, lease_seconds=LEASE)
    second = registry.acquire("a", 0.0, content_length=100, lease_seconds=LEASE)
    assert first is not None
    assert second is not None
    live = live_of(registry, "a")
    assert (registry.inflight("a"), registry.inflight("b")) == (2, 0)
    assert live.inflight_tokens == 1025.0
    first.end(30.0)
    assert (live.inflight, live.inflight_tokens) == (1, 25.0)
    second.end(31.0)
    assert (live.inflight, live.inflight_tokens) == (0, 0.0)
    assert (live.dispatched, live.ended) == (2, 2)


def test_last_used_names_only_endpoints_that_had_a_request() -> None:
    """A refused request is none, one that Envoy moved is; nobody gets a zero time."""
    registry = a_registry(an_info("a"), an_info("b"), an_info("c"))
    assert registry.last_used() == {}
    attempt(registry, "a", FAILURE, 3.0)
    assert registry.acquire("a", 3.5, lease_seconds=LEASE) is None
    registry.follow("b", 4.0)
    assert registry.last_used() == {"a": 3.0, "b": 4.0}


def test_an_open_breaker_refuses_and_a_half_open_one_takes_one_probe() -> None:
    """A refusal counts nothing; the probe's verdict frees its slot or closes."""
    registry = a_registry()
    attempt(registry, "a", FAILURE, 0.0)
    assert registry.acquire("a", 0.5, lease_seconds=LEASE) is None
    probe = granted(registry, "a", 1.0)
    assert probe.is_probe
    assert registry.acquire("a", 1.0, lease_seconds=LEASE) is None
    assert registry.inflight("a") == 1
    probe.end(1.1)
    assert registry.acquire("a", 1.1, lease_seconds=LEASE) is None
    registry.verdict(probe.ticket, IGNORED, 1.1, probe.permit)
    attempt(registry, "a", SUCCESS, 1.2)
    assert state_of(registry, "a", 1.2) is CLOSED
    assert not granted(registry, "a", 1.2).is_probe


def test_watchers_are_told_when_a_probe_gives_its_slot_back() -> None:
    """An ignored probe turns no epoch, and still changes who may go next."""
    registry = a_registry()
    attempt(registry, "a", FAILURE, 0.0)
    probe = granted(registry, "a", 1.0)
    dirty: set[int] = set()
    live_of(registry, "a").watchers.append((dirty, 2))
    registry.verdict(probe.ticket, IGNORED, 1.5, probe.permit)
    assert dirty == {2}


def test_an_endpoint_back_from_half_open_starts_slowly() -> None:
    """From the moment its breaker closes; an opening sets nothing."""
    registry = a_registry()
    attempt(registry, "a", FAILURE, 0.0)
    assert live_of(registry, "a").slow_start_from is None
    attempt(registry, "a", SUCCESS, 2.0)
    assert live_of(registry, "a").slow_start_from == 2.0


def test_following_counts_whatever_the_breaker_says() -> None:
    """Envoy has moved the request already; without a permit its verdict still counts."""
    registry = a_registry()
    attempt(registry, "a", FAILURE, 0.0)
    moved = registry.follow("a", 0.5, content_length=8)
    assert moved is not None
    assert (moved.permit, moved.is_probe) == (None, False)
    live = live_of(registry, "a")
    assert (live.inflight, live.inflight_tokens) == (1, 2.0)
    registry.verdict(moved.ticket, SUCCESS, 1.5)
    assert state_of(registry, "a", 1.5) is CLOSED


def test_a_verdict_from_before_the_opening_changes_nothing() -> None:
    """Requests that were running when the breaker opened neither close nor lengthen."""
    registry = a_registry()
    running = [granted(registry, "a", 0.0) for _ in range(5)]
    for grant in running[:3]:
        registry.verdict(grant.ticket, FAILURE, 0.0, grant.permit)
    live = live_of(registry, "a")
    assert live.breaker.open_until == 1.0
    registry.verdict(running[3].ticket, SUCCESS, 1.0, running[3].permit)
    registry.verdict(running[4].ticket, FAILURE, 1.0)
    assert live.breaker.state(1.0) is HALF_OPEN
    assert live.breaker.open_until == 1.0


def test_a_hold_is_a_floor_under_the_cooldown_in_either_order() -> None:
    """The endpoint's retry-after extends what its failure opened, and outlasts it."""
    for is_first in (True, False):
        registry = a_registry()
        grant = granted(registry, "a", 0.0)
        if is_first:
            registry.hold(grant.ticket, 20.0, 0.0)
        registry.verdict(grant.ticket, FAILURE, 0.0, grant.permit)
        if not is_first:
            registry.hold(grant.ticket, 20.0, 0.0)
        registry.hold(grant.ticket, 5.0, 0.0)
        assert live_of(registry, "a").breaker.open_until == 20.0


def test_backpressure_is_extended_never_shortened_and_capped() -> None:
    """At most the breaker's maximum from now; what is past, or no number, is ignored."""
    registry = a_registry()
    ticket = granted(registry, "a", 0.0).ticket
    live = live_of(registry, "a")
    for until, now, expected in (
        (float("nan"), 1.0, 0.0),
        (0.5, 1.0, 0.0),
        (3.0, 1.0, 3.0),
        (2.0, 1.0, 3.0),
        (9.0, 2.0, 9.0),
        (float("inf"), 4.0, 64.0),
    ):
        registry.backpressure(ticket, until, now)
        assert live.backpressure_until == expected
    assert live.breaker.state(4.0) is CLOSED


def test_quarantine_is_extended_and_never_shortened() -> None:
    """It is no failure: the breaker stays closed."""
    registry = a_registry()
    ticket = granted(registry, "a", 0.0).ticket
    live = live_of(registry, "a")
    for until, now, expected in (
        (0.5, 1.0, 0.0),
        (3.0, 1.0, 3.0),
        (2.5, 1.5, 3.0),
        (4.0, 2.0, 4.0),
    ):
        registry.quarantine(ticket, until, now)
        assert live.quarantined_until == expected
    assert live.breaker.state(2.0) is CLOSED


# What engines say.


def test_a_failed_scrape_is_shown_and_touches_neither_breaker_nor_numbers() -> None:
    """The last numbers stay, with their age, until they are stale; a good scrape clears it."""
    registry = a_registry()
    stats = Stats(running=2, waiting=0)
    registry.observe("a", stats, 0.0)
    for now in range(1, 20):
        registry.scrape_failed("a", "timeout", float(now))
    live = live_of(registry, "a")
    assert live.scrape_error == "timeout"
    assert live.breaker.state(19.0) is CLOSED
    (early, _), (late, _) = registry.snapshots("m", 9.0), registry.snapshots("m", 19.0)
    assert (early.stats, early.is_stale, early.age_seconds) == (stats, False, 9.0)
    assert (late.stats, late.is_stale, late.age_seconds) == (stats, True, 19.0)
    registry.observe("a", stats, 20.0)
    assert live.scrape_error is None


def test_snapshots_read_the_breaker_and_consume_nothing() -> None:
    """However often they are taken, the probe slot is still free."""
    registry = a_registry()
    attempt(registry, "a", FAILURE, 0.0)
    for _ in range(5):
        assert registry.snapshots("m", 0.5)[0].breaker is OPEN
        assert registry.snapshots("m", 1.5)[0].breaker is HALF_OPEN
    assert granted(registry, "a", 1.5).is_probe


def test_the_settings_are_the_registrys() -> None:
    """Staleness and smoothing follow them."""
    chosen = RegistrySettings(stale_after_seconds=1.0, drain_smoothing_ratio=1.0)
    registry = Registry(chosen, Random(0))
    registry.replace((an_info("a"),), 0.0)
    for now in range(3):
        registry.observe("a", Stats(waiting=1, success_total=float(now * now)), float(now))
    assert live_of(registry, "a").drain_rate == 3.0
    assert registry.snapshots("m", 3.1)[0].is_stale


# Laws.

NAMES = ("a", "b", "c", "d")


def visible(live: Live) -> tuple[object, ...]:
    """Everything about an endpoint that a reader may have made something of."""
    breaker = live.breaker
    return (
        live.info,
        live.generation,
        live.stats,
        live.scraped_at,
        live.drain_rate,
        live.running_capacity,
        live.inflight,
        live.inflight_tokens,
        live.dispatched,
        live.ended,
        live.quarantined_until,
        live.backpressure_until,
        live.demotion,
        live.slow_start_from,
        live.last_used,
        live.scrape_error,
        live.misconfigured,
        breaker.epoch,
        breaker.open_until,
        # Seen from all times, so that only an event can change it.
        tuple(breaker.free_probes(float(moment)) for moment in range(0, 2000, 7)),
    )


class AnyInterleaving(RuleBasedStateMachine):
    """A registry and a plain count of what it should hold, under any order of events."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.registry = Registry(RegistrySettings(), Random(5))
        self.running: list[Grant] = []
        self.ended: list[Grant] = []
        self.sizes: dict[int, int] = {}  # by identity of the grant, which `running` keeps alive
        self.seen: dict[int, tuple[Live, tuple[object, ...], set[int]]] = {}

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        chosen=st.sets(st.sampled_from(NAMES)),
        threshold=st.integers(0, 2),
        port=st.sampled_from([8000, 8001]),
        models=st.sampled_from([("m",), ("n",), ("m", "n")]),
    )
    def a_list_comes(
        self, chosen: set[str], threshold: int, port: int, models: tuple[str, ...]
    ) -> None:
        breaker = BreakerSettings(threshold=threshold, probes=2)
        infos = [Info(name, Url("http", name, port), models, breaker=breaker) for name in chosen]
        before = {name: self.registry.live(name) for name in chosen}
        self.registry.replace(infos, self.now)
        assert self.registry.ids() == tuple(sorted(chosen))
        for name, live in before.items():
            assert live is None or self.registry.live(name) is live

    @rule(name=st.sampled_from(NAMES), size=st.integers(0, 10_001))
    def a_request_goes(self, name: str, size: int) -> None:
        live = self.registry.live(name)
        is_refused = live is None or (
            live.breaker.open_until is not None and not live.breaker.free_probes(self.now)
        )
        grant = self.registry.acquire(name, self.now, content_length=size, lease_seconds=LEASE)
        assert (grant is None) == is_refused
        self._keep(grant, size)

    @rule(name=st.sampled_from(NAMES), size=st.integers(0, 10_001))
    def envoy_moves_a_request(self, name: str, size: int) -> None:
        grant = self.registry.follow(name, self.now, content_length=size)
        assert (grant is None) == (self.registry.live(name) is None)
        self._keep(grant, size)

    def _keep(self, grant: Grant | None, size: int) -> None:
        if grant is not None:
            self.running.append(grant)
            self.sizes[id(grant)] = size

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_request_ends(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(self.running))
        self.running.remove(grant)
        self.ended.append(grant)
        assert grant.end(self.now)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def a_request_ends_again(self, data: st.DataObject) -> None:
        assert not data.draw(st.sampled_from(self.ended)).end(self.now)

    @precondition(lambda self: self.running or self.ended)
    @rule(data=st.data(), verdict=st.sampled_from(Verdict), with_permit=st.booleans())
    def a_verdict_comes(self, data: st.DataObject, verdict: Verdict, *, with_permit: bool) -> None:
        grant = data.draw(st.sampled_from(self.running + self.ended))
        permit = grant.permit if with_permit else None
        self.registry.verdict(grant.ticket, verdict, self.now, permit)

    @precondition(lambda self: self.running or self.ended)
    @rule(
        data=st.data(),
        what=st.sampled_from(["hold", "backpressure", "quarantine", "refused", "answered"]),
        seconds=st.floats(-1.0, 100.0),
    )
    def something_is_said(self, data: st.DataObject, what: str, seconds: float) -> None:
        ticket = data.draw(st.sampled_from(self.running + self.ended)).ticket
        registry, now = self.registry, self.now
        if what == "refused":
            for _ in range(3):
                registry.misconfigured(ticket, 401, PATH, now)
        elif what == "answered":
            registry.answered(ticket, PATH, "m", now)
        else:
            say = {
                "hold": registry.hold,
                "backpressure": registry.backpressure,
                "quarantine": registry.quarantine,
            }[what]
            say(ticket, now + seconds, now)

    @rule(
        name=st.sampled_from(NAMES),
        total=st.one_of(st.none(), st.floats(0.0, 100.0)),
        running=st.integers(0, 5),
    )
    def a_scrape_comes(self, name: str, total: float | None, running: int) -> None:
        stats = Stats(running=running, waiting=0, success_total=total)
        self.registry.observe(name, stats, self.now)

    @rule(name=st.sampled_from(NAMES))
    def a_scrape_fails(self, name: str) -> None:
        self.registry.scrape_failed(name, f"at {self.now}", self.now)

    @invariant()
    def in_flight_is_what_runs(self) -> None:
        held: dict[tuple[str, int], list[int]] = {}
        for grant in self.running:
            key = grant.ticket.id, grant.ticket.generation
            held.setdefault(key, []).append(self.sizes[id(grant)])
        for name in NAMES:
            live = self.registry.live(name)
            sizes = held.get((name, live.generation), []) if live is not None else []
            assert self.registry.inflight(name) == len(sizes)
            if live is not None:
                assert live.inflight_tokens == sum(sizes) / 4
                assert live.last_used is not None or not sizes

    @invariant()
    def removed_generations_reach_zero_too(self) -> None:
        for live, _, _ in self.seen.values():
            assert live.inflight >= 0
            assert live.ended >= 0

    @invariant()
    def every_change_marks_the_watchers(self) -> None:
        for name in self.registry.ids():
            live = live_of(self.registry, name)
            before = self.seen.get(live.generation)
            dirty: set[int] = set()
            if before is None:
                live.watchers.append((dirty, live.generation))
            else:
                dirty = before[2]
                assert dirty == {live.generation} or visible(live) == before[1]
                dirty.clear()
            self.seen[live.generation] = live, visible(live), dirty

    @invariant()
    def readers_agree(self) -> None:
        registry = self.registry
        snapshots = registry.snapshots(None, self.now)
        assert tuple(snapshot.info for snapshot in snapshots) == registry.infos()
        assert [snapshot.inflight for snapshot in snapshots] == [
            registry.inflight(name) for name in registry.ids()
        ]
        for model in ("m", "n"):
            serving = [info.id for info in registry.infos() if model in info.models]
            assert [live.info.id for live in registry.members(model)] == serving
        assert set(registry.last_used()) <= set(registry.ids())


AnyInterleaving.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_any_interleaving_keeps_the_laws = AnyInterleaving.TestCase
