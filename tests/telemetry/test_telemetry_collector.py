"""The numbers as Prometheus families, and the page that they make."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from extproc.errors import Reason
from extproc.exchange.outcome import Outcome
from extproc.routing.endpoint import BreakerSettings, Info, Kind, Stats, Url
from extproc.routing.registry import Registry, RegistrySettings
from extproc.telemetry.collector import FleetCollector
from extproc.telemetry.families import FAMILIES
from extproc.telemetry.fleet import Reading, read_fleet
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.page import write_page


class Fleet:
    """Metrics, endpoints and the registry that publishes them."""

    def __init__(self, *infos: Info, now: float = 100.0) -> None:
        self.now = now
        self.endpoints = Registry(RegistrySettings(), Random(0))
        self.endpoints.replace(infos, now)
        self.metrics = Metrics({"gpt-9"}.__contains__)
        self.is_ready = True
        self.published = CollectorRegistry()
        self.published.register(
            FleetCollector(
                self.metrics,
                readings=self.readings,
                is_ready=lambda: self.is_ready,
                version="1.2.3",
            )
        )

    def readings(self) -> Iterator[Reading]:
        """The endpoints now."""
        return read_fleet(self.endpoints, self.now)

    async def samples(self) -> dict[str, float]:
        """The page, as Prometheus reads it: `name{labels}` to value."""
        text = (await write_page(self.published)).decode()
        return {
            sample.name
            + "".join(f" {key}={sample.labels[key]}" for key in sorted(sample.labels)): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    async def of(self, prefix: str) -> dict[str, float]:
        """The samples whose text begins with `prefix`."""
        return {
            key: value for key, value in (await self.samples()).items() if key.startswith(prefix)
        }


def engine(name: str, **changes: object) -> Info:
    """An engine that serves gpt-9."""
    settings: dict[str, object] = {
        "id": name,
        "url": Url("http", "10.0.0.1", 8000),
        "models": ("gpt-9",),
        **changes,
    }
    return Info(**settings)  # type: ignore[arg-type]  # the fields are checked by the tests


async def test_every_family_is_on_the_page() -> None:
    """With one endpoint that says everything, no family is without a series but events to come."""
    fleet = Fleet(engine("a"))
    text = (await write_page(fleet.published)).decode()
    for family in FAMILIES:
        assert f"# TYPE {family.name} {family.kind}\n" in text
        assert f"# HELP {family.name} {family.help}\n" in text


async def test_an_idle_service_shows_zeros() -> None:
    """Counters without labels are there before anything happened, so that rates work."""
    samples = await Fleet().samples()
    assert samples["llmgw_failed_open_total"] == 0
    assert samples["llmgw_exchange_errors_total"] == 0
    assert samples["llmgw_ext_proc_streams"] == 0
    assert samples["llmgw_ready"] == 1
    assert samples["llmgw_build_info version=1.2.3"] == 1


async def test_readiness_is_read_at_the_scrape() -> None:
    """The gauge says what is so now."""
    fleet = Fleet()
    fleet.is_ready = False
    assert (await fleet.samples())["llmgw_ready"] == 0


async def test_an_endpoint_shows_what_is_known_of_it() -> None:
    """Numbers come from the registry; unknown ones have no series."""
    fleet = Fleet(engine("a", pool="h100"), engine("b", kind=Kind.EXTERNAL, engine="none"))
    fleet.endpoints.observe("a", Stats(running=3, waiting=0, kv_usage_ratio=0.5), 98.0)
    fleet.endpoints.acquire("a", 99.0, lease_seconds=10.0)
    samples = await fleet.samples()
    assert samples["llmgw_endpoint_info endpoint=a engine=vllm kind=engine pool=h100"] == 1
    assert samples["llmgw_endpoint_inflight endpoint=a"] == 1
    assert samples["llmgw_endpoint_running endpoint=a"] == 3
    assert samples["llmgw_endpoint_waiting endpoint=a"] == 0
    assert samples["llmgw_endpoint_kv_usage_ratio endpoint=a"] == 0.5
    assert "llmgw_endpoint_running_capacity endpoint=a" not in samples
    assert samples["llmgw_endpoint_stats_age_seconds endpoint=a"] == 2
    assert samples["llmgw_endpoint_stale endpoint=a"] == 0
    assert "llmgw_endpoint_drain_rate endpoint=a" not in samples
    fleet.endpoints.observe("a", Stats(running=3, waiting=1), 98.5)
    assert (await fleet.samples())["llmgw_endpoint_running_capacity endpoint=a"] == 3
    of_b = {key.split()[0] for key in samples if "endpoint=b" in key}
    assert of_b == {
        "llmgw_endpoint_info",
        "llmgw_endpoint_inflight",
        "llmgw_endpoint_breaker",
        "llmgw_endpoint_excluded",
        "llmgw_endpoint_misconfigured_total",
    }


async def test_a_number_that_is_too_old_is_not_shown() -> None:
    """Its age is, and that it is stale; what was learned from it stays."""
    fleet = Fleet(engine("a"))
    stats = Stats(running=3, waiting=1, kv_usage_ratio=0.5)
    fleet.endpoints.observe("a", stats, 100.0)
    fleet.now = 111.0
    samples = await fleet.samples()
    said = {"running", "waiting", "kv_usage_ratio"}
    assert not {f"llmgw_endpoint_{name} endpoint=a" for name in said} & samples.keys()
    assert samples["llmgw_endpoint_stale endpoint=a"] == 1
    assert samples["llmgw_endpoint_stats_age_seconds endpoint=a"] == 11
    assert samples["llmgw_endpoint_running_capacity endpoint=a"] == 3
    fleet.endpoints.observe("a", stats, 111.0)
    assert (await fleet.samples())["llmgw_endpoint_waiting endpoint=a"] == 1


async def test_an_unreadable_page_shows_from_the_first_failure_to_the_next_reading() -> None:
    """Long before its numbers are stale; one that is never read has no series."""
    fleet = Fleet(engine("a"), engine("b", kind=Kind.EXTERNAL, engine="none"))
    unreadable = "llmgw_endpoint_unreadable"
    assert await fleet.of(unreadable) == {f"{unreadable} endpoint=a": 0}
    fleet.endpoints.observe("a", Stats(running=3), 100.0)
    fleet.endpoints.scrape_failed("a", "it answers with status 404", 100.0)
    assert await fleet.of(unreadable) == {f"{unreadable} endpoint=a": 1}
    assert (await fleet.samples())["llmgw_endpoint_running endpoint=a"] == 3
    fleet.endpoints.observe("a", Stats(running=4), 100.0)
    assert await fleet.of(unreadable) == {f"{unreadable} endpoint=a": 0}


async def test_a_breaker_is_in_one_state() -> None:
    """One of the three series is 1."""
    fleet = Fleet(engine("a", breaker=BreakerSettings(threshold=1)))
    grant = fleet.endpoints.acquire("a", 99.0, lease_seconds=10.0)
    assert grant is not None
    assert (await fleet.of("llmgw_endpoint_breaker")) == {
        "llmgw_endpoint_breaker endpoint=a state=closed": 1,
        "llmgw_endpoint_breaker endpoint=a state=open": 0,
        "llmgw_endpoint_breaker endpoint=a state=half_open": 0,
    }


async def test_an_exclusion_shows_while_it_lasts() -> None:
    """Quarantine, backpressure and drain are 1 while they keep an endpoint out."""
    fleet = Fleet(engine("a", drained=True))
    live = fleet.endpoints.live("a")
    assert live is not None
    fleet.endpoints.quarantine(live.ticket, 102.0, 100.0)
    fleet.endpoints.backpressure(live.ticket, 105.0, 100.0)
    excluded = "llmgw_endpoint_excluded endpoint=a why="
    assert await fleet.of(excluded) == {
        f"{excluded}drained": 1,
        f"{excluded}quarantined": 1,
        f"{excluded}backpressure": 1,
        f"{excluded}demoted": 0,
    }
    fleet.now = 103.0
    samples = await fleet.samples()
    assert samples[f"{excluded}quarantined"] == 0
    assert samples[f"{excluded}backpressure"] == 1


async def test_series_of_a_removed_endpoint_go_away() -> None:
    """A thousand endpoints that came and went leave the page as long as it was."""
    fleet = Fleet(engine("a"))
    fleet.metrics.attempt("a", Outcome.SUCCESS)
    before = await fleet.samples()
    for number in range(1000):
        name = f"e{number}"
        fleet.endpoints.replace([engine("a"), engine(name)], 100.0)
        fleet.metrics.dispatched(name, "gpt-9")
        fleet.metrics.attempt(name, Outcome.FAILURE)
    fleet.endpoints.replace([engine("a")], 100.0)
    assert (await fleet.samples()).keys() == before.keys()


async def test_labels_are_escaped() -> None:
    """A label with quotes, backslashes and line breaks reads back as it was."""
    fleet = Fleet(engine("a", pool='q"\\\n'))
    (key,) = await fleet.of("llmgw_endpoint_info")
    assert key.endswith('pool=q"\\\n')


async def test_histograms_have_cumulative_buckets() -> None:
    """The last bucket, the count and the sum agree."""
    fleet = Fleet()
    for seconds in (0.02, 0.2, 2000.0):
        fleet.metrics.answered("gpt-9", seconds)
    name = "llmgw_time_to_response_headers_seconds"
    samples = await fleet.of(name)
    assert samples[f"{name}_bucket le=0.025 model=gpt-9"] == 1
    assert samples[f"{name}_bucket le=+Inf model=gpt-9"] == 3
    assert samples[f"{name}_count model=gpt-9"] == 3
    assert samples[f"{name}_sum model=gpt-9"] == 2000.22


async def test_a_refusal_shows_reason_and_model() -> None:
    """Who asked for what in vain is on the page."""
    fleet = Fleet()
    fleet.metrics.refused(Reason.NO_ENDPOINT, "gpt-9")
    key = "llmgw_requests_refused_total model=gpt-9 reason=no_endpoint"
    assert (await fleet.samples())[key] == 1


async def test_a_long_page_lets_others_work() -> None:
    """While a page of thousands of lines is written, the loop keeps turning."""
    fleet = Fleet(*(engine(f"e{number}") for number in range(300)))
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.ensure_future(turn())
    page = await write_page(fleet.published)
    other.cancel()
    assert turns > page.count(b"\n") / 500


def test_an_endpoint_dropped_during_the_read_is_left_out() -> None:
    """Readings are taken one by one, and a list may be replaced in between."""
    fleet = Fleet(engine("a"), engine("b"))
    readings = fleet.readings()
    assert next(readings).snapshot.info.id == "a"
    fleet.endpoints.replace([engine("a")], 100.0)
    assert list(readings) == []
