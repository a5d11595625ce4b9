"""The metrics that are published against the page that documents them."""

from __future__ import annotations

import re
from pathlib import Path

from extproc.exchange.messages import Phase
from extproc.exchange.outcome import Outcome
from extproc.routing.endpoint import BreakerState
from extproc.routing.endpoint import Kind as EndpointKind
from extproc.telemetry.families import FAMILIES, Family, Kind
from extproc.telemetry.fleet import Exclusion

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md").read_text()
ROW = re.compile(r"^\| `(llmgw_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", re.MULTILINE)


def documented() -> list[Family]:
    """The rows of the page."""
    return [
        Family(name, Kind(kind), tuple(re.findall(r"`(\w+)`", labels)), meaning)
        for name, kind, labels, meaning in ROW.findall(PAGE)
    ]


def test_page_and_code_agree() -> None:
    """Every metric is documented as it is, in the same order, and nothing else is."""
    assert documented() == list(FAMILIES)


def test_every_value_of_a_label_is_documented() -> None:
    """Labels with a fixed set of values have them all on the page."""
    values = {*Outcome, *Phase, *BreakerState, *EndpointKind, *Exclusion}
    assert {value for value in values if f"`{value}`" not in PAGE} == set()


def test_names_follow_the_conventions() -> None:
    """One prefix, units in the name, `_total` for counters and for nothing else."""
    for family in FAMILIES:
        assert re.fullmatch(r"llmgw_[a-z_]+", family.name)
        assert family.name.endswith("_total") == (family.kind is Kind.COUNTER)
        assert family.name.endswith("_seconds") or family.kind is not Kind.HISTOGRAM
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_every_metric_named_on_the_page_exists() -> None:
    """Advice about alerts speaks of metrics that there are."""
    names = set(re.findall(r"llmgw_\w+", PAGE))
    assert names == {family.name for family in FAMILIES}
