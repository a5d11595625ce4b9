"""The model is found wherever it stands in the body, and 400 is for bad JSON alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from typing import Final

import pytest
import pytest_asyncio
from case_bodies import FORM_TYPE, MIB, chat, form, sized_chat
from case_http1 import CHAT, Framing, Pair, Reply, chunked, head
from case_world import World, case, standing

from extproc.lab.engine_http import LabEngine

pytestmark = case(17)

LIMIT: Final = 4 * MIB
CONFIG: Final = f"""
listener: {{body_limit_bytes: {LIMIT}}}
endpoints:
  - {{id: a, url: "$a", models: [m]}}
  - {{id: n, url: "$n", models: [renamed], upstream_model: its-own-name}}
"""
FORM: Final = "/v1/audio/transcriptions"
FORMED: Final = ("content-type", FORM_TYPE)
BEYOND: Final = b'"seed":18446744073709551615,'
BIG: Final = b'"input":[' + b'{"k":"word and "},' * 20_000 + b"0],"

# Where a model can stand, in JSON that is right; each has to be found.
PLACES: Final[dict[str, bytes]] = {
    "first": b'{"model":"m","messages":[]}',
    "last": b'{"messages":[],"model":"m"}',
    "alone": b'{"model":"m"}',
    "behind much": b'{%b"model":"m"}' % BIG,
    "before much": b'{"model":"m",%b"n":1}' % BIG,
    "in the middle": b'{%b"model":"m",%b"n":1}' % (BIG, BIG.replace(b"input", b"more")),
    "behind other models": b'{"messages":[{"model":"x"}],"tools":{"model":"y"},"model":"m"}',
    "before other models": b'{"model":"m","extra":{"model":"x"},"list":[{"model":"y"}]}',
    "behind its own words": b'{"messages":[{"content":"\\"model\\":\\"x\\""}],"model":"m"}',
    "escaped key": b'{"messages":[],"mo\\u0064el":"m"}',
    "escaped value": b'{"messages":[],"model":"\\u006d"}',
    "spaced": b' \r\n\t{ "model" \n:\t "m" , "messages" : [ ] } \n',
    "with a mark": b'\xef\xbb\xbf{"model":"m"}',
    "deep": b'{"x":' + b"[" * 90 + b"]" * 90 + b',"model":"m"}',
    "wide": '{"x":"日本語のテキスト","model":"m"}'.encode(),
    "half a pair": b'{"x":"\\ud83d","model":"m"}',
    "big numbers": b'{"a":1e308,"b":-18446744073709551616,%b"model":"m"}' % BEYOND,
}
BROKEN: Final[dict[str, bytes]] = {
    "nothing but space": b"  \n",
    "a bare word": b"hello",
    "a number": b"1",
    "a list": b'[{"model":"m"}]',
    "a text": b'"model"',
    "no end": b'{"model":"m"',
    "no end, long": sized_chat("m", MIB)[:-1],
    "cut in a text": b'{"model":"m","messages":[{"content":"hel',
    "cut in a key": b'{"model":"m","mess',
    "two": b'{"model":"m"}{"model":"m"}',
    "trailing comma": b'{"model":"m",}',
    "single quotes": b"{'model':'m'}",
    "comment": b'{"model":"m"/*,"n":1*/}',
    "NaN": b'{"model":"m","x":NaN}',
    "raw newline": b'{"model":"m","x":"a\nb"}',
    "form": b"model=m&x=1",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Two engines that say what they got, one of which calls its model otherwise."""
    engines = [LabEngine(name, echo=True) for name in "an"]
    async with standing(tmp_path_factory.mktemp("case"), CONFIG, *engines) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nothing seen yet."""
    await started.forget()
    return started


async def send_in(world: World, body: bytes, size: int, *pairs: Pair, path: str = CHAT) -> Reply:
    """The answer to a body in chunks of that size."""
    start = head("POST", path, pairs, length=len(body), framing=Framing.CHUNKED)
    async with world.http1() as connection:
        return await connection.exchange(start + chunked(body, size))


def assert_arrived(world: World, reply: Reply, where: str, body: bytes) -> None:
    """Engine `where` has that body."""
    assert (reply.status, reply.served_by) == (200, where), reply
    (received,) = world.engines[where].requests
    assert received.body_bytes == len(body)
    assert received.body_sha256 == hashlib.sha256(body).hexdigest()


@pytest.mark.parametrize("where", list(PLACES))
async def test_wherever_it_stands(world: World, where: str) -> None:
    """Read by Envoy, or by the service, or to be changed; sent whole and in single bytes."""
    body = PLACES[where]
    for size in (len(body), 7 if len(body) > 100_000 else 1):
        await world.forget()
        assert_arrived(world, await send_in(world, body, size), "a", body)
    renamed = body.replace(b'"m"', b'"renamed"').replace(b'"\\u006d"', b'"\\u0072enamed"')
    changed = body.replace(b'"m"', b'"its-own-name"').replace(b'"\\u006d"', b'"its-own-name"')
    await world.forget()
    assert_arrived(world, await send_in(world, renamed, 1000), "n", changed)


async def test_behind_three_megabytes(world: World) -> None:
    """As chat clients send it."""
    for model, where in (("m", "a"), ("renamed", "n")):
        body = sized_chat(model, 3 * MIB, is_model_last=True)
        assert body.rindex(b'"model"') > 3_000_000
        expected = body.replace(b'"renamed"', b'"its-own-name"')
        for framing in Framing:
            await world.forget()
            reply = await world.post(body=body, framing=framing)
            assert_arrived(world, reply, where, expected)


@pytest.mark.parametrize("size", [LIMIT - 1, LIMIT, LIMIT + 1])
@pytest.mark.parametrize("reader", ["envoy", "service", "changed", "form"])
async def test_around_the_limit(world: World, reader: str, size: int) -> None:
    """The limit itself is still good, and one more byte is 413: neither is ever 400."""
    path, pairs, model = CHAT, list[Pair](), "m"
    if reader == "form":
        path, pairs, body = FORM, [FORMED], form("m", size)
    else:
        model = "renamed" if reader == "changed" else "m"
        body = sized_chat(model, size, is_model_last=True)
        if reader == "service":
            body = b"{" + BEYOND + sized_chat(model, size - len(BEYOND), is_model_last=True)[1:]
    for framing in Framing:
        await world.forget()
        reply = await world.post(*pairs, path=path, body=body, framing=framing)
        if size > LIMIT:
            assert (reply.status, reply.reason) == (413, "body_too_large")
            assert world.requests() == {}
        else:
            expected = body.replace(b'"renamed"', b'"its-own-name"')
            assert_arrived(world, reply, "n" if reader == "changed" else "a", expected)


@pytest.mark.parametrize("size", [60_000, 70_000])
async def test_in_single_bytes(world: World, size: int) -> None:
    """A chunk per byte, past the size of a buffer."""
    for model, where in (("m", "a"), ("renamed", "n")):
        body = sized_chat(model, size, is_model_last=True)
        await world.forget()
        expected = body.replace(b'"renamed"', b'"its-own-name"')
        assert_arrived(world, await send_in(world, body, 1), where, expected)


@pytest.mark.parametrize("what", list(BROKEN))
async def test_bad_json_is_400(world: World, what: str) -> None:
    """In the envelope, with words that fit, and only where the body has to be read."""
    body = BROKEN[what]
    reply = await world.post(body=body)
    assert reply.status == 400, reply
    assert reply.reason in {"body_invalid", "model_missing"}
    if what.startswith(("no end", "cut")):
        assert reply.error.message == "The body ends in the middle of its JSON."
    if what == "nothing but space":
        assert reply.reason == "model_missing"
    assert world.requests() == {}
    reply = await world.post(("x-llmgw-model", "m"), body=body)
    assert_arrived(world, reply, "a", body)
    await world.forget()
    renamed = await world.post(("x-llmgw-model", "renamed"), body=body)
    assert renamed.status == 400, renamed
    assert world.requests() == {}


async def test_json_by_other_names(world: World) -> None:
    """A content type with a suffix or parameters, or none at all."""
    for kind in (
        "application/json",
        "application/json; charset=utf-8",
        "Application/JSON",
        "application/vnd.api+json",
    ):
        await world.forget()
        reply = await world.post(("content-type", kind))
        assert_arrived(world, reply, "a", chat("m"))
    await world.forget()
    async with world.http2() as connection:
        stream = await connection.begin("POST", CHAT, [], is_json=False)
        await connection.data(stream, chat("m"))
        assert_arrived(world, await connection.answer(stream), "a", chat("m"))


async def test_what_is_no_json(world: World) -> None:
    """Another type is not searched: the client is told what would be right."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/xml", "junk"):
        reply = await world.post(("content-type", kind))
        assert (reply.status, reply.reason) == (415, "body_encoding"), kind
        assert "x-llmgw-model" in reply.error.message
    assert json.loads((await world.ask("GET", "/v1/models")).body)
    assert world.requests() == {}
