"""The numbers, names and rules that the documentation states are those of the code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import Final

import pytest
import yaml

from extproc import headers
from extproc.config import read
from extproc.config.parse import parse
from extproc.config.values import Config, Federation
from extproc.exchange import ledger, outcome
from extproc.exchange.names import MAX_NAME_CHARS
from extproc.exchange.outcome import Flag, Outcome, backpressure_seconds, classify
from extproc.routing import ring, scorers
from extproc.routing.breaker import Verdict
from extproc.routing.demotion import DemotionSettings
from extproc.routing.filters import Filter
from extproc.routing.policy import NOBODY, is_cluster_id, residency_label
from extproc.routing.registry import RegistrySettings
from extproc.routing.sessions import Sessions
from extproc.routing.strategy import BUILT_IN, Picker, Scorer, Strategy
from extproc.serve import mutations
from extproc.serve.lifecycle import Timing
from extproc.xds.render import render

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
Table = Sequence[Mapping[str, str]]


def text(page: str) -> str:
    """A page of the documentation."""
    return (DOCS / page).read_text(encoding="utf-8")


def tables(page: str) -> Mapping[str, Table]:
    """The table below each heading of a page that has one, as rows by column."""
    found: dict[str, Table] = {}
    for part in re.split(r"^##+ ", text(page), flags=re.MULTILINE)[1:]:
        lines = [line for line in part.splitlines() if line.startswith("|")]
        if lines:
            head, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
            found[part.splitlines()[0]] = [dict(zip(head, row, strict=True)) for row in rows]
    return found


def code(cell: str) -> list[str]:
    """What a cell shows as code."""
    return re.findall(r"`([^`]+)`", cell)


def number(cell: str) -> float:
    """The first number of a cell, KiB and MiB taken in."""
    match = re.search(r"(\d[\d,]*(?:\.\d+)?)(?: (KiB|MiB))?", cell)
    assert match is not None, cell
    scale = {"KiB": 1024, "MiB": 1024 * 1024, None: 1}[match[2]]
    return float(match[1].replace(",", "")) * scale


# Headers.


def header_rows(column: str) -> Iterator[tuple[str, str]]:
    """Every header that has such a column, with what stands there."""
    for table in tables("reference/headers.md").values():
        for row in table:
            if "header" in row and column in row:
                yield code(row["header"])[0], row[column]


def test_every_header_of_the_code_is_in_the_tables_and_no_other() -> None:
    """Each in one row, aliases included."""
    known: set[str] = set()
    for name, value in vars(headers).items():
        if (
            name.isupper()
            and not name.endswith(("_NAMESPACE", "_KEY", "_TAG"))
            and "BODY_" not in name
        ):
            known.update((value,) if isinstance(value, str) else value)
    assert sorted(name for name, _ in header_rows("meaning")) == sorted(known)


def test_who_strips_a_header_is_as_in_the_code() -> None:
    """At the edge and by the route."""
    at_the_edge = {
        name
        for name, cell in header_rows("a client may send it")
        if cell == "no: stripped at the edge"
    }
    assert at_the_edge == set(headers.STRIPPED_AT_THE_EDGE)
    by_the_route = {
        name for name, cell in header_rows("towards the endpoint") if cell == "removed by the route"
    }
    assert by_the_route == set(headers.REMOVED_BY_THE_ROUTE)


def test_what_endpoints_do_not_see_is_as_rendered() -> None:
    """What the cluster of a provider removes, and that of an engine."""
    tree = rendered()
    removed = {kind: removals(tree, f"ep-{kind}") for kind in ("engine", "external")}

    def is_removed(kind: str, name: str) -> bool:
        names, prefixes = removed[kind]
        return name in names or name.startswith(prefixes)

    for name, cell in header_rows("towards the endpoint"):
        if cell.startswith(("removed for all", "likewise")):
            assert is_removed("engine", name), name
            assert is_removed("external", name), name
        elif cell == "removed for providers":
            assert not is_removed("engine", name), name
            assert is_removed("external", name), name
        elif cell == "passed on":
            assert not is_removed("external", name), name


def test_the_metadata_is_as_in_the_code() -> None:
    """Every namespace, none besides."""
    documented = [
        code(row["namespace"])[0] for row in tables("reference/headers.md")["Dynamic metadata"]
    ]
    known = {value for name, value in vars(headers).items() if name.endswith("_NAMESPACE")}
    assert set(documented) == known


def removals(tree: object, cluster: str) -> tuple[set[str], tuple[str, ...]]:
    """The names and the prefixes of headers that a cluster removes."""
    clusters = at(tree, "static_resources", "clusters")
    assert isinstance(clusters, list)
    (found,) = [each for each in clusters if each["name"] == cluster]
    (options,) = found["typed_extension_protocol_options"].values()
    mutation = options["http_filters"][0]["typed_config"]["mutations"]["request_mutations"]
    return (
        {each["remove"] for each in mutation if "remove" in each},
        tuple(
            each["remove_on_match"]["key_matcher"]["prefix"]
            for each in mutation
            if "remove_on_match" in each
        ),
    )


# Outcomes.

FLAG_NAMES: Final = {
    short: Flag[name]
    for name, short in re.findall(
        r"^    ([A-Z_]+) = 1 << \d+  # ([A-Z]+)$", inspect.getsource(outcome), flags=re.MULTILINE
    )
}


def statuses(cell: str, used: set[int]) -> list[int]:
    """The statuses that a cell names; "other 4xx" are those that no earlier row has."""
    if cell in {"any", "an answer that Envoy made itself"}:
        return [200, 404, 429, 500, 503]
    if cell == "below 400":
        return [200, 201, 204, 301, 308]
    if cell == "not 504":
        return [200, 408, 503]
    others = re.fullmatch(r"other (\d)xx", cell)
    if others is not None:
        first = int(others[1]) * 100
        return sorted(set(range(first, first + 100)) - used)
    return [int(each) for each in re.findall(r"\d{3}", cell)]


def test_the_outcome_rules_are_those_of_the_code() -> None:
    """Row by row: every flag alone, and every status that the row speaks of."""
    rows = tables("reference/outcomes.md")["Rules"]
    named = {flag for row in rows for flag in code(row["flag"])}
    assert named <= set(FLAG_NAMES)
    used: set[int] = set()
    for row in rows:
        shown = code(row["flag"])
        if row["flag"].startswith("any other but"):
            flags = [flag for name, flag in FLAG_NAMES.items() if name not in named]
        elif row["flag"].startswith("none"):
            flags = [Flag(0), *(FLAG_NAMES[name] for name in shown)]
        else:
            flags = [FLAG_NAMES[name] for name in shown]
        own = row["status"] == "an answer that Envoy made itself"
        retry_after = "3" if "with `retry-after`" in row["status"] else None
        expected = Outcome(code(row["outcome"])[0])
        wanted = statuses(row["status"], used)
        for flag in flags:
            for status in wanted:
                details = "request_payload_too_large" if own else "via_upstream"
                assert classify(status, flag, details, retry_after) is expected, (row, status)
        verdict = ledger._VERDICTS.get(expected, Verdict.IGNORED)
        assert verdict == (row["breaker"] if row["breaker"] in set(Verdict) else Verdict.IGNORED)
        if row["flag"].startswith("none") and not own and retry_after is None:
            used.update(wanted)


def test_every_outcome_has_a_rule() -> None:
    """And there is no other."""
    rows = tables("reference/outcomes.md")["Rules"]
    assert {code(row["outcome"])[0] for row in rows} == set(Outcome)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7), ("0.5", 0.5), ("0", 0), ("Fri, 31 Dec 1999 23:59:59 GMT", 2), ("-1", 2), ("x", 2)],
)
def test_a_retry_after_reads_as_the_page_says(value: str, seconds: float) -> None:
    """Seconds; 2 for what is none."""
    assert backpressure_seconds(value) == seconds


# Limits.


def rendered() -> object:
    """Envoy's configuration with the defaults, an engine and a provider."""
    config = parse(
        "endpoints:\n"
        "- {id: engine, url: 'http://10.0.0.1:8000', models: [m]}\n"
        "- {id: external, url: 'https://10.0.0.2', kind: external, models: [n]}\n"
    )
    return yaml.safe_load(render(config))


def at(tree: object, *path: str | int) -> object:
    """What is at `path` of a tree."""
    return reduce(lambda found, step: found[step], path, tree)  # type: ignore[index]  # a tree of YAML, whose shape the caller knows


def limit_rows() -> Mapping[str, Mapping[str, str]]:
    """Every row of the page by what it limits."""
    return {row["limit"]: row for table in tables("reference/limits.md").values() for row in table}


def test_configurable_limits_have_their_defaults() -> None:
    """Every row whose limit is a key of the configuration."""
    defaults = Config("llmgw", (), ())
    compared = 0
    for row in limit_rows().values():
        (key,) = code(row["where to change it"]) or [""]
        if not key or "[]" in key or "and 1 MiB" in row["default"]:
            continue
        value: object = defaults
        for part in key.split("."):
            value = getattr(value, part)
        assert number(row["default"]) == value, row["limit"]
        compared += 1
    assert compared > 15


MANAGER: Final = (
    *("static_resources", "listeners", 0, "filter_chains", 0, "filters", 0, "typed_config"),
)
RENDERED: Final[Mapping[str, tuple[str | int, ...]]] = {
    "request headers, all": (*MANAGER, "max_request_headers_kb"),
    "request headers, number": (*MANAGER, "common_http_protocol_options", "max_headers_count"),
    "time for the headers to arrive": (*MANAGER, "request_headers_timeout"),
    "idle client connection": (*MANAGER, "common_http_protocol_options", "idle_timeout"),
    "client connections": (
        *("overload_manager", "resource_monitors", 0, "typed_config"),
        "max_active_downstream_connections",
    ),
}


@pytest.mark.parametrize("limit", RENDERED)
def test_limits_of_envoy_are_as_rendered(limit: str) -> None:
    """Those of the listener."""
    value = str(at(rendered(), *RENDERED[limit]))
    unit = "KiB" if limit == "request headers, all" else ""
    assert number(limit_rows()[limit]["default"]) == number(f"{value.rstrip('s')} {unit}")


def test_limits_of_clusters_are_as_rendered() -> None:
    """Connect and idle times of engines and others, and how many requests."""
    clusters = at(rendered(), "static_resources", "clusters")
    assert isinstance(clusters, list)
    by_name = {cluster["name"]: cluster for cluster in clusters}
    rows = limit_rows()
    for name, who in (("ep-engine", "an engine"), ("ep-external", "a provider or peer")):
        cluster = by_name[name]
        (options,) = cluster["typed_extension_protocol_options"].values()
        idle = options["common_http_protocol_options"]["idle_timeout"]
        assert number(rows[f"idle connection to {who}"]["default"]) == number(idle)
        assert number(rows[f"connect to {who}"]["default"]) == number(cluster["connect_timeout"])
        (limits,) = cluster["circuit_breakers"]["thresholds"]
        wanted = number(rows["requests, waiting requests and connections per endpoint"]["default"])
        for key in ("max_connections", "max_pending_requests", "max_requests"):
            assert limits[key] == wanted


def test_fixed_limits_are_those_of_the_code() -> None:
    """Where the code has a name for them."""
    rows = limit_rows()
    demotion = DemotionSettings()
    sessions = inspect.signature(Sessions).parameters
    for limit, value in {
        "model name": MAX_NAME_CHARS,
        "end of the service: still takes requests": Timing().notice_seconds,
        "pause after a 429 that does not say how long": outcome.DEFAULT_BACKPRESSURE_SECONDS,
        "quarantine": ledger.QUARANTINE_SECONDS,
        "wait for Envoy's log before a verdict is final": ledger.GRACE_SECONDS,
        "refusals in a row that demote": demotion.threshold,
        "age of the other endpoint's good answer": demotion.evidence_seconds,
        "probe of a demoted endpoint": demotion.probe_seconds,
        "slow start": RegistrySettings().slow_start_seconds,
        "remembered sessions": sessions["max_entries"].default,
        "memory of a session": sessions["ttl_seconds"].default,
        "`llmgw.yaml`": read.MAX_FILE_BYTES,
        "a secret's file": read.MAX_SECRET_BYTES,
        "header changes in one reply": mutations.MAX_HEADERS,
    }.items():
        assert number(rows[limit]["default"]) == value, limit
    changes = rows["header changes in one reply"]["default"]
    assert changes == (
        f"{mutations.MAX_HEADERS}, {mutations.MAX_TOTAL_BYTES // 1024} KiB in all, "
        f"{mutations.MAX_VALUE_BYTES // 1024} KiB each"
    )
    labels = int(number(rows["residency label"]["default"]))
    assert residency_label("a" * labels) != NOBODY == residency_label("a" * (labels + 1))
    ids = int(number(rows["a gateway's id (`cluster_id`)"]["default"]))
    assert is_cluster_id("a" * ids)
    assert not is_cluster_id("a" * (ids + 1))
    hops = rows["gateways that a request has passed through"]
    assert number(hops["default"]) == Federation().max_hops


# Routing.


def test_filters_are_those_of_the_code_in_their_order() -> None:
    """But for the one that no request asks for."""
    documented = [code(row["filter"])[0] for row in tables("routing.md")["Filters"]]
    assert documented == [each.value for each in Filter if each is not Filter.KIND]


def test_scorers_pickers_and_strategies_are_those_of_the_code() -> None:
    """Names, weights, knees and the picker."""
    found = tables("routing.md")
    assert [code(row["scorer"])[0] for row in found["Scores"]] == list(Scorer)
    assert [code(row["picker"])[0] for row in found["Pickers"]] == list(Picker)
    strategies = {code(row["strategy"])[0]: row for row in found["Strategies"]}
    assert strategies.keys() == BUILT_IN.keys()
    for name, row in strategies.items():
        strategy = BUILT_IN[name]
        weights = {scorer: float(row[scorer]) for scorer in Scorer}
        assert weights == asdict(strategy.weights)
        assert float(row["in-flight knee"]) == strategy.inflight_knee
        assert code(row["picker"]) == [strategy.picker]


def test_formulas_have_the_numbers_of_the_code() -> None:
    """The knees of `chat`, and what else stands in a formula or beside it."""
    chat = Strategy("chat")
    page = text("routing.md")
    for said in (
        f"1 / (1 + q / {chat.queue_knee:g})",
        f"1 / (1 + x / {chat.inflight_knee:g})",
        f"1 / (1 + W / {chat.load_knee_seconds:g} s)",
        f"1 up to a usage of {chat.kv_knee_ratio:g}, then linear to 0 at {chat.kv_ceiling_ratio:g}",
        f"content-length / 4 / {scorers.TOKENS_PER_REQUEST:g}",
        f"or {scorers.UNKNOWN:g} where none",
        f"that mean less {scorers.STALE_PENALTY:g}",
        f"the newest counts {RegistrySettings().drain_smoothing_ratio:g}",
        f"from {scorers.SLOWEST_START_RATIO:g} to 1",
        f"`temperature` ({chat.temperature:g})",
        f"({ring.VIRTUAL_NODES} points per endpoint)",
        f"which scores {scorers.SECOND_TARGET:g}",
        f"max(1, {chat.session_bound_factor:g} * mean in-flight * share)",
        f"* share) + {chat.session_bound_slack:g}",
    ):
        assert said in " ".join(page.split()).replace("\N{MULTIPLICATION SIGN}", "*"), said
    for name in headers.SESSION:
        assert f"`{name}`" in page
