"""A body that is followed by trailers is decided on at its end, at once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from time import monotonic
from typing import Final

import pytest
import pytest_asyncio
from case_bodies import FORM_TYPE, MIB, chat, form, sized_chat
from case_grpc import header, request_body, request_headers, request_trailers
from case_http1 import CHAT, Pair, Reply, chunked, head
from case_http1 import Framing as Delimited
from case_world import World, case, standing

from extproc import headers
from extproc.lab.engine_http import LabEngine

pytestmark = case(9)

CONFIG: Final = """
endpoints:
  - {id: a, url: "$a", models: [m]}
  - {id: b, url: "$b", models: [renamed], upstream_model: its-own-name}
"""
FORM: Final = "/v1/audio/transcriptions"
TRAILERS: Final = [("x-checksum", "abc"), ("x-llmgw-cluster", "ep-b"), ("x-llmgw-model", "renamed")]
PROMPTLY: Final = 1.0

# Path, headers, body, who must get it, and the body that it must get.
ASKED: Final[dict[str, tuple[str, list[Pair], bytes, str, bytes]]] = {
    "model in the body": (CHAT, [], chat("m"), "a", chat("m")),
    "model in a header": (CHAT, [("x-llmgw-model", "m")], chat(None), "a", chat(None)),
    "in a form": (FORM, [("content-type", FORM_TYPE)], form("m"), "a", form("m")),
    "renamed": (CHAT, [], chat("renamed"), "b", chat("its-own-name")),
    "renamed, in a header": (
        CHAT,
        [("x-llmgw-model", "renamed")],
        chat("renamed"),
        "b",
        chat("its-own-name"),
    ),
    "beyond int64": (
        CHAT,
        [],
        b'{"seed":18446744073709551615,"model":"m","messages":[]}',
        "a",
        b'{"seed":18446744073709551615,"model":"m","messages":[]}',
    ),
    "a megabyte": (CHAT, [], sized_chat("m", MIB), "a", sized_chat("m", MIB)),
}


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


async def send(world: World, version: int, path: str, pairs: list[Pair], body: bytes) -> Reply:
    """The answer to a body that ends in trailers."""
    if version == 2:
        async with world.http2() as connection:
            return await connection.ask("POST", path, pairs, body, trailers=TRAILERS)
    named = ("trailer", ", ".join(name for name, _ in TRAILERS))
    start = head("POST", path, [*pairs, named], length=len(body), framing=Delimited.CHUNKED)
    async with world.http1() as connection:
        return await connection.exchange(start + chunked(body, trailers=TRAILERS))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("what", list(ASKED))
async def test_the_end_is_seen(world: World, what: str, version: int) -> None:
    """The request is where it belongs, whole, within a second; its trailers steer nothing."""
    path, pairs, body, where, expected = ASKED[what]
    started = monotonic()
    reply = await send(world, version, path, pairs, body)
    assert monotonic() - started < PROMPTLY
    assert (reply.status, reply.served_by) == (200, where), reply
    (received,) = world.engines[where].requests
    assert received.has_whole_body
    assert received.body_sha256 == hashlib.sha256(expected).hexdigest()
    assert received.header(headers.CLUSTER) == []
    assert world.requests() == {where: 1}
    await world.until_idle()


REFUSED: Final[dict[str, tuple[str, list[Pair], bytes, str]]] = {
    "nothing": (CHAT, [], b"", "model_missing"),
    "no model": (CHAT, [], chat(None), "model_missing"),
    "no JSON": (CHAT, [], b"{", "body_invalid"),
    "no model in a form": (FORM, [("content-type", FORM_TYPE)], form(None), "model_missing"),
    "no form": (FORM, [("content-type", FORM_TYPE)], b"", "model_missing"),
    # There is no body in which the model could be changed.
    "nothing to rename": (
        CHAT,
        [("x-llmgw-model", "renamed")],
        b"",
        "model_missing or body_invalid",
    ),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("what", list(REFUSED))
async def test_what_is_missing_is_said(world: World, what: str, version: int) -> None:
    """Also where trailers are all that follows the headers."""
    path, pairs, body, reason = REFUSED[what]
    started = monotonic()
    reply = await send(world, version, path, pairs, body)
    assert monotonic() - started < PROMPTLY
    assert reply.status == 400, reply
    assert reply.reason in reason.split(" or ")
    assert world.requests() == {}


async def test_trailers_long_after_the_body(world: World) -> None:
    """Nothing is decided before the end, and then at once."""
    async with world.http2() as connection:
        stream = await connection.begin("POST", CHAT)
        await connection.data(stream, chat("m"), ends=False)
        with pytest.raises(TimeoutError):
            await connection.answer(stream, 0.3)
        assert await world.inflight() == 0
        await connection.trail(stream, TRAILERS)
        reply = await connection.answer(stream, PROMPTLY)
    assert reply.served_by == "a"


async def test_the_service_decides_on_a_body_without_its_end(world: World) -> None:
    """The buffered body is all of it; trailers that follow change nothing."""
    async with world.processor() as stream:
        asked = await stream.say(request_headers("POST", FORM, [("content-type", FORM_TYPE)]))
        assert asked.HasField("mode_override")
        reply = await stream.say(request_body(form("m"), ends=False))
        assert header(reply, headers.CLUSTER) == b"ep-a"
        after = await stream.say(request_trailers())
        assert after.WhichOneof("response") == "request_trailers"
        assert not after.request_trailers.header_mutation.set_headers
    await world.until_idle()


async def test_the_service_is_sent_trailers_and_no_body(world: World) -> None:
    """There is none to read, and the client is told so."""
    async with world.processor() as stream:
        await stream.say(request_headers("POST", CHAT))
        reply = await stream.say(request_trailers())
    assert reply.immediate_response.status.code == 400
    assert json.loads(reply.immediate_response.body)["error"]["code"] == "model_missing"
