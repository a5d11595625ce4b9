"""Streams of many chunks through one subject: h2load as client, an engine that only streams."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import answers
import cpu
import load
import rounds
from subjects import Subject

from extproc.lab.processes import Child

CHUNKS: Final = 500
INTERVAL_MS: Final = 4.0  # 250 tokens a second in every stream
STREAMS: Final = 16  # all at once


@dataclass(frozen=True, slots=True)
class Row:
    """One round of streams: how long one took, and CPU in microseconds per stream, by process."""

    seconds: float
    first_byte_ms: float
    failed: int
    cpu_us: dict[str, float]


@asynccontextmanager
async def engine(port: int, hosts: Sequence[str]) -> AsyncIterator[None]:
    """An engine that streams listens on `port` of all these addresses."""
    script = Path(__file__).with_name("stream_server.py")
    command = [sys.executable, str(script), str(port), str(CHUNKS), f"{INTERVAL_MS:g}", *hosts]
    child = Child("the streaming engine", command)
    await child.start()
    try:
        await child.until(lambda: "ready" in child.lines, 20)
        yield
    finally:
        await child.stop()


def measure(subject: Subject, *, is_stream: bool = True) -> Row:
    """One round: every one of `STREAMS` connections asks once, for a stream or for plain JSON."""
    before = {name: cpu.tree_seconds(pid) for name, pid in subject.pids.items()}
    succeeded, report = load.h2load(
        f"{subject.url}/v1/chat/completions",
        answers.body(is_stream=is_stream),
        answers.headers(subject),
        *(f"-n{STREAMS}", f"-c{STREAMS}"),
    )
    used = {
        name: (cpu.tree_seconds(pid) - before[name]) * 1e6 / STREAMS
        for name, pid in subject.pids.items()
    }
    whole = _mean(r"time for request", report)
    first = _mean(r"time to 1st byte", report)
    return Row(whole, first * 1e3, STREAMS - succeeded, used)


def _mean(name: str, text: str) -> float:
    """The mean of a row of times, in seconds: the third after least and most."""
    found = re.search(name + r":\s+[\d.]+\w+\s+[\d.]+\w+\s+([\d.]+)(us|ms|s)\b", text)
    if found is None:
        raise RuntimeError(f"h2load printed something else:\n{text}")
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]


def summed_up(name: str, rows: Sequence[Row]) -> rounds.JsonRow:
    """The medians of several rounds, as the JSON line has them; CPU per stream."""
    return {
        "name": name,
        "chunks": CHUNKS,
        "streams": STREAMS,
        "seconds": round(median(row.seconds for row in rows), 3),
        "first_byte_ms": round(median(row.first_byte_ms for row in rows), 2),
        "cpu_us": rounds.medians([row.cpu_us for row in rows]),
        "errors": sum(row.failed for row in rows),
    }


def show(rows: Sequence[rounds.JsonRow]) -> None:
    """A table of rows that `summed_up` made."""
    asked = CHUNKS * INTERVAL_MS / 1e3
    print(f"\n{STREAMS} streams at once, {CHUNKS} chunks each, sent over {asked:g} s")
    print(f"{'':20}{'seconds':>9}{'1st byte ms':>13}{'us/chunk':>10}  CPU us per stream")
    for row in rows:
        cpu_us = row["cpu_us"]
        assert isinstance(cpu_us, dict)
        print(
            f"{row['name']:20}{row['seconds']:>9}{row['first_byte_ms']:>13}"
            f"{cpu_us['total'] / CHUNKS:>10.1f}  {rounds.shares(cpu_us)}"
            + (f"  errors {row['errors']}" if row["errors"] else "")
        )
