"""The rules of HTTP/2 that a peer can break, and what it costs it."""

from __future__ import annotations

import pytest
from fastlane_peer import GET, NO_ROOM, POST, Frame, Taking, WebPeer, data, headers, parsed, reset

from extproc.serve.fastlane import frames
from extproc.serve.fastlane.frames import PREFACE, ErrorCode, Setting, frame, settings_frame
from extproc.serve.fastlane.headers import literal_block
from extproc.serve.fastlane.settings import Settings

OPEN = literal_block(POST)
END = frames.END_STREAM | frames.END_HEADERS


@pytest.fixture
def taking() -> Taking:
    """An application that keeps what it gets."""
    return Taking()


@pytest.fixture
def peer(taking: Taking) -> WebPeer:
    """A peer that has shaken hands."""
    peer = WebPeer(taking, Settings(max_streams=3, stream_window=1000, connection_window=70_000))
    peer.shake()
    taking.taken.clear()
    return peer


def goaway(answer: list[Frame]) -> ErrorCode:
    """The error with which a connection ended."""
    assert answer[-1].kind == frames.GOAWAY
    return answer[-1].code


def test_the_first_bytes_are_settings_and_a_window(taking: Taking) -> None:
    """The server speaks first, and does not wait for the preface."""
    peer = WebPeer(taking)
    settings, window = peer.fetch()
    assert (settings.kind, settings.flags) == (frames.SETTINGS, 0)
    assert (window.kind, window.stream_id) == (frames.WINDOW_UPDATE, 0)


@pytest.mark.parametrize(
    "opening",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSX",
        PREFACE + frame(frames.PING, 0, 0, bytes(8)),
        PREFACE + frame(frames.SETTINGS, frames.ACK, 0),
        PREFACE + headers(1, literal_block(GET)),
    ],
)
def test_whoever_does_not_begin_with_preface_and_settings_is_refused(
    taking: Taking, opening: bytes
) -> None:
    """Bytes of another protocol are no connection."""
    peer = WebPeer(taking)
    assert goaway(peer.send(opening)) is ErrorCode.PROTOCOL_ERROR
    assert peer.connection.is_over


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (frame(frames.DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.DATA, 0, 5, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, END, 0, OPEN), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, END, 2, OPEN), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, END, 3, b"\xff\xff\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
        (frame(frames.HEADERS, END, 3, b"\x00"), ErrorCode.COMPRESSION_ERROR),
        (frame(frames.HEADERS, END | frames.PADDED, 3, b""), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.HEADERS, END | frames.PADDED, 3, b"\x05abc"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, END | frames.HAS_PRIORITY, 3, b"1234"), ErrorCode.FRAME_SIZE_ERROR),
        (
            frame(frames.HEADERS, END | frames.HAS_PRIORITY, 3, b"\0\0\0\x03\x00" + OPEN),
            ErrorCode.PROTOCOL_ERROR,
        ),
        (frame(frames.PRIORITY, 0, 0, bytes(5)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.PRIORITY, 0, 3, bytes(4)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.PRIORITY, 0, 3, b"\0\0\0\x03\x00"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.RST_STREAM, 0, 0, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.RST_STREAM, 0, 3, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.RST_STREAM, 0, 1, bytes(3)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.SETTINGS, 0, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.SETTINGS, 0, 0, bytes(5)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.SETTINGS, frames.ACK, 0, bytes(6)), ErrorCode.FRAME_SIZE_ERROR),
        (settings_frame({Setting.ENABLE_PUSH: 2}), ErrorCode.PROTOCOL_ERROR),
        (settings_frame({Setting.INITIAL_WINDOW_SIZE: 2**31}), ErrorCode.FLOW_CONTROL_ERROR),
        (settings_frame({Setting.MAX_FRAME_SIZE: 2**14 - 1}), ErrorCode.PROTOCOL_ERROR),
        (settings_frame({Setting.MAX_FRAME_SIZE: 2**24}), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.PUSH_PROMISE, 0, 3, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.PING, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.GOAWAY, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
        (frames.window_frame(0, 0), ErrorCode.PROTOCOL_ERROR),
        (frames.window_frame(0, 2**31 - 1), ErrorCode.FLOW_CONTROL_ERROR),
        (frames.window_frame(3, 1), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.WINDOW_UPDATE, 0, 0, bytes(3)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.CONTINUATION, 0, 3, b""), ErrorCode.PROTOCOL_ERROR),
        (
            frame(frames.HEADERS, 0, 3, OPEN) + frame(frames.PING, 0, 0, bytes(8)),
            ErrorCode.PROTOCOL_ERROR,
        ),
        (
            frame(frames.HEADERS, 0, 3, OPEN) + frame(frames.CONTINUATION, 0, 5, b""),
            ErrorCode.PROTOCOL_ERROR,
        ),
        (frame(frames.HEADERS, 0, 3, OPEN) + frame(99, 0, 3, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(99, 0, 0, bytes(2**14 + 1)), ErrorCode.FRAME_SIZE_ERROR),
    ],
)
def test_a_broken_rule_of_the_connection_ends_it(
    peer: WebPeer, taking: Taking, wrong: bytes, code: ErrorCode
) -> None:
    """The peer is told which rule, and open streams are told that they are gone."""
    peer.send(headers(3, OPEN) if b"\x00\x03" not in wrong[3:9] else b"")
    assert goaway(peer.send(wrong)) is code
    assert peer.connection.is_over
    assert all(taken.told == ["gone"] for taken in taking.taken)
    before = len(taking.taken)
    assert peer.send(headers(9, OPEN) + headers(10, OPEN)) == []
    assert len(taking.taken) == before


@pytest.mark.parametrize(
    ("block", "length"),
    [
        (literal_block([*POST, (b"Upper", b"x")]), None),
        (literal_block([*POST, (b"bad name", b"x")]), None),
        (literal_block([*POST, (b"x", b"a\r\nb")]), None),
        (literal_block([*POST, (b"x", b" a")]), None),
        (literal_block([*POST, (b"connection", b"close")]), None),
        (literal_block([*POST, (b"te", b"gzip")]), None),
        (literal_block([(b"x", b"y"), *POST]), None),
        (literal_block([*POST, (b":path", b"/")]), None),
        (literal_block([*POST, (b":status", b"200")]), None),
        (literal_block(POST[1:]), None),
        (literal_block(POST[:2]), None),
        (literal_block([*POST[:2], (b":path", b"")]), None),
        (literal_block([*POST, (b"host", b"other")]), None),
        (literal_block([(b":method", b"CONNECT"), *POST[1:]]), None),
        (literal_block([*POST, (b"content-length", b"x")]), None),
        (literal_block([*POST, (b"content-length", b"1"), (b"content-length", b"2")]), None),
        (literal_block([*POST, (b"content-length", b"5")]), 4),
        (literal_block([*POST, (b"content-length", b"5")]), 6),
        (literal_block([*POST, (b"content-length", b"5")]), 0),
    ],
)
def test_a_malformed_request_costs_its_stream_only(
    peer: WebPeer, block: bytes, length: int | None
) -> None:
    """The connection goes on."""
    request = headers(3, block, ends=length == 0)
    if length:
        request += data(3, bytes(length), ends=True)
    answer = peer.send(request)
    assert [(one.kind, one.stream_id, one.code) for one in answer] == [
        (frames.RST_STREAM, 3, ErrorCode.PROTOCOL_ERROR)
    ]
    assert not peer.send(headers(5, OPEN))
    assert set(peer.connection.streams) == {5}


@pytest.mark.parametrize("closing", [reset(3), frame(frames.HEADERS, END, 5, OPEN)])
def test_the_end_of_a_stream_is_told_once(peer: WebPeer, taking: Taking, closing: bytes) -> None:
    """By a reset, or because all has come."""
    peer.send(headers(3, OPEN) + data(3, b"ab"))
    peer.send(closing + reset(3) + reset(3))
    assert taking.taken[0].chunks == [b"ab"]
    assert taking.taken[0].told == ["gone"]
    assert not peer.connection.is_over


def test_padding_and_priorities_change_nothing(peer: WebPeer, taking: Taking) -> None:
    """They are taken off."""
    block = b"\x02" + bytes(4) + b"\x01" + OPEN + b"pp"
    flags = frames.PADDED | frames.HAS_PRIORITY | frames.END_HEADERS
    peer.send(
        frame(frames.HEADERS, flags, 3, block)
        + frame(frames.PRIORITY, 0, 3, bytes(5))
        + frame(frames.PRIORITY, 0, 9, bytes(5))
        + frame(frames.DATA, frames.PADDED, 3, b"\x03abppp")
        + frame(frames.DATA, frames.PADDED | frames.END_STREAM, 3, b"\x00cd")
    )
    assert b"".join(taking.taken[0].chunks) == b"abcd"
    assert taking.taken[0].told == ["half_closed"]


def test_a_header_block_may_come_in_pieces(peer: WebPeer, taking: Taking) -> None:
    """In as many frames as the limit allows."""
    pieces = [OPEN[at : at + 9] for at in range(0, len(OPEN), 9)]
    wire = frame(frames.HEADERS, frames.END_STREAM, 3, pieces[0])
    wire += b"".join(frame(frames.CONTINUATION, 0, 3, piece) for piece in pieces[1:])
    peer.send(wire + frame(frames.CONTINUATION, frames.END_HEADERS, 3, b""))
    assert taking.taken[0].head.path == b"/echo"
    assert taking.taken[0].told == ["half_closed"]


def test_a_header_block_without_end_is_given_up(peer: WebPeer) -> None:
    """Also when its frames are empty."""
    flood = frame(frames.HEADERS, 0, 3, OPEN) + frame(frames.CONTINUATION, 0, 3, b"") * 10_000
    assert goaway(peer.send(flood)) is ErrorCode.ENHANCE_YOUR_CALM


def test_too_many_headers_are_given_up(peer: WebPeer) -> None:
    """The list may not be larger than was announced."""
    block = literal_block([*POST, *((b"x", b"y" * 1000) for _ in range(80))])
    wire = frame(frames.HEADERS, 0, 3, block[:16_000])
    for at in range(16_000, len(block), 16_000):
        wire += frame(frames.CONTINUATION, 0, 3, block[at : at + 16_000])
    answer = peer.send(wire + frame(frames.CONTINUATION, frames.END_HEADERS, 3, b""))
    assert goaway(answer) is ErrorCode.ENHANCE_YOUR_CALM


def test_trailers_end_a_request(peer: WebPeer, taking: Taking) -> None:
    """Those that are in order do, others cost the stream."""
    peer.send(headers(3, OPEN) + headers(3, literal_block([(b"a", b"b")]), ends=True))
    assert taking.taken[0].told == ["half_closed"]
    for number, (fields, ends) in enumerate(
        [([(b"a", b"b")], False), ([(b":path", b"/")], True), ([(b"A", b"")], True)]
    ):
        stream_id = 5 + 2 * number
        wrong = headers(stream_id, literal_block(fields), ends=ends)
        answer = peer.send(headers(stream_id, OPEN) + wrong)
        assert [one.code for one in answer] == [ErrorCode.PROTOCOL_ERROR]


def test_streams_beyond_the_limit_are_refused(peer: WebPeer, taking: Taking) -> None:
    """They may be tried again; what follows on them is dropped."""
    answer = peer.send(b"".join(headers(stream_id, OPEN) for stream_id in (3, 5, 7, 9)))
    assert [(one.stream_id, one.code) for one in answer] == [(9, ErrorCode.REFUSED_STREAM)]
    assert peer.send(data(9, b"x") + headers(9, b"", ends=True) + reset(9)) == []
    peer.send(reset(3) + headers(11, OPEN))
    assert len(taking.taken) == 4
    assert set(peer.connection.streams) == {5, 7, 11}


def test_a_closed_stream_stays_closed(peer: WebPeer) -> None:
    """What error it is depends on who closed it."""
    peer.send(headers(3, OPEN) + reset(3))
    for wrong in (data(3, b"x"), headers(3, OPEN)):
        assert [one.code for one in peer.send(wrong)] == [ErrorCode.STREAM_CLOSED]
    assert peer.send(frames.window_frame(3, 1) + reset(3)) == []
    peer.send(headers(5, OPEN, ends=True))
    assert [one.code for one in peer.send(data(5, b""))] == [ErrorCode.STREAM_CLOSED]
    assert peer.send(headers(9, OPEN)) == []
    assert goaway(peer.send(headers(7, OPEN))) is ErrorCode.PROTOCOL_ERROR


def test_an_ended_stream_is_not_reopened(peer: WebPeer, taking: Taking) -> None:
    """Headers after both sides have ended break the connection."""
    peer.send(headers(3, OPEN, ends=True))
    peer.connection.sender.headers(taking.taken[0].stream, b"\x88", ends=True)
    assert [one.kind for one in peer.fetch()] == [frames.HEADERS]
    assert taking.taken[0].told == ["half_closed", "ended"]
    assert [one.code for one in peer.send(data(3, b""))] == [ErrorCode.STREAM_CLOSED]
    assert goaway(peer.send(headers(3, OPEN))) is ErrorCode.STREAM_CLOSED


def test_an_answer_that_comes_first_resets_the_rest(peer: WebPeer, taking: Taking) -> None:
    """The request's remainder is not wanted, and dropped."""
    peer.send(headers(3, OPEN))
    peer.connection.sender.headers(taking.taken[0].stream, b"\x88", ends=True)
    answer = peer.fetch()
    assert [one.kind for one in answer] == [frames.HEADERS, frames.RST_STREAM]
    assert answer[1].code is ErrorCode.NO_ERROR
    assert peer.send(data(3, b"x" * 100) + headers(3, b"", ends=True)) == []


def test_a_stream_that_is_reset_here_is_not_told(peer: WebPeer, taking: Taking) -> None:
    """Whoever resets it knows."""
    peer.send(headers(3, OPEN))
    peer.connection.reset(taking.taken[0].stream, ErrorCode.INTERNAL_ERROR)
    peer.connection.reset(taking.taken[0].stream, ErrorCode.INTERNAL_ERROR)
    assert [one.code for one in peer.fetch()] == [ErrorCode.INTERNAL_ERROR]
    assert taking.taken[0].told == []


def test_a_peers_window_is_filled_up_as_it_is_used(peer: WebPeer) -> None:
    """Half of it at a time, and that of a stream only while more is to come."""
    assert peer.send(headers(3, OPEN) + data(3, bytes(400))) == []
    (grown,) = peer.send(data(3, bytes(200)))
    assert (grown.kind, grown.stream_id) == (frames.WINDOW_UPDATE, 3)
    assert int.from_bytes(grown.payload, "big") == 600
    assert peer.send(data(3, bytes(600), ends=True)) == []
    grown_by = 0
    for number in range(100):
        for one in peer.send(headers(5 + 2 * number, OPEN) + data(5 + 2 * number, bytes(900))):
            if one.stream_id == 0:
                grown_by += int.from_bytes(one.payload, "big")
        peer.send(reset(5 + 2 * number))
    assert grown_by >= 70_000
    assert not peer.connection.is_over


def test_every_byte_counts_against_the_connections_window(taking: Taking) -> None:
    """Whichever stream it came on, and however far those are from their own windows."""
    peer = WebPeer(taking, Settings(connection_window=70_000))
    peer.shake()
    grown_by = 0
    for stream_id in range(3, 203, 2):
        for one in peer.send(headers(stream_id, OPEN) + data(stream_id, bytes(1000))):
            assert (one.kind, one.stream_id) == (frames.WINDOW_UPDATE, 0)
            grown_by += int.from_bytes(one.payload, "big")
    assert 65_000 <= grown_by <= 100_000


def test_more_than_the_content_length_is_noticed_before_the_end(peer: WebPeer) -> None:
    """The stream is reset at once."""
    block = literal_block([*POST, (b"content-length", b"5")])
    assert peer.send(headers(3, block) + data(3, b"12345")) == []
    assert [one.code for one in peer.send(data(3, b"6"))] == [ErrorCode.PROTOCOL_ERROR]


def test_a_choked_stream_gets_no_credit(peer: WebPeer, taking: Taking) -> None:
    """Until it is replenished; more than its window costs it the stream."""
    peer.send(headers(3, OPEN))
    taking.taken[0].stream.is_choked = True
    assert peer.send(data(3, bytes(1000))) == []
    peer.connection.replenish(taking.taken[0].stream)
    assert [one.stream_id for one in peer.fetch()] == [3]
    assert [one.code for one in peer.send(data(3, bytes(1001)))] == [ErrorCode.FLOW_CONTROL_ERROR]
    assert taking.taken[0].codes == [ErrorCode.FLOW_CONTROL_ERROR]


def test_more_than_the_connections_window_breaks_it(taking: Taking) -> None:
    """What nobody could have sent by the rules."""
    peer = WebPeer(taking, Settings(stream_window=100_000, connection_window=65_535))
    peer.shake()
    peer.connection._credit = 10
    assert goaway(peer.send(headers(3, OPEN) + data(3, bytes(11)))) is ErrorCode.FLOW_CONTROL_ERROR


def test_pings_are_answered(peer: WebPeer) -> None:
    """With what they hold; the answer to one of ours is nothing new."""
    (answer,) = peer.send(frame(frames.PING, 0, 0, b"12345678"))
    assert (answer.kind, answer.flags, answer.payload) == (frames.PING, frames.ACK, b"12345678")
    assert peer.send(frame(frames.PING, frames.ACK, 0, b"12345678")) == []
    assert peer.send(frame(99, 255, 0, b"?") + frame(99, 255, 3, b"?")) == []
    assert peer.send(frame(frames.GOAWAY, 0, 0, bytes(8))) == []


def test_settings_are_acknowledged_and_unknown_ones_ignored(peer: WebPeer) -> None:
    """As the protocol has it."""
    wire = frame(frames.SETTINGS, 0, 0, b"\x00\x99\xff\xff\xff\xff")
    assert [(one.kind, one.flags) for one in peer.send(wire)] == [(frames.SETTINGS, frames.ACK)]


def test_a_silent_peer_is_pinged_and_then_given_up(peer: WebPeer) -> None:
    """Anything that it says keeps it."""
    connection = peer.connection
    connection.tick(9.0)
    assert peer.fetch() == []
    connection.tick(10.0)
    connection.tick(11.0)
    assert [one.kind for one in peer.fetch()] == [frames.PING]
    peer.send(frame(frames.PING, 0, 0, bytes(8)), now=14.9)
    connection.tick(16.0)
    assert not connection.is_over
    connection.tick(25.0)
    assert [one.kind for one in peer.fetch()] == [frames.PING]
    connection.tick(29.9)
    assert not connection.is_over
    connection.tick(30.0)
    assert connection.is_over


def test_a_connection_leaves_in_order(peer: WebPeer, taking: Taking) -> None:
    """Announced first; after a round trip it is said which streams are finished, and no more."""
    peer.send(headers(3, OPEN))
    peer.connection.drain()
    peer.connection.drain()
    announced, ping = peer.fetch()
    assert (announced.kind, announced.payload[:4]) == (frames.GOAWAY, b"\x7f\xff\xff\xff")
    assert peer.send(headers(5, OPEN)) == []
    (said,) = peer.send(frame(frames.PING, frames.ACK, 0, ping.payload))
    assert (said.kind, said.payload[:4], said.code) == (
        frames.GOAWAY,
        b"\x00\x00\x00\x05",
        ErrorCode.NO_ERROR,
    )
    assert [one.code for one in peer.send(headers(7, OPEN))] == [ErrorCode.REFUSED_STREAM]
    peer.send(reset(3))
    assert not peer.connection.is_over
    peer.connection.sender.headers(taking.taken[1].stream, b"\x88", ends=True)
    assert peer.connection.is_over


def test_a_connection_that_closes_tells_its_streams(peer: WebPeer, taking: Taking) -> None:
    """Once, however often it is told to."""
    peer.send(headers(3, OPEN))
    peer.connection.close()
    peer.connection.close()
    peer.connection.lost()
    assert parsed(peer.fetched())[0].code is ErrorCode.NO_ERROR
    assert taking.taken[0].told == ["gone"]


def test_blocks_that_come_again_are_not_read_again(peer: WebPeer, taking: Taking) -> None:
    """As long as they mean the same: while the table has no size."""
    before = taking.routed
    for stream_id in range(3, 43, 2):
        peer.send(headers(stream_id, OPEN) + reset(stream_id))
    assert taking.routed == before + 1
    assert {taken.head.path for taken in taking.taken} == {b"/echo"}


def test_a_table_of_the_peers_is_followed_until_it_is_told_not_to(taking: Taking) -> None:
    """What came before our settings were known is read by the rules of the protocol."""
    peer = WebPeer(taking)
    indexed = b"\x83\x86\x40\x05:path\x02/a\x41\x01h"
    peer.send(PREFACE + settings_frame({}) + headers(1, indexed))
    again = b"\x83\x86\xbf\xbe"
    peer.send(headers(3, again))
    assert [taken.head.path for taken in taking.taken] == [b"/a", b"/a"]
    peer.send(frame(frames.SETTINGS, frames.ACK, 0) + headers(5, NO_ROOM + OPEN))
    assert taking.taken[-1].head.path == b"/echo"
    assert goaway(peer.send(headers(7, again))) is ErrorCode.COMPRESSION_ERROR


def test_a_table_that_is_not_shrunk_is_an_error(taking: Taking) -> None:
    """The peer has agreed to it."""
    peer = WebPeer(taking)
    peer.send(PREFACE + settings_frame({}) + frame(frames.SETTINGS, frames.ACK, 0))
    assert goaway(peer.send(headers(1, OPEN))) is ErrorCode.COMPRESSION_ERROR


def test_memory_of_closed_streams_is_bounded(peer: WebPeer) -> None:
    """A stream that is forgotten is closed all the same."""
    malformed = literal_block([*POST, (b"Upper", b"x")])
    for stream_id in range(3, 12_003, 2):
        peer.send(headers(stream_id, malformed))
    assert len(peer.connection._closed._states) <= 4096
    assert [one.code for one in peer.send(data(3, b"x"))] == [ErrorCode.STREAM_CLOSED]
