"""A name stands for its model, then its fallbacks; a session stays on its side of a split."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.catalog import (
    Catalog,
    Fault,
    ModelEntry,
    Resolution,
    Target,
    draw,
    faults,
)

SESSIONS = [f"session-{number}".encode() for number in range(4000)]


def resolved(catalog: Catalog, name: str, key: bytes | None = None, seed: int = 0) -> Resolution:
    """What a name that is known stands for."""
    found = catalog.resolve(name, key, Random(seed))
    assert found is not None
    return found


def models(resolution: Resolution) -> list[str]:
    """The models of the targets, in order."""
    return [target.model for target in resolution.targets]


def problems(*entries: ModelEntry) -> list[str]:
    """What is wrong with entries, each as one text."""
    return [f"{f.entry}.{f.field}[{f.item}]: {f.problem}" for f in faults(entries)]


def sides(entry: ModelEntry) -> dict[bytes, str]:
    """Where every session goes in a split."""
    return {key: draw(entry, key, Random(0)) for key in SESSIONS}


class TestNames:
    def test_a_model_stands_for_itself(self) -> None:
        """Its own strategy goes along."""
        catalog = Catalog([ModelEntry("m", strategy="batch")])
        assert resolved(catalog, "m") == Resolution("m", (Target("m", "batch"),))
        assert resolved(catalog, "m").primary == Target("m", "batch")

    def test_an_alias_stands_for_its_model(self) -> None:
        """The requested name stays as it was asked for."""
        catalog = Catalog([ModelEntry("m", aliases=("a", "b"))])
        assert resolved(catalog, "b") == Resolution("b", (Target("m"),))

    def test_an_unknown_name_stands_for_nothing(self) -> None:
        """Names differ in case."""
        catalog = Catalog([ModelEntry("m", aliases=("a",))])
        assert catalog.resolve("M", b"key", Random(0)) is None
        assert catalog.canonical("M") is None
        assert catalog.entry("M") is None

    def test_every_name_is_listed(self) -> None:
        """Models, aliases and splits, in the order they were given."""
        entries = [
            ModelEntry("b", aliases=("z",)),
            ModelEntry("a"),
            ModelEntry("s", aliases=("t",), split=(("a", 1.0),)),
        ]
        catalog = Catalog(entries)
        assert catalog.listed() == ("b", "z", "a", "s", "t")
        assert catalog.canonical("t") == "s"
        assert catalog.entry("z") == entries[0]

    def test_an_empty_catalog_lists_nothing(self) -> None:
        """It resolves nothing either."""
        catalog = Catalog([])
        assert catalog.listed() == ()
        assert catalog.resolve("m", None, Random(0)) is None


class TestFallbacks:
    def test_fallbacks_follow_in_order(self) -> None:
        """A name's own list comes before what the listed models fall back to."""
        catalog = Catalog(
            [
                ModelEntry("a", fallbacks=("b", "d")),
                ModelEntry("b", fallbacks=("c",)),
                ModelEntry("c", strategy="batch"),
                ModelEntry("d", fallbacks=("c",)),
            ]
        )
        assert resolved(catalog, "a").targets == (
            Target("a"),
            Target("b"),
            Target("d"),
            Target("c", "batch"),
        )

    def test_no_model_is_tried_twice(self) -> None:
        """The first place counts, whatever name leads there later."""
        catalog = Catalog(
            [
                ModelEntry("a", fallbacks=("b", "c")),
                ModelEntry("b", aliases=("bb",)),
                ModelEntry("c", fallbacks=("bb",)),
            ]
        )
        assert models(resolved(catalog, "a")) == ["a", "b", "c"]

    def test_a_fallback_may_be_an_alias(self) -> None:
        """It stands for its model."""
        catalog = Catalog([ModelEntry("a", fallbacks=("x",)), ModelEntry("b", aliases=("x",))])
        assert models(resolved(catalog, "a")) == ["a", "b"]

    def test_a_fallback_may_be_a_split(self) -> None:
        """One member is drawn, by the same session as everywhere."""
        split = ModelEntry("s", split=(("b", 1.0), ("c", 1.0)))
        catalog = Catalog(
            [ModelEntry("a", fallbacks=("s",)), ModelEntry("b"), ModelEntry("c"), split]
        )
        for key in SESSIONS[:50]:
            assert models(resolved(catalog, "a", key)) == ["a", draw(split, key, Random(0))]


class TestSplits:
    def test_one_session_stays_on_its_side(self) -> None:
        """Whatever the random numbers are, and by whichever name it asks."""
        catalog = Catalog(
            [
                ModelEntry("a"),
                ModelEntry("b"),
                ModelEntry("s", aliases=("t",), split=(("a", 1.0), ("b", 1.0))),
            ]
        )
        for key in SESSIONS[:200]:
            first = resolved(catalog, "s", key, seed=1).targets
            assert resolved(catalog, "s", key, seed=2).targets == first
            assert resolved(catalog, "t", key, seed=3).targets == first

    @pytest.mark.parametrize("key", [None, b""])
    def test_without_a_session_the_draw_is_random(self, key: bytes | None) -> None:
        """An empty key is no session; the shares are the weights."""
        split = ModelEntry("s", split=(("a", 1.0), ("b", 3.0)))
        random = Random(7)
        count = Counter(draw(split, key, random) for _ in range(4000))
        assert count["b"] == pytest.approx(3000, abs=150)
        assert count["a"] == 4000 - count["b"]

    @pytest.mark.parametrize(
        "weights", [(1.0, 1.0), (95.0, 5.0), (0.2, 0.3, 0.5), (1e-9, 2e-9), (1e9, 1e9, 1e9, 1e9)]
    )
    def test_sessions_are_shared_by_the_weights(self, weights: tuple[float, ...]) -> None:
        """Every member's share of many sessions is its share of the weights."""
        split = ModelEntry("s", split=tuple((f"m{n}", w) for n, w in enumerate(weights)))
        count = Counter(sides(split).values())
        for name, weight in split.split:
            expected = weight / sum(weights) * len(SESSIONS)
            assert count[name] == pytest.approx(expected, abs=130)

    @given(
        st.lists(st.floats(min_value=0.1, max_value=100), min_size=2, max_size=5),
        st.integers(min_value=0, max_value=4),
        st.floats(min_value=0, max_value=100),
    )
    def test_one_changed_weight_moves_only_its_own_share(
        self, weights: list[float], position: int, changed: float
    ) -> None:
        """Sessions move to the member that gained, or away from the one that lost, never else."""
        position %= len(weights)
        name = f"m{position}"
        before = tuple((f"m{n}", weight) for n, weight in enumerate(weights))
        after = tuple((n, changed if n == name else weight) for n, weight in before)
        for key in SESSIONS[:60]:
            old = draw(ModelEntry("s", split=before), key, Random(0))
            new = draw(ModelEntry("s", split=after), key, Random(0))
            if old != new:
                assert (new if changed > weights[position] else old) == name

    def test_the_order_of_the_members_does_not_matter(self) -> None:
        """A split written the other way round is the same split."""
        one = ModelEntry("s", split=(("a", 1.0), ("b", 2.0), ("c", 3.0)))
        other = ModelEntry("s", split=one.split[::-1])
        assert sides(one) == sides(other)

    def test_two_splits_draw_apart(self) -> None:
        """A session's side in one says nothing about its side in another."""
        members = (("a", 1.0), ("b", 1.0))
        one, other = sides(ModelEntry("s", split=members)), sides(ModelEntry("t", split=members))
        same = sum(one[key] == other[key] for key in SESSIONS)
        assert same == pytest.approx(len(SESSIONS) / 2, abs=150)

    def test_a_weight_of_0_is_never_drawn(self) -> None:
        """Neither by a session nor at random."""
        split = ModelEntry("s", split=(("a", 0.0), ("b", 1.0)))
        assert set(sides(split).values()) == {"b"}
        random = Random(0)
        assert {draw(split, None, random) for _ in range(100)} == {"b"}

    def test_the_splits_strategy_replaces_its_members(self) -> None:
        """A member that is reached otherwise keeps its own."""
        catalog = Catalog(
            [
                ModelEntry("a", strategy="chat"),
                ModelEntry("b", strategy="long-context", fallbacks=("a",)),
                ModelEntry("s", split=(("b", 1.0),), strategy="batch"),
                ModelEntry("t", split=(("b", 1.0),)),
            ]
        )
        assert resolved(catalog, "s").targets == (Target("b", "batch"), Target("a", "chat"))
        assert resolved(catalog, "t").primary == Target("b", "long-context")

    def test_a_split_may_lead_to_a_split(self) -> None:
        """Each of them draws by itself, the outer one's strategy and fallbacks first."""
        catalog = Catalog(
            [
                ModelEntry("a", fallbacks=("z",)),
                ModelEntry("inner", split=(("a", 1.0),), fallbacks=("y",), strategy="batch"),
                ModelEntry("outer", split=(("inner", 1.0),), fallbacks=("x",), strategy="chat"),
                ModelEntry("x"),
                ModelEntry("y"),
                ModelEntry("z"),
            ]
        )
        assert models(resolved(catalog, "outer", b"key")) == ["a", "x", "y", "z"]
        assert resolved(catalog, "outer", b"key").primary == Target("a", "chat")


class TestRefusal:
    def test_a_circle_of_fallbacks_is_refused_and_named(self) -> None:
        """The error shows the way round."""
        entries = [
            ModelEntry("x", fallbacks=("b",)),
            ModelEntry("a", fallbacks=("b",)),
            ModelEntry("b", fallbacks=("c",)),
            ModelEntry("c", fallbacks=("a",)),
        ]
        assert problems(*entries) == ["a.fallbacks[b]: a circle: a -> b -> c -> a"]
        with pytest.raises(ValueError, match="a -> b -> c -> a"):
            Catalog(entries)

    def test_a_model_that_falls_back_to_itself_is_refused(self) -> None:
        """By its own name or by an alias."""
        assert problems(ModelEntry("a", fallbacks=("a",))) == ["a.fallbacks[a]: a circle: a -> a"]
        assert problems(ModelEntry("a", aliases=("b",), fallbacks=("b",))) == [
            "a.fallbacks[b]: a circle: a -> a"
        ]

    def test_a_circle_through_a_split_is_refused(self) -> None:
        """A member may not lead back to the split."""
        entries = [ModelEntry("s", split=(("m", 1.0),)), ModelEntry("m", fallbacks=("s",))]
        assert problems(*entries) == ["s.split[m]: a circle: s -> m -> s"]

    def test_a_long_chain_is_no_circle(self) -> None:
        """Its length is not limited by recursion."""
        chain = [ModelEntry(f"m{n}", fallbacks=(f"m{n + 1}",)) for n in range(5000)]
        catalog = Catalog([*chain, ModelEntry("m5000")])
        assert len(resolved(catalog, "m4000").targets) == 1001

    def test_names_given_twice_are_refused(self) -> None:
        """Two models, a model and an alias, two aliases."""
        assert problems(ModelEntry("a"), ModelEntry("a")) == ["a.name[]: 'a' is given twice"]
        assert problems(ModelEntry("a", aliases=("b",)), ModelEntry("b")) == [
            "a.aliases[b]: 'b' is a model's name"
        ]
        assert problems(ModelEntry("a", aliases=("x",)), ModelEntry("b", aliases=("x",))) == [
            "b.aliases[x]: 'x' already stands for 'a'"
        ]
        assert problems(ModelEntry("a", aliases=("a",))) == ["a.aliases[a]: 'a' is a model's name"]

    def test_unknown_targets_are_refused(self) -> None:
        """In fallbacks and in splits."""
        assert problems(
            ModelEntry("a", fallbacks=("b",)), ModelEntry("s", split=(("a", 1.0), ("c", 1.0)))
        ) == ["a.fallbacks[b]: 'b' is no model", "s.split[c]: 'c' is no model"]

    def test_targets_named_twice_are_refused(self) -> None:
        """Also where the second name is an alias of the first."""
        target = ModelEntry("b", aliases=("c",))
        assert problems(ModelEntry("a", fallbacks=("b", "c")), target) == [
            "a.fallbacks[c]: 'c' is named twice"
        ]
        assert problems(ModelEntry("a", split=(("c", 1.0), ("b", 1.0))), target) == [
            "a.split[b]: 'b' is named twice"
        ]

    @pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), 2e9])
    def test_a_weight_out_of_range_is_refused(self, weight: float) -> None:
        """A weight is a number from 0 to a thousand million."""
        found = faults([ModelEntry("a"), ModelEntry("s", split=(("a", weight),))])
        assert [(f.entry, f.field, f.item) for f in found] == [("s", "split", "a")]

    def test_a_split_of_nothing_is_refused(self) -> None:
        """At least one member has a weight."""
        assert problems(ModelEntry("a"), ModelEntry("s", split=(("a", 0.0),))) == [
            "s.split[]: every weight is 0"
        ]

    def test_every_fault_is_found(self) -> None:
        """The text of the error has all of them."""
        entries = [ModelEntry("a", fallbacks=("x",)), ModelEntry("b", fallbacks=("y",))]
        with pytest.raises(ValueError, match=r"a\.fallbacks: 'x' .*; b\.fallbacks: 'y'"):
            Catalog(entries)


names = st.sampled_from(["a", "b", "c", "d", "e"])
entries = st.lists(
    st.builds(
        ModelEntry,
        name=names,
        aliases=st.lists(st.sampled_from(["x", "y", "a"]), max_size=2).map(tuple),
        fallbacks=st.lists(names | st.just("x"), max_size=3).map(tuple),
        split=st.lists(st.tuples(names, st.floats(width=32)), max_size=3).map(tuple),
    ),
    max_size=5,
)


@given(entries)
def test_any_entries_are_a_catalog_or_have_a_fault(given_entries: list[ModelEntry]) -> None:
    """What has no fault resolves every listed name to different models that serve something."""
    found = faults(given_entries)
    if found:
        assert all(isinstance(fault, Fault) for fault in found)
        with pytest.raises(ValueError, match=":"):
            Catalog(given_entries)
        return
    catalog = Catalog(given_entries)
    for name in catalog.listed():
        targets = resolved(catalog, name, b"key").targets
        assert targets
        assert len({target.model for target in targets}) == len(targets)
        for target in targets:
            entry = catalog.entry(target.model)
            assert entry is not None
            assert entry.name == target.model
            assert not entry.split
