"""The hand-written part of the wire format against the protobuf library."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.serve.pb import base_pb2
from extproc.serve.pb import ext_proc_pb2 as pb
from extproc.serve.protobuf import delimited, number, tag, varint


@given(st.binary(max_size=70_000))
def test_a_delimited_field_is_what_the_library_reads(payload: bytes) -> None:
    """A bytes field of any length arrives whole."""
    written = delimited(tag(pb.BodyMutation.BODY_FIELD_NUMBER), payload)
    assert pb.BodyMutation.FromString(written).body == payload


@given(st.integers(0, 2**32 - 1))
def test_a_number_field_is_what_the_library_reads(value: int) -> None:
    """An unsigned field of any size arrives."""
    written = number(base_pb2.UInt32Value.VALUE_FIELD_NUMBER, value)
    assert base_pb2.UInt32Value.FromString(written).value == value


def test_small_and_large_numbers_are_base_128() -> None:
    """The examples of the protobuf specification."""
    assert varint(1) == b"\x01"
    assert varint(150) == b"\x96\x01"
    assert varint(127) == b"\x7f"
    assert varint(128) == b"\x80\x01"
