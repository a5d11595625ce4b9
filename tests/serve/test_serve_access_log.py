"""Envoy's access log: what a real Envoy 1.40 wrote, and what nobody should write."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_fakes import Tally, silent_lines

from extproc.exchange.messages import AttemptLog, LogEntry, RequestLog
from extproc.exchange.outcome import Flag
from extproc.serve.access_log import AccessLogStream, parse_log
from extproc.serve.pb import access_log_pb2 as pb
from extproc.serve.stream import StreamBroken, StreamEnd
from extproc.serve.wire import Unreadable

PAGES = Path(__file__).parent / "access_log"

UC = int(Flag.UPSTREAM_CONNECTION_TERMINATION)
UF = int(Flag.UPSTREAM_CONNECTION_FAILURE)
UH = int(Flag.NO_HEALTHY_UPSTREAM)
UT = int(Flag.UPSTREAM_TIMEOUT)
DC = int(Flag.DOWNSTREAM_TERMINATION)
NC = int(Flag.NO_CLUSTER)
UPE = int(Flag.UPSTREAM_PROTOCOL_ERROR)
URX = int(Flag.RETRY_LIMIT_EXCEEDED)
CUT = "upstream_reset_after_response_started{protocol_error}"
GONE = "downstream_remote_disconnect"
REFUSED = (
    "upstream_reset_before_response_started"
    "{remote_connection_failure|delayed_connect_error:_Connection_refused}"
)

GOLDEN: dict[str, tuple[LogEntry, ...]] = {
    "attempt-first": (AttemptLog("i1-2", "ep-a", 503, 0, "", "7"),),
    "attempt-hidden-429-then-b": (AttemptLog("i1-3", "ep-a", 429, 0, "", "3"),),
    "attempt-refused-then-b": (AttemptLog("i1-4", "ep-dead", 0, UF, "", None),),
    "attempt-refused-last": (AttemptLog("i1-5", "ep-dead", 0, UF, "", None),),
    "attempt-engine-500-last": (AttemptLog("i1-6", "ep-a", 500, 0, "", None),),
    "attempt-reset-before-headers-then-b": (AttemptLog("i1-8", "ep-a", 0, UC, "", None),),
    "attempt-per-try-timeout-then-b": (AttemptLog("i1-9", "ep-a", 0, UT, "", None),),
    "attempt-cut-mid-stream": (AttemptLog("i1-a", "ep-a", 200, UPE, "", None),),
    "attempt-refused-then-no-host": (AttemptLog("i1-f", "ep-dead", 0, UF, "", None),),
    "attempt-hidden-503-then-client-abort-mid-stream": (
        AttemptLog("i1-10", "ep-a", 503, 0, "", None),
        AttemptLog("i1-10", "ep-a", 503, 0, "", None),
    ),
    "request-first": (RequestLog("i1-5", "ep-dead", 503, UF | URX, REFUSED, 1),),
    "request-engine-500-last": (RequestLog("i1-6", "ep-a", 500, URX, "via_upstream", 1),),
    "request-cut-mid-stream": (RequestLog("i1-a", "ep-a", 200, UPE, CUT, 1),),
    "request-client-abort-mid-stream": (RequestLog("i1-b", "ep-a", 200, DC, GONE, 1),),
    "request-client-abort-before-headers": (RequestLog("i1-c", "ep-a", 0, DC, GONE, 1),),
    "request-unknown-cluster": (RequestLog("i1-d", "", 503, NC, "cluster_not_found", 0),),
    "request-no-host": (RequestLog("i1-e", "", 503, UH, "no_healthy_upstream", 1),),
    "request-refused-then-no-host": (
        RequestLog("i1-f", "ep-dead", 503, UH, "no_healthy_upstream", 2),
    ),
    "request-hidden-503-then-client-abort-mid-stream": (
        RequestLog("i1-10", "ep-a", 503, URX, "via_upstream", 2),
    ),
}


def one(entry: pb.HTTPAccessLogEntry) -> bytes:
    """A message with one entry."""
    logs = pb.StreamAccessLogsMessage.HTTPAccessLogEntries(log_entry=[entry])
    return pb.StreamAccessLogsMessage(http_logs=logs).SerializeToString()


@pytest.mark.parametrize("name", sorted(path.stem for path in PAGES.glob("*.bin")))
def test_a_real_envoys_message_is_understood(name: str) -> None:
    """Each recorded message gives exactly the entries that it stands for."""
    assert parse_log((PAGES / f"{name}.bin").read_bytes()) == GOLDEN[name]


def test_flag_numbers_are_the_attributes() -> None:
    """Each flag's field gives the bit that Envoy's attribute has for it."""
    by_field = {
        "no_healthy_upstream": Flag.NO_HEALTHY_UPSTREAM,
        "upstream_request_timeout": Flag.UPSTREAM_TIMEOUT,
        "local_reset": Flag.LOCAL_RESET,
        "upstream_remote_reset": Flag.UPSTREAM_RESET,
        "upstream_connection_failure": Flag.UPSTREAM_CONNECTION_FAILURE,
        "upstream_connection_termination": Flag.UPSTREAM_CONNECTION_TERMINATION,
        "upstream_overflow": Flag.UPSTREAM_OVERFLOW,
        "no_route_found": Flag.NO_ROUTE,
        "downstream_connection_termination": Flag.DOWNSTREAM_TERMINATION,
        "upstream_retry_limit_exceeded": Flag.RETRY_LIMIT_EXCEEDED,
        "stream_idle_timeout": Flag.STREAM_IDLE_TIMEOUT,
        "downstream_protocol_error": Flag.DOWNSTREAM_PROTOCOL_ERROR,
        "upstream_max_stream_duration_reached": Flag.MAX_STREAM_DURATION,
        "duration_timeout": Flag.DURATION_TIMEOUT,
        "upstream_protocol_error": Flag.UPSTREAM_PROTOCOL_ERROR,
        "no_cluster_found": Flag.NO_CLUSTER,
        "dns_resolution_failure": Flag.DNS_FAILURE,
        "downstream_remote_reset": Flag.DOWNSTREAM_RESET,
    }
    assert set(by_field.values()) == set(Flag)
    for name, flag in by_field.items():
        entry = pb.HTTPAccessLogEntry()
        setattr(entry.common_properties.response_flags, name, True)
        (parsed,) = parse_log(one(entry))
        assert parsed.flags == flag


def test_an_entry_of_another_moment_is_left_out() -> None:
    """Entries for a start, a pool or a period say nothing about an end."""
    for moment in set(pb.AccessLogType.values()) - {pb.NotSet, pb.DownstreamEnd, pb.UpstreamEnd}:
        entry = pb.HTTPAccessLogEntry()
        entry.common_properties.access_log_type = moment
        assert parse_log(one(entry)) == ()


def test_bytes_that_are_not_utf8_do_not_spoil_a_message() -> None:
    """Latin-1 from an endpoint is read as far as it goes."""
    entry = pb.HTTPAccessLogEntry()
    entry.common_properties.access_log_type = pb.UpstreamEnd
    entry.response.response_headers["retry-after"] = b"\xff"
    entry.response.response_code_details = b"a\xffb"
    assert parse_log(one(entry)) == (AttemptLog("", "", 0, 0, "a\ufffdb", "\xff"),)


@given(st.binary(max_size=300))
def test_junk_is_refused_by_its_own_error(raw: bytes) -> None:
    """Whatever the bytes are, they are read or refused."""
    with suppress(Unreadable):
        parse_log(raw)


def test_every_entry_reaches_the_sink_with_the_time() -> None:
    """Entries come in order, with the moment of their message; nothing is replied."""
    seen: list[tuple[LogEntry, float]] = []
    tally = Tally()
    stream = AccessLogStream(
        lambda entry, now: seen.append((entry, now)),
        observer=tally,
        lines=silent_lines(),
        clock=lambda: 7.0,
    )
    name = "attempt-hidden-503-then-client-abort-mid-stream"
    assert stream.receive((PAGES / f"{name}.bin").read_bytes()) == ()
    stream.written()
    stream.end(StreamEnd.HALF_CLOSED)
    assert seen == [(entry, 7.0) for entry in GOLDEN[name]]
    assert tally.seen["entries"] == 2


def test_a_defect_costs_one_entry() -> None:
    """An entry whose booking fails is counted, and the next one is booked."""
    seen: list[LogEntry] = []

    def sink(entry: LogEntry, now: float) -> None:
        if not seen:
            seen.append(entry)
            raise RuntimeError("defect")
        seen.append(entry)

    tally = Tally()
    stream = AccessLogStream(sink, observer=tally, lines=silent_lines(), clock=lambda: 0.0)
    stream.receive((PAGES / "attempt-hidden-503-then-client-abort-mid-stream.bin").read_bytes())
    assert len(seen) == 2
    assert tally.seen["failed"] == 1


def test_an_unreadable_message_ends_the_stream() -> None:
    """Bytes that are no message are counted and break the stream."""
    tally = Tally()
    stream = AccessLogStream(
        lambda _entry, _now: None, observer=tally, lines=silent_lines(), clock=lambda: 0.0
    )
    with pytest.raises(StreamBroken, match="unreadable"):
        stream.receive(b"\xff\xff")
    assert tally.seen["unreadable"] == 1
