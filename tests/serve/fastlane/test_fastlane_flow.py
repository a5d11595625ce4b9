"""What goes out: never more than windows allow, in order, and nothing is kept for the dead."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fastlane_peer import Frame, parsed
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.serve.fastlane import frames
from extproc.serve.fastlane.flow import Sender
from extproc.serve.fastlane.frames import MAX_WINDOW, ConnectionBroken, StreamFault
from extproc.serve.fastlane.streams import Stream


class World:
    """A sender and some streams."""

    def __init__(self, window: int) -> None:
        self.drained: list[int] = []
        self.ended: list[int] = []
        self.sender = Sender(
            drained=lambda stream: self.drained.append(stream.id),
            ended=lambda stream: self.ended.append(stream.id),
        )
        self.streams = {number: Stream(number, window, 0, None) for number in (1, 3, 5)}

    def out(self) -> list[Frame]:
        found = parsed(b"".join(self.sender.out))
        self.sender.out.clear()
        return found


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["data", "data", "headers", "end", "stream", "connection", "resize"]),
        st.sampled_from([1, 3, 5]),
        st.integers(0, 60_000),
    ),
    max_size=30,
)


@given(STEPS)
@settings(deadline=None)
def test_windows_are_kept_and_everything_arrives(  # noqa: C901 - a case for each kind of step
    steps: Sequence[tuple[str, int, int]],
) -> None:
    """In order, and as soon as there is room; at the end nothing is left."""
    world = World(65_535)
    sent: dict[int, list[tuple[int, bytes]]] = {1: [], 3: [], 5: []}
    got: dict[int, list[tuple[int, bytes]]] = {1: [], 3: [], 5: []}
    room = {0: 65_535, 1: 65_535, 3: 65_535, 5: 65_535}
    initial = 65_535
    over: set[int] = set()

    def check() -> None:
        for one in world.out():
            got[one.stream_id].append((one.kind, one.payload))
            if one.kind == frames.DATA:
                for where in (0, one.stream_id):
                    room[where] -= len(one.payload)
                    assert room[where] >= 0 or not one.payload
                assert len(one.payload) <= 16_384

    for kind, number, size in steps:
        stream = world.streams[number]
        match kind:
            case "data" | "headers" | "end" if number in over:
                continue
            case "data":
                world.sender.data(stream, bytes(size))
                sent[number].append((frames.DATA, bytes(size)))
            case "headers":
                world.sender.headers(stream, b"h" * (size // 2 or 1))
                sent[number].append((frames.HEADERS, b"h" * (size // 2 or 1)))
            case "end":
                world.sender.data(stream, b"", ends=True)
                over.add(number)
            case "stream":
                world.sender.grow_stream(stream, size + 1)
                room[number] += size + 1
            case "connection":
                world.sender.grow(size + 1)
                room[0] += size + 1
            case _:
                world.sender.resize(size, world.streams.values())
                world.sender.push(world.streams.values())
                for each in (1, 3, 5):
                    room[each] += size - initial
                initial = size
        check()
    for number, stream in world.streams.items():
        world.sender.grow_stream(stream, 10_000_000)
        room[number] += 10_000_000
    world.sender.grow(100_000_000)
    room[0] += 100_000_000
    check()
    for number in (1, 3, 5):
        assert joined(got[number]) == joined(sent[number])
    assert world.sender.held == 0
    assert set(world.ended) == over


def joined(pieces: Sequence[tuple[int, bytes]]) -> bytes:
    """The payloads one after another."""
    return b"".join(payload for _, payload in pieces)


def test_who_sent_is_told_when_all_is_out() -> None:
    """Only when something was kept back; an end is told as such."""
    world = World(10)
    world.sender.data(world.streams[1], b"x" * 10)
    assert world.drained == []
    world.sender.data(world.streams[1], b"y")
    world.sender.headers(world.streams[1], b"h")
    assert [one.kind for one in world.out()] == [frames.DATA]
    world.sender.grow_stream(world.streams[1], 5)
    assert [one.kind for one in world.out()] == [frames.DATA, frames.HEADERS]
    assert world.drained == [1]
    world.sender.data(world.streams[1], b"z" * 10, ends=True)
    world.sender.grow_stream(world.streams[1], 100)
    assert [one.flags for one in world.out()] == [0, frames.END_STREAM]
    assert (world.drained, world.ended) == ([1], [1])


def test_a_window_below_nothing_is_waited_for() -> None:
    """The peer may shrink it under what is already sent; an end needs no room."""
    world = World(10)
    world.sender.initial_window = 10
    world.sender.data(world.streams[1], b"x" * 10)
    world.sender.resize(0, world.streams.values())
    assert world.streams[1].window == -10
    world.sender.data(world.streams[1], b"", ends=True)
    assert world.out()[-1].flags == frames.END_STREAM


def test_what_is_dropped_leaves_nothing() -> None:
    """Neither bytes nor a place in the queue for the connection's window."""
    world = World(1000)
    world.sender.window = 100
    for stream in world.streams.values():
        world.sender.data(stream, b"x" * 90)
    assert world.sender.held == 170
    world.sender.drop(world.streams[3])
    world.sender.drop(world.streams[3])
    assert world.sender.held == 90
    assert list(world.sender._waiting) == [5]
    world.sender.grow(1000)
    assert [one.stream_id for one in world.out()] == [1, 3, 5]


def test_too_large_a_window_is_an_error() -> None:
    """Of the connection, or of a stream."""
    world = World(10)
    with pytest.raises(ConnectionBroken):
        world.sender.grow(MAX_WINDOW)
    with pytest.raises(StreamFault):
        world.sender.grow_stream(world.streams[1], MAX_WINDOW)
    world.streams[3].window = MAX_WINDOW
    with pytest.raises(ConnectionBroken):
        world.sender.resize(70_000, world.streams.values())


def test_a_long_header_block_is_continued() -> None:
    """In frames of the size that the peer takes."""
    world = World(10)
    world.sender.headers(world.streams[1], b"h" * 40_000, ends=True)
    assert [(one.kind, one.flags, len(one.payload)) for one in world.out()] == [
        (frames.HEADERS, frames.END_STREAM, 16_384),
        (frames.CONTINUATION, 0, 16_384),
        (frames.CONTINUATION, frames.END_HEADERS, 7232),
    ]
