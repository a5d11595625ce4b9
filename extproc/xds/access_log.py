"""What Envoy tells the service that the ext_proc stream cannot: failed attempts and cut streams.

A clean request logs nothing, nor does one that the service did not decide on. Both logs carry the
decision id as a custom tag. Envoy's log of an attempt knows nothing of the request's metadata, only
its headers, and whatever is removed before the endpoint sees it is gone from that log as well. So
the service sets the id under a name that begins with a colon: no client can send such a header and
Envoy writes none to an HTTP/1 endpoint, but both logs can read it.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from extproc import clusters, headers
from extproc.xds.tree import Tree, extension

REQUEST_LOG: Final = "request"
ATTEMPT_LOG: Final = "attempt"

_GRPC_LOG: Final = "envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig"

_TAG: Final[Tree] = MappingProxyType(
    {"tag": headers.DECISION_TAG, "request_header": {"name": headers.DECISION}}
)
_DECIDED: Final[Tree] = MappingProxyType(
    {"header_filter": {"header": {"name": headers.DECISION, "present_match": True}}}
)
_FLAGGED: Final[Tree] = MappingProxyType({"response_flag_filter": {}})


def _status(op: str, value: int) -> Tree:
    return {
        "status_code_filter": {
            "comparison": {
                "op": op,
                "value": {"default_value": value, "runtime_key": f"llmgw.log.status.{op.lower()}"},
            }
        }
    }


def _log(name: str, condition: Tree) -> Tree:
    return {
        **extension(
            "envoy.access_loggers.http_grpc",
            _GRPC_LOG,
            {
                "common_config": {
                    "log_name": name,
                    "transport_api_version": "V3",
                    "grpc_service": {"envoy_grpc": {"cluster_name": clusters.ACCESS_LOG}},
                    "buffer_flush_interval": "0.2s",
                    "custom_tags": [_TAG],
                },
                "additional_response_headers_to_log": [headers.RETRY_AFTER],
            },
        ),
        "filter": {"and_filter": {"filters": [condition, _DECIDED]}},
    }


def request_log() -> Tree:
    """Logs a request that ended with a response flag: a cut, an abort, a timeout."""
    return _log(REQUEST_LOG, _FLAGGED)


def attempt_log() -> Tree:
    """Logs an attempt that failed: without an answer, or with 429 or 500 and above."""
    failed = {"or_filter": {"filters": [_FLAGGED, _status("EQ", 429), _status("GE", 500)]}}
    return _log(ATTEMPT_LOG, failed)
