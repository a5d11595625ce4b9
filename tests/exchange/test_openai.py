"""A refusal on the wire: the envelope, its headers, and what the two real SDKs make of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

import anthropic
import httpx2
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc.errors import Reason, Rejection
from extproc.exchange import refusals
from extproc.exchange.messages import Immediate
from extproc.exchange.openai import refuse

# The first text that hypothesis draws reads its character tables, which may take a second.
LAW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
LOOP = Rejection(508, Reason.LOOP, "The request came back.", code="loop", should_retry=False)


def answer(
    rejection: Rejection, path: str = CHAT, method: str = "POST", request_id: bytes | None = None
) -> tuple[Immediate, dict[str, str]]:
    """The answer to `rejection` and its headers, each present once."""
    found = refuse(rejection, method=method, path=path, request_id=request_id)
    told = {name: value.decode("ascii") for name, value in found.headers}
    assert len(told) == len(found.headers)
    assert all(name == name.lower() and value for name, value in told.items())
    return found, told


def test_the_openai_envelope() -> None:
    """The body is what openai-compatible clients parse; the reason is in a header and the log."""
    found, told = answer(refusals.model_not_found("gpt-9"))
    assert found.status == 404
    assert json.loads(found.body) == {
        "error": {
            "message": "The model 'gpt-9' does not exist.",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }
    assert told == {
        "content-type": "application/json",
        "x-llmgw-reason": "model_not_found",
        "x-should-retry": "false",
    }
    assert found.details == "model_not_found"


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens", f"{MESSAGES}/unknown"])
def test_the_anthropic_envelope_on_its_paths(path: str) -> None:
    """Below /v1/messages the envelope is Anthropic's, with the request's id."""
    found, told = answer(refusals.model_not_found("m"), path, request_id=b"id-1")
    assert json.loads(found.body) == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "The model 'm' does not exist."},
        "request_id": "id-1",
    }
    assert told["request-id"] == "id-1"


@pytest.mark.parametrize("path", [CHAT, "/v1/messagesx", "/", "", "/v1/models"])
def test_everything_else_is_openai(path: str) -> None:
    """Other paths, unknown ones included, have OpenAI's envelope and no request-id header."""
    found, told = answer(refusals.path_not_found(), path, request_id=b"id-1")
    assert set(json.loads(found.body)) == {"error"}
    assert "request-id" not in told


@pytest.mark.parametrize("request_id", [None, b"", b"\xff", b"a b", b"a\r\nx: y", b"x" * 129])
def test_a_request_id_that_is_not_plain_is_left_out(request_id: bytes | None) -> None:
    """A client chooses the id, so only short visible ASCII is given back."""
    found, told = answer(refusals.internal(), MESSAGES, request_id=request_id)
    assert "request_id" not in json.loads(found.body)
    assert "request-id" not in told


@pytest.mark.parametrize(
    ("rejection", "openai_type", "anthropic_type"),
    [
        (refusals.model_missing(), "invalid_request_error", "invalid_request_error"),
        (refusals.model_not_found("m"), "invalid_request_error", "not_found_error"),
        (refusals.method_not_allowed(), "invalid_request_error", "invalid_request_error"),
        (refusals.body_too_large(1), "invalid_request_error", "request_too_large"),
        (refusals.body_compressed(), "invalid_request_error", "invalid_request_error"),
        (refusals.saturated("m", 1.0), "rate_limit_error", "rate_limit_error"),
        (refusals.internal(), "server_error", "api_error"),
        (refusals.upstream_failed(502), "server_error", "api_error"),
        (refusals.no_endpoint("m", 1.0), "service_unavailable_error", "overloaded_error"),
        (refusals.upstream_failed(504), "server_error", "timeout_error"),
        (LOOP, "server_error", "api_error"),
    ],
)
def test_the_type_follows_the_status(
    rejection: Rejection, openai_type: str, anthropic_type: str
) -> None:
    """Each status has one type per envelope."""
    assert json.loads(answer(rejection)[0].body)["error"]["type"] == openai_type
    assert json.loads(answer(rejection, MESSAGES)[0].body)["error"]["type"] == anthropic_type


def test_head_has_no_body() -> None:
    """A HEAD is answered with the headers alone."""
    found, told = answer(refusals.model_not_found("m"), "/v1/models/m", "HEAD")
    assert (found.status, found.body) == (404, b"")
    assert told["x-llmgw-reason"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "allow"),
    [
        (CHAT, "POST, OPTIONS"),
        ("/v1/models", "GET, HEAD, OPTIONS"),
        ("/v1/models/a/b", "GET, HEAD, OPTIONS"),
        ("/nowhere", "OPTIONS"),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(path: str, allow: str) -> None:
    """A 405 lists what the path takes."""
    found, told = answer(refusals.method_not_allowed(), path, "DELETE")
    assert found.status == 405
    assert told["allow"] == allow


@pytest.mark.parametrize(
    ("after", "seconds", "milliseconds"),
    [
        (0.0, "1", "1"),
        (-3.0, "1", "1"),
        (0.25, "1", "250"),
        (1.0, "1", "1000"),
        (1.0001, "2", "1001"),
        (29.5, "30", "29500"),
        (1e300, "3600", "3600000"),
        (float("inf"), "3600", "3600000"),
    ],
)
def test_a_retry_is_timed_in_both_headers(after: float, seconds: str, milliseconds: str) -> None:
    """Whole seconds, at least one, rounded up; milliseconds for those who read them."""
    _, told = answer(refusals.saturated("m", after))
    assert (told["retry-after"], told["retry-after-ms"]) == (seconds, milliseconds)
    assert "x-should-retry" not in told


def test_no_time_is_given_where_none_is_known() -> None:
    """Without a moment, and with one that is no number, only the status speaks."""
    for after in (None, float("nan")):
        _, told = answer(refusals.upstream_failed(502, after))
        assert set(told) == {"content-type", "x-llmgw-reason"}


@pytest.mark.parametrize(
    ("status", "wanted", "word"),
    [
        (400, None, "false"),
        (403, None, "false"),
        (408, None, None),
        (409, None, None),
        (429, None, None),
        (500, None, None),
        (500, False, "false"),
        (404, True, "true"),
    ],
)
def test_whether_a_retry_helps_is_said(
    status: int,
    wanted: bool | None,  # noqa: FBT001 - a value under test
    word: str | None,
) -> None:
    """The refusal's own word counts; without one, a client's mistake is not to be repeated."""
    _, told = answer(Rejection(status, Reason.INTERNAL, "No.", should_retry=wanted))
    assert told.get("x-should-retry") == word


@LAW
@given(
    st.text(st.characters(exclude_categories=())),
    st.sampled_from([CHAT, MESSAGES]),
    st.binary(max_size=20),
)
def test_any_message_makes_a_valid_answer(message: str, path: str, request_id: bytes) -> None:
    """The body is valid UTF-8 JSON whatever a message holds, half a surrogate pair included."""
    rejection = Rejection(400, Reason.BODY_INVALID, message)
    found, _ = answer(rejection, path, request_id=request_id)
    told = json.loads(found.body.decode("utf-8"))["error"]["message"]
    assert told == message.encode("utf-8", "replace").decode()


class Gateway:
    """A transport that answers every call with the next of `answers`, the last one repeated."""

    def __init__(self, *answers: Immediate) -> None:
        self.answers = answers
        self.calls: list[tuple[float, str]] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        """The next answer, as Envoy would send it."""
        found = self.answers[min(len(self.calls), len(self.answers) - 1)]
        self.calls.append((monotonic(), request.url.path))
        return httpx2.Response(found.status, headers=list(spread(found)), content=found.body)


def spread(found: Immediate) -> Sequence[tuple[bytes, bytes]]:
    """The headers of an answer as a client's library takes them."""
    return [(name.encode(), value) for name, value in found.headers]


def openai_call(gateway: Gateway, max_retries: int = 0) -> str:
    """The text that OpenAI's SDK gets for a chat request."""
    client = openai.OpenAI(
        api_key="k",
        base_url="http://gateway/v1",
        max_retries=max_retries,
        http_client=httpx2.Client(transport=httpx2.MockTransport(gateway)),
    )
    with client:
        found = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}]
        )
    return found.choices[0].message.content or ""


def anthropic_call(gateway: Gateway, max_retries: int = 0) -> str:
    """The text that Anthropic's SDK gets for a message request."""
    client = anthropic.Anthropic(
        api_key="k",
        base_url="http://gateway",
        max_retries=max_retries,
        http_client=httpx2.Client(transport=httpx2.MockTransport(gateway)),
    )
    with client:
        found = client.messages.create(
            model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
        )
    block = found.content[0]
    return block.text if block.type == "text" else ""


def ok(body: Mapping[str, object]) -> Immediate:
    """A 200 with `body`."""
    return Immediate(
        200, [("content-type", b"application/json")], json.dumps(body).encode(), "answered"
    )


OPENAI_OK = ok(
    {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "hello"},
            }
        ],
    }
)
ANTHROPIC_OK = ok(
    {
        "id": "1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }
)


@pytest.mark.parametrize(
    ("rejection", "error"),
    [
        (refusals.model_missing(), openai.BadRequestError),
        (refusals.model_not_found("m"), openai.NotFoundError),
        (refusals.body_too_large(1), openai.APIStatusError),
        (refusals.body_compressed(), openai.APIStatusError),
        (refusals.method_not_allowed(), openai.APIStatusError),
        (refusals.saturated("m", 1.0), openai.RateLimitError),
        (refusals.no_endpoint("m", 1.0), openai.InternalServerError),
        (refusals.restricted("m"), openai.InternalServerError),
        (refusals.upstream_failed(504), openai.InternalServerError),
        (refusals.internal(), openai.InternalServerError),
        (LOOP, openai.InternalServerError),
    ],
)
def test_openais_sdk_raises_its_own_error(
    rejection: Rejection, error: type[openai.APIStatusError]
) -> None:
    """The SDK finds message, type, code and parameter where it looks for them."""
    with pytest.raises(error) as caught:
        openai_call(Gateway(answer(rejection)[0]))
    raised = caught.value
    assert rejection.message in str(raised)
    assert raised.status_code == rejection.status
    assert (raised.code, raised.param) == (rejection.code, rejection.param)
    assert raised.response.headers["x-llmgw-reason"] == rejection.reason


@pytest.mark.parametrize(
    ("rejection", "error", "kind"),
    [
        (refusals.model_missing(), anthropic.BadRequestError, "invalid_request_error"),
        (refusals.model_not_found("m"), anthropic.NotFoundError, "not_found_error"),
        (refusals.body_too_large(1), anthropic.APIStatusError, "request_too_large"),
        (refusals.saturated("m", 1.0), anthropic.RateLimitError, "rate_limit_error"),
        (refusals.no_endpoint("m", 1.0), anthropic.APIStatusError, "overloaded_error"),
        (refusals.internal(), anthropic.InternalServerError, "api_error"),
        (LOOP, anthropic.InternalServerError, "api_error"),
    ],
)
def test_anthropics_sdk_raises_its_own_error(
    rejection: Rejection, error: type[anthropic.APIStatusError], kind: str
) -> None:
    """The SDK finds message, type and request id where it looks for them."""
    with pytest.raises(error) as caught:
        anthropic_call(Gateway(answer(rejection, MESSAGES, request_id=b"id-1")[0]))
    raised = caught.value
    assert raised.status_code == rejection.status
    assert (raised.type, raised.request_id) == (kind, "id-1")
    assert rejection.message in str(raised)


CALLS = [
    pytest.param(openai_call, CHAT, OPENAI_OK, id="openai"),
    pytest.param(anthropic_call, MESSAGES, ANTHROPIC_OK, id="anthropic"),
]
# Longer than the SDKs' own first pause, which is half a second at most.
PAUSE_SECONDS = 0.55


@pytest.mark.parametrize(("call", "path", "good"), CALLS)
@pytest.mark.parametrize(
    "rejection",
    [refusals.saturated("m", PAUSE_SECONDS), refusals.no_endpoint("m", PAUSE_SECONDS)],
)
def test_an_sdk_comes_back_at_the_given_moment(
    call: Callable[[Gateway, int], str], path: str, good: Immediate, rejection: Rejection
) -> None:
    """A retry waits for the milliseconds that were given, not less and not the whole second."""
    gateway = Gateway(answer(rejection, path)[0], good)
    assert call(gateway, 1) == "hello"
    (first, asked), (second, asked_again) = gateway.calls
    assert asked == asked_again == path
    assert PAUSE_SECONDS <= second - first < 1.0


@pytest.mark.parametrize(("call", "path", "good"), CALLS)
@pytest.mark.parametrize(
    "rejection", [refusals.no_endpoint("m", None), refusals.restricted("m"), LOOP]
)
def test_an_sdk_does_not_come_back_where_that_cannot_help(
    call: Callable[[Gateway, int], str], path: str, good: Immediate, rejection: Rejection
) -> None:
    """A 5xx that says so is not retried."""
    gateway = Gateway(answer(rejection, path)[0], good)
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)):
        call(gateway, 3)
    assert len(gateway.calls) == 1
