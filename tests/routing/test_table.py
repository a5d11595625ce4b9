"""A table follows the registry change by change, and remembers how it was."""

from __future__ import annotations

import pytest
from fleet import IDLE, MODEL, NOW, Fleet, an_engine, an_external
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.endpoint import Stats
from extproc.routing.filters import Filter
from extproc.routing.pool import POSITION_BITS, Pool
from extproc.routing.strategy import Strategy, Weights
from extproc.routing.table import Table, TableSettings

NOBODY: frozenset[int] = frozenset()
ENGINES = tuple(an_engine(name) for name in "abcd")
ODD = Strategy("odd", Weights(1.1, 0.7, 1.3, 0.9, 0.3, 1.0), queue_knee=7.0, inflight_knee=9.3)


def shape(table: Table) -> object:
    """Everything that decisions read."""
    return (
        table.rows,
        table.keys,
        table.probing,
        [ticket.epoch for ticket in table.tickets],
        [pool_shape(pool) for pool in table.pools],
    )


def pool_shape(pool: Pool) -> object:
    """Everything in a pool that decisions read."""
    return (
        pool.usable,
        [(group.class_id, group.signature, group.keys) for group in pool.groups],
        set(pool.slow.entries),
        (pool.inflight, pool.rel, pool.queue, pool.kv, pool.load),
    )


_EVENTS = st.one_of(
    st.tuples(st.just("load"), st.integers(0, 3), st.integers(1, 3)),
    st.tuples(st.just("press"), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.just("break"), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.just("scrape"), st.integers(0, 3), st.integers(0, 5)),
    st.tuples(st.just("wait"), st.just(0), st.integers(1, 12)),
)


@given(st.lists(_EVENTS, max_size=20))
def test_a_followed_table_equals_a_new_one(events: list[tuple[str, int, int]]) -> None:
    """Renewing rows one by one comes, bit for bit, to what a table made now has."""
    weights = (1.0, 0.7, 0.0, 0.45)
    infos = [
        an_engine(name, weight=weight, priority=number // 3)
        for number, (name, weight) in enumerate(zip("abcd", weights, strict=True))
    ]
    fleet = Fleet(*infos)
    table = fleet.table(ODD)
    now = NOW
    for what, number, amount in events:
        name = "abcd"[number]
        if what == "load":
            fleet.load(name, amount, now)
        elif what == "press":
            fleet.registry.backpressure(fleet.live(name).ticket, now + amount, now)
        elif what == "break":
            fleet.break_until(name, now + amount, now)
        elif what == "scrape":
            stats = Stats(
                running=amount,
                waiting=amount or None,
                kv_usage_ratio=0.17 * amount,
                success_total=now * amount,
            )
            fleet.scrape(stats, name, now=now)
        else:
            now += amount
        table.refresh(now)
    for live in table.lives:
        live.touch()
    table.refresh(now)
    new = fleet.table(ODD, now)
    # A key is only of meaning while its candidate stands somewhere.
    stands = [row.is_candidate for row in new.rows]
    for there, position in zip(stands, range(4), strict=True):
        if not there:
            table.keys[position] = new.keys[position]
    assert shape(table) == shape(new)


def test_many_changes_at_once_are_as_many_single_ones() -> None:
    """More than half of a large table is rebuilt as a whole, with the same result."""
    infos = [an_engine(f"e{number:03}") for number in range(150)]
    fleet = Fleet(*infos)
    at_once = fleet.table()
    one_by_one = fleet.table()
    for number, info in enumerate(infos):
        fleet.load(info.id, 1 + number % 5)
        if number % 40 == 0:
            fleet.break_until(info.id, NOW + 1)
        one_by_one.refresh(NOW)
    at_once.refresh(NOW)
    stands = [row.is_candidate for row in at_once.rows]
    assert [pool_shape(pool) for pool in at_once.pools] == [
        pool_shape(pool) for pool in one_by_one.pools
    ]
    assert at_once.rows == one_by_one.rows
    assert stands.count(False) == 4
    assert at_once.probing == one_by_one.probing == set()
    at_once.refresh(NOW + 1)
    assert len(at_once.probing) == 4


def test_only_changed_rows_are_renewed() -> None:
    """A row that nothing happened to is the same object."""
    fleet = Fleet(*ENGINES)
    table = fleet.table()
    before = list(table.rows)
    fleet.load("b", 1)
    table.refresh(NOW)
    assert [new is old for new, old in zip(table.rows, before, strict=True)] == [
        True,
        False,
        True,
        True,
    ]


def test_rows_can_be_had_as_they_were() -> None:
    """What was decided on some changes ago is still known."""
    fleet = Fleet(*ENGINES)
    table = fleet.table()
    seen = []
    for step in range(6):
        seen.append((table.changes, list(table.rows)))
        fleet.load("abcd"[step % 4], step)
        fleet.break_until("d", NOW + step)
        table.refresh(NOW)
    assert all(table.rows_at(change) == rows for change, rows in seen)


def test_rows_of_long_ago_are_forgotten() -> None:
    """The memory is bounded, and says so."""
    fleet = Fleet(an_engine("a"))
    table = fleet.table()
    for _ in range(4200):
        fleet.live("a").touch()
        table.refresh(NOW)
    assert table.rows_at(0) is None
    assert table.rows_at(table.changes - 4000) is not None


def test_numbers_become_stale_by_time_alone() -> None:
    """At ten seconds they count, just after they do not, though nobody changed anything."""
    fleet = Fleet(an_engine("a"))
    table = fleet.table()
    table.refresh(NOW + 10)
    assert not table.rows[0].is_stale
    table.refresh(NOW + 10.001)
    assert table.rows[0].is_stale


def test_a_scrape_with_the_same_numbers_is_a_new_scrape() -> None:
    """The same Stats object again is fresh again, and teaches what it teaches."""
    fleet = Fleet(an_engine("a"))
    busy = Stats(running=9, waiting=1, kv_usage_ratio=0.5, success_total=10.0)
    fleet.scrape(busy, "a")
    table = fleet.table()
    fleet.load("a", 2)
    table.refresh(NOW)
    fleet.scrape(busy, "a", now=NOW + 8)
    table.refresh(NOW + 8)
    assert table.rows[0].scraped_at == NOW + 8
    assert table.rows[0].own == 0
    table.refresh(NOW + 17)
    assert not table.rows[0].is_stale
    table.refresh(NOW + 19)
    assert table.rows[0].is_stale


def test_a_slow_start_ends_by_time_alone() -> None:
    """After five seconds the endpoint stands in its group."""
    fleet = Fleet(*ENGINES[:2])
    fleet.registry.replace(ENGINES[:3], NOW)
    table = fleet.table()
    assert set(table.pools[0].slow.entries) == {2}
    table.refresh(NOW + 4.9)
    assert set(table.pools[0].slow.entries) == {2}
    table.refresh(NOW + 5)
    assert not table.pools[0].slow
    assert table.pools[0].usable == [0, 1, 2]


def test_alarms_do_not_pile_up() -> None:
    """An endpoint that is scraped for an hour has a few alarms, not one for each scrape."""
    fleet = Fleet(an_engine("a"))
    table = fleet.table()
    for step in range(1800):
        now = NOW + 2 * step
        fleet.scrape(IDLE, "a", now=now)
        fleet.registry.backpressure(fleet.live("a").ticket, now + 1, now)
        table.refresh(now)
    assert len(table._alarms) < 10


def test_the_highest_pool_with_a_candidate_goes_on() -> None:
    """Priorities are tried from the top, and a refused candidate is none."""
    fleet = Fleet(an_engine("a"), an_engine("b", priority=5), an_engine("c", priority=2))
    table = fleet.table()
    assert [pool.priority for pool in table.pools] == [5, 2, 0]
    assert table.candidates(NOBODY) is table.pools[0]
    assert table.candidates({1}) is table.pools[1]
    assert table.candidates({0, 1, 2}) is None
    fleet.break_until("b", NOW + 1)
    table.refresh(NOW)
    assert table.candidates(NOBODY) is table.pools[1]


def test_probes_are_due_in_and_above_the_pool_that_serves() -> None:
    """The highest priority first, then the first id; a pool below is not probed."""
    fleet = Fleet(
        an_engine("a", priority=1),
        an_engine("b", priority=2),
        an_engine("c", priority=2),
        an_engine("d", priority=1),
        an_engine("e"),
    )
    for name in "bcde":
        fleet.break_until(name, NOW + 1)
    table = fleet.table()
    assert table.due_probe(table.candidates(NOBODY), NOBODY) is None
    table.refresh(NOW + 1)
    pool = table.candidates(NOBODY)
    assert pool is not None
    assert pool.priority == 1
    assert table.due_probe(pool, NOBODY) == 1
    assert table.due_probe(pool, {1}) == 2
    assert table.due_probe(pool, {1, 2}) == 3
    assert table.due_probe(pool, {1, 2, 3}) is None
    assert table.due_probe(None, {1, 2, 3}) == 4


def test_what_the_request_rules_out_comes_after_the_endpoints_own_state() -> None:
    """An excluded endpoint that is also open is counted as open, and never probed."""
    fleet = Fleet(*ENGINES[:3])
    fleet.break_until("b", NOW + 1)
    left_out = (None, Filter.POLICY, Filter.POLICY)
    lives = fleet.registry.members(MODEL)
    settings = TableSettings(10.0, 5.0)
    table = Table(MODEL, lives, ODD, excluded=left_out, settings=settings, now=NOW)
    assert [row.dropped for row in table.rows] == [None, Filter.BREAKER, Filter.POLICY]
    table.refresh(NOW + 1)
    assert [row.dropped for row in table.rows] == [None, Filter.POLICY, Filter.POLICY]
    assert not table.probing


def test_a_ticket_is_of_the_breakers_epoch() -> None:
    """Opening makes a new epoch, and the next attempt is charged to it."""
    fleet = Fleet(an_engine("a"))
    table = fleet.table()
    fleet.break_until("a", NOW + 1)
    table.refresh(NOW + 1)
    assert table.tickets[0].epoch == fleet.live("a").breaker.epoch == 1
    assert table.tickets[0].generation == fleet.live("a").generation


def test_weights_are_relative_to_the_models_largest() -> None:
    """0 means 1, and even the smallest weight is more than nothing."""
    fleet = Fleet(
        an_engine("a", weight=0.0), an_engine("b", weight=4.0), an_engine("c", weight=1e-30)
    )
    table = fleet.table()
    assert table.rels == (0.25, 1.0, 2.0**-30)


def test_endpoints_that_can_stand_in_for_each_other_share_a_class() -> None:
    """One kind and one name for the model."""
    fleet = Fleet(
        an_engine("a"),
        an_external("b"),
        an_engine("c"),
        an_external("d", upstream_model="gpt"),
        an_external("e", upstream_model=MODEL),
    )
    assert fleet.table().class_of == (0, 1, 0, 2, 1)


def test_a_closed_table_is_marked_no_more() -> None:
    """The registry forgets the table and no other one, and the past is still there."""
    fleet = Fleet(*ENGINES[:1])
    table, other = fleet.table(), fleet.table()
    fleet.load("a", 1)
    table.refresh(NOW)
    rows = table.rows_at(0)
    table.close()
    fleet.load("a", 1)
    assert not table.dirty
    assert other.dirty == {0}
    assert table.rows_at(0) == rows
    table.forget()
    assert table.rows_at(0) is None
    assert table.rows_at(1) is None


def test_a_table_describes_its_endpoints_until_one_changes() -> None:
    """Another list, another object or another description is not what the table was made of."""
    fleet = Fleet(*ENGINES[:2])
    table = fleet.table()
    assert table.describes(fleet.registry.members(MODEL))
    fleet.registry.replace([*ENGINES[:2], an_engine("z")], NOW)
    assert not table.describes(fleet.registry.members(MODEL))
    fleet.registry.replace(ENGINES[:2], NOW)
    assert table.describes(fleet.registry.members(MODEL))
    fleet.registry.replace([ENGINES[0], an_engine("b", drained=True)], NOW)
    assert not table.describes(fleet.registry.members(MODEL))


@pytest.mark.parametrize("rate_known", [True, False])
def test_the_first_request_changes_what_a_candidate_lacks(*, rate_known: bool) -> None:
    """Idle, the load score is 1; with a request it needs a rate, and without one it is lacking."""
    fleet = Fleet(an_engine("a"), an_engine("b"))
    if rate_known:
        for second, total in ((0, 0.0), (1, 5.0)):
            busy = Stats(running=4, waiting=1, kv_usage_ratio=0.1, success_total=total)
            fleet.scrape(busy, "a", now=NOW + second)
    table = fleet.table(now=NOW + 1)
    fleet.load("a", 1, NOW + 1)
    table.refresh(NOW + 1)
    assert len(table.pools[0].groups) == (1 if rate_known else 2)
    assert table.keys[0] >> POSITION_BITS < table.keys[1] >> POSITION_BITS
