"""A short soak through real Envoy, and its command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "extproc.lab.soak"]


@pytest.mark.envoy
def test_a_short_run_is_clean() -> None:
    """Thousands of mixed requests, a trouble or two: all explained, nothing left, even again."""
    done = subprocess.run(
        [*COMMAND, "--requests", "2000", "--interval", "2", "--seed", "5"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0, done.stdout + done.stderr
    assert last.startswith("soak: 2300 requests, 0 unexplained, in-flight 0, rss ")
    assert "clients that left:" in done.stdout


@pytest.mark.parametrize("arguments", [["--requests", "0"], ["--requests", "many"], ["--what"]])
def test_nonsense_is_refused(arguments: list[str]) -> None:
    """With status 2 and a word about it."""
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert arguments[0] in done.stderr


def test_help_says_what_it_does() -> None:
    """And what its options are."""
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True)
    assert "--seed" in done.stdout
    assert "explained" in done.stdout
