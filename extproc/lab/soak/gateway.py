"""The stack under test: Envoy, the service, engines of two kinds, and hands on all of them."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Final, Self

import aiohttp

from extproc import clusters
from extproc.config.values import Config
from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine
from extproc.lab.soak.asking import LONE_MODEL, MODEL
from extproc.lab.soak.canned import Canned
from extproc.lab.soak.relay import Relay
from extproc.lab.soak.troubles import (
    BREAKER_MAX_SECONDS,
    FAULTS,
    HEADER_DEADLINE_SECONDS,
    LONE_ENGINE,
    STRUCK,
    Episode,
    Trouble,
)
from extproc.lab.stack import Stack
from extproc.routing.endpoint import BreakerState
from extproc.xds.bootstrap import bootstrap
from extproc.xds.render import to_yaml
from extproc.xds.service_cluster import service_cluster
from extproc.xds.tree import Tree

INFLIGHT: Final = "llmgw_endpoint_inflight"
STREAMS: Final = "llmgw_ext_proc_streams"
BREAKER: Final = "llmgw_endpoint_breaker"
EXCLUDED: Final = "llmgw_endpoint_excluded"
DEFECTS: Final = (
    "llmgw_exchange_errors_total",
    "llmgw_actions_refused_total",
    "llmgw_unreadable_messages_total",
)
_CANNED: Final = ("a", "b")
_FAST: Final = EngineSettings(
    max_running=1000, prefill_tokens_per_second=1e7, decode_tokens_per_second=2000.0
)
_SAMPLE: Final = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
_RSS: Final = re.compile(r"^VmRSS:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sample:
    """One number of the metrics page."""

    name: str
    labels: Mapping[str, str]
    value: float

    @property
    def endpoint(self) -> str:
        """Which endpoint it is about; empty for none."""
        return self.labels.get("endpoint", "")


class _Stack(Stack):
    """A stack whose Envoy writes its log to a socket of its own."""

    @property
    def log_socket(self) -> Path:
        """Where Envoy finds the access-log service."""
        return self.folder / "log.sock"

    def envoy_config(self) -> str:
        """The usual one but for that address."""
        own = replace(self.config.service, envoy_address=f"unix:{self.log_socket}")
        log = service_cluster(clusters.ACCESS_LOG, own)
        tree = bootstrap(self.config, self.config.steering)
        return to_yaml(_with_cluster(tree, log))


class Gateway:
    """Entered, everything runs; `do` makes a trouble and takes it back when it has lasted."""

    def __init__(self, *, concurrency: int) -> None:
        self.canned = [Canned(name) for name in _CANNED]
        self.struck = {
            name: LabEngine(
                name,
                (MODEL, LONE_MODEL) if name == LONE_ENGINE else (MODEL,),
                settings=_FAST,
                output_tokens=2,
            )
            for name in STRUCK
        }
        self.generation = 0  # of the service's process
        self._concurrency = concurrency
        self._exits = AsyncExitStack()
        self._stack: _Stack | None = None
        self._relay: Relay | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def stack(self) -> Stack:
        """What runs."""
        if self._stack is None:
            raise RuntimeError("the gateway is not entered")
        return self._stack

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._exits.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._exits.aclose()

    async def _start(self) -> None:
        folder = Path(self._exits.enter_context(TemporaryDirectory(prefix="llmgw-soak-")))
        for canned in self.canned:
            await self._exits.enter_async_context(canned)
        for engine in self.struck.values():
            await self._exits.enter_async_context(engine)
        file = folder / "llmgw.yaml"
        file.write_text(self._text())
        self._session = await self._exits.enter_async_context(aiohttp.ClientSession())
        stack = _Stack(file, port=0, concurrency=self._concurrency)
        self._stack = stack
        relay = Relay(stack.log_socket, self._socket)
        self._relay = relay
        await relay.open()
        self._exits.push_async_callback(relay.lose)
        await self._exits.enter_async_context(stack)

    def _text(self) -> str:
        lines = [
            f"  - {{id: {one.name}, url: '{one.url}', models: [{MODEL}], engine: none}}"
            for one in self.canned
        ]
        lines += [
            f"  - {{id: {one.name}, url: '{one.url}', models: [{', '.join(one.options.models)}]}}"
            for one in self.struck.values()
        ]
        return (
            "cluster_id: soak\n"
            f"listener: {{header_deadline_seconds: {HEADER_DEADLINE_SECONDS:g},"
            " idle_timeout_seconds: 60}\n"
            f"breaker: {{base_seconds: 0.5, max_seconds: {BREAKER_MAX_SECONDS:g}}}\n"
            "service: {drain_seconds: 1}\n"
            "endpoints:\n" + "\n".join(lines) + "\n"
        )

    # Troubles.

    async def do(self, episode: Episode) -> None:
        """The trouble has come, lasted, and gone."""
        if episode.engine is not None:
            engine = self.struck[episode.engine]
            engine.inject(FAULTS[episode.trouble])
            await asyncio.sleep(episode.seconds)
            await engine.heal()
            return
        service = self.stack.service
        match episode.trouble:
            case Trouble.SERVICE_KILLED:
                await service.kill()
                await asyncio.sleep(episode.seconds)
                await self._start_service()
            case Trouble.SERVICE_RESTARTED:
                await service.stop()
                await self._start_service()
            case Trouble.SOCKET_REMOVED:
                self._socket.unlink(missing_ok=True)
                await asyncio.sleep(episode.seconds)
                await service.kill()
                await self._start_service()
            case Trouble.SERVICE_FROZEN:
                service.send(signal.SIGSTOP)
                await asyncio.sleep(episode.seconds)
                service.send(signal.SIGCONT)
            case Trouble.LOG_LOST:
                if self._relay is not None:
                    await self._relay.lose()
                    await asyncio.sleep(episode.seconds)
                    await self._relay.open()
            case _:
                raise ValueError(f"{episode.trouble} strikes an engine")

    async def _start_service(self) -> None:
        self.generation += 1
        await self.stack.start_service()

    @property
    def _socket(self) -> Path:
        return Path(self.stack.config.service.address.removeprefix("unix:"))

    @property
    def config(self) -> Config:
        """What runs, as a configuration."""
        return self.stack.config

    # Looking.

    async def metrics(self) -> list[Sample]:
        """Every sample; none while the service does not answer."""
        if self._session is None:
            return []
        try:
            async with self._session.get(
                f"{self.stack.service_url}/metrics", timeout=aiohttp.ClientTimeout(total=5)
            ) as response:
                text = await response.text()
        except (OSError, aiohttp.ClientError, TimeoutError):
            return []
        return [
            Sample(name, dict(_LABEL.findall(labels)), float(value))
            for name, labels, value in _SAMPLE.findall(text)
        ]

    async def inflight(self) -> dict[str, int]:
        """What the service counts in flight, by endpoint."""
        return inflight(await self.metrics())

    def rss(self) -> tuple[int | None, int | None]:
        """The resident bytes of the service and of Envoy; None for one that does not run."""
        stack = self.stack
        return (
            _rss(stack.service.pid) if stack.service.is_running else None,
            _rss(stack.envoy.pid) if stack.envoy.is_running else None,
        )

    # Holding.

    def hold(self) -> None:
        """No engine finishes an answer."""
        for one in self._held():
            one.hold()

    def release(self) -> None:
        """All engines go on."""
        for one in self._held():
            one.release()

    def _held(self) -> list[Canned | LabEngine]:
        return [*self.canned, *self.struck.values()]


def inflight(samples: Sequence[Sample]) -> dict[str, int]:
    """What a page shows in flight, by endpoint."""
    return {one.endpoint: round(one.value) for one in samples if one.name == INFLIGHT}


def is_welcome(samples: Sequence[Sample]) -> bool:
    """Whether a page shows every endpoint in use: none left out, and every breaker closed."""
    closed = [
        one.value
        for one in samples
        if one.name == BREAKER and one.labels["state"] == BreakerState.CLOSED
    ]
    left_out = sum(one.value for one in samples if one.name == EXCLUDED)
    return bool(closed) and all(closed) and not left_out


def _rss(pid: int) -> int | None:
    try:
        found = _RSS.search(Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024


def _with_cluster(tree: Tree, cluster: Tree) -> Tree:
    """`tree` with `cluster` in the place of the one that has its name."""
    resources = tree["static_resources"]
    if not isinstance(resources, Mapping):
        raise TypeError("the rendered Envoy has no static resources")
    known = resources["clusters"]
    if not isinstance(known, Sequence):
        raise TypeError("the rendered Envoy has no clusters")
    name = cluster["name"]
    found = [cluster if isinstance(one, Mapping) and one["name"] == name else one for one in known]
    return {**tree, "static_resources": {**resources, "clusters": found}}
