"""Sessions are remembered for a while, in bounded memory, and forgotten where they failed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.routing.sessions import Sessions


def test_a_session_is_remembered_for_ten_minutes_after_its_last_write() -> None:
    """Each write starts the time anew; at the end of it the session is unknown."""
    sessions = Sessions()
    sessions.remember(1, "a", 0.0)
    sessions.remember(1, "b", 100.0)
    assert sessions.last(1, 699.9) == "b"
    assert sessions.last(1, 700.0) is None
    assert sessions.last(2, 0.0) is None


def test_the_one_written_longest_ago_gives_way() -> None:
    """A full memory takes a new session and forgets the oldest write, not the oldest session."""
    sessions = Sessions(max_entries=2)
    sessions.remember(1, "a", 0.0)
    sessions.remember(2, "a", 1.0)
    sessions.remember(1, "a", 2.0)
    sessions.remember(3, "a", 3.0)
    assert [sessions.last(key, 3.0) for key in (1, 2, 3)] == ["a", None, "a"]


def test_a_session_is_forgotten_only_where_it_still_is() -> None:
    """A late failure of the old endpoint does not take the session from the new one."""
    sessions = Sessions()
    sessions.remember(1, "a", 0.0)
    sessions.remember(1, "b", 1.0)
    sessions.forget(1, "a")
    assert sessions.last(1, 1.0) == "b"
    sessions.forget(1, "b")
    assert sessions.last(1, 1.0) is None
    sessions.forget(1, "b")
    assert len(sessions) == 0


def test_expired_sessions_leave_as_new_ones_come() -> None:
    """Memory follows the sessions that are alive, long before the bound is met."""
    sessions = Sessions(max_entries=1000, ttl_seconds=10.0)
    for key in range(100):
        sessions.remember(key, "a", 0.0)
    for key in range(1000, 1060):
        sessions.remember(key, "a", 20.0)
    assert len(sessions) == 60


def test_a_memory_of_nothing_remembers_nothing() -> None:
    """No entries, or no time to live, switch the memory off."""
    for sessions in (Sessions(max_entries=0), Sessions(ttl_seconds=0.0)):
        sessions.remember(1, "a", 0.0)
        assert sessions.last(1, 0.0) is None
        assert len(sessions) == 0


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["remember", "forget"]),
        st.integers(0, 12),
        st.sampled_from("abc"),
        st.sampled_from([0.0, 0.0, 1.0, 6.0]),
    ),
    max_size=80,
)


@settings(deadline=None, max_examples=150)
@given(steps=_STEPS, bound=st.integers(1, 6))
def test_any_history_is_bounded_and_equals_a_plain_model(
    steps: list[tuple[str, int, str, float]], bound: int
) -> None:
    """A model that drops all that expired and then the oldest answers the same for every key."""
    sessions, now = Sessions(max_entries=bound, ttl_seconds=10.0), 0.0
    model: dict[int, tuple[str, float]] = {}
    for what, key, name, seconds in steps:
        now += seconds
        model = {known: entry for known, entry in model.items() if now - entry[1] < 10.0}
        if what == "remember":
            sessions.remember(key, name, now)
            model.pop(key, None)
            model[key] = (name, now)
            if len(model) > bound:
                del model[next(iter(model))]
        else:
            sessions.forget(key, name)
            if key in model and model[key][0] == name:
                del model[key]
        assert len(sessions) <= bound
        for known in range(13):
            expected = model[known][0] if known in model else None
            assert sessions.last(known, now) == expected
