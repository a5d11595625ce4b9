"""Whether a router's answers are the upstream's: asked before anything is measured."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Final

import aiohttp
import load
import stream_server
from subjects import Subject

_START_SECONDS: Final = 120.0
_PATH: Final = "/v1/chat/completions"


class WrongAnswer(Exception):  # noqa: N818 - reads as what it is at the place it is raised
    """A router answers, and not with what the upstream said."""


def body(*, is_stream: bool, prompt: str = "Say something.") -> bytes:
    """A request for a chat completion."""
    messages = [{"role": "user", "content": prompt}]
    request: dict[str, object] = {"model": load.MODEL, "messages": messages}
    if is_stream:
        request["stream"] = True
    return json.dumps(request, separators=(",", ":")).encode()


def headers(subject: Subject) -> dict[str, str]:
    """The headers of a request to this subject."""
    sent = {"content-type": "application/json"}
    return sent | ({"x-llmgw-model": load.MODEL} if subject.has_model_header else {})


async def check(subject: Subject, *, chunks: int = 0) -> None:
    """The subject answers with the upstream's words; with `chunks` also with the whole stream.

    It has up to two minutes to begin to answer.

    Raises:
        WrongAnswer: the words are others, or it never answers.
    """
    await _check_one(subject, 0)
    if chunks:
        await _check_one(subject, chunks)


async def _check_one(subject: Subject, chunks: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                status, text = await _ask(session, subject, is_stream=bool(chunks))
            except (aiohttp.ClientError, OSError) as error:
                status, text = 0, repr(error)
            if status == 200:
                break
            if time.monotonic() > deadline:
                raise WrongAnswer(f"{subject.name} answers {status}: {text[:500]}")
            await asyncio.sleep(0.2)
    try:
        said = streamed(text) if chunks else json.loads(text)["choices"][0]["message"]["content"]
    except (ValueError, KeyError) as error:
        raise WrongAnswer(f"{subject.name}'s answer is unreadable: {text[-500:]}") from error
    expected = "".join(stream_server.word(number) for number in range(chunks)) or load.WORDS
    if said != expected:
        raise WrongAnswer(f"{subject.name} answers with something else: {text[:500]}")


async def _ask(
    session: aiohttp.ClientSession, subject: Subject, *, is_stream: bool
) -> tuple[int, str]:
    async with session.post(
        subject.url + _PATH, data=body(is_stream=is_stream), headers=headers(subject)
    ) as response:
        return response.status, await response.text()


def streamed(text: str) -> str:
    """The words of a stream of chat completion chunks."""
    said = ""
    for line in text.splitlines():
        if line.startswith("data:") and "[DONE]" not in line:
            for choice in json.loads(line.removeprefix("data:"))["choices"]:
                said += choice["delta"].get("content") or ""
    return said
