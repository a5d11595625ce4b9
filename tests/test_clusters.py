"""Cluster names: an endpoint's is found again, and nobody else's is taken for one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.clusters import (
    ACCESS_LOG,
    EXT_PROC,
    NONE,
    PICKED,
    cluster_name,
    endpoint_id,
    pool_name,
)


@settings(deadline=None)
@given(st.text())
def test_an_endpoint_is_found_by_its_clusters_name(name: str) -> None:
    """Whatever its id."""
    assert endpoint_id(cluster_name(name)) == name


@settings(deadline=None)
@given(st.text())
def test_a_pool_is_no_endpoint(model: str) -> None:
    """Whatever its model."""
    assert endpoint_id(pool_name(model)) is None


def test_the_clusters_of_ours_are_no_endpoints() -> None:
    """Nor is the name of no cluster."""
    for name in (ACCESS_LOG, EXT_PROC, NONE, PICKED, ""):
        assert endpoint_id(name) is None
