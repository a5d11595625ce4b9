"""A page that does not tell an engine's load does not make the engine look idle."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from case_fleet import AGE, STALE, UNREADABLE, each, known, spread, until_known
from case_pages import (
    NOTHING,
    Numbers,
    asked_one_by_one,
    page,
    show,
    until_numbers,
    vllm,
)
from case_world import World, case, standing, until

from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind

pytestmark = case(36)

BUSY = Numbers(16, 40, 0.85)
HALF = Numbers(8, 4, 0.6)
IDLE = Numbers(0, 0, 0.0)
OTHER_NAMES = Fault(kind=FaultKind.METRICS_NAMES)

# Every page that is none, and what the log says of it.
WRONG: dict[str, tuple[Fault, str]] = {
    "prefix": (OTHER_NAMES, "running: the page has no vllm:num_requests_running"),
    "other_engine": (
        page("sglang:num_running_reqs 0\nsglang:num_queue_reqs 0\nsglang:token_usage 0\n"),
        "running: the page has no vllm:num_requests_running",
    ),
    "no_running": (vllm(running=""), "running: the page has no"),
    "no_waiting": (vllm(waiting=""), "waiting: the page has no"),
    "no_kv": (vllm(kv=""), "kv_usage: the page has no"),
    "types_alone": (
        page("# TYPE vllm:num_requests_running gauge\n# TYPE vllm:num_requests_waiting gauge\n"),
        "running: the page has no",
    ),
    "percent": (vllm(kv="12.5"), "kv_usage: 12.5 is not a ratio"),
    "no_value": (page("vllm:num_requests_running\n"), "is not a sample"),
    "empty": (Fault(kind=FaultKind.METRICS_EMPTY), "running: the page has no"),
    "login": (Fault(kind=FaultKind.METRICS_HTML), "running: the page has no"),
    "json": (Fault(kind=FaultKind.METRICS_JSON), "running: the page has no"),
    "packed": (page("x", content_encoding="gzip"), "is compressed"),
    "missing": (Fault(kind=FaultKind.METRICS_STATUS), "status 404"),
    "forbidden": (Fault(kind=FaultKind.METRICS_STATUS, status=401), "status 401"),
    "broken": (Fault(kind=FaultKind.METRICS_STATUS, status=500), "status 500"),
}
# A redirect to a good page, which says that the engine is idle.
MOVED = "moved"
# A page that is well formed and whose numbers are none.
NO_NUMBERS = "nan"
UNKNOWN = (*WRONG, MOVED, NO_NUMBERS)

CONFIG = """
scrape: {interval_seconds: 0.4, timeout_seconds: 1.5, stale_after_seconds: 2.5}
endpoints:
"""


def line(name: str, *models: str) -> str:
    """An endpoint of the configuration."""
    return f'  - {{id: {name}, url: "${name}", models: [{", ".join(models)}]}}\n'


CONFIG += "".join(line(kind, kind, f"only-{kind}") for kind in UNKNOWN)
CONFIG += "".join(line(name, *UNKNOWN) for name in ("busy", "half"))
CONFIG += line("turns", "turning") + line("stays", "turning")
CONFIG += line("blind0", "blind") + line("blind1", "blind")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """By each such engine, a busy and a half busy one that serve the same model."""
    models = (*UNKNOWN, *(f"only-{kind}" for kind in UNKNOWN), "turning", "blind")
    async with AsyncExitStack() as exits:
        idle = await exits.enter_async_context(LabEngine("idle"))
        faults = {kind: fault for kind, (fault, _) in WRONG.items()}
        faults[MOVED] = Fault(kind=FaultKind.METRICS_REDIRECT, body=f"{idle.url}/metrics")
        faults[NO_NUMBERS] = vllm("NaN", "+Inf", "-1")
        faults |= {"blind0": OTHER_NAMES, "blind1": OTHER_NAMES}
        # From the start: none of them was ever readable.
        engines = [LabEngine(name, models, faults=[fault]) for name, fault in faults.items()]
        sound = {name: LabEngine(name, models) for name in ("busy", "half", "turns", "stays")}
        world = await exits.enter_async_context(
            standing(tmp_path_factory.mktemp("case"), CONFIG, *engines, *sound.values())
        )
        for name, numbers in (("busy", BUSY), ("half", HALF), ("stays", BUSY)):
            show(sound[name], numbers)
            await until_numbers(world, name, numbers)
        yield world
        assert not idle.probes


async def test_it_is_shown_as_unknown(world: World) -> None:
    """No number, not even zero; that it is not readable, and in the log why."""
    reasons = {kind: reason for kind, (_, reason) in WRONG.items()} | {MOVED: "status 301"}

    async def shows(kind: str, reason: str) -> None:
        await until_known(world, UNREADABLE, kind, 1)
        await until_numbers(world, kind, NOTHING)
        shown = await world.page()
        assert (known(shown, STALE, kind), known(shown, AGE, kind)) == (1, None)

        async def is_told() -> bool:
            return any(f"endpoint {kind}: " in said and reason in said for said in world.said)

        await until(is_told, reason)

    await each({kind: shows(kind, reason) for kind, reason in reasons.items()})


async def test_a_page_without_numbers_is_read(world: World) -> None:
    """The engine says that it does not know: that is no fault of the page, and no zero."""
    await until_known(world, STALE, NO_NUMBERS, 0)
    shown = await world.page()
    assert known(shown, UNREADABLE, NO_NUMBERS) == 0
    await until_numbers(world, NO_NUMBERS, NOTHING)


async def test_it_is_not_preferred(world: World) -> None:
    """Beside it are a busy and a half busy engine: the half busy one is the best."""
    for kind in UNKNOWN:
        assert await asked_one_by_one(world, kind, 3) == {"half"}, kind


@pytest.mark.parametrize("kind", ["prefix", NO_NUMBERS])
async def test_it_is_not_avoided(world: World, kind: str) -> None:
    """Of a crowd it gets more than the busy one and less than the half busy one."""
    counts = await spread(world, 30, models=(kind,))
    assert counts["half"] > counts[kind] > counts["busy"], counts


async def test_it_serves_alone(world: World) -> None:
    """Its requests are the proof that it lives."""
    for kind in UNKNOWN:
        assert (await world.post(model=f"only-{kind}")).served_by == kind


async def test_nobody_is_known(world: World) -> None:
    """What is in flight decides, and the load is even."""
    assert await spread(world, 20, models=("blind",)) == {"blind0": 10, "blind1": 10}


async def test_a_page_that_turns_bad(world: World) -> None:
    """Shown at once; its last numbers count until they are stale, and then not at all."""
    turns = world.engines["turns"]
    show(turns, IDLE)
    await until_numbers(world, "turns", IDLE)
    assert await asked_one_by_one(world, "turning", 3) == {"turns"}
    turns.inject(OTHER_NAMES)
    await until_known(world, UNREADABLE, "turns", 1)
    await until_known(world, STALE, "turns", 1)
    await until_numbers(world, "turns", NOTHING)
    assert await asked_one_by_one(world, "turning", 3) == {"stays"}
    await turns.heal()
    await until_known(world, UNREADABLE, "turns", 0)
    await until_numbers(world, "turns", IDLE)
    assert await asked_one_by_one(world, "turning", 3) == {"turns"}
