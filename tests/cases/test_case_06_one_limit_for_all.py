"""One limit for Envoy's buffer, the message to the service and its parser: no hidden 4 MiB."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from enum import Enum, auto
from pathlib import Path
from typing import Final, assert_never

import pytest
import pytest_asyncio
from case_bodies import FORM_TYPE, KIB, MIB, form, sized_chat
from case_grpc import request_body, request_headers
from case_http1 import CHAT, Framing, Pair
from case_world import FAILED_OPEN, World, case, standing

from extproc.lab.engine_http import LabEngine

pytestmark = case(6)

CONFIG: Final = """
listener: {body_limit_bytes: $LIMIT}
endpoints:
  - {id: a, url: "$a", models: [m]}
  - {id: b, url: "$b", models: [renamed], upstream_model: a-longer-name-of-its-own}
"""
UPSTREAM: Final = b'"a-longer-name-of-its-own"'
FORM: Final = "/v1/audio/transcriptions"
LIMIT: Final = 12_000_000
SIZES: Final = (4 * MIB - KIB, 4 * MIB + 1, 8_000_000, LIMIT)
LIMITS: Final = (1024 * KIB + 1, 5 * MIB)


class Reader(Enum):
    """Who reads the body, and so which way it takes."""

    ENVOY = auto()
    SERVICE = auto()  # a form: to the service, and not back
    SERVICE_CHANGES = auto()  # to the service and back, longer than it was
    HEADER_CHANGES = auto()  # the same, though a header names the model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Two engines that say what they got, one of which calls its model otherwise."""
    async with limited(tmp_path_factory.mktemp("case"), LIMIT) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nothing seen yet."""
    await started.forget()
    return started


def limited(folder: Path, limit: int) -> AbstractAsyncContextManager[World]:
    """A gateway with that limit."""
    engines = [LabEngine(name, echo=True) for name in "ab"]
    return standing(folder, CONFIG.replace("$LIMIT", str(limit)), *engines)


def request(reader: Reader, size: int) -> tuple[str, list[Pair], bytes, bytes]:
    """Path, headers and body of a request of that size, and the body as the engine must get it."""
    match reader:
        case Reader.ENVOY:
            body = sized_chat("m", size)
            return CHAT, [], body, body
        case Reader.SERVICE:
            body = form("m", size)
            return FORM, [("content-type", FORM_TYPE)], body, body
        case Reader.SERVICE_CHANGES | Reader.HEADER_CHANGES:
            body = sized_chat("renamed", size, is_model_last=True)
            pairs: list[Pair] = [("x-llmgw-model", "renamed")]
            named = pairs if reader is Reader.HEADER_CHANGES else []
            return CHAT, named, body, body.replace(b'"renamed"', UPSTREAM)
        case _:
            assert_never(reader)


async def assert_arrives(world: World, reader: Reader, size: int, framing: Framing) -> None:
    """The engine has the body that it must get, with its length."""
    path, pairs, body, expected = request(reader, size)
    await world.forget()
    reply = await world.post(*pairs, path=path, body=body, framing=framing)
    assert reply.status == 200, reply
    (received,) = world.engines[reply.served_by].requests
    assert received.body_bytes == len(expected)
    assert received.body_sha256 == hashlib.sha256(expected).hexdigest()
    if reader in {Reader.SERVICE_CHANGES, Reader.HEADER_CHANGES}:
        assert received.header("content-length") == [str(len(expected)).encode()]
    assert await world.new(FAILED_OPEN) == 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("framing", list(Framing))
@pytest.mark.parametrize("reader", list(Reader))
async def test_a_body_up_to_the_limit(
    world: World, reader: Reader, framing: Framing, size: int
) -> None:
    """Whoever reads it, it arrives."""
    await assert_arrives(world, reader, size, framing)


@pytest.mark.parametrize("limit", LIMITS)
async def test_the_limit_is_exact_for_every_reader(tmp_path: Path, limit: int) -> None:
    """One byte below, the limit itself, and one byte above, wherever it is set."""
    async with limited(tmp_path, limit) as world:
        for reader in Reader:
            for framing in Framing:
                await assert_arrives(world, reader, limit - 1, framing)
                await assert_arrives(world, reader, limit, framing)
                await world.forget()
                path, pairs, body, _ = request(reader, limit + 1)
                reply = await world.post(*pairs, path=path, body=body, framing=framing)
                assert (reply.status, reply.reason) == (413, "body_too_large"), (reader, framing)
                assert reply.error.message.count(str(limit)) == 1
                assert world.requests() == {}
                assert await world.new(FAILED_OPEN) == 0


async def test_the_default_limit_is_32_mib(tmp_path: Path) -> None:
    """For a body that goes to the service and back, too."""
    text = CONFIG.replace("listener: {body_limit_bytes: $LIMIT}\n", "")
    engines = [LabEngine(name, echo=True) for name in "ab"]
    async with standing(tmp_path, text, *engines) as world:
        await assert_arrives(world, Reader.SERVICE_CHANGES, 32 * MIB, Framing.CHUNKED)
        reply = await world.post(body=sized_chat("m", 32 * MIB + 1))
        assert (reply.status, reply.reason) == (413, "body_too_large")


@pytest.mark.parametrize("reader", [Reader.SERVICE, Reader.SERVICE_CHANGES])
async def test_what_the_service_sends_back(world: World, reader: Reader) -> None:
    """A body that is not changed does not come back; one that is comes back whole."""
    path, pairs, body, expected = request(reader, LIMIT)
    read = None if reader is Reader.SERVICE else {"model": "renamed"}
    async with world.processor() as stream:
        length = ("content-length", str(len(body)))
        asked = await stream.say(request_headers("POST", path, [*pairs, length], read=read))
        assert asked.HasField("mode_override")
        reply = await stream.say(request_body(body, ends=True))
    mutation = reply.request_body.response.body_mutation
    if reader is Reader.SERVICE:
        assert not mutation.body
        assert reply.ByteSize() < 4 * KIB
    else:
        assert mutation.body == expected
        assert json.loads(mutation.body)["model"] == json.loads(UPSTREAM)
