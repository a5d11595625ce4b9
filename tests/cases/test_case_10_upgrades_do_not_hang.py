"""A request with an upgrade is answered at once, with a body or without one."""

from __future__ import annotations

import asyncio
import base64
import os
import struct
from collections.abc import AsyncIterator
from typing import Final

import aiohttp
import pytest
import pytest_asyncio
from case_bodies import FORM_TYPE, chat, form
from case_http1 import CHAT, Framing, Http1, Pair, head
from case_world import World, case, fresh, standing

from extproc.lab.engine_http import LabEngine
from extproc.lab.records import Outcome
from extproc.paths import PATHS, Route

pytestmark = case(10)

CONFIG: Final = """
endpoints:
  - {id: a, url: "$a", models: [m, other]}
  - {id: b, url: "$b", models: [m, other]}
  - {id: c, url: "$c", models: [renamed], upstream_model: its-own-name}
"""
PROMPTLY: Final = 2.0
REALTIME: Final = "/v1/realtime"
SETTINGS: Final = ("http2-settings", "AAMAAABkAAQCAAAAAAIAAAAA")
POSTED: Final = sorted({one.path for one in PATHS if one.route is Route.INFERENCE} - {REALTIME})

# What a client may put there: curl's, a websocket's, one that nobody speaks, and without the
# connection header that would make it one.
UPGRADES: Final[dict[str, list[Pair]]] = {
    "h2c": [("connection", "Upgrade, HTTP2-Settings"), ("upgrade", "h2c"), SETTINGS],
    "websocket": [("connection", "upgrade"), ("upgrade", "websocket")],
    "WebSocket": [("connection", "Upgrade"), ("upgrade", "WebSocket")],
    "several": [("connection", "upgrade"), ("upgrade", "h2c, websocket")],
    "nobody": [("connection", "upgrade"), ("upgrade", "smoke-signals/1")],
    "unconnected": [("upgrade", "websocket")],
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Two engines that take the same models, and one that calls its model otherwise."""
    engines = [LabEngine(name) for name in "abc"]
    async with standing(tmp_path_factory.mktemp("case"), CONFIG, *engines) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nothing seen yet."""
    await started.forget()
    return started


@pytest.mark.parametrize("framing", list(Framing))
@pytest.mark.parametrize("pairs", [[], [("x-llmgw-model", "m")]], ids=["body", "header"])
@pytest.mark.parametrize("upgrade", list(UPGRADES))
async def test_a_post_with_an_upgrade(
    world: World, upgrade: str, pairs: list[Pair], framing: Framing
) -> None:
    """It is served as if the upgrade were not there, or refused with a clear word."""
    given = [*UPGRADES[upgrade], *pairs]
    reply = await world.post(*given, framing=framing, seconds=PROMPTLY)
    if upgrade in {"h2c", "unconnected"}:
        # RFC 9110 §7.8: a server may ignore it, and Envoy does.
        assert reply.status == 200, reply
    else:
        assert reply.status == 400, reply
        assert reply.error.code == "upgrade_refused"
    await world.until_idle()


@pytest.mark.parametrize("path", POSTED)
async def test_a_post_to_any_path(world: World, path: str) -> None:
    """Nine bytes of JSON that never end, because an upgraded connection does not."""
    pairs: list[Pair] = [("connection", "upgrade"), ("upgrade", "websocket")]
    for extra in ([], [("x-llmgw-model", "m")], [("x-llmgw-model", "renamed")]):
        async with world.http1() as connection:
            await connection.send(head("POST", path, [*pairs, *extra], length=9) + b'{"a": 12}')
            reply = await connection.answer(seconds=PROMPTLY)
        assert reply.status == 400, reply
        assert reply.reason == "body_invalid"
    assert world.requests() == {}


async def test_a_form_with_an_upgrade(world: World) -> None:
    """Where the service would have to read the body."""
    pairs = [*UPGRADES["websocket"], ("content-type", FORM_TYPE)]
    reply = await world.post(
        *pairs, path="/v1/audio/transcriptions", body=form("m"), seconds=PROMPTLY
    )
    assert reply.status == 400


async def test_an_upgrade_while_the_service_is_down(world: World) -> None:
    """The same answers, as quickly."""
    await world.stack.service.kill()
    try:
        for upgrade in ("websocket", "WebSocket", "several", "nobody"):
            reply = await world.post(*UPGRADES[upgrade], seconds=PROMPTLY)
            assert reply.status == 400, (upgrade, reply)
        for upgrade in ("h2c", "unconnected"):
            reply = await world.post(*UPGRADES[upgrade], seconds=PROMPTLY)
            assert reply.status == 200, (upgrade, reply)
    finally:
        await world.stack.start_service()


# Real websockets.


@pytest.mark.parametrize("named", ["query", "header"])
async def test_a_real_websocket(world: World, named: str) -> None:
    """It is routed by its query or header, talks both ways, and counts until it is closed."""
    await world.forget(attempts=True)
    where: set[str] = set()
    for _ in range(8):
        url = f"{world.stack.url}{REALTIME}" + ("?model=m" if named == "query" else "")
        pairs = {"x-session-id": fresh("session")}
        if named == "header":
            pairs["x-llmgw-model"] = "m"
        async with world.session.ws_connect(url, headers=pairs) as socket:
            for number in range(3):
                await socket.send_str(f"hello {number}")
                message = await socket.receive(PROMPTLY)
                assert message.data == f"hello {number}"
            assert await world.inflight() == 1
            busy = [engine for engine in world.engines.values() if engine.counters.active]
            where |= {engine.name for engine in busy}
            assert len(busy) == 1
        await world.until_idle()
    assert where <= {"a", "b"}
    seen = world.requests()
    assert sum(seen.values()) == 8
    await world.until_attempts({(name, "success"): number for name, number in seen.items()})


async def test_a_websocket_that_its_client_drops(world: World) -> None:
    """Nothing stays in flight."""
    async with world.http1() as connection:
        await open_websocket(connection, f"{REALTIME}?model=m")
        assert await world.inflight() == 1
        connection.reset()
    await world.until_idle()


async def test_a_websocket_that_its_engine_drops(world: World) -> None:
    """Nor then."""
    async with world.http1() as connection:
        await open_websocket(connection, f"{REALTIME}?model=m")
        (busy,) = (engine for engine in world.engines.values() if engine.counters.active)
        busy.refuse(is_abrupt=True)
        assert await connection.more() == b""
    await world.until_idle()
    assert [received.outcome for received in busy.requests] != [Outcome.ACTIVE]


@pytest.mark.parametrize(
    ("query", "status", "reason"),
    [
        ("", 400, "model_missing"),
        ("?model=", 400, "model_invalid"),
        ("?model=nobody", 404, "model_not_found"),
        ("?model=m&model=other", 400, "model_ambiguous"),
        # A websocket has no body in which the name could be changed.
        ("?model=renamed", 503, "no_endpoint"),
    ],
)
async def test_a_websocket_that_is_refused(
    world: World, query: str, status: int, reason: str
) -> None:
    """With an answer in plain HTTP."""
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        async with asyncio.timeout(PROMPTLY):
            await world.session.ws_connect(f"{world.stack.url}{REALTIME}{query}")
    assert caught.value.status == status
    assert caught.value.headers is not None
    assert caught.value.headers["x-llmgw-reason"] == reason
    assert world.requests() == {}


async def test_a_websocket_where_there_is_none(world: World) -> None:
    """The other paths take no GET."""
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        await world.session.ws_connect(f"{world.stack.url}{CHAT}?model=m")
    assert caught.value.status == 405


async def test_an_upgrade_header_in_http2(world: World) -> None:
    """There is no such thing: the stream ends at once, and its neighbours go on."""
    async with world.http2() as connection:
        pairs = [("upgrade", "websocket"), ("connection", "upgrade")]
        reply = await connection.ask("POST", CHAT, pairs, chat("m"), seconds=PROMPTLY)
    assert reply.cut or reply.status in {200, 400}
    assert (await world.post()).status == 200


async def open_websocket(connection: Http1, path: str) -> None:
    """The handshake is done and one message has come back."""
    key = base64.b64encode(os.urandom(16)).decode()
    pairs = [*UPGRADES["websocket"], ("sec-websocket-key", key), ("sec-websocket-version", "13")]
    await connection.send(head("GET", path, pairs))
    reply = await connection.start()
    assert reply.status == 101, reply
    text = b"hello"
    mask = os.urandom(4)
    masked = bytes(byte ^ mask[index % 4] for index, byte in enumerate(text))
    await connection.send(struct.pack("!BB", 0x81, 0x80 | len(text)) + mask + masked)
    assert (await connection.more()).endswith(text)
