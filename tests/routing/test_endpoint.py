"""An endpoint's description: its address, its names, and what is never shown of its key."""

from __future__ import annotations

import pytest

from extproc.routing.endpoint import Auth, Info, Kind, SecretKind, SecretRef, Url


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://gpu-1:8000", Url("http", "gpu-1", 8000)),
        ("http://gpu-1", Url("http", "gpu-1", 80)),
        ("https://api.test/", Url("https", "api.test", 443)),
        ("http://[::1]:8000", Url("http", "::1", 8000)),
    ],
)
def test_an_address_is_scheme_host_and_port(text: str, expected: Url) -> None:
    """A missing port is the scheme's own; a bare slash is no path."""
    assert Url.parse(text) == expected


def test_an_address_is_written_as_it_is_dialled() -> None:
    """An IPv6 host stands in brackets."""
    assert str(Url("http", "::1", 8000)) == "http://[::1]:8000"
    assert Url("https", "api.test", 443).authority == "api.test:443"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ftp://host", "not http or https"),
        ("host:8000", "not http or https"),
        ("http://user@host", "user info"),
        ("http://:secret@host", "user info"),
        ("http://host/v1", "a path"),
        ("http://host?a=1", "a path, query"),
        ("http://host#x", "fragment"),
        ("http://", "host is missing"),
        ("http://:8000", "host is missing"),
        ("http://host:0", "port 0"),
        ("http://host:65536", "out of range"),
    ],
)
def test_anything_else_is_refused_with_the_reason(text: str, problem: str) -> None:
    """The reason is in the error."""
    with pytest.raises(ValueError, match=problem):
        Url.parse(text)


def info(**more: object) -> Info:
    """An endpoint with some fields given."""
    return Info("a", Url("http", "h", 1), ("m",), **more)  # type: ignore[arg-type]  # a test's own keywords


def test_a_weight_of_zero_means_one() -> None:
    """An unset weight is an ordinary one."""
    assert (info().relative_weight, info(weight=2.5).relative_weight) == (1.0, 2.5)


def test_only_our_engines_with_a_dialect_are_scraped() -> None:
    """Providers and peers publish nothing, and `none` says so of an engine."""
    assert info().is_scraped
    assert not info(engine="none").is_scraped
    assert not info(kind=Kind.EXTERNAL).is_scraped
    assert not info(kind=Kind.PEER).is_scraped


def test_a_model_keeps_its_name_unless_the_endpoint_calls_it_otherwise() -> None:
    """The upstream's name is the catalog's by default."""
    assert info().upstream_name("m") == "m"
    assert info(upstream_model="org/M").upstream_name("m") == "org/M"


def test_a_secret_is_shown_as_a_place() -> None:
    """Neither text nor representation holds more than where the key is."""
    auth = Auth(SecretRef(SecretKind.ENV, "KEY"))
    assert str(auth.key) == "env:KEY"
    assert "KEY" in repr(auth)
