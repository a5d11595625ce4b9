"""Samples to `Stats`, or an error that names the signal: a missing number never becomes a zero.

What an engine offers and a page lacks is an error when routing depends on it (running, waiting, kv
usage) and unknown otherwise. NaN, infinities and values that cannot be are unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Final

from extproc.engines.candidate import Candidate, Match, parse_candidate
from extproc.engines.dialects import COMBINE, COUNTERS, ROUTED_BY, Combine, Dialect, Signal
from extproc.engines.exposition import Families, Sample, read
from extproc.engines.series import Rules, combined, meets
from extproc.errors import UnreadableMetrics
from extproc.routing.endpoint import Stats

Overrides = Iterable[tuple[str, Sequence[str]]]

# Engines overshoot a full cache by a block or so; a percentage is another unit.
_RATIO_LIMIT: Final = 1.5
# No engine holds more requests or blocks: such a number is a fault of the page.
_COUNT_LIMIT: Final = 1e12

_Page = dict[str, list[Sample]]


@dataclass(frozen=True, slots=True)
class _Way:
    """A candidate with its possible spellings and its text."""

    names: tuple[str, ...]
    where: tuple[Match, ...]
    label: str | None
    plus: tuple[tuple[_Way, ...], ...]
    over: _Way | None
    text: str


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one signal is read: the first of `ways` that the page has."""

    signal: Signal
    ways: tuple[_Way, ...]
    combine: Combine
    is_mandatory: bool


class Contract:
    """What one endpoint's page must say, compiled once for many scrapes.

    `overrides` are the endpoint's own names, signal to candidates in `parse_candidate`'s form; they
    replace the dialect's names for that signal, and one given for a signal that the dialect lacks
    makes it offered. `models` are the names that the engine may know the endpoint's models by: of
    several models on a page those count, unless none of them is there.

    Raises:
        ValueError: an override names no signal, has no candidate, or one that is not readable.
    """

    __slots__ = ("_plans", "_rules", "families")

    def __init__(
        self, dialect: Dialect, *, overrides: Overrides = (), models: Iterable[str] = ()
    ) -> None:
        self._rules = Rules(dialect, frozenset(models))
        candidates = dict(dialect.signals)
        mandatory = dialect.mandatory
        for name, texts in overrides:
            signal = _signal(name)
            if not texts:
                raise ValueError(f"{name}: at least one metric name is needed")
            candidates[signal] = tuple(parse_candidate(text) for text in texts)
            mandatory |= {signal} & ROUTED_BY
        self._plans = tuple(
            _Plan(
                signal,
                tuple(_way(candidate, signal) for candidate in candidates.get(signal, ())),
                COMBINE[signal],
                signal in mandatory,
            )
            for signal in Signal
        )
        self.families = Families(
            name for plan in self._plans for way in plan.ways for name in _names(way)
        )

    def stats(self, samples: Iterable[Sample]) -> Stats:
        """The endpoint's numbers, read from a page's samples of `families`, in any order.

        Raises:
            UnreadableMetrics: a mandatory signal is missing, or the kv usage is not a ratio.
        """
        page: _Page = {}
        for sample in samples:
            page.setdefault(sample.name, []).append(sample)
        running, waiting, usage, size, count, prompt, generation, success = (
            self._read(page, plan) for plan in self._plans
        )
        return Stats(
            running=_count(running),
            waiting=_count(waiting),
            kv_usage_ratio=_ratio(usage),
            block_size_tokens=_count(size) or None,
            block_count=_count(count) or None,
            prompt_tokens_total=_total(prompt),
            generation_tokens_total=_total(generation),
            success_total=_total(success),
        )

    def _read(self, page: _Page, plan: _Plan) -> float:
        """The signal's value, NaN if unknown."""
        for way in plan.ways:
            values = self._values(page, way)
            if not values:
                continue
            if way.over is None:
                return combined(values, plan.combine)
            divisors = self._values(page, way.over)
            if divisors:
                divisor = combined(divisors, Combine.SUM)
                return combined(values, Combine.SUM) / divisor if divisor else nan
        if plan.is_mandatory:
            looked_for = " or ".join(way.text for way in plan.ways)
            raise UnreadableMetrics(plan.signal, f"the page has no {looked_for}")
        return nan

    def _values(self, page: _Page, way: _Way) -> list[float]:
        """One value per series that counts; empty if the page has none of this way."""
        for name in way.names:
            samples = page.get(name, [])
            if way.where:
                samples = [sample for sample in samples if meets(sample, way.where)]
            if samples:
                break
        else:
            return []
        values = self._rules.values(samples, way.label)
        for group in way.plus:
            values += next(filter(None, (self._values(page, addend) for addend in group)), [])
        return values


def stats(
    page: bytes, *, dialect: Dialect, overrides: Overrides = (), models: Iterable[str] = ()
) -> Stats:
    """The numbers on a whole page; arguments and ValueError as `Contract`.

    Raises:
        UnreadableMetrics: as `Contract.stats`, or the page is not readable.
    """
    contract = Contract(dialect, overrides=overrides, models=models)
    return contract.stats(read(page, contract.families))


def _signal(name: str) -> Signal:
    try:
        return Signal(name)
    except ValueError:
        raise ValueError(f"{name!r} is not a signal; the signals are {', '.join(Signal)}") from None


def _way(candidate: Candidate, signal: Signal) -> _Way:
    name = candidate.name
    other = name.removesuffix("_total") if name.endswith("_total") else f"{name}_total"
    return _Way(
        names=(name, other) if signal in COUNTERS else (name,),
        where=candidate.where,
        label=candidate.label,
        plus=tuple(tuple(_way(addend, signal) for addend in group) for group in candidate.plus),
        over=None if candidate.over is None else _way(candidate.over, signal),
        text=str(candidate),
    )


def _names(way: _Way) -> Iterator[str]:
    yield from way.names
    for group in way.plus:
        for addend in group:
            yield from _names(addend)
    if way.over is not None:
        yield from _names(way.over)


def _count(value: float) -> int | None:
    return round(value) if 0 <= value <= _COUNT_LIMIT else None


def _ratio(value: float) -> float | None:
    if value > _RATIO_LIMIT:
        raise UnreadableMetrics(Signal.KV_USAGE, f"{value:g} is not a ratio from 0 to 1")
    return min(value, 1.0) if value >= 0 else None


def _total(value: float) -> float | None:
    return value if 0 <= value < inf else None
