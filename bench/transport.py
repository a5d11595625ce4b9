"""CPU per request of each transport behind real Envoy, with a service that does nothing.

What the service answers is fixed, so that what is left is the transport: HTTP/2, gRPC, the socket.
The lanes take turns on one nginx; medians over the rounds. With JSON=1 the last line is one JSON
object. ROUNDS, SECONDS and CONNECTIONS (comma separated) change the run.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import load
import uvloop
import yaml
from rounds import Row, finish, in_turns, measure, numbers, show, summed_up
from subjects import Subject

from extproc.lab.envoy import running_envoy
from extproc.lab.processes import Child, free_port
from extproc.serve.fastlane.transport import FastlaneSettings, FastlaneTransport
from extproc.serve.grpcio import GrpcSettings, GrpcTransport
from extproc.serve.pb.ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from extproc.serve.stream import StreamEnd, StreamHandler, Transport

LANES = ("fastlane", "grpcio")
_HCM = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_EXT_PROC = "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"
_ROUTER = "envoy.extensions.filters.http.router.v3.Router"
_HTTP = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


class Noop:
    """Reads each message as a real one does and sets three headers on the request."""

    def receive(self, message: bytes) -> Sequence[bytes]:
        """The reply that a processor of three headers gives."""
        request = ProcessingRequest.FromString(message)
        answer = ProcessingResponse()
        if request.WhichOneof("request") != "request_headers":
            answer.response_headers.SetInParent()
            return (answer.SerializeToString(),)
        known = {item.key: item.raw_value for item in request.request_headers.headers.headers}
        common = answer.request_headers.response
        common.clear_route_cache = True
        for name in ("x-cluster", "x-hop", "x-id"):
            option = common.header_mutation.set_headers.add()
            option.header.key = name
            option.header.raw_value = known.get("x-request-id", b"1")
        return (answer.SerializeToString(),)

    def written(self) -> None:
        """Nothing is done."""

    def end(self, why: StreamEnd) -> None:
        """Nothing is done."""


class Service:
    """Carries streams that do nothing."""

    def ext_proc(self) -> StreamHandler:
        """A handler that does nothing of use."""
        return Noop()

    def access_log(self) -> StreamHandler:
        """A handler that nothing is sent to."""
        return Noop()

    def health(self, service: str) -> bool | None:  # noqa: ARG002 - all are well
        """All is well."""
        return True

    def watch_health(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Nothing ever changes."""
        return changed


async def serve(lane: str, address: str) -> None:
    """Serves until the process is ended."""
    transport: Transport
    if lane == "grpcio":
        transport = GrpcTransport(Service(), GrpcSettings(address))
    else:
        transport = FastlaneTransport(Service(), FastlaneSettings(address))
    await transport.start()
    await asyncio.Event().wait()


def typed(name: str, value: dict[str, object]) -> dict[str, object]:
    """A message that says what it is."""
    return {"@type": f"type.googleapis.com/{name}", **value}


def cluster(name: str, address: dict[str, object], **more: object) -> dict[str, object]:
    """A cluster of one endpoint."""
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": address}}]}]
    return {
        "name": name,
        "type": "STATIC",
        "load_assignment": {"cluster_name": name, "endpoints": endpoints},
        **more,
    }


def envoy_config(socket: Path, upstream: int) -> str:
    """One listener with an external processor on `socket`, in front of port `upstream`."""
    processor = typed(
        _EXT_PROC,
        {
            "grpc_service": {"envoy_grpc": {"cluster_name": "processor"}},
            "processing_mode": {"request_header_mode": "SEND", "response_header_mode": "SEND"},
            "message_timeout": "5s",
        },
    )
    manager = typed(
        _HCM,
        {
            "stat_prefix": "bench",
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
                {"name": "router", "typed_config": typed(_ROUTER, {})},
            ],
        },
    )
    http2 = typed(_HTTP, {"explicit_http_config": {"http2_protocol_options": {}}})
    listener = {
        "name": "bench",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}},
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    nginx: dict[str, object] = {"address": "127.0.0.1", "port_value": upstream}
    clusters = [
        cluster("upstream", {"socket_address": nginx}),
        cluster(
            "processor",
            {"pipe": {"path": str(socket)}},
            typed_extension_protocol_options={_HTTP: http2},
        ),
    ]
    admin = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}}
    return yaml.safe_dump(
        {"admin": admin, "static_resources": {"listeners": [listener], "clusters": clusters}}
    )


@asynccontextmanager
async def behind_envoy(lane: str, command: list[str], upstream: int) -> AsyncIterator[Subject]:
    """Envoy with one worker and a transport of its own; `command` gets the socket's address."""
    with TemporaryDirectory(prefix="llmgw-bench-") as name:
        folder = Path(name)
        socket = folder / "socket"
        child = Child(lane, [*command, f"unix:{socket}"])
        await child.start()
        try:
            await child.until(socket.exists, 10)
            config = envoy_config(socket, upstream)
            async with running_envoy(config, folder, log=folder / "envoy.log") as envoy:
                url = f"http://127.0.0.1:{await envoy.listener_port('bench')}"
                yield Subject(lane, url, {"envoy": envoy.pid, "service": child.pid})
        finally:
            await child.stop()


async def main() -> None:
    """The table is on the screen."""
    rounds = int(os.environ.get("ROUNDS", "3"))
    seconds = int(os.environ.get("SECONDS", "4"))
    upstream = free_port()
    async with AsyncExitStack() as exits:
        exits.enter_context(load.nginx(upstream))
        compared = [
            await exits.enter_async_context(
                behind_envoy(lane, [sys.executable, __file__, lane], upstream)
            )
            for lane in LANES
        ]
        rows = []
        for connections in numbers("CONNECTIONS", "1,64"):

            def once(subject: Subject, number: int, connections: int = connections) -> Row:
                return measure(subject, connections, seconds if number else 1)

            found = await in_turns(compared, rounds, f"{connections} connections", once)
            rows += [summed_up(name, connections, some) for name, some in found.items()]
    show(rows)
    finish({"rows": rows})


if __name__ == "__main__":
    if len(sys.argv) == 3:
        uvloop.run(serve(sys.argv[1], sys.argv[2]))
    else:
        asyncio.run(main())
