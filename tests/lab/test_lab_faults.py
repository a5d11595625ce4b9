"""Which fault strikes, how often, and how faults are written down."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.lab.faults import CutBy, Fault, FaultKind, Faults, parse_faults, parse_flag


def test_a_fault_strikes_so_many_times() -> None:
    """Two times, then never again; what is left can be seen."""
    faults = Faults(Random(1))
    faults.add(Fault(kind=FaultKind.HANG, times=2))
    assert faults.armed()[0].times == 2
    assert faults.for_request("/v1/x", is_api=True) is not None
    assert faults.armed()[0].times == 1
    assert faults.for_request("/v1/x", is_api=True) is not None
    assert faults.for_request("/v1/x", is_api=True) is None
    assert faults.armed() == []


def test_the_oldest_that_matches_strikes() -> None:
    """A fault for another path is passed over and not used up."""
    faults = Faults(Random(1))
    first = Fault(kind=FaultKind.RESET, path="/v1/chat", times=1)
    second = Fault(kind=FaultKind.HANG)
    faults.add(first, second)
    assert faults.for_request("/v1/models", is_api=True) == second
    assert faults.for_request("/v1/chat/completions", is_api=True) == first
    assert faults.for_request("/v1/chat/completions", is_api=True) == second
    faults.clear()
    assert faults.for_request("/v1/models", is_api=True) is None


def test_each_kind_strikes_where_it_belongs() -> None:
    """Requests, scrapes, connections and listening are four different things."""
    for kind in FaultKind:
        faults = Faults(Random(1))
        faults.add(Fault(kind=kind))
        places = [
            faults.for_request("/v1/x", is_api=True) is not None,
            faults.for_metrics() is not None,
            faults.for_connection() is not None,
            kind.is_about_listening,
        ]
        assert places.count(True) == 1, kind


def test_probability_is_the_share_of_requests() -> None:
    """About a third of 3,000 requests is struck, by the given randomness."""
    faults = Faults(Random(7))
    faults.add(Fault(kind=FaultKind.HANG, probability=1 / 3))
    struck = sum(faults.for_request("/", is_api=True) is not None for _ in range(3000))
    assert 900 < struck < 1100


def test_a_flag_is_a_kind_with_fields() -> None:
    """The short form has fields, headers and the values' own types."""
    (fault,) = parse_flag("status,status=429,times=2,header=retry-after: 2,header=x-a:b,body=slow")
    assert fault == Fault(
        kind=FaultKind.STATUS,
        status=429,
        times=2,
        headers={"retry-after": "2", "x-a": "b"},
        body="slow",
    )
    assert parse_flag("reset") == [Fault(kind=FaultKind.RESET)]
    assert parse_flag("cut,how=fin,chunks=3") == [
        Fault(kind=FaultKind.CUT, how=CutBy.FIN, chunks=3)
    ]


def test_a_flag_may_be_json() -> None:
    """An object is one fault, a list is several."""
    assert parse_flag('{"kind":"hang","seconds":1.5}') == [Fault(kind=FaultKind.HANG, seconds=1.5)]
    assert len(parse_flag('[{"kind":"hang"},{"kind":"reset"}]')) == 2


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "status,status",
        "status,unknown=1",
        "status,status=99",
        "status,status=103",
        "status,status=600",
        "informational,status=99",
        "hang,times=0",
        "hang,probability=0",
        "hang,probability=1.5",
        "hang,seconds=-1",
        "cut,chunks=-1",
        "cut,how=gently",
        "{",
        "[1]",
    ],
)
def test_what_cannot_be_is_refused(text: str) -> None:
    """A wrong fault is a ValueError that says something."""
    with pytest.raises(ValueError, match=r"\w"):
        parse_flag(text)


@given(st.text(max_size=60))
def test_any_flag_is_faults_or_a_value_error(text: str) -> None:
    """No text raises anything else."""
    try:
        faults = parse_flag(text)
    except ValueError:
        return
    assert all(isinstance(fault, Fault) for fault in faults)


def test_json_that_is_no_fault_says_where() -> None:
    """The message names the field."""
    with pytest.raises(ValueError, match=r"\$\.times"):
        parse_faults('{"kind":"hang","times":"often"}')
