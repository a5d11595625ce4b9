"""The load of the benchmarks: nginx as upstream, wrk as client."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_NGINX = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  client_max_body_size 64m;
  client_body_buffer_size 2m;
  keepalive_requests 100000000;
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      default_type application/json;
      return 200 '{answer}';
    }}
  }}
}}
"""
_ANSWER = (
    '{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"bench","choices":[{"index":0,'
    '"message":{"role":"assistant","content":"A short answer."},"finish_reason":"stop"}],'
    '"usage":{"prompt_tokens":200,"completion_tokens":4,"total_tokens":204}}'
)
_WRK = """
wrk.method = "POST"
wrk.path = "/v1/chat/completions"
wrk.headers["content-type"] = "application/json"
wrk.headers["x-llmgw-model"] = "bench"
local prompt = string.rep("x", {size})
wrk.body = '{{"model":"bench","messages":[{{"role":"user","content":"' .. prompt .. '"}}]}}'
local sessions = {sessions}
local n = 0
request = function()
  n = n + 1
  wrk.headers["x-session-id"] = "session-" .. (n % sessions)
  return wrk.format()
end
"""
_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}


@dataclass(frozen=True, slots=True)
class Result:
    """What wrk measured: requests, their rate, latencies in milliseconds, everything not 2xx."""

    requests: int
    rps: float
    p50_ms: float
    p99_ms: float
    errors: int


@contextmanager
def nginx(port: int) -> Iterator[int]:
    """A started nginx answers all requests on `port` with one chat completion; gives its pid."""
    command = shutil.which("nginx") or "/usr/sbin/nginx"
    with tempfile.TemporaryDirectory(prefix="llmgw-bench-") as name:
        folder = Path(name)
        conf = folder / "nginx.conf"
        conf.write_text(_NGINX.format(folder=folder, port=port, answer=_ANSWER))
        process = subprocess.Popen(
            [command, "-p", name, "-c", str(conf), "-e", str(folder / "error.log")]
        )
        try:
            yield process.pid
        finally:
            process.terminate()
            process.wait(10)


def wrk(
    url: str, *, connections: int, seconds: float, prompt_bytes: int = 900, sessions: int = 1000
) -> Result:
    """What wrk measures against `url` with one thread."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(_WRK.format(size=prompt_bytes, sessions=sessions))
        script.flush()
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "--latency"]
        done = subprocess.run(
            [*command, "-s", script.name, url], check=True, capture_output=True, text=True
        )
    return _parsed(done.stdout)


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
