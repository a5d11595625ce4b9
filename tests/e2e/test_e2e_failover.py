"""A failed attempt moves on to the next engine, at most twice, and never after the first byte."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio
from e2e_world import CHAT, HELLO, MODEL, World, chat, chat_body, fresh, listen, standing, until

from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import CutBy, Fault, FaultKind

pytestmark = [
    pytest.mark.envoy,
    pytest.mark.xdist_group("e2e-failover"),
    pytest.mark.asyncio(loop_scope="module"),
]

# Short cooldowns, and a breaker that stays closed, so that no test is in the way of the next.
PATIENT = {"threshold": 1000, "base_seconds": 0.1, "max_seconds": 0.2}
FRAGILE = {"threshold": 3, "base_seconds": 0.5, "max_seconds": 1.0}

FAULTS = [
    pytest.param(Fault(kind=FaultKind.REFUSE), "failure", id="refused"),
    pytest.param(Fault(kind=FaultKind.ACCEPT_RESET), "failure", id="reset-on-accept"),
    pytest.param(Fault(kind=FaultKind.RESET), "failure", id="reset-before-headers"),
    pytest.param(Fault(kind=FaultKind.RESET_AFTER_BODY), "failure", id="reset-after-body"),
    pytest.param(Fault(kind=FaultKind.STATUS, status=500), "failure", id="500"),
    pytest.param(Fault(kind=FaultKind.STATUS, status=502), "failure", id="502"),
    pytest.param(Fault(kind=FaultKind.STATUS, status=503), "failure", id="503"),
    pytest.param(
        Fault(kind=FaultKind.STATUS, status=503, headers={"retry-after": "1"}),
        "backpressure",
        id="503-retry-after",
    ),
    pytest.param(Fault(kind=FaultKind.STATUS, status=429), "backpressure", id="429"),
    pytest.param(Fault(kind=FaultKind.STATUS, status=508), "failure", id="508"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Five engines of one model, and two of another whose breakers open soon."""
    engines = [LabEngine(name) for name in "abcde"]
    fragile = [LabEngine(name, ("fragile",)) for name in ("x", "y")]
    async with standing(
        tmp_path_factory.mktemp("failover"),
        [*engines, *fragile],
        endpoints={engine.name: {"breaker": FRAGILE} for engine in fragile},
        breaker=PATIENT,
    ) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nothing seen yet and nothing going wrong."""
    await started.forget(attempts=True)
    return started


async def settled(world: World, client: openai.AsyncOpenAI) -> tuple[str, LabEngine]:
    """A session and the engine that it is at; nothing of that is seen any more."""
    session = fresh("session")
    where = (await chat(client, session)).system_fingerprint or ""
    world.overlook()
    return session, world.engines[where]


@pytest.mark.parametrize(("fault", "outcome"), FAULTS)
async def test_the_client_sees_nothing_of_a_failure(
    world: World, fault: Fault, outcome: str
) -> None:
    """One attempt fails, the next serves, each is booked once, and the session has moved."""
    async with world.openai() as client:
        session, first = await settled(world, client)
        if fault.kind is FaultKind.ACCEPT_RESET:
            first.refuse()  # closes the connection that Envoy has kept
            await first.accept()
        first.inject(fault)
        where = (await chat(client, session)).system_fingerprint or ""
        assert where != first.name
        is_seen = fault.kind not in {FaultKind.REFUSE, FaultKind.ACCEPT_RESET}
        assert world.requests() == {where: 1} | ({first.name: 1} if is_seen else {})
        assert first.counters.served == 0
        await world.until_idle()
        await first.heal()
        assert (await chat(client, session)).system_fingerprint == where
    await world.until_attempts({(first.name, outcome): 1, (where, "success"): 2})


async def test_a_stream_fails_over_before_its_first_byte(world: World) -> None:
    """And is then whole."""
    async with world.openai() as client:
        session, first = await settled(world, client)
        first.inject(Fault(kind=FaultKind.STATUS, status=503))
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"x-session-id": session},
        )
        chunks = [chunk async for chunk in stream]
    where = chunks[0].system_fingerprint or ""
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    await world.until_idle()
    await world.until_attempts({(first.name, "failure"): 1, (where, "success"): 1})


@pytest.mark.parametrize("named", ["body", "header"])
async def test_the_next_attempt_has_the_same_body(world: World, named: str) -> None:
    """A megabyte of it, after an engine has read it all and gone."""
    body = chat_body(user="x" * 1_000_000)
    extra = [("x-llmgw-model", MODEL)] if named == "header" else []
    async with world.openai() as client:
        session, first = await settled(world, client)
    first.inject(Fault(kind=FaultKind.RESET_AFTER_BODY))
    reply = await world.ask("POST", CHAT, [*extra, ("x-session-id", session)], body)
    assert reply.status == 200
    where = reply.headers["x-served-by"]
    for engine in (first, world.engines[where]):
        (request,) = engine.requests
        assert request.body_sha256 == hashlib.sha256(body).hexdigest()
        assert request.header("content-length") == [str(len(body)).encode()]
    await world.until_attempts({(first.name, "failure"): 1, (where, "success"): 1})


async def test_there_are_three_attempts_at_most(world: World) -> None:
    """At three engines; then the client gets what the last one said."""
    for engine in world.engines.values():
        engine.inject(Fault(kind=FaultKind.STATUS, status=500))
    async with world.openai() as client:
        with pytest.raises(openai.InternalServerError, match="the engine answers 500") as caught:
            await chat(client)
    assert caught.value.status_code == 500
    assert list(world.requests().values()) == [1, 1, 1]
    await world.until_idle()
    await world.until_attempts({(name, "failure"): 1 for name in world.requests()})


async def test_three_refused_connections_end_in_the_envelope(world: World) -> None:
    """Envoy's own answer, in words that clients can read and that name no host."""
    for engine in world.engines.values():
        engine.refuse()
    async with world.openai() as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await chat(client)
    assert (caught.value.status_code, caught.value.code) == (503, "upstream_failed")
    assert "127.0.0.1" not in caught.value.response.text
    assert caught.value.response.headers["x-llmgw-reason"] == "upstream_failed"

    async def are_booked() -> bool:
        return sum((await world.new_attempts()).values()) >= 3

    await until(are_booked, "three attempts")
    booked = await world.new_attempts()
    assert list(booked.values()) == [1, 1, 1]
    assert {outcome for _, outcome in booked} == {"failure"}
    await world.until_idle()


async def test_a_clients_retry_headers_change_nothing(world: World) -> None:
    """Neither more attempts nor fewer."""
    for engine in world.engines.values():
        engine.inject(Fault(kind=FaultKind.STATUS, status=503))
    reply = await world.post(
        ("x-envoy-max-retries", "9"),
        ("x-envoy-retry-on", "5xx"),
        ("x-envoy-upstream-rq-per-try-timeout-ms", "1"),
        ("x-envoy-upstream-rq-timeout-ms", "1"),
    )
    assert reply.status == 503
    assert list(world.requests().values()) == [1, 1, 1]
    await world.until_attempts({(name, "failure"): 1 for name in world.requests()})


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_a_mistake_of_the_client_is_not_repeated(world: World, status: int) -> None:
    """The engine's answer goes back as it is."""
    for engine in world.engines.values():
        engine.inject(Fault(kind=FaultKind.STATUS, status=status, body='{"said": "so"}'))
    reply = await world.post()
    assert (reply.status, reply.body) == (status, b'{"said": "so"}')
    (name,) = world.requests()
    assert world.requests() == {name: 1}
    outcome = "misconfigured" if status in {401, 404} else "client_error"
    await world.until_attempts({(name, outcome): 1})


@pytest.mark.parametrize("how", list(CutBy))
async def test_nothing_is_repeated_after_the_first_byte(world: World, how: CutBy) -> None:
    """A stream that an engine cuts is cut for the client, and charged to that engine alone."""
    async with world.openai() as client:
        session, first = await settled(world, client)
        first.inject(Fault(kind=FaultKind.CUT, chunks=2, how=how))
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_tokens=50,
            stream=True,
            extra_headers={"x-session-id": session},
        )
        heard: list[str] = []
        with pytest.raises(openai.APIConnectionError):
            await listen(stream, heard)
    assert len(heard) == 2
    assert world.requests() == {first.name: 1}
    await world.until_idle()
    await world.until_attempts({(first.name, "failure"): 1})


async def test_an_answer_cut_in_its_middle_is_not_repeated(world: World) -> None:
    """Nor one that is no stream: the client gets an error, as an answer if none has begun."""
    async with world.openai() as client:
        session, first = await settled(world, client)
        first.inject(Fault(kind=FaultKind.CUT))
        with pytest.raises(openai.APIError) as caught:
            await chat(client, session)
    if isinstance(caught.value, openai.APIStatusError):
        assert (caught.value.status_code, caught.value.code) == (502, "upstream_failed")
    assert world.requests() == {first.name: 1}
    await world.until_attempts({(first.name, "failure"): 1})


async def test_an_engine_that_keeps_failing_is_left_alone(world: World) -> None:
    """After its third failure it gets nothing; sound again, it is tried again and used."""
    x, y = world.engines["x"], world.engines["y"]
    x.inject(Fault(kind=FaultKind.STATUS, status=500))

    async def state(name: str) -> int:
        page = await world.page()
        return page.total("llmgw_endpoint_breaker", endpoint="x", state=name)

    async def ask_until_open() -> bool:
        assert (await world.post(model="fragile")).status == 200
        return await state("closed") == 0

    await until(ask_until_open, "x open")
    assert x.counters.requests >= 3
    await x.heal()

    async def ask_until_closed() -> bool:
        assert (await world.post(model="fragile")).status == 200
        return await state("closed") == 1

    await until(ask_until_closed, "x closed")
    assert x.counters.served >= 1
    assert y.counters.served >= 3
    await world.until_idle()


async def test_an_aborted_retry_leaves_nothing_behind(world: World) -> None:
    """A client that leaves while the second engine has its request: one failure, one abort."""
    async with world.openai() as client:
        session, first = await settled(world, client)
    first.inject(Fault(kind=FaultKind.STATUS, status=503))
    others = [engine for engine in world.engines.values() if engine is not first]
    for engine in others:
        engine.inject(Fault(kind=FaultKind.HANG))
    body = chat_body()
    async with world.connected() as connection:
        await connection.send_head("POST", CHAT, [("x-session-id", session)], len(body))
        await connection.send(body)
        await first.until(lambda: sum(world.requests().values()) == 2)
        assert await world.inflight() == 1
    await world.until_idle()
    (second,) = (engine for engine in others if engine.counters.requests)
    await world.until_attempts({(first.name, "failure"): 1, (second.name, "aborted"): 1})
