"""Counts what the core and the transports tell, in plain dictionaries.

Counting is on the path of every request, so it is an addition to a number; metrics are made of the
numbers when somebody asks. What a client can choose never becomes a label: a model that is not
served counts as `other`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Final

from extproc.errors import Reason
from extproc.exchange.messages import Phase
from extproc.exchange.outcome import Outcome
from extproc.telemetry import families
from extproc.telemetry.families import Family

OTHER: Final = "other"

# A decision takes microseconds, an answer anything from milliseconds to an hour.
_WORK_SECONDS: Final = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 5e-3, 2.5e-2, 0.1, 0.5, 1.0)
_ANSWER_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

Labels = tuple[str, ...]


class Histogram:
    """How many values fell into each bucket, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """`value` is counted; a bucket holds what is at most its bound."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Each bound with the number of values at most as large; the last bound is infinite."""
        running = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            yield bound, running


class Metrics:
    """Is told everything, as `Observer` and as the transports' observers; see `families`.

    `is_model` says whether a name is one that is served; names that are not are never kept.
    """

    def __init__(self, is_model: Callable[[str], bool]) -> None:
        self._is_model = is_model
        self._models: set[str] = set()
        self._counts: dict[Family, defaultdict[Labels, int]] = {
            family: defaultdict(int)
            for family in families.FAMILIES
            if family.kind is families.Kind.COUNTER
        }
        self._refused = self._counts[families.REFUSED]
        self._dispatched = self._counts[families.DISPATCHED]
        self._attempts = self._counts[families.ATTEMPTS]
        self._to_headers: dict[str, Histogram] = {}
        self._durations: dict[str, Histogram] = {}
        self._messages = {phase: Histogram(_WORK_SECONDS) for phase in Phase}
        self.open_streams = 0
        self._longest_stall_seconds = 0.0
        for family in families.FAMILIES:
            if family.kind is families.Kind.COUNTER and not family.labels:
                self._counts[family][()] = 0

    # What the core tells.

    def refused(self, reason: Reason, model: str) -> None:
        """A request was answered by the service."""
        self._refused[reason, self._folded(model)] += 1

    def dispatched(self, endpoint: str, model: str) -> None:
        """A request was sent to `endpoint`."""
        self._dispatched[endpoint, self._folded(model)] += 1

    def attempt(self, endpoint: str, outcome: Outcome) -> None:
        """An attempt has its outcome."""
        self._attempts[endpoint, outcome] += 1

    def failed_open(self) -> None:
        """Envoy went on by itself."""
        self._counts[families.FAILED_OPEN][()] += 1

    def answered(self, model: str, seconds: float) -> None:
        """Response headers came after `seconds`."""
        self._histogram(self._to_headers, model).add(seconds)

    def ended(self, model: str, seconds: float) -> None:
        """An answered request took `seconds` in all."""
        self._histogram(self._durations, model).add(seconds)

    # What the transports tell.

    def stream_opened(self) -> None:
        """One more stream is open."""
        self.open_streams += 1

    def stream_closed(self) -> None:
        """One stream fewer is open."""
        self.open_streams -= 1

    def message(self, phase: Phase, seconds: float) -> None:
        """A message took `seconds` of work."""
        self._messages[phase].add(seconds)

    def exchange_failed(self) -> None:
        """A defect showed itself."""
        self._counts[families.EXCHANGE_ERRORS][()] += 1

    def action_refused(self) -> None:
        """A reply was not sent."""
        self._counts[families.ACTIONS_REFUSED][()] += 1

    def unreadable_message(self) -> None:
        """A message could not be read."""
        self._counts[families.UNREADABLE][()] += 1

    def log_entries(self, count: int) -> None:
        """`count` access-log entries came."""
        self._counts[families.LOG_ENTRIES][()] += count

    # What the process tells.

    def stalled(self, seconds: float) -> None:
        """The event loop was busy for `seconds` at a stretch."""
        self._longest_stall_seconds = max(self._longest_stall_seconds, seconds)

    # What the collector reads.

    def counts(self, family: Family) -> dict[Labels, int]:
        """The series of a counter as they are now."""
        return dict(self._counts[family])

    def histograms(self, family: Family) -> dict[Labels, Histogram]:
        """The series of a histogram; the histograms themselves, not copies."""
        if family is families.MESSAGES:
            return {(phase.value,): histogram for phase, histogram in self._messages.items()}
        series = self._to_headers if family is families.TIME_TO_HEADERS else self._durations
        return {(model,): histogram for model, histogram in series.items()}

    def take_longest_stall(self) -> float:
        """The longest stall since this was last asked, in seconds; forgotten then."""
        longest, self._longest_stall_seconds = self._longest_stall_seconds, 0.0
        return longest

    def keep_only(self, endpoints: Collection[str]) -> None:
        """Series of other endpoints, and of models that are no longer served, are gone."""
        self._models = {model for model in self._models if self._is_model(model)}
        kept = {*self._models, OTHER, ""}
        for series in (self._dispatched, self._attempts):
            for labels in [labels for labels in series if labels[0] not in endpoints]:
                del series[labels]
        for counts in (self._dispatched, self._refused):
            for labels in [labels for labels in counts if labels[1] not in kept]:
                del counts[labels]
        for histograms in (self._to_headers, self._durations):
            for model in [model for model in histograms if model not in kept]:
                del histograms[model]

    def _folded(self, model: str) -> str:
        """The label for `model`: one that is served, or "", or `OTHER`."""
        if model in self._models or not model:
            return model
        if not self._is_model(model):
            return OTHER
        self._models.add(model)
        return model

    def _histogram(self, series: dict[str, Histogram], model: str) -> Histogram:
        """The histogram for `model`."""
        folded = self._folded(model)
        histogram = series.get(folded)
        if histogram is None:
            histogram = series[folded] = Histogram(_ANSWER_SECONDS)
        return histogram
