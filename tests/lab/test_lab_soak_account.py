"""The account of a run and its verdict."""

from __future__ import annotations

from dataclasses import replace

from extproc.lab.soak.account import UNEXPLAINED, Account, Memory, Verdict
from extproc.lab.soak.asking import Ask, Leaving, Plan, Result
from extproc.lab.soak.troubles import Episode, Trouble, Window

MEGABYTE = 1024 * 1024
KILLED = Window(Episode(0, Trouble.SERVICE_KILLED, None, 1.0), 0.0)


def result(ask: Ask, status: int, reason: str | None = None) -> Result:
    """An answer."""
    return Result(Plan(ask, "POST", "/", (), b""), 1.0, 2.0, status, reason)


def verdict(account: Account) -> Verdict:
    """A run in which nothing else was wrong."""
    steady = Memory([(1000, 60 * MEGABYTE), (2000, 61 * MEGABYTE), (3000, 60 * MEGABYTE)])
    return Verdict(
        account,
        seconds=2.0,
        troubles={"service killed": 1},
        inflight={"a": 0, "b": 0},
        defects={"llmgw_exchange_errors_total": 0},
        streams=0,
        service=steady,
        envoy=steady,
        spread={"a": 150, "b": 150},
        alike=frozenset("ab"),
    )


def test_errors_are_counted_with_their_causes() -> None:
    """By problem, kind of request and cause; what nothing explains is kept as an example."""
    account = Account()
    account.add(result(Ask.IN_BODY, 200), [])
    account.add(result(Ask.RESTRICTED, 503, "no_endpoint"), [KILLED])
    account.add(result(Ask.RESTRICTED, 503, "no_endpoint"), [])
    assert account.requests == 3
    assert account.answers == {"200": 1, "503 no_endpoint": 2}
    assert account.errors == {
        ("503 no_endpoint", "restricted", "service killed"): 1,
        ("503 no_endpoint", "restricted", UNEXPLAINED): 1,
    }
    assert account.unexplained == 1
    assert len(account.examples) == 1
    assert account.brief() == f"503 no_endpoint 1, 503 no_endpoint {UNEXPLAINED} 1"


def test_clients_that_left_are_no_errors() -> None:
    """They are counted by the moment at which they went."""
    account = Account()
    plan = Plan(Ask.STREAM, "POST", "/", (), b"", Leaving.STREAMING)
    account.add(Result(plan, 1.0, 2.0, 200, has_left=True), [])
    assert account.left == {"mid-stream": 1}
    assert account.errors == {}
    assert account.brief() == "none"


def test_memory_is_summed_up() -> None:
    """First, largest, last, growth, and the slope of the line through all of it."""
    memory = Memory([(0, 100), (10, 130), (20, 120)])
    assert (memory.first, memory.largest, memory.last) == (100, 130, 120)
    assert memory.growth_percent == 20.0
    assert memory.slope == 1.0
    assert Memory([(5, 100)]).slope == 0.0


def test_a_good_run_is_good() -> None:
    """Its last line says so in numbers."""
    account = Account()
    account.add(result(Ask.IN_BODY, 200), [])
    good = verdict(account)
    assert good.is_good
    assert good.table().splitlines()[-1] == (
        "soak: 1 requests, 0 unexplained, in-flight 0, rss +0.0 %"
    )


def test_whatever_is_left_over_is_bad() -> None:
    """Also a count below zero, an open stream, a defect, an uneven spread, an unexplained error."""
    account = Account()
    account.add(result(Ask.IN_BODY, 200), [])
    good = verdict(account)
    assert not replace(good, inflight={"a": 1, "b": -1}).is_good
    assert replace(good, inflight={"a": 1, "b": -1}).left_over == 2
    assert not replace(good, streams=1).is_good
    assert not replace(good, defects={"llmgw_exchange_errors_total": 1}).is_good
    assert not replace(good, spread={"a": 290, "b": 10}).is_good
    assert not replace(good, spread={"a": 150, "b": 150, "c": 0}).is_good
    assert replace(good, spread={"a": 150, "b": 150, "c": 20}).is_good
    account.add(result(Ask.IN_BODY, 500, "internal"), [])
    assert not good.is_good
    assert UNEXPLAINED in good.table()
