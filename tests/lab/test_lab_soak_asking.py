"""What the clients of a soak ask."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

from extproc.lab.soak.asking import LONE_MODEL, MODEL, MUTE, Ask, Leaving, plan


def test_every_kind_is_asked_and_every_moment_is_left_at() -> None:
    """In the shares that are set, and repeatably."""
    plans = [plan(Random(seed), 0.1) for seed in range(5000)]
    assert plans[:20] == [plan(Random(seed), 0.1) for seed in range(20)]
    assert {one.ask for one in plans} == set(Ask)
    left = Counter(one.leaving for one in plans)
    assert set(left) == {None, *Leaving}
    assert 350 < sum(left.values()) - left[None] < 650


def test_requests_are_what_they_are_called() -> None:
    """Each has its own model, header or method."""
    for seed in range(2000):
        one = plan(Random(seed), 0.2)
        headers = dict(one.headers)
        assert (one.leaving is not None) is (MUTE in headers)
        if one.ask is Ask.MODELS:
            assert (one.method, one.body) == ("GET", b"")
            continue
        body = json.loads(one.body)
        expected = {Ask.LONE: LONE_MODEL, Ask.UNKNOWN: body["model"]}.get(one.ask, MODEL)
        assert body["model"] == expected == headers.get("x-llmgw-model", expected)
        assert ("x-llmgw-residency" in headers) is (one.ask is Ask.RESTRICTED)
        assert ("x-session-id" in headers) is (one.ask is Ask.SESSION)
        assert body.get("stream", False) is one.is_stream
        assert one.expected == (404 if one.ask is Ask.UNKNOWN else 200)
