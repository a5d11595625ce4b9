"""The whole stack under 200 mixed SDK requests: `python -m extproc.lab.smoke`.

Half of the requests are streams.
The last line is the verdict, and the exit status is 0 only if nothing failed, the engines' own
counters add up to what was sent, each sound engine has its share, and nothing is in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import aiohttp
from httpx2 import HTTPError
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError

from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind
from extproc.lab.stack import Stack

REQUESTS: Final = 200
LEAST_SHARE: Final = 40
_PARALLEL: Final = 16
_SETTLE_SECONDS: Final = 5.0
_MODEL: Final = "demo"
_INFLIGHT: Final = re.compile(r"^llmgw_endpoint_inflight\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of the requests; `spread` is good answers by engine, from their own counters."""

    sent: int
    failed: int
    spread: Mapping[str, int]
    inflight: int
    sound: frozenset[str]

    @property
    def is_good(self) -> bool:
        """Whether everything was served, by every sound engine, and nothing is left over."""
        shares = [count for name, count in self.spread.items() if name in self.sound]
        return (
            self.failed == 0
            and self.inflight == 0
            and sum(self.spread.values()) == self.sent
            and min(shares) >= LEAST_SHARE
        )

    def __str__(self) -> str:
        shares = "/".join(str(count) for count in self.spread.values())
        return (
            f"smoke: {self.sent} sent, {self.failed} failed, spread {shares}, "
            f"in-flight {self.inflight}"
        )


async def smoke(fault_status: int | None) -> Verdict:
    """The verdict on three engines, the first of which answers `fault_status` if given."""
    async with AsyncExitStack() as exits:
        folder = Path(exits.enter_context(TemporaryDirectory(prefix="llmgw-smoke-")))
        faults = []
        if fault_status is not None:
            faults = [Fault(kind=FaultKind.STATUS, status=fault_status)]
        engines = [
            LabEngine(name, (_MODEL,), faults=faults if name == "a" else ()) for name in "abc"
        ]
        for engine in engines:
            await exits.enter_async_context(engine)
        file = folder / "llmgw.yaml"
        file.write_text(
            "cluster_id: smoke\nendpoints:\n"
            + "".join(
                f"  - {{id: {engine.name}, url: '{engine.url}', models: [{_MODEL}]}}\n"
                for engine in engines
            )
        )
        _say("starting Envoy, the service and three engines")
        stack = await exits.enter_async_context(Stack(file, port=0))
        _say(f"sending {REQUESTS} requests to {stack.url}, half of them streams")
        client = AsyncOpenAI(
            base_url=f"{stack.url}/v1",
            api_key="unused",
            max_retries=0,
            http_client=DefaultAsyncHttpxClient(trust_env=False),
        )
        exits.push_async_callback(client.close)
        gate = asyncio.Semaphore(_PARALLEL)
        results = await asyncio.gather(*(_one(client, number, gate) for number in range(REQUESTS)))
        return Verdict(
            sent=REQUESTS,
            failed=results.count(False),
            spread={engine.name: engine.counters.served for engine in engines},
            inflight=await _settled_inflight(stack.service_url),
            sound=frozenset("abc" if fault_status is None else "bc"),
        )


async def _one(client: AsyncOpenAI, number: int, gate: asyncio.Semaphore) -> bool:
    """Whether one request got its whole answer; odd ones stream, a quarter have a session."""
    headers = {"x-session-id": f"session-{number % 20}"} if number % 4 == 0 else {}
    if number % 3 == 0:
        headers["x-llmgw-model"] = _MODEL
    async with gate:
        try:
            return await _whole(client, number, headers)
        except (OpenAIError, HTTPError) as error:
            _say(f"request {number}: {error}")
            return False


async def _whole(client: AsyncOpenAI, number: int, headers: Mapping[str, str]) -> bool:
    """Whether the answer to request `number` is complete."""
    if number % 2:
        return await _stream(client, headers)
    if number % 10 == 0:
        answer = await client.embeddings.create(model=_MODEL, input="hello", extra_headers=headers)
        return bool(answer.data)
    completion = await client.chat.completions.create(
        model=_MODEL,
        messages=[{"role": "user", "content": f"request {number}"}],
        max_tokens=8,
        extra_headers=headers,
    )
    return completion.usage is not None


async def _stream(client: AsyncOpenAI, headers: Mapping[str, str]) -> bool:
    """Whether a stream came to its finish reason and its usage."""
    stream = await client.chat.completions.create(
        model=_MODEL,
        messages=[{"role": "user", "content": "stream"}],
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers=headers,
    )
    has_finished = has_usage = False
    async for chunk in stream:
        has_usage = has_usage or chunk.usage is not None
        has_finished = has_finished or any(choice.finish_reason for choice in chunk.choices)
    return has_finished and has_usage


async def _settled_inflight(service_url: str) -> int:
    """In-flight over all endpoints, from /metrics, once it is 0 or has had its time to be."""
    deadline = asyncio.get_running_loop().time() + _SETTLE_SECONDS
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{service_url}/metrics") as response:
                page = await response.text()
            values = _INFLIGHT.findall(page)
            if not values:
                raise RuntimeError("/metrics has no in-flight gauge")
            inflight = round(sum(map(float, values)))
            if inflight == 0 or asyncio.get_running_loop().time() > deadline:
                return inflight
            await asyncio.sleep(0.1)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """The verdict is on the screen; 0 if it is good."""
    parser = argparse.ArgumentParser(prog="extproc.lab.smoke", description=__doc__)
    parser.add_argument("--fault", type=int, metavar="STATUS", help="what engine a answers")
    verdict = asyncio.run(smoke(parser.parse_args().fault))
    _say(str(verdict))
    return 0 if verdict.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
