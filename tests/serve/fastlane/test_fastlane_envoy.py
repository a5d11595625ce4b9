"""The fast lane behind a real Envoy: many streams, large bodies, one connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path

import aiohttp
import pytest
import yaml
from aiohttp import web

from extproc.lab.envoy import Envoy, running_envoy
from extproc.serve.fastlane.transport import FastlaneSettings, FastlaneTransport
from extproc.serve.pb.ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from extproc.serve.stream import StreamEnd, StreamHandler

pytestmark = pytest.mark.envoy

FILTERS = "type.googleapis.com/envoy.extensions.filters"
HTTP = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
BODY_BYTES = 3 * 1024 * 1024


class Marking:
    """Sets a header on the request to the number of bytes of its body."""

    def __init__(self, ends: list[StreamEnd]) -> None:
        self.ends = ends

    def receive(self, message: bytes) -> Sequence[bytes]:
        request = ProcessingRequest.FromString(message)
        answer = ProcessingResponse()
        match request.WhichOneof("request"):
            case "request_headers":
                answer.request_headers.SetInParent()
            case "request_body":
                mutation = answer.request_body.response.header_mutation
                option = mutation.set_headers.add()
                option.header.key = "x-size"
                option.header.raw_value = b"%d" % len(request.request_body.body)
            case _:
                answer.response_headers.SetInParent()
        return (answer.SerializeToString(),)

    def written(self) -> None: ...

    def end(self, why: StreamEnd) -> None:
        self.ends.append(why)


class Service:
    """A service of such streams."""

    def __init__(self) -> None:
        self.began = 0
        self.ends: list[StreamEnd] = []

    def ext_proc(self) -> StreamHandler:
        self.began += 1
        return Marking(self.ends)

    def access_log(self) -> StreamHandler:
        return Marking([])

    def health(self, service: str) -> bool | None:
        return not service

    def watch_health(self, changed: Callable[[], None]) -> Callable[[], None]:
        return changed


def config(socket: Path, upstream: int) -> str:
    """A listener whose requests and their bodies go through the service first."""

    def cluster(name: str, address: object, **more: object) -> dict[str, object]:
        endpoints = [{"lb_endpoints": [{"endpoint": {"address": address}}]}]
        load = {"cluster_name": name, "endpoints": endpoints}
        return {"name": name, "type": "STATIC", "load_assignment": load, **more}

    processor = {
        "@type": f"{FILTERS}.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "processor"}},
        "processing_mode": {"request_body_mode": "BUFFERED"},
        "message_timeout": "10s",
    }
    manager = {
        "@type": f"{FILTERS}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "test",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "upstream"}}],
                }
            ]
        },
        "http_filters": [
            {"name": "processor", "typed_config": processor},
            {
                "name": "router",
                "typed_config": {"@type": f"{FILTERS}.http.router.v3.Router"},
            },
        ],
    }
    http2: dict[str, object] = {"explicit_http_config": {"http2_protocol_options": {}}}
    listener = {
        "name": "test",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}},
        "per_connection_buffer_limit_bytes": 2 * BODY_BYTES,
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    clusters = [
        cluster("upstream", {"socket_address": {"address": "127.0.0.1", "port_value": upstream}}),
        cluster(
            "processor",
            {"pipe": {"path": str(socket)}},
            typed_extension_protocol_options={
                HTTP: {"@type": f"type.googleapis.com/{HTTP}", **http2}
            },
        ),
    ]
    admin = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}}
    return yaml.safe_dump(
        {"admin": admin, "static_resources": {"listeners": [listener], "clusters": clusters}}
    )


async def echo_size(request: web.Request) -> web.Response:
    """The upstream's answer: what the service found."""
    await request.read()
    return web.Response(text=request.headers.get("x-size", "none"))


async def ask(session: aiohttp.ClientSession, url: str, size: int) -> str:
    """What a request with a body of `size` bytes is answered."""
    async with session.post(url, data=BytesIO(bytes(size))) as reply:
        assert reply.status == 200
        return await reply.text()


async def connections(envoy: Envoy) -> int:
    """How many connections Envoy has made to the service."""
    stats = await envoy.stats(r"cluster\.processor\.upstream_cx_total")
    return stats["cluster.processor.upstream_cx_total"]


@asynccontextmanager
async def upstream() -> AsyncIterator[int]:
    """The port of a server that answers every POST with `echo_size`."""
    application = web.Application(client_max_size=2 * BODY_BYTES)
    application.router.add_post("/", echo_size)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving(service: Service, path: Path) -> AsyncIterator[FastlaneTransport]:
    """A started transport on the socket `path`, stopped at the end."""
    transport = FastlaneTransport(service, FastlaneSettings(f"unix:{path}"))
    await transport.start()
    try:
        yield transport
    finally:
        await transport.stop(0)


async def test_envoy_is_served(tmp_path: Path) -> None:
    """Hundreds of streams, each of which Envoy resets, and large bodies, on one connection."""
    service = Service()
    socket = tmp_path / "socket"
    async with (
        serving(service, socket) as transport,
        upstream() as port,
        running_envoy(config(socket, port), tmp_path, log=tmp_path / "envoy.log") as envoy,
        aiohttp.ClientSession() as session,
    ):
        url = f"http://127.0.0.1:{await envoy.listener_port('test')}/"
        sizes = [*range(1, 41), BODY_BYTES]
        for _ in range(10):
            answers = await asyncio.gather(*(ask(session, url, size) for size in sizes))
            assert answers == [str(size) for size in sizes]
        assert await connections(envoy) == 1
        async with asyncio.timeout(5):
            while len(service.ends) < service.began:
                await asyncio.sleep(0.01)
        await asyncio.wait_for(transport.stop(5), 3)
    assert service.began == 410
    assert StreamEnd.FAILED not in service.ends
