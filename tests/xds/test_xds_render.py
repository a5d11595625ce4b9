"""The YAML: what Python reads back is what was meant, and nothing in it can be misread."""

from __future__ import annotations

import re

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from xds_world import config, endpoint

from extproc.config.values import Steering
from extproc.routing.endpoint import Auth, Info, SecretKind, SecretRef
from extproc.xds.bootstrap import bootstrap
from extproc.xds.render import render, to_yaml
from extproc.xds.tree import plain

texts = st.text(max_size=8)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
WORDS = ("y", "N", "on", "yes", "null", "~", "1e5", "1E5", "0x1F", "0o7", ".inf", "nan", "-", "1")


@settings(deadline=None)
@given(st.dictionaries(texts, values, max_size=3))
def test_what_is_written_is_read_back(tree: dict[str, object]) -> None:
    """For any tree of JSON values."""
    value = plain(tree)
    assert isinstance(value, dict)
    assert yaml.safe_load(to_yaml(value)) == tree


@pytest.mark.parametrize("text", WORDS)
def test_text_that_a_parser_could_take_for_something_else_is_quoted(text: str) -> None:
    """Envoy's parser knows other numbers and truth values than Python's."""
    assert to_yaml({"name": text}) == f'name: "{text}"\n'


def test_durations_and_names_stay_readable() -> None:
    """They are not quoted."""
    tree = {"a": "0.25s", "b": "envoy.filters.http.router", "c": "ep-a", "d": "/v1/models"}
    assert to_yaml(tree) == "a: 0.25s\nb: envoy.filters.http.router\nc: ep-a\nd: /v1/models\n"


@pytest.mark.parametrize("steering", Steering)
def test_the_rendering_is_the_bootstrap(steering: Steering) -> None:
    """And the same every time; the head names the file and the steering."""
    configuration = config(endpoint("a", "http://a.test:80", "m"))
    text = render(configuration, steering)
    assert text == render(configuration, steering)
    assert yaml.safe_load(text) == plain(bootstrap(configuration, steering))
    assert f"steered by {steering}" in text.splitlines()[0]
    assert "llmgw.yaml" in text.splitlines()[1]


def test_text_with_quotes_or_foreign_letters_is_written_in_ascii() -> None:
    """In the quotes that need fewer escapes."""
    tree = {"a": '{"b":1}', "c": 'it\'s "d"', "e": "é\n", "f": []}
    assert to_yaml(tree) == (
        'a: \'{"b":1}\'\nc: "it\'s \\"d\\""\ne: "\\U000000E9\\U0000000A"\nf: []\n'
    )
    assert to_yaml({}) == "{}\n"


def test_there_are_no_anchors() -> None:
    """Parts that are alike are written out."""
    text = render(config(*(endpoint(name, "http://a.test:80", "m") for name in "ab")))
    assert not re.search(r"[:-] [&*]", text)


def test_a_key_is_named_and_never_written() -> None:
    """In the environment and in a file."""
    keys = (SecretRef(SecretKind.ENV, "THE_KEY"), SecretRef(SecretKind.FILE, "/run/key"))
    infos = tuple(
        Info(f"e{number}", endpoint("x", "https://a.test", "m").url, ("m",), auth=Auth(key))
        for number, key in enumerate(keys)
    )
    tree = yaml.safe_load(render(config(*infos)))
    assert tree["static_resources"]["secrets"] == [
        {
            "name": "env:THE_KEY",
            "generic_secret": {"secret": {"environment_variable": "THE_KEY"}},
        },
        {"name": "file:/run/key", "generic_secret": {"secret": {"filename": "/run/key"}}},
    ]


def test_two_endpoints_with_one_id_are_refused() -> None:
    """They would get the same cluster."""
    twice = [endpoint("a", "http://a.test", "m"), endpoint("a", "http://b.test", "m")]
    with pytest.raises(ValueError, match="two endpoints are called 'a'"):
        render(config(*twice))


def test_what_is_no_json_is_refused() -> None:
    """A filter of the configuration can hold anything."""
    with pytest.raises(TypeError, match="set is not a JSON value"):
        plain({"a": [set()]})
    with pytest.raises(TypeError, match="float is not a JSON value"):
        plain(float("inf"))
