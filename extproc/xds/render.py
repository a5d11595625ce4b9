"""Writes an Envoy configuration as YAML that Envoy's parser and Python's read alike.

A writer of our own, since it needs no more than mappings, lists and scalars: a thousand endpoints
take it a fraction of a second, and what is quoted does not depend on one parser's idea of a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Final, TypeGuard

from extproc.config.values import Config, Steering
from extproc.xds.bootstrap import bootstrap
from extproc.xds.tree import Json, Tree

# Envoy reads YAML 1.2 and takes an unquoted 1e5 for a number and an unquoted y for a truth value;
# a reader of YAML 1.1 has other such words. Only what nobody can misread stays unquoted.
_PLAIN: Final = re.compile(
    r"[A-Za-z]([A-Za-z0-9_./-]*[A-Za-z0-9])?"  # a name
    r"|/[A-Za-z0-9_./-]*[A-Za-z0-9]"  # a path
    r"|[0-9]+(\.[0-9]+)?s",  # a duration
    re.ASCII,
)
_WORDS: Final = frozenset(
    {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf", "infinity"}
)
_ASCII: Final = re.compile(r"[ -~]*", re.ASCII)


def render(config: Config, steering: Steering | None = None) -> str:
    """A complete Envoy 1.40 bootstrap for `config`, as YAML in ASCII.

    `steering` stands in for the configured one. Keys are named, never written: Envoy reads them
    from its own environment or files. The same configuration always gives the same text.

    Raises:
        ValueError: two endpoints would get the same cluster.
    """
    chosen = steering or config.steering
    head = (
        f"# Envoy 1.40 for {config.cluster_id}, steered by {chosen}.\n"
        f"# Rendered from {PurePath(config.file).name}: change that and render again.\n"
    )
    return head + to_yaml(bootstrap(config, chosen))


def to_yaml(tree: Tree) -> str:
    """`tree` in block style, keys in the order given, without anchors."""
    return "".join(f"{line}\n" for line in (_block(tree, "") if tree else ("{}",)))


def _block(value: Mapping[str, Json] | Sequence[Json], pad: str) -> Iterator[str]:
    """The lines of a container that is not empty."""
    deeper = pad + "  "
    if isinstance(value, Mapping):
        for key, item in value.items():
            if _is_container(item):
                yield f"{pad}{_text(key)}:"
                yield from _block(item, deeper)
            else:
                yield f"{pad}{_text(key)}: {_scalar(item)}"
        return
    for item in value:
        if _is_container(item):
            first, *rest = _block(item, deeper)
            yield f"{pad}- {first.lstrip(' ')}"
            yield from rest
        else:
            yield f"{pad}- {_scalar(item)}"


def _is_container(value: Json) -> TypeGuard[Mapping[str, Json] | Sequence[Json]]:
    return isinstance(value, Mapping | Sequence) and not isinstance(value, str) and bool(value)


def _scalar(value: Json) -> str:
    """Anything that fits on the line of its key."""
    if isinstance(value, str):
        return _text(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        text = repr(value)  # YAML 1.1 wants a point in every float
        return text if "." in text else text.replace("e", ".0e")
    if isinstance(value, int):
        return str(value)
    return "{}" if isinstance(value, Mapping) else "[]"


def _text(text: str) -> str:
    """`text` plain, or quoted in the way that needs fewer escapes."""
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    if '"' in text and "'" not in text and _ASCII.fullmatch(text):
        return f"'{text}'"
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    if character in {'"', "\\"}:
        return "\\" + character
    return character if " " <= character <= "~" else f"\\U{ord(character):08X}"
