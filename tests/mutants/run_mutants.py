"""Breaks one rule of the product at a time and shows that its case notices.

For each rule a copy of the tree gets the rule's edits, and the rule's test runs there, child
processes included; it must fail by an assertion. Unchanged, the same tests must pass. Arguments are
words: only rules whose name, case or test has one of them are tried. The last line is the verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mutant_rules import RULES, Rule
from mutant_verdict import BROKEN, CAUGHT, PASSED, VERDICT

ROOT: Final = Path(__file__).resolve().parents[2]
TESTS: Final = Path("tests")
_COPIED: Final = ("extproc", "tests", "envoy", "docs", "protos", "pyproject.toml", "README.md")
_LEFT_OUT: Final = shutil.ignore_patterns("__pycache__", ".*")
_SECONDS: Final = 240.0
_WIDTH: Final = 64


@dataclass(frozen=True, slots=True)
class Found:
    """What a run of one test on one copy came to."""

    kind: str
    told: str
    seconds: float


def copied(folder: Path) -> Path:
    """The tree again, in a new folder of that one."""
    root = Path(tempfile.mkdtemp(dir=folder))
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=_LEFT_OUT)
        elif source.exists():
            shutil.copy2(source, root / name)
    return root


def run(root: Path, tests: Sequence[str]) -> Found:
    """The tests have run on the copy at `root`, and on nothing else."""
    verdict = root / "verdict.json"
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "mutant_verdict"]
    command += ["-p", "no:cacheprovider", *(str(TESTS / test) for test in tests)]
    # Before whatever is installed: for this process by the path, for its children by the folder
    # that they start in as well.
    path = os.pathsep.join((str(root), str(root / "tests" / "mutants")))
    with (root / "output.txt").open("w") as output:
        try:
            subprocess.run(
                command,
                cwd=root,
                env={**os.environ, "PYTHONPATH": path, VERDICT: str(verdict)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_SECONDS * len(tests),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Found(BROKEN, "it did not end", time.monotonic() - began)
    seconds = time.monotonic() - began
    if not verdict.exists():
        tail = (root / "output.txt").read_text().strip().splitlines()[-1:]
        return Found(BROKEN, f"no verdict: {''.join(tail)}", seconds)
    found = json.loads(verdict.read_text())
    if Path(found["product"]) != root / "extproc":
        return Found(BROKEN, f"it ran on {found['product']}", seconds)
    return Found(found["kind"], found["told"], seconds)


def try_rule(rule: Rule, folder: Path) -> Found:
    """What the rule's test says where the rule is broken."""
    root = copied(folder)
    rule.break_in(root)
    found = run(root, [rule.test])
    _keep_or_drop(root, found, CAUGHT)
    return found


def try_unbroken(tests: Sequence[str], folder: Path) -> Found:
    """What some tests of one file say of the product as it is."""
    root = copied(folder)
    found = run(root, tests)
    _keep_or_drop(root, found, PASSED)
    return found


def _keep_or_drop(root: Path, found: Found, expected: str) -> None:
    """What was not as expected is shown; nothing is left."""
    output = root / "output.txt"
    if found.kind != expected and output.exists():
        sys.stdout.write("\n".join(output.read_text().splitlines()[-60:]) + "\n")
    shutil.rmtree(root, ignore_errors=True)


def table(rules: Sequence[Rule], found: Sequence[Found]) -> str:
    """A line for each rule."""
    lines = [f"{'case':>4}  {'rule that was broken':<{_WIDTH}}  {'caught':<6}  {'s':>4}"]
    for rule, one in zip(rules, found, strict=True):
        verdict = "yes" if one.kind == CAUGHT else "NO"
        line = f"{rule.case:>4}  {rule.name:<{_WIDTH}}  {verdict:<6}  {one.seconds:>4.0f}"
        lines.append(line if one.kind == CAUGHT else f"{line}  {one.kind} {one.told}".rstrip())
    return "\n".join(lines)


def main() -> int:
    """Every rule was tried; 0 if every one was caught."""
    parser = argparse.ArgumentParser(description="break rules, see cases fail")
    parser.add_argument("words", nargs="*", help="only rules that have one of them")
    parser.add_argument("--workers", type=int, default=2, help="how many at a time")
    parser.add_argument(
        "--passed", action="store_true", help="the tests have just passed where nothing is broken"
    )
    asked = parser.parse_args()
    rules = [rule for rule in RULES if not asked.words or any(map(rule.has, asked.words))]
    stale = [complaint for rule in rules for complaint in rule.complaints(ROOT)]
    if stale or not rules:
        sys.stdout.write("\n".join(stale or ["no such rule"]) + "\n")
        return 1
    files: dict[str, list[str]] = {}
    for test in dict.fromkeys(() if asked.passed else (rule.test for rule in rules)):
        files.setdefault(test.partition("::")[0], []).append(test)
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as name,
        ThreadPoolExecutor(asked.workers) as pool,
    ):
        folder = Path(name)
        unbroken = [pool.submit(try_unbroken, tests, folder) for tests in files.values()]
        broken = [pool.submit(try_rule, rule, folder) for rule in rules]
        healthy = [one.result() for one in unbroken]
        found = [one.result() for one in broken]
    sys.stdout.write(f"\n{time.monotonic() - began:.0f} s\n{table(rules, found)}\n")
    failing = [
        f"fails though nothing is broken: {file}: {one.told}"
        for file, one in zip(files, healthy, strict=True)
        if one.kind != PASSED
    ]
    sys.stdout.writelines(f"{line}\n" for line in failing)
    missed = sum(one.kind != CAUGHT for one in found)
    sys.stdout.write(f"mutants: {len(found) - missed} caught, {missed + len(failing)} missed\n")
    return 1 if missed or failing else 0


if __name__ == "__main__":
    sys.exit(main())
