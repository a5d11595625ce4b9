"""A strategy: scorer weights, a picker and the knees of the formulas; three are built in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Scorer(StrEnum):
    """The six scorers, by the name that configuration and rationale use."""

    QUEUE = "queue"
    KV = "kv"
    INFLIGHT = "inflight"
    LOAD = "load"
    WEIGHT = "weight"
    SESSION = "session"


class Picker(StrEnum):
    """How one candidate is taken from the scored ones."""

    MAX_SCORE = "max-score"
    P2C = "p2c"
    SOFTMAX = "softmax"
    ROUND_ROBIN = "round-robin"


@dataclass(frozen=True, slots=True)
class Weights:
    """What each scorer counts for; relative, none negative, 0 switches one off."""

    queue: float = 2.0
    kv: float = 0.5
    inflight: float = 2.0
    load: float = 0.5
    weight: float = 0.0
    session: float = 2.0


@dataclass(frozen=True, slots=True)
class Strategy:
    """Scorer weights, a picker, and the knees of the scorers' formulas.

    `queue_knee` and `inflight_knee` are requests, `load_knee_seconds` an expected wait;
    `kv_knee_ratio` is where the KV score leaves 1 and `kv_ceiling_ratio` where it reaches 0.
    `session_bound_factor` and `session_bound_slack` limit how loaded a session's endpoint may be.
    `temperature` is read by softmax alone.
    """

    name: str
    weights: Weights = Weights()
    picker: Picker = Picker.MAX_SCORE
    temperature: float = 0.1
    queue_knee: float = 8.0
    inflight_knee: float = 8.0
    load_knee_seconds: float = 3.0
    kv_knee_ratio: float = 0.5
    kv_ceiling_ratio: float = 0.9
    session_bound_factor: float = 1.25
    session_bound_slack: float = 4.0


BUILT_IN: Final = MappingProxyType(
    {
        "chat": Strategy("chat"),
        "long-context": Strategy("long-context", Weights(kv=1.0, load=0.25), inflight_knee=16.0),
        "batch": Strategy("batch", Weights(kv=1.0, load=2.0, session=1.0)),
    }
)
