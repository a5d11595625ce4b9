"""Runs the cases against a real Envoy and prints a table: number, what, passed.

Arguments are pytest's; without a path among them it is all cases. A few tests that fail beside
others are asked once more, one after the other: what they promise in milliseconds needs a machine
that is not busy with something else. The table says where that was so; the last line is the
verdict.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_WIDTH = 84
_FEW = 8


class Tally:
    """What came of each case; a case passes when all of its tests do."""

    def __init__(self) -> None:
        self.what: dict[int, str] = {}
        self.passed: Counter[int] = Counter()
        self.failed: Counter[int] = Counter()
        self.again: Counter[int] = Counter()
        self.failures: dict[str, int] = {}
        self.broken = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The result of one test counts for its case; a failing set-up or end counts as well."""
        told = dict(report.user_properties)
        number, what = told.get("case"), told.get("what")
        if not isinstance(number, int):
            return
        self.what[number] = str(what)
        if report.failed:
            self.failed[number] += 1
            self.failures[report.nodeid] = number
        elif report.when == "call":
            # A test that was skipped has shown nothing.
            (self.passed if report.passed else self.failed)[number] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be read is a failure of nobody knows which case."""
        self.broken += report.failed

    def correct(self, later: Tally) -> None:
        """What failed here and passes in `later` has passed, at the second time."""
        for test, number in list(self.failures.items()):
            if test not in later.failures and later.passed[number]:
                del self.failures[test]
                self.again[number] += 1
        self.failed = Counter(self.failures.values())

    def table(self) -> str:
        """A line for each case, and the sum."""
        lines = [f"{'case':>4}  {'what':<{_WIDTH}}  passed"]
        for number in sorted(self.what):
            what = self.what[number]
            shown = what if len(what) <= _WIDTH else f"{what[: _WIDTH - 1]}…"
            good, bad = self.passed[number], self.failed[number]
            again = self.again[number]
            verdict = f"{good + again}/{good + again + bad}" + ("" if not bad else "  FAILED")
            verdict += f"  ({again} at the second time)" if again else ""
            lines.append(f"{number:>4}  {shown:<{_WIDTH}}  {verdict}")
        bad_cases = sum(1 for number in self.what if self.failed[number]) + self.broken
        good_cases = sum(1 for number in self.what if not self.failed[number])
        lines.append(f"cases: {good_cases} passed, {bad_cases} failed")
        return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """The cases have run; pytest's exit status."""
    tally = Tally()
    began = time.monotonic()
    names_tests = any(Path(argument.partition("::")[0]).exists() for argument in arguments)
    own = [] if names_tests else [str(_HERE)]
    status = int(pytest.main(["-q", "--dist=loadfile", *own, *arguments], plugins=[tally]))
    if 0 < len(tally.failures) <= _FEW and not tally.broken:
        later = Tally()
        pytest.main(["-q", *tally.failures], plugins=[later])
        tally.correct(later)
        status = int(bool(tally.failures or later.broken))
    sys.stdout.write(f"\n{time.monotonic() - began:.0f} s\n{tally.table()}\n")
    if tally.broken or not tally.what:
        return status or 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
