"""The OpenAI and Anthropic clients against the whole stack."""

from __future__ import annotations

import asyncio
import time

import anthropic
import openai
import pytest
from e2e_world import HELLO, MODEL, World, chat, chat_body

from extproc.lab.faults import Fault, FaultKind
from extproc.lab.records import Outcome

pytestmark = [
    pytest.mark.envoy,
    pytest.mark.xdist_group("e2e-sdk"),
    pytest.mark.asyncio(loop_scope="module"),
]

FOUR = "the sun was low "


async def test_chat(trio: World) -> None:
    """A whole answer with its usage, counted by one engine."""
    async with trio.openai() as client:
        answer = await chat(client)
    assert answer.choices[0].message.content == FOUR
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert list(trio.requests().values()) == [1]


async def test_streaming_chat_comes_to_its_end(trio: World) -> None:
    """Text, finish reason and usage; the last event is [DONE]."""
    async with trio.openai() as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == FOUR
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None
    raw = await trio.post(stream=True)
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert raw.body.endswith(b"data: [DONE]\n\n")


async def test_chunks_are_not_held_back(trio: World) -> None:
    """Each is with the client before the engine makes the next; so are the response headers."""
    seconds = 0.4
    for engine in trio.engines.values():
        engine.inject(Fault(kind=FaultKind.STALL, chunks=2, seconds=seconds))
    arrivals: list[float] = []
    async with trio.openai() as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=6, stream=True
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                arrivals.append(time.monotonic())
                if len(arrivals) == 2:
                    (busy,) = (e for e in trio.engines.values() if e.counters.requests)
                    assert busy.requests[-1].outcome is Outcome.ACTIVE
                    assert busy.requests[-1].tokens_sent == 2
    assert len(arrivals) == 6
    assert arrivals[2] - arrivals[1] > seconds / 2
    assert arrivals[1] - arrivals[0] < seconds / 2


async def test_chunks_come_as_slowly_as_they_are_made(trio: World) -> None:
    """Over the blocking client, which would otherwise get them all at once."""

    def listen() -> list[float]:
        with trio.blocking_openai() as client:
            stream = client.chat.completions.create(
                model=MODEL, messages=HELLO, max_tokens=200, stream=True
            )
            return [time.monotonic() for c in stream if c.choices and c.choices[0].delta.content]

    arrivals = await asyncio.to_thread(listen)
    (busy,) = (engine for engine in trio.engines.values() if engine.counters.requests)
    end_seconds = busy.requests[-1].end_seconds
    answer_seconds = busy.requests[-1].answer_seconds
    assert end_seconds is not None
    assert answer_seconds is not None
    made_seconds = end_seconds - answer_seconds
    assert len(arrivals) == 200
    assert made_seconds > 0.2
    assert arrivals[-1] - arrivals[0] > made_seconds / 2


async def test_embeddings(trio: World) -> None:
    """One vector for each input."""
    async with trio.openai() as client:
        answer = await client.embeddings.create(model=MODEL, input=["a", "b"], dimensions=3)
    assert [len(item.embedding) for item in answer.data] == [3, 3]


async def test_completions_and_responses(trio: World) -> None:
    """The other calls that run a model, whole and streamed."""
    async with trio.openai() as client:
        whole = await client.completions.create(model=MODEL, prompt="a", max_tokens=4)
        assert whole.choices[0].text == FOUR
        response = await client.responses.create(model=MODEL, input="a", max_output_tokens=4)
        assert response.output_text == FOUR
        async with client.responses.stream(model=MODEL, input="a") as stream:
            kinds = [event.type async for event in stream]
        assert kinds[-1] == "response.completed"


async def test_models(trio: World) -> None:
    """The list and one of its elements are answered without an engine."""
    async with trio.openai() as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("other")
    assert caught.value.code == "model_not_found"
    assert trio.requests() == {}


async def test_a_wrong_model(trio: World) -> None:
    """The SDK's NotFoundError, with OpenAI's code and without a retry; no engine is asked."""
    async with trio.openai() as client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.with_options(max_retries=2).chat.completions.create(
                model="wrong", messages=HELLO
            )
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="wrong", messages=HELLO, stream=True)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert caught.value.type == "invalid_request_error"
    assert caught.value.response.headers["x-llmgw-reason"] == "model_not_found"
    assert trio.requests() == {}


async def test_a_request_without_a_model(trio: World) -> None:
    """A bad request that says what is missing."""
    reply = await trio.ask("POST", "/v1/chat/completions", (), chat_body(None))
    assert (reply.status, reply.error.code) == (400, "model_missing")
    broken = await trio.ask("POST", "/v1/chat/completions", (), b'{"model": "m", ')
    assert (broken.status, broken.error.type) == (400, "invalid_request_error")
    assert trio.requests() == {}


async def test_an_engines_own_error_is_kept(trio: World) -> None:
    """What an engine says to a bad request reaches the client as it was said."""
    async with trio.openai() as client:
        with pytest.raises(openai.BadRequestError, match="messages"):
            await client.chat.completions.create(model=MODEL, messages=[])
    assert list(trio.requests().values()) == [1]


async def test_64_parallel_streams(trio: World) -> None:
    """All of them complete, over all engines, and nothing stays in flight."""

    async def listen(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"stream {number}"}],
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 32
        return chunks[0].system_fingerprint or ""

    async with trio.openai() as client:
        served = await asyncio.gather(*(listen(client, number) for number in range(64)))
    assert sum(engine.counters.streamed for engine in trio.engines.values()) == 64
    assert {name: served.count(name) for name in trio.engines} == trio.requests()
    assert min(trio.requests().values()) >= 4
    await trio.until_idle()


async def test_the_blocking_client_reads_the_same(trio: World) -> None:
    """Whole, streamed, embeddings, models, and the error."""

    def talk() -> list[str]:
        heard: list[str] = []
        with trio.blocking_openai() as client:
            whole = client.chat.completions.create(model=MODEL, max_tokens=4, messages=HELLO)
            heard.append(whole.choices[0].message.content or "")
            stream = client.chat.completions.create(
                model=MODEL, max_tokens=4, messages=HELLO, stream=True
            )
            heard.append("".join(c.choices[0].delta.content or "" for c in stream if c.choices))
            heard.extend(model.id for model in client.models.list())
            vectors = client.embeddings.create(model=MODEL, input="a", dimensions=3)
            heard.append(str(len(vectors.data[0].embedding)))
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(model="wrong", messages=HELLO)
        return heard

    assert await asyncio.to_thread(talk) == [FOUR, FOUR, MODEL, "3"]


async def test_anthropics_client(trio: World) -> None:
    """A message, a stream, a count, and errors in the envelope that this client reads."""
    async with trio.anthropic() as client:
        whole = await client.messages.create(
            model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "hi"}]
        )
        assert isinstance(whole.content[0], anthropic.types.TextBlock)
        assert whole.content[0].text == FOUR
        async with client.messages.stream(
            model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "hi"}]
        ) as stream:
            assert "".join([text async for text in stream.text_stream]) == FOUR
        counted = await client.messages.count_tokens(
            model=MODEL, messages=[{"role": "user", "content": "hi"}]
        )
        assert counted.input_tokens == whole.usage.input_tokens
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.messages.create(
                model="wrong", max_tokens=4, messages=[{"role": "user", "content": "hi"}]
            )
    assert caught.value.body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "The model 'wrong' does not exist."},
        "request_id": caught.value.response.headers["x-request-id"],
    }
