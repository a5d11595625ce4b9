"""However an answer ends, it is counted once and nothing stays in flight."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

import pytest
import pytest_asyncio
from case_bodies import MIB, chat, sized_chat
from case_http1 import CHAT, Framing, Pair, Reply, head
from case_world import (
    DURATIONS,
    STREAMS,
    TIMES_TO_HEADERS,
    World,
    case,
    standing,
)

from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import CutBy, Fault, FaultKind

pytestmark = case(23)

# No breaker opens and a pause is over at once, so that no test is in the way of the next.
CONFIG: Final = """
breaker: {threshold: 1000, base_seconds: 0.1, max_seconds: 0.1}
endpoints:
  - {id: a, url: "$a", models: [m]}
  - {id: n, url: "$n", models: [renamed], upstream_model: m}
"""
EMPTY: Final = {"content-type": "text/plain"}


@dataclass(frozen=True, slots=True)
class Ending:
    """One way in which an answer can come and end: what the engine does, what that comes to."""

    fault: Fault | None
    status: int
    outcome: str
    stream: bool = False
    cut: bool = False


def status_fault(status: int, body: str | None = None) -> Fault:
    """The engine answers so once the request is there."""
    return Fault(kind=FaultKind.STATUS, status=status, body=body, headers=EMPTY)


def early(status: int) -> Fault:
    """The engine answers so before it has read any of the body."""
    return Fault(kind=FaultKind.EARLY_STATUS, status=status)


ENDINGS: Final[dict[str, Ending]] = {
    "json": Ending(None, 200, "success"),
    "stream": Ending(None, 200, "success", stream=True),
    "trailers": Ending(Fault(kind=FaultKind.TRAILERS), 200, "success"),
    "stream and trailers": Ending(Fault(kind=FaultKind.TRAILERS), 200, "success", stream=True),
    "ends with its connection": Ending(Fault(kind=FaultKind.CLOSE_DELIMITED), 200, "success"),
    "stream, ends with its connection": Ending(
        Fault(kind=FaultKind.CLOSE_DELIMITED), 200, "success", stream=True
    ),
    "103 before": Ending(Fault(kind=FaultKind.INFORMATIONAL, status=103), 200, "success"),
    "102 before": Ending(Fault(kind=FaultKind.INFORMATIONAL, status=102), 200, "success"),
    "100 before": Ending(Fault(kind=FaultKind.INFORMATIONAL, status=100), 200, "success"),
    "204": Ending(status_fault(204), 204, "success"),
    "304": Ending(status_fault(304), 304, "success"),
    "empty": Ending(status_fault(200, ""), 200, "success"),
    "redirect": Ending(status_fault(307, ""), 307, "success"),
    "early 200": Ending(early(200), 200, "success"),
    "early 400": Ending(early(400), 400, "client_error"),
    "early 401": Ending(early(401), 401, "misconfigured"),
    "early 413": Ending(early(413), 413, "client_error"),
    "early 429": Ending(early(429), 429, "backpressure"),
    "early 500": Ending(early(500), 500, "failure"),
    "422": Ending(status_fault(422), 422, "client_error"),
    "503": Ending(status_fault(503), 503, "failure"),
    "error in the stream": Ending(
        Fault(kind=FaultKind.ERROR_EVENT, chunks=2), 200, "success", stream=True
    ),
    "cut": Ending(
        Fault(kind=FaultKind.CUT, chunks=2, how=CutBy.FIN), 200, "failure", stream=True, cut=True
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Two engines, one of which calls its model otherwise."""
    engines = [LabEngine(name) for name in "an"]
    async with standing(tmp_path_factory.mktemp("case"), CONFIG, *engines) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nothing seen yet and nothing going wrong."""
    await started.forget(attempts=True)
    await started.until_all_welcome()
    return started


async def counts(world: World) -> dict[str, int]:
    """How often the time of an answer, and the time to its headers, was taken since `forget`."""
    return {name: await world.new(name) for name in (DURATIONS, TIMES_TO_HEADERS)}


@pytest.mark.parametrize("what", list(ENDINGS))
async def test_an_ending(world: World, what: str) -> None:
    """In both versions of HTTP, with the model in the body, in a header, or to be changed."""
    ending = ENDINGS[what]
    asked: list[tuple[str, list[Pair]]] = [
        ("m", []),
        ("m", [("x-llmgw-model", "m")]),
        ("renamed", []),
    ]
    number = 0
    for model, pairs in asked:
        engine = world.engines["n" if model == "renamed" else "a"]
        if ending.fault is not None:
            engine.inject(ending.fault)
        body = chat(model, stream=ending.stream)
        for version in (1, 2):
            number += 1
            if version == 1:
                reply = await world.post(*pairs, body=body)
            else:
                async with world.http2() as connection:
                    reply = await connection.ask("POST", CHAT, pairs, body)
            if ending.cut and reply.status == 502:
                # Envoy has not sent the headers on yet, and can still say so.
                assert reply.reason == "upstream_failed", reply
            else:
                assert (reply.status, reply.cut) == (ending.status, ending.cut), reply
                assert reply.reason is None
            await world.until_idle()
            assert await counts(world) == {DURATIONS: number, TIMES_TO_HEADERS: number}
            await world.until_all_welcome()
    assert (await world.page()).total(STREAMS) == 0
    await world.until_outcomes({ending.outcome: number})
    assert await counts(world) == {DURATIONS: number, TIMES_TO_HEADERS: number}


@pytest.mark.parametrize("status", [200, 400, 429, 500])
@pytest.mark.parametrize("framing", [*Framing, None])
async def test_an_answer_before_the_body_is_there(
    world: World, status: int, framing: Framing | None
) -> None:
    """Half of the body never comes: the request is over when its answer is."""
    world.engines["a"].inject(early(status))
    body = sized_chat(None, MIB)
    half = body[: MIB // 2]
    named = [("x-llmgw-model", "m")]
    if framing is None:
        async with world.http2() as connection:
            stream = await connection.begin("POST", CHAT, named)
            await connection.data(stream, half, ends=False)
            reply = await connection.answer(stream)
            await world.until_idle()
    else:
        async with world.http1() as raw:
            start = head("POST", CHAT, named, length=MIB, framing=framing)
            sent = b"%x\r\n%b\r\n" % (len(half), half) if framing is Framing.CHUNKED else half
            await raw.send(start + sent)
            reply = await raw.answer()
            await world.until_idle()
    assert reply.status == status, reply
    outcomes = {200: "success", 400: "client_error", 429: "backpressure", 500: "failure"}
    await world.until_outcomes({outcomes[status]: 1})
    assert await counts(world) == {DURATIONS: 1, TIMES_TO_HEADERS: 1}


async def test_continue_is_one_answer_and_not_the_end(world: World) -> None:
    """The interim answer is passed on or made by Envoy; the request goes on."""
    body = chat("m")
    async with world.http1() as connection:
        pairs = [("expect", "100-continue"), ("x-llmgw-model", "m")]
        await connection.send(head("POST", CHAT, pairs, length=len(body)))
        assert await connection.interim() == 100
        await world.until_inflight(1)
        await connection.send(body)
        reply = await connection.answer()
    assert reply.status == 200
    await world.until_idle()
    await world.until_attempts({("a", "success"): 1})
    assert await counts(world) == {DURATIONS: 1, TIMES_TO_HEADERS: 1}


async def test_answers_without_an_engine(world: World) -> None:
    """Lists, HEAD, OPTIONS, refusals: nothing is in flight, nothing is booked."""
    replies: list[Reply] = []
    for method, path in (
        ("HEAD", "/v1/models"),
        ("GET", "/v1/models"),
        ("HEAD", "/ready"),
        ("OPTIONS", CHAT),
        ("GET", CHAT),
        ("HEAD", CHAT),
    ):
        replies.append(await world.ask(method, path))
        async with world.http2() as connection:
            replies.append(await connection.ask(method, path))
    replies.append(await world.post(model="nobody"))
    replies.append(await world.post(body=b"{"))
    replies.append(await world.post(body=sized_chat("m", 33 * MIB)))
    statuses = [200, 200, 200, 200, 200, 200, 204, 204, 405, 405, 405, 405, 404, 400, 413]
    assert [reply.status for reply in replies] == statuses
    assert await world.inflight() == 0
    assert await counts(world) == {DURATIONS: 0, TIMES_TO_HEADERS: 0}
    assert await world.new_attempts() == {}
    assert (await world.page()).total(STREAMS) == 0


async def test_a_connection_is_good_for_the_next_request(world: World) -> None:
    """After every ending that leaves it open, twenty requests on one connection."""
    async with world.http1() as connection:
        for number in range(20):
            is_stream = bool(number % 2)
            reply = await connection.ask("POST", CHAT, [], chat("m", stream=is_stream))
            assert (reply.status, reply.cut) == (200, False)
    await world.until_idle()
    await world.until_attempts({("a", "success"): 20})
    assert await counts(world) == {DURATIONS: 20, TIMES_TO_HEADERS: 20}


async def test_an_answer_that_nobody_reads(world: World) -> None:
    """A client that stops reading and goes: its request is over when it has gone."""
    async with world.http1() as connection:
        body = chat("m", stream=True, max_tokens=20_000)
        await connection.send(head("POST", CHAT, length=len(body)) + body)
        assert (await connection.start()).status == 200
        await world.until_inflight(1)
        connection.reset()
    await world.until_idle()
    await world.until_attempts({("a", "aborted"): 1})
