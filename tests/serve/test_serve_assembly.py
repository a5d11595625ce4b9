"""From a configuration to the core: every setting arrives where it works."""

from __future__ import annotations

import json
from random import Random

from extproc.config.parse import parse
from extproc.exchange.messages import Immediate, NeedBody, RequestHeaders, Steer
from extproc.exchange.observer import NoObserver
from extproc.serve.assembly import Core, assemble

TEXT = """
cluster_id: home
max_attempts: 2
headers: {model: [x-my-model], session: [x-my-session]}
listener: {header_deadline_seconds: 5}
endpoints:
  - {id: a, url: 'http://127.0.0.1:1', models: [m], engine: none}
  - {id: b, url: 'http://127.0.0.1:2', models: [m], engine: none}
  - {id: c, url: 'http://127.0.0.1:3', models: [m], engine: none}
  - {id: r, url: 'http://127.0.0.1:4', models: [r], engine: none, upstream_model: org/R}
models:
  m: {aliases: [fast]}
"""


FEDERATED = """
cluster_id: home
endpoints:
  - {id: a, url: 'http://127.0.0.1:1', models: [m], engine: none}
  - {id: p, url: 'http://127.0.0.1:5', models: [x/m], kind: peer, peer: {name: x, cluster_id: xx}}
models:
  theirs: {split: {x/m: 1}}
  half-ours: {split: {x/m: 1, m: 1}}
"""


def core(text: str = TEXT) -> Core:
    """The core of a configuration."""
    return assemble(
        parse(text),
        observer=NoObserver(),
        random=Random(1),
        is_ready=lambda: True,
        now=0.0,
        created=42,
    )


def ask(assembled: Core, *pairs: tuple[str, bytes], method: bytes = b"POST", path: bytes) -> object:
    """The answer to one request's headers."""
    sent = [(":method", method), (":path", path), *pairs]
    return assembled.exchange().receive(RequestHeaders(sent), 1.0)


def test_header_names_and_attempts_are_the_configured_ones() -> None:
    """The request is read and steered as the file says."""
    action = ask(core(), ("x-my-model", b"m"), path=b"/v1/completions")
    assert isinstance(action, Steer)
    assert len(action.clusters) == 2
    assert "x-envoy-max-retries" not in dict(action.set_headers)


def test_models_and_aliases_are_listed_with_the_given_time() -> None:
    """The list has every name that can be asked for."""
    action = ask(core(), method=b"GET", path=b"/v1/models")
    assert isinstance(action, Immediate)
    cards = json.loads(action.body)["data"]
    assert {card["id"] for card in cards} == {"m", "fast", "r"}
    assert {card["created"] for card in cards} == {42}


def test_a_model_under_another_name_needs_the_body() -> None:
    """What an endpoint calls otherwise is known to be foreign."""
    assert isinstance(ask(core(), ("x-my-model", b"r"), path=b"/v1/completions"), NeedBody)


def test_the_cluster_header_knows_no_alternatives() -> None:
    """It names one cluster, so a retry would go to the same endpoint again."""
    action = ask(
        core(f"{TEXT}steering: cluster-header\n"), ("x-my-model", b"m"), path=b"/v1/completions"
    )
    assert isinstance(action, Steer)
    assert len(action.clusters) == 1
    assert ("x-envoy-max-retries", b"0") in action.set_headers


def test_a_split_of_models_that_are_not_ours_is_not_offered_to_peers() -> None:
    """A peer that lists us is shown what we serve ourselves."""
    action = ask(core(FEDERATED), ("x-llmgw-hop", b"other"), method=b"GET", path=b"/v1/models")
    assert isinstance(action, Immediate)
    names = {card["id"] for card in json.loads(action.body)["data"]}
    assert names == {"m", "half-ours"}


def test_two_processes_never_share_a_decision_id() -> None:
    """Each has a name of its own."""
    one = core()
    other = assemble(
        parse(TEXT),
        observer=NoObserver(),
        random=Random(2),
        is_ready=lambda: True,
        now=0.0,
        created=42,
    )
    assert one.gateway.instance != other.gateway.instance
