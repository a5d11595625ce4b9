"""One external-processor stream: bytes in, one request's exchange, bytes out.

Whatever goes wrong in the exchange ends the stream with an error, so that Envoy fails open by its
own rules; a reply that Envoy would refuse becomes a clear answer instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from extproc.exchange.messages import Action, Immediate, Message, Phase
from extproc.serve.mutations import InvalidAction
from extproc.serve.replies import Renderer, go_on
from extproc.serve.stream import StreamBroken, StreamEnd
from extproc.serve.wire import Reader, Unasked, Unreadable
from extproc.telemetry.logs import LimitedLog

_ANSWERED_PHASES: Final = frozenset({Phase.RESPONSE_HEADERS, Phase.RESPONSE_TRAILERS})


class ExchangeLike(Protocol):
    """The conversation of one request; times are monotonic seconds."""

    def receive(self, message: Message, now: float) -> Action | None:
        """What Envoy is told in answer to `message`; None lets it go on unchanged."""
        ...

    def end(self, now: float, *, owes_reply: bool) -> None:
        """The stream is over.

        With `owes_reply`, the request went on without the last reply, which was one that would
        have kept the stream open.
        """
        ...


class StreamObserver(Protocol):
    """Told what happens to streams; each call is cheap and never raises."""

    def stream_opened(self) -> None:
        """An external-processor stream began."""
        ...

    def stream_closed(self) -> None:
        """An external-processor stream is over."""
        ...

    def message(self, phase: Phase, seconds: float) -> None:
        """A message was answered, `seconds` of work after it was taken up."""
        ...

    def exchange_failed(self) -> None:
        """A defect in the exchange ended a stream with an error."""
        ...

    def action_refused(self) -> None:
        """A reply was not sent, because Envoy would have refused it."""
        ...

    def unreadable_message(self) -> None:
        """A message could not be read, or has no answer."""
        ...


@dataclass(frozen=True, slots=True)
class StreamTools:
    """What all streams share; `internal_error` answers a request whose reply was refused."""

    reader: Reader
    renderer: Renderer
    internal_error: Immediate
    observer: StreamObserver
    lines: LimitedLog
    clock: Callable[[], float]


class ExtProcStream:
    """Carries one exchange; see `StreamHandler` for its contract."""

    __slots__ = ("_exchange", "_is_ended", "_is_owing", "_tools")

    def __init__(self, exchange: ExchangeLike, tools: StreamTools) -> None:
        self._exchange = exchange
        self._tools = tools
        self._is_owing = False
        self._is_ended = False
        tools.observer.stream_opened()

    def receive(self, message: bytes) -> Sequence[bytes]:
        """The one reply to `message`.

        Raises:
            StreamBroken: the bytes are no message of Envoy's, or the exchange has a defect.
        """
        tools = self._tools
        try:
            parsed = tools.reader.read(message)
        except Unreadable as error:
            tools.observer.unreadable_message()
            raise StreamBroken("unreadable message") from error
        if isinstance(parsed, Unasked):
            tools.observer.unreadable_message()
            if parsed.reply is None:
                raise StreamBroken("a message without an answer")
            return (parsed.reply,)
        began = tools.clock()
        phase = parsed.phase
        # Envoy resets a stream as soon as it has the reply that ends it, before the write returns.
        # So only a reply with which the stream goes on can be seen to be missing.
        self._is_owing = phase not in _ANSWERED_PHASES
        reply = self._answer(parsed, phase, began)
        tools.observer.message(phase, tools.clock() - began)
        return (reply,)

    def written(self) -> None:
        """Envoy has the reply: nothing is owed any more."""
        self._is_owing = False

    def end(self, why: StreamEnd) -> None:  # noqa: ARG002 - how an end shows itself says nothing
        """The exchange is told, once, that its request is over; a defect there is logged."""
        if self._is_ended:
            return
        self._is_ended = True
        tools = self._tools
        tools.observer.stream_closed()
        try:
            self._exchange.end(tools.clock(), owes_reply=self._is_owing)
        except Exception as error:  # noqa: BLE001 - a transport must never see a defect here
            self._report(error)

    def _answer(self, message: Message, phase: Phase, now: float) -> bytes:
        """The exchange's answer as bytes that Envoy takes."""
        try:
            action = self._exchange.receive(message, now)
        except Exception as error:
            self._report(error)
            raise StreamBroken("internal error") from error
        if action is None:
            return go_on(phase)
        if isinstance(action, Immediate):
            self._is_owing = False
        try:
            return self._tools.renderer.render(action, phase)
        except InvalidAction as error:
            return self._instead(error, phase)

    def _instead(self, refused: InvalidAction, phase: Phase) -> bytes:
        """An error before there is an answer; an answer that has come is left as it is."""
        tools = self._tools
        tools.observer.action_refused()
        tools.lines.error("action", "a reply was not sent", problem=str(refused), phase=phase)
        if phase in _ANSWERED_PHASES:
            return go_on(phase)
        self._is_owing = False
        return tools.renderer.render(tools.internal_error, phase)

    def _report(self, error: Exception) -> None:
        """The defect is counted, and logged unless it was lately."""
        self._tools.observer.exchange_failed()
        self._tools.lines.error("exchange", "an exchange failed", error, kind=type(error).__name__)
