"""How a choice of endpoints is told to Envoy: one renderer per configured steering."""

from __future__ import annotations

from typing import Final, Protocol, assert_never

from extproc import headers
from extproc.config.values import Steering
from extproc.exchange.messages import Headers, Steer
from extproc.serve.mutations import InvalidAction
from extproc.serve.pb import base_pb2, ext_proc_pb2

_CACHED_LISTS: Final = 4096


class Channel(Protocol):
    """What a reply carries so that Envoy's route follows the choice."""

    def headers(self, steer: Steer) -> Headers:
        """Headers to set besides those that `steer` sets."""
        ...

    def metadata(self, steer: Steer) -> bytes:
        """Dynamic metadata, as an encoded reply that holds nothing else; empty for none."""
        ...


class PriorityGroups:
    """Attempt n goes to the n-th cluster, which a namespace of the dynamic metadata names.

    Lists repeat, so their encodings are kept, in a bounded number.
    """

    def __init__(self) -> None:
        self._encoded: dict[tuple[str, ...], bytes] = {}

    def headers(self, steer: Steer) -> Headers:  # noqa: ARG002 - part of the Protocol
        """None: the metadata says it all."""
        return ()

    def metadata(self, steer: Steer) -> bytes:
        """One priority group of one cluster for each element of the list, in order."""
        known = self._encoded.get(steer.clusters)
        if known is not None:
            return known
        if len(self._encoded) >= _CACHED_LISTS:
            self._encoded.clear()
        encoded = self._encoded[steer.clusters] = _priority_groups(steer.clusters)
        return encoded


class ClusterHeader:
    """Envoy's route reads the cluster from a header that is set already."""

    def headers(self, steer: Steer) -> Headers:  # noqa: ARG002 - part of the Protocol
        """None: the exchange has set the cluster header."""
        return ()

    def metadata(self, steer: Steer) -> bytes:  # noqa: ARG002 - part of the Protocol
        """Empty."""
        return b""


class EndpointPicker:
    """The Gateway API's endpoint picker: host:port lists, in a header and in metadata."""

    def headers(self, steer: Steer) -> Headers:
        """The destination header.

        Raises:
            InvalidAction: `steer` has no destinations.
        """
        return ((headers.DESTINATION, _destinations(steer)),)

    def metadata(self, steer: Steer) -> bytes:
        """The same list in the load balancer's namespace."""
        reply = ext_proc_pb2.ProcessingResponse()
        space = reply.dynamic_metadata.fields[headers.PICKER_NAMESPACE].struct_value
        space.fields[headers.DESTINATION].string_value = _destinations(steer)
        return reply.SerializeToString()


def channel(steering: Steering) -> Channel:
    """The renderer that `steering` asks for."""
    match steering:
        case Steering.PRIORITY_GROUP:
            return PriorityGroups()
        case Steering.CLUSTER_HEADER:
            return ClusterHeader()
        case Steering.ENDPOINT_PICKER:
            return EndpointPicker()
        case _:
            assert_never(steering)


def _priority_groups(clusters: tuple[str, ...]) -> bytes:
    """The route namespace's content for `clusters`."""
    reply = ext_proc_pb2.ProcessingResponse()
    space = reply.dynamic_metadata.fields[headers.ROUTE_NAMESPACE].struct_value
    groups = space.fields["priority_groups"].list_value
    groups.values.extend(
        _struct(
            name=base_pb2.Value(string_value=b"%d" % attempt),
            clusters=base_pb2.Value(
                list_value=base_pb2.ListValue(
                    values=[
                        _struct(
                            cluster_name=base_pb2.Value(string_value=cluster.encode()),
                            weight=base_pb2.Value(number_value=1),
                        )
                    ]
                )
            ),
        )
        for attempt, cluster in enumerate(clusters)
    )
    return reply.SerializeToString(deterministic=True)


def _struct(**fields: base_pb2.Value) -> base_pb2.Value:
    """A struct value with `fields`."""
    return base_pb2.Value(struct_value=base_pb2.Struct(fields=fields))


def _destinations(steer: Steer) -> bytes:
    """The comma-separated list of `steer`'s destinations."""
    if not steer.destinations:
        raise InvalidAction("a choice without destinations cannot be told to an endpoint picker")
    return ",".join(steer.destinations).encode()
