"""When the garbage collector runs in a process that serves.

Requests leave no cycles behind, so the collector finds next to nothing; but by its defaults it
looks through every object again and again, which takes a tenth of the service's time and stops it
for tens of milliseconds at once.
"""

from __future__ import annotations

import gc
from typing import Final

# Allocations that outlive as many frees before the youngest objects are looked at, and how many
# such looks make one at the older, and at all. Cycles do arise where a connection fails.
_YOUNGEST: Final = 10_000
_OLDER: Final = 10
_ALL: Final = 100


def rarely_collect() -> None:
    """What is there now is never looked at again, and what comes only rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNGEST, _OLDER, _ALL)
