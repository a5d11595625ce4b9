"""Counting what happens, without letting clients choose labels."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import Reason
from extproc.exchange.messages import Phase
from extproc.exchange.observer import Observer
from extproc.exchange.outcome import Outcome
from extproc.serve.access_log import LogObserver
from extproc.serve.ext_proc_stream import StreamObserver
from extproc.telemetry import families
from extproc.telemetry.metrics import OTHER, Histogram, Metrics

SERVED = {"gpt-9", "llama"}


def metrics() -> Metrics:
    """Metrics that know two models."""
    return Metrics(SERVED.__contains__)


def test_it_hears_everything_that_is_told() -> None:
    """One object observes the core, the streams and the logs."""
    told = metrics()
    core: Observer = told
    streams: StreamObserver = told
    logs: LogObserver = told
    core.dispatched("a", "gpt-9")
    core.dispatched("a", "gpt-9")
    core.attempt("a", Outcome.FAILURE)
    core.failed_open()
    streams.exchange_failed()
    streams.action_refused()
    streams.unreadable_message()
    logs.log_entries(3)
    assert told.counts(families.DISPATCHED) == {("a", "gpt-9"): 2}
    assert told.counts(families.ATTEMPTS) == {("a", "failure"): 1}
    assert told.counts(families.LOG_ENTRIES) == {(): 3}
    for family in (
        families.FAILED_OPEN,
        families.EXCHANGE_ERRORS,
        families.ACTIONS_REFUSED,
        families.UNREADABLE,
    ):
        assert told.counts(family) == {(): 1}


def test_streams_are_counted_while_they_are_open() -> None:
    """Opening and closing are exact."""
    told = metrics()
    told.stream_opened()
    told.stream_opened()
    told.stream_closed()
    assert told.open_streams == 1


def test_the_longest_stall_is_shown_once() -> None:
    """Each read begins anew."""
    told = metrics()
    for seconds in (0.1, 0.7, 0.2):
        told.stalled(seconds)
    assert told.take_longest_stall() == 0.7
    assert told.take_longest_stall() == 0.0


def test_junk_models_fold_into_one() -> None:
    """Fifty thousand names that nobody serves make one series each."""
    told = metrics()
    for number in range(50_000):
        told.refused(Reason.MODEL_NOT_FOUND, f"junk-{number}")
        told.answered(f"junk-{number}", 0.1)
    told.refused(Reason.MODEL_MISSING, "")
    assert told.counts(families.REFUSED) == {
        (Reason.MODEL_NOT_FOUND, OTHER): 50_000,
        (Reason.MODEL_MISSING, ""): 1,
    }
    assert list(told.histograms(families.TIME_TO_HEADERS)) == [(OTHER,)]
    assert not told._models


def test_series_of_what_is_gone_go_away() -> None:
    """Endpoints and models that are no longer there leave nothing behind."""
    served = set(SERVED)
    told = Metrics(lambda name: name in served)
    for endpoint in ("a", "b"):
        told.dispatched(endpoint, "gpt-9")
        told.dispatched(endpoint, "llama")
        told.attempt(endpoint, Outcome.SUCCESS)
    told.answered("gpt-9", 1.0)
    told.answered("llama", 1.0)
    told.ended("llama", 1.0)
    told.refused(Reason.SATURATED, "llama")
    told.refused(Reason.MODEL_NOT_FOUND, "junk")
    served.remove("llama")
    told.keep_only({"a"})
    assert told.counts(families.DISPATCHED) == {("a", "gpt-9"): 1}
    assert told.counts(families.ATTEMPTS) == {("a", "success"): 1}
    assert told.counts(families.REFUSED) == {(Reason.MODEL_NOT_FOUND, OTHER): 1}
    assert list(told.histograms(families.TIME_TO_HEADERS)) == [("gpt-9",)]
    assert told.histograms(families.DURATION) == {}
    told.refused(Reason.SATURATED, "llama")
    assert told.counts(families.REFUSED)[Reason.SATURATED, OTHER] == 1


def test_a_message_counts_in_its_phase() -> None:
    """Work is measured phase by phase."""
    told = metrics()
    told.message(Phase.REQUEST_BODY, 0.002)
    histograms = told.histograms(families.MESSAGES)
    assert set(histograms) == {(phase.value,) for phase in Phase}
    assert histograms[("request_body",)].total == 0.002
    assert sum(histograms[("request_headers",)].counts) == 0


@given(st.lists(st.floats(0, 1e6), max_size=50))
def test_a_histogram_is_cumulative(values: list[float]) -> None:
    """Each bucket holds every value that is at most its bound; the last holds all."""
    histogram = Histogram((0.1, 1.0, 10.0))
    for value in values:
        histogram.add(value)
    for bound, count in histogram.cumulative():
        assert count == sum(value <= bound for value in values)
    assert histogram.total == sum(values)
