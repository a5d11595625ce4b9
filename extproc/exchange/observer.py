"""What the core tells about its work, and a listener that ignores it all.

The core never counts, logs or measures anything itself: it tells this Protocol.
"""

from __future__ import annotations

from typing import Protocol

from extproc.errors import Reason
from extproc.exchange.outcome import Outcome


class Observer(Protocol):
    """Told of every event of a request's life; each call is cheap and never raises.

    `model` is the name that the client asked for, "" where none could be read; `endpoint` is an
    endpoint's id; durations are in seconds.
    """

    def refused(self, reason: Reason, model: str) -> None:
        """A request was answered by us and went nowhere."""
        ...

    def dispatched(self, endpoint: str, model: str) -> None:
        """A request was sent to `endpoint` as its first attempt."""
        ...

    def attempt(self, endpoint: str, outcome: Outcome) -> None:
        """One attempt at `endpoint` has its final outcome; told once per attempt."""
        ...

    def failed_open(self) -> None:
        """Envoy went on without our decision."""
        ...

    def answered(self, model: str, seconds: float) -> None:
        """Response headers came `seconds` after the request's headers."""
        ...

    def ended(self, model: str, seconds: float) -> None:
        """An answered request is over, `seconds` after its headers came."""
        ...


class NoObserver:
    """Ignores everything that it is told."""

    def refused(self, reason: Reason, model: str) -> None:
        """Nothing happens."""

    def dispatched(self, endpoint: str, model: str) -> None:
        """Nothing happens."""

    def attempt(self, endpoint: str, outcome: Outcome) -> None:
        """Nothing happens."""

    def failed_open(self) -> None:
        """Nothing happens."""

    def answered(self, model: str, seconds: float) -> None:
        """Nothing happens."""

    def ended(self, model: str, seconds: float) -> None:
        """Nothing happens."""
