"""Holds a body of unknown length back until it is whole, where the service may have to read it.

The service asks for a body in its reply to the headers. By then Envoy may have taken in more than
the limit; it has stopped reading, and its filter waits for an end that is never read. A body that
says its length is refused by the service instead, and one whose model Envoy reads out of it is
whole before the service is asked at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from extproc.config.values import Config
from extproc.routing.catalog import ModelEntry
from extproc.xds.tree import Tree, extension, typed

_INPUT: Final = "envoy.type.matcher.v3.HttpRequestHeaderMatchInput"


def whole_bodies(config: Config) -> Tree:
    """The filter that buffers up to the body limit, and answers 413 beyond it."""
    buffer = extension(
        "envoy.filters.http.buffer",
        "envoy.extensions.filters.http.buffer.v3.Buffer",
        {"max_request_bytes": config.listener.body_limit_bytes},
    )
    return _unless("llmgw.whole-bodies", buffer, _passes(config))


def unless_present(name: str, inner: Tree, header: str) -> Tree:
    """The filter `inner` for requests that do not have the header when they come to it."""
    return _unless(name, inner, _present(header))


def _unless(name: str, inner: Tree, predicate: Tree) -> Tree:
    skip = extension("skip", "envoy.extensions.filters.common.matcher.action.v3.SkipFilter")
    return {
        "name": name,
        "typed_config": typed(
            "envoy.extensions.common.matching.v3.ExtensionWithMatcher",
            {
                "extension_config": inner,
                "xds_matcher": {
                    "matcher_list": {
                        "matchers": [{"predicate": predicate, "on_match": {"action": skip}}]
                    }
                },
            },
        ),
    }


def renamed_names(config: Config) -> tuple[str, ...]:
    """The names under which a request may have to be sent on with another model in its body."""
    foreign = {
        model
        for info in config.endpoints
        for model in info.models
        if info.upstream_name(model) != model
    }

    def names(entry: ModelEntry) -> Sequence[str]:
        is_moved = entry.split or entry.fallbacks or entry.name in foreign
        return (entry.name, *entry.aliases) if is_moved else entry.aliases

    return tuple(sorted({name for entry in config.models for name in names(entry)}))


def _passes(config: Config) -> Tree:
    """Matches what is not held back: a known length, no end to wait for, a model as it is."""
    as_it_is = [_is_named_otherwise(name, renamed_names(config)) for name in config.headers.model]
    passing = [_present("content-length"), _present("upgrade"), *as_it_is]
    return {"or_matcher": {"predicate": passing}}


def _is_named_otherwise(header: str, names: Sequence[str]) -> Tree:
    """Matches a request whose `header` is there and has none of `names`."""
    if not names:
        return _present(header)
    listed = _matches(header, "|".join(re.escape(name) for name in names))
    return {"and_matcher": {"predicate": [_present(header), {"not_matcher": listed}]}}


def _present(header: str) -> Tree:
    return _matches(header, ".*")


def _matches(header: str, pattern: str) -> Tree:
    return {
        "single_predicate": {
            "input": extension("request-headers", _INPUT, {"header_name": header}),
            "value_match": {"safe_regex": {"google_re2": {}, "regex": pattern}},
        }
    }
