"""One way to read a signal off a page: a name, conditions on its labels, and what is done to it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_CANDIDATE: Final = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*+)(?:\{(.*)\})?", re.DOTALL)
_MATCH: Final = re.compile(
    r'\s*+([A-Za-z_][A-Za-z0-9_]*+)\s*+(!?=)\s*+"([^"\\]*+(?:\\.[^"\\]*+)*+)"\s*+(?:,|\Z)',
    re.DOTALL,
)
_ESCAPE: Final = re.compile(r'\\([\\"n])')


@dataclass(frozen=True, slots=True)
class Match:
    """A condition on a label; a label that is missing is empty."""

    label: str
    value: str
    is_equal: bool = True

    def __str__(self) -> str:
        value = self.value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'{self.label}{"=" if self.is_equal else "!="}"{value}"'


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to read a signal: the samples called `name` whose labels meet `where`.

    The value is the sample's, or the number in its `label` if given. Of each group in `plus` the
    first that the page has is added. `over` divides: the sum of this by the sum of that.
    """

    name: str
    where: tuple[Match, ...] = ()
    label: str | None = None
    plus: tuple[tuple[Candidate, ...], ...] = ()
    over: Candidate | None = None

    def __str__(self) -> str:
        where = "{" + ",".join(map(str, self.where)) + "}" if self.where else ""
        label = f" label {self.label}" if self.label else ""
        over = f" / {self.over}" if self.over else ""
        return f"{self.name}{where}{label}{over}"


def parse_candidate(text: str) -> Candidate:
    """The candidate that `text` names: `name` or `name{label="value",other!="value"}`.

    Raises:
        ValueError: it has another form.
    """
    parts = _CANDIDATE.fullmatch(text.strip())
    if parts is None:
        raise ValueError(f'{text!r} is not a metric name, or name{{label="value"}}')
    where = []
    labels = (parts[2] or "").strip()
    at = 0
    while at < len(labels):
        match = _MATCH.match(labels, at)
        if match is None:
            raise ValueError(f'{text!r}: {labels[at:]!r} is not label="value"')
        value = _ESCAPE.sub(lambda escape: "\n" if escape[1] == "n" else escape[1], match[3])
        where.append(Match(match[1], value, is_equal=match[2] == "="))
        at = match.end()
    return Candidate(parts[1], tuple(where))
