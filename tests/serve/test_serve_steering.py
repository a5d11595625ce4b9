"""How each steering tells Envoy where a request goes."""

from __future__ import annotations

import pytest

from extproc import headers
from extproc.config.values import Steering
from extproc.exchange.messages import Phase, Steer
from extproc.serve import steering
from extproc.serve.mutations import InvalidAction
from extproc.serve.pb import ext_proc_pb2 as pb
from extproc.serve.steering import ClusterHeader, EndpointPicker, PriorityGroups, channel

CHOICE = Steer(
    phase=Phase.REQUEST_HEADERS,
    clusters=("ep-a", "ep-b"),
    set_headers=((headers.CLUSTER, b"ep-a"),),
    destinations=("10.0.0.1:8000", "10.0.0.2:8000"),
)


def test_priority_groups_name_one_cluster_for_each_attempt() -> None:
    """The metadata is a list of groups in order, each of one cluster of weight 1."""
    told = pb.ProcessingResponse.FromString(PriorityGroups().metadata(CHOICE)).dynamic_metadata
    assert list(told.fields) == [headers.ROUTE_NAMESPACE]
    space = told.fields[headers.ROUTE_NAMESPACE].struct_value.fields
    assert list(space) == ["priority_groups"]
    groups = []
    for group in space["priority_groups"].list_value.values:
        fields = group.struct_value.fields
        (cluster,) = fields["clusters"].list_value.values
        inner = cluster.struct_value.fields
        groups.append(
            (
                fields["name"].string_value,
                inner["cluster_name"].string_value,
                inner["weight"].number_value,
            )
        )
    assert groups == [(b"0", b"ep-a", 1.0), (b"1", b"ep-b", 1.0)]
    assert PriorityGroups().headers(CHOICE) == ()


def test_what_is_kept_of_earlier_lists_is_bounded() -> None:
    """However many clusters there have been, a list is written as it was at first."""
    renderer = PriorityGroups()
    first = renderer.metadata(CHOICE)
    names = [f"ep-{number}x" for number in range(steering._CACHED_GROUPS + 1)]
    for start in range(0, len(names), 1024):
        clusters = tuple(names[start : start + 1024])
        renderer.metadata(Steer(CHOICE.phase, clusters, CHOICE.set_headers))
    assert len(renderer._encoded) <= steering._CACHED_GROUPS
    assert renderer.metadata(CHOICE) == first


def test_the_cluster_header_needs_nothing_else() -> None:
    """The exchange has set the header, so nothing is added."""
    assert ClusterHeader().headers(CHOICE) == ()
    assert ClusterHeader().metadata(CHOICE) == b""


def test_an_endpoint_picker_gets_addresses_twice() -> None:
    """Header and metadata carry the same list, first choice first."""
    listed = b"10.0.0.1:8000,10.0.0.2:8000"
    assert EndpointPicker().headers(CHOICE) == ((headers.DESTINATION, listed),)
    told = pb.ProcessingResponse.FromString(EndpointPicker().metadata(CHOICE)).dynamic_metadata
    fields = told.fields[headers.PICKER_NAMESPACE].struct_value.fields
    assert {key: value.string_value for key, value in fields.items()} == {
        headers.DESTINATION: listed
    }


def test_an_endpoint_picker_needs_addresses() -> None:
    """A choice without destinations cannot be told."""
    choice = Steer(CHOICE.phase, CHOICE.clusters, CHOICE.set_headers)
    with pytest.raises(InvalidAction):
        EndpointPicker().headers(choice)


def test_every_steering_has_its_channel() -> None:
    """Configuration's words lead to the renderers."""
    assert isinstance(channel(Steering.PRIORITY_GROUP), PriorityGroups)
    assert isinstance(channel(Steering.CLUSTER_HEADER), ClusterHeader)
    assert isinstance(channel(Steering.ENDPOINT_PICKER), EndpointPicker)
