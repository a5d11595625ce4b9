"""What is measured: Envoy alone, and Envoy with the service behind it, on one set of endpoints."""

from __future__ import annotations

import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import load
import yaml

from extproc.config.values import Transport
from extproc.lab.envoy import find_envoy
from extproc.lab.processes import Child, free_port
from extproc.lab.stack import Stack

ENDPOINTS: Final = 100
_HCM = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: its address and the processes whose CPU counts, with all their children.

    `metrics_url` is the service's page, where there is a service.
    """

    name: str
    url: str
    pids: dict[str, int]
    has_model_header: bool = True
    metrics_url: str | None = None

    @property
    def with_model_in_body(self) -> Subject:
        """The same processes, asked without the model header."""
        return replace(self, name=f"{self.name}-body", has_model_header=False)


def transports() -> list[Transport]:
    """The service's transports, the fastest first."""
    return sorted(Transport, key=lambda transport: transport is Transport.GRPCIO)


@asynccontextmanager
async def envoy_alone(folder: Path, upstreams: Sequence[str]) -> AsyncIterator[Subject]:
    """Envoy with one worker that forwards to the upstreams, `host:port` each, in turn."""
    port = free_port()
    file = folder / "plain.yaml"
    file.write_text(_plain_envoy(port, upstreams))
    options = ["--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]
    child = Child("Envoy", [str(find_envoy()), "-c", str(file), *options])
    await child.start()
    try:
        yield Subject("envoy", f"http://127.0.0.1:{port}", {"envoy": child.pid})
    finally:
        await child.stop()


@asynccontextmanager
async def ours(
    folder: Path, upstreams: Sequence[str], transport: Transport
) -> AsyncIterator[Subject]:
    """Envoy with one worker, the full rendered configuration, and the service behind it."""
    file = config_file(folder, upstreams, transport=transport)
    async with Stack(file, port=0, concurrency=1) as stack:
        yield of_stack(f"ours-{transport}", stack)


def of_stack(name: str, stack: Stack) -> Subject:
    """The subject that a running stack is."""
    pids = {"envoy": stack.envoy.pid, "service": stack.service.pid}
    return Subject(name, stack.url, pids, metrics_url=f"{stack.service_url}/metrics")


def config_file(
    folder: Path,
    upstreams: Sequence[str],
    *,
    transport: Transport = Transport.GRPCIO,
    engine: str = "none",
) -> Path:
    """A configuration with an endpoint for each of the upstreams, `host:port` each."""
    file = folder / f"llmgw-{transport}.yaml"
    endpoints = [
        {
            "id": f"e{number:05d}",
            "url": f"http://{upstream}",
            "models": [load.MODEL],
            "engine": engine,
        }
        for number, upstream in enumerate(upstreams)
    ]
    tree = {
        "cluster_id": "bench",
        "service": {"transport": str(transport)},
        "endpoints": endpoints,
    }
    file.write_text(yaml.safe_dump(tree))
    return file


def messages(subject: Subject) -> float:
    """How many ext_proc messages the service has been sent so far; 0 where there is no service."""
    page = "" if subject.metrics_url is None else fetched(subject.metrics_url)
    family = "llmgw_ext_proc_message_seconds_count"
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(family))


def fetched(url: str) -> str:
    """What a GET of `url` is answered with."""
    with urllib.request.urlopen(url, timeout=10) as response:
        body: bytes = response.read()
    return body.decode()


def _plain_envoy(port: int, upstreams: Sequence[str]) -> str:
    """A configuration that does nothing but forward."""
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(number)}}}}
        for host, _, number in (upstream.partition(":") for upstream in upstreams)
    ]
    cluster = {
        "name": "upstream",
        "type": "STATIC",
        "load_assignment": {
            "cluster_name": "upstream",
            "endpoints": [{"lb_endpoints": endpoints}],
        },
    }
    manager = {
        "@type": f"type.googleapis.com/{_HCM}",
        "stat_prefix": "plain",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "upstream"}}],
                }
            ]
        },
        "http_filters": [
            {
                "name": "router",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
                },
            }
        ],
    }
    listener = {
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    return yaml.safe_dump(
        {"static_resources": {"listeners": [listener], "clusters": [cluster]}}, sort_keys=False
    )
