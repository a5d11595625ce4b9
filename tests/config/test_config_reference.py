"""The reference page and the parser know the same keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from extproc.config.parse import parse
from extproc.config.problems import ConfigErrors

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "configuration.md"
TEXT = PAGE.read_text(encoding="utf-8")
ENDPOINT = "endpoints: [{{id: e, url: 'https://h', models: [m], {}}}]"
# A file with one unknown key in the section that the heading names.
SECTIONS = {
    "Top level": "qqqqqq: 1",
    "`listener`": "listener: {qqqqqq: 1}",
    "`service`": "service: {qqqqqq: 1}",
    "`service.tls`": "service: {tls: {cert_file: /c, key_file: /k, qqqqqq: 1}}",
    "`endpoints`": ENDPOINT.format("qqqqqq: 1"),
    "`endpoints[].metrics`": ENDPOINT.format("metrics: {qqqqqq: 1}"),
    "`endpoints[].metrics.names`": ENDPOINT.format("metrics: {names: {qqqqqq: 1}}"),
    "`endpoints[].tls`": ENDPOINT.format("tls: {qqqqqq: 1}"),
    "`endpoints[].peer`": ENDPOINT.format("kind: peer, peer: {name: p, cluster_id: c, qqqqqq: 1}"),
    "`models`": "models: {m: {qqqqqq: 1}}",
    "`clients`": "clients: {c: {qqqqqq: 1}}",
    "`strategies`": "strategies: {s: {qqqqqq: 1}}",
    "`strategies.*.weights`": "strategies: {s: {weights: {qqqqqq: 1}}}",
    "`headers`": "headers: {qqqqqq: 1}",
    "`breaker`": "breaker: {qqqqqq: 1}",
    "`scrape`": "scrape: {qqqqqq: 1}",
    "`federation`": "federation: {qqqqqq: 1}",
}


def documented() -> dict[str, list[str]]:
    """The keys of every table of the page, by the heading above it."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^##+ ", TEXT, flags=re.MULTILINE)[1:]:
        keys = re.findall(r"^\| `(\w+)` \|", part, flags=re.MULTILINE)
        if keys:
            found[part.splitlines()[0]] = keys
    return found


def test_every_section_has_a_table() -> None:
    """And every table is a section."""
    assert set(documented()) == set(SECTIONS)


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_table_has_the_keys_that_the_parser_knows(heading: str) -> None:
    """No more and no fewer, each once."""
    with pytest.raises(ConfigErrors) as caught:
        parse(SECTIONS[heading])
    (error,) = caught.value.errors
    known = error.expected.removeprefix("known here: ").split(", ")
    assert sorted(documented()[heading]) == sorted(known)


def test_the_small_file_of_the_page_is_right() -> None:
    """As it stands there."""
    (example,) = re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)
    assert parse(example).warnings == ()
