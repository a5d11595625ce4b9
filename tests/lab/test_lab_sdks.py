"""The OpenAI and Anthropic clients, sync and async, read everything that an engine answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anthropic
import openai
import pytest

from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, FaultKind

FOUR = "the sun was low "


@asynccontextmanager
async def openai_client(engine: LabEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of the engine that never retries."""
    async with openai.AsyncOpenAI(
        base_url=f"{engine.url}/v1", api_key="secret", max_retries=0
    ) as client:
        yield client


@asynccontextmanager
async def anthropic_client(engine: LabEngine) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """A client of the engine that never retries."""
    async with anthropic.AsyncAnthropic(
        base_url=engine.url, api_key="secret", max_retries=0
    ) as client:
        yield client


async def test_openai_reads_chat_completions() -> None:
    """Text, usage and fingerprint of a whole answer, and of a stream with usage."""
    async with LabEngine("a", key="secret") as engine, openai_client(engine) as client:
        whole = await client.chat.completions.create(
            model="m", max_tokens=4, messages=[{"role": "user", "content": "hi"}]
        )
        assert whole.choices[0].message.content == FOUR
        assert whole.system_fingerprint == "a"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 4
        stream = await client.chat.completions.create(
            model="m",
            max_tokens=4,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == FOUR
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 4


async def test_openai_reads_completions_embeddings_and_models() -> None:
    """The other calls of the OpenAI API, the model list included."""
    async with LabEngine(models=("m", "n")) as engine, openai_client(engine) as client:
        whole = await client.completions.create(model="m", prompt=["a", "b"], max_tokens=4)
        assert whole.choices[0].text == FOUR
        stream = await client.completions.create(
            model="m", prompt=[1, 2, 3], max_tokens=4, stream=True
        )
        assert "".join([chunk.choices[0].text async for chunk in stream]) == FOUR
        vectors = await client.embeddings.create(model="m", input=["a", "b"], dimensions=3)
        plain = await client.embeddings.create(
            model="m", input="a", dimensions=3, encoding_format="float"
        )
        assert [len(item.embedding) for item in vectors.data] == [3, 3]
        assert vectors.data[0].embedding == pytest.approx(plain.data[0].embedding)
        assert [model.id async for model in client.models.list()] == ["m", "n"]


async def test_openai_reads_responses() -> None:
    """A whole response, and a stream that the client puts together again."""
    async with LabEngine() as engine, openai_client(engine) as client:
        whole = await client.responses.create(model="m", input="hi", max_output_tokens=4)
        assert (whole.output_text, whole.status) == (FOUR, "incomplete")
        async with client.responses.stream(
            model="m", input=[{"role": "user", "content": "hi"}], instructions="be brief"
        ) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert len(final.output_text.split()) == 16


async def test_openai_reads_errors() -> None:
    """Statuses become the client's exceptions, an error inside a stream too."""
    async with LabEngine() as engine, openai_client(engine) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="x", messages=[])
        with pytest.raises(openai.BadRequestError, match="messages"):
            await client.chat.completions.create(model="m", messages=[])
        engine.inject(Fault(kind=FaultKind.STATUS, status=429, times=1))
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="m", prompt="x")
        engine.inject(Fault(kind=FaultKind.ERROR_EVENT, chunks=1, times=1))
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        with pytest.raises(openai.APIError, match="the engine failed"):
            _ = [chunk async for chunk in stream]


async def test_anthropic_reads_messages() -> None:
    """A whole message, a stream of text, and the count of tokens."""
    async with (
        LabEngine(key="secret") as engine,
        anthropic_client(engine) as client,
    ):
        whole = await client.messages.create(
            model="m", max_tokens=4, messages=[{"role": "user", "content": "hi"}]
        )
        assert isinstance(whole.content[0], anthropic.types.TextBlock)
        assert whole.content[0].text == FOUR
        assert whole.stop_reason == "max_tokens"
        async with client.messages.stream(
            model="m",
            max_tokens=4,
            system="be brief",
            messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        ) as stream:
            assert [text async for text in stream.text_stream] == ["the ", "sun ", "was ", "low "]
            final = await stream.get_final_message()
        assert final.usage.output_tokens == 4
        assert final.usage.input_tokens > whole.usage.input_tokens
        count = await client.messages.count_tokens(
            model="m", messages=[{"role": "user", "content": "hi"}]
        )
        assert count.input_tokens == whole.usage.input_tokens


async def test_anthropic_reads_errors() -> None:
    """Statuses and an error event become the client's exceptions."""
    async with LabEngine() as engine, anthropic_client(engine) as client:
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(
                model="x", max_tokens=1, messages=[{"role": "user", "content": "hi"}]
            )
        engine.inject(Fault(kind=FaultKind.ERROR_EVENT, chunks=1, times=1))
        with pytest.raises(anthropic.APIStatusError, match="the engine failed"):
            async with client.messages.stream(
                model="m", max_tokens=4, messages=[{"role": "user", "content": "hi"}]
            ) as stream:
                await stream.until_done()


async def test_the_sync_clients_read_the_same() -> None:
    """Both clients in their blocking form, whole and streamed."""
    async with LabEngine() as engine:

        def talk() -> list[str]:
            heard: list[str] = []
            with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="k") as client:
                whole = client.chat.completions.create(
                    model="m", max_tokens=4, messages=[{"role": "user", "content": "hi"}]
                )
                heard.append(whole.choices[0].message.content or "")
                stream = client.chat.completions.create(
                    model="m",
                    max_tokens=4,
                    messages=[{"role": "user", "content": "hi"}],
                    stream=True,
                )
                heard.append("".join(c.choices[0].delta.content or "" for c in stream))
                heard.append(
                    client.responses.create(model="m", input="hi", max_output_tokens=4).output_text
                )
            with (
                anthropic.Anthropic(base_url=engine.url, api_key="k") as other,
                other.messages.stream(
                    model="m", max_tokens=4, messages=[{"role": "user", "content": "hi"}]
                ) as messages,
            ):
                heard.append("".join(messages.text_stream))
            return heard

        assert await asyncio.to_thread(talk) == [FOUR] * 4
        assert engine.counters.served == 4
        assert engine.counters.streamed == 2


async def test_a_client_that_stops_listening_frees_the_engine() -> None:
    """Closing the SDK's stream in the middle is an abort."""
    async with LabEngine() as engine, openai_client(engine) as client:
        stream = await client.chat.completions.create(
            model="m",
            max_tokens=20_000,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
        )
        async for _ in stream:
            break
        await stream.close()
        await engine.until(lambda: engine.counters.aborted == 1)
        assert engine.running == 0
