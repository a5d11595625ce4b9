"""Sessions stay with one engine, and many sessions are spread over all of them."""

from __future__ import annotations

import asyncio

import openai
import pytest
from e2e_world import CHAT, MODEL, World, chat, chat_body, fresh

from extproc.lab.records import Outcome

pytestmark = [
    pytest.mark.envoy,
    pytest.mark.xdist_group("e2e-sessions"),
    pytest.mark.asyncio(loop_scope="module"),
]


async def test_a_session_stays_with_one_engine(trio: World) -> None:
    """Though the others are as idle."""
    async with trio.openai() as client:
        for session in (fresh("session") for _ in range(5)):
            served = {(await chat(client, session)).system_fingerprint for _ in range(6)}
            assert len(served) == 1


async def test_many_sessions_use_every_engine(trio: World) -> None:
    """Each a fair part of them, and each session its own engine when it comes back."""
    sessions = [fresh("session") for _ in range(60)]
    async with trio.openai() as client:
        first = [(await chat(client, session)).system_fingerprint for session in sessions]
        again = [(await chat(client, session)).system_fingerprint for session in sessions]
    assert again == first
    assert min(first.count(name) for name in trio.engines) >= 6
    assert sum(trio.requests().values()) == 120


async def test_parallel_requests_of_a_session_stay_together(trio: World) -> None:
    """As long as their engine is not overloaded by them."""
    session = fresh("session")
    async with trio.openai() as client:
        answers = await asyncio.gather(*(chat(client, session) for _ in range(4)))
    assert len({answer.system_fingerprint for answer in answers}) == 1


async def test_a_session_does_not_overload_its_engine(trio: World) -> None:
    """Requests beyond what is fair go elsewhere."""
    session = fresh("session")
    for engine in trio.engines.values():
        engine.hold()

    async def held() -> None:
        async with trio.openai() as client:
            await chat(client, session)

    asking = [asyncio.create_task(held()) for _ in range(24)]
    try:
        (one, *_) = trio.engines.values()
        await one.until(lambda: sum(trio.requests().values()) == 24)
        assert max(trio.requests().values()) <= 16
    finally:
        for engine in trio.engines.values():
            engine.release()
        await asyncio.gather(*asking)


@pytest.mark.parametrize(
    "name",
    [
        "x-llmgw-session",
        "x-session-id",
        "x-claude-code-session-id",
        "x-session-affinity",
        "session-id",
        "session_id",
    ],
)
async def test_every_session_header_is_read(trio: World, name: str) -> None:
    """Whether the model is in the body or in a header."""
    where: set[str] = set()
    session = (name, fresh("session"))
    for number in range(6):
        extra = [session, ("x-llmgw-model", MODEL)] if number % 2 else [session]
        reply = await trio.ask("POST", CHAT, extra, chat_body())
        assert reply.status == 200
        where.add(reply.headers["x-served-by"])
    assert len(where) == 1


async def test_the_body_can_name_the_session(trio: World) -> None:
    """As OpenAI's clients do, with prompt_cache_key."""
    found: list[str | None] = []
    async with trio.openai() as client:
        for key in (fresh("key") for _ in range(8)):
            where = {await _cached(client, key) for _ in range(4)}
            assert len(where) == 1
            found += where
    assert len(set(found)) > 1


async def _cached(client: openai.AsyncOpenAI, key: str) -> str | None:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=4,
        prompt_cache_key=key,
    )
    return answer.system_fingerprint


async def test_without_a_session_requests_are_spread(trio: World) -> None:
    """Nothing that is missing counts as a session of its own."""
    for _ in range(30):
        assert (await trio.post()).status == 200
    assert len(trio.requests()) == 3
    assert all(r.outcome is Outcome.ANSWERED for e in trio.engines.values() for r in e.requests)
