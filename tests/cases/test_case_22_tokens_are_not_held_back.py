"""A token is with the client as soon as it is made, also while the service stands still."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import AsyncIterator
from typing import Final

import pytest
import pytest_asyncio
from case_bodies import chat
from case_http1 import CHAT, Http1, Pair, head
from case_world import World, case, standing

from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine

pytestmark = case(22)

CONFIG: Final = """
endpoints:
  - {id: a, url: "$a", models: [m]}
  - {id: n, url: "$n", models: [renamed], upstream_model: m}
"""
GAP_SECONDS: Final = 0.25
TOKENS: Final = 40
# What a shared machine may add to a chunk's way through one more process, half of the time.
ADDED_SECONDS: Final = 0.01
# Far below what a held-back chunk would show, which comes with the next one.
LATEST_SECONDS: Final = 0.2
PATIENCE: Final = TOKENS * GAP_SECONDS + 10


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Two engines that make a token of 200 bytes every 250 ms, and write the time on it."""
    pace = EngineSettings(decode_tokens_per_second=1 / GAP_SECONDS, decode_slowdown_ratio=0)
    engines = [
        LabEngine(name, settings=pace, token_bytes=200, stamps=True, output_tokens=TOKENS)
        for name in "an"
    ]
    async with standing(tmp_path_factory.mktemp("case"), CONFIG, *engines) as running:
        yield running


async def delays(connection: Http1, model: str, *pairs: Pair) -> list[float]:
    """How long each token of one stream took from the engine to here, in seconds."""
    body = chat(model, stream=True, max_tokens=TOKENS)
    await connection.send(head("POST", CHAT, pairs, length=len(body)) + body)
    reply = await connection.start()
    assert reply.status == 200
    loop = asyncio.get_running_loop()
    found: list[float] = []
    async with asyncio.timeout(PATIENCE):
        while True:
            event = await connection.until(b"\n\n", PATIENCE)
            arrived = loop.time()
            text = event[event.index(b"data: ") + 6 :].strip()
            if text == b"[DONE]":
                return found
            (choice,) = json.loads(text)["choices"] or [{"delta": {}}]
            if choice["delta"].get("content"):
                found.append(arrived - choice["delta"]["sent_at"])


async def through(world: World, model: str, *pairs: Pair) -> list[float]:
    """The delays by way of Envoy."""
    async with world.http1() as connection:
        return await delays(connection, model, *pairs)


async def direct(engine: LabEngine) -> list[float]:
    """The delays without it."""
    connection = Http1(*await asyncio.open_connection(engine.host, engine.port))
    try:
        return await delays(connection, "m")
    finally:
        await connection.close()


def assert_prompt(found: list[float], plain: list[float]) -> None:
    """Every token came, and none was held back."""
    assert len(found) == len(plain) == TOKENS
    assert statistics.median(found) - statistics.median(plain) < ADDED_SECONDS
    assert max(found) < LATEST_SECONDS


async def test_each_token_comes_when_it_is_made(world: World) -> None:
    """Whether Envoy or the service read the model, and whether a body was changed."""
    plain, *others = await asyncio.gather(
        direct(world.engines["a"]),
        through(world, "m"),
        through(world, "m", ("x-llmgw-model", "m")),
        through(world, "renamed"),
        through(world, "m", ("x-llmgw-hop", "edge")),
    )
    for found in others:
        assert_prompt(found, plain)
    await world.until_idle()


async def test_a_frozen_service_stops_no_stream(world: World) -> None:
    """It stands still from the middle of the streams until after their end."""
    asking = [
        asyncio.create_task(direct(world.engines["a"])),
        asyncio.create_task(through(world, "m")),
        asyncio.create_task(through(world, "m", ("x-llmgw-model", "m"))),
        asyncio.create_task(through(world, "renamed")),
        asyncio.create_task(through(world, "m", ("x-llmgw-residency", "eu"))),
    ]
    await world.until_inflight(len(asking) - 1)
    await world.engines["a"].until(
        lambda: all(
            received.tokens_sent >= 3
            for engine in world.engines.values()
            for received in engine.requests
        )
    )
    world.freeze()
    try:
        plain, *others = await asyncio.gather(*asking)
    finally:
        world.thaw()
    for found in others:
        assert_prompt(found, plain)
    await world.until_idle(5)


async def test_a_large_answer_is_not_collected(world: World) -> None:
    """Its first bytes are here before its last ones are made."""
    body = chat("m", stream=True, max_tokens=TOKENS)
    async with world.http2() as connection:
        stream = await connection.begin("POST", CHAT)
        await connection.data(stream, body)
        assert (await connection.started(stream)).status == 200
        await connection.heard(stream, 200)
        engine = world.engines["a"]
        assert engine.requests[-1].tokens_sent < TOKENS / 2
        await connection.reset(stream)
    await world.until_idle()
