"""What the tests of this room share: a silent log, an observer that counts, sample messages."""

from __future__ import annotations

import logging
from collections import Counter

from extproc.exchange.messages import Phase
from extproc.serve.pb import ext_proc_pb2 as pb
from extproc.telemetry.logs import LimitedLog


def silent_lines() -> LimitedLog:
    """A log that goes nowhere."""
    logger = logging.getLogger("silent")
    logger.setLevel(logging.CRITICAL + 1)
    return LimitedLog(logger, lambda: 0.0)


class Tally:
    """Counts what streams report."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.times: list[tuple[Phase, float]] = []

    def stream_opened(self) -> None:
        self.seen["opened"] += 1

    def stream_closed(self) -> None:
        self.seen["closed"] += 1

    def message(self, phase: Phase, seconds: float) -> None:
        self.times.append((phase, seconds))
        self.seen[f"message {phase}"] += 1

    def exchange_failed(self) -> None:
        self.seen["failed"] += 1

    def action_refused(self) -> None:
        self.seen["refused"] += 1

    def unreadable_message(self) -> None:
        self.seen["unreadable"] += 1

    def log_entries(self, count: int) -> None:
        self.seen["entries"] += count


def request_headers(**headers: str) -> bytes:
    """A request-headers message with the given headers, underscores read as hyphens."""
    message = pb.ProcessingRequest()
    message.request_headers.headers.SetInParent()
    for name, value in headers.items():
        sent = message.request_headers.headers.headers.add(key=name.replace("_", "-"))
        sent.raw_value = value.encode()
    return message.SerializeToString()
