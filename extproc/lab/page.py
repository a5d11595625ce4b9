"""Prometheus text, written family by family."""

from __future__ import annotations

from collections.abc import Mapping

from extproc.lab.tally import Histogram

_CREATED = 1_750_000_000.0


class Page:
    """A page in the making; every family's name starts with `prefix`.

    Counters end in `total_suffix`. `has_created` adds the `_created` samples that some exporters
    have beside counters and histograms. Samples are keyed by their label text, "" for none.
    """

    def __init__(
        self, prefix: str = "", *, total_suffix: str = "_total", has_created: bool = False
    ) -> None:
        self._prefix = prefix
        self._total_suffix = total_suffix
        self._has_created = has_created
        self._lines: list[str] = []

    def text(self) -> bytes:
        """The page so far."""
        return "".join(f"{line}\n" for line in self._lines).encode()

    def gauge(self, name: str, samples: Mapping[str, float]) -> None:
        """A gauge family is on the page."""
        self._family(name, "gauge", samples)

    def counter(self, name: str, samples: Mapping[str, float]) -> None:
        """A counter family is on the page; `name` comes without its suffix."""
        self._family(name + self._total_suffix, "counter", samples)
        self._created(name, samples)

    def histogram(self, name: str, samples: Mapping[str, Histogram]) -> None:
        """A histogram family is on the page."""
        full = self._head(name, "histogram")
        for own, histogram in samples.items():
            inside = f"{own}," if own else ""
            below = 0
            for bound, count in zip((*histogram.bounds, None), histogram.counts, strict=True):
                below += count
                edge = "+Inf" if bound is None else repr(bound)
                self._lines.append(f'{full}_bucket{{{inside}le="{edge}"}} {float(below)}')
            braces = f"{{{own}}}" if own else ""
            self._lines.append(f"{full}_count{braces} {float(histogram.count)}")
            self._lines.append(f"{full}_sum{braces} {histogram.sum!r}")
        self._created(name, samples)

    def append(self, other: Page) -> None:
        """The other page's families come after this one's."""
        self._lines += other._lines

    def _family(self, name: str, kind: str, samples: Mapping[str, float]) -> None:
        full = self._head(name, kind)
        for own, value in samples.items():
            braces = f"{{{own}}}" if own else ""
            self._lines.append(f"{full}{braces} {float(value)!r}")

    def _head(self, name: str, kind: str) -> str:
        full = self._prefix + name
        self._lines.append(f"# HELP {full} {name.replace('_', ' ').capitalize()}.")
        self._lines.append(f"# TYPE {full} {kind}")
        return full

    def _created(self, name: str, samples: Mapping[str, object]) -> None:
        if self._has_created:
            self._family(f"{name}_created", "gauge", dict.fromkeys(samples, _CREATED))


def labels(pairs: Mapping[str, str]) -> str:
    """The label text of a sample, names in order, values escaped."""
    return ",".join(f'{name}="{_escaped(pairs[name])}"' for name in sorted(pairs))


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
