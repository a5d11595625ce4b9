"""A service that is told to end says so first, serves on, and lets every stream finish."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Final

import pytest
from case_bodies import chat
from case_fleet import each
from case_http1 import CHAT, Http1, Pair, Reply, head
from case_service import Service, command, first, health, second
from case_world import MODEL, World, case, endpoints, fresh, standing, until

from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine
from extproc.lab.processes import Child, free_port
from extproc.serve.health import LIVENESS, READINESS
from extproc.serve.lifecycle import Timing

pytestmark = case(51)

DRAIN_SECONDS: Final = 2.0
CONFIG: Final = f"service: {{drain_seconds: {DRAIN_SECONDS:g}}}\n" + endpoints("a", "b")
NOTICE_SECONDS: Final = Timing().notice_seconds
# Beside what is promised: the library's own time, and a loaded machine.
MARGIN_SECONDS: Final = 3.0
TOKENS_PER_SECOND: Final = 20
GOAWAYS: Final = "llmgw-ext-proc.upstream_cx_close_notify"
# Without the service this is refused, so that every good answer is a decision.
RESTRICTED: Final[Pair] = ("x-llmgw-residency", "eu")


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[World]:
    """Two engines that make twenty tokens a second."""
    steady = EngineSettings(decode_tokens_per_second=TOKENS_PER_SECOND)
    engines = [LabEngine(name, settings=steady) for name in "ab"]
    async with standing(folder, CONFIG, *engines) as world:
        yield world


def short() -> bytes:
    """A request whose answer is over at once."""
    return chat(MODEL, max_tokens=1)


@asynccontextmanager
async def streams(world: World, seconds: float, number: int = 4) -> AsyncIterator[list[Http1]]:
    """Connections with a stream on each that has begun and lasts so long; half are restricted."""
    body = chat(MODEL, stream=True, max_tokens=round(seconds * TOKENS_PER_SECOND))
    async with AsyncExitStack() as exits:
        opened = [await exits.enter_async_context(world.http1()) for _ in range(number)]
        for index, connection in enumerate(opened):
            pairs = [RESTRICTED] if index % 2 else []
            await connection.send(head("POST", CHAT, pairs, length=len(body)) + body)
        for connection in opened:
            assert (await connection.start()).status == 200
        yield opened


async def finish(opened: list[Http1], seconds: float) -> None:
    """Every stream comes to its last token."""
    await asyncio.gather(*(one.until(b"data: [DONE]\n\n", seconds) for one in opened))


async def ended(service: Service, within_seconds: float) -> float:
    """How long the process takes to end, which it does with a good status and in time."""
    began = monotonic()
    async with asyncio.timeout(within_seconds):
        status = await service.child.wait()
    assert status == 0, list(service.child.lines)
    assert not any("Traceback" in line for line in service.child.lines)
    return monotonic() - began


class Load:
    """Clients that ask again and again, each on one connection, until they are told to stop."""

    def __init__(self, world: World, *pairs: Pair) -> None:
        self.replies: list[Reply] = []
        self._world = world
        self._pairs = pairs
        self._is_over = False

    async def ask(self) -> None:
        """Requests one after the other."""
        async with self._world.http1() as connection:
            while not self._is_over:
                self.replies.append(await connection.ask("POST", CHAT, self._pairs, short()))

    async def more(self, number: int) -> None:
        """So many more answers have come."""
        goal = len(self.replies) + number

        async def is_reached() -> bool:
            return len(self.replies) >= goal

        await until(is_reached, f"{number} more answers")

    def stop(self) -> None:
        """The clients make no further request."""
        self._is_over = True

    @property
    def failed(self) -> list[Reply]:
        """The answers that are not good."""
        return [one for one in self.replies if one.status != 200 or one.cut]


@asynccontextmanager
async def load(world: World, *pairs: Pair, clients: int = 4) -> AsyncIterator[Load]:
    """A steady load; it has come to its end when the context has."""
    asked = Load(world, *pairs)
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(asked.ask())
        try:
            yield asked
        finally:
            asked.stop()


async def test_it_is_unready_first_and_serves_on(tmp_path: Path) -> None:
    """Readiness is gone at once, liveness stays, and for the notice every request is decided."""
    async with gateway(tmp_path) as world:
        await tell_unready_first(world)


async def tell_unready_first(world: World) -> None:
    """The story of the notice, to the end of the process."""
    service = first(world)
    assert await health(service, READINESS) is True
    async with streams(world, NOTICE_SECONDS + 1.5), load(world, RESTRICTED) as restricted:
        await restricted.more(20)
        told = await world.envoy_stat(GOAWAYS)
        service.child.send(signal.SIGTERM)
        began = monotonic()

        async def is_unready() -> bool:
            return await service.status("/ready") == 503

        await until(is_unready, "readiness is gone", NOTICE_SECONDS / 2)
        assert await health(service, READINESS) is False
        assert await health(service, LIVENESS) is True
        while monotonic() - began < NOTICE_SECONDS * 0.75:
            await restricted.more(5)
            assert await service.status("/ready") == 503
            assert await service.status("/healthz") == 200
        restricted.stop()
        assert restricted.failed == []
        assert await world.envoy_stat(GOAWAYS) == told

        async def is_told() -> bool:
            return await world.envoy_stat(GOAWAYS) > told

        # By a GOAWAY, while the streams that run are still carried and the process still lives.
        await until(is_told, "Envoy is told to go away", NOTICE_SECONDS)
        assert monotonic() - began > NOTICE_SECONDS * 0.75
        assert await service.status("/healthz") == 200
        assert await world.inflight() == 4
        await ended(service, DRAIN_SECONDS + MARGIN_SECONDS)


async def wait_for_streams(world: World) -> None:
    """It ends as soon as the last one has, all of them whole, and new requests are served."""
    service = first(world)
    async with streams(world, NOTICE_SECONDS + 1) as opened, load(world, clients=2) as unrestricted:
        service.child.send(signal.SIGTERM)
        began = monotonic()
        await finish(opened, NOTICE_SECONDS + 1 + MARGIN_SECONDS)
        assert monotonic() - began > NOTICE_SECONDS
        await ended(service, 1 + MARGIN_SECONDS)
        await unrestricted.more(20)
        await service.start()
        await unrestricted.more(20)
    assert unrestricted.failed == []


async def end_in_time(world: World) -> None:
    """The notice and the grace are all it takes; Envoy carries the streams on to their ends."""
    service = first(world)
    bound = NOTICE_SECONDS + DRAIN_SECONDS
    async with streams(world, bound + 2) as opened:
        service.child.send(signal.SIGTERM)
        assert await ended(service, bound + MARGIN_SECONDS) > bound - 0.5
        await finish(opened, 2 + MARGIN_SECONDS)


async def end_at_once(world: World, seconds: float) -> None:
    """After a second signal neither the notice nor the grace is waited for; streams go on."""
    service = first(world)
    async with streams(world, seconds + 2) as opened:
        service.child.send(signal.SIGTERM)
        # Nothing to wait for: the moment is what differs.
        await asyncio.sleep(seconds)
        assert service.child.is_running
        service.child.send(signal.SIGTERM)
        await ended(service, 1 + MARGIN_SECONDS)
        await finish(opened, seconds + 2 + MARGIN_SECONDS)


async def test_ends_under_load(tmp_path: Path) -> None:
    """It waits for streams, no longer than it says, and not at all when it is told twice."""

    async def with_gateway(name: str, story: Callable[[World], Awaitable[None]]) -> None:
        folder = tmp_path / name
        folder.mkdir()
        async with gateway(folder) as world:
            await story(world)

    stories: dict[str, Callable[[World], Awaitable[None]]] = {
        "waits": wait_for_streams,
        "bound": end_in_time,
        "twice in the notice": lambda world: end_at_once(world, 0.3),
        "twice in the grace": lambda world: end_at_once(world, NOTICE_SECONDS + 0.5),
    }
    await each({name: with_gateway(name, story) for name, story in stories.items()})


def hears(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^SigCgt:\s+([0-9a-f]+)$", text, re.MULTILINE)
    assert found is not None
    return bool(int(found[1], 16) >> (signal.SIGTERM - 1) & 1)


async def test_a_signal_during_the_start(tmp_path: Path) -> None:
    """It ends at once and well, whatever it was doing, and leaves no socket behind.

    A handler is there before the slow part of the start: the first process of a container would
    not hear the signal otherwise.
    """
    async with gateway(tmp_path) as world:
        moments = (0.0, 0.1, 0.25, 0.5)
        await each({f"{late} s": start_and_end(world, late) for late in moments})


async def start_and_end(world: World, late_seconds: float) -> None:
    """A service is told to end so long after it began to listen to signals."""
    path = world.stack.folder / f"{fresh('starting')}.sock"
    http_address = f"127.0.0.1:{free_port()}"
    child = Child("the service", command(world, f"unix:{path}", http_address))
    await child.start()
    service = Service(child, f"unix:{path}", f"http://{http_address}")

    async def is_heard() -> bool:
        return hears(child.pid)

    try:
        await until(is_heard, "the process hears signals")
        assert await service.status("/ready") is None
        await asyncio.sleep(late_seconds)
        child.send(signal.SIGTERM)
        await ended(service, NOTICE_SECONDS + MARGIN_SECONDS)
    finally:
        await child.kill()
    assert not path.exists()


async def test_one_of_two(tmp_path: Path) -> None:
    """Envoy asks the other one: no request fails, restricted ones included, while each restarts."""
    async with gateway(tmp_path) as world, second(world) as other:
        async with (
            streams(world, 6) as opened,
            load(world) as unrestricted,
            load(world, RESTRICTED) as restricted,
        ):
            for service in (other, first(world)):
                await restricted.more(20)
                service.child.send(signal.SIGTERM)
                await ended(service, NOTICE_SECONDS + DRAIN_SECONDS + MARGIN_SECONDS)
                await restricted.more(30)
                assert await service.status("/healthz") is None
                await service.start()
                await restricted.more(20)
            await finish(opened, 10)
        assert restricted.failed == []
        assert unrestricted.failed == []


@pytest.mark.slow
async def test_a_stream_of_a_minute(tmp_path: Path) -> None:
    """It outlives both of two services, one after the other."""
    async with gateway(tmp_path) as world, second(world) as other, streams(world, 60) as opened:
        for service in (other, first(world)):
            service.child.send(signal.SIGTERM)
            await ended(service, NOTICE_SECONDS + DRAIN_SECONDS + MARGIN_SECONDS)
        await finish(opened, 70)
