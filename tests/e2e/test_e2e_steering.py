"""Each way of telling Envoy where a request goes does the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio
from e2e_world import DISPATCHED, HELLO, MODEL, World, chat, fresh, standing, until

from extproc.config.values import Steering
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

EACH = [
    pytest.param(steering, marks=pytest.mark.xdist_group(f"e2e-{steering}"), id=steering.value)
    for steering in Steering
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=EACH)
async def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    """Four engines of one model, of which no breaker opens, and one of a model of its own."""
    steering = Steering(request.param)
    engines = [LabEngine(name) for name in "abcd"]
    breaker = {"threshold": 1000, "base_seconds": 0.1, "max_seconds": 0.2}
    async with standing(
        tmp_path_factory.mktemp(steering.value), engines, steering=steering, breaker=breaker
    ) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nothing seen yet and nothing going wrong."""
    await started.forget(attempts=True)
    return started


def fails_over(world: World) -> bool:
    """Whether Envoy can be told more than one endpoint."""
    return world.stack.config.steering is not Steering.CLUSTER_HEADER


async def test_sessions_and_spread(world: World) -> None:
    """The decision is followed: sessions stay, and every engine is used."""
    sessions = [fresh("session") for _ in range(24)]
    async with world.openai() as client:
        first = [(await chat(client, session)).system_fingerprint for session in sessions]
        again = [(await chat(client, session)).system_fingerprint for session in sessions]
    assert again == first
    assert set(first) == set(world.engines)
    assert {name: 2 * first.count(name) for name in world.engines} == world.requests()
    await world.until_attempts(
        {(name, "success"): number for name, number in world.requests().items()}
    )


async def test_parallel_streams(world: World) -> None:
    """All of them whole, and nothing in flight afterwards."""

    async def listen(client: openai.AsyncOpenAI) -> int:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=16, stream=True
        )
        return len([c async for c in stream if c.choices and c.choices[0].delta.content])

    async with world.openai() as client:
        assert await asyncio.gather(*(listen(client) for _ in range(16))) == [16] * 16
    await world.until_idle()


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (FaultKind.REFUSE, "body"),
        (FaultKind.RESET, "header"),
        (FaultKind.STATUS, "body"),
        (FaultKind.STATUS, "header"),
    ],
)
async def test_a_failure_moves_on(world: World, kind: FaultKind, named: str) -> None:
    """To another engine, unseen by the client, where one can be named; each attempt is booked."""
    session = ("x-session-id", fresh("session"))
    extra = [session, ("x-llmgw-model", MODEL)] if named == "header" else [session]
    first = world.engines[(await world.post(*extra)).headers["x-served-by"]]
    world.overlook()
    first.inject(Fault(kind=kind, status=503))
    reply = await world.post(*extra)
    expected = {(first.name, "failure"): 1}
    if fails_over(world):
        assert reply.status == 200
        expected[reply.headers["x-served-by"], "success"] = 1
    else:
        assert reply.status == 503
    seen = 0 if kind is FaultKind.REFUSE else 1
    assert first.counters.requests == seen
    assert sum(world.requests().values()) == seen + len(expected) - 1
    await world.until_idle()
    await world.until_attempts(expected)


async def test_there_are_three_attempts_at_most(world: World) -> None:
    """At three different engines; at one where a list of them cannot be told."""
    for engine in world.engines.values():
        engine.inject(Fault(kind=FaultKind.STATUS, status=500))
    assert (await world.post()).status == 500
    assert list(world.requests().values()) == ([1, 1, 1] if fails_over(world) else [1])
    await world.until_idle()
    await world.until_attempts({(name, "failure"): 1 for name in world.requests()})


async def test_a_restricted_request_is_served_by_our_own_engines(world: World) -> None:
    """Its route is closed only while the service says nothing."""
    reply = await world.post(("x-llmgw-residency", "eu"), ("x-llmgw-no-store", "true"))
    assert reply.status == 200


async def test_a_client_cannot_steer(world: World) -> None:
    """Whatever it says, its session stays where it is."""
    session = ("x-session-id", fresh("session"))
    where = (await world.post(session)).headers["x-served-by"]
    for engine in world.engines.values():
        reply = await world.post(
            session,
            ("x-llmgw-cluster", f"ep-{engine.name}"),
            ("x-gateway-destination-endpoint", engine.authority),
            ("x-gateway-destination-endpoint-subset", engine.authority),
        )
        assert (reply.status, reply.headers["x-served-by"]) == (200, where)


async def test_the_service_dies_and_comes_back(world: World) -> None:
    """Envoy serves from our engines meanwhile, refuses what is restricted, and follows again."""
    await world.stack.service.kill()
    served = [(await world.post()).headers["x-served-by"] for _ in range(20)]
    assert len(set(served)) > 1
    refused = await world.post(("x-llmgw-residency", "eu"))
    assert (refused.status, refused.error.code) == (503, "no_endpoint")
    assert sum(world.requests().values()) == 20
    await world.stack.start_service()

    async def is_asked() -> bool:
        assert (await world.post()).status == 200
        return (await world.page()).total(DISPATCHED) > 0

    await until(is_asked, "the service decides again")


async def test_what_an_endpoint_picker_cannot_name_is_never_chosen(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A provider, and an engine with a key of its own: the requests go to the others."""
    engines = [LabEngine(name) for name in ("a", "b", "far", "keyed")]
    async with standing(
        tmp_path_factory.mktemp("unnameable"),
        engines,
        steering=Steering.ENDPOINT_PICKER,
        endpoints={"far": {"kind": "external"}, "keyed": {"api_key": "env:PATH"}},
    ) as world:
        replies = [await world.post() for _ in range(24)]
        assert {reply.status for reply in replies} == {200}
        assert {reply.headers["x-served-by"] for reply in replies} == {"a", "b"}
