"""Numbers that are old or missing draw nobody, drain nobody and stop nobody."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
from case_fleet import (
    AGE,
    EXCLUDED,
    RUNNING,
    STALE,
    WAITING,
    ask_until,
    breaker,
    exclusions,
    known,
    reconfigured,
    spread,
    started_anew,
    until_breaker,
    until_fresh,
    until_known,
    until_stale,
)
from case_startup import WallClock, wall_clock
from case_world import REFUSED, World, case, endpoints, standing, until

from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind
from extproc.routing.endpoint import BreakerState
from extproc.telemetry.fleet import Exclusion

pytestmark = case(41)

STALE_SECONDS = 2.0
SCRAPE = (
    f"scrape: {{interval_seconds: 0.3, timeout_seconds: 0.3, stale_after_seconds: {STALE_SECONDS}}}"
)
LONG_SECONDS = 60
CONFIG = (
    f"{SCRAPE}\nbreaker: {{threshold: 1, base_seconds: {LONG_SECONDS}, jitter_ratio: 0}}\n"
    + endpoints("a", "b", "c")
    + """
  - {id: lone, url: "$lone", models: [lone]}
  - id: quick
    url: "$quick"
    models: [quick]
    breaker: {base_seconds: 0.5}
"""
)
THREE = ("a", "b", "c")
BUSY = (4, 2)  # running, waiting
BURST = 60
HOUR_SECONDS = 3600
# No number is older than this where every page comes: an interval, the page, and some load here.
YOUNG_SECONDS = STALE_SECONDS - 0.1


@dataclass(frozen=True, slots=True)
class Clocked:
    """A stack and the wall clock of its service."""

    world: World
    clock: WallClock


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Clocked]:
    """Three equal engines of a model, and two that are alone with theirs."""
    settings = EngineSettings(max_running=1000)
    models = ("m", "lone", "quick")
    engines = [LabEngine(name, models, settings=settings) for name in (*THREE, "lone", "quick")]
    folder = tmp_path_factory.mktemp("case")
    with wall_clock(folder) as clock:
        async with standing(folder, CONFIG, *engines) as world:
            yield Clocked(world, clock)


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: Clocked) -> World:
    """The same, all read lately and idle by their pages."""
    world = started.world
    started.clock.jump(0)
    await world.forget()
    for engine in world.engines.values():
        engine.show(running=0, waiting=0, kv_usage_ratio=0.0)
    await until_fresh(world, *world.engines)
    for name in world.engines:
        await until_known(world, RUNNING, name, 0)
    return world


async def busy(world: World, *names: str) -> None:
    """The service has read that these engines are half busy."""
    running, waiting = BUSY
    for name in names:
        world.engines[name].show(running=running, waiting=waiting, kv_usage_ratio=0.6)
    for name in names:
        await until_known(world, WAITING, name, waiting)


async def one_by_one(world: World, number: int) -> Counter[str]:
    """Where requests go of which each begins when the one before it counts no more."""
    where: Counter[str] = Counter()
    for _ in range(number):
        reply = await world.post()
        assert reply.status == 200
        where[reply.served_by] += 1
        await world.until_idle()
    return where


def lose(world: World, *names: str, kind: FaultKind = FaultKind.METRICS_HANG) -> None:
    """The pages of these engines do not come any more."""
    for name in names:
        world.engines[name].inject(Fault(kind=kind, status=500))


@pytest.mark.parametrize("kind", [FaultKind.METRICS_HANG, FaultKind.METRICS_STATUS])
async def test_an_idle_page_of_long_ago_draws_nobody(world: World, kind: FaultKind) -> None:
    """It was the best while it was known to be idle, and is the last of equals afterwards."""
    await busy(world, "b", "c")
    assert await one_by_one(world, 20) == {"a": 20}
    lose(world, "a", kind=kind)
    await until_stale(world, "a")
    where = await one_by_one(world, 20)
    assert where.keys() == {"b", "c"}, where
    # No drain: of what comes at once it has its share, by our own count.
    where = await spread(world, BURST)
    assert BURST / 3 * 0.5 < where["a"] < BURST / 3 * 1.2, where
    await world.engines["a"].heal()
    await until_fresh(world, "a")
    assert await one_by_one(world, 5) == {"a": 5}


async def test_a_busy_page_of_long_ago_keeps_nobody_away(world: World) -> None:
    """The trap's other side: what was full when last heard of has its share as well."""
    await busy(world, "a")
    assert (await one_by_one(world, 10))["a"] == 0
    lose(world, "a")
    await until_stale(world, "a")
    where = await spread(world, BURST)
    assert BURST / 3 * 0.7 < where["a"] < BURST / 3 * 1.2, where


async def test_all_pages_are_lost(world: World) -> None:
    """Nobody is refused and nobody waits: our own count decides."""
    await busy(world, "b", "c")
    lose(world, *world.engines)
    await until_stale(world, *world.engines)
    loop = asyncio.get_running_loop()
    for _ in range(30):
        began = loop.time()
        assert (await world.post()).status == 200
        assert loop.time() - began < 1
    await world.until_idle()
    where = await spread(world, BURST)
    assert where == dict.fromkeys(THREE, BURST // 3)
    page = await world.page()
    assert page.total(EXCLUDED) == 0
    assert await world.new(REFUSED) == 0


async def test_no_page_ever_came(world: World) -> None:
    """A service that starts while no engine tells anything sends requests all the same."""
    lose(world, *world.engines)
    await started_anew(world)
    assert {known(world.booked, AGE, name) for name in THREE} == {None}
    assert {world.booked.total(STALE, endpoint=name) for name in THREE} == {1}
    assert (await world.post(model="lone")).status == 200
    where = await spread(world, BURST)
    assert where == dict.fromkeys(THREE, BURST // 3)


async def test_a_lone_engine_misses_one_page(world: World) -> None:
    """Requests go there before, meanwhile and afterwards, and also while no page comes."""
    lone = world.engines["lone"]
    lone.inject(Fault(kind=FaultKind.METRICS_HANG, times=1))

    async def is_missed() -> bool:
        assert (await world.post(model="lone")).status == 200
        return not lone.faults.armed()

    await until(is_missed, "one page is missed")
    page = await world.page()
    age = known(page, AGE, "lone")
    assert age is not None
    await until_fresh(world, "lone")
    lose(world, "lone")
    await until_stale(world, "lone")
    replies = await asyncio.gather(*(world.post(model="lone") for _ in range(30)))
    assert {(reply.status, reply.served_by) for reply in replies} == {(200, "lone")}


async def test_a_configuration_that_is_always_stale(world: World) -> None:
    """It is warned of, and serves by our own count."""
    always = "scrape: {interval_seconds: 15, stale_after_seconds: 0.2}"
    async with reconfigured(world, lambda text: text.replace(SCRAPE, always)):
        warned = [line for line in world.said if "load is never known" in line]
        assert len(warned) == 1
        await until_stale(world, *world.engines)
        where = await spread(world, BURST)
        assert where == dict.fromkeys(THREE, BURST // 3)


async def clock_is_off(world: World) -> float:
    """By how many seconds the clock was wrong when the service started; its models show it."""
    before = time.time()
    await started_anew(world)
    reply = await world.ask("GET", "/v1/models/lone")
    made = json.loads(reply.body)["created"]
    assert isinstance(made, int)
    return made - before


@pytest.mark.parametrize("hours", [1, -1])
async def test_the_wall_clock_jumps(started: Clocked, world: World, hours: int) -> None:
    """Ages, cooldowns and pauses are what they were: no decision reads that clock."""
    # A long cooldown is running when the clock jumps.
    world.engines["lone"].inject(Fault(kind=FaultKind.STATUS, status=500, times=1))
    await ask_until(world, "lone", BreakerState.OPEN, model="lone")
    pause = {"retry-after": str(LONG_SECONDS)}
    world.engines["a"].inject(Fault(kind=FaultKind.STATUS, status=429, headers=pause, times=1))

    async def is_paused() -> bool:
        await world.post()
        return Exclusion.BACKPRESSURE in exclusions(await world.page(), "a")

    await until(is_paused, "a is left alone")
    started.clock.jump(hours * HOUR_SECONDS)

    reads = world.engines["b"].counters.by_path
    seen = reads["/metrics"]

    async def are_read() -> bool:
        page = await world.page()
        ages = {name: known(page, AGE, name) for name in world.engines}
        assert all(age is not None and 0 <= age < YOUNG_SECONDS for age in ages.values()), ages
        assert page.total(STALE) == 0
        return reads["/metrics"] >= seen + 4

    await until(are_read, "read again and again")
    assert breaker(await world.page(), "lone") is BreakerState.OPEN
    assert Exclusion.BACKPRESSURE in exclusions(await world.page(), "a")
    # Short ones begin and end after it as ever.
    world.engines["quick"].inject(Fault(kind=FaultKind.STATUS, status=500, times=1))
    await ask_until(world, "quick", BreakerState.OPEN, model="quick")
    await until_breaker(world, "quick", BreakerState.HALF_OPEN, 3)
    await ask_until(world, "quick", BreakerState.CLOSED, model="quick")
    lose(world, "b")
    await until_stale(world, "b", seconds=STALE_SECONDS + 2)
    # That clock is the one which the service has.
    assert await clock_is_off(world) == pytest.approx(hours * HOUR_SECONDS, abs=60)
