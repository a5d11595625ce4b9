"""Which bodies are held back until they are whole, and under which names they may be changed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from xds_world import config, endpoint

from extproc.config.values import Config, HeaderNames
from extproc.routing.catalog import ModelEntry
from extproc.routing.endpoint import Kind
from extproc.xds.whole_bodies import renamed_names, whole_bodies

ENGINE = endpoint("a", "http://192.0.2.1:80", "m", "n")
Headers = dict[str, str]


def with_models(*entries: ModelEntry) -> Config:
    """A configuration of one engine and these entries."""
    return replace(config(ENGINE), models=entries)


def test_a_name_is_renamed_when_any_endpoint_may_call_it_otherwise() -> None:
    """Aliases, splits, names with fallbacks, and whatever has an upstream model."""
    assert renamed_names(config(ENGINE)) == ()
    foreign = replace(endpoint("b", "http://192.0.2.2:80", "other"), upstream_model="its-own")
    assert renamed_names(config(ENGINE, foreign)) == ("other",)
    peer = endpoint("p", "http://192.0.2.3:80", "there/m", kind=Kind.PEER)
    assert renamed_names(config(ENGINE, replace(peer, upstream_model="m"))) == ("there/m",)
    entries = (
        ModelEntry("m", aliases=("alias",)),
        ModelEntry("n", aliases=("last",), fallbacks=("m",)),
        ModelEntry("half", split=(("m", 1.0), ("n", 1.0))),
    )
    assert renamed_names(with_models(*entries)) == ("alias", "half", "last", "n")


def test_the_limit_is_the_one_of_the_listener() -> None:
    """The same for Envoy's buffer, the message to the service and its parser."""
    tree = whole_bodies(config(ENGINE))["typed_config"]
    assert isinstance(tree, dict)
    buffer = tree["extension_config"]["typed_config"]
    assert buffer["max_request_bytes"] == config(ENGINE).listener.body_limit_bytes


def passes(configuration: Config, sent: Headers) -> bool:
    """Whether the rendered predicate lets a request with these headers through unheld."""
    tree = whole_bodies(configuration)["typed_config"]
    assert isinstance(tree, dict)
    (matcher,) = tree["xds_matcher"]["matcher_list"]["matchers"]
    return holds(matcher["predicate"], sent)


def holds(predicate: dict[str, object], sent: Headers) -> bool:
    """What Envoy makes of a predicate: a header that is absent matches nothing."""
    ((kind, inside),) = predicate.items()
    assert isinstance(inside, dict)
    match kind:
        case "or_matcher":
            return any(holds(one, sent) for one in inside["predicate"])
        case "and_matcher":
            return all(holds(one, sent) for one in inside["predicate"])
        case "not_matcher":
            return not holds(inside, sent)
        case _:
            value = sent.get(inside["input"]["typed_config"]["header_name"])
            pattern = inside["value_match"]["safe_regex"]["regex"]
            return value is not None and re.fullmatch(pattern, value) is not None


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({}, False),
        ({"content-length": "5"}, True),
        ({"upgrade": "websocket"}, True),
        ({"x-llmgw-model": "m"}, True),
        ({"x-ai-eg-model": "m"}, True),
        ({"x-llmgw-model": ""}, True),
        ({"x-llmgw-model": "al.as"}, False),
        ({"x-ai-eg-model": "al.as"}, False),
        ({"x-llmgw-model": "alias"}, True),
        ({"x-llmgw-model": "al.as", "content-length": "5"}, True),
    ],
)
def test_what_is_held_back(sent: Headers, expected: bool) -> None:  # noqa: FBT001 - a table's column
    """A body of unknown length whose model is in it, or may have to be changed in it."""
    assert passes(with_models(ModelEntry("m", aliases=("al.as",))), sent) is expected


def test_without_renamed_names_a_model_header_is_enough() -> None:
    """Whichever of the configured names it has."""
    configuration = replace(config(ENGINE), headers=HeaderNames(model=("x-model",)))
    assert passes(configuration, {"x-model": "anything"})
    assert not passes(configuration, {"x-llmgw-model": "m"})
