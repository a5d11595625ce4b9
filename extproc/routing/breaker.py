"""One endpoint's circuit breaker: when requests stay away from it, and how it comes back.

It counts what requests say and nothing else: scrapes, in-flight and scores are not its business.
Time is passed in; reading never changes anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random

from extproc.routing.endpoint import BreakerSettings, BreakerState

_LARGEST_EXPONENT = 1000  # 2.0 ** 1024 overflows; the maximum cuts far below either


class Verdict(StrEnum):
    """What one attempt means for its endpoint's breaker."""

    SUCCESS = "success"
    FAILURE = "failure"
    IGNORED = "ignored"


@dataclass(frozen=True, slots=True)
class Permit:
    """Leave to send one request: the epoch that gave it, and the probe's lease (0: not a probe)."""

    epoch: int
    is_probe: bool = False
    lease: int = 0


class Breaker:
    """A cooldown and a circuit breaker in one: closed, open, half-open, closed again.

    `epoch` grows at every opening and every closing, and a verdict counts only in the epoch that
    its permit is from. `open_until` is the moment at which open turns half-open, None when closed.
    `streak` is the consecutive failures while closed, `openings` those since the last closing.
    A threshold, base or maximum of 0 switches the breaker off: it stays closed.
    """

    __slots__ = (
        "_leases",
        "_next_lease",
        "_pass",
        "_random",
        "epoch",
        "open_until",
        "openings",
        "settings",
        "streak",
    )

    def __init__(self, settings: BreakerSettings, random: Random) -> None:
        self.settings = settings
        self.epoch = 0
        self.open_until: float | None = None
        self.streak = 0
        self.openings = 0
        self._random = random
        self._leases: dict[int, float] = {}
        self._next_lease = 1
        self._pass = Permit(0)

    @property
    def is_off(self) -> bool:
        """Whether the settings switch the breaker off."""
        settings = self.settings
        return settings.threshold <= 0 or settings.base_seconds <= 0 or settings.max_seconds <= 0

    def state(self, now: float) -> BreakerState:
        """The state at `now`; nothing is consumed, and open becomes half-open by time alone."""
        if self.open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.open_until else BreakerState.HALF_OPEN

    def free_probes(self, now: float) -> int:
        """How many probes could start at `now`: 0 unless half-open; nothing is consumed."""
        if self.open_until is None or now < self.open_until:
            return 0
        leased = sum(1 for until in self._leases.values() if until > now)
        return max(0, max(1, self.settings.probes) - leased)

    def next_change(self, now: float) -> float | None:
        """The earliest moment after `now` when time alone changes state or free probes, if any."""
        if self.open_until is None:
            return None
        if now < self.open_until:
            return self.open_until
        return min((until for until in self._leases.values() if until > now), default=None)

    def allow(self, now: float, lease_seconds: float) -> Permit | None:
        """The leave to send one request now, or None when the breaker refuses.

        Half-open, the permit is a probe that holds one of `probes` slots until its verdict, or for
        min(`lease_seconds`, the maximum cooldown): a probe that never reports frees its slot. A
        `lease_seconds` of 0 or less is no deadline, so the maximum is the lease.
        """
        open_until = self.open_until
        if open_until is None:
            return self._pass
        if now < open_until:
            return None
        leases = self._leases
        for lease in [lease for lease, until in leases.items() if until <= now]:
            del leases[lease]
        # Without a probe the endpoint could never come back, so 0 probes reads as 1.
        if len(leases) >= max(1, self.settings.probes):
            return None
        longest = self.settings.max_seconds
        lease = self._next_lease
        self._next_lease = lease + 1
        leases[lease] = now + (lease_seconds if 0 < lease_seconds < longest else longest)
        return Permit(self.epoch, is_probe=True, lease=lease)

    def record(self, permit: Permit, verdict: Verdict, now: float) -> None:
        """The permit's probe slot is free and its verdict has taken effect, see `judge`."""
        if permit.is_probe:
            self._leases.pop(permit.lease, None)
        self.judge(permit.epoch, verdict, now)

    def judge(self, epoch: int, verdict: Verdict, now: float) -> None:
        """The verdict on a request let through in `epoch` has taken effect; another's has none.

        Closed: a success resets the streak, a failure may complete it and open. Half-open: a
        success closes, a failure re-opens for longer. Open: nothing, the cooldown runs its time.
        A verdict outlives its probe's lease: an engine whose headers take longer than the lease
        must be able to close its breaker.
        """
        if epoch != self.epoch or verdict is Verdict.IGNORED:
            return
        if self.open_until is None:
            if verdict is Verdict.SUCCESS:
                self.streak = 0
                return
            self.streak += 1
            if self.streak >= self.settings.threshold and not self.is_off:
                self._open(now + self._cooldown_seconds())
        elif now >= self.open_until:
            if verdict is Verdict.SUCCESS:
                self._close()
            else:
                self._open(now + self._cooldown_seconds())

    def hold(self, until: float, now: float) -> None:
        """The breaker is open until `until` at least, at most for the maximum cooldown from now.

        A later moment extends a running cooldown, an earlier one never shortens it. A moment that
        is past, or not a number, changes nothing; nor does any when the breaker is off.
        """
        if not until > now or self.is_off:
            return
        until = min(until, now + self.settings.max_seconds)
        if self.open_until is None or now >= self.open_until:
            # An opening, so what was let through before it counts no more.
            self._open(until)
        elif until > self.open_until:
            self.open_until = until

    def apply(self, settings: BreakerSettings, now: float) -> None:
        """The settings are in force: off closes, no cooldown or lease outlasts their maximum."""
        self.settings = settings
        if self.open_until is None:
            return
        if self.is_off:
            self._close()
            return
        latest = now + settings.max_seconds
        self.open_until = min(self.open_until, latest)
        self._leases = {lease: min(until, latest) for lease, until in self._leases.items()}

    def _cooldown_seconds(self) -> float:
        settings = self.settings
        doubled = settings.base_seconds * 2.0 ** min(self.openings, _LARGEST_EXPONENT)
        factor = 1.0 + settings.jitter_ratio * (2.0 * self._random.random() - 1.0)
        return min(doubled, settings.max_seconds) * factor

    def _open(self, until: float) -> None:
        self.open_until = until
        self.openings += 1
        self._turn()

    def _close(self) -> None:
        self.open_until = None
        self.openings = 0
        self._turn()

    def _turn(self) -> None:
        self.streak = 0
        self._leases.clear()
        self.epoch += 1
        self._pass = Permit(self.epoch)
