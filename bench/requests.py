"""Requests/s, latency and CPU per request: Envoy alone, and Envoy with the service behind it.

All on the same nginx upstream with the same load, in turns; medians over the rounds. With JSON=1
the last line is one JSON object. ROUNDS, SECONDS and CONNECTIONS (comma separated) change the run.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import load
import subjects
from rounds import Row, finish, in_turns, measure, numbers, show, summed_up

from extproc.lab.processes import free_port


async def main() -> None:
    """The table is on the screen."""
    rounds = int(os.environ.get("ROUNDS", "3"))
    seconds = int(os.environ.get("SECONDS", "5"))
    port = free_port()
    hosts = load.hosts(subjects.ENDPOINTS)
    upstreams = [f"{host}:{port}" for host in hosts]
    async with AsyncExitStack() as exits:
        folder = Path(exits.enter_context(TemporaryDirectory(prefix="llmgw-bench-")))
        exits.enter_context(load.nginx(port, hosts))
        compared = [await exits.enter_async_context(subjects.envoy_alone(folder, upstreams))]
        for transport in subjects.transports():
            stack = subjects.ours(folder, upstreams, transport)
            compared.append(await exits.enter_async_context(stack))
        rows = []
        for connections in numbers("CONNECTIONS", "1,8,64"):

            def once(subject: subjects.Subject, number: int, connections: int = connections) -> Row:
                return measure(subject, connections, seconds if number else 1)

            found = await in_turns(compared, rounds, f"{connections} connections", once)
            rows += [summed_up(name, connections, some) for name, some in found.items()]
    show(rows)
    finish({"rows": rows})


if __name__ == "__main__":
    asyncio.run(main())
