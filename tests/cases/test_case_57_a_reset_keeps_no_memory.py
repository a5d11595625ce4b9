"""Streams that end by a reset, as Envoy's all do, leave no memory behind in the service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import pytest
import pytest_asyncio
from case_http1 import Pair
from case_volume import answering, ask, request
from case_world import MODEL, STREAMS, World, case, standing, until

pytestmark = case(57)

IN_HEADER: Final[Pair] = ("x-llmgw-model", MODEL)
REQUESTS: Final = [request(IN_HEADER), request(IN_HEADER, ("x-session-id", "one"))]
MUTE: Final = request(IN_HEADER, ("x-mute", "1"))
# Verdicts wait a second for Envoy's log, and what waits at full speed is most of what the service
# ever holds: so the warm-up is at full speed for longer than any part of the rest.
WARM_UP: Final = (8000, 2000)
MEASURED: Final = (8000, 1600)
# A stream has some ten operations in the library, each of which is 80 bytes when it is lost; one
# lost object of Python's is several times that.
BYTES_PER_STREAM: Final = 160


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """The configured default transport, before an engine that is never scraped."""
    async with answering() as url:
        text = f"""
breaker: {{threshold: 100000}}
endpoints:
  - {{id: a, url: '{url}', models: [{MODEL}], engine: none}}
"""
        folder = tmp_path_factory.mktemp("case")
        async with standing(folder, text, concurrency=1) as running:
            yield running


async def give_up(world: World, number: int, crowd: int = 50) -> None:
    """So many requests are sent, decided on, and given up before their answer; half by a reset."""
    for start in range(0, number, crowd):
        async with asyncio.TaskGroup() as group:
            size = min(crowd, number - start)
            writers = [group.create_task(_ask_in_vain(world)) for _ in range(size)]
        await world.until_inflight(size)
        for index, task in enumerate(writers):
            writer = task.result()
            if index % 2:
                writer.transport.abort()
            else:
                writer.close()
        await world.until_idle(5.0)


async def _ask_in_vain(world: World) -> asyncio.StreamWriter:
    listener = world.stack.config.listener
    _, writer = await asyncio.open_connection(listener.host, listener.port)
    writer.write(MUTE)
    return writer


async def until_over(world: World) -> None:
    """No stream is open any more."""

    async def is_so() -> bool:
        return (await world.page()).total(STREAMS) == 0

    await until(is_so, "no open stream")


async def test_memory_after_many_streams(world: World) -> None:
    """After a warm-up, thousands of good requests and of aborts cost next to nothing each."""
    assert await ask(world, WARM_UP[0], REQUESTS) == WARM_UP[0]
    await give_up(world, WARM_UP[1])
    await until_over(world)
    before = world.service_rss_bytes()
    for _ in range(2):
        good, aborted = (number // 2 for number in MEASURED)
        assert await ask(world, good, REQUESTS) == good
        await give_up(world, aborted)
    await until_over(world)
    grown = world.service_rss_bytes() - before
    assert grown / sum(MEASURED) < BYTES_PER_STREAM, f"{grown} bytes more"


async def test_every_stream_ended(world: World) -> None:
    """And each of them was an answer or an abort, none a failure."""
    await world.until_idle()
    await world.until_outcomes(
        {"success": WARM_UP[0] + MEASURED[0], "aborted": WARM_UP[1] + MEASURED[1]}
    )
