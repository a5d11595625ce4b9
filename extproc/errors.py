"""Every refusal and failure that the product can report, with what a client is told about it.

    LlmgwError
    ├── ConfigError        a configuration is refused; it names file, line, key and what is right
    └── UnreadableMetrics  an engine's metrics page does not keep its contract; it names the signal

Refusals on the request path are values (`Rejection`), not exceptions.
Nothing here does I/O, and no text here names a host.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why a request was refused; the value of the reason header and of the metrics label."""

    MODEL_MISSING = "model_missing"
    MODEL_AMBIGUOUS = "model_ambiguous"
    MODEL_INVALID = "model_invalid"
    MODEL_NOT_FOUND = "model_not_found"
    BODY_INVALID = "body_invalid"
    BODY_TOO_LARGE = "body_too_large"
    BODY_ENCODING = "body_encoding"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    PATH_NOT_FOUND = "path_not_found"
    LOOP = "loop"
    HOP_INVALID = "hop_invalid"
    TOO_MANY_HOPS = "too_many_hops"
    NO_ENDPOINT = "no_endpoint"
    RESTRICTED = "restricted"
    SATURATED = "saturated"
    UPSTREAM_FAILED = "upstream_failed"
    NOT_READY = "not_ready"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Rejection:
    """A refusal before an endpoint was chosen.

    `status` is the HTTP status, `message` the client's sentence (it never names a host), `code`
    and `param` go into the error envelope. `retry_after_seconds` is present where a retry helps;
    `should_retry` false tells SDKs that a retry cannot help.
    """

    status: int
    reason: Reason
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_seconds: float | None = None
    should_retry: bool | None = None


class LlmgwError(Exception):
    """The parent of every error that this package raises on purpose."""


class ConfigError(LlmgwError):
    """A configuration is refused.

    `problem` says what is wrong and `expected` what would be right; `line` is 1-based, 0 when the
    fault belongs to no line; `key` is the dotted path of the value.
    """

    def __init__(self, file: str, line: int, key: str, problem: str, expected: str) -> None:
        self.file = file
        self.line = line
        self.key = key
        self.problem = problem
        self.expected = expected
        place = f"{file}:{line}" if line else file
        super().__init__(f"{place}: {key}: {problem}; {expected}")


class UnreadableMetrics(LlmgwError):  # noqa: N818 - reads as what it is at the place it is caught
    """A metrics page is refused; `signal` names what is missing or wrong."""

    def __init__(self, signal: str, problem: str) -> None:
        self.signal = signal
        self.problem = problem
        super().__init__(f"{signal}: {problem}")
