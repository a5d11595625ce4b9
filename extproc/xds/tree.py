"""What an Envoy configuration is made of: JSON values, typed extensions and durations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Tree: TypeAlias = "Mapping[str, Json]"

_TYPES: Final = "type.googleapis.com/"


def typed(message: str, fields: Tree | None = None) -> Tree:
    """A message of the named protobuf type, as `typed_config` fields hold it."""
    return {"@type": _TYPES + message, **(fields or {})}


def extension(name: str, message: str, fields: Tree | None = None) -> Tree:
    """A named extension with its typed configuration."""
    return {"name": name, "typed_config": typed(message, fields)}


def seconds(value: float) -> str:
    """A duration in protobuf's JSON form, to the millisecond."""
    return f"{value:.3f}".rstrip("0").rstrip(".") + "s"


def address(host: str, port: int) -> Tree:
    """A TCP address."""
    return {"socket_address": {"address": host, "port_value": port}}


def header_options(pairs: Iterable[tuple[str, str]]) -> list[Tree]:
    """Headers that take the place of any that are there under the same name."""
    return [
        {
            "header": {"key": name, "value": value},
            "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
        }
        for name, value in pairs
    ]


def plain(value: object) -> Json:
    """A copy of `value`, known to consist of JSON values all the way down.

    Raises:
        TypeError: something in it is none.
    """
    if isinstance(value, str):
        return str(value)  # an enum's member becomes its text
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} is not a JSON value")
