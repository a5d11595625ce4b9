"""In-flight is exact, however a request ends: never leaked, never released early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from enum import StrEnum
from random import Random

import pytest
import pytest_asyncio
from case_bodies import chat
from case_fleet import counts, held, spread, until_asked, until_counted
from case_http1 import CHAT, Pair, head
from case_leaving import Way, crowd
from case_world import World, case, endpoints, fresh, standing, until

from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import CutBy, Fault, FaultKind

pytestmark = case(24)

# Breakers stay closed and no metrics are read: what engines do here on purpose, and what is learned
# of their speed meanwhile, must not change where requests go.
CONFIG = "breaker: {threshold: 100000}\n" + endpoints("a", "b", "c", engine="none")
CROWD = 50
IN_HEADER = [("x-llmgw-model", "m")]
SETTINGS = EngineSettings(max_running=1000, decode_tokens_per_second=25.0)
STREAM = chat("m", stream=True) + b" " * 200
LONG_STREAM = chat("m", stream=True, max_tokens=2000)


class Phase(StrEnum):
    """How far a request has come when its client leaves."""

    UPLOADING = "before the body's end"
    WAITING = "waiting for headers"
    STARTED = "after headers"
    STREAMING = "mid-stream"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Three engines that take as many requests as come."""
    engines = [LabEngine(name, settings=SETTINGS) for name in "abc"]
    async with standing(tmp_path_factory.mktemp("case"), CONFIG, *engines) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nothing in flight and nothing going wrong."""
    await started.forget()
    return started


def inject(world: World, *faults: Fault) -> None:
    """Every engine has the faults."""
    for engine in world.engines.values():
        engine.inject(*faults)


async def assert_even(world: World, number: int = 99) -> None:
    """The next requests are spread evenly, so nobody's count is off."""
    await world.forget()
    share = number / len(world.engines)
    found = await spread(world, number)
    # One request that leaked at one of them would show as two fewer there than elsewhere.
    assert all(abs(found[name] - share) <= 1 for name in world.engines), found
    await until_counted(world, {})


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("phase", list(Phase))
async def test_clients_leave(world: World, phase: Phase, way: Way) -> None:
    """Each counts where its engine has it, until it leaves; then nothing does, within a second."""
    pairs: list[Pair] = [*IN_HEADER] if phase is Phase.UPLOADING else []
    sent = len(STREAM) // 2 if phase is Phase.UPLOADING else None
    body = STREAM if phase is Phase.UPLOADING else LONG_STREAM
    if phase is Phase.WAITING:
        inject(world, Fault(kind=FaultKind.HANG))
    elif phase is Phase.STARTED:
        for engine in world.engines.values():
            engine.hold()
    async with crowd(world, way, CROWD, body, pairs, sent=sent) as clients:
        await until_asked(world, CROWD)
        if phase in {Phase.STARTED, Phase.STREAMING}:
            await clients.started()
        if phase is Phase.STREAMING:
            await clients.heard()
        await until_counted(world, world.requests())
        await clients.leave()
        await until_counted(world, {})
    # As many as the engines have seen leave.
    for engine in world.engines.values():
        await engine.until(lambda engine=engine: engine.counters.active == 0)  # type: ignore[misc]  # this round's
    await assert_even(world)


@pytest.mark.parametrize("way", list(Way))
async def test_clients_leave_while_envoy_has_the_body(world: World, way: Way) -> None:
    """The model is in a body that has not come: no engine has it and nothing counts."""
    async with crowd(world, way, CROWD, STREAM, sent=len(STREAM) // 2) as clients:

        async def are_there() -> bool:
            return await world.envoy_stat("http.llmgw.downstream_rq_active") >= CROWD

        await until(are_there, "Envoy has all requests")
        assert counts(await world.page()) == {}
        await clients.leave()

        async def are_gone() -> bool:
            return await world.envoy_stat("http.llmgw.downstream_rq_active") == 0

        await until(are_gone, "Envoy has none")
    await until_counted(world, {})
    assert world.requests() == {}


@pytest.mark.parametrize("pairs", [[], IN_HEADER], ids=["body", "header"])
async def test_a_reply_races_the_leaving(world: World, pairs: list[Pair]) -> None:
    """Clients that leave at any moment of the first milliseconds, while the service decides."""
    random = Random(24)
    wire = head("POST", CHAT, pairs, length=len(LONG_STREAM)) + LONG_STREAM

    async def hurry(seconds: float) -> None:
        async with world.http1() as connection:
            await connection.send(wire)
            # Not to wait for something: the moment itself is what differs.
            await asyncio.sleep(seconds)
            connection.reset()

    for _ in range(8):
        await asyncio.gather(*(hurry(random.uniform(0.0, 0.02)) for _ in range(25)))
    await until_counted(world, {})
    await assert_even(world)


@pytest.mark.parametrize("kind", [FaultKind.RESET, FaultKind.RESET_AFTER_BODY])
async def test_engines_reset_before_they_answer(world: World, kind: FaultKind) -> None:
    """While the body is still coming, or when all of it is there: three attempts, none is left."""
    inject(world, Fault(kind=kind))
    replies = await asyncio.gather(*(world.post(*IN_HEADER, body=STREAM) for _ in range(30)))
    assert {(reply.status, reply.reason) for reply in replies} == {(503, "upstream_failed")}
    await until_counted(world, {})
    assert sum(world.requests().values()) == 90
    await assert_even(world)


@pytest.mark.parametrize("how", list(CutBy))
@pytest.mark.parametrize("chunks", [0, 3], ids=["after headers", "mid-stream"])
async def test_engines_cut_their_answers(world: World, chunks: int, how: CutBy) -> None:
    """After the headers or later, with a reset or a plain end of the connection."""
    inject(world, Fault(kind=FaultKind.CUT, chunks=chunks, how=how))
    replies = await asyncio.gather(*(world.post(body=LONG_STREAM) for _ in range(30)))
    assert all(reply.cut or reply.status == 502 for reply in replies)
    await until_counted(world, {})
    assert sum(world.requests().values()) == 30
    await assert_even(world)


async def test_an_engine_dies_with_all_of_its_streams(world: World) -> None:
    """Every connection to it is reset: its count is 0 and the others' are what they were."""
    async with held(world.engines.values()), crowd(world, Way.FIN, 30, LONG_STREAM) as clients:
        await clients.started()
        before = world.requests()
        await until_counted(world, before)
        world.engines["a"].inject(Fault(kind=FaultKind.KILL))
        await until_counted(world, {name: before[name] for name in "bc"})
    await until_counted(world, {})
    await assert_even(world)


async def test_the_count_moves_with_the_request(world: World) -> None:
    """To the endpoint that has it, before that one has said a word."""
    session = ("x-session-id", fresh("session"))
    first = (await world.post(session)).served_by
    await world.forget()
    inject(world, Fault(kind=FaultKind.HANG))
    world.engines[first].faults.clear()
    world.engines[first].inject(Fault(kind=FaultKind.STATUS, status=503))
    async with crowd(world, Way.FIN, 5, chat("m"), [session]):
        await until_asked(world, 10)
        now = {name: number for name, number in world.requests().items() if name != first}
        assert sum(now.values()) == 5
        # Within what Envoy keeps a line of its log back.
        await until_counted(world, now)
    await until_counted(world, {})


async def watch(world: World, seconds: float) -> None:
    """A stream is in flight all along, and no longer than it lasts."""
    loop = asyncio.get_running_loop()
    tokens = round(seconds * SETTINGS.decode_tokens_per_second)
    async with world.http1() as connection:
        body = chat("m", stream=True, max_tokens=tokens)
        await connection.send(head("POST", CHAT, length=len(body)) + body)
        assert (await connection.start()).status == 200
        (name,) = world.requests()
        began = loop.time()
        ending = asyncio.create_task(connection.until(b"[DONE]", seconds + 10))
        seen = 0
        while world.engines[name].counters.active:
            assert counts(await world.page()) == {name: 1} or not world.engines[name].running
            seen += 1
            await asyncio.sleep(0.02)
        await ending
        assert loop.time() - began > 0.8 * seconds
        assert seen > seconds * 5
        await until_counted(world, {})


async def test_a_stream_counts_all_along(world: World) -> None:
    """One, from its headers to its last token, read many times a second."""
    await watch(world, 3.0)


@pytest.mark.slow
async def test_a_long_stream_counts_all_along(world: World) -> None:
    """The same for half a minute."""
    await watch(world, 30.0)


@pytest.mark.slow
async def test_ten_thousand_requests(world: World) -> None:
    """Of all kinds, of which a fifth is given up on the way: nothing is left, and it is even."""
    random = Random(10_000)
    fast = chat("m", max_tokens=1)

    async def one() -> None:
        number = random.random()
        if number < 0.2:
            async with world.http1() as connection:
                pairs = IN_HEADER if random.random() < 0.5 else []
                sent = LONG_STREAM[: random.randrange(1, len(LONG_STREAM) + 1)]
                await connection.send(head("POST", CHAT, pairs, length=len(LONG_STREAM)) + sent)
                await asyncio.sleep(random.uniform(0.0, 0.1))
                connection.reset()
        elif number < 0.3:
            await world.post(body=chat("m", stream=True))
        else:
            assert (await world.post(body=fast, seconds=60)).status == 200

    async def some(number: int) -> None:
        for _ in range(number):
            await one()

    await asyncio.gather(*(some(200) for _ in range(50)))
    await until_counted(world, {})
    await assert_even(world, 300)
