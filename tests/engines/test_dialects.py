"""Dialects: what is read from each engine's page, by version."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.config.values import ENGINES, SIGNALS
from extproc.engines.contract import Contract, stats
from extproc.engines.dialects import COMBINE, DIALECTS, ROUTED_BY, Signal
from extproc.errors import UnreadableMetrics
from extproc.routing.endpoint import Stats

PAGES = Path(__file__).parent / "pages"

READ = {
    "vllm-0.32.0-idle": Stats(0, 0, 0.0, 128, 8192, 3.0, 8.0, 1.0),
    "vllm-0.32.0-dp2-busy": Stats(4, 8, 0.0014650225857648635, 128, 32768, 52.0, 2586.0, 0.0),
    "vllm-0.8.5-v0-engine": Stats(7, 2, 0.375, 16, 27874, 91342.0, 40211.0, 122.0),
    "vllm-0.10.2-both-kv-names": Stats(1, 0, 0.25, 16, None, 512.0, None, None),
    "vllm-0.11.0-openmetrics": Stats(3, 1, 0.5, None, None, 1000.0, 2000.0, 25.0),
    "vllm-0.11.0-ray-2.51": Stats(10, 1, 0.25, None, None, 100.0, None, None),
    "sglang-0.4.6-no-rank-labels": Stats(162, 2826, 0.28, None, None, 8128.0, 7557.0, 61.0),
    "sglang-0.5.6-tp4-all-schedulers": Stats(8, 4, 0.5, 64, 4096, 5000.0, None, 70.0),
    "sglang-0.5.11-dp2-priority": Stats(11, 40, 0.9, 64, 2000, None, 500.0, None),
    "sglang-0.5.9-decode": Stats(10, 6, 0.31, None, None, None, None, None),
    "tgi-3.3.6": Stats(12, 6, 0.25, None, None, 31400.0, 20500.0, 104.0),
    "tgi-2.4.1": Stats(3, 0, None, None, None, None, None, None),
    "trtllm-1.2.0": Stats(5, 1, 0.62, 32, 2048, 700.0, 900.0, 40.0),
    "triton-25.06-tensorrtllm": Stats(8, 2, 0.4875, 64, 6238, None, None, 52.0),
    "lmdeploy-0.10.2-dp2": Stats(7, 6, 0.7, 64, None, 30.0, None, 3.0),
    "llamacpp-b11434-idle": Stats(0, 0, None, None, None, 26.0, 16.0, None),
}


def page_of(name: str) -> tuple[str, bytes]:
    """The engine and the bytes of a golden page."""
    return name.partition("-")[0], (PAGES / f"{name}.txt").read_bytes()


@pytest.mark.parametrize("name", sorted(READ))
def test_a_golden_page_reads_as(name: str) -> None:
    """Every signal that the engine offers is read, and nothing that it does not."""
    engine, page = page_of(name)
    assert stats(page, dialect=DIALECTS[engine]) == READ[name]


def test_every_page_is_read() -> None:
    """No golden page lies about unread, and every engine has one."""
    assert {path.stem for path in PAGES.glob("*.txt")} == set(READ)
    assert {page_of(name)[0] for name in READ} == set(DIALECTS) - {"none"}


@pytest.mark.parametrize("name", sorted(READ))
def test_a_golden_pages_lines_may_come_in_any_order(name: str) -> None:
    """Backwards reads as forwards: no series wins by coming last."""
    engine, page = page_of(name)
    backwards = b"\n".join(reversed(page.splitlines()))
    assert stats(backwards, dialect=DIALECTS[engine]) == READ[name]


@pytest.mark.parametrize("name", sorted(READ))
def test_a_page_with_another_engines_dialect_is_an_error(name: str) -> None:
    """Names that are not there make no idle engine."""
    engine, page = page_of(name)
    for other, dialect in DIALECTS.items():
        if other in {engine, "none"}:
            continue
        with pytest.raises(UnreadableMetrics) as refused:
            stats(page, dialect=dialect)
        assert refused.value.signal == "running"


@pytest.mark.parametrize("engine", sorted(set(DIALECTS) - {"none"}))
def test_an_engine_offers_what_routing_needs(engine: str) -> None:
    """Running and waiting always; kv usage where every version has it; what is needed is named."""
    dialect = DIALECTS[engine]
    assert dialect.mandatory <= set(dialect.signals)
    assert {Signal.RUNNING, Signal.WAITING} <= dialect.mandatory <= ROUTED_BY
    assert (Signal.KV_USAGE in dialect.mandatory) is (engine not in {"tgi", "llamacpp"})


def test_the_unread_engine_offers_nothing() -> None:
    """Its page would be empty, and that is no error."""
    assert stats(b"", dialect=DIALECTS["none"]) == Stats()
    assert Contract(DIALECTS["none"]).stats([]) == Stats()


def test_the_tables_are_complete() -> None:
    """Every signal has its way to combine, and names agree with the configuration's."""
    assert set(COMBINE) == set(Signal)
    assert tuple(DIALECTS) == ENGINES
    assert tuple(Signal) == SIGNALS


def test_only_trtllm_has_another_path() -> None:
    """Its /metrics is JSON."""
    paths = {engine: dialect.path for engine, dialect in DIALECTS.items()}
    assert paths.pop("trtllm") == "/prometheus/metrics"
    assert set(paths.values()) == {"/metrics"}
