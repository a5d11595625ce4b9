"""Runs one API call on the engine model and sends what comes out of it."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from aiohttp import web

from extproc.lab.asks import Api, Ask, Problem, decoded, understand
from extproc.lab.delivery import JSON, MIDWAY, Delivery
from extproc.lab.desk import Desk
from extproc.lab.engine import Refusal
from extproc.lab.faults import FaultKind
from extproc.lab.pump import Run
from extproc.lab.records import Outcome
from extproc.lab.tally import FinishReason
from extproc.lab.voice import Speech, Subject, Voice
from extproc.lab.voices_events import MessageVoice, ResponseVoice
from extproc.lab.voices_openai import ChatVoice, CompletionVoice, embeddings_body

_BROKEN: Final = "the engine failed"
# A client that reads slowly lets tokens pile up; they are not all made into one text.
_MOST_AT_ONCE: Final = 64


async def infer(desk: Desk, delivery: Delivery, api: Api, body: bytes) -> web.StreamResponse:
    """The call is answered; its place in the engine is free, however it ended."""
    options = desk.options
    encoding = delivery.request.headers.get("content-encoding", "")
    plain = decoded(body, encoding, options.max_body_bytes)
    if isinstance(plain, Problem):
        return await delivery.fail(plain)
    ask = understand(api, plain, desk.serves(), options.models[0])
    if isinstance(ask, Problem):
        return await delivery.fail(ask)
    if api is Api.COUNT_TOKENS:
        return await delivery.json({"input_tokens": ask.prompt_tokens})
    run = _submit(desk, ask)
    if isinstance(run, Problem):
        return await delivery.fail(run)
    try:
        if ask.is_stream:
            return await _stream(desk, delivery, ask, run)
        return await _whole(desk, delivery, ask, run)
    finally:
        # Nothing happens to a run that has ended.
        desk.pump.abort(run)


def _submit(desk: Desk, ask: Ask) -> Run | Problem:
    settings = desk.options.settings
    longest = settings.longest_request_tokens
    if ask.output_tokens is None:
        wanted = min(desk.options.output_tokens, max(1, longest - ask.prompt_tokens))
        reason = FinishReason.STOP
    else:
        wanted = ask.output_tokens
        reason = FinishReason.LENGTH
    run = desk.pump.submit(
        ask.prompt_tokens,
        wanted,
        reason=reason,
        blocks=ask.blocks(settings.block_size_tokens) if settings.prefix_cache else (),
    )
    match run:
        case Refusal.QUEUE_FULL:
            return Problem(503, "ServiceUnavailableError", "the queue is full")
        case Refusal.TOO_LONG:
            message = (
                f"The longest request has {longest} tokens; this one has {ask.prompt_tokens} "
                f"in its prompt and asks for {wanted}."
            )
            return Problem(400, "BadRequestError", message)
        case _:
            return run


async def _whole(desk: Desk, delivery: Delivery, ask: Ask, run: Run) -> web.StreamResponse:
    produced, has_ended = 0, False
    while not has_ended:
        fresh, has_ended = await run.tokens()
        produced += fresh
    if delivery.kind is FaultKind.ERROR_EVENT:
        return await delivery.fail(Problem(500, "InternalServerError", _BROKEN))
    delivery.received.tokens_sent = produced
    if ask.api is Api.EMBEDDINGS:
        body = embeddings_body(ask, _subject(desk, delivery, ask, run))
    else:
        body = _voice(desk, delivery, ask, run).whole(produced, run.generation.reason)
    return await delivery.reply(200, JSON, body)


async def _stream(desk: Desk, delivery: Delivery, ask: Ask, run: Run) -> web.StreamResponse:
    received, fault = delivery.received, delivery.fault
    fresh, has_ended = (0, False) if desk.options.headers_at_once else await run.tokens()
    reply = await delivery.begin_stream()
    strike_after = fault.chunks if fault is not None and fault.kind in MIDWAY else None
    voice: Voice | None = None
    while True:
        is_out = has_ended and not fresh
        if strike_after is not None and (is_out or received.tokens_sent >= strike_after):
            strike_after = None
            if delivery.kind is FaultKind.ERROR_EVENT:
                voice = voice or _voice(desk, delivery, ask, run)
                await reply.write(voice.failure(_BROKEN))
                return await delivery.finish(reply, Outcome.FAULTED)
            await delivery.cut_or_stall()
        if is_out:
            break
        if not fresh:
            fresh, has_ended = await run.tokens()
        opening = b""
        if voice is None:
            # Not before the first token: what the cache had of the prompt is known only now.
            voice = _voice(desk, delivery, ask, run)
            opening = voice.opening()
        first = received.tokens_sent
        count = min(fresh, _MOST_AT_ONCE)
        if strike_after is not None:
            count = min(count, strike_after - first)
        # Before they are on the wire: whoever reads them may look at the count at once.
        received.tokens_sent += count
        fresh -= count
        await reply.write(opening + voice.chunk(first, count))
    voice = voice or _voice(desk, delivery, ask, run)
    await reply.write(voice.closing(received.tokens_sent, run.generation.reason))
    return await delivery.finish(reply, Outcome.ANSWERED)


def _voice(desk: Desk, delivery: Delivery, ask: Ask, run: Run) -> Voice:
    options = desk.options
    stamp = asyncio.get_running_loop().time if options.stamps else None
    speech = Speech(options.token_bytes, stamp)
    about = _subject(desk, delivery, ask, run)
    match ask.api:
        case Api.COMPLETIONS:
            return CompletionVoice(about, speech, include_usage=ask.include_usage)
        case Api.RESPONSES:
            return ResponseVoice(about, speech)
        case Api.MESSAGES:
            return MessageVoice(about, speech)
        case _:
            return ChatVoice(about, speech, include_usage=ask.include_usage)


def _subject(desk: Desk, delivery: Delivery, ask: Ask, run: Run) -> Subject:
    return Subject(
        engine=desk.name,
        number=delivery.received.number,
        created=int(time.time()),
        model=ask.model,
        prompt_tokens=run.generation.prompt_tokens,
        cached_tokens=run.generation.cached_tokens,
    )
