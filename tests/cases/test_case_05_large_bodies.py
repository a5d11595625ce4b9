"""A body of any size arrives as it was sent, or is refused with 413: never a hang, never a 500."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from enum import Enum, auto
from typing import Final, assert_never

import pytest
import pytest_asyncio
from case_bodies import FORM_TYPE, KIB, MIB, form, sized_chat
from case_http1 import CHAT, Framing, Pair, Reply, chunked, head
from case_world import World, case, standing

from extproc.lab.engine_http import LabEngine

pytestmark = case(5)

LIMIT: Final = 13 * MIB
CONFIG = f"""
listener: {{body_limit_bytes: {LIMIT}}}
endpoints:
  - {{id: a, url: "$a", models: [m]}}
  - {{id: b, url: "$b", models: [renamed], upstream_model: its-own-name}}
"""
FORM: Final = "/v1/audio/transcriptions"
IN_A_HEADER: Final = ("x-llmgw-model", "m")
AROUND_32_KIB: Final = (32 * KIB - 1, 32 * KIB, 32 * KIB + 1)
AROUND_1_MIB: Final = (MIB - 1, MIB, MIB + 1)
SIZES: Final = (*AROUND_32_KIB, *AROUND_1_MIB, 12_000_000)
PROMPTLY: Final = 5.0


class Found(Enum):
    """Where the model is, and who has to read the body."""

    IN_JSON = auto()
    IN_FORM = auto()
    RENAMED = auto()  # in a header, and the body is changed all the same


class How(Enum):
    """How a body is sent."""

    LENGTH = auto()
    CHUNKED = auto()
    EXPECTED = auto()  # with `Expect: 100-continue`, and only after the gateway agrees
    HTTP2 = auto()
    HTTP2_LENGTH = auto()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Two engines that say what they got, one of which calls its model otherwise."""
    engines = [LabEngine(name, echo=True) for name in "ab"]
    async with standing(tmp_path_factory.mktemp("case"), CONFIG, *engines) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nothing seen yet."""
    await started.forget()
    return started


async def send(
    world: World,
    how: How,
    body: bytes,
    pairs: list[Pair],
    path: str = CHAT,
    *,
    seconds: float = PROMPTLY,
) -> Reply:
    """The answer to a body that is sent so."""
    async with asyncio.timeout(seconds):
        if how in {How.HTTP2, How.HTTP2_LENGTH}:
            length = [("content-length", str(len(body)))] if how is How.HTTP2_LENGTH else []
            async with world.http2() as connection:
                return await connection.ask("POST", path, [*pairs, *length], body)
        async with world.http1() as connection:
            if how is not How.EXPECTED:
                framing = Framing.CHUNKED if how is How.CHUNKED else Framing.LENGTH
                return await connection.ask("POST", path, pairs, body, framing=framing)
            expecting = [*pairs, ("expect", "100-continue")]
            await connection.send(head("POST", path, expecting, length=len(body)))
            reply = await connection.start()
            if reply.status != 100:
                return await connection.rest_of(reply)
            return await connection.exchange(body)


@pytest.mark.parametrize("how", list(How))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pairs", [[], [IN_A_HEADER]], ids=["body", "header"])
async def test_bytes_are_the_same(world: World, pairs: list[Pair], size: int, how: How) -> None:
    """Whether the body had to be read for its model or not."""
    body = sized_chat("m", size)
    reply = await send(world, how, body, pairs)
    assert reply.status == 200, reply
    (received,) = world.engines["a"].requests
    assert received.body_bytes == size
    assert received.body_sha256 == hashlib.sha256(body).hexdigest()
    assert len(received.header("content-length")) + len(received.header("transfer-encoding")) == 1
    await world.until_idle()


@pytest.mark.parametrize("how", list(How))
async def test_a_form_is_the_same(world: World, how: How) -> None:
    """Audio, whose model comes after the file and is read by the service."""
    body = form("m", 12_000_000)
    reply = await send(world, how, body, [("content-type", FORM_TYPE)], FORM)
    assert reply.status == 200, reply
    (received,) = world.engines["a"].requests
    assert received.body_sha256 == hashlib.sha256(body).hexdigest()


@pytest.mark.parametrize("framing", list(Framing))
async def test_a_body_beside_a_model_header_is_never_held_back(
    world: World, framing: Framing
) -> None:
    """The engine has the first half before the second is sent."""
    body = sized_chat("m", MIB)
    half = len(body) // 2
    is_chunked = framing is Framing.CHUNKED
    async with world.http1() as connection:
        await connection.send(
            head("POST", CHAT, [IN_A_HEADER], length=len(body), framing=framing)
            + (b"%x\r\n%b\r\n" % (half, body[:half]) if is_chunked else body[:half])
        )
        engine = world.engines["a"]
        await engine.until(lambda: bool(engine.requests) and engine.requests[-1].body_bytes == half)
        assert await world.inflight() == 1
        reply = await connection.exchange(chunked(body[half:]) if is_chunked else body[half:])
    assert reply.status == 200
    assert engine.requests[-1].body_sha256 == hashlib.sha256(body).hexdigest()


def too_large(found: Found) -> tuple[str, list[Pair], bytes]:
    """Path, headers and body of a request that is one byte above the limit."""
    match found:
        case Found.IN_JSON:
            return CHAT, [], sized_chat("m", LIMIT + 1)
        case Found.IN_FORM:
            return FORM, [("content-type", FORM_TYPE)], form("m", LIMIT + 1)
        case Found.RENAMED:
            return CHAT, [("x-llmgw-model", "renamed")], sized_chat("renamed", LIMIT + 1)
        case _:
            assert_never(found)


def assert_too_large(world: World, reply: Reply) -> None:
    """The answer is 413 that says what to do, and no engine has seen the request."""
    assert (reply.status, reply.reason) == (413, "body_too_large"), reply
    assert reply.header("x-should-retry") == "false"
    assert world.requests() == {}


@pytest.mark.parametrize("how", list(How))
@pytest.mark.parametrize("found", list(Found))
async def test_above_the_limit(world: World, found: Found, how: How) -> None:
    """413 in the envelope of the path; nothing is in flight."""
    path, pairs, body = too_large(found)
    reply = await send(world, how, body, pairs, path)
    assert_too_large(world, reply)
    assert reply.error.code == "body_too_large"
    assert "x-llmgw-model" in reply.error.message
    assert await world.inflight() == 0


@pytest.mark.parametrize("how", list(How))
@pytest.mark.parametrize("found", list(Found))
async def test_above_the_limit_before_the_service_answers(
    world: World, found: Found, how: How
) -> None:
    """All of the body is there before the service has asked for it."""
    path, pairs, body = too_large(found)
    world.freeze()
    loop = asyncio.get_running_loop()
    # Well below the message timeout, after which Envoy goes on by itself.
    going_on = loop.call_later(0.4, world.thaw)
    try:
        reply = await send(world, how, body, pairs, path)
    finally:
        going_on.cancel()
        world.thaw()
    assert_too_large(world, reply)


@pytest.mark.parametrize("how", list(How))
async def test_above_the_limit_for_anthropics_clients(world: World, how: How) -> None:
    """In the envelope that they read."""
    body = sized_chat("m", LIMIT + 1)
    reply = await send(world, how, body, [], "/v1/messages")
    assert_too_large(world, reply)
    assert reply.anthropic_error == "request_too_large"


@pytest.mark.parametrize("how", list(How))
async def test_above_the_limit_beside_a_model_header(world: World, how: How) -> None:
    """It passes: nobody has to read it."""
    body = sized_chat("m", LIMIT + MIB)
    reply = await send(world, how, body, [IN_A_HEADER])
    assert reply.status == 200, reply
    (received,) = world.engines["a"].requests
    assert received.body_sha256 == hashlib.sha256(body).hexdigest()
