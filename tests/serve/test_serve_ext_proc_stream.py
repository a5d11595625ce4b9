"""One stream of messages and its exchange."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from serve_fakes import Tally, request_headers, silent_lines

from extproc.config.values import Steering
from extproc.exchange.messages import (
    Action,
    Continue,
    Immediate,
    Message,
    Phase,
    RequestHeaders,
    ResponseHeaders,
)
from extproc.serve.ext_proc_stream import ExtProcStream, StreamTools
from extproc.serve.pb import ext_proc_pb2 as pb
from extproc.serve.replies import GO_ON_RESPONSE_BODY, Renderer, go_on
from extproc.serve.steering import channel
from extproc.serve.stream import StreamBroken, StreamEnd
from extproc.serve.wire import Reader

OOPS = Immediate(500, (("content-type", b"application/json"),), b'{"error":{}}', "internal")
RESPONSE = pb.ProcessingRequest(response_headers=pb.HttpHeaders()).SerializeToString()
TRAILERS = pb.ProcessingRequest(response_trailers=pb.HttpTrailers()).SerializeToString()


class Script:
    """An exchange that answers as told and remembers what it heard."""

    def __init__(self, answer: Callable[[Message], Action | None]) -> None:
        self.answer = answer
        self.heard: list[tuple[Message, float]] = []
        self.ends: list[tuple[float, bool]] = []
        self.end_fault: Exception | None = None

    def receive(self, message: Message, now: float) -> Action | None:
        self.heard.append((message, now))
        return self.answer(message)

    def end(self, now: float, *, owes_reply: bool) -> None:
        self.ends.append((now, owes_reply))
        if self.end_fault is not None:
            raise self.end_fault


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Stage:
    """A stream with its exchange and everything that it reports to."""

    def __init__(self, answer: Callable[[Message], Action | None]) -> None:
        self.exchange = Script(answer)
        self.tally = Tally()
        self.clock = Clock()
        tools = StreamTools(
            reader=Reader(),
            renderer=Renderer(channel(Steering.CLUSTER_HEADER)),
            internal_error=OOPS,
            observer=self.tally,
            lines=silent_lines(),
            clock=self.clock,
        )
        self.stream = ExtProcStream(self.exchange, tools)


def silence(_message: Message) -> None:
    """Nothing to say."""


def defect(_message: Message) -> Action:
    """An exchange that is broken."""
    raise RuntimeError("defect")


def read(reply: bytes) -> pb.ProcessingResponse:
    """A reply, as the library reads it."""
    return pb.ProcessingResponse.FromString(reply)


def test_a_message_reaches_the_exchange_and_its_action_the_wire() -> None:
    """One message gives one reply, with the time passed on."""
    stage = Stage(lambda _message: Continue(Phase.REQUEST_HEADERS, (("x-a", b"1"),)))
    (reply,) = stage.stream.receive(request_headers(x_b="2"))
    assert stage.exchange.heard == [(RequestHeaders([("x-b", b"2")]), 100.0)]
    option = read(reply).request_headers.response.header_mutation.set_headers[0]
    assert option.header.raw_value == b"1"
    assert stage.tally.seen["message request_headers"] == 1


def test_an_exchange_without_a_word_lets_envoy_go_on() -> None:
    """No action is the empty reply of the message's phase."""
    stage = Stage(silence)
    assert stage.stream.receive(RESPONSE) == (go_on(Phase.RESPONSE_HEADERS),)
    assert stage.stream.receive(TRAILERS) == (go_on(Phase.RESPONSE_TRAILERS),)
    assert stage.exchange.heard[0] == (ResponseHeaders(0), 100.0)


def test_a_reply_is_owed_until_it_is_written() -> None:
    """The exchange is told whether Envoy got the last reply."""
    stage = Stage(silence)
    stage.stream.receive(request_headers())
    stage.stream.end(StreamEnd.CANCELLED)
    assert stage.exchange.ends == [(100.0, True)]

    stage = Stage(silence)
    stage.stream.receive(request_headers())
    stage.stream.written()
    stage.clock.now = 130.0
    stage.stream.end(StreamEnd.HALF_CLOSED)
    assert stage.exchange.ends == [(130.0, False)]


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (RESPONSE, silence),
        (TRAILERS, silence),
        (request_headers(), lambda _message: OOPS),
        (request_headers(), lambda _message: Continue(Phase.REQUEST_HEADERS, (("x-a", b"\n"),))),
    ],
    ids=["response headers", "response trailers", "immediate", "refused"],
)
def test_a_reply_that_ends_the_stream_is_never_owed(
    message: bytes, answer: Callable[[Message], Action | None]
) -> None:
    """Envoy may act on such a reply and reset the stream before the write returns."""
    stage = Stage(answer)
    stage.stream.receive(message)
    stage.stream.end(StreamEnd.CANCELLED)
    assert stage.exchange.ends == [(100.0, False)]


def test_an_end_is_told_once() -> None:
    """However often a transport says so, the exchange ends once."""
    stage = Stage(silence)
    for why in StreamEnd:
        stage.stream.end(why)
    assert len(stage.exchange.ends) == 1
    assert stage.tally.seen["opened"] == stage.tally.seen["closed"] == 1


def test_a_defect_breaks_the_stream_with_the_reply_owed() -> None:
    """The stream ends with an error, so that Envoy fails open, and nothing of it leaks out."""
    stage = Stage(defect)
    with pytest.raises(StreamBroken, match=r"^internal error$"):
        stage.stream.receive(request_headers())
    stage.stream.end(StreamEnd.FAILED)
    assert stage.exchange.ends == [(100.0, True)]
    assert stage.tally.seen["failed"] == 1


def test_a_defect_at_the_end_stays_inside() -> None:
    """A transport never sees an exception from an end."""
    stage = Stage(silence)
    stage.exchange.end_fault = RuntimeError("defect")
    stage.stream.end(StreamEnd.HALF_CLOSED)
    assert stage.tally.seen["failed"] == 1


def test_a_reply_that_envoy_would_refuse_becomes_an_error_for_the_client() -> None:
    """Before there is an answer, the client gets a whole error instead of a broken mutation."""
    stage = Stage(lambda _message: Continue(Phase.REQUEST_HEADERS, (("x-a", b"\r\n"),)))
    (reply,) = stage.stream.receive(request_headers())
    assert read(reply).immediate_response.status.code == 500
    assert read(reply).immediate_response.body == OOPS.body
    assert stage.tally.seen["refused"] == 1


def test_an_action_for_another_phase_is_never_sent() -> None:
    """Envoy would reset the stream; the client gets an error instead."""
    stage = Stage(lambda _message: Continue(Phase.RESPONSE_HEADERS))
    (reply,) = stage.stream.receive(request_headers())
    assert read(reply).immediate_response.status.code == 500


def test_an_answer_that_has_come_is_left_as_it_is() -> None:
    """A refused change of an answer does not cost the client the answer."""
    stage = Stage(lambda _message: Continue(Phase.RESPONSE_HEADERS, (("x-a", b"\r\n"),)))
    assert stage.stream.receive(RESPONSE) == (go_on(Phase.RESPONSE_HEADERS),)
    assert stage.tally.seen["refused"] == 1


def test_a_response_body_passes_without_the_exchange() -> None:
    """A body mode that nobody asked for holds nothing up."""
    stage = Stage(defect)
    message = pb.ProcessingRequest(response_body=pb.HttpBody(body=b"x")).SerializeToString()
    assert stage.stream.receive(message) == (GO_ON_RESPONSE_BODY,)
    assert not stage.exchange.heard


@pytest.mark.parametrize("raw", [b"\xff\xff", b""], ids=["junk", "unknown kind"])
def test_a_message_without_an_answer_breaks_the_stream(raw: bytes) -> None:
    """Envoy fails open at once instead of waiting for its timeout."""
    stage = Stage(silence)
    with pytest.raises(StreamBroken):
        stage.stream.receive(raw)
    assert stage.tally.seen["unreadable"] == 1
    stage.stream.end(StreamEnd.FAILED)
    assert stage.exchange.ends == [(100.0, False)]


def test_time_spent_is_measured() -> None:
    """The observer hears how long the work on a message took."""
    stage = Stage(silence)

    def slow(_message: Message) -> None:
        stage.clock.now += 0.25

    stage.exchange.answer = slow
    stage.stream.receive(request_headers())
    assert stage.tally.times == [(Phase.REQUEST_HEADERS, 0.25)]
