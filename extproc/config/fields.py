"""Typed reading of one mapping: every key is known, every value of its type, every mistake told.

A value that is wrong is reported and read as its default, so that reading goes on and the next
mistake is found too. Who reads must call `close` when done and may not use the values before
`Problems.raise_if_any`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from enum import StrEnum
from typing import TypeVar, assert_never

from extproc.config.grammar import Rule
from extproc.config.problems import MAX_SHOWN_CHARS, Problems, joined, shown
from extproc.config.yaml_lines import Entries, Entry, Items, Node, Scalar

D = TypeVar("D")
E = TypeVar("E", bound=StrEnum)


class Section:
    """One mapping of the file, read key by key; `key` is its dotted key, "" for the whole file."""

    def __init__(self, node: Entries, key: str, problems: Problems) -> None:
        self.line = node.line
        self.key = key
        self.problems = problems
        self._entries = {entry.key: entry for entry in node.entries}
        self._asked: list[str] = []

    def has(self, name: str) -> bool:
        """Whether the key is there, whatever its value."""
        return name in self._entries

    def is_empty(self, name: str) -> bool:
        """Whether the key is there with a list or mapping that holds nothing."""
        entry = self._entries.get(name)
        match entry.value if entry else None:
            case Items(items=()) | Entries(entries=()):
                return True
            case _:
                return False

    def both(self, first: str, second: str) -> None:
        """Both keys are there, or neither; a mistake if not."""
        if self.has(first) != self.has(second):
            there, missing = (first, second) if self.has(first) else (second, first)
            self.error(there, f"stands without {missing}", f"give {first} and {second} together")

    def names(self) -> Iterator[tuple[str, int]]:
        """Every key with its line, in order, where keys are names that the user chose."""
        for entry in self._entries.values():
            yield entry.key, entry.line

    def error(self, name: str, problem: str, expected: str) -> None:
        """The value of `name`, or its absence, is a mistake."""
        self.problems.error(self._line(name), self._path(name), problem, expected)

    def error_in(self, name: str, item: str, problem: str, expected: str) -> None:
        """The part of `name` that is or is called `item` is a mistake; "" for all of it."""
        places = ((line, path) for text, line, path in self._parts(name) if text == item)
        line, path = next(places, (self._line(name), self._path(name)))
        self.problems.error(line, path, problem, expected)

    def warn(self, name: str, text: str) -> None:
        """The value of `name`, or its absence, is probably not meant."""
        self.problems.warn(self._line(name), self._path(name), text)

    def node(self, name: str) -> Node | None:
        """The value of `name` as it stands in the file; None when it is not there."""
        self._asked.append(name)
        entry = self._entries.get(name)
        return None if entry is None else entry.value

    def text(self, name: str, rule: Rule, default: D) -> str | D:
        """The text that `name` gives, or the default where it is not there or wrong."""
        node = self.node(name)
        if node is None:
            return default
        if not (isinstance(node, Scalar) and isinstance(node.value, str)):
            self.error(name, f"is {_kind(node)}, not text", rule.expected + _quoting(node))
            return default
        return node.value if self.follows(name, node.value, rule) else default

    def required(self, name: str, rule: Rule) -> str:
        """The text that `name` gives; its absence is a mistake, and "" is returned then."""
        if not self.has(name):
            self.node(name)
            self.error(name, "is missing", rule.expected)
        return self.text(name, rule, "")

    def follows(self, name: str, text: str, rule: Rule) -> bool:
        """Whether `text`, which `name` gives, keeps the rule; a mistake if not."""
        if rule.accepts(text):
            return True
        what = f"{shown(text)} is not allowed" if rule.shows else "the value is not allowed"
        self.error(name, what, rule.expected)
        return False

    def choice(self, name: str, words: Iterable[str], default: D, what: str) -> str | D:
        """The word of `words` that `name` gives; `what` names the set in an error."""
        known = tuple(words)
        rule = Rule(lambda text: text in known, f"give one of {', '.join(known)}")
        node = self.node(name)
        if isinstance(node, Scalar) and isinstance(node.value, str) and node.value not in known:
            hint = _nearest(node.value, known)
            self.error(name, f"{shown(node.value)} is no {what}{hint}", rule.expected)
            return default
        return self.text(name, rule, default)

    def member(self, name: str, default: E, what: str) -> E:
        """The member of the default's enum that `name` gives."""
        kind = type(default)
        return kind(self.choice(name, (str(word) for word in kind), str(default), what))

    def boolean(self, name: str, *, default: bool) -> bool:
        """The truth value that `name` gives."""
        node = self.node(name)
        if node is None:
            return default
        if isinstance(node, Scalar) and isinstance(node.value, bool):
            return node.value
        self.error(name, f"is {_kind(node)}, not a truth value", "give true or false, unquoted")
        return default

    def integer(self, name: str, default: D, low: int, high: int) -> int | D:
        """The whole number between `low` and `high` that `name` gives."""
        node = self.node(name)
        expected = f"give a whole number from {low:,} to {high:,}"
        if node is None:
            return default
        if not (isinstance(node, Scalar) and type(node.value) is int):
            self.error(name, f"is {_kind(node)}, not a whole number", expected)
            return default
        if not low <= node.value <= high:
            self.error(name, f"{node.value} is out of range", expected)
            return default
        return node.value

    def number(self, name: str, default: float, low: float = 0.0, high: float = 1e9) -> float:
        """The number between `low` and `high` that `name` gives."""
        return self._number(name, default, low, high, f"give a number from {low:g} to {high:,.10g}")

    def positive(self, name: str, default: float, high: float = 1e9) -> float:
        """The number above 0 and up to `high` that `name` gives."""
        smallest = math.ulp(0.0)
        return self._number(
            name, default, smallest, high, f"give a number above 0, up to {high:,.10g}"
        )

    def _number(self, name: str, default: float, low: float, high: float, expected: str) -> float:
        node = self.node(name)
        if node is None:
            return default
        if not (isinstance(node, Scalar) and type(node.value) in {int, float}):
            self.error(name, f"is {_kind(node)}, not a number", expected)
            return default
        value = float(node.value or 0.0)
        if not low <= value <= high:
            self.error(name, f"{value:g} is out of range", expected)
            return default
        return value

    def texts(self, name: str, rule: Rule, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        """The texts that `name` lists, none of them twice."""
        node = self.node(name)
        if node is None:
            return default
        if not isinstance(node, Items):
            self.error(name, f"is {_kind(node)}, not a list", f"give a list; {rule.expected}")
            return default
        found: dict[str, None] = {}
        for index, item in enumerate(node.items):
            place = f"{name}[{index}]"
            if not (isinstance(item, Scalar) and isinstance(item.value, str)):
                self._error_at(item, place, f"is {_kind(item)}, not text", rule.expected)
            elif not rule.accepts(item.value):
                what = shown(item.value) if rule.shows else "the value"
                self._error_at(item, place, f"{what} is not allowed", rule.expected)
            elif item.value in found:
                self._error_at(item, place, "is given twice", "keep one of the two")
            else:
                found[item.value] = None
        return tuple(found)

    def section(self, name: str) -> Section:
        """The mapping that `name` gives, without keys where it is not there or wrong."""
        node = self.node(name)
        if node is not None and not isinstance(node, Entries) and not _is_null(node):
            self.error(name, f"is {_kind(node)}, not a mapping", "give keys with values")
        entries = node if isinstance(node, Entries) else Entries(self._line(name), ())
        return Section(entries, joined(self.key, name), self.problems)

    def sections(self, name: str) -> Iterator[Section]:
        """The mappings that `name` lists."""
        node = self.node(name)
        if node is None:
            return
        if not isinstance(node, Items):
            self.error(name, f"is {_kind(node)}, not a list", "give a list of mappings")
            return
        for index, item in enumerate(node.items):
            place = f"{name}[{index}]"
            if isinstance(item, Entries):
                yield Section(item, self._path(place, quote=False), self.problems)
            else:
                self._error_at(item, place, f"is {_kind(item)}, not a mapping", "give keys")

    def named(self, name: str, rule: Rule) -> Iterator[tuple[str, Section]]:
        """The mappings below `name` by the names that the user gave them; one may be left empty."""
        parent = self.section(name)
        for key, _ in parent.names():
            if parent.follows(key, key, rule):
                yield key, parent.section(key)

    def close(self) -> None:
        """Every key that nobody asked for is reported as unknown."""
        for entry in self._entries.values():
            if entry.key not in self._asked:
                self._unknown(entry)

    def _unknown(self, entry: Entry) -> None:
        hint = _nearest(entry.key, self._asked)
        known = f"known here: {', '.join(dict.fromkeys(self._asked))}"
        path = joined(self.key, entry.key)
        self.problems.error(entry.line, path, f"unknown key{hint}", known)

    def _parts(self, name: str) -> Iterator[tuple[str, int, str]]:
        """The items or the keys below `name`, each with its line and its dotted key."""
        entry = self._entries.get(name)
        match entry.value if entry else None:
            case Items(items=items):
                for index, node in enumerate(items):
                    if isinstance(node, Scalar):
                        yield node.text, node.line, self._path(f"{name}[{index}]", quote=False)
            case Entries(entries=entries):
                for inner in entries:
                    yield inner.key, inner.line, joined(self._path(name), inner.key)
            case _:
                pass

    def _error_at(self, node: Node, place: str, problem: str, expected: str) -> None:
        self.problems.error(node.line, self._path(place, quote=False), problem, expected)

    def _line(self, name: str) -> int:
        entry = self._entries.get(name)
        return self.line if entry is None else entry.line

    def _path(self, name: str, *, quote: bool = True) -> str:
        if not name:
            return self.key
        if quote:
            return joined(self.key, name)
        return f"{self.key}.{name}" if self.key else name


def plain(node: Node) -> object:
    """The node as lists, dicts with text keys, and scalars."""
    match node:
        case Scalar():
            return node.value
        case Items():
            return [plain(item) for item in node.items]
        case Entries():
            return {entry.key: plain(entry.value) for entry in node.entries}
        case _:
            assert_never(node)


def _is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.value is None


def _kind(node: Node) -> str:
    """What a node is, in the words of an error; never its value."""
    match node:
        case Items():
            return "a list"
        case Entries():
            return "a mapping"
        case Scalar(value=None):
            return "empty"
        case Scalar(value=bool()):
            return "a truth value"
        case Scalar(value=int() | float()):
            return "a number"
        case _:
            return "text"


def _quoting(node: Node) -> str:
    if isinstance(node, Scalar) and node.value is not None:
        return "; quote it to make it text"
    return ""


def _nearest(word: str, known: Sequence[str]) -> str:
    """A suggestion for a mistyped word, "" where nothing is near."""
    near = get_close_matches(word[:MAX_SHOWN_CHARS].lower(), known, n=1)
    return f", did you mean {near[0]}?" if near else ""
