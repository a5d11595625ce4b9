"""The `/lab/` pages of a simulated engine: what it saw, and what is to happen to it.

GET    /lab/counters          counts, and what the engine model does now
GET    /lab/requests          the last API requests and probes, oldest first
POST   /lab/reset             counts start anew, nothing is remembered
GET    /lab/faults            what goes wrong now
POST   /lab/faults            a fault, or a list of them, goes wrong from now on
DELETE /lab/faults            nothing goes wrong any more, connections are accepted
POST   /lab/hold              no token comes any more
POST   /lab/release           tokens come again
POST   /lab/show              numbers for the metrics page: running, waiting, kv_usage_ratio
POST   /lab/health            {"is_healthy": false} makes the health check answer 503
"""

from __future__ import annotations

import dataclasses
from typing import Final, Protocol

import msgspec
from aiohttp import web

from extproc.lab.desk import Desk, Shown
from extproc.lab.faults import Fault, parse_faults
from extproc.lab.voice import json_bytes

PREFIX: Final = "/lab/"
_LIMIT_BYTES: Final = 1024 * 1024


class Controlled(Protocol):
    """The engine that the pages are about."""

    @property
    def desk(self) -> Desk:
        """Its state."""
        ...

    def inject(self, *faults: Fault) -> None:
        """The faults go wrong from now on."""
        ...

    async def heal(self) -> None:
        """Nothing goes wrong any more."""
        ...


class _Health(msgspec.Struct, forbid_unknown_fields=True):
    is_healthy: bool


async def control(engine: Controlled, request: web.BaseRequest) -> web.StreamResponse:
    """The page, or the command has been carried out; 400 says what is wrong with one."""
    body = await _body(request)
    name = request.path.removeprefix(PREFIX)
    if request.method == "GET":
        shown = _read(engine.desk, name)
        return _json({"detail": "Not Found"}, status=404) if shown is None else _json(shown)
    if (request.method, name) == ("DELETE", "faults"):
        await engine.heal()
        return _json({"done": True})
    try:
        is_known = request.method == "POST" and _carry_out(engine, name, body)
    except (ValueError, msgspec.DecodeError) as error:
        return _json({"detail": str(error)}, status=400)
    return _json({"done": is_known}, status=200 if is_known else 404)


def _read(desk: Desk, name: str) -> object:
    match name:
        case "counters":
            return _counters(desk)
        case "requests":
            return {
                "requests": [received.as_json() for received in desk.records.requests],
                "probes": [received.as_json() for received in desk.records.probes],
            }
        case "faults":
            return msgspec.to_builtins(desk.faults.armed())
        case _:
            return None


def _carry_out(engine: Controlled, name: str, body: bytes) -> bool:
    desk = engine.desk
    match name:
        case "reset":
            desk.records.reset()
        case "faults":
            engine.inject(*parse_faults(body))
        case "hold":
            desk.pump.hold()
        case "release":
            desk.pump.release()
        case "show":
            desk.shown = msgspec.json.decode(body or b"{}", type=Shown)
        case "health":
            desk.is_healthy = msgspec.json.decode(body, type=_Health).is_healthy
        case _:
            return False
    return True


def _counters(desk: Desk) -> dict[str, object]:
    readings = [engine.reading() for engine in desk.pump.engines]
    totals = [
        {
            "running": reading.running,
            "waiting": reading.waiting,
            "kv_usage_ratio": reading.kv_usage_ratio,
            "prompt_tokens": reading.totals.prompt_tokens,
            "generation_tokens": reading.totals.generation_tokens,
            "preemptions": reading.totals.preemptions,
            "prefix_queries": reading.totals.prefix_queries,
            "prefix_hits": reading.totals.prefix_hits,
            "finished": {reason.value: count for reason, count in reading.finished.items()},
        }
        for reading in readings
    ]
    shown = dataclasses.asdict(desk.shown)
    counters = desk.records.counters.as_json()
    return {"name": desk.name, **counters, "is_held": desk.pump.is_held, "shown": shown} | {
        "engines": totals
    }


async def _body(request: web.BaseRequest) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.content.iter_any():
        size += len(chunk)
        if size <= _LIMIT_BYTES:
            chunks.append(chunk)
    return b"".join(chunks)


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(status=status, body=json_bytes(value), content_type="application/json")
