"""How late the event loop comes back."""

from __future__ import annotations

import asyncio
import time

from extproc.telemetry.stalls import watch_stalls


async def test_a_blocked_loop_is_noticed() -> None:
    """Work that blocks the loop shows as a stall of about its length."""
    stalls: list[float] = []
    heard = asyncio.Event()

    def stalled(seconds: float) -> None:
        stalls.append(seconds)
        heard.set()

    task = asyncio.ensure_future(watch_stalls(time.monotonic, stalled, period_seconds=0.01))
    await heard.wait()
    stalls.clear()
    heard.clear()
    time.sleep(0.2)  # noqa: ASYNC251 - the blocking is what is measured
    await heard.wait()
    task.cancel()
    assert 0.15 <= max(stalls) < 2
