"""While the service is down or half started, nothing passes that it would not have let through."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Final

import aiohttp
import pytest
import pytest_asyncio
from case_bodies import FORM_TYPE, MIB, chat, form, sized_chat
from case_grpc import header, processor, request_headers
from case_http1 import CHAT, Framing, Pair, Reply
from case_world import World, case, standing, until

from extproc import headers
from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine

pytestmark = case(15)

# The provider and the peer would serve model m as well, if the service said so.
CONFIG: Final = """
cluster_id: here
service: {message_timeout_seconds: 0.5}
endpoints:
  - {id: a, url: "$a", models: [m], priority: 1}
  - {id: b, url: "$b", models: [m], priority: 1}
  - {id: r, url: "$r", models: [renamed], upstream_model: m}
  - {id: x, url: "$x", kind: external, models: [m, bought]}
  - {id: p, url: "$p", kind: peer, models: [there/m], peer: {name: there, cluster_id: far}}
models:
  m: {aliases: [alias], fallbacks: [bought]}
  half: {split: {m: 1, bought: 1}}
"""
OURS: Final = {"a", "b"}
PROMPTLY: Final = 1.5
ECHO: Final = ("x-lab-echo", "1")
RESTRICTED: Final[list[Pair]] = [
    ("x-llmgw-residency", "eu"),
    ("x-llmgw-residency", ""),
    ("x-llmgw-no-store", "true"),
    ("x-llmgw-no-store", ""),
    ("x-llmgw-hop", "edge"),
    ("x-llmgw-hop", "junk, 1"),
]
Trouble = Callable[[World], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[World]:
    """Engines of our own, a provider, a peer."""
    steady = EngineSettings(decode_tokens_per_second=40)
    engines = [LabEngine(name, ("m", "bought"), settings=steady) for name in "abrxp"]
    async with standing(folder, CONFIG, *engines) as world:
        yield world


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """The gateway that most tests share."""
    async with gateway(tmp_path_factory.mktemp("case")) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with its service up and nothing seen yet."""
    await started.forget()
    await until_decided(started)
    await started.forget()
    return started


# What can be wrong with the service.


@asynccontextmanager
async def killed(world: World) -> AsyncIterator[None]:
    """Its process is gone, and its socket is left."""
    await world.stack.service.kill()
    yield
    await world.stack.start_service()


@asynccontextmanager
async def frozen(world: World) -> AsyncIterator[None]:
    """Its process stands still, and its connections are open."""
    world.freeze()
    try:
        yield
    finally:
        world.thaw()


@asynccontextmanager
async def replaced(
    world: World, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None] | None
) -> AsyncIterator[None]:
    """Something else is where its socket was: another server, or an ordinary file."""
    await world.stack.service.kill()
    path = socket_of(world)
    path.unlink(missing_ok=True)
    taken: list[asyncio.StreamWriter] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.append(writer)
        if serve is not None:
            serve(reader, writer)

    if serve is None:
        path.write_text("no socket")
        yield
    else:
        async with await asyncio.start_unix_server(take, path):
            yield
            for writer in taken:
                writer.close()
    path.unlink(missing_ok=True)
    await world.stack.start_service()


def socket_of(world: World) -> Path:
    """Where the service listens for Envoy."""
    return Path(world.stack.config.service.address.removeprefix("unix:"))


TROUBLES: Final[dict[str, Trouble]] = {
    "killed": killed,
    "frozen": frozen,
    "mute": lambda world: replaced(world, lambda _, __: None),
    "closing": lambda world: replaced(world, lambda _, writer: writer.close()),
    "talking": lambda world: replaced(world, lambda _, writer: writer.write(b"HTTP/1.0 200\r\n")),
    "no socket": lambda world: replaced(world, None),
}


# What must hold meanwhile.


async def until_decided(world: World) -> None:
    """The service decides again: what nobody else lets through is served."""

    async def is_decided() -> bool:
        return (await world.post(RESTRICTED[0])).status == 200

    await until(is_decided, "the service decides")


async def promptly(world: World, *pairs: Pair, model: str = "m") -> Reply:
    """The answer to a small request, which comes soon."""
    began = monotonic()
    reply = await world.post(*pairs, model=model)
    assert monotonic() - began < PROMPTLY, reply
    return reply


def assert_closed(reply: Reply) -> None:
    """The refusal of a request that only the service could let through."""
    assert (reply.status, reply.reason) == (503, "no_endpoint"), reply
    assert reply.header("retry-after") == "1"
    assert reply.error.type == "service_unavailable_error"


async def assert_fails_safely(world: World) -> None:
    """Unrestricted requests are served by our own engines, everything else is refused."""
    for engine in world.engines.values():
        engine.records.reset()
    replies = await asyncio.gather(
        *(promptly(world) for _ in range(6)),
        *(promptly(world, ("x-llmgw-model", "m")) for _ in range(6)),
    )
    assert [reply.status for reply in replies] == [200] * 12
    # A body of any size has its model read.
    large = sized_chat("m", 2 * MIB)
    for framing in Framing:
        began = monotonic()
        reply = await world.post(ECHO, body=large, framing=framing)
        assert monotonic() - began < PROMPTLY
        assert reply.status == 200, reply
        assert_closed(await world.post(RESTRICTED[0], body=large, framing=framing))
    assert set(world.requests()) <= OURS
    for engine in world.engines.values():
        engine.records.reset()
    by_header = ("x-llmgw-model", "m")
    restricted = await asyncio.gather(
        *(promptly(world, pair) for pair in RESTRICTED),
        *(promptly(world, pair, by_header) for pair in RESTRICTED),
    )
    for reply in restricted:
        assert_closed(reply)
    # No engine of ours has it, or not under that name; and forms are read by the service.
    others = await asyncio.gather(
        *(promptly(world, model=model) for model in ("bought", "there/m", "renamed", "half")),
        *(promptly(world, ("x-llmgw-model", model)) for model in ("bought", "alias", "nobody")),
        world.post(("content-type", FORM_TYPE), path="/v1/audio/transcriptions", body=form("m")),
    )
    for reply in others:
        assert_closed(reply)
    for method, path in (("GET", "/v1/models"), ("GET", "/ready"), ("OPTIONS", CHAT)):
        reply = await world.ask(method, path, seconds=PROMPTLY)
        assert reply.status == 503
    assert (await world.ask("GET", "/metrics")).status == 404
    assert world.requests() == {}


@pytest.mark.parametrize("trouble", list(TROUBLES))
async def test_nothing_passes_that_should_not(world: World, trouble: str) -> None:
    """And the service is followed again as soon as it is back, by the same Envoy."""
    envoy = world.stack.envoy.pid
    async with TROUBLES[trouble](world):
        await assert_fails_safely(world)
    await until_decided(world)
    assert world.stack.envoy.pid == envoy
    await world.until_idle()


@pytest.mark.parametrize("trouble", ["killed", "frozen"])
async def test_running_streams_go_on(world: World, trouble: str) -> None:
    """Those of restricted requests as well, to their last token."""
    async with world.http2() as connection:
        body = chat("m", stream=True, max_tokens=60)
        asked: list[list[Pair]] = [[], [("x-llmgw-model", "m")], [RESTRICTED[0]], [RESTRICTED[4]]]
        streams = []
        for pairs in asked:
            stream = await connection.begin("POST", CHAT, pairs)
            await connection.data(stream, body)
            streams.append(stream)
        for stream in streams:
            assert (await connection.started(stream)).status == 200
        async with TROUBLES[trouble](world):
            whole = [await connection.answer(stream) for stream in streams]
    for reply in whole:
        assert not reply.cut
        assert reply.body.endswith(b"data: [DONE]\n\n")
    await until_decided(world)
    await world.until_idle()


async def test_killed_again_and_again_under_load(world: World) -> None:
    """No unrestricted request fails, and no restricted one leaves our engines."""
    stopped = False
    served = refused = 0

    async def ask(*pairs: Pair) -> None:
        nonlocal served, refused
        async with world.http1() as connection:
            while not stopped:
                reply = await connection.ask("POST", CHAT, pairs, chat("m", max_tokens=1))
                if reply.status == 200:
                    assert reply.served_by in OURS
                    served += 1
                else:
                    assert pairs, reply
                    assert_closed(reply)
                    refused += 1

    asking = [asyncio.create_task(ask()) for _ in range(6)]
    asking += [asyncio.create_task(ask(pair)) for pair in RESTRICTED[:3]]
    for _ in range(3):
        goal = served + 20

        async def is_reached(goal: int = goal) -> bool:
            return served >= goal

        async with killed(world):
            await until(is_reached, "20 more are served")
    stopped = True
    await asyncio.gather(*asking)
    assert refused
    assert set(world.requests()) <= OURS
    await world.until_idle()


# Before Envoy has ever reached the service.


@pytest.mark.parametrize("how", ["moved away", "forbidden"])
async def test_the_socket_comes_later(tmp_path: Path, how: str) -> None:
    """Envoy connects when it can, without a restart."""
    async with gateway(tmp_path) as world:
        path = socket_of(world)
        elsewhere = path.with_name("elsewhere")
        if how == "moved away":
            path.rename(elsewhere)
            await assert_fails_safely(world)
            elsewhere.rename(path)
        else:
            path.chmod(0)
            # Nothing is forbidden to root.
            if os.geteuid():
                await assert_fails_safely(world)
            path.chmod(0o600)
        await until_decided(world)
        await world.until_idle()


async def test_ready_means_that_decisions_are_made(world: World) -> None:
    """At the first moment at which it says so, a stream is answered with an endpoint."""
    for _ in range(3):
        await world.stack.service.kill()
        await world.stack.service.start()
        statuses = await until_ready(world)
        assert set(statuses) <= {0, 503, 200}
        async with processor(world.stack.config.service.address) as stream:
            named = [("x-llmgw-model", "m")]
            reply = await stream.say(request_headers("POST", CHAT, named))
            assert header(reply, headers.CLUSTER) in {b"ep-a", b"ep-b"}


async def until_ready(world: World) -> list[int]:
    """What the readiness page said, the last time 200; 0 is no answer at all."""
    seen: list[int] = []

    async def is_ready() -> bool:
        try:
            async with world.session.get(f"{world.stack.service_url}/ready") as response:
                seen.append(response.status)
        except aiohttp.ClientError:
            seen.append(0)
        return seen[-1] == 200

    await until(is_ready, "ready")
    return seen
