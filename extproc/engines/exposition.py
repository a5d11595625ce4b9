"""Prometheus text to the few samples that somebody asked for.

A page of an engine is mostly histogram buckets. They are skipped line by line, never built: the
cost of a page is its length at memory speed plus a little per wanted sample. Text format 0.0.4 is
read, and OpenMetrics text with it. What a sample means is decided elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Final

from extproc.errors import UnreadableMetrics

# Above these a page is no engine's, and reading it would hold up the event loop.
MAX_SAMPLES: Final = 4096
MAX_LABELS_BYTES: Final = 16 * 1024
_KNOWN_LABELS: Final = 1024
_KNOWN_BYTES: Final = 4096

_NAME: Final = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")

# What follows a sample's name: labels, value, timestamp, exemplar. Possessive, so that no input
# makes it slow, and confined to one line.
_REST: Final = (
    rb"[ \t]*+"
    rb'(?:\{([^"}\n]*+(?:"[^"\\\n]*+(?:\\[^\n][^"\\\n]*+)*+"[^"}\n]*+)*+)\}[ \t]*+)?+'
    rb"([^\s#{}]++)"
    rb"(?:[ \t]++[-+.0-9eE]++)?+"
    rb"[ \t]*+(?:#[^\n]*+)?+\r?+(?=\n|\Z)"
)
# The grammar of what stands between the braces, and its pairs.
_PAIR: Final = (
    r"[ \t]*+([A-Za-z_][A-Za-z0-9_]*+)[ \t]*+=[ \t]*+"
    r'"([^"\\]*+(?:\\[^\n][^"\\]*+)*+)"[ \t]*+'
)
_LABELS: Final = re.compile(rf"(?:{_PAIR}(?:,|\Z))*+[ \t]*+")
_LABEL: Final = re.compile(_PAIR)
_ESCAPE: Final = re.compile(r'\\([\\"n])')


@dataclass(frozen=True, slots=True)
class Labels:
    """A sample's labels: by name, and as what tells its series from the others of its name."""

    by_name: Mapping[str, str] = field(compare=False)
    series: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, pairs: Sequence[tuple[str, str]]) -> Labels:
        """The labels that `pairs` name."""
        return cls(dict(pairs), frozenset(pairs))

    def get(self, name: str) -> str:
        """A label's value; one that is missing is empty, as in the format's own definition."""
        return self.by_name.get(name, "")


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a page; `name` as it was asked for."""

    name: str
    labels: Labels
    value: float


class Families:
    """The families to look for, ready for use on any number of pages.

    `names` are exact sample names: a suffix such as `_total` or `_sum` is part of them, so
    `_created` never passes for a value. The first ':' or '_' of a name matches either, and a
    leading `ray_` on the page is ignored: wrappers rename so.

    Raises:
        ValueError: something in `names` is not a metric name.
    """

    __slots__ = ("_asked", "_known", "_lines")

    def __init__(self, names: Iterable[str]) -> None:
        ordered = sorted(set(names), reverse=True)
        for name in ordered:
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not a metric name")
        self._asked = {name.encode().replace(b":", b"_"): name for name in ordered}
        # An engine's labels are the same at every scrape, and reading them is half of the work.
        self._known: dict[bytes, Labels] = {}
        # Every line costs one attempt at this pattern. It starts with a literal, for which the
        # regular expression engine has a fast search.
        self._lines = re.compile(
            rb"\n[ \t]*+(?:ray_)?(" + b"|".join(_pattern(name) for name in ordered) + rb")"
            rb"(?![A-Za-z0-9_:])(?:" + _REST + rb"|)"
            if ordered
            else rb"(?!)"
        )

    def begin(self) -> Reading:
        """A reading of one page, which has seen nothing yet."""
        if len(self._known) >= _KNOWN_LABELS:
            self._known.clear()
        return Reading(self._lines, self._asked, self._known)


class Reading:
    """One page in the course of its arrival; where it is cut into pieces makes no difference."""

    __slots__ = ("_asked", "_known", "_lines", "_pending", "_samples")

    def __init__(
        self, lines: re.Pattern[bytes], asked: dict[bytes, str], known: dict[bytes, Labels]
    ) -> None:
        self._lines = lines
        self._asked = asked
        self._known = known
        self._pending = [b"\n"]  # the line not yet complete, with the line feed before it
        self._samples: list[Sample] = []

    def feed(self, piece: bytes) -> None:
        r"""The wanted samples of every line that `piece` completes are read.

        Raises:
            UnreadableMetrics: as `end`; after it the reading is of no use.
        """
        if b"\n" not in piece:
            self._pending.append(piece)
            return
        text = b"".join([*self._pending, piece])
        cut = text.rindex(b"\n")
        self._scan(text, cut)
        self._pending = [text[cut:]]

    def end(self) -> list[Sample]:
        """All wanted samples, in the page's order.

        Raises:
            UnreadableMetrics: a line of a wanted family is not a sample, its labels are longer
                than `MAX_LABELS_BYTES`, or there are more than `MAX_SAMPLES`; the signal is the
                family.
        """
        text = b"".join(self._pending)
        self._scan(text, len(text))
        self._pending = []
        return self._samples

    def _scan(self, text: bytes, end: int) -> None:
        samples, asked, known = self._samples, self._asked, self._known
        for line in self._lines.finditer(text, 0, end):
            spelling, pairs, value = line.groups(b"")
            name = asked[spelling.replace(b":", b"_")]
            if not value:
                raise UnreadableMetrics(name, "a line of this family is not a sample")
            if len(samples) == MAX_SAMPLES:
                raise UnreadableMetrics(name, f"there are more than {MAX_SAMPLES} samples")
            labels = known.get(pairs)
            if labels is None:
                labels = _labels(name, pairs)
                if len(known) < _KNOWN_LABELS and len(pairs) <= _KNOWN_BYTES:
                    known[pairs] = labels
            samples.append(Sample(name, labels, _value(value)))


def read(page: bytes, families: Families) -> list[Sample]:
    """The samples of `families` on a whole page, in its order; raises as `Reading.end`."""
    reading = families.begin()
    reading.feed(page)
    return reading.end()


def _pattern(name: str) -> bytes:
    namespace = re.match(r"[^:_]*+(?=[:_])", name[1:])
    if namespace is None:
        return re.escape(name).encode()
    at = 1 + namespace.end()
    return re.escape(name[:at]).encode() + b"[:_]" + re.escape(name[at + 1 :]).encode()


def _value(text: bytes) -> float:
    # A value that is no number is unknown, like NaN; float() alone would take 1_000 for one.
    if b"_" in text:
        return nan
    try:
        return float(text)
    except ValueError:
        return nan


def _labels(name: str, text: bytes) -> Labels:
    if len(text) > MAX_LABELS_BYTES:
        raise UnreadableMetrics(name, f"its labels are longer than {MAX_LABELS_BYTES} bytes")
    block = text.decode("utf-8", "replace")
    if not _LABELS.fullmatch(block):
        raise UnreadableMetrics(name, 'its labels are not name="value" pairs')
    pairs: list[tuple[str, str]] = _LABEL.findall(block)
    if "\\" in block:
        pairs = [(label, _ESCAPE.sub(_unescaped, value)) for label, value in pairs]
    return Labels.of(pairs)


def _unescaped(escape: re.Match[str]) -> str:
    return "\n" if escape[1] == "n" else escape[1]
