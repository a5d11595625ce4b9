"""Messages out of bytes that come in pieces."""

from __future__ import annotations

import pytest
from fastlane_peer import message
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.serve.fastlane.messages import Inbox, Malformed, Status

BODIES = st.lists(st.binary(max_size=60), max_size=8)


def taken(inbox: Inbox) -> list[bytes | Malformed]:
    """All that can be taken, large ones joined."""
    found: list[bytes | Malformed] = []
    while (one := inbox.next()) is not None:
        found.append(b"".join(one) if isinstance(one, list) else one)
    return found


@given(BODIES, st.integers(1, 30), st.integers(0, 40))
@settings(deadline=None)
def test_messages_come_out_as_they_went_in(bodies: list[bytes], step: int, large: int) -> None:
    """In whatever pieces; nothing is kept then."""
    wire = b"".join(message(body) for body in bodies)
    inbox = Inbox(1000, large)
    found = []
    for at in range(0, len(wire), step):
        inbox.feed(wire[at : at + step])
        found += taken(inbox)
    assert found == bodies
    assert inbox.size == 0


def test_a_large_message_comes_in_pieces() -> None:
    """Joining it is left to whoever takes it."""
    inbox = Inbox(1000, 10)
    inbox.feed(message(b"123456789") + message(b"12345")[:7])
    assert inbox.next() == b"123456789"
    assert inbox.size == 2
    assert inbox.next() is None
    inbox.feed(b"345")
    inbox.feed(message(b"1234567890"))
    assert inbox.next() == b"12345"
    assert inbox.next() == [b"1234567890"]


@pytest.mark.parametrize(
    ("prefix", "status"),
    [
        (b"\x01\x00\x00\x00\x01", Status.UNIMPLEMENTED),
        (b"\x02\x00\x00\x00\x01", Status.INTERNAL),
        (b"\x00\x00\x00\x03\xe9", Status.RESOURCE_EXHAUSTED),
    ],
)
def test_nothing_comes_after_what_is_no_message(prefix: bytes, status: Status) -> None:
    """What came before it is taken first; what comes after it is not even kept."""
    inbox = Inbox(1000, 2000)
    inbox.feed(message(b"a") + prefix + b"rest" + message(b"b"))
    first, second = taken(inbox)
    assert first == b"a"
    assert isinstance(second, Malformed)
    assert second.status is status
    inbox.feed(bytes(1000))
    assert taken(inbox) == []
    assert inbox.size == 0


def test_bytes_are_not_copied_again_and_again() -> None:
    """A large body of many frames is kept as its pieces, so that it takes time by its size."""
    inbox = Inbox(2**30, 2**18)
    wire = bytes(16_384)
    inbox.feed(b"\x00" + (4 * 2**20).to_bytes(4, "big"))
    for _ in range(4 * 64):
        inbox.feed(wire)
    pieces = inbox.next()
    assert isinstance(pieces, list)
    assert [len(piece) for piece in pieces] == [16_384] * (4 * 64)
