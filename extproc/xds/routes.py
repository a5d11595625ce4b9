"""Which requests Envoy lets through, and where each goes while the service says nothing.

The order of the routes is the policy: what the service steers itself, a wrong method, bodies that
are to be read for their model, restricted requests, models with a pool, the rest of the listed
paths, everything else. A restricted route is closed by a cluster without hosts and not by failing
closed, which would cut streams that are running when the service ends.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, assert_never

from extproc import clusters, headers
from extproc.config.values import Config, Steering
from extproc.errors import Rejection
from extproc.exchange import refusals
from extproc.paths import PATHS, ApiPath, Flavour, Route
from extproc.xds.connect import OTHER_HOST
from extproc.xds.local_replies import UPGRADE_REFUSED, answer
from extproc.xds.pools import pools
from extproc.xds.tree import Tree, extension, header_options, seconds, typed

# Names of the HTTP filters that routes switch on and off.
BODY_FILTER: Final = "llmgw.model-from-body"
MODEL_FILTER: Final = "llmgw.model-header"
LARGE_BODY_FILTER: Final = "llmgw.model-from-large-body"
LARGE_MODEL_FILTER: Final = "llmgw.model-header-of-large-body"
EXT_PROC_FILTER: Final = "llmgw.ext-proc"

_PER_ROUTE: Final = "envoy.config.route.v3.FilterConfig"
_PRIORITY_GROUP: Final = (
    "envoy.extensions.router.cluster_specifiers.priority_group.v3.PriorityGroupClusterSpecifier"
)

# Every text but exactly `false` and `0`, spelt out because RE2 cannot negate. An inverted match
# would not do: of several headers one that says false would switch off what another asks for.
_NO_STORE_ON: Final = "([^0f].*|0.+|f([^a].*|a([^l].*|l([^s].*|s([^e].*|e.+)?)?)?)?)?"

# A body at the limit becomes longer where the model's name is longer for the endpoint. The limit
# itself is kept by the service, which is told the length, and by the filter that waits for one.
_RENAMING_BYTES: Final = 4096

# A body whose length has so many digits is left to the service. Reading JSON takes Envoy ten times
# as long, ten milliseconds for each megabyte, in which its thread does nothing for anybody else.
_LARGE: Final = "[0-9]{7,}"

RETRIABLE: Final = (429, 500, 502, 503, 504, 508)

_METHOD: Final = ":method"
_UPGRADE: Final = "upgrade"


def _present(name: str) -> Tree:
    return {"name": name, "present_match": True}


def _absent(name: str) -> Tree:
    return {"name": name, "present_match": True, "invert_match": True}


def _equals(name: str, value: str) -> Tree:
    return {"name": name, "string_match": {"exact": value}}


def _matches(name: str, regex: str) -> Tree:
    return {"name": name, "string_match": {"safe_regex": {"regex": regex}}}


def _one_of(name: str, values: Iterable[str], *, invert: bool = False) -> Tree:
    pattern = "|".join(re.escape(value) for value in values)
    match: dict[str, Mapping[str, Mapping[str, str]] | str | bool] = {
        "name": name,
        "string_match": {"safe_regex": {"regex": pattern}},
    }
    if invert:
        match["invert_match"] = True
    return match


def _paths(entries: Iterable[ApiPath]) -> Tree:
    """Matches the whole path, its query aside, of any of `entries`."""
    patterns = [re.escape(entry.path) + ("/.+" if entry.takes_id else "") for entry in entries]
    return {"safe_regex": {"regex": "|".join(patterns)}}


def _cluster(name: str, steering: Steering) -> Tree:
    """The part of a route action that names the cluster used while the service says nothing."""
    if steering is not Steering.PRIORITY_GROUP:
        return {"cluster": name}
    return {
        "inline_cluster_specifier_plugin": {
            "extension": extension(
                "envoy.router.cluster_specifier_plugin.priority_group",
                _PRIORITY_GROUP,
                {
                    "override_metadata_namespace": headers.ROUTE_NAMESPACE,
                    "priority_groups": [
                        {"name": name, "clusters": [{"cluster_name": name, "weight": 1}]}
                    ],
                },
            )
        }
    }


def _action(cluster: Tree) -> Tree:
    # Host and port of whichever endpoint an attempt goes to; no limit on the length of an answer.
    return {**cluster, "timeout": "0s", "auto_host_rewrite": True}


def _route(
    name: str,
    path: Tree,
    header_matches: Sequence[Tree],
    cluster: Tree,
    *,
    filters: Sequence[str] = (),
) -> Tree:
    route: dict[str, Tree | str] = {
        "name": name,
        "match": {**path, **({"headers": header_matches} if header_matches else {})},
        "route": _action(cluster),
    }
    if filters:
        on = typed(_PER_ROUTE, {"config": {}})
        route["typed_per_filter_config"] = dict.fromkeys(filters, on)
    return route


def _refusal(
    name: str,
    path: Tree,
    header_matches: Sequence[Tree],
    rejection: Rejection,
    flavour: Flavour,
    *,
    example: str | None = None,
) -> Tree:
    """A route that Envoy answers itself; the service is not asked.

    `example` is one of the paths, where the answer differs between paths.
    """
    told = answer(rejection, flavour, example)
    return {
        "name": name,
        "match": {**path, **({"headers": header_matches} if header_matches else {})},
        "direct_response": {"status": rejection.status, "body": {"inline_string": told.body}},
        "response_headers_to_add": header_options(told.headers),
        "typed_per_filter_config": {EXT_PROC_FILTER: typed(_PER_ROUTE, {"disabled": True})},
    }


def _misused() -> list[Tree]:
    """Listed paths with a method that they do not take, or with an upgrade where none is.

    OPTIONS is left to the service. An upgrade with a body hangs: Envoy waits for the endpoint's
    agreement before it sends the body, and the endpoint for the body before it answers.
    """
    groups: defaultdict[tuple[tuple[str, ...], Flavour], list[ApiPath]] = defaultdict(list)
    for entry in PATHS:
        groups[entry.methods, entry.flavour].append(entry)
    found = []
    for (methods, flavour), entries in groups.items():
        label = f"{'-'.join(methods)}-{flavour}".lower()
        paths = _paths(entries)
        other = [_one_of(_METHOD, [*methods, "OPTIONS"], invert=True)]
        found.append(
            _refusal(
                f"method-not-{label}",
                paths,
                other,
                refusals.method_not_allowed(),
                flavour,
                example=entries[0].path,
            )
        )
        if not any(entry.may_upgrade for entry in entries):
            found.append(
                _refusal(
                    f"no-upgrade-{label}", paths, [_present(_UPGRADE)], UPGRADE_REFUSED, flavour
                )
            )
    return found


def _unlisted() -> list[Tree]:
    anthropic = {"safe_regex": {"regex": "/v1/messages(/.*)?"}}
    rejection = refusals.path_not_found()
    return [
        _refusal("unlisted-anthropic", anthropic, [], rejection, Flavour.ANTHROPIC),
        _refusal("unlisted", {"prefix": "/"}, [], rejection, Flavour.OPENAI),
    ]


def _steered(steering: Steering, inference: Tree, closed: Tree) -> Tree:
    """What the service has decided on, found by the header that it set, ahead of all others."""
    match steering:
        case Steering.PRIORITY_GROUP:
            # The service's metadata outranks the group of any route; this one is reached soonest.
            return _route("steered", inference, [_present(headers.CLUSTER)], closed)
        case Steering.CLUSTER_HEADER:
            cluster: Tree = {"cluster_header": headers.CLUSTER}
            return _route("steered", inference, [_present(headers.CLUSTER)], cluster)
        case Steering.ENDPOINT_PICKER:
            cluster = {"cluster": clusters.PICKED}
            return _route("steered", inference, [_present(headers.DESTINATION)], cluster)
        case _:
            assert_never(steering)


def _restricted(config: Config, inference: Tree, closed: Tree) -> list[Tree]:
    """Requests that some rule keeps off some endpoints; only the service knows which."""
    matches: list[tuple[str, list[Tree]]] = [
        ("restricted-hop", [_present(headers.HOP)]),
        ("restricted-residency", [_present(headers.RESIDENCY)]),
        (
            "restricted-no-store",
            [_matches(headers.NO_STORE, _NO_STORE_ON)],
        ),
    ]
    clients = restricted_clients(config)
    if clients:
        matches.append(("restricted-client", [_one_of(headers.CLIENT, clients)]))
    return [_route(name, inference, match, closed) for name, match in matches]


def restricted_clients(config: Config) -> tuple[str, ...]:
    """The clients whose policy keeps their requests off some endpoints, by name."""
    return tuple(
        sorted(name for name, policy in config.clients.items() if policy.restriction.is_restricted)
    )


def _models(config: Config, steering: Steering, inference: Tree) -> list[Tree]:
    """A route per model with a pool, for each header that may name it.

    Only where no other header names a model: the service refuses a request with two.
    """
    found = []
    ready = pools(config)
    for name in config.headers.model:  # outside: most requests use the first name
        others = [_absent(other) for other in config.headers.model if other != name]
        for pool in ready:
            cluster = _cluster(clusters.pool_name(pool.model), steering)
            match = [_equals(name, pool.model), *others]
            found.append(_route(f"model-{pool.model}", inference, match, cluster))
    return found


def virtual_host(config: Config, steering: Steering) -> Tree:
    """The one virtual host: every route, the limits and the retries that they share."""
    closed = _cluster(clusters.NONE, steering)
    own = [entry for entry in PATHS if entry.route is not Route.INFERENCE]
    listed = [entry for entry in PATHS if entry.route is Route.INFERENCE]
    inference = _paths(listed)
    # An upgrade has no end of stream, and the body filter would wait for it for ever.
    unread = [
        _equals(_METHOD, "POST"),
        _absent(_UPGRADE),
        *(_absent(name) for name in config.headers.model),
    ]
    json_paths = _paths(entry for entry in listed if entry.has_json_model)
    return {
        "name": "llmgw",
        "domains": ["*"],
        "request_body_buffer_limit": config.listener.body_limit_bytes + _RENAMING_BYTES,
        "request_headers_to_remove": list(headers.REMOVED_BY_THE_ROUTE),
        "retry_policy": {
            "retry_on": "connect-failure,refused-stream,reset,retriable-status-codes",
            "retriable_status_codes": list(RETRIABLE),
            # The service lowers it where fewer endpoints can take a request.
            "num_retries": max(0, config.max_attempts - 1),
            "per_try_timeout": seconds(config.listener.header_deadline_seconds),
            "refresh_cluster_on_retry": True,
            "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.05s"},
            **OTHER_HOST,
        },
        "routes": [
            # What is steered has passed the others before, and no client can send the header.
            _steered(steering, inference, closed),
            *_misused(),
            _route("own", _paths(own), [], closed),
            _route("options", inference, [_equals(_METHOD, "OPTIONS")], closed),
            _route(
                "model-from-large-body",
                json_paths,
                [*unread, _matches("content-length", _LARGE)],
                closed,
                filters=(LARGE_BODY_FILTER, LARGE_MODEL_FILTER),
            ),
            _route(
                "model-from-body",
                json_paths,
                unread,
                closed,
                filters=(BODY_FILTER, MODEL_FILTER),
            ),
            *_restricted(config, inference, closed),
            *_models(config, steering, inference),
            _route("closed", inference, [], closed),
            *_unlisted(),
        ],
    }
