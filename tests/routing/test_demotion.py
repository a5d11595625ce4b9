"""An endpoint that refuses what another one serves is kept away, and tried again by a rule."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.routing.demotion import Answers, Demotion, DemotionSettings, Refusals, folded
from extproc.routing.endpoint import Info, Url
from extproc.routing.live import Live, Ticket
from extproc.routing.registry import Registry, RegistrySettings

CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"


def an_info(name: str, *models: str, port: int = 8000) -> Info:
    """An engine that serves the models ("m" when none is given)."""
    return Info(name, Url("http", name, port), models or ("m",))


class Fleet:
    """Two endpoints of one model and their registry."""

    def __init__(self, *infos: Info) -> None:
        self.registry = Registry(RegistrySettings(), Random(0))
        self.registry.replace(infos or (an_info("bad"), an_info("good")), 0.0)

    def live(self, name: str) -> Live:
        live = self.registry.live(name)
        assert live is not None
        return live

    def ticket(self, name: str) -> Ticket:
        return self.live(name).ticket

    def refuse(
        self, name: str, now: float, *, times: int = 5, status: int = 401, path: str = CHAT
    ) -> None:
        for _ in range(times):
            self.registry.misconfigured(self.ticket(name), status, path, now)

    def answer(self, name: str, now: float, *, path: str = CHAT, model: str = "m") -> None:
        self.registry.answered(self.ticket(name), path, model, now)

    def is_demoted(self, name: str) -> bool:
        return self.live(name).demotion is not None


@pytest.mark.parametrize("status", [401, 403, 404])
def test_the_fifth_refusal_in_a_row_demotes_when_another_answered(status: int) -> None:
    """Four are not enough; the fifth on a path that another one serves is."""
    fleet = Fleet()
    fleet.answer("good", 0.0)
    fleet.refuse("bad", 1.0, times=4, status=status)
    assert not fleet.is_demoted("bad")
    fleet.refuse("bad", 2.0, times=1, status=status)
    assert fleet.live("bad").demotion == Demotion(2.0, 32.0, 30.0)
    assert not fleet.is_demoted("good")
    assert fleet.live("bad").misconfigured == 5


@pytest.mark.parametrize("status", [400, 405, 422, 429, 500])
def test_other_statuses_never_demote(status: int) -> None:
    """405 is counted and shown; what is no sign of misconfiguration is not even counted."""
    fleet = Fleet()
    fleet.answer("good", 0.0)
    fleet.refuse("bad", 1.0, times=20, status=status)
    assert not fleet.is_demoted("bad")
    assert fleet.live("bad").misconfigured == (20 if status == 405 else 0)


def test_without_another_endpoints_answer_the_mistake_is_the_clients() -> None:
    """Nobody answered, it answered itself, or the answer was too long ago or on another path."""
    nobody = Fleet()
    nobody.refuse("bad", 1.0, times=50)
    assert not nobody.is_demoted("bad")
    itself = Fleet()
    itself.answer("bad", 0.0)
    itself.refuse("bad", 1.0, times=50)
    assert not itself.is_demoted("bad")
    late = Fleet()
    late.answer("good", 0.0)
    late.refuse("bad", 60.1, times=50)
    assert not late.is_demoted("bad")
    elsewhere = Fleet()
    elsewhere.answer("good", 0.0, path=EMBEDDINGS)
    elsewhere.refuse("bad", 1.0, times=50)
    assert not elsewhere.is_demoted("bad")


def test_an_answer_is_evidence_for_a_minute() -> None:
    """At sixty seconds exactly it still is."""
    fleet = Fleet()
    fleet.answer("good", 0.0)
    fleet.refuse("bad", 60.0)
    assert fleet.is_demoted("bad")


def test_evidence_that_comes_late_convicts_at_the_next_refusal() -> None:
    """A long row is remembered until somebody else shows that the path works."""
    fleet = Fleet()
    fleet.refuse("bad", 1.0, times=7)
    fleet.answer("good", 2.0)
    assert not fleet.is_demoted("bad")
    fleet.refuse("bad", 3.0, times=1)
    assert fleet.is_demoted("bad")


def test_a_success_of_its_own_ends_every_row() -> None:
    """An endpoint that serves chat and has no embeddings stays where it is."""
    fleet = Fleet()
    fleet.answer("good", 0.0, path=EMBEDDINGS)
    for now in range(1, 20):
        fleet.refuse("bad", float(now), times=4, status=404, path=EMBEDDINGS)
        assert not fleet.is_demoted("bad")
        fleet.answer("bad", float(now))


def test_rows_are_per_path_and_mixed_traffic_still_convicts() -> None:
    """A wrong key on two paths demotes when one of the rows is full."""
    fleet = Fleet()
    fleet.answer("good", 0.0)
    for _ in range(4):
        fleet.refuse("bad", 1.0, times=1)
        fleet.refuse("bad", 1.0, times=1, path=EMBEDDINGS)
    assert not fleet.is_demoted("bad")
    fleet.refuse("bad", 1.0, times=1)
    assert fleet.is_demoted("bad")


def test_the_query_is_no_part_of_the_path() -> None:
    """Clients cannot make paths of their own with it."""
    fleet = Fleet()
    fleet.answer("good", 0.0, path=f"{CHAT}?a=1")
    for number in range(5):
        fleet.refuse("bad", 1.0, times=1, path=f"{CHAT}?b={number}")
    assert fleet.is_demoted("bad")
    assert len(folded("/" + "x" * 10_000)) == 256


def test_evidence_is_of_a_model_that_both_serve() -> None:
    """An answer under a model that the accused does not serve says nothing."""
    fleet = Fleet(an_info("bad", "m", "n"), an_info("good", "o"))
    fleet.answer("good", 0.0, model="o")
    fleet.refuse("bad", 1.0, times=20)
    assert not fleet.is_demoted("bad")


def test_a_refusal_under_a_known_model_needs_evidence_under_the_same() -> None:
    """With the model given, another model of the endpoint proves nothing."""
    fleet = Fleet(an_info("bad", "m", "n"), an_info("good", "m", "n"))
    fleet.answer("good", 0.0, model="m")
    for _ in range(20):
        fleet.registry.misconfigured(fleet.ticket("bad"), 404, CHAT, 1.0, model="n")
    assert not fleet.is_demoted("bad")
    for _ in range(5):
        fleet.registry.misconfigured(fleet.ticket("bad"), 404, CHAT, 1.0, model="m")
    assert fleet.is_demoted("bad")


def test_one_probe_passes_every_thirty_seconds_until_one_succeeds() -> None:
    """Taking the due probe puts the next one off; a 2xx ends the demotion."""
    fleet = Fleet()
    fleet.answer("good", 0.0)
    fleet.refuse("bad", 10.0)
    demotion = fleet.live("bad").demotion
    assert demotion is not None
    assert not demotion.is_probe_due(39.9)
    assert demotion.is_probe_due(40.0)
    assert fleet.registry.acquire("bad", 45.0, lease_seconds=600.0) is not None
    demotion = fleet.live("bad").demotion
    assert demotion is not None
    assert demotion == Demotion(10.0, 75.0, 30.0)
    fleet.refuse("bad", 46.0, times=1)
    assert fleet.live("bad").demotion == demotion
    fleet.answer("bad", 76.0)
    assert not fleet.is_demoted("bad")
    fleet.refuse("bad", 77.0, times=4)
    assert not fleet.is_demoted("bad")


def test_a_request_before_the_probe_is_due_puts_nothing_off() -> None:
    """Where the caller sends one anyway, the probe stays due when it was."""
    fleet = Fleet()
    fleet.answer("good", 0.0)
    fleet.refuse("bad", 10.0)
    assert fleet.registry.follow("bad", 20.0) is not None
    assert fleet.live("bad").demotion == Demotion(10.0, 40.0, 30.0)


def test_a_changed_description_may_be_probed_at_once() -> None:
    """Whoever corrects the key does not wait for the next half minute."""
    fleet = Fleet()
    fleet.answer("good", 0.0)
    fleet.refuse("bad", 10.0)
    fleet.registry.replace((an_info("bad", "m", "n"), an_info("good")), 12.0)
    demotion = fleet.live("bad").demotion
    assert demotion is not None
    assert demotion.is_probe_due(12.0)


def test_another_generation_is_neither_charged_nor_evidence() -> None:
    """What is said of an endpoint that was removed says nothing of the one that took its id."""
    fleet = Fleet()
    old_bad, old_good = fleet.ticket("bad"), fleet.ticket("good")
    fleet.registry.replace((), 1.0)
    fleet.registry.replace((an_info("bad"), an_info("good")), 2.0)
    fleet.registry.answered(old_good, CHAT, "m", 3.0)
    fleet.refuse("bad", 3.0, times=20)
    assert not fleet.is_demoted("bad")
    fleet.answer("good", 4.0)
    for _ in range(20):
        fleet.registry.misconfigured(old_bad, 401, CHAT, 5.0)
    assert not fleet.is_demoted("bad")


def test_the_accused_own_later_answers_do_not_hide_the_others() -> None:
    """Of two endpoints the last answer of each is known."""
    fleet = Fleet()
    fleet.answer("good", 0.0)
    for now in range(1, 30):
        fleet.answer("bad", float(now))
    fleet.refuse("bad", 30.0)
    assert fleet.is_demoted("bad")


def anybody(endpoint_id: str) -> bool:
    """Every endpoint's answer is evidence."""
    return bool(endpoint_id)


def test_the_last_endpoint_of_a_model_is_never_demoted() -> None:
    """Those that are kept away already are no evidence, or one bad client could end a model."""
    fleet = Fleet()
    fleet.answer("good", 0.0)
    fleet.answer("bad", 0.5)
    fleet.refuse("bad", 1.0)
    assert fleet.is_demoted("bad")
    fleet.refuse("good", 2.0)
    assert not fleet.is_demoted("good")


def test_rows_are_bounded() -> None:
    """A thousand paths leave no more than the bound; the oldest row gives way."""
    refusals = Refusals()
    assert refusals.add("m", "/first") == 1
    for number in range(1000):
        refusals.add("m", f"/{number}")
    assert len(refusals) == 64
    assert refusals.add("m", "/first") == 1
    assert refusals.add("m", "/999") == 2


def test_the_answer_noted_longest_ago_is_forgotten_first() -> None:
    """A path that is answered again and again stays known, whatever else comes."""
    answers = Answers(2)
    for number in range(5):
        answers.note("m", CHAT, "a", float(number))
        answers.note("m", f"/{number}", "a", float(number))
        assert answers.by_another(("m",), CHAT, "b", float(number), is_witness=anybody)
    assert not answers.by_another(("m",), "/3", "b", 0.0, is_witness=anybody)


def test_watchers_are_told_of_a_demotion_and_of_its_end() -> None:
    """Both change where requests may go."""
    fleet = Fleet()
    dirty: set[int] = set()
    fleet.answer("good", 0.0)
    fleet.refuse("bad", 1.0, times=4)
    fleet.live("bad").watchers.append((dirty, 7))
    fleet.refuse("bad", 1.0, times=1)
    assert dirty == {7}
    dirty.clear()
    fleet.answer("bad", 2.0)
    assert dirty == {7}
    dirty.clear()
    fleet.answer("bad", 3.0)
    assert not dirty


_ANSWERS = st.lists(
    st.tuples(st.sampled_from("mn"), st.sampled_from("/xyz"), st.sampled_from("abc")), max_size=40
)


@settings(deadline=None)
@given(history=_ANSWERS, bound=st.integers(1, 9))
def test_evidence_is_bounded_and_never_invented(
    history: list[tuple[str, str, str]], bound: int
) -> None:
    """It is at most the bound, holds only what happened, and all of it when nothing was evicted."""
    answers = Answers(bound)
    for now, (model, path, name) in enumerate(history):
        answers.note(model, path, name, float(now))
        assert len(answers) <= bound
    for model in "mn":
        for path in "/xyz":
            for name in "abc":
                for since in (0.0, len(history) / 2):
                    happened = any(
                        (m, p) == (model, path) and n != name and now >= since
                        for now, (m, p, n) in enumerate(history)
                    )
                    known = answers.by_another((model,), path, name, since, is_witness=anybody)
                    assert known == happened if bound >= 8 else known <= happened


def test_the_rule_is_configurable() -> None:
    """Threshold, age of the evidence and time between probes are settings."""
    rule = DemotionSettings(threshold=2, evidence_seconds=5.0, probe_seconds=7.0)
    fleet = Fleet()
    fleet.registry = Registry(RegistrySettings(demotion=rule), Random(0))
    fleet.registry.replace((an_info("bad"), an_info("good")), 0.0)
    fleet.answer("good", 0.0)
    fleet.refuse("bad", 5.1, times=9)
    assert not fleet.is_demoted("bad")
    fleet.answer("good", 6.0)
    fleet.refuse("bad", 6.0, times=1)
    assert fleet.live("bad").demotion == Demotion(6.0, 13.0, 7.0)
