"""Envoy's part of the ext_proc conversation, spoken to the service over its own socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import grpc.aio
from case_http1 import SECONDS, Pairs, raw

from extproc import headers
from extproc.serve.pb.base_pb2 import HeaderValueOption
from extproc.serve.pb.ext_proc_pb2 import ProcessingRequest, ProcessingResponse

METHOD: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"

_Stub = grpc.aio.StreamStreamMultiCallable[ProcessingRequest, ProcessingResponse]
_Call = grpc.aio.StreamStreamCall[ProcessingRequest, ProcessingResponse]


class Processor:
    """One stream to the service."""

    def __init__(self, call: _Call) -> None:
        self._call = call

    async def say(self, message: ProcessingRequest) -> ProcessingResponse:
        """The reply to one message."""
        async with asyncio.timeout(SECONDS):
            await self._call.write(message)
            reply = await self._call.read()
        assert isinstance(reply, ProcessingResponse), reply
        return reply


@asynccontextmanager
async def processor(address: str) -> AsyncIterator[Processor]:
    """A stream to the service at a gRPC address; it is cancelled at the end, as Envoy does."""
    # Envoy's client has no limit of its own.
    unlimited = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(address, unlimited) as channel:
        stub: _Stub = channel.stream_stream(
            METHOD,
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )
        call = stub(None)
        try:
            yield Processor(call)
        finally:
            call.cancel()


def request_headers(
    method: str,
    path: str,
    pairs: Pairs = (),
    *,
    ends: bool = False,
    read: Mapping[str, str] | None = None,
) -> ProcessingRequest:
    """The first message of a request; `read` is what Envoy's filter read from the body."""
    message = ProcessingRequest()
    sent = message.request_headers
    sent.end_of_stream = ends
    for name, value in [(":method", method), (":path", path), *pairs]:
        one = sent.headers.headers.add()
        one.key = raw(name).decode()
        one.raw_value = raw(value)
    if read:
        space = message.metadata_context.filter_metadata[headers.BODY_NAMESPACE]
        for key, text in read.items():
            space.fields[key].string_value = text.encode()
    return message


def request_body(body: bytes, *, ends: bool) -> ProcessingRequest:
    """A buffered body."""
    message = ProcessingRequest()
    message.request_body.body = body
    message.request_body.end_of_stream = ends
    return message


def request_trailers() -> ProcessingRequest:
    """The end of a request that has trailers."""
    message = ProcessingRequest()
    message.request_trailers.SetInParent()
    return message


def set_headers(reply: ProcessingResponse) -> list[HeaderValueOption]:
    """Every header that a reply sets, in whatever phase."""
    match reply.WhichOneof("response"):
        case "request_headers":
            return list(reply.request_headers.response.header_mutation.set_headers)
        case "request_body":
            return list(reply.request_body.response.header_mutation.set_headers)
        case "response_headers":
            return list(reply.response_headers.response.header_mutation.set_headers)
        case "immediate_response":
            return list(reply.immediate_response.headers.set_headers)
        case _:
            return []


def header(reply: ProcessingResponse, name: str) -> bytes | None:
    """The value that a reply sets a header to."""
    found = [one.header.raw_value for one in set_headers(reply) if one.header.key == name]
    assert len(found) <= 1, (name, found)
    return found[0] if found else None
