"""Request bodies of every size and kind."""

from __future__ import annotations

import json
from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

_BOUNDARY: Final = "a-line-that-no-file-has"
FORM_TYPE: Final = f"multipart/form-data; boundary={_BOUNDARY}"


def chat(model: str | None, **fields: object) -> bytes:
    """A small chat request; without a model if it is None."""
    named = {} if model is None else {"model": model}
    said = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    return json.dumps({**named, **said, **fields}).encode()


def sized_chat(model: str | None, size: int, *, is_model_last: bool = False) -> bytes:
    """A chat request of exactly `size` bytes, of many messages."""
    named = b"" if model is None else b'"model":%b' % json.dumps(model).encode()
    begin, end = (b"", b"," + named) if is_model_last else (named + b",", b"")
    if model is None:
        begin = end = b""
    before = b'{%b"max_tokens":4,"messages":[{"role":"user","content":"hello"}' % begin
    after = b"]%b}" % end
    left = size - len(before) - len(after)
    message = b',{"role":"user","content":"%b"}' % (b"a word and " * 90)
    whole, rest = divmod(left, len(message))
    frame = b',{"role":"user","content":"%b"}'
    overhead = len(frame) - 2
    if rest < overhead and whole:
        whole, rest = whole - 1, rest + len(message)
    assert rest >= overhead, size
    body = before + message * whole + frame % (b"x" * (rest - overhead)) + after
    assert len(body) == size
    return body


def form(model: str | None, size: int = 1000, *, is_model_last: bool = True) -> bytes:
    """A form with a file, of exactly `size` bytes; its type is `FORM_TYPE`."""
    line = b"--%b\r\n" % _BOUNDARY.encode()
    named = b""
    if model is not None:
        named = b'%bcontent-disposition: form-data; name="model"\r\n\r\n%b\r\n' % (
            line,
            model.encode(),
        )
    opening = (
        b'%bcontent-disposition: form-data; name="file"; filename="a.wav"\r\n'
        b"content-type: audio/wav\r\n\r\n"
    ) % line
    before = opening if is_model_last else named + opening
    after = b"\r\n" + (named if is_model_last else b"") + b"--%b--\r\n" % _BOUNDARY.encode()
    left = size - len(before) - len(after)
    assert left >= 0, size
    return before + b"\xff\x00RIFF\r\n--"[: min(left, 10)] + b"\x80" * max(0, left - 10) + after
