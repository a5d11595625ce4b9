"""Bytes that are not UTF-8, and names that would be headers, concern one request and no other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Final

import pytest
import pytest_asyncio
from case_bodies import FORM_TYPE, chat, form
from case_http1 import CHAT, Pair, Reply
from case_world import World, case, standing, until

from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine
from extproc.lab.records import Received

pytestmark = case(13)

CONFIG: Final = """
cluster_id: here
endpoints:
  - {id: a, url: "$a", models: [m]}
  - {id: b, url: "$b", models: [m]}
  - {id: c, url: "$c", models: [renamed], upstream_model: its-own-name}
"""
FORM: Final = "/v1/audio/transcriptions"
ECHO: Final = ("x-lab-echo", "1")

# What a client gives as its model, in JSON's own spelling.
MODELS: Final[dict[str, bytes]] = {
    "CR LF": rb'"m\r\nx-evil: 1"',
    "LF": rb'"m\nx-evil: 1"',
    "CR": rb'"m\rx-evil: 1"',
    "raw CR LF": b'"m\r\nx-evil: 1"',
    "NUL": rb'"a\u0000b"',
    "raw NUL": b'"a\x00b"',
    "DEL": rb'"a\u007fb"',
    "escape": rb'"a\u001b[31mb"',
    "line separator": rb'"a\u2028b"',
    "lone surrogate": rb'"\ud800"',
    "second half": rb'"\udc00"',
    "not UTF-8": b'"\xff\xfe"',
    "cut UTF-8": b'"\xe2\x82"',
    "over-long UTF-8": b'"\xc0\xaf"',
    "100 KB": b'"' + b"x" * 100_000 + b'"',
    "300 characters": b'"' + b"x" * 300 + b'"',
    "empty": b'""',
    "blank": b'"  "',
    "number": b"123",
    "huge number": b"123456789012345678901234567890",
    "null": b"null",
    "true": b"true",
    "list": b'["x"]',
    "list of m": b'["m"]',
    "object": b'{"name":"m"}',
    "unknown": '"größe-✓"'.encode(),
    "percent": b'"%REQ(authorization)%"',
    "quotes": rb'"a\"b\\c"',
    "markup": b'"<script>alert(1)</script>"',
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Three engines, one of which calls its model otherwise."""
    slow = EngineSettings(decode_tokens_per_second=20)
    engines = [LabEngine(name, settings=slow) for name in "abc"]
    async with standing(tmp_path_factory.mktemp("case"), CONFIG, *engines) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nothing seen yet."""
    await started.forget()
    return started


def named(model: bytes) -> bytes:
    """A chat request with that model in JSON's spelling."""
    return b'{"model":%b,"max_tokens":1,"messages":[{"role":"user","content":"hi"}]}' % model


def assert_harmless(reply: Reply) -> None:
    """The answer is a clear 4xx with nothing raw in it."""
    assert reply.status in {400, 404}, reply
    assert reply.error.type == "invalid_request_error"
    assert reply.error.message.isprintable()
    assert len(reply.error.message) < 300
    assert reply.header("x-evil") is None
    for _, value in reply.headers:
        assert value.isprintable()


@pytest.mark.parametrize("what", list(MODELS))
async def test_a_model_in_the_body(world: World, what: str) -> None:
    """Refused, in both versions of HTTP, whoever read the body; nothing reaches an engine."""
    body = named(MODELS[what])
    beyond = body[:-1] + b',"seed":18446744073709551615}'
    for sent in (body, beyond):
        assert_harmless(await world.post(body=sent))
        async with world.http2() as connection:
            assert_harmless(await connection.ask("POST", CHAT, [], sent))
    assert world.requests() == {}
    assert (await world.post()).status == 200


@pytest.mark.parametrize("what", [what for what in MODELS if MODELS[what].startswith(b'"')])
async def test_a_model_in_a_form(world: World, what: str) -> None:
    """There the bytes are as they are."""
    value = MODELS[what][1:-1]
    written = value.replace(rb"\r", b"\r").replace(rb"\n", b"\n").replace(rb"\u0000", b"\0")
    body = form("@model@").replace(b"@model@", written)
    reply = await world.post(("content-type", FORM_TYPE), path=FORM, body=body)
    assert_harmless(reply)
    assert world.requests() == {}


@pytest.mark.parametrize(
    "value",
    [b"m\x80", b"\xff", b"\xe2\x82", b"\xc0\xaf", b"m\tm", "größe".encode("latin-1"), b"x" * 300],
)
@pytest.mark.parametrize("name", ["x-llmgw-model", "x-ai-eg-model"])
async def test_a_model_in_a_header(world: World, name: str, value: bytes) -> None:
    """Refused; the request's body does not matter."""
    assert_harmless(await world.post((name, value)))
    async with world.http2() as connection:
        assert_harmless(await connection.ask("POST", CHAT, [(name, value)], chat("m")))
    assert world.requests() == {}


@pytest.mark.parametrize("query", ["%ff", "%00", "%0d%0ax-evil:%201", "m%80", "%"])
async def test_a_model_in_the_query(world: World, query: str) -> None:
    """Likewise."""
    assert_harmless(await world.ask("GET", f"/v1/realtime?model={query}"))
    assert world.requests() == {}


@pytest.mark.parametrize("model_id", ["%ff", "%00", "a%0d%0ab", "%c0%af", "x" * 3000])
async def test_an_id_in_the_path(world: World, model_id: str) -> None:
    """A model that is asked about by its path."""
    reply = await world.ask("GET", f"/v1/models/{model_id}")
    assert_harmless(reply)


# Bytes that are none of our business, and keep what they are.

SESSIONS: Final = [b"\xff\xfe", b"Espa\xf1a", b"\x80", "größe ✓".encode(), b"a" * 60_000]


@pytest.mark.parametrize("name", ["x-llmgw-session", "x-session-id", "session_id"])
@pytest.mark.parametrize("session", SESSIONS, ids=lambda one: ascii(one[:10]))
async def test_a_session_of_any_bytes(world: World, name: str, session: bytes) -> None:
    """It keeps its engine and arrives as it was sent."""
    served: set[str] = set()
    for number in range(6):
        pairs: list[Pair] = [(name, session), ECHO]
        if number % 2:
            pairs.append(("x-llmgw-model", "m"))
        reply = await world.post(*pairs)
        assert reply.status == 200, reply
        served.add(reply.served_by)
    assert len(served) == 1
    for received in world.engines[served.pop()].requests:
        assert received.header(name) == [session]


@pytest.mark.parametrize(
    "pair",
    [
        ("user-agent", b"Espa\xf1a/1.0"),
        ("x-request-id", b"\xff\xfe-id"),
        ("x-llmgw-tags", b"team=\xe9quipe"),
        ("x-anything", b"\x80\x81\xfe"),
        ("accept-language", b"fr-\xff"),
    ],
    ids=lambda pair: str(pair[0]),
)
@pytest.mark.parametrize("version", [1, 2])
async def test_a_header_of_any_bytes(world: World, pair: tuple[str, bytes], version: int) -> None:
    """It arrives as it was sent."""
    if version == 1:
        reply = await world.post(pair, ECHO)
    else:
        async with world.http2() as connection:
            reply = await connection.ask("POST", CHAT, [pair, ECHO], chat("m"))
    assert reply.status == 200, reply
    (received,) = world.engines[reply.served_by].requests
    assert received.header(pair[0]) == [pair[1]]


@pytest.mark.parametrize(
    ("pair", "status"),
    [
        (("x-llmgw-hop", b"edge-\xff"), 508),
        (("x-llmgw-hop", b"\x80"), 508),
        (("x-llmgw-residency", b"\xff"), 200),
        (("x-llmgw-no-store", b"\xff"), 200),
        (("content-type", b"application/json; charset=\xff"), 200),
        (("content-encoding", b"\xff"), 415),
        (("content-type", b"\xff"), 415),
    ],
    ids=ascii,
)
async def test_a_header_that_is_read(world: World, pair: Pair, status: int) -> None:
    """What cannot be read restricts, or is refused; our own engines are always permitted."""
    reply = await world.post(pair)
    assert reply.status == status, reply


async def test_anthropics_request_id(world: World) -> None:
    """An id that is not plain is not repeated in the envelope."""
    reply = await world.post(("x-request-id", b"\xff\xfe"), model="nobody", path="/v1/messages")
    assert reply.status == 404
    assert reply.header("request-id") is None
    assert "request_id" not in json.loads(reply.body)


# Those who ask at the same time.


async def test_neighbours_on_the_same_connection(world: World) -> None:
    """A stream runs to its end, and good requests are served, between bad ones."""
    bad = [*MODELS.values()]
    async with world.http2() as connection:
        stream = await connection.begin("POST", CHAT)
        await connection.data(stream, chat("m", stream=True, max_tokens=40))
        assert (await connection.started(stream)).status == 200
        asking = [connection.ask("POST", CHAT, [], named(model)) for model in bad]
        asking += [connection.ask("POST", CHAT, [], chat("m", max_tokens=1)) for _ in range(10)]
        replies = await asyncio.gather(*asking)
        assert {reply.status for reply in replies[: len(bad)]} <= {400, 404}
        assert [reply.status for reply in replies[len(bad) :]] == [200] * 10
        whole = await connection.answer(stream)
    assert not whole.cut
    assert whole.body.endswith(b"data: [DONE]\n\n")
    assert whole.body.count(b'"content"') >= 40


async def test_while_the_service_is_down(world: World) -> None:
    """Envoy alone lets none of it through either."""
    await world.stack.service.kill()
    try:
        for body in [named(model) for model in MODELS.values()]:
            reply = await world.post(body=body)
            assert reply.status in {400, 404, 503}, reply
            assert reply.header("x-evil") is None
        assert world.requests() == {}
        await until(lambda: is_served(world), "a good request is served")
    finally:
        await world.stack.start_service()
    assert all(not received.header("x-evil") for received in seen(world))


async def is_served(world: World) -> bool:
    """Whether a good request is served now."""
    return (await world.post()).status == 200


def seen(world: World) -> Sequence[Received]:
    """What all engines have seen."""
    return [received for engine in world.engines.values() for received in engine.requests]
