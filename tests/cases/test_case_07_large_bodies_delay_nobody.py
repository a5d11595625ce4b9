"""Small requests are decided in time beside 30 bodies of 10 MB and a busy metrics page."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from functools import partial
from typing import Final

import pytest
import pytest_asyncio
from case_bodies import FORM_TYPE, chat, form, sized_chat
from case_http1 import CHAT, Pair, Reply, head
from case_world import DISPATCHED, World, case, standing

from extproc.lab.engine_http import LabEngine
from extproc.lab.processes import Child, free_port

pytestmark = case(7)

# The message timeout is left at its default of one second.
CONFIG: Final = """
endpoints:
  - {id: large, url: "LARGE", models: [m]}
  - {id: changed, url: "LARGE", models: [renamed], upstream_model: its-own-name}
  - {id: small, url: "$small", models: [small]}
"""
LARGE: Final = 10_000_000
ROUNDS: Final = 2
FORM: Final = "/v1/audio/transcriptions"
# Half of the message timeout, on a machine that tests share.
LONGEST_STALL_SECONDS: Final = 0.5
PATIENCE_SECONDS: Final = 60.0


class Load(Enum):
    """What the large bodies are, and so which way they take."""

    JSON = auto()
    FORM = auto()
    CHANGED = auto()  # to the service and back to Envoy, changed


# How many at a time. The service takes one after the other; those that are changed cross the socket
# twice.
COUNTS: Final = {Load.JSON: 30, Load.FORM: 10, Load.CHANGED: 4}
# Whatever has no decision in time is refused, also if it is small.
RESTRICTED: Final = ("x-llmgw-no-store", "1")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """One engine for what is small, and a process of its own for what is large."""
    port = free_port()
    flags = ["--name=large", f"--port={port}", "--models=m", "--echo", "--die-with-parent"]
    # It gives way to what is tested, which on a machine of its own it would not compete with.
    command = ["nice", "-n", "10", sys.executable, "-m", "extproc.lab.engine_main", *flags]
    process = Child("the engine", command)
    await process.start()
    try:
        await process.until(lambda: bool(process.lines), 30)
        text = CONFIG.replace("LARGE", f"http://127.0.0.1:{port}")
        folder = tmp_path_factory.mktemp("case")
        async with standing(folder, text, LabEngine("small", ("small",), echo=True)) as world:
            yield world
    finally:
        await process.stop()


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


def send(port: int, start: bytes, body: bytes) -> int:
    """The status of the answer to one request; for a thread, so that no event loop is busy."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as connection:
        connection.sendall(start)
        connection.sendall(body)
        answer = connection.makefile("rb").readline()
    return int(answer.split()[1])


@pytest.mark.parametrize("load", list(Load))
async def test_small_requests_beside_large_ones(world: World, load: Load) -> None:
    """The service decides on each in time, and no turn of its event loop is long."""
    small: list[Reply] = []
    stalls: list[float] = []
    is_over = asyncio.Event()

    async def ask_small() -> None:
        async with world.http1() as connection:
            while not is_over.is_set():
                small.append(await connection.ask("POST", CHAT, [RESTRICTED], chat("small")))
                await asyncio.sleep(0.005)

    async def read_page() -> None:
        while not is_over.is_set():
            page = await world.page()
            stalls.append(page.value("llmgw_event_loop_stall_seconds"))

    path, pairs, body = large(load)
    start = head("POST", path, pairs, length=len(body))
    count = COUNTS[load]
    loop = asyncio.get_running_loop()
    post = partial(send, world.stack.config.listener.port, start, body)
    async with asyncio.TaskGroup() as meanwhile:
        for _ in range(3):
            meanwhile.create_task(ask_small())
        meanwhile.create_task(read_page())
        with ThreadPoolExecutor(count) as threads:
            for _ in range(ROUNDS):
                work = [loop.run_in_executor(threads, post) for _ in range(count)]
                found = await asyncio.gather(*work)
                # One that the others keep waiting for too long is refused, and nothing worse.
                assert 200 in found
                assert set(found) <= {200, 503}
        is_over.set()
    assert len(small) > 10
    assert {reply.status for reply in small} == {200}
    assert await world.new(DISPATCHED, model="small") == len(small)
    assert len(stalls) > 5
    assert max(stalls) < LONGEST_STALL_SECONDS
    await world.until_idle()
