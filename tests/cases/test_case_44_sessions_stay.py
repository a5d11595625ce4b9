"""When an endpoint goes, comes or breaks, its own sessions move, and no others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import pytest
import pytest_asyncio
from case_bodies import chat
from case_fleet import ask_until, exclusions, reconfigured, spread, started_anew, until_breaker
from case_http1 import CHAT
from case_world import World, case, endpoints, fresh, standing

from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind
from extproc.routing.endpoint import BreakerState
from extproc.telemetry.fleet import Exclusion

pytestmark = case(44)

FOUR = ("a", "b", "c", "d")
NEW = "e"
CONFIG = (
    "breaker: {threshold: 2, base_seconds: 0.3, max_seconds: 0.6, jitter_ratio: 0}\n"
    "scrape: {interval_seconds: 0.5, timeout_seconds: 0.5, stale_after_seconds: 60}\n"
    + endpoints(*FOUR, NEW)
)
COUNT = 200
# Of those that ought to stay, so many may have moved: what is still counted from the request
# before may have outweighed the ring's order, and the probe of a breaker is anybody's.
FEW = COUNT // 50

Places = Mapping[str, str]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Four equal engines; Envoy knows a fifth one."""
    settings = EngineSettings(
        max_running=1000, decode_tokens_per_second=100_000, shortest_step_seconds=0.0005
    )
    engines = [LabEngine(name, settings=settings) for name in (*FOUR, NEW)]
    async with (
        standing(tmp_path_factory.mktemp("case"), CONFIG, *engines) as world,
        reconfigured(world, without(NEW)),
    ):
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nothing in flight, nothing going wrong and nobody starting slowly."""
    await started.forget()
    await started_anew(started)
    return started


@pytest.fixture
def sessions() -> Sequence[str]:
    """Sessions that nobody has heard of."""
    prefix = fresh("session")
    return [f"{prefix}-{number}" for number in range(COUNT)]


def begins(name: str) -> str:
    """What an endpoint's line in the configuration begins with."""
    return f"  - {{id: {name}, "


def without(name: str) -> Callable[[str], str]:
    """The configuration with an endpoint less."""
    return lambda text: "".join(
        line for line in text.splitlines(keepends=True) if not line.startswith(begins(name))
    )


def drained(name: str) -> Callable[[str], str]:
    """The configuration with an endpoint drained."""
    return lambda text: text.replace(begins(name), f"{begins(name)}drained: true, ")


def with_new(text: str) -> str:
    """The configuration with an endpoint more, which Envoy knows already."""
    (line,) = (one for one in text.splitlines(keepends=True) if one.startswith(begins("d")))
    new = CONFIG.splitlines(keepends=True)[-1]
    assert new.startswith(begins(NEW))
    return text + line.replace(begins("d"), begins(NEW))


async def places(world: World, sessions: Sequence[str]) -> Places:
    """Where each session is served, two at a time; nobody sees an error."""
    found: dict[str, str] = {}
    waiting = iter(sessions)

    async def ask() -> None:
        async with world.http1() as connection:
            for session in waiting:
                reply = await connection.ask("POST", CHAT, [("x-session-id", session)], chat("m"))
                assert reply.status == 200, reply
                found[session] = reply.served_by

    await asyncio.gather(ask(), ask())
    return found


def at(found: Places, name: str) -> set[str]:
    """The sessions that are at an endpoint."""
    return {session for session, where in found.items() if where == name}


def moved(before: Places, after: Places) -> set[str]:
    """The sessions that are elsewhere now."""
    return {session for session, where in before.items() if after[session] != where}


def assert_even(found: Places, names: tuple[str, ...]) -> None:
    """Each of the endpoints has sessions, and none has many more than its part."""
    counted = Counter(found.values())
    assert counted.keys() == set(names)
    part = COUNT / len(names)
    assert all(part * 0.5 < number < part * 1.6 for number in counted.values()), counted


async def test_they_stay(world: World, sessions: Sequence[str]) -> None:
    """While nothing changes, and also when the service was started anew: it has the ring."""
    first = await places(world, sessions)
    assert_even(first, FOUR)
    assert await places(world, sessions) == first
    await started_anew(world)
    assert len(moved(first, await places(world, sessions))) <= FEW


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind=FaultKind.STATUS, status=500),
        Fault(kind=FaultKind.REFUSE),
    ],
    ids=lambda fault: fault.kind,
)
async def test_one_breaks(world: World, sessions: Sequence[str], fault: Fault) -> None:
    """Its sessions go elsewhere and stay there; no other moves, probe after probe, and no error."""
    first = await places(world, sessions)
    world.engines["b"].inject(fault)
    broken = await places(world, sessions)
    assert at(broken, "b") == set()
    assert moved(first, broken) == at(first, "b")
    # Its breaker is half-open now and then, and each probe is some session's request.
    assert await places(world, sessions) == broken
    await world.engines["b"].heal()
    await ask_until(world, "b", BreakerState.CLOSED)
    # Back in service: nobody is called back, but for the session of the probe.
    assert len(moved(broken, await places(world, sessions))) <= FEW


async def test_one_flaps(world: World, sessions: Sequence[str]) -> None:
    """Broken and mended again and again: the sessions of the others never move."""
    first = await places(world, sessions)
    others = set(sessions) - at(first, "c")
    for _ in range(2):
        world.engines["c"].inject(Fault(kind=FaultKind.STATUS, status=503))
        now = await places(world, sessions)
        assert at(now, "c") == set()
        await world.engines["c"].heal()
        await ask_until(world, "c", BreakerState.CLOSED)
    assert len(moved(first, await places(world, sessions)) & others) <= FEW


async def test_one_is_restarted_on_its_address(world: World, sessions: Sequence[str]) -> None:
    """While it is away its sessions are served elsewhere; who did not ask meanwhile comes back."""
    first = await places(world, sessions)
    engine = world.engines["a"]
    await engine.stop()
    asked = sorted(at(first, "a"))[:5]
    for session in asked:
        reply = await world.post(("x-session-id", session))
        assert (reply.status, reply.served_by == "a") == (200, False)
    await engine.start()
    await until_breaker(world, "a", BreakerState.HALF_OPEN)
    await ask_until(world, "a", BreakerState.CLOSED)
    after = await places(world, sessions)
    assert moved(first, after) >= set(asked)
    assert len(moved(first, after) - set(asked)) <= FEW


async def test_one_is_restarted_while_nobody_asks(world: World, sessions: Sequence[str]) -> None:
    """An idle connection to it is dead, which no client notices: all are where they were."""
    first = await places(world, sessions)
    await world.engines["a"].stop()
    await world.engines["a"].start()
    assert len(moved(first, await places(world, sessions))) <= FEW


async def test_one_is_removed_and_comes_back(world: World, sessions: Sequence[str]) -> None:
    """Its sessions are shared out among the others, and it gets the same ones back."""
    first = await places(world, sessions)
    async with reconfigured(world, without("c")):
        fewer = await places(world, sessions)
        assert_even(fewer, ("a", "b", "d"))
        assert len(moved(first, fewer) - at(first, "c")) <= FEW
    back = await places(world, sessions)
    assert len(moved(first, back)) <= FEW


async def test_one_is_added(world: World, sessions: Sequence[str]) -> None:
    """It takes its part of the sessions, a little from each, and no other session moves."""
    first = await places(world, sessions)
    async with reconfigured(world, with_new):
        more = await places(world, sessions)
        assert_even(more, (*FOUR, NEW))
        assert len(moved(first, more) - at(more, NEW)) <= FEW
        assert len(at(more, NEW)) < COUNT * 0.3


async def test_one_is_drained(world: World, sessions: Sequence[str]) -> None:
    """It takes no request, of sessions that were there neither; the others stay."""
    first = await places(world, sessions)
    async with reconfigured(world, drained("d")):
        assert exclusions(await world.page(), "d") == {Exclusion.DRAINED}
        fewer = await places(world, sessions)
        assert_even(fewer, ("a", "b", "c"))
        assert len(moved(first, fewer) - at(first, "d")) <= FEW


async def test_one_session_in_a_crowd(world: World) -> None:
    """A hundred requests of one session are not all at its endpoint: affinity has a limit."""
    session = ("x-session-id", fresh("crowd"))
    home = (await world.post(session)).served_by
    await world.forget()
    where = await spread(world, 100, session)
    assert where.keys() == set(FOUR)
    assert where[home] <= 40, where
