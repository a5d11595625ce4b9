"""The families of a vLLM page that no router reads, so that a page is as long as a real one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from extproc.lab.page import Page
from extproc.lab.tally import LENGTH_BOUNDS, REQUEST_BOUNDS, TOKEN_BOUNDS, Histogram

_COUNTERS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = MappingProxyType(
    {
        "estimated_flops_per_gpu": ("", ("",)),
        "estimated_read_bytes_per_gpu": ("", ("",)),
        "estimated_write_bytes_per_gpu": ("", ("",)),
        "external_prefix_cache_queries": ("", ("",)),
        "external_prefix_cache_hits": ("", ("",)),
        "mm_cache_queries": ("", ("",)),
        "mm_cache_hits": ("", ("",)),
        "prompt_tokens_by_source": (
            "source",
            ("local_compute", "local_cache_hit", "external_kv_transfer"),
        ),
        "prompt_tokens_cached": ("", ("",)),
        "prompt_tokens_cached_by_source": (
            "source",
            ("device", "host", "p2p", "disk", "external_unspecified"),
        ),
        "admission_rejections": ("reason", ("max_num_queued_reqs", "max_num_queued_tokens")),
    }
)
_HISTOGRAMS: Final[Mapping[str, tuple[float, ...]]] = MappingProxyType(
    {
        "iteration_tokens_total": tuple(float(2**n) for n in (0, *range(3, 15))),
        "request_max_num_generation_tokens": LENGTH_BOUNDS,
        "request_params_n": LENGTH_BOUNDS[:5],
        "request_params_max_tokens": LENGTH_BOUNDS,
        "request_time_per_output_token_seconds": TOKEN_BOUNDS,
        "request_inference_time_seconds": REQUEST_BOUNDS,
        "request_prefill_time_seconds": REQUEST_BOUNDS,
        "request_decode_time_seconds": REQUEST_BOUNDS,
        "request_num_preemptions": (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0),
        "request_prefill_kv_computed_tokens": LENGTH_BOUNDS,
    }
)
_PROCESS: Final[Mapping[str, float]] = MappingProxyType(
    {
        "process_virtual_memory_bytes": 2.2e9,
        "process_resident_memory_bytes": 6.5e8,
        "process_start_time_seconds": 1.75e9,
        "process_open_fds": 34.0,
        "process_max_fds": 20000.0,
    }
)
_HANDLERS: Final = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models", "/v1/responses"),
    *("/health", "/tokenize", "/detokenize"),
)


def vllm_bulk(page: Page, ranks: Sequence[str]) -> None:
    """The families are on the page, all zero, for each of the ranks' label texts."""
    for name, (label, values) in _COUNTERS.items():
        more = [f',{label}="{value}"' if label else "" for value in values]
        page.counter(name, {rank + extra: 0 for rank in ranks for extra in more})
    for name, bounds in _HISTOGRAMS.items():
        page.histogram(name, {rank: Histogram(bounds) for rank in ranks})
    states = ("awake", "weights_offloaded", "discard_all")
    sleep = {f'{rank},sleep_state="{s}"': float(s == "awake") for rank in ranks for s in states}
    page.gauge("engine_sleep_state", sleep)
    page.append(_process())
    page.append(_http())


def _process() -> Page:
    page = Page()
    for name in ("objects_collected", "objects_uncollectable", "collections"):
        page.counter(f"python_gc_{name}", {f'generation="{n}"': 0.0 for n in range(3)})
    for name, value in _PROCESS.items():
        page.gauge(name, {"": value})
    page.counter("process_cpu_seconds", {"": 8.55})
    return page


def _http() -> Page:
    page = Page(has_created=True)
    calls = [f'handler="{path}",method="POST"' for path in _HANDLERS]
    page.counter("http_requests", {f'{call},status="2xx"': 1.0 for call in calls})
    bounds = (*TOKEN_BOUNDS[:2], 0.1, 0.5, 1.0)
    page.histogram("http_request_duration_seconds", {call: Histogram(bounds) for call in calls})
    page.histogram("http_request_duration_highr_seconds", {"": Histogram(REQUEST_BOUNDS)})
    return page
