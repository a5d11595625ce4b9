"""A pytest plugin that writes down what became of a test: passed, broken, or failed and by what.

It is loaded with `-p mutant_verdict` into a pytest that runs on a copy of the product. The file
that `MUTANT_VERDICT` names gets one JSON object.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import extproc

VERDICT: Final = "MUTANT_VERDICT"
PASSED: Final = "passed"
# The test noticed: something was not as asserted, or did not come in time.
CAUGHT: Final = "caught"
# It failed by itself: nothing that can be read as its word about the product.
BROKEN: Final = "broken"


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors in a group of any depth, or the one that is none."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from leaves(one)
    else:
        yield error


def is_word(error: BaseException) -> bool:
    """Whether the test says so on purpose."""
    noticed = (AssertionError, TimeoutError, pytest.fail.Exception)
    return any(isinstance(leaf, noticed) for leaf in leaves(error))


class Verdict:
    """What was seen of the run's tests."""

    def __init__(self) -> None:
        self._kind = PASSED
        self._told = ""

    def pytest_exception_interact(
        self, call: pytest.CallInfo[None], report: pytest.TestReport | pytest.CollectReport
    ) -> None:
        """The first failure of a test's own call counts; one before it is no word of the test."""
        if call.excinfo is None or self._kind != PASSED:
            return
        error = call.excinfo.value
        in_call = isinstance(report, pytest.TestReport) and report.when == "call"
        self._kind = CAUGHT if in_call and is_word(error) else BROKEN
        text = str(next(leaves(error))).strip() or "no text"
        self._told = f"{type(error).__name__}: {text.splitlines()[0]}"

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """The verdict is written; a run without tests is a broken one."""
        kind = self._kind
        if kind == PASSED and exitstatus != pytest.ExitCode.OK:
            kind, self._told = BROKEN, f"pytest's exit status is {exitstatus}"
        found = {"kind": kind, "told": self._told, "product": str(Path(extproc.__file__).parent)}
        Path(os.environ[VERDICT]).write_text(json.dumps(found))


def pytest_configure(config: pytest.Config) -> None:
    """The verdict is taken in the process that was asked for one."""
    if VERDICT in os.environ:
        config.pluginmanager.register(Verdict(), "mutant-verdict")
