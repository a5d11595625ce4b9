"""Engines rename their numbers: each is found under every name that a version has for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from case_fleet import STALE, UNREADABLE, each, known, spread, until_known
from case_pages import (
    NOTHING,
    Numbers,
    asked_one_by_one,
    lines,
    page,
    show,
    turn,
    until_numbers,
    until_read,
)
from case_world import World, case, standing

from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault

pytestmark = case(37)

DRAIN_RATE = "llmgw_endpoint_drain_rate"
GOLDEN = Path(__file__).parents[1] / "engines" / "pages"

# What stands on an engine's page, by engine and version: running, waiting, KV usage.
VERSIONS = {
    "vllm-0.32.0-idle": Numbers(0, 0, 0.0),
    "vllm-0.32.0-dp2-busy": Numbers(4, 8, 0.0014650225857648635),
    "vllm-0.8.5-v0-engine": Numbers(7, 2, 0.375),
    "vllm-0.10.2-both-kv-names": Numbers(1, 0, 0.25),
    "vllm-0.11.0-openmetrics": Numbers(3, 1, 0.5),
    "vllm-0.11.0-ray-2.51": Numbers(10, 1, 0.25),
    "sglang-0.4.6-no-rank-labels": Numbers(162, 2826, 0.28),
    "sglang-0.5.6-tp4-all-schedulers": Numbers(8, 4, 0.5),
    "sglang-0.5.11-dp2-priority": Numbers(11, 40, 0.9),
    "sglang-0.5.9-decode": Numbers(10, 6, 0.31),
    "tgi-3.3.6": Numbers(12, 6, 0.25),
    "tgi-2.4.1": Numbers(3, 0, None),
    "trtllm-1.2.0": Numbers(5, 1, 0.62),
    "triton-25.06-tensorrtllm": Numbers(8, 2, 0.4875),
    "lmdeploy-0.10.2-dp2": Numbers(7, 6, 0.7),
    "llamacpp-b11434-idle": Numbers(0, 0, None),
}

LOAD = ("vllm:num_requests_running 3", "vllm:num_requests_waiting 2")
OLD = "vllm:gpu_cache_usage_perc 0.25"
NEW = "vllm:kv_cache_usage_perc 0.5"
OPENMETRICS = """\
# TYPE vllm:num_requests_running gauge
# UNIT vllm:num_requests_running requests
vllm:num_requests_running{engine="0",model_name="m"} 3.0 1766000000.123
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0 1766000000.123
vllm:num_requests_waiting_created{engine="0",model_name="m"} 1.766e+09
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5 # {trace_id="a \\" b} 7"} 9.0 1766000000.1
# EOF
"""
# Ways in which vLLM's numbers may be written, and what they are.
WRITTEN: dict[str, tuple[Fault, Numbers]] = {
    "old": (lines([*LOAD, OLD]), Numbers(3, 2, 0.25)),
    "new": (lines([*LOAD, NEW]), Numbers(3, 2, 0.5)),
    "old_first": (lines([*LOAD, OLD, NEW]), Numbers(3, 2, 0.5)),
    "new_first": (lines([*LOAD, NEW, OLD]), Numbers(3, 2, 0.5)),
    # A new name that is there has the word, also where it does not know.
    "new_unknown": (lines([*LOAD, OLD, "vllm:kv_cache_usage_perc NaN"]), Numbers(3, 2, None)),
    "neither": (lines(LOAD), NOTHING),
    "created": (
        lines(
            [
                "vllm:num_requests_running_created 1.766e+09",
                "vllm:num_requests_waiting_created 1.766e+09",
                *LOAD,
                NEW,
                "vllm:num_requests_running_created 1.766e+09",
                "vllm:kv_cache_usage_perc_created 1.766e+09",
            ]
        ),
        Numbers(3, 2, 0.5),
    ),
    "created_alone": (
        lines(["vllm:num_requests_running_created 0", LOAD[1], NEW]),
        NOTHING,
    ),
    "longer_names": (
        lines(
            [
                'vllm:num_requests_waiting_by_reason{reason="capacity"} 90',
                "vllm:num_requests_running_total 90",
                *LOAD,
                NEW,
            ]
        ),
        Numbers(3, 2, 0.5),
    ),
    "openmetrics": (
        page(OPENMETRICS, content_type="application/openmetrics-text; version=1.0.0"),
        Numbers(3, 2, 0.5),
    ),
    "underscores": (
        page("\n".join([*LOAD, NEW]).replace(":", "_")),  # no line feed at the end either
        Numbers(3, 2, 0.5),
    ),
    "wrapped": (
        page("\r\n".join(f"ray_{line}" for line in [*LOAD, NEW, ""]).replace(":", "_")),
        Numbers(3, 2, 0.5),
    ),
    "spaces": (
        lines(
            f'{name}{{ engine = "0" , }}\t{value}' for name, value in map(str.split, (*LOAD, NEW))
        ),
        Numbers(3, 2, 0.5),
    ),
}

# How the counter of completed requests may be written; whether it is one.
COUNTERS = {
    "with_total": (["vllm:request_success_total {}"], True),
    "without_total": (["vllm:request_success {}"], True),
    "both": (["vllm:request_success {}", "vllm:request_success_total {}"], True),
    "total_and_created": (
        [
            'vllm:request_success_created{{finished_reason="stop"}} 1.766e+09',
            'vllm:request_success_total{{finished_reason="stop"}} {} # {{trace_id="a"}} 1 1.7e+09',
            'vllm:request_success_created{{finished_reason="stop"}} 1.766e+09',
        ],
        True,
    ),
    "created_only": (["vllm:request_success_created 1.766{}e+09"], False),
}

ENGINES = ("vllm", "sglang", "tgi", "trtllm", "triton", "lmdeploy", "llamacpp")
KV_LESS = "llamacpp"
# Whom each engine's numbers are to tell apart, and by which of them.
BUSY = Numbers(16, 40, 0.75)
IDLE = Numbers(0, 0, 0.0)
QUEUED = Numbers(0, 40, 0.0)
FULL = Numbers(0, 0, 0.875)

CONFIG = """
scrape: {interval_seconds: 0.5, timeout_seconds: 1.5, stale_after_seconds: 5}
endpoints:
"""
CONFIG += "".join(
    f'  - {{id: v{number}, url: "$v{number}", engine: {name.partition("-")[0]}, models: [v]}}\n'
    for number, name in enumerate(VERSIONS)
)
CONFIG += "".join(
    f'  - {{id: {name}, url: "${name}", models: [written]}}\n' for name in (*WRITTEN, *COUNTERS)
)
CONFIG += "".join(
    f'  - {{id: {name}{place}, url: "${name}{place}", engine: {name}, models: [{name}]}}\n'
    for name in ENGINES
    for place in (0, 1)
)
CONFIG += """
  - {id: mute0, url: "$mute0", engine: none, models: [none]}
  - {id: mute1, url: "$mute1", engine: none, models: [none]}
  - {id: beside, url: "$beside", models: [mixed]}
  - {id: silent, url: "$silent", engine: none, models: [mixed]}
  - id: own
    url: "$own"
    models: [own]
    metrics:
      url: "$mute0/metrics"
      names:
        running: ["fork:busy"]
        waiting: ["fork:queue{class!=\\"batch\\"}"]
        kv_usage: ["fork:cache{tier=\\"gpu\\"}", "vllm:kv_cache_usage_perc"]
"""
OWN = lines(
    [
        "fork:busy 3",
        'fork:queue{class="batch"} 90',
        'fork:queue{class="chat"} 2',
        'fork:cache{tier="gpu"} 0.5',
    ]
)


def counted(form: list[str], number: int) -> Fault:
    """A busy engine's page with its counter of completed requests at `number`."""
    return lines([*LOAD, NEW, *(line.format(number) for line in form)])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """An engine for each version, each way of writing, and two of each kind."""
    engines = []
    for number, name in enumerate(VERSIONS):
        text = (GOLDEN / f"{name}.txt").read_text()
        kind = name.partition("-")[0]
        engines.append(LabEngine(f"v{number}", dialect=kind, faults=[page(text)]))
    engines += [LabEngine(name, faults=[fault]) for name, (fault, _) in WRITTEN.items()]
    engines += [LabEngine(name, faults=[counted(f, 100)]) for name, (f, _) in COUNTERS.items()]
    models = (*ENGINES, "none", "mixed", "own")
    engines += [
        LabEngine(f"{kind}{place}", models, dialect=kind) for kind in ENGINES for place in (0, 1)
    ]
    engines += [LabEngine(name, models) for name in ("mute1", "beside", "silent", "own")]
    engines.append(LabEngine("mute0", models, faults=[OWN]))
    async with standing(tmp_path_factory.mktemp("case"), CONFIG, *engines) as world:
        yield world


async def test_every_version(world: World) -> None:
    """Pages of seven engines, old and new, whole ones of running engines among them."""
    await each(
        {
            name: until_numbers(world, f"v{number}", numbers)
            for number, (name, numbers) in enumerate(VERSIONS.items())
        }
    )
    for number in range(len(VERSIONS)):
        # On a busy machine a page may come too late; the next one counts as well.
        await until_known(world, UNREADABLE, f"v{number}", 0)


async def test_every_way_of_writing(world: World) -> None:
    """The newer name wins whatever the order; where a number is missing, all are unknown."""

    async def is_read(name: str, numbers: Numbers) -> None:
        await until_known(world, UNREADABLE, name, float(numbers is NOTHING))
        await until_numbers(world, name, numbers)

    await each({name: is_read(name, numbers) for name, (_, numbers) in WRITTEN.items()})


async def test_counters(world: World) -> None:
    """With or without their suffix they count; the moment of their creation is no count."""

    async def counts(name: str, form: list[str], *, is_counter: bool) -> None:
        engine = world.engines[name]
        await (until_known(world, DRAIN_RATE, name, 0) if is_counter else until_read(engine))
        turn(engine, counted(form, 200))
        await until_read(engine)
        rate = known(await world.page(), DRAIN_RATE, name)
        assert (rate is not None and rate > 0) if is_counter else rate is None

    await each(
        {
            name: counts(name, form, is_counter=is_counter)
            for name, (form, is_counter) in COUNTERS.items()
        }
    )


async def test_what_is_asked_for(world: World) -> None:
    """The plain text format, each engine's page where that engine has it, and no other page."""
    for kind in ENGINES:
        path = "/prometheus/metrics" if kind == "trtllm" else "/metrics"
        engine = world.engines[f"{kind}0"]
        await engine.until(lambda engine=engine: bool(engine.probes))  # type: ignore[misc]  # this round's
        assert {probe.path for probe in engine.probes} == {path}
        assert {tuple(probe.header("accept")) for probe in engine.probes} == {
            (b"text/plain;version=0.0.4;q=1,text/plain;q=0.5",)
        }


@pytest.mark.parametrize("worse", [BUSY, QUEUED, FULL])
async def test_every_engines_numbers_route(world: World, worse: Numbers) -> None:
    """Of two alike, the one that is busy, has a queue, or a full cache gets nothing; both ways."""
    kinds = [kind for kind in ENGINES if not (kind == KV_LESS and worse is FULL)]
    for better in (0, 1):
        for kind in kinds:
            show(world.engines[f"{kind}{better}"], IDLE)
            show(world.engines[f"{kind}{1 - better}"], worse)
        for kind in kinds:
            for place, numbers in ((better, IDLE), (1 - better, worse)):
                seen = numbers._replace(kv=None) if kind == KV_LESS else numbers
                await until_numbers(world, f"{kind}{place}", seen)
        for kind in kinds:
            assert await asked_one_by_one(world, kind, 2) == {f"{kind}{better}"}


async def test_an_engine_that_is_not_read(world: World) -> None:
    """`none` has no page: nothing is asked, nothing shown, and in-flight decides alone."""
    assert await spread(world, 20, models=("none",)) == {"mute0": 10, "mute1": 10}
    assert not world.engines["mute1"].probes
    assert not world.engines["silent"].probes
    shown = await world.page()
    for name in ("mute0", "mute1", "silent"):
        await until_numbers(world, name, NOTHING)
        assert (known(shown, STALE, name), known(shown, UNREADABLE, name)) == (None, None)


async def test_it_is_like_the_others(world: World) -> None:
    """Beside an engine that is read, its load counts as that one's: neither draws all."""
    for numbers in (IDLE, BUSY):
        show(world.engines["beside"], numbers)
        await until_numbers(world, "beside", numbers)
        counts = await spread(world, 20, models=("mixed",))
        assert min(counts["beside"], counts["silent"]) >= 5, counts


async def test_names_of_ones_own(world: World) -> None:
    """Where an engine has other names, its endpoint says which, and at which address."""
    await until_numbers(world, "own", Numbers(3, 2, 0.5))
    assert not world.engines["own"].probes
