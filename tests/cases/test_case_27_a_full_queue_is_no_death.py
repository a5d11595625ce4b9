"""An endpoint that says "not now" is left alone as long as it asked, and is not held for dead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from case_bodies import chat
from case_fleet import ask_until, breaker, exclusions, until_breaker
from case_http1 import CHAT, Reply, head
from case_world import ATTEMPTS, World, case, standing, until

from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind
from extproc.routing.endpoint import BreakerState
from extproc.telemetry.fleet import Exclusion

pytestmark = case(27)

CONFIG = """
breaker: {threshold: 5, base_seconds: 60}
endpoints:
  - {id: alone, url: "$alone", models: [alone]}
  - {id: a, url: "$a", models: [two]}
  - {id: b, url: "$b", models: [two]}
  - {id: short, url: "$short", models: [short], breaker: {max_seconds: 1, base_seconds: 1}}
  - {id: tiny, url: "$tiny", models: [tiny], breaker: {base_seconds: 0.5}}
"""
DEFAULT_SECONDS = 2.0
# What an engine may say, and how long it is then left alone.
WAITS: list[tuple[int, dict[str, str], float]] = [
    (429, {}, DEFAULT_SECONDS),
    *(
        (status, {"retry-after": text}, seconds)
        for status in (429, 503)
        for text, seconds in (
            ("1", 1.0),
            ("0.5", 0.5),
            ("soon", DEFAULT_SECONDS),
            ("-1", DEFAULT_SECONDS),
            ("Wed, 21 Oct 2065 07:28:00 GMT", DEFAULT_SECONDS),
        )
    ),
]
# An endpoint of its own for each.
WAITING = [f"w{number}" for number in range(len(WAITS))]
CONFIG += "".join(f'  - {{id: {name}, url: "${name}", models: [{name}]}}\n' for name in WAITING)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """A model of one endpoint, one of two, and engines with a short cap and a short queue."""
    models = ("alone", "two", "short", "tiny", *WAITING)
    engines = [LabEngine(name, models) for name in ("alone", "a", "b", "short", *WAITING)]
    tiny = LabEngine("tiny", models, settings=EngineSettings(max_running=1, max_waiting=0))
    async with standing(tmp_path_factory.mktemp("case"), CONFIG, *engines, tiny) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nobody kept away."""
    await started.forget()

    async def is_nobody_away() -> bool:
        page = await started.page()
        return not any(exclusions(page, name) for name in started.engines)

    await until(is_nobody_away, "nobody is kept away")
    return started


def full(status: int, headers: dict[str, str], times: int | None = 1) -> Fault:
    """The engine's own word that it is full."""
    return Fault(kind=FaultKind.STATUS, status=status, headers=headers, times=times)


def told_seconds(reply: Reply) -> float:
    """When the client is told to come back; both headers say the same."""
    exact, whole = reply.header("retry-after-ms"), reply.header("retry-after")
    assert exact is not None
    assert whole is not None
    assert 0 <= int(whole) * 1000 - int(exact) < 1000 or (whole, int(exact) < 1000) == ("1", True)
    return int(exact) / 1000


async def until_excluded(world: World, name: str) -> None:
    """It is known that the endpoint is full; Envoy's log may come a fraction of a second later."""

    async def is_so() -> bool:
        return exclusions(await world.page(), name) == {Exclusion.BACKPRESSURE}

    await until(is_so, f"{name} is left alone", 1)


async def until_served(world: World, model: str, seconds: float) -> float:
    """How long it took until a request was served."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def is_served() -> bool:
        return (await world.post(model=model)).status == 200

    await until(is_served, f"{model} served", seconds)
    return loop.time() - began


async def wait_out(world: World, name: str, fault: Fault, seconds: float) -> None:
    """The only endpoint of a model says that it is full, and is asked again and again."""
    engine = world.engines[name]
    engine.inject(fault)
    reply = await world.post(model=name)
    assert (reply.status, reply.reason) == (fault.status, None)
    assert reply.header("retry-after") == fault.headers.get("retry-after")
    first = await world.post(model=name)
    assert (first.status, first.reason) == (429, "saturated")
    assert first.error.code == "rate_limit_exceeded"
    told = told_seconds(first)
    assert seconds - 0.5 < told <= seconds
    # When the client was told to come, and not before.
    assert 0.8 * told < await until_served(world, name, told + 1)
    assert engine.counters.requests == 2


async def test_its_word_is_a_floor(world: World) -> None:
    """Nothing goes there earlier, and it is back at once afterwards."""
    await asyncio.gather(
        *(
            wait_out(world, name, full(status, headers), seconds)
            for name, (status, headers, seconds) in zip(WAITING, WAITS, strict=True)
        )
    )
    page = await world.page()
    for name in WAITING:
        assert breaker(page, name) is BreakerState.CLOSED
        assert await world.new(ATTEMPTS, endpoint=name, outcome="backpressure") == 1
        assert await world.new(ATTEMPTS, endpoint=name, outcome="failure") == 0


async def test_a_503_without_a_word(world: World) -> None:
    """It is a failure, because an engine that is broken says the same."""
    engine = world.engines["alone"]
    engine.inject(full(503, {}))
    assert (await world.post(model="alone")).status == 503
    assert (await world.post(model="alone")).status == 200
    assert await world.new(ATTEMPTS, endpoint="alone", outcome="failure") == 1


@pytest.mark.parametrize("status", [429, 503])
async def test_no_wait_at_all(world: World, status: int) -> None:
    """A `retry-after` of 0 keeps nobody away."""
    world.engines["alone"].inject(full(status, {"retry-after": "0"}))
    assert (await world.post(model="alone")).status == status
    assert (await world.post(model="alone")).status == 200


@pytest.mark.parametrize("status", [429, 503])
async def test_another_endpoint_has_room(world: World, status: int) -> None:
    """The client sees nothing; the full one gets nothing until its time is over, then its share."""
    a, b = world.engines["a"], world.engines["b"]
    a.inject(full(status, {"retry-after": "2"}, None))
    replies = []
    while not a.counters.requests:
        replies.append(await world.post(model="two"))
    # Behind a good answer of another endpoint it is Envoy's log that tells.
    await until_excluded(world, "a")
    replies += await asyncio.gather(*(world.post(model="two") for _ in range(20)))
    assert {(reply.status, reply.served_by) for reply in replies} == {(200, "b")}
    assert a.counters.requests == 1
    page = await world.page()
    assert breaker(page, "a") is BreakerState.CLOSED
    assert exclusions(page, "a") == {Exclusion.BACKPRESSURE}
    await a.heal()

    async def is_back() -> bool:
        return (await world.post(model="two")).served_by == "a"

    await until(is_back, "a is used again", 3)
    assert b.counters.served >= 21


async def test_all_are_full(world: World) -> None:
    """The client is told the soonest moment, and is served then."""
    world.engines["a"].inject(full(429, {"retry-after": "3"}))
    world.engines["b"].inject(full(503, {"retry-after": "1"}))
    assert (await world.post(model="two")).status in {429, 503}
    await until_excluded(world, "a")
    await until_excluded(world, "b")
    reply = await world.post(model="two")
    assert (reply.status, reply.reason) == (429, "saturated")
    assert told_seconds(reply) <= 1
    await until_served(world, "two", 2)
    assert world.requests() == {"a": 1, "b": 2}


async def test_it_is_full_for_a_while(world: World) -> None:
    """Eight clients that keep asking: few requests reach it, and they are served soon after."""
    engine = world.engines["alone"]
    engine.inject(full(503, {"retry-after": "0.5"}, None))
    loop = asyncio.get_running_loop()
    began = loop.time()
    served_at = 0.0

    async def keep_asking() -> None:
        nonlocal served_at
        while (await world.post(model="alone")).status != 200:
            await asyncio.sleep(0.02)
        served_at = served_at or loop.time()

    async with asyncio.TaskGroup() as clients:
        for _ in range(8):
            clients.create_task(keep_asking())
        await asyncio.sleep(1.5)
        hits = engine.counters.requests
        await engine.heal()
        healed = loop.time()
    # Of each half second's end, as many as were there before the first had its answer.
    assert hits <= 8 * ((healed - began) / 0.5 + 1)
    assert served_at - healed < 1
    assert breaker(await world.page(), "alone") is BreakerState.CLOSED


async def test_the_later_word_counts(world: World) -> None:
    """A shorter wait that is told afterwards does not shorten the longer one."""
    engine = world.engines["alone"]
    body = chat("alone")
    start = head("POST", CHAT, [("x-llmgw-model", "alone")], length=len(body))
    async with world.http1() as one, world.http1() as other:
        # Both have their engine before either has an answer.
        for connection, seconds in ((one, "1.5"), (other, "0.1")):
            engine.inject(full(429, {"retry-after": seconds}))
            seen = engine.counters.requests
            await connection.send(start)
            await engine.until(lambda seen=seen: engine.counters.requests > seen)  # type: ignore[misc]  # this round's
        for connection in (one, other):
            await connection.send(body)
            assert (await connection.answer()).status == 429
    assert await until_served(world, "alone", 4) > 1


async def test_the_wait_is_capped(world: World) -> None:
    """By the longest time that a breaker may be open: no engine can ask to be forgotten."""
    world.engines["short"].inject(full(429, {"retry-after": "86400"}))
    assert (await world.post(model="short")).status == 429
    reply = await world.post(model="short")
    assert reply.reason == "saturated"
    assert told_seconds(reply) <= 1
    await until_served(world, "short", 2)


async def test_envoys_own_503_is_a_failure(world: World) -> None:
    """Nobody there is not "not now", though the client is told to come again in either case."""
    world.engines["alone"].refuse()
    reply = await world.post(model="alone")
    assert (reply.status, reply.reason) == (503, "upstream_failed")
    assert reply.header("retry-after") is not None
    assert exclusions(await world.page(), "alone") == set()
    assert await world.new(ATTEMPTS, endpoint="alone", outcome="failure") == 1
    assert await world.new(ATTEMPTS, endpoint="alone", outcome="backpressure") == 0
    await world.engines["alone"].accept()
    assert (await world.post(model="alone")).status == 200


async def test_a_full_queue_without_a_word(world: World) -> None:
    """An engine's plain 503 opens the breaker; drained, it is back within a few seconds."""
    tiny = world.engines["tiny"]
    tiny.hold()
    holding = asyncio.create_task(world.post(model="tiny", seconds=30))
    await tiny.until(lambda: tiny.running == 1)
    await ask_until(world, "tiny", BreakerState.OPEN, model="tiny")
    await until_breaker(world, "tiny", BreakerState.HALF_OPEN)
    assert (await world.post(model="tiny")).status == 503
    assert (await world.post(model="tiny")).reason == "no_endpoint"
    tiny.release()
    assert (await holding).status == 200
    await until_served(world, "tiny", 3)
