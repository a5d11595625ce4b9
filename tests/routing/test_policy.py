"""A request goes nowhere that its residency, its no-store wish or its hops forbid."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import Reason, Rejection
from extproc.routing.endpoint import Info, Kind, Peer, Url
from extproc.routing.policy import (
    NOBODY,
    UNRESTRICTED,
    Restriction,
    append_hop,
    client_restriction,
    is_cluster_id,
    no_store_of,
    parse_hops,
    residency_label,
    residency_of,
    restriction_of,
)

ENGINE = Info("engine", Url("http", "10.0.0.1", 80), ("m",))
PLAIN = replace(ENGINE, id="plain", kind=Kind.EXTERNAL)
EU = replace(PLAIN, id="eu", residency="eu")
US = replace(PLAIN, id="us", residency="us")
FORGETFUL = replace(PLAIN, id="forgetful", no_store_allowed=True)
EU_FORGETFUL = replace(EU, id="eu-forgetful", no_store_allowed=True)
BERLIN = replace(ENGINE, id="berlin", kind=Kind.PEER, peer=Peer("berlin", "berlin-1"))
PARIS = replace(ENGINE, id="paris", kind=Kind.PEER, peer=Peer("paris", "paris-1"))
STRAY = replace(ENGINE, id="stray", kind=Kind.PEER)
# What a mistake in a list of endpoints could bring: a label that must match nothing.
ODD = replace(PLAIN, id="odd", residency=NOBODY, no_store_allowed=True)
FLEET = (ENGINE, PLAIN, EU, US, FORGETFUL, EU_FORGETFUL, BERLIN, PARIS, STRAY, ODD)

LABELS = frozenset({"eu", "us"})
CLUSTERS = frozenset({"berlin-1", "paris-1"})


def allowed(restriction: Restriction) -> set[str]:
    """The ids of the fleet that a restriction leaves."""
    return {info.id for info in FLEET if restriction.allows(info)}


header_values = st.lists(
    st.one_of(
        st.sampled_from([b"eu", b"us", b"EU ", b"", b"false", b"0", b"true", b"eu,us", b"\xff"]),
        st.binary(max_size=12),
    ),
    max_size=3,
)
hop_lists = st.lists(st.sampled_from(["berlin-1", "paris-1", "elsewhere"]), max_size=3, unique=True)
cluster_ids = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True).filter(
    lambda text: is_cluster_id(text) and text not in {"own", "next"}
)
restrictions = st.builds(
    Restriction,
    residency=st.frozensets(st.sampled_from(["eu", "us", "mars", NOBODY]), max_size=3),
    no_store=st.booleans(),
    own_only=st.booleans(),
    visited=st.frozensets(st.sampled_from(["berlin-1", "paris-1", "elsewhere"]), max_size=3),
)


class TestAllows:
    def test_nothing_is_kept_from_anybody_without_a_restriction(self) -> None:
        """The empty restriction allows the whole fleet."""
        assert allowed(UNRESTRICTED) == {info.id for info in FLEET}
        assert not UNRESTRICTED.is_restricted

    def test_residency_leaves_engines_and_the_providers_of_that_label(self) -> None:
        """Peers, unlabelled providers and those of another label are left out."""
        assert allowed(Restriction(residency=frozenset({"eu"}))) == {"engine", "eu", "eu-forgetful"}

    def test_two_labels_leave_engines_alone(self) -> None:
        """No endpoint has two labels."""
        assert allowed(Restriction(residency=frozenset({"eu", "us"}))) == {"engine"}

    def test_a_label_that_nobody_can_have_leaves_engines_alone(self) -> None:
        """Not even an endpoint that carries that very text."""
        assert allowed(Restriction(residency=frozenset({NOBODY}))) == {"engine"}

    def test_no_store_leaves_engines_and_providers_that_may_be_sent_it(self) -> None:
        """Peers and every other provider are left out."""
        assert allowed(Restriction(no_store=True)) == {"engine", "forgetful", "eu-forgetful", "odd"}

    def test_residency_and_no_store_hold_together(self) -> None:
        """A provider must satisfy both."""
        both = Restriction(residency=frozenset({"eu"}), no_store=True)
        assert allowed(both) == {"engine", "eu-forgetful"}

    def test_own_only_leaves_engines_alone(self) -> None:
        """Neither providers nor peers see a request that came through another gateway."""
        assert allowed(Restriction(own_only=True)) == {"engine"}

    def test_visited_clusters_are_left_out(self) -> None:
        """A peer whose cluster is unknown may be one of them."""
        left = allowed(Restriction(visited=frozenset({"berlin-1"})))
        assert {info.id for info in FLEET} - left == {"berlin", "stray"}

    @given(restrictions)
    def test_our_engines_are_always_allowed(self, restriction: Restriction) -> None:
        """No restriction keeps a request from our own engines."""
        assert restriction.allows(ENGINE)

    @given(restrictions)
    def test_only_the_empty_restriction_is_unrestricted(self, restriction: Restriction) -> None:
        """`is_restricted` says whether it differs from the empty one."""
        assert restriction.is_restricted == (restriction != UNRESTRICTED)


class TestCombining:
    @given(restrictions, restrictions)
    def test_both_together_allow_what_each_allows(self, a: Restriction, b: Restriction) -> None:
        """Combining is the intersection, so it never allows more than a part."""
        assert allowed(a.also(b)) == allowed(a) & allowed(b)

    @given(restrictions, restrictions, restrictions)
    def test_the_order_does_not_matter(
        self, a: Restriction, b: Restriction, c: Restriction
    ) -> None:
        """Combining is commutative, associative and idempotent."""
        assert a.also(b) == b.also(a)
        assert a.also(b).also(c) == a.also(b.also(c))
        assert a.also(a) == a

    @given(restrictions)
    def test_reducing_changes_nothing_for_the_fleet(self, restriction: Restriction) -> None:
        """What an endpoint with known labels may serve stays the same."""
        assert allowed(restriction.reduced(LABELS, CLUSTERS)) == allowed(restriction)

    @given(st.lists(restrictions, min_size=1, max_size=50))
    def test_reduced_restrictions_are_few(self, many: list[Restriction]) -> None:
        """Their number is bounded by the labels and clusters that there are."""
        bound = 1 + 2 * (len(LABELS) + 1) + 2 + 2 ** len(CLUSTERS)
        assert len({restriction.reduced(LABELS, CLUSTERS) for restriction in many}) <= bound

    @given(header_values, header_values, hop_lists, st.booleans(), restrictions)
    def test_a_request_can_only_restrict(
        self,
        residency: list[bytes],
        no_store: list[bytes],
        hops: list[str],
        forward: bool,  # noqa: FBT001 - hypothesis passes by position
        client: Restriction,
    ) -> None:
        """Whatever headers say, a client's policy holds."""
        restriction = restriction_of(
            residency=residency,
            no_store=no_store,
            hops=hops,
            forward_hopped_requests=forward,
            client=client,
        )
        assert allowed(restriction) <= allowed(client)

    @given(header_values, header_values, header_values)
    def test_another_header_line_never_allows_more(
        self, residency: list[bytes], no_store: list[bytes], more: list[bytes]
    ) -> None:
        """Adding lines leaves the same endpoints or fewer."""
        before = restriction_of(residency=residency, no_store=no_store)
        after = restriction_of(residency=residency + more, no_store=no_store + more)
        assert allowed(after) <= allowed(before)


class TestResidencyHeader:
    @pytest.mark.parametrize(
        ("text", "label"),
        [
            ("eu", "eu"),
            (" EU\t", "eu"),
            ("eu-west.1_a", "eu-west.1_a"),
            ("0", "0"),
            ("false", "false"),
        ],
    )
    def test_a_label_is_trimmed_and_lowered(self, text: str, label: str) -> None:
        """Labels compare exactly after that."""
        assert residency_label(text) == label

    @pytest.mark.parametrize(
        "text", ["", " ", "eu,us", "eu us", "é", "\u212aa", "-eu", "a" * 65, "eu\n", NOBODY, "*"]
    )
    def test_junk_is_a_label_that_nobody_can_have(self, text: str) -> None:
        """Empty, a list, other alphabets, too long: no endpoint has it."""
        assert residency_label(text) == NOBODY

    def test_no_line_is_no_restriction(self) -> None:
        """Absence is the only way to ask for nothing."""
        assert residency_of([]) == frozenset()

    def test_equal_lines_are_one_label(self) -> None:
        """Two lines that say the same restrict like one."""
        assert residency_of([b"eu", b" EU"]) == {"eu"}

    def test_lines_that_differ_leave_engines_alone(self) -> None:
        """Both labels would have to hold."""
        assert allowed(restriction_of(residency=[b"eu", b"us"])) == {"engine"}

    @pytest.mark.parametrize("value", [b"", b"\xff", b"eu,us", b"e\x00u"])
    def test_a_junk_line_leaves_engines_alone(self, value: bytes) -> None:
        """What cannot be read fails closed."""
        assert allowed(restriction_of(residency=[value])) == {"engine"}


class TestNoStoreHeader:
    @pytest.mark.parametrize("value", [b"", b"1", b"true", b"no", b"off", b"00", b"\xff", b"0,0"])
    def test_anything_but_false_and_0_restricts(self, value: bytes) -> None:
        """Empty and junk restrict too."""
        assert no_store_of([value])

    @pytest.mark.parametrize("value", [b"false", b"0", b" False ", b"FALSE\t"])
    def test_false_and_0_do_not_restrict(self, value: bytes) -> None:
        """Case and blanks around do not matter."""
        assert not no_store_of([value])

    def test_one_restricting_line_is_enough(self) -> None:
        """A second line cannot take back what the first one says."""
        assert no_store_of([b"true", b"false"])
        assert no_store_of([b"0", b""])
        assert not no_store_of([b"0", b"false"])
        assert not no_store_of([])


class TestRestrictionOf:
    def test_a_plain_request_has_its_clients_restriction(self) -> None:
        """Without headers and hops nothing is added."""
        client = client_restriction("EU", no_store=True)
        assert restriction_of(client=client) is client
        assert client == Restriction(residency=frozenset({"eu"}), no_store=True)
        assert restriction_of() == UNRESTRICTED
        assert client_restriction(None, no_store=False) == UNRESTRICTED

    def test_a_clients_empty_label_forbids_every_provider(self) -> None:
        """A policy that cannot be read fails closed."""
        assert allowed(client_restriction("", no_store=False)) == {"engine"}

    def test_a_hopped_request_is_for_our_engines(self) -> None:
        """It goes on only where configuration lets it."""
        assert allowed(restriction_of(hops=("berlin-1",))) == {"engine"}

    def test_a_forwarded_request_does_not_go_back(self) -> None:
        """Clusters that it passed through are left out, others are not."""
        onward = restriction_of(hops=("berlin-1",), forward_hopped_requests=True)
        assert "berlin" not in allowed(onward)
        assert {"paris", "plain"} <= allowed(onward)


class TestHops:
    def test_no_header_is_no_hop(self) -> None:
        """A request that comes from a client itself has none."""
        assert parse_hops([], "own") == ()

    def test_a_list_is_read_in_order(self) -> None:
        """Spaces and tabs around ids are ignored."""
        assert parse_hops([b"edge-1 ,\tb.2"], "own") == ("edge-1", "b.2")

    @pytest.mark.parametrize(
        "line",
        [
            b"",
            b" ",
            b"abc def",
            b"-1",
            b"0",
            b"999",
            b"9" * 500,
            b"1,1",
            b"a,a",
            b"a,",
            b",a",
            b"a,,b",
            b"a;b",
            b"a\n",
            b"\xff",
            "é".encode(),
            b"a" * 65,
            b"-a",
            b"a\x00",
        ],
    )
    def test_junk_is_refused(self, line: bytes) -> None:
        """It is never read as no hops."""
        refused = parse_hops([line], "own")
        assert isinstance(refused, Rejection)
        assert (refused.status, refused.reason) == (508, Reason.HOP_INVALID)
        assert refused.should_retry is False

    def test_two_lines_are_refused(self) -> None:
        """Even when they say the same."""
        refused = parse_hops([b"a", b"a"], "own")
        assert isinstance(refused, Rejection)
        assert (refused.status, refused.reason) == (508, Reason.HOP_INVALID)

    def test_our_own_id_is_a_loop(self) -> None:
        """Wherever in the list it stands."""
        for line in (b"own", b"a,own", b"own,a"):
            refused = parse_hops([line], "own")
            assert isinstance(refused, Rejection)
            assert (refused.status, refused.reason) == (508, Reason.LOOP)
            assert refused.should_retry is False

    def test_the_limit_itself_is_allowed(self) -> None:
        """Eight hops pass and nine do not."""
        ids = [f"c{n}" for n in range(9)]
        assert parse_hops([",".join(ids[:8]).encode()], "own") == tuple(ids[:8])
        refused = parse_hops([",".join(ids).encode()], "own")
        assert isinstance(refused, Rejection)
        assert (refused.status, refused.reason) == (508, Reason.TOO_MANY_HOPS)
        assert refused.should_retry is False

    def test_the_limit_is_a_setting(self) -> None:
        """One hop may be all that is allowed."""
        assert parse_hops([b"a"], "own", 1) == ("a",)
        assert isinstance(parse_hops([b"a,b"], "own", 1), Rejection)

    def test_our_id_is_appended(self) -> None:
        """The list towards a peer ends with us."""
        assert append_hop((), "own") == b"own"
        assert append_hop(("a", "b"), "own") == b"a,b,own"

    @given(st.lists(st.binary(max_size=80), max_size=3))
    def test_any_bytes_give_ids_or_a_refusal(self, values: list[bytes]) -> None:
        """Nothing raises, and what is accepted is a list of different cluster ids."""
        hops = parse_hops(values, "own")
        if isinstance(hops, Rejection):
            assert hops.status == 508
        else:
            assert bool(hops) == bool(values)
            assert len(hops) == len(set(hops)) <= 8
            assert all(is_cluster_id(hop) and hop != "own" for hop in hops)

    @given(st.lists(cluster_ids, max_size=7, unique=True))
    def test_a_list_that_we_send_is_read_back_by_the_next(self, hops: list[str]) -> None:
        """Appending and parsing are inverse; coming back to us is a loop."""
        sent = append_hop(hops, "own")
        assert parse_hops([sent], "next") == (*hops, "own")
        back = parse_hops([sent], "own")
        assert isinstance(back, Rejection)
        assert back.reason is Reason.LOOP


class TestClusterId:
    @pytest.mark.parametrize("text", ["edge-1", "a", "A.b_c", "1a", "x" * 64])
    def test_letters_and_digits_make_an_id(self, text: str) -> None:
        """At least one letter, at most 64 characters."""
        assert is_cluster_id(text)

    @pytest.mark.parametrize("text", ["", "1", "1.2", "-a", ".a", "a b", "a,b", "x" * 65, "ä"])
    def test_numbers_and_other_characters_do_not(self, text: str) -> None:
        """A bare number looks like a hop count."""
        assert not is_cluster_id(text)
