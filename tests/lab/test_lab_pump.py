"""Engine models driven by an event loop."""

from __future__ import annotations

import asyncio

from extproc.lab.engine import Engine, EngineSettings, Refusal
from extproc.lab.pump import Pump, Run


def pump_of(*settings: EngineSettings) -> Pump:
    """Engines with these settings, driven by the running loop."""
    return Pump([Engine(one) for one in settings], asyncio.get_running_loop())


async def drained(run: Run) -> int:
    """All tokens of the run, when it has ended."""
    tokens, has_ended = 0, False
    while not has_ended:
        fresh, has_ended = await run.tokens()
        tokens += fresh
    return tokens


async def test_every_token_arrives_once() -> None:
    """Several runs side by side get exactly what they asked for."""
    pump = pump_of(EngineSettings(max_running=2))
    runs = [pump.submit(10, wanted) for wanted in (1, 7, 30)]
    async with asyncio.timeout(5):
        got = await asyncio.gather(*(drained(run) for run in runs if isinstance(run, Run)))
    assert got == [1, 7, 30]


async def test_a_late_reader_gets_all_at_once() -> None:
    """Tokens wait for whoever fetches them, and the end is told again."""
    pump = pump_of(EngineSettings())
    run = pump.submit(1, 5)
    assert isinstance(run, Run)
    other = pump.submit(1, 30)
    assert isinstance(other, Run)
    async with asyncio.timeout(5):
        await drained(other)
    assert await run.tokens() == (5, True)
    assert await run.tokens() == (0, True)


async def test_an_idle_pump_has_no_timer() -> None:
    """Nothing is scheduled before the first request and after the last."""
    pump = pump_of(EngineSettings())

    def has_timer() -> bool:
        return pump._timer is not None

    assert not has_timer()
    run = pump.submit(1, 2)
    assert has_timer()
    assert isinstance(run, Run)
    async with asyncio.timeout(5):
        await drained(run)
    assert not has_timer()
    aborted = pump.submit(1000, 2)
    assert isinstance(aborted, Run)
    assert pump.abort(aborted)
    assert not pump.abort(aborted)
    assert not has_timer()
    assert pump._runs == {}


async def test_held_time_does_not_pass() -> None:
    """What was held goes on after its release as if nothing had been."""
    pump = pump_of(EngineSettings())
    pump.release()
    pump.hold()
    run = pump.submit(1, 50)
    assert isinstance(run, Run)
    before = pump.now()
    pump.hold()
    await asyncio.sleep(0.02)
    assert pump.now() == before
    assert pump.is_held
    assert run.generation.produced == 0
    pump.release()
    assert asyncio.get_running_loop().time() - pump.now() >= 0.02
    async with asyncio.timeout(5):
        assert await drained(run) == 50


async def test_the_emptiest_rank_gets_the_request() -> None:
    """Four requests on two ranks are two each."""
    pump = pump_of(EngineSettings(), EngineSettings())
    pump.hold()
    for _ in range(4):
        pump.submit(1, 1)
    assert [len(engine.running) for engine in pump.engines] == [2, 2]


async def test_a_refusal_is_passed_on() -> None:
    """What the engine refuses never becomes a run."""
    pump = pump_of(EngineSettings(max_model_tokens=5))
    assert pump.submit(5, 5) is Refusal.TOO_LONG
    assert pump._runs == {}
