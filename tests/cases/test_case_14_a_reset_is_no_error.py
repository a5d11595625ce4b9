"""The reset that ends every ext_proc stream is neither an error nor an abort."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Final

import pytest
import pytest_asyncio
from case_bodies import FORM_TYPE, chat, form
from case_http1 import CHAT, Pair, head
from case_world import STREAMS, World, case, fresh, standing, until

from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine

pytestmark = case(14)

CONFIG: Final = """
endpoints:
  - {id: a, url: "$a", models: [m]}
  - {id: b, url: "$b", models: [m]}
  - {id: a-renamed, url: "$a", models: [renamed], upstream_model: m}
"""
GRACEFUL: Final = "envoy.reloadable_features.ext_proc_graceful_grpc_close"
FORM: Final = "/v1/audio/transcriptions"
GOOD: Final = 1000
ABORTED: Final = 50
WORKERS: Final = 20

# Good requests of every kind that goes to an engine; what the service answers itself is beside.
SENT: Final[list[tuple[str, str, list[Pair], bytes | None]]] = [
    ("POST", CHAT, [], chat("m")),
    ("POST", CHAT, [("x-llmgw-model", "m")], chat("m")),
    ("POST", CHAT, [], chat("m", stream=True)),
    ("POST", CHAT, [("x-llmgw-model", "m")], chat("m", stream=True)),
    ("POST", CHAT, [], chat("renamed", stream=True)),
    ("GET", "/v1/realtime?model=m", [("x-lab-echo", "1")], None),
    ("POST", CHAT, [], b'{"seed":18446744073709551615,' + chat("m")[1:]),
    ("POST", FORM, [("content-type", FORM_TYPE), ("x-lab-echo", "1")], form("m")),
]
OWN: Final = [("GET", "/v1/models", 200), ("GET", "/ready", 200), ("OPTIONS", CHAT, 204)]


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["true", "false"], ids=["graceful", "abrupt"]
)
async def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    """Two engines, and an Envoy that closes its streams to the service in either way."""
    fast = EngineSettings(decode_tokens_per_second=5000)
    engines = [LabEngine(name, settings=fast) for name in "ab"]
    async with standing(
        tmp_path_factory.mktemp("case"), CONFIG, *engines, runtime={GRACEFUL: request.param}
    ) as running:
        yield running


def complaints(world: World) -> list[str]:
    """What the service has logged beside its good news."""
    return [line for line in world.said if not re.search(r"\binfo\b", line)]


async def test_good_requests_and_aborts(world: World) -> None:
    """1,000 good ones are 1,000 successes; 50 that their clients gave up are 50 aborts."""
    await world.forget(attempts=True)
    todo = iter(range(GOOD))
    sent_on = 0

    async def ask() -> None:
        nonlocal sent_on
        async with world.http1() as connection:
            for number in todo:
                if number % 10 == 9:
                    method, path, status = OWN[number // 10 % len(OWN)]
                    assert (await connection.ask(method, path)).status == status
                    continue
                method, path, pairs, body = SENT[number % len(SENT)]
                reply = await connection.ask(method, path, pairs, body)
                assert reply.status == 200, reply
                sent_on += 1

    await asyncio.gather(*(ask() for _ in range(WORKERS)))
    await asyncio.gather(*(give_up(world, number) for number in range(ABORTED)))
    await world.until_idle()
    assert (await world.page()).total(STREAMS) == 0
    await world.until_outcomes({"success": sent_on, "aborted": ABORTED})
    assert complaints(world) == []


async def give_up(world: World, number: int) -> None:
    """A client leaves while its answer is awaited, or in the middle of it."""
    is_stream = bool(number % 2)
    mark = fresh("abort")
    async with world.http1() as connection:
        body = chat("m", stream=is_stream, max_tokens=20_000)
        pairs: list[Pair] = [("x-mark", mark)]
        if number % 4 < 2:
            pairs.append(("x-llmgw-model", "m"))
        await connection.send(head("POST", CHAT, pairs, length=len(body)) + body)
        if is_stream:
            assert (await connection.start()).status == 200
            await connection.until(b"data: ")
        else:
            await until(lambda: has_arrived(world, mark), "the request is at an engine")
        if number % 3:
            connection.reset()


async def has_arrived(world: World, mark: str) -> bool:
    """Whether an engine has the request with that mark."""
    return any(
        received.header("x-mark") == [mark.encode()]
        for engine in world.engines.values()
        for received in engine.requests
    )
