"""Requests share tables, and tables come and go with what they are made of."""

from __future__ import annotations

from dataclasses import replace

from fleet import MODEL, NOW, Fleet, an_engine, an_external

from extproc.routing.decision import Query
from extproc.routing.endpoint import Kind, Peer
from extproc.routing.filters import Filter
from extproc.routing.policy import Restriction
from extproc.routing.strategy import BUILT_IN
from extproc.routing.table import Table
from extproc.routing.tables import MAX_CLOSED_TABLES, MAX_LIMITED_TABLES, MAX_LIMITS, Tables

PLAIN = Query(MODEL)


def tables_of(fleet: Fleet) -> Tables:
    """The fleet's tables."""
    return Tables(fleet.registry, BUILT_IN, "chat")


def table_for(tables: Tables, query: Query) -> Table:
    """The table that there must be."""
    table = tables.of(query, NOW)
    assert table is not None
    return table


def resident(label: str) -> Query:
    """A request that must stay in a place."""
    return Query(MODEL, restriction=Restriction(residency=frozenset({label})))


def test_a_strategy_has_one_table() -> None:
    """The same for every request; an unknown strategy is the default one."""
    tables = tables_of(Fleet(an_engine("a"), an_engine("b")))
    table = table_for(tables, PLAIN)
    assert table.strategy.name == "chat"
    assert table_for(tables, Query(MODEL, 7, 100)) is table
    assert table_for(tables, Query(MODEL, strategy="unheard of")) is table
    assert table_for(tables, Query(MODEL, restriction=Restriction())) is table
    assert table_for(tables, Query(MODEL, strategy="batch")).strategy.name == "batch"


def test_a_model_that_nobody_serves_has_no_table() -> None:
    """Restricted or not."""
    tables = tables_of(Fleet(an_engine("a")))
    assert tables.of(Query("other"), NOW) is None
    assert tables.of(Query("other", restriction=Restriction(own_only=True)), NOW) is None


def test_equal_choices_share_a_table() -> None:
    """However a request says it, what matters is whom it leaves out."""
    tables = tables_of(Fleet(an_engine("a"), an_external("b")))
    limited = table_for(tables, resident("eu"))
    assert limited.excluded == (None, Filter.POLICY)
    assert table_for(tables, resident("us")) is limited
    own = Query(MODEL, restriction=Restriction(own_only=True))
    assert table_for(tables, own) is limited
    assert table_for(tables, replace_strategy(own, "batch")) is not limited
    by_kind = table_for(tables, Query(MODEL, kinds=frozenset({Kind.ENGINE})))
    assert by_kind.excluded == (None, Filter.KIND)


def replace_strategy(query: Query, name: str) -> Query:
    """The query under another strategy."""
    return Query(query.model, restriction=query.restriction, strategy=name)


def test_who_is_limited_to_everyone_shares_the_plain_table() -> None:
    """A restriction that leaves nobody out is none."""
    tables = tables_of(Fleet(an_engine("a"), an_engine("b")))
    limited = table_for(tables, resident("eu"))
    assert limited is table_for(tables, PLAIN)
    everyone = Query(MODEL, subset=frozenset({"a", "b"}))
    assert table_for(tables, everyone) is limited


def test_junk_labels_do_not_fill_the_memory() -> None:
    """What clients make up is one restriction."""
    tables = tables_of(Fleet(an_engine("a"), an_external("b", residency="eu")))
    for number in range(50):
        table_for(tables, resident(f"junk{number}"))
    assert len(tables._limits) == 1
    assert table_for(tables, resident("eu")) is table_for(tables, PLAIN)


def test_visited_clusters_leave_their_peers_out() -> None:
    """A request never goes back to a cluster that it passed through."""
    infos = [
        replace(an_external(name), kind=Kind.PEER, peer=Peer(name, f"cluster-{name}"))
        for name in ("p", "q")
    ]
    tables = tables_of(Fleet(*infos))
    query = Query(MODEL, restriction=Restriction(visited=frozenset({"cluster-q", "elsewhere"})))
    assert table_for(tables, query).excluded == (None, Filter.POLICY)


def test_limited_tables_are_bounded() -> None:
    """The one used longest ago gives way and is not marked any more."""
    names = [f"e{number:02}" for number in range(MAX_LIMITED_TABLES + 2)]
    fleet = Fleet(*map(an_engine, names))
    tables = tables_of(fleet)

    def only(name: str) -> Query:
        return Query(MODEL, subset=frozenset({name}))

    first = table_for(tables, only(names[0]))
    second = table_for(tables, only(names[1]))
    for name in names[2:MAX_LIMITED_TABLES]:
        table_for(tables, only(name))
    assert table_for(tables, only(names[0])) is first
    table_for(tables, only(names[-1]))
    assert table_for(tables, only(names[0])) is first
    assert table_for(tables, only(names[1])) is not second
    assert all(len(fleet.live(name).watchers) == MAX_LIMITED_TABLES for name in names)


def test_limits_are_bounded() -> None:
    """Ever new subsets are forgotten, the first first, and the table is found again."""
    tables = tables_of(Fleet(an_engine("a"), an_engine("b")))
    table = table_for(tables, Query(MODEL, subset=frozenset({"a"})))
    for number in range(MAX_LIMITS + 5):
        query = Query(MODEL, subset=frozenset({"a", f"x{number}"}))
        assert table_for(tables, query) is table
    assert len(tables._limits) == MAX_LIMITS


def test_a_table_stays_while_its_endpoints_do() -> None:
    """A change elsewhere makes no new table; one of its own endpoints does."""
    fleet = Fleet(an_engine("a"), replace(an_engine("b"), models=("other",)))
    tables = tables_of(fleet)
    table, limited = table_for(tables, PLAIN), table_for(tables, Query(MODEL, subset=frozenset()))
    fleet.registry.replace([an_engine("a")], NOW)
    assert table_for(tables, PLAIN) is table
    assert table_for(tables, Query(MODEL, subset=frozenset())) is limited
    fleet.registry.replace([an_engine("a", weight=0.5)], NOW)
    assert table_for(tables, PLAIN) is not table
    assert table_for(tables, Query(MODEL, subset=frozenset())) is not limited
    fleet.registry.replace([], NOW)
    assert tables.of(PLAIN, NOW) is None


def test_a_gone_model_leaves_nothing_behind() -> None:
    """Its ring and its turns go with it."""
    fleet = Fleet(an_engine("a"))
    tables = tables_of(fleet)
    tables.ring(table_for(tables, PLAIN))
    tables.turns[MODEL] = "a"
    fleet.registry.replace([replace(an_engine("a"), models=("other",))], NOW)
    table_for(tables, Query("other"))
    assert not tables._rings
    assert not tables.turns


def test_a_ring_is_built_when_membership_changes() -> None:
    """Tables of one model share it; another list of ids is another ring."""
    fleet = Fleet(an_engine("a"), an_engine("b"))
    tables = tables_of(fleet)
    ring = tables.ring(table_for(tables, PLAIN))
    assert tables.ring(table_for(tables, Query(MODEL, strategy="batch"))) is ring
    fleet.registry.replace([an_engine("a"), an_engine("b", weight=0.5)], NOW)
    assert tables.ring(table_for(tables, PLAIN)) is ring
    fleet.registry.replace([an_engine("a"), an_engine("c")], NOW)
    assert tables.ring(table_for(tables, PLAIN)).ids == ("a", "c")


def test_closed_tables_are_explained_for_a_while() -> None:
    """The past of the last eight closed tables is kept."""
    fleet = Fleet(an_engine("a"))
    tables = tables_of(fleet)
    closed = []
    for number in range(MAX_CLOSED_TABLES + 2):
        closed.append(table_for(tables, PLAIN))
        fleet.registry.replace([an_engine("a", weight=2.0 + number)], NOW)
    table_for(tables, PLAIN)
    known = [table.rows_at(0) is not None for table in closed]
    assert known == [False, False] + [True] * MAX_CLOSED_TABLES
