"""Requests/s, latency and CPU per request: Envoy alone, and Envoy with the service behind it.

Both on the same nginx upstream with the same load, in turns; medians over the rounds. With JSON=1
the last line is one JSON object. ROUNDS, SECONDS and CONNECTIONS (comma separated) change the run.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import cpu
import load
import yaml

from extproc.lab.envoy import find_envoy
from extproc.lab.processes import Child, free_port
from extproc.lab.stack import Stack

ENDPOINTS = 100
_HCM = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: its address and the processes whose CPU counts."""

    name: str
    url: str
    pids: dict[str, int]


@dataclass(frozen=True, slots=True)
class Row:
    """One round of one subject; CPU in microseconds per request, by process."""

    result: load.Result
    cpu_us: dict[str, float]


def measure(subject: Subject, connections: int, seconds: float) -> Row:
    """One round of load against `subject`."""
    before = {name: cpu.seconds(pid) for name, pid in subject.pids.items()}
    result = load.wrk(subject.url, connections=connections, seconds=seconds)
    used = {
        name: (cpu.seconds(pid) - before[name]) * 1e6 / max(1, result.requests)
        for name, pid in subject.pids.items()
    }
    return Row(result, used)


def summed_up(name: str, connections: int, rows: list[Row]) -> dict[str, object]:
    """The medians of several rounds, as the JSON line has them."""
    cpu_us = {
        process: round(median(row.cpu_us.get(process, 0.0) for row in rows), 1)
        for process in ("envoy", "service")
    }
    cpu_us["total"] = round(sum(cpu_us.values()), 1)
    return {
        "name": name,
        "connections": connections,
        "rps": round(median(row.result.rps for row in rows), 1),
        "p50_ms": round(median(row.result.p50_ms for row in rows), 3),
        "p99_ms": round(median(row.result.p99_ms for row in rows), 3),
        "cpu_us": cpu_us,
        "errors": sum(row.result.errors for row in rows),
    }


def _plain_envoy(port: int, upstream: int) -> str:
    """A configuration that does nothing but forward."""
    address = {"socket_address": {"address": "127.0.0.1", "port_value": upstream}}
    endpoint = {"endpoint": {"address": address}}
    cluster = {
        "name": "upstream",
        "type": "STATIC",
        "load_assignment": {
            "cluster_name": "upstream",
            "endpoints": [{"lb_endpoints": [endpoint]}],
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


@asynccontextmanager
async def envoy_alone(folder: Path, upstream: int) -> AsyncIterator[Subject]:
    """Envoy with one worker that forwards everything to nginx."""
    port = free_port()
    file = folder / "plain.yaml"
    file.write_text(_plain_envoy(port, upstream))
    options = ["--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]
    child = Child("Envoy", [str(find_envoy()), "-c", str(file), *options])
    await child.start()
    try:
        yield Subject("envoy", f"http://127.0.0.1:{port}", {"envoy": child.pid})
    finally:
        await child.stop()


@asynccontextmanager
async def ours(folder: Path, upstream: int) -> AsyncIterator[Subject]:
    """Envoy with one worker, the full rendered configuration, and the service behind it."""
    async with Stack(config_file(folder, upstream), port=0, concurrency=1) as stack:
        pids = {"envoy": stack.envoy.pid, "service": stack.service.pid}
        yield Subject("ours-grpcio", stack.url, pids)


def config_file(folder: Path, upstream: int) -> Path:
    """A configuration of 100 endpoints, all of which are the nginx on port `upstream`."""
    file = folder / "llmgw.yaml"
    endpoints = [
        {
            "id": f"e{number:03d}",
            "url": f"http://127.0.0.1:{upstream}",
            "models": ["bench"],
            "engine": "none",
        }
        for number in range(ENDPOINTS)
    ]
    file.write_text(yaml.safe_dump({"cluster_id": "bench", "endpoints": endpoints}))
    return file


async def main() -> None:
    """The table is on the screen."""
    rounds = int(os.environ.get("ROUNDS", "3"))
    seconds = float(os.environ.get("SECONDS", "5"))
    counts = [int(text) for text in os.environ.get("CONNECTIONS", "1,8,64").split(",")]
    upstream = free_port()
    with TemporaryDirectory(prefix="llmgw-bench-") as name, load.nginx(upstream):
        folder = Path(name)
        async with envoy_alone(folder, upstream) as plain, ours(folder, upstream) as full:
            rows = []
            for connections in counts:
                found: dict[str, list[Row]] = {}
                for number in range(rounds + 1):
                    for subject in (plain, full):
                        _progress(f"{connections} connections, round {number}: {subject.name}")
                        row = await asyncio.to_thread(
                            measure, subject, connections, seconds if number else 1.0
                        )
                        if number:  # the first one warms up
                            found.setdefault(subject.name, []).append(row)
                rows += [summed_up(name, connections, some) for name, some in found.items()]
    _show(rows)


def _progress(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _show(rows: list[dict[str, object]]) -> None:
    print(f"{'':14}{'conns':>6}{'req/s':>10}{'p50 ms':>9}{'p99 ms':>9}  CPU us per request")
    for row in rows:
        parts = row["cpu_us"]
        assert isinstance(parts, dict)
        shares = ", ".join(f"{name} {value:g}" for name, value in parts.items() if value)
        print(
            f"{row['name']:14}{row['connections']:>6}{row['rps']:>10}{row['p50_ms']:>9}"
            f"{row['p99_ms']:>9}  {shares}" + (f"  errors {row['errors']}" if row["errors"] else "")
        )
    if os.environ.get("JSON"):
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    asyncio.run(main())
