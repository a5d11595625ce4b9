"""When an endpoint that refuses what another one serves is kept away, and when it is tried again.

A wrong key answers in a millisecond, looks idle, and would draw every request. The breaker does not
see it, because a 4xx is the client's mistake until another endpoint of the model proves otherwise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

COUNTED: Final = frozenset({401, 403, 404, 405})
CONVICTING: Final = frozenset({401, 403, 404})

_PATH_CHARACTERS = 256
_ROWS_PER_ENDPOINT = 64


@dataclass(frozen=True, slots=True)
class DemotionSettings:
    """`threshold` refusals in a row, against an answer not older than `evidence_seconds`.

    One probe passes every `probe_seconds`. `max_entries` bounds the memory of who answered what.
    """

    threshold: int = 5
    evidence_seconds: float = 60.0
    probe_seconds: float = 30.0
    max_entries: int = 1024


@dataclass(frozen=True, slots=True)
class Demotion:
    """Since when an endpoint is kept away, and from when on one request may try it."""

    since: float
    next_probe_at: float
    probe_seconds: float

    def is_probe_due(self, now: float) -> bool:
        """Whether the next request may go to the endpoint in spite of its demotion."""
        return now >= self.next_probe_at

    def probed(self, now: float) -> Demotion:
        """The demotion after one request was let through now: the next has to wait its turn."""
        return replace(self, next_probe_at=now + self.probe_seconds)

    def due(self, now: float) -> Demotion:
        """The demotion with its next probe allowed at once."""
        return replace(self, next_probe_at=min(now, self.next_probe_at))


def folded(path: str) -> str:
    """The path without its query, at most 256 characters of it."""
    return path.partition("?")[0][:_PATH_CHARACTERS]


class Refusals:
    """One endpoint's refusals in a row, by model and path.

    Any success of the endpoint ends every row: an endpoint that serves chat and has no embeddings
    is not misconfigured. Memory is bounded; the oldest row gives way.
    """

    __slots__ = ("_rows",)

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, model: str, path: str) -> int:
        """The length of this row, the refusal included."""
        rows = self._rows
        key = (model, path)
        if key not in rows and len(rows) >= _ROWS_PER_ENDPOINT:
            del rows[next(iter(rows))]
        rows[key] = length = rows.get(key, 0) + 1
        return length

    def end(self) -> None:
        """No row is running."""
        if self._rows:
            self._rows.clear()


class Answers:
    """Which endpoints answered a path of a model with 2xx, and when: the last two that differ.

    Two are enough to know another than the accused. What does not fit `max_entries` is forgotten,
    the oldest first: paths that share an entry would convict each other.
    """

    __slots__ = ("_entries", "_max_entries")

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[tuple[str, str], tuple[str, float, str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, model: str, path: str, endpoint_id: str, now: float) -> None:
        """The endpoint is known to have answered."""
        entries = self._entries
        key = (model, path)
        entry = entries.get(key)
        if entry is None:
            entries[key] = (endpoint_id, now, "", 0.0)
            if len(entries) > self._max_entries:
                entries.popitem(last=False)
            return
        last, at, other, other_at = entry
        if last != endpoint_id:
            other, other_at = last, at
        entries[key] = (endpoint_id, now, other, other_at)
        entries.move_to_end(key)

    def by_another(
        self,
        models: Iterable[str],
        path: str,
        endpoint_id: str,
        since: float,
        *,
        is_witness: Callable[[str], bool],
    ) -> bool:
        """Whether an endpoint other than this one answered the path of one of the models.

        `is_witness` says whose answer counts. One that is kept away itself, or gone, is none: the
        last endpoint of a model would be convicted by those that it has outlived.
        """
        for model in models:
            entry = self._entries.get((model, path))
            if entry is None:
                continue
            last, at, other, other_at = entry
            for witness, seen_at in ((last, at), (other, other_at)):
                if witness and witness != endpoint_id and seen_at >= since and is_witness(witness):
                    return True
        return False
