"""What a request passes through between the listener and the choice of its cluster."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

from extproc import clusters, headers
from extproc.config.values import Config, Steering
from extproc.exchange.messages import BodyField
from extproc.xds.access_log import attempt_log
from extproc.xds.connect import OTHER_HOST
from extproc.xds.routes import (
    BODY_FILTER,
    EXT_PROC_FILTER,
    LARGE_BODY_FILTER,
    LARGE_MODEL_FILTER,
    MODEL_FILTER,
    restricted_clients,
)
from extproc.xds.service_cluster import may_be_several
from extproc.xds.tree import Json, Tree, extension, plain, seconds
from extproc.xds.whole_bodies import unless_present, whole_bodies

_JSON_TO_METADATA: Final = "envoy.extensions.filters.http.json_to_metadata.v3.JsonToMetadata"
_HEADER_MUTATION: Final = "envoy.extensions.filters.http.header_mutation.v3.HeaderMutation"

# Where the body's model is kept for the model header: only when the body has one, whereas the
# namespace that the service reads says in every other case what was wrong.
_NAMED_NAMESPACE: Final = "llmgw.named"

# What the exchange reads; nothing else leaves Envoy, and above all no key does.
_READ_FROM_REQUESTS: Final = (
    ":method",
    ":path",
    "content-encoding",
    "content-length",
    "content-type",
    "transfer-encoding",
    "upgrade",
    headers.CLIENT,
    headers.HOP,
    headers.NO_STORE,
    headers.REQUEST_ID,
    headers.RESIDENCY,
    headers.TAGS,
)
_READ_FROM_RESPONSES: Final = (":status", headers.RETRY_AFTER)

_RESPONSE_ATTRIBUTES: Final = (
    "response.flags",
    "response.code_details",
    "xds.cluster_name",
    "upstream.request_attempt_count",
)


def _body_filter() -> Tree:
    """Reads the model; the one route for bodies without a model header switches it on."""
    return {**extension(BODY_FILTER, _JSON_TO_METADATA, _body_rules()), "disabled": True}


def _large_body_filter() -> Tree:
    """Reads the model where the service was to read it and has not decided: it may be down."""
    reader = extension("reader", _JSON_TO_METADATA, _body_rules())
    return {**unless_present(LARGE_BODY_FILTER, reader, headers.CLUSTER), "disabled": True}


def _body_rules() -> Tree:
    model_key = {"key": BodyField.MODEL.value}
    namespace = {"metadata_namespace": headers.BODY_NAMESPACE}
    rules: list[Tree] = [
        {
            "selectors": [model_key],
            "on_present": {**namespace, **model_key, "type": "STRING"},
            "on_missing": {**namespace, **model_key, "value": headers.BODY_MODEL_MISSING},
            "on_error": {**namespace, **model_key, "value": headers.BODY_MODEL_UNREADABLE},
        },
        {
            "selectors": [model_key],
            "on_present": {"metadata_namespace": _NAMED_NAMESPACE, **model_key, "type": "STRING"},
        },
    ]
    rules.extend(
        {
            "selectors": [{"key": field.value}],
            "on_present": {**namespace, "key": field.value},
        }
        for field in BodyField
        if field is not BodyField.MODEL
    )
    return {
        "request_rules": {
            "allow_content_types_regex": {"regex": r"application/(.*\+)?json(;.*)?"},
            "allow_empty_content_type": True,
            "rules": rules,
        }
    }


def _model_header(config: Config, name: str) -> Tree:
    """Copies the body's model into the first model header, so that a pool's route is found.

    Off but on the routes whose bodies are read.
    """
    model = f"%DYNAMIC_METADATA({_NAMED_NAMESPACE}:{BodyField.MODEL})%"
    copied: Tree = {
        "header": {"key": config.headers.model[0], "value": model},
        "append_action": "ADD_IF_ABSENT",
    }
    mutation: Tree = {"mutations": {"request_mutations": [{"append": copied}]}}
    return {**extension(name, _HEADER_MUTATION, mutation), "disabled": True}


def _fresh_route() -> Tree:
    """Lets the routes see the client that a filter before has just authenticated."""
    return extension(
        "llmgw.fresh-route",
        "envoy.extensions.filters.http.set_filter_state.v3.Config",
        {
            "on_request_headers": [
                {
                    "object_key": "llmgw.authenticated",
                    "factory_key": "envoy.string",
                    "format_string": {"text_format_source": {"inline_string": "yes"}},
                }
            ],
            "clear_route_cache": True,
        },
    )


# Only where there may be another: what could be retried costs Envoy a tenth of all that a request
# does, and a process that is gone will not be back within the back-off.
_ANOTHER_PROCESS: Final[Tree] = MappingProxyType(
    {
        "retry_policy": {
            # The last two are what a service says that has just begun to end.
            "retry_on": "connect-failure,refused-stream,reset,unavailable,cancelled",
            "num_retries": 2,
            "retry_back_off": {"base_interval": "0.002s", "max_interval": "0.01s"},
            **OTHER_HOST,
        }
    }
)


def _ext_proc(config: Config, steering: Steering) -> Tree:
    read = [*_READ_FROM_REQUESTS, *config.headers.model, *config.headers.session]
    allowed = sorted(map(re.escape, {*read, *_READ_FROM_RESPONSES}))
    forwarded = [headers.BODY_NAMESPACE]
    received = []
    match steering:
        case Steering.PRIORITY_GROUP:
            received.append(headers.ROUTE_NAMESPACE)
        case Steering.ENDPOINT_PICKER:
            received.append(headers.PICKER_NAMESPACE)
            forwarded.append(headers.SUBSET_NAMESPACE)
        case Steering.CLUSTER_HEADER:
            pass
    return extension(
        EXT_PROC_FILTER,
        "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        {
            "grpc_service": {
                "envoy_grpc": {"cluster_name": clusters.EXT_PROC, "skip_envoy_headers": True},
                **(_ANOTHER_PROCESS if may_be_several(config.service) else {}),
            },
            "processing_mode": {
                "request_header_mode": "SEND",
                "response_header_mode": "SEND",
                "request_body_mode": "NONE",
                "response_body_mode": "NONE",
                "request_trailer_mode": "SKIP",
                # Keeps the stream open until the answer ends, which is what in-flight counts.
                "response_trailer_mode": "SEND",
            },
            "message_timeout": seconds(config.service.message_timeout_seconds),
            # Failing closed would cut every running stream whenever the service restarts.
            "failure_mode_allow": True,
            "allow_mode_override": True,
            "response_attributes": list(_RESPONSE_ATTRIBUTES),
            "mutation_rules": {
                "allow_envoy": True,  # for the retry count
                "disallow_expression": {"regex": "|".join(headers.CREDENTIALS)},
            },
            "forward_rules": {
                # One expression: of many patterns each is tried on each header.
                "allowed_headers": {"patterns": [{"safe_regex": {"regex": "|".join(allowed)}}]}
            },
            "metadata_options": {
                "forwarding_namespaces": {"untyped": forwarded},
                "receiving_namespaces": {"untyped": received},
            },
        },
    )


def _router(config: Config) -> Tree:
    log = [attempt_log()] if config.service.access_log else []
    return extension(
        "envoy.filters.http.router",
        "envoy.extensions.filters.http.router.v3.Router",
        {"suppress_envoy_headers": True, **({"upstream_log": log} if log else {})},
    )


def http_filters(config: Config, steering: Steering) -> list[Json]:
    """Every HTTP filter in order: the configured ones, the body, its model, service, router."""
    filters: list[Json] = [plain(item) for item in config.listener.http_filters]
    if filters and restricted_clients(config):
        filters.append(_fresh_route())
    filters += [
        whole_bodies(config),
        _body_filter(),
        _model_header(config, MODEL_FILTER),
        _ext_proc(config, steering),
        _large_body_filter(),
        _model_header(config, LARGE_MODEL_FILTER),
        _router(config),
    ]
    return filters
