"""The command `llmgwctl` on metrics pages and on a service that is not there."""

from __future__ import annotations

from random import Random

from prometheus_client import CollectorRegistry
from rich.console import Console
from typer.testing import CliRunner

from extproc.cli.llmgwctl import app, as_table, rows
from extproc.exchange.outcome import Outcome
from extproc.lab.processes import free_port
from extproc.routing.breaker import Verdict
from extproc.routing.endpoint import BreakerSettings, Info, Stats, Url
from extproc.routing.registry import Registry, RegistrySettings
from extproc.telemetry.collector import FleetCollector
from extproc.telemetry.fleet import read_fleet
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.page import write_page


async def page() -> str:
    """The metrics of two endpoints: one busy, one broken and never scraped."""
    registry = Registry(RegistrySettings(), Random(1))
    breaker = BreakerSettings(threshold=1)
    registry.replace(
        [
            Info("a", Url.parse("http://127.0.0.1:1"), ("m",)),
            Info("b", Url.parse("http://127.0.0.1:2"), ("m",), breaker=breaker),
        ],
        0.0,
    )
    metrics = Metrics(lambda name: name == "m")
    registry.observe("a", Stats(running=3, waiting=1, kv_usage_ratio=0.25), 1.0)
    assert registry.acquire("a", 1.0, lease_seconds=1) is not None
    broken = registry.acquire("b", 1.0, lease_seconds=1)
    assert broken is not None
    registry.verdict(broken.ticket, Verdict.FAILURE, 1.0, broken.permit)
    broken.end(1.0)
    metrics.attempt("b", Outcome.FAILURE)
    published = CollectorRegistry()
    published.register(
        FleetCollector(
            metrics,
            readings=lambda: read_fleet(registry, 1.5),
            is_ready=lambda: True,
            version="test",
        )
    )
    return (await write_page(published)).decode()


async def test_every_endpoint_is_a_row_and_the_unknown_is_a_hyphen() -> None:
    """Load, breaker and outcomes are read from the page; a missing number is not a zero."""
    console = Console(width=160, record=True)
    console.print(as_table(rows(await page())))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[1] == ["a", "engine", "vllm", "closed", "-", "1", "3", "1", "25%", "0.5", "-"]
    assert lines[2] == ["b", "engine", "vllm", "open", "-", "0", "-", "-", "-", "-", "failure", "1"]


def test_a_service_that_is_not_there_is_told_in_a_sentence() -> None:
    """Exit 1, the address that was tried, and what to give."""
    address = f"127.0.0.1:{free_port()}"
    result = CliRunner().invoke(app, ["endpoints", "--address", address])
    assert result.exit_code == 1
    assert address in result.stderr
    assert "http_address" in result.stderr
