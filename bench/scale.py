"""How cost grows: with endpoints and models, with engines that are scraped, with requests served.

Four questions, each with a table: the time of one decision; CPU per request end to end; memory of
the service and of Envoy, before and after many requests; CPU of reading the engines' metrics.

With JSON=1 the last line is one JSON object. QUICK=1 is short; ONLY (`decisions`, `requests`,
`memory`, `scrapes`; comma separated), ENDPOINTS, MODELS, ENGINES, SECONDS, ROUNDS and REQUESTS
change the run.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import cpu
import decision
import load
import rounds
import scrapes
import subjects
from rounds import JsonRow
from subjects import Subject

from extproc.lab.processes import free_port

CONNECTIONS: Final = 64
MEMORY_ENDPOINTS: Final = 1_000
_SHOWN_MEMORY: Final = 10


async def main() -> None:
    """The tables are on the screen."""
    is_quick = bool(os.environ.get("QUICK"))
    only = (os.environ.get("ONLY") or "decisions,requests,memory,scrapes").split(",")
    seconds = int(os.environ.get("SECONDS", "2" if is_quick else "5"))
    sizes = rounds.numbers("ENDPOINTS", "10,100,1000" if is_quick else "10,100,1000,10000")
    report: dict[str, list[JsonRow]] = {}
    if "decisions" in only:
        report["decisions"] = decisions(sizes, rounds.numbers("MODELS", "1,10,100,1000"))
    if "requests" in only:
        report["requests"] = await requests(sizes, seconds)
    if "memory" in only:
        count = int(os.environ.get("REQUESTS", "5000" if is_quick else "50000"))
        report["memory"] = await memory(count)
    if "scrapes" in only:
        engines = rounds.numbers("ENGINES", "10,100" if is_quick else "10,100,1000")
        report["scrapes"] = await scrapes.table(engines, 2 * seconds)
    rounds.finish(report)


def decisions(sizes: list[int], model_counts: list[int]) -> list[JsonRow]:
    """The time of a decision for every number of endpoints and of models that share them."""
    print("One decision with a session, us: median and 99th percentile")
    print(f"{'endpoints':>9}{'models':>8}{'median':>9}{'p99':>9}")
    rows: list[JsonRow] = []
    for endpoints in sizes:
        for models in model_counts:
            rounds.say(f"decisions: {endpoints} endpoints, {models} models")
            times = decision.quietest(decision.measure(endpoints, "known", models=models))
            median, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
            print(f"{endpoints:>9}{models:>8}{median:>9.1f}{p99:>9.1f}", flush=True)
            rows.append(
                {
                    "name": "decision",
                    "endpoints": endpoints,
                    "models": models,
                    "median_us": round(median, 2),
                    "p99_us": round(p99, 2),
                }
            )
    return rows


@asynccontextmanager
async def fleet(endpoints: int) -> AsyncIterator[Subject]:
    """The whole stack on so many endpoints, an nginx behind all of them."""
    port = free_port()
    transport = subjects.transports()[0]
    async with AsyncExitStack() as exits:
        folder = Path(exits.enter_context(TemporaryDirectory(prefix="llmgw-bench-")))
        hosts = load.hosts(endpoints)
        exits.enter_context(load.nginx(port, hosts))
        upstreams = [f"{host}:{port}" for host in hosts]
        yield await exits.enter_async_context(subjects.ours(folder, upstreams, transport))


async def requests(sizes: list[int], seconds: int) -> list[JsonRow]:
    """CPU per request, and memory, of the whole stack for every number of endpoints."""
    print(f"\nThe whole stack, {CONNECTIONS} connections, 1 KB prompts")
    print(f"{'endpoints':>9}{'req/s':>9}{'p50 ms':>8}{'service MB':>12}{'Envoy MB':>10}  CPU us")
    repeats = int(os.environ.get("ROUNDS", "3"))
    rows: list[JsonRow] = []
    for endpoints in sizes:
        rounds.say(f"requests: {endpoints} endpoints")
        async with fleet(endpoints) as subject:
            found = await rounds.in_turns(
                [subject],
                repeats,
                f"{endpoints} endpoints",
                lambda each, number: rounds.measure(each, CONNECTIONS, seconds if number else 2),
            )
            row = rounds.summed_up(subject.name, CONNECTIONS, found[subject.name])
            megabytes = resident(subject)
        rows.append(row | {"endpoints": endpoints, "resident_mb": megabytes})
        print(
            f"{endpoints:>9}{row['rps']:>9}{row['p50_ms']:>8}{megabytes['service']:>12}"
            f"{megabytes['envoy']:>10}  {rounds.shares(row['cpu_us'])}"
            + (f"  errors {row['errors']}" if row["errors"] else ""),
            flush=True,
        )
    return rows


async def memory(count: int) -> list[JsonRow]:
    """Resident memory as requests are served, every one of a new session, until `count` are."""
    print(f"\nMemory while requests of new sessions are served, {MEMORY_ENDPOINTS} endpoints")
    print(f"{'requests':>9}{'service MB':>12}{'Envoy MB':>10}")
    rows: list[JsonRow] = []
    served = 0
    async with fleet(MEMORY_ENDPOINTS) as subject:
        shown = 0.0
        while True:
            if served >= shown:
                shown += count / _SHOWN_MEMORY
                megabytes = resident(subject)
                print(f"{served:>9}{megabytes['service']:>12}{megabytes['envoy']:>10}", flush=True)
                rows.append({"name": subject.name, "requests": served, "resident_mb": megabytes})
            if served >= count:
                return rows
            result = await asyncio.to_thread(
                load.wrk, subject.url, connections=CONNECTIONS, seconds=2, sessions=0
            )
            served += result.requests - result.errors


def resident(subject: Subject) -> dict[str, float]:
    """Resident memory by process, in MB."""
    return {name: round(cpu.tree_resident_mb(pid), 1) for name, pid in subject.pids.items()}


if __name__ == "__main__":
    asyncio.run(main())
