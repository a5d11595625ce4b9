"""The gateway that the conversation tests talk to."""

from __future__ import annotations

import pytest
from world import CONFIG, World


@pytest.fixture
def world() -> World:
    """A gateway with three equal engines, one that calls its model otherwise, and outsiders."""
    return World(CONFIG)
