"""The pages by which another process watches and steers a simulated engine."""

from __future__ import annotations

import asyncio
import json

from lab_client import CHAT, call, chat

from extproc.lab.engine_http import LabEngine


async def post(engine: LabEngine, name: str, value: object = None) -> int:
    """The status of a command."""
    body = b"" if value is None else json.dumps(value).encode()
    return (await call(engine, "POST", f"/lab/{name}", body)).status


async def test_counters_are_told_and_the_asking_is_not_counted() -> None:
    """The page has the counts, the engine model's state and nothing of itself."""
    async with LabEngine("a") as engine:
        await call(engine, "POST", CHAT, chat(max_tokens=2))
        told = (await call(engine, "GET", "/lab/counters")).json
        assert told["name"] == "a"
        assert (told["requests"], told["served"], told["active"]) == (1, 1, 0)
        assert told["by_status"] == {"200": 1}
        (model,) = told["engines"]
        assert model["finished"] == {"stop": 0, "length": 1, "abort": 0}
        assert model["generation_tokens"] == 2
        assert engine.counters.by_path == {CHAT: 1}


async def test_requests_are_told_and_forgotten() -> None:
    """After a reset nothing is remembered but what is in progress."""
    async with LabEngine() as engine:
        await call(engine, "POST", CHAT, chat(), {"X-Mark": "\xfc"})
        await call(engine, "GET", "/metrics")
        told = (await call(engine, "GET", "/lab/requests")).json
        (request,) = told["requests"]
        assert ["X-Mark", "\xfc"] in request["headers"]
        assert request["body_bytes"] == len(chat())
        assert request["outcome"] == "answered"
        assert [p["path"] for p in told["probes"]] == ["/metrics"]
        engine.hold()
        task = asyncio.create_task(call(engine, "POST", CHAT, chat()))
        await engine.until(lambda: engine.counters.active == 1)
        assert await post(engine, "reset") == 200
        assert (engine.counters.requests, engine.counters.active) == (0, 1)
        assert not engine.requests
        engine.release()
        await task
        assert engine.counters.active == 0
        assert engine.counters.served == 1


async def test_faults_come_and_go() -> None:
    """One or several are added, shown with what is left of them, and taken away."""
    async with LabEngine() as engine:
        assert await post(engine, "faults", {"kind": "status", "status": 429, "times": 2}) == 200
        assert await post(engine, "faults", [{"kind": "hang", "path": "/x"}]) == 200
        assert (await call(engine, "POST", CHAT, chat())).status == 429
        told = json.loads((await call(engine, "GET", "/lab/faults")).body)
        assert [(fault["kind"], fault["times"]) for fault in told] == [
            ("status", 1),
            ("hang", None),
        ]
        assert (await call(engine, "DELETE", "/lab/faults")).status == 200
        assert (await call(engine, "POST", CHAT, chat())).status == 200


async def test_a_wrong_fault_is_refused_with_the_reason() -> None:
    """Nothing changes, and the answer says what is wrong."""
    async with LabEngine() as engine:
        reply = await call(engine, "POST", "/lab/faults", b'{"kind":"status","statsu":1}')
        assert reply.status == 400
        assert "statsu" in str(reply.json["detail"])
        assert engine.faults.armed() == []


async def test_time_is_held_and_released() -> None:
    """Holding and releasing work from outside."""
    async with LabEngine() as engine:
        assert await post(engine, "hold") == 200
        task = asyncio.create_task(call(engine, "POST", CHAT, chat()))
        await engine.until(lambda: engine.running == 1)
        assert (await call(engine, "GET", "/lab/counters")).json["is_held"] is True
        assert await post(engine, "release") == 200
        assert (await task).status == 200


async def test_the_metrics_page_can_be_told_what_to_show() -> None:
    """Shown numbers stay until the truth is asked for again."""
    async with LabEngine() as engine:
        assert await post(engine, "show", {"running": 3, "kv_usage_ratio": 0.5}) == 200
        page = (await call(engine, "GET", "/metrics")).body
        assert b'num_requests_running{engine="0",model_name="m"} 3.0' in page
        assert b'kv_cache_usage_perc{engine="0",model_name="m"} 0.5' in page
        assert await post(engine, "show") == 200
        page = (await call(engine, "GET", "/metrics")).body
        assert b'num_requests_running{engine="0",model_name="m"} 0.0' in page
        assert await post(engine, "show", {"running": "many"}) == 400


async def test_health_can_be_taken_away() -> None:
    """The health check follows, nothing else does."""
    async with LabEngine() as engine:
        assert await post(engine, "health", {"is_healthy": False}) == 200
        assert (await call(engine, "GET", "/health")).status == 503
        assert (await call(engine, "POST", CHAT, chat())).status == 200
        assert await post(engine, "health", {"is_healthy": 1}) == 400


async def test_unknown_pages_are_404() -> None:
    """A name that is none is refused by every method."""
    async with LabEngine() as engine:
        for method in ("GET", "POST", "DELETE", "PUT"):
            assert (await call(engine, method, "/lab/nothing", b"")).status == 404
        assert (await call(engine, "POST", "/lab/faults", b"x" * 2_000_000)).status == 400
