"""Which endpoint last served a session: a bounded memory that only ever improves on the ring.

Keys are hashes (`ring.session_hash`), so no client's text is kept.
"""

from __future__ import annotations

from collections import OrderedDict

_EXPIRED_PER_WRITE = 2


class Sessions:
    """The endpoint that last served each session, for `ttl_seconds` after the last write.

    At most `max_entries`; the one written longest ago gives way. Every operation is O(1).
    """

    __slots__ = ("_entries", "_max_entries", "_ttl_seconds")

    def __init__(self, max_entries: int = 100_000, ttl_seconds: float = 600.0) -> None:
        self._max_entries = max_entries
        self._ttl_seconds = ttl_seconds
        self._entries: OrderedDict[int, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def last(self, key_hash: int, now: float) -> str | None:
        """The endpoint that the session was last at, or None: not remembered, or too long ago."""
        entry = self._entries.get(key_hash)
        if entry is None or now - entry[1] >= self._ttl_seconds:
            return None
        return entry[0]

    def remember(self, key_hash: int, endpoint_id: str, now: float) -> None:
        """The session is at the endpoint; the oldest entries have given way where they had to."""
        entries = self._entries
        entries[key_hash] = (endpoint_id, now)
        entries.move_to_end(key_hash)
        # Writes are in order of time, so what has expired is at the front: two go for each that
        # comes, and an idle night's worth of sessions does not stay until the bound is met.
        for _ in range(_EXPIRED_PER_WRITE):
            oldest = next(iter(entries))
            if now - entries[oldest][1] < self._ttl_seconds:
                break
            del entries[oldest]
            if not entries:
                return
        if len(entries) > self._max_entries:
            entries.popitem(last=False)

    def forget(self, key_hash: int, endpoint_id: str) -> None:
        """The session is not at this endpoint; where it has moved on since, nothing has changed."""
        entry = self._entries.get(key_hash)
        if entry is not None and entry[0] == endpoint_id:
            del self._entries[key_hash]
