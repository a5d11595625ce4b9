"""Multipart forms: the text fields found, and every ambiguity refused."""

from __future__ import annotations

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.exchange.form import Field, FormError, boundary_of, fields

LAW = settings(deadline=None)
WANTED = frozenset({"model", "stream"})
MODEL = b'Content-Disposition: form-data; name="model"'


def form(*parts: bytes, boundary: bytes = b"b0") -> bytes:
    """A form of `parts`, each headers, blank line and content."""
    body = b"".join(b"--%b\r\n%b\r\n" % (boundary, part) for part in parts)
    return body + b"--%b--\r\n" % boundary


def part(value: bytes, *headers: bytes) -> bytes:
    """A part with `headers`."""
    return b"\r\n".join(headers) + b"\r\n\r\n" + value


def values(body: bytes, boundary: bytes = b"b0") -> list[tuple[str, bytes]]:
    """Name and value of each wanted field."""
    return [(f.name, body[f.start : f.end]) for f in fields(body, boundary, WANTED)]


def test_the_wanted_fields_are_found_in_order_behind_a_file() -> None:
    """A field after a file that holds line ends and dashes is found; others are passed over."""
    noise = b"\r\n--b\r\n\r\n--\r\n" * 1_000
    file = part(
        noise,
        b'content-disposition: form-data; name="file"; filename="a.wav"',
        b"Content-Type: audio/wav",
    )
    language = part(b"en", b'Content-Disposition: form-data; name="language"')
    stream = part(b"true", b"Content-Disposition: form-data; name=stream")
    body = form(file, language, part(b"whisper-1", MODEL), stream)
    assert values(body) == [("model", b"whisper-1"), ("stream", b"true")]
    assert values(b"\r\n" + body) == [("model", b"whisper-1"), ("stream", b"true")]


def test_repeated_empty_and_file_fields_are_reported() -> None:
    """Repetition is the caller's to judge; a file is not text; a value may be empty."""
    body = form(
        part(b"", MODEL),
        part(b"x", MODEL + b'; filename="m.txt"'),
        part(b"eA==", MODEL, b"Content-Transfer-Encoding: base64"),
        part(b"x", MODEL, b"Content-Transfer-Encoding: 8bit"),
    )
    found = fields(body, b"b0", WANTED)
    assert [field.is_text for field in found] == [True, False, False, True]
    assert found[0] == Field("model", found[0].start, found[0].start, is_text=True)


def test_a_real_clients_form_is_read() -> None:
    """What an HTTP library sends is understood."""
    request = httpx2.Request(
        "POST",
        "http://gw/v1/audio/transcriptions",
        data={"model": "whisper-1"},
        files={"file": ('we"ird;name=.mp3', b"\x00\xff" * 1_000, "audio/mpeg")},
    )
    body = request.read()
    assert values(body, boundary_of(request.headers["content-type"])) == [("model", b"whisper-1")]


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ("multipart/form-data; boundary=b0", b"b0"),
        ('multipart/form-data; charset=utf-8; Boundary="a b:c"', b"a b:c"),
        ("multipart/form-data;boundary=" + "x" * 70, b"x" * 70),
        ("multipart/form-data; boundary=x ", b"x"),
    ],
)
def test_the_boundary_is_read_from_the_content_type(content_type: str, boundary: bytes) -> None:
    """Quoted or not, in any letter case."""
    assert boundary_of(content_type) == boundary


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary=""',
        'multipart/form-data; boundary="a "',
        "multipart/form-data; boundary=a; boundary=b",
        "multipart/form-data; boundary=" + "x" * 71,
        "multipart/form-data; boundary=a\xf1",
        'multipart/form-data; boundary="a\\"b"',
        'multipart/form-data; boundary="a',
        "multipart/form-data; boundary=a;",
    ],
)
def test_an_unusable_boundary_is_refused(content_type: str) -> None:
    """Absent, empty, doubled, over-long and exotic boundaries are refused."""
    with pytest.raises(FormError):
        boundary_of(content_type)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "does not begin"),
        (b"x" + form(part(b"m", MODEL)), "does not begin"),
        (b"preamble\r\n" + form(part(b"m", MODEL)), "does not begin"),
        (form(part(b"m", MODEL), boundary=b"other"), "does not begin"),
        (b"--b0", "no line end"),
        (b"--b0 \r\n" + part(b"m", MODEL) + b"\r\n--b0--", "no line end"),
        (b"--b0\n" + part(b"m", MODEL) + b"\r\n--b0--", "no line end"),
        (b"--b0\r\n" + part(b"m", MODEL) + b"\r\n--b0x\r\n", "no line end"),
        (form(part(b"m", MODEL))[:-8], "before its last boundary"),
        (b"--b0\r\n" + part(b"m", MODEL), "before its last boundary"),
        (form(MODEL + b"\r\n"), "no end of headers"),
        (form(part(b"m", MODEL, b"x: " + b"y" * 5_000)), "no end of headers"),
        (form(part(b"m")), "not a header"),
        (form(part(b"m", b"x: y")), "no content-disposition"),
        (form(part(b"m", MODEL, MODEL)), "two content-dispositions"),
        (form(part(b"m", MODEL, b" folded")), "not a header"),
        (form(part(b"m", MODEL, b"x y: z")), "not a header"),
        (form(part(b"m", MODEL + b"\nx: y")), "not a header"),
        (form(part(b"m", b"content-disposition: form-data")), "exactly one name"),
        (form(part(b"m", MODEL + b"; name=x")), "exactly one name"),
        (form(part(b"m", MODEL + b"; name*=utf-8''x")), "exactly one name"),
        (form(part(b"m", b'content-disposition: form-data; name="mo\\del"')), "an escape"),
        (form(part(b"m", b'content-disposition: form-data; name="a')), "cannot be read"),
        (form(part(b"m", MODEL + b"; junk")), "cannot be read"),
        (form(*[part(b"x", b"content-disposition: form-data; name=x")] * 1_001), "more than"),
    ],
)
def test_a_form_that_two_readers_could_take_differently_is_refused(
    body: bytes, problem: str
) -> None:
    """Every looseness is an error that names itself."""
    with pytest.raises(FormError, match=problem):
        fields(body, b"b0", WANTED)


def test_a_thousand_parts_are_read() -> None:
    """The bound itself is allowed."""
    parts = [part(b"x", b"content-disposition: form-data; name=x")] * 999
    assert values(form(*parts, part(b"m", MODEL))) == [("model", b"m")]


CONTENT = st.binary(max_size=40).filter(lambda content: b"b0" not in content)


@LAW
@given(st.lists(st.tuples(st.sampled_from(["model", "file", "stream"]), CONTENT), max_size=5))
def test_a_form_gives_back_what_was_put_in(entries: list[tuple[str, bytes]]) -> None:
    """Any contents come back byte for byte, in order."""
    parts = [
        part(content, b'Content-Disposition: form-data; name="%b"' % name.encode())
        for name, content in entries
    ]
    assert values(form(*parts)) == [entry for entry in entries if entry[0] in WANTED]


@LAW
@given(st.data())
def test_a_damaged_form_is_read_or_refused(data: st.DataObject) -> None:
    """Cut, doubled or overwritten bytes never raise anything but the form's own error."""
    body = form(part(b"\r\n\r\nx", b"content-disposition: form-data; name=f"), part(b"m", MODEL))
    start = data.draw(st.integers(0, len(body)))
    end = data.draw(st.integers(start, len(body)))
    damaged = body[:start] + data.draw(st.binary(max_size=6)) + body[end:]
    try:
        found = fields(damaged, b"b0", WANTED)
    except FormError:
        return
    assert all(0 <= field.start <= field.end <= len(damaged) for field in found)
