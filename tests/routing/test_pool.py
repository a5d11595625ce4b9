"""A pool keeps its candidates in order and knows what they have in common."""

from __future__ import annotations

import pytest
from fleet import a_row
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.pool import POSITION_BITS, POSITION_MASK, Group, Pool, key_of
from extproc.routing.rows import KV, LOAD, QUEUE, STALE, Scores
from extproc.routing.strategy import Weights

EIGHTH = 2**27


def scores(total: float, signature: int = 0, queue: float = 0.0, kv: float = 0.0) -> Scores:
    """Scores with this total."""
    return Scores(signature, queue, kv, 0.0, 0.0, total)


def added(pool: Pool, position: int, made: Scores, class_id: int = 0) -> Group | None:
    """A candidate with one request of ours is in the pool."""
    row = a_row(position=position, inflight=1)
    return pool.add(row, made, 0.5, class_id)


def test_keys_sort_by_score_and_then_by_position() -> None:
    """A key holds both."""
    assert key_of(0.5, 3) < key_of(0.5, 4) < key_of(0.5 + 2**-30, 0)
    assert key_of(0.5, 3) & POSITION_MASK == 3
    assert key_of(0.5, 3) >> POSITION_BITS == 2**29


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=40))
def test_what_comes_and_goes_leaves_the_pool_as_if_built_at_once(
    moves: list[tuple[int, bool]],
) -> None:
    """Lists, sums and groups depend on who is there, not on how they came."""
    pool = Pool(0, 9)
    there: dict[int, Group | None] = {}
    made = {n: scores(n / 8, (QUEUE, 0, KV)[n % 3], queue=n / 16) for n in range(9)}
    for position, comes in moves:
        if comes and position not in there:
            there[position] = added(pool, position, made[position], position % 2)
        elif not comes and position in there:
            gone = made[position]
            pool.count(-1, -gone.queue, -gone.kv, -gone.load)
            pool.remove(position, key_of(gone.total, position), 0.5, there.pop(position))
    built = Pool(0, 9)
    for position in sorted(there):
        row = a_row(position=position, inflight=1)
        built.append(row, made[position], 0.5, position % 2)
    built.sort()
    assert pool.usable == built.usable == sorted(there)
    assert (pool.inflight, pool.rel, pool.queue) == (built.inflight, built.rel, built.queue)
    described = [(g.class_id, g.signature, g.keys) for g in pool.groups]
    assert described == [(g.class_id, g.signature, g.keys) for g in built.groups]


def test_groups_stand_in_a_fixed_order() -> None:
    """By class, then by what they lack; an empty one is gone."""
    pool = Pool(0, 4)
    added(pool, 0, scores(0.5, QUEUE), class_id=1)
    first = added(pool, 1, scores(0.5, KV), class_id=0)
    added(pool, 2, scores(0.5), class_id=0)
    order = [(group.class_id, group.signature) for group in pool.groups]
    assert order == [(0, 0), (0, KV), (1, QUEUE)]
    pool.remove(1, key_of(0.5, 1), 0.5, first)
    assert [(group.class_id, group.signature) for group in pool.groups] == [(0, 0), (1, QUEUE)]


def test_what_is_lacking_counts_for_the_mean_of_those_who_have_it() -> None:
    """The mean over the candidates with the signal, half the weight where none has it."""
    pool = Pool(0, 4)
    added(pool, 0, scores(0.25, queue=0.25))
    added(pool, 1, scores(0.5, queue=0.5))
    added(pool, 2, scores(0.0, QUEUE | KV))
    weights = Weights(queue=0.5, kv=0.25, load=0.25)
    assert pool.means(weights) == (0.375, 0.0, 0.0)
    assert pool.set_offsets(weights) == {0: 0, QUEUE | KV: 3 * EIGHTH}
    assert [group.offset for group in pool.groups] == [0, 3 * EIGHTH]
    alone = Pool(0, 4)
    added(alone, 2, scores(0.0, QUEUE | KV | LOAD))
    assert alone.means(weights) == (0.25, 0.125, 0.125)
    assert alone.set_offsets(weights) == {QUEUE | KV | LOAD: 4 * EIGHTH}


def test_what_is_stale_counts_for_a_little_less() -> None:
    """0.01 of each weight less."""
    pool = Pool(0, 4)
    added(pool, 0, scores(0.5, queue=0.5))
    added(pool, 1, scores(0.0, QUEUE | STALE))
    offsets = pool.set_offsets(Weights(queue=0.5))
    assert offsets[QUEUE | STALE] == pytest.approx((0.5 - 0.005) * 2**30, abs=1)


def test_a_slow_candidate_stands_in_no_group_and_counts() -> None:
    """It is in every sum, and its signature has an offset."""
    pool = Pool(0, 4)
    row = a_row(position=1, inflight=3, slow_from=7.0)
    assert pool.add(row, scores(0.5, KV), 1.0, 0) is None
    added(pool, 0, scores(0.25, queue=0.25))
    assert pool.usable == [0, 1]
    assert pool.inflight == 4
    assert len(pool.slow) == 1
    assert set(pool.set_offsets(Weights(queue=0.5, kv=0.5))) == {0, KV}
    pool.remove(1, 0, 1.0, None)
    assert not pool.slow
    pool.append(row, scores(0.5), 1.0, 0)
    assert len(pool.slow) == 1


def test_a_moved_key_is_in_its_new_place() -> None:
    """A group stays sorted."""
    group = Group(0, 0)
    group.keys = [10, 20, 30]
    group.move(10, 25)
    assert group.keys == [20, 25, 30]
