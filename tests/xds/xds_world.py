"""What the tests of the rendered Envoy share: configurations, a raw client, a scripted service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import grpc.aio

from extproc import headers
from extproc.config.values import Config, Listener, Service, Steering
from extproc.lab.envoy import Envoy, running_envoy
from extproc.routing.catalog import ModelEntry
from extproc.routing.endpoint import Info, Kind, Url
from extproc.serve.pb.access_log_pb2 import HTTPAccessLogEntry, StreamAccessLogsMessage
from extproc.serve.pb.base_pb2 import HeaderValueOption
from extproc.serve.pb.ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from extproc.xds.bootstrap import bootstrap
from extproc.xds.render import render
from extproc.xds.tree import plain

CHAT = "/v1/chat/completions"
MESSAGES = b'"messages":[{"role":"user","content":"hi"}]'
SECONDS = 10.0


def endpoint(name: str, url: str, *models: str, kind: Kind = Kind.ENGINE) -> Info:
    """An endpoint with the defaults of its kind."""
    engine = "vllm" if kind is Kind.ENGINE else "none"
    return Info(name, Url.parse(url), models, kind=kind, engine=engine)


def config(*endpoints: Info, folder: Path | None = None, models: Sequence[str] = ()) -> Config:
    """A configuration on free ports; the service is a Unix socket in `folder`.

    Its models are those that the endpoints serve, or `models`.
    """
    names = models or sorted({name for info in endpoints for name in info.models})
    return Config(
        cluster_id="gw",
        endpoints=endpoints,
        models=tuple(ModelEntry(name) for name in names),
        listener=Listener(port=0, admin_port=0),
        service=Service(address=f"unix:{(folder or Path('/nowhere')) / 'service.sock'}"),
    )


def rendered(configuration: Config, steering: Steering | None = None) -> Any:
    """The bootstrap as JSON values, without the detour by YAML."""
    return plain(bootstrap(configuration, steering))


def chat(model: str | None) -> bytes:
    """A small body that names `model`."""
    named = b"" if model is None else b'"model":%s,' % json.dumps(model).encode()
    return b"{%s%s}" % (named, MESSAGES)


@asynccontextmanager
async def gateway(
    configuration: Config, folder: Path, environ: Mapping[str, str] | None = None
) -> AsyncIterator[Gateway]:
    """A real Envoy on what is rendered for `configuration`."""
    async with running_envoy(
        render(configuration), folder, log=folder / "envoy.log", environ=environ
    ) as envoy:
        yield Gateway(envoy, await envoy.listener_port())


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer, header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running Envoy and the port that clients use."""

    envoy: Envoy
    port: int

    async def ask(
        self,
        method: str,
        path: str,
        extra: Sequence[tuple[str, str]] | Mapping[str, str] = (),
        body: bytes | None = None,
    ) -> Reply:
        """The answer to one request, whose path is sent as it is."""
        pairs = list(extra.items()) if isinstance(extra, Mapping) else list(extra)
        lines = [f"{method} {path} HTTP/1.1", "host: gw"]
        if body is not None:
            names = {name for name, _ in pairs}
            pairs += [] if "content-type" in names else [("content-type", "application/json")]
            pairs += [] if "content-length" in names else [("content-length", str(len(body)))]
        lines += [f"{name}: {value}" for name, value in pairs]
        return await self.send(("\r\n".join(lines) + "\r\n\r\n").encode() + (body or b""))

    async def post(
        self,
        model: str | None = None,
        extra: Sequence[tuple[str, str]] | Mapping[str, str] = (),
        path: str = CHAT,
    ) -> Reply:
        """The answer to a small request whose body names `model`."""
        return await self.ask("POST", path, extra, chat(model))

    async def send(self, request: bytes, *later: bytes, pause: float = 0.0) -> Reply:
        """The answer to the bytes `request`, then `later`, each after `pause` seconds."""
        async with asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                writer.write(request)
                for part in later:
                    await asyncio.sleep(pause)
                    writer.write(part)
                    await writer.drain()
                return await _reply(reader, has_body=not request.startswith(b"HEAD "))
            finally:
                writer.close()


async def _reply(reader: asyncio.StreamReader, *, has_body: bool) -> Reply:
    head = b"HTTP/1.1 100"
    while head.startswith(b"HTTP/1.1 100"):
        head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    pairs = (line.partition(":") for line in lines)
    found = {name.lower(): value.strip() for name, _, value in pairs}
    status = int(first.split()[1])
    if not has_body or status in {101, 204, 304}:
        return Reply(status, found, b"")
    if found.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
        return Reply(status, found, body)
    return Reply(status, found, await reader.readexactly(int(found.get("content-length", "0"))))


def steer(
    *cluster_names: str, decision: str = "d-1", extra: Mapping[str, str] | None = None
) -> ProcessingResponse:
    """What the service says to send a request to these clusters in turn."""
    reply = ProcessingResponse()
    common = reply.request_headers.response
    common.clear_route_cache = True
    told = {
        headers.CLUSTER: cluster_names[0],
        headers.DECISION: decision,
        headers.MAX_RETRIES: str(len(cluster_names) - 1),
        **(extra or {}),
    }
    for name, value in told.items():
        option = common.header_mutation.set_headers.add()
        option.header.key = name
        option.header.raw_value = value.encode()
        option.append_action = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    spaces = reply.dynamic_metadata.fields
    groups = spaces[headers.ROUTE_NAMESPACE].struct_value.fields["priority_groups"].list_value
    for attempt, name in enumerate(cluster_names):
        group = groups.values.add().struct_value.fields
        group["name"].string_value = b"%d" % attempt
        cluster = group["clusters"].list_value.values.add().struct_value.fields
        cluster["cluster_name"].string_value = name.encode()
        cluster["weight"].number_value = 1
    return reply


def pick(*destinations: str) -> ProcessingResponse:
    """What the service says to send a request to these addresses in turn."""
    listed = ",".join(destinations)
    reply = steer("unused", extra={headers.DESTINATION: listed})
    option = reply.request_headers.response.header_mutation.set_headers
    for one in option:
        if one.header.key == headers.MAX_RETRIES:
            one.header.raw_value = b"%d" % (len(destinations) - 1)
    space = reply.dynamic_metadata.fields[headers.PICKER_NAMESPACE].struct_value
    space.fields[headers.DESTINATION].string_value = listed.encode()
    return reply


def immediate(status: int, body: bytes, details: str = "said_by_us") -> ProcessingResponse:
    """What the service says to have Envoy answer with `body`."""
    reply = ProcessingResponse()
    reply.immediate_response.status.code = status
    reply.immediate_response.body = body
    reply.immediate_response.details = details
    return reply


@dataclass(slots=True)
class Seen:
    """What one ext_proc stream said: of the request, of its body's model, of the response."""

    request: dict[str, bytes] = field(default_factory=dict)
    body_model: bytes | None = None
    response: dict[str, bytes] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)
    kinds: list[str] = field(default_factory=list)


class ScriptedService:
    """An ext_proc and access-log server that says what it is told to say.

    It listens on a Unix socket, or on an address whose port it chooses.
    `answer` replies to request headers, `answer_response` to response headers (None: go on), once
    `may_answer_response` is set, which it is. One that is `silent` takes streams and never replies.
    """

    def __init__(self, place: Path | str, *, silent: bool = False) -> None:
        self.port = 0
        self._silent = silent
        self._address = f"unix:{place}" if isinstance(place, Path) else place
        self._server: grpc.aio.Server | None = None
        self.answer: Callable[[Seen], ProcessingResponse | None] = lambda _: None
        self.answer_response: Callable[[Seen], ProcessingResponse | None] = lambda _: None
        self.seen: list[Seen] = []
        self.logged: list[HTTPAccessLogEntry] = []
        self.arrived = asyncio.Event()
        self.answering = asyncio.Event()
        self.may_answer_response = asyncio.Event()
        self.may_answer_response.set()

    async def __aenter__(self) -> Self:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(
                    "envoy.service.ext_proc.v3.ExternalProcessor",
                    {
                        "Process": grpc.stream_stream_rpc_method_handler(
                            self._process,
                            request_deserializer=ProcessingRequest.FromString,
                            response_serializer=ProcessingResponse.SerializeToString,
                        )
                    },
                ),
                grpc.method_handlers_generic_handler(
                    "envoy.service.accesslog.v3.AccessLogService",
                    {
                        "StreamAccessLogs": grpc.stream_unary_rpc_method_handler(
                            self._log, request_deserializer=StreamAccessLogsMessage.FromString
                        )
                    },
                ),
            ]
        )
        self.port = server.add_insecure_port(self._address)
        await server.start()
        self._server = server
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Nobody answers any more; open streams are cut."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def entries(self, decision: str, count: int) -> list[HTTPAccessLogEntry]:
        """The first `count` log entries of one decision, as soon as they are there."""
        async with asyncio.timeout(SECONDS):
            while len(found := self._logged_of(decision)) < count:
                self.arrived.clear()
                await self.arrived.wait()
        return found[:count]

    def _logged_of(self, decision: str) -> list[HTTPAccessLogEntry]:
        return [
            entry
            for entry in self.logged
            if entry.common_properties.custom_tags.get("decision") == decision.encode()
        ]

    async def until_answering(self) -> None:
        """Some request's answer has begun."""
        async with asyncio.timeout(SECONDS):
            await self.answering.wait()

    async def _process(
        self, messages: AsyncIterator[ProcessingRequest], _: object
    ) -> AsyncIterator[ProcessingResponse]:
        seen = Seen()
        self.seen.append(seen)
        async for message in messages:
            kind = message.WhichOneof("request") or ""
            seen.kinds.append(kind)
            said: ProcessingResponse | None = None
            if kind == "request_headers":
                listed = message.request_headers.headers.headers
                seen.request = {one.key: one.raw_value for one in listed}
                if headers.BODY_NAMESPACE in message.metadata_context.filter_metadata:
                    space = message.metadata_context.filter_metadata[headers.BODY_NAMESPACE]
                    seen.body_model = space.fields["model"].string_value
                if self._silent:
                    await asyncio.Event().wait()
                said = self.answer(seen)
            elif kind == "response_headers":
                listed = message.response_headers.headers.headers
                seen.response = {one.key: one.raw_value for one in listed}
                seen.attributes = {
                    name for told in message.attributes.values() for name in told.fields
                }
                self.answering.set()
                await self.may_answer_response.wait()
                said = self.answer_response(seen)
            if said is None:
                said = ProcessingResponse()
                getattr(said, kind).SetInParent()
            yield said

    async def _log(self, messages: AsyncIterator[StreamAccessLogsMessage], _: object) -> bytes:
        async for message in messages:
            self.logged.extend(message.http_logs.log_entry)
            self.arrived.set()
        return b""


def steered_by(configuration: Config, steering: Steering) -> Config:
    """`configuration` with another steering."""
    return replace(configuration, steering=steering)
