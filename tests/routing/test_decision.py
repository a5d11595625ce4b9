"""A decision says where a request goes, and can always be explained."""

from __future__ import annotations

import msgspec
import pytest
from fleet import MODEL, NOW, Fleet, an_engine, an_external

from extproc.routing.decision import Basis, Explanation, Query, Term
from extproc.routing.endpoint import Kind, Stats
from extproc.routing.filters import Filter
from extproc.routing.strategy import BUILT_IN, Picker, Scorer, Strategy, Weights

BUSY = Stats(running=8, waiting=8, kv_usage_ratio=0.7)
ALL = {"chat": Strategy("chat", Weights(weight=0.5))}


def explained(fleet: Fleet, query: Query | None = None, now: float = NOW) -> Explanation:
    """The rationale of a decision made now."""
    explanation = fleet.scheduler.explain(fleet.decide(query, now))
    assert explanation is not None
    return explanation


def terms_of(explanation: Explanation, name: str) -> dict[Scorer, Term]:
    """What each scorer said of one candidate."""
    (candidate,) = (c for c in explanation.candidates if c.id == name)
    return {term.scorer: term for term in candidate.terms}


def test_a_decision_names_its_list() -> None:
    """The chosen endpoint first, then what stands behind it, all of one kind and name."""
    fleet = Fleet(an_external("a", upstream_model="gpt"), an_external("b", upstream_model="gpt"))
    decision = fleet.decide()
    assert decision.tickets == (decision.chosen, *decision.alternatives)
    assert len(decision.alternatives) == 1
    assert (decision.upstream_name, decision.kind) == ("gpt", Kind.EXTERNAL)
    assert (decision.model, decision.strategy, decision.at) == (MODEL, "chat", NOW)
    assert not decision.is_probe


def test_a_query_can_be_limited_further() -> None:
    """The same query for endpoints that call the model so; the first one is unchanged."""
    query = Query(MODEL, 7, 100, strategy="batch")
    limited = query.for_upstream_name("gpt")
    assert limited.upstream_name == "gpt"
    assert limited == msgspec.structs.replace(query, upstream_name="gpt")
    assert query.upstream_name is None


def test_every_scorer_is_accounted_for() -> None:
    """Value and weight per scorer; the score is the mean of the values by their weights."""
    fleet = Fleet(an_engine("a"), an_engine("b", weight=0.5), strategies=ALL)
    fleet.teach("a", "b", rate=4.0)
    fleet.scrape(BUSY, "a")
    fleet.load("a", 4)
    session = 3
    fleet.scheduler.served(session, "b", NOW)
    explanation = explained(fleet, Query(MODEL, session))
    terms = terms_of(explanation, "a")
    values = {scorer: term.value for scorer, term in terms.items()}
    # Four of ours came since the scrape, and no slot was free.
    assert values == {
        Scorer.QUEUE: pytest.approx(1 / (1 + 12 / 8)),
        Scorer.KV: pytest.approx(0.5),
        Scorer.INFLIGHT: pytest.approx(1 / (1 + 4 / 8)),
        Scorer.LOAD: pytest.approx(1 / (1 + 1 / 3)),
        Scorer.WEIGHT: pytest.approx(1.0),
        Scorer.SESSION: 0.0,
    }
    assert terms[Scorer.KV].weight == 0.5
    assert {term.basis for term in terms.values()} == {Basis.OWN}
    assert terms_of(explanation, "b")[Scorer.SESSION].value == 1.0
    assert terms_of(explanation, "b")[Scorer.WEIGHT].value == pytest.approx(0.5)
    for candidate in explanation.candidates:
        weight = sum(term.weight for term in candidate.terms)
        score = sum(term.value * term.weight for term in candidate.terms) / weight
        assert candidate.score == pytest.approx(score, abs=1e-8)
    assert [candidate.id for candidate in explanation.candidates] == ["b", "a"]


def test_a_scorer_that_is_off_has_no_term() -> None:
    """The weight scorer is off in the built-in strategies."""
    fleet = Fleet(an_engine("a"))
    assert Scorer.WEIGHT not in terms_of(explained(fleet), "a")


def test_what_was_unknown_or_stale_is_said() -> None:
    """The unknown has the mean of those who know, the stale 0.01 less."""
    fleet = Fleet(an_engine("a"), an_engine("b"), an_external("x"))
    fleet.scrape(BUSY, "a", now=NOW + 11)
    for name in "abx":
        fleet.load(name, 1, NOW + 11)
    fleet.live("a").drain_rate = 2.0
    explanation = explained(fleet, now=NOW + 11)
    own, stale, unknown = (terms_of(explanation, name) for name in "abx")
    for scorer in (Scorer.QUEUE, Scorer.KV, Scorer.LOAD):
        assert own[scorer].basis is Basis.OWN
        assert stale[scorer].basis is Basis.STALE
        assert unknown[scorer].basis is Basis.MEAN
        assert unknown[scorer].value == pytest.approx(own[scorer].value, abs=1e-8)
        assert stale[scorer].value == pytest.approx(own[scorer].value - 0.01, abs=1e-8)
    ages = {candidate.id: candidate.age_seconds for candidate in explanation.candidates}
    assert ages == {"a": 0.0, "b": 11.0, "x": None}


def test_where_nobody_knows_it_is_a_half() -> None:
    """Nothing but externals: the scraped signals are 0.5 each."""
    fleet = Fleet(an_external("x"), an_external("y"))
    terms = terms_of(explained(fleet), "x")
    for scorer in (Scorer.QUEUE, Scorer.KV):
        assert terms[scorer].value == pytest.approx(0.5, abs=1e-8)
    assert terms[Scorer.LOAD].value == 1.0


def test_who_was_dropped_is_named() -> None:
    """Every other endpoint has the filter that it did not pass, and filters are counted."""
    fleet = Fleet(
        an_engine("a"),
        an_engine("b", drained=True),
        an_engine("c", priority=-1),
        an_engine("d"),
        an_engine("e", priority=-1),
    )
    fleet.break_until("d", NOW + 5)
    explanation = explained(fleet)
    assert {drop.id: drop.filter for drop in explanation.dropped} == {
        "b": Filter.DRAINED,
        "c": Filter.PRIORITY,
        "d": Filter.BREAKER,
        "e": Filter.PRIORITY,
    }
    assert explanation.counts == {Filter.DRAINED: 1, Filter.PRIORITY: 2, Filter.BREAKER: 1}
    assert [candidate.id for candidate in explanation.candidates] == ["a"]


def test_a_probe_is_explained_as_one() -> None:
    """It went by rule; the candidates are what stood behind it."""
    fleet = Fleet(an_engine("a"), an_engine("b"))
    fleet.break_until("b", NOW + 5)
    explanation = explained(fleet, now=NOW + 5)
    assert explanation.is_probe
    assert explanation.chosen == "b"
    assert explanation.alternatives == ("a",)
    assert explanation.probing == ("b",)
    assert [candidate.id for candidate in explanation.candidates] == ["a"]


def test_a_lone_probe_has_no_candidates() -> None:
    """Nothing was scored."""
    fleet = Fleet(an_engine("a"))
    fleet.break_until("a", NOW + 5)
    assert explained(fleet, now=NOW + 5).candidates == ()


def test_a_slow_start_shows() -> None:
    """A newcomer's in-flight score is that of the moment of the decision."""
    fleet = Fleet(an_engine("a"))
    fleet.load("a", 4)
    fleet.registry.replace([an_engine("a"), an_engine("b")], NOW)
    explanation = explained(fleet, now=NOW + 2)
    slow = {candidate.id: candidate.is_slow_start for candidate in explanation.candidates}
    assert slow == {"a": False, "b": True}
    expected = 1 / (1 + 0.6 * 2 / 8)
    assert terms_of(explanation, "b")[Scorer.INFLIGHT].value == pytest.approx(expected, abs=1e-8)


def test_an_explanation_has_the_numbers_of_then() -> None:
    """What came later does not change why it was decided so."""
    fleet = Fleet(an_engine("a"), an_engine("b"))
    fleet.load("a", 1)
    decision = fleet.decide()
    before = fleet.scheduler.explain(decision)
    fleet.load("b", 9)
    fleet.break_until("a", NOW + 5)
    fleet.decide(now=NOW + 1)
    fleet.registry.replace([an_engine("z")], NOW + 1)
    fleet.decide(now=NOW + 1)
    assert fleet.scheduler.explain(decision) == before
    assert before is not None
    assert [c.inflight for c in before.candidates] == [0, 1]


def test_a_forgotten_decision_is_not_explained() -> None:
    """When its table's past is gone, nothing is made up."""
    fleet = Fleet(an_engine("a"))
    decision = fleet.decide()
    for number in range(12):
        fleet.registry.replace([an_engine("a", weight=2.0 + number)], NOW)
        fleet.decide()
    assert fleet.scheduler.explain(decision) is None


def test_without_weights_every_score_is_0() -> None:
    """A strategy that asks nobody has candidates without terms."""
    nothing = Strategy("chat", Weights(0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    fleet = Fleet(an_engine("a"), an_engine("b"), strategies={"chat": nothing})
    explanation = explained(fleet)
    assert [(c.score, c.terms) for c in explanation.candidates] == [(0.0, ())] * 2


def test_an_explanation_names_the_rules() -> None:
    """Number, model, time, strategy and picker are part of it."""
    turns = Strategy("turns", picker=Picker.ROUND_ROBIN)
    fleet = Fleet(an_engine("a"), strategies={**BUILT_IN, "turns": turns})
    explanation = explained(fleet, Query(MODEL, strategy="turns"), NOW + 1)
    assert (explanation.number, explanation.model, explanation.at) == (1, MODEL, NOW + 1)
    assert (explanation.strategy, explanation.picker) == ("turns", Picker.ROUND_ROBIN)
