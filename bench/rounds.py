"""One round of load against one subject, several rounds in turn, and their medians."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, TypeVar

import cpu
import load
from subjects import Subject

PROCESSES: Final = ("envoy", "service", "router")

T = TypeVar("T")
JsonRow = dict[str, object]


@dataclass(frozen=True, slots=True)
class Row:
    """One round of one subject; CPU in microseconds per request, by process."""

    result: load.Result
    cpu_us: dict[str, float]


def measure(subject: Subject, connections: int, seconds: int, *, prompt_bytes: int = 900) -> Row:
    """One round of load against `subject`.

    Requests that are in flight at the end count half: that much of their work is done on average,
    which matters where there are only some hundred requests in a round.
    """
    before = {name: cpu.tree_seconds(pid) for name, pid in subject.pids.items()}
    result = load.wrk(
        subject.url,
        connections=connections,
        seconds=seconds,
        prompt_bytes=prompt_bytes,
        has_model_header=subject.has_model_header,
    )
    requests = result.requests + connections / 2
    used = {
        name: (cpu.tree_seconds(pid) - before[name]) * 1e6 / requests
        for name, pid in subject.pids.items()
    }
    return Row(result, used)


async def in_turns(
    subjects: Sequence[Subject],
    rounds: int,
    what: str,
    once: Callable[[Subject, int], T],
) -> dict[str, list[T]]:
    """What `once` gave for every subject, round by round: noise of the machine hits all alike.

    `once` is told the round's number; round 0 warms up and is dropped.
    """
    found: dict[str, list[T]] = {subject.name: [] for subject in subjects}
    for number in range(rounds + 1):
        for subject in subjects:
            say(f"{what}, round {number}: {subject.name}")
            one = await asyncio.to_thread(once, subject, number)
            if number:
                found[subject.name].append(one)
    return found


def summed_up(name: str, connections: int, rows: Sequence[Row]) -> JsonRow:
    """The medians of several rounds, as the JSON line has them."""
    return {
        "name": name,
        "connections": connections,
        "rps": round(median(row.result.rps for row in rows), 1),
        "p50_ms": round(median(row.result.p50_ms for row in rows), 3),
        "p99_ms": round(median(row.result.p99_ms for row in rows), 3),
        "cpu_us": medians([row.cpu_us for row in rows]),
        "errors": sum(row.result.errors for row in rows),
    }


def medians(used: Sequence[dict[str, float]]) -> dict[str, float]:
    """The medians by process, and their sum; 0 for a process that the subject does not have."""
    found = {
        process: round(median(each.get(process, 0.0) for each in used), 1) for process in PROCESSES
    }
    return found | {"total": round(sum(found.values()), 1)}


def shares(cpu_us: object) -> str:
    """The parts of a `cpu_us`, in words."""
    assert isinstance(cpu_us, dict)
    parts = {name: value for name, value in cpu_us.items() if value}
    if len(parts) == 2:  # the sum of one part says nothing
        del parts["total"]
    return ", ".join(f"{name} {value:g}" for name, value in parts.items())


def show(rows: Sequence[JsonRow]) -> None:
    """A table of rows that `summed_up` made."""
    print(f"{'':20}{'conns':>6}{'req/s':>10}{'p50 ms':>9}{'p99 ms':>9}  CPU us per request")
    for row in rows:
        print(
            f"{row['name']:20}{row['connections']:>6}{row['rps']:>10}{row['p50_ms']:>9}"
            f"{row['p99_ms']:>9}  {shares(row['cpu_us'])}"
            + (f"  errors {row['errors']}" if row["errors"] else "")
        )


def finish(report: Mapping[str, object]) -> None:
    """With JSON=1 the report is the last line of the output."""
    if os.environ.get("JSON"):
        print(json.dumps(report))


def say(text: str) -> None:
    """The line is on standard error, where progress goes."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def numbers(name: str, default: str) -> list[int]:
    """The comma-separated numbers of an environment variable."""
    return [int(text) for text in (os.environ.get(name) or default).split(",")]
