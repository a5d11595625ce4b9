"""What a request carries: models, bodies, ids and keys, from the client to the engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Final

import openai
import pytest
import pytest_asyncio
from e2e_world import (
    CHAT,
    CLIENT_KEY,
    HELLO,
    MODEL,
    World,
    chat,
    chat_body,
    fresh,
    standing,
)

from extproc import headers
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind
from extproc.lab.records import Received

pytestmark = [
    pytest.mark.envoy,
    pytest.mark.xdist_group("e2e-headers"),
    pytest.mark.asyncio(loop_scope="module"),
]

BODY_LIMIT_BYTES: Final = 1024 * 1024
KEYS: Final = {"k1": "sk-key-of-k1", "k2": "sk-key-of-k2"}
# What only Envoy and the service may say to each other.
INTERNAL: Final = {
    *headers.STRIPPED_AT_THE_EDGE,
    *headers.REMOVED_BY_THE_ROUTE,
    headers.DECISION,
    headers.MAX_RETRIES,
}
MODEL_HEADER: Final = ("x-llmgw-model", MODEL)
ECHO: Final = ("x-lab-echo", "yes")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Engines without keys, two with keys of their own, and one that calls its model otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        for name, key in KEYS.items():
            patch.setenv(f"E2E_KEY_OF_{name.upper()}", key)
        engines = [
            LabEngine("a"),
            LabEngine("b"),
            LabEngine("k1", ("keyed",), key=KEYS["k1"]),
            LabEngine("k2", ("keyed",), key=KEYS["k2"], key_header="x-api-key"),
            LabEngine("other", ("its-own-name",)),
        ]
        async with standing(
            tmp_path_factory.mktemp("headers"),
            engines,
            endpoints={
                "k1": {"api_key": "env:E2E_KEY_OF_K1"},
                "k2": {"api_key": "env:E2E_KEY_OF_K2", "api_key_header": "x-api-key"},
                "other": {"models": ["renamed"], "upstream_model": "its-own-name"},
            },
            listener={"body_limit_bytes": BODY_LIMIT_BYTES},
            models={MODEL: {"aliases": ["quick", "a-much-longer-name-than-the-model"]}},
            breaker={"threshold": 1000, "base_seconds": 0.1, "max_seconds": 0.2},
        ) as world:
            yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nothing seen yet and nothing going wrong."""
    await started.forget()
    return started


def only_request(world: World) -> Received:
    """The one request that one engine has seen."""
    (request,) = (request for engine in world.engines.values() for request in engine.requests)
    return request


def names_of(request: Received) -> set[str]:
    """The names of a request's headers, in lower case."""
    return {name.decode("latin-1").lower() for name, _ in request.headers}


# Models.


async def test_a_model_in_a_header_lets_the_body_stream(world: World) -> None:
    """Its first bytes are at the engine before the client has sent the last."""
    body = chat_body()
    async with world.connected() as connection:
        await connection.send_head("POST", CHAT, [MODEL_HEADER], len(body))
        await connection.send(body[:20])
        engine = world.engines["a"]
        await engine.until(lambda: bool(world.requests()))
        request = only_request(world)
        await engine.until(lambda: request.body_bytes == 20)
        assert not request.has_whole_body
        await connection.send(body[20:])
        assert (await connection.answer()).status == 200
    assert request.body_sha256 == hashlib.sha256(body).hexdigest()


async def test_a_model_in_the_body_waits_for_the_body(world: World) -> None:
    """No engine hears of the request before its last byte is there."""
    body = chat_body()
    loop = asyncio.get_running_loop()
    async with world.connected() as connection:
        await connection.send_head("POST", CHAT, [], len(body))
        await connection.send(body[:-1])
        # A whole request meanwhile shows that the first had its time.
        assert (await world.post(MODEL_HEADER)).status == 200
        assert sum(world.requests().values()) == 1
        sent_at = loop.time()
        await connection.send(body[-1:])
        assert (await connection.answer()).status == 200
    arrivals = [r.arrived_at for engine in world.engines.values() for r in engine.requests]
    assert len(arrivals) == 2
    assert max(arrivals) >= sent_at


@pytest.mark.parametrize("name", headers.MODEL)
async def test_every_model_header_is_read(world: World, name: str) -> None:
    """In place of the body, which is then not looked at."""
    reply = await world.ask("POST", CHAT, [(name, MODEL), ECHO], b'{"model": "wrong"}')
    assert reply.status == 200
    assert reply.headers["x-served-by"] in {"a", "b"}


async def test_two_models_are_refused(world: World) -> None:
    """In two headers, and in one header twice."""
    other = ("x-gateway-model-name", "keyed")
    for extra in ([MODEL_HEADER, other], [MODEL_HEADER, MODEL_HEADER], [("x-llmgw-model", "")]):
        reply = await world.ask("POST", CHAT, extra, chat_body())
        assert reply.status == 400, extra
        assert reply.error.type == "invalid_request_error"
    assert world.requests() == {}


@pytest.mark.parametrize("alias", ["quick", "a-much-longer-name-than-the-model"])
@pytest.mark.parametrize("named", ["body", "header"])
async def test_an_alias_is_rewritten_in_the_body(world: World, alias: str, named: str) -> None:
    """The engine reads its own name for the model, and the length is right."""
    extra = [("x-llmgw-model", alias)] if named == "header" else []
    reply = await world.ask("POST", CHAT, extra, chat_body(alias, user="kept"))
    assert reply.status == 200
    request = only_request(world)
    told = json.loads(request.body_start)
    assert (told["model"], told["user"], told["messages"]) == (MODEL, "kept", HELLO)
    assert request.header("content-length") == [str(request.body_bytes).encode()]
    assert len(request.body_start) == request.body_bytes


async def test_an_alias_in_a_chunked_body(world: World) -> None:
    """Likewise, where the client gives no length."""
    body = chat_body("quick")
    async with world.connected() as connection:
        extra = [("transfer-encoding", "chunked"), ("content-type", "application/json")]
        await connection.send_head("POST", CHAT, extra, None)
        for piece in (body[:7], body[7:]):
            await connection.send(b"%x\r\n%s\r\n" % (len(piece), piece))
        await connection.send(b"0\r\n\r\n")
        assert (await connection.answer()).status == 200
    assert json.loads(only_request(world).body_start)["model"] == MODEL


async def test_an_alias_over_a_failover(world: World) -> None:
    """Every attempt has the rewritten body."""
    session = ("x-session-id", fresh("session"))
    first = (await world.post(session, model="quick")).headers["x-served-by"]
    await world.forget()
    world.engines[first].inject(Fault(kind=FaultKind.STATUS, status=503))
    assert (await world.post(session, model="quick")).status == 200
    seen = [request for engine in world.engines.values() for request in engine.requests]
    assert len(seen) == 2
    assert {json.loads(request.body_start)["model"] for request in seen} == {MODEL}
    assert len({request.body_sha256 for request in seen}) == 1


async def test_an_engines_own_name_for_a_model(world: World) -> None:
    """Is what it reads, though clients use another; the SDK sees the list of theirs."""
    async with world.openai() as client:
        answer = await chat(client, model="renamed")
        assert answer.system_fingerprint == "other"
        listed = {model.id async for model in client.models.list()}
    assert json.loads(only_request(world).body_start)["model"] == "its-own-name"
    assert {MODEL, "quick", "keyed", "renamed"} <= listed
    assert "its-own-name" not in listed


# Bodies.


async def test_12_megabytes_by_header(world: World) -> None:
    """Arrive as they were sent."""
    body = chat_body(user="x" * 12_000_000)
    reply = await world.ask("POST", CHAT, [MODEL_HEADER, ECHO], body)
    assert reply.status == 200
    request = only_request(world)
    assert request.body_bytes == len(body)
    assert request.body_sha256 == hashlib.sha256(body).hexdigest()


@pytest.mark.parametrize("size", [40_000, BODY_LIMIT_BYTES])
async def test_a_body_up_to_the_limit_is_read(world: World, size: int) -> None:
    """And arrives as it was sent."""
    padding = size - len(chat_body(user=""))
    body = chat_body(user="x" * padding)
    assert len(body) == size
    reply = await world.ask("POST", CHAT, [ECHO], body)
    assert reply.status == 200
    assert only_request(world).body_sha256 == hashlib.sha256(body).hexdigest()


async def test_a_body_over_the_limit(world: World) -> None:
    """413 in the envelope where it would have to be read, also for the SDK; no engine sees it."""
    body = chat_body(user="x" * BODY_LIMIT_BYTES)
    reply = await world.ask("POST", CHAT, (), body)
    assert (reply.status, reply.error.code) == (413, "body_too_large")
    assert "x-llmgw-model" in reply.error.message
    async with world.openai() as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x" * BODY_LIMIT_BYTES}]
            )
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")
    assert world.requests() == {}
    assert await world.inflight() == 0


# Steering.


@pytest.mark.parametrize("named", ["body", "header"])
async def test_steering_headers_never_reach_an_engine(world: World, named: str) -> None:
    """Neither the service's own nor those that a client sends, which do not steer either."""
    session = ("x-session-id", fresh("session"))
    extra = [session, MODEL_HEADER] if named == "header" else [session]
    where = (await world.post(*extra)).headers["x-served-by"]
    elsewhere = world.engines["b" if where == "a" else "a"]
    reply = await world.post(
        *extra,
        ("x-llmgw-cluster", f"ep-{elsewhere.name}"),
        ("X-LLMGW-Cluster", "ep-k1"),
        ("x-gateway-destination-endpoint", elsewhere.authority),
        ("x-gateway-destination-endpoint-subset", elsewhere.authority),
        ("x-gateway-destination-endpoint-served", elsewhere.authority),
        ("x-llmgw-decision", "forged"),
        ("x-llmgw-client", "somebody"),
        ("x-envoy-max-retries", "7"),
    )
    assert (reply.status, reply.headers["x-served-by"]) == (200, where)
    assert elsewhere.counters.requests == 0
    for request in world.engines[where].requests:
        assert names_of(request).isdisjoint(INTERNAL)
    assert not any("llmgw-decision" in name for name in reply.headers)


async def test_steering_headers_do_not_survive_a_failover(world: World) -> None:
    """The second engine sees none of them either."""
    session = ("x-session-id", fresh("session"))
    first = (await world.post(session)).headers["x-served-by"]
    world.engines[first].inject(Fault(kind=FaultKind.STATUS, status=503))
    assert (await world.post(session)).headers["x-served-by"] != first
    seen = [request for engine in world.engines.values() for request in engine.requests]
    assert len(seen) == 3
    for request in seen:
        assert names_of(request).isdisjoint(INTERNAL)


# Ids.


@pytest.mark.parametrize("named", ["body", "header"])
@pytest.mark.parametrize(
    "request_id", ["short", "5b8b1a4e-5b0f-4c60-9f4e-6a3d1d9c0f11", "weird/+ id=1"]
)
async def test_a_clients_request_id_is_kept(world: World, request_id: str, named: str) -> None:
    """To the letter, at the engine and in the answer."""
    extra = [MODEL_HEADER] if named == "header" else []
    reply = await world.post(("x-request-id", request_id), *extra)
    assert reply.headers["x-request-id"] == request_id
    assert only_request(world).header("x-request-id") == [request_id.encode()]


async def test_a_request_without_an_id_gets_one(world: World) -> None:
    """The same at the engine and in the answer, and another for every request."""
    found = set()
    for _ in range(3):
        reply = await world.post()
        found.add(reply.headers["x-request-id"])
    seen = {
        r.header("x-request-id")[0].decode() for e in world.engines.values() for r in e.requests
    }
    assert seen == found
    assert len(found) == 3


async def test_refusals_carry_the_request_id(world: World) -> None:
    """The service's and Envoy's own, so that a client can quote it."""
    for extra, model in (((), "wrong"), ((MODEL_HEADER, MODEL_HEADER), MODEL)):
        reply = await world.post(("x-request-id", "quote-me"), *extra, model=model)
        assert reply.status in {400, 404}
        assert reply.headers["x-request-id"] == "quote-me"
    unlisted = await world.ask("GET", "/metrics", [("x-request-id", "quote-me")])
    assert unlisted.headers["x-request-id"] == "quote-me"


# Keys.


async def test_a_clients_key_is_not_passed_on(world: World) -> None:
    """In whatever header, to an engine that has no key of its own."""
    async with world.openai() as client:
        await chat(client)
    extra = [("x-api-key", CLIENT_KEY), ("api-key", CLIENT_KEY), ("cookie", f"key={CLIENT_KEY}")]
    assert (await world.post(*extra, ("authorization", CLIENT_KEY))).status == 200
    for engine in world.engines.values():
        for request in engine.requests:
            assert names_of(request).isdisjoint(headers.CREDENTIALS)
            assert CLIENT_KEY.encode() not in b"\n".join(value for _, value in request.headers)


async def test_an_endpoints_own_key_is_used(world: World) -> None:
    """Each its own, in its own header and form; the engines themselves demand it."""
    async with world.openai() as client:
        for _ in range(12):
            await chat(client, model="keyed")
    assert set(world.requests()) == set(KEYS)
    for request in world.engines["k1"].requests:
        assert request.header("authorization") == [f"Bearer {KEYS['k1']}".encode()]
        assert "x-api-key" not in names_of(request)
    for request in world.engines["k2"].requests:
        assert request.header("x-api-key") == [KEYS["k2"].encode()]
        assert "authorization" not in names_of(request)


@pytest.mark.parametrize("first", sorted(KEYS))
async def test_no_failover_carries_a_key_elsewhere(world: World, first: str) -> None:
    """Whichever engine is tried first, and whatever the client sends."""
    (second,) = set(KEYS) - {first}
    session = await _session_at(world, first)
    await world.forget()
    world.engines[first].inject(Fault(kind=FaultKind.STATUS, status=503))
    reply = await world.post(
        ("x-session-id", session),
        ("authorization", f"Bearer {CLIENT_KEY}"),
        ("x-api-key", CLIENT_KEY),
        model="keyed",
    )
    assert (reply.status, reply.headers["x-served-by"]) == (200, second)
    for name in KEYS:
        (request,) = world.engines[name].requests
        told = b"\n".join(value for _, value in request.headers)
        found = {key for key in (*KEYS.values(), CLIENT_KEY) if key.encode() in told}
        assert found == {KEYS[name]}


async def _session_at(world: World, name: str) -> str:
    """A session that the engine `name` serves."""
    for _ in range(100):
        session = fresh("session")
        reply = await world.post(("x-session-id", session), model="keyed")
        assert reply.status == 200
        if reply.headers["x-served-by"] == name:
            return session
    raise AssertionError(f"no session went to {name}")


async def test_no_key_is_shown(world: World) -> None:
    """Not on the metrics page, in the service's log, in Envoy's file or on the command line."""
    page = str((await world.page()).samples)
    files = [path.read_text() for path in world.stack.folder.iterdir() if path.is_file()]
    said = [*world.stack.service.lines, *world.stack.envoy.lines]
    shown = "\n".join([page, *files, *said])
    for pid in (world.stack.service.pid, world.stack.envoy.pid):
        with open(f"/proc/{pid}/cmdline") as file:  # noqa: ASYNC230, PTH123 - a file of the kernel's
            shown += file.read()
    assert not [key for key in KEYS.values() if key in shown]
