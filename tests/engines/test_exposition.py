"""Exposition: the wanted samples of a page, whatever else is on it."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from extproc.engines.exposition import (
    MAX_LABELS_BYTES,
    MAX_SAMPLES,
    Families,
    Labels,
    Sample,
    read,
)
from extproc.errors import UnreadableMetrics

PAGES = Path(__file__).parent / "pages"
WANTED = ("vllm:num_requests_running", "tgi_queue_size", "x", "vllm:prompt_tokens_total")
FAMILIES = Families(WANTED)


def samples(*lines: str) -> list[Sample]:
    """What is read from a page of these lines."""
    return read("\n".join((*lines, "")).encode(), FAMILIES)


def one(line: str) -> Sample:
    """The only sample of a page of one line."""
    (sample,) = samples(line)
    return sample


def labels(**pairs: str) -> Labels:
    """These labels."""
    return Labels.of(tuple(pairs.items()))


def test_only_wanted_families_are_read() -> None:
    """Comments, other families and longer names are passed over."""
    found = samples(
        "# HELP x a family",
        "# TYPE x gauge",
        "x 1",
        "xy 2",
        "y 3",
        "x_created 4",
        "x_total 5",
        "a_x 6",
        'y{a="\\n"} 7',
    )
    assert found == [Sample("x", labels(), 1.0)]


def test_samples_keep_the_pages_order_and_their_labels() -> None:
    """Each series of a family is one sample."""
    assert samples('x{b="2",a="1"} 1', "tgi_queue_size 2", 'x{a="3"} 4') == [
        Sample("x", labels(a="1", b="2"), 1.0),
        Sample("tgi_queue_size", labels(), 2.0),
        Sample("x", labels(a="3"), 4.0),
    ]


def test_a_missing_label_reads_as_empty() -> None:
    """A label's value is there by name, and a missing label is empty, as the format defines."""
    sample = one('x{a="1"} 1')
    assert sample.labels.get("a") == "1"
    assert sample.labels.get("b") == ""


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("vllm:num_requests_running 1", "vllm:num_requests_running"),
        ("vllm_num_requests_running 1", "vllm:num_requests_running"),
        ("ray_vllm_num_requests_running 1", "vllm:num_requests_running"),
        ("ray_vllm:num_requests_running 1", "vllm:num_requests_running"),
        ("tgi:queue_size 1", "tgi_queue_size"),
    ],
)
def test_a_wrappers_spelling_of_a_name_is_the_same_name(line: str, name: str) -> None:
    """The separator after the namespace is ':' or '_', and `ray_` may precede it."""
    assert one(line).name == name


def test_no_other_prefix_is_taken_for_a_wrapper() -> None:
    """A family of another exporter that ends alike is another family."""
    assert (
        samples("my_vllm_num_requests_running 1", "xray_x 1", "vllm::num_requests_running 1") == []
    )


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (r'{a="say \"hi\""}', 'say "hi"'),
        (r'{a="C:\\new"}', r"C:\new"),
        (r'{a="two\nlines"}', "two\nlines"),
        (r'{a="\\"}', "\\"),
        (r'{a="\t"}', r"\t"),
        ('{a="}{"}', "}{"),
        ('{a="x 9 # y"}', "x 9 # y"),
        ('{a="b=\\"c\\",d"}', 'b="c",d'),
        ('{a=""}', ""),
        ('{a="é"}', "é"),
        ('{ a = "v" , }', "v"),
    ],
)
def test_label_values_are_unescaped(written: str, meant: str) -> None:
    """Quotes, backslashes, line feeds, braces and blanks in a value do not end it."""
    sample = one(f"x{written} 3")
    assert sample == Sample("x", labels(a=meant), 3.0)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("x 1", 1.0),
        ("x\t1", 1.0),
        ("  x   1.5  ", 1.5),
        ('x{a="b"}2', 2.0),
        ("x 1e3", 1000.0),
        ("x -0.25", -0.25),
        ("x +Inf", math.inf),
        ("x -Inf", -math.inf),
        ("x 1 1766000000123", 1.0),
        ("x 1 1766000000.123", 1.0),
        ("x 1 -5", 1.0),
        ('x 1 # {trace_id="a b"} 0.5 1766000000.0', 1.0),
        ('x 1 1766000000.0 # {trace_id="a"} 0.5', 1.0),
        ("x{} 1", 1.0),
    ],
)
def test_values_are_read_with_what_may_follow_them(line: str, value: float) -> None:
    """Blanks, timestamps and exemplars do not change a value."""
    assert one(line).value == value


@pytest.mark.parametrize("text", ["NaN", "nan", "1_000", "0x10", "one", "1.2.3"])
def test_a_value_that_is_no_number_is_unknown(text: str) -> None:
    """NaN stands for it."""
    assert math.isnan(one(f"x {text}").value)


@pytest.mark.parametrize(
    "line",
    [
        "x",
        "x ",
        'x{a="b"}',
        'x{a="b" 1',
        'x{a="b',
        "x{a=b} 1",
        'x{="b"} 1',
        'x{a="b"c="d"} 1',
        'x{a="b"} 1 2 3',
        "x 1 later",
        "x}1",
    ],
)
def test_a_line_of_a_wanted_family_that_is_no_sample_is_refused(line: str) -> None:
    """A series that is left out would make a sum too small; the error names the family."""
    with pytest.raises(UnreadableMetrics) as refused:
        samples("tgi_queue_size 1", line, "tgi_queue_size 1")
    assert refused.value.signal == "x"


def test_a_page_may_end_without_a_line_feed() -> None:
    """The last line counts in any case."""
    assert read(b"x 1\nx 2", FAMILIES)[-1].value == 2.0


def test_lines_may_end_with_carriage_returns() -> None:
    """Both line ends are read alike."""
    page = 'x 1\r\nx{a="b"} 2\r\n# EOF\r\n'
    assert [sample.value for sample in read(page.encode(), FAMILIES)] == [1.0, 2.0]


def test_nothing_is_read_from_what_is_not_a_page() -> None:
    """JSON, HTML and emptiness hold no samples; that this is wrong, the contract says."""
    for page in (b"", b"\n\n", b'{"x": 1}', b"<html>\n<p>x 1</p>\n</html>", b"\x00\xff\xfe"):
        assert read(page, FAMILIES) == []


def test_no_families_find_nothing() -> None:
    """An engine that is never read has nothing to look for."""
    assert read(b"\nx 1\n", Families(())) == []


@pytest.mark.parametrize("name", ["", "a-b", "1a", "a{b}", "a b"])
def test_a_name_that_no_page_can_have_is_refused(name: str) -> None:
    """A mistake in a name shows when it is set, not as a missing sample."""
    with pytest.raises(ValueError, match="not a metric name"):
        Families([name])


def test_more_series_than_an_engine_has_are_refused() -> None:
    """What no engine publishes must not hold up the event loop."""
    line = 'x{a="b"} 1\n'
    assert len(read((line * MAX_SAMPLES).encode(), FAMILIES)) == MAX_SAMPLES
    with pytest.raises(UnreadableMetrics, match="more than"):
        read((line * (MAX_SAMPLES + 1)).encode(), FAMILIES)


def test_labels_longer_than_an_engine_has_are_refused() -> None:
    """As above, for one line."""
    with pytest.raises(UnreadableMetrics, match="labels are longer"):
        samples(f'x{{a="{"b" * MAX_LABELS_BYTES}"}} 1')


def test_families_stay_right_over_many_pages_with_ever_new_labels() -> None:
    """What is kept between pages is bounded and never mixed up."""
    for number in range(3000):
        (sample,) = read(f'x{{a="{number}"}} {number}\n'.encode(), FAMILIES)
        assert sample == Sample("x", labels(a=str(number)), float(number))


def test_many_and_long_labels_on_one_page_are_read() -> None:
    """What is too much to keep between pages is still read."""
    values = [*map(str, range(2000)), "b" * 5000]
    for _ in range(2):
        found = samples(*(f'x{{a="{value}"}} 1' for value in values))
        assert [sample.labels.get("a") for sample in found] == values


@settings(deadline=None, max_examples=300)
@given(
    st.binary(max_size=300) | st.text(alphabet='x 1{}"\\,=#\n\rae_', max_size=60).map(str.encode)
)
def test_any_bytes_are_read_or_refused(page: bytes) -> None:
    """No input raises anything but the error of this room."""
    try:
        found = read(page, FAMILIES)
    except UnreadableMetrics:
        return
    assert all(sample.name in WANTED for sample in found)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 5000), max_size=12), st.sampled_from(sorted(PAGES.glob("*.txt"))))
def test_where_a_page_is_cut_makes_no_difference(cuts: list[int], path: Path) -> None:
    """A page that arrives in pieces reads as the whole one."""
    page = path.read_bytes()[:5000]
    families = Families(["vllm:num_requests_running", "sglang:num_running_reqs", "tgi_queue_size"])
    reading = families.begin()
    places = [0, *sorted(cuts), len(page)]
    for start, end in pairwise(places):
        reading.feed(page[start:end])
    assert reading.end() == read(page, families)


NAMES = st.sampled_from([*WANTED, "x_created", "xy", "vllm:num_requests", "other_total"])
VALUES = st.floats().map(repr) | st.sampled_from(["NaN", "+Inf", "-Inf", "1e+06", "0"])
LABELS = st.dictionaries(
    st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True),
    st.text(st.characters(exclude_categories=("Cs", "Cc")) | st.just("\n"), max_size=12),
    max_size=4,
)


def line_of(name: str, pairs: dict[str, str], value: str, timestamp: int | None) -> str:
    """One line of a page, as an exporter writes it."""
    escapes = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})
    inside = ",".join(f'{key}="{text.translate(escapes)}"' for key, text in pairs.items())
    after = "" if timestamp is None else f" {timestamp}"
    return f"{name}{{{inside}}} {value}{after}" if pairs else f"{name} {value}{after}"


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.builds(line_of, NAMES, LABELS, VALUES, st.none() | st.integers(0, 2**40)), max_size=8
    )
)
def test_valid_pages_read_as_prometheus_reads_them(lines: list[str]) -> None:
    """The reference parser finds the same samples in the same order."""
    page = "".join(f"{line}\n" for line in lines)
    theirs = [
        (sample.name, sample.labels, repr(float(sample.value)))
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name in WANTED
    ]
    ours = [
        (sample.name, dict(sample.labels.by_name), repr(sample.value))
        for sample in read(page.encode(), FAMILIES)
    ]
    assert ours == theirs


@pytest.mark.parametrize("path", sorted(PAGES.glob("*.txt")), ids=lambda path: path.stem)
def test_golden_pages_read_as_prometheus_reads_them(path: Path) -> None:
    """Every sample of a page is found by its name, with the same labels and value."""
    page = path.read_text()
    # Without the comments, because by them the reference renames counters; without exemplars,
    # which its text parser does not know.
    lines = [line.partition(" # ")[0] for line in page.splitlines() if not line.startswith("#")]
    theirs = [
        (sample.name, sample.labels, repr(float(sample.value)))
        for family in text_string_to_metric_families("\n".join([*lines, ""]))
        for sample in family.samples
    ]
    names = {name for name, _, _ in theirs}
    if any(name.startswith("ray_") for name in names):
        theirs = [(name.removeprefix("ray_"), pairs, value) for name, pairs, value in theirs]
        names = {name.removeprefix("ray_") for name in names}
    ours = [
        (sample.name, dict(sample.labels.by_name), repr(sample.value))
        for sample in read(page.encode(), Families(names))
    ]
    assert ours == theirs
