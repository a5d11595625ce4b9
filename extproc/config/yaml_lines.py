"""YAML text as a tree of plain values, each of which knows its line.

Stricter than YAML: one document, no tags, no merge keys (`<<` is a key like any other), no key
twice, and words are what YAML 1.2 says they are: `no` and `on` are text, `010` is not eight. What
an alias stands for is counted as often as it is used, so that a short text cannot mean a huge tree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NoReturn

import yaml

from extproc.config.problems import ConfigErrors, joined
from extproc.errors import ConfigError

MAX_DEPTH: Final = 64
MAX_NODES: Final = 1_000_000
SECRET_KEY: Final = "api_key"  # noqa: S105 - the name of a key, under which no error shows anything

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NULL: Final = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE: Final = frozenset({"true", "True", "TRUE"})
_FALSE: Final = frozenset({"false", "False", "FALSE"})
_INTEGER: Final = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})", re.ASCII)
_NUMBER: Final = re.compile(
    r"[-+]?(\.[0-9]{1,40}|(0|[1-9][0-9]{0,40})(\.[0-9]{0,40})?)([eE][-+]?[0-9]{1,4})?", re.ASCII
)
_SPECIAL_NUMBER: Final = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", re.ASCII)
_QUOTED: Final = re.compile(r"'[^'\s]{2,}'")


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value; `text` is how it was written, without quotes."""

    line: int
    value: str | int | float | bool | None
    text: str


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    line: int
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a mapping with its value; a key is text, however it was written."""

    key: str
    line: int
    value: Node


@dataclass(frozen=True, slots=True)
class Entries:
    """A mapping; no key is there twice."""

    line: int
    entries: tuple[Entry, ...]


Node = Scalar | Items | Entries


@dataclass(slots=True)
class _Open:
    """A list or mapping whose end has not come yet."""

    line: int
    is_mapping: bool
    anchor: str | None
    items: list[Node] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)
    key: Scalar | None = None
    nodes: int = 1
    height: int = 1

    def closed(self) -> Node:
        if self.is_mapping:
            return Entries(self.line, tuple(self.entries.values()))
        return Items(self.line, tuple(self.items))


def compose(text: str, file: str) -> Node:
    """The tree that `text` describes.

    Raises:
        ConfigErrors: text that is no YAML, or more YAML than is allowed; one error, as the rest of
            the text has no meaning then. It shows nothing of the text but keys.
    """
    return _Composer(file).compose(text)


class _Composer:
    def __init__(self, file: str) -> None:
        self._file = file
        self._stack: list[_Open] = []
        self._anchors: dict[str, tuple[Node, int, int]] = {}
        self._nodes = 0
        self._root: Node | None = None

    def compose(self, text: str) -> Node:
        try:
            for event in self._events(text):
                self._take(event)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            problem = _QUOTED.sub("'...'", error.problem or "it cannot be read")
            # The end of a text that ends too early is marked as one line after it.
            line = min(mark.line, text.count("\n")) + 1 if mark else 0
            self._refuse(line, f"not YAML: {problem}", "correct the syntax")
        except (yaml.YAMLError, UnicodeError):
            self._refuse(0, "not YAML: a character that it does not allow", "remove it")
        if self._root is None:
            self._refuse(0, "the file is empty", "give at least one endpoint")
        return self._root

    def _events(self, text: str) -> Iterator[yaml.Event]:
        events: Iterator[yaml.Event] = yaml.parse(text, Loader=_LOADER)
        return events

    def _take(self, event: yaml.Event) -> None:
        """The tree holds what the event adds to it."""
        line = event.start_mark.line + 1 if event.start_mark else 0
        match event:
            case yaml.DocumentStartEvent() if self._root is not None:
                self._refuse(line, "a second document begins here", "keep one document in a file")
            case yaml.AliasEvent():
                self._take_alias(event.anchor, line)
            case yaml.ScalarEvent():
                self._check_tag(event.tag, line)
                value = _resolved(event.value) if event.implicit[0] else event.value
                self._add(Scalar(line, value, event.value), 1, 0, event.anchor, line)
            case yaml.CollectionStartEvent():
                self._check_tag(event.tag, line)
                self._check_depth(1, line)
                is_mapping = isinstance(event, yaml.MappingStartEvent)
                self._stack.append(_Open(line, is_mapping, event.anchor))
            case yaml.CollectionEndEvent():
                ended = self._stack.pop()
                node = ended.closed()
                self._add(node, ended.nodes, ended.height, ended.anchor, ended.line)
            case _:
                pass

    def _take_alias(self, anchor: str | None, line: int) -> None:
        if anchor not in self._anchors:
            self._refuse(line, "an alias of no anchor before it", "define the anchor first")
        node, nodes, height = self._anchors[anchor]
        self._check_depth(height, line)
        self._add(node, nodes, height, None, line)

    def _check_depth(self, height: int, line: int) -> None:
        if len(self._stack) + height > MAX_DEPTH:
            self._refuse(line, f"nested more than {MAX_DEPTH} deep", "nest less")

    def _check_tag(self, tag: str | None, line: int) -> None:
        if tag is not None:
            self._refuse(line, "a tag", "write the value without a tag")

    def _add(self, node: Node, nodes: int, height: int, anchor: str | None, line: int) -> None:
        """`node`, which stands for `nodes` of them in `height` levels, is part of what is open."""
        if anchor is not None:
            self._anchors[anchor] = (node, nodes, height)
        if not self._stack:
            self._root = node
            return
        top = self._stack[-1]
        top.nodes += nodes
        top.height = max(top.height, height + 1)
        if top.nodes > MAX_NODES:
            self._refuse(line, f"more than {MAX_NODES} values, aliases spelled out", "say less")
        if not top.is_mapping:
            top.items.append(node)
        elif top.key is None:
            if not isinstance(node, Scalar):
                self._refuse(line, "a key that is a list or a mapping", "use text as a key")
            if node.text in top.entries:
                first = top.entries[node.text].line
                problem = f"the key is given twice, first in line {first}"
                self._refuse(line, problem, "keep one of the two", node.text)
            top.key = Scalar(line, node.value, node.text)
        else:
            top.entries[top.key.text] = Entry(top.key.text, top.key.line, node)
            top.key = None

    def _path(self, last: str | None) -> str:
        """The dotted key of the place that is being read; it ends at a secret's key."""
        path = ""
        for level in self._stack:
            if not level.is_mapping:
                path += f"[{len(level.items)}]"
            elif level.key is not None:
                path = joined(path, level.key.text)
                if level.key.text == SECRET_KEY:
                    return path
        return path if last is None else joined(path, last)

    def _refuse(self, line: int, problem: str, expected: str, last: str | None = None) -> NoReturn:
        error = ConfigError(self._file, line, self._path(last) or "(file)", problem, expected)
        raise ConfigErrors([error]) from None


def _resolved(text: str) -> str | int | float | bool | None:
    """What an unquoted word means in YAML 1.2's core schema; numbers of unusual length are text."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    if _SPECIAL_NUMBER.fullmatch(text):
        return float(text.replace(".", ""))
    return text
