"""Envoy and the service as child processes on one configuration, for people and for tests."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import aiohttp

from extproc.config.read import read
from extproc.config.values import Config, Steering
from extproc.lab.envoy import find_envoy
from extproc.lab.processes import Child, Say, free_port
from extproc.xds.render import render

_START_SECONDS: Final = 30.0
_PYTHON: Final = (sys.executable, "-m")


class Stack:
    """Envoy in front of the service, in front of the endpoints that a configuration file names.

    The service's socket is in a folder of its own, so that several stacks never meet; `port`
    overrides the file's, and 0 takes a free one. Envoy's admin port is always a free one.
    `runtime` has keys of Envoy's runtime, for switches that its configuration does not have.
    """

    def __init__(
        self,
        file: Path,
        *,
        port: int | None = None,
        steering: Steering | None = None,
        service_says: Say | None = None,
        envoy_says: Say | None = None,
        has_request_log: bool = False,
        concurrency: int = 2,
        runtime: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="llmgw-"))
        config = read(file)
        if steering is not None:
            config = replace(config, steering=steering)
        wanted = config.listener.port if port is None else port
        listener = replace(
            config.listener,
            port=wanted or free_port(config.listener.host),
            admin_host="127.0.0.1",
            admin_port=free_port(),
        )
        service = replace(
            config.service,
            address=f"unix:{self.folder}/ext-proc.sock",
            envoy_address=None,
            http_address=f"127.0.0.1:{free_port()}",
            tls=None,
        )
        self.config: Config = replace(config, listener=listener, service=service)
        self._file = file
        self.service = Child("the service", self._service_command(has_request_log), service_says)
        self.envoy = Child("Envoy", self._envoy_command(concurrency, runtime or {}), envoy_says)

    @property
    def url(self) -> str:
        """Where clients connect, without a slash at the end."""
        listener = self.config.listener
        host = "127.0.0.1" if listener.host == "0.0.0.0" else listener.host
        scheme = "http" if listener.tls_cert_file is None else "https"
        return f"{scheme}://{host}:{listener.port}"

    @property
    def service_url(self) -> str:
        """Where the service's /ready and /metrics are."""
        return f"http://{self.config.service.http_address}"

    @property
    def admin_url(self) -> str:
        """Envoy's administration interface."""
        return f"http://127.0.0.1:{self.config.listener.admin_port}"

    async def start(self) -> None:
        """Envoy takes requests and the service is ready.

        Raises:
            ChildFailed: one of them did not start.
        """
        await self.start_service()
        (self.folder / "envoy.yaml").write_text(self.envoy_config())
        await self.envoy.start()
        await _until_answers(self.envoy, f"{self.admin_url}/ready")

    def envoy_config(self) -> str:
        """What Envoy is started with."""
        return render(self.config)

    async def start_service(self) -> None:
        """The service runs and is ready, for the first time or again."""
        await self.service.start()
        await _until_answers(self.service, f"{self.service_url}/ready")

    async def stop(self) -> None:
        """Nothing runs any more and nothing is left on the disk."""
        await self.envoy.stop()
        await self.service.kill()  # with Envoy gone there is nobody to drain for
        shutil.rmtree(self.folder, ignore_errors=True)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    def _service_command(self, has_request_log: bool) -> list[str]:  # noqa: FBT001 - an option passed on
        service = self.config.service
        return [
            *_PYTHON,
            "extproc.cli.llmgw",
            "serve",
            f"--config={self._file}",
            f"--address={service.address}",
            f"--http-address={service.http_address}",
            f"--steering={self.config.steering}",
            *(["--request-log"] if has_request_log else []),
        ]

    def _envoy_command(self, concurrency: int, runtime: Mapping[str, str]) -> list[str]:
        layer = {"name": "stack", "static_layer": dict(runtime)}
        # Envoy merges this into the file: its layer is put above those that are there.
        overlay = json.dumps({"layered_runtime": {"layers": [layer]}})
        return [
            str(find_envoy()),
            # Envoy's parser takes no `--name=value`.
            *("--config-path", f"{self.folder}/envoy.yaml"),
            *("--concurrency", str(concurrency)),
            *("--log-level", "warning"),
            *(("--config-yaml", overlay) if runtime else ()),
            "--disable-hot-restart",
        ]


async def _until_answers(child: Child, url: str) -> None:
    """A GET of `url` is answered with 200."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        answered = False

        async def ask() -> None:
            nonlocal answered
            while not answered:
                try:
                    async with session.get(url) as response:
                        answered = response.status == 200
                except (OSError, aiohttp.ClientError, TimeoutError):
                    answered = False
                if not answered:
                    await asyncio.sleep(0.05)

        asking = asyncio.create_task(ask())
        try:
            await child.until(lambda: answered, _START_SECONDS)
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
