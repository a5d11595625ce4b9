"""The place where everything is wired: one configuration, one event loop, one process."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from random import Random, SystemRandom
from typing import Final, assert_never

import uvloop
from prometheus_client import CollectorRegistry

from extproc.config.reachable import reachable
from extproc.config.values import Config
from extproc.config.values import Transport as TransportName
from extproc.engines.scrape import Scraper
from extproc.exchange import refusals
from extproc.exchange.openai import refuse
from extproc.serve import lifecycle
from extproc.serve.access_log import AccessLogStream
from extproc.serve.assembly import Core, assemble
from extproc.serve.collection import rarely_collect
from extproc.serve.ext_proc_stream import ExtProcStream, StreamTools
from extproc.serve.fastlane.transport import FastlaneSettings, FastlaneTransport
from extproc.serve.grpcio import GrpcSettings, GrpcTransport
from extproc.serve.health import Health
from extproc.serve.http import HttpServer
from extproc.serve.lifecycle import Lifecycle, Timing
from extproc.serve.replies import Renderer
from extproc.serve.request_log import RequestLog
from extproc.serve.sockets import AddressUnavailable
from extproc.serve.steering import channel
from extproc.serve.stream import StreamHandler, Transport
from extproc.serve.wire import Reader
from extproc.telemetry.collector import FleetCollector
from extproc.telemetry.fleet import read_fleet
from extproc.telemetry.logs import LimitedLog, LogFormat, configure
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.page import CONTENT_TYPE, write_page
from extproc.telemetry.stalls import watch_stalls

_TICK_SECONDS: Final = 0.25
_LOGGER: Final = logging.getLogger("llmgw")


class App:
    """The running service on one configuration; what a transport carries is here."""

    def __init__(self, config: Config, *, write_request: Callable[[str], None] | None) -> None:
        self._config = config
        self._clock = time.monotonic
        self._lines = LimitedLog(_LOGGER, self._clock)
        self.lifecycle = Lifecycle(Timing(drain_seconds=config.service.drain_seconds))
        self._health = Health(self.lifecycle)
        self.metrics = Metrics(self._is_model)
        request_log = (
            None if write_request is None else RequestLog(write_request, then=self.metrics)
        )
        # Seeded by the system, so that replicas neither jitter nor break ties alike.
        random = Random(SystemRandom().getrandbits(64))  # noqa: S311 - not for secrets
        self.core: Core = assemble(
            config,
            observer=request_log or self.metrics,
            random=random,
            is_ready=lambda: self.lifecycle.is_ready,
            now=self._clock(),
            created=int(time.time()),
            on_ended=None if request_log is None else request_log.flight_ended,
        )
        self._published = CollectorRegistry()
        self._published.register(
            FleetCollector(
                self.metrics,
                readings=lambda: read_fleet(self.core.registry, self._clock()),
                is_ready=lambda: self.lifecycle.is_ready,
                version=version("llmgw-extproc"),
            )
        )
        self._scraper = Scraper(self.core.registry, config.scrape, clock=self._clock, random=random)
        self._scraper.update(reachable(config))
        self._tools = StreamTools(
            reader=Reader(),
            renderer=Renderer(channel(config.steering)),
            internal_error=refuse(refusals.internal(), method="POST", path=""),
            observer=self.metrics,
            lines=self._lines,
            clock=self._clock,
        )

    def _is_model(self, name: str) -> bool:
        return self.core.gateway.catalog.canonical(name) is not None

    # What a transport carries.

    def ext_proc(self) -> StreamHandler:
        """A handler for one request."""
        return ExtProcStream(self.core.exchange(), self._tools)

    def access_log(self) -> StreamHandler:
        """A handler for one of Envoy's log streams."""
        return AccessLogStream(
            self.core.ledger.logged,
            observer=self.metrics,
            lines=self._lines,
            clock=self._clock,
        )

    def health(self, service: str) -> bool | None:
        """Whether `service` is well."""
        return self._health.of(service)

    def watch_health(self, changed: Callable[[], None]) -> Callable[[], None]:
        """`changed` is called after every change of health."""
        return self._health.watch(changed)

    # The process.

    async def serve(self) -> None:
        """The service has run until a signal ended it, during its start or later.

        Ready only once the configuration is loaded and the socket accepts.

        Raises:
            AddressUnavailable: an address cannot be bound.
        """
        with lifecycle.heeding(self.lifecycle, self._clock):
            await self._serve()

    async def _serve(self) -> None:
        config = self._config
        transport = _transport(self, config)
        http = HttpServer(
            config.service.http_address, self.lifecycle, page=self._page, content_type=CONTENT_TYPE
        )
        await http.start()
        background = [
            asyncio.create_task(self._scraper.run(), name="scrape"),
            asyncio.create_task(self._tick(), name="tick"),
            asyncio.create_task(watch_stalls(self._clock, self.metrics.stalled), name="stalls"),
        ]
        try:
            await transport.start()
            self.lifecycle.started()
            if self.lifecycle.is_ready:
                _LOGGER.info("ready on %s", config.service.address)
            await lifecycle.run(self.lifecycle, transport.stop, self._clock)
        finally:
            for task in background:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*background)
            await http.stop()

    async def _page(self) -> bytes:
        """The metrics page as of now."""
        return await write_page(self._published)

    async def _tick(self) -> None:
        """Verdicts that waited for a log entry are booked, a few times a second."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            try:
                self.core.ledger.tick(self._clock())
            except Exception as error:  # noqa: BLE001 - one bad verdict must not end the booking
                self.metrics.exchange_failed()
                self._lines.error("tick", "a verdict was lost", error)


def _transport(app: App, config: Config) -> Transport:
    match config.service.transport:
        case TransportName.GRPCIO:
            return GrpcTransport(
                app,
                GrpcSettings(
                    address=config.service.address,
                    body_limit_bytes=config.listener.body_limit_bytes,
                    tls=config.service.tls,
                ),
            )
        case TransportName.FASTLANE:
            return FastlaneTransport(
                app,
                FastlaneSettings(
                    address=config.service.address,
                    body_limit_bytes=config.listener.body_limit_bytes,
                ),
            )
        case _:
            assert_never(config.service.transport)


def run(config: Config, *, has_request_log: bool) -> int:
    """The service has run until a signal ended it; the exit status."""
    configure(sys.stderr, level=logging.INFO, log_format=LogFormat.TEXT)
    app = App(config, write_request=_say if has_request_log else None)
    rarely_collect()
    try:
        uvloop.run(app.serve())
    except AddressUnavailable as error:
        _LOGGER.error("%s", error)  # noqa: TRY400 - the sentence says it all
        return 1
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
