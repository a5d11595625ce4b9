"""The metrics as Prometheus families, made of the numbers when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import Metric
from prometheus_client.registry import Collector

from extproc.routing.endpoint import BreakerState, Snapshot, Stats
from extproc.telemetry import families
from extproc.telemetry.families import FAMILIES, Family, Kind
from extproc.telemetry.fleet import Exclusion, Reading
from extproc.telemetry.metrics import Labels, Metrics
from extproc.telemetry.page import number_text

Series = Iterable[tuple[Labels, float]]

_TOTAL: Final = "_total"


class FleetCollector(Collector):
    """Publishes everything in `FAMILIES`.

    `readings` gives the endpoints as they are now; `is_ready` whether requests are welcome. A read
    forgets the series of endpoints and models that are gone.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        readings: Callable[[], Iterable[Reading]],
        is_ready: Callable[[], bool],
        version: str,
    ) -> None:
        self._metrics = metrics
        self._readings = readings
        self._is_ready = is_ready
        self._version = version

    def describe(self) -> Iterator[Metric]:
        """Every family without its series, so that registering needs no endpoints."""
        return (_metric(family) for family in FAMILIES)

    def collect(self) -> Iterator[Metric]:
        """Every family with its series, made one at a time."""
        readings = list(self._readings())
        self._metrics.keep_only({reading.snapshot.info.id for reading in readings})
        gauges = {**self._of_process(), **_of_fleet(readings)}
        for family in FAMILIES:
            metric = _metric(family)
            if family.kind is Kind.HISTOGRAM:
                self._fill_histogram(metric, family)
            elif family in gauges:
                _fill(metric, family, gauges[family])
            else:
                _fill(metric, family, self._metrics.counts(family).items())
            yield metric

    def _of_process(self) -> dict[Family, Series]:
        """The gauges of this process."""
        metrics = self._metrics
        return {
            families.STREAMS: [((), metrics.open_streams)],
            families.LOOP_STALL: [((), metrics.take_longest_stall())],
            families.READY: [((), self._is_ready())],
            families.BUILD: [((self._version,), 1)],
        }

    def _fill_histogram(self, metric: Metric, family: Family) -> None:
        """`metric` has the buckets, counts and sums of `family`."""
        for labels, histogram in self._metrics.histograms(family).items():
            named = dict(zip(family.labels, labels, strict=True))
            count = 0
            for bound, count in histogram.cumulative():
                bucket = {**named, "le": number_text(bound)}
                metric.add_sample(f"{family.name}_bucket", bucket, count)
            metric.add_sample(f"{family.name}_count", named, count)
            metric.add_sample(f"{family.name}_sum", named, histogram.total)


def _metric(family: Family) -> Metric:
    """`family` without series; the library writes a counter's suffix itself."""
    return Metric(family.name.removesuffix(_TOTAL), family.help, family.kind.value)


def _fill(metric: Metric, family: Family, series: Series) -> None:
    """`metric` has one sample for each of `series`."""
    for labels, value in series:
        metric.add_sample(family.name, dict(zip(family.labels, labels, strict=True)), value)


def _of_fleet(readings: Sequence[Reading]) -> dict[Family, Series]:
    """The series of every endpoint; a number that is unknown has none."""
    return {
        families.INFO: (_info(reading.snapshot) for reading in readings),
        families.INFLIGHT: _known(readings, lambda snapshot: snapshot.inflight),
        families.BREAKER: (
            ((reading.snapshot.info.id, state), reading.snapshot.breaker is state)
            for reading in readings
            for state in BreakerState
        ),
        families.EXCLUDED: (
            ((reading.snapshot.info.id, why), why in reading.exclusions)
            for reading in readings
            for why in Exclusion
        ),
        families.MISCONFIGURED: (
            ((reading.snapshot.info.id,), reading.misconfigured) for reading in readings
        ),
        families.STALE: _known(
            readings, lambda snapshot: snapshot.is_stale if snapshot.info.is_scraped else None
        ),
        families.UNREADABLE_PAGE: (
            ((reading.snapshot.info.id,), reading.is_unreadable)
            for reading in readings
            if reading.snapshot.info.is_scraped
        ),
        families.AGE: _known(readings, lambda snapshot: snapshot.age_seconds),
        families.RUNNING: _said(readings, lambda stats: stats.running),
        families.WAITING: _said(readings, lambda stats: stats.waiting),
        families.KV_USAGE: _said(readings, lambda stats: stats.kv_usage_ratio),
        families.CAPACITY: _known(readings, lambda snapshot: snapshot.running_capacity or None),
        families.DRAIN_RATE: _known(readings, lambda snapshot: snapshot.drain_rate),
    }


def _info(snapshot: Snapshot) -> tuple[Labels, float]:
    """What an endpoint is."""
    info = snapshot.info
    return (info.id, info.kind, info.engine, info.pool), 1


def _known(readings: Sequence[Reading], value: Callable[[Snapshot], float | None]) -> Series:
    """One series for each endpoint whose `value` is known."""
    for reading in readings:
        number = value(reading.snapshot)
        if number is not None:
            yield (reading.snapshot.info.id,), number


def _said(readings: Sequence[Reading], value: Callable[[Stats], float | None]) -> Series:
    """The same of what an engine says itself; what it said long ago is not known now."""
    return _known(readings, lambda snapshot: None if snapshot.is_stale else value(snapshot.stats))
