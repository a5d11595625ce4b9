"""An engine that answers nothing leaves the rotation, whatever it says of itself; a busy one stays.

Requests tell the two apart. No health check is asked, and a metrics page is no health check.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from case_fleet import (
    UNREADABLE,
    ask_until,
    breaker,
    each,
    exclusions,
    known,
    spread,
    until_breaker,
    until_fresh,
    until_stale,
)
from case_http1 import Reply
from case_world import REFUSED, World, case, endpoints, fresh, standing

from extproc.config.values import Steering
from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind
from extproc.routing.endpoint import BreakerState

pytestmark = case(34)

THRESHOLD = 3
DEADLINE_SECONDS = 0.6
# What is asked for in the API's name is not answered, but for the list of models.
STUCK = {
    "hangs": Fault(kind=FaultKind.HANG, path="/v1/c"),
    "dawdles": Fault(kind=FaultKind.SLOW_HEADERS, path="/v1/c", seconds=30),
}
STUCK_CONFIG = f"""
listener: {{header_deadline_seconds: {DEADLINE_SECONDS}}}
scrape: {{interval_seconds: 0.4, timeout_seconds: 0.4, stale_after_seconds: 3}}
breaker: {{threshold: {THRESHOLD}, base_seconds: 60}}
endpoints:
  - {{id: hangs, url: "$hangs", models: [hangs]}}
  - {{id: dawdles, url: "$dawdles", models: [dawdles]}}
  - {{id: crowded, url: "$crowded", models: [crowded]}}
  - {{id: sound, url: "$sound", models: [hangs, dawdles, crowded]}}
  - {{id: alone, url: "$alone", models: [alone]}}
  - {{id: mends, url: "$mends", models: [mends], breaker: {{threshold: 1, base_seconds: 0.4}}}}
"""
NAMES = ("hangs", "dawdles", "crowded", "sound", "alone", "mends")

BUSY_CONFIG = """
scrape: {interval_seconds: 0.3, timeout_seconds: 0.3, stale_after_seconds: 1}
breaker: {threshold: 3, base_seconds: 60}
"""
BUSY_CONFIG += endpoints("busy", "calm") + '  - {id: alone, url: "$alone", models: [alone]}\n'
BURST = 300
SLOW_SECONDS = 15.0
# Everything that somebody might ask an engine for its health.
PAGES = ("/health", "/ping", "/load", "/v1/models")


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[Steering.PRIORITY_GROUP, Steering.CLUSTER_HEADER],
)
async def stuck(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    """Engines that look well and answer nothing, some beside one that does."""
    engines = [LabEngine(name, NAMES) for name in NAMES]
    folder = tmp_path_factory.mktemp("case")
    async with standing(folder, STUCK_CONFIG, *engines, steering=request.param) as world:
        for engine in engines:
            if engine.name != "sound":
                engine.inject(STUCK.get(engine.name, STUCK["hangs"]))
        yield world


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def busy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Engines that serve, and take fifteen seconds to say that they are not well."""
    small = EngineSettings(max_running=4, decode_tokens_per_second=2000)
    faults = [Fault(kind=FaultKind.METRICS_SLOW, seconds=SLOW_SECONDS)]
    faults += [
        Fault(kind=FaultKind.SLOW_HEADERS, path=path, seconds=SLOW_SECONDS) for path in PAGES
    ]
    engines = [
        LabEngine(name, ("m", "alone"), settings=small, faults=faults) for name in ("busy", "alone")
    ]
    calm = LabEngine("calm")
    async with standing(tmp_path_factory.mktemp("case"), BUSY_CONFIG, *engines, calm) as world:
        for engine in engines:
            engine.desk.is_healthy = False
        await until_stale(world, "busy", "alone")
        yield world


async def looks_well(world: World, name: str) -> bool:
    """Whether the engine's own pages all come, and say that it is well."""
    for path in (*PAGES, "/metrics"):
        async with world.session.get(f"{world.engines[name].url}{path}") as response:
            if response.status != 200:
                return False
    return True


def assert_served(world: World, replies: list[Reply]) -> None:
    """By the sound one, or, where Envoy tries no other, told that there was no answer."""
    is_tried_elsewhere = world.stack.config.steering is Steering.PRIORITY_GROUP
    for reply in replies:
        if reply.status == 200:
            assert reply.served_by == "sound"
        else:
            assert not is_tried_elsewhere
            assert (reply.status, reply.reason) == (504, "upstream_failed")
            assert b"127.0.0.1" not in reply.body


async def test_it_answers_nothing(stuck: World) -> None:
    """After three deadlines it gets nothing more, though all of its pages say that it is well."""
    await each({name: leaves(stuck, name) for name in STUCK})


async def leaves(world: World, name: str) -> None:
    """The endpoint leaves the rotation, by what requests say and nothing else."""
    engine = world.engines[name]
    replies = await ask_until(world, name, BreakerState.OPEN, model=name, seconds=20)
    assert_served(world, replies)
    seen = engine.counters.requests
    # Envoy's log of attempts, which tells of those that were tried elsewhere, may be a moment late.
    assert THRESHOLD <= seen <= THRESHOLD + 2
    replies = [await world.post(("x-session-id", fresh("s")), model=name) for _ in range(20)]
    assert {(reply.status, reply.served_by) for reply in replies} == {(200, "sound")}
    assert engine.counters.requests == seen
    assert (await world.page()).attempts()[name, "failure"] == seen
    await until_fresh(world, name)
    shown = await world.page()
    assert known(shown, UNREADABLE, name) == 0
    assert exclusions(shown, name) == set()
    assert breaker(shown, "sound") is BreakerState.CLOSED
    assert await looks_well(world, name)


async def test_a_crowd_meets_it(stuck: World) -> None:
    """Thirty requests at once: those that it got go on, and later ones do not meet it at all."""
    replies = await asyncio.gather(*(stuck.post(model="crowded") for _ in range(30)))
    assert_served(stuck, list(replies))
    await until_breaker(stuck, "crowded", BreakerState.OPEN)
    seen = stuck.engines["crowded"].counters.requests
    assert seen >= THRESHOLD
    replies = await asyncio.gather(*(stuck.post(model="crowded") for _ in range(30)))
    assert {(reply.status, reply.served_by) for reply in replies} == {(200, "sound")}
    assert stuck.engines["crowded"].counters.requests == seen


async def test_there_is_no_other(stuck: World) -> None:
    """Three clients wait in vain; then nobody waits, and each is told when to come back."""
    for _ in range(THRESHOLD):
        reply = await stuck.post(model="alone")
        assert (reply.status, reply.reason) == (504, "upstream_failed")
    loop = asyncio.get_running_loop()
    began = loop.time()
    replies = [await stuck.post(model="alone") for _ in range(5)]
    assert loop.time() - began < 5 * DEADLINE_SECONDS
    assert {(reply.status, reply.reason) for reply in replies} == {(503, "no_endpoint")}
    assert all(reply.header("retry-after") for reply in replies)
    assert stuck.engines["alone"].counters.requests == THRESHOLD


async def test_it_answers_again(stuck: World) -> None:
    """One request after its cooldown is enough to bring it back."""
    engine = stuck.engines["mends"]
    await ask_until(stuck, "mends", BreakerState.OPEN, model="mends")
    await engine.heal()
    await ask_until(stuck, "mends", BreakerState.CLOSED, model="mends")
    assert (await stuck.post(model="mends")).status == 200


async def test_a_burst_at_a_busy_one(busy: World) -> None:
    """Hundreds of requests for four places, and no page of its comes: all are served."""
    engine = busy.engines["alone"]
    replies = await asyncio.gather(*(busy.post(model="alone", seconds=30) for _ in range(BURST)))
    assert {reply.status for reply in replies} == {200}
    assert engine.counters.requests == engine.counters.served == BURST
    assert engine.counters.peak_active > 4 * 4
    assert await busy.new(REFUSED) == 0
    shown = await busy.page()
    assert breaker(shown, "alone") is BreakerState.CLOSED
    assert exclusions(shown, "alone") == set()
    assert {outcome for name, outcome in shown.attempts() if name == "alone"} <= {"success"}


async def test_a_busy_one_keeps_its_share(busy: World) -> None:
    """Beside one whose pages come it is used all the same."""
    counts = await spread(busy, 20)
    assert min(counts["busy"], counts["calm"]) >= 8, counts
    shown = await busy.page()
    assert known(shown, UNREADABLE, "busy") == 1
    assert breaker(shown, "busy") is BreakerState.CLOSED


async def test_nobody_asks_for_its_health(busy: World) -> None:
    """Of its pages the metrics alone are read, and never more than one at a time."""
    for name in ("busy", "calm", "alone"):
        assert {probe.path for probe in busy.engines[name].probes} == {"/metrics"}
