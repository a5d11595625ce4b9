"""A header that we set replaces the client's copies: one line, one value."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
from case_bodies import chat
from case_http1 import CHAT, Pair
from case_world import World, case, standing, until

from extproc import headers
from extproc.config.values import Steering
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind
from extproc.lab.records import Received

pytestmark = case(3)

CONFIG = """
cluster_id: here
federation: {forward_hopped_requests: true}
endpoints:
  - {id: a, url: "$a", models: [m]}
  - {id: b, url: "$b", models: [evil]}
  - {id: p, url: "$p", kind: peer, models: [there/m], peer: {name: there, cluster_id: over-there,
     send_tags: true}}
  - {id: q, url: "$q", kind: peer, models: [yonder/m], peer: {name: yonder, cluster_id: far}}
"""

# Names that only the service may set, in spellings that HTTP takes for the same.
STEERING: Sequence[str] = (
    *headers.REMOVED_BY_THE_ROUTE,
    headers.CLIENT,
    headers.CLUSTER.upper(),
    headers.DESTINATION.title(),
)


# The endpoint picker reaches no peers.
@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[Steering.PRIORITY_GROUP, Steering.CLUSTER_HEADER],
)
async def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    """Two engines and two peers that show what they get."""
    engines = [LabEngine(name, echo=True) for name in "abpq"]
    folder = tmp_path_factory.mktemp("case")
    async with standing(folder, CONFIG, *engines, steering=request.param) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nothing seen yet."""
    await started.forget()
    return started


async def arrived(
    world: World, where: str, *pairs: Pair, model: str = "m", version: int = 1
) -> Received:
    """What engine `where` sees of a request that it must get."""
    if version == 1:
        reply = await world.ask("POST", CHAT, pairs, chat(model))
    else:
        async with world.http2() as connection:
            reply = await connection.ask("POST", CHAT, pairs, chat(model))
    assert (reply.status, reply.served_by) == (200, where), reply
    assert world.requests() == {where: 1}
    (received,) = world.engines[where].requests
    return received


def steering_of_a_client(version: int) -> list[Pair]:
    """Several values of every steering header, in any spelling, that name other endpoints."""
    evil = ["ep-b", "ep-b", "b", "127.0.0.1:1"]
    # Names are in lower case in HTTP/2.
    names = [name for name in STEERING if version == 1 or name == name.lower()]
    return [(name, value) for name in names for value in evil]


async def assert_gone(world: World, version: int, *pairs: Pair) -> None:
    """The request is where it belongs, and no steering header is there."""
    received = await arrived(world, "a", *steering_of_a_client(version), *pairs, version=version)
    for name in STEERING:
        assert received.header(name) == []


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("pairs", [[], [("x-llmgw-model", "m")]], ids=["body", "header"])
async def test_a_clients_steering_is_gone(world: World, version: int, pairs: list[Pair]) -> None:
    """No endpoint sees any of it, and it changes nothing."""
    await assert_gone(world, version, *pairs)


async def test_a_clients_steering_is_gone_from_the_endpoint_picker(tmp_path: Path) -> None:
    """Where headers name addresses as well."""
    engines = [LabEngine(name, echo=True) for name in "ab"]
    text = 'endpoints: [{id: a, url: "$a", models: [m]}, {id: b, url: "$b", models: [evil]}]'
    async with standing(tmp_path, text, *engines, steering=Steering.ENDPOINT_PICKER) as world:
        for version in (1, 2):
            await world.forget()
            await assert_gone(world, version)


@pytest.mark.parametrize("version", [1, 2])
async def test_the_hop_list_is_one_line(world: World, version: int) -> None:
    """A client's hops are one value that ends with ours."""
    pair = ("x-llmgw-hop", "edge-1, edge-2")
    received = await arrived(world, "p", pair, model="there/m", version=version)
    assert received.header("x-llmgw-hop") == [b"edge-1,edge-2,here"]


@pytest.mark.parametrize("version", [1, 2])
async def test_two_hop_lines_are_refused(world: World, version: int) -> None:
    """They are neither joined nor is one of them chosen."""
    pairs = [("x-llmgw-hop", "edge-1"), ("x-llmgw-hop", "edge-2")]
    if version == 1:
        reply = await world.post(*pairs, model="there/m")
    else:
        async with world.http2() as connection:
            reply = await connection.ask("POST", CHAT, pairs, chat("there/m"))
    assert (reply.status, reply.reason) == (508, "hop_invalid")
    assert world.requests() == {}


@pytest.mark.parametrize("hop", ["0", "999", "-1", "here", "edge,edge", "x" * 65, ""])
async def test_a_hop_value_that_is_none(world: World, hop: str) -> None:
    """It is refused, never dropped and never joined to ours."""
    for model in ("m", "there/m"):
        reply = await world.post(("x-llmgw-hop", hop), model=model)
        assert reply.status == 508, reply
    assert world.requests() == {}


@pytest.mark.parametrize("model", ["m", "there/m"])
async def test_the_request_id_is_one(world: World, model: str) -> None:
    """The client's own is kept, without one there is one, and the client is told which."""
    where = "a" if model == "m" else "p"
    received = await arrived(world, where, ("x-request-id", "id-of-the-client"), model=model)
    assert received.header("x-request-id") == [b"id-of-the-client"]
    await world.forget()
    reply = await world.post(model=model)
    (received,) = world.engines[where].requests
    (made,) = received.header("x-request-id")
    assert reply.header("x-request-id") == made.decode()
    assert made


@pytest.mark.parametrize("name", ["x-llmgw-model", "x-gateway-model-name", "x-ai-eg-model"])
async def test_a_peer_is_asked_for_one_model(world: World, name: str) -> None:
    """The name that it has there, in the header that the client used."""
    received = await arrived(world, "p", (name, "there/m"), model="there/m")
    assert [received.header(known) for known in headers.MODEL if known != name] == [[], []]
    assert received.header(name) == [b"m"]


async def test_tags_are_one_line(world: World) -> None:
    """Or none, for a peer that gets none."""
    pairs = [("x-llmgw-tags", "team=a"), ("x-llmgw-tags", "job=b")]
    received = await arrived(world, "p", *pairs, model="there/m")
    assert received.header("x-llmgw-tags") == [b"team=a,job=b"]
    await world.forget()
    received = await arrived(world, "q", *pairs, model="yonder/m")
    assert received.header("x-llmgw-tags") == []


async def test_a_clients_retry_limits_are_gone(world: World) -> None:
    """The number of attempts and their deadline are ours, and no endpoint sees either."""
    world.engines["a"].inject(Fault(kind=FaultKind.STATUS, status=503))
    pairs = [
        ("x-envoy-max-retries", "9"),
        ("x-envoy-max-retries", "8"),
        ("x-envoy-retry-on", "5xx"),
        ("x-envoy-upstream-rq-per-try-timeout-ms", "1"),
        ("x-envoy-upstream-rq-timeout-ms", "1"),
    ]
    assert (await world.post(*pairs)).status == 503

    # The model has one endpoint, and so one attempt.
    async def is_booked() -> bool:
        return bool(await world.new_attempts())

    await until(is_booked, "the attempt is booked")
    (received,) = world.engines["a"].requests
    for name, _ in pairs:
        assert received.header(name) == []
