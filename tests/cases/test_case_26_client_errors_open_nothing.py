"""A client's mistake is no failure of the endpoint, and an endpoint's wrong key is no death."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from case_bodies import chat
from case_fleet import (
    ask_until,
    breaker,
    exclusions,
    settle,
    until_breaker,
)
from case_world import ATTEMPTS, World, case, fresh, standing, until

from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind
from extproc.routing.endpoint import BreakerState
from extproc.telemetry.fleet import Exclusion

pytestmark = case(26)

# `quick` and `other` open after three failures and are back soon.
# `keyed` and `sound` share a model.
CONFIG = """
breaker: {threshold: 5, base_seconds: 60}
endpoints:
  - {id: one, url: "$one", models: [one]}
  - {id: a, url: "$a", models: [two]}
  - {id: b, url: "$b", models: [two]}
  - id: quick
    url: "$quick"
    models: [quick]
    breaker: {threshold: 3, base_seconds: 0.3, max_seconds: 60, jitter_ratio: 0}
  - {id: keyed, url: "$keyed", models: [keyed]}
  - {id: sound, url: "$sound", models: [keyed, beside]}
"""
NAMES = ("one", "a", "b", "quick", "keyed", "sound")
MISTAKES = (400, 401, 403, 404, 405, 409, 413, 415, 422, 451)
MISCONFIGURED = {401, 403, 404, 405}
MISCONFIGURED_TOTAL = "llmgw_endpoint_misconfigured_total"
TIMES = 50
TOO_LONG = "a word " * 400


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Engines that take short prompts only."""
    settings = EngineSettings(max_model_tokens=200)
    engines = [
        LabEngine(name, ("one", "two", "quick", "keyed", "beside"), settings=settings)
        for name in NAMES
    ]
    async with standing(tmp_path_factory.mktemp("case"), CONFIG, *engines) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nothing in flight and nothing going wrong."""
    await started.forget()
    return started


async def until_booked(world: World, endpoint: str, outcome: str, number: int) -> None:
    """So many attempts came to this outcome, and none is a failure."""

    async def is_so() -> bool:
        return await world.new(ATTEMPTS, endpoint=endpoint, outcome=outcome) >= number

    await until(is_so, f"{number} {outcome} at {endpoint}")
    booked = await world.new_attempts()
    assert booked[endpoint, outcome] == number
    assert (endpoint, "failure") not in booked


def outcome(status: int) -> str:
    """What an attempt with this status is counted as."""
    return "misconfigured" if status in MISCONFIGURED else "client_error"


async def ask(world: World, number: int, model: str, body: bytes | None = None) -> set[int]:
    """The statuses of so many requests at once."""
    replies = await asyncio.gather(*(world.post(model=model, body=body) for _ in range(number)))
    return {reply.status for reply in replies}


async def test_prompts_that_are_too_long(world: World) -> None:
    """Fifty of them, refused by the engine itself: the next request is served."""
    body = chat("one", messages=[{"role": "user", "content": TOO_LONG}])
    assert await ask(world, TIMES, "one", body) == {400}
    await until_booked(world, "one", "client_error", TIMES)
    assert breaker(await world.page(), "one") is BreakerState.CLOSED
    assert (await world.post(model="one")).status == 200


@pytest.mark.parametrize("kind", [FaultKind.STATUS, FaultKind.EARLY_STATUS])
@pytest.mark.parametrize("status", MISTAKES)
async def test_every_mistake(world: World, status: int, kind: FaultKind) -> None:
    """Whether the engine reads the body first or not; alone it is never left out for it."""
    world.engines["one"].inject(Fault(kind=kind, status=status, times=TIMES))
    assert await ask(world, TIMES, "one") == {status}
    await until_booked(world, "one", outcome(status), TIMES)
    page = await world.page()
    assert breaker(page, "one") is BreakerState.CLOSED
    assert exclusions(page, "one") == set()
    told = await world.new(MISCONFIGURED_TOTAL, endpoint="one")
    assert told == (TIMES if status in MISCONFIGURED else 0)
    assert (await world.post(model="one")).status == 200


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_fleet_stays(world: World, status: int) -> None:
    """Every endpoint of a model says no, fifty times: all of them are still there."""
    for name in "ab":
        world.engines[name].inject(Fault(kind=FaultKind.STATUS, status=status))
    assert await ask(world, TIMES, "two") == {status}
    page = await world.page()
    for name in "ab":
        assert breaker(page, name) is BreakerState.CLOSED
        assert exclusions(page, name) == set()
        await world.engines[name].heal()
    assert await ask(world, 10, "two") == {200}
    assert {"a", "b"} <= world.requests().keys()


async def test_mistakes_neither_end_nor_lengthen_a_row(world: World) -> None:
    """Two failures, mistakes, a third failure: open. Without the failures, never."""
    await settle(world)  # a success that is still to be booked would end the row
    quick = world.engines["quick"]
    for status in (500, 400, 401, 500, 422, 404):
        quick.inject(Fault(kind=FaultKind.STATUS, status=status, times=1))
        assert (await world.post(model="quick")).status == status
    await world.until_attempts(
        {
            ("quick", "failure"): 2,
            ("quick", "client_error"): 2,
            ("quick", "misconfigured"): 2,
        }
    )
    assert breaker(await world.page(), "quick") is BreakerState.CLOSED
    quick.inject(Fault(kind=FaultKind.STATUS, status=500, times=1))
    assert (await world.post(model="quick")).status == 500
    await until_breaker(world, "quick", BreakerState.OPEN)
    await ask_until(world, "quick", BreakerState.CLOSED, model="quick")


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_a_mistake_as_a_probe(world: World, status: int) -> None:
    """It neither closes the breaker nor opens it again, and gives its place back at once."""
    await settle(world)
    quick = world.engines["quick"]
    quick.inject(Fault(kind=FaultKind.STATUS, status=500, times=3))
    await ask_until(world, "quick", BreakerState.OPEN, model="quick")
    await until_breaker(world, "quick", BreakerState.HALF_OPEN)
    await world.forget()
    quick.inject(Fault(kind=FaultKind.STATUS, status=status, times=4))
    for _ in range(4):
        # One after the other, each of them the probe.
        assert (await world.post(model="quick")).status == status
        assert breaker(await world.page(), "quick") is BreakerState.HALF_OPEN
    await until_booked(world, "quick", outcome(status), 4)
    assert (await world.post(model="quick")).status == 200
    await until_breaker(world, "quick", BreakerState.CLOSED)


async def test_a_wrong_key_draws_no_traffic(world: World) -> None:
    """It answers in no time and looks idle: left out once another endpoint shows it wrong."""
    keyed = world.engines["keyed"]
    keyed.inject(Fault(kind=FaultKind.STATUS, status=401))
    refused = 0

    async def is_left_out() -> bool:
        nonlocal refused
        refused += (await world.post(model="keyed")).status == 401
        return Exclusion.DEMOTED in exclusions(await world.page(), "keyed")

    await until(is_left_out, "keyed is demoted")
    assert refused <= 10
    seen = keyed.counters.requests
    assert await ask(world, TIMES, "keyed") == {200}
    assert keyed.counters.requests == seen
    assert breaker(await world.page(), "keyed") is BreakerState.CLOSED


async def test_what_one_model_shows_is_no_evidence_for_another(world: World) -> None:
    """The only endpoint of a model stays, though it refuses it and serves others."""
    world.engines["sound"].inject(Fault(kind=FaultKind.STATUS, status=404, times=TIMES))
    assert await ask(world, TIMES, "beside") == {404}
    assert exclusions(await world.page(), "sound") == set()
    assert (await world.post(model="beside")).status == 200


@pytest.mark.slow
async def test_a_mended_key_is_noticed(world: World) -> None:
    """One request in half a minute tries it; the first good answer brings it back."""
    keyed = world.engines["keyed"]
    keyed.inject(Fault(kind=FaultKind.STATUS, status=403))

    async def is_left_out() -> bool:
        await world.post(("x-session-id", fresh("session")), model="keyed")
        return Exclusion.DEMOTED in exclusions(await world.page(), "keyed")

    await until(is_left_out, "keyed is demoted")
    await world.forget()

    async def is_back() -> bool:
        assert (await world.post(model="keyed")).status == 200
        await asyncio.sleep(0.2)
        return Exclusion.DEMOTED not in exclusions(await world.page(), "keyed")

    await until(is_back, "keyed is back", 40)
    assert keyed.counters.served >= 1
