"""Actions as the replies that Envoy reads.

Replies carry `raw_value` only, overwrite every header they set, and clear the route cache together
with a header change, without which Envoy ignores the clearing. Everything is checked before it is
written; nothing here decides anything.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final, TypeVar, assert_never

from extproc.exchange.messages import Action, Continue, Headers, Immediate, NeedBody, Phase, Steer
from extproc.serve.mutations import (
    InvalidAction,
    check_body,
    check_immediate,
    check_name,
    check_removed,
    check_together,
    check_value,
)
from extproc.serve.pb.base_pb2 import HeaderValue, HeaderValueOption
from extproc.serve.pb.ext_proc_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    ImmediateResponse,
    ProcessingMode,
    ProcessingResponse,
)
from extproc.serve.protobuf import delimited, number, opening, tag, varint
from extproc.serve.steering import Channel

# How each phase is answered: the tag of its reply, the tag of the common response inside it.
_REPLY: Final = MappingProxyType(
    {
        Phase.REQUEST_HEADERS: tag(ProcessingResponse.REQUEST_HEADERS_FIELD_NUMBER),
        Phase.REQUEST_BODY: tag(ProcessingResponse.REQUEST_BODY_FIELD_NUMBER),
        Phase.REQUEST_TRAILERS: tag(ProcessingResponse.REQUEST_TRAILERS_FIELD_NUMBER),
        Phase.RESPONSE_HEADERS: tag(ProcessingResponse.RESPONSE_HEADERS_FIELD_NUMBER),
        Phase.RESPONSE_TRAILERS: tag(ProcessingResponse.RESPONSE_TRAILERS_FIELD_NUMBER),
    }
)
_COMMON: Final = MappingProxyType(
    {
        Phase.REQUEST_HEADERS: tag(HeadersResponse.RESPONSE_FIELD_NUMBER),
        Phase.REQUEST_BODY: tag(BodyResponse.RESPONSE_FIELD_NUMBER),
        Phase.RESPONSE_HEADERS: tag(HeadersResponse.RESPONSE_FIELD_NUMBER),
    }
)
_HEADER_MUTATION: Final = tag(CommonResponse.HEADER_MUTATION_FIELD_NUMBER)
_BODY_MUTATION: Final = tag(CommonResponse.BODY_MUTATION_FIELD_NUMBER)
_CLEAR_ROUTE_CACHE: Final = number(CommonResponse.CLEAR_ROUTE_CACHE_FIELD_NUMBER, 1)
_BODY: Final = tag(BodyMutation.BODY_FIELD_NUMBER)
_SET_HEADER: Final = tag(HeaderMutation.SET_HEADERS_FIELD_NUMBER)
_REMOVE_HEADER: Final = tag(HeaderMutation.REMOVE_HEADERS_FIELD_NUMBER)
_HEADER: Final = tag(HeaderValueOption.HEADER_FIELD_NUMBER)
_OVERWRITE: Final = number(
    HeaderValueOption.APPEND_ACTION_FIELD_NUMBER, HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
)
_KEY: Final = tag(HeaderValue.KEY_FIELD_NUMBER)
_RAW_VALUE: Final = tag(HeaderValue.RAW_VALUE_FIELD_NUMBER)

_GO_ON: Final = MappingProxyType(
    {
        phase: delimited(reply, delimited(_COMMON[phase], b"") if phase in _COMMON else b"")
        for phase, reply in _REPLY.items()
    }
)
GO_ON_RESPONSE_BODY: Final = ProcessingResponse(
    response_body=BodyResponse(response=CommonResponse())
).SerializeToString()
# Override fields that are left alone keep what Envoy's configuration says. Without the trailers, a
# request that has nothing else would go on undecided: an empty body sends no message.
_NEED_BODY: Final = ProcessingResponse(
    request_headers=HeadersResponse(response=CommonResponse()),
    mode_override=ProcessingMode(
        request_body_mode=ProcessingMode.BUFFERED, request_trailer_mode=ProcessingMode.SEND
    ),
).SerializeToString()

_MAX_KEPT: Final = 2048

_Kept = TypeVar("_Kept")


def go_on(phase: Phase) -> bytes:
    """The reply that changes nothing."""
    return _GO_ON[phase]


class Renderer:
    """Writes replies for one configured steering.

    What depends on a header's checked name and on lengths alone is kept, in a bounded number.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._beginnings: dict[tuple[Phase, int], bytes] = {}
        self._openings: dict[tuple[str, int], bytes] = {}
        self._removals: dict[str, bytes] = {}

    def render(self, action: Action, phase: Phase) -> bytes:
        """The reply that carries `action` in answer to a message of `phase`.

        Raises:
            InvalidAction: Envoy would refuse the reply, or `action` does not answer `phase`.
        """
        match action:
            case Steer():
                return self._steer(action, phase)
            case Continue():
                return self._continue(action, phase)
            case NeedBody():
                if phase is not Phase.REQUEST_HEADERS:
                    raise InvalidAction("a body can be asked for with the request headers only")
                return _NEED_BODY
            case Immediate():
                return self._immediate(action, phase)
            case _:
                assert_never(action)

    def _steer(self, steer: Steer, phase: Phase) -> bytes:
        """The request goes where `steer` says."""
        if steer.phase is not phase or phase not in {Phase.REQUEST_HEADERS, Phase.REQUEST_BODY}:
            raise InvalidAction(f"a choice cannot answer {phase}")
        if not steer.clusters or not all(steer.clusters):
            raise InvalidAction("a choice without clusters")
        if steer.body is not None and phase is not Phase.REQUEST_BODY:
            raise InvalidAction("a body can be replaced in answer to a body only")
        set_headers = (*steer.set_headers, *self._channel.headers(steer))
        if not set_headers:
            raise InvalidAction("a choice must set a header, or Envoy keeps its cached route")
        mutation = self._mutation(set_headers, steer.remove_headers, steer.body)
        metadata = self._channel.metadata(steer)
        if steer.body is None:
            return self._before(phase, len(mutation)) + mutation + _CLEAR_ROUTE_CACHE + metadata
        common = delimited(_HEADER_MUTATION, mutation) + _CLEAR_ROUTE_CACHE
        common += delimited(_BODY_MUTATION, delimited(_BODY, steer.body))
        return delimited(_REPLY[phase], delimited(_COMMON[phase], common)) + metadata

    def _before(self, phase: Phase, size: int) -> bytes:
        """What stands before a header mutation of that size that clears the route cache."""
        before = self._beginnings.get((phase, size))
        if before is None:
            mutation = opening((_HEADER_MUTATION,), size)
            common = len(mutation) + size + len(_CLEAR_ROUTE_CACHE)
            before = opening((_REPLY[phase], _COMMON[phase]), common) + mutation
            _remember(self._beginnings, (phase, size), before)
        return before

    def _continue(self, action: Continue, phase: Phase) -> bytes:
        """Envoy goes on with the headers that `action` changes."""
        if action.phase is not phase:
            raise InvalidAction(f"an action for {action.phase} cannot answer {phase}")
        if not action.set_headers and not action.remove_headers:
            return _GO_ON[phase]
        if phase not in _COMMON:
            raise InvalidAction("headers cannot be changed with trailers")
        mutation = self._mutation(action.set_headers, action.remove_headers, None)
        common = delimited(_HEADER_MUTATION, mutation)
        return delimited(_REPLY[phase], delimited(_COMMON[phase], common))

    def _immediate(self, action: Immediate, phase: Phase) -> bytes:
        """Envoy answers by itself."""
        if phase is Phase.RESPONSE_TRAILERS:
            raise InvalidAction("the client already has an answer")
        check_immediate(action.status, action.details)
        reply = ImmediateResponse(body=action.body, details=action.details)
        reply.status.code = action.status
        reply.headers.MergeFromString(self._mutation(action.headers, (), action.body, is_ours=True))
        return ProcessingResponse(immediate_response=reply).SerializeToString()

    def _mutation(
        self,
        set_headers: Headers,
        remove_headers: tuple[str, ...],
        body: bytes | None,
        *,
        is_ours: bool = False,
    ) -> bytes:
        """The encoded header mutation.

        `body` is the body that goes with the headers; unless the whole message `is_ours`, replacing
        it demands its length among the headers.
        """
        parts: list[bytes] = []
        openings = self._openings
        for name, value in set_headers:
            before = openings.get((name, len(value)))
            if before is None:
                check_name(name)
                before = _before_value(name, len(value))
                _remember(openings, (name, len(value)), before)
            check_value(name, value, body)
            parts += (before, value, _OVERWRITE)
        removals = self._removals
        for name in remove_headers:
            removal = removals.get(name)
            if removal is None:
                check_removed(name)
                removal = delimited(_REMOVE_HEADER, name.encode())
                _remember(removals, name, removal)
            parts.append(removal)
        encoded = b"".join(parts)
        names_set = [name for name, _ in set_headers]
        check_together(names_set, remove_headers, len(encoded))
        if not is_ours:
            check_body(names_set, body)
        return encoded


def _before_value(name: str, value_size: int) -> bytes:
    """What stands before the value, of that size, of a header that is set; overwriting follows."""
    header = delimited(_KEY, name.encode()) + _RAW_VALUE + varint(value_size)
    option = _HEADER + varint(len(header) + value_size) + header
    return _SET_HEADER + varint(len(option) + value_size + len(_OVERWRITE)) + option


def _remember(kept: dict[_Kept, bytes], key: _Kept, encoded: bytes) -> None:
    """`encoded` is in `kept`, which never grows beyond its bound."""
    if len(kept) >= _MAX_KEPT:
        kept.clear()
    kept[key] = encoded
