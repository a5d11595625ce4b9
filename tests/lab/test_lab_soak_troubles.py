"""When troubles come, and which errors they explain."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest

from extproc.lab.soak.asking import Ask, Leaving, Plan, Result
from extproc.lab.soak.troubles import (
    FAULTS,
    LONE_ENGINE,
    STRUCK,
    Episode,
    Trouble,
    Window,
    explain,
    schedule,
)

OTHER = next(name for name in STRUCK if name != LONE_ENGINE)


def result(
    ask: Ask,
    status: int | None,
    reason: str | None = None,
    *,
    served_by: str | None = None,
    is_whole: bool = True,
    began: float = 10.0,
    ended: float = 10.1,
) -> Result:
    """What came of a request."""
    asked = Plan(ask, "POST", "/v1/chat/completions", (), b"{}")
    return Result(asked, began, ended, status, reason, served_by, is_whole=is_whole)


def window(
    trouble: Trouble, engine: str | None = None, began: float = 9.0, ended: float = math.inf
) -> Window:
    """A trouble that has begun."""
    return Window(Episode(0, trouble, engine, 1.0), began, ended)


def test_a_schedule_is_repeatable() -> None:
    """The same seed gives the same episodes, another one others."""
    assert schedule(100_000, Random(1)) == schedule(100_000, Random(1))
    assert schedule(100_000, Random(1)) != schedule(100_000, Random(2))


@pytest.mark.parametrize("requests", [50, 2000, 100_000, 1_000_000])
def test_episodes_come_in_order(requests: int) -> None:
    """Within the run; engines are named where one is to be struck."""
    episodes = schedule(requests, Random(1))
    moments = [one.after for one in episodes]
    assert moments == sorted(moments)
    assert 0 <= moments[0] <= moments[-1] <= requests
    for one in episodes:
        assert (one.engine in STRUCK) is not one.trouble.is_ours
        assert 0.5 <= one.seconds <= 2.0


def test_one_process_serves_the_last_two_thirds() -> None:
    """Whatever ends the service's process is over by then."""
    late = [one for one in schedule(900_000, Random(3)) if one.after > 300_000]
    assert late
    assert not any(one.trouble.ends_process for one in late)


def test_troubles_come_equally_often() -> None:
    """In a long run no kind is left behind."""
    assert {one.trouble for one in schedule(100_000, Random(1))} == set(Trouble)
    counts = Counter(one.trouble for one in schedule(1_000_000, Random(1)))
    for ends_process in (True, False):
        some = [number for one, number in counts.items() if one.ends_process is ends_process]
        assert max(some) - min(some) <= 1


def test_every_trouble_of_an_engine_has_its_fault() -> None:
    """And those of our own have none."""
    assert set(FAULTS) == {one for one in Trouble if not one.is_ours}


@pytest.mark.parametrize("ask", [Ask.RESTRICTED, Ask.UNKNOWN, Ask.MODELS])
def test_what_only_the_service_can_answer_fails_without_it(ask: Ask) -> None:
    """While it is away and a moment longer; not with another error, and not much later."""
    refused = result(ask, 503, "no_endpoint")
    for trouble in (Trouble.SERVICE_KILLED, Trouble.SERVICE_FROZEN, Trouble.SOCKET_REMOVED):
        assert explain(refused, [window(trouble)]) is trouble
        assert explain(refused, [window(trouble, began=8.0, ended=9.5)]) is trouble
        assert explain(refused, [window(trouble, began=1.0, ended=2.0)]) is None
        assert explain(refused, [window(trouble, began=11.0)]) is None
        assert explain(result(ask, 500, "internal"), [window(trouble)]) is None


@pytest.mark.parametrize("ask", [Ask.IN_BODY, Ask.IN_HEADER, Ask.STREAM, Ask.SESSION, Ask.LONE])
def test_the_service_is_no_excuse_for_what_fails_open(ask: Ask) -> None:
    """An ordinary request that fails while the service is away is a fault of ours."""
    refused = result(ask, 503, "no_endpoint")
    assert explain(refused, [window(Trouble.SERVICE_KILLED)]) is None


def test_the_log_explains_nothing() -> None:
    """Without it verdicts are poorer, and no request fails."""
    refused = result(Ask.RESTRICTED, 503, "no_endpoint")
    assert explain(refused, [window(Trouble.LOG_LOST)]) is None


def test_a_cut_is_the_fault_of_who_served() -> None:
    """Of an engine that cuts or dies, and of no other one."""
    cut = result(Ask.STREAM, 200, served_by="c", is_whole=False)
    assert explain(cut, [window(Trouble.CUT_MIDWAY, "c")]) is Trouble.CUT_MIDWAY
    assert explain(cut, [window(Trouble.KILL, "c")]) is Trouble.KILL
    assert explain(cut, [window(Trouble.CUT_MIDWAY, "d")]) is None
    assert explain(cut, [window(Trouble.STATUS_500, "c")]) is None
    assert explain(cut, [window(Trouble.SERVICE_KILLED)]) is None


def test_a_cut_before_anything_was_sent_on_is_a_502() -> None:
    """While an engine cuts, and no longer; one that resets earlier is no excuse."""
    failed = result(Ask.SESSION, 502, "upstream_failed")
    assert explain(failed, [window(Trouble.CUT_AT_ONCE, "c")]) is Trouble.CUT_AT_ONCE
    assert explain(failed, [window(Trouble.KILL, "c")]) is Trouble.KILL
    assert explain(failed, [window(Trouble.RESET, "c")]) is None
    assert explain(failed, [window(Trouble.CUT_AT_ONCE, "c", began=8.0, ended=9.9)]) is None


def test_a_lone_endpoint_has_nobody_behind_it() -> None:
    """Its errors reach the client, until its breaker has closed again; others' do not."""
    failed = result(Ask.LONE, 503, "upstream_failed")
    assert explain(failed, [window(Trouble.RESET, LONE_ENGINE)]) is Trouble.RESET
    assert explain(failed, [window(Trouble.RESET, OTHER)]) is None
    assert explain(failed, [window(Trouble.NO_METRICS, LONE_ENGINE)]) is None
    old = window(Trouble.RESET, LONE_ENGINE, began=-100.0, ended=-90.0)
    assert explain(failed, [old]) is None
    retried = result(Ask.IN_BODY, 503, "upstream_failed")
    assert explain(retried, [window(Trouble.RESET, LONE_ENGINE)]) is None


def test_what_is_well_needs_no_explanation() -> None:
    """Good answers, expected refusals, and clients that left have no problem."""
    assert result(Ask.IN_BODY, 200).problem is None
    assert result(Ask.UNKNOWN, 404, "model_not_found").problem is None
    plan = Plan(Ask.STREAM, "POST", "/", (), b"", Leaving.STARTED)
    assert Result(plan, 0.0, 1.0, 200, is_whole=False, has_left=True).problem is None
    assert explain(result(Ask.IN_BODY, 200), [window(Trouble.SERVICE_KILLED)]) is None


def test_problems_say_what_is_wrong() -> None:
    """In the words of the table."""
    assert result(Ask.IN_BODY, None).problem == "no answer"
    assert result(Ask.IN_BODY, 200, is_whole=False).problem == "200 cut"
    assert result(Ask.IN_BODY, 503, "no_endpoint").problem == "503 no_endpoint"
    assert result(Ask.IN_BODY, 404).problem == "404"
    assert result(Ask.UNKNOWN, 200).problem == "200"
