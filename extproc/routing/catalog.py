"""Which models a requested name stands for: aliases, weighted splits, ordered fallbacks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One name that clients may ask for.

    `split` maps model names to relative weights; an entry with a split serves nothing itself.
    `fallbacks` are used in order when this model has no usable endpoint or all are saturated.
    """

    name: str
    aliases: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    split: tuple[tuple[str, float], ...] = ()
    strategy: str | None = None
