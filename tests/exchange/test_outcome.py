"""What an attempt's status and flags mean for its endpoint."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.exchange.outcome import (
    DEFAULT_BACKPRESSURE_SECONDS,
    Flag,
    Outcome,
    backpressure_seconds,
    classify,
    retry_after_seconds,
)

VIA = "via_upstream"


@pytest.mark.parametrize(
    ("status", "retry_after", "expected"),
    [
        (200, None, Outcome.SUCCESS),
        (204, None, Outcome.SUCCESS),
        (101, None, Outcome.SUCCESS),
        (307, None, Outcome.SUCCESS),
        (400, None, Outcome.CLIENT_ERROR),
        (413, None, Outcome.CLIENT_ERROR),
        (422, None, Outcome.CLIENT_ERROR),
        (401, None, Outcome.MISCONFIGURED),
        (403, None, Outcome.MISCONFIGURED),
        (404, None, Outcome.MISCONFIGURED),
        (405, None, Outcome.MISCONFIGURED),
        (429, None, Outcome.BACKPRESSURE),
        (429, "3", Outcome.BACKPRESSURE),
        (503, "3", Outcome.BACKPRESSURE),
        (503, None, Outcome.FAILURE),
        (500, None, Outcome.FAILURE),
        (502, "3", Outcome.FAILURE),
        (504, None, Outcome.FAILURE),
        (508, None, Outcome.LOOP),
    ],
)
def test_the_endpoints_own_answer_is_judged_by_its_status(
    status: int, retry_after: str | None, expected: Outcome
) -> None:
    """Without a flag the status decides, and a 503 that says when to come back is no failure."""
    assert classify(status, 0, VIA, retry_after) is expected


def test_a_websocket_ends_with_its_connection() -> None:
    """That is no cut; anything else that goes wrong with it is one."""
    details = "upstream_reset_after_response_started{connection_termination}"
    closed = Flag.UPSTREAM_CONNECTION_TERMINATION
    assert classify(101, closed, details, None) is Outcome.SUCCESS
    assert classify(101, closed, "", None) is Outcome.SUCCESS
    assert classify(200, closed, details, None) is Outcome.FAILURE
    assert classify(101, closed | Flag.UPSTREAM_TIMEOUT, details, None) is Outcome.FAILURE
    assert classify(101, Flag.DOWNSTREAM_TERMINATION, details, None) is Outcome.ABORTED


@pytest.mark.parametrize(
    "flag",
    [
        Flag.NO_HEALTHY_UPSTREAM,
        Flag.UPSTREAM_TIMEOUT,
        Flag.UPSTREAM_RESET,
        Flag.UPSTREAM_CONNECTION_FAILURE,
        Flag.UPSTREAM_CONNECTION_TERMINATION,
        Flag.UPSTREAM_PROTOCOL_ERROR,
        Flag.DNS_FAILURE,
    ],
)
@pytest.mark.parametrize("also", [0, Flag.RETRY_LIMIT_EXCEEDED])
def test_a_connection_that_broke_is_a_failure_whatever_the_status(flag: Flag, also: int) -> None:
    """Refused, reset, timed out or cut after a 200: the endpoint failed."""
    for status in (200, 503, 504):
        assert classify(status, flag | also, "upstream_reset", None) is Outcome.FAILURE


@pytest.mark.parametrize("flag", [Flag.NO_CLUSTER, Flag.UPSTREAM_OVERFLOW])
def test_what_envoy_cannot_send_is_quarantined(flag: Flag) -> None:
    """A missing cluster or a full one says nothing about the engine."""
    assert classify(503, flag, "cluster_not_found", None) is Outcome.QUARANTINED


@pytest.mark.parametrize(
    "flag",
    [Flag.DOWNSTREAM_TERMINATION, Flag.DOWNSTREAM_RESET, Flag.DOWNSTREAM_PROTOCOL_ERROR],
)
@pytest.mark.parametrize("status", [0, 200, 500])
def test_a_caller_who_hangs_up_is_nobodys_fault(flag: Flag, status: int) -> None:
    """The client's going away outranks everything that it may look like."""
    both = flag | Flag.UPSTREAM_CONNECTION_TERMINATION
    assert classify(status, both, "downstream_remote_disconnect", None) is Outcome.ABORTED


@pytest.mark.parametrize(
    ("status", "flags", "details"),
    [
        (413, 0, "request_payload_too_large"),
        (404, int(Flag.NO_ROUTE), "route_not_found"),
        (500, 0, "rejected_header_mutations"),
        (408, int(Flag.STREAM_IDLE_TIMEOUT), "stream_idle_timeout"),
    ],
)
def test_envoys_own_refusal_is_charged_to_nobody(status: int, flags: int, details: str) -> None:
    """What Envoy answers itself is no endpoint's doing."""
    assert classify(status, flags, details, None) is Outcome.NOBODY


def test_the_engines_500_after_the_last_retry_is_a_failure() -> None:
    """The retry limit tells that Envoy stopped, not that Envoy failed."""
    assert classify(500, Flag.RETRY_LIMIT_EXCEEDED, VIA, None) is Outcome.FAILURE


@pytest.mark.parametrize(
    ("status", "retry_after", "expected"),
    [
        (503, None, Outcome.FAILURE),
        (503, "3", Outcome.BACKPRESSURE),
        (429, None, Outcome.BACKPRESSURE),
    ],
)
def test_an_answer_that_envoy_had_no_room_to_retry_is_the_endpoints(
    status: int, retry_after: str | None, expected: Outcome
) -> None:
    """The overflow is of retries: the endpoint was reached, and this is what it said."""
    flags = Flag.UPSTREAM_OVERFLOW | Flag.RETRY_LIMIT_EXCEEDED
    assert classify(status, flags, VIA, retry_after) is expected


def test_a_broken_connection_that_envoy_had_no_room_to_retry_is_a_failure() -> None:
    """The overflow does not unmake what came before it."""
    flags = Flag.UPSTREAM_CONNECTION_FAILURE | Flag.UPSTREAM_OVERFLOW
    assert classify(503, flags, "upstream_reset", None) is Outcome.FAILURE


@pytest.mark.parametrize(
    ("status", "expected"),
    [(504, Outcome.FAILURE), (408, Outcome.NOBODY), (200, Outcome.NOBODY)],
)
def test_an_idle_stream_is_a_failure_where_no_answer_began(status: int, expected: Outcome) -> None:
    """504: the endpoint had the whole request. 408: the client had not sent it. 200: either."""
    assert classify(status, Flag.STREAM_IDLE_TIMEOUT, "stream_idle_timeout", None) is expected


@given(
    status=st.integers(0, 999),
    flags=st.integers(0, 2**30),
    details=st.text(max_size=30),
    retry_after=st.none() | st.text(max_size=10),
)
def test_every_attempt_has_one_meaning(
    status: int, flags: int, details: str, retry_after: str | None
) -> None:
    """Any status with any flags is classified."""
    assert classify(status, flags, details, retry_after) in Outcome


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", 3.0),
        (" 7 ", 7.0),
        ("1.5", 1.5),
        ("0", 0.0),
        (None, DEFAULT_BACKPRESSURE_SECONDS),
        ("", DEFAULT_BACKPRESSURE_SECONDS),
        ("-1", DEFAULT_BACKPRESSURE_SECONDS),
        ("nan", DEFAULT_BACKPRESSURE_SECONDS),
        ("1e9", DEFAULT_BACKPRESSURE_SECONDS),
        ("9" * 30, DEFAULT_BACKPRESSURE_SECONDS),
        ("²", DEFAULT_BACKPRESSURE_SECONDS),
        (".", DEFAULT_BACKPRESSURE_SECONDS),
        ("Wed, 21 Oct 2026 07:28:00 GMT", DEFAULT_BACKPRESSURE_SECONDS),
    ],
)
def test_retry_after_is_read_as_seconds_and_junk_as_the_default(
    text: str | None, expected: float
) -> None:
    """Only a plain count of seconds is believed."""
    assert backpressure_seconds(text) == expected
    assert retry_after_seconds(text) in {expected, None}


@pytest.mark.parametrize("text", [None, "", "-1", "nan", "soon", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_what_is_no_count_of_seconds_is_no_retry_after(text: str | None) -> None:
    """A floor of nothing is none."""
    assert retry_after_seconds(text) is None


@given(st.text(max_size=40))
def test_any_retry_after_gives_a_finite_wait(text: str) -> None:
    """No header value makes an endpoint wait without end."""
    assert 0 <= backpressure_seconds(text) < 1e9
