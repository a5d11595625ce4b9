"""The service as a process: its pages, its health over gRPC, and a second one beside it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import aiohttp
import grpc.aio
import yaml
from case_world import World, fresh, until

from extproc.lab.processes import Child, free_port
from extproc.serve.pb.health_pb2 import HealthCheckRequest, HealthCheckResponse
from extproc.xds.render import render

CHECK: Final = "/grpc.health.v1.Health/Check"
READY_SECONDS: Final = 20.0
_NAME: Final = "replicas.test:1"


def command(world: World, address: str, http_address: str) -> list[str]:
    """The command line of a service on the world's configuration, at other addresses."""
    return [
        *(sys.executable, "-m", "extproc.cli.llmgw", "serve"),
        f"--config={world.stack.config.file}",
        f"--address={address}",
        f"--http-address={http_address}",
    ]


@dataclass(slots=True)
class Service:
    """One service process and where it answers."""

    child: Child
    address: str
    http_url: str

    async def status(self, path: str) -> int | None:
        """The status of one of its pages; None when nobody answers."""
        timeout = aiohttp.ClientTimeout(total=2)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(self.http_url + path) as response,
            ):
                return response.status
        except (OSError, aiohttp.ClientError, TimeoutError):
            return None

    async def is_ready(self) -> bool:
        """Whether new requests are welcome."""
        return await self.status("/ready") == 200

    async def start(self) -> None:
        """It runs and is ready."""
        await self.child.start()
        await until(self.is_ready, "the service is ready", READY_SECONDS)


def first(world: World) -> Service:
    """The service that the world has anyway."""
    return Service(world.stack.service, world.stack.config.service.address, world.stack.service_url)


@asynccontextmanager
async def second(world: World) -> AsyncIterator[Service]:
    """Another service on the same configuration, which Envoy asks in turn with the first.

    Envoy begins anew, and knows both from then on.
    """
    address = f"unix:{world.stack.folder}/{fresh('second')}.sock"
    http_address = f"127.0.0.1:{free_port()}"
    child = Child("the second service", command(world, address, http_address))
    service = Service(child, address, f"http://{http_address}")
    file = world.stack.folder / "envoy.yaml"
    try:
        await service.start()
        file.write_text(_rendered(world, address))
        await _restart_envoy(world)
        yield service
    finally:
        await child.kill()


def _rendered(world: World, address: str) -> str:
    """Envoy's configuration for a service behind a name, which two processes answer to."""
    config = world.stack.config
    behind_a_name = replace(config, service=replace(config.service, envoy_address=_NAME))
    tree = yaml.safe_load(render(behind_a_name))
    paths = [one.removeprefix("unix:") for one in (config.service.address, address)]
    resolved = [{"endpoint": {"address": {"pipe": {"path": path}}}} for path in paths]
    changed = 0
    for cluster in tree["static_resources"]["clusters"]:
        for group in cluster["load_assignment"].get("endpoints", []):
            where = group["lb_endpoints"][0]["endpoint"]["address"].get("socket_address")
            if where == {"address": _NAME.partition(":")[0], "port_value": 1}:
                group["lb_endpoints"] = resolved
                del cluster["cluster_type"]
                cluster["type"] = "STATIC"
                changed += 1
    assert changed, "Envoy knows the service under no name"
    return yaml.safe_dump(tree, sort_keys=False)


async def _restart_envoy(world: World) -> None:
    """Envoy runs on what its file says now."""
    await world.stack.envoy.kill()
    await world.stack.envoy.start()

    async def is_ready() -> bool:
        try:
            async with world.session.get(f"{world.stack.admin_url}/ready") as response:
                return response.status == 200
        except (OSError, aiohttp.ClientError):
            return False

    await until(is_ready, "Envoy is ready", READY_SECONDS)


async def health(service: Service, name: str) -> bool | None:
    """What the gRPC health service says of a name; None when nobody answers."""
    async with grpc.aio.insecure_channel(service.address) as channel:
        ask: Callable[..., Awaitable[HealthCheckResponse]] = channel.unary_unary(
            CHECK,
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        try:
            reply = await ask(HealthCheckRequest(service=name), timeout=2)
        except grpc.aio.AioRpcError:
            return None
    return reply.status == HealthCheckResponse.SERVING
