"""What each engine calls its numbers, and how its series make one number: tables, no behaviour.

Names are tried in order, newest first. Sources: the engines' own exporters, and pages of running
engines in tests/engines/pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from extproc.engines.candidate import Candidate, Match


class Signal(StrEnum):
    """What an engine can say about itself; the key of an endpoint's own names in configuration."""

    RUNNING = "running"
    WAITING = "waiting"
    KV_USAGE = "kv_usage"
    BLOCK_SIZE = "block_size"
    BLOCK_COUNT = "block_count"
    PROMPT_TOKENS = "prompt_tokens"
    GENERATION_TOKENS = "generation_tokens"
    SUCCESS = "success"


class Combine(StrEnum):
    """How the series of one signal, one per data-parallel rank, become its value."""

    SUM = "sum"
    MAX = "max"
    SAME = "same"  # unknown where they differ


COMBINE: Final[Mapping[Signal, Combine]] = MappingProxyType(
    {
        Signal.RUNNING: Combine.SUM,
        Signal.WAITING: Combine.SUM,
        Signal.KV_USAGE: Combine.MAX,  # a request lands on one rank, and the fullest one preempts
        Signal.BLOCK_SIZE: Combine.SAME,
        Signal.BLOCK_COUNT: Combine.SUM,
        Signal.PROMPT_TOKENS: Combine.SUM,
        Signal.GENERATION_TOKENS: Combine.SUM,
        Signal.SUCCESS: Combine.SUM,
    }
)
# Without these a page is no ground for a decision, where its engine offers them.
ROUTED_BY: Final = frozenset({Signal.RUNNING, Signal.WAITING, Signal.KV_USAGE})
# Exporters write counters with `_total` or without it, and some write both.
COUNTERS: Final = frozenset({Signal.PROMPT_TOKENS, Signal.GENERATION_TOKENS, Signal.SUCCESS})


@dataclass(frozen=True, slots=True)
class Dialect:
    """One engine's vocabulary.

    `path` is where its page is. `mandatory` are the signals that every version of it publishes,
    without which a page is refused; the other ones are unknown where they are missing.
    Of samples that differ only in `copy_labels` the lowest ranks' one counts: they are copies. Of
    samples that differ only in `split_label` the one where it is empty counts, if there is one: it
    is the total of the others. `model_label` names the model; `model_rule` combines several models.
    """

    path: str = "/metrics"
    signals: Mapping[Signal, tuple[Candidate, ...]] = field(default_factory=dict)
    mandatory: frozenset[Signal] = ROUTED_BY
    copy_labels: tuple[str, ...] = ()
    split_label: str | None = None
    model_label: str | None = "model_name"
    model_rule: Combine = Combine.SUM


def _named(*names: str) -> tuple[Candidate, ...]:
    return tuple(Candidate(name) for name in names)


def _where(name: str, **labels: str) -> Candidate:
    return Candidate(name, tuple(Match(label, value) for label, value in labels.items()))


# An error frees a place in no time: it counts as nothing finished. An abort frees one as a
# completion does, and the requests that we count in flight include those that will be aborted.
_FINISHED: Final = (Match("finished_reason", "error", is_equal=False),)

_VLLM: Final = Dialect(
    signals={
        Signal.RUNNING: _named("vllm:num_requests_running"),
        Signal.WAITING: _named("vllm:num_requests_waiting"),
        Signal.KV_USAGE: _named("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        Signal.BLOCK_SIZE: (Candidate("vllm:cache_config_info", label="block_size"),),
        Signal.BLOCK_COUNT: (Candidate("vllm:cache_config_info", label="num_gpu_blocks"),),
        Signal.PROMPT_TOKENS: _named("vllm:prompt_tokens_total"),
        Signal.GENERATION_TOKENS: _named("vllm:generation_tokens_total"),
        Signal.SUCCESS: (Candidate("vllm:request_success_total", _FINISHED),),
    }
)

_SGLANG: Final = Dialect(
    signals={
        Signal.RUNNING: _named("sglang:num_running_reqs"),
        Signal.WAITING: (
            Candidate(
                "sglang:num_queue_reqs",
                # Accepted and not yet computing. Prefill's in-flight queue is absent on purpose:
                # its requests have been computed and wait for their transfer.
                plus=(
                    _named("sglang:num_grammar_queue_reqs"),
                    _named(
                        "sglang:num_prefill_bootstrap_queue_reqs",
                        "sglang:num_prefill_prealloc_queue_reqs",
                    ),
                    _named("sglang:num_decode_prealloc_queue_reqs"),
                    _named("sglang:num_decode_transfer_queue_reqs"),
                ),
            ),
        ),
        Signal.KV_USAGE: _named("sglang:token_usage"),
        Signal.BLOCK_SIZE: (
            Candidate("sglang:page_size"),
            Candidate("sglang:cache_config_info", label="page_size"),
        ),
        Signal.BLOCK_COUNT: (
            Candidate("sglang:num_pages"),
            Candidate("sglang:cache_config_info", label="num_pages"),
        ),
        Signal.PROMPT_TOKENS: _named("sglang:prompt_tokens_total"),
        Signal.GENERATION_TOKENS: _named("sglang:generation_tokens_total"),
        # A request aborted while it runs is in it; num_aborted_requests would count it twice.
        Signal.SUCCESS: _named("sglang:num_requests_total"),
    },
    copy_labels=("tp_rank", "pp_rank", "moe_ep_rank"),
    split_label="priority",
)

_TGI: Final = Dialect(
    signals={
        Signal.RUNNING: _named("tgi_batch_current_size"),
        Signal.WAITING: _named("tgi_queue_size"),
        Signal.KV_USAGE: (
            Candidate("tgi_batch_current_max_tokens", over=Candidate("tgi_batch_max_total_tokens")),
        ),
        Signal.PROMPT_TOKENS: _named("tgi_request_input_length_sum"),
        Signal.GENERATION_TOKENS: _named("tgi_request_generated_tokens_sum"),
        Signal.SUCCESS: (
            Candidate(
                "tgi_request_success", plus=((_where("tgi_request_failure", err="dropped"),),)
            ),
        ),
    },
    mandatory=frozenset({Signal.RUNNING, Signal.WAITING}),  # the divisor of kv came with version 3
    model_label=None,
)

_TRTLLM: Final = Dialect(
    path="/prometheus/metrics",  # its /metrics is JSON
    signals={
        Signal.RUNNING: _named("trtllm_num_requests_running"),
        Signal.WAITING: _named("trtllm_num_requests_waiting"),
        Signal.KV_USAGE: _named("trtllm_kv_cache_utilization"),
        Signal.BLOCK_SIZE: _named("trtllm_kv_cache_tokens_per_block"),
        Signal.BLOCK_COUNT: _named("trtllm_kv_cache_max_blocks"),
        Signal.PROMPT_TOKENS: _named("trtllm_prompt_tokens_total"),
        Signal.GENERATION_TOKENS: _named("trtllm_generation_tokens_total"),
        Signal.SUCCESS: (Candidate("trtllm_request_success_total", _FINISHED),),
    },
)

_TRITON: Final = Dialect(
    signals={
        Signal.RUNNING: (_where("nv_trt_llm_request_metrics", request_type="scheduled"),),
        Signal.WAITING: (_where("nv_trt_llm_request_metrics", request_type="waiting"),),
        Signal.KV_USAGE: (
            _where("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="fraction"),
        ),
        Signal.BLOCK_SIZE: (
            _where("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="tokens_per"),
        ),
        Signal.BLOCK_COUNT: (
            _where("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="max"),
        ),
        Signal.SUCCESS: _named("nv_inference_request_success"),
    },
    model_label="model",
    model_rule=Combine.MAX,  # the models are an ensemble's steps, and each counts every request
)

_LMDEPLOY: Final = Dialect(
    signals={
        Signal.RUNNING: _named("lmdeploy:num_requests_running"),
        Signal.WAITING: (
            Candidate(
                "lmdeploy:num_requests_waiting",
                plus=(_named("lmdeploy:num_api_requests_waiting"),),  # not handed to the engine yet
            ),
        ),
        Signal.KV_USAGE: _named("lmdeploy:gpu_cache_usage_perc"),
        Signal.BLOCK_SIZE: (
            Candidate("lmdeploy:backend_config_info", label="block_size"),
            Candidate("lmdeploy:backend_config_info", label="cache_block_seq_len"),
        ),
        Signal.BLOCK_COUNT: (Candidate("lmdeploy:backend_config_info", label="num_gpu_blocks"),),
        Signal.PROMPT_TOKENS: _named("lmdeploy:prompt_tokens_total"),
        Signal.GENERATION_TOKENS: _named("lmdeploy:generation_tokens_total"),
        Signal.SUCCESS: (Candidate("lmdeploy:request_success_total", _FINISHED),),
    }
)

_LLAMACPP: Final = Dialect(
    signals={
        Signal.RUNNING: _named("llamacpp:requests_processing"),
        Signal.WAITING: _named("llamacpp:requests_deferred"),
        Signal.PROMPT_TOKENS: _named("llamacpp:prompt_tokens_total"),
        Signal.GENERATION_TOKENS: _named("llamacpp:tokens_predicted_total"),
    },
    mandatory=frozenset({Signal.RUNNING, Signal.WAITING}),  # no kv: it was removed
    model_label=None,
)

_NONE: Final = Dialect(mandatory=frozenset(), model_label=None)

DIALECTS: Final[Mapping[str, Dialect]] = MappingProxyType(
    {
        "vllm": _VLLM,
        "sglang": _SGLANG,
        "tgi": _TGI,
        "trtllm": _TRTLLM,
        "triton": _TRITON,
        "lmdeploy": _LMDEPLOY,
        "llamacpp": _LLAMACPP,
        "none": _NONE,
    }
)
