"""The simulated engine as a server: life, listening, counting, clients that leave."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest
from lab_client import CHAT, Connection, Reply, call, chat, connected

from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind
from extproc.lab.records import Outcome
from extproc.lab.tally import FinishReason
from extproc.lab.wire import reset


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


async def leave(connection: Connection, *, by_reset: bool) -> None:
    """The client's end of the connection is gone."""
    if by_reset:
        reset(connection.writer.transport)  # type: ignore[arg-type]  # a TCP transport is one
    await connection.close()


async def test_it_answers_and_counts() -> None:
    """A chat completion is answered by name and shows up in counters and records."""
    async with LabEngine("a") as engine:
        reply = await call(engine, "POST", CHAT, chat(max_tokens=3))
        assert reply.status == 200
        assert reply.headers["x-served-by"] == "a"
        assert reply.json["system_fingerprint"] == "a"
        counters = engine.counters
        assert (counters.requests, counters.served, counters.streamed) == (1, 1, 0)
        assert (counters.active, counters.peak_active, counters.aborted) == (0, 1, 0)
        assert counters.by_path == {CHAT: 1}
        assert counters.by_status == {200: 1}
        (received,) = engine.requests
        assert received.outcome is Outcome.ANSWERED
        assert received.tokens_sent == 3


async def test_one_connection_serves_many_requests() -> None:
    """Keep-alive works across answers of every kind."""
    async with LabEngine() as engine, connected(engine) as connection:
        for body in (chat(), chat(stream=True), b"{", chat(model="none")):
            await connection.call("POST", CHAT, body)
        assert engine.counters.connections == 1
        assert engine.counters.by_status == {200: 2, 400: 1, 404: 1}


async def test_headers_and_body_are_recorded_as_sent() -> None:
    """Header case, order, repeats and bytes are kept, and so is the body's digest."""
    async with LabEngine() as engine, connected(engine) as connection:
        head = b"POST /v1/x?q=1 HTTP/1.1\r\nHost: lab\r\nX-One: 1\r\nx-one: \xff\xfe\r\n"
        connection.writer.write(head + b"Content-Length: 3\r\n\r\nabc")
        reply = await connection.answer()
        assert reply.status == 404
        received = engine.requests[-1]
        assert received.path == "/v1/x?q=1"
        assert received.headers[1:3] == ((b"X-One", b"1"), (b"x-one", b"\xff\xfe"))
        assert received.header("x-ONE") == [b"1", b"\xff\xfe"]
        assert received.body_start == b"abc"
        digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        assert received.body_sha256 == digest


async def test_the_times_of_a_body_show_that_it_was_streamed() -> None:
    """First and last byte are timed as they arrive, not when the body is complete."""
    async with LabEngine() as engine, connected(engine) as connection:
        body = chat()
        connection.send_head("POST", CHAT, {}, len(body))
        await engine.until(lambda: len(engine.requests) == 1)
        received = engine.requests[0]
        assert engine.requests[0].first_byte_seconds is None
        connection.writer.write(body[:10])
        await engine.until(lambda: received.body_bytes == 10)
        assert not engine.requests[0].has_whole_body
        connection.writer.write(body[10:])
        assert (await connection.answer()).status == 200
        assert received.has_whole_body
        assert received.first_byte_seconds is not None
        assert received.last_byte_seconds is not None
        assert 0 <= received.first_byte_seconds < received.last_byte_seconds


async def test_unknown_paths_are_counted_as_one() -> None:
    """Counting does not grow with the paths that clients invent."""
    async with LabEngine() as engine:
        for number in range(3):
            await call(engine, "GET", f"/junk/{number}")
        assert engine.counters.by_path == {"other": 3}


async def test_probes_are_no_requests() -> None:
    """Scrapes and health checks are recorded apart."""
    async with LabEngine() as engine:
        await call(engine, "GET", "/health")
        await call(engine, "GET", "/metrics")
        assert engine.counters.requests == 0
        assert engine.counters.by_path == {"/health": 1, "/metrics": 1}
        assert [probe.path for probe in engine.probes] == ["/health", "/metrics"]


async def test_the_batch_limit_queues_and_hold_stops_time() -> None:
    """While the engine is held, two run and one waits; released, all are answered."""
    async with LabEngine(settings=EngineSettings(max_running=2)) as engine:
        engine.hold()
        calls = [asyncio.create_task(call(engine, "POST", CHAT, chat())) for _ in range(3)]
        await engine.until(lambda: (engine.running, engine.waiting) == (2, 1))
        assert engine.counters.active == 3
        engine.release()
        replies = await asyncio.gather(*calls)
        assert [reply.status for reply in replies] == [200, 200, 200]
        assert (engine.running, engine.waiting, engine.counters.active) == (0, 0, 0)


@pytest.mark.parametrize("by_reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_slot(*, stream: bool, by_reset: bool) -> None:
    """Whether it waits for headers or for tokens, its slot is free within 50 ms."""
    loop = asyncio.get_running_loop()
    body = chat(stream=stream)
    took: list[float] = []
    async with LabEngine(settings=EngineSettings(max_running=1)) as engine:
        engine.hold()
        for _ in range(5):
            async with connected(engine) as connection:
                connection.send_head("POST", CHAT, {}, len(body))
                connection.writer.write(body)
                await engine.until(lambda: engine.running == 1)
                if stream:
                    await connection.head()
                await leave(connection, by_reset=by_reset)
                left_at = loop.time()
                await engine.until(lambda: engine.running == 0)
                took.append(loop.time() - left_at)
        # A busy machine may hold up some of them, not all.
        assert min(took) < 0.05
        assert engine.counters.aborted == 5
        assert engine.counters.active == 0
        assert engine.counters.served == 0
        assert engine.engines[0].totals.finished[FinishReason.ABORT] == 5
        assert engine.requests[0].outcome is Outcome.ABORTED


async def test_a_client_that_leaves_the_queue_is_forgotten() -> None:
    """A request that waits for a slot goes when its client does; the running one goes on."""
    async with LabEngine(settings=EngineSettings(max_running=1)) as engine:
        engine.hold()
        running = asyncio.create_task(call(engine, "POST", CHAT, chat()))
        await engine.until(lambda: engine.running == 1)
        async with connected(engine) as connection:
            connection.send_head("POST", CHAT, {}, len(chat()))
            connection.writer.write(chat())
            await engine.until(lambda: engine.waiting == 1)
        await engine.until(lambda: engine.waiting == 0)
        assert engine.counters.aborted == 1
        engine.release()
        assert (await running).status == 200


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_counted() -> None:
    """A body that never ends is an abort, not an answer."""
    async with LabEngine() as engine:
        async with connected(engine) as connection:
            connection.send_head("POST", CHAT, {}, 1000)
            connection.writer.write(b"{")
            await engine.until(lambda: bool(engine.requests and engine.requests[0].body_bytes))
        await engine.until(lambda: engine.counters.active == 0)
        assert engine.counters.aborted == 1
        assert not engine.requests[0].has_whole_body


async def test_a_client_that_leaves_in_the_middle_of_a_stream_is_counted() -> None:
    """After some tokens the stream's end is an abort; the tokens that were sent are known."""
    async with LabEngine() as engine:
        async with connected(engine) as connection:
            body = chat(stream=True, max_tokens=20_000)
            connection.send_head("POST", CHAT, {}, len(body))
            connection.writer.write(body)
            await connection.head()
            await engine.until(lambda: engine.requests[0].tokens_sent > 2)
        await engine.until(lambda: engine.counters.active == 0)
        assert engine.counters.aborted == 1
        assert engine.engines[0].kv_used_tokens == 0


async def test_a_client_that_stops_reading_can_still_leave() -> None:
    """A full connection does not keep a slot when it goes."""
    fast = EngineSettings(decode_tokens_per_second=1e6, kv_tokens=10**7, max_model_tokens=10**6)
    async with LabEngine(settings=fast, token_bytes=1000) as engine:
        async with connected(engine) as connection:
            body = chat(stream=True, max_tokens=100_000)
            connection.send_head("POST", CHAT, {}, len(body))
            connection.writer.write(body)
            await engine.until(lambda: bool(engine.requests and engine.requests[0].tokens_sent))
            sent = -1
            while sent != engine.requests[0].tokens_sent:  # until the connection takes no more
                sent = engine.requests[0].tokens_sent
                await asyncio.sleep(0.05)
            await leave(connection, by_reset=True)
        await engine.until(lambda: engine.counters.active == 0)
        assert engine.counters.aborted == 1
        assert engine.requests[0].tokens_sent < 100_000


async def test_refusal_closes_the_port_and_accept_opens_it_again() -> None:
    """Refused connections fail at connect; the port stays the engine's own."""
    async with LabEngine() as engine:
        port = engine.port
        for _ in range(3):
            engine.inject(Fault(kind=FaultKind.REFUSE))
            with pytest.raises(ConnectionRefusedError):
                await call(engine, "GET", "/health")
            await engine.heal()
            assert (await call(engine, "GET", "/health")).status == 200
        assert engine.port == port


async def test_refusal_ends_idle_connections_and_spares_busy_ones() -> None:
    """A request in progress gets its answer; a connection that waits for one is closed."""
    async with LabEngine() as engine, connected(engine) as idle, connected(engine) as busy:
        await idle.call("GET", "/health")
        engine.hold()
        busy.send_head("POST", CHAT, {}, len(chat()))
        busy.writer.write(chat())
        await engine.until(lambda: engine.running == 1)
        engine.refuse()
        async with asyncio.timeout(5):
            assert await idle.reader.read() == b""
        engine.release()
        assert (await busy.answer()).status == 200


async def test_refusal_can_end_by_itself() -> None:
    """After its seconds the port is open again."""
    async with LabEngine() as engine:
        engine.inject(Fault(kind=FaultKind.REFUSE, seconds=0.05))
        with pytest.raises(ConnectionRefusedError):
            await call(engine, "GET", "/health")
        reply: Reply | None = None
        while reply is None:
            await asyncio.sleep(0.01)
            try:
                reply = await call(engine, "GET", "/health")
            except ConnectionRefusedError:
                continue
        assert reply.status == 200


async def test_a_kill_resets_everything() -> None:
    """Busy connections get a reset, new ones are refused."""
    async with LabEngine() as engine, connected(engine) as busy:
        engine.hold()
        busy.send_head("POST", CHAT, {}, len(chat()))
        busy.writer.write(chat())
        await engine.until(lambda: engine.running == 1)
        engine.inject(Fault(kind=FaultKind.KILL))
        with pytest.raises(ConnectionResetError):
            await busy.answer()
        with pytest.raises(ConnectionRefusedError):
            await call(engine, "GET", "/health")
        await engine.until(lambda: engine.running == 0)


async def test_it_can_start_refusing() -> None:
    """Faults given at construction are there from the start, a closed port too."""
    faults = [Fault(kind=FaultKind.REFUSE), Fault(kind=FaultKind.STATUS, times=1)]
    async with LabEngine(faults=faults) as engine:
        with pytest.raises(ConnectionRefusedError):
            await call(engine, "GET", "/health")
        await engine.accept()
        assert (await call(engine, "POST", CHAT, chat())).status == 503
        assert (await call(engine, "POST", CHAT, chat())).status == 200


async def test_a_control_port_answers_while_connections_are_refused() -> None:
    """Another process can end what it began."""
    async with LabEngine(control_port=0) as engine:
        engine.refuse()
        reply = await call(engine, "DELETE", "/lab/faults", port=engine.control_port)
        assert reply.status == 200
        assert (await call(engine, "GET", "/health")).status == 200


async def test_it_restarts_on_the_same_port() -> None:
    """Stopped and started it is the same address with an empty batch, and counts go on."""
    engine = LabEngine()
    await engine.start()
    port = engine.port
    await call(engine, "POST", CHAT, chat())
    await engine.stop()
    with pytest.raises(ConnectionRefusedError):
        await call(engine, "GET", "/health")
    await engine.start()
    assert engine.port == port
    await call(engine, "POST", CHAT, chat())
    assert engine.counters.requests == 2
    assert engine.engines[0].totals.finished[FinishReason.STOP] == 1
    await engine.stop()
    await engine.stop()


async def test_stopping_does_not_wait_for_requests() -> None:
    """Requests in every phase end when the engine does."""
    engine = LabEngine()
    await engine.start()
    engine.hold()
    calls = [asyncio.create_task(call(engine, "POST", CHAT, chat(stream=s))) for s in (True, False)]
    async with connected(engine) as unsent:
        unsent.send_head("POST", CHAT, {}, 100)
        await engine.until(lambda: engine.counters.active == 3)
        async with asyncio.timeout(5):
            await engine.stop()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(
        isinstance(r, Exception) or (isinstance(r, Reply) and r.error is not None) for r in results
    )
    assert engine.counters.active == 0


async def test_dozens_live_in_one_process() -> None:
    """Forty engines answer side by side, each with its own name."""
    engines = [LabEngine(f"e{number}") for number in range(40)]
    await asyncio.gather(*(engine.start() for engine in engines))
    replies = await asyncio.gather(*(call(e, "POST", CHAT, chat(max_tokens=1)) for e in engines))
    assert [r.headers["x-served-by"] for r in replies] == [e.name for e in engines]
    await asyncio.gather(*(engine.stop() for engine in engines))


async def test_it_speaks_tls(tmp_path: Path) -> None:
    """With a context the URL is https and requests are answered over TLS."""
    cert, key = certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    trusting = ssl.create_default_context(cafile=cert)
    async with LabEngine(tls=tls) as engine, aiohttp.ClientSession() as session:
        assert engine.url.startswith("https://")
        async with session.post(engine.url + CHAT, data=chat(), ssl=trusting) as answer:
            assert answer.status == 200
        engine.inject(Fault(kind=FaultKind.RESET))
        with pytest.raises(aiohttp.ClientError):
            await session.post(engine.url + CHAT, data=chat(), ssl=trusting)
        with pytest.raises((ConnectionError, EOFError)):
            await call(engine, "GET", "/health")


async def test_before_the_start_there_is_nothing_to_ask() -> None:
    """State that only a started engine has is an error, not a wrong number."""
    engine = LabEngine("x", host="::1")
    assert engine.authority == "[::1]:0"
    assert engine.url == "http://[::1]:0"
    assert engine.control_port is None
    with pytest.raises(RuntimeError, match="not started"):
        _ = engine.desk
    with pytest.raises(RuntimeError, match="not started"):
        engine.refuse()


async def test_waiting_in_vain_is_an_error() -> None:
    """A condition that does not come true is reported with the counters."""
    async with LabEngine() as engine:
        with pytest.raises(TimeoutError, match="engine: not within"):
            await engine.until(lambda: False, seconds=0.01)


async def test_every_request_is_a_line_in_the_log() -> None:
    """The line says who, what, how it ended and by which fault."""
    lines: list[str] = []
    async with LabEngine("a", log=lines.append) as engine:
        engine.inject(Fault(kind=FaultKind.STATUS, status=429, times=1))
        for _ in range(2):
            await call(engine, "POST", CHAT, chat(max_tokens=2))
    assert lines[0].startswith(f"a POST {CHAT} 429 answered tokens=0 seconds=")
    assert lines[0].endswith("fault=status")
    assert lines[1].startswith(f"a POST {CHAT} 200 answered tokens=2 seconds=")


async def test_bad_http_is_answered_and_leaves_no_trace() -> None:
    """A request line that is none gets 400 from the HTTP library; nothing is counted."""
    async with LabEngine() as engine, connected(engine) as connection:
        connection.writer.write(b"nonsense\r\n\r\n")
        assert (await connection.answer()).status == 400
        assert engine.counters.requests == 0


async def test_a_broken_chunked_body_is_no_answer() -> None:
    """A request whose chunks make no sense ends as left by its client, once that is gone."""
    async with LabEngine() as engine:
        async with connected(engine) as connection:
            connection.send_head("POST", CHAT, {"transfer-encoding": "chunked"}, None)
            await engine.until(lambda: engine.counters.active == 1)
            connection.writer.write(b"zz\r\n")
        await engine.until(lambda: engine.counters.active == 0)
        assert engine.counters.aborted == 1


async def test_ranks_share_the_requests() -> None:
    """Two data-parallel ranks take one each, and the page shows both."""
    async with LabEngine(ranks=2) as engine:
        engine.hold()
        calls = [asyncio.create_task(call(engine, "POST", CHAT, chat())) for _ in range(2)]
        await engine.until(lambda: engine.running == 2)
        assert [len(one.running) for one in engine.engines] == [1, 1]
        page = (await call(engine, "GET", "/metrics")).body
        for rank in (0, 1):
            line = f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} 1.0\n'
            assert line.encode() in page
        engine.release()
        await asyncio.gather(*calls)


async def test_the_page_follows_load_and_shows_what_it_is_told() -> None:
    """Running and usage rise while a request is in, fall after it, and can be overruled."""
    async with LabEngine() as engine:
        engine.hold()
        task = asyncio.create_task(call(engine, "POST", CHAT, chat()))
        await engine.until(lambda: engine.running == 1)
        busy = (await call(engine, "GET", "/metrics")).body
        assert b'vllm:num_requests_running{engine="0",model_name="m"} 1.0\n' in busy
        assert b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0\n' not in busy
        engine.release()
        await task
        idle = (await call(engine, "GET", "/metrics")).body
        assert b'vllm:num_requests_running{engine="0",model_name="m"} 0.0\n' in idle
        assert b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0\n' in idle
        assert b'request_success_total{engine="0",finished_reason="stop",model_name="m"} 1' in idle
        engine.show(running=7, waiting=40, kv_usage_ratio=0.9)
        told = (await call(engine, "GET", "/metrics")).body
        assert b'vllm:num_requests_waiting{engine="0",model_name="m"} 40.0\n' in told
        assert json.loads((await call(engine, "GET", "/load")).body) == {"server_load": 47}
