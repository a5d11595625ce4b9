"""The Prometheus text page, written without holding up the event loop.

With thousands of endpoints a page takes longer than a request may wait, so the work is cut into
slices and requests are served between them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.samples import Sample

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_SLICE_LINES: Final = 250


async def write_page(registry: CollectorRegistry) -> bytes:
    """Every metric of `registry`; the loop runs at least once every few hundred lines."""
    lines: list[str] = []
    pieces: list[bytes] = []
    for line in _lines(registry):
        lines.append(line)
        if len(lines) == _SLICE_LINES:
            pieces.append("".join(lines).encode())
            lines.clear()
            await asyncio.sleep(0)
    pieces.append("".join(lines).encode())
    return b"".join(pieces)


def number_text(value: float) -> str:
    """`value` as the text format writes it."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)


def _lines(registry: CollectorRegistry) -> Iterator[str]:
    """The lines of the page, one after the other."""
    for metric in registry.collect():
        name = _shown_name(metric)
        text = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
        yield f"# HELP {name} {text}\n"
        yield f"# TYPE {name} {metric.type}\n"
        for sample in metric.samples:
            yield _line(sample)


def _shown_name(metric: Metric) -> str:
    """The name in the text format, where a counter has its suffix."""
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def _line(sample: Sample) -> str:
    """One sample."""
    value = number_text(float(sample.value))
    if not sample.labels:
        return f"{sample.name} {value}\n"
    labels = ",".join([f'{key}="{_escaped(text)}"' for key, text in sample.labels.items()])
    return f"{sample.name}{{{labels}}} {value}\n"


def _escaped(text: str) -> str:
    """`text` as a label value."""
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
