"""What the service makes of its endpoints, by its metrics, and crowds of requests at engines."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from case_http1 import SECONDS, Pair, Reply
from case_world import INFLIGHT, MODEL, Page, World, until

from extproc.exchange.ledger import GRACE_SECONDS
from extproc.lab.engine_http import LabEngine
from extproc.routing.endpoint import BreakerState
from extproc.telemetry.fleet import Exclusion

BREAKER = "llmgw_endpoint_breaker"
EXCLUDED = "llmgw_endpoint_excluded"
STALE = "llmgw_endpoint_stale"
UNREADABLE = "llmgw_endpoint_unreadable"
AGE = "llmgw_endpoint_stats_age_seconds"
RUNNING = "llmgw_endpoint_running"
WAITING = "llmgw_endpoint_waiting"
KV_USAGE = "llmgw_endpoint_kv_usage_ratio"


def breaker(page: Page, endpoint: str) -> BreakerState:
    """The state of an endpoint's breaker."""
    (state,) = (one for one in BreakerState if page.total(BREAKER, endpoint=endpoint, state=one))
    return state


def exclusions(page: Page, endpoint: str) -> set[Exclusion]:
    """Why an endpoint gets no requests, its breaker aside."""
    return {why for why in Exclusion if page.total(EXCLUDED, endpoint=endpoint, why=why)}


def known(page: Page, name: str, endpoint: str) -> float | None:
    """An endpoint's number; None where the page has none."""
    found = [
        value
        for sample, labels, value in page.samples
        if sample == name and labels.get("endpoint") == endpoint
    ]
    assert len(found) <= 1, (name, found)
    return found[0] if found else None


def counts(page: Page) -> dict[str, int]:
    """How many requests are in flight at each endpoint, zeros left out."""
    found = {
        labels["endpoint"]: round(value)
        for name, labels, value in page.samples
        if name == INFLIGHT and value
    }
    assert all(number > 0 for number in found.values()), found
    return found


async def until_counted(world: World, expected: dict[str, int], seconds: float = 1.0) -> None:
    """Exactly these are in flight, zeros left out, and no count is negative on the way."""
    found: dict[str, int] = {}

    async def is_so() -> bool:
        nonlocal found
        found = counts(await world.page())
        return found == expected

    try:
        await until(is_so, f"in flight {expected}", seconds)
    except AssertionError:
        raise AssertionError(f"in flight {found}, expected {expected}") from None


async def until_breaker(
    world: World, endpoint: str, state: BreakerState, seconds: float = SECONDS
) -> None:
    """The endpoint's breaker is in this state."""

    async def is_so() -> bool:
        return breaker(await world.page(), endpoint) is state

    await until(is_so, f"{endpoint} is {state}", seconds)


async def until_fresh(world: World, *endpoints: str, seconds: float = SECONDS) -> None:
    """The numbers of these endpoints have been read lately."""

    async def is_so() -> bool:
        page = await world.page()
        return all(page.total(STALE, endpoint=name) == 0 for name in endpoints)

    await until(is_so, f"{endpoints} fresh", seconds)


async def until_stale(world: World, *endpoints: str, seconds: float = SECONDS) -> None:
    """The numbers of these endpoints are missing or too old."""

    async def is_so() -> bool:
        page = await world.page()
        return all(page.total(STALE, endpoint=name) == 1 for name in endpoints)

    await until(is_so, f"{endpoints} stale", seconds)


async def until_known(
    world: World, name: str, endpoint: str, value: float | None, seconds: float = SECONDS
) -> None:
    """The page shows this number of the endpoint, or none."""

    async def is_so() -> bool:
        return known(await world.page(), name, endpoint) == value

    await until(is_so, f"{name} of {endpoint} is {value}", seconds)


async def until_asked(world: World, number: int, seconds: float = SECONDS) -> None:
    """The engines have got so many requests since `forget`."""

    async def is_so() -> bool:
        return sum(world.requests().values()) >= number

    await until(is_so, f"{number} requests at engines", seconds)


async def ask_until(
    world: World,
    endpoint: str,
    state: BreakerState,
    *pairs: Pair,
    model: str = MODEL,
    seconds: float = SECONDS,
) -> list[Reply]:
    """Requests, one after the other, until the endpoint's breaker is in this state."""
    replies: list[Reply] = []

    async def is_so() -> bool:
        if breaker(await world.page(), endpoint) is state:
            return True
        replies.append(await world.post(*pairs, model=model, seconds=seconds))
        return False

    await until(is_so, f"{endpoint} is {state}", seconds)
    return replies


@asynccontextmanager
async def held(engines: Iterable[LabEngine]) -> AsyncIterator[None]:
    """The engines make no token meanwhile."""
    listed = list(engines)
    for engine in listed:
        engine.hold()
    try:
        yield
    finally:
        for engine in listed:
            engine.release()


async def spread(
    world: World,
    number: int,
    *pairs: Pair,
    models: tuple[str, ...] = (MODEL,),
    seconds: float = SECONDS,
) -> Counter[str]:
    """Where `number` requests are that are in progress all at once; then all are answered.

    They ask for each of the models in turn.
    """
    before = sum(world.requests().values())
    async with held(world.engines.values()):
        asking = [
            asyncio.create_task(
                world.post(*pairs, model=models[turn % len(models)], seconds=seconds)
            )
            for turn in range(number)
        ]
        try:
            await until_asked(world, before + number, seconds)
        except BaseException:
            for task in asking:
                task.cancel()
            raise
    replies = await asyncio.gather(*asking)
    assert {reply.status for reply in replies} == {200}
    return Counter(reply.served_by for reply in replies)


async def settle(world: World) -> None:
    """Every verdict is booked; nothing is remembered of what happened until now."""
    await world.forget()
    # Nothing tells when the last one is: each waits its grace for Envoy's log, and for a tick.
    await asyncio.sleep(GRACE_SECONDS + 0.5)
    await world.forget()


async def each(stories: Mapping[str, Coroutine[None, None, None]]) -> None:
    """Every story has come to its good end, all at once; a failure has its story's name."""

    async def tell(name: str, story: Coroutine[None, None, None]) -> None:
        try:
            await story
        except Exception as error:
            error.add_note(name)
            raise

    async with asyncio.TaskGroup() as group:
        for name, story in stories.items():
            group.create_task(tell(name, story))


async def started_anew(world: World) -> None:
    """The service is another process, which remembers no session, breaker or slow start."""
    await world.stack.service.kill()
    await world.stack.start_service()
    world.booked = await world.page()


@asynccontextmanager
async def reconfigured(world: World, changed: Callable[[str], str]) -> AsyncIterator[None]:
    """The service runs on another text meanwhile, Envoy as it was; both begin and end anew."""
    file = Path(world.stack.config.file)
    text = file.read_text()

    file.write_text(changed(text))
    await started_anew(world)
    try:
        yield
    finally:
        file.write_text(text)
        await started_anew(world)
