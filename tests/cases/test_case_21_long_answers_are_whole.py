"""An answer may take as long as it takes; only a stream that has stopped is ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Final

import pytest
from case_bodies import chat
from case_http1 import CHAT, Pair, Reply, head
from case_world import INFLIGHT, World, case, standing

from extproc.config.parse import parse
from extproc.config.values import Steering
from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind
from extproc.xds.bootstrap import bootstrap

pytestmark = case(21)

DONE: Final = b"data: [DONE]\n\n"
# As it is shipped: no time is set.
SHIPPED: Final = """
endpoints:
  - {id: slow, url: "$slow", models: [slow]}
  - {id: late, url: "$late", models: [late]}
"""
# The same with an idle time that a test can wait for.
IMPATIENT: Final = (
    """
listener: {idle_timeout_seconds: 3, header_deadline_seconds: 60}
"""
    + SHIPPED
)
MARGIN_SECONDS: Final = 15.0


@asynccontextmanager
async def running(
    folder: Path, text: str, *, tokens_per_second: float, faults: Sequence[Fault] = ()
) -> AsyncIterator[World]:
    """An engine that speaks slowly, and one that does what `faults` say."""
    pace = EngineSettings(
        decode_tokens_per_second=tokens_per_second, decode_slowdown_ratio=0, max_running=64
    )
    engines = [LabEngine("slow", ("slow",), settings=pace), LabEngine("late", ("late",))]
    async with standing(folder, text, *engines) as world:
        world.engines["late"].inject(*faults)
        yield world


async def listen(world: World, tokens: int, seconds: float, *pairs: Pair) -> Reply:
    """The whole stream of so many tokens, over HTTP/1.1."""
    body = chat("slow", stream=True, max_tokens=tokens)
    return await world.post(*pairs, body=body, seconds=seconds + MARGIN_SECONDS)


async def listen2(world: World, tokens: int, seconds: float, *pairs: Pair) -> Reply:
    """The same over HTTP/2."""
    body = chat("slow", stream=True, max_tokens=tokens)
    async with world.http2() as connection:
        return await connection.ask("POST", CHAT, pairs, body, seconds=seconds + MARGIN_SECONDS)


def assert_whole(reply: Reply, tokens: int) -> None:
    """The stream has all of its tokens and its end."""
    assert (reply.status, reply.cut) == (200, False), reply
    assert reply.body.endswith(DONE)
    events = [line for line in reply.body.split(b"\n\n") if line.startswith(b"data: {")]
    said = [json.loads(line[6:])["choices"] for line in events]
    heard = [one for choices in said for one in choices if one["delta"].get("content")]
    assert len(heard) == tokens


async def test_a_slow_stream_for_20_seconds(tmp_path: Path) -> None:
    """It goes on though its idle time is shorter, and counts as one all along."""
    async with running(tmp_path, IMPATIENT, tokens_per_second=1) as world:
        asked = [
            listen(world, 20, 20),
            listen(world, 20, 20, ("x-llmgw-model", "slow")),
            listen2(world, 20, 20),
        ]
        asking = asyncio.gather(*asked)
        await world.until_inflight(len(asked))
        engine = world.engines["slow"]
        counts: set[int] = set()
        while engine.counters.served == 0 and not asking.done():
            # A page that was made before the first end is a page of three.
            page = await world.page()
            if engine.counters.served == 0:
                counts.add(page.total(INFLIGHT, endpoint="slow"))
            await asyncio.wait({asking}, timeout=0.2)
        assert counts == {len(asked)}
        for reply in await asking:
            assert_whole(reply, 20)
        await world.until_idle()
        await world.until_attempts({("slow", "success"): len(asked)})


async def test_a_stream_that_has_stopped_is_ended(tmp_path: Path) -> None:
    """After its idle time, whichever way it stopped; the client sees that it was cut."""
    stalls = [Fault(kind=FaultKind.STALL, chunks=3, times=1), Fault(kind=FaultKind.STALL, times=1)]
    async with running(tmp_path, IMPATIENT, tokens_per_second=1, faults=stalls) as world:
        body = chat("late", stream=True, max_tokens=10)
        for tokens in (3, 0):
            began = monotonic()
            reply = await world.post(body=body, seconds=30)
            assert 2.5 < monotonic() - began < 6
            assert reply.status == 200
            assert reply.cut
            assert DONE not in reply.body
            assert reply.body.count(b'"content":"') >= tokens
        await world.until_idle()


async def test_a_client_that_stops_sending_is_ended(tmp_path: Path) -> None:
    """A body that does not come is 408 after the idle time."""
    async with (
        running(tmp_path, IMPATIENT, tokens_per_second=1) as world,
        world.http1() as connection,
    ):
        began = monotonic()
        await connection.send(head("POST", CHAT, length=100) + b'{"model"')
        reply = await connection.answer(seconds=10)
        assert 2.5 < monotonic() - began < 6
        assert (reply.status, reply.reason) == (408, "body_invalid"), reply


@pytest.mark.slow
async def test_what_takes_minutes(tmp_path: Path) -> None:
    """Streams of 70 and 320 s with a token every 10 s; answers after 130 and 310 s of silence."""
    late = [Fault(kind=FaultKind.SLOW_HEADERS, seconds=130, times=2)]
    late.append(Fault(kind=FaultKind.SLOW_HEADERS, seconds=310, times=2))
    async with running(tmp_path, SHIPPED, tokens_per_second=0.1, faults=late) as world:
        # The engine's first faults are for the first requests.
        waiting = [asyncio.create_task(late_answer(world, 130)) for _ in range(2)]
        engine = world.engines["late"]
        await engine.until(lambda: engine.counters.active == 2)
        waiting += [asyncio.create_task(late_answer(world, 310)) for _ in range(2)]
        streams = {
            asyncio.create_task(listen(world, tokens, tokens * 10, *pairs)): tokens
            for tokens in (7, 32)
            for pairs in ([], [("x-llmgw-model", "slow")])
        }
        streams[asyncio.create_task(listen2(world, 32, 320))] = 32
        await world.until_inflight(len(waiting) + len(streams))
        for stream, tokens in streams.items():
            assert_whole(await stream, tokens)
        await asyncio.gather(*waiting)
        await world.until_idle()
        await world.until_attempts(
            {("slow", "success"): len(streams), ("late", "success"): len(waiting)}
        )


async def late_answer(world: World, silence: float) -> None:
    """An answer that is not streamed has come, after that silence."""
    began = monotonic()
    reply = await world.post(model="late", seconds=silence + MARGIN_SECONDS)
    assert reply.status == 200, reply
    assert monotonic() - began > silence
    assert json.loads(reply.body)["choices"]


# What the configuration says.


@pytest.mark.parametrize("steering", list(Steering))
async def test_no_route_is_left_to_a_default(steering: Steering) -> None:
    """Envoy's own is 15 s for the whole answer; every route says that there is none."""
    text = SHIPPED.replace("$slow", "http://192.0.2.1:1").replace("$late", "http://192.0.2.2:1")
    found = list(actions(bootstrap(parse(text), steering)))
    assert len(found) > 5
    for action in found:
        assert action["timeout"] == "0s"
        assert "idle_timeout" not in action
        assert "max_stream_duration" not in action


async def test_envoy_has_taken_it_so(tmp_path: Path) -> None:
    """By its own word, of the configuration that it runs."""
    async with (
        running(tmp_path, SHIPPED, tokens_per_second=1) as world,
        world.session.get(f"{world.stack.admin_url}/config_dump") as response,
    ):
        dumped = json.loads(await response.text())
    found = list(actions(dumped))
    assert len(found) > 5
    assert {action["timeout"] for action in found} == {"0s"}


def actions(tree: object) -> Iterator[Mapping[str, object]]:
    """Every action of a route that leads to a cluster."""
    if isinstance(tree, Mapping):
        action = tree.get("route")
        if "match" in tree and isinstance(action, Mapping):
            yield action
        for branch in tree.values():
            yield from actions(branch)
    elif isinstance(tree, Sequence) and not isinstance(tree, str):
        for branch in tree:
            yield from actions(branch)


async def test_a_time_that_would_cut_is_warned_of() -> None:
    """An idle time below the deadline for headers ends requests that wait for their answer."""
    text = SHIPPED.replace("$slow", "http://192.0.2.1:1").replace("$late", "http://192.0.2.2:1")
    assert parse(text).warnings == ()
    warned = parse("listener: {idle_timeout_seconds: 5, header_deadline_seconds: 60}\n" + text)
    assert [warning.key for warning in warned.warnings] == ["listener.idle_timeout_seconds"]
