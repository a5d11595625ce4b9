"""What comes between two scrapes is spread evenly, whatever was learned before."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from case_fleet import RUNNING, WAITING, spread, until_fresh, until_known
from case_world import World, case, endpoints, standing

from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind

pytestmark = case(43)

BURST = 90
THREE = ("a", "b", "c")
PAIRS = {"x": ("x1", "x2"), "y": ("y1", "y2"), "turns-x": ("x1", "x2"), "turns-y": ("y1", "y2")}
STRATEGIES = """
strategies: {turns: {picker: round-robin}}
models:
  turns-x: {strategy: turns}
  turns-y: {strategy: turns}
"""
MANY = (
    "scrape: {interval_seconds: 0.5, timeout_seconds: 0.5}\n"
    + STRATEGIES
    + endpoints(*THREE)
    + "".join(
        f'  - {{id: {name}, url: "${name}", models: [{model}, turns-{model}]}}\n'
        for model in ("x", "y")
        for name in PAIRS[model]
    )
)
# The strategies that are built in, each under the name of a model that has it.
BUILT_IN = ("chat", "batch", "long-context")
LEARNING = (
    "scrape: {interval_seconds: 0.5, timeout_seconds: 0.5}\nmodels:\n"
    + "".join(f"  {name}: {{strategy: {name}}}\n" for name in BUILT_IN)
    + endpoints(*THREE, models=", ".join(BUILT_IN))
)
SETTINGS = EngineSettings(max_running=1000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Seven equal engines behind an Envoy with four workers, which all ask the one service."""
    names = [*THREE, *PAIRS["x"], *PAIRS["y"]]
    engines = [LabEngine(name, ("m", *PAIRS), settings=SETTINGS) for name in names]
    folder = tmp_path_factory.mktemp("case")
    async with standing(folder, MANY, *engines, concurrency=4) as world:
        yield world


def end_scrapes(world: World) -> None:
    """No scrape ends any more: what comes from now on comes between two of them."""
    for engine in world.engines.values():
        engine.inject(Fault(kind=FaultKind.METRICS_HANG))


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, idle and known to be, with the next scrape far away."""
    await started.forget()
    await until_fresh(started, *started.engines)
    for name in started.engines:
        await until_known(started, RUNNING, name, 0)
        await until_known(started, WAITING, name, 0)
    end_scrapes(started)
    return started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def learning(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Three equal engines, for a service that has learned something of them."""
    engines = [LabEngine(name, BUILT_IN, settings=SETTINGS) for name in THREE]
    async with standing(tmp_path_factory.mktemp("case"), LEARNING, *engines) as world:
        yield world


async def show(world: World, pages: dict[str, tuple[int, int]]) -> None:
    """The service has read these pages: how many run and wait, idle for those not named."""
    for name, engine in world.engines.items():
        running, waiting = pages.get(name, (0, 0))
        engine.show(running=running, waiting=waiting, kv_usage_ratio=0.0)
    for name in world.engines:
        running, waiting = pages.get(name, (0, 0))
        await until_known(world, RUNNING, name, running)
        await until_known(world, WAITING, name, waiting)


def about(number: int) -> tuple[int, int]:
    """A tenth less and a tenth more."""
    return number - number // 10, number + number // 10


async def test_idle_engines(world: World) -> None:
    """Ninety at once to three idle equals: thirty each, because our own count at once."""
    where = await spread(world, BURST)
    low, high = about(BURST // 3)
    assert sorted(where) == [*THREE]
    assert all(low <= number <= high for number in where.values()), where


async def test_one_burst_after_the_other(world: World) -> None:
    """What came and went since the scrape is no load any more."""
    low, high = about(BURST // 3)
    for _ in range(3):
        where = await spread(world, BURST)
        assert all(low <= where[name] <= high for name in THREE), where
        await world.until_idle()


@pytest.mark.parametrize("models", [("x", "y"), ("turns-x", "turns-y")])
async def test_two_models_in_turn(world: World, models: tuple[str, str]) -> None:
    """Each has two endpoints of its own: the turns of one are not counted in the other's."""
    where = await spread(world, 80, models=models)
    low, high = about(20)
    assert sorted(where) == ["x1", "x2", "y1", "y2"]
    assert all(low <= number <= high for number in where.values()), where


async def one_by_one(world: World, number: int, *models: str) -> Counter[str]:
    """Where requests go of which each begins when the one before it counts no more."""
    where: Counter[str] = Counter()
    for turn in range(number):
        reply = await world.post(model=models[turn % len(models)])
        assert reply.status == 200
        where[reply.served_by] += 1
        await world.until_idle()
    return where


async def test_equals_are_drawn(world: World) -> None:
    """Where nothing is in flight nobody is first: a trickle reaches all three."""
    where = await one_by_one(world, BURST, "m")
    # By chance: thirty each, with a deviation of four and a half.
    assert all(where[name] >= 8 for name in THREE), where


async def test_two_models_trickle_in_turn(world: World) -> None:
    """A model's turns are its own, also where requests of another come between each two."""
    by_turns = await one_by_one(world, 40, "turns-x", "turns-y")
    assert by_turns == dict.fromkeys(["x1", "x2", "y1", "y2"], 10)
    drawn = await one_by_one(world, 80, "x", "y")
    # By chance: twenty each, with a deviation of three.
    assert all(drawn[name] >= 5 for name in ("x1", "x2", "y1", "y2")), drawn


@pytest.mark.parametrize(
    "seen",
    [
        {"a": (1, 0)},
        {"a": (1, 0), "b": (2, 0)},
        {"a": (8, 0), "b": (1, 0), "c": (3, 0)},
        {"a": (8, 2), "b": (8, 5), "c": (8, 1)},
    ],
    ids=["one-ran", "two-ran", "all-ran", "all-queued"],
)
async def test_after_earlier_load(learning: World, seen: dict[str, tuple[int, int]]) -> None:
    """How little an engine was ever seen to run does not make it look full in a burst."""
    world = learning
    await world.stack.service.kill()
    await world.stack.start_service()
    await world.forget()
    await until_fresh(world, *THREE)
    await show(world, seen)
    await show(world, {})
    end_scrapes(world)
    low, high = about(BURST // 3)
    for model in BUILT_IN:
        where = await spread(world, BURST, models=(model,))
        assert all(low <= where[name] <= high for name in THREE), (model, where)
        await world.until_idle()
