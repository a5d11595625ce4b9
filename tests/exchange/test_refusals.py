"""The refusals: each has its status, reason, code and whether a retry helps."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc.errors import Reason, Rejection
from extproc.exchange import refusals

# The first text that hypothesis draws reads its character tables, which may take a second.
LAW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

PERMANENT = [
    (refusals.model_missing(), 400, Reason.MODEL_MISSING, "model_missing"),
    (refusals.model_ambiguous("two models"), 400, Reason.MODEL_AMBIGUOUS, "model_ambiguous"),
    (refusals.model_invalid("is empty"), 400, Reason.MODEL_INVALID, "model_invalid"),
    (refusals.model_not_found("m"), 404, Reason.MODEL_NOT_FOUND, "model_not_found"),
    (refusals.body_invalid("No."), 400, Reason.BODY_INVALID, "body_invalid"),
    (refusals.body_too_large(9), 413, Reason.BODY_TOO_LARGE, "body_too_large"),
    (refusals.body_compressed(), 415, Reason.BODY_ENCODING, "body_encoding"),
    (refusals.media_type_unsupported(), 415, Reason.BODY_ENCODING, "body_encoding"),
    (refusals.method_not_allowed(), 405, Reason.METHOD_NOT_ALLOWED, "method_not_allowed"),
    (refusals.path_not_found(), 404, Reason.PATH_NOT_FOUND, "path_not_found"),
    (refusals.no_endpoint("m", None), 503, Reason.NO_ENDPOINT, "no_endpoint"),
    (refusals.restricted("m"), 503, Reason.RESTRICTED, "restricted"),
    (refusals.client_ambiguous(), 500, Reason.INTERNAL, "internal_error"),
]
PASSING = [
    (refusals.no_endpoint("m", 2.0), 503, Reason.NO_ENDPOINT, "no_endpoint"),
    (refusals.restricted("m", 2.0), 503, Reason.RESTRICTED, "restricted"),
    (refusals.saturated("m", 2.0), 429, Reason.SATURATED, "rate_limit_exceeded"),
    (refusals.upstream_failed(502, 2.0), 502, Reason.UPSTREAM_FAILED, "upstream_failed"),
    (refusals.upstream_failed(504), 504, Reason.UPSTREAM_FAILED, "upstream_failed"),
    (refusals.not_ready(), 503, Reason.NOT_READY, "not_ready"),
    (refusals.internal(), 500, Reason.INTERNAL, "internal_error"),
]


@pytest.mark.parametrize(("rejection", "status", "reason", "code"), PERMANENT)
def test_a_permanent_refusal_says_that_no_retry_helps(
    rejection: Rejection, status: int, reason: Reason, code: str
) -> None:
    """What the client or its operator must change is not retried."""
    assert (rejection.status, rejection.reason, rejection.code) == (status, reason, code)
    assert rejection.should_retry is False
    assert rejection.retry_after_seconds is None


@pytest.mark.parametrize(("rejection", "status", "reason", "code"), PASSING)
def test_a_passing_refusal_leaves_the_retry_to_the_client(
    rejection: Rejection, status: int, reason: Reason, code: str
) -> None:
    """What time can change forbids no retry."""
    assert (rejection.status, rejection.reason, rejection.code) == (status, reason, code)
    assert rejection.should_retry is None


@pytest.mark.parametrize("rejection", [entry[0] for entry in PERMANENT + PASSING])
def test_a_sentence_is_a_printable_sentence(rejection: Rejection) -> None:
    """Every message begins with a capital and ends with a full stop."""
    assert rejection.message.isprintable()
    assert rejection.message[0].isupper()
    assert rejection.message.endswith(".")


def test_the_models_own_mistakes_point_at_its_parameter() -> None:
    """SDKs show `param`; it is the model where the model is at fault."""
    for rejection, *_ in PERMANENT:
        is_about_model = rejection.reason.value.startswith("model_")
        assert (rejection.param == "model") is is_about_model


@LAW
@given(st.text(st.characters(exclude_categories=()), max_size=300))
def test_a_name_is_shown_cut_and_cleaned(name: str) -> None:
    """Whatever a client calls its model, the message quotes at most 100 printable characters."""
    text = refusals.shown(name)
    assert text == "" or text.isprintable()
    assert len(text) <= 103
    if name.isprintable() and len(name) <= 100:
        assert text == name
    for rejection in (
        refusals.model_not_found(name),
        refusals.no_endpoint(name, None),
        refusals.restricted(name),
        refusals.saturated(name, 1.0),
    ):
        assert text in rejection.message
        assert rejection.message.isprintable()
