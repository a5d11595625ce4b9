"""The ring places sessions as the bounded-load algorithm says, and moves few of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh64

from extproc.routing.ring import VIRTUAL_NODES, Ring, bounded_target, load_limit, session_hash

HASHES = st.integers(0, 2**64 - 1)
SMALL = settings(deadline=None, max_examples=60)


def names(count: int, prefix: str = "gpu") -> list[str]:
    """That many ids."""
    return [f"{prefix}-{number}" for number in range(count)]


def some_hashes(count: int, seed: int = 1) -> list[int]:
    """That many places on the circle."""
    random = Random(seed)
    return [random.getrandbits(64) for _ in range(count)]


def oracle(key_hash: int, ids: list[str], inflight: list[int], factor: float) -> int:
    """Bounded-load consistent hashing in the plainest form; -1 when there are no candidates.

    64 nodes an endpoint, sorted by hash, walked from the first at or after the key. Over the
    limit is more in-flight than factor times the average, where that limit is at least 1; with
    all over it the first target keeps the key.
    """
    if not ids:
        return -1
    if len(ids) == 1:
        return 0
    nodes = sorted(
        (xxh64(f"{name}#{number // 10}{number % 10}".encode()).intdigest(), index)
        for index, name in enumerate(ids)
        for number in range(64)
    )
    ceiling = max(1.0, sum(inflight) / len(ids) * factor)
    start = bisect_left([node[0] for node in nodes], key_hash)
    walk = [index for _, index in nodes[start:] + nodes[:start]]
    return next((index for index in walk if inflight[index] <= ceiling), walk[0])


@SMALL
@given(
    key_hash=HASHES,
    inflight=st.lists(st.integers(0, 40), max_size=12),
    factor=st.sampled_from([0.5, 1.0, 1.25, 2.0]),
    prefix=st.sampled_from(["a", "gpu-", "ünï"]),
)
def test_without_slack_the_target_is_the_reference_algorithms(
    key_hash: int, inflight: list[int], factor: float, prefix: str
) -> None:
    """Same hash, same nodes, same limit, same walk, for any load."""
    ids = names(len(inflight), prefix)
    target = bounded_target(Ring(ids), key_hash, inflight, factor=factor, slack=0.0)
    assert (-1 if target is None else target) == oracle(key_hash, ids, inflight, factor)


@SMALL
@given(
    key_hash=HASHES,
    loads=st.lists(st.tuples(st.integers(0, 60), st.floats(0.1, 8.0)), min_size=2, max_size=10),
    slack=st.sampled_from([0.0, 4.0]),
)
def test_the_target_is_the_first_within_its_limit_or_else_the_first(
    key_hash: int, loads: list[tuple[int, float]], slack: float
) -> None:
    """No session goes to an endpoint over its limit while one within it exists."""
    ring = Ring(names(len(loads)))
    inflight = [load for load, _ in loads]
    weights = [weight for _, weight in loads]
    mean, mean_weight = sum(inflight) / len(loads), sum(weights) / len(loads)
    fits = [
        load <= max(1.0, 1.25 * mean * (weight / mean_weight)) + slack for load, weight in loads
    ]
    walk = list(ring.targets(key_hash))
    target = bounded_target(ring, key_hash, inflight, weights=weights, slack=slack)
    assert target == next((position for position in walk if fits[position]), walk[0])


@SMALL
@given(count=st.integers(2, 8), seed=st.integers(0, 1000), slack=st.sampled_from([0.0, 4.0]))
def test_placing_one_after_another_keeps_the_bound(count: int, seed: int, slack: float) -> None:
    """Even when every session has the same key, nobody gets further than one over its limit."""
    ring = Ring(names(count))
    inflight = [0] * count
    key_hash = some_hashes(1, seed)[0]
    for _ in range(60):
        target = bounded_target(ring, key_hash, inflight, slack=slack)
        assert target is not None
        inflight[target] += 1
    assert max(inflight) <= load_limit(60 / count, 1.0, 1.25, slack) + 1


def test_an_idle_pool_keeps_affinity() -> None:
    """The limit never falls below one request plus the slack."""
    assert load_limit(0.0, 1.0, 1.25, 0.0) == 1.0
    assert load_limit(0.2, 1.0, 1.25, 4.0) == 5.0
    assert load_limit(8.0, 0.5, 1.25, 4.0) == 9.0


def test_no_candidates_and_a_single_one_need_no_walk() -> None:
    """None for nobody; the only one whatever its load."""
    assert bounded_target(Ring([]), 1, []) is None
    assert list(Ring([]).targets(1)) == []
    assert bounded_target(Ring(["only"]), 1, [10_000], slack=0.0) == 0


@SMALL
@given(key_hash=HASHES, count=st.integers(1, 20))
def test_a_walk_meets_every_position_once(key_hash: int, count: int) -> None:
    """All of them, distinct, from any start, the ends of the circle included."""
    ring = Ring(names(count))
    assert len(ring) == count
    for start in (key_hash, 0, 2**64 - 1):
        assert sorted(ring.targets(start)) == list(range(count))


def test_a_key_on_a_node_belongs_to_it() -> None:
    """The walk starts at the first node at or after the key."""
    ids = names(5)
    ring = Ring(ids)
    for position, name in enumerate(ids):
        for number in (0, 7, VIRTUAL_NODES - 1):
            node = xxh64(f"{name}#{number:02d}".encode()).intdigest()
            assert next(ring.targets(node)) == position


def test_the_order_of_ids_does_not_move_a_session() -> None:
    """Placement is by name, not by position."""
    ids = names(9)
    straight, reverse = Ring(ids), Ring(ids[::-1])
    for key_hash in some_hashes(200):
        here = [straight.ids[position] for position in straight.targets(key_hash)]
        there = [reverse.ids[position] for position in reverse.targets(key_hash)]
        assert here == there


@SMALL
@given(count=st.integers(2, 12), seed=st.integers(0, 10_000))
def test_only_the_keys_of_the_changed_endpoint_move(count: int, seed: int) -> None:
    """Adding one of N moves about 1/N of the keys, all to it; removing it moves them back."""
    ids = names(count + 1)
    small, large = Ring(ids[:-1]), Ring(ids)
    keys = some_hashes(400, seed)
    moved = 0
    for key_hash in keys:
        before, after = next(small.targets(key_hash)), next(large.targets(key_hash))
        if before != after:
            assert after == count
            moved += 1
    # 64 nodes place a share of 1/N within a factor of two or so; 400 keys add their own noise.
    assert moved / len(keys) <= 2.0 / (count + 1) + 0.05


def test_shares_are_even() -> None:
    """With 64 nodes each, nobody has less than half or more than twice its share."""
    ring = Ring(names(10))
    shares = Counter(next(ring.targets(key_hash)) for key_hash in some_hashes(20_000))
    assert min(shares.values()) > 1000
    assert max(shares.values()) < 4000


def test_a_session_is_scoped_by_its_model() -> None:
    """The key alone is not a session, and the NUL keeps model and key apart."""
    assert session_hash("llama", b"alice") == xxh64(b"llama\0alice").intdigest()
    assert session_hash("llama", b"alice") != session_hash("qwen", b"alice")
    assert session_hash("ab", b"c") != session_hash("a", b"bc")
    raw = "modèle".encode() + b"\0\xff\x00"
    assert session_hash("modèle", b"\xff\x00") == xxh64(raw).intdigest()
