"""Answers in the two APIs whose streams are made of named events: Responses and Messages."""

from __future__ import annotations

from extproc.lab.asks import Problem
from extproc.lab.tally import FinishReason
from extproc.lab.voice import Speech, Subject, Voice, error_body, json_bytes, named_event

Json = dict[str, object]


class ResponseVoice(Voice):
    """OpenAI's Responses API: one message with one text part."""

    def __init__(self, about: Subject, speech: Speech) -> None:
        super().__init__(about, speech)
        self._sequence = 0
        self._item_id = f"msg_{about.engine}_{about.number}"

    def opening(self) -> bytes:
        """The response, its message and its text part begin."""
        started = self._response("in_progress", [], None)
        item = self._item("in_progress", [])
        part = {"item_id": self._item_id, "content_index": 0, "part": _part("")}
        return (
            self._named("response.created", {"response": started})
            + self._named("response.in_progress", {"response": started})
            + self._named("response.output_item.added", {"output_index": 0, "item": item})
            + self._named("response.content_part.added", {"output_index": 0, **part})
        )

    def chunk(self, first: int, count: int) -> bytes:
        """One numbered event for each of the tokens."""
        text = self.speech.text
        return b"".join(self.token_event(text(i, 1)) for i in range(first, first + count))

    def token_event(self, text: str) -> bytes:
        """A text delta."""
        stamp = self.speech.stamp
        delta: Json = {**self._place(), "delta": text, "logprobs": []}
        if stamp is not None:
            delta["sent_at"] = stamp()
        return self._named("response.output_text.delta", delta)

    def closing(self, produced: int, reason: FinishReason) -> bytes:
        """Part, message and response end."""
        text = self.speech.text(0, produced)
        item = self._item("completed", [_part(text)])
        name = "response.completed" if reason is FinishReason.STOP else "response.incomplete"
        done: Json = {**self._place(), "text": text, "logprobs": []}
        return (
            self._named("response.output_text.done", done)
            + self._named("response.content_part.done", {**self._place(), "part": _part(text)})
            + self._named("response.output_item.done", {"output_index": 0, "item": item})
            + self._named(name, {"response": self._finished(produced, reason)})
        )

    def whole(self, produced: int, reason: FinishReason) -> bytes:
        """The response with its one message."""
        return json_bytes(self._finished(produced, reason))

    def failure(self, message: str) -> bytes:
        """An error event."""
        return self._named("error", {"code": "server_error", "message": message, "param": None})

    def _named(self, name: str, fields: Json) -> bytes:
        event = named_event(name, {"type": name, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return event

    def _place(self) -> Json:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _item(self, status: str, content: list[object]) -> Json:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _finished(self, produced: int, reason: FinishReason) -> Json:
        about = self.about
        usage = {
            "input_tokens": about.prompt_tokens,
            "input_tokens_details": {"cached_tokens": about.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": produced,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": about.prompt_tokens + produced,
        }
        item = self._item("completed", [_part(self.speech.text(0, produced))])
        status = "completed" if reason is FinishReason.STOP else "incomplete"
        return self._response(status, [item], usage)

    def _response(self, status: str, output: list[object], usage: Json | None) -> Json:
        about = self.about
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{about.engine}_{about.number}",
            "object": "response",
            "created_at": about.created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": None,
            "metadata": {},
            "model": about.model,
            "output": output,
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "usage": usage,
        }


class MessageVoice(Voice):
    """Anthropic's Messages API: one text block."""

    def opening(self) -> bytes:
        """The message and its text block begin."""
        block = {"type": "text", "text": ""}
        return named_event(
            "message_start", {"type": "message_start", "message": self._message([], None, 0)}
        ) + named_event(
            "content_block_start",
            {"type": "content_block_start", "index": 0, "content_block": block},
        )

    def token_event(self, text: str) -> bytes:
        """A text delta."""
        delta = {"type": "text_delta", "text": text}
        return named_event(
            "content_block_delta", {"type": "content_block_delta", "index": 0, "delta": delta}
        )

    def closing(self, produced: int, reason: FinishReason) -> bytes:
        """Block and message end."""
        delta = {"stop_reason": _stop_reason(reason), "stop_sequence": None}
        usage = {"output_tokens": produced}
        return (
            named_event("content_block_stop", {"type": "content_block_stop", "index": 0})
            + named_event(
                "message_delta", {"type": "message_delta", "delta": delta, "usage": usage}
            )
            + named_event("message_stop", {"type": "message_stop"})
        )

    def whole(self, produced: int, reason: FinishReason) -> bytes:
        """The message with its one block."""
        content: list[object] = [{"type": "text", "text": self.speech.text(0, produced)}]
        return json_bytes(self._message(content, _stop_reason(reason), produced))

    def failure(self, message: str) -> bytes:
        """An error event."""
        problem = Problem(500, "InternalServerError", message)
        return b"event: error\ndata: " + error_body(problem, is_anthropic=True) + b"\n\n"

    def _message(self, content: list[object], stop_reason: str | None, produced: int) -> Json:
        about = self.about
        usage = {
            "input_tokens": about.prompt_tokens - about.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": about.cached_tokens,
            "output_tokens": produced,
        }
        return {
            "id": f"msg_{about.engine}_{about.number}",
            "type": "message",
            "role": "assistant",
            "model": about.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": usage,
        }


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _stop_reason(reason: FinishReason) -> str:
    return "end_turn" if reason is FinishReason.STOP else "max_tokens"
