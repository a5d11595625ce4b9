"""Half-open, as many probes pass as are configured and no more, however many come at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from case_bodies import chat
from case_fleet import ask_until, breaker, settle, until_breaker
from case_http1 import CHAT, Reply
from case_world import World, case, standing, until

from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind
from extproc.routing.endpoint import BreakerState

pytestmark = case(30)

DEADLINE_SECONDS = 1.5
CROWD = 200
# The longest cooldown, and so the lease of a probe, outlasts every test.
CONFIG = f"""
listener: {{header_deadline_seconds: {DEADLINE_SECONDS}}}
breaker: {{threshold: 2, base_seconds: 0.5, max_seconds: 60, jitter_ratio: 0}}
endpoints:
  - {{id: one, url: "$one", models: [one]}}
  - {{id: four, url: "$four", models: [four], breaker: {{probes: 4}}}}
  - {{id: a, url: "$a", models: [two]}}
  - {{id: b, url: "$b", models: [two]}}
  - {{id: c, url: "$c", models: [three]}}
  - {{id: d, url: "$d", models: [three], breaker: {{probes: 3}}}}
"""
NAMES = ("one", "four", "a", "b", "c", "d")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[1, 4], ids=["1", "4"])
async def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    """Behind an Envoy with one worker and with four, which all ask the one service."""
    settings = EngineSettings(max_running=1000)
    models = ("one", "four", "two", "three")
    engines = [LabEngine(name, models, settings=settings) for name in NAMES]
    folder = tmp_path_factory.mktemp("case")
    async with standing(folder, CONFIG, *engines, concurrency=request.param) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nothing in flight and nothing going wrong."""
    await started.forget()
    return started


async def opened(world: World, name: str, model: str) -> LabEngine:
    """The endpoint's breaker is half-open, and requests hang there."""
    engine = world.engines[name]
    await ask_until(world, name, BreakerState.CLOSED, model=model)
    engine.inject(Fault(kind=FaultKind.STATUS, status=500))

    async def is_open() -> bool:
        await world.post(model=model)
        return breaker(await world.page(), name) is not BreakerState.CLOSED

    await until(is_open, f"{name} is open")
    await engine.heal()
    engine.inject(Fault(kind=FaultKind.HANG))
    await until_breaker(world, name, BreakerState.HALF_OPEN)
    engine.records.reset()
    return engine


async def rush(world: World, model: str, number: int = CROWD) -> list[tuple[float, Reply]]:
    """So many requests at once: how long each took, and its answer."""
    loop = asyncio.get_running_loop()

    async def timed() -> tuple[float, Reply]:
        async with world.http1() as connection:
            began = loop.time()
            reply = await connection.ask("POST", CHAT, body=chat(model))
            return loop.time() - began, reply

    return await asyncio.gather(*(timed() for _ in range(number)))


@pytest.mark.parametrize(("name", "probes"), [("one", 1), ("four", 4)])
async def test_the_only_endpoint(world: World, name: str, probes: int) -> None:
    """The others are refused at once, with a moment to come back."""
    engine = await opened(world, name, name)
    answers = await rush(world, name)
    assert (engine.counters.peak_active, engine.counters.requests) == (probes, probes)
    waited = [reply for _, reply in answers if reply.status == 504]
    refused = [(took, reply) for took, reply in answers if reply.status == 503]
    assert (len(waited), len(refused)) == (probes, CROWD - probes)
    for took, reply in refused:
        assert took < DEADLINE_SECONDS
        assert reply.reason == "no_endpoint"
        assert reply.header("retry-after-ms") is not None


@pytest.mark.parametrize(
    ("name", "other", "model", "probes"), [("a", "b", "two", 1), ("d", "c", "three", 3)]
)
async def test_another_endpoint(
    world: World, name: str, other: str, model: str, probes: int
) -> None:
    """The others go there, and so do the probes when they have failed: everybody is served."""
    engine = await opened(world, name, model)
    answers = await rush(world, model)
    assert {(reply.status, reply.served_by) for _, reply in answers} == {(200, other)}
    assert (engine.counters.peak_active, engine.counters.requests) == (probes, probes)
    late = [took for took, _ in answers if took >= DEADLINE_SECONDS]
    assert len(late) == probes


async def test_both_are_half_open(world: World) -> None:
    """Each of two endpoints gets its one probe, and the rest is refused."""
    for name in "ab":
        world.engines[name].inject(Fault(kind=FaultKind.STATUS, status=500))

    async def are_open() -> bool:
        await world.post(model="two")
        page = await world.page()
        return all(breaker(page, name) is not BreakerState.CLOSED for name in "ab")

    await until(are_open, "both are open")
    await settle(world)  # what is booked late would open one of them again
    for name in "ab":
        world.engines[name].inject(Fault(kind=FaultKind.HANG))
        await until_breaker(world, name, BreakerState.HALF_OPEN)
    answers = await rush(world, "two")
    assert [world.engines[name].counters.requests for name in "ab"] == [1, 1]
    assert sorted({reply.status for _, reply in answers}) == [503, 504]
    assert sum(reply.status == 503 for _, reply in answers) == CROWD - 2
