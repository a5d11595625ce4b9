"""How long the event loop is kept from its work.

A stall longer than Envoy's message timeout makes every waiting request fail open, so it is measured
all the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

_PERIOD_SECONDS: Final = 0.05


async def watch_stalls(
    clock: Callable[[], float],
    stalled: Callable[[float], None],
    *,
    period_seconds: float = _PERIOD_SECONDS,
) -> None:
    """Until it is cancelled, `stalled` hears how late each wake-up was, in seconds."""
    while True:
        due = clock() + period_seconds
        await asyncio.sleep(period_seconds)
        stalled(max(0.0, clock() - due))
