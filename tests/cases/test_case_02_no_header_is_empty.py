"""Every header that we emit, to engines, peers and clients, has a value and comes once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest
import pytest_asyncio
from case_bodies import FORM_TYPE, chat, form
from case_grpc import request_body, request_headers, set_headers
from case_http1 import CHAT, Pair, Reply
from case_world import World, case, standing, until

from extproc import headers
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind
from extproc.serve.pb.base_pb2 import HeaderValueOption
from extproc.serve.pb.ext_proc_pb2 import ProcessingRequest

pytestmark = case(2)

CONFIG = """
cluster_id: here
federation: {forward_hopped_requests: true}
endpoints:
  - {id: a, url: "$a", models: [m]}
  - {id: b, url: "$b", models: [renamed], upstream_model: its-own-name}
  - {id: x, url: "$x", kind: external, models: [bought], upstream_model: sold}
  - {id: p, url: "$p", kind: peer, models: [there/m], peer: {name: there, cluster_id: over-there,
     send_tags: true}}
  - {id: busy, url: "$busy", models: [busy]}
  - {id: dead, url: "$dead", models: [dead], breaker: {threshold: 1, base_seconds: 60}}
"""
FORM = "/v1/audio/transcriptions"
MESSAGES = "/v1/messages"
REQUEST_ID = ("x-request-id", "the-id-of-the-client")

# To an endpoint: what is asked and who gets it.
SENT = {
    "model in a header": (CHAT, [("x-llmgw-model", "m")], chat(None), "a"),
    "model in the body": (CHAT, [], chat("m"), "a"),
    "model in a form": (FORM, [("content-type", FORM_TYPE)], form("m"), "a"),
    "with an id": (CHAT, [REQUEST_ID], chat("m"), "a"),
    "hopped": (CHAT, [("x-llmgw-hop", "edge")], chat("m"), "a"),
    "renamed": (CHAT, [], chat("renamed"), "b"),
    "renamed, in a header": (CHAT, [("x-llmgw-model", "renamed")], chat("renamed"), "b"),
    "provider": (CHAT, [], chat("bought"), "x"),
    "peer": (CHAT, [], chat("there/m"), "p"),
    "peer, in a header": (CHAT, [("x-llmgw-model", "there/m")], chat("there/m"), "p"),
    "peer, with tags and hops": (
        CHAT,
        [("x-llmgw-tags", "team=a"), ("x-llmgw-hop", "edge"), REQUEST_ID],
        chat("there/m"),
        "p",
    ),
}


@dataclass(frozen=True, slots=True)
class Ours:
    """An answer of the gateway's own."""

    status: int
    reason: str | None
    method: str = "POST"
    path: str = CHAT
    pairs: Sequence[Pair] = ()
    body: bytes | None = None


OWN = {
    "model missing": Ours(400, "model_missing", body=chat(None)),
    "no body": Ours(400, "model_missing", body=b""),
    "model ambiguous": Ours(
        400,
        "model_ambiguous",
        pairs=[("x-llmgw-model", "m"), ("x-ai-eg-model", "m")],
        body=chat("m"),
    ),
    "model invalid": Ours(400, "model_invalid", body=chat("")),
    "body invalid": Ours(400, "body_invalid", body=b"{"),
    "unknown model": Ours(404, "model_not_found", body=chat("nobody")),
    "unknown model, anthropic": Ours(
        404, "model_not_found", path=MESSAGES, pairs=[REQUEST_ID], body=chat("nobody")
    ),
    "unknown path": Ours(404, "path_not_found", path="/v1/nothing", body=chat("m")),
    "method": Ours(405, "method_not_allowed", "GET"),
    "method, models": Ours(405, "method_not_allowed", path="/v1/models", body=b"{}"),
    "compressed": Ours(415, "body_encoding", pairs=[("content-encoding", "gzip")], body=b"\x1f"),
    "upgrade": Ours(400, "body_invalid", pairs=[("upgrade", "websocket")], body=chat("m")),
    "saturated": Ours(429, "saturated", body=chat("busy")),
    "saturated, anthropic": Ours(429, "saturated", path=MESSAGES, body=chat("busy")),
    "no endpoint": Ours(503, "no_endpoint", body=chat("dead")),
    "no endpoint, anthropic": Ours(503, "no_endpoint", path=MESSAGES, body=chat("dead")),
    "restricted": Ours(503, "restricted", pairs=[("x-llmgw-residency", "eu")], body=chat("bought")),
    "loop": Ours(508, "loop", pairs=[("x-llmgw-hop", "here")], body=chat("m")),
    "hop junk": Ours(508, "hop_invalid", pairs=[("x-llmgw-hop", "0")], body=chat("m")),
    "models": Ours(200, None, "GET", "/v1/models"),
    "model": Ours(200, None, "GET", "/v1/models/m"),
    "ready": Ours(200, None, "GET", "/ready"),
    "options": Ours(204, None, "OPTIONS"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """A gateway with an endpoint of every kind, one that is busy and one that is dead."""
    engines = [LabEngine(name, echo=True) for name in ("a", "b", "x", "p", "busy", "dead")]
    async with standing(tmp_path_factory.mktemp("case"), CONFIG, *engines) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with the busy and the dead endpoint in that state."""
    await started.forget()
    busy, dead = started.engines["busy"], started.engines["dead"]
    busy.inject(Fault(kind=FaultKind.STATUS, status=429, headers={"retry-after": "30"}))
    dead.inject(Fault(kind=FaultKind.STATUS, status=500))

    async def is_left_alone(model: str) -> bool:
        reply = await started.post(model=model)
        return reply.reason is not None

    for model in ("busy", "dead"):
        await until(lambda model=model: is_left_alone(model), f"{model} is left alone")  # type: ignore[misc]  # binds this round's model
    for engine in started.engines.values():
        engine.records.reset()
    return started


def assert_full(reply: Reply) -> None:
    """Every header has a value, and those that are ours come once."""
    empty = [name for name, value in reply.headers if not value]
    assert not empty, reply
    names = [name for name, _ in reply.headers]
    assert len(names) == len(set(names)), names


@pytest.mark.parametrize("what", list(SENT))
async def test_what_an_endpoint_gets(world: World, what: str) -> None:
    """No header of it is empty, and no single one comes twice."""
    path, pairs, body, where = SENT[what]
    reply = await world.post(*pairs, path=path, body=body)
    assert (reply.status, reply.served_by) == (200, where)
    assert_full(reply)
    (received,) = world.engines[where].requests
    assert not [name for name, value in received.headers if not value]
    names = [name.lower() for name, _ in received.headers]
    assert len(names) == len(set(names)), names
    (request_id,) = received.header("x-request-id")
    assert request_id == (b"the-id-of-the-client" if REQUEST_ID in pairs else request_id)
    assert received.header("content-length") == [str(received.body_bytes).encode()]
    if where == "p":
        hops = b"edge,here" if ("x-llmgw-hop", "edge") in pairs else b"here"
        assert [value.replace(b" ", b"") for value in received.header("x-llmgw-hop")] == [hops]
        assert received.header("x-llmgw-model") == [b"m"]
        assert json.loads(received.body_start)["model"] == "m"
        tags = [b"team=a"] if ("x-llmgw-tags", "team=a") in pairs else []
        assert received.header("x-llmgw-tags") == tags


# There is no upgrade in HTTP/2.
@pytest.mark.parametrize(
    ("version", "what"),
    [(1, what) for what in OWN] + [(2, what) for what in OWN if what != "upgrade"],
)
async def test_what_a_client_gets(world: World, version: int, what: str) -> None:
    """Status, reason, type, retry headers: each has its value, on both versions of HTTP."""
    own = OWN[what]
    if version == 1:
        pairs = [*own.pairs, ("connection", "upgrade")] if what == "upgrade" else own.pairs
        reply = await world.ask(own.method, own.path, pairs, own.body)
    else:
        async with world.http2() as connection:
            reply = await connection.ask(own.method, own.path, own.pairs, own.body)
    assert (reply.status, reply.reason) == (own.status, own.reason), reply
    assert_full(reply)
    if own.status != 204:
        assert reply.header("content-type") == "application/json"
        assert reply.header("content-length") == str(len(reply.body))
    if own.status in {204, 405}:
        assert "OPTIONS" in (reply.header("allow") or "")
    if own.status in {429, 503} and own.reason != "restricted":
        seconds = reply.header(headers.RETRY_AFTER)
        milliseconds = reply.header(headers.RETRY_AFTER_MS)
        assert seconds is not None
        assert milliseconds is not None
        assert 0 < int(milliseconds) <= int(seconds) * 1000
    elif own.status >= 400:
        assert reply.header(headers.SHOULD_RETRY) == "false"
    if own.path == MESSAGES:
        assert reply.anthropic_error
        expected = "the-id-of-the-client" if REQUEST_ID in own.pairs else reply.header("request-id")
        assert reply.header("request-id") == expected
    elif own.reason is not None:
        assert reply.error.code
    assert world.requests() == {}


async def test_what_a_client_gets_without_the_service(world: World) -> None:
    """Envoy's own answers have the same headers."""
    await world.stack.service.kill()
    try:
        for pairs in ([("x-llmgw-residency", "eu")], [("x-llmgw-hop", "edge")]):
            reply = await world.post(*pairs)
            assert (reply.status, reply.reason) == (503, "no_endpoint")
            assert_full(reply)
            assert reply.header(headers.RETRY_AFTER) == "1"
        for method, path, status in (("GET", CHAT, 405), ("GET", "/v1/nothing", 404)):
            reply = await world.ask(method, path)
            assert reply.status == status
            assert_full(reply)
    finally:
        await world.stack.start_service()


def first_messages() -> list[ProcessingRequest]:
    """The first message of each request in this file, as Envoy would say it."""
    sent = [("POST", path, pairs, body) for path, pairs, body, _ in SENT.values()]
    own = [(own.method, own.path, own.pairs, own.body) for own in OWN.values()]
    made = []
    for method, path, pairs, body in [*sent, *own]:
        read = None
        if body and body.startswith(b'{"model"') and not any("model" in str(n) for n, _ in pairs):
            read = {"model": json.loads(body)["model"]}
        made.append(request_headers(method, path, pairs, ends=not body, read=read))
    return made


async def test_replies_use_raw_values_alone(world: World) -> None:
    """Of a header's two fields one is set, and it takes the place of a client's own."""
    kinds: set[str | None] = set()
    checked = 0
    for message in first_messages():
        async with world.processor() as stream:
            reply = await stream.say(message)
            if reply.HasField("mode_override"):
                sent = {one.key: one.raw_value for one in message.request_headers.headers.headers}
                is_form = sent.get("content-type", b"").startswith(b"multipart")
                model = sent.get("x-llmgw-model", b"renamed").decode()
                body = form("m") if is_form else chat(model)
                reply = await stream.say(request_body(body, ends=True))
            kinds.add(reply.WhichOneof("response"))
            for one in set_headers(reply):
                assert one.header.raw_value, one
                assert not one.header.value, one
                assert one.append_action == HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
                checked += 1
    assert kinds == {"request_headers", "request_body", "immediate_response"}
    assert checked > 100
