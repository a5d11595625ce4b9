"""Answers to chat completions, text completions and embeddings."""

from __future__ import annotations

import base64
import struct
from abc import abstractmethod

import xxhash

from extproc.lab.asks import Ask, Problem
from extproc.lab.tally import FinishReason
from extproc.lab.voice import (
    DONE,
    Speech,
    Subject,
    Voice,
    data_event,
    error_body,
    json_bytes,
)

Json = dict[str, object]


class _Completions(Voice):
    """What chat and text completions share."""

    id_prefix = ""
    object_name = ""
    chunk_name = ""

    def __init__(self, about: Subject, speech: Speech, *, include_usage: bool) -> None:
        super().__init__(about, speech)
        self.include_usage = include_usage

    @abstractmethod
    def part(self, text: str) -> Json:
        """The piece of a choice that carries text in a stream; all the text has gone if empty."""

    @abstractmethod
    def full(self, text: str) -> Json:
        """The piece of a choice that carries the whole text."""

    def closing(self, produced: int, reason: FinishReason) -> bytes:
        """The finish chunk, the usage chunk if asked for, and the end mark."""
        events = self._chunk([_choice(self.part(""), reason)])
        if self.include_usage:
            events += self._chunk([], {"usage": self._usage(produced)})
        return events + DONE

    def whole(self, produced: int, reason: FinishReason) -> bytes:
        """One choice with all the tokens."""
        choices: list[object] = [_choice(self.full(self.speech.text(0, produced)), reason)]
        envelope = self._envelope(self.object_name, choices)
        return json_bytes({**envelope, "usage": self._usage(produced)})

    def failure(self, message: str) -> bytes:
        """An error in place of a chunk, as inside a 200 answer, and the end mark."""
        problem = Problem(500, "InternalServerError", message)
        return b"data: " + error_body(problem, is_anthropic=False) + b"\n\n" + DONE

    def token_event(self, text: str) -> bytes:
        """The chunk that carries the text."""
        return self._chunk([_choice(self.part(text))])

    def _chunk(self, choices: list[object], more: Json | None = None) -> bytes:
        return data_event({**self._envelope(self.chunk_name, choices), **(more or {})})

    def _envelope(self, object_name: str, choices: list[object]) -> Json:
        about = self.about
        return {
            "id": f"{self.id_prefix}-{about.engine}-{about.number}",
            "object": object_name,
            "created": about.created,
            "model": about.model,
            "system_fingerprint": about.engine,
            "choices": choices,
        }

    def _usage(self, produced: int) -> Json:
        about = self.about
        return {
            "prompt_tokens": about.prompt_tokens,
            "completion_tokens": produced,
            "total_tokens": about.prompt_tokens + produced,
            "prompt_tokens_details": {"cached_tokens": about.cached_tokens},
        }


class ChatVoice(_Completions):
    """Chat completions."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def opening(self) -> bytes:
        """The chunk that names the role."""
        return self._chunk([_choice({"delta": {"role": "assistant", "content": ""}})])

    def part(self, text: str) -> Json:
        """A delta."""
        return {"delta": {"content": text} if text else {}}

    def full(self, text: str) -> Json:
        """A message."""
        return {"message": {"role": "assistant", "content": text}}


class CompletionVoice(_Completions):
    """Text completions."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def opening(self) -> bytes:
        """Nothing: a text completion starts with its text."""
        return b""

    def part(self, text: str) -> Json:
        """A text."""
        return {"text": text}

    def full(self, text: str) -> Json:
        """A text."""
        return {"text": text}


def embeddings_body(ask: Ask, about: Subject) -> bytes:
    """The answer to an embeddings request: for each text a vector that only the text decides."""
    data: list[Json] = []
    for index, text in enumerate(ask.texts):
        vector = [_component(text, i) for i in range(ask.dimensions)]
        packed = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        embedding: object = packed if ask.base64 else vector
        data.append({"object": "embedding", "index": index, "embedding": embedding})
    usage = {"prompt_tokens": about.prompt_tokens, "total_tokens": about.prompt_tokens}
    body = {
        "id": f"embd-{about.engine}-{about.number}",
        "object": "list",
        "created": about.created,
        "model": about.model,
        "data": data,
        "usage": usage,
    }
    return json_bytes(body)


def _component(text: str, index: int) -> float:
    digest = xxhash.xxh32_intdigest(text.encode("utf-8", "surrogatepass"), seed=index)
    return digest / 2**31 - 1.0


def _choice(piece: Json, reason: FinishReason | None = None) -> Json:
    finish = None if reason is None else reason.value
    return {"index": 0, **piece, "logprobs": None, "finish_reason": finish}
