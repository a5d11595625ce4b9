"""An engine's metrics page in the dialect of each engine that people run.

Names, labels and types are those of the engines; the help texts are not. A dialect that has no
page at its path answers 404, as Ollama does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import assert_never

from extproc.lab.bulk import vllm_bulk
from extproc.lab.page import Page, labels
from extproc.lab.tally import FinishReason, Histogram, Reading, Totals


class Dialect(StrEnum):
    """Whose metrics page it is."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TGI = "tgi"
    TRTLLM = "trtllm"
    TRITON = "triton"
    LMDEPLOY = "lmdeploy"
    LLAMACPP = "llamacpp"
    NONE = "none"

    @property
    def metrics_path(self) -> str:
        """Where the page is."""
        return "/prometheus/metrics" if self is Dialect.TRTLLM else "/metrics"


@dataclass(frozen=True, slots=True)
class Pages:
    """The metrics pages of one server: its first model's name and whether it shows every family.

    `is_bulky` adds to vLLM's page what a router never reads, as the real one has it: some 50 KB.
    """

    dialect: Dialect
    model: str
    is_bulky: bool = False

    def render(self, readings: Sequence[Reading]) -> bytes | None:
        """The page for these readings, one per data-parallel rank; None if there is no page."""
        match self.dialect:
            case Dialect.VLLM:
                page = _vllm(self.model, readings, is_bulky=self.is_bulky)
            case Dialect.SGLANG:
                page = _sglang(self.model, readings)
            case Dialect.TGI:
                page = _tgi(readings)
            case Dialect.TRTLLM:
                page = _trtllm(self.model, readings)
            case Dialect.TRITON:
                page = _triton(readings)
            case Dialect.LMDEPLOY:
                page = _lmdeploy(self.model, readings)
            case Dialect.LLAMACPP:
                page = _llamacpp(readings)
            case Dialect.NONE:
                return None
            case _:
                assert_never(self.dialect)
        return page.text()


class _Rows:
    """The readings with the labels of each; a rank's own label only where the dialect has one."""

    def __init__(self, readings: Sequence[Reading], fixed: Mapping[str, str], rank: str) -> None:
        self._rows = [
            ({**fixed, rank: str(number)} if rank else dict(fixed), reading)
            for number, reading in enumerate(readings)
        ]

    def of(self, value: Callable[[Reading], float], **more: str) -> dict[str, float]:
        """One number of each."""
        return {labels({**own, **more}): value(reading) for own, reading in self._rows}

    def histograms(self, which: Callable[[Totals], Histogram]) -> dict[str, Histogram]:
        """One histogram of each."""
        return {labels(own): which(reading.totals) for own, reading in self._rows}

    def finished(self, name: str, reasons: Mapping[str, FinishReason | None]) -> dict[str, float]:
        """How many ended, by the dialect's words; None is a reason that never occurs."""
        found: dict[str, float] = {}
        for word, reason in reasons.items():
            found |= self.of(partial(_ended, reason), **{name: word})
        return found


def _ended(reason: FinishReason | None, reading: Reading) -> float:
    return 0 if reason is None else reading.finished[reason]


def _vllm(model: str, readings: Sequence[Reading], *, is_bulky: bool) -> Page:
    rows = _Rows(readings, {"model_name": model}, "engine")
    page = Page("vllm:", has_created=is_bulky)
    page.gauge("num_requests_running", rows.of(lambda r: r.running))
    page.gauge("num_requests_waiting", rows.of(lambda r: r.waiting))
    by_reason = rows.of(lambda r: r.waiting, reason="capacity")
    page.gauge("num_requests_waiting_by_reason", by_reason | rows.of(_zero, reason="deferred"))
    page.gauge("kv_cache_usage_perc", rows.of(lambda r: r.kv_usage_ratio))
    page.gauge("cache_config_info", _vllm_cache_config(readings))
    page.counter("prefix_cache_queries", rows.of(lambda r: r.totals.prefix_queries))
    page.counter("prefix_cache_hits", rows.of(lambda r: r.totals.prefix_hits))
    page.counter("num_preemptions", rows.of(lambda r: r.totals.preemptions))
    page.counter("prompt_tokens", rows.of(lambda r: r.totals.prompt_tokens))
    page.counter("generation_tokens", rows.of(lambda r: r.totals.generation_tokens))
    reasons = {
        "stop": FinishReason.STOP,
        "length": FinishReason.LENGTH,
        "abort": FinishReason.ABORT,
        "error": None,
        "repetition": None,
    }
    page.counter("request_success", rows.finished("finished_reason", reasons))
    page.histogram("request_prompt_tokens", rows.histograms(lambda t: t.prompt_lengths))
    page.histogram("request_generation_tokens", rows.histograms(lambda t: t.output_lengths))
    page.histogram("time_to_first_token_seconds", rows.histograms(lambda t: t.first_token_seconds))
    page.histogram("inter_token_latency_seconds", rows.histograms(lambda t: t.inter_token_seconds))
    page.histogram("e2e_request_latency_seconds", rows.histograms(lambda t: t.request_seconds))
    page.histogram("request_queue_time_seconds", rows.histograms(lambda t: t.queue_seconds))
    if is_bulky:
        vllm_bulk(page, list(rows.of(_zero)))
    return page


def _vllm_cache_config(readings: Sequence[Reading]) -> dict[str, float]:
    return {
        labels(
            {
                "block_size": str(reading.block_size_tokens),
                "cache_dtype": "auto",
                "enable_prefix_caching": "True",
                "engine": str(rank),
                "gpu_memory_utilization": "0.92",
                "kv_cache_size_tokens": str(reading.kv_tokens),
                "num_cpu_blocks": "None",
                "num_gpu_blocks": str(reading.block_count),
                "sliding_window": "None",
            }
        ): 1
        for rank, reading in enumerate(readings)
    }


def _sglang(model: str, readings: Sequence[Reading]) -> Page:
    fixed = {
        "engine_type": "unified",
        "model_name": model,
        "moe_ep_rank": "0",
        "pp_rank": "0",
        "tp_rank": "0",
    }
    rows = _Rows(readings, fixed, "dp_rank" if len(readings) > 1 else "")
    page = Page("sglang:")
    page.gauge("num_running_reqs", rows.of(lambda r: r.running))
    page.gauge("num_queue_reqs", rows.of(lambda r: r.waiting))
    page.gauge("num_grammar_queue_reqs", rows.of(_zero))
    page.gauge("num_used_tokens", rows.of(lambda r: r.kv_used_tokens))
    page.gauge("token_usage", rows.of(lambda r: r.kv_usage_ratio))
    page.gauge("cache_hit_rate", rows.of(lambda r: _hit_rate(r.totals)))
    page.gauge("page_size", rows.of(lambda r: r.block_size_tokens))
    page.gauge("num_pages", rows.of(lambda r: r.block_count))
    page.gauge("max_total_num_tokens", rows.of(lambda r: r.kv_tokens))
    page.gauge("context_len", rows.of(lambda r: r.max_model_tokens))
    page.counter("prompt_tokens", rows.of(lambda r: r.totals.finished_prompt_tokens))
    page.counter("generation_tokens", rows.of(lambda r: r.totals.finished_generation_tokens))
    decoded = rows.of(lambda r: r.totals.generation_tokens, mode="decode")
    page.counter("realtime_tokens", decoded)
    page.counter("num_requests", rows.of(lambda r: r.succeeded))
    page.counter("num_aborted_requests", rows.of(_aborted))
    page.histogram("time_to_first_token_seconds", rows.histograms(lambda t: t.first_token_seconds))
    page.histogram("inter_token_latency_seconds", rows.histograms(lambda t: t.inter_token_seconds))
    page.histogram("e2e_request_latency_seconds", rows.histograms(lambda t: t.request_seconds))
    page.histogram("queue_time_seconds", rows.histograms(lambda t: t.queue_seconds))
    return page


def _tgi(readings: Sequence[Reading]) -> Page:
    rows = _Rows(readings[:1], {}, "")
    page = Page("tgi_", total_suffix="")
    page.gauge("batch_current_size", rows.of(lambda r: r.running))
    page.gauge("queue_size", rows.of(lambda r: r.waiting))
    page.gauge("batch_current_max_tokens", rows.of(lambda r: r.kv_used_tokens))
    page.gauge("batch_max_total_tokens", rows.of(lambda r: r.kv_tokens))
    page.counter("request_success", rows.of(lambda r: r.succeeded))
    page.counter("request_failure", rows.of(_aborted, err="dropped"))
    page.histogram("request_input_length", rows.histograms(lambda t: t.prompt_lengths))
    page.histogram("request_generated_tokens", rows.histograms(lambda t: t.output_lengths))
    page.histogram("request_duration", rows.histograms(lambda t: t.request_seconds))
    page.histogram("request_queue_duration", rows.histograms(lambda t: t.queue_seconds))
    mean = rows.histograms(lambda t: t.inter_token_seconds)
    page.histogram("request_mean_time_per_token_duration", mean)
    return page


def _trtllm(model: str, readings: Sequence[Reading]) -> Page:
    rows = _Rows(readings[:1], {"engine_type": "trtllm", "model_name": model}, "")
    page = Page("trtllm_")
    page.gauge("num_requests_running", rows.of(lambda r: r.running))
    page.gauge("num_requests_waiting", rows.of(lambda r: r.waiting))
    page.gauge("kv_cache_utilization", rows.of(lambda r: r.kv_usage_ratio))
    page.gauge("kv_cache_hit_rate", rows.of(lambda r: _hit_rate(r.totals)))
    page.gauge("kv_cache_tokens_per_block", rows.of(lambda r: r.block_size_tokens))
    page.gauge("kv_cache_max_blocks", rows.of(lambda r: r.block_count))
    page.counter("prompt_tokens", rows.of(lambda r: r.totals.prompt_tokens))
    page.counter("generation_tokens", rows.of(lambda r: r.totals.generation_tokens))
    reasons = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
    page.counter("request_success", rows.finished("finished_reason", reasons))
    page.counter("request_error", rows.of(_zero, http_code="500"))
    page.histogram("time_to_first_token_seconds", rows.histograms(lambda t: t.first_token_seconds))
    per_token = rows.histograms(lambda t: t.inter_token_seconds)
    page.histogram("time_per_output_token_seconds", per_token)
    page.histogram("e2e_request_latency_seconds", rows.histograms(lambda t: t.request_seconds))
    page.histogram("request_queue_time_seconds", rows.histograms(lambda t: t.queue_seconds))
    return page


def _triton(readings: Sequence[Reading]) -> Page:
    rows = _Rows(readings[:1], {"model": "tensorrt_llm", "version": "1"}, "")
    page = Page("nv_", total_suffix="")
    requests = rows.of(lambda r: r.running + r.waiting, request_type="active")
    requests |= rows.of(lambda r: r.max_running, request_type="max")
    requests |= rows.of(lambda r: r.running, request_type="scheduled")
    requests |= rows.of(lambda r: r.waiting, request_type="waiting")
    page.gauge("trt_llm_request_metrics", requests)
    kind = "kv_cache_block_type"
    blocks = rows.of(lambda r: r.kv_usage_ratio, **{kind: "fraction"})
    blocks |= rows.of(lambda r: r.block_size_tokens, **{kind: "tokens_per"})
    blocks |= rows.of(lambda r: r.block_count, **{kind: "max"})
    blocks |= rows.of(_used_blocks, **{kind: "used"})
    blocks |= rows.of(lambda r: r.block_count - _used_blocks(r), **{kind: "free"})
    page.gauge("trt_llm_kv_cache_block_metrics", blocks)
    page.counter("inference_request_success", rows.of(lambda r: r.succeeded))
    page.counter("inference_request_failure", rows.of(_aborted, reason="CANCELED"))
    page.counter("inference_exec_count", rows.of(lambda r: r.succeeded))
    page.gauge("inference_pending_request_count", rows.of(lambda r: r.waiting))
    return page


def _lmdeploy(model: str, readings: Sequence[Reading]) -> Page:
    rows = _Rows(readings, {"model_name": model}, "engine")
    page = Page("lmdeploy:")
    page.gauge("num_requests_total", rows.of(lambda r: r.succeeded + _aborted(r)))
    page.gauge("num_requests_succeeded", rows.of(lambda r: r.succeeded))
    page.gauge("num_requests_failed", rows.of(_aborted))
    page.gauge("num_api_requests_waiting", rows.of(_zero))
    page.gauge("num_requests_running", rows.of(lambda r: r.running))
    page.gauge("num_requests_waiting", rows.of(lambda r: r.waiting))
    page.gauge("gpu_cache_usage_perc", rows.of(lambda r: r.kv_usage_ratio))
    page.gauge("prefix_cache_hit_rate", rows.of(lambda r: _hit_rate(r.totals)))
    page.counter("prompt_tokens", rows.of(lambda r: r.totals.prompt_tokens))
    page.counter("generation_tokens", rows.of(lambda r: r.totals.generation_tokens))
    page.counter("cached_tokens", rows.of(lambda r: r.totals.prefix_hits))
    reasons = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
    reasons |= {"abort": FinishReason.ABORT}
    page.counter("request_success", rows.finished("finished_reason", reasons))
    config = {
        labels(
            {
                "block_size": str(reading.block_size_tokens),
                "engine": str(rank),
                "num_gpu_blocks": str(reading.block_count),
            }
        ): 1.0
        for rank, reading in enumerate(readings)
    }
    page.gauge("backend_config_info", config)
    page.histogram("time_to_first_token_seconds", rows.histograms(lambda t: t.first_token_seconds))
    per_token = rows.histograms(lambda t: t.inter_token_seconds)
    page.histogram("time_per_output_token_seconds", per_token)
    page.histogram("e2e_request_latency_seconds", rows.histograms(lambda t: t.request_seconds))
    page.histogram("request_queue_time_seconds", rows.histograms(lambda t: t.queue_seconds))
    return page


def _llamacpp(readings: Sequence[Reading]) -> Page:
    rows = _Rows(readings[:1], {}, "")
    page = Page("llamacpp:")
    page.counter("prompt_tokens", rows.of(lambda r: r.totals.prompt_tokens))
    page.counter("prompt_tokens_cached", rows.of(lambda r: r.totals.prefix_hits))
    page.counter("tokens_predicted", rows.of(lambda r: r.totals.generation_tokens))
    seconds = rows.of(lambda r: r.totals.inter_token_seconds.sum)
    page.counter("tokens_predicted_seconds", seconds)
    page.gauge("prompt_tokens_seconds", rows.of(_zero))
    page.gauge("predicted_tokens_seconds", rows.of(_zero))
    page.gauge("requests_processing", rows.of(lambda r: r.running))
    page.gauge("requests_deferred", rows.of(lambda r: r.waiting))
    page.gauge("n_busy_slots_per_decode", rows.of(lambda r: r.running))
    return page


def _zero(_: Reading) -> float:
    return 0


def _aborted(reading: Reading) -> float:
    return reading.finished[FinishReason.ABORT]


def _used_blocks(reading: Reading) -> float:
    return -(-reading.kv_used_tokens // reading.block_size_tokens)


def _hit_rate(totals: Totals) -> float:
    return totals.prefix_hits / totals.prefix_queries if totals.prefix_queries else 0.0
