"""What the end-to-end tests share: a running stack, its engines, its metrics and a raw client."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, AsyncStream, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam
from prometheus_client.parser import text_string_to_metric_families

from extproc.config.values import Steering
from extproc.lab.engine_http import LabEngine
from extproc.lab.stack import Stack

CHAT: Final = "/v1/chat/completions"
MODEL: Final = "m"
HELLO: Final[list[ChatCompletionMessageParam]] = [{"role": "user", "content": "hello"}]
SECONDS: Final = 10.0
CLIENT_KEY: Final = "sk-of-the-client"
_POLL_SECONDS: Final = 0.02
_NUMBERS: Final = count()

INFLIGHT: Final = "llmgw_endpoint_inflight"
ATTEMPTS: Final = "llmgw_attempts_total"
DISPATCHED: Final = "llmgw_requests_dispatched_total"
FAILED_OPEN: Final = "llmgw_failed_open_total"
STREAMS: Final = "llmgw_ext_proc_streams"
# What only a defect of the service makes grow.
DEFECTS: Final = (
    "llmgw_exchange_errors_total",
    "llmgw_actions_refused_total",
    "llmgw_unreadable_messages_total",
)


class _Error(msgspec.Struct, forbid_unknown_fields=True):
    message: str
    type: str
    param: str | None
    code: str | None


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    error: _Error


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer as it came; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def error(self) -> _Error:
        """What is in OpenAI's error envelope; a body that is none is an error of the test."""
        assert self.headers["content-type"] == "application/json", self
        return msgspec.json.decode(self.body, type=_Envelope).error


@dataclass(frozen=True, slots=True)
class Page:
    """The service's metrics at one moment."""

    samples: Sequence[tuple[str, Mapping[str, str], float]]

    def total(self, name: str, **labels: str) -> int:
        """The sum of a family's series that have these labels."""
        return round(
            sum(
                value
                for sample, has, value in self.samples
                if sample == name and labels.items() <= has.items()
            )
        )

    def attempts(self) -> dict[tuple[str, str], int]:
        """How many attempts came to what, by endpoint and outcome."""
        return {
            (labels["endpoint"], labels["outcome"]): round(value)
            for name, labels, value in self.samples
            if name == ATTEMPTS
        }


class Connection:
    """One HTTP/1.1 connection on which bytes are sent as they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        """The bytes are on their way."""
        self._writer.write(data)
        await self._writer.drain()

    async def send_head(
        self, method: str, path: str, extra: Iterable[tuple[str, str]], length: int | None
    ) -> None:
        """The request line and headers are sent; `length` None is a request without a body."""
        lines = [f"{method} {path} HTTP/1.1", "host: gateway"]
        if length is not None:
            lines += ["content-type: application/json", f"content-length: {length}"]
        lines += [f"{name}: {value}" for name, value in extra]
        await self.send(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))

    async def answer(self) -> Reply:
        """The next answer, in full."""
        async with asyncio.timeout(SECONDS):
            status, found = await self.head()
            if found.get("transfer-encoding") == "chunked":
                body = b""
                while size := int(await self._reader.readuntil(b"\r\n"), 16):
                    body += (await self._reader.readexactly(size + 2))[:-2]
                await self._reader.readuntil(b"\r\n")
            else:
                body = await self._reader.readexactly(int(found.get("content-length", "0")))
            return Reply(status, found, body)

    async def head(self) -> tuple[int, Mapping[str, str]]:
        """The next answer's status and headers."""
        async with asyncio.timeout(SECONDS):
            raw = await self._reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").strip().split("\r\n")
        pairs = (line.partition(":") for line in lines)
        return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}

    async def close(self) -> None:
        """The connection is closed, whatever was on it."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return  # the other side was quicker


@dataclass(slots=True)
class World:
    """A running stack and the engines behind it, by the name that is their endpoint's id."""

    stack: Stack
    engines: Mapping[str, LabEngine]
    _session: aiohttp.ClientSession
    _booked: Page = field(default_factory=lambda: Page(()))
    _overlooked: Counter[tuple[str, str]] = field(default_factory=Counter)

    @asynccontextmanager
    async def openai(self) -> AsyncIterator[AsyncOpenAI]:
        """The asynchronous client; it never retries by itself."""
        async with AsyncOpenAI(
            base_url=f"{self.stack.url}/v1", api_key=CLIENT_KEY, max_retries=0, timeout=30.0
        ) as client:
            yield client

    def blocking_openai(self) -> OpenAI:
        """The synchronous client, for a thread of its own."""
        return OpenAI(
            base_url=f"{self.stack.url}/v1", api_key=CLIENT_KEY, max_retries=0, timeout=30.0
        )

    @asynccontextmanager
    async def anthropic(self) -> AsyncIterator[AsyncAnthropic]:
        """Anthropic's asynchronous client; it never retries by itself."""
        async with AsyncAnthropic(
            base_url=self.stack.url, api_key=CLIENT_KEY, max_retries=0, timeout=30.0
        ) as client:
            yield client

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Connection]:
        """A connection to Envoy."""
        listener = self.stack.config.listener
        connection = Connection(*await asyncio.open_connection(listener.host, listener.port))
        try:
            yield connection
        finally:
            await connection.close()

    async def ask(
        self,
        method: str,
        path: str,
        extra: Iterable[tuple[str, str]] = (),
        body: bytes | None = None,
    ) -> Reply:
        """The answer to one request on a connection of its own; the path is sent as it is."""
        async with self.connected() as connection:
            await connection.send_head(method, path, extra, None if body is None else len(body))
            if body:
                await connection.send(body)
            return await connection.answer()

    async def post(self, *extra: tuple[str, str], model: str = MODEL, **fields: object) -> Reply:
        """The answer to a small chat request."""
        return await self.ask("POST", CHAT, extra, chat_body(model, **fields))

    def requests(self) -> dict[str, int]:
        """How many API requests each engine got, zeros left out."""
        counts = {name: engine.counters.requests for name, engine in self.engines.items()}
        return {name: number for name, number in counts.items() if number}

    async def page(self) -> Page:
        """The service's metrics now."""
        async with self._session.get(f"{self.stack.service_url}/metrics") as response:
            assert response.status == 200
            text = await response.text()
        return Page(
            [
                (sample.name, sample.labels, sample.value)
                for metric in text_string_to_metric_families(text)
                for sample in metric.samples
            ]
        )

    async def inflight(self) -> int:
        """How many requests the service counts in flight."""
        return (await self.page()).total(INFLIGHT)

    async def until_idle(self, seconds: float = 1.0) -> None:
        """Nothing is in flight any more."""

        async def is_idle() -> bool:
            return await self.inflight() == 0

        await until(is_idle, "nothing in flight", seconds)

    async def until_attempts(self, expected: Mapping[tuple[str, str], int]) -> None:
        """Exactly these attempts have been booked since `forget`, by endpoint and outcome."""
        found: dict[tuple[str, str], int] = {}
        wanted = self._overlooked + Counter(expected)

        async def is_booked() -> bool:
            nonlocal found
            found = await self.new_attempts()
            return sum(found.values()) >= wanted.total()

        try:
            await until(is_booked, f"attempts {wanted}")
        finally:
            assert found == dict(wanted)

    async def new_attempts(self) -> dict[tuple[str, str], int]:
        """The attempts booked since `forget`, by endpoint and outcome."""
        before = self._booked.attempts()
        now = (await self.page()).attempts()
        new = {key: number - before.get(key, 0) for key, number in now.items()}
        return {key: number for key, number in new.items() if number}

    async def forget(self, *, attempts: bool = False) -> None:
        """The service runs, all engines are sound, nothing is in flight, nothing has been seen.

        With `attempts`, every attempt that an engine has seen is booked as well; a success is a
        second after its end.
        """
        if not self.stack.service.is_running:
            await self.stack.start_service()
        for engine in self.engines.values():
            await engine.heal()
            engine.release()
        await self.until_idle(SECONDS)
        if attempts:
            await until(self._is_all_booked, "every attempt booked")
        self._booked = await self.page()
        self.overlook()
        self._overlooked.clear()

    def overlook(self) -> None:
        """The engines have seen nothing; what they had seen is a success each, booked or not."""
        for name, number in self.requests().items():
            self._overlooked[name, "success"] += number
        for engine in self.engines.values():
            engine.records.reset()

    async def _is_all_booked(self) -> bool:
        """Whether each attempt that an engine has seen has its outcome."""
        booked = await self.new_attempts()
        seen = Counter(self.requests())
        for (name, _), number in self._overlooked.items():
            seen[name] += number
        for (name, _), number in booked.items():
            seen[name] -= number
        return all(number <= 0 for number in seen.values())


@asynccontextmanager
async def standing(
    folder: Path,
    engines: Sequence[LabEngine],
    *,
    endpoints: Mapping[str, Mapping[str, object]] | None = None,
    steering: Steering | None = None,
    **settings: object,
) -> AsyncIterator[World]:
    """Envoy and the service in front of `engines`.

    Each engine is an endpoint of its own name; `endpoints` has further keys for some, by that name.
    `settings` are further keys of the configuration file.
    """
    async with AsyncExitStack() as exits:
        for engine in engines:
            await exits.enter_async_context(engine)
        file = folder / "llmgw.yaml"
        listed = [
            {
                "id": engine.name,
                "url": engine.url,
                "models": list(engine.options.models),
                **(endpoints or {}).get(engine.name, {}),
            }
            for engine in engines
        ]
        tree = {"cluster_id": "e2e", "endpoints": listed, **settings}
        if transport := os.environ.get("TRANSPORT"):  # see `make grpcio`
            service = settings.get("service", {})
            assert isinstance(service, dict)
            tree["service"] = {**service, "transport": transport}
        # JSON is YAML.
        file.write_text(json.dumps(tree))
        stack = Stack(file, port=0, steering=steering)
        session = await exits.enter_async_context(aiohttp.ClientSession())
        exits.push_async_callback(stack.stop)
        # Its notice of two seconds is for load balancers, which are not here.
        exits.push_async_callback(stack.service.kill)
        await stack.start()
        world = World(stack, {engine.name: engine for engine in engines}, session)
        yield world
        if stack.service.is_running:
            page = await world.page()
            assert {name: page.total(name) for name in DEFECTS} == dict.fromkeys(DEFECTS, 0)


def chat_body(model: str | None = MODEL, **fields: object) -> bytes:
    """The body of a small chat request."""
    named = {} if model is None else {"model": model}
    return json.dumps({**named, "messages": HELLO, "max_tokens": 4, **fields}).encode()


async def chat(
    client: AsyncOpenAI, session: str | None = None, model: str = MODEL
) -> ChatCompletion:
    """The SDK's answer to a small chat request."""
    named = {} if session is None else {"x-session-id": session}
    return await client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=4, extra_headers=named
    )


async def listen(stream: AsyncStream[ChatCompletionChunk], heard: list[str]) -> None:
    """Every piece of text that the stream carries is in `heard`, to its end, good or bad."""
    async for chunk in stream:
        heard += [choice.delta.content for choice in chunk.choices if choice.delta.content]


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
