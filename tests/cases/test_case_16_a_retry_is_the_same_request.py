"""The next attempt is at the next endpoint, with the same body, and never beside the last one."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from enum import Enum, auto
from pathlib import Path
from typing import Final, assert_never

import pytest
import pytest_asyncio
from case_bodies import FORM_TYPE, MIB, chat, form, sized_chat
from case_http1 import CHAT, Framing, Pair, Reply, chunked, head
from case_world import World, case, endpoints, fresh, standing, until

from extproc.config.values import Steering
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import CutBy, Fault, FaultKind
from extproc.lab.records import Outcome, Received

pytestmark = case(16)

# Cooldowns are short and no breaker opens, so that no test is in the way of the next. The deadline
# is one that a sound engine keeps on a busy machine, with a megabyte to be changed on the way.
CONFIG: Final = (
    """
listener: {body_limit_bytes: 3145728, header_deadline_seconds: 1.2}
breaker: {threshold: 1000, base_seconds: 0.1, max_seconds: 0.2}
"""
    + endpoints("a", "b", "c", "d")
    + """
  - {id: n1, url: "$n1", models: [renamed], upstream_model: its-own-name}
  - {id: n2, url: "$n2", models: [renamed], upstream_model: its-own-name}
"""
)
FORM: Final = "/v1/audio/transcriptions"

# What the first endpoint does, and what that is for it.
FAILURES: Final[dict[str, tuple[Fault, str]]] = {
    "refused": (Fault(kind=FaultKind.REFUSE), "failure"),
    "reset on accept": (Fault(kind=FaultKind.ACCEPT_RESET), "failure"),
    "reset at the headers": (Fault(kind=FaultKind.RESET), "failure"),
    "reset after the body": (Fault(kind=FaultKind.RESET_AFTER_BODY), "failure"),
    "no answer": (Fault(kind=FaultKind.HANG), "failure"),
    "too late": (Fault(kind=FaultKind.SLOW_HEADERS, seconds=5), "failure"),
    "500": (Fault(kind=FaultKind.STATUS, status=500), "failure"),
    "502": (Fault(kind=FaultKind.STATUS, status=502), "failure"),
    "503": (Fault(kind=FaultKind.STATUS, status=503), "failure"),
    "503 at once": (Fault(kind=FaultKind.EARLY_STATUS, status=503), "failure"),
    "504": (Fault(kind=FaultKind.STATUS, status=504), "failure"),
    "429": (Fault(kind=FaultKind.STATUS, status=429), "backpressure"),
    "429 at once": (Fault(kind=FaultKind.EARLY_STATUS, status=429), "backpressure"),
}


class Way(Enum):
    """How the request comes, and so how far its body is known when an attempt fails."""

    HEADER = auto()
    HEADER_CHUNKED = auto()
    BODY = auto()
    BODY_HTTP2 = auto()
    FORM = auto()
    RENAMED = auto()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Four engines of one model, and two that call theirs otherwise."""
    engines = [LabEngine(name, echo=True) for name in ("a", "b", "c", "d", "n1", "n2")]
    async with standing(tmp_path_factory.mktemp("case"), CONFIG, *engines) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nothing seen yet, nothing going wrong and no engine left alone."""
    await started.forget(attempts=True)
    await started.until_all_welcome()
    return started


async def settled(world: World, model: str = "m") -> tuple[Pair, LabEngine]:
    """A session, as the header that names it, and the engine that it is at.

    The one request that told is still to be booked, as a success of that engine.
    """
    session = ("x-session-id", fresh("session"))
    where = (await world.post(session, model=model)).served_by
    await world.until_idle()
    for engine in world.engines.values():
        engine.records.reset()
    return session, world.engines[where]


async def arm(engine: LabEngine, fault: Fault) -> None:
    """The fault is in force, also where Envoy has a connection that is older than it."""
    if fault.kind is FaultKind.ACCEPT_RESET:
        engine.refuse()
        await engine.accept()
    engine.inject(fault)


async def until_counted(world: World, name: str, outcome: str, count: int) -> None:
    """So many attempts of one engine have come to that."""

    async def is_counted() -> bool:
        return (await world.new_attempts()).get((name, outcome), 0) >= count

    await until(is_counted, f"{count} {outcome} of {name}")


def request(way: Way, size: int) -> tuple[str, list[Pair], bytes, bytes]:
    """Path, headers and body of a request, and the body that each engine must get."""
    match way:
        case Way.HEADER | Way.HEADER_CHUNKED:
            body = sized_chat(None, size)
            return CHAT, [("x-llmgw-model", "m")], body, body
        case Way.BODY | Way.BODY_HTTP2:
            body = sized_chat("m", size)
            return CHAT, [], body, body
        case Way.FORM:
            body = form("m", size)
            return FORM, [("content-type", FORM_TYPE)], body, body
        case Way.RENAMED:
            body = sized_chat("renamed", size)
            return CHAT, [], body, body.replace(b'"renamed"', b'"its-own-name"', 1)
        case _:
            assert_never(way)


async def send(world: World, way: Way, path: str, pairs: list[Pair], body: bytes) -> Reply:
    """The answer."""
    if way is Way.BODY_HTTP2:
        async with world.http2() as connection:
            return await connection.ask("POST", path, pairs, body)
    framing = Framing.CHUNKED if way is Way.HEADER_CHUNKED else Framing.LENGTH
    return await world.post(*pairs, path=path, body=body, framing=framing)


def digest(received: Received) -> tuple[int, str]:
    """How long a body is and what."""
    return received.body_bytes, received.body_sha256


@pytest.mark.parametrize("way", list(Way))
async def test_a_failure_is_followed_by_the_same_request(world: World, way: Way) -> None:
    """A megabyte of it, at another engine; each failure is booked once, and each success once."""
    path, pairs, body, expected = request(way, MIB)
    whole = (len(expected), hashlib.sha256(expected).hexdigest())
    attempts: Counter[tuple[str, str]] = Counter()
    for failure, (fault, outcome) in FAILURES.items():
        session, first = await settled(world, "renamed" if way is Way.RENAMED else "m")
        await arm(first, fault)
        reply = await send(world, way, path, [*pairs, session], body)
        assert reply.status == 200, (failure, reply)
        assert reply.served_by != first.name, failure
        (received,) = world.engines[reply.served_by].requests
        assert digest(received) == whole, failure
        assert len(first.requests) <= 1, failure
        for earlier in first.requests:
            if earlier.has_whole_body:
                assert digest(earlier) == whole, failure
        await first.until(lambda first=first: first.counters.active == 0, seconds=1.0)  # type: ignore[misc]  # binds this round's engine
        await first.heal()
        attempts.update([(first.name, "success"), (first.name, outcome)])
        attempts[reply.served_by, "success"] += 1
        if outcome == "backpressure":
            # It is known when Envoy's log has told it; until then the engine seems welcome.
            await until_counted(world, first.name, outcome, attempts[first.name, outcome])
            await world.until_all_welcome()
    await world.until_attempts(attempts)
    await world.until_idle()


@pytest.mark.parametrize("kind", [FaultKind.HANG, FaultKind.SLOW_HEADERS])
async def test_there_is_one_generation_at_a_time(world: World, kind: FaultKind) -> None:
    """The engine that is given up knows it while the next one is still at work."""
    session, first = await settled(world)
    first.inject(Fault(kind=kind, seconds=30))
    others = [engine for engine in world.engines.values() if engine is not first]
    for engine in others:
        engine.inject(Fault(kind=FaultKind.SLOW_HEADERS, seconds=0.9))
    asking = asyncio.create_task(world.post(session))
    await first.until(lambda: any(engine.counters.active for engine in others))
    await first.until(lambda: first.counters.active == 0, seconds=0.6)
    assert first.counters.aborted == 1
    assert [received.outcome for received in first.requests] == [Outcome.ABORTED]
    assert sum(engine.counters.active for engine in others) == 1
    assert await world.inflight() == 1
    reply = await asking
    assert reply.status == 200
    await world.until_attempts(
        {
            (first.name, "success"): 1,
            (first.name, "failure"): 1,
            (reply.served_by, "success"): 1,
        }
    )


@pytest.mark.parametrize("failure", ["refused", "reset after the body", "503", "429"])
async def test_three_attempts_at_most(world: World, failure: str) -> None:
    """At three engines, one each; then the last one's word, or a clean 503."""
    fault, outcome = FAILURES[failure]
    engines = [world.engines[name] for name in "abcd"]
    for engine in engines:
        await arm(engine, fault)
    body = sized_chat("m", MIB)
    reply = await world.post(body=body)
    assert reply.status == (429 if failure == "429" else 503), reply
    if failure in {"refused", "reset after the body"}:
        assert reply.error.code == "upstream_failed"
        assert "127.0.0.1" not in reply.body.decode()
    if failure != "refused":
        assert sorted(world.requests().values()) == [1, 1, 1]
        for engine in engines:
            for received in engine.requests:
                assert digest(received) == (len(body), hashlib.sha256(body).hexdigest())
    await world.until_outcomes({outcome: 3})
    assert set((await world.new_attempts()).values()) == {1}
    await world.until_idle()


async def test_an_upload_that_is_still_running(world: World) -> None:
    """The engine goes when it has half of the body; the next one gets all of it."""
    body = sized_chat(None, MIB)
    half = len(body) // 2
    session, first = await settled(world)
    async with world.http1() as connection:
        pairs = [("x-llmgw-model", "m"), session]
        await connection.send(head("POST", CHAT, pairs, length=len(body)) + body[:half])
        await first.until(lambda: bool(first.requests) and first.requests[0].body_bytes == half)
        first.refuse(is_abrupt=True)
        await first.until(lambda: first.counters.active == 0)
        reply = await connection.exchange(body[half:])
    assert reply.status == 200, reply
    assert reply.served_by != first.name
    (received,) = world.engines[reply.served_by].requests
    assert digest(received) == (len(body), hashlib.sha256(body).hexdigest())
    await world.until_attempts(
        {
            (first.name, "success"): 1,
            (first.name, "failure"): 1,
            (reply.served_by, "success"): 1,
        }
    )


@pytest.mark.parametrize("framing", list(Framing))
async def test_a_body_above_the_limit_is_not_sent_twice(world: World, framing: Framing) -> None:
    """It was not kept: one attempt, one clean 503, and the others see nothing."""
    session, first = await settled(world)
    first.inject(Fault(kind=FaultKind.RESET_AFTER_BODY))
    pairs: list[Pair] = [("x-llmgw-model", "m"), session]
    reply = await world.post(*pairs, body=sized_chat(None, 4 * MIB), framing=framing)
    assert reply.status == 503, reply
    assert reply.error.code == "upstream_failed"
    assert world.requests() == {first.name: 1}
    await world.until_attempts({(first.name, "success"): 1, (first.name, "failure"): 1})


async def test_nothing_is_repeated_after_the_first_byte(world: World) -> None:
    """An answer that is cut stays cut; one that ends with its connection is whole."""
    attempts: Counter[tuple[str, str]] = Counter()
    for kind, outcome in ((FaultKind.CUT, "failure"), (FaultKind.CLOSE_DELIMITED, "success")):
        session, first = await settled(world)
        first.inject(Fault(kind=kind, how=CutBy.FIN))
        reply = await world.post(session)
        if kind is FaultKind.CUT:
            # Where Envoy has not sent the headers on yet, it can still say so.
            assert reply.cut or (reply.status, reply.reason) == (502, "upstream_failed"), reply
        else:
            assert (reply.status, reply.cut) == (200, False), reply
        assert world.requests() == {first.name: 1}
        await first.heal()
        attempts.update([(first.name, "success"), (first.name, outcome)])
    await world.until_attempts(attempts)


async def test_a_trailing_chunk_after_the_failure(world: World) -> None:
    """A chunked body whose last chunk comes when the first attempt is long over."""
    session, first = await settled(world)
    first.inject(Fault(kind=FaultKind.RESET))
    body = sized_chat(None, MIB)
    async with world.http1() as connection:
        pairs = [("x-llmgw-model", "m"), session]
        start = head("POST", CHAT, pairs, length=len(body), framing=Framing.CHUNKED)
        cut = len(body) - 10
        await connection.send(start + b"%x\r\n%b\r\n" % (cut, body[:cut]))
        others = [engine for engine in world.engines.values() if engine is not first]
        await first.until(lambda: any(engine.requests for engine in others))
        reply = await connection.exchange(chunked(body[cut:]))
    assert reply.status == 200, reply
    (received,) = world.engines[reply.served_by].requests
    assert digest(received) == (len(body), hashlib.sha256(body).hexdigest())
    await world.until_attempts(
        {
            (first.name, "success"): 1,
            (first.name, "failure"): 1,
            (reply.served_by, "success"): 1,
        }
    )


async def test_without_failover(tmp_path: Path) -> None:
    """The cluster header names one cluster: one attempt, one clean 503, one failure."""
    engines = [LabEngine(name) for name in "ab"]
    text = "breaker: {threshold: 1000}\n" + endpoints("a", "b")
    async with standing(tmp_path, text, *engines, steering=Steering.CLUSTER_HEADER) as world:
        for failure in ("refused", "reset after the body", "503"):
            await world.forget(attempts=True)
            await world.until_all_welcome()
            fault, outcome = FAILURES[failure]
            for engine in engines:
                await arm(engine, fault)
            reply = await world.post(body=sized_chat("m", MIB))
            assert reply.status == 503
            assert failure == "503" or reply.error.code == "upstream_failed"
            assert sum(world.requests().values()) == (0 if failure == "refused" else 1)
            await world.until_outcomes({outcome: 1})


async def test_the_first_attempt_is_booked_though_its_client_leaves(world: World) -> None:
    """A client that goes during the second attempt: one failure and one abort."""
    session, first = await settled(world)
    first.inject(Fault(kind=FaultKind.STATUS, status=503))
    others = [engine for engine in world.engines.values() if engine is not first]
    for engine in others:
        engine.inject(Fault(kind=FaultKind.SLOW_HEADERS, seconds=0.5))
    body = chat("m")
    async with world.http1() as connection:
        await connection.send(head("POST", CHAT, [session], length=len(body)) + body)
        await first.until(lambda: any(engine.counters.active for engine in others))
    await world.until_idle()
    (second,) = (engine for engine in others if engine.counters.requests)
    await until(lambda: is_over(second), "the second attempt is given up")
    await world.until_attempts(
        {(first.name, "success"): 1, (first.name, "failure"): 1, (second.name, "aborted"): 1}
    )


async def is_over(engine: LabEngine) -> bool:
    """Whether the engine has nothing to do."""
    return engine.counters.active == 0
