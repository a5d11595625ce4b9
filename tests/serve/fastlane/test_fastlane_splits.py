"""Laws of the core: pieces do not matter, shortcuts do not show, and no bytes make it fall over."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from fastlane_peer import CALL, Echo, Echoing, Peer, Taking, message
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.serve.fastlane import frames
from extproc.serve.fastlane.frames import ErrorCode, Setting, frame, settings_frame
from extproc.serve.fastlane.headers import literal_block
from extproc.serve.fastlane.settings import Settings

BLOCKS = [
    literal_block(CALL),
    literal_block([*CALL, (b"x", b"y")]),
    literal_block([*CALL[:2], (b":path", b"/log"), *CALL[3:]]),
    literal_block([*CALL[:2], (b":path", b"/nowhere"), *CALL[3:]]),
    literal_block(CALL[1:]),
]
STREAMS = st.sampled_from([3, 5, 7, 9])
MESSAGES = st.sampled_from(
    [b"", b"a", b"mute", b"break", b"refuse", b"defect", b"x" * 200, b"y" * 3000]
)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Messages one after another, the last of them perhaps not complete, or none."""
    body = b"".join(message(draw(MESSAGES)) for _ in range(draw(st.integers(0, 3))))
    match draw(st.integers(0, 9)):
        case 0:
            body += b"\x01\x00\x00\x00\x01z"
        case 1:
            body += b"\x00\x7f\x00\x00\x00z"
        case 2:
            body = body[: draw(st.integers(0, len(body)))]
    return body


@st.composite
def moves(draw: st.DrawFn) -> bytes:
    """A frame that a peer might send, in order or not."""
    stream_id = draw(STREAMS)
    flag = draw(st.sampled_from([0, 0, 0, frames.END_STREAM]))
    match draw(st.integers(0, 9)):
        case 0 | 1 | 2:
            block = draw(st.sampled_from(BLOCKS))
            return frame(frames.HEADERS, flag | frames.END_HEADERS, stream_id, block)
        case 3 | 4 | 5 | 6:
            return frame(frames.DATA, flag, stream_id, draw(bodies()))
        case 7:
            return frames.reset_frame(stream_id, ErrorCode.CANCEL)
        case 8:
            return frames.window_frame(draw(st.sampled_from([0, stream_id])), 70)
        case _:
            return draw(
                st.sampled_from(
                    [
                        frame(frames.PING, 0, 0, b"12345678"),
                        settings_frame({Setting.INITIAL_WINDOW_SIZE: 40}),
                        settings_frame({Setting.INITIAL_WINDOW_SIZE: 4000}),
                        frame(77, 0, 0, b"?"),
                        frame(frames.PRIORITY, 0, stream_id, bytes(5)),
                    ]
                )
            )


WIRES = st.lists(moves(), max_size=25).map(b"".join)


def written(echo: Echo) -> list[int]:
    """What the echo was told to be out.

    Whether an answer is out when its stream is reset depends on when that comes, as it should.
    """
    return echo.written_after if echo.ends != ["cancelled"] else []


class Run:
    """What a server of echoes made of bytes that came in pieces."""

    def __init__(self, pieces: Sequence[bytes], *, limits: Settings | None = None) -> None:
        self.service = Echoing(limit=5000, large=2500)
        self.peer = Peer(self.service.calls, limits or Settings(stream_window=6000))
        self.peer.shake()
        self.out = b""
        for piece in pieces:
            self.peer.connection.receive(piece, 0.0)
            self.out += self.peer.fetched()
        large = self.service.workload.large
        while large:
            large.popleft().take_large()
            self.out += self.peer.fetched()

    @property
    def seen(self) -> tuple[object, ...]:
        """Everything that can be seen of it."""
        echoes: list[Echo] = self.service.echoes
        return (
            self.out,
            [(echo.received, written(echo), echo.ends) for echo in echoes],
            self.peer.connection.is_over,
            set(self.peer.connection.streams),
            self.peer.connection.held,
            self.service.workload.running,
        )


def cut(wire: bytes, at: Sequence[int]) -> list[bytes]:
    """The bytes in pieces that end where `at` says."""
    marks = [0, *sorted(place % (len(wire) + 1) for place in at), len(wire)]
    return [wire[start:stop] for start, stop in pairwise(marks)]


@given(WIRES, st.lists(st.integers(0, 2**20), max_size=12))
@settings(deadline=None, max_examples=150)
def test_it_does_not_matter_in_which_pieces_bytes_come(wire: bytes, at: list[int]) -> None:
    """At once, byte by byte or anyhow: the same bytes go out, and handlers see the same."""
    at_once = Run([wire]).seen
    assert Run([wire[place : place + 1] for place in range(len(wire))]).seen == at_once
    assert Run(cut(wire, at)).seen == at_once


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[str, int, bytes]]:
    """Steps of some calls that keep to the rules."""
    steps: list[tuple[str, int, bytes]] = []
    for stream_id in (3, 5, 7):
        steps.append(("open", stream_id, draw(st.sampled_from(BLOCKS[:3]))))
        steps.extend(("data", stream_id, draw(bodies())) for _ in range(draw(st.integers(0, 3))))
        if draw(st.booleans()):
            steps.append(("reset", stream_id, b""))
    return steps


def encoded(steps: Sequence[tuple[str, int, bytes]], *, plainly: bool) -> bytes:
    """The steps as Envoy sends them, or in forms that mean the same and have no shortcut."""
    wire = b""
    for kind, stream_id, body in steps:
        if kind == "reset":
            wire += frames.reset_frame(stream_id | (0 if plainly else 2**31), ErrorCode.CANCEL)
        elif kind == "data":
            flags, padded = (0, body) if plainly else (frames.PADDED, b"\x00" + body)
            wire += frame(frames.DATA, flags, stream_id, padded)
        elif plainly:
            wire += frame(frames.HEADERS, frames.END_HEADERS, stream_id, body)
        else:
            wire += frame(frames.HEADERS, frames.PADDED, stream_id, b"\x02" + body[:9] + b"pp")
            wire += frame(frames.CONTINUATION, frames.END_HEADERS, stream_id, body[9:])
    return wire


@given(conversations())
@settings(deadline=None, max_examples=150)
def test_shortcuts_do_not_show(steps: list[tuple[str, int, bytes]]) -> None:
    """Frames that take the short way have the effect of those that take the long one."""
    limits = Settings()  # windows so large that padding does not open one earlier
    short = Run([encoded(steps, plainly=True)], limits=limits)
    long = Run([encoded(steps, plainly=False)], limits=limits)
    assert short.seen == long.seen


@given(st.lists(st.one_of(moves(), st.binary(max_size=40)), max_size=12))
@settings(deadline=None, max_examples=200)
def test_no_bytes_make_it_fall_over(parts: list[bytes]) -> None:
    """Whatever comes, the connection answers by the rules or ends with an error of the RFC."""
    run = Run(parts)
    connection = run.peer.connection
    connection.lost()
    assert connection.held == 0
    assert connection.sender.held == 0
    assert run.service.workload.running == 0
    assert all(len(echo.ends) == 1 for echo in run.service.echoes)


@given(WIRES, st.integers(0, 2**20), st.integers(1, 255))
@settings(deadline=None, max_examples=150)
def test_a_flipped_byte_is_survived(wire: bytes, place: int, change: int) -> None:
    """Corrupt frames cost a stream or the connection, and every handler is told its end."""
    if wire:
        at = place % len(wire)
        wire = wire[:at] + bytes((wire[at] ^ change,)) + wire[at + 1 :]
    taking = Taking()
    peer = Peer(taking)
    peer.shake()
    peer.send(wire)
    run = Run([wire])
    run.peer.connection.lost()
    assert all(len(echo.ends) == 1 for echo in run.service.echoes)
    peer.connection.lost()
    assert all(taken.told.count("gone") == 1 for taken in taking.taken)
