"""A line for every request, for people who watch a terminal."""

from __future__ import annotations

from collections.abc import Callable

from extproc.errors import Reason
from extproc.exchange.ledger import Flight
from extproc.exchange.observer import Observer
from extproc.exchange.outcome import Outcome


class RequestLog:
    """Writes a line for every request that is over or refused; passes every event on to `then`."""

    def __init__(self, write: Callable[[str], None], then: Observer) -> None:
        self._write = write
        self._then = then

    def flight_ended(self, flight: Flight, now: float) -> None:
        """The line says model, path, endpoints in the order tried, status and seconds.

        A status of 0 is a request that ended without an answer.
        """
        tickets = flight.decision.tickets
        last = flight.holder if flight.answered is None else flight.answered
        tried = " > ".join(ticket.id for ticket in tickets[: last + 1])
        status = flight.status or "no answer"
        seconds = now - flight.started
        self._write(f"{flight.model} {flight.path} -> {tried} {status} {seconds:.3f} s")

    def refused(self, reason: Reason, model: str) -> None:
        """The line says what was asked for and why it went nowhere."""
        self._write(f"{model or '(no model)'} refused: {reason}")
        self._then.refused(reason, model)

    def dispatched(self, endpoint: str, model: str) -> None:
        """Passed on."""
        self._then.dispatched(endpoint, model)

    def attempt(self, endpoint: str, outcome: Outcome) -> None:
        """Passed on."""
        self._then.attempt(endpoint, outcome)

    def failed_open(self) -> None:
        """Passed on."""
        self._then.failed_open()

    def answered(self, model: str, seconds: float) -> None:
        """Passed on."""
        self._then.answered(model, seconds)

    def ended(self, model: str, seconds: float) -> None:
        """Passed on."""
        self._then.ended(model, seconds)
