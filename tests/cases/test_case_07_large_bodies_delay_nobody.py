"""Small requests are decided in time beside 30 bodies of 10 MB and a busy metrics page."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from enum import Enum, auto
from typing import Final

import pytest
import pytest_asyncio
from case_bodies import FORM_TYPE, chat, form, sized_chat
from case_http1 import CHAT, Pair, Reply
from case_world import FAILED_OPEN, World, case, standing

from extproc.lab.engine_http import LabEngine

pytestmark = case(7)

# The message timeout is left at its default of one second.
CONFIG: Final = """
endpoints:
  - {id: a, url: "$a", models: [m]}
  - {id: b, url: "$b", models: [m]}
  - {id: c, url: "$c", models: [renamed], upstream_model: its-own-name}
  - {id: d, url: "$d", models: [tiny]}
"""
LARGE: Final = 10_000_000
COUNT: Final = 30
FORM: Final = "/v1/audio/transcriptions"
# Half of the message timeout, on a machine that tests share.
LONGEST_STALL_SECONDS: Final = 0.5
PATIENCE_SECONDS: Final = 60.0


class Load(Enum):
    """What the large bodies are, and so who has to read them."""

    JSON = auto()  # Envoy
    FORM = auto()  # the service
    CHANGED = auto()  # the service, and they go back to Envoy


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Engines that say what they got."""
    engines = [LabEngine(name, echo=True, keep_requests=5) for name in "abcd"]
    async with standing(tmp_path_factory.mktemp("case"), CONFIG, *engines) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nothing seen yet."""
    await started.forget()
    return started


def large(load: Load) -> tuple[str, list[Pair], bytes]:
    """Path, headers and body of a large request."""
    if load is Load.FORM:
        return FORM, [("content-type", FORM_TYPE)], form("m", LARGE)
    return CHAT, [], sized_chat("m" if load is Load.JSON else "renamed", LARGE)


@contextlib.asynccontextmanager
async def meanwhile(*work: asyncio.Task[None]) -> AsyncIterator[None]:
    """The tasks run, and are ended at the end; one that failed before fails the test."""
    try:
        yield
        for task in work:
            assert not task.done(), task
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


@pytest.mark.parametrize("load", list(Load))
async def test_small_requests_beside_large_ones(world: World, load: Load) -> None:
    """None times out or is decided by Envoy alone, and no turn of the event loop is long."""
    small: list[Reply] = []
    stalls: list[float] = []

    async def ask_small() -> None:
        async with world.http1() as connection:
            while True:
                small.append(await connection.ask("POST", CHAT, [], chat("tiny")))
                await asyncio.sleep(0.005)

    async def read_page() -> None:
        while True:
            page = await world.page()
            stalls.append(page.value("llmgw_event_loop_stall_seconds"))

    path, pairs, body = large(load)
    timeouts = await world.envoy_stat("ext_proc.message_timeouts")
    async with meanwhile(
        *(asyncio.create_task(ask_small()) for _ in range(3)), asyncio.create_task(read_page())
    ):
        replies = await asyncio.gather(
            *(
                world.post(*pairs, path=path, body=body, seconds=PATIENCE_SECONDS)
                for _ in range(COUNT)
            )
        )
    bad = [reply for reply in replies if reply.status != 200]
    assert not bad, bad[0]
    assert len(small) > 20
    assert {reply.status for reply in small} == {200}
    assert await world.envoy_stat("ext_proc.message_timeouts") == timeouts
    assert await world.new(FAILED_OPEN) == 0
    assert len(stalls) > 5
    assert max(stalls) < LONGEST_STALL_SECONDS
    await world.until_idle()
