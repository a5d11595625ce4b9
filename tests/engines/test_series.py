"""Series: copies, splits, models and ranks, and what they make together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.engines.candidate import Match
from extproc.engines.dialects import Combine, Dialect
from extproc.engines.exposition import Labels, Sample
from extproc.engines.series import Rules, combined, meets

PLAIN = Dialect()
COPIES = Dialect(copy_labels=("tp_rank", "pp_rank"))
SPLIT = Dialect(split_label="priority")
STEPS = Dialect(model_label="model", model_rule=Combine.MAX)
UNNAMED = Dialect(model_label=None)


def sample(value: float, **labels: str) -> Sample:
    """A sample of no matter which family."""
    return Sample("x", Labels.of(tuple(labels.items())), value)


def values(
    dialect: Dialect, *samples: Sample, models: Sequence[str] = (), label: str | None = None
) -> list[float]:
    """The values that count, smallest first."""
    return sorted(Rules(dialect, frozenset(models)).values(list(samples), label))


def test_each_rank_counts() -> None:
    """Series that differ in a label are different series."""
    assert values(PLAIN, sample(1, engine="0"), sample(2, engine="1")) == [1, 2]


def test_copies_count_once() -> None:
    """Of tensor and pipeline parallel copies, the lowest ranks' one counts."""
    ranks = [sample(10 + r, dp_rank="0", tp_rank=str(r), pp_rank="0") for r in (10, 2, 9)]
    other = [sample(5, dp_rank="1", tp_rank="4", pp_rank="1"), sample(6, dp_rank="1", tp_rank="5")]
    assert values(COPIES, *ranks, *other) == [5, 12]


def test_a_rank_that_is_no_number_is_the_lowest() -> None:
    """A label of any length and content is harmless."""
    assert values(COPIES, sample(1, tp_rank="9" * 5000), sample(2, tp_rank="1")) == [1]


def test_the_empty_split_is_the_total() -> None:
    """The parts of a total are not added to it."""
    assert values(
        SPLIT, sample(5, priority=""), sample(2, priority="0"), sample(3, priority="9")
    ) == [5]
    assert values(SPLIT, sample(5), sample(2, priority="0")) == [5]


def test_parts_without_a_total_count() -> None:
    """A family that has parts only is their sum, per rank."""
    assert values(
        SPLIT,
        sample(2, priority="0", dp="0"),
        sample(3, priority="9", dp="0"),
        sample(4, priority="", dp="1"),
        sample(4, priority="0", dp="1"),
    ) == [2, 3, 4]


def test_the_endpoints_model_counts_where_it_is_on_the_page() -> None:
    """Of several models the endpoint's count, and series that name no model."""
    page = [sample(1, model_name="base"), sample(2, model_name="lora"), sample(4)]
    assert values(PLAIN, *page, models=["base"]) == [1, 4]
    assert values(PLAIN, *page, models=["base", "lora", "other"]) == [1, 2, 4]


def test_a_page_without_the_endpoints_model_counts_whole() -> None:
    """The engine may know the model by a name that nobody told us."""
    page = [sample(1, model_name="base"), sample(2, model_name="lora")]
    assert values(PLAIN, *page, models=["mine"]) == [1, 2]
    assert values(PLAIN, *page) == [1, 2]
    assert values(PLAIN, sample(1, model_name="base", e="0"), sample(2, model_name="base", e="1"),
                  models=["base"]) == [1, 2]  # fmt: skip
    assert values(UNNAMED, *page, models=["base"]) == [1, 2]


def test_the_steps_of_an_ensemble_count_a_request_once() -> None:
    """Where every model counts the same requests, the largest count is the number of them."""
    page = [sample(50, model="ensemble"), sample(52, model="pre"), sample(51, model="llm")]
    assert values(STEPS, *page) == [52]
    assert values(STEPS, *page, models=["llm"]) == [51]
    assert math.isnan(values(STEPS, *page, sample(math.nan, model="post"))[0])


def test_a_series_that_is_there_twice_counts_once() -> None:
    """The larger value is the safer one, and an unknown one the safest."""
    assert values(PLAIN, sample(1, a="1"), sample(3, a="1")) == [3]
    for pair in ([math.nan, 3.0], [3.0, math.nan]):
        assert math.isnan(values(PLAIN, *(sample(value, a="1") for value in pair))[0])


def test_a_number_in_a_label_is_read() -> None:
    """One that is no number is unknown."""
    page = [sample(1, size="16", e="0"), sample(1, size="32", e="1")]
    assert values(PLAIN, *page, label="size") == [16, 32]
    for text in ("None", "", "-1", "1e3", "²"):
        assert math.isnan(values(PLAIN, sample(1, size=text), label="size")[0])


@pytest.mark.parametrize(
    ("how", "of", "value"),
    [
        (Combine.SUM, [1.0, 2.0, 4.0], 7.0),
        (Combine.MAX, [0.1, 0.9], 0.9),
        (Combine.SAME, [16.0, 16.0], 16.0),
        (Combine.SAME, [16.0, 32.0], None),
        (Combine.SUM, [1.0, math.nan], None),
        (Combine.MAX, [1.0, math.inf], None),
        (Combine.SAME, [-math.inf], None),
        (Combine.SUM, [1e308, 1e308], math.inf),
    ],
)
def test_series_are_combined(how: Combine, of: list[float], value: float | None) -> None:
    """A part that is unknown makes the whole unknown."""
    found = combined(of, how)
    assert math.isnan(found) if value is None else found == value


def test_conditions_on_labels_all_hold() -> None:
    """A missing label is empty."""
    found = sample(1, a="1", b="2")
    assert meets(found, ())
    assert meets(found, (Match("a", "1"), Match("b", "3", is_equal=False), Match("c", "")))
    assert not meets(found, (Match("a", "1"), Match("b", "2", is_equal=False)))
    assert not meets(found, (Match("c", "1"),))


LABELS = st.fixed_dictionaries(
    {},
    optional={
        "engine": st.sampled_from(["0", "1"]),
        "tp_rank": st.sampled_from(["0", "1", "x"]),
        "priority": st.sampled_from(["", "0"]),
        "model_name": st.sampled_from(["base", "lora"]),
    },
)
PAGES = st.lists(st.tuples(st.floats(0, 100) | st.just(math.nan), LABELS), min_size=1, max_size=8)
EVERY_RULE = Dialect(copy_labels=("tp_rank",), split_label="priority", model_rule=Combine.MAX)


@settings(deadline=None, max_examples=200)
@given(PAGES, st.randoms(use_true_random=False), st.sampled_from([PLAIN, EVERY_RULE]))
def test_the_order_of_the_lines_makes_no_difference(
    page: list[tuple[float, Mapping[str, str]]], random: Random, dialect: Dialect
) -> None:
    """Whatever the labels are, any order gives the same numbers."""
    rules = Rules(dialect, frozenset({"base"}))
    samples = [sample(value, **labels) for value, labels in page]
    results = []
    for _ in range(2):
        found = rules.values(samples, None)
        results.append([repr(combined(found, how)) for how in Combine])
        random.shuffle(samples)
    assert results[0] == results[1]
