"""In-flight counts are exact: 1 from the decision to the end, however it ends."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import openai
import pytest
import pytest_asyncio
from e2e_world import CHAT, HELLO, INFLIGHT, MODEL, STREAMS, World, chat_body, listen

from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind

pytestmark = [
    pytest.mark.envoy,
    pytest.mark.xdist_group("e2e-inflight"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(loop_scope="module")
async def trio(started_trio: World) -> World:
    """Three sound engines, of which nothing is seen and nothing is still to be booked."""
    await started_trio.forget(attempts=True)
    return started_trio


def hold(world: World) -> None:
    """No engine makes tokens."""
    for engine in world.engines.values():
        engine.hold()


def release(world: World) -> None:
    """All engines make tokens again."""
    for engine in world.engines.values():
        engine.release()


async def busy(world: World) -> LabEngine:
    """The one engine that has a request, as soon as it has."""
    (any_engine, *_) = world.engines.values()
    await any_engine.until(lambda: bool(world.requests()))
    (name,) = world.requests()
    return world.engines[name]


async def counted(world: World, engine: LabEngine) -> tuple[int, int]:
    """What is in flight at the engine, and in all."""
    page = await world.page()
    return page.total(INFLIGHT, endpoint=engine.name), page.total(INFLIGHT)


async def test_a_stream_counts_until_its_end(trio: World) -> None:
    """It reads 1 before the first token, between tokens, and 0 within a second after the last."""
    hold(trio)
    async with trio.openai() as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=100, stream=True
        )
        engine = await busy(trio)
        assert await counted(trio, engine) == (1, 1)
        engine.release()
        chunks = aiter(stream)
        for _ in range(5):
            await anext(chunks)
        engine.hold()
        assert await counted(trio, engine) == (1, 1)
        engine.release()
        async for _ in chunks:
            pass
        await trio.until_idle()
    assert (await trio.page()).total(STREAMS) == 0
    await trio.until_attempts({(engine.name, "success"): 1})


async def test_a_client_that_leaves_a_stream(trio: World) -> None:
    """Is gone within a second, at the engine too, and nobody is to blame."""
    async with trio.openai() as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=20_000, stream=True
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                break
        engine = await busy(trio)
        assert await counted(trio, engine) == (1, 1)
        await stream.close()
        await trio.until_idle()
    await engine.until(lambda: engine.counters.aborted == 1)
    await trio.until_attempts({(engine.name, "aborted"): 1})


@pytest.mark.parametrize("extra", [[], [("x-llmgw-model", MODEL)]], ids=["body", "header"])
async def test_a_client_that_leaves_before_the_headers(
    trio: World, extra: list[tuple[str, str]]
) -> None:
    """Likewise, whether the model was in the body or in a header."""
    for engine in trio.engines.values():
        engine.inject(Fault(kind=FaultKind.HANG))
    body = chat_body()
    async with trio.connected() as connection:
        await connection.send_head("POST", CHAT, extra, len(body))
        await connection.send(body)
        engine = await busy(trio)
        assert await counted(trio, engine) == (1, 1)
    await trio.until_idle()
    await engine.until(lambda: engine.counters.aborted == 1)
    await trio.until_attempts({(engine.name, "aborted"): 1})


async def test_a_client_that_leaves_while_it_sends(trio: World) -> None:
    """The engine has half of the body; nothing stays behind."""
    body = chat_body()
    async with trio.connected() as connection:
        await connection.send_head("POST", CHAT, [("x-llmgw-model", MODEL)], len(body))
        await connection.send(body[:10])
        engine = await busy(trio)
        assert await counted(trio, engine) == (1, 1)
    await trio.until_idle()
    await trio.until_attempts({(engine.name, "aborted"): 1})


async def test_many_clients_that_leave(trio: World) -> None:
    """30 at once, half of them in a stream: all are gone, and the next requests are served."""
    hold(trio)

    async def leave(client: openai.AsyncOpenAI, *, is_stream: bool) -> None:
        answer = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=50, stream=is_stream
        )
        assert isinstance(answer, openai.AsyncStream)
        await asyncio.Event().wait()

    async with trio.openai() as client:
        asking = [
            asyncio.create_task(leave(client, is_stream=bool(number % 2))) for number in range(30)
        ]
        (any_engine, *_) = trio.engines.values()
        await any_engine.until(lambda: sum(trio.requests().values()) == 30)
        page = await trio.page()
        assert {name: page.total(INFLIGHT, endpoint=name) for name in trio.engines} == (
            trio.requests()
        )
        for task in asking:
            task.cancel()
        for task in asking:
            with suppress(asyncio.CancelledError):
                await task
    await trio.until_idle()
    release(trio)
    expected = {(name, "aborted"): number for name, number in trio.requests().items()}
    await trio.until_attempts(expected)
    for _ in range(6):
        assert (await trio.post()).status == 200
    await trio.until_idle()


async def test_an_engine_that_cuts_its_stream(trio: World) -> None:
    """The count is 0 at once, and the cut is the engine's failure."""
    for engine in trio.engines.values():
        engine.inject(Fault(kind=FaultKind.CUT, chunks=3))
    heard: list[str] = []
    async with trio.openai() as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=50, stream=True
        )
        with pytest.raises(openai.APIConnectionError):
            await listen(stream, heard)
    assert len(heard) == 3
    await trio.until_idle()
    await trio.until_attempts({(next(iter(trio.requests())), "failure"): 1})


async def test_what_no_engine_sees_is_never_in_flight(trio: World) -> None:
    """Lists, refusals and bad bodies."""
    async with trio.openai() as client:
        _ = [model async for model in client.models.list()]
    assert (await trio.post(model="wrong")).status == 404
    assert (await trio.ask("POST", CHAT, (), b"[]")).status == 400
    assert await trio.inflight() == 0
    assert trio.requests() == {}
