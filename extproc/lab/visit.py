"""One request at a simulated engine: which of its pages or calls it gets, and by what fault."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from aiohttp import WSMsgType, web

from extproc.lab.asks import Api, Problem
from extproc.lab.delivery import JSON, SERVED_BY, BadEndError, Delivery, forever
from extproc.lab.desk import Desk
from extproc.lab.faults import CutBy, FaultKind
from extproc.lab.inference import infer
from extproc.lab.records import Outcome
from extproc.lab.voice import json_bytes
from extproc.lab.wire import Spent

ECHO: Final = "x-lab-echo"
PROBES: Final = frozenset(
    {"/", "/health", "/health_generate", "/ping", "/load", "/version", "/props"}
)

_POST: Final = frozenset({"POST"})
_METHODS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        **{api.value: _POST for api in Api},
        "/v1/models": frozenset({"GET", "HEAD"}),
        "/v1/load_lora_adapter": _POST,
        "/v1/unload_lora_adapter": _POST,
    }
)
KNOWN_PATHS: Final = frozenset({*_METHODS, *PROBES, "/v1/realtime"})


class Visit:
    """One request from its arrival to the end of its answer."""

    def __init__(self, desk: Desk, delivery: Delivery) -> None:
        self._desk = desk
        self._delivery = delivery
        self._request = delivery.request

    async def serve(self) -> web.StreamResponse:
        """The request is answered, or the fault has had its way.

        Raises:
            OSError: the client is gone; so does CancelledError.
        """
        try:
            return await self._serve()
        except BadEndError:
            return Spent()

    async def _serve(self) -> web.StreamResponse:
        delivery = self._delivery
        if delivery.kind is FaultKind.RESET:
            delivery.end_badly(CutBy.RST)
        if delivery.kind is FaultKind.EARLY_STATUS:
            return await delivery.planned()
        if self._request.headers.get("upgrade", "").lower() == "websocket":
            return await self._converse()
        body = await delivery.read(self._desk.options.max_body_bytes)
        match delivery.kind:
            case FaultKind.HANG:
                await forever()
            case FaultKind.RESET_AFTER_BODY:
                delivery.end_badly(CutBy.RST)
            case FaultKind.STATUS:
                return await delivery.planned()
            case FaultKind.SLOW_HEADERS:
                await delivery.wait()
            case FaultKind.INFORMATIONAL:
                delivery.inform()
            case _:
                pass
        if body is None:
            problem = Problem(413, "Request Entity Too Large", "the body is too large")
            return await delivery.fail(problem)
        return await self._route(body)

    async def _route(self, body: bytes) -> web.StreamResponse:
        path, delivery = self._request.path, self._delivery
        if path in PROBES:
            return await self._probe(path)
        if self._desk.options.echo or self._request.headers.get(ECHO):
            echo = {"served_by": self._desk.name, **delivery.received.as_json()}
            return await delivery.json(echo)
        return await self._call(path, self._request.method, body)

    async def _call(self, path: str, method: str, body: bytes) -> web.StreamResponse:
        delivery = self._delivery
        if path.startswith("/v1/") and not self._has_key():
            return await delivery.fail(Problem(401, "invalid_request_error", "the key is wrong"))
        allowed = _METHODS.get(path, frozenset())
        if method not in allowed:
            status, detail = (405, "Method Not Allowed") if allowed else (404, "Not Found")
            return await delivery.reply(status, JSON, json_bytes({"detail": detail}))
        match path:
            case "/v1/models":
                return await delivery.json(self._models())
            case "/v1/load_lora_adapter" | "/v1/unload_lora_adapter":
                return await self._load(body, is_loading=path == "/v1/load_lora_adapter")
            case _:
                return await infer(self._desk, delivery, Api(path), body)

    async def _probe(self, path: str) -> web.StreamResponse:
        desk, delivery = self._desk, self._delivery
        readings = desk.readings()
        match path:
            case "/load":
                load = sum(r.running + r.waiting for r in readings)
                return await delivery.json({"server_load": load})
            case "/version":
                return await delivery.json({"version": "lab"})
            case "/props":
                slots = sum(r.max_running for r in readings)
                context = {"n_ctx": desk.options.settings.longest_request_tokens}
                props = {"total_slots": slots, "default_generation_settings": context}
                return await delivery.json(props)
            case _:
                return await delivery.reply(200 if desk.is_healthy else 503, {}, b"")

    async def _converse(self) -> web.StreamResponse:
        """Every text message comes back, until the client closes."""
        socket = web.WebSocketResponse()
        socket.headers[SERVED_BY] = self._desk.name
        await socket.prepare(self._request)
        self._delivery.received.status = 101
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                await socket.send_str(message.data)
        self._delivery.received.outcome = Outcome.ANSWERED
        return socket

    async def _load(self, body: bytes, *, is_loading: bool) -> web.StreamResponse:
        name = _lora_name(body)
        adapters = self._desk.adapters
        if name is None:
            problem = Problem(400, "BadRequestError", "lora_name is missing", "lora_name")
            return await self._delivery.fail(problem)
        if is_loading:
            adapters[name] = self._desk.options.models[0]
        elif adapters.pop(name, None) is None:
            problem = Problem(404, "NotFoundError", "no such adapter", "lora_name")
            return await self._delivery.fail(problem)
        return await self._delivery.reply(200, {"content-type": "text/plain"}, b"Success")

    def _models(self) -> Mapping[str, object]:
        options = self._desk.options
        base = {"object": "model", "created": 0, "owned_by": options.dialect.value}
        longest = options.settings.longest_request_tokens
        cards: list[Mapping[str, object]] = [
            {"id": name, **base, "root": name, "parent": None, "max_model_len": longest}
            for name in options.models
        ]
        cards += [
            {"id": name, **base, "root": name, "parent": parent}
            for name, parent in self._desk.adapters.items()
        ]
        return {"object": "list", "data": cards}

    def _has_key(self) -> bool:
        options = self._desk.options
        if options.key is None:
            return True
        is_bearer = options.key_header.lower() == "authorization"
        wanted = f"Bearer {options.key}" if is_bearer else options.key
        given = self._request.headers.getall(options.key_header, [])
        return any(
            hmac.compare_digest(one.encode("utf-8", "surrogateescape"), wanted.encode())
            for one in given
        )


def _lora_name(body: bytes) -> str | None:
    try:
        fields: object = json.loads(body)
    except ValueError:
        return None
    name = fields.get("lora_name") if isinstance(fields, dict) else None
    return name if isinstance(name, str) and name else None
