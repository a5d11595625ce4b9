"""What a lab engine has seen: counts, and the last requests as they came in.

In memory and bounded; a test reads the attributes, another process the JSON.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum

Json = dict[str, object]


class Outcome(StrEnum):
    """How a request ended: in full, by the client's leaving, by a fault; or it has not yet."""

    ACTIVE = "active"
    ANSWERED = "answered"
    ABORTED = "aborted"
    FAULTED = "faulted"


@dataclass(slots=True, eq=False)
class Received:
    """One request as it came in.

    Header names and values are the bytes of the wire. Times are seconds after the request's
    headers were there, None while (or because) there is none. `body_start` is at most the first
    `keep_bytes` of the body; length and digest are of all that came.
    """

    number: int
    method: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    arrived_at: float
    keep_bytes: int = 4096
    body_bytes: int = 0
    body_start: bytes = b""
    first_byte_seconds: float | None = None
    last_byte_seconds: float | None = None
    has_whole_body: bool = False
    fault: str | None = None
    status: int | None = None
    tokens_sent: int = 0
    answer_seconds: float | None = None
    end_seconds: float | None = None
    outcome: Outcome = Outcome.ACTIVE
    _digest: hashlib._Hash = field(default_factory=hashlib.sha256, repr=False)

    @property
    def body_sha256(self) -> str:
        """The digest, in hexadecimal, of the body that has come so far."""
        return self._digest.hexdigest()

    def feed(self, chunk: bytes, now: float) -> None:
        """The chunk counts as part of the body."""
        since = now - self.arrived_at
        if self.first_byte_seconds is None:
            self.first_byte_seconds = since
        self.last_byte_seconds = since
        self.body_bytes += len(chunk)
        self._digest.update(chunk)
        if len(self.body_start) < self.keep_bytes:
            self.body_start += chunk[: self.keep_bytes - len(self.body_start)]

    def header(self, name: str) -> list[bytes]:
        """Every value of the header, in order; `name` in any case."""
        wanted = name.lower().encode()
        return [value for key, value in self.headers if key.lower() == wanted]

    def as_json(self) -> Json:
        """The request for another process; bytes are shown as Latin-1, which keeps each of them."""
        return {
            "number": self.number,
            "method": self.method,
            "path": self.path,
            "headers": [[k.decode("latin-1"), v.decode("latin-1")] for k, v in self.headers],
            "body_bytes": self.body_bytes,
            "body_sha256": self.body_sha256,
            "body_start": self.body_start.decode("latin-1"),
            "has_whole_body": self.has_whole_body,
            "first_byte_seconds": self.first_byte_seconds,
            "last_byte_seconds": self.last_byte_seconds,
            "answer_seconds": self.answer_seconds,
            "end_seconds": self.end_seconds,
            "fault": self.fault,
            "status": self.status,
            "tokens_sent": self.tokens_sent,
            "outcome": self.outcome.value,
        }


@dataclass(slots=True)
class Counters:
    """Counts since the start or the last reset.

    `requests` are those of the API, by whatever path; probes (metrics, health) count in `by_path`
    alone, with unknown paths folded into "other". `served` were answered in full with 2xx,
    `streamed` those of them that were event streams. `aborted` were left by their client,
    `faulted` were struck by a fault, whatever their end. `active` is now, `peak_active` its
    highest value. `connections` were accepted.
    """

    requests: int = 0
    active: int = 0
    peak_active: int = 0
    served: int = 0
    streamed: int = 0
    aborted: int = 0
    faulted: int = 0
    connections: int = 0
    by_path: Counter[str] = field(default_factory=Counter)
    by_status: Counter[int] = field(default_factory=Counter)

    def as_json(self) -> Json:
        """The counts for another process."""
        return {
            "requests": self.requests,
            "active": self.active,
            "peak_active": self.peak_active,
            "served": self.served,
            "streamed": self.streamed,
            "aborted": self.aborted,
            "faulted": self.faulted,
            "connections": self.connections,
            "by_path": dict(self.by_path),
            "by_status": {str(status): count for status, count in self.by_status.items()},
        }


class Records:
    """The counters, the last `keep` API requests and the last 50 probes, oldest first."""

    def __init__(self, *, keep: int = 200, keep_bytes: int = 4096) -> None:
        self.counters = Counters()
        self.requests: deque[Received] = deque(maxlen=keep)
        self.probes: deque[Received] = deque(maxlen=50)
        self._keep_bytes = keep_bytes
        self._arrived = 0

    def arrive(
        self,
        method: str,
        path: str,
        headers: tuple[tuple[bytes, bytes], ...],
        now: float,
        *,
        family: str,
        is_api: bool,
    ) -> Received:
        """The request is recorded and counted; `family` is its path among the known ones."""
        self._arrived += 1
        received = Received(
            number=self._arrived,
            method=method,
            path=path,
            headers=headers,
            arrived_at=now,
            keep_bytes=self._keep_bytes,
        )
        counters = self.counters
        counters.by_path[family] += 1
        if is_api:
            counters.requests += 1
            counters.active += 1
            counters.peak_active = max(counters.peak_active, counters.active)
            self.requests.append(received)
        else:
            self.probes.append(received)
        return received

    def end(self, received: Received, now: float, *, is_api: bool, is_stream: bool) -> None:
        """The request is over, with the outcome and status that it has."""
        received.end_seconds = now - received.arrived_at
        if not is_api:
            return
        counters = self.counters
        counters.active -= 1
        counters.faulted += received.fault is not None
        counters.aborted += received.outcome is Outcome.ABORTED
        status = received.status
        if status is not None:
            counters.by_status[status] += 1
            if received.outcome is Outcome.ANSWERED and status // 100 == 2:
                counters.served += 1
                counters.streamed += is_stream

    def reset(self) -> None:
        """Counts start anew and nothing is remembered; requests in progress stay active."""
        active = self.counters.active
        self.counters = Counters(active=active, peak_active=active)
        self.requests.clear()
        self.probes.clear()
