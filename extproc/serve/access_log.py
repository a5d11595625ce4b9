"""Envoy's gRPC access log as log entries: failed attempts and requests that ended with a flag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Final, Protocol

from google.protobuf.message import DecodeError

from extproc import headers
from extproc.exchange.messages import AttemptLog, LogEntry, RequestLog
from extproc.serve.pb.access_log_pb2 import (
    AccessLogCommon,
    HTTPAccessLogEntry,
    ResponseFlags,
    StreamAccessLogsMessage,
    UpstreamEnd,
)
from extproc.serve.pb.access_log_pb2 import (
    DownstreamEnd as RequestEnd,
)
from extproc.serve.pb.access_log_pb2 import (
    NotSet as UnknownEnd,
)
from extproc.serve.stream import StreamBroken, StreamEnd
from extproc.serve.wire import Unreadable
from extproc.telemetry.logs import LimitedLog

# Flag n of the message is bit n - 1 of the mask, but for one that came after a flag without field.
_MISPLACED_BITS: Final = MappingProxyType(
    {ResponseFlags.DOWNSTREAM_REMOTE_RESET_FIELD_NUMBER: 1 << 28}
)


class LogObserver(Protocol):
    """Told what the access log brings; each call is cheap and never raises."""

    def log_entries(self, count: int) -> None:
        """`count` entries came in one message."""
        ...

    def unreadable_message(self) -> None:
        """A message could not be read."""
        ...

    def exchange_failed(self) -> None:
        """A defect kept an entry from being booked."""
        ...


def parse_log(raw: bytes) -> tuple[LogEntry, ...]:
    """The entries in one message, in order.

    An upstream entry is a failed attempt, a downstream entry a request that is over; entries of
    other moments are left out.

    Raises:
        Unreadable: `raw` is no access-log message.
    """
    try:
        message = StreamAccessLogsMessage.FromString(raw)
    except DecodeError as error:
        raise Unreadable("not an access-log message") from error
    entries = (_entry(entry) for entry in message.http_logs.log_entry)
    return tuple(entry for entry in entries if entry is not None)


def _entry(entry: HTTPAccessLogEntry) -> LogEntry | None:
    """One entry, None for a moment that is not an end."""
    common = entry.common_properties
    response = entry.response
    decision = _decision_id(common)
    cluster = common.upstream_cluster.decode(errors="replace")
    status = response.response_code.value
    flags = _mask(common.response_flags)
    details = response.response_code_details.decode(errors="replace")
    if common.access_log_type == UpstreamEnd:
        retry_after = response.response_headers.get(headers.RETRY_AFTER)
        text = None if retry_after is None else retry_after.decode("latin-1")
        return AttemptLog(decision, cluster, status, flags, details, text)
    if common.access_log_type in {RequestEnd, UnknownEnd}:
        attempts = common.upstream_request_attempt_count
        return RequestLog(decision, cluster, status, flags, details, attempts)
    return None


def _decision_id(common: AccessLogCommon) -> str:
    """The id of the service's decision; "" for a request that it did not decide."""
    return common.custom_tags.get(headers.DECISION_TAG, b"").decode(errors="replace")


def _mask(flags: ResponseFlags) -> int:
    """The flags as the bit mask that the attribute `response.flags` has."""
    mask = 0
    for field, _ in flags.ListFields():
        mask |= _MISPLACED_BITS.get(field.number, 1 << (field.number - 1))
    return mask


class AccessLogStream:
    """Hands every entry of one stream to `sink`; see `StreamHandler` for its contract.

    A defect in `sink` costs the entry that showed it and nothing else.
    """

    __slots__ = ("_clock", "_lines", "_observer", "_sink")

    def __init__(
        self,
        sink: Callable[[LogEntry, float], None],
        *,
        observer: LogObserver,
        lines: LimitedLog,
        clock: Callable[[], float],
    ) -> None:
        self._sink = sink
        self._observer = observer
        self._lines = lines
        self._clock = clock

    def receive(self, message: bytes) -> Sequence[bytes]:
        """No reply; the entries of `message` have been taken in.

        Raises:
            StreamBroken: the bytes are no access-log message.
        """
        try:
            entries = parse_log(message)
        except Unreadable as error:
            self._observer.unreadable_message()
            raise StreamBroken("unreadable message") from error
        self._observer.log_entries(len(entries))
        now = self._clock()
        for entry in entries:
            try:
                self._sink(entry, now)
            except Exception as error:  # noqa: BLE001 - the other entries are still to be booked
                self._observer.exchange_failed()
                self._lines.error("access log", "an access-log entry was lost", error)
        return ()

    def written(self) -> None:
        """Nothing is ever written."""

    def end(self, why: StreamEnd) -> None:
        """Nothing was held."""
