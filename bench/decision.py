"""How long one decision takes, by the number of endpoints.

A decision here is a dispatch with every scorer and a session, the acquire in it, and the end of an
earlier request's grant, so that two endpoints have changed since the last one. Endpoints are
scraped every 2 s of a virtual clock, at 2,000 requests per second; the scrapes are not timed, what
they make a decision do is. Sessions are "known" (the endpoint is remembered), "new" (the ring is
asked) or "none". Of five blocks of decisions the one with the lowest median is reported, because
what else the machine does is not a decision's cost.

Usage: python bench/decision.py. With JSON=1 in the environment the last line is one JSON object.
"""

from __future__ import annotations

import json
import os
from collections import deque
from dataclasses import replace
from random import Random
from time import perf_counter_ns
from typing import Final

from extproc.routing.endpoint import Info, Stats, Url
from extproc.routing.live import Grant
from extproc.routing.registry import Registry, RegistrySettings
from extproc.routing.ring import session_hash
from extproc.routing.scheduler import Dispatch, Query, Scheduler
from extproc.routing.sessions import Sessions
from extproc.routing.strategy import BUILT_IN, Strategy, Weights

MODEL: Final = "llama"
SIZES: Final = (10, 100, 1_000, 10_000)
BLOCKS: Final = 5
ROUNDS_PER_BLOCK: Final = 4_000
WARM_UP: Final = 2_000
REQUESTS_PER_SECOND: Final = 2_000
SCRAPE_SECONDS: Final = 2.0
INFLIGHT_PER_ENDPOINT: Final = 4
MAX_INFLIGHT: Final = 4_000
ALL_SCORERS: Final = Strategy("all", Weights(weight=0.5))


def served_by(number: int, endpoints: int, models: int) -> tuple[str, ...]:
    """What endpoint `number` serves, when the models share the endpoints evenly."""
    if models <= endpoints:
        return (f"{MODEL}-{number % models}",)
    return tuple(f"{MODEL}-{model}" for model in range(number, models, endpoints))


def registry_of(endpoints: int, random: Random, models: int = 1) -> Registry:
    """A registry of busy engines, with everything learned that scrapes teach."""
    registry = Registry(RegistrySettings(), random)
    registry.replace(
        [
            Info(
                id=f"engine-{number:05d}",
                url=Url("http", f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 8000),
                models=served_by(number, endpoints, models),
                weight=random.choice((1.0, 1.0, 0.5)),
            )
            for number in range(endpoints)
        ],
        0.0,
    )
    for name in registry.ids():
        first = stats(random)
        registry.observe(name, replace(first, success_total=0.0, running=30, waiting=1), 0.0)
        registry.observe(
            name, replace(first, success_total=random.uniform(4.0, 40.0), waiting=1), 1.0
        )
    return registry


def stats(random: Random) -> Stats:
    """One scrape of a busy engine."""
    return Stats(
        running=random.randrange(8, 32),
        waiting=random.randrange(0, 4),
        kv_usage_ratio=random.uniform(0.2, 0.95),
    )


def measure(
    endpoints: int,
    sessions: str,
    *,
    models: int = 1,
    rounds: int = BLOCKS * ROUNDS_PER_BLOCK,
) -> list[float]:
    """The time of each decision in µs; every request is for any of the models."""
    random = Random(endpoints)
    registry = registry_of(endpoints, random, models)
    scheduler = Scheduler(
        registry, {**BUILT_IN, "all": ALL_SCORERS}, random, Sessions(), default_strategy="all"
    )
    ids = registry.ids()
    # Sessions belong to a model, and so to an endpoint that serves it.
    known: list[tuple[str, int]] = []
    for number in range(4 * max(endpoints, models)):
        of_one = served_by(number % endpoints, endpoints, models)
        model = of_one[number // endpoints % len(of_one)]
        key = session_hash(model, f"s{number}".encode())
        known.append((model, key))
        scheduler.served(key, ids[number % endpoints], 2.0)
    outstanding: deque[Grant] = deque()
    kept = min(INFLIGHT_PER_ENDPOINT * endpoints, MAX_INFLIGHT)
    scrapes = 0.0
    times = []
    now = 2.0
    for number in range(WARM_UP + kept + rounds):
        now += 1.0 / REQUESTS_PER_SECOND
        scrapes += endpoints / SCRAPE_SECONDS / REQUESTS_PER_SECOND
        while scrapes >= 1.0:
            scrapes -= 1.0
            registry.observe(random.choice(ids), stats(random), now)
        model, key = random.choice(known)
        session = {"known": key, "new": random.getrandbits(64), "none": None}[sessions]
        query = Query(model, session, 4 * random.randrange(8_000))
        oldest = outstanding.popleft() if len(outstanding) >= kept else None
        begin = perf_counter_ns()
        result = scheduler.dispatch(query, now)
        if oldest is not None:
            oldest.end(now)
        end = perf_counter_ns()
        assert isinstance(result, Dispatch)
        outstanding.append(result.grant)
        if number >= WARM_UP + kept:
            times.append((end - begin) / 1000.0)
    return times


def quietest(times: list[float]) -> list[float]:
    """The sorted times of the block with the lowest median."""
    blocks = [
        sorted(times[begin : begin + ROUNDS_PER_BLOCK])
        for begin in range(0, len(times), ROUNDS_PER_BLOCK)
    ]
    return min(blocks, key=lambda block: block[len(block) // 2])


def main() -> None:
    """The table is printed."""
    rows = []
    print("endpoints  sessions  median µs  p99 µs")
    for endpoints in SIZES:
        for sessions in ("known", "new", "none"):
            times = quietest(measure(endpoints, sessions))
            median, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
            print(f"{endpoints:9,}  {sessions:8}  {median:9.1f}  {p99:6.1f}", flush=True)
            if sessions == "known":
                row = {"name": "decision", "endpoints": endpoints}
                rows.append(row | {"median_us": round(median, 2), "p99_us": round(p99, 2)})
    if os.environ.get("JSON") == "1":
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
