"""What keeps a request from its endpoint counts against that endpoint, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

import pytest
import pytest_asyncio
from case_bodies import MIB, sized_chat
from case_fleet import ask_until, breaker, each, exclusions, reconfigured, settle
from case_hosts import black_hole, breaking_off, certified
from case_http1 import CHAT, head
from case_world import ATTEMPTS, World, case, endpoints, fresh, standing, until

from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind
from extproc.routing.endpoint import BreakerState

pytestmark = case(31)

THRESHOLD = 3
HEAD = "breaker: {threshold: 3, base_seconds: 60}\nlistener: {body_limit_bytes: 2097152}\n"

# Engines that break off by themselves; a fault of the lab for each.
FAULTS = {
    "refused": FaultKind.REFUSE,
    "slammed": FaultKind.ACCEPT_RESET,
    "reset": FaultKind.RESET,
    "drains": FaultKind.RESET_AFTER_BODY,
}
# The next endpoint cannot be tried: either the client has the answer's head, or Envoy has no host.
NOT_REPEATED = frozenset({"head-and-reset", "no-name"})


@dataclass(frozen=True, slots=True)
class Fleet:
    """A stack with one dead endpoint of each kind; by each, a sound one of the same model."""

    world: World
    dead: tuple[str, ...]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Every kind of dead endpoint beside a sound one, and two sound ones of a model."""
    folder = tmp_path_factory.mktemp("case")
    begun = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    chunked = b"transfer-encoding: chunked\r\n\r\n"
    async with AsyncExitStack() as exits:
        # Spoken to in the wrong scheme, so their addresses are needed in the text.
        plain = await exits.enter_async_context(LabEngine("plain"))
        secret = await exits.enter_async_context(LabEngine("secret", tls=certified(folder)))
        urls = {
            "black-hole": exits.enter_context(black_hole()),
            "half-a-head": await exits.enter_async_context(breaking_off(begun)),
            "no-http": await exits.enter_async_context(breaking_off(b"SSH-2.0-here\r\n\r\n")),
            "head-and-reset": await exits.enter_async_context(breaking_off(begun + chunked)),
            "no-name": "http://nobody.invalid:80",
            "speaks-no-tls": f"https://{plain.authority}",
            "speaks-tls": f"http://{secret.authority}",
            "is-untrusted": f"https://{secret.authority}",
            **{name: f"${name}" for name in FAULTS},
        }
        # Of two idle endpoints the one whose metrics are read is preferred, and none of these dead
        # ones has any: without metrics, each is as good as the sound one until it has failed.
        lines = [
            f'  - {{id: {where}{name}, url: "{url}", models: [{name}], engine: none}}'
            for name, dead in urls.items()
            for where, url in (("", dead), ("by-", "$sound"))
        ]
        text = HEAD + endpoints("a", "b") + "\n".join(lines) + "\n"
        engines = [LabEngine(name, ("m", *urls)) for name in ("sound", "a", "b", *FAULTS)]
        world = await exits.enter_async_context(standing(folder, text, *engines))
        for name, kind in FAULTS.items():
            world.engines[name].inject(Fault(kind=kind))
        yield Fleet(world, tuple(urls))


async def test_the_breaker_opens(fleet: Fleet) -> None:
    """After three failures; until then and from then on the other endpoint serves every request."""
    world = fleet.world

    async def ask(name: str) -> None:
        replies = await ask_until(world, name, BreakerState.OPEN, model=name, seconds=30)
        for reply in replies:
            if reply.status == 200 and not reply.cut:
                assert reply.served_by == "sound"
                continue
            assert name in NOT_REPEATED, reply
            # Cut off, or refused in words that a client can read.
            assert reply.cut or reply.status in {502, 503}
            if not reply.cut:
                assert reply.error.code in {"upstream_failed", "no_endpoint"}
                assert b"127.0.0.1" not in reply.body

    await each({name: ask(name) for name in fleet.dead})
    await settle(world)
    # Now nothing goes there any more.
    replies = await asyncio.gather(
        *(world.post(model=name) for name in fleet.dead for _ in range(20))
    )
    assert {(reply.status, reply.served_by) for reply in replies} == {(200, "sound")}
    page = await world.page()
    for name in fleet.dead:
        outcomes = {what for where, what in page.attempts() if where == name}
        assert outcomes == {"failure"}, name
        assert page.total(ATTEMPTS, endpoint=name) >= THRESHOLD
        assert await world.new(ATTEMPTS, endpoint=name) == 0
        assert breaker(page, f"by-{name}") is BreakerState.CLOSED


async def test_envoys_own_answers(fleet: Fleet) -> None:
    """A body over the limit, a path or method that is not there, junk: nobody is charged."""
    world = fleet.world
    await settle(world)

    async def ask() -> None:
        too_large = await world.post(body=sized_chat("m", 3 * MIB))
        assert (too_large.status, too_large.error.code) == (413, "body_too_large")
        assert (await world.ask("POST", "/v1/nothing", body=b"{}")).status == 404
        assert (await world.ask("GET", CHAT)).status == 405
        upgrade = [("upgrade", "websocket"), ("connection", "upgrade")]
        assert (await world.post(*upgrade)).error.code == "upgrade_refused"

    async def hang_up_on(sent: bytes) -> None:
        # Envoy's answer to what is no HTTP waits for the service, and the connection does not.
        async with world.http1() as connection:
            with suppress(OSError):  # a reset, where Envoy has not read all of it
                await connection.send(sent)
                assert await connection.more() == b""

    junk = b"POST /v1 HTTP/1.1\r\nhost: a\r\n: b\r\n\r\n"
    long = head("POST", CHAT, [("x-long", "x" * 100_000)], length=0)
    async with asyncio.TaskGroup() as group:
        for _ in range(2 * THRESHOLD):
            group.create_task(ask())
            group.create_task(hang_up_on(junk))
            group.create_task(hang_up_on(long))
    await settle(world)
    assert await world.new_attempts() == {}
    page = await world.page()
    for name in "ab":
        assert breaker(page, name) is BreakerState.CLOSED
    assert world.requests() == {}


async def test_a_cluster_that_envoy_does_not_know(fleet: Fleet) -> None:
    """It is quarantined and shown, and is no failure, on whichever attempt it is found out."""
    world = fleet.world
    url = world.engines["a"].url
    ghosts = "".join(
        f'  - {{id: {name}, url: "{url}", models: [{model}]}}\n'
        for name, model in (("ghost", "m"), ("only-ghost", "ghostly"))
    )
    async with reconfigured(world, lambda text: text + ghosts):
        for _ in range(THRESHOLD + 1):
            reply = await world.post(model="ghostly")
            assert (reply.status, reply.reason) == (503, "no_endpoint")
        session = ("x-session-id", fresh("session"))

        async def is_found_out() -> bool:
            # A request whose first endpoint it is ends with it.
            await world.post()
            return bool(exclusions(await world.page(), "ghost"))

        await until(is_found_out, "the ghost is quarantined")
        replies = await asyncio.gather(*(world.post() for _ in range(20)))
        assert {reply.status for reply in replies} == {200}
        home = (await world.post(session)).served_by
        await settle(world)

        async def is_back() -> bool:
            return not exclusions(await world.page(), "ghost")

        await until(is_back, "the ghost is tried again", 3)
        (other,) = {"a", "b"} - {home}
        # Of the session's endpoint and the two behind it, the ghost is one.
        world.engines[home].inject(Fault(kind=FaultKind.STATUS, status=503, times=1))
        world.engines[other].inject(Fault(kind=FaultKind.STATUS, status=503, times=1))
        assert (await world.post(session)).status == 503
        await settle(world)
        page = await world.page()
        for name in ("ghost", "only-ghost"):
            assert breaker(page, name) is BreakerState.CLOSED
            assert {what for where, what in page.attempts() if where == name} == {"quarantined"}
        assert page.total(ATTEMPTS, endpoint="ghost") == 2


async def test_it_accepts_again(fleet: Fleet) -> None:
    """After its cooldown it is probed, and used again."""
    world = fleet.world
    text = "breaker: {threshold: 1, base_seconds: 0.3}\n"
    async with reconfigured(world, lambda old: text + old.split("\n", 1)[1]):
        engine = world.engines["refused"]
        engine.refuse()
        await ask_until(world, "refused", BreakerState.OPEN, model="refused")
        await engine.heal()
        await ask_until(world, "refused", BreakerState.CLOSED, model="refused")
        assert engine.counters.served >= 1
