"""Which models a requested name stands for: aliases, weighted splits, ordered fallbacks.

The catalog knows names only. Whether a model has a usable endpoint is for the scheduler to find,
target after target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from random import Random
from typing import Final

import xxhash

MAX_WEIGHT: Final = 1e9
_HASH_RANGE: Final = 2.0**64


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One name that clients may ask for.

    `split` maps model names to relative weights; an entry with a split serves nothing itself.
    `fallbacks` are used in order when this model has no usable endpoint or all are saturated.
    Both may name models, aliases and splits.
    """

    name: str
    aliases: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    split: tuple[tuple[str, float], ...] = ()
    strategy: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A model to be tried, and the strategy that places it (None: the default one)."""

    model: str
    strategy: str | None = None


@dataclass(frozen=True, slots=True)
class Resolution:
    """What a requested name stands for: `targets` in the order of use, no model twice."""

    requested: str
    targets: tuple[Target, ...]

    @property
    def primary(self) -> Target:
        """The model that serves the request if it can."""
        return self.targets[0]


@dataclass(frozen=True, slots=True)
class Fault:
    """Why entries make no catalog: the entry, its field ("name", "aliases", ...), what is wrong.

    `item` is the offending part of the field, "" for the field as a whole.
    """

    entry: str
    field: str
    item: str
    problem: str
    expected: str


class Catalog:
    """Every name that clients may ask for, and what it stands for.

    A name's targets are its model, then its own fallbacks in order, then what those fall back to,
    and so on; each model once, at its first place. A split stands for one of its members, drawn
    anew wherever the split is met; the drawn member's fallbacks follow the split's own, and the
    split's strategy, where it has one, replaces the member's.
    """

    def __init__(self, models: Iterable[ModelEntry]) -> None:
        """Raises ValueError with every fault that `faults` finds."""
        entries = tuple(models)
        found = faults(entries)
        if found:
            raise ValueError("; ".join(f"{f.entry}.{f.field}: {f.problem}" for f in found))
        self._entries = {entry.name: entry for entry in entries}
        self._named = _named(entries)
        self._listed = tuple(self._named)
        self._drawing = _reaching_a_split(self._entries, self._named)
        # What depends on no draw is worked out once, when it is first asked for.
        self._fixed: dict[str, Resolution] = {}

    def resolve(self, name: str, session_key: bytes | None, random: Random) -> Resolution | None:
        """What `name` stands for in this session; None for a name that nobody offers.

        One session draws the same member of a split every time; without a session (None or empty)
        the draw is random, by the weights.
        """
        fixed = self._fixed.get(name)
        if fixed is not None:
            return fixed
        canonical = self._named.get(name)
        if canonical is None:
            return None
        targets = self._targets(canonical, lambda split: draw(split, session_key, random))
        resolution = Resolution(name, targets)
        if canonical not in self._drawing:
            self._fixed[name] = resolution
        return resolution

    def listed(self) -> tuple[str, ...]:
        """The names to offer: models, aliases and splits, in the order they were given."""
        return self._listed

    def canonical(self, name: str) -> str | None:
        """The entry that `name` or an alias of that name belongs to; None for an unknown name."""
        return self._named.get(name)

    def entry(self, name: str) -> ModelEntry | None:
        """The entry of `name`, alias or not; None for an unknown name."""
        canonical = self._named.get(name)
        return None if canonical is None else self._entries[canonical]

    def _targets(self, name: str, drawn: Callable[[ModelEntry], str]) -> tuple[Target, ...]:
        """The targets of a canonical name, breadth first, `drawn` choosing a split's member."""
        targets: dict[str, Target] = {}
        pending = [name]
        met = {name}
        for current in pending:
            entry = self._entries[current]
            fallbacks = entry.fallbacks
            strategy = None
            while entry.split:
                strategy = strategy or entry.strategy
                entry = self._entries[self._named[drawn(entry)]]
                fallbacks += entry.fallbacks
            targets.setdefault(entry.name, Target(entry.name, strategy or entry.strategy))
            for fallback in fallbacks:
                canonical = self._named[fallback]
                if canonical not in met:
                    met.add(canonical)
                    pending.append(canonical)
        return tuple(targets.values())


def draw(entry: ModelEntry, session_key: bytes | None, random: Random) -> str:
    """The member of a split that a request goes to; a member of weight 0 is never drawn.

    With a session key: weighted rendezvous, the member with the smallest -ln(u)/weight, u in (0, 1)
    being xxh64 of split, member and key. The members' shares are their weights; changing one weight
    moves sessions to or from that member only. Without a key: random by the weights.
    """
    members = [(member, weight) for member, weight in entry.split if weight > 0]
    if not session_key:
        names, weights = zip(*members, strict=True)
        drawn: str = random.choices(names, weights)[0]
        return drawn
    return min((_exponential(entry.name, m, session_key) / w, m) for m, w in members)[1]


def _exponential(split: str, member: str, key: bytes) -> float:
    """An exponentially distributed number of mean 1 that belongs to these three."""
    digest = xxhash.xxh64_intdigest(f"{split}\0{member}\0".encode() + key)
    return -math.log((digest + 0.5) / _HASH_RANGE)


def _named(entries: Iterable[ModelEntry]) -> dict[str, str]:
    """Every name to the name of its entry; the first owner of a name keeps it."""
    named: dict[str, str] = {}
    for entry in entries:
        for name in (entry.name, *entry.aliases):
            named.setdefault(name, entry.name)
    return named


def _linked(entry: ModelEntry, named: Mapping[str, str]) -> Iterator[str]:
    """The canonical names that an entry's split and fallbacks lead to, known ones only."""
    for name in (*(member for member, _ in entry.split), *entry.fallbacks):
        if name in named:
            yield named[name]


def _reaching_a_split(entries: Mapping[str, ModelEntry], named: Mapping[str, str]) -> set[str]:
    """The entries whose targets depend on a draw."""
    order = TopologicalSorter({name: list(_linked(e, named)) for name, e in entries.items()})
    drawing: set[str] = set()
    for name in order.static_order():
        entry = entries[name]
        if entry.split or not drawing.isdisjoint(_linked(entry, named)):
            drawing.add(name)
    return drawing


def faults(entries: Sequence[ModelEntry]) -> tuple[Fault, ...]:
    """What keeps these entries from being a catalog, in their order; empty when nothing does.

    A name or alias given twice, a fallback or a split member that nobody offers or that is named
    twice, weights that are negative, not finite or all 0, and one circle of references, if any.
    """
    named = _named(entries)
    found = [*_name_faults(entries)]
    for entry in entries:
        found += _reference_faults(entry, "fallbacks", entry.fallbacks, named)
        found += _reference_faults(entry, "split", [name for name, _ in entry.split], named)
        found += _weight_faults(entry)
    found += _cycle_faults(entries, named)
    return tuple(found)


def _name_faults(entries: Sequence[ModelEntry]) -> Iterator[Fault]:
    owners: dict[str, str] = {}
    for entry in entries:
        if entry.name in owners:
            yield Fault(
                entry.name,
                "name",
                "",
                f"{entry.name!r} is given twice",
                "every model has a name of its own",
            )
        owners.setdefault(entry.name, entry.name)
    for entry in entries:
        for alias in entry.aliases:
            if alias in owners:
                owner = owners[alias]
                yield Fault(
                    entry.name,
                    "aliases",
                    alias,
                    f"{alias!r} is a model's name"
                    if owner == alias
                    else f"{alias!r} already stands for {owner!r}",
                    "an alias is the name of nothing else",
                )
            owners.setdefault(alias, entry.name)


def _reference_faults(
    entry: ModelEntry, field: str, names: Sequence[str], named: Mapping[str, str]
) -> Iterator[Fault]:
    met: set[str] = set()
    for name in names:
        if name not in named:
            yield Fault(
                entry.name,
                field,
                name,
                f"{name!r} is no model",
                "name a model, alias or split that is configured",
            )
        elif named[name] in met:
            yield Fault(
                entry.name, field, name, f"{name!r} is named twice", "name each model at most once"
            )
        else:
            met.add(named[name])


def _weight_faults(entry: ModelEntry) -> Iterator[Fault]:
    for name, weight in entry.split:
        if not 0 <= weight <= MAX_WEIGHT:
            yield Fault(
                entry.name,
                "split",
                name,
                f"{weight} is no weight",
                "give a number from 0 to 1e9",
            )
    if entry.split and all(weight == 0 for _, weight in entry.split):
        yield Fault(
            entry.name, "split", "", "every weight is 0", "give at least one member a weight"
        )


def _cycle_faults(entries: Sequence[ModelEntry], named: Mapping[str, str]) -> Iterator[Fault]:
    by_name = {entry.name: entry for entry in reversed(entries)}
    graph = {entry.name: list(_linked(entry, named)) for entry in by_name.values()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        # graphlib gives the circle from the referred to the referring, its first name twice.
        circle: list[str] = error.args[1][::-1]
        first = next(entry for entry in entries if entry.name in circle)
        start = circle.index(first.name)
        turned = [*circle[start:-1], *circle[:start], first.name]
        names = [name for name in first.fallbacks if named.get(name) == turned[1]]
        yield Fault(
            first.name,
            "fallbacks" if names else "split",
            names[0] if names else next(n for n, _ in first.split if named.get(n) == turned[1]),
            f"a circle: {' -> '.join(turned)}",
            "let no model lead back to itself",
        )
