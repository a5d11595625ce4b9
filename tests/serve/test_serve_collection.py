"""The garbage collector leaves a process that serves alone, which its requests allow."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from serve_fakes import request_headers

from extproc.config.parse import parse
from extproc.serve.app import App
from extproc.serve.collection import rarely_collect
from extproc.serve.pb import ext_proc_pb2 as pb
from extproc.serve.stream import StreamEnd

CONFIG = """
cluster_id: home
endpoints:
  - {id: a, url: 'http://127.0.0.1:1', models: [m], engine: none}
  - {id: b, url: 'http://127.0.0.1:2', models: [m], engine: none}
"""


@pytest.fixture
def collector() -> Iterator[None]:
    """The collector is as it was afterwards."""
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    gc.enable()


@pytest.mark.usefixtures("collector")
def test_what_is_there_is_not_looked_at_again() -> None:
    """And the rest far less often than by default."""
    usual = gc.get_threshold()
    rarely_collect()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 1000
    assert gc.get_threshold()[0] >= 10 * usual[0]


@pytest.mark.usefixtures("collector")
def test_requests_leave_no_cycles() -> None:
    """Served, refused or given up: all that they made is gone without the collector."""
    app = App(parse(CONFIG), write_request=None)
    app.lifecycle.started()
    answer = pb.ProcessingRequest(response_headers=pb.HttpHeaders()).SerializeToString()

    def ask(model: str, *messages: bytes) -> None:
        stream = app.ext_proc()
        first = {":method": "POST", ":path": "/v1/completions", "x_llmgw_model": model}
        stream.receive(request_headers(**first))
        for message in messages:
            stream.receive(message)
        stream.written()
        stream.end(StreamEnd.CANCELLED)

    def ask_all() -> None:
        for _ in range(20):
            ask("m", answer)
            ask("m")
            ask("unknown")
        app.core.ledger.tick(float("inf"))

    ask_all()  # what is made once
    gc.collect()
    gc.disable()
    ask_all()
    assert len(app.core.gateway.scheduler.decisions) == 80
    assert len(app.core.ledger) == 0
    assert gc.collect() == 0
