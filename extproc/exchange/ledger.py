"""Who is charged for each attempt of a request, and when.

Two feeds tell how attempts ended: the ext_proc stream, which always comes, and Envoy's access
log, which comes a little later, only for what went wrong, and sometimes not at all. The ledger
joins them by decision id. In-flight follows the stream alone (a log entry may only move it
earlier); verdicts that a log entry could still correct wait `GRACE_SECONDS` for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from types import MappingProxyType
from typing import Final

from extproc.clusters import PICKED
from extproc.exchange.messages import LogEntry, RequestLog, ResponseHeaders
from extproc.exchange.observer import Observer
from extproc.exchange.outcome import (
    Flag,
    Outcome,
    backpressure_seconds,
    classify,
    retry_after_seconds,
)
from extproc.routing.breaker import Verdict
from extproc.routing.decision import Decision
from extproc.routing.endpoint import BreakerState, Kind
from extproc.routing.registry import Grant, Registry, Ticket
from extproc.routing.scheduler import Scheduler

GRACE_SECONDS: Final = 1.0
QUARANTINE_SECONDS: Final = 2.0

_NO_HOST: Final = int(Flag.NO_HEALTHY_UPSTREAM)  # a plain number is ten times as fast to test

_VERDICTS: Final = MappingProxyType(
    {Outcome.SUCCESS: Verdict.SUCCESS, Outcome.FAILURE: Verdict.FAILURE}
)


class _Due(IntEnum):
    """What becomes final when a grace period is over."""

    HIDDEN_FAILURE = 0
    CLOSE = 1
    PROBE = 2


class Flight:
    """One dispatched request, from the decision until its last verdict is booked.

    `holder` is the index, in the decision's list, of the endpoint that has the request now;
    `answered` the index of the one whose answer the client got, None before there is an answer;
    `status` is that answer's, `is_serving` whether it is a good one that nothing has spoilt yet.
    `tickets` are whom to charge: the decision's, renewed for an endpoint that the request reached.
    """

    __slots__ = (
        "answered",
        "charged",
        "clusters",
        "content_length",
        "decision",
        "decision_id",
        "grant",
        "holder",
        "is_ended",
        "is_serving",
        "model",
        "path",
        "permit",
        "session",
        "started",
        "status",
        "tickets",
    )

    def __init__(
        self,
        *,
        decision_id: str,
        decision: Decision,
        grant: Grant,
        session: int | None,
        content_length: int,
        path: str,
        model: str,
        started: float,
    ) -> None:
        self.decision_id = decision_id
        self.decision = decision
        self.grant = grant
        self.permit = grant.permit
        self.tickets = list(decision.tickets)
        self.session = session
        self.content_length = content_length
        self.path = path
        self.model = model
        self.started = started
        self.clusters = decision.clusters
        self.charged = 0  # bit i: attempt i has its outcome
        self.holder = 0
        self.answered: int | None = None
        self.is_ended = False
        self.status = 0
        self.is_serving = False


class Ledger:
    """Books the outcome of every attempt once.

    `tick` must be called a few times a second, for when no request ends; nothing else needs a
    timer. `on_ended` is told of every request that is over, in the same call, but for those that
    Envoy sent on by itself.
    """

    def __init__(
        self,
        registry: Registry,
        scheduler: Scheduler,
        observer: Observer,
        on_ended: Callable[[Flight, float], None] | None = None,
    ) -> None:
        self._on_ended = on_ended
        self._registry = registry
        self._scheduler = scheduler
        self._observer = observer
        self._flights: dict[str, Flight] = {}
        self._due: deque[tuple[float, _Due, int, Flight]] = deque()

    def __len__(self) -> int:
        """How many requests still have a verdict to be booked."""
        return len(self._flights)

    def open(self, flight: Flight) -> None:
        """`flight` is known by its decision id until its last verdict is booked."""
        self._flights[flight.decision_id] = flight
        self._observer.dispatched(flight.decision.chosen.id, flight.model)

    def withdraw(self, grant: Grant, now: float) -> None:
        """A request that was refused after all holds nothing, not even a probe's slot."""
        grant.end(now)
        self._registry.verdict(grant.ticket, Verdict.IGNORED, now, grant.permit)

    def abandon(self, flight: Flight, now: float) -> None:
        """The request counts nowhere: Envoy went on without our answer."""
        flight.grant.end(now)
        self._acquit(flight, 0, now)
        self._flights.pop(flight.decision_id, None)
        self._observer.failed_open()

    def responded(self, flight: Flight, message: ResponseHeaders, now: float) -> None:
        """The client's answer has begun; earlier attempts have failed and the count is moved.

        Envoy's cluster name tells whose answer it is. Where it names none of the list, attempt n
        went to list element min(n, last). An element that was tried again is judged by its answer.
        """
        final = _answering(flight, message)
        self._reach(flight, final, now)
        flight.answered = final
        flight.status = message.status
        self._observer.answered(flight.model, now - flight.started)
        retry_after = message.retry_after
        outcome = classify(message.status, message.flags, message.details, retry_after)
        if message.flags & _NO_HOST and not message.cluster:
            # A cluster that Envoy does not know, on any attempt but the first.
            outcome = Outcome.QUARANTINED
        if message.flags & _NO_HOST:
            # Envoy goes on to no other endpoint from there, so the next request must not meet it.
            self._registry.quarantine(flight.tickets[final], now + QUARANTINE_SECONDS, now)
        if outcome is Outcome.SUCCESS:
            flight.is_serving = True
            if final == 0 and flight.permit is not None and flight.permit.is_probe:
                self._due.append((now + GRACE_SECONDS, _Due.PROBE, 0, flight))
            self._serve(flight, final, message.status, now)
        elif outcome is not Outcome.NOBODY:
            self._charge(
                flight, final, outcome, now, status=message.status, retry_after=retry_after
            )

    def ended(self, flight: Flight, now: float) -> None:
        """The request is over: it holds nothing from now on, and what is undecided waits."""
        if flight.is_ended:
            return
        flight.is_ended = True
        flight.grant.end(now)
        if flight.answered is not None:
            self._observer.ended(flight.model, now - flight.started)
        self._due.append((now + GRACE_SECONDS, _Due.CLOSE, flight.holder, flight))
        if self._on_ended is not None:
            self._on_ended(flight, now)
        # One by one as they come due, or a tick would find thousands and hold up everybody.
        self.tick(now)

    def logged(self, entry: LogEntry, now: float) -> None:
        """What Envoy's access log says of an attempt or a request is booked, once.

        An attempt's entry names its cluster. A request's entry may name an earlier attempt's, so it
        is believed only about whoever has the request: cut after its headers, or given up by the
        client.
        """
        flight = self._flights.get(entry.decision_id)
        if flight is None:
            return
        if isinstance(entry, RequestLog):
            self._request_logged(flight, entry, now)
            return
        index = _failing(flight, entry.cluster)
        if index is None:
            return
        outcome = classify(entry.status, entry.flags, entry.details, entry.retry_after)
        if outcome is Outcome.SUCCESS:
            return
        if outcome is Outcome.NOBODY:
            self._acquit(flight, index, now)
        else:
            self._charge(
                flight, index, outcome, now, status=entry.status, retry_after=entry.retry_after
            )
        following = index + 1
        if flight.answered is None and flight.holder < following < len(flight.clusters):
            self._reach(flight, following, now)

    def tick(self, now: float) -> None:
        """Verdicts whose grace period is over are booked."""
        due = self._due
        while due and due[0][0] <= now:
            _, kind, index, flight = due.popleft()
            match kind:
                case _Due.HIDDEN_FAILURE:
                    self._charge(flight, index, Outcome.FAILURE, now)
                case _Due.PROBE:
                    self._prove(flight, now)
                case _Due.CLOSE:
                    self._close(flight, now)

    def _request_logged(self, flight: Flight, entry: RequestLog, now: float) -> None:
        """A request that ended with a flag is an abort, a cut, or at least no success."""
        outcome = classify(entry.status, entry.flags, entry.details, None)
        answered = flight.answered
        if answered is None:
            if outcome is Outcome.ABORTED:
                # The log alone knows how far a request came that was given up without an answer.
                if entry.attempts:
                    self._reach(flight, min(entry.attempts, len(flight.clusters)) - 1, now)
                self._charge(flight, flight.holder, outcome, now)
        elif outcome is Outcome.ABORTED or (outcome is Outcome.FAILURE and flight.is_serving):
            self._charge(flight, answered, outcome, now)
        elif outcome is not Outcome.SUCCESS:
            flight.is_serving = False

    def _close(self, flight: Flight, now: float) -> None:
        """An answered request without a complaint was a success; nothing is left undecided.

        Before any answer only the caller can end a request, and no endpoint is to blame for that.
        """
        for earlier in range(flight.holder):
            self._charge(flight, earlier, Outcome.FAILURE, now)
        if flight.answered is None:
            self._charge(flight, flight.holder, Outcome.ABORTED, now)
        elif flight.is_serving:
            self._charge(flight, flight.answered, Outcome.SUCCESS, now)
        self._acquit(flight, 0, now)
        self._flights.pop(flight.decision_id, None)

    def _prove(self, flight: Flight, now: float) -> None:
        """A probe whose answer has run well for a while closes its breaker before its end.

        Streams take minutes, and where no other endpoint is left a model would be down for as
        long. How the stream ends still counts, as an attempt after the closing.
        """
        permit = flight.permit
        if permit is None or flight.charged & 1 or not flight.is_serving or flight.is_ended:
            return  # an end within the grace has a grace of its own
        ticket = flight.tickets[0]
        live = self._registry.live(ticket.id)
        if live is None or live.breaker.epoch != permit.epoch:
            return  # it turned since: neither this nor the end is of its present epoch
        self._registry.verdict(ticket, Verdict.SUCCESS, now, permit)
        flight.permit = None
        flight.tickets[0] = replace(ticket, epoch=live.breaker.epoch)

    def _acquit(self, flight: Flight, index: int, now: float) -> None:
        """List element `index` is blamed for nothing, and a probe there gives its slot back."""
        if flight.charged >> index & 1:
            return
        flight.charged |= 1 << index
        permit = None if index else flight.permit
        self._registry.verdict(flight.tickets[index], Verdict.IGNORED, now, permit)

    def _reach(self, flight: Flight, index: int, now: float) -> None:
        """List element `index` has the request, so those before it have failed."""
        for earlier in range(index):
            if not flight.charged >> earlier & 1:
                self._due.append((now + GRACE_SECONDS, _Due.HIDDEN_FAILURE, earlier, flight))
        self._move(flight, index, now)

    def _move(self, flight: Flight, index: int, now: float) -> None:
        """The in-flight count is on list element `index`, unless the request is over."""
        if index == flight.holder:
            return
        flight.holder = index
        if flight.is_ended:
            return
        flight.grant.end(now)
        name = flight.tickets[index].id
        grant = self._registry.follow(name, now, content_length=flight.content_length)
        if grant is not None:
            flight.grant = grant
            # Its breaker may have turned since the decision, and the attempt begins about now.
            flight.tickets[index] = grant.ticket

    def _serve(self, flight: Flight, index: int, status: int, now: float) -> None:
        """The session belongs to whoever answered it."""
        ticket = flight.tickets[index]
        if 200 <= status < 300:
            self._registry.answered(ticket, flight.path, flight.decision.model, now)
        if flight.session is not None and index:
            self._scheduler.served(flight.session, ticket.id, now)

    def _charge(
        self,
        flight: Flight,
        index: int,
        outcome: Outcome,
        now: float,
        *,
        status: int = 0,
        retry_after: str | None = None,
    ) -> None:
        """List element `index` gets `outcome`, unless it already has one."""
        if flight.charged >> index & 1:
            return
        flight.charged |= 1 << index
        if outcome is Outcome.LOOP and flight.decision.kind is not Kind.PEER:
            outcome = Outcome.FAILURE  # another gateway alone can know that a request loops
        ticket = flight.tickets[index]
        registry = self._registry
        self._observer.attempt(ticket.id, outcome)
        if outcome is Outcome.BACKPRESSURE:
            registry.backpressure(ticket, now + backpressure_seconds(retry_after), now)
        elif outcome is Outcome.QUARANTINED:
            registry.quarantine(ticket, now + QUARANTINE_SECONDS, now)
        elif outcome is Outcome.MISCONFIGURED:
            registry.misconfigured(ticket, status, flight.path, now, model=flight.decision.model)
        verdict = _VERDICTS.get(outcome, Verdict.IGNORED)
        registry.verdict(ticket, verdict, now, flight.permit if index == 0 else None)
        if outcome is Outcome.FAILURE:
            self._failed(flight, ticket, retry_after, now)

    def _failed(self, flight: Flight, ticket: Ticket, retry_after: str | None, now: float) -> None:
        """The session forgets the endpoint; its own retry-after is the least of a cooldown.

        A cooldown that runs is extended, none is begun: a late failure must not undo a half-open
        breaker's probe.
        """
        if flight.session is not None:
            self._scheduler.failed(flight.session, ticket.id)
        seconds = retry_after_seconds(retry_after)
        live = self._registry.live(ticket.id)
        if seconds and live is not None and live.breaker.state(now) is BreakerState.OPEN:
            self._registry.hold(ticket, now + seconds, now)


def _answering(flight: Flight, message: ResponseHeaders) -> int:
    """The list element whose answer `message` is."""
    if message.cluster in flight.clusters:
        return flight.clusters.index(message.cluster)
    return min(max(message.attempts, 1), len(flight.clusters)) - 1


def _failing(flight: Flight, cluster: str) -> int | None:
    """The list element whose attempt in `cluster` failed; None for a cluster of no element.

    The endpoint picker has one cluster for all, whose attempts follow the list, and end with the
    one that was answered.
    """
    if cluster in flight.clusters:
        return flight.clusters.index(cluster)
    if cluster != PICKED:
        return None
    count = len(flight.clusters) if flight.answered is None else flight.answered + 1
    return next((i for i in range(count) if not flight.charged >> i & 1), None)
