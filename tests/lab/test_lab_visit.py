"""What each path of a simulated engine answers while nothing goes wrong."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from lab_client import CHAT, call, chat, connected

from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine


@pytest.mark.parametrize("path", ["/health", "/ping", "/health_generate", "/"])
async def test_health_is_an_empty_200_until_it_is_not(path: str) -> None:
    """A healthy engine answers 200 without a body, an unhealthy one 503."""
    async with LabEngine("a") as engine:
        reply = await call(engine, "GET", path)
        assert (reply.status, reply.body) == (200, b"")
        assert reply.headers["x-served-by"] == "a"
        engine.desk.is_healthy = False
        assert (await call(engine, "GET", path)).status == 503


async def test_models_are_listed_with_their_length() -> None:
    """Every name is a card; the longest request is its max_model_len."""
    async with LabEngine(models=("m", "org/m:1"), settings=EngineSettings(kv_tokens=640)) as engine:
        cards = (await call(engine, "GET", "/v1/models")).json["data"]
        assert isinstance(cards, list)
        assert [card["id"] for card in cards] == ["m", "org/m:1"]
        assert cards[0]["max_model_len"] == 640


async def test_head_has_the_headers_of_get_and_no_body() -> None:
    """HEAD on the model list and on health leaves the connection usable."""
    async with LabEngine() as engine, connected(engine) as connection:
        listing = await connection.call("GET", "/v1/models")
        head = await connection.call("HEAD", "/v1/models")
        assert head.headers["content-length"] == listing.headers["content-length"]
        assert (await connection.call("HEAD", "/health")).status == 200
        assert (await connection.call("GET", "/health")).status == 200


async def test_an_adapter_comes_and_goes() -> None:
    """A loaded adapter is listed under its base and served; an unloaded one is unknown."""
    async with LabEngine() as engine:
        name = json.dumps({"lora_name": "ada", "lora_path": "/x"}).encode()
        assert (await call(engine, "POST", "/v1/load_lora_adapter", name)).status == 200
        listed = (await call(engine, "GET", "/v1/models")).json["data"]
        assert isinstance(listed, list)
        assert listed[1]["parent"] == "m"
        assert "max_model_len" not in listed[1]
        assert (await call(engine, "POST", CHAT, chat(model="ada"))).json["model"] == "ada"
        assert (await call(engine, "POST", "/v1/unload_lora_adapter", name)).status == 200
        assert (await call(engine, "POST", CHAT, chat(model="ada"))).status == 404
        assert (await call(engine, "POST", "/v1/unload_lora_adapter", name)).status == 404
        assert (await call(engine, "POST", "/v1/load_lora_adapter", b"{}")).status == 400
        assert (await call(engine, "POST", "/v1/load_lora_adapter", b"[")).status == 400


async def test_unknown_paths_and_methods_are_refused_as_vllm_does() -> None:
    """404 and 405 carry a detail."""
    async with LabEngine() as engine:
        nowhere = await call(engine, "GET", "/nowhere")
        assert (nowhere.status, nowhere.json) == (404, {"detail": "Not Found"})
        wrong = await call(engine, "GET", CHAT)
        assert (wrong.status, wrong.json) == (405, {"detail": "Method Not Allowed"})
        assert (await call(engine, "POST", "/v1/models", b"{}")).status == 405


async def test_small_pages_say_what_they_say() -> None:
    """Version and props answer; slots are the batch limit."""
    async with LabEngine(settings=EngineSettings(max_running=3), ranks=2) as engine:
        assert (await call(engine, "GET", "/version")).json == {"version": "lab"}
        assert (await call(engine, "GET", "/props")).json["total_slots"] == 6


@pytest.mark.parametrize(
    ("key_header", "good"),
    [("authorization", "Bearer secret"), ("x-api-key", "secret"), ("api-key", "secret")],
)
async def test_a_key_is_demanded(key_header: str, good: str) -> None:
    """Without the right key every /v1/ path is 401; health and metrics stay open."""
    async with LabEngine(key="secret", key_header=key_header) as engine:
        assert (await call(engine, "POST", CHAT, chat())).status == 401
        bad = await call(engine, "POST", CHAT, chat(), {key_header: "Bearer \xff"})
        assert bad.status == 401
        assert (await call(engine, "POST", CHAT, chat(), {key_header: good})).status == 200
        assert (await call(engine, "GET", "/v1/models")).status == 401
        assert (await call(engine, "GET", "/health")).status == 200
        assert (await call(engine, "GET", "/metrics")).status == 200


async def test_echo_shows_what_came_in() -> None:
    """With the option or the header any path answers with headers and digest, any method."""
    async with LabEngine("a") as engine:
        asked = await call(engine, "PUT", "/any?x=1", b"abc", {"X-Lab-Echo": "1", "X-A": "\xe9"})
        echo = asked.json
        assert (echo["served_by"], echo["method"], echo["path"]) == ("a", "PUT", "/any?x=1")
        assert isinstance(echo["headers"], list)
        assert ["X-A", "\xe9"] in echo["headers"]
        assert echo["body_bytes"] == 3
        assert echo["has_whole_body"] is True
    async with LabEngine(echo=True) as engine:
        assert (await call(engine, "POST", CHAT, b"not json")).json["body_start"] == "not json"


async def test_a_client_that_asks_first_is_told_to_continue() -> None:
    """Expect: 100-continue gets its interim answer before the body is sent."""
    async with LabEngine() as engine, connected(engine) as connection:
        connection.send_head("POST", CHAT, {"expect": "100-continue"}, len(chat()))
        assert (await connection.head())[0] == 100
        connection.writer.write(chat())
        assert (await connection.answer()).status == 200
        assert (await connection.call("GET", "/health")).status == 200


async def test_too_long_a_body_is_413() -> None:
    """A body over the limit is read to its end and refused."""
    async with LabEngine() as engine, connected(engine) as connection:
        too_long = b"x" * (engine.options.max_body_bytes + 1)
        reply = await connection.call("POST", CHAT, too_long)
        assert reply.status == 413
        assert engine.requests[0].body_bytes == len(too_long)
        assert (await connection.call("GET", "/health")).status == 200


async def test_a_websocket_is_echoed() -> None:
    """Text messages come back by name of the engine until the client closes."""
    async with LabEngine("a") as engine:
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{engine.url}/v1/realtime") as socket,
        ):
            await socket.send_str("hello")
            assert await socket.receive_str() == "hello"
            await socket.send_bytes(b"ignored")
            assert engine.counters.active == 1
        await engine.until(lambda: engine.counters.active == 0)
        assert engine.counters.by_status == {101: 1}
        assert engine.counters.aborted == 0


async def test_an_upgrade_to_something_else_is_an_ordinary_request() -> None:
    """A POST that offers h2c is answered as any other."""
    async with LabEngine() as engine:
        headers = {
            "connection": "upgrade, http2-settings",
            "upgrade": "h2c",
            "http2-settings": "AA",
        }
        async with asyncio.timeout(5):
            assert (await call(engine, "POST", CHAT, chat(), headers)).status == 200
