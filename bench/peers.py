"""Envoy alone, this service, and other routers: side by side on the same endpoints.

Three questions, each with a table: how fast and at what cost small requests go through at 1, 8 and
64 connections; what long prompts cost; what a stream of many chunks costs. Every subject runs all
the time, rounds go in turns, figures are medians over the rounds, CPU is the kernel's accounting of
whole process trees. Before anything is measured every subject's answers are checked.

With JSON=1 the last line is one JSON object. QUICK=1 is short; ROUNDS, SECONDS, CONNECTIONS and
ONLY (`requests`, `prompts`, `streams`; comma separated) change the run.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import answers
import derived
import load
import paced
import rivals
import rounds
import streams
import subjects
from rounds import JsonRow
from subjects import Subject

from extproc.lab.processes import free_port

PROMPT_CONNECTIONS: Final = 8
SMALL_BYTES: Final = 1_000
LARGE_BYTES: Final = (100_000, 1_000_000)
_SETTLE_SECONDS: Final = 0.3  # the last message of a request comes after its answer


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: rounds, the whole seconds that wrk runs in each, long prompts."""

    rounds: int
    seconds: int
    large_bytes: tuple[int, ...]

    @classmethod
    def chosen(cls) -> Effort:
        """What the environment says."""
        is_quick = bool(os.environ.get("QUICK"))
        return cls(
            rounds=int(os.environ.get("ROUNDS", "3")),
            seconds=int(os.environ.get("SECONDS", "1" if is_quick else "3")),
            large_bytes=LARGE_BYTES[-1:] if is_quick else LARGE_BYTES,
        )


async def main() -> None:
    """The tables are on the screen."""
    effort = Effort.chosen()
    only = (os.environ.get("ONLY") or "requests,prompts,streams").split(",")
    for rival in rivals.RIVALS:
        rivals.installed(rival)
    cases = _cases(only, effort)
    measured, at_one_rate = await _plain(cases, effort) if cases else ([], [])
    # The small prompt is a case of both.
    small = [row for row in measured if row["prompt_bytes"] == SMALL_BYTES]
    prompts = [row for row in measured if row["connections"] == PROMPT_CONNECTIONS]
    if small:
        print(f"\nRequests with prompts of {SMALL_BYTES} bytes")
        rounds.show(small)
    if "prompts" in only:
        _show_prompts(prompts)
        paced.show(at_one_rate)
    streamed = await _streams(effort) if "streams" in only else []
    if streamed:
        streams.show(streamed)
    figures = derived.figures(small, at_one_rate, streamed)
    derived.show(figures)
    rounds.finish(
        {
            "rows": small,
            "prompts": prompts,
            "paced": at_one_rate,
            "streams": streamed,
            "derived": figures,
        }
    )


def _cases(only: Sequence[str], effort: Effort) -> list[tuple[int, int]]:
    """Connections and bytes of the prompt, of every case that is asked for."""
    counts = rounds.numbers("CONNECTIONS", "1,8,64") if "requests" in only else []
    if "prompts" not in only:
        return [(count, SMALL_BYTES) for count in counts]
    small = sorted({*counts, PROMPT_CONNECTIONS})
    return [
        *((count, SMALL_BYTES) for count in small),
        *((PROMPT_CONNECTIONS, size) for size in effort.large_bytes),
    ]


async def _started(
    exits: AsyncExitStack, folder: Path, upstreams: Sequence[str], *, chunks: int = 0
) -> list[Subject]:
    """Every subject, running and giving the right answers."""
    found = [await exits.enter_async_context(subjects.envoy_alone(folder, upstreams))]
    for transport in subjects.transports():
        stack = subjects.ours(folder, upstreams, transport)
        ours = await exits.enter_async_context(stack)
        found += [ours, ours.with_model_in_body]
    for rival in rivals.RIVALS:
        found.append(await exits.enter_async_context(rivals.running(rival, folder, upstreams)))
    for subject in found:
        rounds.say(f"checking the answers of {subject.name}")
        await answers.check(subject, chunks=chunks)
    return found


async def _plain(
    cases: Sequence[tuple[int, int]], effort: Effort
) -> tuple[list[JsonRow], list[JsonRow]]:
    """The rows of every case, on an upstream that answers at once, and those at one rate."""
    port = free_port()
    hosts = load.hosts(subjects.ENDPOINTS)
    rows = []
    async with AsyncExitStack() as exits:
        folder = Path(exits.enter_context(TemporaryDirectory(prefix="llmgw-bench-")))
        exits.enter_context(load.nginx(port, hosts))
        compared = await _started(exits, folder, [f"{host}:{port}" for host in hosts])
        for connections, size in cases:

            def once(
                subject: Subject,
                number: int,
                connections: int = connections,
                size: int = size,
            ) -> rounds.Row:
                seconds = effort.seconds if number else 1
                return rounds.measure(subject, connections, seconds, prompt_bytes=size)

            what = f"{connections} connections, {size} bytes"
            found = await rounds.in_turns(compared, effort.rounds, what, once)
            rows += [
                rounds.summed_up(name, connections, some) | {"prompt_bytes": size}
                for name, some in found.items()
            ]
        sizes = sorted({size for _, size in cases})
        at_one_rate = await _paced(compared, sizes, effort) if len(sizes) > 1 else []
    return rows, at_one_rate


async def _paced(
    compared: Sequence[Subject], sizes: Sequence[int], effort: Effort
) -> list[JsonRow]:
    """What the service uses for each size of prompt, all of them at the same rate."""
    ours = [subject for subject in compared if "service" in subject.pids]
    rows = []
    for size in sizes:

        def once(subject: Subject, number: int, size: int = size) -> float:
            return paced.measure(subject, size, effort.seconds if number else 1)

        found = await rounds.in_turns(ours, effort.rounds, f"{size} bytes at one rate", once)
        rows += [paced.summed_up(name, size, some) for name, some in found.items()]
    return rows


async def _streams(effort: Effort) -> list[JsonRow]:
    """The rows of the streams, with how many messages the service was sent for each."""
    port = free_port()
    hosts = load.hosts(subjects.ENDPOINTS)
    async with AsyncExitStack() as exits:
        folder = Path(exits.enter_context(TemporaryDirectory(prefix="llmgw-bench-")))
        await exits.enter_async_context(streams.engine(port, hosts))
        upstreams = [f"{host}:{port}" for host in hosts]
        compared = await _started(exits, folder, upstreams, chunks=streams.CHUNKS)
        counted: dict[str, dict[str, float]] = {subject.name: {} for subject in compared}

        def once(subject: Subject, number: int) -> streams.Row:
            kind = "stream" if number else "plain"
            before = subjects.messages(subject)
            row = streams.measure(subject, is_stream=bool(number))
            if subject.metrics_url is not None:
                time.sleep(_SETTLE_SECONDS)
            counted[subject.name][kind] = (subjects.messages(subject) - before) / streams.STREAMS
            return row

        found = await rounds.in_turns(compared, effort.rounds, "streams", once)
    return [
        streams.summed_up(name, some) | {"messages": counted[name]} for name, some in found.items()
    ]


def _show_prompts(rows: Sequence[JsonRow]) -> None:
    """What long prompts cost, a column of CPU for each size."""
    sizes = sorted({int(str(row["prompt_bytes"])) for row in rows})
    print(f"\nPrompts of {', '.join(f'{size:,}' for size in sizes)} bytes, 8 connections")
    print(f"{'':20}{'bytes':>10}{'req/s':>10}{'p50 ms':>9}{'p99 ms':>9}  CPU us per request")
    for row in rows:
        print(
            f"{row['name']:20}{row['prompt_bytes']:>10}{row['rps']:>10}{row['p50_ms']:>9}"
            f"{row['p99_ms']:>9}  {rounds.shares(row['cpu_us'])}"
            + (f"  errors {row['errors']}" if row["errors"] else "")
        )


if __name__ == "__main__":
    asyncio.run(main())
