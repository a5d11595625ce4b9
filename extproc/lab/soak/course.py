"""One run: clients that ask, troubles that come and go, and what is left at the end."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

from extproc.lab.soak.account import Account, Memory, Verdict
from extproc.lab.soak.asking import MODEL, Ask, Plan, plan
from extproc.lab.soak.gateway import DEFECTS, STREAMS, Gateway, inflight, is_welcome
from extproc.lab.soak.http1 import Http1
from extproc.lab.soak.http2 import Http2
from extproc.lab.soak.troubles import Episode, Window, schedule

NEXT: Final = 300
_SETTLE_SECONDS: Final = 30.0
# An old trouble cannot have to do with a new request: its window is looked at no longer.
_KEPT_SECONDS: Final = 90.0
_WARM_UP_RATIO: Final = 0.1
_MEGABYTE: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run is: the same seed has the same troubles at the same requests."""

    requests: int = 100_000
    seed: int = 1
    clients: int = 48
    http2_connections: int = 2
    http2_share: float = 0.25
    leaving_ratio: float = 0.1
    interval_seconds: float = 5.0
    concurrency: int = 2


@dataclass(slots=True)
class _Progress:
    """What is going on."""

    account: Account = field(default_factory=Account)
    begun: int = 0
    windows: deque[Window] = field(default_factory=deque)
    troubles: Counter[str] = field(default_factory=Counter)
    defects: Counter[str] = field(default_factory=Counter)
    service: list[tuple[int, int, int]] = field(default_factory=list)  # generation first
    envoy: list[tuple[int, int]] = field(default_factory=list)
    current: str = ""


class Course:
    """A run on a gateway that stands; `say` is given a line for each interval."""

    def __init__(self, gateway: Gateway, settings: Settings, say: Callable[[str], None]) -> None:
        self._gateway = gateway
        self._settings = settings
        self._say = say
        self._progress = _Progress()
        self._moved = asyncio.Event()
        self._began = 0.0

    async def run(self) -> Verdict:
        """Everything has been asked, and what is left over has been looked at."""
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        watching = asyncio.create_task(self._watch())
        striking = asyncio.create_task(self._strike())
        try:
            await self._ask_all()
            await striking
        finally:
            for task in (watching, striking):
                task.cancel()
            await asyncio.gather(watching, striking, return_exceptions=True)
        seconds = loop.time() - self._began
        # Breakers close again, so that the next requests find every endpoint.
        held, streams = await self._settled()
        await self._look()
        spread = await self._spread()
        settled, more_streams = await self._settled()
        progress = self._progress
        return Verdict(
            progress.account,
            seconds,
            progress.troubles,
            {name: held.get(name, 0) + number for name, number in settled.items()},
            {name: progress.defects[name] for name in DEFECTS},
            streams + more_streams,
            self._service_memory(),
            Memory(_warm(progress.envoy, 0, self._settings.requests)),
            spread,
            frozenset(canned.name for canned in self._gateway.canned),
        )

    # Asking.

    async def _ask_all(self) -> None:
        settings = self._settings
        listener = self._gateway.config.listener
        random = Random(settings.seed)  # noqa: S311 - not for secrets
        shared = [Http2(listener.host, listener.port) for _ in range(settings.http2_connections)]
        over_http2 = round(settings.clients * settings.http2_share)
        async with asyncio.TaskGroup() as group:
            for number in range(settings.clients):
                own = Random(random.getrandbits(64))  # noqa: S311 - not for secrets
                client: Http1 | Http2 = (
                    shared[number % len(shared)]
                    if number < over_http2
                    else Http1(listener.host, listener.port, own)
                )
                group.create_task(self._ask(client, own))
        for one in shared:
            one.drop()

    async def _ask(self, client: Http1 | Http2, random: Random) -> None:
        progress = self._progress
        while progress.begun < self._settings.requests:
            progress.begun += 1
            result = await client.ask(plan(random, self._settings.leaving_ratio))
            progress.account.add(result, progress.windows)
            self._moved.set()
        if isinstance(client, Http1):
            client.drop()

    # Troubles.

    async def _strike(self) -> None:
        """Every episode of the schedule has been, each when its time has come."""
        progress = self._progress
        random = Random(self._settings.seed)  # noqa: S311 - not for secrets
        for episode in schedule(self._settings.requests, random):
            while progress.account.requests < episode.after:
                await self._moved.wait()
                self._moved.clear()
            if progress.begun >= self._settings.requests:
                return  # a slow machine: what comes now strikes nobody
            await self._carry_out(episode)

    async def _carry_out(self, episode: Episode) -> None:
        loop = asyncio.get_running_loop()
        progress = self._progress
        window = Window(episode, loop.time())
        while progress.windows and progress.windows[0].ended < window.began - _KEPT_SECONDS:
            progress.windows.popleft()
        progress.windows.append(window)
        progress.current = f"{episode.trouble}{f' ({episode.engine})' if episode.engine else ''}"
        if episode.trouble.ends_process:
            await self._count_defects()
        await self._gateway.do(episode)
        progress.windows[-1] = replace(window, ended=loop.time())
        progress.troubles[episode.trouble] += 1
        progress.current = ""

    # Looking.

    async def _watch(self) -> None:
        """A line is said in every interval, and memory is noted."""
        while True:
            await asyncio.sleep(self._settings.interval_seconds)
            await self._look()

    async def _look(self) -> None:
        progress = self._progress
        samples = await self._gateway.metrics()
        held = sum(inflight(samples).values())
        service, envoy = self._gateway.rss()
        done = progress.account.requests
        if service is not None and samples:
            progress.service.append((self._gateway.generation, done, service))
        if envoy is not None:
            progress.envoy.append((done, envoy))
        seconds = asyncio.get_running_loop().time() - self._began
        self._say(
            f"{seconds:6.0f} s  {done:>8} requests  in flight {held if samples else '-':>4}"
            f"  service {_megabytes(service)}  Envoy {_megabytes(envoy)}"
            f"  errors: {progress.account.brief()}"
            + (f"  now: {progress.current}" if progress.current else "")
        )

    async def _count_defects(self) -> None:
        """What this process counts of its own defects is added, for it goes away."""
        for one in await self._gateway.metrics():
            if one.name in DEFECTS:
                self._progress.defects[one.name] += round(one.value)

    def _service_memory(self) -> Memory:
        """Of the last process, once it is warm."""
        last = self._gateway.generation
        samples = [(done, size) for number, done, size in self._progress.service if number == last]
        return Memory(_warm(samples, samples[0][0] if samples else 0, self._settings.requests))

    async def _settled(self) -> tuple[dict[str, int], int]:
        """In-flight by endpoint and open streams, once they are 0 or have had their time to be."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SETTLE_SECONDS
        while True:
            samples = await self._gateway.metrics()
            held = inflight(samples)
            streams = round(sum(one.value for one in samples if one.name == STREAMS))
            is_settled = bool(held) and not any(held.values()) and not streams
            if is_settled or loop.time() > deadline:
                return held, streams
            await asyncio.sleep(0.1)

    async def _spread(self) -> dict[str, int]:
        """Where the next requests are, all held at once; then all are answered."""
        await self._until_welcome()
        listener = self._gateway.config.listener
        body = f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"next"}}]}}'.encode()
        kind = ("content-type", "application/json")
        asked = Plan(Ask.IN_BODY, "POST", "/v1/chat/completions", (kind,), body)
        clients = [Http1(listener.host, listener.port, Random(0)) for _ in range(NEXT)]  # noqa: S311 - not for secrets
        self._gateway.hold()
        try:
            asking = [asyncio.create_task(client.ask(asked)) for client in clients]
            deadline = asyncio.get_running_loop().time() + _SETTLE_SECONDS
            found: dict[str, int] = {}
            while asyncio.get_running_loop().time() < deadline:
                found = await self._gateway.inflight()
                if sum(found.values()) >= NEXT:
                    break
                await asyncio.sleep(0.05)
        finally:
            self._gateway.release()
        for result in await asyncio.gather(*asking):
            self._progress.account.add(result, ())
        for client in clients:
            client.drop()
        await self._count_defects()
        return found

    async def _until_welcome(self) -> None:
        """No endpoint is left out for what it did: a few good requests close every breaker."""
        loop = asyncio.get_running_loop()
        listener = self._gateway.config.listener
        random = Random(0)  # noqa: S311 - not for secrets
        client = Http1(listener.host, listener.port, random)
        deadline = loop.time() + _SETTLE_SECONDS
        while not is_welcome(await self._gateway.metrics()) and loop.time() < deadline:
            for _ in range(50):
                await client.ask(plan(random, 0.0))
        client.drop()


def _warm(samples: list[tuple[int, int]], since: int, requests: int) -> list[tuple[int, int]]:
    """The samples after the first tenth of what a process has served; at least the last one."""
    begin = since + _WARM_UP_RATIO * (requests - since)
    return [one for one in samples if one[0] >= begin] or samples[-1:] or [(0, 1)]


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / _MEGABYTE:.0f} MB"
