"""Envoy's own answers: which are put into an envelope, and what they say."""

from __future__ import annotations

import json
import re

from extproc import headers
from extproc.paths import Flavour
from extproc.xds.local_replies import answer, local_replies, local_reply_config

LIMIT = 1000


def test_an_answer_is_what_the_service_would_say() -> None:
    """In the envelope of the flavour, with the hints that SDKs read."""
    (told,) = [one.told for one in local_replies(LIMIT) if one.told.status == 413]
    openai = answer(told, Flavour.OPENAI)
    assert str(LIMIT) in json.loads(openai.body)["error"]["message"]
    assert dict(openai.headers) == {
        "content-type": "application/json",
        headers.REASON: "body_too_large",
        headers.SHOULD_RETRY: "false",
    }
    anthropic = json.loads(answer(told, Flavour.ANTHROPIC).body)
    assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "request_too_large")


def test_no_answer_is_matched_by_status_or_flag_alone() -> None:
    """Every expression asks for Envoy's own word."""
    mappers = local_reply_config(LIMIT)["mappers"]
    assert isinstance(mappers, list)
    for mapper in mappers:
        expression = mapper["filter"]["extension_filter"]["typed_config"]["expression"]
        assert "response.code_details" in expression
        assert set(mapper["filter"]) == {"extension_filter"}


def test_the_words_of_the_service_are_not_among_envoys() -> None:
    """What it gives as details is one of its reasons, or plain words."""
    words = {word for one in local_replies(LIMIT) for word in one.words}
    beginnings = tuple(start for one in local_replies(LIMIT) for start in one.beginnings)
    for own in (*(one.told.reason.value for one in local_replies(LIMIT)), "answered", "options"):
        assert own not in words
        assert not own.startswith(beginnings)


def test_the_words_can_stand_in_an_expression() -> None:
    """They are put between quotes as they are."""
    for one in local_replies(LIMIT):
        for text in (*one.words, *one.beginnings, one.path or ""):
            assert re.fullmatch(r"[A-Za-z0-9_./{}-]*", text)


def test_a_percent_sign_is_text() -> None:
    """Envoy would read it as a command."""
    mappers = local_reply_config(LIMIT)["mappers"]
    assert isinstance(mappers, list)
    for mapper in mappers:
        text = mapper["body_format_override"]["text_format_source"]["inline_string"]
        assert "%" not in text.replace("%%", "")
