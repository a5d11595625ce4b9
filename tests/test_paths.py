"""The table of paths: what is found, what is not, and in whose envelope errors come."""

from __future__ import annotations

import pytest

from extproc.paths import PATHS, Flavour, Route, find, flavour_of


def test_every_entry_is_found_by_its_path() -> None:
    """With an id after it where it takes one."""
    for listed in PATHS:
        path = f"{listed.path}/org/name" if listed.takes_id else listed.path
        assert find(path) is listed


@pytest.mark.parametrize(
    "path",
    ["", "/", "/v1", "/metrics", "/v1/models/", "/v1/chat/completions/", "/v1/chat", "/ready/x"],
)
def test_other_paths_are_not_found(path: str) -> None:
    """A prefix of a listed path is not that path, nor is one that goes on."""
    assert find(path) is None


def test_a_models_id_may_hold_slashes() -> None:
    """Model names do."""
    found = find("/v1/models/org/name:tag")
    assert found is not None
    assert (found.route, found.takes_id) == (Route.MODELS, True)


@pytest.mark.parametrize(
    ("path", "flavour"),
    [
        ("/v1/messages", Flavour.ANTHROPIC),
        ("/v1/messages?beta=true", Flavour.ANTHROPIC),
        ("/v1/messages/count_tokens", Flavour.ANTHROPIC),
        ("/v1/messages/batches", Flavour.ANTHROPIC),
        ("/v1/messagesx", Flavour.OPENAI),
        ("/v1/chat/completions", Flavour.OPENAI),
        ("", Flavour.OPENAI),
    ],
)
def test_the_flavour_follows_the_path(path: str, flavour: Flavour) -> None:
    """Listed or not."""
    assert flavour_of(path) is flavour


def test_a_listed_paths_flavour_is_that_of_its_errors() -> None:
    """The table and the rule for unlisted paths agree."""
    for entry in PATHS:
        assert flavour_of(entry.path) is entry.flavour


def test_only_posts_have_json_bodies() -> None:
    """Envoy reads a body for its model on these paths alone."""
    for entry in PATHS:
        assert not entry.has_json_model or entry.methods == ("POST",)
