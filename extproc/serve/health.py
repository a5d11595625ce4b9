"""What the gRPC health service says of each service name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from extproc.serve.lifecycle import Lifecycle

EXT_PROC: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS: Final = "liveness"
READINESS: Final = "readiness"

# The empty name asks for the server as a whole.
_READY_NAMES: Final = frozenset({"", EXT_PROC, READINESS})


class Health:
    """Answers from the lifecycle: live until it has stopped, ready while it takes requests."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    def of(self, service: str) -> bool | None:
        """Whether `service` is well; None for a name that is not served."""
        if service == LIVENESS:
            return self._lifecycle.is_alive
        return self._lifecycle.is_ready if service in _READY_NAMES else None

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """`changed` is called after every change, until the returned function is."""
        return self._lifecycle.watch(changed)
