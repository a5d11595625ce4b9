"""API calls on a simulated engine: bodies, streams, limits, errors."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest
from lab_client import CHAT, call, chat, connected

from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine

TEXT_16 = "the sun was low and the sea lay far out one man and his dog ran "


async def test_a_chat_completion_has_text_and_usage() -> None:
    """Without a limit the answer ends by itself, with all its tokens and their count."""
    async with LabEngine() as engine:
        reply = await call(engine, "POST", CHAT, chat())
        assert reply.headers["content-type"] == "application/json"
        (choice,) = reply.json["choices"]
        assert choice["message"] == {"role": "assistant", "content": TEXT_16}
        assert choice["finish_reason"] == "stop"
        assert reply.json["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 16,
            "total_tokens": 19,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_token_limit_is_met_exactly(name: str) -> None:
    """A limit gives just so many tokens and the reason length."""
    async with LabEngine() as engine:
        reply = await call(engine, "POST", CHAT, chat(**{name: 40}))
        (choice,) = reply.json["choices"]
        assert len(choice["message"]["content"].split()) == 40
        assert choice["finish_reason"] == "length"


async def test_a_stream_is_role_content_finish_usage_done() -> None:
    """The chunks come in the order of the API, the last but one with usage and no choices."""
    async with LabEngine("a") as engine:
        body = chat(stream=True, max_tokens=3, stream_options={"include_usage": True})
        reply = await call(engine, "POST", CHAT, body)
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["transfer-encoding"] == "chunked"
        assert reply.body.endswith(b"data: [DONE]\n\n")
        *chunks, usage = reply.events
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert [delta.get("content") for delta in deltas[1:]] == ["the ", "sun ", "was ", None]
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 4 + ["length"]
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 3
        assert {event["system_fingerprint"] for event in reply.events} == {"a"}
        assert engine.counters.streamed == 1


async def test_a_stream_has_no_usage_unless_asked() -> None:
    """Without stream options every chunk has its choice."""
    async with LabEngine() as engine:
        reply = await call(engine, "POST", CHAT, chat(stream=True))
        assert all(event["choices"] for event in reply.events)


async def test_a_stream_starts_before_its_first_token() -> None:
    """Headers come at once even while the engine is held; the role comes with the first token."""
    async with LabEngine() as engine, connected(engine) as connection:
        engine.hold()
        connection.send_head("POST", CHAT, {}, len(chat(stream=True)))
        connection.writer.write(chat(stream=True))
        status, _ = await connection.head()
        assert status == 200
        assert engine.requests[0].tokens_sent == 0
        assert engine.requests[0].answer_seconds is not None


async def test_late_headers_wait_for_the_first_token() -> None:
    """With the option nothing is sent while the engine is held."""
    async with (
        LabEngine(headers_at_once=False) as engine,
        connected(engine) as connection,
    ):
        engine.hold()
        connection.send_head("POST", CHAT, {}, len(chat(stream=True)))
        connection.writer.write(chat(stream=True))
        await engine.until(lambda: engine.running == 1)
        assert engine.requests[0].status is None
        engine.release()
        assert (await connection.answer()).status == 200


async def test_tokens_come_at_the_engines_pace() -> None:
    """Ten tokens after the first at 100 a second take a tenth of a second, never less."""
    slow = EngineSettings(decode_tokens_per_second=100.0)
    async with LabEngine(settings=slow, stamps=True, token_bytes=200) as engine:
        reply = await call(engine, "POST", CHAT, chat(stream=True, max_tokens=11))
        deltas = [event["choices"][0]["delta"] for event in reply.events]
        content = [delta for delta in deltas if delta.get("content")]
        assert [len(delta["content"]) for delta in content] == [200] * 11
        stamps = [delta["sent_at"] for delta in content]
        assert stamps == sorted(stamps)
        # A busy machine makes tokens late, nothing makes them early.
        assert stamps[-1] - engine.requests[0].arrived_at > 0.099


async def test_completions_stream_text() -> None:
    """A text completion's chunks have text and no role."""
    async with LabEngine() as engine:
        body = json.dumps({"model": "m", "prompt": "x", "stream": True, "max_tokens": 2}).encode()
        reply = await call(engine, "POST", "/v1/completions", body)
        texts = [event["choices"][0]["text"] for event in reply.events]
        assert texts == ["the ", "sun ", ""]


async def test_an_unknown_model_is_vllms_404() -> None:
    """The error names the parameter and has the status as its code."""
    async with LabEngine() as engine:
        reply = await call(engine, "POST", CHAT, chat(model="other"))
        assert reply.status == 404
        assert reply.json == {
            "error": {
                "message": "The model `other` does not exist.",
                "type": "NotFoundError",
                "param": "model",
                "code": 404,
            }
        }


async def test_a_body_without_a_model_is_served() -> None:
    """The engine's first model is the default."""
    async with LabEngine(models=("first", "second")) as engine:
        body = b'{"messages":[{"role":"user","content":"x"}]}'
        assert (await call(engine, "POST", CHAT, body)).json["model"] == "first"


async def test_bad_bodies_are_400_and_cost_nothing() -> None:
    """Nothing of them reaches the engine model."""
    async with LabEngine() as engine:
        for body in (b"", b"{", b"[]", b"{}", chat(max_tokens=0), b"\xff"):
            reply = await call(engine, "POST", CHAT, body)
            assert reply.status == 400
            error = reply.json["error"]
            assert isinstance(error, dict)
            assert error["code"] == 400
        assert engine.engines[0].totals.prompt_tokens == 0


async def test_anthropic_errors_have_anthropics_envelope() -> None:
    """On /v1/messages the type is Anthropic's."""
    async with LabEngine() as engine:
        body = b'{"model":"none","max_tokens":1,"messages":[{"role":"user","content":"x"}]}'
        reply = await call(engine, "POST", "/v1/messages", body)
        assert reply.status == 404
        assert reply.json["type"] == "error"
        assert reply.json["error"]["type"] == "not_found_error"


async def test_too_long_a_request_is_400_and_a_full_queue_503() -> None:
    """Refusals of the engine model become its statuses."""
    small = EngineSettings(max_running=1, max_waiting=0, max_model_tokens=20)
    async with LabEngine(settings=small) as engine:
        assert (await call(engine, "POST", CHAT, chat(max_tokens=18))).status == 400
        assert (await call(engine, "POST", CHAT, chat())).status == 200
        engine.hold()
        async with connected(engine) as connection:
            connection.send_head("POST", CHAT, {}, len(chat()))
            connection.writer.write(chat())
            await engine.until(lambda: engine.running == 1)
            assert (await call(engine, "POST", CHAT, chat())).status == 503


@pytest.mark.parametrize(
    ("encoding", "encode"), [("gzip", gzip.compress), ("deflate", zlib.compress)]
)
async def test_compressed_bodies_are_read_and_recorded_as_sent(
    encoding: str, encode: object
) -> None:
    """The engine understands gzip and deflate; the record has the bytes of the wire."""
    assert callable(encode)
    async with LabEngine() as engine:
        body = encode(chat())
        reply = await call(engine, "POST", CHAT, body, {"content-encoding": encoding})
        assert reply.status == 200
        assert engine.requests[0].body_bytes == len(body)
        assert engine.requests[0].body_start == body


async def test_a_conversation_finds_its_prefix_again() -> None:
    """With the prefix cache a longer prompt of the same beginning counts cached tokens."""
    settings = EngineSettings(prefix_cache=True, block_size_tokens=4)
    async with LabEngine(settings=settings) as engine:
        turns = [{"role": "user", "content": "a long enough question, is it not?"}]
        await call(engine, "POST", CHAT, chat(messages=turns))
        turns.append({"role": "assistant", "content": "yes"})
        reply = await call(engine, "POST", CHAT, chat(messages=turns))
        usage = reply.json["usage"]
        assert isinstance(usage, dict)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 8
        assert engine.engines[0].totals.prefix_hits == 8


async def test_counting_tokens_runs_nothing() -> None:
    """Anthropic's token count is answered without a place in the batch."""
    async with LabEngine() as engine:
        engine.hold()
        body = b'{"model":"m","messages":[{"role":"user","content":"12345678"}]}'
        reply = await call(engine, "POST", "/v1/messages/count_tokens", body)
        assert reply.json == {"input_tokens": 4}


async def test_embeddings_differ_by_text_alone() -> None:
    """The same text has the same vector, at any place and in either encoding."""
    async with LabEngine() as engine:

        async def vectors(**more: object) -> list[Any]:
            body = json.dumps({"model": "m", **more}).encode()
            data = (await call(engine, "POST", "/v1/embeddings", body)).json["data"]
            assert isinstance(data, list)
            return [item["embedding"] for item in data]

        one, two, again = await vectors(input=["x", "y", "x"])
        assert one == again != two
        assert len(one) == 8
        (packed,) = await vectors(input="x", encoding_format="base64")
        assert isinstance(packed, str)
        assert [len(v) for v in await vectors(input=[[1, 2], [3]], dimensions=2)] == [2, 2]
        assert len(await vectors(input=[1, 2, 3])) == 1
