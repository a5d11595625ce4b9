"""No client chooses its endpoint or reaches a path off the list, whatever the service does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import StrEnum

import pytest
import pytest_asyncio
from case_bodies import chat
from case_http1 import CHAT, Pair
from case_world import World, case, standing, together

from extproc import headers
from extproc.config.values import Steering
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind

pytestmark = case(4)

# The target is an endpoint of another model; a client may ask for that, but not by naming it.
CONFIG = """
service: {message_timeout_seconds: 0.3}
breaker: {threshold: 2, base_seconds: 60}
endpoints:
  - {id: a, url: "$a", models: [m]}
  - {id: target, url: "$target", models: [secret]}
  - {id: bought, url: "$bought", kind: external, models: [provided]}
  - {id: broken, url: "$broken", models: [broken]}
"""
UNLISTED = (
    "/metrics",
    "//metrics",
    "/v1/../metrics",
    "/v1/%2e%2e/metrics",
    "/v1/chat/completions/../../../metrics",
    "/v1/chat/completions/..%2f..%2f..%2fmetrics",
    "/v1/models/../../metrics",
    "/v1/chat/completions/",
    "/V1/chat/completions",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/flush_cache",
    "/health",
    "/",
    "/lab/faults",
)


class Service(StrEnum):
    """What the service does while the client asks."""

    UP = "up"
    UNDECIDED = "undecided"  # it has the request and never answers
    DOWN = "down"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(Steering))
async def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    """Four endpoints that have no model in common, steered in each of the three ways."""
    engines = [LabEngine(name, echo=True) for name in ("a", "target", "bought", "broken")]
    folder = tmp_path_factory.mktemp("case")
    async with standing(folder, CONFIG, *engines, steering=request.param) as world:
        world.engines["broken"].refuse()
        yield world


@pytest.fixture(scope="module", params=list(Service))
def state(request: pytest.FixtureRequest) -> Service:
    """Each state of the service."""
    return Service(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing_so(state: Service, started: World) -> AsyncIterator[World]:
    """The gateway with its service in that state, for all tests of it."""
    match state:
        case Service.UNDECIDED:
            started.freeze()
        case Service.DOWN:
            await started.stack.service.kill()
        case _:
            pass
    yield started
    started.thaw()
    if not started.stack.service.is_running:
        await started.stack.start_service()


@pytest.fixture
def world(standing_so: World) -> World:
    """The same, with nothing seen yet."""
    for engine in standing_so.engines.values():
        engine.records.reset()
    return standing_so


def named(world: World, *, version: int = 1) -> list[Pair]:
    """The target in every header that could choose it, by every name that it has."""
    target = world.engines["target"]
    names = ["ep-target", "target", target.authority, target.url]
    listed = [
        *headers.REMOVED_BY_THE_ROUTE,
        headers.CLIENT,
        "x-envoy-original-dst-host",
        "x-envoy-decorator-operation",
        "x-forwarded-host",
    ]
    if version == 1:
        listed += [headers.CLUSTER.upper(), headers.DESTINATION.title()]
    return [(name, value) for name in listed for value in names]


@pytest.mark.parametrize("pairs", [[], [("x-llmgw-model", "m")]], ids=["body", "header"])
@pytest.mark.parametrize("version", [1, 2])
async def test_the_target_is_named(world: World, pairs: list[Pair], version: int) -> None:
    """The model's own engine has the request all the same."""
    given = [*named(world, version=version), *pairs]
    if version == 1:
        reply = await world.post(*given)
    else:
        async with world.http2() as connection:
            reply = await connection.ask("POST", CHAT, given, chat("m"))
    assert (reply.status, reply.served_by) == (200, "a"), reply
    assert world.requests() == {"a": 1}


@pytest.mark.parametrize("model", ["nobody", "broken", "provided"])
async def test_there_is_nowhere_to_go(world: World, model: str) -> None:
    """An unknown model, a broken endpoint, one that only the service may use: never the target."""
    given: list[list[Pair]] = [[], [("x-llmgw-model", model)]]
    for _ in range(3):
        for reply in await together(
            world.post(*named(world), *pairs, model=model) for pairs in given
        ):
            if model == "provided" and reply.status == 200:
                # Whoever decides on it is the service.
                assert reply.served_by == "bought"
                continue
            assert reply.status in {404, 503}, reply
            assert reply.error.code
    assert "target" not in world.requests()
    assert "a" not in world.requests()


@pytest.mark.parametrize(
    "pair",
    [("x-llmgw-residency", "eu"), ("x-llmgw-no-store", ""), ("x-llmgw-hop", "edge")],
    ids=["residency", "no-store", "hop"],
)
async def test_a_restricted_request(world: World, state: Service, pair: Pair) -> None:
    """It goes to our own engine if the service says so, and nowhere otherwise."""
    reply = await world.post(*named(world), pair)
    if state is Service.UP:
        assert (reply.status, reply.served_by) == (200, "a")
    else:
        assert (reply.status, reply.reason) == (503, "no_endpoint")
        assert world.requests() == {}


async def test_paths_without_a_decision(world: World) -> None:
    """Lists, refusals and preflights reach no endpoint, though they name one."""
    asked = [
        ("GET", "/v1/models", None),
        ("GET", "/ready", None),
        ("OPTIONS", CHAT, None),
        ("GET", CHAT, None),
        ("DELETE", CHAT, None),
        ("POST", "/v1/nothing", chat("m")),
        ("POST", "/v1/models", chat("m")),
    ]
    for method, path, body in asked:
        reply = await world.ask(method, path, named(world), body)
        assert reply.header("x-served-by") is None
    assert world.requests() == {}


async def test_paths_off_the_list(world: World) -> None:
    """However they are written: an engine's own pages are no client's."""
    for path in UNLISTED:
        for method, body in (("GET", None), ("POST", chat("m"))):
            reply = await world.ask(method, path, [("x-llmgw-model", "m"), *named(world)], body)
            assert reply.status in {400, 404, 405}, (path, reply)
            assert reply.reason, reply
    assert world.requests() == {}
    # Scrapes are ours; a request that came through Envoy has an id.
    probes = [probe for engine in world.engines.values() for probe in engine.probes]
    assert not [probe for probe in probes if probe.header("x-request-id")]


@pytest.mark.parametrize("state", [Service.UP], indirect=True)
async def test_all_breakers_are_open(world: World) -> None:
    """A model whose endpoints are left alone is refused, not served elsewhere."""
    await world.forget()
    broken = world.engines["broken"]
    broken.inject(Fault(kind=FaultKind.RESET))
    for _ in range(4):
        reply = await world.post(*named(world), model="broken")
        assert reply.status == 503, reply
    reply = await world.post(*named(world), model="broken")
    assert (reply.status, reply.reason) == (503, "no_endpoint")
    assert set(world.requests()) <= {"broken"}
    broken.refuse()
