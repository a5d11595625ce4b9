"""One request's conversation: a message comes in, the action that answers it goes out.

The table `_MOVES` is the state machine: what each message means in each state. A message that has
no entry is let through, because Envoy resets a stream that stays without an answer. The exchange
never waits and does no I/O; it decides in the call that asks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from extproc import headers
from extproc.errors import Rejection
from extproc.exchange import refusals
from extproc.exchange.body import read_model, replace_model, unreadable
from extproc.exchange.facts import NO_FACTS, Facts, ModelSource, read_facts, read_target
from extproc.exchange.gateway import NO_RULES, Gateway
from extproc.exchange.ledger import Flight
from extproc.exchange.listing import local_answer
from extproc.exchange.messages import (
    Action,
    Continue,
    Message,
    NeedBody,
    Phase,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseHeaders,
    Steer,
)
from extproc.exchange.openai import refuse
from extproc.routing.catalog import Target
from extproc.routing.endpoint import Kind
from extproc.routing.policy import UNRESTRICTED, Restriction, append_hop, parse_hops, restriction_of
from extproc.routing.ring import session_hash
from extproc.routing.scheduler import Dispatch, Query, Unavailable, UnavailableKind

_AS_IT_CAME: Final = Continue(Phase.RESPONSE_HEADERS)

# What is sent on of a client's own words: Envoy takes no longer header, and no control character.
_SENDABLE_TAGS: Final = re.compile(rb"[\t -~\x80-\xff]{1,8192}")


class State(Enum):
    """Where a conversation stands.

    FRESH: nothing said. READING: the body is asked for. ROUTED: an endpoint has the request.
    ANSWERED: its answer has begun. LOCAL: no endpoint is concerned. OVER: the stream has ended.
    """

    FRESH = auto()
    READING = auto()
    ROUTED = auto()
    ANSWERED = auto()
    LOCAL = auto()
    OVER = auto()


class Exchange:
    """The conversation about one HTTP request; `end` must be called once, however it ends."""

    __slots__ = (
        "_facts",
        "_flight",
        "_gateway",
        "_hops",
        "_restriction",
        "_rules",
        "_started",
        "_subset",
        "state",
    )

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._facts = NO_FACTS
        self._flight: Flight | None = None
        self._hops: tuple[str, ...] = ()
        self._restriction = UNRESTRICTED
        self._rules = NO_RULES
        self._subset: frozenset[str] | None = None
        self._started = 0.0
        self.state = State.FRESH

    def receive(self, message: Message, now: float) -> Action:
        """The one action that answers `message`."""
        move = _MOVES.get((self.state, type(message)))
        if move is None:
            return Continue(message.phase)
        return move(self, message, now)

    def end(self, now: float, *, owes_reply: bool = False) -> None:
        """The stream is over; nothing is held any more.

        `owes_reply` means that the last action was not written: Envoy went on without it.
        """
        flight = self._flight
        state, self.state = self.state, State.OVER
        if flight is None or state is State.OVER:
            return
        if owes_reply and state is State.ROUTED:
            self._gateway.ledger.abandon(flight, now)
        else:
            self._gateway.ledger.ended(flight, now)

    def on_request_headers(self, message: RequestHeaders, now: float) -> Action:
        """The request is routed, refused, answered here, or its body is asked for."""
        gateway = self._gateway
        self._started = now
        facts = read_facts(message, gateway.names)
        if isinstance(facts, Rejection):
            asked = read_target(message.headers)
            self._facts = replace(NO_FACTS, method=asked.method, path=asked.path)
            return self._refuse(facts, "")
        self._facts = facts
        self._subset = None if message.subset is None else frozenset(message.subset)
        if facts.client is not None:
            self._rules = gateway.clients.get(facts.client, NO_RULES)
        local = local_answer(
            facts.method,
            facts.path,
            gateway.listing,
            is_ready=gateway.is_ready,
            own_only=bool(facts.hops),
            request_id=facts.request_id,
        )
        if local is not None:
            self.state = State.LOCAL
            return local
        hops = parse_hops(facts.hops, gateway.cluster_id, gateway.limits.max_hops)
        if isinstance(hops, Rejection):
            return self._refuse(hops, "")
        self._hops = hops
        self._restriction = self._restrict(facts, hops)
        return self._place(facts, is_read=bool(message.metadata), now=now)

    def on_request_body(self, message: RequestBody, now: float) -> Action:
        """The request is routed by its header or by what its body says, or refused."""
        facts = self._facts
        read = read_model(
            message.body,
            facts.content_type,
            facts.content_encoding,
            self._gateway.limits.body_limit_bytes,
        )
        if isinstance(read, Rejection):
            return self._refuse(read, facts.model or "")
        session = read.prompt_cache_key if facts.session is None else facts.session
        # A header outranks the body, also where the body is read for another reason.
        model = facts.model or read.model
        return self._route(replace(facts, session=session), model, message.body, now)

    def on_request_trailers(self, message: RequestTrailers, now: float) -> Action:
        """Trailers in the place of the body that was asked for: there is no body to read."""
        del message, now
        model = self._facts.model
        if model is None:
            return self._refuse(refusals.model_missing(), "")
        return self._refuse(refusals.body_invalid("The request has no body."), model)

    def on_response_headers(self, message: ResponseHeaders, now: float) -> Action:
        """The answer has begun: what the attempts before it came to is known."""
        flight = self._flight
        if flight is not None:
            self.state = State.ANSWERED
            self._gateway.ledger.responded(flight, message, now)
        return _AS_IT_CAME

    def on_unrouted_response(self, message: ResponseHeaders, now: float) -> Action:
        """Envoy answered by itself before anything was decided: no endpoint is concerned."""
        del message, now
        self.state = State.LOCAL
        return _AS_IT_CAME

    def _place(self, facts: Facts, *, is_read: bool, now: float) -> Action:
        """The request is routed, if its model is known; `is_read` is that Envoy has its body."""
        limit = self._gateway.limits.body_limit_bytes
        if is_read and facts.content_length > limit:
            return self._refuse(refusals.body_too_large(limit), "")
        if facts.model is not None:
            return self._route(facts, facts.model, None, now)
        if facts.model_source is ModelSource.BODY:
            return self._need_body(facts, "")
        return self._refuse(refusals.model_missing(), "")

    def _restrict(self, facts: Facts, hops: tuple[str, ...]) -> Restriction:
        return restriction_of(
            residency=facts.residency,
            no_store=facts.no_store,
            hops=hops,
            forward_hopped_requests=self._gateway.forward_hopped_requests,
            client=self._rules.restriction,
        )

    def _route(self, facts: Facts, model: str, body: bytes | None, now: float) -> Action:
        """The request is on its way to the best endpoint, or refused, or its body is needed."""
        gateway = self._gateway
        resolution = gateway.catalog.resolve(model, facts.session, gateway.random)
        if resolution is None:
            return self._refuse(refusals.model_not_found(model), model)
        can_read = body is not None or not (facts.end_of_stream or facts.is_upgrade)
        refused: list[Unavailable] = []
        for target in resolution.targets:
            query = self._query(facts, target)
            if model != target.model or target.model in gateway.foreign_names:
                if not can_read:
                    query = query.for_upstream_name(model)
                elif body is None:
                    preview = gateway.scheduler.preview(query, now)
                    if isinstance(preview, Unavailable):
                        refused.append(preview)
                        continue
                    if preview.upstream_name != model:
                        return self._need_body(facts, model)
                    query = query.for_upstream_name(model)
            result = gateway.scheduler.dispatch(query, now)
            if isinstance(result, Dispatch):
                return self._steer(facts, model, query=query, dispatch=result, body=body, now=now)
            refused.append(result)
        return self._refuse(_unavailable(model, refused), model)

    def _need_body(self, facts: Facts, model: str) -> Action:
        """The body is asked for, unless its headers say that it cannot be read.

        Envoy must not be asked for a body above the limit: it would wait for the end of it.
        """
        refused = unreadable(
            facts.content_type,
            facts.content_encoding,
            facts.content_length,
            self._gateway.limits.body_limit_bytes,
        )
        if refused is not None:
            return self._refuse(refused, model)
        self.state = State.READING
        return NeedBody()

    def _query(self, facts: Facts, target: Target) -> Query:
        """What the scheduler is asked for one model."""
        gateway = self._gateway
        rules = self._rules
        limits = gateway.limits
        return Query(
            model=target.model,
            session=None if facts.session is None else session_hash(target.model, facts.session),
            # A client may announce more than it ever sends, and one request must not look like a
            # thousand others.
            content_length=min(facts.content_length, limits.body_limit_bytes),
            restriction=self._restriction,
            subset=self._subset,
            strategy=rules.strategy or target.strategy,
            max_attempts=limits.max_attempts,
            lease_seconds=limits.header_deadline_seconds,
        )

    def _steer(
        self,
        facts: Facts,
        model: str,
        *,
        query: Query,
        dispatch: Dispatch,
        body: bytes | None,
        now: float,
    ) -> Action:
        """Envoy is told where the request goes, in order, and what it looks like there."""
        gateway = self._gateway
        decision = dispatch.decision
        new_body: bytes | None = None
        if body is not None and decision.upstream_name != model:
            try:
                replaced = replace_model(
                    body, facts.content_type, decision.upstream_name, facts.content_encoding
                )
            except BaseException:
                gateway.ledger.withdraw(dispatch.grant, now)
                raise
            if isinstance(replaced, Rejection):
                gateway.ledger.withdraw(dispatch.grant, now)
                return self._refuse(replaced, model)
            new_body = replaced
        decision_id = f"{gateway.instance}-{decision.number:x}"
        flight = Flight(
            decision_id=decision_id,
            decision=decision,
            grant=dispatch.grant,
            session=query.session,
            content_length=query.content_length,
            path=facts.path,
            model=model,
            started=self._started,
        )
        gateway.ledger.open(flight)
        self._flight = flight
        self.state = State.ROUTED
        written_id = decision_id.encode()
        set_headers = [
            (headers.CLUSTER, flight.clusters[0].encode()),
            (headers.DECISION, written_id),
        ]
        if facts.request_id is None:
            set_headers.append((headers.REQUEST_ID, written_id))
        attempts = len(flight.clusters)
        if attempts != gateway.limits.route_attempts:
            set_headers.append((headers.MAX_RETRIES, b"%d" % (attempts - 1)))
        remove_headers: tuple[str, ...] = ()
        if new_body is not None:
            set_headers.append(("content-length", b"%d" % len(new_body)))
        if decision.kind is Kind.PEER:
            set_headers.append((headers.HOP, append_hop(self._hops, gateway.cluster_id)))
            model_header = facts.model_header or headers.MODEL[0]
            set_headers.append((model_header, decision.upstream_name.encode()))
            # A later attempt has the same headers, so one peer that gets no tags is enough.
            peers = [info.peer for info in decision.infos]
            is_tagged = all(peer is not None and peer.send_tags for peer in peers)
            tags = self._tags(facts) if is_tagged else b""
            if tags:
                set_headers.append((headers.TAGS, tags))
            else:
                remove_headers = (headers.TAGS,)
        return Steer(
            phase=Phase.REQUEST_HEADERS if body is None else Phase.REQUEST_BODY,
            clusters=flight.clusters,
            set_headers=set_headers,
            remove_headers=remove_headers,
            destinations=decision.authorities,
            body=new_body,
        )

    def _tags(self, facts: Facts) -> bytes:
        """Who sent the request: its client's tags, then its own unless they cannot be sent on."""
        own = self._rules.tags.encode()
        tags = b",".join(tag for tag in (own, *facts.tags) if tag)
        return tags if _SENDABLE_TAGS.fullmatch(tags) else own

    def _refuse(self, rejection: Rejection, model: str) -> Action:
        """The client is told why its request goes nowhere."""
        self.state = State.LOCAL
        self._gateway.observer.refused(rejection.reason, model)
        facts = self._facts
        return refuse(rejection, method=facts.method, path=facts.path, request_id=facts.request_id)


def _unavailable(model: str, refused: Sequence[Unavailable]) -> Rejection:
    """The refusal that several models' refusals add up to.

    One that is merely saturated outweighs one that is dead, because waiting helps; the moment to
    come back is the soonest of all.
    """
    moments = [item.retry_after_seconds for item in refused if item.retry_after_seconds is not None]
    retry_after_seconds = min(moments, default=None)
    kinds = {item.kind for item in refused}
    if UnavailableKind.SATURATED in kinds:
        return refusals.saturated(model, retry_after_seconds or 1.0)
    if UnavailableKind.RESTRICTED in kinds:
        return refusals.restricted(model, retry_after_seconds)
    return refusals.no_endpoint(model, retry_after_seconds)


# What each message means in each state. Left out: a message that changes nothing.
_MOVES: Final[Mapping[tuple[State, type[Message]], Callable[..., Action]]] = MappingProxyType(
    {
        (State.FRESH, RequestHeaders): Exchange.on_request_headers,
        (State.FRESH, ResponseHeaders): Exchange.on_unrouted_response,
        (State.READING, RequestBody): Exchange.on_request_body,
        (State.READING, RequestTrailers): Exchange.on_request_trailers,
        (State.READING, ResponseHeaders): Exchange.on_unrouted_response,
        (State.ROUTED, ResponseHeaders): Exchange.on_response_headers,
    }
)
