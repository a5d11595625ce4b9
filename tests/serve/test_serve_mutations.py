"""What Envoy would refuse is refused before it is sent."""

from __future__ import annotations

import pytest

from extproc import headers
from extproc.serve.mutations import (
    MAX_HEADERS,
    MAX_TOTAL_BYTES,
    MAX_VALUE_BYTES,
    InvalidAction,
    check_body,
    check_immediate,
    check_name,
    check_removed,
    check_together,
    check_value,
)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ":authority",
        ":path",
        "host",
        "X-Upper",
        "with space",
        "new\nline",
        "colon:",
        "ä",
        "transfer-encoding",
        "connection",
        "authorization",
        "cookie",
        "x-api-key",
        "x-envoy-original-path",
        "a" * 300,
        "x-envoy-upstream-rq-per-try-timeout-ms",
    ],
)
def test_a_name_that_is_not_ours_is_refused(name: str) -> None:
    """Pseudo-headers, framing, credentials, Envoy's own and what is no token."""
    with pytest.raises(InvalidAction):
        check_name(name)


@pytest.mark.parametrize(
    "name",
    [
        headers.CLUSTER,
        headers.HOP,
        headers.REQUEST_ID,
        headers.MAX_RETRIES,
        headers.DESTINATION,
        headers.DECISION,
        "session_id",
        "content-length",
    ],
)
def test_every_header_that_is_ever_set_is_allowed(name: str) -> None:
    """The product's own names pass."""
    check_name(name)


def test_the_length_of_a_body_is_not_removed() -> None:
    """Removing content-length would let Envoy frame the body anew."""
    check_removed("x-llmgw-tags")
    with pytest.raises(InvalidAction):
        check_removed("content-length")
    with pytest.raises(InvalidAction):
        check_removed("authorization")


@pytest.mark.parametrize(
    "value", [b"a\r\nx-evil: 1", b"a\nb", b"a\x00b", b"\x7f", b"\x1b[0m", b"a" * 20_000]
)
def test_a_value_that_could_become_another_header_is_refused(value: bytes) -> None:
    """No control character and nothing endless gets into a header."""
    with pytest.raises(InvalidAction):
        check_value("x-a", value, None)


@pytest.mark.parametrize("value", [b"", b"a b\tc", b"\xff\xfe", b"a" * MAX_VALUE_BYTES])
def test_other_bytes_are_a_value(value: bytes) -> None:
    """Spaces, tabs and bytes above ASCII are allowed, as in HTTP."""
    check_value("x-a", value, None)


def test_a_content_length_is_the_bodys() -> None:
    """A length without a body, or of another body, is refused: it would smuggle a request."""
    check_value("content-length", b"2", b"{}")
    for value, body in ((b"3", b"{}"), (b"2", None), (b"02", b"{}"), (b"x", b"{}")):
        with pytest.raises(InvalidAction):
            check_value("content-length", value, body)


def test_a_replaced_body_has_its_length() -> None:
    """Envoy refuses a new body without content-length."""
    check_body(["x-a"], None)
    check_body(["content-length"], b"{}")
    with pytest.raises(InvalidAction):
        check_body(["x-a"], b"{}")


def test_one_header_is_changed_once() -> None:
    """Two mutations of one header have no defined order."""
    check_together(["a", "b"], ["c"], 10)
    for set_names, removed in ((["a", "a"], []), (["a"], ["a"]), ([], ["a", "a"])):
        with pytest.raises(InvalidAction):
            check_together(set_names, removed, 10)


def test_changes_are_limited_in_number_and_size() -> None:
    """More or larger changes than Envoy's limits allow are refused."""
    check_together([f"x-{n}" for n in range(MAX_HEADERS)], [], MAX_TOTAL_BYTES)
    with pytest.raises(InvalidAction):
        check_together([f"x-{n}" for n in range(MAX_HEADERS)], ["y"], 10)
    with pytest.raises(InvalidAction):
        check_together(["a"], [], MAX_TOTAL_BYTES + 1)


def test_a_status_is_one_that_envoy_knows() -> None:
    """A status outside Envoy's enum, or an interim one, is refused."""
    check_immediate(508, "loop")
    for status in (0, 100, 199, 209, 418, 599, 600, -1):
        with pytest.raises(InvalidAction):
            check_immediate(status, "loop")


def test_details_are_a_word() -> None:
    """What goes into Envoy's access log cannot break its lines."""
    check_immediate(404, "")
    for details in ("two words", "a\nb", "é", "a" * 200):
        with pytest.raises(InvalidAction):
            check_immediate(404, details)
