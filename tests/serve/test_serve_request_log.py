"""The line for every request."""

from __future__ import annotations

from random import Random

from extproc.config.parse import parse
from extproc.errors import Reason
from extproc.exchange.messages import RequestHeaders, ResponseHeaders, Steer
from extproc.exchange.observer import NoObserver
from extproc.exchange.outcome import Outcome
from extproc.serve.assembly import assemble
from extproc.serve.request_log import RequestLog
from extproc.telemetry import families
from extproc.telemetry.metrics import Metrics

TEXT = """
cluster_id: home
endpoints:
  - {id: a, url: 'http://127.0.0.1:1', models: [m], engine: none}
  - {id: b, url: 'http://127.0.0.1:2', models: [m], engine: none}
"""
HEADERS = [(":method", b"POST"), (":path", b"/v1/completions"), ("x-llmgw-model", b"m")]


def lines_of(*messages: ResponseHeaders) -> tuple[list[str], Steer]:
    """What is written about one request that got these answers."""
    lines: list[str] = []
    log = RequestLog(lines.append, then=NoObserver())
    core = assemble(
        parse(TEXT),
        observer=log,
        random=Random(1),
        is_ready=lambda: True,
        now=0.0,
        created=1,
        on_ended=log.flight_ended,
    )
    exchange = core.exchange()
    steer = exchange.receive(RequestHeaders(HEADERS), 1.0)
    assert isinstance(steer, Steer)
    for message in messages:
        exchange.receive(message, 1.25)
    exchange.end(1.5)
    return lines, steer


def test_the_line_names_every_endpoint_that_was_tried() -> None:
    """A failover can be read off the terminal."""
    lines, steer = lines_of(ResponseHeaders(200, details="via_upstream", attempts=2))
    first, second = (name.removeprefix("ep-") for name in steer.clusters)
    assert lines == [f"m /v1/completions -> {first} > {second} 200 0.500 s"]


def test_a_request_without_an_answer_says_so() -> None:
    """A client that went away is no status."""
    lines, steer = lines_of()
    assert lines == [f"m /v1/completions -> {steer.clusters[0][3:]} no answer 0.500 s"]


def test_everything_is_passed_on_and_refusals_are_lines() -> None:
    """The metrics count as if nobody watched."""
    lines: list[str] = []
    metrics = Metrics(lambda name: name == "m")
    log = RequestLog(lines.append, then=metrics)
    log.refused(Reason.LOOP, "m")
    log.refused(Reason.MODEL_MISSING, "")
    log.dispatched("a", "m")
    log.attempt("a", Outcome.SUCCESS)
    log.failed_open()
    log.answered("m", 0.1)
    log.ended("m", 0.2)
    assert lines == ["m refused: loop", "(no model) refused: model_missing"]
    assert metrics.counts(families.REFUSED) == {("loop", "m"): 1, ("model_missing", ""): 1}
    assert metrics.counts(families.DISPATCHED) == {("a", "m"): 1}
    assert metrics.counts(families.ATTEMPTS) == {("a", "success"): 1}
    assert metrics.counts(families.FAILED_OPEN) == {(): 1}
    assert list(metrics.histograms(families.DURATION)) == [("m",)]
