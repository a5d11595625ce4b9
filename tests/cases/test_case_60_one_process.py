"""The service is one process by design: a second one fails to start, and all counts are exact."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio
from case_bodies import chat
from case_fleet import counts, each, held, started_anew, until_asked, until_counted
from case_http1 import CHAT, Http1, head
from case_service import Service, command, first
from case_world import DISPATCHED, MODEL, STREAMS, World, case, endpoints, fresh, standing, until

from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine
from extproc.lab.processes import Child, free_port

pytestmark = case(60)

CONFIG: Final = endpoints("a", "b", "c")
CROWD: Final = 60
CONNECTIONS: Final = "llmgw-ext-proc.upstream_cx_active"
END_SECONDS: Final = 10.0
BODY: Final = chat(MODEL, stream=True, max_tokens=2)


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[1, 4], ids=["one worker", "four workers"]
)
async def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[World, int]]:
    """Three engines behind an Envoy with so many workers."""
    roomy = EngineSettings(max_running=1000)
    engines = [LabEngine(name, settings=roomy) for name in "abc"]
    folder = tmp_path_factory.mktemp("case")
    async with standing(folder, CONFIG, *engines, concurrency=request.param) as world:
        yield world, request.param


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: tuple[World, int]) -> World:
    """The same, with the service up and nothing seen yet."""
    await started[0].forget()
    return started[0]


async def crowd(world: World, exits: AsyncExitStack) -> list[Http1]:
    """Connections with a request each that an engine has."""
    before = sum(world.requests().values())
    opened = [await exits.enter_async_context(world.http1()) for _ in range(CROWD)]
    for connection in opened:
        await connection.send(head("POST", CHAT, length=len(BODY)) + BODY)
    await until_asked(world, before + CROWD)
    return opened


async def busy_workers(world: World) -> int:
    """How many of Envoy's workers have a client's connection."""
    url = f"{world.stack.admin_url}/stats?filter=worker_.*downstream_cx_active$"
    async with world.session.get(url) as response:
        lines = (await response.text()).splitlines()
    found = [line for line in lines if ".admin." not in line]
    return sum(int(line.rpartition(": ")[2]) > 0 for line in found)


async def test_one_process_has_all(world: World, started: tuple[World, int]) -> None:
    """Each worker has its own connection to it; every count is the engines' own."""
    before = await world.new(DISPATCHED)
    async with held(world.engines.values()), AsyncExitStack() as exits:
        opened = await crowd(world, exits)
        workers = await busy_workers(world)
        assert workers == 1 if started[1] == 1 else workers > 1
        # Without a choice of connection there is nothing to divide; none is idle for long.
        assert workers <= await world.envoy_stat(CONNECTIONS) <= started[1]
        await until_counted(world, world.requests())
        assert (await world.page()).total(STREAMS) == CROWD
        assert await world.new(DISPATCHED) - before == CROWD
        for engine in world.engines.values():
            engine.release()
        for connection in opened:
            await connection.until(b"data: [DONE]\n\n")
    await until_counted(world, {})
    await world.until_outcomes({"success": CROWD})


async def test_the_one_is_killed(world: World) -> None:
    """Its successor knows nothing of what runs, so the late ends of that are not subtracted."""
    async with held(world.engines.values()), AsyncExitStack() as exits:
        old = await crowd(world, exits)
        await until_counted(world, world.requests())
        await started_anew(world)
        assert counts(world.booked) == {}
        seen = world.requests()

        async def is_followed() -> bool:
            return (await world.ask("GET", "/v1/models")).status == 200

        await until(is_followed, "Envoy follows the service")
        new = await crowd(world, exits)
        now = {name: number - seen.get(name, 0) for name, number in world.requests().items()}
        assert sum(now.values()) == CROWD
        await until_counted(world, now)
        for connection in old:
            connection.reset()
        for engine in world.engines.values():
            await engine.until(lambda engine=engine: engine.counters.active == now[engine.name])  # type: ignore[misc]  # this round's
        await until_counted(world, now)
        for engine in world.engines.values():
            engine.release()
        for connection in new:
            await connection.until(b"data: [DONE]\n\n")
    await until_counted(world, {})
    await world.until_outcomes({"success": CROWD})


async def refused(world: World, address: str, http_address: str, named: str) -> None:
    """A service does not start there, and says in one line which address it cannot have."""
    child = Child("another service", command(world, address, http_address))
    await child.start()
    try:
        async with asyncio.timeout(END_SECONDS):
            assert await child.wait() == 1
    finally:
        await child.kill()
    (line,) = [one for one in child.lines if " error llmgw " in one]
    assert named in line
    assert re.search("in use|another process", line)
    assert "Traceback" not in "\n".join(child.lines)


async def test_a_second_process_takes_nothing(world: World) -> None:
    """Not the socket and not the port of the pages; the first one goes on and loses no request."""
    service = world.stack.config.service
    path = service.address.removeprefix("unix:")
    inode = Path(path).stat().st_ino
    elsewhere = f"unix:{world.stack.folder}/{fresh('elsewhere')}.sock"
    async with held(world.engines.values()), AsyncExitStack() as exits:
        opened = await crowd(world, exits)
        await each(
            {
                "socket": refused(world, service.address, f"127.0.0.1:{free_port()}", path),
                "pages": refused(world, elsewhere, service.http_address, service.http_address),
            }
        )
        assert Path(path).stat().st_ino == inode
        assert not Path(elsewhere.removeprefix("unix:")).exists()
        assert await first(world).is_ready()
        await until_counted(world, world.requests())
        for engine in world.engines.values():
            engine.release()
        for connection in opened:
            await connection.until(b"data: [DONE]\n\n")
    assert (await world.ask("GET", "/v1/models")).status == 200
    await world.until_outcomes({"success": CROWD})


async def test_a_port_is_not_shared(world: World) -> None:
    """Two services on one TCP port would have half of the connections each."""
    address, http_address = (f"127.0.0.1:{free_port()}" for _ in range(2))
    child = Child("a service", command(world, address, http_address))
    service = Service(child, address, f"http://{http_address}")
    try:
        await service.start()
        await refused(world, address, f"127.0.0.1:{free_port()}", address)
        assert await service.is_ready()
    finally:
        await child.kill()
