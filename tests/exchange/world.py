"""A gateway on a small fleet, with a clock that only the test moves."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from random import Random

from extproc import headers
from extproc.config.values import ClientPolicy, Config, Federation
from extproc.errors import Reason
from extproc.exchange.exchange import Exchange
from extproc.exchange.messages import (
    Action,
    AttemptLog,
    Continue,
    Immediate,
    Phase,
    RequestHeaders,
    RequestLog,
    ResponseHeaders,
    Steer,
)
from extproc.exchange.outcome import Outcome
from extproc.routing.breaker import Verdict
from extproc.routing.catalog import ModelEntry
from extproc.routing.endpoint import BreakerSettings, BreakerState, Info, Kind, Peer, Url
from extproc.routing.registry import Live
from extproc.serve.assembly import Core, assemble


@dataclass
class Told:
    """An observer that remembers what it was told."""

    refusals: list[tuple[Reason, str]] = field(default_factory=list)
    dispatches: list[tuple[str, str]] = field(default_factory=list)
    attempts: list[tuple[str, Outcome]] = field(default_factory=list)
    failed_opens: int = 0
    answers: int = 0
    ends: int = 0
    seconds: list[float] = field(default_factory=list)

    def refused(self, reason: Reason, model: str) -> None:
        self.refusals.append((reason, model))

    def dispatched(self, endpoint: str, model: str) -> None:
        self.dispatches.append((endpoint, model))

    def attempt(self, endpoint: str, outcome: Outcome) -> None:
        self.attempts.append((endpoint, outcome))

    def failed_open(self) -> None:
        self.failed_opens += 1

    def answered(self, model: str, seconds: float) -> None:
        self.answers += 1
        self.seconds.append(seconds)

    def ended(self, model: str, seconds: float) -> None:
        self.ends += 1
        self.seconds.append(seconds)


class World:
    """A core, what it told its observer, and a virtual clock."""

    def __init__(self, config: Config) -> None:
        self.told = Told()
        self.is_ready = True
        self.now = 100.0
        self.core: Core = assemble(
            config,
            observer=self.told,
            random=Random(7),
            is_ready=lambda: self.is_ready,
            now=self.now,
            created=1,
        )

    def later(self, seconds: float) -> None:
        """Time passes, and what was due is booked."""
        self.now += seconds
        self.core.ledger.tick(self.now)

    def inflight(self) -> dict[str, int]:
        """In-flight of every endpoint that has any."""
        registry = self.core.registry
        return {name: registry.inflight(name) for name in registry.ids() if registry.inflight(name)}

    def ask(
        self,
        *pairs: tuple[str, str | bytes],
        method: str = "POST",
        path: str = "/v1/chat/completions",
        end_of_stream: bool = False,
        metadata: dict[str, str] | None = None,
        subset: tuple[str, ...] | None = None,
    ) -> tuple[Exchange, Action]:
        """A new conversation and the answer to its first message."""
        sent = [(":method", method.encode()), (":path", path.encode())]
        sent += [(k, v if isinstance(v, bytes) else v.encode()) for k, v in pairs]
        exchange = self.core.exchange()
        message = RequestHeaders(sent, end_of_stream, metadata or {}, subset)
        return exchange, exchange.receive(message, self.now)

    def route(self, *pairs: tuple[str, str | bytes], model: str = "m") -> tuple[Exchange, Steer]:
        """A new conversation that was steered."""
        exchange, action = self.ask(("x-llmgw-model", model), *pairs)
        assert isinstance(action, Steer), action
        return exchange, action

    def respond(
        self,
        exchange: Exchange,
        status: int = 200,
        *,
        attempts: int = 1,
        flags: int = 0,
        details: str = "via_upstream",
        retry_after: str | None = None,
        cluster: str = "",
    ) -> None:
        """Envoy reports the answer."""
        message = ResponseHeaders(status, retry_after, False, flags, details, cluster, attempts)
        assert exchange.receive(message, self.now) == Continue(Phase.RESPONSE_HEADERS)

    def attempts_of(self, endpoint: str) -> list[Outcome]:
        """The outcomes that were booked for one endpoint."""
        return [outcome for name, outcome in self.told.attempts if name == endpoint]


def sent(steer: Steer) -> dict[str, bytes]:
    """The headers that a steering sets."""
    return dict(steer.set_headers)


def error(action: Action) -> dict[str, object]:
    """The error object of an immediate answer."""
    assert isinstance(action, Immediate), action
    body = json.loads(action.body)["error"]
    assert isinstance(body, dict)
    return body


def status(action: Action) -> int:
    """The status of an immediate answer."""
    assert isinstance(action, Immediate), action
    return action.status


def reason(action: Action) -> str:
    """The reason header of an immediate answer."""
    assert isinstance(action, Immediate), action
    return dict(action.headers)[headers.REASON].decode()


def decision_id(steer: Steer) -> str:
    """The id of the decision, as Envoy's access log has it."""
    return sent(steer)[headers.DECISION].decode()


def names(steer: Steer) -> list[str]:
    """The endpoints of a steering, in order."""
    return [cluster.removeprefix("ep-") for cluster in steer.clusters]


def attempt_log(
    steer: Steer, index: int, status: int = 0, flags: int = 0, retry_after: str | None = None
) -> AttemptLog:
    """Envoy's log entry of the attempt at list element `index`."""
    return AttemptLog(decision_id(steer), steer.clusters[index], status, flags, "", retry_after)


def request_log(
    steer: Steer, status: int, flags: int, cluster: str = "", attempts: int = 1
) -> RequestLog:
    """Envoy's log entry of the whole request."""
    return RequestLog(decision_id(steer), cluster, status, flags, "", attempts)


def live_of(world: World, name: str) -> Live:
    """The live state of one endpoint."""
    live = world.core.registry.live(name)
    assert live is not None
    return live


def breaker(world: World, name: str) -> BreakerState:
    """The state of one endpoint's breaker."""
    return live_of(world, name).breaker.state(world.now)


def streak(world: World, name: str) -> int:
    """The consecutive failures of one endpoint."""
    return live_of(world, name).breaker.streak


def rest(world: World, name: str) -> None:
    """The endpoint's breaker is open for a second."""
    live = live_of(world, name)
    live.breaker.hold(world.now + 1, world.now)
    live.touch()


def open_breaker(world: World, name: str) -> None:
    """The endpoint has failed three times in a row, which opens its breaker."""
    for _ in range(3):
        ticket = replace(live_of(world, name).ticket, epoch=live_of(world, name).breaker.epoch)
        world.core.registry.verdict(ticket, Verdict.FAILURE, world.now)
    assert breaker(world, name) is BreakerState.OPEN


def engine(name: str, port: int, *models: str, **more: object) -> Info:
    """One of our own engines, without scraping."""
    return Info(
        id=name,
        url=Url.parse(f"http://127.0.0.1:{port}"),
        models=models or ("m",),
        engine="none",
        breaker=BreakerSettings(threshold=3),
        **more,  # type: ignore[arg-type]  # a test's own keywords
    )


CONFIG = Config(
    cluster_id="home",
    endpoints=(
        engine("a", 9001),
        engine("b", 9002),
        engine("c", 9003),
        engine("renamed", 9004, "renamed", upstream_model="org/Renamed-7B"),
        Info(
            id="provider",
            url=Url.parse("https://provider.test"),
            models=("outside",),
            kind=Kind.EXTERNAL,
            residency="eu",
        ),
        Info(
            id="peer-x",
            url=Url.parse("https://x.test"),
            models=("x/m",),
            kind=Kind.PEER,
            upstream_model="m",
            peer=Peer("x", "cluster-x", send_tags=True),
        ),
        Info(
            id="peer-y",
            url=Url.parse("https://y.test"),
            models=("y/m",),
            kind=Kind.PEER,
            upstream_model="m",
            peer=Peer("y", "cluster-y"),
        ),
    ),
    models=(
        ModelEntry("m", aliases=("fast",)),
        ModelEntry("renamed"),
        ModelEntry("outside", fallbacks=("m",)),
        ModelEntry("x/m"),
        ModelEntry("y/m"),
    ),
    clients={
        "strict": ClientPolicy(no_store=True),
        "tagged": ClientPolicy(tags=(("team", "red"),)),
    },
    federation=Federation(),
)
