"""Liveness, readiness and metrics over HTTP, for kubelets, load balancers and Prometheus."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from extproc.serve.lifecycle import Lifecycle
from extproc.serve.sockets import Address, AddressUnavailable, TcpAddress, bindable, parse_address

PATH_LIVE: Final = "/healthz"
PATH_READY: Final = "/ready"
PATH_METRICS: Final = "/metrics"

# Whoever asks for health must not be waited for at the end.
_CLOSE_SECONDS: Final = 1.0


class HttpServer:
    """Answers three paths and nothing else.

    `page` writes the metrics; `content_type` is its type.
    """

    def __init__(
        self,
        address: str,
        lifecycle: Lifecycle,
        *,
        page: Callable[[], Awaitable[bytes]],
        content_type: str,
    ) -> None:
        self._address = parse_address(address)
        self._lifecycle = lifecycle
        self._page = page
        self._content_type = content_type
        self._runner: web.AppRunner | None = None

    @property
    def address(self) -> Address:
        """Where it listens; after `start`, with the port that port 0 became."""
        return self._address

    async def start(self) -> None:
        """Requests are answered.

        Raises:
            AddressUnavailable: the address cannot be bound.
        """
        app = web.Application()
        app.router.add_get(PATH_LIVE, self._live)
        app.router.add_get(PATH_READY, self._ready)
        app.router.add_get(PATH_METRICS, self._metrics)
        runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=_CLOSE_SECONDS
        )
        await runner.setup()
        address = self._address
        site: web.BaseSite
        if isinstance(address, TcpAddress):
            site = web.TCPSite(runner, address.host, address.port)
        else:
            site = web.UnixSite(runner, str(address.path))
        try:
            with bindable(address):
                await site.start()
        except OSError as error:
            await runner.cleanup()
            raise AddressUnavailable(f"cannot listen on {address}: {error.strerror}") from error
        except AddressUnavailable:
            await runner.cleanup()
            raise
        self._runner = runner
        if isinstance(address, TcpAddress):
            self._address = TcpAddress(address.host, runner.addresses[0][1])

    async def stop(self) -> None:
        """Nothing listens any more."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _live(self, _request: web.Request) -> web.Response:
        """200 while the process works, draining included."""
        return _told(self._lifecycle.state, is_well=self._lifecycle.is_alive)

    async def _ready(self, _request: web.Request) -> web.Response:
        """200 while new requests are welcome, 503 before and after."""
        return _told(self._lifecycle.state, is_well=self._lifecycle.is_ready)

    async def _metrics(self, _request: web.Request) -> web.Response:
        """The metrics page."""
        return web.Response(body=await self._page(), headers={"content-type": self._content_type})


def _told(state: str, *, is_well: bool) -> web.Response:
    """The state as a line."""
    return web.Response(
        status=200 if is_well else 503, text=f"{state}\n", headers={"cache-control": "no-store"}
    )
