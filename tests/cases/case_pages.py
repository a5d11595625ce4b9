"""Metrics pages of engines, as any text, and what the service says that it has read there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from case_fleet import KV_USAGE, RUNNING, WAITING, known
from case_world import World, until

from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind


class Numbers(NamedTuple):
    """What the service says of an endpoint's load; None where it says nothing."""

    running: float | None
    waiting: float | None
    kv: float | None


NOTHING = Numbers(None, None, None)


def page(text: str, **headers: str) -> Fault:
    """The engine's page is this text; `_` in a header's name is `-`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Fault(kind=FaultKind.METRICS_PAGE, body=text, headers=named)


def lines(listed: Iterable[str]) -> Fault:
    """A page of these lines."""
    return page("".join(f"{line}\n" for line in listed))


def vllm(running: str = "0", waiting: str = "0", kv: str = "0") -> Fault:
    """A page of vLLM; where a number is empty, its line is not there."""
    named = {
        "vllm:num_requests_running": running,
        "vllm:num_requests_waiting": waiting,
        "vllm:kv_cache_usage_perc": kv,
    }
    return lines(f"{name} {value}" for name, value in named.items() if value)


def show(engine: LabEngine, numbers: Numbers) -> None:
    """The engine's own page has these numbers on every rank, and the truth for None."""
    running, waiting, kv = numbers
    engine.show(
        running=None if running is None else round(running),
        waiting=None if waiting is None else round(waiting),
        kv_usage_ratio=kv,
    )


async def until_numbers(world: World, endpoint: str, numbers: Numbers) -> None:
    """The service says exactly this of the endpoint."""
    found = NOTHING

    async def is_so() -> bool:
        nonlocal found
        shown = await world.page()
        found = Numbers(*(known(shown, name, endpoint) for name in (RUNNING, WAITING, KV_USAGE)))
        return found == numbers

    try:
        await until(is_so, f"{endpoint} at {numbers}")
    except AssertionError:
        raise AssertionError(f"{endpoint} at {found}, expected {numbers}") from None


async def asked_one_by_one(world: World, model: str, number: int) -> set[str]:
    """Who served so many requests, each asked for when the one before was over."""
    served = set()
    for _ in range(number):
        reply = await world.post(model=model)
        assert reply.status == 200, reply
        served.add(reply.served_by)
        await world.until_idle()
    return served


def turn(engine: LabEngine, fault: Fault) -> None:
    """The engine's page is another from now on."""
    engine.faults.clear()
    engine.inject(fault)


async def until_read(engine: LabEngine, times: int = 2) -> None:
    """The engine's page has been asked for so many times more, the last but one read to its end."""
    seen = engine.counters.by_path.total()
    await engine.until(lambda: engine.counters.by_path.total() >= seen + times, seconds=10)
