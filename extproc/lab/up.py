"""`llmgw up`: a whole stack in one terminal, with a line for every request."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import signal
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from extproc.config.values import Steering
from extproc.errors import LlmgwError
from extproc.lab.processes import Child, free_port
from extproc.lab.stack import Stack

MODEL: Final = "demo"
_READY: Final = "ready "


def run(file: Path | None, *, port: int | None, engines: int, steering: Steering | None) -> int:
    """The stack has run until Ctrl-C; the exit status. Nothing is left running."""
    try:
        return asyncio.run(_up(file, port=port, engines=engines, steering=steering))
    except LlmgwError as error:
        sys.stderr.write(f"{error}\n")
        return 1


async def _up(
    file: Path | None, *, port: int | None, engines: int, steering: Steering | None
) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with AsyncExitStack() as exits:
        if file is None:
            file = await _simulated(engines, exits)
        say_line(f"starting the service and Envoy for {file}")
        stack = Stack(
            file,
            port=port,
            steering=steering,
            service_says=say_line,
            # What Envoy says about being told to stop is no news.
            envoy_says=lambda line: None if stopped.is_set() else say_line(f"envoy: {line}"),
            has_request_log=True,
        )
        await exits.enter_async_context(stack)
        _greet(stack)
        ends = [
            asyncio.create_task(stopped.wait()),
            asyncio.create_task(stack.service.wait()),
            asyncio.create_task(stack.envoy.wait()),
        ]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        was_asked = stopped.is_set()
        say_line("stopping" if was_asked else "a process has ended; stopping the others")
        for end in ends[:1]:
            end.cancel()
    return 0 if was_asked else 1


async def _simulated(count: int, exits: AsyncExitStack) -> Path:
    """A configuration file for `count` simulated engines that run until the stack is left."""
    folder = Path(tempfile.mkdtemp(prefix="llmgw-engines-"))
    exits.callback(shutil.rmtree, folder, ignore_errors=True)
    names = [chr(ord("a") + index) if count <= 26 else f"engine-{index}" for index in range(count)]
    ports = [free_port() for _ in names]
    for name, port in zip(names, ports, strict=True):
        engine = Child(
            f"engine {name}",
            [
                sys.executable,
                "-m",
                "extproc.lab.engine_main",
                f"--name={name}",
                f"--port={port}",
                f"--models={MODEL}",
                "--die-with-parent",
            ],
        )
        await engine.start()
        exits.push_async_callback(engine.stop)
        await engine.until(lambda lines=engine.lines: bool(lines), 30)  # type: ignore[misc]  # binds this round's lines
    file = folder / "llmgw.yaml"
    file.write_text(
        "cluster_id: local\nendpoints:\n"
        + "".join(
            f"  - {{id: {name}, url: 'http://127.0.0.1:{port}', models: [{MODEL}]}}\n"
            for name, port in zip(names, ports, strict=True)
        )
    )
    say_line(f"{count} simulated engines run: {', '.join(names)}")
    return file


def _greet(stack: Stack) -> None:
    """The address and a command to paste are on the screen."""
    models = [entry.name for entry in stack.config.models]
    body = f'{{"model": "{models[0]}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    say_line(f"ready: {stack.url}/v1  models: {', '.join(models)}")
    say_line(f"metrics: {stack.service_url}/metrics  Envoy admin: {stack.admin_url}")
    say_line(
        f"try:  curl {stack.url}/v1/chat/completions -H 'content-type: application/json' "
        f"-d {shlex.quote(body)}"
    )
    say_line("Ctrl-C ends everything.")


def say_line(line: str) -> None:
    """The line is on the screen."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
