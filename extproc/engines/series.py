"""Which of a signal's series count, each once, and what they make together.

A page holds one series per data-parallel rank, and beside them copies, splits of a total and other
models' series. The rules are the dialect's; the order of the lines never matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import assert_never

from extproc.engines.candidate import Match
from extproc.engines.dialects import Combine, Dialect
from extproc.engines.exposition import Sample

_Series = frozenset[tuple[str, str]]  # the labels that tell one series from another


@dataclass(frozen=True, slots=True)
class Rules:
    """A dialect's rules for one endpoint, whose models the engine knows as `models`."""

    dialect: Dialect
    models: frozenset[str]

    def values(self, samples: list[Sample], label: str | None) -> list[float]:
        """One value per series that counts, NaN where it is unknown.

        It is the sample's value, or the number in its `label` if given.
        """
        if len(samples) == 1:
            return [_value(samples[0], label)]
        dialect = self.dialect
        if dialect.model_label is not None and self.models:
            samples = self._of_our_models(samples, dialect.model_label)
        # Samples that agree in everything but their rank are copies. Ones that agree in everything
        # are a fault of the page: the larger one is the safer one, an unknown one the safest.
        lowest: dict[_Series, tuple[tuple[int, ...], float]] = {}
        for sample in samples:
            key = _without(sample.labels.series, dialect.copy_labels)
            value = _value(sample, label)
            entry = (_ranks(sample, dialect.copy_labels), -value if isfinite(value) else -inf)
            if key not in lowest or entry < lowest[key]:
                lowest[key] = entry
        values = {key: -negative for key, (_, negative) in lowest.items()}
        if dialect.split_label is not None:
            values = _totals(values, dialect.split_label)
        if dialect.model_label is not None and dialect.model_rule is Combine.MAX:
            values = _largest(values, dialect.model_label)
        return [value if value < inf else nan for value in values.values()]

    def _of_our_models(self, samples: list[Sample], label: str) -> list[Sample]:
        named = {sample.labels.get(label) for sample in samples}
        ours = named & self.models
        if not ours or len(named) == 1:
            return samples
        ours.add("")
        return [sample for sample in samples if sample.labels.get(label) in ours]


def combined(values: Sequence[float], how: Combine) -> float:
    """One value of several; NaN when any is unknown, because a part does not stand for the whole.

    `values` is not empty.
    """
    if not all(map(isfinite, values)):
        return nan
    match how:
        case Combine.SUM:
            return sum(sorted(values))  # the order of the lines must not show, not even in a bit
        case Combine.MAX:
            return max(values)
        case Combine.SAME:
            return values[0] if min(values) == max(values) else nan
        case _:
            assert_never(how)


def meets(sample: Sample, where: tuple[Match, ...]) -> bool:
    """Whether every condition holds for the sample's labels."""
    return all((sample.labels.get(match.label) == match.value) is match.is_equal for match in where)


def _value(sample: Sample, label: str | None) -> float:
    if label is None:
        return sample.value
    text = sample.labels.get(label)
    return float(text) if text.isascii() and text.isdecimal() else nan


def _without(series: _Series, names: tuple[str, ...]) -> _Series:
    if not names:
        return series
    return frozenset([pair for pair in series if pair[0] not in names])


def _ranks(sample: Sample, labels: tuple[str, ...]) -> tuple[int, ...]:
    return tuple([_rank(sample.labels.get(label)) for label in labels])


def _rank(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def _totals(values: dict[_Series, float], label: str) -> dict[_Series, float]:
    """Each total, and the parts of what has no total."""
    parts: dict[_Series, dict[_Series, float]] = {}
    totals: dict[_Series, float] = {}
    for key, value in values.items():
        whole = _without(key, (label,))
        if len(whole) == len(key) or (label, "") in key:
            totals[whole] = max(value, totals.get(whole, value))
        else:
            parts.setdefault(whole, {})[key] = value
    for whole, split in parts.items():
        if whole not in totals:
            totals |= split
    return totals


def _largest(values: dict[_Series, float], label: str) -> dict[_Series, float]:
    groups: dict[_Series, float] = {}
    for key, value in values.items():
        whole = _without(key, (label,))
        groups[whole] = max(value, groups.get(whole, value))
    return groups
