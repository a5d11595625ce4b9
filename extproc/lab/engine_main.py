"""Simulated engines as a process: `python -m extproc.lab.engine_main --port 9001 --name a`.

Prints one line per engine when it answers, `ready NAME URL`, and ends at SIGTERM or SIGINT.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import os
import signal
import ssl
import sys
from collections.abc import Sequence
from random import Random
from typing import Final

import uvloop

from extproc.lab.engine import EngineSettings
from extproc.lab.engine_http import LabEngine
from extproc.lab.faults import Fault, parse_flag
from extproc.lab.pages import Dialect

_PR_SET_PDEATHSIG: Final = 1


class _Flags(argparse.Namespace):
    host: str
    port: int
    control_port: int | None
    count: int
    name: str
    models: tuple[str, ...]
    dialect: Dialect
    ranks: int
    max_running: int
    max_waiting: int | None
    prefill_rate: float
    decode_rate: float
    decode_slowdown: float
    kv_tokens: int
    block_size: int
    max_model_tokens: int
    prefix_cache: bool
    output_tokens: int
    token_bytes: int
    stamps: bool
    late_headers: bool
    key: str | None
    key_header: str
    echo: bool
    bulky: bool
    fault: list[list[Fault]]
    seed: int | None
    tls_cert: str | None
    tls_key: str | None
    log: bool
    die_with_parent: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """The process has served until it was told to stop; its exit status."""
    parent = os.getppid()
    parser = _parser()
    flags = parser.parse_args(arguments, namespace=_Flags())
    if flags.die_with_parent and not die_with_parent(parent):
        return 0
    try:
        engines = _engines(flags)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        uvloop.run(serve(engines))
    except OSError as error:
        sys.stderr.write(f"cannot listen: {error}\n")
        return 1
    return 0


async def serve(engines: Sequence[LabEngine]) -> None:
    """The engines have answered until the process was told to stop."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
            _say(f"ready {engine.name} {engine.url}")
        await stopped.wait()


def die_with_parent(parent: int) -> bool:
    """The process ends when its parent does; False if the parent, `parent`, is gone already.

    Linux only; elsewhere the process lives on.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return os.getppid() == parent


def _engines(flags: _Flags) -> list[LabEngine]:
    settings = EngineSettings(
        max_running=flags.max_running,
        max_waiting=flags.max_waiting,
        prefill_tokens_per_second=flags.prefill_rate,
        decode_tokens_per_second=flags.decode_rate,
        decode_slowdown_ratio=flags.decode_slowdown,
        kv_tokens=flags.kv_tokens,
        block_size_tokens=flags.block_size,
        max_model_tokens=flags.max_model_tokens,
        prefix_cache=flags.prefix_cache,
    )
    tls = None
    if flags.tls_cert is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(flags.tls_cert, flags.tls_key)
    return [
        LabEngine(
            flags.name if flags.count == 1 else f"{flags.name}-{index}",
            flags.models,
            host=flags.host,
            port=flags.port + index if flags.port else 0,
            control_port=flags.control_port + index if flags.control_port else flags.control_port,
            tls=tls,
            dialect=flags.dialect,
            settings=settings,
            ranks=flags.ranks,
            output_tokens=flags.output_tokens,
            token_bytes=flags.token_bytes,
            stamps=flags.stamps,
            headers_at_once=not flags.late_headers,
            key=flags.key,
            key_header=flags.key_header,
            echo=flags.echo,
            is_bulky=flags.bulky,
            faults=[fault for several in flags.fault for fault in several],
            random=None if flags.seed is None else Random(flags.seed + index),  # noqa: S311 - not for secrets
            log=_say if flags.log else None,
        )
        for index in range(flags.count)
    ]


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    usual = EngineSettings()
    parser = argparse.ArgumentParser(
        prog="extproc.lab.engine_main", description="Simulated inference engines."
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="0 takes a free one")
    add("--control-port", type=int, help="where /lab/ answers even while connections are refused")
    add("--count", type=int, default=1, help="so many engines, on ports and names that count up")
    add("--name", default="engine")
    add("--models", type=_names, default=("m",), help="comma separated, the first is the default")
    add("--dialect", type=Dialect, choices=list(Dialect), default=Dialect.VLLM)
    add("--ranks", type=int, default=1, help="data-parallel engines behind the address")
    add("--max-running", type=int, default=usual.max_running)
    add("--max-waiting", type=int, help="queue limit; none by default")
    add("--prefill-rate", type=float, default=usual.prefill_tokens_per_second, help="tokens/s")
    add("--decode-rate", type=float, default=usual.decode_tokens_per_second, help="tokens/s")
    add("--decode-slowdown", type=float, default=usual.decode_slowdown_ratio)
    add("--kv-tokens", type=int, default=usual.kv_tokens)
    add("--block-size", type=int, default=usual.block_size_tokens)
    add("--max-model-tokens", type=int, default=usual.max_model_tokens)
    add("--prefix-cache", action="store_true")
    add("--output-tokens", type=int, default=16, help="of a request that sets no limit")
    add("--token-bytes", type=int, default=4)
    add("--stamps", action="store_true", help="stream events carry the monotonic time")
    add("--late-headers", action="store_true", help="a stream's headers wait for its first token")
    add("--key", help="demanded on /v1/ paths")
    add("--key-header", default="authorization")
    add("--echo", action="store_true", help="answer with what was received")
    add("--bulky", action="store_true", help="a metrics page as long as a real one")
    add("--fault", type=_faults, action="append", default=[], help="kind,field=value,... or JSON")
    add("--seed", type=int, help="of faults that have a probability")
    add("--tls-cert")
    add("--tls-key")
    add("--log", action="store_true", help="a line per request")
    add("--die-with-parent", action="store_true", help="end when the parent process does")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _faults(text: str) -> list[Fault]:
    try:
        return parse_flag(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
