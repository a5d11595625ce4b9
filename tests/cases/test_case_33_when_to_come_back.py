"""Where no endpoint takes a request, the client is told when the first one could."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import anthropic
import openai
import pytest
import pytest_asyncio
from case_bodies import chat
from case_fleet import ask_until, breaker, each, exclusions, until_breaker
from case_http1 import CHAT, Reply
from case_world import REFUSED, World, case, standing, until

from extproc.config.values import Steering
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind
from extproc.routing.endpoint import BreakerState
from extproc.telemetry.fleet import Exclusion

pytestmark = case(33)

MESSAGES = "/v1/messages"
MODEL_HEADER = "x-llmgw-model"
SOON_SECONDS = 1.5
# How long it may take, at most, until all are down and have been asked for.
SLACK_SECONDS = 9.0


@dataclass(frozen=True, slots=True)
class One:
    """An endpoint, for how long it is down, and whether by its breaker or by its own word."""

    name: str
    seconds: float = 0.0
    is_full: bool = False
    keys: str = ""

    def line(self, model: str) -> str:
        """Its line in the configuration."""
        settings = f"threshold: 1, base_seconds: {self.seconds or 1}, max_seconds: 60"
        return (
            f'  - {{id: {self.name}, url: "${self.name}", models: [{model}],'
            f" breaker: {{{settings}, jitter_ratio: 0}}{self.keys}}}\n"
        )

    @property
    def fault(self) -> Fault:
        """What brings it down."""
        if self.is_full:
            headers = {"retry-after": str(self.seconds)}
            return Fault(kind=FaultKind.STATUS, status=429, headers=headers)
        return Fault(kind=FaultKind.STATUS, status=500)


@dataclass(frozen=True, slots=True)
class Down:
    """A model none of whose endpoints takes a request, and what a client is told of it.

    `seconds` is when the first could; None: waiting does not help.
    """

    endpoints: tuple[One, ...]
    status: int
    seconds: float | None


DRAINED = ", drained: true"
DOWN: dict[str, Down] = {
    "one": Down((One("box_one0", 20),), 503, 20),
    # The first to come back, whichever it is in the list.
    "soonest-last": Down((One("box_sl0", 50), One("box_sl1", 40), One("box_sl2", 30)), 503, 30),
    "soonest-first": Down((One("box_sf0", 30), One("box_sf1", 50)), 503, 30),
    "second-rank": Down((One("box_sr0", 40, keys=", priority: 1"), One("box_sr1", 20)), 503, 20),
    # Some live and want to be left alone.
    "full-sooner": Down((One("box_fs0", 40), One("box_fs1", 20, is_full=True)), 429, 20),
    "full-later": Down((One("box_fl0", 20), One("box_fl1", 40, is_full=True)), 429, 20),
    "all-full": Down((One("box_af0", 40, is_full=True), One("box_af1", 30, is_full=True)), 429, 30),
    # What is drained comes back by nobody's waiting.
    "drained-beside": Down((One("box_db0", 20), One("box_db1", keys=DRAINED)), 503, 20),
    "all-drained": Down((One("box_ad0", keys=DRAINED), One("box_ad1", keys=DRAINED)), 503, None),
    # The fallback's endpoint is the first.
    "with-fallback": Down((One("box_wf0", 50),), 503, 20),
    "fallback": Down((One("box_fb0", 20),), 503, 20),
}
ALIAS = "nickname"
SOON = ("soon0", "soon1", "soon2", "soon3")
MODELS = (*DOWN, *SOON, "probed", "bought")
CONFIG = """
models:
  with-fallback: {fallbacks: [fallback], aliases: [nickname]}
endpoints:
  - {id: provider, url: "$provider", kind: external, models: [bought]}
"""
CONFIG += "".join(one.line(model) for model, down in DOWN.items() for one in down.endpoints)
CONFIG += "".join(One(name, SOON_SECONDS).line(name) for name in SOON)
CONFIG += One("probed", 0.5).line("probed") + One("ours", 20).line("bought")


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[Steering.PRIORITY_GROUP, Steering.CLUSTER_HEADER],
)
async def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    """Every model is down."""
    ones = [one for down in DOWN.values() for one in down.endpoints]
    names = ["provider", "probed", "ours", *SOON, *(one.name for one in ones)]
    engines = [LabEngine(name, MODELS) for name in names]
    async with standing(
        tmp_path_factory.mktemp("case"), CONFIG, *engines, steering=request.param
    ) as world:
        for one in (*ones, One("ours")):
            world.engines[one.name].inject(one.fault)
        await each({model: bring_down(world, model, down) for model, down in DOWN.items()})
        for engine in world.engines.values():
            await engine.heal()
            engine.records.reset()
        yield world
        # However often it was asked for, nothing was sent to what is down.
        down = {one.name for one in ones}
        assert not down & world.requests().keys()


async def bring_down(world: World, model: str, down: Down) -> None:
    """No endpoint of the model takes a request any more."""

    async def is_down() -> bool:
        page = await world.page()
        for one in down.endpoints:
            if one.keys == DRAINED:
                continue
            if one.is_full and Exclusion.BACKPRESSURE not in exclusions(page, one.name):
                break
            if not one.is_full and breaker(page, one.name) is not BreakerState.OPEN:
                break
        else:
            return True
        await world.post(model=model)
        return False

    await until(is_down, f"{model} is down", SLACK_SECONDS / 2)


def assert_told(reply: Reply, model: str, down: Down) -> None:
    """Status, reason and moment are right, and no host is named anywhere."""
    reason = "no_endpoint" if down.status == 503 else "saturated"
    assert (reply.status, reply.reason) == (down.status, reason), reply
    assert f"'{model}'".encode() in reply.body
    everything = reply.body + "".join(f"{k}: {v}\n" for k, v in reply.headers).encode()
    for told in (b"127.0.0.1", *(one.name.encode() for one in down.endpoints)):
        assert told not in everything
    exact, whole = reply.header("retry-after-ms"), reply.header("retry-after")
    if down.seconds is None:
        assert (exact, whole, reply.header("x-should-retry")) == (None, None, "false")
        return
    assert exact is not None
    assert whole is not None
    assert down.seconds - SLACK_SECONDS < int(exact) / 1000 <= down.seconds
    assert 0 <= int(whole) * 1000 - int(exact) < 1000
    assert reply.header("x-should-retry") is None


@pytest.mark.parametrize("model", list(DOWN))
async def test_the_first_moment(world: World, model: str) -> None:
    """However it is asked for: the two APIs, a stream, a header that names the model, HTTP/2."""
    down = DOWN[model]
    replies = [
        await world.post(model=model),
        await world.post(body=chat(model, stream=True)),
        await world.post((MODEL_HEADER, model)),
        await world.post(model=model, path="/v1/completions"),
    ]
    async with world.http2() as connection:
        replies.append(await connection.ask("POST", CHAT, [], chat(model)))
    for reply in replies:
        assert_told(reply, model, down)
        code = "no_endpoint" if down.status == 503 else "rate_limit_exceeded"
        assert reply.error.code == code
    reply = await world.post(model=model, path=MESSAGES)
    assert_told(reply, model, down)
    kind = "overloaded_error" if down.status == 503 else "rate_limit_error"
    assert reply.anthropic_error == kind


async def test_another_name_of_it(world: World) -> None:
    """The client is told of the name that it asked for."""
    assert_told(await world.post(model=ALIAS), ALIAS, DOWN["with-fallback"])


async def test_the_moment_comes_nearer(world: World) -> None:
    """It is a moment, not a length of time."""
    first = (await world.post(model="one")).header("retry-after-ms")
    assert first is not None

    async def is_nearer() -> bool:
        later = (await world.post(model="one")).header("retry-after-ms")
        return later is not None and int(later) < int(first) - 100

    await until(is_nearer, "an earlier moment", 3)


async def test_what_is_forbidden_is_no_hope(world: World) -> None:
    """A provider serves, and not this request: it is told when our own engine could."""
    world.engines["ours"].inject(Fault(kind=FaultKind.STATUS, status=500))
    await ask_until(world, "ours", BreakerState.OPEN, model="bought")
    assert (await world.post(model="bought")).served_by == "provider"
    reply = await world.post(("x-llmgw-no-store", "true"), model="bought")
    assert (reply.status, reply.reason) == (503, "restricted")
    told = reply.header("retry-after-ms")
    assert told is not None
    assert 20 - SLACK_SECONDS < int(told) / 1000 <= 20


async def test_while_its_probe_is_under_way(world: World) -> None:
    """The next request could be taken when the probe's place is free again at the latest."""
    probed = world.engines["probed"]
    probed.inject(Fault(kind=FaultKind.STATUS, status=500, times=1))
    await ask_until(world, "probed", BreakerState.OPEN, model="probed")
    await until_breaker(world, "probed", BreakerState.HALF_OPEN)
    probed.records.reset()
    probed.hold()
    probe = asyncio.create_task(world.post(model="probed"))
    await probed.until(lambda: probed.running == 1)
    reply = await world.post(model="probed")
    assert (reply.status, reply.reason) == (503, "no_endpoint")
    told = reply.header("retry-after-ms")
    assert told is not None
    assert 60 - SLACK_SECONDS < int(told) / 1000 <= 60
    probed.release()
    assert (await probe).status == 200


async def test_clients_that_wait_as_they_are_told(world: World) -> None:
    """The SDKs as they are: refused once, they come back in time and are served."""
    url = world.stack.url
    said: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hello"}]
    full = Fault(
        kind=FaultKind.STATUS, status=429, headers={"retry-after": str(SOON_SECONDS)}, times=1
    )
    fails = Fault(kind=FaultKind.STATUS, status=500, times=1)
    async with AsyncExitStack() as exits:
        ours = await exits.enter_async_context(
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k")
        )
        theirs = await exits.enter_async_context(
            anthropic.AsyncAnthropic(base_url=url, api_key="k")
        )

        async def whole(model: str) -> str:
            found = await ours.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "hello"}]
            )
            return found.choices[0].message.content or ""

        async def streamed(model: str) -> str:
            stream = await ours.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "hello"}], stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def message(model: str) -> str:
            found = await theirs.messages.create(model=model, messages=said, max_tokens=4)
            (block,) = found.content
            assert block.type == "text"
            return block.text

        stories = {
            "soon0": (fails, whole),
            "soon1": (fails, streamed),
            "soon2": (fails, message),
            "soon3": (full, whole),
        }
        world.booked = await world.page()

        async def come_back(model: str, fault: Fault, ask: Callable[[str], Awaitable[str]]) -> None:
            engine = world.engines[model]
            engine.inject(fault)
            assert (await world.post(model=model)).status == fault.status
            assert await ask(model)
            assert await world.new(REFUSED, model=model) == 1
            assert engine.counters.requests == 2

        await each({model: come_back(model, *story) for model, story in stories.items()})

        # Where waiting does not help they do not wait.
        with pytest.raises(openai.InternalServerError, match="all-drained"):
            await whole("all-drained")
        assert await world.new(REFUSED, model="all-drained") == 1
