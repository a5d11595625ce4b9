"""Who may serve a model while the service is down."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xds_world import config, endpoint

from extproc.config.reachable import largest_group
from extproc.routing.catalog import ModelEntry
from extproc.routing.endpoint import Auth, Info, Kind, SecretKind, SecretRef
from extproc.xds.pools import pools

URL = "http://192.0.2.1:80"
KEYS = (None, Auth(SecretRef(SecretKind.ENV, "K1")), Auth(SecretRef(SecretKind.ENV, "K2")))

infos = st.lists(
    st.builds(
        lambda number, kind, models, auth, drained, priority, upstream: replace(
            endpoint(f"e{number}", URL, *models, kind=kind),
            auth=auth,
            drained=drained,
            priority=priority,
            upstream_model=upstream,
        ),
        st.integers(0, 99),
        st.sampled_from(Kind),
        st.lists(st.sampled_from("mno"), min_size=1, unique=True),
        st.sampled_from(KEYS),
        st.booleans(),
        st.integers(-1, 1),
        st.sampled_from([None, "m"]),
    ),
    max_size=8,
    unique_by=lambda info: info.id,
)


@settings(deadline=None)
@given(infos)
def test_a_pool_holds_only_engines_that_may_serve_unseen(endpoints: list[Info]) -> None:
    """Our own, not drained, under the very name, all with the same key, in a stable order."""
    found = pools(config(*endpoints, models="mno"))
    for pool in found:
        assert pool.members
        for info in pool.members:
            assert info.kind is Kind.ENGINE
            assert not info.drained
            assert pool.model in info.models
            assert info.upstream_name(pool.model) == pool.model
            assert info.auth == pool.auth
        order = [(-info.priority, info.id) for info in pool.members]
        assert order == sorted(order)
    assert found == pools(config(*reversed(endpoints), models="mno"))


@settings(deadline=None)
@given(infos)
def test_the_largest_group_is_the_largest(endpoints: list[Info]) -> None:
    """No key is shared by more."""
    group = largest_group(endpoints)
    counts = [sum(info.auth == key for info in endpoints) for key in KEYS]
    assert len(group) == max(counts)


def test_of_equal_groups_the_one_with_the_first_id_is_taken() -> None:
    """So that the choice does not depend on the order of the file."""
    keyed = replace(endpoint("a", URL, "m"), auth=KEYS[1])
    assert largest_group([endpoint("b", URL, "m"), keyed]) == (keyed,)
    assert largest_group([]) == ()


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (ModelEntry("m"), ["m"]),
        (ModelEntry("other", aliases=("m",)), ["m"]),
        (ModelEntry("m", split=(("n", 1.0),)), []),
        (ModelEntry("n", aliases=("x",)), []),
    ],
)
def test_names_that_no_engine_serves_as_such_have_no_pool(
    entry: ModelEntry, expected: list[str]
) -> None:
    """Splits, aliases and models of the catalog alone."""
    configuration = replace(config(endpoint("a", URL, "m")), models=(entry,))
    assert [pool.model for pool in pools(configuration)] == expected
