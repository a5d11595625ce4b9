"""Contract: numbers from a page, or an error that names the signal; never a zero for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.engines.contract import Contract, stats
from extproc.engines.dialects import DIALECTS
from extproc.engines.exposition import read
from extproc.errors import UnreadableMetrics
from extproc.routing.endpoint import Stats

PAGES = Path(__file__).parent / "pages"
VLLM = DIALECTS["vllm"]
GOOD = {
    "vllm:num_requests_running": "2",
    "vllm:num_requests_waiting": "3",
    "vllm:kv_cache_usage_perc": "0.5",
}


def page(**values: str) -> bytes:
    """A good page of vLLM; `running=""` leaves running out, and so on."""
    names = dict(zip(("running", "waiting", "kv"), GOOD, strict=True))
    lines = {**{name: GOOD[name] for name in names.values()}}
    lines.update({names[short]: value for short, value in values.items()})
    return "".join(f"{name} {value}\n" for name, value in lines.items() if value).encode()


def lines(*text: str) -> bytes:
    """A page of these lines."""
    return "\n".join((*text, "")).encode()


def test_unknown_is_not_zero() -> None:
    """A page with the mandatory signals alone leaves all others unknown."""
    assert stats(page(), dialect=VLLM) == Stats(running=2, waiting=3, kv_usage_ratio=0.5)


@pytest.mark.parametrize(
    ("missing", "signal", "names"),
    [
        ("running", "running", "vllm:num_requests_running"),
        ("waiting", "waiting", "vllm:num_requests_waiting"),
        ("kv", "kv_usage", "vllm:kv_cache_usage_perc or vllm:gpu_cache_usage_perc"),
    ],
)
def test_a_missing_mandatory_signal_is_an_error(missing: str, signal: str, names: str) -> None:
    """It names the signal and every name that was looked for."""
    with pytest.raises(UnreadableMetrics) as refused:
        stats(page(**{missing: ""}), dialect=VLLM)
    assert refused.value.signal == signal
    assert str(refused.value) == f"{signal}: the page has no {names}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\n",
        b"<html><body>log in: vllm:num_requests_running 1</body></html>",
        b'{"vllm:num_requests_running": 1}',
        b"# HELP vllm:num_requests_running x\n# TYPE vllm:num_requests_running gauge\n",
        b"other:num_requests_running 0\nother:num_requests_waiting 0\n",
        b"vllm:num_requests_running_created 1\n",
    ],
)
def test_what_is_no_page_of_the_engine_is_an_error(body: bytes) -> None:
    """An empty page, a login page, JSON, another prefix: none of them is an idle engine."""
    with pytest.raises(UnreadableMetrics, match=r"^running: "):
        stats(body, dialect=VLLM)


@pytest.mark.parametrize("text", ["NaN", "+Inf", "-Inf", "-1", "1e300", "none"])
def test_a_number_that_cannot_be_is_unknown(text: str) -> None:
    """The signal is on the page, so it is no error; it is no number, so it is unknown."""
    found = stats(page(running=text, waiting=text), dialect=VLLM)
    assert (found.running, found.waiting, found.kv_usage_ratio) == (None, None, 0.5)


@pytest.mark.parametrize(
    ("text", "ratio"),
    [("0", 0.0), ("1", 1.0), ("1.02", 1.0), ("-0.5", None), ("NaN", None), ("+Inf", None)],
)
def test_kv_usage_is_a_ratio(text: str, ratio: float | None) -> None:
    """A little over full is full."""
    assert stats(page(kv=text), dialect=VLLM).kv_usage_ratio == ratio


def test_a_percentage_is_an_error() -> None:
    """Another unit must not pass for a full cache for ever."""
    with pytest.raises(UnreadableMetrics, match=r"kv_usage: 37\.5 is not a ratio"):
        stats(page(kv="37.5"), dialect=VLLM)


@pytest.mark.parametrize(
    ("present", "ratio"),
    [
        (["vllm:gpu_cache_usage_perc 0.1"], 0.1),
        (["vllm:kv_cache_usage_perc 0.2"], 0.2),
        (["vllm:gpu_cache_usage_perc 0.1", "vllm:kv_cache_usage_perc 0.2"], 0.2),
        (["vllm:kv_cache_usage_perc 0.2", "vllm:gpu_cache_usage_perc 0.1"], 0.2),
    ],
)
def test_a_new_name_wins_over_an_old_one(present: list[str], ratio: float) -> None:
    """The old one stands in where the new one is not there."""
    body = page(kv="") + lines(*present)
    assert stats(body, dialect=VLLM).kv_usage_ratio == ratio


@pytest.mark.parametrize(
    ("present", "total"),
    [
        (["vllm:prompt_tokens_total 5", "vllm:prompt_tokens_created 1.7e9"], 5.0),
        (["vllm:prompt_tokens 5", "vllm:prompt_tokens_created 1.7e9"], 5.0),
        (["vllm:prompt_tokens 5", "vllm:prompt_tokens_total 5"], 5.0),
        (["vllm:prompt_tokens_created 1.7e9"], None),
        (['vllm:prompt_tokens_total{engine="0"} 5', 'vllm:prompt_tokens_total{engine="1"} 6'], 11),
        (["vllm:prompt_tokens_total NaN"], None),
    ],
)
def test_a_counter_is_found_with_and_without_its_suffix(
    present: list[str], total: float | None
) -> None:
    """Both spellings of one counter count once, and the time of its creation never counts."""
    assert stats(page() + lines(*present), dialect=VLLM).prompt_tokens_total == total


def test_a_gauge_has_one_spelling() -> None:
    """A counter that is called like a gauge is another family."""
    with pytest.raises(UnreadableMetrics, match="running"):
        stats(page(running="") + lines("vllm:num_requests_running_total 9"), dialect=VLLM)


@pytest.mark.parametrize("order", [1, -1])
def test_ranks_are_summed_and_the_fullest_cache_counts(order: int) -> None:
    """Whichever engine comes last."""
    body = lines(
        *[
            'vllm:num_requests_running{engine="0"} 1',
            'vllm:num_requests_running{engine="1"} 2',
            'vllm:num_requests_waiting{engine="0"} 0',
            'vllm:num_requests_waiting{engine="1"} 40',
            'vllm:kv_cache_usage_perc{engine="0"} 0.1',
            'vllm:kv_cache_usage_perc{engine="1"} 0.9',
            'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="100"} 1',
            'vllm:cache_config_info{engine="1",block_size="32",num_gpu_blocks="100"} 1',
        ][::order]
    )
    assert stats(body, dialect=VLLM) == Stats(3, 40, 0.9, None, 200)


def test_one_unknown_rank_makes_the_endpoint_unknown() -> None:
    """The other rank's number would pass for the endpoint's."""
    body = page(waiting="") + lines(
        'vllm:num_requests_waiting{engine="0"} 0', 'vllm:num_requests_waiting{engine="1"} NaN'
    )
    assert stats(body, dialect=VLLM).waiting is None


def test_the_endpoints_model_counts() -> None:
    """Of a base model and an adapter on one page, the endpoint's own."""
    body = page(running="") + lines(
        'vllm:num_requests_running{model_name="base"} 3',
        'vllm:num_requests_running{model_name="lora"} 2',
    )
    assert stats(body, dialect=VLLM, models=["base"]).running == 3
    assert stats(body, dialect=VLLM, models=["lora"]).running == 2
    assert stats(body, dialect=VLLM, models=["base", "lora"]).running == 5
    assert stats(body, dialect=VLLM, models=["other"]).running == 5


def test_requests_that_end_in_an_error_do_not_count_as_finished() -> None:
    """An engine that fails fast would look fast; one whose clients leave has free places."""
    body = page() + lines(
        'vllm:request_success_total{finished_reason="stop"} 5',
        'vllm:request_success_total{finished_reason="length"} 3',
        'vllm:request_success_total{finished_reason="abort"} 2',
        'vllm:request_success_total{finished_reason="error"} 100',
    )
    assert stats(body, dialect=VLLM).success_total == 10


@pytest.mark.parametrize(
    ("used", "all_", "ratio"),
    [("50", "200", 0.25), ("50", "0", None), ("50", "", None), ("NaN", "200", None)],
)
def test_a_ratio_of_two_families_is_unknown_without_both(
    used: str, all_: str, ratio: float | None
) -> None:
    """A division by nothing is no usage."""
    body = lines(
        "tgi_batch_current_size 1", "tgi_queue_size 0", f"tgi_batch_current_max_tokens {used}"
    )
    if all_:
        body += lines(f"tgi_batch_max_total_tokens {all_}")
    assert stats(body, dialect=DIALECTS["tgi"]).kv_usage_ratio == ratio


def test_an_endpoints_own_names_replace_the_dialects() -> None:
    """They win where both are on the page, label matches included."""
    body = page() + lines('own_running{kind="llm"} 7', 'own_running{kind="other"} 9', "own_kv 0.75")
    overrides = [("running", ('own_running{kind="llm"}',)), ("kv_usage", ("newer_kv", "own_kv"))]
    assert stats(body, dialect=VLLM, overrides=overrides) == Stats(7, 3, 0.75)


def test_an_endpoints_own_name_that_is_missing_is_an_error() -> None:
    """The dialect's name does not stand in for what was configured."""
    with pytest.raises(UnreadableMetrics) as refused:
        stats(page(), dialect=VLLM, overrides=[("running", ("a", 'b{c="d"}'))])
    assert str(refused.value) == 'running: the page has no a or b{c="d"}'


def test_an_override_offers_what_the_dialect_lacks() -> None:
    """A name for llama.cpp's kv usage makes it mandatory; one for a counter does not."""
    llamacpp = DIALECTS["llamacpp"]
    base = lines("llamacpp:requests_processing 1", "llamacpp:requests_deferred 0")
    overrides = [("kv_usage", ("my_kv",)), ("success", ("my_done",))]
    body = base + lines("my_kv 0.5", "my_done_total 4")
    assert stats(body, dialect=llamacpp, overrides=overrides) == Stats(1, 0, 0.5, success_total=4.0)
    with pytest.raises(UnreadableMetrics, match="kv_usage: the page has no my_kv"):
        stats(base, dialect=llamacpp, overrides=overrides)
    assert stats(base + b"my_kv 0\n", dialect=llamacpp, overrides=overrides).success_total is None


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (("load", ("a",)), "the signals are running, waiting, kv_usage"),
        (("running", ()), "at least one"),
        (("running", ("a b",)), "not a metric name"),
    ],
)
def test_an_override_with_a_mistake_is_refused(
    override: tuple[str, tuple[str, ...]], says: str
) -> None:
    """It shows when it is set."""
    with pytest.raises(ValueError, match=says):
        Contract(VLLM, overrides=[override])


def test_a_contract_serves_many_pages() -> None:
    """It is made once per endpoint."""
    contract = Contract(VLLM)
    for running in ("1", "2"):
        found = contract.stats(read(page(running=running), contract.families))
        assert found.running == int(running)


@pytest.mark.parametrize("path", sorted(PAGES.glob("*.txt")), ids=lambda path: path.stem)
def test_a_golden_page_without_a_mandatory_family_is_an_error(path: Path) -> None:
    """Whichever of its families is renamed, no number becomes a zero."""
    body = path.read_bytes()
    dialect = DIALECTS[path.stem.partition("-")[0]]
    for signal in dialect.mandatory:
        names = [name.name for name in dialect.signals[signal]]
        renamed = body
        for name in names:
            for spelling in {name, name.replace(":", "_")}:
                renamed = renamed.replace(spelling.encode(), b"renamed")
        with pytest.raises(UnreadableMetrics):
            stats(renamed, dialect=dialect)


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(sorted(PAGES.glob("*.txt"))),
    st.data(),
)
def test_a_damaged_page_gives_right_numbers_or_an_error(path: Path, data: st.DataObject) -> None:
    """Any bytes anywhere on a page give values in range or the error of this room."""
    body = bytearray(path.read_bytes()[:4000])
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 30))] = data.draw(st.binary(max_size=10))
    try:
        found = stats(bytes(body), dialect=DIALECTS[path.stem.partition("-")[0]])
    except UnreadableMetrics:
        return
    for count in (found.running, found.waiting, found.block_size_tokens, found.block_count):
        assert count is None or count >= 0
    assert found.kv_usage_ratio is None or 0 <= found.kv_usage_ratio <= 1
    for total in (found.prompt_tokens_total, found.generation_tokens_total, found.success_total):
        assert total is None or 0 <= total < float("inf")
