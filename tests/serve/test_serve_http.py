"""Liveness, readiness and metrics over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from extproc.serve.http import HttpServer
from extproc.serve.lifecycle import Lifecycle, Timing
from extproc.serve.sockets import AddressUnavailable

TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def page() -> bytes:
    """A metrics page."""
    return b"llmgw_ready 1.0\n"


def server_of(lifecycle: Lifecycle, address: str = "127.0.0.1:0") -> HttpServer:
    """A server that is not started."""
    return HttpServer(address, lifecycle, page=page, content_type=TYPE)


@pytest.fixture
def lifecycle() -> Lifecycle:
    """A process that is starting."""
    return Lifecycle(Timing())


@pytest.fixture
async def server(lifecycle: Lifecycle) -> AsyncIterator[HttpServer]:
    """A started server on a free port."""
    started = server_of(lifecycle)
    await started.start()
    yield started
    await started.stop()


async def get(server: HttpServer, path: str) -> tuple[int, str, str]:
    """Status, body and type of an answer."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{server.address}{path}") as answer,
    ):
        return answer.status, await answer.text(), answer.headers["content-type"]


async def test_health_and_readiness_follow_the_lifecycle(
    server: HttpServer, lifecycle: Lifecycle
) -> None:
    """Alive until it has stopped, ready only in between."""
    assert (await get(server, "/healthz"))[:2] == (200, "starting\n")
    assert (await get(server, "/ready"))[:2] == (503, "starting\n")
    lifecycle.started()
    assert (await get(server, "/healthz"))[:2] == (200, "ready\n")
    assert (await get(server, "/ready"))[:2] == (200, "ready\n")
    lifecycle.terminate(0.0)
    assert (await get(server, "/healthz"))[:2] == (200, "draining\n")
    assert (await get(server, "/ready"))[:2] == (503, "draining\n")
    lifecycle.drained()
    assert (await get(server, "/healthz"))[0] == 503


async def test_metrics_are_a_page_of_their_type(server: HttpServer) -> None:
    """The page comes as it was written, with the type that Prometheus expects."""
    assert await get(server, "/metrics") == (200, "llmgw_ready 1.0\n", TYPE)


@pytest.mark.parametrize("path", ["/", "/metrics/", "/v1/models"])
async def test_nothing_else_is_there(server: HttpServer, path: str) -> None:
    """Other paths are not found."""
    assert (await get(server, path))[0] == 404


async def test_a_taken_port_is_named(server: HttpServer, lifecycle: Lifecycle) -> None:
    """A second server on the same port fails with the address in its text."""
    with pytest.raises(AddressUnavailable, match=str(server.address)):
        await server_of(lifecycle, str(server.address)).start()


async def test_it_serves_on_a_unix_socket(lifecycle: Lifecycle, tmp_path: Path) -> None:
    """A socket file works, and a second server on it fails."""
    path = tmp_path / "http.sock"
    server = server_of(lifecycle, f"unix:{path}")
    await server.start()
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session,
        session.get("http://local/healthz") as answer,
    ):
        assert answer.status == 200
    with pytest.raises(AddressUnavailable):
        await server_of(lifecycle, f"unix:{path}").start()
    await server.stop()


async def test_a_server_that_never_started_stops(lifecycle: Lifecycle) -> None:
    """Stopping what does not run is nothing."""
    await server_of(lifecycle).stop()
