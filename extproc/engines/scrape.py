"""Every engine's metrics page, read again and again: the one shell of this room, all of it here.

One task per endpoint, so that a page which hangs, trickles or never ends delays no other one. What
a page means is the contract's affair, and what follows from it the sink's.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Final, Protocol

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from extproc.engines.contract import Contract
from extproc.engines.dialects import DIALECTS
from extproc.errors import UnreadableMetrics
from extproc.routing.endpoint import Info, Stats, Tls

_log = logging.getLogger(__name__)

_HEADERS: Final = (
    ("accept", "text/plain;version=0.0.4;q=1,text/plain;q=0.5"),
    ("accept-encoding", "identity"),
    ("user-agent", "llmgw"),
)
_JITTER_RATIO: Final = 0.1
_READ_BYTES: Final = 64 * 1024
_ONE_TURN_BYTES: Final = 256 * 1024  # a page up to this size is read in one turn of the loop
_LOG_SECONDS: Final = 60.0  # at most one line about an endpoint in this time
_FIRST_SHARE_SECONDS: Final = 0.02
_DNS_SECONDS: Final = 30
_TLS_SECONDS: Final = 300.0  # certificates are renewed on disk while we run

Lookup = Callable[[str, int], list[str]]


class Settings(Protocol):
    """How pages are read."""

    @property
    def interval_seconds(self) -> float:
        """The period, from start to start, of one endpoint's reads; jittered."""

    @property
    def timeout_seconds(self) -> float:
        """The deadline of one read as a whole."""

    @property
    def body_limit_bytes(self) -> int:
        """The largest page that is read."""


class Sink(Protocol):
    """Where the numbers go, and the word that there are none; both by endpoint id."""

    def observe(self, endpoint: str, stats: Stats, now: float, /) -> None:
        """The endpoint published these numbers at `now`."""

    def scrape_failed(self, endpoint: str, problem: str, now: float, /) -> None:
        """At `now` the endpoint's page was not readable, for the reason that `problem` says."""


def metrics_url(info: Info) -> str:
    """Where the endpoint's page is: its own setting, else its address and its dialect's path."""
    return info.metrics_url or f"{info.url}{DIALECTS[info.engine].path}"


def lookup(host: str, port: int) -> list[str]:
    """The addresses of a host, in the system's order; blocks.

    Raises:
        OSError: there are none.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def first_delays(count: int, interval_seconds: float, random: Random) -> list[float]:
    """When each of `count` endpoints is first read: one in every share of the interval.

    A share is 20 ms at most: until an endpoint is read, those that are look better than it.
    """
    if not count:
        return []
    share = min(interval_seconds / count, _FIRST_SHARE_SECONDS)
    return [(place + random.random()) * share for place in range(count)]


def jittered(interval_seconds: float, random: Random) -> float:
    """The interval, longer or shorter by up to a tenth."""
    return interval_seconds * (1 + random.uniform(-_JITTER_RATIO, _JITTER_RATIO))


class Scraper:
    """Reads the page of every endpoint that is scraped, each in its own task, while `run` runs.

    A page that can be read goes to the sink as numbers, any failure as a sentence; both with
    `clock()`. Failures never end a task. No credentials are sent, no redirect is followed. All
    methods belong to the event loop's thread.
    """

    def __init__(
        self,
        sink: Sink,
        settings: Settings,
        *,
        clock: Callable[[], float],
        random: Random,
        lookup: Lookup = lookup,
    ) -> None:
        self._sink = sink
        self._settings = settings
        self._clock = clock
        self._random = random
        self._lookup = lookup
        self._targets: dict[str, _Target] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None
        self._tls = _TlsContexts()

    def update(self, infos: Iterable[Info]) -> None:
        """Exactly these endpoints are read from now on.

        One that is gone, or is read differently now, is dropped at once, in the middle of a read
        too. Those that stay are not disturbed. The first reads of new ones are spread over an
        interval at most.
        """
        targets = {info.id: _Target.of(info) for info in infos if info.is_scraped}
        for gone in [id_ for id_ in self._tasks if targets.get(id_) != self._targets[id_]]:
            self._end(self._tasks.pop(gone))
        self._targets = targets
        if self._session is not None:
            self._start(self._session)

    async def run(self) -> None:
        """Reads until it is cancelled; then every task and connection is gone."""
        connector = aiohttp.TCPConnector(
            limit=0,  # an endpoint never waits for another one's connection; each has at most one
            resolver=_Resolver(self._lookup),
            ttl_dns_cache=_DNS_SECONDS,
            keepalive_timeout=self._settings.interval_seconds * 2 + 1,
        )
        async with aiohttp.ClientSession(
            connector=connector,
            headers=dict(_HEADERS),
            timeout=aiohttp.ClientTimeout(total=None),  # one deadline: ours
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            self._session = session
            try:
                self._start(session)
                await asyncio.Event().wait()
            finally:
                self._session = None
                for task in self._tasks.values():
                    self._end(task)
                self._tasks.clear()
                await asyncio.gather(*self._ending, return_exceptions=True)

    def _start(self, session: aiohttp.ClientSession) -> None:
        new = [id_ for id_ in self._targets if id_ not in self._tasks]
        delays = first_delays(len(new), self._settings.interval_seconds, self._random)
        for id_, delay in zip(new, delays, strict=True):
            self._tasks[id_] = asyncio.create_task(
                self._follow(session, id_, self._targets[id_], delay), name=f"scrape {id_}"
            )

    def _end(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _follow(
        self, session: aiohttp.ClientSession, id_: str, target: _Target, delay: float
    ) -> None:
        report = _Report(id_)
        try:
            url = URL(target.url)
            contract = target.contract()
        except ValueError as error:
            self._failed(report, f"its metrics cannot be asked for: {error}")
            return
        time = asyncio.get_running_loop().time
        await asyncio.sleep(delay)
        while True:
            started = time()
            try:
                async with asyncio.timeout(self._settings.timeout_seconds):
                    stats = await self._read(session, url, target, contract)
                now = self._clock()
                self._sink.observe(id_, stats, now)
                report.succeeded(now)
            except Exception as error:  # noqa: BLE001 - whatever a page provokes is that page's failure
                self._failed(report, *_problem(error))
            period = jittered(self._settings.interval_seconds, self._random)
            await asyncio.sleep(max(period - (time() - started), 0))

    def _failed(self, report: _Report, problem: str, unforeseen: Exception | None = None) -> None:
        now = self._clock()
        self._sink.scrape_failed(report.id, problem, now)
        report.failed(problem, now, unforeseen)

    async def _read(
        self, session: aiohttp.ClientSession, url: URL, target: _Target, contract: Contract
    ) -> Stats:
        limit = self._settings.body_limit_bytes
        is_https = url.scheme == "https"
        context = await self._tls.context(target.tls) if is_https else True
        # The endpoint's server name is its own host's; a page elsewhere has its URL's.
        server_name = target.tls.sni if is_https and url.host == target.host else None
        async with session.get(
            url, allow_redirects=False, ssl=context, server_hostname=server_name
        ) as response:
            if response.status != 200:
                raise _RefusedError(f"it answers with status {response.status}")
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                raise _RefusedError("its page is compressed, which was not asked for")
            if (response.content_length or 0) > limit:
                raise _RefusedError(f"its page is larger than {limit} bytes")
            reading = contract.families.begin()
            size = 0
            async for piece in response.content.iter_chunked(_READ_BYTES):
                size += len(piece)
                if size > limit:
                    raise _RefusedError(f"its page is larger than {limit} bytes")
                reading.feed(piece)
                if size > _ONE_TURN_BYTES:
                    await asyncio.sleep(0)  # what came at once need not be read at once
        return contract.stats(reading.end())


class _RefusedError(Exception):
    """The answer is not a page that is read; the text says why."""


@dataclass(frozen=True, slots=True)
class _Target:
    """The part of an endpoint's description that reading its page depends on."""

    url: str
    engine: str
    names: tuple[tuple[str, tuple[str, ...]], ...]
    models: tuple[str, ...]
    tls: Tls
    host: str

    @classmethod
    def of(cls, info: Info) -> _Target:
        return cls(
            url=metrics_url(info) if info.engine in DIALECTS else "",
            engine=info.engine,
            names=info.metric_names,
            models=(info.upstream_model,) if info.upstream_model else info.models,
            tls=info.tls,
            host=info.url.host,
        )

    def contract(self) -> Contract:
        dialect = DIALECTS.get(self.engine)
        if dialect is None:
            raise ValueError(f"{self.engine!r} is not an engine; there are {', '.join(DIALECTS)}")
        return Contract(dialect, overrides=self.names, models=self.models)


class _Report:
    """Log lines about one endpoint: when its state changes, at most one a minute."""

    __slots__ = ("_logged", "_silent_until", "id")

    def __init__(self, id_: str) -> None:
        self.id = id_
        self._logged: str | None = None  # the problem that the last line told; None: there is none
        self._silent_until = float("-inf")

    def failed(self, problem: str, now: float, unforeseen: Exception | None) -> None:
        if problem != self._logged and now >= self._silent_until:
            _log.warning(
                "endpoint %s: its metrics are not readable: %s",
                self.id,
                problem,
                exc_info=unforeseen,
            )
            self._logged = problem
            self._silent_until = now + _LOG_SECONDS

    def succeeded(self, now: float) -> None:
        if self._logged is not None and now >= self._silent_until:
            _log.info("endpoint %s: its metrics are readable again", self.id)
            self._logged = None
            self._silent_until = now + _LOG_SECONDS


class _TlsContexts:
    """One context per kind of verification, made anew from the files every few minutes."""

    __slots__ = ("_made", "_making")

    def __init__(self) -> None:
        self._made: dict[Tls, tuple[float, ssl.SSLContext]] = {}
        self._making = asyncio.Lock()

    async def context(self, tls: Tls) -> ssl.SSLContext:
        async with self._making:
            now = asyncio.get_running_loop().time()
            made_at, context = self._made.get(tls, (float("-inf"), None))
            if context is None or now - made_at > _TLS_SECONDS:
                # In a thread: the system's authorities take tens of milliseconds to load.
                context = await asyncio.to_thread(_tls_context, tls)
                self._made[tls] = (now, context)
            return context


def _tls_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.ca_file)
    if not tls.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if tls.client_cert_file is not None:
        context.load_cert_chain(tls.client_cert_file, tls.client_key_file)
    return context


class _Resolver(AbstractResolver):
    """Looks names up in a thread each, because a name that hangs would hold a place in a pool.

    The connector asks for one name at a time once, and keeps the answer for a while.
    """

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    async def resolve(
        self,
        host: str,
        port: int = 0,
        family: socket.AddressFamily = socket.AF_UNSPEC,  # noqa: ARG002 - the connector asks for any
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[str]] = loop.create_future()

        def deliver(addresses: list[str] | OSError) -> None:
            if answer.done():
                return
            if isinstance(addresses, OSError):
                answer.set_exception(addresses)
            else:
                answer.set_result(addresses)

        def look_up() -> None:
            addresses: list[str] | OSError
            try:
                addresses = self._lookup(host, port)
            except OSError as error:
                addresses = error
            except UnicodeError:  # a label that is too long
                addresses = OSError("not a host name")
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(deliver, addresses)

        # A daemon: a lookup that hangs does not hold up the process's end.
        threading.Thread(target=look_up, name=f"lookup {host}", daemon=True).start()
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in await answer
        ]

    async def close(self) -> None:
        """Nothing is held."""


# The first that fits; the sentence is the same for the same cause, and names no host.
_PROBLEMS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (aiohttp.InvalidURL, "its metrics URL is not one that can be asked"),
    (aiohttp.NonHttpUrlClientError, "its metrics URL is not one that can be asked"),
    (aiohttp.ClientConnectorDNSError, "its name does not resolve"),
    (aiohttp.ClientConnectorCertificateError, "its certificate is refused"),
    (aiohttp.ClientSSLError, "TLS with it fails"),
    (aiohttp.ClientConnectorError, "it cannot be connected to"),
    (aiohttp.ClientError, "its answer breaks off or is not HTTP"),
    (TimeoutError, "it does not answer in time"),
    (OSError, "its TLS files cannot be read"),
)


def _problem(error: Exception) -> tuple[str, Exception | None]:
    """What is wrong; with the error itself if nobody thought of it."""
    if isinstance(error, UnreadableMetrics | _RefusedError):
        return str(error), None
    for kind, sentence in _PROBLEMS:
        if isinstance(error, kind):
            return sentence, None
    return f"reading it fails: {type(error).__name__}", error
