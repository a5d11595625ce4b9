"""A model or adapter is found under exactly its own name, where it is configured, listed once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from urllib.parse import quote

import pytest
import pytest_asyncio
from case_fleet import exclusions, reconfigured
from case_http1 import Reply
from case_world import World, case, standing, until

from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind
from extproc.telemetry.fleet import Exclusion

pytestmark = case(47)

# In turn at `p` and at `q`, so that a name which is taken for its neighbour is found out.
NAMES = (
    "org/model-7b",
    "org/model",
    "meta-llama/Llama-3.1-8B:free",
    "meta-llama/Llama-3.1-8B",
    "model@2024-01-01",
    "model",
    "two words",
    "two",
    "CASE",
    "case",
    "a/b/c@d:e f",
    "a%2Fb%2Fc@d:e f",
    "sum+difference",
    "sum difference",
    "モデル/日本語",
    "{model}?q=1&x=#y",
)
AT_P, AT_Q = NAMES[::2], NAMES[1::2]
NOBODY = (
    "nobody",
    "Org/model-7b",
    "org/model-7b/",
    "/org/model-7b",
    "org",
    "model-7b",
    "meta-llama/Llama-3.1-8B:paid",
    "model@",
    " two words",
    "two words ",
    "two  words",
    "Case",
    "sum%2Bdifference",
)
ADAPTERS = {"a": "base:lora-a", "b": "base:lora-b"}
SHARED = "lora/shared"
CONFIG = f"""
endpoints:
  - {{id: p, url: "$p", models: {json.dumps(AT_P)}}}
  - {{id: q, url: "$q", models: {json.dumps(AT_Q)}}}
  - {{id: a, url: "$a", models: [base, "{ADAPTERS["a"]}", "{SHARED}"]}}
  - {{id: b, url: "$b", models: [base, "{ADAPTERS["b"]}", "{SHARED}"]}}
"""
ALL = {*NAMES, *ADAPTERS.values(), SHARED, "base"}
MODELS = "/v1/models"
LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Engines that each take their own models alone; `a` and `b` have loaded adapters."""
    engines = [
        LabEngine("p", AT_P),
        LabEngine("q", AT_Q),
        *(LabEngine(name, ("base",)) for name in ADAPTERS),
    ]
    async with standing(tmp_path_factory.mktemp("case"), CONFIG, *engines) as world:
        for name, adapter in ADAPTERS.items():
            await load(world, name, adapter)
            await load(world, name, SHARED)
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nothing in flight and nothing going wrong."""
    await started.forget()
    return started


async def load(world: World, engine: str, adapter: str, path: str = LOAD) -> None:
    """The engine itself has loaded or unloaded an adapter, which nobody tells the gateway."""
    url = world.engines[engine].url + path
    async with world.session.post(url, json={"lora_name": adapter}) as response:
        assert response.status == 200


def asked_for(engine: LabEngine) -> str:
    """The model that the engine was asked for last."""
    name = json.loads(engine.requests[-1].body_start)["model"]
    assert isinstance(name, str)
    return name


async def listed(world: World) -> list[str]:
    """The names in the gateway's list of models."""
    reply = await world.ask("GET", MODELS)
    assert (reply.status, reply.header("content-type")) == (200, "application/json")
    cards = json.loads(reply.body)
    assert cards["object"] == "list"
    for card in cards["data"]:
        assert card["object"] == "model"
        assert isinstance(card["created"], int)
        assert isinstance(card["owned_by"], str)
    return [card["id"] for card in cards["data"]]


def assert_unknown(reply: Reply) -> None:
    """The answer says in OpenAI's words that there is no such model."""
    assert (reply.status, reply.error.code) == (404, "model_not_found")
    assert (reply.error.type, reply.reason) == ("invalid_request_error", "model_not_found")


async def test_each_name_is_its_own(world: World) -> None:
    """In the body and in a header: the engine that has it gets it, spelled as the client did."""
    for names, engine in ((AT_P, "p"), (AT_Q, "q")):
        for name in names:
            for pairs in ([], [("x-llmgw-model", name.encode())]):
                reply = await world.post(*pairs, model=name)
                assert (reply.status, reply.served_by) == (200, engine), name
                assert asked_for(world.engines[engine]) == name


async def test_each_is_listed_once(world: World) -> None:
    """However many engines serve it; each can be looked up by itself, encoded or not."""
    names = await listed(world)
    assert len(names) == len(set(names))
    assert set(names) == ALL
    for name in ALL:
        reply = await world.ask("GET", f"{MODELS}/{quote(name, safe='')}")
        assert reply.status == 200, name
        assert json.loads(reply.body)["id"] == name
    for name in ("org/model-7b", "meta-llama/Llama-3.1-8B:free", "model@2024-01-01"):
        reply = await world.ask("GET", f"{MODELS}/{name}")
        assert json.loads(reply.body)["id"] == name
    head = await world.ask("HEAD", MODELS)
    assert (head.status, head.body) == (200, b"")


async def test_unknown_names(world: World) -> None:
    """What nobody has is said to be missing, however near it is to a name, and nobody is asked."""
    for name in NOBODY:
        assert_unknown(await world.post(model=name))
        if not name.startswith("/"):  # two slashes in a path are one
            assert_unknown(await world.ask("GET", f"{MODELS}/{quote(name, safe='')}"))
    assert world.requests() == {}
    assert not set(NOBODY) & set(await listed(world))


async def test_adapters_are_asked_where_they_are(world: World) -> None:
    """Each of two engines has its own and both have one: nobody is asked for another's."""
    for engine, adapter in ADAPTERS.items():
        replies = await asyncio.gather(*(world.post(model=adapter) for _ in range(20)))
        assert {(reply.status, reply.served_by) for reply in replies} == {(200, engine)}
        assert asked_for(world.engines[engine]) == adapter
    for name in (SHARED, "base"):
        replies = await asyncio.gather(*(world.post(model=name) for _ in range(20)))
        assert {(reply.status, reply.served_by) for reply in replies} == {(200, "a"), (200, "b")}


async def test_what_engines_list_changes_nothing(world: World) -> None:
    """What nobody configured is not offered, and a list that cannot be had is no loss."""
    before = await listed(world)
    await load(world, "a", "unheard-of")
    for engine in "ab":
        world.engines[engine].inject(Fault(kind=FaultKind.STATUS, status=500, path=MODELS))
    assert_unknown(await world.post(model="unheard-of"))
    assert await listed(world) == before
    for name in (*ADAPTERS.values(), SHARED):
        assert (await world.post(model=name)).status == 200
    await load(world, "a", "unheard-of", UNLOAD)


@pytest.mark.parametrize("path", [LOAD, UNLOAD, f"/v1/../v1{LOAD[3:]}", f"//v1/{LOAD[4:]}"])
async def test_no_client_loads_an_adapter(world: World, path: str) -> None:
    """Loading is the operator's: there is no such path, and no engine hears of it."""
    body = json.dumps({"lora_name": SHARED, "model": "base"}).encode()
    for pairs in ([], [("x-llmgw-model", "base")]):
        reply = await world.ask("POST", path, pairs, body)
        assert reply.status == 404
    assert world.requests() == {}
    assert (await world.post(model=SHARED)).status == 200


async def test_an_adapter_is_configured(world: World) -> None:
    """It is offered as soon as the configuration names it, only there, and not a moment longer."""
    await load(world, "b", "late")
    assert_unknown(await world.post(model="late"))

    def with_late(text: str) -> str:
        return text.replace(f'"{ADAPTERS["b"]}"', f'"{ADAPTERS["b"]}", late')

    async with reconfigured(world, with_late):
        assert (await listed(world)).count("late") == 1
        replies = await asyncio.gather(*(world.post(model="late") for _ in range(10)))
        assert {(reply.status, reply.served_by) for reply in replies} == {(200, "b")}
    assert_unknown(await world.post(model="late"))
    assert "late" not in await listed(world)
    await load(world, "b", "late", UNLOAD)


async def test_an_adapter_is_dropped(world: World) -> None:
    """One of two engines has it no more: after a few refusals the other one gets every request."""
    await load(world, "b", SHARED, UNLOAD)
    refused = 0

    async def is_left_out() -> bool:
        nonlocal refused
        reply = await world.post(model=SHARED)
        refused += reply.status == 404
        return Exclusion.DEMOTED in exclusions(await world.page(), "b")

    await until(is_left_out, "b is demoted")
    assert refused <= 10
    replies = await asyncio.gather(*(world.post(model=SHARED) for _ in range(30)))
    assert {(reply.status, reply.served_by) for reply in replies} == {(200, "a")}
    assert (await world.post(model="base")).status == 200
    await load(world, "b", SHARED)
