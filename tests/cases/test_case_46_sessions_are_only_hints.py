"""A session id is a hint: of any size and number it costs no memory, steers and leaks nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from random import Random

import pytest
import pytest_asyncio
from case_bodies import chat
from case_fleet import spread
from case_http1 import CHAT, Pair, Reply
from case_world import World, case, endpoints, fresh, standing

from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine

pytestmark = case(46)

FOUR = ("a", "b", "c", "d")
OTHERS = ("x", "y")
CONFIG = endpoints(*FOUR) + "".join(
    f'  - {{id: {name}, url: "${name}", models: [other]}}\n' for name in OTHERS
)
HEADER = "x-session-id"
# Every header that may carry a session, and the place in the body.
HEADERS = (
    "x-llmgw-session",
    "x-session-id",
    "x-claude-code-session-id",
    "x-session-affinity",
    "session-id",
    "session_id",
)
MIB = 1024 * 1024
CONNECTIONS = 16


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Four engines of one model and two of another."""
    settings = EngineSettings(
        max_running=1000, decode_tokens_per_second=100_000, shortest_step_seconds=0.0005
    )
    engines = [LabEngine(name, ("m", "other"), settings=settings) for name in (*FOUR, *OTHERS)]
    async with standing(tmp_path_factory.mktemp("case"), CONFIG, *engines) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> World:
    """The same, with nothing in flight."""
    await started.forget()
    return started


async def homes(
    world: World, asked: Iterable[Sequence[Pair]], body: bytes | None = None
) -> Counter[str]:
    """Where these requests are served, one after the other; nobody is refused."""
    where: Counter[str] = Counter()
    async with world.http1() as connection:
        for pairs in asked:
            reply = await connection.ask("POST", CHAT, pairs, body or chat("m"))
            assert reply.status == 200, reply
            where[reply.served_by] += 1
    return where


async def flood(world: World, ids: Sequence[str]) -> None:
    """A request for each of the ids, many at a time; nobody is refused."""
    waiting = iter(ids)

    async def ask() -> None:
        async with world.http1() as connection:
            for one in waiting:
                reply = await connection.ask("POST", CHAT, [(HEADER, one)], chat("m"))
                assert reply.status == 200, reply

    await asyncio.gather(*(ask() for _ in range(CONNECTIONS)))


def random_ids(number: int, size: int = 32) -> list[str]:
    """So many ids of which no two are alike."""
    random = Random(number)
    return [f"{random.getrandbits(4 * size):0{size}x}" for _ in range(number)]


async def assert_still_kept(world: World) -> None:
    """New sessions are served, spread, and come back to where they were."""
    ids = random_ids(40)
    first = [await homes(world, [[(HEADER, one)]]) for one in ids]
    again = [await homes(world, [[(HEADER, one)]]) for one in ids]
    assert first == again
    assert len({next(iter(one)) for one in first}) > 1


async def test_many_ids(world: World) -> None:
    """Thousands that nobody repeats: each is served, and the service hardly grows."""
    await flood(world, random_ids(500))
    before = world.service_rss_bytes()
    await flood(world, random_ids(2000))
    assert world.service_rss_bytes() - before < 8 * MIB
    await assert_still_kept(world)


async def test_long_ids_are_not_kept(world: World) -> None:
    """Only their hash is: twenty megabytes of ids leave no trace."""
    ids = random_ids(400, 50_000)
    await flood(world, ids[:40])
    before = world.service_rss_bytes()
    await flood(world, ids)
    assert world.service_rss_bytes() - before < 10 * MIB
    # To the last character, they are different sessions.
    near = [ids[0] + str(number) for number in range(40)]
    where = await homes(world, [[(HEADER, one)] for one in near])
    assert len(where) > 1
    assert await homes(world, [[(HEADER, near[0])]] * 10) == await homes(
        world, [[(HEADER, near[0])]] * 10
    )


async def test_an_id_that_is_too_long_for_a_header(world: World) -> None:
    """A hundred kilobytes: no header is so long for Envoy, and its request is not sent on."""
    # Envoy closes while the rest is still being sent, and its answer may get lost by that.
    with suppress(EOFError, OSError):
        assert (await world.post((HEADER, "x" * 100_000))).status == 431
    assert world.requests() == {}


async def test_ids_in_the_body(world: World) -> None:
    """Up to 8 KiB they are as good as any; a longer one is none, and no reason to refuse."""
    for size in (1, 100, 8_000):
        body = chat("m", prompt_cache_key=fresh("x" * size))
        assert len(await homes(world, [[]] * 10, body)) == 1, size
    await homes(world, [[]] * 10, chat("m", prompt_cache_key="x" * 100_000))


@pytest.mark.parametrize("name", HEADERS)
async def test_an_empty_id_is_none(world: World, name: str) -> None:
    """It is not one session of everybody: requests go to all."""
    assert len(await homes(world, [[(name, "")]] * 40)) == len(FOUR)
    await world.until_idle()
    where = await spread(world, 40, (name, ""))
    assert where == dict.fromkeys(FOUR, 10)


async def test_an_empty_id_in_the_body_is_none(world: World) -> None:
    """Nor there, and an empty header does not hide the id of the body."""
    assert len(await homes(world, [[]] * 40, chat("m", prompt_cache_key=""))) == len(FOUR)
    body = chat("m", prompt_cache_key=fresh("key"))
    assert len(await homes(world, [[(HEADER, "")]] * 10, body)) == 1


@pytest.mark.parametrize("name", HEADERS)
async def test_a_header_that_comes_twice(world: World, name: str) -> None:
    """It is served, and always at the same place."""
    one, other = fresh("one"), fresh("other")
    assert len(await homes(world, [[(name, one), (name, other)]] * 10)) == 1
    # All of them at once are one session too.
    everywhere = [(header, fresh("id")) for header in HEADERS]
    assert len(await homes(world, [everywhere] * 10)) == 1


async def test_any_bytes(world: World) -> None:
    """What is not text, looks like a number or like code is an id like any other."""
    ids = (
        b"\xff\xfe\x80",
        "é€".encode(),
        b"0",
        b"-1",
        b"null",
        b"a,b;c=d",
        b"../../etc/passwd",
        b"${jndi:ldap://127.0.0.1/a}",
        b"' OR 1=1 --",
        b"%00%0d%0a",
        b"\t spaced \t",
        b"a" * 300,
    )
    for one in ids:
        assert len(await homes(world, [[(HEADER, one)]] * 6)) == 1, one


def forged(world: World) -> list[str]:
    """Ids that name an endpoint in every way that we or others have of naming one."""
    found: list[str] = []
    for name in OTHERS:
        engine = world.engines[name]
        found += [name, f"{name}#00", f"{name}#63", f"ep:{name}", f"endpoint/{name}"]
        found += [engine.url, engine.authority, f"{engine.authority},127.0.0.1:1"]
        found += [
            f'{{"endpoint": "{name}"}}',
            f"other\x00{name}".replace("\x00", "%00"),
        ]
    return found


async def test_a_forged_id_steers_nowhere(world: World) -> None:
    """An id is hashed with the model that was asked for, so that it names nothing."""
    tokens = forged(world)
    where = await homes(world, [[(header, token)] for token in tokens for header in HEADERS])
    assert where.keys() <= set(FOUR)
    for token in tokens:
        body = chat("m", prompt_cache_key=token)
        assert (await homes(world, [[]], body)).keys() <= set(FOUR)
    assert world.engines["x"].counters.requests == world.engines["y"].counters.requests == 0


async def test_an_id_is_another_one_under_another_model(world: World) -> None:
    """The same id for two models: each has its own endpoint for it, among its own."""
    session = (HEADER, fresh("shared"))
    for model, names in (("m", FOUR), ("other", OTHERS)):
        replies = [await world.post(session, model=model) for _ in range(5)]
        assert len({reply.served_by for reply in replies}) == 1
        assert replies[0].served_by in names


def leaks(world: World, reply: Reply) -> set[str]:
    """The addresses of engines that are anywhere in an answer."""
    said = reply.body + "\n".join(f"{name}: {value}" for name, value in reply.headers).encode()
    return {
        engine.authority
        for engine in world.engines.values()
        if engine.authority.encode() in said or str(engine.port).encode() in said
    }


async def test_an_answer_names_no_address(world: World) -> None:
    """Neither with an id nor without, neither an engine's answer nor our own."""
    for pairs in ([(HEADER, fresh("id"))], [(HEADER, "a")], []):
        for model, status in (("m", 200), ("nobody", 404)):
            reply = await world.post(*pairs, model=model)
            assert reply.status == status
            assert leaks(world, reply) == set()
            assert not any(name.startswith("x-llmgw-cluster") for name, _ in reply.headers)
