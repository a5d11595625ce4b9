"""The rendered Envoy steered by the cluster header, and by an endpoint picker's addresses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from xds_world import (
    Gateway,
    ScriptedService,
    config,
    endpoint,
    gateway,
    pick,
    steer,
    steered_by,
)

from extproc import headers
from extproc.config.values import Steering
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind
from extproc.routing.endpoint import Kind

pytestmark = pytest.mark.envoy


@dataclass(frozen=True, slots=True)
class World:
    """One Envoy, two engines of our own and a provider."""

    gateway: Gateway
    service: ScriptedService
    a: LabEngine
    b: LabEngine
    external: LabEngine


@asynccontextmanager
async def running_world(steering: Steering, folder: Path) -> AsyncIterator[World]:
    """Everything runs, the service included."""
    async with (
        LabEngine("a", ("m",)) as a,
        LabEngine("b", ("m",)) as b,
        LabEngine("external", ("m",)) as external,
    ):
        infos = (
            endpoint("a", a.url, "m"),
            endpoint("b", b.url, "m"),
            endpoint("external", external.url, "m", kind=Kind.EXTERNAL),
        )
        configuration = steered_by(config(*infos, folder=folder), steering)
        service = ScriptedService(folder / "service.sock")
        async with service, gateway(configuration, folder) as running:
            yield World(running, service, a, b, external)


async def test_the_cluster_header_is_followed(tmp_path: Path) -> None:
    """To any cluster, also for a restricted request; what a client says there is not."""
    async with running_world(Steering.CLUSTER_HEADER, tmp_path) as world:
        spoofed = {headers.CLUSTER: "ep-external"}
        for name in ("a", "b", "external"):
            world.service.answer = lambda _, name=name: steer(f"ep-{name}")  # type: ignore[misc]  # bound for this round
            for extra in (spoofed, {headers.HOP: "h"}):
                reply = await world.gateway.post("m", extra)
                assert reply.headers["x-served-by"] == name
        world.service.answer = lambda _: steer("ep-unknown")
        reply = await world.gateway.post("m")
        assert (reply.status, reply.headers[headers.REASON]) == (503, "no_endpoint")
        assert not world.external.requests[-1].header(headers.CLUSTER)


async def test_without_a_word_the_cluster_header_steering_fails_open(tmp_path: Path) -> None:
    """To the pool of the model, and only for what nothing restricts."""
    async with running_world(Steering.CLUSTER_HEADER, tmp_path) as world:
        await world.service.stop()
        spoofed = {headers.CLUSTER: "ep-external"}
        for _ in range(10):
            assert (await world.gateway.post("m", spoofed)).status == 200
        assert (await world.gateway.post("m", {headers.HOP: "h"})).status == 503
        assert world.external.counters.requests == 0


async def test_picked_addresses_are_followed_in_order(tmp_path: Path) -> None:
    """Through the same cluster, until the list ends."""
    async with running_world(Steering.ENDPOINT_PICKER, tmp_path) as world:
        a, b = world.a.authority, world.b.authority
        for chosen, expected in (((a,), "a"), ((b,), "b"), ((b, a), "b")):
            world.service.answer = lambda _, chosen=chosen: pick(*chosen)  # type: ignore[misc]  # bound for this round
            assert (await world.gateway.post("m")).headers["x-served-by"] == expected
        world.a.faults.add(Fault(FaultKind.STATUS, status=503))
        world.service.answer = lambda _: pick(a, b)
        assert (await world.gateway.post("m")).headers["x-served-by"] == "b"
        assert world.b.requests[-1].header(headers.DESTINATION) == []


async def test_an_address_outside_the_cluster_is_nobody(tmp_path: Path) -> None:
    """Rather than anybody: a provider has a key and headers of its own."""
    async with running_world(Steering.ENDPOINT_PICKER, tmp_path) as world:
        for address in (world.external.authority, "192.0.2.1:80", "junk"):
            world.service.answer = lambda _, address=address: pick(address)  # type: ignore[misc]  # bound for this round
            assert (await world.gateway.post("m")).status == 503
        assert world.external.counters.requests == 0


async def test_without_a_word_the_picker_steering_fails_open(tmp_path: Path) -> None:
    """To the pool of the model; an address from a client does not count."""
    async with running_world(Steering.ENDPOINT_PICKER, tmp_path) as world:
        await world.service.stop()
        spoofed = {headers.DESTINATION: world.external.authority}
        for _ in range(10):
            assert (await world.gateway.post("m", spoofed)).status == 200
        assert (await world.gateway.post("m", {headers.RESIDENCY: "eu"})).status == 503
        assert world.external.counters.requests == 0


async def test_a_hung_service_costs_the_message_timeout(tmp_path: Path) -> None:
    """Then an unrestricted request is served, and a restricted one refused."""
    async with LabEngine("a", ("m",)) as engine:
        configuration = config(endpoint("a", engine.url, "m"), folder=tmp_path)
        settings = replace(configuration.service, message_timeout_seconds=0.2)
        service = ScriptedService(tmp_path / "service.sock", silent=True)
        async with (
            service,
            gateway(replace(configuration, service=settings), tmp_path) as running,
        ):
            assert (await running.post("m")).status == 200
            assert (await running.post("m", {headers.HOP: "h"})).status == 503
