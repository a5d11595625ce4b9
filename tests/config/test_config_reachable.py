"""Which endpoints each steering can send to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from extproc.config.parse import parse
from extproc.config.reachable import reachable
from extproc.config.values import Steering

CONFIG = parse("""
cluster_id: home
endpoints:
  - {id: a, url: 'http://10.0.0.1', models: [m], api_key: 'env:KEY'}
  - {id: b, url: 'http://10.0.0.2', models: [m], api_key: 'env:KEY'}
  - {id: keyless, url: 'http://10.0.0.3', models: [m]}
  - {id: named, url: 'http://engine.test', models: [m], api_key: 'env:KEY'}
  - {id: provider, url: 'http://10.0.0.4', models: [m], kind: external, api_key: 'env:KEY'}
""")


@pytest.mark.parametrize("steering", [Steering.PRIORITY_GROUP, Steering.CLUSTER_HEADER])
def test_clusters_of_their_own_reach_every_endpoint(steering: Steering) -> None:
    """Where each endpoint has its cluster, none is left out."""
    assert reachable(replace(CONFIG, steering=steering)) == CONFIG.endpoints


def test_the_endpoint_picker_reaches_own_engines_by_address_with_one_key() -> None:
    """One cluster for all holds those alone that can share it."""
    found = reachable(replace(CONFIG, steering=Steering.ENDPOINT_PICKER))
    assert [info.id for info in found] == ["a", "b"]
