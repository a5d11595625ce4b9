"""The rules that the cases guard, each with the smallest edit that breaks it and a test to notice.

An edit is exact text that stands in its file once; a product that has changed since makes the rule
stale, which is an error and not a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class Edit:
    """`new` instead of `old` in a file of the package."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: what is broken, the case that says so, the test under `tests/`, and the edits."""

    name: str
    case: int
    test: str
    edits: tuple[Edit, ...]

    def has(self, word: str) -> bool:
        """Whether it is about `word`: its case, or a part of its name or test."""
        return word == str(self.case) or word in self.name or word in self.test

    def complaints(self, root: Path) -> list[str]:
        """Why it cannot be tried on the tree at `root`; empty if it can."""
        found = []
        for edit in self.edits:
            count = (root / "extproc" / edit.file).read_text().count(edit.old)
            if count != 1:
                found.append(f"{self.name}: {count} times in {edit.file}: {edit.old!r}")
        file, _, rest = self.test.partition("::")
        function = rest.partition("[")[0]
        path = root / "tests" / file
        if not path.is_file() or f"def {function}(" not in path.read_text():
            found.append(f"{self.name}: there is no test {self.test}")
        return found

    def break_in(self, root: Path) -> None:
        """The tree at `root` has the edits."""
        for edit in self.edits:
            file = root / "extproc" / edit.file
            text = file.read_text()
            assert text.count(edit.old) == 1, edit
            file.write_text(text.replace(edit.old, edit.new))


def _one(file: str, old: str, new: str) -> tuple[Edit, ...]:
    return (Edit(file, old, new),)


RULES: Final = (
    # Envoy and the service.
    Rule(
        "the route cache is cleared with the decision",
        1,
        "cases/test_case_01_route_follows_the_decision.py"
        "::test_the_request_is_where_the_log_says[cluster-header-post, model in a header]",
        _one(
            "serve/replies.py",
            "number(CommonResponse.CLEAR_ROUTE_CACHE_FIELD_NUMBER, 1)",
            "number(CommonResponse.CLEAR_ROUTE_CACHE_FIELD_NUMBER, 0)",
        ),
    ),
    Rule(
        "headers are set by their raw value",
        2,
        "cases/test_case_02_no_header_is_empty.py::test_what_an_endpoint_gets[peer, in a header]",
        _one("serve/replies.py", "tag(HeaderValue.RAW_VALUE_FIELD_NUMBER)", "tag(2)"),
    ),
    Rule(
        "of two hop lines none is chosen",
        3,
        "cases/test_case_03_one_value_and_ours.py::test_two_hop_lines_are_refused"
        "[priority-group-1]",
        _one("routing/policy.py", "    if len(values) > 1:\n", "    if False:\n"),
    ),
    Rule(
        "a client's cluster header is stripped at the edge",
        4,
        "cases/test_case_04_clients_choose_no_endpoint.py::test_the_target_is_named"
        "[down-cluster-header-1-header]",
        _one(
            "headers.py",
            "STRIPPED_AT_THE_EDGE: Final = (CLIENT, CLUSTER, ",
            "STRIPPED_AT_THE_EDGE: Final = (CLIENT, ",
        ),
    ),
    Rule(
        "only listed paths reach an engine",
        4,
        "cases/test_case_04_clients_choose_no_endpoint.py::test_paths_off_the_list"
        "[down-priority-group]",
        _one("xds/routes.py", "inference = _paths(listed)", 'inference: Tree = {"prefix": "/"}'),
    ),
    Rule(
        "a body beside a model header is not held back",
        5,
        "cases/test_case_05_large_bodies.py"
        "::test_a_body_beside_a_model_header_is_never_held_back[Framing.LENGTH]",
        _one(
            "xds/http_filters.py", '"request_body_mode": "NONE"', '"request_body_mode": "BUFFERED"'
        ),
    ),
    Rule(
        "the body limit is exact",
        6,
        "cases/test_case_06_one_limit_for_all.py::test_the_limit_is_exact_for_every_reader[1048577]",
        _one("exchange/body.py", "if len(body) > limit:", "if len(body) >= limit:"),
    ),
    Rule(
        "the largest message is the body limit, not gRPC's default",
        6,
        "cases/test_case_06_one_limit_for_all.py::test_a_body_up_to_the_limit"
        "[Reader.SERVICE-Framing.LENGTH-8000000]",
        _one(
            "serve/fastlane/transport.py",
            "message_limit_bytes=settings.body_limit_bytes + _MESSAGE_MARGIN_BYTES",
            "message_limit_bytes=4 * 1024 * 1024",
        ),
    ),
    Rule(
        "trailers are asked for with the body",
        9,
        "cases/test_case_09_bodies_that_end_in_trailers.py::test_what_is_missing_is_said",
        _one(
            "serve/replies.py",
            "request_trailer_mode=ProcessingMode.SEND",
            "request_trailer_mode=ProcessingMode.SKIP",
        ),
    ),
    Rule(
        "an upgrade's body is not waited for",
        10,
        "cases/test_case_10_upgrades_do_not_hang.py::test_a_post_with_an_upgrade"
        "[websocket-body-Framing.LENGTH]",
        (
            Edit(
                "xds/routes.py", "if not any(entry.may_upgrade for entry in entries):", "if False:"
            ),
            Edit("xds/routes.py", "        _absent(_UPGRADE),\n", ""),
        ),
    ),
    Rule(
        "an empty body is answered, not waited for",
        11,
        "cases/test_case_11_requests_without_a_body.py::test_the_service_is_sent_an_empty_body",
        _one("exchange/body.py", "    if not body:\n        return refusals.model_missing()\n", ""),
    ),
    Rule(
        "bytes that are no text are refused, and are no defect",
        13,
        "cases/test_case_13_bytes_that_are_not_utf8.py::test_a_model_in_a_form[not UTF-8]",
        _one("exchange/names.py", "    except UnicodeDecodeError:\n", "    except KeyError:\n"),
    ),
    Rule(
        "a cancelled stream is an end like any other",
        14,
        "cases/test_case_14_a_reset_is_no_error.py::test_good_requests_and_aborts[abrupt]",
        _one(
            "exchange/exchange.py",
            "if owes_reply and state is State.ROUTED:",
            "if state is State.ROUTED or state is State.ANSWERED:",
        ),
    ),
    Rule(
        "failing open stays within our own engines",
        15,
        "cases/test_case_15_the_service_is_down.py::test_nothing_passes_that_should_not[killed]",
        _one(
            "xds/pools.py",
            "if endpoint.kind is Kind.ENGINE\n",
            "if endpoint.kind is not Kind.PEER\n",
        ),
    ),
    Rule(
        "a restricted request does not fail open",
        15,
        "cases/test_case_15_the_service_is_down.py::test_nothing_passes_that_should_not[killed]",
        _one("xds/routes.py", "            *_restricted(config, inference, closed),\n", ""),
    ),
    Rule(
        "429 is tried elsewhere",
        16,
        "cases/test_case_16_a_retry_is_the_same_request.py::test_three_attempts_at_most[429]",
        _one("xds/routes.py", "RETRIABLE: Final = (429, ", "RETRIABLE: Final = ("),
    ),
    Rule(
        "each failed attempt is charged to the endpoint that made it",
        16,
        "cases/test_case_16_a_retry_is_the_same_request.py::test_three_attempts_at_most[429]",
        _one(
            "exchange/ledger.py",
            "    if cluster in flight.clusters:\n        return flight.clusters.index(cluster)\n",
            "    if cluster in flight.clusters:\n        return 0\n",
        ),
    ),
    Rule(
        "a client has three attempts at most",
        16,
        "cases/test_case_16_a_retry_is_the_same_request.py::test_three_attempts_at_most[503]",
        _one(
            "xds/routes.py",
            '"num_retries": max(0, config.max_attempts - 1)',
            '"num_retries": max(0, config.max_attempts + 1)',
        ),
    ),
    Rule(
        "only truncated JSON is called truncated",
        17,
        "cases/test_case_17_the_model_is_found_anywhere.py::test_behind_three_megabytes",
        _one(
            "exchange/body.py",
            "body[skipped:] if skipped else body)",
            "body[:65536])",
        ),
    ),
    Rule(
        "a compressed body is not read",
        18,
        "cases/test_case_18_compressed_bodies.py::test_where_the_body_has_to_be_read"
        "[gzip-Framing.LENGTH]",
        _one(
            "exchange/body.py",
            'content_encoding.strip().lower() not in {"", "identity"}',
            'content_encoding.strip().lower() not in {"", "identity", "gzip"}',
        ),
    ),
    Rule(
        "two models in a body that the service reads are refused",
        19,
        "cases/test_case_19_one_answer_to_which_model.py"
        "::test_two_are_refused_where_the_service_reads[plain]",
        _one("exchange/body.py", "if _is_repeated(data, start):", "if False:"),
    ),
    Rule(
        "two model headers are refused",
        19,
        "cases/test_case_19_one_answer_to_which_model.py::test_two_model_headers",
        _one(
            "exchange/facts.py",
            "            if model_header is not None:\n",
            "            if False:\n",
        ),
    ),
    Rule(
        "no route has Envoy's time limit for answers",
        21,
        "cases/test_case_21_long_answers_are_whole.py::test_a_slow_stream_for_20_seconds",
        _one("xds/routes.py", '"timeout": "0s"', '"timeout": "5s"'),
    ),
    Rule(
        "the service never sees an answer's body",
        22,
        "cases/test_case_22_tokens_are_not_held_back.py::test_each_token_comes_when_it_is_made",
        _one(
            "xds/http_filters.py",
            '"response_body_mode": "NONE"',
            '"response_body_mode": "BUFFERED"',
        ),
    ),
    Rule(
        "a stream that is cut is a failure",
        23,
        "cases/test_case_23_every_answer_ends.py::test_an_ending[cut]",
        _one("exchange/outcome.py", "    | Flag.UPSTREAM_PROTOCOL_ERROR\n", ""),
    ),
    # What is counted.
    Rule(
        "a request counts until its end, not until its headers",
        24,
        "cases/test_case_24_inflight_is_exact.py::test_a_stream_counts_all_along",
        _one(
            "exchange/ledger.py",
            "        flight.answered = final\n",
            "        flight.answered = final\n        flight.grant.end(now)\n",
        ),
    ),
    Rule(
        "the count moves to the endpoint that has the request",
        24,
        "cases/test_case_24_inflight_is_exact.py::test_the_count_moves_with_the_request",
        _one(
            "exchange/ledger.py",
            "            self._reach(flight, following, now)\n",
            "            pass\n",
        ),
    ),
    Rule(
        "a client's mistake is no failure",
        26,
        "cases/test_case_26_client_errors_open_nothing.py::test_prompts_that_are_too_long",
        _one(
            "exchange/outcome.py",
            "Outcome.CLIENT_ERROR if status < 500 else Outcome.FAILURE",
            "Outcome.FAILURE",
        ),
    ),
    Rule(
        "a mistake as a probe does not close the breaker",
        26,
        "cases/test_case_26_client_errors_open_nothing.py::test_a_mistake_as_a_probe[400]",
        _one(
            "exchange/ledger.py",
            "{Outcome.SUCCESS: Verdict.SUCCESS, ",
            "{Outcome.SUCCESS: Verdict.SUCCESS, Outcome.CLIENT_ERROR: Verdict.SUCCESS, ",
        ),
    ),
    Rule(
        "who refuses what another serves is left out",
        26,
        "cases/test_case_26_client_errors_open_nothing.py::test_a_wrong_key_draws_no_traffic",
        _one("routing/registry.py", "if row >= rule.threshold and", "if False and"),
    ),
    Rule(
        "retry-after is a floor",
        27,
        "cases/test_case_27_a_full_queue_is_no_death.py::test_the_later_word_counts",
        _one(
            "exchange/outcome.py",
            "return DEFAULT_BACKPRESSURE_SECONDS if seconds is None else seconds",
            "return min(0.2, DEFAULT_BACKPRESSURE_SECONDS if seconds is None else seconds)",
        ),
    ),
    Rule(
        "a full queue is no failure",
        27,
        "cases/test_case_27_a_full_queue_is_no_death.py::test_another_endpoint_has_room[429]",
        _one(
            "exchange/outcome.py",
            "        return Outcome.BACKPRESSURE\n",
            "        return Outcome.FAILURE\n",
        ),
    ),
    Rule(
        "a caller who leaves is no failure",
        28,
        "cases/test_case_28_callers_who_leave.py::test_callers_hang_up[mid-stream-rst]",
        _one(
            "exchange/outcome.py",
            "        return Outcome.ABORTED\n",
            "        return Outcome.FAILURE\n",
        ),
    ),
    Rule(
        "headers that do not come in time are a failure",
        28,
        "cases/test_case_28_callers_who_leave.py::test_the_only_endpoint_without_headers",
        _one("exchange/outcome.py", "    | Flag.UPSTREAM_TIMEOUT\n", ""),
    ),
    Rule(
        "a probe's place is lent for a time",
        29,
        "cases/test_case_29_probes_never_wedge.py::test_it_hangs",
        _one(
            "routing/breaker.py",
            "leases[lease] = now + (lease_seconds if 0 < lease_seconds < longest else longest)",
            "leases[lease] = now + 1e9",
        ),
    ),
    Rule(
        "a probe that is given up frees its place",
        26,
        "cases/test_case_26_client_errors_open_nothing.py::test_a_mistake_as_a_probe[401]",
        _one("routing/breaker.py", "self._leases.pop(permit.lease, None)", "pass"),
    ),
    Rule(
        "half-open lets few in",
        30,
        "cases/test_case_30_few_probes_at_a_time.py::test_the_only_endpoint[1-one-1]",
        (
            Edit(
                "routing/breaker.py",
                "if len(leases) >= max(1, self.settings.probes):",
                "if False:",
            ),
            Edit(
                "routing/breaker.py",
                "return max(0, max(1, self.settings.probes) - leased)",
                "return 1 + leased",
            ),
        ),
    ),
    Rule(
        "an endpoint that refuses connections has failed",
        27,
        "cases/test_case_27_a_full_queue_is_no_death.py::test_envoys_own_503_is_a_failure",
        _one("exchange/outcome.py", "    | Flag.UPSTREAM_CONNECTION_FAILURE\n", ""),
    ),
    Rule(
        "a cluster that Envoy does not know is no failure",
        31,
        "cases/test_case_31_no_connection_is_a_failure.py::test_a_cluster_that_envoy_does_not_know",
        _one(
            "exchange/outcome.py",
            "    if flags & _NO_CLUSTER:\n        return Outcome.QUARANTINED\n",
            "    if flags & _NO_CLUSTER:\n        return Outcome.FAILURE\n",
        ),
    ),
    Rule(
        "Envoy's own answers come in the envelope",
        16,
        "cases/test_case_16_a_retry_is_the_same_request.py::test_three_attempts_at_most[refused]",
        _one(
            "xds/local_replies.py",
            'beginnings=("upstream_reset_before_response_started",)',
            'beginnings=("nothing",)',
        ),
    ),
    Rule(
        "who refuses for now says when to come again",
        33,
        "cases/test_case_33_when_to_come_back.py::test_the_first_moment",
        _one(
            "exchange/exchange.py",
            "return refusals.no_endpoint(model, retry_after_seconds)",
            "return refusals.no_endpoint(model, None)",
        ),
    ),
    Rule(
        "an attempt has a deadline for its headers",
        34,
        "cases/test_case_34_stuck_is_not_busy.py::test_there_is_no_other",
        _one(
            "xds/routes.py",
            '"per_try_timeout": seconds(config.listener.header_deadline_seconds)',
            '"per_try_timeout": "600s"',
        ),
    ),
    # What engines say of themselves.
    Rule(
        "what a page does not say is unknown, not 0",
        36,
        "cases/test_case_36_unknown_is_not_idle.py::test_it_is_shown_as_unknown",
        _one(
            "engines/contract.py",
            "        if plan.is_mandatory:\n",
            "        if plan.is_mandatory:\n            return 0.0\n        if False:\n",
        ),
    ),
    Rule(
        "the newest name of a metric wins",
        37,
        "cases/test_case_37_names_change.py::test_every_version",
        _one(
            "engines/contract.py",
            "        for way in plan.ways:\n            values =",
            "        for way in reversed(plan.ways):\n            values =",
        ),
    ),
    Rule(
        "ranks are added up, none of them counts for all",
        38,
        "cases/test_case_38_several_series.py::test_every_layout_in_every_order",
        _one("engines/series.py", "return sum(sorted(values))", "return values[-1]"),
    ),
    Rule(
        "old numbers are not believed",
        41,
        "cases/test_case_41_old_numbers.py::test_an_idle_page_of_long_ago_draws_nobody",
        _one(
            "routing/live.py",
            "self.scraped_at is None or now - self.scraped_at > stale_after_seconds",
            "self.scraped_at is None",
        ),
    ),
    Rule(
        "what was sent on counts at once",
        43,
        "cases/test_case_43_a_burst_is_spread.py::test_one_burst_after_the_other",
        _one(
            "routing/live.py",
            "        self.last_used = now\n"
            "        for dirty, position in self.watchers:\n"
            "            dirty.add(position)\n",
            "        self.last_used = now\n",
        ),
    ),
    Rule(
        "a session stays where it is",
        44,
        "cases/test_case_44_sessions_stay.py::test_they_stay",
        _one(
            "routing/scheduler.py",
            "            if query.session is not None:\n",
            "            if False:\n",
        ),
    ),
    Rule(
        "a key stays with its endpoint",
        53,
        "e2e/test_e2e_headers.py::test_no_failover_carries_a_key_elsewhere[k1]",
        _one(
            "xds/upstream_filters.py",
            "removals = [*_credentials(config), *_private(kind, config)]",
            "removals = [*_private(kind, config)]",
        ),
    ),
)
