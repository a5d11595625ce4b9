"""The gRPC health service, for the calls of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError

from extproc.serve.fastlane.grpc import CallRefused, Line
from extproc.serve.fastlane.messages import Status
from extproc.serve.pb.health_pb2 import HealthCheckRequest, HealthCheckResponse
from extproc.serve.stream import Service, StreamEnd


class Check:
    """One question for the health of a service, answered with its health now."""

    __slots__ = ("_service",)

    def __init__(self, service: Service) -> None:
        self._service = service

    def receive(self, message: bytes) -> Sequence[bytes]:
        """The one reply.

        Raises:
            CallRefused: it is no question, or for a service that is not known.
        """
        health = self._service.health(_asked(message))
        if health is None:
            raise CallRefused(Status.NOT_FOUND, "unknown service")
        return (_reply(health),)

    def written(self) -> None:
        """Nothing is done."""

    def end(self, why: StreamEnd) -> None:
        """Nothing is done."""


class Watch:
    """The health of one service, told at once and after every change."""

    __slots__ = ("_forget", "_last", "_line", "_name", "_service", "_wants_writing")

    def __init__(self, service: Service, line: Line) -> None:
        self._service = service
        self._line = line
        self._name = ""
        self._last = b""
        self._wants_writing = False
        self._forget: Callable[[], None] | None = None

    def receive(self, message: bytes) -> Sequence[bytes]:
        """The health as it is now.

        Raises:
            CallRefused: it is no question, or not the first.
        """
        if self._forget is not None:
            raise CallRefused(Status.INVALID_ARGUMENT, "one question only")
        self._name = _asked(message)
        self._forget = self._service.watch_health(self._changed)
        self._last = _reply(self._service.health(self._name))
        self._wants_writing = True
        return (self._last,)

    def written(self) -> None:
        """What has changed since the last reply is told now."""
        self._wants_writing = False
        self._changed()

    def end(self, why: StreamEnd) -> None:  # noqa: ARG002 - every end is the same to a watch
        """Changes are not told any more."""
        if self._forget is not None:
            self._forget()

    def _changed(self) -> None:
        if self._wants_writing:
            return
        reply = _reply(self._service.health(self._name))
        if reply != self._last:
            self._last = reply
            self._wants_writing = True
            self._line.push(reply)


def _asked(message: bytes) -> str:
    """The service that a health request asks about."""
    try:
        return HealthCheckRequest.FromString(message).service
    except DecodeError as error:
        raise CallRefused(Status.INVALID_ARGUMENT, "not a request") from error


def _reply(health: bool | None) -> bytes:  # noqa: FBT001 - the seam's own value
    """The health reply for what the service says of itself."""
    if health is None:
        status = HealthCheckResponse.SERVICE_UNKNOWN
    else:
        status = HealthCheckResponse.SERVING if health else HealthCheckResponse.NOT_SERVING
    return HealthCheckResponse(status=status).SerializeToString()
