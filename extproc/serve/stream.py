"""The seam between a transport and what it carries.

A transport frames messages and nothing else: it makes a handler per stream, hands it each message,
writes what it gets back, and tells it once that the stream is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

from extproc.errors import LlmgwError


class StreamEnd(StrEnum):
    """How a stream's end showed itself.

    It carries no verdict: which of the first two a transport sees of one and the same event is a
    race, because Envoy closes its side and resets the stream in the same moment.
    """

    HALF_CLOSED = "half_closed"
    CANCELLED = "cancelled"
    FAILED = "failed"


class StreamBroken(LlmgwError):  # noqa: N818 - reads as what it is at the place it is caught
    """A stream cannot go on; the transport ends it with an error status, so that Envoy fails open.

    The text goes to Envoy as the status message: it names no host and nothing of a request.
    """


class StreamHandler(Protocol):
    """One stream, from its first message to its end."""

    def receive(self, message: bytes) -> Sequence[bytes]:
        """The messages to write, in order, in answer to `message`.

        Raises:
            StreamBroken: the stream is to end with an error status.
        """
        ...

    def written(self) -> None:
        """Everything that the last `receive` returned has been handed to the network."""
        ...

    def end(self, why: StreamEnd) -> None:
        """The stream is over; told exactly once, and nothing is told after it."""
        ...


class Service(Protocol):
    """What a transport serves."""

    def ext_proc(self) -> StreamHandler:
        """A handler for a new external-processor stream."""
        ...

    def access_log(self) -> StreamHandler:
        """A handler for a new access-log stream."""
        ...

    def health(self, service: str) -> bool | None:
        """Whether `service` takes requests; None for a service that is not known."""
        ...

    def watch_health(self, changed: Callable[[], None]) -> Callable[[], None]:
        """`changed` is called after every change of health, until the returned function is."""
        ...


class Transport(Protocol):
    """A server that carries a `Service`."""

    async def start(self) -> None:
        """Streams are accepted."""
        ...

    async def stop(self, grace_seconds: float) -> None:
        """No stream is accepted any more, and none runs; those that did had the grace to finish."""
        ...
