"""The refusals of the request path, one function each, so that every sentence stands once.

A sentence tells a client what to change. It never names a host and echoes nothing but a model's
name, cut and cleaned. How a refusal looks on the wire is decided in `openai.py`.
"""

from __future__ import annotations

from typing import Final

from extproc import headers
from extproc.errors import Reason, Rejection

_MAX_SHOWN_CHARS: Final = 100


def shown(text: str) -> str:
    """`text` as a message may quote it: printable characters only, at most 100 of them."""
    head = text[:_MAX_SHOWN_CHARS]
    safe = head if head.isprintable() else "".join(c if c.isprintable() else "?" for c in head)
    return safe if len(text) <= _MAX_SHOWN_CHARS else f"{safe}..."


def model_missing() -> Rejection:
    """The request names no model anywhere."""
    return Rejection(
        400,
        Reason.MODEL_MISSING,
        f"The request names no model: set `model` in the body or the {headers.MODEL[0]} header.",
        code="model_missing",
        param="model",
        should_retry=False,
    )


def model_ambiguous(where: str) -> Rejection:
    """The request names a model more than once; `where` continues "The request has"."""
    return Rejection(
        400,
        Reason.MODEL_AMBIGUOUS,
        f"The request has {where}: name the model once.",
        code="model_ambiguous",
        param="model",
        should_retry=False,
    )


def model_invalid(problem: str) -> Rejection:
    """What the request gives as its model cannot be one; `problem` continues "The model"."""
    return Rejection(
        400,
        Reason.MODEL_INVALID,
        f"The model {problem}.",
        code="model_invalid",
        param="model",
        should_retry=False,
    )


def model_not_found(name: str) -> Rejection:
    """The catalog has no such model."""
    return Rejection(
        404,
        Reason.MODEL_NOT_FOUND,
        f"The model '{shown(name)}' does not exist.",
        code="model_not_found",
        param="model",
        should_retry=False,
    )


def body_invalid(problem: str) -> Rejection:
    """The body cannot be read; `problem` is a whole sentence."""
    return Rejection(400, Reason.BODY_INVALID, problem, code="body_invalid", should_retry=False)


def body_too_large(limit: int) -> Rejection:
    """The body is larger than `limit` bytes, which is what the gateway reads."""
    return Rejection(
        413,
        Reason.BODY_TOO_LARGE,
        f"The body is larger than the {limit} bytes that the gateway reads: shorten it, or name "
        f"the model in the {headers.MODEL[0]} header.",
        code="body_too_large",
        should_retry=False,
    )


def body_compressed() -> Rejection:
    """The body is compressed, and the model would have to be read from it."""
    return Rejection(
        415,
        Reason.BODY_ENCODING,
        "The body is compressed and the gateway does not decompress: send it without "
        f"content-encoding, or name the model in the {headers.MODEL[0]} header.",
        code="body_encoding",
        should_retry=False,
    )


def media_type_unsupported() -> Rejection:
    """The body is of a type in which the model is not looked for."""
    return Rejection(
        415,
        Reason.BODY_ENCODING,
        "The gateway reads the model from application/json and multipart/form-data only: send "
        f"one of them as content-type, or name the model in the {headers.MODEL[0]} header.",
        code="body_encoding",
        should_retry=False,
    )


def method_not_allowed() -> Rejection:
    """The path exists, with other methods; the answer's `allow` header lists them."""
    return Rejection(
        405,
        Reason.METHOD_NOT_ALLOWED,
        "This path does not take that method.",
        code="method_not_allowed",
        should_retry=False,
    )


def path_not_found() -> Rejection:
    """No such path is served."""
    return Rejection(
        404,
        Reason.PATH_NOT_FOUND,
        "This path is not served here.",
        code="path_not_found",
        should_retry=False,
    )


def no_endpoint(model: str, retry_after_seconds: float | None) -> Rejection:
    """No endpoint of `model` is usable; None when waiting cannot change that."""
    return Rejection(
        503,
        Reason.NO_ENDPOINT,
        f"No endpoint of the model '{shown(model)}' is available at the moment.",
        code="no_endpoint",
        retry_after_seconds=retry_after_seconds,
        should_retry=None if retry_after_seconds is not None else False,
    )


def restricted(model: str, retry_after_seconds: float | None = None) -> Rejection:
    """Only endpoints that the request's own restrictions forbid could serve `model`.

    `retry_after_seconds` is present when a permitted endpoint exists and may come back.
    """
    return Rejection(
        503,
        Reason.RESTRICTED,
        f"No endpoint of the model '{shown(model)}' is permitted by the restrictions of this "
        "request (hops, residency, no-store).",
        code="restricted",
        retry_after_seconds=retry_after_seconds,
        should_retry=None if retry_after_seconds is not None else False,
    )


def saturated(model: str, retry_after_seconds: float) -> Rejection:
    """Every usable endpoint of `model` asked to be left alone for a while."""
    return Rejection(
        429,
        Reason.SATURATED,
        f"Every endpoint of the model '{shown(model)}' is saturated.",
        code="rate_limit_exceeded",
        retry_after_seconds=retry_after_seconds,
    )


def upstream_failed(status: int, retry_after_seconds: float | None = None) -> Rejection:
    """Every attempt failed; `status` is 502, 503 or 504."""
    return Rejection(
        status,
        Reason.UPSTREAM_FAILED,
        "Every attempt to have this request served has failed.",
        code="upstream_failed",
        retry_after_seconds=retry_after_seconds,
    )


def not_ready() -> Rejection:
    """The service has no endpoint list yet, or is draining; another replica may serve."""
    return Rejection(
        503,
        Reason.NOT_READY,
        "The gateway is not ready.",
        code="not_ready",
        retry_after_seconds=1.0,
    )


def internal() -> Rejection:
    """The fault is the gateway's own."""
    return Rejection(
        500, Reason.INTERNAL, "The gateway failed on this request.", code="internal_error"
    )


def client_ambiguous() -> Rejection:
    """Two client identities arrived: whoever authenticates must set the header once.

    It is a fault of the gateway's configuration, since a client's own copy is stripped, and
    choosing one of the two could drop a restriction.
    """
    return Rejection(
        500,
        Reason.INTERNAL,
        "The gateway was given two client identities for this request.",
        code="internal_error",
        should_retry=False,
    )
