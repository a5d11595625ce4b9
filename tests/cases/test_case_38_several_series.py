"""Several series of one engine make one number, by its kind's rule and in any order."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random

import pytest
import pytest_asyncio
from case_fleet import UNREADABLE, each, known
from case_pages import NOTHING, Numbers, asked_one_by_one, lines, show, until_numbers
from case_world import World, case, standing, until

from extproc.lab.engine_http import LabEngine

pytestmark = case(38)


def series(name: str, value: float, **labels: object) -> str:
    """A line of a page."""
    named = ",".join(f'{label}="{text}"' for label, text in labels.items())
    return f"{name}{{{named}}} {value}"


def vllm(running: float, waiting: float, kv: float, **labels: object) -> list[str]:
    """The lines of one series each in vLLM's words."""
    return [
        series("vllm:num_requests_running", running, **labels),
        series("vllm:num_requests_waiting", waiting, **labels),
        series("vllm:kv_cache_usage_perc", kv, **labels),
    ]


def sglang(running: float, waiting: float, kv: float, **labels: object) -> list[str]:
    """The same in SGLang's."""
    return [
        series("sglang:num_running_reqs", running, **labels),
        series("sglang:num_queue_reqs", waiting, **labels),
        series("sglang:token_usage", kv, **labels),
    ]


def lmdeploy(running: float, waiting: float, kv: float, **labels: object) -> list[str]:
    """The same in LMDeploy's."""
    return [
        series("lmdeploy:num_requests_running", running, **labels),
        series("lmdeploy:num_requests_waiting", waiting, **labels),
        series("lmdeploy:gpu_cache_usage_perc", kv, **labels),
    ]


def trtllm(running: float, waiting: float, kv: float, **labels: object) -> list[str]:
    """The same in TensorRT-LLM's."""
    return [
        series("trtllm_num_requests_running", running, **labels),
        series("trtllm_num_requests_waiting", waiting, **labels),
        series("trtllm_kv_cache_utilization", kv, **labels),
    ]


def triton(running: float, waiting: float, kv: float, **labels: object) -> list[str]:
    """The same in Triton's, which has several numbers in a family."""
    requests, blocks = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
    return [
        series(requests, 512, request_type="max", **labels),
        series(requests, running, request_type="scheduled", **labels),
        series(requests, waiting, request_type="waiting", **labels),
        series(requests, running + waiting, request_type="active", **labels),
        series(blocks, 4096, kv_cache_block_type="max", **labels),
        series(blocks, kv, kv_cache_block_type="fraction", **labels),
        series(blocks, 4096 * kv, kv_cache_block_type="used", **labels),
    ]


@dataclass(frozen=True, slots=True)
class Layout:
    """A page whose series are the sum of these parts, and what it comes to."""

    parts: tuple[list[str], ...]
    numbers: Numbers
    engine: str = "vllm"
    models: str = "some"


def _tp(number: int, copies: int = 4) -> dict[str, object]:
    return {"engine_type": "unified", "tp_rank": number % copies, "pp_rank": 0, "moe_ep_rank": 0}


LAYOUTS: dict[str, Layout] = {
    # Data parallel: what waits anywhere waits, and a request may land on the fullest rank.
    "vllm_ranks": Layout(
        (vllm(2, 0, 0.1, engine=0, model_name="m"), vllm(3, 40, 0.9, engine=1, model_name="m")),
        Numbers(5, 40, 0.9),
    ),
    "vllm_many_ranks": Layout(
        tuple(vllm(n, n, n / 16, engine=n, model_name="m") for n in range(12)),
        Numbers(66, 66, 11 / 16),
    ),
    "lmdeploy_ranks": Layout(
        (
            [*lmdeploy(2, 0, 0.1, engine=0), series("lmdeploy:num_api_requests_waiting", 3)],
            lmdeploy(3, 40, 0.9, engine=1),
        ),
        Numbers(5, 43, 0.9),
        engine="lmdeploy",
    ),
    "sglang_ranks": Layout(
        tuple(sglang(4 + n, 40 * n, 0.1 + 0.4 * n, dp_rank=n, tp_rank=n * 4) for n in range(2)),
        Numbers(9, 40, 0.5),
        engine="sglang",
    ),
    # Tensor parallel: every rank says what all of them do together.
    "sglang_copies": Layout(
        tuple(sglang(8, 8, 0.5, **_tp(n)) for n in range(4)), Numbers(8, 8, 0.5), engine="sglang"
    ),
    # They are read one after the other, and may differ by a request: the first rank has the word.
    "sglang_copies_differ": Layout(
        tuple(sglang(8 + n, 8 - n, 0.5 + n / 16, **_tp(n)) for n in range(4)),
        Numbers(8, 8, 0.5),
        engine="sglang",
    ),
    "sglang_pipeline": Layout(
        tuple(sglang(8, 8, 0.5, tp_rank=n % 2, pp_rank=n // 2) for n in range(4)),
        Numbers(8, 8, 0.5),
        engine="sglang",
    ),
    "sglang_ranks_and_copies": Layout(
        tuple(sglang(8, 8, 0.25 * (1 + n // 4), dp_rank=n // 4, **_tp(n)) for n in range(8)),
        Numbers(16, 16, 0.5),
        engine="sglang",
    ),
    "sglang_ten_copies": Layout(
        tuple(sglang(8 + n, 8, 0.5, **_tp(n, 12)) for n in range(2, 12)),
        Numbers(10, 8, 0.5),
        engine="sglang",
    ),
    # A split of a total beside the total.
    "sglang_priorities": Layout(
        (
            sglang(8, 12, 0.5, priority=""),
            sglang(5, 4, 0.5, priority="0"),
            sglang(3, 8, 0.5, priority="9"),
        ),
        Numbers(8, 12, 0.5),
        engine="sglang",
    ),
    # Several models on one page: those that the endpoint serves.
    "two_models_one_ours": Layout(
        (vllm(2, 3, 0.25, model_name="base"), vllm(8, 40, 0.9, model_name="lora")),
        Numbers(2, 3, 0.25),
        models="base",
    ),
    "two_models_the_other_ours": Layout(
        (vllm(2, 3, 0.25, model_name="base"), vllm(8, 40, 0.9, model_name="lora")),
        Numbers(8, 40, 0.9),
        models="lora",
    ),
    "two_models_both_ours": Layout(
        (vllm(2, 3, 0.25, model_name="base"), vllm(8, 40, 0.9, model_name="lora")),
        Numbers(10, 43, 0.9),
        models="base, lora",
    ),
    # None of the names is known: the engine is as loaded as all of them.
    "two_models_none_ours": Layout(
        (vllm(2, 3, 0.25, model_name="base"), vllm(8, 40, 0.9, model_name="lora")),
        Numbers(10, 43, 0.9),
    ),
    "two_models_on_ranks": Layout(
        (
            vllm(2, 3, 0.25, engine=0, model_name="base"),
            vllm(8, 40, 0.9, engine=0, model_name="lora"),
            vllm(2, 3, 0.5, engine=1, model_name="base"),
            vllm(8, 40, 0.9, engine=1, model_name="lora"),
        ),
        Numbers(4, 6, 0.5),
        models="base",
    ),
    "sglang_two_models": Layout(
        (
            sglang(2, 3, 0.25, model_name="base", tp_rank=0),
            sglang(2, 3, 0.25, model_name="base", tp_rank=1),
            sglang(8, 40, 0.9, model_name="lora", tp_rank=0),
        ),
        Numbers(2, 3, 0.25),
        engine="sglang",
        models="base",
    ),
    "trtllm_two_models": Layout(
        (trtllm(2, 3, 0.25, model_name="base"), trtllm(8, 40, 0.9, model_name="lora")),
        Numbers(2, 3, 0.25),
        engine="trtllm",
        models="base",
    ),
    # The steps of an ensemble, through which every request goes.
    "triton_steps": Layout(
        (triton(2, 3, 0.25, model="first"), triton(8, 40, 0.5, model="second")),
        Numbers(8, 40, 0.5),
        engine="triton",
    ),
    # One rank that does not know: a part does not stand for the whole.
    "vllm_rank_unknown": Layout(
        (vllm(2, 3, 0.25, engine=0), vllm(float("nan"), 4, float("inf"), engine=1)),
        Numbers(None, 7, None),
    ),
    # The same series twice is a fault of the page: the worse one counts.
    "vllm_twice": Layout(
        (vllm(2, 0, 0.25, engine=0), vllm(2, 40, 0.75, engine=0)), Numbers(2, 40, 0.75)
    ),
}
ORDERS = ("forwards", "backwards", "mixed")


def ordered(layout: Layout, order: str) -> list[str]:
    """The lines of the page in this order."""
    listed = [line for part in layout.parts for line in part]
    if order == "backwards":
        listed.reverse()
    if order == "mixed":
        Random(len(listed)).shuffle(listed)
    return listed


CONFIG = """
scrape: {interval_seconds: 0.6, timeout_seconds: 1.5, stale_after_seconds: 6}
endpoints:
"""
CONFIG += "".join(
    f'  - {{id: {name}_{order}, url: "${name}_{order}", engine: {layout.engine},'
    f" models: [{layout.models}]}}\n"
    for name, layout in LAYOUTS.items()
    for order in ORDERS
)
CONFIG += '  - {id: inside, url: "$inside", models: [outside], upstream_model: base}\n'
# A plain engine with a queue of 20, and one whose ranks have 0 and 40, whichever comes last.
CONFIG += "".join(
    f'  - {{id: ranks_{order}, url: "$ranks_{order}", models: [dp_{order}]}}\n'
    f'  - {{id: copies_{order}, url: "$copies_{order}", engine: sglang, models: [tp_{order}]}}\n'
    for order in ORDERS
)
ROUTED = [f"{what}_{order}" for what in ("dp", "tp") for order in ORDERS]
CONFIG += f'  - {{id: plain, url: "$plain", models: [{", ".join(ROUTED)}]}}\n'
# Behind one address, as many engines as there are ranks.
for kind in ("vllm", "sglang", "lmdeploy"):
    CONFIG += f'  - {{id: real_{kind}, url: "$real_{kind}", engine: {kind}, models: [m]}}\n'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """An engine for each page and order."""
    both = [line for n in (0, 1) for line in vllm(8, 40 * n, 0.25, engine=n)]
    copies = Layout(tuple(sglang(8, 8, 0.25, **_tp(n)) for n in range(4)), NOTHING)
    engines = []
    for order in ORDERS:
        for name, layout in LAYOUTS.items():
            fault = lines(ordered(layout, order))
            engines.append(LabEngine(f"{name}_{order}", dialect=layout.engine, faults=[fault]))
        ranks = lines(ordered(Layout((both,), NOTHING), order))
        engines.append(LabEngine(f"ranks_{order}", ROUTED, faults=[ranks]))
        page = lines(ordered(copies, order))
        engines.append(LabEngine(f"copies_{order}", ROUTED, dialect="sglang", faults=[page]))
    page = lines([*vllm(2, 3, 0.25, model_name="base"), *vllm(8, 40, 0.9, model_name="outside")])
    engines += [LabEngine("inside", ("base",), faults=[page]), LabEngine("plain", ROUTED)]
    for kind in ("vllm", "sglang", "lmdeploy"):
        engines.append(LabEngine(f"real_{kind}", dialect=kind, ranks=4))
    async with standing(tmp_path_factory.mktemp("case"), CONFIG, *engines) as world:
        yield world


async def test_every_layout_in_every_order(world: World) -> None:
    """Sums over data-parallel ranks and the fullest cache; copies once; our models alone."""
    await each(
        {
            f"{name}_{order}": until_numbers(world, f"{name}_{order}", layout.numbers)
            for name, layout in LAYOUTS.items()
            for order in ORDERS
        }
    )

    async def is_read() -> bool:
        # On a busy machine a page may come too late; the next one counts as well.
        shown = await world.page()
        return not any(
            known(shown, UNREADABLE, f"{name}_{order}") for name in LAYOUTS for order in ORDERS
        )

    await until(is_read, "every layout is read")


async def test_the_engines_name_of_the_model_counts(world: World) -> None:
    """Not the one that clients use, where the two differ."""
    await until_numbers(world, "inside", Numbers(2, 3, 0.25))


async def test_engines_with_ranks(world: World) -> None:
    """Four ranks behind one address, each with the same load."""
    for kind in ("vllm", "sglang", "lmdeploy"):
        show(world.engines[f"real_{kind}"], Numbers(2, 3, 0.25))
    for kind in ("vllm", "sglang", "lmdeploy"):
        await until_numbers(world, f"real_{kind}", Numbers(8, 12, 0.25))


async def test_an_idle_rank_hides_no_queue(world: World) -> None:
    """Ranks with 0 and 40 waiting are worse than an engine with 20."""
    show(world.engines["plain"], Numbers(8, 20, 0.25))
    await until_numbers(world, "plain", Numbers(8, 20, 0.25))
    for order in ORDERS:
        await until_numbers(world, f"ranks_{order}", Numbers(16, 40, 0.25))
        assert await asked_one_by_one(world, f"dp_{order}", 3) == {"plain"}


async def test_copies_make_no_queue(world: World) -> None:
    """Four ranks that all say 8 are better than an engine with 20."""
    show(world.engines["plain"], Numbers(8, 20, 0.25))
    await until_numbers(world, "plain", Numbers(8, 20, 0.25))
    for order in ORDERS:
        await until_numbers(world, f"copies_{order}", Numbers(8, 8, 0.25))
        assert await asked_one_by_one(world, f"tp_{order}", 3) == {f"copies_{order}"}
