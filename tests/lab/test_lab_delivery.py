"""Every fault of the API, as it looks on the wire and in the counters."""

from __future__ import annotations

import asyncio
import json

import pytest
from lab_client import CHAT, Reply, call, chat, connected

from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import CutBy, Fault, FaultKind
from extproc.lab.records import Outcome

STREAM = chat(stream=True, max_tokens=10)


def content(reply: Reply) -> int:
    """How many content chunks came whole."""
    whole = reply.body.rpartition(b"\n\n")[0]
    return sum(b'"delta":{"content"' in line for line in whole.split(b"\n\n"))


async def test_reset_comes_before_headers_and_body() -> None:
    """The connection is reset although the body was never sent."""
    async with LabEngine() as engine, connected(engine) as connection:
        engine.inject(Fault(kind=FaultKind.RESET, times=1))
        connection.send_head("POST", CHAT, {}, 100)
        with pytest.raises(ConnectionResetError):
            await connection.answer()
        await engine.until(lambda: engine.counters.active == 0)
        assert engine.counters.faulted == 1
        assert engine.counters.aborted == 0
        assert engine.requests[0].outcome is Outcome.FAULTED
        assert engine.requests[0].body_bytes == 0
        assert (await call(engine, "POST", CHAT, chat())).status == 200


async def test_reset_after_body_has_read_it_all() -> None:
    """The connection is reset only when the whole request has come."""
    async with LabEngine() as engine:
        engine.inject(Fault(kind=FaultKind.RESET_AFTER_BODY, times=1))
        with pytest.raises(ConnectionResetError):
            await call(engine, "POST", CHAT, chat())
        assert engine.requests[0].has_whole_body
        assert engine.requests[0].body_bytes == len(chat())
        assert engine.engines[0].totals.prompt_tokens == 0


async def test_a_connection_can_be_reset_at_accept() -> None:
    """The first connections are reset before a request is read, the next is served."""
    async with LabEngine() as engine:
        engine.inject(Fault(kind=FaultKind.ACCEPT_RESET, times=2))
        for _ in range(2):
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await call(engine, "POST", CHAT, chat())
        assert (await call(engine, "POST", CHAT, chat())).status == 200
        assert engine.counters.requests == 1
        assert engine.counters.connections == 3


@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize("how", list(CutBy))
async def test_a_stream_is_cut_after_so_many_chunks(how: CutBy, after: int) -> None:
    """Exactly the chunks that were asked for arrive, then a reset or an early end."""
    async with LabEngine() as engine:
        engine.inject(Fault(kind=FaultKind.CUT, chunks=after, how=how, times=1))
        reply = await call(engine, "POST", CHAT, STREAM)
        assert reply.status == 200
        assert content(reply) == after
        assert reply.error is (
            ConnectionResetError if how is CutBy.RST else asyncio.IncompleteReadError
        )
        await engine.until(lambda: engine.counters.active == 0)
        assert engine.counters.aborted == engine.counters.served == 0
        assert engine.requests[0].tokens_sent == after
        assert engine.running == 0


async def test_a_cut_after_more_chunks_than_there_are_takes_the_end() -> None:
    """All tokens arrive and the finish does not."""
    async with LabEngine() as engine:
        engine.inject(Fault(kind=FaultKind.CUT, chunks=99, how=CutBy.FIN))
        reply = await call(engine, "POST", CHAT, STREAM)
        assert content(reply) == 10
        assert b"finish_reason" in reply.body
        assert b"[DONE]" not in reply.body


async def test_a_body_is_cut_in_half() -> None:
    """An answer that is not streamed ends before its content length."""
    async with LabEngine() as engine:
        engine.inject(Fault(kind=FaultKind.CUT, how=CutBy.FIN))
        reply = await call(engine, "POST", CHAT, chat())
        assert reply.error is asyncio.IncompleteReadError
        assert len(reply.body) == int(reply.headers["content-length"]) // 2


async def test_a_status_comes_with_its_headers_and_body() -> None:
    """The answer is what the fault says, in the plain API envelope unless it has a body."""
    async with LabEngine("a") as engine, connected(engine) as connection:
        engine.inject(
            Fault(kind=FaultKind.STATUS, status=429, headers={"Retry-After": "2"}, times=1),
            Fault(kind=FaultKind.STATUS, status=503, body="busy", times=1),
            Fault(kind=FaultKind.STATUS, status=204, times=1),
            Fault(kind=FaultKind.STATUS, status=529, path="/v1/messages"),
        )
        limited = await connection.call("POST", CHAT, chat())
        assert (limited.status, limited.headers["retry-after"]) == (429, "2")
        assert limited.headers["x-served-by"] == "a"
        assert limited.json["error"]["code"] == 429
        busy = await connection.call("POST", CHAT, chat())
        assert (busy.status, busy.body) == (503, b"busy")
        empty = await connection.call("POST", CHAT, chat())
        assert (empty.status, empty.body) == (204, b"")
        assert "content-length" not in empty.headers
        assert (await connection.call("POST", CHAT, chat())).status == 200
        overloaded = await connection.call("POST", "/v1/messages", b"{}")
        assert overloaded.json["error"]["type"] == "overloaded_error"
        assert engine.counters.by_status == {429: 1, 503: 1, 204: 1, 200: 1, 529: 1}
        assert engine.counters.served == 2
        assert engine.counters.faulted == 4


async def test_an_early_status_does_not_wait_for_the_body() -> None:
    """The answer is there while most of the body has not been sent."""
    async with LabEngine() as engine, connected(engine) as connection:
        engine.inject(Fault(kind=FaultKind.EARLY_STATUS, status=400, times=1))
        connection.send_head("POST", CHAT, {}, 1000)
        connection.writer.write(b"x")
        assert (await connection.answer()).status == 400
        assert not engine.requests[0].has_whole_body
        assert engine.counters.active == 0


async def test_slow_headers_come_in_the_end() -> None:
    """The answer is whole, and later by the delay."""
    async with LabEngine() as engine:
        engine.inject(Fault(kind=FaultKind.SLOW_HEADERS, seconds=0.1))
        reply = await call(engine, "POST", CHAT, chat(stream=True))
        assert reply.body.endswith(b"data: [DONE]\n\n")
        assert engine.requests[0].answer_seconds is not None
        assert engine.requests[0].answer_seconds >= 0.1
        assert engine.counters.served == engine.counters.faulted == 1


async def test_a_hang_never_answers_and_takes_no_slot() -> None:
    """The request is read and nothing comes; when its client leaves, that is an abort."""
    async with LabEngine() as engine:
        engine.inject(Fault(kind=FaultKind.HANG))
        async with connected(engine) as connection:
            connection.send_head("POST", CHAT, {}, len(chat()))
            connection.writer.write(chat())
            await engine.until(lambda: bool(engine.requests and engine.requests[0].has_whole_body))
            assert engine.running == 0
        await engine.until(lambda: engine.counters.active == 0)
        assert engine.counters.aborted == engine.counters.faulted == 1
        assert engine.requests[0].status is None


async def test_a_stall_stops_in_the_middle_for_good() -> None:
    """So many chunks come and no more, on an open connection."""
    async with LabEngine() as engine, connected(engine) as connection:
        engine.inject(Fault(kind=FaultKind.STALL, chunks=2))
        connection.send_head("POST", CHAT, {}, len(STREAM))
        connection.writer.write(STREAM)
        await connection.head()
        await engine.until(lambda: engine.requests[0].tokens_sent == 2)
        await engine.until(lambda: engine.running == 0)  # the model is through, the stream is not
        assert engine.counters.active == 1
        assert engine.requests[0].tokens_sent == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stall_with_an_end_loses_nothing(*, stream: bool) -> None:
    """After its seconds the rest of the answer comes."""
    async with LabEngine() as engine:
        engine.inject(Fault(kind=FaultKind.STALL, chunks=2, seconds=0.02))
        reply = await call(engine, "POST", CHAT, chat(stream=stream, max_tokens=10))
        assert reply.error is None
        assert content(reply) == (10 if stream else 0)
        assert engine.counters.served == 1


async def test_an_error_event_comes_inside_a_200() -> None:
    """After so many chunks the stream says that it failed, and ends in order."""
    async with LabEngine() as engine, connected(engine) as connection:
        engine.inject(Fault(kind=FaultKind.ERROR_EVENT, chunks=1))
        reply = await connection.call("POST", CHAT, STREAM)
        assert (reply.status, content(reply)) == (200, 1)
        assert reply.events[-1]["error"]["type"] == "InternalServerError"
        assert reply.body.endswith(b"data: [DONE]\n\n")
        assert engine.requests[0].outcome is Outcome.FAULTED
        assert engine.counters.served == 0
        assert (await connection.call("POST", CHAT, chat())).status == 500


@pytest.mark.parametrize(
    ("path", "body", "event"),
    [
        (
            "/v1/messages",
            {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]},
            "error",
        ),
        ("/v1/responses", {"input": "x"}, "error"),
    ],
)
async def test_an_error_event_can_be_the_first_one(
    path: str, body: dict[str, object], event: str
) -> None:
    """With no chunks before it the error is the whole stream, in each API's words."""
    async with LabEngine() as engine:
        engine.inject(Fault(kind=FaultKind.ERROR_EVENT))
        reply = await call(engine, "POST", path, json.dumps({**body, "stream": True}).encode())
        assert reply.body.startswith(f"event: {event}\ndata: ".encode())
        assert len(reply.events) == 1


async def test_an_interim_answer_comes_first() -> None:
    """103 with its headers precedes an ordinary answer on a connection that goes on."""
    async with LabEngine() as engine, connected(engine) as connection:
        engine.inject(
            Fault(kind=FaultKind.INFORMATIONAL, headers={"link": "</x>"}, times=1),
            Fault(kind=FaultKind.INFORMATIONAL, status=102, times=1),
        )
        first = await connection.call("POST", CHAT, chat())
        second = await connection.call("POST", CHAT, chat(stream=True))
        assert (first.interim, first.status) == ((103,), 200)
        assert (second.interim, second.status) == ((102,), 200)
        assert engine.counters.served == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_trailers_end_the_answer(*, stream: bool) -> None:
    """The whole answer comes in chunks, with trailers behind it."""
    async with LabEngine("a") as engine:
        engine.inject(Fault(kind=FaultKind.TRAILERS, headers={"x-end": "1"}))
        reply = await call(engine, "POST", CHAT, chat(stream=stream))
        assert reply.trailers == {"x-end": "1"}
        assert reply.headers["x-served-by"] == "a"
        assert reply.body.endswith(b"data: [DONE]\n\n" if stream else b"}")
        await engine.until(lambda: engine.counters.served == 1)
        assert engine.counters.aborted == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_can_end_with_its_connection(*, stream: bool) -> None:
    """There is neither length nor chunking; the body is whole when the connection closes."""
    async with LabEngine() as engine:
        engine.inject(Fault(kind=FaultKind.CLOSE_DELIMITED))
        reply = await call(engine, "POST", CHAT, chat(stream=stream))
        assert "content-length" not in reply.headers
        assert "transfer-encoding" not in reply.headers
        assert reply.body.endswith(b"data: [DONE]\n\n" if stream else b"}")
        await engine.until(lambda: engine.counters.served == 1)


async def test_a_fault_without_a_path_spares_probes() -> None:
    """Health checks fail only when the fault names them."""
    async with LabEngine() as engine:
        engine.inject(Fault(kind=FaultKind.STATUS))
        assert (await call(engine, "GET", "/health")).status == 200
        assert (await call(engine, "GET", "/v1/models")).status == 503
        await engine.heal()
        engine.inject(Fault(kind=FaultKind.STATUS, path="/health"))
        assert (await call(engine, "GET", "/health")).status == 503
        assert (await call(engine, "GET", "/v1/models")).status == 200


async def test_a_client_may_leave_a_hand_written_answer() -> None:
    """The stream with trailers notices that nobody reads it any more."""
    async with LabEngine() as engine:
        engine.inject(Fault(kind=FaultKind.TRAILERS))
        async with connected(engine) as connection:
            body = chat(stream=True, max_tokens=20_000)
            connection.send_head("POST", CHAT, {}, len(body))
            connection.writer.write(body)
            await connection.head()
            await engine.until(lambda: engine.requests[0].tokens_sent > 2)
        await engine.until(lambda: engine.counters.active == 0)
        assert engine.counters.aborted == 1
