"""The transport in front of a real Envoy: what it makes of replies, defects and ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import pytest
from serve_fakes import Tally, silent_lines

from extproc import headers
from extproc.clusters import cluster_name
from extproc.config.values import Config, Listener, Service, Steering
from extproc.exchange.messages import (
    Action,
    AttemptLog,
    Continue,
    Immediate,
    LogEntry,
    Message,
    NeedBody,
    Phase,
    RequestBody,
    RequestHeaders,
    ResponseHeaders,
    Steer,
)
from extproc.lab.engine_http import LabEngine
from extproc.lab.envoy import Envoy, running_envoy
from extproc.routing.catalog import ModelEntry
from extproc.routing.endpoint import Info, Url
from extproc.serve.access_log import AccessLogStream
from extproc.serve.ext_proc_stream import ExtProcStream, StreamTools
from extproc.serve.grpcio import GrpcSettings, GrpcTransport
from extproc.serve.replies import Renderer
from extproc.serve.steering import channel
from extproc.serve.stream import StreamHandler
from extproc.serve.wire import Reader
from extproc.xds.render import render

pytestmark = pytest.mark.envoy

OOPS = Immediate(500, (("content-type", b"application/json"),), b'{"error":{"code":"x"}}', "oops")
Answer = Callable[[Message], Action | None]


@dataclass(slots=True)
class Scripted:
    """An exchange that says what it is told to say, and remembers how it ended."""

    answer: Answer
    heard: list[Message] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def receive(self, message: Message, now: float) -> Action | None:
        self.heard.append(message)
        return self.answer(message)

    def end(self, now: float, *, owes_reply: bool) -> None:
        self.ends.append(owes_reply)
        self.over.set()


class World:
    """Envoy, two engines, a dead address, and a service that follows a script."""

    def __init__(self, steering: Steering) -> None:
        self.answer: Answer = lambda _message: None
        self.exchanges: list[Scripted] = []
        self.entries: list[LogEntry] = []
        self.logged = asyncio.Event()
        self.tally = Tally()
        self.a = LabEngine("a")
        self.b = LabEngine("b")
        self._tools = StreamTools(
            reader=Reader(),
            renderer=Renderer(channel(steering)),
            internal_error=OOPS,
            observer=self.tally,
            lines=silent_lines(),
            clock=time.monotonic,
        )
        self.transport: GrpcTransport
        self.envoy: Envoy
        self.url: str

    def ext_proc(self) -> StreamHandler:
        self.exchanges.append(Scripted(self.answer))
        return ExtProcStream(self.exchanges[-1], self._tools)

    def access_log(self) -> StreamHandler:
        return AccessLogStream(
            self._log, observer=self.tally, lines=silent_lines(), clock=time.monotonic
        )

    def health(self, service: str) -> bool | None:
        return not service

    def watch_health(self, changed: Callable[[], None]) -> Callable[[], None]:
        return changed

    def _log(self, entry: LogEntry, _now: float) -> None:
        self.entries.append(entry)
        self.logged.set()

    async def ask(self, **body: object) -> tuple[int, str, str]:
        """Status, body and who served, of a request for model m."""
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"{self.url}/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "hi"}], **body},
                headers={headers.MODEL[0]: "m"},
            ) as reply,
        ):
            return reply.status, await reply.text(), reply.headers.get("x-served-by", "")

    async def last_end(self) -> bool:
        """Whether the last exchange still owed a reply at its end, of which there is one."""
        exchange = self.exchanges[-1]
        await asyncio.wait_for(exchange.over.wait(), 5)
        await asyncio.sleep(0.1)  # longer than a second end would take
        assert len(exchange.ends) == 1
        return exchange.ends[0]

    def steer(self, phase: Phase, *endpoints: str, body: bytes | None = None) -> Steer:
        """A choice of `endpoints` by id, in order."""
        names = tuple(cluster_name(endpoint) for endpoint in endpoints)
        length = [] if body is None else [("content-length", b"%d" % len(body))]
        by_id = {"a": self.a.authority, "b": self.b.authority, "dead": "127.0.0.1:1"}
        return Steer(
            phase=phase,
            clusters=names,
            set_headers=(
                (headers.CLUSTER, names[0].encode()),
                (headers.DECISION, b"t-1"),
                (headers.MAX_RETRIES, b"%d" % (len(names) - 1)),
                *length,
            ),
            destinations=tuple(by_id[endpoint] for endpoint in endpoints),
            body=body,
        )

    def at_headers(self, *endpoints: str) -> Answer:
        """An answer that chooses when the request's headers come, and lets the rest pass."""
        choice = self.steer(Phase.REQUEST_HEADERS, *endpoints)
        return lambda message: choice if isinstance(message, RequestHeaders) else None


@asynccontextmanager
async def world_of(folder: Path, steering: Steering) -> AsyncIterator[World]:
    """Everything is running."""
    world = World(steering)
    async with AsyncExitStack() as stack:
        for engine in (world.a, world.b):
            await stack.enter_async_context(engine)
        urls = {"a": world.a.url, "b": world.b.url, "dead": "http://127.0.0.1:1"}
        infos = tuple(Info(name, Url.parse(url), ("m",)) for name, url in urls.items())
        configuration = Config(
            cluster_id="gw",
            endpoints=tuple(replace(info, drained=info.id == "dead") for info in infos),
            models=(ModelEntry("m"),),
            listener=Listener(port=0, admin_port=0),
            service=Service(address=f"unix:{folder / 'service.sock'}"),
            steering=steering,
        )
        world.transport = GrpcTransport(world, GrpcSettings(configuration.service.address))
        await world.transport.start()
        stack.push_async_callback(world.transport.stop, 0)
        world.envoy = await stack.enter_async_context(
            running_envoy(render(configuration), folder, log=folder / "envoy.log")
        )
        world.url = f"http://127.0.0.1:{await world.envoy.listener_port()}"
        yield world


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A world with the default steering."""
    async with world_of(tmp_path, Steering.PRIORITY_GROUP) as started:
        yield started


async def test_a_choice_is_followed_and_its_failure_logged(world: World) -> None:
    """Attempts go down the list; the failed one is in the access log under the decision's id."""
    world.answer = world.at_headers("dead", "b")
    status, _, served_by = await world.ask()
    assert (status, served_by) == (200, "b")
    assert await world.last_end() is False
    heard = world.exchanges[-1].heard
    answered = next(message for message in heard if isinstance(message, ResponseHeaders))
    assert (answered.status, answered.attempts, answered.cluster) == (200, 2, "ep-b")
    assert answered.details == "via_upstream"
    await asyncio.wait_for(world.logged.wait(), 5)
    (entry,) = world.entries
    assert isinstance(entry, AttemptLog)
    assert (entry.decision_id, entry.cluster) == ("t-1", "ep-dead")


@pytest.mark.parametrize("steering", Steering)
async def test_every_steering_reaches_the_chosen_endpoint(
    tmp_path: Path, steering: Steering
) -> None:
    """Envoy rendered for a steering follows the replies written for it."""
    async with world_of(tmp_path, steering) as world:
        for name in ("b", "a", "b"):
            world.answer = world.at_headers(name)
            assert (await world.ask())[::2] == (200, name)


async def test_a_body_is_asked_for_and_replaced(world: World) -> None:
    """The engine gets the new body whole, and the stream lasts as long as the request."""
    said = [{"role": "user", "content": "x" * 5000}]
    new_body = json.dumps({"model": "m", "messages": said}).encode()

    def answer(message: Message) -> Action | None:
        match message:
            case RequestHeaders():
                return NeedBody()
            case RequestBody(body=body):
                assert json.loads(body)["user"] == "somebody"
                return world.steer(Phase.REQUEST_BODY, "b", body=new_body)
            case _:
                return None

    world.answer = answer
    status, _, served_by = await world.ask(user="somebody")
    assert (status, served_by) == (200, "b")
    assert world.b.requests[-1].body_bytes == len(new_body)
    assert await world.last_end() is False


async def test_an_immediate_answer_reaches_the_client(world: World) -> None:
    """Status, headers and body are ours, and the request goes nowhere."""
    told = (("content-type", b"application/json"), ("retry-after", b"2"))
    world.answer = lambda _message: Immediate(429, told, b'{"error":1}', "saturated")
    assert (await world.ask())[:2] == (429, '{"error":1}')
    assert await world.last_end() is False
    assert not world.a.requests
    assert not world.b.requests


async def test_a_defect_fails_open(world: World) -> None:
    """An exchange that breaks costs the decision, not the request."""

    def broken(_message: Message) -> Action:
        raise RuntimeError("defect")

    world.answer = broken
    status, _, served_by = await world.ask()
    assert status == 200
    assert served_by in {"a", "b"}
    assert await world.last_end() is True
    assert world.tally.seen["failed"] == 1


async def test_a_refused_reply_is_an_error_for_the_client(world: World) -> None:
    """What Envoy would refuse never reaches it; the client gets the whole error envelope."""
    world.answer = lambda message: (
        Continue(Phase.REQUEST_HEADERS, (("x-a", b"\r\n"),))
        if isinstance(message, RequestHeaders)
        else None
    )
    assert (await world.ask())[:2] == (500, OOPS.body.decode())
    stats = await world.envoy.stats("rejected_header_mutations")
    assert not any(stats.values())


async def test_a_stream_lasts_until_its_request_is_over(world: World) -> None:
    """A client that leaves in the middle ends it within a moment, and before that it is open."""
    world.answer = world.at_headers("a")
    world.a.options = replace(world.a.options, output_tokens=2000)
    async with aiohttp.ClientSession() as session:
        reply = await session.post(
            f"{world.url}/v1/chat/completions",
            json={"stream": True, "messages": [{"role": "user", "content": "hi"}]},
            headers={headers.MODEL[0]: "m"},
        )
        await reply.content.readline()
        assert not world.exchanges[-1].over.is_set()
        reply.close()
    assert await world.last_end() is False


async def test_a_stopped_service_cuts_no_answer(world: World) -> None:
    """An answer that has begun goes on to its end while the service leaves."""
    world.answer = world.at_headers("a")
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{world.url}/v1/chat/completions",
            json={"stream": True, "messages": [{"role": "user", "content": "hi"}]},
            headers={headers.MODEL[0]: "m"},
        ) as reply,
    ):
        await reply.content.readline()
        await world.transport.stop(0)
        assert (await reply.content.read()).rstrip().endswith(b"[DONE]")
    assert len(world.exchanges[-1].ends) == 1


async def test_many_requests_leave_nothing_open(world: World) -> None:
    """Good requests and aborted ones all end once, and none of them is an error here or there."""
    world.answer = world.at_headers("a", "b")

    async def aborted() -> None:
        async with aiohttp.ClientSession() as session:
            reply = await session.post(
                f"{world.url}/v1/chat/completions",
                json={"stream": True, "messages": [{"role": "user", "content": "hi"}]},
                headers={headers.MODEL[0]: "m"},
            )
            reply.close()

    for _ in range(5):
        replies = await asyncio.gather(*(world.ask() for _ in range(20)))
        assert {status for status, _, _ in replies} == {200}
        await asyncio.gather(*(aborted() for _ in range(4)))
    for exchange in world.exchanges:
        await asyncio.wait_for(exchange.over.wait(), 5)
    assert [exchange.ends for exchange in world.exchanges] == [[False]] * 120
    assert world.tally.seen["opened"] == world.tally.seen["closed"] == 120
    assert not world.tally.seen["failed"]
    stats = await world.envoy.stats("ext_proc.*(failed|rejected|spurious|timeouts|failure_mode)")
    assert stats
    assert not any(stats.values())
