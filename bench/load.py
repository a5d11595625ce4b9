"""The load of the benchmarks: nginx as upstream, wrk as client."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MODEL: Final = "bench"
WORDS: Final = "A short answer."

_NGINX = """
daemon off;
worker_processes 1;
worker_rlimit_nofile 20000;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 16384; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  client_max_body_size 64m;
  client_body_buffer_size 2m;
  keepalive_requests 100000000;
  keepalive_timeout 600s;
  server {{
    {listens}
    location / {{
      default_type application/json;
      return 200 '{answer}';
    }}
    location = /v1/models {{
      default_type application/json;
      return 200 '{models}';
    }}
    location = /health {{
      return 200 '';
    }}
    location = /status {{
      stub_status;
    }}
    location = /metrics {{
      default_type text/plain;
      alias {folder}/page.txt;
    }}
  }}
}}
"""
ANSWER: Final = (
    '{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"bench","choices":[{"index":0,'
    f'"message":{{"role":"assistant","content":"{WORDS}"}},"finish_reason":"stop"}}],'
    '"usage":{"prompt_tokens":200,"completion_tokens":4,"total_tokens":204}}'
)
MODELS: Final = (
    '{"object":"list","data":[{"id":"bench","object":"model","created":1,"owned_by":"bench"}]}'
)
# Whole requests are made beforehand, so that large ones do not keep the client busy. Every session
# has a prompt of its own: a router that looks for common beginnings finds one per session.
_WRK = """
wrk.method = "POST"
wrk.path = "/v1/chat/completions"
wrk.headers["content-type"] = "application/json"
{model_header}
local sentence = "The quick brown fox jumps over the lazy dog again, and then it rests. "
local ready = {{}}
local n = 0
local function made(session)
  wrk.headers["x-session-id"] = "session-" .. session
  local prompt = string.sub(
    session .. ": " .. string.rep(sentence, {size} / #sentence + 1), 1, {size})
  return wrk.format(nil, nil, nil,
    '{{"model":"{model}","messages":[{{"role":"user","content":"' .. prompt .. '"}}]}}')
end
init = function()
  for session = 1, {kept} do ready[session] = made(session) end
end
request = function()
  n = n + 1
  if {kept} == 0 then return made(n) end
  return ready[n % {kept} + 1]
end
"""
_KEPT_BYTES: Final = 64 * 1024 * 1024
_KEPT_AT_LEAST: Final = 16
_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}


@dataclass(frozen=True, slots=True)
class Result:
    """What wrk measured: requests, their rate, latencies in milliseconds, everything not 2xx."""

    requests: int
    rps: float
    p50_ms: float
    p99_ms: float
    errors: int


def hosts(count: int) -> list[str]:
    """`count` addresses of this machine's loopback, which is where every endpoint is (Linux)."""
    return [f"127.0.{number // 250}.{number % 250 + 1}" for number in range(count)]


@contextmanager
def nginx(port: int, addresses: Sequence[str] = ("127.0.0.1",), page: bytes = b"") -> Iterator[int]:
    """A started nginx answers all requests on `port` with one chat completion; gives its pid.

    GET /v1/models, /health, and /metrics, with `page`, are answered as an engine would;
    /status says how many requests there were.
    """
    command = shutil.which("nginx") or "/usr/sbin/nginx"
    with tempfile.TemporaryDirectory(prefix="llmgw-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the worker that reads the page is another user
        (folder / "page.txt").write_bytes(page)
        conf = folder / "nginx.conf"
        listens = "\n    ".join(f"listen {address}:{port} backlog=4096;" for address in addresses)
        conf.write_text(_NGINX.format(folder=folder, listens=listens, answer=ANSWER, models=MODELS))
        process = subprocess.Popen(
            [command, "-p", name, "-c", str(conf), "-e", str(folder / "error.log")]
        )
        try:
            yield process.pid
        finally:
            process.terminate()
            process.wait(10)


def wrk(
    url: str,
    *,
    connections: int,
    seconds: int,
    prompt_bytes: int = 900,
    sessions: int = 1000,
    has_model_header: bool = True,
) -> Result:
    """What wrk measures against `url` with one thread, in whole `seconds`.

    Requests go through `sessions` sessions in turn, through fewer where the prompts would fill
    memory; 0 is a new session for every request. The model is in the body in any case.
    """
    kept = min(sessions, max(_KEPT_AT_LEAST, _KEPT_BYTES // prompt_bytes))
    header = f'wrk.headers["x-llmgw-model"] = "{MODEL}"' if has_model_header else ""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(_WRK.format(size=prompt_bytes, kept=kept, model=MODEL, model_header=header))
        script.flush()
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency"]
        done = subprocess.run(
            [*command, "--timeout", "30s", "-s", script.name, url],
            check=True,
            capture_output=True,
            text=True,
        )
    return _parsed(done.stdout)


def h2load(url: str, data: bytes, headers: Mapping[str, str], *options: str) -> tuple[int, str]:
    """How many POSTs of `data` succeeded over HTTP/1.1, and h2load's whole report."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        fields = [f"-H{name}: {value}" for name, value in headers.items()]
        done = subprocess.run(
            ["h2load", "--h1", "-t1", *options, f"-d{file.name}", *fields, url],
            check=True,
            capture_output=True,
            text=True,
        )
    succeeded = re.search(r"(\d+) succeeded", done.stdout)
    if succeeded is None:
        raise RuntimeError(f"h2load printed something else:\n{done.stdout}")
    return int(succeeded[1]), done.stdout


def _parsed(text: str) -> Result:
    """The numbers of wrk's report."""
    requests = int(_found(r"(\d+) requests in", text))
    refused = re.search(r"Non-2xx or 3xx responses: (\d+)", text)
    broken = re.search(
        r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", text
    )
    errors = int(refused[1]) if refused else 0
    errors += sum(int(count) for count in broken.groups()) if broken else 0
    return Result(
        requests=requests,
        rps=float(_found(r"Requests/sec:\s+([\d.]+)", text)),
        p50_ms=_milliseconds(_found(r"50%\s+([\d.]+[a-z]+)", text)),
        p99_ms=_milliseconds(_found(r"99%\s+([\d.]+[a-z]+)", text)),
        errors=errors,
    )


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"wrk printed something else:\n{text}")
    return match[1]


def _milliseconds(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)([a-z]+)", text).groups()  # type: ignore[union-attr]  # the caller's pattern matched
    return float(number) * _UNITS[unit]
