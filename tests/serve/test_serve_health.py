"""What the health service says of each name."""

from __future__ import annotations

import pytest

from extproc.serve.health import EXT_PROC, LIVENESS, READINESS, Health
from extproc.serve.lifecycle import Lifecycle, Timing


@pytest.mark.parametrize("name", ["", EXT_PROC, READINESS])
def test_readiness_follows_the_lifecycle(name: str) -> None:
    """Ready between the start and the first word of an end."""
    lifecycle = Lifecycle(Timing())
    health = Health(lifecycle)
    assert health.of(name) is False
    lifecycle.started()
    assert health.of(name) is True
    lifecycle.terminate(0.0)
    assert health.of(name) is False


def test_liveness_lasts_until_the_end() -> None:
    """Starting and draining processes are alive; nobody should kill them."""
    lifecycle = Lifecycle(Timing())
    health = Health(lifecycle)
    assert health.of(LIVENESS) is True
    lifecycle.started()
    lifecycle.terminate(0.0)
    assert health.of(LIVENESS) is True
    lifecycle.drained()
    assert health.of(LIVENESS) is False


def test_an_unknown_name_is_unknown() -> None:
    """A name that is not served is neither well nor ill."""
    assert Health(Lifecycle(Timing())).of("other.Service") is None


def test_a_change_is_told() -> None:
    """Watchers hear of every change until they leave."""
    lifecycle = Lifecycle(Timing())
    seen: list[bool | None] = []
    health = Health(lifecycle)
    forget = health.watch(lambda: seen.append(health.of(READINESS)))
    lifecycle.started()
    lifecycle.terminate(0.0)
    forget()
    lifecycle.drained()
    assert seen == [True, False]
