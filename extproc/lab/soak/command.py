"""The command line of the soak."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import uvloop

from extproc.lab.soak.account import Verdict
from extproc.lab.soak.course import Course, Settings
from extproc.lab.soak.gateway import Gateway

_TEXT = """\
Real Envoy, the service and four engines under mixed load over HTTP/1.1 and HTTP/2, while clients
leave at every moment and faults strike the engines and the service. Every error is put down to
the fault that caused it. The exit status is 0 only if every error is explained, nothing is in
flight at the end, the service has counted no defect, and the next requests are spread evenly.
"""


class _Flags(argparse.Namespace):
    requests: int
    seed: int
    clients: int
    interval: float


async def soak(settings: Settings) -> Verdict:
    """The run is over, and nothing of it is left."""
    say("starting Envoy, the service and four engines")
    async with Gateway(concurrency=settings.concurrency) as gateway:
        return await Course(gateway, settings, say).run()


def say(line: str) -> None:
    """The line is on the screen."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """The table is on the screen; 0 if all is well."""
    usual = Settings()
    parser = argparse.ArgumentParser(prog="extproc.lab.soak", description=_TEXT)
    add = parser.add_argument
    add("--requests", type=_positive, default=usual.requests, help="how many in all")
    add("--seed", type=int, default=usual.seed, help="the same one has the same faults")
    add("--clients", type=_positive, default=usual.clients, help="how many ask at a time")
    add("--interval", type=float, default=usual.interval_seconds, help="seconds between lines")
    flags = parser.parse_args(arguments, namespace=_Flags())
    verdict = uvloop.run(
        soak(
            Settings(
                requests=flags.requests,
                seed=flags.seed,
                clients=flags.clients,
                interval_seconds=flags.interval,
            )
        )
    )
    say(verdict.table())
    return 0 if verdict.is_good else 1


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("not a positive number")
    return number
