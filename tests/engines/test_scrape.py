"""Scraping: real servers on loopback, each with one way to misbehave."""

from __future__ import annotations

import asyncio
import gzip
import logging
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from aiohttp import web

from extproc.config.values import Scrape
from extproc.engines.scrape import Scraper, first_delays, jittered, metrics_url
from extproc.routing.endpoint import Auth, Info, Kind, SecretKind, SecretRef, Stats, Tls, Url

PAGE = (Path(__file__).parent / "pages" / "vllm-0.32.0-dp2-busy.txt").read_bytes()
FAST = Scrape(interval_seconds=0.01, timeout_seconds=5.0, body_limit_bytes=200_000)
IMPATIENT = Scrape(interval_seconds=0.01, timeout_seconds=0.2, body_limit_bytes=200_000)
PATIENCE_SECONDS = 10.0  # before a test gives up; nothing waits for it to pass

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class Sink:
    """What was told, by endpoint, and a way to wait for more of it."""

    told: dict[str, list[Stats | str]] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def observe(self, endpoint: str, stats: Stats, now: float) -> None:
        self._tell(endpoint, stats, now)

    def scrape_failed(self, endpoint: str, problem: str, now: float) -> None:
        self._tell(endpoint, problem, now)

    def _tell(self, endpoint: str, what: Stats | str, now: float) -> None:
        self.told.setdefault(endpoint, []).append(what)
        self.times.append(now)
        self.changed.set()

    async def until(self, is_there: Callable[[], bool]) -> None:
        """Returns when the condition holds, which is looked at after every word."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not is_there():
                self.changed.clear()
                await self.changed.wait()

    async def more(self, endpoint: str, count: int = 1) -> Stats | str:
        """The last of `count` further words about the endpoint."""
        goal = len(self.told.get(endpoint, ())) + count
        await self.until(lambda: len(self.told.get(endpoint, ())) >= goal)
        return self.told[endpoint][goal - 1]


@dataclass(slots=True)
class Clock:
    """A clock that stands still until a test moves it."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def serving(handler: Handler, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """The port of a server that answers everything with `handler`."""
    runner = web.ServerRunner(web.Server(handler), shutdown_timeout=0)  # type: ignore[arg-type]  # it takes any awaitable
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    try:
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


@asynccontextmanager
async def raw(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """The port of a server that speaks bytes; `talk` ends when the other side hangs up."""
    talks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        talks.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await talk(reader, writer)
        finally:
            writer.close()
            talks.discard(task)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in list(talks):
            task.cancel()
        await asyncio.gather(*talks, return_exceptions=True)
        await server.wait_closed()


async def good(request: web.Request) -> web.StreamResponse:
    """A busy engine's page."""
    del request
    return web.Response(body=PAGE, content_type="text/plain")


def engine(id_: str, port: int, **more: object) -> Info:
    """A vLLM on this machine."""
    options: dict[str, object] = {"models": ("tiny",), **more}
    return Info(id=id_, url=Url("http", "127.0.0.1", port), **options)  # type: ignore[arg-type]  # the options of Info


@asynccontextmanager
async def scraping(
    sink: Sink,
    *infos: Info,
    settings: Scrape = FAST,
    clock: Clock | None = None,
    lookup: Callable[[str, int], list[str]] | None = None,
) -> AsyncIterator[Scraper]:
    """A scraper that reads the endpoints meanwhile."""
    clock = clock or Clock()
    scraper = (
        Scraper(sink, settings, clock=clock, random=Random(7), lookup=lookup)
        if lookup
        else Scraper(sink, settings, clock=clock, random=Random(7))
    )
    scraper.update(infos)
    task = asyncio.create_task(scraper.run())
    try:
        yield scraper
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def hung(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Takes the request and never answers."""
    del writer
    await reader.read(-1)


async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends a byte now and then, so that no single read takes long."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


# What is read.


async def test_a_page_is_read_again_and_again() -> None:
    """Numbers go to the sink with the time of the given clock."""
    sink, clock = Sink(), Clock(now=17.0)
    async with serving(good) as port, scraping(sink, engine("a", port), clock=clock):
        found = await sink.more("a", 3)
    assert isinstance(found, Stats)
    assert (found.running, found.waiting, found.kv_usage_ratio) == (4, 8, 0.0014650225857648635)
    assert set(sink.times) == {17.0}


@pytest.mark.parametrize(
    ("dialect", "path"), [("vllm", "/metrics"), ("trtllm", "/prometheus/metrics")]
)
async def test_the_page_is_asked_for_where_the_engine_has_it(dialect: str, path: str) -> None:
    """Text 0.0.4 in the clear, without credentials."""
    asked: list[web.BaseRequest] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request)
        return await good(request)

    key = Auth(SecretRef(SecretKind.ENV, "KEY"))
    sink = Sink()
    async with (
        serving(answer) as port,
        scraping(sink, engine("a", port, engine=dialect, auth=key)),
    ):
        await sink.more("a")
    assert asked[0].method == "GET"
    assert asked[0].path == path
    assert asked[0].headers["accept"].startswith("text/plain;version=0.0.4")
    assert asked[0].headers["accept-encoding"] == "identity"
    assert {"authorization", "cookie", "x-api-key"}.isdisjoint(map(str.lower, asked[0].headers))


async def test_an_endpoints_own_address_and_names_are_used() -> None:
    """The page may be at another port and path, under names of its own."""

    async def answer(request: web.Request) -> web.StreamResponse:
        is_right = request.path_qs == "/own?model=a"
        return web.Response(text="r 1\nw 2\nk 0.5\n", status=200 if is_right else 404)

    names = (("running", ("r",)), ("waiting", ("w",)), ("kv_usage", ("k",)))
    sink = Sink()
    async with serving(answer) as port:
        url = f"http://127.0.0.1:{port}/own?model=a"
        async with scraping(sink, engine("a", 9, metrics_url=url, metric_names=names)):
            assert await sink.more("a") == Stats(1, 2, 0.5)


@pytest.mark.parametrize(("upstream", "running"), [(None, 1), ("two", 2)])
async def test_the_engines_name_for_the_model_chooses_its_series(
    upstream: str | None, running: int
) -> None:
    """An upstream name stands for the catalog's."""

    async def answer(request: web.Request) -> web.StreamResponse:
        del request
        series = "".join(
            f'vllm:num_requests_running{{model_name="{name}"}} {value}\n'
            for name, value in (("one", 1), ("two", 2))
        )
        return web.Response(
            text=f"{series}vllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
        )

    sink = Sink()
    async with serving(answer) as port:
        info = engine("a", port, models=("one",), upstream_model=upstream)
        async with scraping(sink, info):
            assert await sink.more("a") == Stats(running, 0, 0.0)


async def test_only_engines_with_a_page_are_read() -> None:
    """External providers, peers and engines without metrics are never asked."""
    sink = Sink()
    async with serving(good) as port:
        infos = [
            engine("none", port, engine="none"),
            engine("external", port, kind=Kind.EXTERNAL),
            engine("peer", port, kind=Kind.PEER),
            engine("good", port),
        ]
        async with scraping(sink, *infos):
            await sink.more("good", 3)
    assert set(sink.told) == {"good"}


def test_the_default_address_is_the_engines() -> None:
    """IPv6 hosts keep their brackets."""
    info = Info(id="a", url=Url("https", "::1", 8443), models=("m",))
    assert metrics_url(info) == "https://[::1]:8443/metrics"


# What is refused.


async def redirect(request: web.Request) -> web.StreamResponse:
    """Sends to a good page."""
    if request.path == "/good":
        raise AssertionError("the redirect was followed")
    return web.Response(status=302, headers={"location": "/good"})


async def compressed(request: web.Request) -> web.StreamResponse:
    """A gigabyte of blanks, if one unpacks it."""
    del request
    bomb = gzip.compress(b" " * 10_000_000)
    return web.Response(body=bomb, headers={"content-encoding": "gzip"})


async def endless(request: web.Request) -> web.StreamResponse:
    """Chunks without end."""
    response = web.StreamResponse()
    await response.prepare(request)
    with suppress(ConnectionError):
        while True:
            await response.write(b"vllm:num_requests_swapped 1\n" * 1000)
    return response


def answering(body: bytes, status: int = 200, content_type: str = "text/plain") -> Handler:
    """A handler that always answers so."""

    async def answer(request: web.Request) -> web.StreamResponse:
        del request
        return web.Response(body=body, status=status, content_type=content_type)

    return answer


MISSING = "running: the page has no vllm:num_requests_running"


@pytest.mark.parametrize(
    ("handler", "problem"),
    [
        (redirect, "it answers with status 302"),
        (answering(b"", 404), "it answers with status 404"),
        (answering(PAGE, 500), "it answers with status 500"),
        (answering(b"", 204), "it answers with status 204"),
        (answering(b"<html>log in</html>", 200, "text/html"), MISSING),
        (answering(b'{"running": 0}', 200, "application/json"), MISSING),
        (answering(b""), MISSING),
        (answering(b"x" * 200_001), "its page is larger than 200000 bytes"),
        (endless, "its page is larger than 200000 bytes"),
        (compressed, "its page is compressed, which was not asked for"),
    ],
)
async def test_an_answer_that_is_no_page_is_a_failure(handler: Handler, problem: str) -> None:
    """Each with its own sentence, and never with numbers."""
    sink = Sink()
    async with serving(handler) as port, scraping(sink, engine("a", port)):
        await sink.more("a", 2)
    assert set(sink.told["a"]) == {problem}


async def test_a_page_at_the_limit_is_read() -> None:
    """The limit itself is allowed."""
    body = PAGE + b"#" * (200_000 - len(PAGE) - 1) + b"\n"
    sink = Sink()
    async with serving(answering(body)) as port, scraping(sink, engine("a", port)):
        assert isinstance(await sink.more("a"), Stats)


async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Half a page."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(PAGE) + PAGE[:30_000])
    await writer.drain()


async def noise(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Another protocol."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"220 mail.example ESMTP\r\n")
    await writer.drain()


@pytest.mark.parametrize("talk", [cut, noise])
async def test_an_answer_that_breaks_off_is_a_failure(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> None:
    """What arrived of it counts for nothing."""
    sink = Sink()
    async with raw(talk) as port, scraping(sink, engine("a", port)):
        assert await sink.more("a") == "its answer breaks off or is not HTTP"


async def test_nobody_there_is_a_failure() -> None:
    """A port without a server refuses."""
    async with raw(hung) as port:
        pass
    sink = Sink()
    async with scraping(sink, engine("a", port)):
        assert await sink.more("a") == "it cannot be connected to"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"engine": "vllm2"}, "'vllm2' is not an engine; there are vllm, sglang"),
        ({"metric_names": (("load", ("a",)),)}, "'load' is not a signal"),
        ({"metrics_url": "http://[::1/metrics"}, "URL"),
    ],
)
async def test_what_can_never_be_read_is_said_once(change: dict[str, object], says: str) -> None:
    """Such an endpoint has no task that tries again, and it harms no other one."""
    sink = Sink()
    async with (
        serving(good) as port,
        scraping(sink, engine("bad", port, **change), engine("a", port)) as scraper,
    ):
        await sink.more("a", 3)
        scraper.update([engine("a", port)])
        await sink.more("a")
    (problem,) = sink.told["bad"]
    assert isinstance(problem, str)
    assert says in problem


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/metrics", "http://127.1:9/metrics"])
async def test_a_metrics_url_that_cannot_be_asked_is_a_failure(url: str) -> None:
    """Nothing but HTTP is asked, and no address in disguise."""
    sink = Sink()
    async with scraping(sink, engine("a", 9, metrics_url=url)):
        assert await sink.more("a") == "its metrics URL is not one that can be asked"


# One does not delay another.


@pytest.mark.parametrize("talk", [hung, trickle])
async def test_the_deadline_is_of_the_whole_read(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> None:
    """An endpoint that sends a byte now and then is as late as one that sends none."""
    sink = Sink()
    async with raw(talk) as port, scraping(sink, engine("a", port), settings=IMPATIENT):
        assert await sink.more("a") == "it does not answer in time"
        assert await sink.more("a") == "it does not answer in time"


async def test_hung_and_trickling_endpoints_delay_nobody() -> None:
    """While five of them wait for their deadline, the others are read many times."""
    sink = Sink()
    async with raw(hung) as deaf, raw(trickle) as slow, serving(good) as port:
        bad = [engine(f"deaf{n}", deaf) for n in range(4)] + [engine("slow", slow)]
        fine = [engine(f"fine{n}", port) for n in range(3)]
        async with scraping(sink, *bad, *fine):
            await asyncio.gather(*(sink.more(info.id, 10) for info in fine))
    assert set(sink.told) == {info.id for info in fine}


async def test_a_name_that_hangs_delays_nobody_and_is_looked_up_once() -> None:
    """Lookups have no pool in which a dead name could hold the places."""
    asked: list[str] = []
    release = threading.Event()

    def lookup(host: str, port: int) -> list[str]:
        assert port
        asked.append(host)
        if host.startswith("dead"):
            release.wait(PATIENCE_SECONDS)
            raise OSError("no such name")
        return ["127.0.0.1"]

    sink = Sink()
    async with serving(good) as port:
        dead = [
            Info(id=f"dead{n}", url=Url("http", f"dead{n}.example", port), models=("tiny",))
            for n in range(20)
        ]
        fine = Info(id="fine", url=Url("http", "fine.example", port), models=("tiny",))
        async with scraping(sink, *dead, fine, settings=IMPATIENT, lookup=lookup):
            await asyncio.gather(*(sink.more(info.id, 3) for info in dead))
            await sink.until(
                lambda: sum(isinstance(word, Stats) for word in sink.told.get("fine", ())) >= 3
            )
            assert sorted(asked) == sorted({*(info.url.host for info in dead), "fine.example"})
            assert set(sink.told["dead0"]) == {"it does not answer in time"}
            release.set()
            await sink.until(lambda: sink.told["dead0"][-1] == "its name does not resolve")


async def test_an_answer_about_a_name_may_come_after_the_end() -> None:
    """Whoever waited for it is gone, and nothing happens."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    release = threading.Event()

    def lookup(host: str, port: int) -> list[str]:
        loop.call_soon_threadsafe(asked.set)
        release.wait(PATIENCE_SECONDS)
        raise OSError(host, port)

    sink = Sink()
    info = Info(id="a", url=Url("http", "late.example", 9), models=("tiny",))
    async with scraping(sink, info, lookup=lookup), asyncio.timeout(PATIENCE_SECONDS):
        await asked.wait()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "lookup late.example"]
    release.set()
    await asyncio.to_thread(thread.join)
    await asyncio.sleep(0)
    assert sink.told == {}


async def test_a_large_page_is_read_whole() -> None:
    """One of many megabytes is read in pieces, and its last line counts."""
    body = b"#" * 99 + b"\n"
    limit = Scrape(interval_seconds=0.01, timeout_seconds=5.0, body_limit_bytes=4_000_000)
    sink = Sink()
    async with (
        serving(answering(body * 30_000 + PAGE)) as port,
        scraping(sink, engine("a", port), settings=limit),
    ):
        assert isinstance(await sink.more("a"), Stats)


async def test_a_name_without_an_address_is_a_failure() -> None:
    """A label that no name may have included."""
    sink = Sink()
    long = Info(id="a", url=Url("http", f"{'a' * 64}.example", 9), models=("tiny",))
    async with scraping(sink, long):
        assert await sink.more("a") == "its name does not resolve"


async def test_a_name_is_looked_up_with_the_system() -> None:
    """Without a lookup of its own the scraper asks the system."""
    sink = Sink()
    async with serving(good) as port:
        info = Info(id="a", url=Url("http", "localhost", port), models=("tiny",))
        async with scraping(sink, info):
            assert isinstance(await sink.more("a"), Stats)


def test_first_reads_are_spread_over_the_interval() -> None:
    """One endpoint in every share of it, and a few endpoints are all read soon."""
    delays = first_delays(1000, 2.0, Random(1))
    assert [int(delay / 0.002) for delay in delays] == list(range(1000))
    delays = first_delays(3, 2.0, Random(1))
    assert [int(delay / 0.02) for delay in delays] == [0, 1, 2]
    assert first_delays(0, 2.0, Random(1)) == []


def test_later_reads_are_jittered() -> None:
    """By a tenth at most, to both sides."""
    random = Random(1)
    periods = [jittered(2.0, random) for _ in range(1000)]
    assert 1.8 <= min(periods) < 1.85
    assert 2.15 < max(periods) <= 2.2


# Connections.


async def test_one_connection_serves_all_reads_of_an_endpoint() -> None:
    """A good endpoint keeps its connection; one that hangs never has two."""
    peers: set[object] = set()

    async def answer(request: web.Request) -> web.StreamResponse:
        peers.add(request.transport.get_extra_info("peername") if request.transport else None)
        return await good(request)

    opened, most, now_open = 0, 0, 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened, most, now_open
        opened, now_open = opened + 1, now_open + 1
        most = max(most, now_open)
        try:
            await hung(reader, writer)
        finally:
            now_open -= 1

    sink = Sink()
    async with (
        serving(answer) as port,
        raw(count) as deaf,
        scraping(sink, engine("a", port)),
        scraping(sink, engine("deaf", deaf), settings=IMPATIENT),
    ):
        await asyncio.gather(sink.more("a", 10), sink.more("deaf", 5))
    assert len(peers) == 1
    assert opened >= 5
    assert most <= 2  # the old one's end and the new one's start may reach the server together


# A list that changes.


async def test_a_removed_endpoint_ends_at_once() -> None:
    """Its read is broken off in the middle, and nothing more is told of it."""
    arrived, left = asyncio.Event(), asyncio.Event()

    async def watch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        arrived.set()
        try:
            await hung(reader, writer)
        finally:
            left.set()

    sink = Sink()
    async with raw(watch) as port, serving(good) as fine:
        infos = [engine("gone", port), engine("stays", fine)]
        async with scraping(sink, *infos) as scraper:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await arrived.wait()
                scraper.update(infos[1:])
                await left.wait()
            await sink.more("stays", 3)
    assert set(sink.told) == {"stays"}


async def test_an_endpoint_that_stays_is_not_disturbed() -> None:
    """A change that does not touch its page leaves even a running read alone."""
    arrived, release = asyncio.Event(), asyncio.Event()
    requests = 0

    async def slow(request: web.Request) -> web.StreamResponse:
        nonlocal requests
        requests += 1
        arrived.set()
        await release.wait()
        return await good(request)

    sink = Sink()
    async with serving(slow) as port, scraping(sink, engine("a", port)) as scraper:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await arrived.wait()
        scraper.update([engine("a", port, weight=2.0, drained=True)])
        release.set()
        assert isinstance(await sink.more("a"), Stats)
        assert requests == 1


async def test_an_endpoint_that_moved_is_read_at_its_new_place() -> None:
    """The old address is not asked again."""
    sink = Sink()
    async with (
        serving(answering(b"")) as old,
        serving(good) as new,
        scraping(sink, engine("a", old)) as scraper,
    ):
        assert await sink.more("a") == MISSING
        scraper.update([engine("a", new)])
        assert isinstance(await sink.more("a"), Stats)
        await sink.more("a", 5)
    assert sink.told["a"].count(MISSING) == len(sink.told["a"]) - 6


async def test_an_endpoint_that_is_added_is_read() -> None:
    """And one that comes back too."""
    sink = Sink()
    async with serving(good) as port, scraping(sink) as scraper:
        for _ in range(2):
            scraper.update([engine("a", port)])
            await sink.more("a")
            scraper.update([])


async def test_nothing_is_left_after_the_end() -> None:
    """Cancelled in the middle of reads, it leaves no task and tells nothing more."""
    arrived = asyncio.Event()

    async def watch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await hung(reader, writer)

    sink = Sink()
    async with raw(watch) as port:
        async with (
            scraping(sink, engine("a", port)) as scraper,
            asyncio.timeout(PATIENCE_SECONDS),
        ):
            await arrived.wait()
        assert sink.told == {}
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("scrape")]
        scraper.update([engine("b", port)])
    assert sink.told == {}


# What is logged.


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """The level and text of each line about endpoints."""
    return [(r.levelno, r.getMessage()) for r in caplog.records if r.name.endswith("scrape")]


async def test_a_failure_is_logged_when_it_begins_and_when_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not at every read, and at most one line a minute."""
    caplog.set_level(logging.INFO)
    body = b""

    async def answer(request: web.Request) -> web.StreamResponse:
        del request
        return web.Response(body=body)

    sink, clock = Sink(), Clock()
    failing = (logging.WARNING, f"endpoint a: its metrics are not readable: {MISSING}")
    again = (logging.INFO, "endpoint a: its metrics are readable again")
    async with serving(answer) as port, scraping(sink, engine("a", port), clock=clock):
        await sink.more("a", 5)
        assert said(caplog) == [failing]
        body = PAGE
        await sink.more("a", 3)
        assert said(caplog) == [failing]
        clock.now += 61
        await sink.more("a", 3)
        assert said(caplog) == [failing, again]
        for body in (b"", PAGE, b"", PAGE, b""):  # noqa: B007 - the handler answers with it
            await sink.more("a", 2)
        assert said(caplog) == [failing, again]
        clock.now += 61
        await sink.more("a", 5)
        assert said(caplog) == [failing, again, failing]


async def test_a_good_endpoint_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Silence is the normal state."""
    caplog.set_level(logging.INFO)
    sink = Sink()
    async with serving(good) as port, scraping(sink, engine("a", port)):
        await sink.more("a", 5)
    assert said(caplog) == []


async def test_a_fault_that_nobody_thought_of_is_logged_with_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is that read's failure, and the next read is tried."""

    @dataclass(slots=True)
    class Faulty(Sink):
        def observe(self, endpoint: str, stats: Stats, now: float) -> None:
            if len(self.told.get(endpoint, ())) < 2:
                raise KeyError(endpoint)
            Sink.observe(self, endpoint, stats, now)

    sink = Faulty()
    async with serving(good) as port, scraping(sink, engine("a", port)):
        await sink.until(lambda: len(sink.told.get("a", ())) >= 3)
    assert sink.told["a"][:2] == ["reading it fails: KeyError"] * 2
    assert isinstance(sink.told["a"][2], Stats)
    (record,) = [record for record in caplog.records if record.name.endswith("scrape")]
    assert record.exc_info is not None


# TLS.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for engine.example in one file."""
    folder = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
        " -subj /CN=engine.example -addext subjectAltName=DNS:engine.example"
        " -keyout key.pem -out cert.pem"
    )
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_text((folder / "key.pem").read_text() + (folder / "cert.pem").read_text())
    return both


@pytest.fixture
async def secure(certificate: Path) -> AsyncIterator[int]:
    """The port of an https engine."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    async with serving(good, context) as port:
        yield port


async def read_with(port: int, tls: Tls, **more: object) -> Stats | str:
    """The first word about an https engine that is verified so."""
    sink = Sink()
    options: dict[str, object] = {"models": ("tiny",), "tls": tls, **more}
    info = Info(id="a", url=Url("https", "127.0.0.1", port), **options)  # type: ignore[arg-type]  # the options of Info
    async with scraping(sink, info):
        return await sink.more("a")


async def test_an_engine_is_verified_by_the_endpoints_settings(
    secure: int, certificate: Path
) -> None:
    """Its authority and its name must fit, unless verification is off."""
    ca_file = str(certificate)
    named = Tls(sni="engine.example", ca_file=ca_file)
    assert isinstance(await read_with(secure, named), Stats)
    assert isinstance(await read_with(secure, Tls(verify=False)), Stats)
    with_key = Tls(verify=False, client_cert_file=ca_file, client_key_file=ca_file)
    assert isinstance(await read_with(secure, with_key), Stats)
    assert await read_with(secure, Tls(ca_file=ca_file)) == "its certificate is refused"
    assert await read_with(secure, Tls(sni="engine.example")) == "its certificate is refused"


async def test_tls_settings_that_cannot_be_read_are_a_failure(secure: int, tmp_path: Path) -> None:
    """The files may come later, so it is tried again."""
    missing = Tls(ca_file=str(tmp_path / "missing.pem"))
    assert await read_with(secure, missing) == "its TLS files cannot be read"


async def test_the_endpoints_server_name_is_for_its_own_host(
    secure: int, certificate: Path
) -> None:
    """A page elsewhere is verified by the name in its URL."""
    tls = Tls(sni="engine.example", ca_file=str(certificate))
    elsewhere = f"https://localhost:{secure}/metrics"
    assert await read_with(secure, tls, metrics_url=elsewhere) == "its certificate is refused"


async def test_a_server_without_tls_is_a_failure() -> None:
    """It is told apart from a refused certificate."""
    async with serving(good) as port:
        assert await read_with(port, Tls(verify=False)) == "TLS with it fails"
