"""Every way in which a metrics page can be wrong."""

from __future__ import annotations

import asyncio

import pytest
from lab_client import CHAT, call, chat, connected

from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind
from extproc.lab.pages import Dialect


@pytest.mark.parametrize("dialect", [d for d in Dialect if d is not Dialect.NONE])
async def test_each_dialect_has_its_page_at_its_path(dialect: Dialect) -> None:
    """The page is Prometheus text, and the scrape is recorded with its headers."""
    async with LabEngine(dialect=dialect.value) as engine:
        reply = await call(engine, "GET", dialect.metrics_path, None, {"accept": "text/plain"})
        assert reply.status == 200
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert b"# TYPE" in reply.body
        assert engine.probes[0].header("accept") == [b"text/plain"]


async def test_an_engine_without_metrics_has_no_page() -> None:
    """The dialect none answers 404."""
    async with LabEngine(dialect="none") as engine:
        assert (await call(engine, "GET", "/metrics")).status == 404


async def test_a_hanging_page_never_comes_and_others_do() -> None:
    """The scrape waits while requests and health checks are served."""
    async with LabEngine() as engine:
        engine.inject(Fault(kind=FaultKind.METRICS_HANG, times=1))
        async with connected(engine) as connection:
            connection.send_head("GET", "/metrics", {}, None)
            await engine.until(lambda: len(engine.probes) == 1)
            assert (await call(engine, "POST", CHAT, chat())).status == 200
            assert engine.probes[0].end_seconds is None
        await engine.until(lambda: engine.probes[0].end_seconds is not None)
        assert engine.counters.aborted == 0
        assert (await call(engine, "GET", "/metrics")).status == 200


async def test_a_trickling_page_promises_all_and_gives_little() -> None:
    """A byte comes, the next is not in sight."""
    async with LabEngine() as engine, connected(engine) as connection:
        engine.inject(Fault(kind=FaultKind.METRICS_TRICKLE, seconds=60))
        connection.send_head("GET", "/metrics", {}, None)
        _, headers = await connection.head()
        assert int(headers["content-length"]) > 1000
        assert await connection.reader.readexactly(1) == b"#"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connection.reader.readexactly(1)


async def test_a_trickling_page_can_be_whole_in_the_end() -> None:
    """Byte after byte it is the same page."""
    async with LabEngine(dialect="llamacpp") as engine:
        right = await call(engine, "GET", "/metrics")
        engine.inject(Fault(kind=FaultKind.METRICS_TRICKLE, seconds=0))
        assert (await call(engine, "GET", "/metrics")).body == right.body


async def test_a_slow_page_is_right() -> None:
    """It is the same page, later."""
    async with LabEngine() as engine:
        right = await call(engine, "GET", "/metrics")
        engine.inject(Fault(kind=FaultKind.METRICS_SLOW, seconds=0.05))
        assert (await call(engine, "GET", "/metrics")).body == right.body
        assert (engine.probes[1].answer_seconds or 0) >= 0.05


async def test_wrong_names_are_well_formed() -> None:
    """Every line is there, every name is another."""
    async with LabEngine() as engine:
        right = (await call(engine, "GET", "/metrics")).body.decode().splitlines()
        engine.inject(Fault(kind=FaultKind.METRICS_NAMES))
        wrong = (await call(engine, "GET", "/metrics")).body.decode().splitlines()
        assert [line.replace("other_", "", 1) for line in wrong] == right
        assert not any(line.startswith(("vllm:", "# TYPE vllm:")) for line in wrong)


@pytest.mark.parametrize(
    ("fault", "status", "body"),
    [
        (Fault(kind=FaultKind.METRICS_EMPTY), 200, b""),
        (Fault(kind=FaultKind.METRICS_JSON), 200, b"[]"),
        (Fault(kind=FaultKind.METRICS_STATUS), 404, b"not here"),
        (Fault(kind=FaultKind.METRICS_STATUS, status=500), 500, b"not here"),
        (Fault(kind=FaultKind.METRICS_REDIRECT, body="http://169.254.1.1/"), 301, b""),
    ],
)
async def test_something_else_comes_in_its_place(fault: Fault, status: int, body: bytes) -> None:
    """Status and body are the fault's."""
    async with LabEngine() as engine:
        engine.inject(fault)
        reply = await call(engine, "GET", "/metrics")
        assert (reply.status, reply.body) == (status, body)
        assert reply.headers.get("location") == (fault.body if status == 301 else None)


async def test_a_login_page_is_html() -> None:
    """It looks like success to whoever looks at the status alone."""
    async with LabEngine() as engine:
        engine.inject(Fault(kind=FaultKind.METRICS_HTML))
        reply = await call(engine, "GET", "/metrics")
        assert reply.headers["content-type"] == "text/html"
        assert reply.body.startswith(b"<!doctype html>")


async def test_any_text_can_be_the_page() -> None:
    """Byte for byte, as the type that is asked for; a plain one is the format's own."""
    text = 'a{b="é"} 1 # {c="d"} 2\r\n\n# EOF'
    async with LabEngine() as engine:
        engine.inject(Fault(kind=FaultKind.METRICS_PAGE, body=text, times=1))
        reply = await call(engine, "GET", "/metrics")
        assert (reply.status, reply.body) == (200, text.encode())
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        headers = {"content-type": "application/openmetrics-text"}
        engine.inject(Fault(kind=FaultKind.METRICS_PAGE, body=text, headers=headers))
        reply = await call(engine, "GET", "/metrics")
        assert reply.headers["content-type"] == "application/openmetrics-text"


async def test_api_faults_spare_the_page() -> None:
    """What goes wrong with requests does not with scrapes, nor the other way round."""
    async with LabEngine() as engine:
        engine.inject(Fault(kind=FaultKind.STATUS), Fault(kind=FaultKind.METRICS_STATUS))
        assert (await call(engine, "GET", "/metrics")).status == 404
        assert (await call(engine, "POST", CHAT, chat())).status == 503
        await engine.heal()
        assert (await call(engine, "GET", "/metrics")).status == 200
