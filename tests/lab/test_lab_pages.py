"""What the metrics pages show, by the names that routers look for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from extproc.engines.contract import stats
from extproc.engines.dialects import DIALECTS
from extproc.lab.engine import Engine, EngineSettings
from extproc.lab.page import Page, labels
from extproc.lab.pages import Dialect, Pages
from extproc.lab.tally import FinishReason, Histogram, Reading

SETTINGS = EngineSettings(
    max_running=2,
    kv_tokens=1000,
    block_size_tokens=10,
    prefill_tokens_per_second=1000.0,
    decode_tokens_per_second=10.0,
    prefix_cache=True,
)


def busy_engine() -> Engine:
    """Two run, three wait, one has ended by itself, one was aborted; 302 tokens are held."""
    engine = Engine(SETTINGS)
    engine.submit(100, 1, 0.0, reason=FinishReason.STOP)
    aborted = engine.submit(50, 5, 0.0)
    engine.advance(0.1)
    assert not isinstance(aborted, str)
    engine.abort(aborted, 0.1)
    for prompt in (200, 100, 10, 10, 10):
        engine.submit(prompt, 50, 1.0)
    return engine


READING = busy_engine().reading()


def samples(dialect: Dialect, *readings: Reading, bulky: bool = False) -> dict[str, float]:
    """Every sample of the page by name and sorted labels."""
    page = Pages(dialect, "tiny", is_bulky=bulky).render(readings)
    assert page is not None
    return {
        sample.name + "{" + labels(sample.labels) + "}": sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_the_reading_is_what_the_pages_are_tested_with() -> None:
    """Two run, three wait, 302 of 1000 tokens are held."""
    assert (READING.running, READING.waiting, READING.kv_used_tokens) == (2, 3, 302)
    assert (READING.succeeded, READING.block_count, READING.kv_tokens) == (1, 100, 1000)


@pytest.mark.parametrize(
    ("dialect", "wanted"),
    [
        (
            Dialect.VLLM,
            {
                'vllm:num_requests_running{engine="0",model_name="tiny"}': 2,
                'vllm:num_requests_waiting{engine="0",model_name="tiny"}': 3,
                'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"}': 0.302,
                'vllm:prompt_tokens_total{engine="0",model_name="tiny"}': 450,
                'vllm:generation_tokens_total{engine="0",model_name="tiny"}': 1,
                'vllm:request_success_total{engine="0",finished_reason="stop"': 1,
                'vllm:request_success_total{engine="0",finished_reason="abort"': 1,
                'vllm:e2e_request_latency_seconds_count{engine="0",model_name="tiny"}': 1,
            },
        ),
        (
            Dialect.SGLANG,
            {
                "sglang:num_running_reqs": 2,
                "sglang:num_queue_reqs": 3,
                "sglang:token_usage": 0.302,
                "sglang:page_size": 10,
                "sglang:num_pages": 100,
                "sglang:prompt_tokens_total": 100,
                "sglang:generation_tokens_total": 1,
                "sglang:num_requests_total": 1,
                "sglang:num_aborted_requests_total": 1,
            },
        ),
        (
            Dialect.TGI,
            {
                "tgi_batch_current_size{}": 2,
                "tgi_queue_size{}": 3,
                "tgi_batch_current_max_tokens{}": 302,
                "tgi_batch_max_total_tokens{}": 1000,
                "tgi_request_input_length_sum{}": 100,
                "tgi_request_generated_tokens_sum{}": 1,
            },
        ),
        (
            Dialect.TRTLLM,
            {
                "trtllm_num_requests_running": 2,
                "trtllm_num_requests_waiting": 3,
                "trtllm_kv_cache_utilization": 0.302,
                "trtllm_kv_cache_tokens_per_block": 10,
                "trtllm_kv_cache_max_blocks": 100,
                "trtllm_prompt_tokens_total": 450,
            },
        ),
        (
            Dialect.LMDEPLOY,
            {
                'lmdeploy:num_requests_running{engine="0",model_name="tiny"}': 2,
                'lmdeploy:num_requests_waiting{engine="0",model_name="tiny"}': 3,
                'lmdeploy:gpu_cache_usage_perc{engine="0",model_name="tiny"}': 0.302,
                'lmdeploy:prompt_tokens_total{engine="0",model_name="tiny"}': 450,
            },
        ),
        (
            Dialect.LLAMACPP,
            {
                "llamacpp:requests_processing{}": 2,
                "llamacpp:requests_deferred{}": 3,
                "llamacpp:prompt_tokens_total{}": 450,
                "llamacpp:tokens_predicted_total{}": 1,
            },
        ),
        (
            Dialect.TRITON,
            {
                'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled"': 2,
                'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting"': 3,
                'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"': 0.302,
                'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per"': 10,
                'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used"': 31,
                'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"': 100,
            },
        ),
    ],
)
def test_each_dialect_tells_its_state_by_its_own_names(
    dialect: Dialect, wanted: dict[str, float]
) -> None:
    """Load, cache, tokens and ends are where that engine has them."""
    shown = samples(dialect, READING)
    for start, value in wanted.items():
        (found,) = [shown[key] for key in shown if key.startswith(start)]
        assert found == pytest.approx(value), start


def test_counters_without_a_suffix_stay_so() -> None:
    """TGI and Triton write none, and the page's text shows it."""
    tgi = Pages(Dialect.TGI, "m").render([READING])
    triton = Pages(Dialect.TRITON, "m").render([READING])
    assert tgi is not None
    assert triton is not None
    assert b"\ntgi_request_success 1.0\n" in tgi
    assert b'\nnv_inference_request_success{model="tensorrt_llm",version="1"} 1.0\n' in triton


def test_ranks_are_series_of_one_family() -> None:
    """They differ by engine on vLLM, on SGLang by dp_rank, which a single rank does not have."""
    vllm = samples(Dialect.VLLM, READING, READING)
    assert len([key for key in vllm if key.startswith("vllm:num_requests_running{")]) == 2
    sglang = samples(Dialect.SGLANG, READING, READING)
    running = [key for key in sglang if key.startswith("sglang:num_running_reqs{")]
    assert len(running) == 2
    assert 'dp_rank="1"' in running[1]
    assert not any("dp_rank" in key for key in samples(Dialect.SGLANG, READING))


def test_cache_facts_are_labels() -> None:
    """Block size and count are labels of vLLM's information gauge."""
    (info,) = [k for k in samples(Dialect.VLLM, READING) if k.startswith("vllm:cache_config_info")]
    for label in ('block_size="10"', 'num_gpu_blocks="100"', 'kv_cache_size_tokens="1000"'):
        assert label in info


def test_a_bulky_page_is_as_long_as_a_real_one_and_says_the_same() -> None:
    """Some 50 to 70 KB, with every sample of the short page in it."""
    page = Pages(Dialect.VLLM, "a-model-with-a-name", is_bulky=True).render([READING])
    assert page is not None
    assert 50_000 < len(page) < 70_000
    short = samples(Dialect.VLLM, READING)
    long = samples(Dialect.VLLM, READING, bulky=True)
    assert short.items() <= long.items()
    assert any(key.startswith("process_cpu_seconds_total") for key in long)


@pytest.mark.parametrize("dialect", [d for d in Dialect if d is not Dialect.NONE])
def test_the_router_reads_every_page(dialect: Dialect) -> None:
    """What our own reader makes of the pages is the state that they show."""
    page = Pages(dialect, "tiny", is_bulky=True).render([READING])
    assert page is not None
    read = stats(page, dialect=DIALECTS[dialect.value], models=("tiny",))
    assert (read.running, read.waiting) == (2, 3)
    has_no_cache = dialect is Dialect.LLAMACPP
    assert read.kv_usage_ratio == (None if has_no_cache else pytest.approx(0.302))


def test_no_dialect_is_no_page() -> None:
    """What has no metrics renders nothing."""
    assert Pages(Dialect.NONE, "m").render([READING]) is None


def test_histograms_are_cumulative() -> None:
    """Buckets count all at or below their bound, the last one everything."""
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.0)
    histogram.observe(1.5, 2)
    histogram.observe(9.0)
    page = Page("x_")
    page.histogram("h", {'a="b"': histogram})
    lines = [line for line in page.text().decode().splitlines() if not line.startswith("#")]
    assert lines == [
        'x_h_bucket{a="b",le="1.0"} 1.0',
        'x_h_bucket{a="b",le="2.0"} 3.0',
        'x_h_bucket{a="b",le="+Inf"} 4.0',
        'x_h_count{a="b"} 4.0',
        'x_h_sum{a="b"} 13.0',
    ]


@given(st.text(max_size=20))
def test_any_model_name_survives_as_a_label(name: str) -> None:
    """Quotes, backslashes and line ends are escaped; a reader gets the name back."""
    page = Page()
    page.gauge("g", {labels({"model": name}): 1})
    if "\r" in name or any(ord(c) in {0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029} for c in name):
        return  # the reading library takes these for line ends
    try:
        text = page.text().decode()
    except UnicodeEncodeError:
        return  # a lone surrogate is no UTF-8
    (family,) = text_string_to_metric_families(text)
    assert family.samples[0].labels == {"model": name}
