"""The mutants still fit the product: `make mutants` can try each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutant_rules import RULES, Rule

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_is_not_stale(rule: Rule) -> None:
    """What it edits is there once, and so is the test that is to notice."""
    assert rule.complaints(ROOT) == []


def test_each_rule_has_a_name_of_its_own() -> None:
    """The table would not tell them apart."""
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_an_edit_that_fits_twice_is_a_complaint(tmp_path: Path) -> None:
    """Also one that fits nowhere, and a test that is not there."""
    (tmp_path / "extproc").mkdir()
    rule = RULES[0]
    (edit,) = rule.edits
    file = tmp_path / "extproc" / edit.file
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(edit.old * 2)
    twice, missing = rule.complaints(tmp_path)
    assert "2 times" in twice
    assert "no test" in missing
    file.write_text("")
    assert "0 times" in rule.complaints(tmp_path)[0]
