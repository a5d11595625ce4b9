"""Candidates: what an endpoint's own metric names in the configuration mean."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.engines.candidate import Candidate, Match, parse_candidate


@pytest.mark.parametrize(
    ("text", "candidate"),
    [
        ("up", Candidate("up")),
        (" vllm:num_requests_running ", Candidate("vllm:num_requests_running")),
        ("up{}", Candidate("up")),
        ('up{a="b"}', Candidate("up", (Match("a", "b"),))),
        ('up{ a = "b" , c!="" , }', Candidate("up", (Match("a", "b"), Match("c", "", False)))),
        (r'up{a="}\"\\\n,"}', Candidate("up", (Match("a", '}"\\\n,'),))),
    ],
)
def test_a_name_with_labels_is_read(text: str, candidate: Candidate) -> None:
    """A name, and in braces what its labels must and must not be."""
    assert parse_candidate(text) == candidate


@pytest.mark.parametrize(
    "text",
    ["", "a-b", "1up", "up{", "up}", "up{a}", "up{a=b}", 'up{a="b"c="d"}', 'up{a=~"b"}', "up 1"],
)
def test_another_form_is_refused(text: str) -> None:
    """The error shows the text and the right form."""
    with pytest.raises(ValueError, match=r'label="value"'):
        parse_candidate(text)


MATCHES = st.builds(
    Match,
    st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True),
    st.text(max_size=8),
    is_equal=st.booleans(),
)
CANDIDATES = st.builds(
    Candidate,
    st.from_regex(r"[a-z_:][a-z0-9_:]{0,9}", fullmatch=True),
    st.lists(MATCHES, max_size=3).map(tuple),
)


@settings(deadline=None)
@given(CANDIDATES)
def test_a_candidates_text_reads_as_itself(candidate: Candidate) -> None:
    """What an error says was looked for can be pasted into a configuration."""
    assert parse_candidate(str(candidate)) == candidate


def test_a_text_says_what_is_done_to_a_value() -> None:
    """Labels that hold the number, and divisors, are named."""
    assert str(Candidate("info", label="block_size")) == "info label block_size"
    assert str(Candidate("used", over=Candidate("all"))) == "used / all"
