"""What goes wrong on purpose, when, and which errors that explains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from types import MappingProxyType
from typing import Final

from extproc.lab.faults import CutBy, Fault, FaultKind
from extproc.lab.soak.asking import Ask, Result

# The engines that faults strike; the second one alone has the model of `Ask.LONE`.
STRUCK: Final = ("c", "d")
LONE_ENGINE: Final = "d"

HEADER_DEADLINE_SECONDS: Final = 2.0
BREAKER_MAX_SECONDS: Final = 2.0


class Trouble(StrEnum):
    """One thing that goes wrong."""

    # An engine's.
    REFUSE = "engine refuses connections"
    KILL = "engine dies with its connections"
    ACCEPT_RESET = "engine resets new connections"
    RESET = "engine resets at the headers"
    RESET_AFTER_BODY = "engine resets after the body"
    HANG = "engine never answers"
    STATUS_429 = "engine answers 429"
    STATUS_500 = "engine answers 500"
    STATUS_503 = "engine answers 503"
    CUT_AT_ONCE = "engine cuts after the headers"
    CUT_MIDWAY = "engine cuts in the middle"
    NO_METRICS = "engine hides its metrics"
    # Our own.
    SERVICE_KILLED = "service killed"
    SERVICE_RESTARTED = "service restarted"
    SOCKET_REMOVED = "service's socket removed"
    SERVICE_FROZEN = "service stopped for a while"
    LOG_LOST = "access log lost"

    @property
    def is_ours(self) -> bool:
        """Whether it is the service's and not an engine's."""
        return self in _OURS

    @property
    def ends_process(self) -> bool:
        """Whether another process serves after it."""
        return self in _NEW_PROCESS


_NEW_PROCESS: Final = frozenset(
    {Trouble.SERVICE_KILLED, Trouble.SERVICE_RESTARTED, Trouble.SOCKET_REMOVED}
)
_OURS: Final = _NEW_PROCESS | {Trouble.SERVICE_FROZEN, Trouble.LOG_LOST}
_CUTTING: Final = frozenset({Trouble.KILL, Trouble.CUT_AT_ONCE, Trouble.CUT_MIDWAY})

FAULTS: Final[Mapping[Trouble, Fault]] = MappingProxyType(
    {
        Trouble.REFUSE: Fault(kind=FaultKind.REFUSE),
        Trouble.KILL: Fault(kind=FaultKind.KILL),
        Trouble.ACCEPT_RESET: Fault(kind=FaultKind.ACCEPT_RESET),
        Trouble.RESET: Fault(kind=FaultKind.RESET),
        Trouble.RESET_AFTER_BODY: Fault(kind=FaultKind.RESET_AFTER_BODY),
        Trouble.HANG: Fault(kind=FaultKind.HANG),
        Trouble.STATUS_429: Fault(kind=FaultKind.STATUS, status=429, headers={"retry-after": "1"}),
        Trouble.STATUS_500: Fault(kind=FaultKind.STATUS, status=500),
        Trouble.STATUS_503: Fault(kind=FaultKind.STATUS, status=503),
        Trouble.CUT_AT_ONCE: Fault(kind=FaultKind.CUT, probability=0.5),
        Trouble.CUT_MIDWAY: Fault(kind=FaultKind.CUT, chunks=1, how=CutBy.FIN, probability=0.5),
        Trouble.NO_METRICS: Fault(kind=FaultKind.METRICS_HANG),
    }
)


@dataclass(frozen=True, slots=True)
class Episode:
    """A trouble that is to begin once `after` requests are done, and to last `seconds`."""

    after: int
    trouble: Trouble
    engine: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Window:
    """An episode as it was: monotonic seconds; it has no end while it lasts."""

    episode: Episode
    began: float
    ended: float = math.inf


def schedule(requests: int, random: Random) -> list[Episode]:
    """The episodes of a run, in order; the same for an equal `random`.

    There is one for every 3,000 requests, and each kind comes as often as the others. What ends
    the service's process is in the first third: a single process serves the rest, so that its
    memory can be looked at.
    """
    third = requests // 3
    early = sorted(one for one in Trouble if one.ends_process)
    late = sorted(one for one in Trouble if not one.ends_process)
    return [
        *_spread(early, 0, third, random),
        *_spread(late, third, requests, random),
    ]


def _spread(kinds: Sequence[Trouble], begin: int, end: int, random: Random) -> list[Episode]:
    """Episodes from `begin` to `end`, at least one, each kind as often as the others."""
    number = max(1, (end - begin) // _REQUESTS_PER_EPISODE)
    chosen: list[Trouble] = []
    while len(chosen) < number:
        chosen += random.sample(kinds, len(kinds))
    step = (end - begin) / (number + 1)
    return [
        _episode(trouble, begin + round(step * (index + 1)), random)
        for index, trouble in enumerate(chosen[:number])
    ]


_REQUESTS_PER_EPISODE: Final = 3000


def _episode(trouble: Trouble, after: int, random: Random) -> Episode:
    engine = None if trouble.is_ours else random.choice(STRUCK)
    return Episode(after, trouble, engine, round(random.uniform(0.5, 2.0), 2))


def explain(result: Result, windows: Iterable[Window]) -> Trouble | None:
    """The trouble that caused what is wrong with `result`; None when none of them could have."""
    return next((one.episode.trouble for one in windows if _explains(one, result)), None)


def _explains(window: Window, result: Result) -> bool:
    """Whether a trouble could have caused it: by its time, by the request, and by the error."""
    trouble = window.episode.trouble
    problem = result.problem
    if problem is None or result.ended < window.began:
        return False
    if result.began > window.ended + _LINGERING[trouble]:
        return False
    if trouble.is_ours:
        # A request that only the service can answer, or let through, is refused without it.
        return (
            trouble is not Trouble.LOG_LOST
            and result.plan.ask in {Ask.RESTRICTED, Ask.UNKNOWN, Ask.MODELS}
            and problem == "503 no_endpoint"
        )
    if problem.endswith("cut"):
        return trouble in _CUTTING and result.served_by == window.episode.engine
    if problem == "502 upstream_failed" and result.began <= window.ended:
        # The headers had come, and were not sent on yet: too late for another attempt.
        return trouble in _CUTTING
    return (
        trouble is not Trouble.NO_METRICS
        and result.plan.ask is Ask.LONE
        and window.episode.engine == LONE_ENGINE
        and problem in _LONE_PROBLEMS
    )


# What a request sees whose only endpoint fails, or has failed so often that its breaker is open.
_LONE_PROBLEMS: Final = frozenset(
    {"503 upstream_failed", "503 no_endpoint", "504 upstream_failed", "502 upstream_failed"}
    | {"429", "500", "503", "429 saturated"}
)
# Envoy comes back to the service within its back-off; a breaker opens again until a probe is good.
_RECONNECT_SECONDS: Final = 1.5
_BREAKER_SECONDS: Final = 2 * BREAKER_MAX_SECONDS + HEADER_DEADLINE_SECONDS
_LINGERING: Final[Mapping[Trouble, float]] = MappingProxyType(
    {one: _RECONNECT_SECONDS if one.is_ours else _BREAKER_SECONDS for one in Trouble}
)
