"""A request without a body is answered within a second, by whoever is to answer it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

import pytest
import pytest_asyncio
from case_bodies import FORM_TYPE
from case_grpc import request_body, request_headers
from case_http1 import CHAT, Framing, Pair, Reply, head
from case_world import World, case, standing

from extproc.lab.engine_http import LabEngine
from extproc.paths import PATHS, Route

pytestmark = case(11)

CONFIG: Final = """
endpoints:
  - {id: a, url: "$a", models: [m, org/name]}
  - {id: b, url: "$b", models: [renamed], upstream_model: its-own-name}
"""
PROMPTLY: Final = 1.0
FORM: Final = "/v1/audio/transcriptions"


@dataclass(frozen=True, slots=True)
class Bare:
    """A request without a body, and its documented answer."""

    method: str
    path: str
    status: int
    reason: str | None = None
    pairs: Sequence[Pair] = ()


BARE: Final = [
    Bare("GET", "/v1/models", 200),
    Bare("HEAD", "/v1/models", 200),
    Bare("GET", "/v1/models/m", 200),
    Bare("GET", "/v1/models/org/name", 200),
    Bare("GET", "/v1/models/org%2Fname", 200),
    Bare("HEAD", "/v1/models/m", 200),
    Bare("GET", "/v1/models/nobody", 404, "model_not_found"),
    Bare("HEAD", "/v1/models/nobody", 404, "model_not_found"),
    Bare("GET", "/ready", 200),
    Bare("HEAD", "/ready", 200),
    Bare("OPTIONS", CHAT, 204),
    Bare("OPTIONS", "/v1/models", 204),
    Bare(
        "OPTIONS",
        CHAT,
        204,
        pairs=[("origin", "https://app.example"), ("access-control-request-method", "POST")],
    ),
    Bare("GET", CHAT, 405, "method_not_allowed"),
    Bare("HEAD", CHAT, 405, "method_not_allowed"),
    Bare("DELETE", CHAT, 405, "method_not_allowed"),
    Bare("PUT", CHAT, 405, "method_not_allowed"),
    Bare("PATCH", "/v1/models", 405, "method_not_allowed"),
    Bare("DELETE", "/v1/models/m", 405, "method_not_allowed"),
    Bare("DELETE", "/v1/files/x", 404, "path_not_found"),
    Bare("GET", "/v1/files", 404, "path_not_found"),
    Bare("HEAD", "/v1/nothing", 404, "path_not_found"),
    Bare("GET", "/v1/realtime", 400, "model_missing"),
    Bare("POST", CHAT, 400, "model_missing"),
    Bare("POST", "/v1/messages", 400, "model_missing"),
    Bare("POST", FORM, 400, "model_missing"),
    Bare("POST", CHAT, 404, "model_not_found", [("x-llmgw-model", "nobody")]),
    # An endpoint that calls the model otherwise could not be told so.
    Bare("POST", CHAT, 503, "no_endpoint", [("x-llmgw-model", "renamed")]),
    # An engine's own word.
    Bare("POST", CHAT, 400, None, [("x-llmgw-model", "m")]),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Two engines, one of which calls its model otherwise."""
    engines = [LabEngine(name) for name in "ab"]
    async with standing(tmp_path_factory.mktemp("case"), CONFIG, *engines) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nothing seen yet."""
    await started.forget()
    return started


def assert_answered(world: World, bare: Bare, reply: Reply) -> None:
    """The answer is the documented one."""
    assert (reply.status, reply.reason) == (bare.status, bare.reason), reply
    if bare.method == "HEAD":
        assert reply.body == b""
    elif bare.status == 204:
        assert reply.body == b""
        assert "OPTIONS" in (reply.header("allow") or "")
        # Permission for other origins is Envoy's CORS filter to give.
        assert reply.header("access-control-allow-origin") is None
    elif bare.reason is not None and bare.path == "/v1/messages":
        assert reply.anthropic_error == "invalid_request_error"
    elif bare.reason is not None:
        assert reply.error.message
    elif bare.status == 200:
        assert json.loads(reply.body)
    assert bool(world.requests()) == (bare.status == 400 and bare.reason is None)


@pytest.mark.parametrize("bare", BARE, ids=lambda bare: f"{bare.method} {bare.path} {bare.status}")
async def test_without_a_body(world: World, bare: Bare) -> None:
    """On both versions of HTTP, and the connection is good for the next request."""
    async with world.http1() as connection:
        for _ in range(2):
            await world.forget()
            await connection.send(head(bare.method, bare.path, bare.pairs))
            reply = await connection.answer(bare.method, PROMPTLY)
            assert_answered(world, bare, reply)
            if reply.header("connection") == "close":
                assert reply.status == 400  # after its own 400, Envoy closes
                break
    async with world.http2() as connection:
        for _ in range(2):
            await world.forget()
            reply = await connection.ask(bare.method, bare.path, bare.pairs, seconds=PROMPTLY)
            assert_answered(world, bare, reply)
    await world.until_idle()


EMPTY: Final = [bare for bare in BARE if bare.method == "POST"]


@pytest.mark.parametrize("bare", EMPTY, ids=lambda bare: f"{bare.path} {bare.status}")
@pytest.mark.parametrize("framing", list(Framing))
async def test_an_empty_body(world: World, bare: Bare, framing: Framing) -> None:
    """A length of 0, and chunks of which there are none."""
    reply = await world.post(
        *bare.pairs, path=bare.path, body=b"", framing=framing, seconds=PROMPTLY
    )
    # With chunks the end comes after the headers, and a body could have come.
    is_read = framing is Framing.CHUNKED and ("x-llmgw-model", "renamed") in bare.pairs
    expected = Bare("POST", bare.path, 400, "model_missing") if is_read else bare
    assert_answered(world, expected, reply)


@pytest.mark.parametrize("bare", EMPTY, ids=lambda bare: f"{bare.path} {bare.status}")
async def test_an_empty_body_in_http2(world: World, bare: Bare) -> None:
    """Headers that do not end the stream, and an empty frame that does."""
    async with world.http2() as connection:
        stream = await connection.begin("POST", bare.path, bare.pairs)
        await connection.data(stream, b"")
        reply = await connection.answer(stream, PROMPTLY)
    is_read = ("x-llmgw-model", "renamed") in bare.pairs
    expected = Bare("POST", bare.path, 400, "model_missing") if is_read else bare
    assert_answered(world, expected, reply)


async def test_an_empty_form(world: World) -> None:
    """It has no model."""
    for framing in Framing:
        reply = await world.post(
            ("content-type", FORM_TYPE), path=FORM, body=b"", framing=framing, seconds=PROMPTLY
        )
        assert (reply.status, reply.reason) == (400, "model_missing")


async def test_a_length_of_nothing_with_a_get(world: World) -> None:
    """A client that says that its body is empty."""
    reply = await world.ask("GET", "/v1/models", [("content-length", "0")], seconds=PROMPTLY)
    assert reply.status == 200


async def test_a_get_with_a_body(world: World) -> None:
    """It is not waited for."""
    for framing in Framing:
        reply = await world.ask(
            "GET", "/v1/models", [], b'{"a":1}', framing=framing, seconds=PROMPTLY
        )
        assert reply.status == 200


async def test_the_service_is_sent_an_empty_body(world: World) -> None:
    """As some proxies do: it is no JSON error."""
    for ends in (False, True):
        async with world.processor() as stream:
            asked = await stream.say(request_headers("POST", CHAT))
            assert asked.HasField("mode_override")
            reply = await stream.say(request_body(b"", ends=ends))
        assert reply.immediate_response.status.code == 400
        assert json.loads(reply.immediate_response.body)["error"]["code"] == "model_missing"


async def test_the_list_shows_each_model_once(world: World) -> None:
    """And the paths that answer without an endpoint are those of the list."""
    reply = await world.ask("GET", "/v1/models")
    listed = [card["id"] for card in json.loads(reply.body)["data"]]
    assert sorted(listed) == ["m", "org/name", "renamed"]
    own = {one.path for one in PATHS if one.route is not Route.INFERENCE}
    assert own == {"/v1/models", "/ready"}
