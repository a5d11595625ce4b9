"""What can be made to go wrong with an engine, and the list of what is going wrong now.

Values and their choice only; the server carries them out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum
from random import Random

import msgspec


class FaultKind(StrEnum):
    """One way to fail; the comment says what the peer sees and which fields count."""

    REFUSE = "refuse"  # connections are refused, idle ones closed; `seconds` (none: until told)
    KILL = "kill"  # the same, and every open connection is reset
    ACCEPT_RESET = "accept_reset"  # a new connection is reset at once
    RESET = "reset"  # reset as soon as the request's headers are there
    RESET_AFTER_BODY = "reset_after_body"  # reset when the whole request has been read
    HANG = "hang"  # the request is read and never answered
    SLOW_HEADERS = "slow_headers"  # the answer starts `seconds` later (1 if not given)
    STATUS = "status"  # answered with `status`, `headers` and `body`
    EARLY_STATUS = "early_status"  # the same, before any of the body is read
    CUT = "cut"  # the answer ends after `chunks` tokens, by `how`
    STALL = "stall"  # the answer stops after `chunks` tokens, for `seconds` (none: for good)
    ERROR_EVENT = "error_event"  # an error inside the stream after `chunks` tokens
    INFORMATIONAL = "informational"  # an interim answer `status` (103 if not 1xx) comes first
    TRAILERS = "trailers"  # `headers` come as trailers of the answer
    CLOSE_DELIMITED = "close_delimited"  # the answer has no length and ends with the connection
    METRICS_HANG = "metrics_hang"  # the metrics page never comes
    METRICS_TRICKLE = "metrics_trickle"  # it comes a byte at a time, one every `seconds` (1)
    METRICS_SLOW = "metrics_slow"  # it comes `seconds` later (1 if not given)
    METRICS_PAGE = "metrics_page"  # it is `body`, with `headers` and status 200
    METRICS_NAMES = "metrics_names"  # it is well formed and every name is another
    METRICS_HTML = "metrics_html"  # it is a login page, with status 200
    METRICS_EMPTY = "metrics_empty"  # it is empty, with status 200
    METRICS_JSON = "metrics_json"  # it is JSON, with status 200
    METRICS_REDIRECT = "metrics_redirect"  # 301 to `body`
    METRICS_STATUS = "metrics_status"  # `status`, 404 unless given

    @property
    def is_about_metrics(self) -> bool:
        """Whether it strikes the metrics page instead of the API."""
        return self.value.startswith("metrics_")

    @property
    def is_about_requests(self) -> bool:
        """Whether it strikes a single request."""
        return (
            not self.is_about_metrics
            and not self.is_about_listening
            and (self is not FaultKind.ACCEPT_RESET)
        )

    @property
    def is_about_listening(self) -> bool:
        """Whether it closes the listening socket, which is a state and never used up."""
        return self in {FaultKind.REFUSE, FaultKind.KILL}


class CutBy(StrEnum):
    """How a connection is ended in the middle of an answer."""

    RST = "rst"
    FIN = "fin"


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that goes wrong.

    `times` limits it to so many requests (None: until it is taken away), `probability` is the
    chance of each matching request, `path` a prefix that the request's path must have.
    """

    kind: FaultKind
    times: int | None = None
    probability: float = 1.0
    path: str = ""
    status: int | None = None
    headers: dict[str, str] = {}
    body: str | None = None
    seconds: float | None = None
    chunks: int = 0
    how: CutBy = CutBy.RST

    def __post_init__(self) -> None:
        """Refuses what could never strike or never be sent."""
        if not 0.0 < self.probability <= 1.0:
            raise ValueError("probability is above 0 and at most 1")
        if self.times is not None and self.times < 1:
            raise ValueError("times starts at 1")
        if self.chunks < 0 or (self.seconds is not None and self.seconds < 0):
            raise ValueError("chunks and seconds are not negative")
        lowest = 100 if self.kind is FaultKind.INFORMATIONAL else 200
        if self.status is not None and not lowest <= self.status <= 599:
            raise ValueError(f"status is {lowest} to 599")


class Faults:
    """The faults in force, oldest first; the first that matches strikes."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._armed: list[tuple[Fault, int | None]] = []

    def add(self, *faults: Fault) -> None:
        """The faults are in force, after those that already are."""
        self._armed += [(fault, fault.times) for fault in faults]

    def clear(self) -> None:
        """Nothing goes wrong any more."""
        self._armed.clear()

    def armed(self) -> list[Fault]:
        """What is in force, with the times that are left."""
        return [msgspec.structs.replace(fault, times=left) for fault, left in self._armed]

    def for_request(self, path: str, *, is_api: bool) -> Fault | None:
        """What goes wrong with this request, counted as used.

        A fault without a path strikes the API alone, never a health check.
        """
        return self._take(
            lambda fault: (
                fault.kind.is_about_requests
                and path.startswith(fault.path)
                and (is_api or bool(fault.path))
            )
        )

    def for_metrics(self) -> Fault | None:
        """What goes wrong with this scrape, counted as used."""
        return self._take(lambda fault: fault.kind.is_about_metrics)

    def for_connection(self) -> Fault | None:
        """What goes wrong with this connection, counted as used."""
        return self._take(lambda fault: fault.kind is FaultKind.ACCEPT_RESET)

    def _take(self, strikes: Callable[[Fault], bool]) -> Fault | None:
        for index, (fault, left) in enumerate(self._armed):
            if not strikes(fault):
                continue
            if fault.probability < 1.0 and self._random.random() >= fault.probability:
                continue
            if left is not None:
                if left == 1:
                    del self._armed[index]
                else:
                    self._armed[index] = (fault, left - 1)
            return fault
        return None


def parse_faults(text: bytes | str) -> list[Fault]:
    """The faults in a JSON object or array.

    Raises:
        ValueError: what is wrong and where.
    """
    try:
        decoded = msgspec.json.decode(text, type=Fault | list[Fault])
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    except msgspec.DecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    return [decoded] if isinstance(decoded, Fault) else decoded


def parse_flag(text: str) -> list[Fault]:
    """The faults of one command-line flag: JSON, or `kind` or `kind,field=value,...`.

    `header=name:value` adds one header.

    Raises:
        ValueError: what is wrong and where.
    """
    if text.lstrip()[:1] in {"{", "["}:
        return parse_faults(text)
    kind, *pairs = text.split(",")
    fields: dict[str, object] = {"kind": kind.strip()}
    headers: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair!r} is not field=value")
        if name.strip() == "header":
            header, _, content = value.partition(":")
            headers[header.strip()] = content.strip()
        else:
            fields[name.strip()] = _literal(value)
    if headers:
        fields["headers"] = headers
    return parse_faults(json.dumps(fields))


def _literal(text: str) -> object:
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    return value
