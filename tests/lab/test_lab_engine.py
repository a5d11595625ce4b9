"""The engine model, on a clock that the test turns."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.lab.engine import Engine, EngineSettings, Generation, Phase, Progress, Refusal
from extproc.lab.tally import FinishReason

# One token every 0.1 s, 1000 prompt tokens a second, no slowdown: easy numbers.
PLAIN = EngineSettings(
    max_running=2,
    prefill_tokens_per_second=1000.0,
    decode_tokens_per_second=10.0,
    decode_slowdown_ratio=0.0,
    kv_tokens=1000,
    block_size_tokens=10,
)


def submitted(engine: Engine, prompt: int, output: int, now: float) -> Generation:
    """A request that the engine has taken."""
    generation = engine.submit(prompt, output, now)
    assert isinstance(generation, Generation)
    return generation


def run_dry(engine: Engine) -> tuple[float, list[Progress]]:
    """Everything submitted has ended; when, and what came out."""
    progress: list[Progress] = []
    now = 0.0
    while engine.next_at is not None:
        now = engine.next_at
        progress += engine.advance(now)
    return now, progress


def test_prefill_delays_the_first_token_by_the_length_of_the_prompt() -> None:
    """A prompt of 500 tokens at 1000 a second gives its first token after half a second."""
    engine = Engine(PLAIN)
    generation = submitted(engine, 500, 3, 0.0)
    assert engine.next_at == pytest.approx(0.5)
    assert engine.advance(0.49) == []
    assert engine.advance(0.51) == [Progress(generation, 1, has_ended=False)]
    assert generation.first_token_at == pytest.approx(0.5)


def test_decode_gives_a_token_per_step_until_the_limit() -> None:
    """After the first token one comes every 0.1 s, and the last one ends the generation."""
    engine = Engine(PLAIN)
    generation = submitted(engine, 100, 3, 0.0)
    end, progress = run_dry(engine)
    assert end == pytest.approx(0.3)
    assert [(p.tokens, p.has_ended) for p in progress] == [(1, False), (1, False), (1, True)]
    assert generation.phase is Phase.ENDED
    assert generation.reason is FinishReason.LENGTH
    assert engine.next_at is None


def test_requests_above_the_batch_limit_wait_in_order() -> None:
    """With two slots the third and fourth wait, and the third is next."""
    engine = Engine(PLAIN)
    first, second, third, fourth = (submitted(engine, 10, 5, 0.0) for _ in range(4))
    assert engine.running == [first, second]
    assert list(engine.waiting) == [third, fourth]
    assert engine.abort(first, 0.001)
    assert engine.running == [second, third]
    assert list(engine.waiting) == [fourth]


def test_an_abort_frees_slot_and_cache_at_once() -> None:
    """An aborted request holds neither slot nor cache, and counts as aborted once."""
    engine = Engine(PLAIN)
    generation = submitted(engine, 100, 50, 0.0)
    assert engine.kv_used_tokens == 101
    assert engine.abort(generation, 0.05)
    assert (engine.kv_used_tokens, engine.running, engine.next_at) == (0, [], None)
    assert not engine.abort(generation, 0.06)
    assert engine.totals.finished[FinishReason.ABORT] == 1
    assert engine.totals.request_seconds.count == 0


def test_a_waiting_request_can_be_aborted() -> None:
    """A request that leaves the queue does not disturb the others."""
    engine = Engine(PLAIN)
    running = [submitted(engine, 10, 5, 0.0) for _ in range(2)]
    waiting = submitted(engine, 10, 5, 0.0)
    assert engine.abort(waiting, 0.0)
    assert engine.running == running
    assert not engine.waiting
    _, progress = run_dry(engine)
    assert {p.generation.number for p in progress} == {1, 2}


def test_an_abort_of_the_only_running_request_starts_the_next_at_once() -> None:
    """The step that computed for nobody is dropped: the waiting prompt starts now."""
    engine = Engine(EngineSettings(max_running=1, prefill_tokens_per_second=100.0))
    first = submitted(engine, 1000, 1, 0.0)
    second = submitted(engine, 50, 1, 0.0)
    engine.abort(first, 1.0)
    assert engine.running == [second]
    assert engine.next_at == pytest.approx(1.5)


def test_the_cache_fills_with_tokens_and_empties_at_the_end() -> None:
    """Usage is the prompt and every token so far, and 0 when all is over."""
    engine = Engine(PLAIN)
    submitted(engine, 99, 3, 0.0)
    assert engine.reading().kv_usage_ratio == pytest.approx(0.1)
    engine.advance(0.1)
    engine.advance(0.2)
    assert engine.kv_used_tokens == 101
    run_dry(engine)
    assert engine.reading().kv_usage_ratio == 0.0


def test_the_head_of_the_queue_waits_for_the_cache() -> None:
    """A prompt that does not fit waits although a slot is free, and so does all behind it."""
    engine = Engine(PLAIN)
    submitted(engine, 700, 5, 0.0)
    big = submitted(engine, 600, 5, 0.0)
    small = submitted(engine, 10, 5, 0.0)
    assert list(engine.waiting) == [big, small]
    run_dry(engine)
    assert engine.totals.finished[FinishReason.LENGTH] == 3


def test_a_full_cache_preempts_the_youngest_and_all_still_end() -> None:
    """Two requests that outgrow the cache together both get all their tokens."""
    engine = Engine(PLAIN)
    old = submitted(engine, 400, 300, 0.0)
    young = submitted(engine, 400, 300, 0.0)
    _, progress = run_dry(engine)
    assert engine.totals.preemptions > 0
    for generation in (old, young):
        assert sum(p.tokens for p in progress if p.generation is generation) == 300
    assert engine.kv_used_tokens == 0
    assert old.ended_at is not None
    assert young.ended_at is not None
    assert old.ended_at < young.ended_at


def test_too_long_a_request_is_refused() -> None:
    """Prompt and output together must fit the model and the cache."""
    engine = Engine(PLAIN)
    assert engine.submit(990, 11, 0.0) is Refusal.TOO_LONG
    assert isinstance(engine.submit(990, 10, 0.0), Generation)
    short = Engine(EngineSettings(max_model_tokens=10))
    assert short.submit(10, 1, 0.0) is Refusal.TOO_LONG


def test_a_bounded_queue_refuses_what_is_too_much() -> None:
    """With one slot and one place to wait the third request is refused, until one leaves."""
    engine = Engine(EngineSettings(max_running=1, max_waiting=1))
    first = submitted(engine, 1, 1, 0.0)
    submitted(engine, 1, 1, 0.0)
    assert engine.submit(1, 1, 0.0) is Refusal.QUEUE_FULL
    engine.abort(first, 0.0)
    assert isinstance(engine.submit(1, 1, 0.0), Generation)


def test_a_queue_of_none_still_takes_what_has_a_slot() -> None:
    """max_waiting 0 refuses only what cannot start at once."""
    engine = Engine(EngineSettings(max_running=1, max_waiting=0))
    assert isinstance(engine.submit(1, 1, 0.0), Generation)
    assert engine.submit(1, 1, 0.0) is Refusal.QUEUE_FULL


def test_the_batch_shares_the_pace() -> None:
    """Every further decoding request lengthens the step by the slowdown."""
    slowing = EngineSettings(
        max_running=4,
        prefill_tokens_per_second=math.inf,
        decode_tokens_per_second=10.0,
        decode_slowdown_ratio=0.5,
    )
    engine = Engine(slowing)
    for _ in range(3):
        submitted(engine, 1, 2, 0.0)
    # The first step prefills the first request alone, the second the others beside its decode.
    end, _ = run_dry(engine)
    assert end == pytest.approx(0.1 + 0.15)


def test_a_long_prefill_is_cut_so_that_others_go_on() -> None:
    """Decoding requests get tokens between the pieces of a long prompt."""
    engine = Engine(
        EngineSettings(
            prefill_tokens_per_second=1000.0,
            prefill_budget_tokens=100,
            decode_tokens_per_second=10.0,
        )
    )
    quick = submitted(engine, 10, 50, 0.0)
    engine.advance(0.01)
    slow = submitted(engine, 1000, 1, 0.01)
    while slow.first_token_at is None:
        assert engine.next_at is not None
        engine.advance(engine.next_at)
    # One with its own prefill, one in the step that was on its way, ten beside ten pieces.
    assert quick.produced == 12


def test_an_engine_without_limits_of_speed_is_done_at_once() -> None:
    """With infinite rates everything comes out of the moment of its submission."""
    fast = EngineSettings(prefill_tokens_per_second=math.inf, decode_tokens_per_second=math.inf)
    engine = Engine(fast)
    submitted(engine, 5000, 1000, 7.0)
    assert sum(p.tokens for p in engine.advance(7.0)) == 1000
    assert engine.next_at is None


def test_a_fast_engine_takes_several_tokens_per_step() -> None:
    """At 10,000 tokens a second a step still lasts the shortest time, and the rate is kept."""
    engine = Engine(
        EngineSettings(
            prefill_tokens_per_second=math.inf,
            decode_tokens_per_second=10_000.0,
            shortest_step_seconds=0.005,
        )
    )
    submitted(engine, 1, 1001, 0.0)
    end, progress = run_dry(engine)
    assert end == pytest.approx(0.1)
    assert len(progress) == 21


def test_embeddings_end_with_their_prefill() -> None:
    """A request for no output ends when its prompt is computed, with no token."""
    engine = Engine(PLAIN)
    generation = submitted(engine, 100, 0, 0.0)
    assert engine.advance(0.1) == [Progress(generation, 0, has_ended=True)]
    assert engine.totals.generation_tokens == 0
    assert engine.totals.first_token_seconds.count == 0


def test_a_known_prefix_is_not_computed_again() -> None:
    """A prompt whose blocks are cached prefills only what follows them."""
    engine = Engine(
        EngineSettings(prefill_tokens_per_second=1000.0, block_size_tokens=10, prefix_cache=True)
    )
    assert isinstance(engine.submit(100, 1, 0.0, blocks=range(10)), Generation)
    engine.advance(0.1)
    again = engine.submit(120, 1, 1.0, blocks=range(12))
    assert isinstance(again, Generation)
    assert again.cached_tokens == 100
    assert engine.next_at == pytest.approx(1.02)
    assert engine.totals.prefix_hits == 100
    assert engine.totals.prefix_queries == 220


def test_a_wholly_known_prompt_still_computes_its_last_token() -> None:
    """The prompt's last token gives the first of the output, cached or not."""
    engine = Engine(EngineSettings(block_size_tokens=10, prefix_cache=True))
    engine.submit(100, 1, 0.0, blocks=range(10))
    run_dry(engine)
    generation = engine.submit(100, 1, 1.0, blocks=range(10))
    assert isinstance(generation, Generation)
    assert generation.cached_tokens == 99


def test_the_prefix_cache_lives_in_what_requests_leave() -> None:
    """A running request pushes out cached blocks, the tail of the oldest prompt first."""
    engine = Engine(
        EngineSettings(kv_tokens=100, block_size_tokens=10, prefix_cache=True, max_running=1)
    )
    engine.submit(60, 1, 0.0, blocks=range(6))
    run_dry(engine)
    engine.submit(69, 1, 1.0)  # leaves room for three blocks
    run_dry(engine)
    known = engine.submit(60, 1, 2.0, blocks=range(6))
    assert isinstance(known, Generation)
    assert known.cached_tokens == 30


def test_totals_tell_what_happened() -> None:
    """Token sums, reasons and times are those of the requests."""
    engine = Engine(PLAIN)
    submitted(engine, 100, 5, 0.0)
    engine.submit(100, 1, 0.0, reason=FinishReason.STOP)
    submitted(engine, 100, 5, 0.0)  # waits for the second one's slot
    run_dry(engine)
    totals = engine.totals
    assert totals.prompt_tokens == totals.finished_prompt_tokens == 300
    assert totals.generation_tokens == totals.finished_generation_tokens == 11
    assert totals.finished == {
        FinishReason.STOP: 1,
        FinishReason.LENGTH: 2,
        FinishReason.ABORT: 0,
    }
    assert totals.first_token_seconds.count == totals.request_seconds.count == 3
    assert totals.inter_token_seconds.count == 8
    assert totals.queue_seconds.sum == pytest.approx(0.3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_running": 0},
        {"prefill_budget_tokens": 0},
        {"decode_tokens_per_second": 0.0},
        {"prefill_tokens_per_second": -1.0},
        {"kv_tokens": 8},
    ],
)
def test_settings_that_never_make_progress_are_refused(wrong: dict[str, float]) -> None:
    """Sizes and rates of nothing are a ValueError."""
    with pytest.raises(ValueError, match=r"start at|above 0|one block"):
        EngineSettings(**wrong)  # type: ignore[arg-type]  # whole numbers arrive as float's subtype


def check_books(engine: Engine) -> None:
    """Slots and cache are not overdrawn, and nobody waits for an idle engine."""
    limits = engine.settings
    assert 0 <= engine.kv_used_tokens <= limits.kv_tokens
    assert engine.kv_used_tokens == sum(g.held_tokens for g in engine.running)
    assert len(engine.running) <= limits.max_running
    # Preempted requests return to the queue whatever its limit.
    assert limits.max_waiting is None or len(engine.waiting) <= limits.max_waiting + 2
    assert (engine.next_at is None) == (not engine.running)
    assert not (engine.waiting and not engine.running)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 60), st.integers(0, 60)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("advance"), st.integers(1, 50), st.just(0)),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=150)
@given(actions=ACTIONS, prefix_cache=st.booleans(), bounded=st.booleans())
def test_any_order_of_actions_keeps_the_books(  # noqa: C901 - one story
    actions: list[tuple[str, int, int]],
    prefix_cache: bool,  # noqa: FBT001 - hypothesis passes by name
    bounded: bool,  # noqa: FBT001 - as above
) -> None:
    """Cache and slots are never overdrawn, every request gets exactly its tokens, all ends at 0."""
    limits = EngineSettings(
        max_running=3,
        max_waiting=4 if bounded else None,
        kv_tokens=120,
        block_size_tokens=4,
        prefill_tokens_per_second=100.0,
        prefill_budget_tokens=16,
        decode_tokens_per_second=10.0,
        prefix_cache=prefix_cache,
    )
    engine = Engine(limits)
    now = 0.0
    taken: list[Generation] = []
    got: dict[int, int] = {}

    def turn(until: float) -> None:
        for progress in engine.advance(until):
            number = progress.generation.number
            got[number] = got.get(number, 0) + progress.tokens

    for action, a, b in actions:
        if action == "submit":
            generation = engine.submit(a, b, now, blocks=range(a // 4))
            if isinstance(generation, Generation):
                taken.append(generation)
        elif action == "abort" and a < len(taken):
            engine.abort(taken[a], now)
        elif action == "advance":
            now += a / 20
            turn(now)
        check_books(engine)
    for _ in range(100_000):
        if engine.next_at is None:
            break
        turn(engine.next_at)
    assert engine.next_at is None
    assert engine.kv_used_tokens == 0
    for generation in taken:
        assert generation.phase is Phase.ENDED
        if generation.reason is not FinishReason.ABORT:
            assert got.get(generation.number, 0) == generation.output_tokens
    assert sum(engine.totals.finished.values()) == len(taken)
