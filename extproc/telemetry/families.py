"""Every metric that is published, once: name, kind, labels and what it says.

`docs/reference/metrics.md` shows the same table, and a test holds the two equal. Names are final:
dashboards and alerts hang on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """The metric types of the Prometheus text format that are used here."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """A metric's description; a counter's name ends in `_total`."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


REFUSED: Final = Family(
    "llmgw_requests_refused_total",
    Kind.COUNTER,
    ("reason", "model"),
    "Requests that were answered by the service itself, by reason.",
)
DISPATCHED: Final = Family(
    "llmgw_requests_dispatched_total",
    Kind.COUNTER,
    ("endpoint", "model"),
    "Requests sent to an endpoint as their first attempt.",
)
ATTEMPTS: Final = Family(
    "llmgw_attempts_total",
    Kind.COUNTER,
    ("endpoint", "outcome"),
    "Attempts whose outcome is final; retries count one by one.",
)
FAILED_OPEN: Final = Family(
    "llmgw_failed_open_total",
    Kind.COUNTER,
    (),
    "Requests that Envoy sent on without waiting for the decision.",
)
TIME_TO_HEADERS: Final = Family(
    "llmgw_time_to_response_headers_seconds",
    Kind.HISTOGRAM,
    ("model",),
    "From a request's headers to its response headers.",
)
DURATION: Final = Family(
    "llmgw_request_duration_seconds",
    Kind.HISTOGRAM,
    ("model",),
    "From a request's headers to the end of its answer.",
)
STREAMS: Final = Family(
    "llmgw_ext_proc_streams",
    Kind.GAUGE,
    (),
    "External-processor streams that are open: requests in flight at Envoy.",
)
MESSAGES: Final = Family(
    "llmgw_ext_proc_message_seconds",
    Kind.HISTOGRAM,
    ("phase",),
    "Time spent on one message of Envoy's, the network aside.",
)
EXCHANGE_ERRORS: Final = Family(
    "llmgw_exchange_errors_total",
    Kind.COUNTER,
    (),
    "Defects in the service that cost a request its decision or a log entry its effect.",
)
ACTIONS_REFUSED: Final = Family(
    "llmgw_actions_refused_total",
    Kind.COUNTER,
    (),
    "Replies that were not sent, because Envoy would have refused them.",
)
UNREADABLE: Final = Family(
    "llmgw_unreadable_messages_total",
    Kind.COUNTER,
    (),
    "Messages that could not be read or have no answer.",
)
LOG_ENTRIES: Final = Family(
    "llmgw_access_log_entries_total",
    Kind.COUNTER,
    (),
    "Entries that came over Envoy's access log.",
)
LOOP_STALL: Final = Family(
    "llmgw_event_loop_stall_seconds",
    Kind.GAUGE,
    (),
    "The longest time since the last scrape in which the event loop did nothing else.",
)
READY: Final = Family("llmgw_ready", Kind.GAUGE, (), "1 while new requests are welcome.")
BUILD: Final = Family(
    "llmgw_build_info", Kind.GAUGE, ("version",), "Always 1; the version is in the label."
)
INFO: Final = Family(
    "llmgw_endpoint_info",
    Kind.GAUGE,
    ("endpoint", "kind", "engine", "pool"),
    "Always 1; what an endpoint is, in the labels.",
)
INFLIGHT: Final = Family(
    "llmgw_endpoint_inflight", Kind.GAUGE, ("endpoint",), "Our requests that an endpoint holds now."
)
BREAKER: Final = Family(
    "llmgw_endpoint_breaker",
    Kind.GAUGE,
    ("endpoint", "state"),
    "1 for the state that the breaker is in, 0 for the others.",
)
EXCLUDED: Final = Family(
    "llmgw_endpoint_excluded",
    Kind.GAUGE,
    ("endpoint", "why"),
    "1 while an endpoint gets no requests for this reason, breakers aside.",
)
MISCONFIGURED: Final = Family(
    "llmgw_endpoint_misconfigured_total",
    Kind.COUNTER,
    ("endpoint",),
    "Answers 401, 403, 404 and 405: probably a wrong key, path or model.",
)
STALE: Final = Family(
    "llmgw_endpoint_stale",
    Kind.GAUGE,
    ("endpoint",),
    "1 while an engine's numbers are missing or too old.",
)
UNREADABLE_PAGE: Final = Family(
    "llmgw_endpoint_unreadable",
    Kind.GAUGE,
    ("endpoint",),
    "1 while an engine's metrics page cannot be had, or lacks a number that it ought to have.",
)
AGE: Final = Family(
    "llmgw_endpoint_stats_age_seconds",
    Kind.GAUGE,
    ("endpoint",),
    "Time since the last good scrape of an engine.",
)
RUNNING: Final = Family(
    "llmgw_endpoint_running",
    Kind.GAUGE,
    ("endpoint",),
    "Requests that an engine runs, by its own word.",
)
WAITING: Final = Family(
    "llmgw_endpoint_waiting",
    Kind.GAUGE,
    ("endpoint",),
    "Requests that wait in an engine, by its own word.",
)
KV_USAGE: Final = Family(
    "llmgw_endpoint_kv_usage_ratio",
    Kind.GAUGE,
    ("endpoint",),
    "The used part of an engine's KV cache, 0 to 1.",
)
CAPACITY: Final = Family(
    "llmgw_endpoint_running_capacity",
    Kind.GAUGE,
    ("endpoint",),
    "The most requests that an engine was ever seen to run at once, if others waited beside them.",
)
DRAIN_RATE: Final = Family(
    "llmgw_endpoint_drain_rate",
    Kind.GAUGE,
    ("endpoint",),
    "Requests that a busy engine completes in a second, smoothed.",
)

FAMILIES: Final = (
    REFUSED,
    DISPATCHED,
    ATTEMPTS,
    FAILED_OPEN,
    TIME_TO_HEADERS,
    DURATION,
    STREAMS,
    MESSAGES,
    EXCHANGE_ERRORS,
    ACTIONS_REFUSED,
    UNREADABLE,
    LOG_ENTRIES,
    LOOP_STALL,
    READY,
    BUILD,
    INFO,
    INFLIGHT,
    BREAKER,
    EXCLUDED,
    MISCONFIGURED,
    STALE,
    UNREADABLE_PAGE,
    AGE,
    RUNNING,
    WAITING,
    KV_USAGE,
    CAPACITY,
    DRAIN_RATE,
)
