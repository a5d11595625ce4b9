"""The service killed or frozen: what Envoy still serves, what it refuses, and the way back."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
import pytest_asyncio
from e2e_world import (
    CHAT,
    DISPATCHED,
    HELLO,
    MODEL,
    World,
    chat,
    chat_body,
    fresh,
    standing,
    until,
)
from openai.types.chat import ChatCompletionChunk

from extproc.lab.engine_http import LabEngine
from extproc.lab.records import Outcome

pytestmark = [
    pytest.mark.envoy,
    pytest.mark.xdist_group("e2e-service-down"),
    pytest.mark.asyncio(loop_scope="module"),
]

# What a request may carry that Envoy alone must not judge.
RESTRICTIONS = [
    pytest.param(("x-llmgw-residency", "eu"), id="residency"),
    pytest.param(("x-llmgw-residency", ""), id="empty-residency"),
    pytest.param(("x-llmgw-no-store", "true"), id="no-store"),
    pytest.param(("x-llmgw-no-store", "junk"), id="junk-no-store"),
    pytest.param(("x-llmgw-hop", "elsewhere"), id="hop"),
]
UNLISTED = [
    ("GET", "/metrics"),
    ("POST", "/v1/load_lora_adapter"),
    ("GET", "//metrics"),
    ("GET", "/v1/../metrics"),
    ("GET", "/v1/%2e%2e/metrics"),
    ("POST", "/v1//load_lora_adapter"),
    ("POST", "/v1/chat/completions/../../load_lora_adapter"),
    ("POST", "/flush_cache"),
    ("GET", "/health"),
    ("GET", "/lab/requests"),
]
MESSAGE_TIMEOUT_SECONDS = 1.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Two engines of our own, a provider of the same model, and a provider of another."""
    provider = {"kind": "external", "residency": "eu", "no_store_allowed": True}
    async with standing(
        tmp_path_factory.mktemp("down"),
        [
            LabEngine("a"),
            LabEngine("b"),
            LabEngine("far", (MODEL, "provided")),
        ],
        endpoints={"far": {**provider, "priority": -1}},
    ) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> AsyncIterator[World]:
    """The same, with nothing seen yet; whatever a test does to the service is undone."""
    await started.forget()
    yield started
    started.stack.service.send(signal.SIGCONT)


@pytest_asyncio.fixture(loop_scope="module")
async def down(started: World) -> World:
    """The same, with the service killed; it stays so for the next test that asks for this."""
    if started.stack.service.is_running:
        await started.forget()
        await started.stack.service.kill()
    started.overlook()
    return started


@asynccontextmanager
async def running_stream(world: World) -> AsyncIterator[openai.AsyncStream[ChatCompletionChunk]]:
    """A stream of which a few tokens have come and many are still to come."""
    async with world.openai() as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=300, stream=True
        )
        for _ in range(3):
            await anext(stream)
        yield stream
        await stream.close()


async def rest_of(stream: openai.AsyncStream[ChatCompletionChunk]) -> int:
    """How many more chunks came, to the stream's good end."""
    return len([chunk async for chunk in stream])


def served(world: World) -> list[str]:
    """The engines that have served something."""
    return [name for name, engine in world.engines.items() if engine.counters.served]


async def test_killed_unrestricted_requests_are_served(down: World) -> None:
    """By our own engines, both of them, whether the model is in the body or in a header."""
    async with down.openai() as client:
        for number in range(20):
            named = {"x-llmgw-model": MODEL} if number % 2 else {}
            answer = await client.chat.completions.create(
                model=MODEL, messages=HELLO, max_tokens=4, extra_headers=named
            )
            assert answer.usage is not None
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=8, stream=True
        )
        assert await rest_of(stream) >= 8
        vectors = await client.embeddings.create(model=MODEL, input="a", dimensions=3)
        assert vectors.data
    assert served(down) == ["a", "b"]
    assert sum(down.requests().values()) == 22


@pytest.mark.parametrize("restriction", RESTRICTIONS)
@pytest.mark.parametrize("named", ["body", "header"])
async def test_killed_restricted_requests_are_refused(
    down: World, restriction: tuple[str, str], named: str
) -> None:
    """At once, with 503 in the envelope that clients read."""
    extra = [("x-llmgw-model", MODEL)] if named == "header" else []
    loop = asyncio.get_running_loop()
    began = loop.time()
    reply = await down.post(restriction, *extra)
    assert loop.time() - began < MESSAGE_TIMEOUT_SECONDS / 2
    assert (reply.status, reply.error.code) == (503, "no_endpoint")
    assert reply.headers["x-llmgw-reason"] == "no_endpoint"
    assert "retry-after" in reply.headers
    assert down.requests() == {}


async def test_killed_the_sdk_understands(down: World) -> None:
    """A restricted request and a model that only a provider has: InternalServerError, 503."""
    async with down.openai() as client:
        with pytest.raises(openai.InternalServerError) as restricted:
            await client.chat.completions.create(
                model=MODEL, messages=HELLO, extra_headers={"x-llmgw-no-store": "1"}
            )
        with pytest.raises(openai.InternalServerError) as provided:
            await chat(client, model="provided")
        with pytest.raises(openai.InternalServerError) as listed:
            _ = [model async for model in client.models.list()]
    for caught in (restricted, provided, listed):
        assert (caught.value.status_code, caught.value.code) == (503, "no_endpoint")
    assert down.requests() == {}


@pytest.mark.parametrize(("method", "path"), UNLISTED)
async def test_killed_unlisted_paths_are_not_found(down: World, method: str, path: str) -> None:
    """However they are written; no engine sees them."""
    await refuses(down, method, path)


@pytest.mark.parametrize(("method", "path"), UNLISTED)
async def test_unlisted_paths_are_not_found(world: World, method: str, path: str) -> None:
    """Nor while the service runs."""
    await refuses(world, method, path)


async def refuses(world: World, method: str, path: str) -> None:
    """The path is not found, and no engine has seen it; scrapes are the service's own."""
    body = b'{"lora_name": "x", "lora_path": "/x"}' if method == "POST" else None
    reply = await world.ask(method, path, [("x-llmgw-model", MODEL)], body)
    assert (reply.status, reply.error.code) == (404, "path_not_found")
    assert world.requests() == {}
    via = [probe for engine in world.engines.values() for probe in engine.probes]
    assert not [probe for probe in via if probe.header("x-llmgw-model")]


async def test_killed_running_streams_go_on(world: World) -> None:
    """To their good end; so do restricted ones."""
    async with running_stream(world) as stream, world.connected() as connection:
        body = chat_body(stream=True, max_tokens=300)
        await connection.send_head("POST", CHAT, [("x-llmgw-residency", "eu")], len(body))
        await connection.send(body)
        status, _ = await connection.head()
        assert status == 200
        await world.stack.service.kill()
        assert any(
            request.outcome is Outcome.ACTIVE
            for engine in world.engines.values()
            for request in engine.requests
        )
        assert await rest_of(stream) >= 297
        await world.engines["a"].until(
            lambda: sum(engine.counters.served for engine in world.engines.values()) == 2
        )


async def test_back_again_the_service_decides(world: World) -> None:
    """Without Envoy's being started again; sessions stick and restricted requests are served."""
    envoy = world.stack.envoy.pid
    await world.stack.service.kill()
    assert (await world.post()).status == 200
    await world.stack.start_service()

    async def is_asked() -> bool:
        assert (await world.post()).status == 200
        return (await world.page()).total(DISPATCHED) > 0

    await until(is_asked, "the service decides again")
    session = fresh("session")
    async with world.openai() as client:
        where = {(await chat(client, session)).system_fingerprint for _ in range(5)}
        assert len(where) == 1
        assert [model.id async for model in client.models.list()] == [MODEL, "provided"]
    assert (await world.post(("x-llmgw-no-store", "true"))).status == 200
    assert (await world.post(model="provided")).headers["x-served-by"] == "far"
    assert world.stack.envoy.pid == envoy
    await world.until_idle()


async def test_killed_and_back_under_load(world: World) -> None:
    """Not one of the requests that come all the while fails."""
    stopping = asyncio.Event()
    statuses: list[int] = []

    async def keep_asking() -> None:
        while not stopping.is_set():
            statuses.append((await world.post()).status)

    asking = [asyncio.create_task(keep_asking()) for _ in range(4)]
    await world.stack.service.kill()
    await world.stack.start_service()

    async def is_asked() -> bool:
        return (await world.page()).total(DISPATCHED) > 0

    await until(is_asked, "the service decides again")
    stopping.set()
    await asyncio.gather(*asking)
    assert set(statuses) == {200}
    await world.until_idle()


async def test_frozen_requests_fail_open_after_the_message_timeout(world: World) -> None:
    """About a second late; a restricted one is refused then. Thawed, nothing is left over."""
    world.stack.service.send(signal.SIGSTOP)
    loop = asyncio.get_running_loop()
    began = loop.time()
    open_reply, closed_reply, by_header = await asyncio.gather(
        world.post(),
        world.post(("x-llmgw-no-store", "true")),
        world.post(("x-llmgw-model", MODEL)),
    )
    passed = loop.time() - began
    assert MESSAGE_TIMEOUT_SECONDS * 0.9 < passed < MESSAGE_TIMEOUT_SECONDS + 1
    assert (open_reply.status, by_header.status) == (200, 200)
    assert (closed_reply.status, closed_reply.error.code) == (503, "no_endpoint")
    assert set(served(world)) <= {"a", "b"}
    world.stack.service.send(signal.SIGCONT)
    await world.until_idle()
    async with world.openai() as client:
        assert (await chat(client)).usage is not None


async def test_frozen_a_running_stream_is_not_disturbed(world: World) -> None:
    """Its chunks keep coming, none of them late, to its good end."""
    loop = asyncio.get_running_loop()
    async with running_stream(world) as stream:
        assert await world.inflight() == 1
        world.stack.service.send(signal.SIGSTOP)
        gaps: list[float] = []
        last = loop.time()
        async for _ in stream:
            gaps.append(loop.time() - last)
            last = loop.time()
    assert len(gaps) >= 297
    assert max(gaps) < MESSAGE_TIMEOUT_SECONDS / 2
    world.stack.service.send(signal.SIGCONT)
    await world.until_idle()


async def test_frozen_for_long_it_recovers_by_itself(world: World) -> None:
    """Streams that ended meanwhile are not counted for ever, and decisions are followed again."""
    async with running_stream(world), running_stream(world):
        assert await world.inflight() == 2
        world.stack.service.send(signal.SIGSTOP)
    # Both clients have left while nobody was there to be told.
    for name in ("a", "b"):
        engine = world.engines[name]
        await engine.until(lambda engine=engine: engine.running == 0)  # type: ignore[misc]  # this round's
    world.stack.service.send(signal.SIGCONT)
    await world.until_idle()
    session = fresh("session")
    async with world.openai() as client:
        where = {(await chat(client, session)).system_fingerprint for _ in range(5)}
    assert len(where) == 1
