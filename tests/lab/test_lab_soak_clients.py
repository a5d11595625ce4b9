"""The clients of a soak against its own cheap engine, and the relay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest

from extproc.lab.soak.asking import CHAT, MODEL, MUTE, Ask, Leaving, Plan, Result
from extproc.lab.soak.canned import Canned
from extproc.lab.soak.http1 import Http1
from extproc.lab.soak.relay import Relay

BODY = b'{"model": "m", "messages": []}'
STREAM_BODY = b'{"model": "m", "stream": true, "messages": []}'


@pytest.fixture
async def engine() -> AsyncIterator[Canned]:
    """A cheap engine that serves."""
    async with Canned("a") as one:
        yield one


def client(engine: Canned) -> Http1:
    """A client of the engine."""
    host, _, port = engine.url.removeprefix("http://").partition(":")
    return Http1(host, int(port), Random(1))


def asked(ask: Ask = Ask.IN_BODY, leaving: Leaving | None = None, *, is_mute: bool = False) -> Plan:
    """A request of that kind."""
    pairs = ((MUTE, "1"),) if is_mute else ()
    return Plan(ask, "POST", CHAT, pairs, STREAM_BODY if ask is Ask.STREAM else BODY, leaving)


async def test_answers_and_streams_are_whole(engine: Canned) -> None:
    """Many on one connection, each as its kind has it."""
    one = client(engine)
    for ask in (Ask.IN_BODY, Ask.STREAM, Ask.STREAM, Ask.IN_BODY):
        result = await one.ask(asked(ask))
        assert (result.status, result.served_by, result.problem) == (200, "a", None)
    assert engine.requests == 4
    one.drop()


@pytest.mark.parametrize("leaving", list(Leaving))
async def test_a_client_leaves_where_it_is_told(engine: Canned, leaving: Leaving) -> None:
    """And asks again on a new connection."""
    one = client(engine)
    ask = Ask.IN_BODY if leaving is Leaving.WAITING else Ask.STREAM
    result = await one.ask(asked(ask, leaving, is_mute=True))
    assert result.has_left
    assert result.problem is None
    assert (await one.ask(asked())).problem is None
    one.drop()


async def test_a_stream_without_its_end_is_cut() -> None:
    """Though the connection was closed in order."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"messages")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        one = Http1("127.0.0.1", port, Random(1))
        assert (await one.ask(asked(Ask.STREAM))).problem == "200 cut"
        one.drop()


async def test_nobody_there_is_no_answer() -> None:
    """A refused connection is a result like any other."""
    async with Canned("a") as engine:
        one = client(engine)
    assert (await one.ask(asked())).problem == "no answer"


async def test_a_held_engine_answers_when_it_is_released(engine: Canned) -> None:
    """Nothing is lost meanwhile."""
    engine.hold()
    clients = [client(engine) for _ in range(3)]
    asking = [asyncio.create_task(one.ask(asked())) for one in clients]
    while engine.requests < 3:
        await asyncio.sleep(0.01)
    assert not any(task.done() for task in asking)
    engine.release()
    results: list[Result] = await asyncio.gather(*asking)
    assert [one.problem for one in results] == [None] * 3
    for one in clients:
        one.drop()


async def test_a_relay_is_lost_and_found(tmp_path: Path) -> None:
    """Connections are carried, broken, refused, and carried again."""
    target, path = tmp_path / "target", tmp_path / "relay"

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    async with await asyncio.start_unix_server(echo, target):
        relay = Relay(path, target)
        await relay.open()
        for _ in range(2):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(MODEL.encode())
            assert await reader.readexactly(1) == b"m"
            await relay.lose()
            with pytest.raises((OSError, EOFError)):
                await reader.readexactly(1)
            writer.close()
            with pytest.raises(OSError, match="No such file"):
                await asyncio.open_unix_connection(path)
            await relay.open()
        await relay.lose()
