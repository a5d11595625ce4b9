"""Simulated engines as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import Request, urlopen

import pytest

from extproc.lab.engine_main import die_with_parent, main

COMMAND = [sys.executable, "-m", "extproc.lab.engine_main"]


@contextmanager
def started(*flags: str) -> Iterator[subprocess.Popen[str]]:
    """A process with these flags, killed at the end."""
    process = subprocess.Popen([*COMMAND, *flags], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def line_of(process: subprocess.Popen[str]) -> list[str]:
    """The words of the next line that it prints."""
    assert process.stdout is not None
    return process.stdout.readline().split()


def alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123 - not a path of the project
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_when_it_is_ready_and_ends_when_told(number: signal.Signals) -> None:
    """One line per engine, a line per request if asked, and an end at once with status 0."""
    flags = ["--name", "e", "--models", "a, b", "--count", "2", "--log", "--fault", "hang,path=/h"]
    with started(*flags) as process:
        urls = []
        for index in range(2):
            ready, name, url = line_of(process)
            assert (ready, name) == ("ready", f"e-{index}")
            urls.append(url)
        with urlopen(f"{urls[0]}/v1/models") as answer:
            assert answer.headers["x-served-by"] == "e-0"
        assert line_of(process)[:4] == ["e-0", "GET", "/v1/models", "200"]
        command = Request(f"{urls[1]}/lab/hold", method="POST", data=b"")
        with urlopen(command) as answer:
            assert answer.status == 200
        started_at = time.monotonic()
        process.send_signal(number)
        assert process.wait(5) == 0
        assert time.monotonic() - started_at < 2


def test_it_dies_with_its_parent() -> None:
    """Killed without a word, the parent takes its engine with it."""
    code = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([*{COMMAND!r}, '--die-with-parent'], stdout=subprocess.PIPE)\n"
        "print(p.pid, p.stdout.readline().split()[0].decode(), flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid, ready = line_of(parent)
    assert ready == "ready"
    parent.kill()
    parent.wait()
    assert parent.stdout is not None
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while alive(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(int(pid))


def test_a_parent_that_is_gone_is_noticed() -> None:
    """If the parent died before the wish could be made known, the answer is no."""
    parent = os.getppid()
    code = f"from extproc.lab.engine_main import *; print(die_with_parent({parent}))"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout == "False\n"
    assert callable(die_with_parent)


@pytest.mark.parametrize(
    "flags",
    [
        ["--fault", "nothing"],
        ["--max-running", "0"],
        ["--models", ","],
        ["--dialect", "klingon"],
        ["--tls-cert", "/nowhere"],
    ],
)
def test_wrong_flags_are_an_error_with_a_usage(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The status is 2 and the text says what is wrong."""
    with pytest.raises(SystemExit) as stop:
        main(flags)
    assert stop.value.code == 2
    assert "error" in capsys.readouterr().err


def test_a_port_in_use_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes on one port: the second says so and ends with 1."""
    with started() as process:
        port = line_of(process)[2].rpartition(":")[2]
        assert main(["--port", port]) == 1
    assert "cannot listen" in capsys.readouterr().err
