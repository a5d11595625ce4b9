"""Transports are tried on both event loops: what a loop promises is not what the other one does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

BOTH = {"test_serve_transports.py", "test_fastlane_transport.py"}
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, LoopFactory]:
    """The loops that a test runs on."""
    loops: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop}
    if item.path.name in BOTH:
        loops["uvloop"] = uvloop.new_event_loop
    return loops
