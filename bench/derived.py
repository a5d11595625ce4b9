"""The three figures that follow from the tables: what the service adds, and what it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rounds import JsonRow

_FLOOR: Final = "envoy"
_OURS: Final = "ours-"

Figures = dict[str, dict[str, float]]


def figures(
    rows: Sequence[JsonRow], paced: Sequence[JsonRow], streams: Sequence[JsonRow]
) -> Figures:
    """By figure and subject: those whose rows were measured.

    `added_p50_ms`: p50 at one connection less that of Envoy alone. `long_prompt_service_us`: CPU
    of the service for the longest prompt less that for the shortest, at one rate.
    `stream_messages`: ext_proc messages for a stream less those for an answer in one piece.
    """
    one = {str(row["name"]): _number(row, "p50_ms") for row in rows if row["connections"] == 1}
    found: Figures = {"added_p50_ms": {}, "long_prompt_service_us": {}, "stream_messages": {}}
    if _FLOOR in one:
        found["added_p50_ms"] = {
            name: round(p50 - one[_FLOOR], 3) for name, p50 in one.items() if name != _FLOOR
        }
    by_size: dict[str, list[tuple[float, float]]] = {}
    for row in paced:
        sizes = by_size.setdefault(str(row["name"]), [])
        sizes.append((_number(row, "prompt_bytes"), _number(row, "service_us")))
    found["long_prompt_service_us"] = {
        name: round(max(sizes)[1] - min(sizes)[1], 1) for name, sizes in by_size.items()
    }
    for row in streams:
        counted = row["messages"]
        assert isinstance(counted, Mapping)
        if str(row["name"]).startswith(_OURS):
            extra = float(counted["stream"]) - float(counted["plain"])
            found["stream_messages"][str(row["name"])] = round(extra, 2)
    return {figure: values for figure, values in found.items() if values}


_WORDS: Final = {
    "added_p50_ms": "p50 at one connection, more than Envoy alone, ms",
    "long_prompt_service_us": "service CPU for the longest prompt, more than for 1 KB at one rate",
    "stream_messages": "ext_proc messages for a stream of 500 chunks, more than for one answer",
}


def show(found: Figures) -> None:
    """The figures are on the screen."""
    for figure, values in found.items():
        print(f"\n{_WORDS[figure]}")
        for name, value in values.items():
            print(f"  {name:20}{value:>10g}")


def _number(row: JsonRow, key: str) -> float:
    return float(str(row[key]))
