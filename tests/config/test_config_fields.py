"""A section tells every mistake at its line, and reads on with the default."""

from __future__ import annotations

import pytest

from extproc.config.fields import Section, plain
from extproc.config.problems import ConfigErrors, Problems
from extproc.config.yaml_lines import Entries, compose


def section(text: str) -> Section:
    """The section that a text is, with problems of its own."""
    node = compose(text, "f")
    assert isinstance(node, Entries)
    return Section(node, "top", Problems("f"))


def problems(read: Section) -> list[str]:
    """What the section found wrong, as `line key: problem`."""
    with pytest.raises(ConfigErrors) as caught:
        read.problems.raise_if_any()
    return [f"{error.line} {error.key}: {error.problem}" for error in caught.value.errors]


def test_an_error_in_a_part_has_the_parts_place() -> None:
    """An item of a list, a key of a mapping, and the whole where neither is there."""
    read = section("a:\n- x\n- [y]\n- z\nb:\n  c: 1\nd: 1")
    read.error_in("a", "z", "one", "")
    read.error_in("b", "c", "two", "")
    read.error_in("a", "nowhere", "three", "")
    read.error_in("d", "x", "four", "")
    read.error_in("gone", "x", "five", "")
    assert problems(read) == [
        "1 top.a: three",
        "1 top.gone: five",
        "4 top.a[2]: one",
        "6 top.b.c: two",
        "7 top.d: four",
    ]


def test_a_mistake_that_is_found_twice_is_told_once() -> None:
    """Reading a part again adds nothing."""
    read = section("a: text")
    read.section("a")
    read.section("a")
    assert problems(read) == ["1 top.a: is text, not a mapping"]


def test_an_empty_mapping_gives_the_defaults() -> None:
    """A section that is not there, empty or null has no keys."""
    read = section("a:\nb: {}")
    for name in ("a", "b", "c"):
        assert read.section(name).number("x", 1.5) == 1.5
    read.problems.raise_if_any()


def test_a_tree_becomes_plain_values() -> None:
    """Lists, dicts and scalars, keys as text."""
    node = compose("{a: [1, 1.5, true, ~, x], 1: {b: 'no'}}", "f")
    assert plain(node) == {"a": [1, 1.5, True, None, "x"], "1": {"b": "no"}}
