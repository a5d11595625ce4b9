"""A request goes where the service decided, in whichever phase that was."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from case_bodies import FORM_TYPE, chat, form
from case_http1 import CHAT, Pair
from case_world import World, case, fresh, standing

from extproc import headers
from extproc.config.values import Steering
from extproc.lab.engine_http import LabEngine

pytestmark = case(1)

# Sessions spread over a, b and c; d calls the model otherwise, so its body is decided on.
CONFIG = """
endpoints:
  - {id: a, url: "$a", models: [m]}
  - {id: b, url: "$b", models: [m]}
  - {id: c, url: "$c", models: [m]}
  - {id: d, url: "$d", models: [other], upstream_model: its-own-name}
"""
FEWEST = 12
# One of three engines gets none of so many sessions once in ten million runs.
MOST = 40
FORM = "/v1/audio/transcriptions"
REALTIME = "/v1/realtime"

ASKED = {
    "get, model in the query": ("GET", f"{REALTIME}?model=m", [], None),
    "get, model in a header": ("GET", REALTIME, [("x-llmgw-model", "m")], None),
    "post, model in a header": ("POST", CHAT, [("x-llmgw-model", "m")], chat("other")),
    "post, model in an alias header": ("POST", CHAT, [("x-ai-eg-model", "m")], chat("other")),
    "post, model in the body": ("POST", CHAT, [], chat("m")),
    "post, model in a form": ("POST", FORM, [("content-type", FORM_TYPE)], form("m")),
    # Without a decision these go to a cluster without hosts.
    "post, restricted, in a header": (
        "POST",
        CHAT,
        [("x-llmgw-model", "m"), ("x-llmgw-residency", "eu")],
        chat("m"),
    ),
    "post, restricted, in the body": ("POST", CHAT, [("x-llmgw-no-store", "1")], chat("m")),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(Steering))
async def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    """Four echoing engines, steered in each of the three ways."""
    engines = [LabEngine(name, echo=True) for name in "abcd"]
    folder = tmp_path_factory.mktemp("case")
    async with standing(
        folder, CONFIG, *engines, steering=request.param, has_request_log=True
    ) as running:
        yield running


@pytest.mark.parametrize("how", list(ASKED))
async def test_the_request_is_where_the_log_says(world: World, how: str) -> None:
    """For sessions of every engine, of which none is a default."""
    await world.forget()
    method, path, pairs, body = ASKED[how]
    served: list[str] = []
    while len(served) < FEWEST or set(served) < set("abc"):
        assert len(served) < MOST, served
        extra: list[Pair] = [*pairs, ("x-session-id", fresh("session"))]
        reply = await world.ask(method, path, extra, body)
        assert reply.status == 200, reply
        served.append(reply.served_by)
        await world.until_idle()
    assert await world.decided(len(served)) == [(name,) for name in served]
    assert world.requests() == {name: served.count(name) for name in "abc"}


async def test_a_decision_that_changes_the_body(world: World) -> None:
    """The route follows the reply to the body, and the body is the one that belongs there."""
    await world.forget()
    reply = await world.post(model="other")
    assert reply.status == 200
    (received,) = world.engines["d"].requests
    assert json.loads(received.body_start)["model"] == "its-own-name"
    assert await world.decided(1) == [("d",)]
    assert world.requests() == {"d": 1}


async def test_engines_see_no_steering(world: World) -> None:
    """What the route followed is removed before the engine sees the request."""
    await world.forget()
    for pairs in ([], [("x-llmgw-model", "m")]):
        assert (await world.post(*pairs)).status == 200
    seen = [received for engine in world.engines.values() for received in engine.requests]
    assert len(seen) == 2
    for name in (*headers.REMOVED_BY_THE_ROUTE, headers.DECISION):
        assert [received.header(name) for received in seen] == [[], []]
