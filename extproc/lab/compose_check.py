"""compose.yaml for real: `python -m extproc.lab.compose_check --compose 'docker compose'`.

Brings it up as a project of its own, sends SDK requests through it and takes it down again, however
that ended. The last line is the verdict, and the exit status is 0 only if nothing failed and every
engine has served. Otherwise what the containers logged stands before it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final, TypeAlias

import aiohttp
from httpx2 import HTTPError
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, NotFoundError, OpenAIError

from extproc.config.problems import ConfigErrors
from extproc.config.read import read
from extproc.lab.delivery import SERVED_BY

CONFIG: Final = Path("envoy/compose/llmgw.yaml")
PROJECT: Final = "llmgw-check"
_ROUNDS: Final = 20
_PARALLEL: Final = 8
_POLL_SECONDS: Final = 0.25
_REQUEST_SECONDS: Final = 30.0
_SHOWN_LINES: Final = 100

# The engine that answered, or None where the service itself did.
_Request: TypeAlias = Callable[[], Coroutine[None, None, str | None]]


class StackFailed(Exception):  # noqa: N818 - reads as what it is at the place it is caught
    """The stack did not come up; the text says what is missing."""


class _WrongAnswer(Exception):  # noqa: N818 - as above
    """An answer came and is not the one that it should be."""


# A stream that is cut while it is read raises the HTTP library's error, not the SDK's.
_FAILURES: Final = (OpenAIError, HTTPError, _WrongAnswer)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of the requests; `spread` is good answers by engine."""

    sent: int
    failed: int
    spread: Mapping[str, int]

    @property
    def is_good(self) -> bool:
        """Whether every request was answered as it should be, and every engine has served."""
        return self.sent > 0 and self.failed == 0 and all(self.spread.values())

    def __str__(self) -> str:
        shares = "/".join(str(count) for count in self.spread.values())
        return f"compose: {self.sent} sent, {self.failed} failed, spread {shares}"


@dataclass(frozen=True, slots=True)
class Project:
    """One run of a compose file: the command with its options, and where the gateway appears."""

    compose: Sequence[str]
    file: Path
    port: int
    name: str = PROJECT
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def url(self) -> str:
        """Where clients connect, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    def up(self) -> None:
        """The images are built and the containers run.

        Raises:
            StackFailed: the command has failed.
        """
        status = self._run("up", "-d", "--build")
        if status != 0:
            raise StackFailed(f"{shlex.join(self.compose)} up: exit status {status}")

    def logs(self) -> None:
        """The last lines that each container wrote are on the screen."""
        self._run("logs", f"--tail={_SHOWN_LINES}")

    def down(self) -> None:
        """No container, network or volume of the project is left.

        Raises:
            StackFailed: the command has failed.
        """
        status = self._run("down", "-v")
        if status != 0:
            raise StackFailed(f"{shlex.join(self.compose)} down: exit status {status}")

    def _run(self, *arguments: str) -> int:
        command = [*self.compose, "-p", self.name, "-f", str(self.file), *arguments]
        environ = {**self.environ, "LLMGW_HOST": "127.0.0.1", "LLMGW_PORT": str(self.port)}
        _say(f"$ {shlex.join(command)}")
        return subprocess.run(command, env=environ, check=False).returncode  # noqa: S603 - the user's own command


class Visitor:
    """Sends requests of every kind with the SDK and judges the answers."""

    def __init__(self, client: AsyncOpenAI, model: str) -> None:
        self._client = client
        self._model = model

    def plan(self, rounds: int) -> list[_Request]:
        """What is sent: so many rounds of chat, stream and embeddings, and two questions."""
        return [*[self.chat, self.stream, self.embeddings] * rounds, self.models, self.wrong_model]

    async def chat(self) -> str | None:
        """The engine that answered a chat request."""
        raw = await self._client.chat.completions.with_raw_response.create(
            model=self._model, messages=[{"role": "user", "content": "Hello"}], max_tokens=8
        )
        answer = raw.parse()
        _require(answer.usage is not None and bool(answer.choices), "the answer is not whole")
        return raw.headers.get(SERVED_BY)

    async def stream(self) -> str | None:
        """The engine that answered a stream, to its finish reason and its usage."""
        raw = await self._client.chat.completions.with_raw_response.create(
            model=self._model,
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
        has_finished = has_usage = False
        async for chunk in raw.parse():
            has_usage = has_usage or chunk.usage is not None
            has_finished = has_finished or any(choice.finish_reason for choice in chunk.choices)
        _require(has_finished and has_usage, "the stream ended early")
        return raw.headers.get(SERVED_BY)

    async def embeddings(self) -> str | None:
        """The engine that answered an embeddings request."""
        raw = await self._client.embeddings.with_raw_response.create(
            model=self._model, input="Hello"
        )
        _require(bool(raw.parse().data), "no embedding came")
        return raw.headers.get(SERVED_BY)

    async def models(self) -> str | None:
        """None: the service lists the model."""
        listed = [model.id async for model in self._client.models.list()]
        _require(self._model in listed, f"the models are {listed}")
        return None

    async def wrong_model(self) -> str | None:
        """None: a model that nobody serves is refused with the SDK's NotFoundError."""
        try:
            await self._client.chat.completions.create(
                model="nobody-serves-this", messages=[{"role": "user", "content": "Hello"}]
            )
        except NotFoundError:
            return None
        raise _WrongAnswer("a model that nobody serves was answered")


async def visit(url: str, model: str, engines: Sequence[str], wait_seconds: float) -> Verdict:
    """The verdict on the stack at `url`, once it is ready and has found every engine.

    Raises:
        StackFailed: it is not ready, or an engine never answers, within `wait_seconds`.
    """
    async with (
        DefaultAsyncHttpxClient(trust_env=False) as http,
        AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key="unused",
            max_retries=0,
            timeout=_REQUEST_SECONDS,
            http_client=http,
        ) as client,
    ):
        visitor = Visitor(client, model)
        loop = asyncio.get_running_loop()
        start = loop.time()
        await _until_ready(url, start + wait_seconds)
        _say(f"ready after {loop.time() - start:.1f} s")
        await _until_all_served(visitor, engines, start + wait_seconds)
        _say(f"every engine has answered after {loop.time() - start:.1f} s")
        plan = visitor.plan(_ROUNDS)
        gate = asyncio.Semaphore(_PARALLEL)
        results = await asyncio.gather(*(_one(request, gate) for request in plan))
        served = Counter(name for is_good, name in results if is_good and name is not None)
        failed = sum(not is_good for is_good, _ in results)
        return Verdict(len(plan), failed, {name: served[name] for name in engines})


async def _one(request: _Request, gate: asyncio.Semaphore) -> tuple[bool, str | None]:
    """Whether one request went as it should, and which engine answered it."""
    async with gate:
        try:
            return True, await request()
        except _FAILURES as error:
            _say(f"{getattr(request, '__name__', 'a request')} failed: {error!r}")
            return False, None


async def _until_ready(url: str, deadline: float) -> None:
    """The service answers /ready with 200, through Envoy."""
    loop = asyncio.get_running_loop()
    seen = "no answer"
    timeout = aiohttp.ClientTimeout(total=5)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
        while loop.time() < deadline:
            try:
                async with session.get(f"{url}/ready") as response:
                    if response.status == 200:
                        return
                    seen = f"status {response.status}"
            except (OSError, aiohttp.ClientError, TimeoutError) as error:
                seen = repr(error)
            await asyncio.sleep(_POLL_SECONDS)
    raise StackFailed(f"{url}/ready is not answered with 200 in time, the last was: {seen}")


async def _until_all_served(visitor: Visitor, engines: Sequence[str], deadline: float) -> None:
    """Every engine has answered once: Envoy has found them all, in whatever order they came."""
    loop = asyncio.get_running_loop()
    missing = set(engines)
    last: Exception | None = None
    while loop.time() < deadline:
        before = len(missing)
        try:
            missing.discard(await visitor.chat() or "")
        except _FAILURES as error:
            last = error
        if not missing:
            return
        if len(missing) == before:
            await asyncio.sleep(_POLL_SECONDS)
    raise StackFailed(f"no answer from {', '.join(sorted(missing))}; the last error was: {last!r}")


def check(project: Project, *, wait_seconds: float) -> int:
    """The stack was brought up, visited and taken down; 0 if all went well."""
    try:
        config = read(project.file.parent / CONFIG)
    except ConfigErrors as errors:
        _say(f"{errors}\ncompose: failed, the configuration is wrong")
        return 1
    if shutil.which(project.compose[0]) is None:
        _say(f"compose: failed, there is no command {project.compose[0]}")
        return 1
    engines = [info.id for info in config.endpoints]
    told, is_good = "", False
    try:
        project.up()
        verdict = asyncio.run(visit(project.url, config.models[0].name, engines, wait_seconds))
        told, is_good = str(verdict), verdict.is_good
    except StackFailed as error:
        told = f"compose: failed, {error}"
    finally:
        is_down = _taken_down(project, has_logs=not is_good)
    _say(told if is_down else f"{told}, not taken down")
    return 0 if is_good and is_down else 1


def _taken_down(project: Project, *, has_logs: bool) -> bool:
    """Whether nothing of the project is left; its logs are on the screen first if asked for."""
    if has_logs:
        project.logs()
    try:
        project.down()
    except StackFailed as error:
        _say(str(error))
        return False
    return True


def _require(is_right: bool, problem: str) -> None:  # noqa: FBT001 - an assertion
    if not is_right:
        raise _WrongAnswer(problem)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _terminated(_number: int, _frame: FrameType | None) -> None:
    """A signal unwinds the stack, so that the containers go too; a second one changes nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """The verdict is on the screen; 0 if it is good."""
    parser = argparse.ArgumentParser(prog="extproc.lab.compose_check", description=__doc__)
    add = parser.add_argument
    add("--compose", default="docker compose", help="the command, with its options")
    add("--file", type=Path, default=Path("compose.yaml"))
    add("--port", type=int, default=8080, help="of this machine, where the gateway appears")
    add("--wait", type=float, default=120.0, metavar="SECONDS", help="until it is ready")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _terminated)
    project = Project(shlex.split(options.compose), options.file, options.port)
    return check(project, wait_seconds=options.wait)


if __name__ == "__main__":
    sys.exit(main())
