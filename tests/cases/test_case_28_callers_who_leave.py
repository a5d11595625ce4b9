"""A caller who hangs up or runs out of time is nobody's fault; an endpoint without headers is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from case_bodies import chat
from case_fleet import (
    ask_until,
    breaker,
    held,
    settle,
    spread,
    until_asked,
    until_breaker,
    until_counted,
)
from case_leaving import Way, crowd
from case_world import ATTEMPTS, World, case, fresh, standing, until

from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind
from extproc.routing.endpoint import BreakerState

pytestmark = case(28)

DEADLINE_SECONDS = 1.0
# What is learned of the speed of `a` and `b` would move requests as well, so it is not read.
CONFIG = f"""
breaker: {{threshold: 3, base_seconds: 60}}
listener: {{header_deadline_seconds: {DEADLINE_SECONDS}}}
endpoints:
  - {{id: a, url: "$a", models: [m], engine: none}}
  - {{id: b, url: "$b", models: [m], engine: none}}
  - {{id: mute, url: "$mute", models: [q]}}
  - {{id: sound, url: "$sound", models: [q]}}
  - {{id: lone, url: "$lone", models: [lone]}}
"""
NAMES = ("a", "b", "mute", "sound", "lone")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """A model of two engines, one of a mute and a sound one, one of a single engine."""
    settings = EngineSettings(max_running=1000)
    engines = [LabEngine(name, ("m", "q", "lone"), settings=settings) for name in NAMES]
    async with standing(tmp_path_factory.mktemp("case"), CONFIG, *engines) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nothing in flight and nothing going wrong."""
    await started.forget()
    return started


async def until_aborted(world: World, number: int) -> None:
    """So many attempts are booked as given up by their callers, and none as a failure."""

    async def is_so() -> bool:
        return await world.new(ATTEMPTS, outcome="aborted") >= number

    await until(is_so, f"{number} aborted", 3)
    booked = await world.new_attempts()
    assert sum(count for (_, outcome), count in booked.items() if outcome == "aborted") == number
    assert {outcome for _, outcome in booked} <= {"aborted", "success"}


async def assert_served(world: World) -> None:
    """Both endpoints are in use alike, with closed breakers: no request counts that has left."""
    page = await world.page()
    for name in "ab":
        assert breaker(page, name) is BreakerState.CLOSED
    await world.forget()
    found = await spread(world, 40)
    assert min(found[name] for name in "ab") >= 19, found


async def test_callers_run_out_of_time(world: World) -> None:
    """A hundred with a limit of 0.2 s, at engines that take longer."""
    for name in "ab":
        world.engines[name].inject(Fault(kind=FaultKind.SLOW_HEADERS, seconds=0.8))

    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            await world.post(seconds=0.2)

    await asyncio.gather(*(impatient() for _ in range(100)))
    await until_counted(world, {})
    await until_aborted(world, sum(world.requests().values()))
    await assert_served(world)


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("is_streaming", [False, True], ids=["before headers", "mid-stream"])
async def test_callers_hang_up(world: World, way: Way, *, is_streaming: bool) -> None:
    """In every way, while they wait and while they listen."""
    body = chat("m", stream=is_streaming, max_tokens=100)
    async with held(world.engines[name] for name in "ab"):
        async with crowd(world, way, 20, body) as clients:
            await until_asked(world, 20)
            if is_streaming:
                await clients.started()
            await clients.leave()
        await until_counted(world, {})
    await until_aborted(world, 20)
    await assert_served(world)


async def test_a_caller_who_leaves_a_retry(world: World) -> None:
    """What failed before stays a failure; whoever had the request last is not to blame."""
    session = ("x-session-id", fresh("session"))
    first = (await world.post(session)).served_by
    await settle(world)
    (second,) = {"a", "b"} - {first}
    world.engines[first].inject(Fault(kind=FaultKind.STATUS, status=500, times=1))
    world.engines[second].inject(Fault(kind=FaultKind.HANG))
    async with crowd(world, Way.RST, 1, chat("m"), [session]) as clients:
        await until_asked(world, 2)
        await clients.leave()
    await world.until_attempts({(first, "failure"): 1, (second, "aborted"): 1})


async def test_an_endpoint_without_headers(world: World) -> None:
    """Our own deadline counts against it: the caller is served elsewhere, and it is left alone."""
    mute = world.engines["mute"]
    mute.inject(Fault(kind=FaultKind.HANG))
    loop = asyncio.get_running_loop()
    replies = []
    while breaker(await world.page(), "mute") is not BreakerState.OPEN:
        began = loop.time()
        # Ten at once, so that both get some; those at the mute one wait for the deadline.
        replies += await asyncio.gather(*(world.post(model="q") for _ in range(10)))
        assert loop.time() - began < DEADLINE_SECONDS + 1
    assert {(reply.status, reply.served_by) for reply in replies} == {(200, "sound")}
    seen = mute.counters.requests
    assert await world.new(ATTEMPTS, endpoint="mute", outcome="failure") >= 3
    replies = await asyncio.gather(*(world.post(model="q") for _ in range(20)))
    assert {reply.status for reply in replies} == {200}
    assert mute.counters.requests == seen


async def test_the_only_endpoint_without_headers(world: World) -> None:
    """The caller gets a 504 in the envelope, and then refusals until a probe is due."""
    lone = world.engines["lone"]
    lone.inject(Fault(kind=FaultKind.HANG))
    replies = await asyncio.gather(*(world.post(model="lone") for _ in range(3)))
    assert {(reply.status, reply.reason) for reply in replies} == {(504, "upstream_failed")}
    assert {reply.error.code for reply in replies} == {"upstream_failed"}
    await until_breaker(world, "lone", BreakerState.OPEN)
    assert (await world.post(model="lone")).reason == "no_endpoint"


async def test_a_slow_answer_has_all_the_time(world: World) -> None:
    """The deadline is for the headers alone: a stream that has begun goes on past it."""
    a, b = world.engines["a"], world.engines["b"]
    for engine in (a, b):
        engine.inject(Fault(kind=FaultKind.STALL, chunks=2, seconds=DEADLINE_SECONDS * 1.5))
    reply = await world.post(body=chat("m", stream=True))
    assert reply.status == 200
    assert not reply.cut
    assert reply.body.rstrip().endswith(b"[DONE]")
    await world.until_idle()
    assert await world.new(ATTEMPTS, outcome="failure") == 0
    await ask_until(world, "a", BreakerState.CLOSED)
