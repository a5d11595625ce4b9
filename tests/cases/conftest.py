"""Marks of the case suite: which case a test belongs to, and what takes minutes."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
WANTS_SLOW = os.environ.get("SLOW") == "1"


def pytest_configure(config: pytest.Config) -> None:
    """The suite's marks are known."""
    config.addinivalue_line("markers", "case(number): which case the test belongs to")
    config.addinivalue_line("markers", "slow: takes minutes; runs with SLOW=1 only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each test of this folder carries its case to the report; slow ones need SLOW=1."""
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        if HERE not in item.path.parents:
            kept.append(item)
            continue
        mark = item.get_closest_marker("case")
        if mark is None:
            raise pytest.UsageError(f"{item.nodeid} belongs to no case")
        item.user_properties.append(("case", mark.args[0]))
        item.user_properties.append(("what", _first_line(item)))
        is_slow = item.get_closest_marker("slow") is not None
        (left_out if is_slow and not WANTS_SLOW else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def _first_line(item: pytest.Item) -> str:
    """What a case is about: the first line of its file."""
    module = item.getparent(pytest.Module)
    inside: ModuleType | None = None if module is None else module.obj
    text = None if inside is None else inside.__doc__
    return (text or "").strip().partition("\n")[0]
