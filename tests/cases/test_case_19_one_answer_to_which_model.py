"""Whoever reads a request finds one model in it: the one that the engine runs, or none."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Final

import pytest
import pytest_asyncio
from case_bodies import FORM_TYPE, chat, form
from case_http1 import CHAT, Pair, Reply
from case_world import World, case, standing

from extproc.lab.engine_http import LabEngine

pytestmark = case(19)

# Each engine refuses a model that is not its own, so a 200 is an agreement.
CONFIG: Final = """
endpoints:
  - {id: a, url: "$a", models: [a]}
  - {id: b, url: "$b", models: [b]}
  - {id: n, url: "$n", models: [renamed], upstream_model: n}
  - {id: p, url: "$p", kind: peer, models: [there/p], peer: {name: there, cluster_id: far}}
"""
FORM: Final = "/v1/audio/transcriptions"
BEYOND: Final = b'"seed":18446744073709551615,'
REST: Final = b'"max_tokens":1,"messages":[{"role":"user","content":"hi"}]}'

# Bodies with two models: the last one counts, in whatever spelling.
DUPLICATES: Final[dict[str, bytes]] = {
    "plain": b'{"model":"a","model":"b",',
    "apart": b'{"model":"a","n":1,"x":{"model":"a"},"model":"b",',
    "escaped first": b'{"mo\\u0064el":"a","model":"b",',
    "escaped last": b'{"model":"a","mo\\u0064el":"b",',
    "three": b'{"model":"b","model":"a","model":"b",',
    "same": b'{"model":"b","model":"b",',
    "null first": b'{"model":null,"model":"b",',
    "unknown first": b'{"model":"nobody","model":"b",',
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Engines that each take their own model alone, and a peer."""
    engines = [LabEngine(name, (name,)) for name in "abnp"]
    async with standing(tmp_path_factory.mktemp("case"), CONFIG, *engines) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nothing seen yet."""
    await started.forget()
    return started


def assert_ambiguous(world: World, reply: Reply) -> None:
    """The answer says that the model is to be named once, and nobody was asked."""
    assert (reply.status, reply.reason) == (400, "model_ambiguous"), reply
    assert reply.error.param == "model"
    assert world.requests() == {}


# Twice in the body.


@pytest.mark.parametrize("what", list(DUPLICATES))
async def test_the_last_one_counts_where_envoy_reads(world: World, what: str) -> None:
    """And where it counts, the engine runs it."""
    reply = await world.post(body=DUPLICATES[what] + REST)
    assert (reply.status, reply.served_by) == (200, "b"), reply
    assert json.loads(reply.body)["model"] == "b"
    assert world.requests() == {"b": 1}


@pytest.mark.parametrize("what", list(DUPLICATES))
async def test_two_are_refused_where_the_service_reads(world: World, what: str) -> None:
    """Whether to read it or to change it, equal or not."""
    body = DUPLICATES[what]
    assert_ambiguous(world, await world.post(body=body + BEYOND + REST))
    # The last one has to be changed, and the others would stay.
    renamed = body.replace(b'"b"', b'"renamed"')
    assert_ambiguous(world, await world.post(body=renamed + REST))
    assert_ambiguous(world, await world.post(("x-llmgw-model", "renamed"), body=body + REST))


async def test_two_are_refused_in_a_form(world: World) -> None:
    """Equal or not, before the file or behind it."""
    one = form("a", is_model_last=False)
    two = one.replace(
        b'content-disposition: form-data; name="file"',
        b'content-disposition: form-data; name="model"\r\n\r\nb\r\n--a-line-that-no-file-has\r\n'
        b'content-disposition: form-data; name="file"',
    )
    pair = ("content-type", FORM_TYPE)
    assert_ambiguous(world, await world.post(pair, path=FORM, body=two))


@pytest.mark.parametrize("what", list(DUPLICATES))
async def test_the_last_one_counts_without_the_service(world: World, what: str) -> None:
    """Envoy alone reads it likewise."""
    await world.stack.service.kill()
    try:
        reply = await world.post(body=DUPLICATES[what] + REST)
        assert (reply.status, reply.served_by) == (200, "b"), reply
    finally:
        await world.stack.start_service()


# In the header and in the body.


@pytest.mark.parametrize("name", ["x-llmgw-model", "x-gateway-model-name", "x-ai-eg-model"])
async def test_the_header_alone_decides(world: World, name: str) -> None:
    """The body is not read beside it: the engine gets what it says, and judges for itself."""
    reply = await world.post((name, "a"), model="b")
    assert world.requests() == {"a": 1}
    assert reply.status == 404  # the engine's own word: it does not have b
    assert reply.reason is None
    for body in (chat(None), b"", b"{", b"\xff"):
        await world.forget()
        reply = await world.post((name, "a"), body=body)
        assert world.requests() == {"a": 1}


async def test_the_header_decides_where_the_body_is_changed(world: World) -> None:
    """Then the body's model is replaced, whatever it was."""
    reply = await world.post(("x-llmgw-model", "renamed"), model="a")
    assert (reply.status, reply.served_by) == (200, "n")
    assert json.loads(world.engines["n"].requests[0].body_start)["model"] == "n"


async def test_the_query_does_not_count_beside_a_body(world: World) -> None:
    """It is for requests without one."""
    reply = await world.post(model="a", path=f"{CHAT}?model=b")
    assert (reply.status, reply.served_by) == (200, "a")


@pytest.mark.parametrize(
    "pairs",
    [
        [("x-llmgw-model", "a"), ("x-llmgw-model", "b")],
        [("x-llmgw-model", "a"), ("x-llmgw-model", "a")],
        [("x-llmgw-model", "a"), ("X-LLMGW-Model", "b")],
        [("x-llmgw-model", "a"), ("x-ai-eg-model", "b")],
        [("x-gateway-model-name", "a"), ("x-llmgw-model", "a")],
        [("x-llmgw-model", ""), ("x-llmgw-model", "b")],
    ],
    ids=str,
)
async def test_two_model_headers(world: World, pairs: list[Pair]) -> None:
    """Refused, equal or not, in both versions of HTTP, with the service and without it."""
    assert_ambiguous(world, await world.post(*pairs, model="a"))
    async with world.http2() as connection:
        lower = [(str(name).lower(), value) for name, value in pairs]
        assert_ambiguous(world, await connection.ask("POST", CHAT, lower, chat("a")))


@pytest.mark.parametrize(
    "pairs",
    [
        [("x-llmgw-model", "a"), ("x-ai-eg-model", "b")],
        [("x-gateway-model-name", "a"), ("x-llmgw-model", "b")],
    ],
    ids=str,
)
async def test_two_model_headers_without_the_service(world: World, pairs: list[Pair]) -> None:
    """Nobody chooses between them then."""
    await world.stack.service.kill()
    try:
        reply = await world.post(*pairs, model="a")
        assert reply.status == 503
        assert world.requests() == {}
    finally:
        await world.stack.start_service()


@pytest.mark.parametrize("value", ["a,b", "a, a", "a;b"])
async def test_a_list_in_one_header(world: World, value: str) -> None:
    """It is one name, and nobody has it."""
    reply = await world.post(("x-llmgw-model", value))
    assert (reply.status, reply.reason) == (404, "model_not_found")
    assert world.requests() == {}


@pytest.mark.parametrize("value", ["", " ", "\t"])
async def test_an_empty_header(world: World, value: str) -> None:
    """It is not as if there were none."""
    reply = await world.post(("x-llmgw-model", value), model="a")
    assert (reply.status, reply.reason) == (400, "model_invalid"), reply
    assert world.requests() == {}


# Names are what they are.


@pytest.mark.parametrize("name", [" a", "a ", " a ", "A", "a\\u0020", "а", "a/", "./a"])  # noqa: RUF001 - one of them is Cyrillic
async def test_a_name_that_is_nearly_one(world: World, name: str) -> None:
    """Spaces, case and look-alikes make another name; and an engine would not know it either."""
    body = b'{"model":"%b",' % name.encode() + REST
    reply = await world.post(body=body)
    assert (reply.status, reply.reason) == (404, "model_not_found"), reply
    reply = await world.post(body=body[:-1] + b"," + BEYOND[:-1] + b"}")
    assert (reply.status, reply.reason) == (404, "model_not_found"), reply
    assert world.requests() == {}


async def test_spaces_around_a_header_are_not_part_of_it(world: World) -> None:
    """So HTTP has it."""
    reply = await world.post(("x-llmgw-model", "  a\t "), model="a")
    assert (reply.status, reply.served_by) == (200, "a")


async def test_a_byte_order_mark(world: World) -> None:
    """It is skipped, and the engine gets it as it came."""
    body = b"\xef\xbb\xbf" + chat("a")
    reply = await world.post(body=body)
    assert world.requests() == {"a": 1}
    assert reply.status in {200, 400}  # the engine's own word
    assert world.engines["a"].requests[0].body_start.startswith(b"\xef\xbb\xbf")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-7"])
async def test_other_unicode(world: World, encoding: str) -> None:
    """JSON is UTF-8 (RFC 8259 §8.1)."""
    text = '{"model":"a","x":"ä"}'
    reply = await world.post(body=text.encode(encoding))
    if encoding == "utf-7":
        # It is ASCII as well, with other words.
        assert reply.status in {200, 400}
        return
    assert (reply.status, reply.reason) == (400, "body_invalid"), reply
    assert world.requests() == {}


@pytest.mark.parametrize("word", ["_missing", "_error"])
async def test_the_words_of_envoys_filter(world: World, word: str) -> None:
    """A client that calls its model so gets the answer to an unknown model."""
    reply = await world.post(model=word)
    assert (reply.status, reply.reason) == (404, "model_not_found"), reply
    reply = await world.post(("x-llmgw-model", word))
    assert (reply.status, reply.reason) == (404, "model_not_found"), reply


async def test_a_peer_reads_what_we_read(world: World) -> None:
    """Header and body towards it name the same model."""
    for pairs in ([], [("x-llmgw-model", "there/p")]):
        await world.forget()
        reply = await world.post(*pairs, model="there/p")
        assert (reply.status, reply.served_by) == (200, "p"), reply
        (received,) = world.engines["p"].requests
        assert received.header("x-llmgw-model") == [b"p"]
        assert json.loads(received.body_start)["model"] == "p"
    await world.forget()
    body = b'{"model":"there/p","model":"a",' + REST
    reply = await world.post(("x-llmgw-model", "there/p"), body=body)
    assert_ambiguous(world, reply)
