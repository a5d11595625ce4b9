"""A half-open endpoint always comes back: no probe that gets lost can keep it out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import product

import pytest
import pytest_asyncio
from case_bodies import chat
from case_fleet import (
    WAITING,
    ask_until,
    breaker,
    counts,
    each,
    until_breaker,
    until_known,
    until_stale,
)
from case_leaving import Way, crowd
from case_world import ATTEMPTS, World, case, fresh, standing, until

from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import CutBy, Fault, FaultKind
from extproc.routing.endpoint import BreakerState

pytestmark = case(29)

# One failure opens, for 0.4 s and then for 0.8 s. A probe that never reports has its place for as
# long as the longest cooldown, because the deadline for headers is longer.
LONGEST_SECONDS = 0.8
DEADLINE_SECONDS = 2.5
CONFIG = f"""
listener: {{header_deadline_seconds: {DEADLINE_SECONDS}}}
scrape: {{interval_seconds: 0.2, timeout_seconds: 0.2, stale_after_seconds: 1}}
breaker: {{threshold: 1, base_seconds: 0.4, max_seconds: {LONGEST_SECONDS}, jitter_ratio: 0}}
endpoints:
"""
# Each is the only endpoint of a model of its own name, and two share a model.
LONE = [f"lone{number}" for number in range(24)]
PAIRS = [(f"x{number}", f"y{number}") for number in range(4)]
CONFIG += "".join(f'  - {{id: {name}, url: "${name}", models: [{name}]}}\n' for name in LONE)
CONFIG += "".join(
    f'  - {{id: {name}, url: "${name}", models: [{"-".join(pair)}]}}\n'
    for pair in PAIRS
    for name in pair
)
# A success is booked a second after its end.
GRACE_SECONDS = 1.0
# And the rest is for a busy machine: what wedges never comes back.
BACK_SECONDS = LONGEST_SECONDS + GRACE_SECONDS + 4.0


@dataclass(frozen=True, slots=True)
class Bench:
    """The stack, and the endpoints that no test has used yet."""

    world: World
    lone: Iterator[str]
    pairs: Iterator[tuple[str, str]]

    async def opened(self, name: str | None = None, model: str | None = None) -> LabEngine:
        """An endpoint whose breaker was opened by one failure, and is half-open now."""
        name = name or next(self.lone)
        engine = self.world.engines[name]
        engine.inject(Fault(kind=FaultKind.STATUS, status=500))

        async def is_open() -> bool:
            await self.world.post(model=model or name)
            return breaker(await self.world.page(), name) is not BreakerState.CLOSED

        await until(is_open, f"{name} is open")
        await engine.heal()
        await until_breaker(self.world, name, BreakerState.HALF_OPEN)
        await until(lambda: self.is_idle(name), f"{name} is idle")
        engine.records.reset()
        return engine

    async def is_idle(self, name: str) -> bool:
        """Whether nothing is in flight there."""
        return name not in counts(await self.world.page())

    async def state(self, engine: LabEngine) -> BreakerState:
        """The state of the endpoint's breaker."""
        return breaker(await self.world.page(), engine.name)

    async def assert_back(self, engine: LabEngine) -> None:
        """The only endpoint of a model is in service again, within one more cooldown."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await ask_until(self.world, engine.name, BreakerState.CLOSED, model=engine.name)
        assert loop.time() - began < BACK_SECONDS
        assert engine.counters.served >= 1


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    """Many engines, of which each test takes some of its own."""
    settings = EngineSettings(max_running=1000)
    models = [*LONE, *("-".join(pair) for pair in PAIRS)]
    names = [*LONE, *(name for pair in PAIRS for name in pair)]
    engines = [LabEngine(name, models, settings=settings) for name in names]
    async with standing(tmp_path_factory.mktemp("case"), CONFIG, *engines) as world:
        yield Bench(world, iter(LONE), iter(PAIRS))


async def test_its_client_leaves(bench: Bench) -> None:
    """In any way, at any time: its place is free as soon as that is known."""

    async def leave(way: Way, *, is_streaming: bool) -> None:
        engine = await bench.opened()
        engine.hold()
        if not is_streaming:
            engine.inject(Fault(kind=FaultKind.HANG, times=1))
        body = chat(engine.name, stream=is_streaming)
        async with crowd(bench.world, way, 1, body) as clients:
            await engine.until(lambda: engine.counters.requests == 1)
            if is_streaming:
                await clients.started()
            await clients.leave()
        engine.release()
        await until(lambda: bench.is_idle(engine.name), "idle", 1)
        assert await bench.state(engine) is BreakerState.HALF_OPEN
        await bench.assert_back(engine)

    ways = product(Way, [False, True])
    await each({f"{way}, streaming: {late}": leave(way, is_streaming=late) for way, late in ways})


async def test_it_is_refused(bench: Bench) -> None:
    """A mistake of the client's, or a full queue: the next request is the next probe."""

    async def refuse(status: int) -> None:
        engine = await bench.opened()
        headers = {"retry-after": "0"} if status == 429 else {}
        engine.inject(Fault(kind=FaultKind.STATUS, status=status, headers=headers, times=1))
        assert (await bench.world.post(model=engine.name)).status == status
        assert await bench.state(engine) is BreakerState.HALF_OPEN
        await bench.assert_back(engine)

    await each({str(status): refuse(status) for status in (400, 401, 404, 422, 429)})


async def test_it_hangs(bench: Bench) -> None:
    """Its place is lent, not given: the next probe goes before the first one's deadline."""
    world, engine = bench.world, await bench.opened()
    engine.inject(Fault(kind=FaultKind.HANG, times=1))
    loop = asyncio.get_running_loop()
    first = asyncio.create_task(world.post(model=engine.name))
    await engine.until(lambda: engine.counters.requests == 1)
    began = loop.time()

    async def is_through() -> bool:
        reply = await world.post(model=engine.name)
        assert reply.status == 200 or reply.reason == "no_endpoint"
        return reply.status == 200

    await until(is_through, "the next probe", LONGEST_SECONDS + 1)
    assert loop.time() - began > LONGEST_SECONDS * 0.7
    assert engine.counters.requests == 2
    await until_breaker(world, engine.name, BreakerState.CLOSED, GRACE_SECONDS + 1)
    # The first one's failure is of an epoch that is over: it opens nothing.
    assert (await first).status == 504
    booked = (await world.page()).total(ATTEMPTS, endpoint=engine.name, outcome="failure")
    assert booked >= 2
    assert await bench.state(engine) is BreakerState.CLOSED


async def test_it_streams_for_long(bench: Bench) -> None:
    """A good answer that outlasts its lease closes the breaker when it has ended."""
    engine = await bench.opened()
    engine.inject(Fault(kind=FaultKind.STALL, chunks=1, seconds=LONGEST_SECONDS + 0.4, times=1))
    reply = await bench.world.post(body=chat(engine.name, stream=True))
    assert (reply.status, reply.cut) == (200, False)
    await until_breaker(bench.world, engine.name, BreakerState.CLOSED, GRACE_SECONDS + 1)


async def test_it_fails(bench: Bench) -> None:
    """Then the next cooldown is longer, and after it the next probe goes."""
    ways = {
        "500": Fault(kind=FaultKind.STATUS, status=500, times=1),
        "reset": Fault(kind=FaultKind.RESET, times=1),
        "cut by reset": Fault(kind=FaultKind.CUT, chunks=1, times=1),
        "cut by end": Fault(kind=FaultKind.CUT, chunks=1, how=CutBy.FIN, times=1),
    }

    async def fail(fault: Fault) -> None:
        engine = await bench.opened()
        engine.inject(fault)
        # Envoy shows a client the end of a cut stream a second late; nobody waits for that here.
        asking = asyncio.create_task(bench.world.post(body=chat(engine.name, stream=True)))
        await until_breaker(bench.world, engine.name, BreakerState.OPEN, GRACE_SECONDS + 1)
        await asking
        await until_breaker(bench.world, engine.name, BreakerState.HALF_OPEN, LONGEST_SECONDS + 1)
        await bench.assert_back(engine)

    await each({way: fail(fault) for way, fault in ways.items()})


async def test_its_session_is_elsewhere(bench: Bench) -> None:
    """Every request belongs to a session of the other endpoint: it is probed all the same."""
    pair = next(bench.pairs)
    model = "-".join(pair)
    session = ("x-session-id", fresh("session"))
    home = (await bench.world.post(session, model=model)).served_by
    (other,) = {*pair} - {home}
    engine = await bench.opened(other, model)
    assert (await bench.world.post(session, model=model)).served_by == other
    await until_breaker(bench.world, other, BreakerState.CLOSED, GRACE_SECONDS + 1)
    assert engine.counters.served == 1


async def test_it_scores_worse(bench: Bench) -> None:
    """Its numbers are the worst that there are, and it is probed all the same."""
    pair = next(bench.pairs)
    engine = await bench.opened(pair[0], "-".join(pair))
    engine.show(running=100, waiting=1000, kv_usage_ratio=0.99)
    await until_known(bench.world, WAITING, engine.name, 1000)
    assert (await bench.world.post(model="-".join(pair))).served_by == engine.name
    await until_breaker(bench.world, engine.name, BreakerState.CLOSED, GRACE_SECONDS + 1)


async def test_its_metrics_are_gone(bench: Bench) -> None:
    """Another gate than the breaker does not hide it: stale, it is probed all the same."""
    pair = next(bench.pairs)
    engine = await bench.opened(pair[0], "-".join(pair))
    engine.inject(Fault(kind=FaultKind.METRICS_HANG))
    await until_stale(bench.world, engine.name)
    assert (await bench.world.post(model="-".join(pair))).served_by == engine.name
    await until_breaker(bench.world, engine.name, BreakerState.CLOSED, GRACE_SECONDS + 1)


async def test_few_requests(bench: Bench) -> None:
    """One is enough: the first after the cooldown is the probe, however few there are."""

    async def ask_once(name: str | None, model: str | None) -> None:
        engine = await bench.opened(name, model)
        reply = await bench.world.post(model=model or engine.name)
        assert reply.served_by == engine.name
        await until_breaker(bench.world, engine.name, BreakerState.CLOSED, GRACE_SECONDS + 1)
        assert engine.counters.requests == 1

    pair = next(bench.pairs)
    await each({"alone": ask_once(None, None), "one of two": ask_once(pair[0], "-".join(pair))})


async def test_the_service_dies_with_it(bench: Bench) -> None:
    """The place was in its memory alone: started again, it knows of no breaker."""
    world, engine = bench.world, await bench.opened()
    engine.inject(Fault(kind=FaultKind.HANG, times=1))
    async with crowd(world, Way.FIN, 1, chat(engine.name)):
        await engine.until(lambda: engine.counters.requests == 1)
        await world.stack.service.kill()
        await world.stack.start_service()

        async def is_served() -> bool:
            return (await world.post(model=engine.name)).status == 200

        await until(is_served, "served again", 3)
        assert await bench.state(engine) is BreakerState.CLOSED
