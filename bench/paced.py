"""What long prompts cost the service at one and the same rate, each request by itself.

Several at once wake the service up together, and the more seldom the longer their prompts are: that
is their company's doing, not the prompt's.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Final

import answers
import cpu
import load
from rounds import JsonRow
from subjects import Subject

REQUESTS_PER_SECOND: Final = 100  # on one connection


def measure(subject: Subject, prompt_bytes: int, seconds: int) -> float:
    """CPU microseconds of the service per request, in one round of that many seconds."""
    pid = subject.pids["service"]
    before = cpu.tree_seconds(pid)
    count = REQUESTS_PER_SECOND * seconds
    # So many requests, not for so long: in its timed mode h2load stalls on long bodies.
    served, report = load.h2load(
        f"{subject.url}/v1/chat/completions",
        answers.body(is_stream=False, prompt="x" * prompt_bytes),
        answers.headers(subject),
        *("-c1", f"--rps={REQUESTS_PER_SECOND}", f"-n{count}"),
    )
    if served < count:
        raise RuntimeError(f"{subject.name} served no more than {served} of {count}:\n{report}")
    return (cpu.tree_seconds(pid) - before) * 1e6 / count


def summed_up(name: str, prompt_bytes: int, found: Sequence[float]) -> JsonRow:
    """The median of several rounds, as the JSON line has it."""
    used = round(median(found), 1)
    return {"name": name, "prompt_bytes": prompt_bytes, "service_us": used}


def show(rows: Sequence[JsonRow]) -> None:
    """A table of rows that `summed_up` made."""
    print(f"\nCPU of the service at {REQUESTS_PER_SECOND} requests/s, us per request")
    print(f"{'':20}{'bytes':>10}{'service':>10}")
    for row in rows:
        print(f"{row['name']:20}{row['prompt_bytes']:>10}{row['service_us']:>10}")
