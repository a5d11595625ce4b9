"""A stream that breaks off is its engine's failure, once; an error written into one is not seen."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import product

import openai
import pytest
import pytest_asyncio
from case_bodies import chat
from case_fleet import breaker, each, exclusions, until_breaker
from case_hosts import breaking_off
from case_http1 import CHAT, Reply, chunked, head
from case_world import World, case, standing, together

from extproc.config.values import Steering
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import CutBy, Fault, FaultKind
from extproc.routing.endpoint import BreakerState

pytestmark = case(35)

# Each is alone with its model, but for the two of `pair`; `never` counts and does not open.
CONFIG = """
breaker: {threshold: 3, base_seconds: 60}
endpoints:
  - {id: a, url: "$a", models: [pair]}
  - {id: b, url: "$b", models: [pair]}
  - {id: never, url: "$never", models: [never], breaker: {threshold: 0}}
  - {id: closes, url: "$closes", models: [closes]}
  - {id: dies, url: "$dies", models: [dies]}
"""
NAMES = ("a", "b", "never", "closes", "dies")
THRESHOLD = 3
LAST = b"0\r\n\r\n"
ERROR = b"the engine failed"
# What hosts say before they reset the connection.
HEADERS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"the "}}]}\n\n'
EVENT = b'data: {"error":{"message":"%b"}}\n\n' % ERROR
SAID = {
    "nothing": HEADERS,
    "token": HEADERS + chunked(TOKEN).removesuffix(LAST),
    "error": HEADERS + chunked(TOKEN + EVENT).removesuffix(LAST),
    "short": b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{",
}
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[Steering.PRIORITY_GROUP, Steering.CLUSTER_HEADER],
)
async def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    """Two engines of a model, and some that are alone with theirs."""
    engines = [LabEngine(name, ("pair", *NAMES)) for name in NAMES]
    folder = tmp_path_factory.mktemp("case")
    async with AsyncExitStack() as exits:
        text = CONFIG
        for name, said in SAID.items():
            url = await exits.enter_async_context(breaking_off(said))
            text += f'  - {{id: {name}, url: "{url}", models: [{name}], engine: none}}\n'
        standing_ = standing(folder, text, *engines, steering=request.param)
        yield await exits.enter_async_context(standing_)


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nothing going wrong and every outcome booked."""
    await started.forget(attempts=True)
    return started


def error_after(chunks: int) -> Fault:
    """An error in place of what would have come after so many tokens."""
    return Fault(kind=FaultKind.ERROR_EVENT, chunks=chunks, times=1)


def cut_after(chunks: int) -> Fault:
    """The end of the connection after so many tokens, in order."""
    return Fault(kind=FaultKind.CUT, chunks=chunks, how=CutBy.FIN, times=1)


def assert_broken(reply: Reply) -> None:
    """The client knows that this is no answer: cut, or refused if it had no headers yet."""
    if not reply.cut:
        assert (reply.status, reply.reason) == (502, "upstream_failed"), reply
    assert b"[DONE]" not in reply.body


async def listen(world: World, model: str, path: str = CHAT, *, version: int = 1) -> Reply:
    """The answer to a request for a stream."""
    body = chat(model, stream=True, input="hello", prompt="hello")
    if version == 1:
        return await world.post(path=path, body=body)
    async with world.http2() as connection:
        return await connection.ask("POST", path, [], body)


async def test_an_error_in_the_stream(world: World) -> None:
    """First of all or later: it reaches the client as it is, and counts as served, not as tried."""
    asked = list(product(PATHS, (0, 3), (1, 2)))
    for path, chunks, version in asked:
        world.engines["never"].inject(error_after(chunks))
        reply = await listen(world, "never", path, version=version)
        assert (reply.status, reply.cut, reply.reason) == (200, False, None)
        assert reply.body.count(ERROR) == 1
    await world.until_attempts({("never", "success"): len(asked)})
    assert world.requests() == {"never": len(asked)}


async def test_errors_in_streams_open_nothing(world: World) -> None:
    """More of them than failures that would; another endpoint is not tried either."""
    for name in "ab":
        world.engines[name].inject(*(error_after(0) for _ in range(2 * THRESHOLD)))
    replies = [await listen(world, "pair") for _ in range(2 * THRESHOLD)]
    assert all(reply.status == 200 and ERROR in reply.body for reply in replies)
    assert sum(world.requests().values()) == len(replies)
    await world.until_outcomes({"success": len(replies)})
    page = await world.page()
    for name in "ab":
        assert breaker(page, name) is BreakerState.CLOSED
        assert exclusions(page, name) == set()


async def test_a_stream_that_breaks_off(world: World) -> None:
    """One failure, seen by the client, and not tried again."""
    never = world.engines["never"]
    asked = list(product((1, 3), (1, 2)))
    never.inject(*(cut_after(chunks) for chunks, _ in asked))
    replies = await together(listen(world, "never", version=version) for _, version in asked)
    for reply in replies:
        assert_broken(reply)
    await world.until_idle()
    await world.until_attempts({("never", "failure"): len(asked)})
    # Whatever else tells of it, it counts once: a later request is booked, and nothing more is.
    assert (await world.post(model="never")).status == 200
    await world.until_attempts({("never", "failure"): len(asked), ("never", "success"): 1})
    assert world.requests() == {"never": len(asked) + 1}


async def test_a_connection_that_is_reset(world: World) -> None:
    """After headers, a token, an error, or half of an answer: three times, and it is left alone."""

    async def break_off(name: str) -> None:
        for number in range(THRESHOLD):
            assert_broken(await listen(world, name, version=1 + number % 2))
        await until_breaker(world, name, BreakerState.OPEN)
        reply = await listen(world, name)
        assert (reply.status, reply.reason) == (503, "no_endpoint")

    await each({name: break_off(name) for name in SAID})
    await world.until_attempts({(name, "failure"): THRESHOLD for name in SAID})


async def test_an_engine_that_always_breaks_off(world: World) -> None:
    """Each of its answers begins with 200: after three of them it gets no more requests."""
    engine = world.engines["closes"]
    engine.inject(*(cut_after(1) for _ in range(THRESHOLD)))
    for reply in await together(listen(world, "closes") for _ in range(THRESHOLD)):
        assert_broken(reply)
    await until_breaker(world, "closes", BreakerState.OPEN)
    reply = await listen(world, "closes")
    assert (reply.status, reply.reason) == (503, "no_endpoint")
    assert engine.counters.requests == THRESHOLD
    await world.until_attempts({("closes", "failure"): THRESHOLD})


async def test_an_engine_dies_with_its_streams(world: World) -> None:
    """Each is a failure, all at once; none goes on elsewhere, and nothing stays in flight."""
    dies = world.engines["dies"]
    dies.inject(Fault(kind=FaultKind.STALL, chunks=1))
    number = 2 * THRESHOLD
    body = chat("dies", stream=True)
    async with AsyncExitStack() as exits:
        connections = [await exits.enter_async_context(world.http1()) for _ in range(number)]
        for connection in connections:
            await connection.send(head("POST", CHAT, length=len(body)) + body)
        for connection in connections:
            assert (await connection.start()).status == 200
            await connection.until(b"data: ")
        dies.refuse(is_abrupt=True)
        await world.until_idle()
    await world.until_attempts({("dies", "failure"): number})
    assert breaker(await world.page(), "dies") is BreakerState.OPEN
    assert world.requests() == {"dies": number}


async def test_what_a_client_sees(world: World) -> None:
    """The SDK raises for either: neither is a short answer."""
    never = world.engines["never"]
    async with openai.AsyncOpenAI(base_url=f"{world.stack.url}/v1", api_key="k") as client:

        async def stream() -> AsyncIterator[object]:
            return await client.chat.completions.create(
                model="never", messages=[{"role": "user", "content": "hello"}], stream=True
            )

        never.inject(error_after(1))
        with pytest.raises(openai.APIError, match="the engine failed"):
            _ = [chunk async for chunk in await stream()]
        never.inject(Fault(kind=FaultKind.STALL, chunks=1, times=1))
        chunks = await stream()
        assert await anext(aiter(chunks))
        never.refuse(is_abrupt=True)
        with pytest.raises(openai.APIConnectionError):
            _ = [chunk async for chunk in chunks]
    assert world.requests() == {"never": 2}
