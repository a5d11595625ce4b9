"""What reading the engines' metrics costs the service: a real vLLM page of 64 KB for every engine.

Only the service runs, at its default interval; an nginx gives every engine the same page.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import cpu
import load
import rounds
import subjects
from rounds import JsonRow

from extproc.lab.processes import free_port
from extproc.lab.stack import Stack

PAGE: Final = (
    Path(__file__)
    .resolve()
    .parent.parent.joinpath("tests", "engines", "pages", "vllm-0.32.0-dp2-busy.txt")
)
_WARM_UP_SECONDS: Final = 6  # every engine has been read twice


async def table(sizes: Sequence[int], seconds: int) -> list[JsonRow]:
    """The rows for every number of engines; the table is on the screen."""
    page = PAGE.read_bytes().replace(b'model_name="tiny"', f'model_name="{load.MODEL}"'.encode())
    print(f"\nReading metrics: pages of {len(page) // 1000} KB, each every 2 s")
    print(f"{'engines':>9}{'reads/s':>9}{'CPU %':>8}{'us/read':>9}{'oldest s':>10}{'MB':>8}")
    rows: list[JsonRow] = []
    for engines in sizes:
        rounds.say(f"scrapes: {engines} engines")
        row = await _measured(engines, page, seconds)
        rows.append(row)
        print(
            f"{engines:>9}{row['reads_per_second']:>9}{row['cpu_percent']:>8}{row['read_us']:>9}"
            f"{row['oldest_seconds']:>10}{row['resident_mb']:>8}",
            flush=True,
        )
    return rows


async def _measured(engines: int, page: bytes, seconds: int) -> JsonRow:
    port = free_port()
    hosts = load.hosts(engines)
    with TemporaryDirectory(prefix="llmgw-bench-") as name, load.nginx(port, hosts, page):
        upstreams = [f"{host}:{port}" for host in hosts]
        stack = Stack(
            subjects.config_file(
                Path(name), upstreams, transport=subjects.transports()[0], engine="vllm"
            )
        )
        try:
            await stack.start_service()
            await asyncio.sleep(_WARM_UP_SECONDS)
            pid, status = stack.service.pid, f"http://{hosts[0]}:{port}/status"
            used, read = cpu.seconds(pid), await _requests(status)
            await asyncio.sleep(seconds)
            used, read = cpu.seconds(pid) - used, await _requests(status) - read
            resident = cpu.tree_resident_mb(pid)
            metrics = await asyncio.to_thread(subjects.fetched, f"{stack.service_url}/metrics")
        finally:
            await stack.stop()
    ages = re.findall(r"^llmgw_endpoint_stats_age_seconds\{.*\} (\S+)$", metrics, re.MULTILINE)
    if len(ages) != engines:
        raise RuntimeError(f"{engines - len(ages)} of {engines} pages were never read")
    return {
        "name": "scrapes",
        "engines": engines,
        "reads_per_second": round(read / seconds, 1),
        "cpu_percent": round(100 * used / seconds, 1),
        "read_us": round(used * 1e6 / max(1, read), 0),
        "oldest_seconds": round(max(float(age) for age in ages), 2),
        "resident_mb": round(resident, 1),
    }


async def _requests(url: str) -> int:
    """How many requests nginx has had, not counting those for this page."""
    text = await asyncio.to_thread(subjects.fetched, url)
    counts = re.search(r"^ (\d+) (\d+) (\d+)", text, re.MULTILINE)
    if counts is None:
        raise RuntimeError(f"nginx says something else:\n{text}")
    return int(counts[3]) - 1
