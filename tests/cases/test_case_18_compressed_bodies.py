"""A compressed body passes untouched beside a model header, and is 415 without one."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import AsyncIterator
from time import monotonic
from typing import Final

import pytest
import pytest_asyncio
from case_bodies import FORM_TYPE, MIB, chat, form, sized_chat
from case_http1 import CHAT, Framing, Pair
from case_world import World, case, standing

from extproc.lab.engine_http import LabEngine

pytestmark = case(18)

CONFIG: Final = """
endpoints:
  - {id: a, url: "$a", models: [m]}
  - {id: n, url: "$n", models: [renamed], upstream_model: its-own-name}
"""
FORM: Final = "/v1/audio/transcriptions"
PLAIN: Final = chat("m")


def zstd_of(body: bytes) -> bytes:
    """A zstd frame of one raw block (RFC 8878 §3.1.1)."""
    assert len(body) < 256
    block = (1 | len(body) << 3).to_bytes(3, "little")
    return b"\x28\xb5\x2f\xfd" + b"\x20" + bytes([len(body)]) + block + body


def bomb(size: int) -> bytes:
    """A small body that inflates to `size` bytes of JSON."""
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    parts = [packer.compress(b'{"model":"m","messages":"')]
    parts += [packer.compress(b" " * MIB) for _ in range(size // MIB)]
    return b"".join([*parts, packer.compress(b'"}'), packer.flush()])


# Whatever a client may say, and bytes that go with it. Brotli's are of the text "hello".
BODIES: Final[dict[str, tuple[str, bytes]]] = {
    "gzip": ("gzip", gzip.compress(PLAIN)),
    "GZIP": ("GZIP", gzip.compress(PLAIN)),
    "x-gzip": ("x-gzip", gzip.compress(PLAIN)),
    "deflate": ("deflate", zlib.compress(PLAIN)),
    "zstd": ("zstd", zstd_of(PLAIN)),
    "br": ("br", b"\x0b\x02\x80hello\x03"),
    "twice": ("gzip, gzip", gzip.compress(gzip.compress(PLAIN))),
    "identity, gzip": ("identity, gzip", gzip.compress(PLAIN)),
    "unknown": ("smoke", b"~~~"),
    "corrupt": ("gzip", gzip.compress(PLAIN)[:-9] + b"corrupted"),
    "empty": ("gzip", b"\x1f\x8b"),
    "large": ("gzip", gzip.compress(sized_chat("m", 2 * MIB), 0)),
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


@pytest.mark.parametrize("framing", list(Framing))
@pytest.mark.parametrize("what", list(BODIES))
async def test_beside_a_model_header(world: World, what: str, framing: Framing) -> None:
    """Bytes and header arrive as they were sent."""
    encoding, body = BODIES[what]
    pairs = [("x-llmgw-model", "m"), ("content-encoding", encoding)]
    reply = await world.post(*pairs, body=body, framing=framing)
    assert (reply.status, reply.served_by) == (200, "a"), reply
    (received,) = world.engines["a"].requests
    assert received.header("content-encoding") == [encoding.encode()]
    assert received.body_sha256 == hashlib.sha256(body).hexdigest()


@pytest.mark.parametrize("framing", list(Framing))
@pytest.mark.parametrize("what", list(BODIES))
async def test_where_the_body_has_to_be_read(world: World, what: str, framing: Framing) -> None:
    """415, never "invalid JSON", and the client is told what to do."""
    encoding, body = BODIES[what]
    encoded = ("content-encoding", encoding)
    asked: list[tuple[str, list[Pair], bytes]] = [
        (CHAT, [encoded], body),
        (CHAT, [encoded, ("x-llmgw-model", "renamed")], body),
        (FORM, [encoded, ("content-type", FORM_TYPE)], gzip.compress(form("m"))),
    ]
    for path, pairs, sent in asked:
        reply = await world.post(*pairs, path=path, body=sent, framing=framing)
        assert (reply.status, reply.reason) == (415, "body_encoding"), reply
        assert "x-llmgw-model" in reply.error.message
        assert reply.header("x-should-retry") == "false"
    anthropic = await world.post(encoded, path="/v1/messages", body=body, framing=framing)
    assert anthropic.status == 415
    assert anthropic.anthropic_error == "invalid_request_error"
    assert world.requests() == {}


@pytest.mark.parametrize("encoding", ["identity", "Identity", ""])
async def test_what_is_not_compressed(world: World, encoding: str) -> None:
    """The word for it is no obstacle."""
    reply = await world.post(("content-encoding", encoding))
    assert (reply.status, reply.served_by) == (200, "a"), reply


async def test_what_is_only_called_compressed(world: World) -> None:
    """Envoy can read it; the engine is told the same lie and judges for itself."""
    reply = await world.post(("content-encoding", "gzip"), body=PLAIN)
    assert (reply.status, reply.served_by) == (200, "a")
    assert world.engines["a"].requests[0].header("content-encoding") == [b"gzip"]
    reply = await world.post(("content-encoding", "gzip"), body=chat("renamed"))
    assert reply.status == 415


async def test_two_encoding_headers(world: World) -> None:
    """One after the other is twice compressed."""
    body = gzip.compress(gzip.compress(PLAIN))
    pairs = [("content-encoding", "identity"), ("content-encoding", "gzip")]
    reply = await world.post(*pairs, body=body)
    assert reply.status == 415, reply
    reply = await world.post(*reversed(pairs), body=body)
    assert reply.status == 415, reply
    assert world.requests() == {}


async def test_a_bomb(world: World) -> None:
    """A gibibyte in a megabyte: refused at once, and nobody's memory grows."""
    body = bomb(1024 * MIB)
    assert len(body) < 2 * MIB
    encoded = ("content-encoding", "gzip")
    assert (await world.post(encoded, body=body)).status == 415
    before = world.service_rss_bytes()
    for pairs in ([encoded], [encoded, ("x-llmgw-model", "renamed")]):
        for _ in range(10):
            began = monotonic()
            reply = await world.post(*pairs, body=body)
            assert reply.status == 415
            assert monotonic() - began < 1.0
    reply = await world.post(encoded, ("x-llmgw-model", "m"), body=body)
    assert reply.status == 200
    assert world.service_rss_bytes() - before < 32 * MIB


async def test_a_compressed_body_while_the_service_is_down(world: World) -> None:
    """Beside a model header it passes; Envoy cannot read the other and lets it go nowhere."""
    encoding, body = BODIES["gzip"]
    encoded = ("content-encoding", encoding)
    await world.stack.service.kill()
    try:
        reply = await world.post(encoded, ("x-llmgw-model", "m"), body=body)
        assert (reply.status, reply.served_by) == (200, "a")
        await world.engines["a"].heal()
        reply = await world.post(encoded, body=body)
        assert (reply.status, reply.reason) == (503, "no_endpoint")
    finally:
        await world.stack.start_service()
