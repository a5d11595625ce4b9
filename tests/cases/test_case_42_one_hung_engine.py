"""Engines whose pages hang, trickle or have no address cost the others nothing."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import pytest_asyncio
from case_bodies import chat
from case_fleet import AGE, STALE, known, until_fresh
from case_http1 import CHAT
from case_startup import unresolvable
from case_world import World, case, endpoints, standing, until

from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind
from extproc.lab.records import Outcome

pytestmark = case(42)

INTERVAL_SECONDS = 0.5
TIMEOUT_SECONDS = 0.4
JITTER_RATIO = 0.1
# An interval and a page, and what a loaded machine adds.
YOUNG_SECONDS = INTERVAL_SECONDS + TIMEOUT_SECONDS + 1.0
NAMELESS = "hangs.invalid"
GOOD = tuple(f"good{number}" for number in range(12))
HUNG = tuple(f"hung{number}" for number in range(5))
TRICKLES = "trickles"
LARGE = "large"
CONFIG = (
    f"scrape: {{interval_seconds: {INTERVAL_SECONDS}, timeout_seconds: {TIMEOUT_SECONDS}, "
    "stale_after_seconds: 5}\n"
    + endpoints(*GOOD, LARGE, *HUNG, TRICKLES)
    + f'  - {{id: nameless, url: "http://{NAMELESS}:8000", models: [nameless]}}\n'
)
BAD = (*HUNG, TRICKLES, "nameless")
ROUNDS = 8  # so many times every page is asked for while we look


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Twenty endpoints: sound, five that hang, one that trickles, one whose name never resolves."""
    hangs = [Fault(kind=FaultKind.METRICS_HANG)]
    trickles = [Fault(kind=FaultKind.METRICS_TRICKLE, seconds=1)]
    engines = [
        *(LabEngine(name) for name in GOOD),
        *(LabEngine(name, faults=hangs) for name in HUNG),
        LabEngine(TRICKLES, faults=trickles),
        LabEngine(LARGE, is_bulky=True),
    ]
    folder = tmp_path_factory.mktemp("case")
    with unresolvable(folder, NAMELESS):
        async with standing(folder, CONFIG, *engines) as world:
            await until_fresh(world, *GOOD, LARGE)
            yield world


def process(world: World) -> tuple[int, int]:
    """How many files and sockets, and how many threads, the service has."""
    folder = Path(f"/proc/{world.stack.service.pid}")
    found = re.search(r"^Threads:\s+(\d+)$", (folder / "status").read_text(), re.MULTILINE)
    assert found is not None
    return len(list((folder / "fd").iterdir())), int(found[1])


async def until_read(world: World, rounds: int) -> None:
    """Every engine's page was asked for so many times more."""
    engines = world.engines.values()
    seen = {engine.name: engine.counters.by_path["/metrics"] for engine in engines}

    async def is_so() -> bool:
        return all(
            engine.counters.by_path["/metrics"] - seen[engine.name] >= rounds for engine in engines
        )

    await until(is_so, f"{rounds} rounds of scrapes", 30)


async def while_read(world: World, look: Callable[[], Awaitable[None]]) -> None:
    """What is looked at is right again and again while every page is asked for many times."""

    async def keep_looking() -> None:
        while True:
            await look()
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        looking = group.create_task(keep_looking())
        await until_read(world, ROUNDS)
        looking.cancel()


async def test_the_others_are_read_in_time(world: World) -> None:
    """Whenever one looks, the sound engines' numbers are young, and the others' are missing."""
    oldest: list[float] = []

    async def look() -> None:
        page = await world.page()
        ages = [known(page, AGE, name) for name in (*GOOD, LARGE)]
        oldest.append(max(float("inf") if age is None else age for age in ages))
        for name in BAD:
            assert page.total(STALE, endpoint=name) == 1
            assert known(page, AGE, name) is None

    await while_read(world, look)
    assert len(oldest) >= ROUNDS
    assert max(oldest) < YOUNG_SECONDS
    # Most of the time an interval and its jitter, whatever the machine does besides.
    assert median(oldest) < INTERVAL_SECONDS * (1 + JITTER_RATIO) + 0.25


async def test_routing_is_as_quick_as_ever(world: World) -> None:
    """Requests are decided on while pages hang, and the engines behind those serve as well."""
    loop = asyncio.get_running_loop()
    took: list[float] = []
    served: set[str] = set()
    async with world.http1() as connection:
        for turn in range(200):
            began = loop.time()
            pairs = [("x-session-id", f"session-{turn}")]
            reply = await connection.ask("POST", CHAT, pairs, chat("m"))
            took.append(loop.time() - began)
            assert reply.status == 200
            served.add(reply.served_by)
    assert median(took) < 0.1
    assert max(took) < 1.0
    assert served & set(HUNG)


async def test_nothing_piles_up(world: World) -> None:
    """Round after round the service has as many sockets and threads, and asks each page once."""
    await until_read(world, 2)
    files, threads = process(world)
    asking = 0

    async def look() -> None:
        nonlocal asking
        now_files, now_threads = process(world)
        # A read that is just beginning where another one has just ended.
        assert now_files <= files + len(BAD)
        assert now_threads <= threads + 1
        for engine in world.engines.values():
            open_now = sum(one.outcome is Outcome.ACTIVE for one in engine.probes)
            asking = max(asking, open_now)

    await while_read(world, look)
    assert asking == 1


async def test_scrapes_are_spread(world: World) -> None:
    """Not all at once at the start, and in no common rhythm later; a hung page no more often."""
    firsts = sorted(engine.probes[0].arrived_at for engine in world.engines.values())
    assert firsts[-1] - firsts[0] > 0.1
    await until_read(world, 2)
    for engine in world.engines.values():
        times = [one.arrived_at for one in engine.probes]
        gaps = [late - early for early, late in pairwise(times)]
        # What comes late brings the next one closer, and never a volley.
        assert median(gaps) > INTERVAL_SECONDS * (1 - JITTER_RATIO) - 0.05
        assert max(gaps) - min(gaps) > INTERVAL_SECONDS * 0.01


async def test_the_log_is_no_flood(world: World) -> None:
    """A line for each endpoint that cannot be read, and not one more for the same reason."""
    await until_read(world, ROUNDS)
    told = Counter(
        found[1] for line in world.said if (found := re.search(r"endpoint ([\w]+): its", line))
    )
    assert told == dict.fromkeys(BAD, 1)


async def test_they_answer_again(world: World) -> None:
    """What was hung is read like the others from its next page on."""
    for name in (*HUNG, TRICKLES):
        await world.engines[name].heal()
    await until_fresh(world, *HUNG, TRICKLES)
