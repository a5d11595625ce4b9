"""The breaker opens on consecutive failures, comes back by probes, and never wedges."""

from __future__ import annotations

import copy
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from extproc.routing.breaker import Breaker, Permit, Verdict
from extproc.routing.endpoint import BreakerSettings, BreakerState

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
SUCCESS, FAILURE, IGNORED = Verdict.SUCCESS, Verdict.FAILURE, Verdict.IGNORED
LEASE = 600.0


def a_breaker(
    *,
    threshold: int = 1,
    base_seconds: float = 1.0,
    max_seconds: float = 60.0,
    jitter_ratio: float = 0.0,
    probes: int = 1,
    seed: int = 0,
) -> Breaker:
    """A plain cooldown without jitter, but for what is given."""
    return Breaker(
        BreakerSettings(threshold, base_seconds, max_seconds, jitter_ratio, probes), Random(seed)
    )


def allowed(breaker: Breaker, now: float, lease_seconds: float = LEASE) -> Permit:
    """The permit of a request that must pass."""
    permit = breaker.allow(now, lease_seconds)
    assert permit is not None
    return permit


def attempt(breaker: Breaker, verdict: Verdict, now: float) -> None:
    """One request has passed and is judged at once."""
    breaker.record(allowed(breaker, now), verdict, now)


def opened(*, base_seconds: float = 1.0, max_seconds: float = 60.0, probes: int = 1) -> Breaker:
    """A breaker that opened at 0."""
    breaker = a_breaker(base_seconds=base_seconds, max_seconds=max_seconds, probes=probes)
    attempt(breaker, FAILURE, 0.0)
    assert breaker.state(0.0) is OPEN
    return breaker


# Closed.


def test_it_opens_at_the_fifth_consecutive_failure() -> None:
    """Four failures change nothing, the fifth opens for the base cooldown."""
    breaker = Breaker(BreakerSettings(jitter_ratio=0.0), Random(0))
    for _ in range(4):
        attempt(breaker, FAILURE, 10.0)
        assert breaker.state(10.0) is CLOSED
    attempt(breaker, FAILURE, 10.0)
    assert breaker.state(10.0) is OPEN
    assert breaker.open_until == 11.0


def test_a_success_resets_the_streak_and_an_ignored_attempt_does_not() -> None:
    """Only consecutive failures count; what is ignored is as if it had not been."""
    breaker = a_breaker(threshold=2)
    attempt(breaker, FAILURE, 0.0)
    attempt(breaker, SUCCESS, 0.0)
    attempt(breaker, FAILURE, 0.0)
    assert breaker.state(0.0) is CLOSED
    attempt(breaker, IGNORED, 0.0)
    attempt(breaker, FAILURE, 0.0)
    assert breaker.state(0.0) is OPEN


def test_a_threshold_of_one_is_a_plain_cooldown() -> None:
    """One failure keeps requests away for the base cooldown."""
    breaker = opened(base_seconds=3.0)
    assert breaker.allow(2.9, LEASE) is None
    assert breaker.allow(3.0, LEASE) is not None


def test_a_closed_breaker_gives_every_request_the_same_permit() -> None:
    """Nothing is made for a request that needs no lease."""
    breaker = a_breaker()
    assert allowed(breaker, 0.0) is allowed(breaker, 1.0)
    assert not allowed(breaker, 0.0).is_probe


@pytest.mark.parametrize("zero", ["threshold", "base_seconds", "max_seconds"])
def test_zero_is_off(zero: str) -> None:
    """With a threshold, base or maximum of 0 neither failures nor holds open it."""
    breaker = a_breaker(**{zero: 0})
    for _ in range(20):
        attempt(breaker, FAILURE, 0.0)
    breaker.hold(30.0, 0.0)
    assert breaker.state(0.0) is CLOSED
    assert breaker.is_off


# Open.


def test_open_becomes_half_open_by_time_alone() -> None:
    """Nobody has to ask in between, and at the very moment it is half-open."""
    breaker = opened(base_seconds=2.0)
    assert [breaker.state(now) for now in (0.0, 1.999, 2.0, 500.0)] == [
        OPEN,
        OPEN,
        HALF_OPEN,
        HALF_OPEN,
    ]
    assert breaker.free_probes(1.999) == 0
    assert breaker.free_probes(2.0) == 1


def test_while_open_a_verdict_leaves_the_cooldown_as_it_is() -> None:
    """A request that Envoy moved here during the cooldown neither ends nor lengthens it."""
    for verdict in Verdict:
        breaker = opened(base_seconds=2.0)
        breaker.judge(breaker.epoch, verdict, 1.0)
        assert breaker.state(1.0) is OPEN
        assert breaker.open_until == 2.0


def test_cooldowns_double_up_to_the_maximum_and_a_success_starts_them_over() -> None:
    """Base times two to the number of openings since a success, at most the maximum."""
    breaker = opened(base_seconds=1.0, max_seconds=6.0)
    now, seen = 0.0, []
    for _ in range(5):
        assert breaker.open_until is not None
        seen.append(breaker.open_until - now)
        now = breaker.open_until
        attempt(breaker, FAILURE, now)
    assert seen == [1.0, 2.0, 4.0, 6.0, 6.0]
    now += 6.0
    attempt(breaker, SUCCESS, now)
    assert breaker.state(now) is CLOSED
    attempt(breaker, FAILURE, now)
    assert breaker.open_until == now + 1.0


def test_the_doubling_never_overflows() -> None:
    """Thousands of openings without a success stay at the maximum."""
    breaker = opened()
    breaker.openings = 1_000_000
    attempt(breaker, FAILURE, 100.0)
    assert breaker.open_until == 160.0


def test_jitter_comes_from_the_passed_randomness() -> None:
    """The same seed gives the same cooldowns, spread over 1 plus or minus the ratio."""

    def cooldowns(seed: int) -> list[float]:
        breaker = a_breaker(jitter_ratio=0.2, seed=seed, base_seconds=10.0, max_seconds=10.0)
        lengths, now = [], 0.0
        for _ in range(50):
            attempt(breaker, FAILURE, now)
            assert breaker.open_until is not None
            lengths.append(breaker.open_until - now)
            now = breaker.open_until
        return lengths

    assert cooldowns(1) == cooldowns(1)
    assert cooldowns(1) != cooldowns(2)
    assert all(7.999 <= length <= 12.001 for length in cooldowns(1))
    assert max(cooldowns(1)) - min(cooldowns(1)) > 2.0


# Half-open.


def test_two_hundred_requests_at_once_give_one_probe() -> None:
    """Half-open lets as many through as there are probe slots, not everybody."""
    for probes in (1, 3):
        breaker = opened(probes=probes)
        permits = [breaker.allow(5.0, LEASE) for _ in range(200)]
        assert sum(permit is not None for permit in permits) == probes
        assert breaker.free_probes(5.0) == 0


def test_zero_probes_reads_as_one() -> None:
    """A breaker without probes could never close again."""
    breaker = opened(probes=0)
    assert breaker.free_probes(1.0) == 1
    attempt(breaker, SUCCESS, 1.0)
    assert breaker.state(1.0) is CLOSED


def test_a_probe_that_succeeds_closes_and_one_that_fails_opens_for_longer() -> None:
    """Success closes at once; failure doubles the cooldown, counted from now."""
    closing = opened()
    attempt(closing, SUCCESS, 1.0)
    assert closing.state(1.0) is CLOSED
    assert closing.open_until is None
    failing = opened()
    attempt(failing, FAILURE, 1.5)
    assert failing.open_until == 3.5


def test_an_ignored_probe_frees_its_slot_and_changes_nothing_else() -> None:
    """A client's mistake or abort as the probe neither closes nor wedges."""
    breaker = opened()
    probe = allowed(breaker, 1.0)
    assert breaker.allow(1.1, LEASE) is None
    breaker.record(probe, IGNORED, 1.2)
    assert breaker.state(1.2) is HALF_OPEN
    assert allowed(breaker, 1.2).is_probe


def test_a_lost_probe_gives_its_slot_back_when_its_lease_ends() -> None:
    """The lease is the header deadline: then the next request probes."""
    breaker = opened()
    allowed(breaker, 1.0, lease_seconds=20.0)
    assert breaker.next_change(1.0) == 21.0
    assert breaker.allow(20.9, LEASE) is None
    assert breaker.free_probes(20.9) == 0
    assert breaker.free_probes(21.0) == 1
    assert allowed(breaker, 21.0).is_probe


@pytest.mark.parametrize("lease_seconds", [600.0, 0.0, -1.0, float("nan"), float("inf")])
def test_a_lease_is_never_longer_than_the_maximum_cooldown(lease_seconds: float) -> None:
    """A long deadline is cut; none at all (0 or junk) reads as the maximum."""
    breaker = opened(max_seconds=30.0)
    allowed(breaker, 1.0, lease_seconds)
    assert breaker.allow(30.9, LEASE) is None
    assert breaker.allow(31.0, LEASE) is not None


def test_a_success_after_its_lease_still_closes() -> None:
    """An engine whose headers take longer than the lease can close its breaker."""
    breaker = opened(max_seconds=10.0)
    slow = allowed(breaker, 1.0)
    assert allowed(breaker, 11.0).is_probe
    breaker.record(slow, SUCCESS, 40.0)
    assert breaker.state(40.0) is CLOSED


def test_recording_twice_counts_once() -> None:
    """The first verdict of a probe turns the epoch, so that a second one says nothing."""
    breaker = opened()
    probe = allowed(breaker, 1.0)
    breaker.record(probe, FAILURE, 1.0)
    until = breaker.open_until
    breaker.record(probe, FAILURE, 1.0)
    breaker.record(probe, SUCCESS, 99.0)
    assert breaker.open_until == until


# Epochs.


def test_a_late_verdict_from_before_the_opening_changes_nothing() -> None:
    """It neither lengthens the back-off nor closes, open, half-open or closed again."""
    breaker = a_breaker()
    late = [allowed(breaker, 0.0) for _ in range(4)]
    attempt(breaker, FAILURE, 0.0)
    breaker.record(late[0], FAILURE, 0.5)
    assert breaker.open_until == 1.0
    breaker.record(late[1], SUCCESS, 1.0)
    assert breaker.state(1.0) is HALF_OPEN
    breaker.record(late[2], FAILURE, 1.0)
    assert breaker.open_until == 1.0
    attempt(breaker, SUCCESS, 1.0)
    breaker.record(late[3], FAILURE, 1.0)
    assert breaker.state(1.0) is CLOSED


def test_a_late_success_does_not_reset_a_newer_streak() -> None:
    """What an endpoint did before it opened says nothing about its failures since."""
    breaker = a_breaker(threshold=2)
    old = allowed(breaker, 0.0)
    attempt(breaker, FAILURE, 0.0)
    attempt(breaker, FAILURE, 0.0)
    attempt(breaker, SUCCESS, 1.0)
    attempt(breaker, FAILURE, 1.0)
    breaker.record(old, SUCCESS, 1.0)
    attempt(breaker, FAILURE, 1.0)
    assert breaker.state(1.0) is OPEN


def test_the_epoch_grows_at_every_opening_and_every_closing() -> None:
    """Open, re-open, close, and a hold are four epochs; an extension is none."""
    breaker = a_breaker()
    seen = [breaker.epoch]
    attempt(breaker, FAILURE, 0.0)
    seen.append(breaker.epoch)
    attempt(breaker, FAILURE, 1.0)
    seen.append(breaker.epoch)
    attempt(breaker, SUCCESS, 3.0)
    seen.append(breaker.epoch)
    breaker.hold(10.0, 3.0)
    seen.append(breaker.epoch)
    breaker.hold(20.0, 4.0)
    assert seen == [0, 1, 2, 3, 4]
    assert breaker.epoch == 4


def test_a_moved_request_counts_by_its_epoch_alone() -> None:
    """A verdict without a probe's lease decides half-open as well."""
    breaker = opened()
    breaker.judge(breaker.epoch, SUCCESS, 1.0)
    assert breaker.state(1.0) is CLOSED


def test_probes_of_an_earlier_turn_hold_no_slot_in_the_next() -> None:
    """Another request's failure re-opened it; the probe that was on its way then is forgotten."""
    breaker = opened()
    lost = allowed(breaker, 1.0)
    breaker.judge(breaker.epoch, FAILURE, 1.5)
    assert breaker.state(3.5) is HALF_OPEN
    assert breaker.free_probes(3.5) == 1
    probe = allowed(breaker, 3.5)
    breaker.record(lost, SUCCESS, 3.6)
    assert breaker.free_probes(3.6) == 0
    breaker.record(probe, SUCCESS, 3.7)
    assert breaker.state(3.7) is CLOSED


# Holds.


def test_a_later_hold_extends_and_an_earlier_one_never_shortens() -> None:
    """The latest moment asked for stands, at most the maximum cooldown from when it was asked."""
    breaker = opened(base_seconds=5.0, max_seconds=60.0)
    breaker.hold(3.0, 1.0)
    assert breaker.open_until == 5.0
    breaker.hold(30.0, 1.0)
    assert breaker.open_until == 30.0
    breaker.hold(10_000.0, 2.0)
    assert breaker.open_until == 62.0


@pytest.mark.parametrize("until", [float("nan"), float("-inf"), -5.0, 0.0, 7.0])
def test_a_hold_that_is_junk_or_past_is_ignored(until: float) -> None:
    """What is no moment in the future changes nothing."""
    breaker = a_breaker()
    breaker.hold(until, 7.0)
    assert breaker.state(7.0) is CLOSED
    assert breaker.epoch == 0


def test_a_hold_opens_a_closed_breaker_and_ends_a_half_open_one() -> None:
    """It is an opening: probes that are out count no more, and the next failure opens longer."""
    breaker = a_breaker()
    breaker.hold(4.0, 0.0)
    assert breaker.state(3.9) is OPEN
    probe = allowed(breaker, 4.0)
    breaker.hold(9.0, 5.0)
    breaker.record(probe, SUCCESS, 6.0)
    assert breaker.state(6.0) is OPEN
    attempt(breaker, FAILURE, 9.0)
    assert breaker.open_until == 9.0 + 4.0


# Settings.


def test_a_lower_threshold_counts_the_streak_so_far() -> None:
    """The next failure opens when the streak has reached the new threshold."""
    breaker = a_breaker(threshold=10)
    for _ in range(3):
        attempt(breaker, FAILURE, 0.0)
    breaker.apply(BreakerSettings(threshold=2, jitter_ratio=0.0), 0.0)
    assert breaker.state(0.0) is CLOSED
    attempt(breaker, FAILURE, 0.0)
    assert breaker.state(0.0) is OPEN


def test_a_lower_maximum_cuts_what_is_running() -> None:
    """Neither a cooldown nor a lease outlasts the new maximum."""
    breaker = opened(base_seconds=60.0)
    breaker.apply(BreakerSettings(max_seconds=5.0), 1.0)
    assert breaker.open_until == 6.0
    leased = opened()
    allowed(leased, 1.0)
    leased.apply(BreakerSettings(max_seconds=5.0), 2.0)
    assert leased.state(2.0) is HALF_OPEN
    assert leased.free_probes(6.9) == 0
    assert leased.free_probes(7.0) == 1


def test_switching_off_closes_an_open_breaker() -> None:
    """Off means that requests pass at once."""
    breaker = opened(base_seconds=60.0)
    breaker.apply(BreakerSettings(threshold=0), 1.0)
    assert breaker.state(1.0) is CLOSED
    assert breaker.epoch == 2


def test_more_probes_are_free_at_once_and_fewer_wait_for_leases() -> None:
    """The number of slots follows the settings; a lease that is out is never taken back."""
    breaker = opened(probes=2)
    first, second = allowed(breaker, 1.0), allowed(breaker, 1.0)
    breaker.apply(BreakerSettings(probes=1), 1.0)
    breaker.record(first, IGNORED, 1.0)
    assert breaker.free_probes(1.0) == 0
    breaker.record(second, IGNORED, 1.0)
    assert breaker.free_probes(1.0) == 1


def test_the_next_change_is_the_end_of_the_cooldown_then_of_a_lease() -> None:
    """None where time alone changes nothing."""
    breaker = a_breaker()
    assert breaker.next_change(0.0) is None
    attempt(breaker, FAILURE, 0.0)
    assert breaker.next_change(0.0) == 1.0
    assert breaker.next_change(1.0) is None
    allowed(breaker, 1.0, 10.0)
    assert breaker.next_change(1.0) == 11.0
    assert breaker.next_change(11.0) is None


# Laws.

_SETTINGS = st.builds(
    BreakerSettings,
    threshold=st.integers(0, 4),
    base_seconds=st.sampled_from([0.0, 0.5, 1.0, 7.0]),
    max_seconds=st.sampled_from([0.0, 0.5, 5.0, 60.0]),
    jitter_ratio=st.sampled_from([0.0, 0.1, 0.5]),
    probes=st.integers(0, 3),
)


def twin(breaker: Breaker) -> Breaker:
    """A breaker in the same state, to try out what would happen."""
    other = Breaker(breaker.settings, Random(0))
    for name in Breaker.__slots__:
        if name != "_random":
            setattr(other, name, copy.copy(getattr(breaker, name)))
    return other


def everything(breaker: Breaker) -> list[object]:
    """The whole state of the breaker, copied."""
    return [copy.copy(getattr(breaker, name)) for name in Breaker.__slots__ if name != "_random"]


class AnyHistory(RuleBasedStateMachine):
    """A breaker under any order of requests, verdicts, holds, new settings and passing time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.breaker = Breaker(BreakerSettings(threshold=2), Random(3))
        self.permits: list[Permit] = []
        self.leased: dict[int, float] = {}  # the probes that are out, and until when at most
        self.epoch = 0

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 4.0, 30.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(lease=st.sampled_from([0.0, 0.5, 10.0, 600.0]))
    def a_request_asks(self, lease: float) -> None:
        breaker, now = self.breaker, self.now
        state, free = breaker.state(now), breaker.free_probes(now)
        permit = breaker.allow(now, lease)
        assert (permit is None) == (state is OPEN or (state is HALF_OPEN and free == 0))
        if permit is None:
            return
        assert permit.epoch == breaker.epoch
        assert permit.is_probe == (state is HALF_OPEN)
        self.permits.append(permit)
        if permit.is_probe:
            assert breaker.free_probes(now) == free - 1
            longest = breaker.settings.max_seconds
            self.leased[permit.lease] = now + (min(lease, longest) if lease > 0 else longest)

    @precondition(lambda self: self.permits)
    @rule(data=st.data(), verdict=st.sampled_from(Verdict), is_last=st.booleans())
    def a_verdict_comes(self, data: st.DataObject, verdict: Verdict, *, is_last: bool) -> None:
        permit = data.draw(st.sampled_from(self.permits))
        if is_last:
            self.permits.remove(permit)
        breaker, now = self.breaker, self.now
        state, until, epoch = breaker.state(now), breaker.open_until, breaker.epoch
        breaker.record(permit, verdict, now)
        self.leased.pop(permit.lease, None)
        if permit.epoch != epoch or verdict is IGNORED or state is OPEN:
            assert (breaker.state(now), breaker.open_until, breaker.epoch) == (state, until, epoch)
        elif verdict is SUCCESS:
            assert breaker.state(now) is CLOSED
        elif state is HALF_OPEN:
            assert breaker.epoch == epoch + 1
            assert breaker.state(now) is OPEN

    @rule(seconds=st.sampled_from([-1.0, 0.0, 3.0, 1e9, float("nan")]))
    def a_hold_comes(self, seconds: float) -> None:
        before = self.breaker.open_until
        self.breaker.hold(self.now + seconds, self.now)
        if before is not None:
            assert self.breaker.open_until is not None
            assert self.breaker.open_until >= before

    @rule(new=_SETTINGS)
    def the_settings_change(self, new: BreakerSettings) -> None:
        self.breaker.apply(new, self.now)
        latest = self.now + new.max_seconds
        self.leased = {lease: min(until, latest) for lease, until in self.leased.items()}

    @invariant()
    def reading_changes_nothing(self) -> None:
        before = everything(self.breaker)
        for ahead in (120.0, 0.0, 1.0):
            self.breaker.state(self.now + ahead)
            self.breaker.free_probes(self.now + ahead)
            self.breaker.next_change(self.now + ahead)
        assert everything(self.breaker) == before

    @invariant()
    def epochs_never_go_back(self) -> None:
        assert self.breaker.epoch >= self.epoch

    @invariant()
    def cooldowns_are_bounded(self) -> None:
        breaker = self.breaker
        if breaker.open_until is not None:
            longest = breaker.settings.max_seconds * (1.0 + breaker.settings.jitter_ratio)
            assert breaker.open_until <= self.now + longest + 1e-9

    @invariant()
    def a_free_slot_is_one_that_no_probe_holds(self) -> None:
        if self.breaker.epoch != self.epoch:
            self.leased.clear()  # an opening or a closing frees every slot
        self.epoch = self.breaker.epoch
        if self.breaker.state(self.now) is HALF_OPEN:
            held = sum(until > self.now for until in self.leased.values())
            slots = max(1, self.breaker.settings.probes)
            assert self.breaker.free_probes(self.now) == max(0, slots - held)

    @invariant()
    def time_alone_changes_only_at_the_announced_moment(self) -> None:
        breaker, now = self.breaker, self.now
        change = breaker.next_change(now)
        if change is None:
            assert breaker.state(now + 1e6) is breaker.state(now)
            assert breaker.free_probes(now + 1e6) == breaker.free_probes(now)
            return
        just_before = now + (change - now) * 0.999
        assert breaker.state(just_before) is breaker.state(now)
        assert breaker.free_probes(just_before) == breaker.free_probes(now)

    @invariant()
    def it_is_never_wedged(self) -> None:
        """After the longest cooldown and lease a request passes, and its success closes."""
        breaker = twin(self.breaker)
        longest = breaker.settings.max_seconds
        later = self.now + longest * (1.0 + breaker.settings.jitter_ratio) + longest + 1e-6
        permit = breaker.allow(later, LEASE)
        assert permit is not None
        breaker.record(permit, SUCCESS, later)
        assert breaker.state(later) is CLOSED


AnyHistory.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
test_any_history_keeps_the_laws = pytest.mark.interpreted(AnyHistory.TestCase)


@settings(deadline=None)
@given(
    probes=st.integers(1, 4),
    gaps=st.lists(st.floats(0.0, 20.0), max_size=60),
    lease=st.floats(0.1, 100.0),
)
def test_lost_probes_are_never_more_than_the_slots_at_a_time(
    probes: int, gaps: list[float], lease: float
) -> None:
    """Whatever the arrivals, at most `probes` leases overlap, and re-probing goes on."""
    breaker = opened(probes=probes, max_seconds=15.0)
    now, leases = 1.0, []
    for gap in gaps:
        now += gap
        if breaker.allow(now, lease) is not None:
            leases.append((now, now + min(lease, 15.0)))
        assert sum(start <= now < end for start, end in leases) <= probes
    assert breaker.allow(now + 15.0, lease) is not None
