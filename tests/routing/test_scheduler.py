"""The scheduler filters, scores, picks and acquires by the rules."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from fleet import IDLE, MODEL, NOW, Fleet, an_engine, an_external
from histories import History, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.routing.breaker import Verdict
from extproc.routing.decision import Decision, Query, Unavailable
from extproc.routing.endpoint import Stats
from extproc.routing.live import Grant
from extproc.routing.registry import Registry, RegistrySettings
from extproc.routing.ring import Ring, session_hash
from extproc.routing.scheduler import MAX_DECISIONS, Dispatch, Scheduler
from extproc.routing.sessions import Sessions
from extproc.routing.strategy import BUILT_IN, Picker, Strategy

SESSION = session_hash(MODEL, b"s")
WITH_SESSION = Query(MODEL, SESSION)


# The rules as a whole.


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 2**32))
def test_it_decides_as_the_reference_over_any_history(kinds: list[int], seed: int) -> None:
    """Whatever has happened, list, scores, filters, refusals and draws are the reference's."""
    history = History(kinds, seed)
    for step in steps(seed, 150):
        step(history)
    history.check_memory()


@pytest.mark.parametrize(("count", "seed"), [(40, 1), (40, 2), (150, 3), (150, 4)])
def test_it_decides_as_the_reference_in_large_fleets(count: int, seed: int) -> None:
    """The same where much changes at once and many start slowly."""
    random = Random(seed)
    kinds = [random.randrange(6) if seed % 2 else 0 for _ in range(count)]
    history = History(kinds, seed)
    for step in steps(seed, 150):
        step(history)
    history.check_memory()


# Filters and priorities.


def test_the_highest_priority_serves() -> None:
    """However loaded it is; the pool below is for when nobody of it is usable."""
    fleet = Fleet(an_engine("a"), an_engine("b", priority=1))
    fleet.load("b", 50)
    assert fleet.decide().tickets == (fleet.live("b").ticket,)
    fleet.break_until("b", NOW + 5)
    assert fleet.chosen() == "a"
    assert fleet.chosen(now=NOW + 4.9) == "a"


def test_half_open_endpoints_never_hold_back_the_pool_below() -> None:
    """With every probe of the higher pool taken, the lower one serves."""
    fleet = Fleet(an_engine("a"), an_engine("b", priority=1), an_engine("c", priority=1))
    fleet.break_until("b", NOW + 1)
    fleet.break_until("c", NOW + 1)
    found = [fleet.dispatch(now=NOW + 1).decision for _ in range(4)]
    assert [decision.chosen.id for decision in found] == ["b", "c", "a", "a"]
    assert [len(decision.alternatives) for decision in found] == [1, 1, 0, 0]


def test_a_lower_pool_is_not_probed_while_a_higher_one_serves() -> None:
    """A pool that would not be asked is not asked as a probe either."""
    fleet = Fleet(an_engine("a"), an_engine("b", priority=1))
    fleet.break_until("a", NOW + 1)
    assert fleet.chosen(now=NOW + 1) == "b"
    fleet.break_until("b", NOW + 9)
    assert fleet.chosen(now=NOW + 1) == "a"


# Probes.


def test_a_probe_takes_the_next_request_by_rule() -> None:
    """Not by luck: the first request after the cooldown, idle alternatives behind it."""
    fleet = Fleet(*map(an_engine, "abcd"))
    fleet.load("b", 3)
    fleet.break_until("b", NOW + 1)
    fleet.sessions.remember(SESSION, "a", NOW)
    first = fleet.dispatch(WITH_SESSION, NOW + 1)
    assert first.decision.is_probe
    assert first.grant.is_probe
    assert first.decision.chosen.id == "b"
    assert first.decision.alternatives[0].id == "a"
    assert "b" not in [ticket.id for ticket in fleet.decide(WITH_SESSION, NOW + 1).tickets]
    fleet.registry.verdict(first.grant.ticket, Verdict.SUCCESS, NOW + 2, first.grant.permit)
    assert not fleet.decide(now=NOW + 2).is_probe


def test_a_demoted_endpoint_gets_one_request_when_its_probe_is_due() -> None:
    """Every 30 s one request tries it, with alternatives behind."""
    fleet = Fleet(an_engine("a"), an_engine("b"))
    fleet.registry.answered(fleet.live("b").ticket, "/p", MODEL, NOW)
    for _ in range(5):
        fleet.registry.misconfigured(fleet.live("a").ticket, 401, "/p", NOW)
    fleet.load("b", 9)
    found = [fleet.decide(now=NOW + second) for second in (0, 29, 30, 31, 59, 60)]
    assert [decision.chosen.id for decision in found] == ["b", "b", "a", "b", "b", "a"]
    assert found[2].is_probe
    assert found[2].alternatives == (fleet.live("b").ticket,)


class Refusing(Registry):
    """A registry whose acquire refuses some ids, as if something had changed since."""

    refuses: frozenset[str] = frozenset()

    def acquire(
        self, endpoint_id: str, now: float, *, content_length: int = 0, lease_seconds: float
    ) -> Grant | None:
        """None for those that are refused."""
        if endpoint_id in self.refuses:
            return None
        return super().acquire(
            endpoint_id, now, content_length=content_length, lease_seconds=lease_seconds
        )


@pytest.mark.interpreted
@pytest.mark.parametrize("picker", Picker)
def test_where_acquire_refuses_the_next_candidate_is_tried(picker: Picker) -> None:
    """Candidate after candidate, probes first, then the pool below, and then nobody."""
    registry = Refusing(RegistrySettings(), Random(1))
    infos = [an_engine(name) for name in "abc"]
    registry.replace([*infos, an_engine("d", priority=-1)], NOW)
    for name in "abcd":
        registry.observe(name, IDLE, NOW)
    live = registry.live("c")
    assert live is not None
    registry.hold(live.ticket, NOW + 1, NOW)
    strategy = Strategy("s", picker=picker)
    scheduler = Scheduler(registry, {"s": strategy}, Random(1), Sessions(), default_strategy="s")

    def chosen() -> str | None:
        result = scheduler.dispatch(Query(MODEL, SESSION), NOW + 1)
        if isinstance(result, Unavailable):
            return None
        result.grant.end(NOW + 1)
        assert result.decision.chosen.id not in {t.id for t in result.decision.alternatives}
        return result.decision.chosen.id

    registry.refuses = frozenset("c")
    assert chosen() in {"a", "b"}
    registry.refuses = frozenset("ac")
    assert chosen() == "b"
    registry.refuses = frozenset("abc")
    assert chosen() == "d"
    registry.refuses = frozenset("abcd")
    assert chosen() is None


# Scores.


def test_the_least_loaded_serves() -> None:
    """Of equal engines the one with fewer requests of ours."""
    fleet = Fleet(*map(an_engine, "abc"))
    fleet.load("a", 2)
    fleet.load("c", 1)
    assert [ticket.id for ticket in fleet.decide().tickets] == ["b", "c", "a"]


def test_long_prompts_count_for_more() -> None:
    """One of 400 kB outweighs three small ones."""
    fleet = Fleet(*map(an_engine, "ab"))
    fleet.registry.follow("a", NOW, content_length=400_000)
    fleet.load("b", 3)
    assert fleet.chosen() == "b"


def test_a_burst_between_scrapes_is_spread() -> None:
    """Without a new scrape, 40 requests go to four engines ten each."""
    fleet = Fleet(*map(an_engine, "abcd"))
    counter = Counter(fleet.dispatch().decision.chosen.id for _ in range(40))
    assert set(counter.values()) == {10}


@pytest.mark.parametrize("strategy", BUILT_IN)
def test_what_was_learned_while_idle_skews_no_burst(strategy: str) -> None:
    """Neither how little ran nor how slowly it came says what an engine can do."""
    fleet = Fleet(*map(an_engine, "abcd"), default=strategy)
    for name, running, completed in (("a", 1, 0.2), ("b", 2, 40.0), ("c", 8, 1.0)):
        for turn in range(3):
            total = completed * turn
            fleet.scrape(Stats(running, 0, 0.0, success_total=total), name, now=NOW + turn)
    fleet.scrape(IDLE, *"abcd", now=NOW + 3)
    spread = Counter(fleet.dispatch(now=NOW + 3).decision.chosen.id for _ in range(100))
    assert spread == dict.fromkeys("abcd", 25)


def test_a_fresh_equal_beats_a_stale_one_and_staleness_is_no_drain() -> None:
    """A stale engine loses a tie and gets its share of a load."""
    fleet = Fleet(*map(an_engine, "ab"))
    fleet.scrape(Stats(running=4, waiting=0, kv_usage_ratio=0.2), "b", now=NOW + 11)
    assert fleet.chosen(now=NOW + 11) == "b"
    counter = Counter(fleet.dispatch(now=NOW + 11).decision.chosen.id for _ in range(20))
    assert min(counter.values()) >= 8


def test_all_stale_is_served_by_inflight_alone() -> None:
    """With every page down, our own counts still spread the load."""
    fleet = Fleet(*map(an_engine, "abc"))
    counter = Counter(fleet.dispatch(now=NOW + 60).decision.chosen.id for _ in range(30))
    assert set(counter.values()) == {10}


def test_ties_are_random() -> None:
    """Idle equals are all used."""
    fleet = Fleet(*map(an_engine, "abcd"))
    assert set(Counter(fleet.chosen() for _ in range(60))) == set("abcd")


def test_a_newcomer_is_not_flooded() -> None:
    """Among busy engines a new one gets less than it would take at once."""
    fleet = Fleet(*map(an_engine, "ab"))
    fleet.load("a", 6)
    fleet.load("b", 6)
    fleet.registry.replace(map(an_engine, "abc"), NOW)
    fleet.scrape(IDLE, "c")
    counter = Counter(fleet.dispatch(now=NOW + 0.1).decision.chosen.id for _ in range(6))
    assert counter["c"] <= 2


# Sessions.


def test_a_session_stays_where_it_was() -> None:
    """The memory is written at dispatch, and beats a little more load."""
    fleet = Fleet(*map(an_engine, "abcdefgh"))
    first = fleet.dispatch(WITH_SESSION).decision.chosen.id
    again = [fleet.dispatch(WITH_SESSION).decision.chosen.id for _ in range(3)]
    assert set(again) == {first}


def test_a_new_session_goes_where_the_ring_puts_it() -> None:
    """Every replica places it alike, without a shared memory."""
    fleet = Fleet(*map(an_engine, "abcdefgh"))
    ids = tuple("abcdefgh")
    for number in range(20):
        session = session_hash(MODEL, b"%d" % number)
        expected = ids[next(iter(Ring(ids).targets(session)))]
        assert fleet.chosen(Query(MODEL, session)) == expected


def test_without_a_session_there_is_no_affinity() -> None:
    """A missing key is not the hash of a constant."""
    fleet = Fleet(*map(an_engine, "abcd"))
    decisions = [fleet.decide() for _ in range(40)]
    assert len({decision.chosen.id for decision in decisions}) == 4
    assert all(decision.bonuses == () for decision in decisions)
    assert len(fleet.sessions) == 0


def test_a_session_moves_with_who_served_it_and_leaves_who_failed_it() -> None:
    """Its memory follows the outcome."""
    fleet = Fleet(*map(an_engine, "abcd"))
    fleet.scheduler.served(SESSION, "c", NOW)
    assert fleet.chosen(WITH_SESSION) == "c"
    fleet.scheduler.failed(SESSION, "a")
    assert fleet.sessions.last(SESSION, NOW) == "c"
    fleet.scheduler.failed(SESSION, "c")
    assert fleet.sessions.last(SESSION, NOW) is None


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 30), min_size=5, max_size=5))
def test_p2c_keeps_a_session_unless_another_is_better(session: int, loads: list[int]) -> None:
    """The session's target is one of the two, so who wins is no worse."""
    fleet = Fleet(
        *map(an_engine, "abcde"),
        strategies={"p2c": Strategy("p2c", picker=Picker.P2C)},
        default="p2c",
    )
    for name, count in zip("abcde", loads, strict=True):
        fleet.load(name, count)
    decision = fleet.decide(Query(MODEL, session))
    explanation = fleet.scheduler.explain(decision)
    assert explanation is not None
    scores = {candidate.id: candidate.score for candidate in explanation.candidates}
    target = "abcde"[decision.bonuses[0][0]]
    assert scores[decision.chosen.id] >= scores[target]


# Pickers and alternatives.


def test_round_robin_is_fair_per_model() -> None:
    """Everyone in turn, also when somebody comes or goes between, whatever the load."""
    fleet = Fleet(
        *map(an_engine, "abc"),
        strategies={"turns": Strategy("turns", picker=Picker.ROUND_ROBIN)},
        default="turns",
    )
    fleet.load("a", 20)
    assert [fleet.chosen() for _ in range(6)] == list("abcabc")
    fleet.break_until("a", NOW + 1)
    assert [fleet.chosen() for _ in range(3)] == list("bcb")
    fleet.registry.replace(map(an_engine, "bcd"), NOW)
    assert [fleet.chosen() for _ in range(4)] == list("cdbc")


def test_at_most_two_stand_behind() -> None:
    """Three attempts in all, fewer where the request says so, never fewer than one."""
    fleet = Fleet(*map(an_engine, "abcdef"))
    assert len(fleet.decide().tickets) == 3
    for asked, given_ in ((0, 1), (1, 1), (2, 2), (4, 4), (9, 6)):
        assert len(fleet.decide(Query(MODEL, max_attempts=asked)).tickets) == given_


def test_what_stands_behind_is_closed_and_alike() -> None:
    """Open, other kinds and other names for the model never stand behind."""
    fleet = Fleet(
        an_engine("a"),
        an_engine("b"),
        an_engine("c"),
        an_engine("d", upstream_model="gpt"),
        an_external("e"),
    )
    fleet.break_until("c", NOW + 5)
    for _ in range(30):
        decision = fleet.decide()
        names = {ticket.id for ticket in decision.tickets}
        assert names in ({"a", "b"}, {"d"}, {"e"})


def test_requests_can_be_limited() -> None:
    """To a subset, a restriction's endpoints or a name for the model."""
    fleet = Fleet(an_engine("a"), an_engine("b"), an_external("x", upstream_model="gpt"))
    only_b = Query(MODEL, subset=frozenset({"b.local:8000"}))
    assert {fleet.chosen(only_b) for _ in range(5)} == {"b"}
    assert {fleet.chosen(Query(MODEL).for_upstream_name("gpt")) for _ in range(5)} == {"x"}


# What is kept.


def test_a_dispatch_counts_and_its_end_does_not() -> None:
    """In-flight is exactly what runs."""
    fleet = Fleet(an_engine("a"))
    result = fleet.dispatch(Query(MODEL, content_length=400))
    assert fleet.registry.inflight("a") == 1
    assert fleet.live("a").inflight_tokens == 100
    assert result.grant.end(NOW)
    assert fleet.registry.inflight("a") == 0


def test_a_preview_changes_nothing() -> None:
    """Nothing is counted, remembered or drawn, and no turn is taken."""
    fleet = Fleet(
        *map(an_engine, "abcd"),
        strategies={**BUILT_IN, "turns": Strategy("turns", picker=Picker.ROUND_ROBIN)},
    )
    state = fleet.random.getstate()
    for query in (Query(MODEL), WITH_SESSION, Query(MODEL, SESSION, strategy="turns")):
        preview = fleet.scheduler.preview(query, NOW)
        assert isinstance(preview, Decision)
        assert preview.number == 0
        assert fleet.scheduler.explain(preview) is not None
    assert fleet.random.getstate() == state
    assert all(fleet.registry.inflight(name) == 0 for name in "abcd")
    assert len(fleet.sessions) == 0
    assert not fleet.scheduler.decisions
    assert fleet.chosen(Query(MODEL, strategy="turns")) == "a"


def test_a_preview_takes_no_probe() -> None:
    """The probe that it names is still to be had."""
    fleet = Fleet(an_engine("a"), an_engine("b"))
    fleet.break_until("a", NOW + 1)
    preview = fleet.scheduler.preview(Query(MODEL), NOW + 1)
    assert isinstance(preview, Decision)
    assert preview.is_probe
    assert fleet.dispatch(now=NOW + 1).grant.is_probe


def test_decisions_are_numbered_and_bounded() -> None:
    """The last 1024, oldest first; refusals are none."""
    fleet = Fleet(an_engine("a"))
    for _ in range(MAX_DECISIONS + 5):
        fleet.decide()
    fleet.break_until("a", NOW + 1)
    fleet.refusal()
    numbers = [decision.number for decision in fleet.scheduler.decisions]
    assert numbers == list(range(6, MAX_DECISIONS + 6))


def test_the_chosen_ticket_is_the_grants() -> None:
    """A verdict on either is one on the other."""
    fleet = Fleet(an_engine("a"), an_engine("b"))
    result = fleet.dispatch()
    assert isinstance(result, Dispatch)
    assert result.grant.ticket == result.decision.chosen
