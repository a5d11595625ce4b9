"""A model's name: one rule wherever it comes from."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc.errors import Reason, Rejection
from extproc.exchange.names import MAX_NAME_CHARS, checked_name, decoded_name

# The first text that hypothesis draws reads its character tables, which may take a second.
LAW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("name", ["m", "org/m-7B:q4@main", " a ", "模型", "ü" * MAX_NAME_CHARS])
def test_a_printable_name_is_itself(name: str) -> None:
    """A name is neither trimmed nor folded."""
    assert checked_name(name) == name
    assert decoded_name(name.encode()) == name


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "is empty"),
        (" ", "is empty"),
        ("\r\n", "is empty"),
        ("m" * 257, "is longer than 256 characters"),
        ("a\x00", "has a character that is not printable"),
        ("a\u200b", "has a character that is not printable"),
        ("a\ud800", "has a character that is not printable"),
    ],
)
def test_what_cannot_be_a_name_is_refused(name: str, problem: str) -> None:
    """The refusal says which rule is broken and shows nothing of the name."""
    found = checked_name(name)
    assert isinstance(found, Rejection)
    assert (found.status, found.reason) == (400, Reason.MODEL_INVALID)
    assert found.message == f"The model {problem}."


def test_bytes_that_are_not_utf8_are_refused() -> None:
    """A name is UTF-8, and an over-long one is not even decoded."""
    found = decoded_name(b"\xff")
    assert isinstance(found, Rejection)
    assert found.message == "The model is not valid UTF-8."
    found = decoded_name(b"\xff" * 1_025)
    assert isinstance(found, Rejection)
    assert found.message == "The model is longer than 256 characters."


@LAW
@given(st.text())
def test_a_name_means_the_same_as_text_and_as_bytes(name: str) -> None:
    """Both readers take the same names and refuse the rest."""
    assert decoded_name(name.encode()) == checked_name(name)
