"""How a choice of endpoints is told to Envoy: one renderer per configured steering."""

from __future__ import annotations

from typing import Final, Protocol, assert_never

from extproc import headers
from extproc.config.values import Steering
from extproc.exchange.messages import Headers, Steer
from extproc.serve.mutations import InvalidAction
from extproc.serve.pb import base_pb2, ext_proc_pb2
from extproc.serve.protobuf import delimited, opening, tag

_CACHED_GROUPS: Final = 65536
_CACHED_SIZES: Final = 2048

# A map entry's key and value have these numbers in every map.
_MAP_KEY: Final = tag(1)
_MAP_VALUE: Final = tag(2)
_METADATA: Final = tag(ext_proc_pb2.ProcessingResponse.DYNAMIC_METADATA_FIELD_NUMBER)
_FIELDS: Final = tag(base_pb2.Struct.FIELDS_FIELD_NUMBER)
_STRUCT_VALUE: Final = tag(base_pb2.Value.STRUCT_VALUE_FIELD_NUMBER)
_LIST_VALUE: Final = tag(base_pb2.Value.LIST_VALUE_FIELD_NUMBER)
_LIST_ELEMENT: Final = tag(base_pb2.ListValue.VALUES_FIELD_NUMBER)
_ROUTE_KEY: Final = delimited(_MAP_KEY, headers.ROUTE_NAMESPACE.encode())
_GROUPS_KEY: Final = delimited(_MAP_KEY, b"priority_groups")
_TO_THE_LIST: Final = (
    _METADATA,
    _FIELDS,
    _ROUTE_KEY + _MAP_VALUE,
    _STRUCT_VALUE,
    _FIELDS,
    _GROUPS_KEY + _MAP_VALUE,
    _LIST_VALUE,
)


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

    Lists differ from request to request and their elements do not, so it is the elements whose
    encodings are kept, and what stands before a list of some size, both in a bounded number.
    """

    def __init__(self) -> None:
        self._encoded: dict[tuple[int, str], bytes] = {}
        self._before: dict[int, bytes] = {}

    def headers(self, steer: Steer) -> Headers:  # noqa: ARG002 - part of the Protocol
        """None: the metadata says it all."""
        return ()

    def metadata(self, steer: Steer) -> bytes:
        """One priority group of one cluster for each element of the list, in order."""
        known = self._encoded.get
        groups = b"".join(
            [known(element) or self._group(element) for element in enumerate(steer.clusters)]
        )
        before = self._before.get(len(groups))
        if before is None:
            if len(self._before) >= _CACHED_SIZES:
                self._before.clear()
            before = self._before[len(groups)] = opening(_TO_THE_LIST, len(groups))
        return before + groups

    def _group(self, element: tuple[int, str]) -> bytes:
        """The list element for one attempt and its cluster, tag included."""
        if len(self._encoded) >= _CACHED_GROUPS:
            self._encoded.clear()
        encoded = self._encoded[element] = delimited(_LIST_ELEMENT, _priority_group(*element))
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


def _priority_group(attempt: int, cluster: str) -> bytes:
    """The group named for `attempt` that holds `cluster` alone, as an encoded value."""
    only = _struct(
        cluster_name=base_pb2.Value(string_value=cluster.encode()),
        weight=base_pb2.Value(number_value=1),
    )
    group = _struct(
        name=base_pb2.Value(string_value=b"%d" % attempt),
        clusters=base_pb2.Value(list_value=base_pb2.ListValue(values=[only])),
    )
    return group.SerializeToString(deterministic=True)


def _struct(**fields: base_pb2.Value) -> base_pb2.Value:
    """A struct value with `fields`."""
    return base_pb2.Value(struct_value=base_pb2.Struct(fields=fields))


def _destinations(steer: Steer) -> bytes:
    """The comma-separated list of `steer`'s destinations."""
    if not steer.destinations:
        raise InvalidAction("a choice without destinations cannot be told to an endpoint picker")
    return ",".join(steer.destinations).encode()
