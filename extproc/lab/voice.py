"""What all answers of an engine share: the tokens' text, the subject, the error envelopes.

Pure text; what the tokens are is fixed (one short word after the other), so that a test can tell
whether any is missing.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from extproc.lab.asks import Problem
from extproc.lab.tally import FinishReason

WORDS: Final = (
    *("the", "sun", "was", "low", "and", "the", "sea", "lay", "far", "out", "one", "man"),
    *("and", "his", "dog", "ran", "for", "the", "old", "red", "hut", "but", "saw", "not"),
    *("who", "had", "put", "its", "key", "out", "for", "him"),
)
DONE: Final = b"data: [DONE]\n\n"

_MARK: Final = "@the-token@"
_ANTHROPIC_TYPES: Final[Mapping[int, str]] = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        529: "overloaded_error",
    }
)


@dataclass(frozen=True, slots=True)
class Speech:
    """How tokens read: each is `token_bytes` long (at least 2), the last byte a space.

    With `stamp`, every stream event carries beside its text, as `sent_at`, what `stamp` returned
    when the event was made.
    """

    token_bytes: int = 4
    stamp: Callable[[], float] | None = None

    def text(self, first: int, count: int) -> str:
        """The tokens from number `first` (the first is 0) on."""
        width = self.token_bytes - 1
        return "".join(
            f"{WORDS[i % len(WORDS)]:-<{width}.{width}} " for i in range(first, first + count)
        )


@dataclass(frozen=True, slots=True)
class Subject:
    """What an answer is about: which request, of which engine, made when (Unix seconds)."""

    engine: str
    number: int
    created: int
    model: str
    prompt_tokens: int
    cached_tokens: int = 0


class Voice(ABC):
    """One answer in one API's words. Tokens are numbered from 0."""

    def __init__(self, about: Subject, speech: Speech) -> None:
        self.about = about
        self.speech = speech
        self._frame: tuple[bytes, bytes] | None = None

    @abstractmethod
    def opening(self) -> bytes:
        """The events before the first token."""

    @abstractmethod
    def closing(self, produced: int, reason: FinishReason) -> bytes:
        """The events after the last token, to the stream's end."""

    @abstractmethod
    def whole(self, produced: int, reason: FinishReason) -> bytes:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def failure(self, message: str) -> bytes:
        """An error event, and the stream's end."""

    @abstractmethod
    def token_event(self, text: str) -> bytes:
        """The event of a token whose text is `text`."""

    def chunk(self, first: int, count: int) -> bytes:
        """One event for each of the tokens."""
        return b"".join(self._event(self.speech.text(i, 1)) for i in range(first, first + count))

    def _event(self, text: str) -> bytes:
        """As `token_event`; the event's frame is made once and the text put in."""
        if self._frame is None:
            before, after = self.token_event(_MARK).split(b'"' + _MARK.encode() + b'"', 1)
            self._frame = (before, after)
        before, after = self._frame
        stamp = self.speech.stamp
        stamped = b"" if stamp is None else b',"sent_at":%.6f' % stamp()
        return b'%b"%b"%b%b' % (before, text.encode(), stamped, after)


def error_body(problem: Problem, *, is_anthropic: bool) -> bytes:
    """The body of an error answer, in the envelope that the API's clients read."""
    if is_anthropic:
        kind = _ANTHROPIC_TYPES.get(problem.status, "api_error")
        return json_bytes({"type": "error", "error": {"type": kind, "message": problem.message}})
    error = {
        "message": problem.message,
        "type": problem.type,
        "param": problem.param,
        "code": problem.status,
    }
    return json_bytes({"error": error})


def json_bytes(value: object) -> bytes:
    """Compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


def data_event(value: object) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + json_bytes(value) + b"\n\n"


def named_event(name: str, value: object) -> bytes:
    """A server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + data_event(value)
