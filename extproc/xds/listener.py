"""The listener: how Envoy takes connections, cleans requests and asks the service."""

from __future__ import annotations

from typing import Final

from extproc import headers
from extproc.config.values import Config, Steering
from extproc.xds.access_log import request_log
from extproc.xds.http_filters import http_filters
from extproc.xds.local_replies import local_reply_config
from extproc.xds.routes import virtual_host
from extproc.xds.tree import Json, Tree, address, extension, seconds, typed

_USUAL_BUFFER_BYTES: Final = 1024 * 1024
_SMALLEST_WINDOW_BYTES: Final = 65_535

_HCM: Final = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"


def _connection_manager(config: Config, steering: Steering) -> Tree:
    limits = config.listener
    fields: dict[str, Json] = {
        "stat_prefix": "llmgw",
        "codec_type": "AUTO",
        # Drops a client's own x-envoy-max-retries and its like: only the service may set them.
        "use_remote_address": True,
        "preserve_external_request_id": True,
        "always_set_request_id_in_response": True,
        "request_id_extension": {
            "typed_config": typed(
                "envoy.extensions.request_id.uuid.v3.UuidRequestIdConfig",
                {"pack_trace_reason": False},  # would change a character of the client's id
            )
        },
        "normalize_path": True,
        "merge_slashes": True,
        "path_with_escaped_slashes_action": "UNESCAPE_AND_FORWARD",
        "stream_idle_timeout": seconds(limits.idle_timeout_seconds),
        "request_headers_timeout": "10s",
        "max_request_headers_kb": 96,
        "http_protocol_options": {"accept_http_10": True, "default_host_for_http_10": "llmgw"},
        # Envoy buffers a window of a stream in any case, 16 MiB by default.
        "http2_protocol_options": {
            "initial_stream_window_size": max(_buffer_bytes(config), _SMALLEST_WINDOW_BYTES)
        },
        "common_http_protocol_options": {
            "idle_timeout": "3600s",
            "headers_with_underscores_action": "ALLOW",
            "max_headers_count": 200,
        },
        "upgrade_configs": [{"upgrade_type": "websocket"}],
        "early_header_mutation_extensions": [
            extension(
                "envoy.http.early_header_mutation.header_mutation",
                "envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
                {"mutations": [{"remove": name} for name in headers.STRIPPED_AT_THE_EDGE]},
            )
        ],
        "local_reply_config": local_reply_config(limits.body_limit_bytes),
        "route_config": {
            "name": "llmgw",
            "virtual_hosts": [virtual_host(config, steering)],
        },
        "http_filters": http_filters(config, steering),
    }
    if config.service.access_log:
        fields["access_log"] = [request_log()]
    return fields


def listener(config: Config, steering: Steering) -> Tree:
    """The listener that clients connect to: HTTP/1.0, 1.1 and 2 on one port, TLS if configured."""
    chain: dict[str, Json] = {
        "filters": [
            extension(
                "envoy.filters.network.http_connection_manager",
                _HCM,
                _connection_manager(config, steering),
            )
        ]
    }
    if config.listener.tls_cert_file is not None and config.listener.tls_key_file is not None:
        chain["transport_socket"] = _server_tls(
            config.listener.tls_cert_file, config.listener.tls_key_file
        )
    return {
        "name": "llmgw",
        "address": address(config.listener.host, config.listener.port),
        "filter_chains": [chain],
        # Envoy's own buffer, which a smaller limit for bodies would not reach into.
        "per_connection_buffer_limit_bytes": _buffer_bytes(config),
    }


def _buffer_bytes(config: Config) -> int:
    return min(config.listener.body_limit_bytes, _USUAL_BUFFER_BYTES)


def _server_tls(cert_file: str, key_file: str) -> Tree:
    return extension(
        "envoy.transport_sockets.tls",
        "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        {
            "common_tls_context": {
                "alpn_protocols": ["h2", "http/1.1"],
                "tls_certificates": [
                    {
                        "certificate_chain": {"filename": cert_file},
                        "private_key": {"filename": key_file},
                    }
                ],
            }
        },
    )
