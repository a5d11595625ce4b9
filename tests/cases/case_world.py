"""What the cases share: Envoy, the service and engines on a configuration, and how to read them.

A test file is one case. It starts with `pytestmark = case(NN)`, and its stack comes from
`standing`, whose configuration is text with `$name` where an engine's URL belongs:

    CONFIG = '''
    endpoints:
      - {id: a, url: "$a", models: [m]}
    '''
    async with standing(tmp_path, CONFIG, LabEngine("a")) as world:
        reply = await world.post(model="m")
        await world.until_idle()

Raw clients are in `case_http1` and `case_http2`, Envoy's side of ext_proc in `case_grpc`, bodies
of every size and kind in `case_bodies`.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from string import Template
from typing import Final

import aiohttp
import pytest
from case_bodies import chat
from case_grpc import Processor, processor
from case_http1 import CHAT, SECONDS, Framing, Http1, Pairs, Reply
from case_http2 import Http2
from prometheus_client.parser import text_string_to_metric_families

from extproc.config.values import Steering
from extproc.lab.engine_http import LabEngine
from extproc.lab.stack import Stack

MODEL: Final = "m"
_POLL_SECONDS: Final = 0.02
_NUMBERS: Final = count()

INFLIGHT: Final = "llmgw_endpoint_inflight"
ATTEMPTS: Final = "llmgw_attempts_total"
DISPATCHED: Final = "llmgw_requests_dispatched_total"
REFUSED: Final = "llmgw_requests_refused_total"
FAILED_OPEN: Final = "llmgw_failed_open_total"
EXCLUDED: Final = "llmgw_endpoint_excluded"
STREAMS: Final = "llmgw_ext_proc_streams"
DURATIONS: Final = "llmgw_request_duration_seconds_count"
TIMES_TO_HEADERS: Final = "llmgw_time_to_response_headers_seconds_count"

# What only a defect of the service makes grow.
DEFECTS: Final = (
    "llmgw_exchange_errors_total",
    "llmgw_actions_refused_total",
    "llmgw_unreadable_messages_total",
)

# A line of the request log: model, path, the endpoints in the order tried, the status.
_DECIDED: Final = re.compile(r"^(.+) (/\S*) -> (\S+(?: > \S+)*) (no answer|\d+) [\d.]+ s$")


def case(number: int) -> list[pytest.MarkDecorator]:
    """The marks of a test file that is the case of this number."""
    return [
        pytest.mark.case(number),
        pytest.mark.envoy,
        pytest.mark.asyncio(loop_scope="module"),
    ]


@dataclass(frozen=True, slots=True)
class Page:
    """A metrics page at one moment."""

    samples: Sequence[tuple[str, Mapping[str, str], float]]

    def total(self, name: str, **labels: str) -> int:
        """The sum of a family's series that have these labels."""
        return round(self.value(name, **labels))

    def value(self, name: str, **labels: str) -> float:
        """The same, with its fraction."""
        return sum(
            value
            for sample, has, value in self.samples
            if sample == name and labels.items() <= has.items()
        )

    def attempts(self) -> dict[tuple[str, str], int]:
        """How many attempts came to what, by endpoint and outcome."""
        return {
            (labels["endpoint"], labels["outcome"]): round(value)
            for name, labels, value in self.samples
            if name == ATTEMPTS
        }


@dataclass(slots=True)
class World:
    """A running stack and the engines behind it, by name.

    `said` are the service's lines since its start, `booked` the metrics at the last `forget`.
    """

    stack: Stack
    engines: Mapping[str, LabEngine]
    session: aiohttp.ClientSession
    said: list[str]
    booked: Page = field(default_factory=lambda: Page(()))

    # Asking.

    @asynccontextmanager
    async def http1(self) -> AsyncIterator[Http1]:
        """A connection to Envoy that speaks HTTP/1.1."""
        connection = Http1(*await self._dial())
        try:
            yield connection
        finally:
            await connection.close()

    @asynccontextmanager
    async def http2(self) -> AsyncIterator[Http2]:
        """A connection to Envoy that speaks HTTP/2."""
        connection = Http2(*await self._dial())
        try:
            yield connection
        finally:
            await connection.close()

    @asynccontextmanager
    async def processor(self) -> AsyncIterator[Processor]:
        """A stream to the service in Envoy's place."""
        async with processor(self.stack.config.service.address) as stream:
            yield stream

    async def ask(
        self,
        method: str,
        path: str,
        pairs: Pairs = (),
        body: bytes | None = None,
        *,
        framing: Framing = Framing.LENGTH,
        seconds: float = SECONDS,
    ) -> Reply:
        """The answer to one request on a connection of its own."""
        async with self.http1() as connection:
            return await connection.ask(method, path, pairs, body, framing=framing, seconds=seconds)

    async def post(
        self,
        *pairs: tuple[str | bytes, str | bytes],
        model: str | None = MODEL,
        body: bytes | None = None,
        path: str = CHAT,
        framing: Framing = Framing.LENGTH,
        seconds: float = SECONDS,
    ) -> Reply:
        """The answer to a POST; its body is a small chat request unless given."""
        sent = chat(model) if body is None else body
        return await self.ask("POST", path, pairs, sent, framing=framing, seconds=seconds)

    # What was seen.

    def requests(self) -> dict[str, int]:
        """How many API requests each engine got since `forget`, zeros left out."""
        counts = {name: engine.counters.requests for name, engine in self.engines.items()}
        return {name: number for name, number in counts.items() if number}

    async def decided(self, count: int) -> list[tuple[str, ...]]:
        """The endpoints of `count` finished requests in the order tried, by the request log."""
        found: list[tuple[str, ...]] = []

        async def is_written() -> bool:
            lines = (_DECIDED.match(line) for line in self.said)
            found[:] = [tuple(one[3].split(" > ")) for one in lines if one is not None]
            return len(found) >= count

        await until(is_written, f"{count} lines in the request log")
        return found

    async def page(self) -> Page:
        """The service's metrics now."""
        async with self.session.get(f"{self.stack.service_url}/metrics") as response:
            assert response.status == 200
            text = await response.text()
        return Page(
            [
                (sample.name, sample.labels, sample.value)
                for metric in text_string_to_metric_families(text)
                for sample in metric.samples
            ]
        )

    async def envoy_stat(self, name: str) -> int:
        """The sum of Envoy's counters and gauges whose name ends so."""
        url = f"{self.stack.admin_url}/stats?filter={re.escape(name)}$"
        async with self.session.get(url) as response:
            assert response.status == 200
            lines = (await response.text()).splitlines()
        return sum(int(line.rpartition(": ")[2]) for line in lines)

    async def inflight(self) -> int:
        """How many requests the service counts in flight."""
        return (await self.page()).total(INFLIGHT)

    async def new(self, name: str, **labels: str) -> int:
        """By how much a counter has grown since `forget`."""
        return (await self.page()).total(name, **labels) - self.booked.total(name, **labels)

    async def new_attempts(self) -> dict[tuple[str, str], int]:
        """The attempts booked since `forget`, by endpoint and outcome."""
        before = self.booked.attempts()
        now = (await self.page()).attempts()
        grown = {key: number - before.get(key, 0) for key, number in now.items()}
        return {key: number for key, number in grown.items() if number}

    # Waiting.

    async def until_inflight(self, number: int, seconds: float = SECONDS) -> None:
        """So many requests are in flight."""

        async def is_reached() -> bool:
            return await self.inflight() == number

        await until(is_reached, f"{number} in flight", seconds)

    async def until_idle(self, seconds: float = 1.0) -> None:
        """Nothing is in flight any more; within a second, as is promised."""
        await self.until_inflight(0, seconds)

    async def until_attempts(self, expected: Mapping[tuple[str, str], int]) -> None:
        """Exactly these attempts have been booked since `forget`, by endpoint and outcome."""
        found: dict[tuple[str, str], int] = {}

        async def is_booked() -> bool:
            nonlocal found
            found = await self.new_attempts()
            return sum(found.values()) >= sum(expected.values())

        try:
            await until(is_booked, f"attempts {expected}")
        finally:
            assert found == dict(expected)

    async def until_all_welcome(self) -> None:
        """No endpoint is left out for what it did: no pause, no quarantine, no demotion."""

        async def is_welcome() -> bool:
            return (await self.page()).total(EXCLUDED) == 0

        await until(is_welcome, "no endpoint left out")

    async def until_outcomes(self, expected: Mapping[str, int]) -> None:
        """Exactly so many attempts of each outcome have been booked since `forget`, wherever."""
        found: Counter[str] = Counter()

        async def is_booked() -> bool:
            found.clear()
            for (_, outcome), number in (await self.new_attempts()).items():
                found[outcome] += number
            return found.total() >= sum(expected.values())

        try:
            await until(is_booked, f"outcomes {expected}")
        finally:
            assert found == dict(expected)

    async def forget(self, *, attempts: bool = False) -> None:
        """The service runs, all engines are sound, nothing is in flight, nothing is remembered.

        With `attempts`, the outcome of every attempt is booked as well; a success is booked a
        second after its end.
        """
        if not self.stack.service.is_running:
            await self.stack.start_service()
            self.booked = await self.page()
        for engine in self.engines.values():
            await engine.heal()
            engine.release()
        await self.until_idle(SECONDS)
        if attempts:
            await until(self._is_all_booked, "every attempt booked")
        self.booked = await self.page()
        self.said.clear()
        for engine in self.engines.values():
            engine.records.reset()

    async def _is_all_booked(self) -> bool:
        """Whether every request that the service sent on, or an engine saw, has its outcome."""
        page = await self.page()
        attempts = page.attempts()
        booked = self.booked.attempts()
        for name, seen in self.requests().items():
            new = sum(
                number - booked.get((where, outcome), 0)
                for (where, outcome), number in attempts.items()
                if where == name
            )
            if new < seen:
                return False
        return sum(attempts.values()) >= page.total(DISPATCHED) - page.total(FAILED_OPEN)

    # The service's own troubles.

    def freeze(self) -> None:
        """The service does nothing any more, and its sockets stay open."""
        self.stack.service.send(signal.SIGSTOP)

    def thaw(self) -> None:
        """The service goes on."""
        self.stack.service.send(signal.SIGCONT)

    def service_rss_bytes(self) -> int:
        """How much memory the service holds."""
        text = Path(f"/proc/{self.stack.service.pid}/status").read_text()
        found = re.search(r"^VmRSS:\s+(\d+) kB$", text, re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        listener = self.stack.config.listener
        return await asyncio.open_connection(listener.host, listener.port)


@asynccontextmanager
async def standing(
    folder: Path,
    text: str,
    *engines: LabEngine,
    steering: Steering | None = None,
    has_request_log: bool = False,
    concurrency: int = 2,
    runtime: Mapping[str, str] | None = None,
) -> AsyncIterator[World]:
    """Envoy and the service on the configuration `text`, with `engines` running behind them.

    `$name` in the text is the URL of the engine of that name; engines that the text does not
    mention run as well. `runtime` are Envoy's runtime keys. At the end the service has shown no
    defect, unless the test has ended it.
    """
    said: list[str] = []
    async with AsyncExitStack() as exits:
        for engine in engines:
            await exits.enter_async_context(engine)
        file = folder / f"{fresh('llmgw')}.yaml"
        written = Template(text).substitute({one.name: one.url for one in engines})
        file.write_text(_on_transport(written, os.environ.get("TRANSPORT")))
        stack = Stack(
            file,
            port=0,
            steering=steering,
            has_request_log=has_request_log,
            service_says=said.append,
            concurrency=concurrency,
            runtime=runtime,
        )
        session = await exits.enter_async_context(aiohttp.ClientSession())
        exits.push_async_callback(stack.stop)
        # Its notice of two seconds is for load balancers, which are not here.
        exits.push_async_callback(stack.service.kill)
        await stack.start()
        world = World(stack, {engine.name: engine for engine in engines}, session, said)
        world.booked = await world.page()
        yield world
        if stack.service.is_running:
            page = await world.page()
            assert {name: page.total(name) for name in DEFECTS} == dict.fromkeys(DEFECTS, 0)


def endpoints(*engines: str, models: str = MODEL, **keys: object) -> str:
    """The lines of a configuration for plain engines, each by its own name."""
    more = "".join(f", {key}: {value}" for key, value in keys.items())
    lines = [f'  - {{id: {name}, url: "${name}", models: [{models}]{more}}}' for name in engines]
    return "endpoints:\n" + "\n".join(lines) + "\n"


def fresh(what: str) -> str:
    """A name that no other test uses."""
    return f"{what}-{os.getpid()}-{next(_NUMBERS)}"


async def until(holds: Callable[[], Awaitable[bool]], what: str, seconds: float = SECONDS) -> None:
    """The condition holds, within `seconds`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not await holds():
        assert loop.time() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(_POLL_SECONDS)


async def together(asking: Iterable[Awaitable[Reply]]) -> list[Reply]:
    """All answers, asked for at the same time."""
    return list(await asyncio.gather(*asking))


def _on_transport(text: str, transport: str | None) -> str:
    """The configuration with the service's transport in it, if one is wanted; see `make grpcio`."""
    if not transport:
        return text
    begun = f"service: {{transport: {transport}"
    changed, count = re.subn(r"^service: \{", f"{begun}, ", text, flags=re.MULTILINE)
    return changed if count else f"{begun}}}\n{text}"
