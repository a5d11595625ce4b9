"""Calls of gRPC on the core: what is answered, in which order, and what a handler is told."""

from __future__ import annotations

import pytest
from fastlane_peer import (
    CALL,
    POST,
    Echoing,
    Frame,
    GrpcPeer,
    data,
    headers,
    message,
    reset,
)

from extproc.serve.fastlane import frames
from extproc.serve.fastlane.frames import ErrorCode, Setting
from extproc.serve.fastlane.grpc import Call
from extproc.serve.fastlane.headers import literal_block
from extproc.serve.fastlane.messages import Status
from extproc.serve.fastlane.settings import Settings

OPEN = literal_block(CALL)


def on(path: bytes, *more: tuple[bytes, bytes]) -> bytes:
    """The headers of a call."""
    return literal_block([*CALL[:2], (b":path", path), *CALL[3:], *more])


@pytest.fixture
def service() -> Echoing:
    """A server of echoes."""
    return Echoing()


@pytest.fixture
def peer(service: Echoing) -> GrpcPeer:
    """A peer that has shaken hands."""
    peer = GrpcPeer(service.calls)
    peer.shake()
    return peer


def status(peer: GrpcPeer, answer: list[Frame]) -> tuple[int, bytes]:
    """The status of the call that ended."""
    (last,) = (one for one in answer if one.kind == frames.HEADERS and one.flags & 1)
    fields = peer.fields(last.payload)
    return int(fields[b"grpc-status"]), fields.get(b"grpc-message", b"")


def test_a_call_is_answered_and_ends_with_its_status(peer: GrpcPeer, service: Echoing) -> None:
    """Headers once, then messages, then trailers when the peer is done."""
    head, first = peer.send(headers(3, OPEN) + data(3, message(b"a")))
    assert peer.fields(head.payload) == {
        b":status": b"200",
        b"content-type": b"application/grpc",
    }
    assert (first.kind, first.payload) == (frames.DATA, message(b"a"))
    (second,) = peer.send(data(3, message(b"b")))
    assert second.payload == message(b"b")
    assert service.workload.running == 1
    (trailers,) = peer.send(data(3, b"", ends=True))
    assert peer.fields(trailers.payload) == {b"grpc-status": b"0"}
    assert trailers.flags & frames.END_STREAM
    assert service.echoes[0].written_after == [1, 2]
    assert service.echoes[0].ends == ["half_closed"]
    assert service.workload.running == 0


def test_messages_of_one_frame_take_turns(peer: GrpcPeer, service: Echoing) -> None:
    """Each is taken when the answer to the one before is out, and the end comes last."""
    body = b"".join(message(text) for text in (b"a", b"mute", b"c"))
    answer = peer.send(headers(3, OPEN) + data(3, body, ends=True))
    assert [one.payload for one in answer[1:-1]] == [message(b"a"), message(b"c")]
    assert service.echoes[0].written_after == [1, 2, 3]
    assert status(peer, answer) == (0, b"")


def test_a_call_without_messages_ends_well(peer: GrpcPeer, service: Echoing) -> None:
    """Its status comes in its only headers."""
    (only,) = peer.send(headers(3, OPEN, ends=True))
    assert peer.fields(only.payload)[b"grpc-status"] == b"0"
    assert peer.fields(only.payload)[b":status"] == b"200"
    assert service.echoes[0].ends == ["half_closed"]


def test_an_answer_that_is_not_out_is_not_written(peer: GrpcPeer, service: Echoing) -> None:
    """A reset that comes before is an end with the answer owed."""
    peer.connection.receive(headers(3, OPEN) + data(3, message(b"a")) + reset(3), 0.0)
    peer.fetch()
    assert service.echoes[0].written_after == []
    assert service.echoes[0].ends == ["cancelled"]


@pytest.mark.parametrize(
    ("body", "said", "end"),
    [
        (message(b"break"), (Status.INTERNAL, b"cannot go on"), "failed"),
        (message(b"refuse"), (Status.NOT_FOUND, b"100 %25 n%C3%B6"), "failed"),
        (message(b"defect"), (Status.UNKNOWN, b"internal error"), "cancelled"),
        (
            message(b"x", 1),
            (Status.UNIMPLEMENTED, b"compressed messages are not taken"),
            "cancelled",
        ),
        (message(b"x", 7), (Status.INTERNAL, b"no message"), "cancelled"),
        (b"\0\0\x0f\x42\x41", (Status.RESOURCE_EXHAUSTED, b"too large a message"), "cancelled"),
    ],
)
def test_a_call_that_fails_says_why(
    peer: GrpcPeer, service: Echoing, body: bytes, said: tuple[Status, bytes], end: str
) -> None:
    """The request's remainder is not wanted, and other calls go on."""
    peer.send(headers(3, OPEN) + data(3, message(b"a")) + headers(5, OPEN))
    answer = peer.send(data(3, body) + data(3, message(b"late")))
    assert status(peer, answer) == said
    assert answer[-1].kind == frames.RST_STREAM
    assert answer[-1].code is ErrorCode.NO_ERROR
    assert service.echoes[0].ends == [end]
    assert b"late" not in service.echoes[0].received
    assert len(service.defects) == (body == message(b"defect"))
    assert peer.send(data(5, message(b"b")))[-1].payload == message(b"b")


def test_an_unfinished_message_is_no_end(peer: GrpcPeer, service: Echoing) -> None:
    """The call failed, though the peer thinks that it is done."""
    answer = peer.send(headers(3, OPEN) + data(3, message(b"abc")[:-1], ends=True))
    assert status(peer, answer)[0] == Status.INTERNAL
    assert service.echoes[0].ends == ["cancelled"]
    assert peer.connection.held == 0


def test_a_status_of_a_call_without_answers_is_all_there_is(peer: GrpcPeer) -> None:
    """One header section with both."""
    answer = peer.send(headers(3, OPEN) + data(3, message(b"break")))
    assert [one.kind for one in answer] == [frames.HEADERS, frames.RST_STREAM]
    assert peer.fields(answer[0].payload)[b":status"] == b"200"


@pytest.mark.parametrize(
    ("block", "fields"),
    [
        (literal_block(POST), {b":status": b"415"}),
        (literal_block([*POST, (b"content-type", b"application/grpc-web")]), {b":status": b"415"}),
        (
            literal_block([(b":method", b"GET"), *CALL[1:]]),
            {b":status": b"405", b"allow": b"POST"},
        ),
        (on(b"/nothing"), {b":status": b"200", b"grpc-status": b"12"}),
        (on(b"/echo", (b"grpc-timeout", b"soon")), {b":status": b"200", b"grpc-status": b"13"}),
    ],
)
def test_what_is_no_call_of_ours_is_refused(
    peer: GrpcPeer, service: Echoing, block: bytes, fields: dict[bytes, bytes]
) -> None:
    """In the form that the peer understands, with and without a body."""
    only, *_ = peer.send(headers(3, block, ends=True))
    assert peer.fields(only.payload).items() >= fields.items()
    assert only.flags & frames.END_STREAM
    first, second = peer.send(headers(5, block) + data(5, message(b"a"), ends=True))
    assert peer.fields(first.payload).items() >= fields.items()
    assert second.code is ErrorCode.NO_ERROR
    assert not service.echoes


@pytest.mark.parametrize("kind", [b"application/grpc+proto", b"application/grpc;charset=x"])
def test_kinds_of_grpc_are_grpc(peer: GrpcPeer, service: Echoing, kind: bytes) -> None:
    """What messages hold is the method's business."""
    peer.send(headers(3, literal_block([*POST, (b"content-type", kind)])))
    assert len(service.echoes) == 1


def test_a_log_gets_its_one_reply_at_the_end(peer: GrpcPeer, service: Echoing) -> None:
    """An empty message, after the last of the peer's."""
    peer.send(headers(3, on(b"/log")) + data(3, message(b"mute")))
    assert service.workload.running == 0
    answer = peer.send(data(3, b"", ends=True))
    assert [one.payload for one in answer if one.kind == frames.DATA] == [message(b"")]
    assert status(peer, answer) == (0, b"")


def test_an_endless_call_goes_on_after_the_peer_is_done(peer: GrpcPeer, service: Echoing) -> None:
    """It can be pushed to until it is reset."""
    peer.send(headers(3, on(b"/watch")) + data(3, message(b"a"), ends=True))
    call = peer.connection.streams[3].sink
    assert isinstance(call, Call)
    call.push(b"news")
    assert peer.woken == 1
    assert peer.fetch()[-1].payload == message(b"news")
    assert service.echoes[0].ends == []
    peer.send(reset(3))
    assert service.echoes[0].ends == ["cancelled"]
    call.push(b"late")
    assert peer.fetch() == []


def test_a_deadline_ends_a_call(peer: GrpcPeer, service: Echoing) -> None:
    """At its time, unless the call ended before; the alarm is set for the next one."""
    for stream_id, timeout in ((3, b"2S"), (5, b"1000m"), (7, b"3S"), (9, b"1H")):
        peer.send(headers(stream_id, on(b"/echo", (b"grpc-timeout", timeout))), now=10.0)
    assert service.alarms == [12.0, 11.0]
    peer.send(reset(3), now=10.5)
    service.workload.end_expired(10.9)
    assert peer.fetch() == []
    service.workload.end_expired(11.0)
    answer = peer.fetch()
    assert status(peer, answer) == (Status.DEADLINE_EXCEEDED, b"deadline exceeded")
    assert peer.woken == 1
    assert service.echoes[1].ends == ["cancelled"]
    assert service.alarms[-1] == 13.0


def test_deadlines_of_ended_calls_are_forgotten(peer: GrpcPeer, service: Echoing) -> None:
    """However far they are away."""
    block = on(b"/echo", (b"grpc-timeout", b"9H"))
    for stream_id in range(3, 10_003, 2):
        peer.send(headers(stream_id, block) + reset(stream_id))
    assert len(service.workload._deadlines) <= 1024


def test_a_large_message_waits_for_its_turn(peer: GrpcPeer, service: Echoing) -> None:
    """What is behind it waits too; other calls do not."""
    large = bytes(150_000)
    body = message(large) + message(b"next")
    peer.send(headers(3, OPEN) + headers(5, OPEN))
    for at in range(0, len(body), 16_384):
        peer.send(data(3, body[at : at + 16_384]))
    peer.send(data(5, message(b"small")) + data(3, b"", ends=True))
    assert [echo.received for echo in service.echoes] == [[], [b"small"]]
    assert peer.connection.held >= len(large)
    (call,) = service.workload.large
    call.take_large()
    peer.fetch()
    assert service.echoes[0].received == [large]  # the peer's window is smaller than the answer
    assert peer.connection.sender.held > 0
    peer.send(frames.window_frame(0, 200_000) + frames.window_frame(3, 200_000))
    assert service.echoes[0].received == [large, b"next"]
    assert service.echoes[0].ends == ["half_closed"]
    assert peer.connection.held == peer.connection.sender.held == 0


def test_a_large_message_of_a_call_that_is_over_is_not_taken(
    peer: GrpcPeer, service: Echoing
) -> None:
    """Nor kept."""
    body = message(bytes(150_000))
    peer.send(headers(3, OPEN))
    for at in range(0, len(body), 16_384):
        peer.send(data(3, body[at : at + 16_384]))
    peer.send(reset(3))
    assert peer.connection.held == 0
    service.workload.large[0].take_large()
    assert service.echoes[0].received == []


def test_a_peer_that_fetches_nothing_is_asked_for_nothing(service: Echoing) -> None:
    """Its messages wait, its window is not filled up, and what is kept stays small."""
    peer = GrpcPeer(service.calls, Settings(stream_window=10_000))
    peer.shake({Setting.INITIAL_WINDOW_SIZE: 100})
    answer = peer.send(headers(3, OPEN) + data(3, message(b"x" * 200)))
    assert sum(len(one.payload) for one in answer if one.kind == frames.DATA) == 100
    sent = 205
    while sent + 205 <= 10_000:
        assert peer.send(data(3, message(b"x" * 200))) == []
        sent += 205
    assert len(service.echoes[0].received) == 1
    assert service.echoes[0].written_after == []
    answer = peer.send(frames.window_frame(3, 100_000))
    assert len(service.echoes[0].received) == sent // 205
    assert [one.stream_id for one in answer if one.kind == frames.WINDOW_UPDATE] == [3]
    assert service.echoes[0].written_after == list(range(1, sent // 205 + 1))


@pytest.mark.parametrize("grown", [0, 3])
def test_small_answers_count_against_both_windows(service: Echoing, grown: int) -> None:
    """That of the stream and that of the connection, whichever shuts first."""
    peer = GrpcPeer(service.calls)
    peer.shake({Setting.INITIAL_WINDOW_SIZE: 65_535 if grown == 0 else 40})
    if grown == 0:
        peer.connection.sender.window = 40
    answer = peer.send(headers(3, OPEN))
    for _ in range(6):
        answer += peer.send(data(3, message(b"abc")))
    sent = sum(len(one.payload) for one in answer if one.kind == frames.DATA)
    assert sent == 40
    (rest,) = (one for one in peer.send(frames.window_frame(grown, 1000)))
    assert rest.payload == message(b"abc")


def test_replies_that_nobody_fetches_have_a_bound(service: Echoing) -> None:
    """The call that goes over it is reset; the others go on."""
    peer = GrpcPeer(service.calls, Settings(held_bytes=5000))
    peer.shake({Setting.INITIAL_WINDOW_SIZE: 0})
    peer.send(headers(3, OPEN) + data(3, message(b"x" * 4000)))
    answer = peer.send(headers(5, OPEN) + data(5, message(b"x" * 4000)))
    assert answer[-1].code is ErrorCode.ENHANCE_YOUR_CALM
    assert service.echoes[1].ends == ["cancelled"]
    assert peer.connection.sender.held == 4005
    assert peer.send(frames.window_frame(3, 5000))[-1].payload[-4000:] == b"x" * 4000


def test_messages_that_are_not_complete_have_a_bound(service: Echoing) -> None:
    """The call that goes over it is refused."""
    peer = GrpcPeer(service.calls, Settings(held_bytes=30_000))
    peer.shake()
    peer.send(headers(3, OPEN) + data(3, message(bytes(16_000))[:15_000]))
    answer = peer.send(headers(5, OPEN) + data(5, message(bytes(16_380))[:16_384]))
    assert status(peer, answer)[0] == Status.RESOURCE_EXHAUSTED
    assert peer.connection.held == 15_000 - 5


def test_a_call_that_is_cut_with_an_answer_on_its_way_is_reset(
    service: Echoing,
) -> None:
    """A status cannot overtake it."""
    peer = GrpcPeer(service.calls)
    peer.shake({Setting.INITIAL_WINDOW_SIZE: 10})
    peer.send(headers(3, OPEN) + data(3, message(b"x" * 20)))
    call = peer.connection.streams[3].sink
    assert isinstance(call, Call)
    call.cut(Status.UNAVAILABLE, "over")
    call.cut(Status.UNAVAILABLE, "over")
    assert [one.code for one in peer.fetch()] == [ErrorCode.CANCEL]
    assert service.echoes[0].ends == ["cancelled"]
    assert service.workload.running == 0


def test_an_answer_waits_for_the_connections_window(service: Echoing) -> None:
    """Calls go on in turn as it opens, and their ends behind their answers."""
    peer = GrpcPeer(service.calls)
    peer.shake({Setting.INITIAL_WINDOW_SIZE: 2**20})
    for stream_id in (3, 5, 7):
        peer.send(headers(stream_id, OPEN) + data(stream_id, message(b"x" * 30_000)[:16_000]))
        peer.send(data(stream_id, message(b"x" * 30_000)[16_000:], ends=True))
    answer = peer.send(frames.window_frame(0, 1_000_000))
    ends = [one.stream_id for one in answer if one.kind == frames.HEADERS and one.flags & 1]
    assert ends == [7]
    assert [echo.ends for echo in service.echoes] == [["half_closed"]] * 3
    assert peer.connection.sender.held == 0


def test_a_defect_in_a_handlers_end_is_reported(service: Echoing, peer: GrpcPeer) -> None:
    """And hurts nobody else."""
    peer.send(headers(3, OPEN) + headers(5, OPEN))

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    service.echoes[0].end = fail  # type: ignore[assignment]  # a defect
    service.echoes[1].written = fail  # type: ignore[method-assign]  # as above
    peer.send(reset(3) + data(5, message(b"a")))
    assert len(service.defects) == 2
    assert peer.send(data(5, message(b"b")))[-1].payload == message(b"b")
