"""What the check of compose.yaml makes of a stack that comes up, and of one that does not."""

from __future__ import annotations

import shlex
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from extproc.lab.compose_check import CONFIG, Project, StackFailed, Verdict, check, main, visit
from extproc.lab.engine_http import LabEngine
from extproc.lab.processes import free_port
from extproc.lab.stack import Stack

ROOT = Path(__file__).resolve().parents[2]

# Stands in for a compose command: notes what it is asked to do and fails at the word FAILS.
FAKE = """
import os, sys
with open(os.environ["NOTES"], "a") as notes:
    notes.write(" ".join(sys.argv[1:]) + " " + os.environ["LLMGW_PORT"] + "\\n")
sys.exit(os.environ["FAILS"] in sys.argv)
"""


def project(folder: Path, *, fails: str) -> Project:
    """A project whose compose command only takes notes."""
    file = folder / CONFIG
    file.parent.mkdir(parents=True)
    file.write_bytes((ROOT / CONFIG).read_bytes())
    (folder / "fake.py").write_text(FAKE)
    return Project(
        compose=(sys.executable, str(folder / "fake.py")),
        file=folder / "compose.yaml",
        port=free_port(),
        environ={"NOTES": str(folder / "notes"), "FAILS": fails},
    )


def asked(folder: Path) -> list[str]:
    """The compose verbs that were called, in order."""
    lines = (folder / "notes").read_text().splitlines()
    return [line.split("compose.yaml ")[1].rpartition(" ")[0] for line in lines]


def test_a_verdict_is_good_only_if_nothing_failed_and_every_engine_served() -> None:
    """The line shows what was sent, what failed, and the engines' shares in their order."""
    good = Verdict(62, 0, {"a": 20, "b": 30, "c": 10})
    assert str(good) == "compose: 62 sent, 0 failed, spread 20/30/10"
    assert good.is_good
    assert not Verdict(62, 1, {"a": 20, "b": 29, "c": 10}).is_good
    assert not Verdict(62, 0, {"a": 30, "b": 30, "c": 0}).is_good
    assert not Verdict(0, 0, {}).is_good


def test_what_did_not_come_up_is_shown_and_taken_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed start ends with the logs, a clean-up with volumes, and a line that says so."""
    stack = project(tmp_path, fails="up")
    assert check(stack, wait_seconds=0.1) == 1
    assert asked(tmp_path) == ["up -d --build", "logs --tail=100", "down -v"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"compose: failed, {shlex.join(stack.compose)} up: exit status 1"


def test_a_stack_that_is_never_ready_is_taken_down_at_the_deadline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing listens where the gateway should be, and the check ends all the same."""
    stack = project(tmp_path, fails="nothing")
    assert check(stack, wait_seconds=0.1) == 1
    assert asked(tmp_path) == ["up -d --build", "logs --tail=100", "down -v"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"compose: failed, {stack.url}/ready is not answered with 200 in time")


def test_what_cannot_be_taken_down_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last line says that containers may be left."""
    assert check(project(tmp_path, fails="down"), wait_seconds=0.1) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith(", not taken down")


def test_the_project_and_the_port_are_its_own(tmp_path: Path) -> None:
    """A stack that somebody runs from the same file is neither reused nor taken down."""
    stack = project(tmp_path, fails="up")
    check(stack, wait_seconds=0.1)
    for line in (tmp_path / "notes").read_text().splitlines():
        assert line.startswith("-p llmgw-check -f ")
        assert line.endswith(f" {stack.port}")


def test_a_command_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was started, so nothing is taken down."""
    assert main(["--compose", "no-such-command up", "--file", str(ROOT / "compose.yaml")]) == 1
    assert capsys.readouterr().out == "compose: failed, there is no command no-such-command\n"


@pytest.mark.envoy
async def test_a_sound_stack_gets_a_good_verdict(tmp_path: Path) -> None:
    """Every kind of request goes through, and the shares are the engines' own."""
    async with AsyncExitStack() as exits:
        engines = [LabEngine(name, ("demo",)) for name in "abc"]
        for engine in engines:
            await exits.enter_async_context(engine)
        file = tmp_path / "llmgw.yaml"
        file.write_text(
            "cluster_id: check\nendpoints:\n"
            + "".join(
                f"  - {{id: {engine.name}, url: '{engine.url}', models: [demo]}}\n"
                for engine in engines
            )
        )
        stack = await exits.enter_async_context(Stack(file, port=0))
        verdict = await visit(stack.url, "demo", [*"abc"], 20)
        assert verdict.is_good, str(verdict)
        assert sum(verdict.spread.values()) == 60
        with pytest.raises(StackFailed, match=r"no answer from .*nobody"):
            await visit(stack.url, "demo", [*"abc", "nobody"], 5)
