"""What clients ask, how they leave early, and what came of each request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from types import MappingProxyType
from typing import Final

MODEL: Final = "m"
LONE_MODEL: Final = "lone"
SESSIONS: Final = 2000
CHAT: Final = "/v1/chat/completions"
# Canned engines do not answer a request that has this, or go on with an answer that they began.
MUTE: Final = "x-mute"

Pairs = tuple[tuple[str, str], ...]


class Ask(StrEnum):
    """One kind of request; the comment says what is special about it."""

    IN_HEADER = "model in a header"
    IN_BODY = "model in the body"
    STREAM = "stream"
    SESSION = "session"
    RESTRICTED = "restricted"  # only the service can let it through
    LONE = "lone endpoint"  # its model has a single endpoint, and nothing to retry with
    UNKNOWN = "unknown model"  # the service answers 404
    MODELS = "list of models"  # the service answers it


class Leaving(StrEnum):
    """When a client goes away on purpose."""

    UPLOADING = "before the body's end"
    WAITING = "waiting for headers"
    STARTED = "after headers"
    STREAMING = "mid-stream"


_SHARES: Final[Mapping[Ask, int]] = MappingProxyType(
    {
        Ask.IN_HEADER: 30,
        Ask.IN_BODY: 26,
        Ask.STREAM: 14,
        Ask.SESSION: 18,
        Ask.RESTRICTED: 6,
        Ask.LONE: 2,
        Ask.UNKNOWN: 2,
        Ask.MODELS: 2,
    }
)


@dataclass(frozen=True, slots=True)
class Plan:
    """One request to be made; with `leaving`, its client goes away then."""

    ask: Ask
    method: str
    path: str
    headers: Pairs
    body: bytes
    leaving: Leaving | None = None

    @property
    def expected(self) -> int:
        """The status where nothing is wrong."""
        return 404 if self.ask is Ask.UNKNOWN else 200

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream of events."""
        return self.ask is Ask.STREAM


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one request; times are monotonic seconds.

    `status` is None when no answer came. `is_whole` is false when it ended too early.
    `served_by` is the engine that answered.
    """

    plan: Plan
    began: float
    ended: float
    status: int | None
    reason: str | None = None
    served_by: str | None = None
    is_whole: bool = True
    has_left: bool = False

    @property
    def problem(self) -> str | None:
        """What is wrong with it in a few words, None when it is as it should be."""
        if self.has_left:
            return None
        if self.status is None:
            return "no answer"
        if not self.is_whole:
            return f"{self.status} cut"
        if self.status == self.plan.expected:
            return None
        return self.kind

    @property
    def kind(self) -> str:
        """Status and reason, as the table counts answers."""
        if self.status is None:
            return "left" if self.has_left else "no answer"
        return f"{self.status}" if self.reason is None else f"{self.status} {self.reason}"


def plan(random: Random, leaving_ratio: float) -> Plan:
    """The next request of a client."""
    (ask,) = random.choices(list(_SHARES), list(_SHARES.values()))
    leaving = None
    if random.random() < leaving_ratio:
        leaving = random.choice(list(Leaving))
        ask = Ask.STREAM if leaving is not Leaving.WAITING else Ask.IN_HEADER
    return _made(ask, leaving, random)


def _made(ask: Ask, leaving: Leaving | None, random: Random) -> Plan:
    if ask is Ask.MODELS:
        return Plan(ask, "GET", "/v1/models", (), b"")
    model = {Ask.LONE: LONE_MODEL, Ask.UNKNOWN: f"junk-{random.randrange(10**9)}"}.get(ask, MODEL)
    pairs: list[tuple[str, str]] = [("content-type", "application/json")]
    if ask is Ask.IN_HEADER or (ask is not Ask.IN_BODY and random.random() < 0.5):
        pairs.append(("x-llmgw-model", model))
    if ask is Ask.SESSION:
        pairs.append(("x-session-id", f"session-{random.randrange(SESSIONS)}"))
    if ask is Ask.RESTRICTED:
        pairs.append(("x-llmgw-residency", "eu"))
    if leaving is not None:
        pairs.append((MUTE, "1"))
    said: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": "a word and " * random.choice((1, 20, 200))}],
        "max_tokens": 2 if leaving is None else 2000,
    }
    if ask is Ask.STREAM:
        said["stream"] = True
    return Plan(ask, "POST", CHAT, tuple(pairs), json.dumps(said).encode(), leaving)
