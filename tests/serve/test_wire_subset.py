"""Our subset of Envoy's messages against an independent copy of Envoy's whole API."""

from __future__ import annotations

import warnings

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from extproc.serve.mutations import STATUSES
from extproc.serve.pb import access_log_pb2, base_pb2, ext_proc_pb2, health_pb2

with warnings.catch_warnings():
    # The library warns about its own use of pydantic while it is imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    import betterproto2
    import envoy_data_plane.envoy.config.core.v3 as core
    import envoy_data_plane.envoy.data.accesslog.v3 as entries
    import envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 as ext_proc_config
    import envoy_data_plane.envoy.service.accesslog.v3 as access_log
    import envoy_data_plane.envoy.service.ext_proc.v3 as ext_proc
    import envoy_data_plane.envoy.type.v3 as envoy_type
    import envoy_data_plane.google.protobuf as well_known

PAIRS: list[tuple[type[Message], type[betterproto2.Message]]] = [
    (base_pb2.HeaderValue, core.HeaderValue),
    (base_pb2.HeaderMap, core.HeaderMap),
    (base_pb2.HeaderValueOption, core.HeaderValueOption),
    (base_pb2.Metadata, core.Metadata),
    (base_pb2.Struct, well_known.Struct),
    (base_pb2.Value, well_known.Value),
    (base_pb2.ListValue, well_known.ListValue),
    (base_pb2.UInt32Value, well_known.UInt32Value),
    (ext_proc_pb2.HttpHeaders, ext_proc.HttpHeaders),
    (ext_proc_pb2.HttpBody, ext_proc.HttpBody),
    (ext_proc_pb2.HttpTrailers, ext_proc.HttpTrailers),
    (ext_proc_pb2.ProcessingRequest, ext_proc.ProcessingRequest),
    (ext_proc_pb2.ProcessingResponse, ext_proc.ProcessingResponse),
    (ext_proc_pb2.HeadersResponse, ext_proc.HeadersResponse),
    (ext_proc_pb2.BodyResponse, ext_proc.BodyResponse),
    (ext_proc_pb2.TrailersResponse, ext_proc.TrailersResponse),
    (ext_proc_pb2.CommonResponse, ext_proc.CommonResponse),
    (ext_proc_pb2.HeaderMutation, ext_proc.HeaderMutation),
    (ext_proc_pb2.BodyMutation, ext_proc.BodyMutation),
    (ext_proc_pb2.ImmediateResponse, ext_proc.ImmediateResponse),
    (ext_proc_pb2.HttpStatus, envoy_type.HttpStatus),
    (ext_proc_pb2.ProcessingMode, ext_proc_config.ProcessingMode),
    (access_log_pb2.StreamAccessLogsMessage, access_log.StreamAccessLogsMessage),
    (
        access_log_pb2.StreamAccessLogsMessage.HTTPAccessLogEntries,
        access_log.StreamAccessLogsMessageHttpAccessLogEntries,
    ),
    (access_log_pb2.StreamAccessLogsResponse, access_log.StreamAccessLogsResponse),
    (access_log_pb2.HTTPAccessLogEntry, entries.HttpAccessLogEntry),
    (access_log_pb2.AccessLogCommon, entries.AccessLogCommon),
    (access_log_pb2.HTTPResponseProperties, entries.HttpResponseProperties),
    (access_log_pb2.ResponseFlags, entries.ResponseFlags),
    (access_log_pb2.ResponseFlags.Unauthorized, entries.ResponseFlagsUnauthorized),
]

ENUMS: list[tuple[EnumDescriptor, type[betterproto2.Enum]]] = [
    (
        base_pb2.HeaderValueOption.HeaderAppendAction.DESCRIPTOR,
        core.HeaderValueOptionHeaderAppendAction,
    ),
    (base_pb2.Value.NullValue.DESCRIPTOR, well_known.NullValue),
    (
        ext_proc_pb2.CommonResponse.ResponseStatus.DESCRIPTOR,
        ext_proc.CommonResponseResponseStatus,
    ),
    (
        ext_proc_pb2.ProcessingMode.HeaderSendMode.DESCRIPTOR,
        ext_proc_config.ProcessingModeHeaderSendMode,
    ),
    (
        ext_proc_pb2.ProcessingMode.BodySendMode.DESCRIPTOR,
        ext_proc_config.ProcessingModeBodySendMode,
    ),
    (access_log_pb2.AccessLogType.DESCRIPTOR, entries.AccessLogType),
]

FIELDS = [
    pytest.param(ours, theirs, field.name, id=f"{ours.DESCRIPTOR.full_name}.{field.name}")
    for ours, theirs in PAIRS
    for field in ours.DESCRIPTOR.fields
]

# Text that is not ours is declared bytes here: the wire is the same.
SAMPLES: dict[int, object] = {
    FieldDescriptor.TYPE_STRING: "text",
    FieldDescriptor.TYPE_BYTES: b"text",
    FieldDescriptor.TYPE_BOOL: True,
    FieldDescriptor.TYPE_UINT32: 300,
    FieldDescriptor.TYPE_INT32: 503,
    FieldDescriptor.TYPE_ENUM: 1,
    FieldDescriptor.TYPE_DOUBLE: 1.5,
}


def fill(message: Message, name: str, depth: int = 0) -> None:
    """The field `name` of `message` is set, down to a leaf that differs from its default."""
    field = message.DESCRIPTOR.fields_by_name[name]
    target = getattr(message, name)
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        value = kind.fields_by_name["value"]
        if value.message_type is not None:
            fill_first(target["key"], depth + 1)
        else:
            target["key"] = SAMPLES[value.type]
    elif kind is not None:
        fill_first(target.add() if field.is_repeated else target, depth + 1)
    elif field.is_repeated:
        target.append(SAMPLES[field.type])
    elif field.enum_type is not None and len(field.enum_type.values) == 1:
        setattr(message, field.name, 0)
    else:
        setattr(message, field.name, SAMPLES[field.type])


def fill_first(message: Message, depth: int) -> None:
    """`message` is present, with its simplest field set unless it is deep enough."""
    message.SetInParent()
    fields = message.DESCRIPTOR.fields_by_name
    names = sorted(fields, key=lambda name: bool(fields[name].message_type))
    if names and depth < 5:
        fill(message, names[0], depth)


@pytest.mark.parametrize(("ours", "theirs", "name"), FIELDS)
def test_a_field_is_the_same_on_the_wire(
    ours: type[Message], theirs: type[betterproto2.Message], name: str
) -> None:
    """What one side writes in a field, the other reads in the field of the same name."""
    mine = ours()
    fill(mine, name)
    written = mine.SerializeToString()
    read = theirs.parse(written)
    assert read.is_set(name)
    assert not read._unknown_fields
    rebuilt = theirs(**{name: getattr(read, name)})
    assert ours.FromString(bytes(rebuilt)) == mine


@pytest.mark.parametrize(("ours", "theirs"), ENUMS, ids=[ours.full_name for ours, _ in ENUMS])
def test_an_enum_has_the_same_numbers(
    ours: EnumDescriptor, theirs: type[betterproto2.Enum]
) -> None:
    """Every name of our enum has the number that it has at Envoy."""
    known = {member.name: member.value for member in theirs}
    for value in ours.values:
        assert known.get(value.name, known.get(value.name.removesuffix("_VALUE"))) == value.number


def test_every_message_is_compared() -> None:
    """No message of the subset is left out of the table."""
    compared = {ours.DESCRIPTOR.full_name for ours, _ in PAIRS}
    for module in (base_pb2, ext_proc_pb2, access_log_pb2):
        for message in module.DESCRIPTOR.message_types_by_name.values():
            assert names_of(message) <= compared


def names_of(message: Descriptor) -> set[str]:
    """The full names of a message and of the messages inside it, map entries aside."""
    nested = {inner.full_name for inner in message.nested_types if not inner.GetOptions().map_entry}
    return {message.full_name} | nested


def test_known_statuses_are_envoys() -> None:
    """The statuses that a reply may have are the final ones of Envoy's enum."""
    assert {member.value for member in envoy_type.StatusCode if member.value >= 200} == STATUSES


def test_health_messages_have_the_numbers_of_the_protocol() -> None:
    """The health messages are these bytes, whoever wrote them."""
    assert health_pb2.HealthCheckRequest(service="x").SerializeToString() == b"\x0a\x01x"
    statuses = {"UNKNOWN": 0, "SERVING": 1, "NOT_SERVING": 2, "SERVICE_UNKNOWN": 3}
    assert dict(health_pb2.HealthCheckResponse.ServingStatus.items()) == statuses
    serving = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
    assert serving.SerializeToString() == b"\x08\x01"
