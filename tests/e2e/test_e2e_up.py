"""The commands that people type: `llmgw up` and `llmgw check`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import openai
import pytest
from e2e_world import HELLO, fresh, until

from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind
from extproc.lab.processes import free_port

pytestmark = [pytest.mark.envoy, pytest.mark.xdist_group("e2e-up")]

START_SECONDS: Final = 40.0
# The service's notice that it ends, its drain, and Envoy's.
END_SECONDS: Final = 30.0
_MARK: Final = "LLMGW_E2E_MARK"
_LLMGW: Final = (sys.executable, "-m", "extproc.cli.llmgw")


class _Message(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Message


class _Answer(msgspec.Struct):
    choices: list[_Choice]


def marked(mark: str) -> list[str]:
    """The command lines of all running processes that descend from the one with this mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue  # gone, or not ours
        if f"{_MARK}={mark}".encode() in environ.split(b"\0") and command:
            found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found


@dataclass(slots=True)
class Terminal:
    """A command that runs, and what it has printed so far."""

    process: Process
    mark: str
    temp: Path
    lines: list[str] = field(default_factory=list)

    async def line(self, pattern: str, seconds: float = 10.0) -> re.Match[str]:
        """The first line that matches, as soon as it is there."""
        found: list[re.Match[str]] = []

        async def is_there() -> bool:
            found[:] = [match for line in self.lines if (match := re.search(pattern, line))]
            assert found or self.process.returncode is None, self.lines
            return bool(found)

        await until(is_there, f"{pattern} in {self.lines}", seconds)
        return found[0]

    async def follow(self) -> None:
        """Every line is read as it comes, to the end."""
        assert self.process.stdout is not None
        async for raw in self.process.stdout:
            self.lines.append(raw.decode().rstrip("\n"))

    def interrupt(self) -> None:
        """Ctrl-C, as a terminal sends it: to the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    async def end(self) -> int:
        """The exit status, once it has ended."""
        async with asyncio.timeout(END_SECONDS):
            return await self.process.wait()


@asynccontextmanager
async def up(temp: Path, *arguments: str) -> AsyncIterator[Terminal]:
    """`llmgw up`, ready, with a folder of its own for temporary files."""
    mark = fresh("up")
    folder = temp / "tmp"
    folder.mkdir()
    process = await asyncio.create_subprocess_exec(
        *_LLMGW,
        "up",
        *arguments,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        env={**os.environ, _MARK: mark, "TMPDIR": str(folder)},
        process_group=0,
    )
    terminal = Terminal(process, mark, folder)
    reading = asyncio.create_task(terminal.follow())
    try:
        await terminal.line(r"Ctrl-C", START_SECONDS)
        yield terminal
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await reading


async def run(
    *command: str, environ: dict[str, str] | None = None, folder: Path | None = None
) -> tuple[int, str, str]:
    """The exit status, standard output and standard error of a command."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, **(environ or {})},
        cwd=folder,
    )
    async with asyncio.timeout(START_SECONDS):
        said, complained = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode(), complained.decode()


async def until_nothing_is_left(terminal: Terminal) -> None:
    """No process of the command's runs any more."""

    async def is_alone() -> bool:
        return not marked(terminal.mark)

    await until(is_alone, f"no process left of {terminal.mark}")


async def test_the_first_minute(tmp_path: Path) -> None:
    """Ready, the curl line works, each request has a line, and Ctrl-C leaves nothing."""
    async with up(tmp_path, "--port", "0") as terminal:
        ready = await terminal.line(r"^ready: (http://\S+/v1)\b.*\bdemo\b")
        assert len(marked(terminal.mark)) >= 6  # itself, three engines, the service and Envoy
        curl = await terminal.line(r"(curl .*)")
        assert ready[1] in curl[1]
        status, said, complained = await run(*shlex.split(curl[1]), "--fail", "--silent")
        assert (status, complained) == (0, "")
        assert msgspec.json.decode(said, type=_Answer).choices[0].message.content
        await terminal.line(r"demo /v1/chat/completions -> (a|b|c) 200 ")
        async with openai.AsyncOpenAI(base_url=ready[1], api_key="k", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="demo", messages=HELLO, max_tokens=4, stream=True
            )
            chunks = [chunk async for chunk in stream]
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="nothing", messages=HELLO)
        served = [line for line in terminal.lines if " 200 " in line]
        where = chunks[0].system_fingerprint

        async def is_told() -> bool:
            served[:] = [line for line in terminal.lines if " 200 " in line]
            return len(served) == 2

        await until(is_told, "a line for each request")
        assert f"-> {where} 200 " in served[1]
        await terminal.line(r"nothing refused: model_not_found")
        assert list(terminal.temp.iterdir())
        terminal.interrupt()
        assert await terminal.end() == 0
        await until_nothing_is_left(terminal)
        assert list(terminal.temp.iterdir()) == []
        assert not any("Traceback" in line for line in terminal.lines)


async def test_ones_own_engines(tmp_path: Path) -> None:
    """On a given port; a failover shows both endpoints in its line; SIGTERM ends it as well."""
    port = free_port()
    async with LabEngine("mine", ("my-model",)) as mine, LabEngine("sick", ("my-model",)) as sick:
        file = tmp_path / "llmgw.yaml"
        endpoints = [
            {"id": engine.name, "url": engine.url, "models": ["my-model"]}
            for engine in (mine, sick)
        ]
        file.write_text(json.dumps({"endpoints": endpoints}))
        sick.inject(Fault(kind=FaultKind.STATUS, status=503))
        async with up(tmp_path, "--config", str(file), "--port", str(port)) as terminal:
            await terminal.line(rf"^ready: http://127\.0\.0\.1:{port}/v1 .*my-model")
            curl = await terminal.line(r"(curl .*)")

            async def are_tried() -> bool:
                status, _, _ = await run(*shlex.split(curl[1]), "--fail", "--silent")
                assert status == 0
                tried = {line.split(" -> ")[1] for line in terminal.lines if " -> " in line}
                return {"sick > mine 200", "mine 200"} <= {one.rsplit(" ", 2)[0] for one in tried}

            await until(are_tried, "a failover and a success", 30)
            os.kill(terminal.process.pid, signal.SIGTERM)
            assert await terminal.end() == 0
            await until_nothing_is_left(terminal)
            assert list(terminal.temp.iterdir()) == []


async def test_a_running_stream_does_not_keep_it_from_ending(tmp_path: Path) -> None:
    """A second Ctrl-C is not needed, nor does one leave anything behind."""
    async with up(tmp_path, "--port", "0") as terminal:
        ready = await terminal.line(r"^ready: (http://\S+/v1)\b")
        async with openai.AsyncOpenAI(base_url=ready[1], api_key="k", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="demo", messages=HELLO, max_tokens=30_000, stream=True
            )
            await anext(stream)
            terminal.interrupt()
            await terminal.line(r"^stopping")
            terminal.interrupt()
            assert await terminal.end() in {0, -signal.SIGINT, 130}
            await until_nothing_is_left(terminal)
            assert list(terminal.temp.iterdir()) == []
            await stream.close()


async def test_killed_it_leaves_no_process(tmp_path: Path) -> None:
    """Not even when it cannot do anything about it any more."""
    async with up(tmp_path, "--port", "0") as terminal:
        terminal.process.kill()
        await terminal.end()
        await until_nothing_is_left(terminal)


async def test_a_part_that_dies_ends_it(tmp_path: Path) -> None:
    """With an exit status that says so, and without leaving the others."""
    async with up(tmp_path, "--port", "0") as terminal:
        (envoy,) = pids_of(terminal, lambda command: "--config-path" in command)
        os.kill(envoy, signal.SIGKILL)
        assert await terminal.end() == 1
        await terminal.line(r"has ended")
        await until_nothing_is_left(terminal)
        assert list(terminal.temp.iterdir()) == []


def pids_of(terminal: Terminal, is_it: Callable[[str], bool]) -> Sequence[int]:
    """The processes that descend from the terminal's and whose command line it is."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes()
            command = (folder / "cmdline").read_text(errors="replace")
        except OSError:
            continue  # gone, or not ours
        if f"{_MARK}={terminal.mark}".encode() in environ.split(b"\0") and is_it(command):
            found.append(int(folder.name))
    return found


async def test_a_port_in_use_is_said_so(tmp_path: Path) -> None:
    """In a sentence, with exit status 1 and nothing left."""
    async with LabEngine("taken") as engine:
        mark = fresh("up")
        folder = tmp_path / "tmp"
        folder.mkdir()
        status, said, complained = await run(
            *_LLMGW,
            "up",
            f"--port={engine.port}",
            environ={_MARK: mark, "TMPDIR": str(folder)},
        )
    assert status == 1
    assert "Traceback" not in said + complained
    assert str(engine.port) in said + complained
    assert marked(mark) == []
    assert list(folder.iterdir()) == []


GOOD: Final = "endpoints:\n  - {id: a, url: 'http://127.0.0.1:1', models: [m]}\n"


async def test_check_accepts(tmp_path: Path) -> None:
    """A good file: exit status 0 and a line that says what is in it."""
    (tmp_path / "good.yaml").write_text(GOOD)
    status, said, complained = await run(*_LLMGW, "check", "good.yaml", folder=tmp_path)
    assert (status, complained) == (0, "")
    assert re.search(r"good\.yaml: ok, 1 endpoint\b.*1 model\b", said)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("endpoints:\n  - {id: a, url: 'http://h:1', modells: [m]}\n", r"bad\.yaml:2: .*modells"),
        (GOOD + "  - {id: a, url: 'http://h:2', models: [m]}\n", r"bad\.yaml:3: .*id"),
        ("endpoints:\n  - {id: a, url: 'ftp://h', models: [m]}\n", r"bad\.yaml:2: .*url"),
        ("endpoints: [", r"bad\.yaml:"),
        (
            "endpoints:\n  - {id: a, url: 'http://h:1', models: [m], api_key: 'env:E2E_NOT_SET'}\n",
            r"E2E_NOT_SET",
        ),
    ],
    ids=["unknown-key", "duplicate-id", "bad-url", "no-yaml", "missing-secret"],
)
async def test_check_refuses(tmp_path: Path, text: str, complaint: str) -> None:
    """A bad file: exit status 1, and file, line and key on standard error."""
    (tmp_path / "bad.yaml").write_text(text)
    status, said, complained = await run(*_LLMGW, "check", "bad.yaml", folder=tmp_path)
    assert (status, said) == (1, "")
    assert re.search(complaint, complained), complained
    assert "Traceback" not in complained


async def test_check_without_a_file(tmp_path: Path) -> None:
    """Neither 0 nor a traceback."""
    status, said, complained = await run(*_LLMGW, "check", "absent.yaml", folder=tmp_path)
    assert status in {1, 2}
    assert said == ""
    assert "absent.yaml" in complained
    assert "Traceback" not in complained


async def test_up_refuses_a_bad_file(tmp_path: Path) -> None:
    """Before anything starts."""
    (tmp_path / "bad.yaml").write_text("endpoint: []\n")
    status, _, complained = await run(*_LLMGW, "up", "--config=bad.yaml", folder=tmp_path)
    assert status == 1
    assert re.search(r"bad\.yaml:1: .*endpoint", complained)
    assert "Traceback" not in complained
