"""The command `llmgw`: run the service, bring a whole stack up, check a file, render Envoy's."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sized
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Final

import typer

from extproc.config.problems import ConfigErrors
from extproc.config.reachable import reachable
from extproc.config.read import missing_files, missing_secrets, read
from extproc.config.values import Config, Steering
from extproc.xds.render import render

app = typer.Typer(
    name="llmgw",
    help="An LLM router that runs as an Envoy external processor.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_SHOWN_WARNINGS: Final = 20

ConfigFile = Annotated[
    Path, typer.Option("--config", "-c", metavar="FILE", help="The configuration file.")
]
SteeringOption = Annotated[
    Steering | None,
    typer.Option("--steering", help="How Envoy follows decisions; overrides the file."),
]


@app.command()
def serve(
    config: ConfigFile = Path("llmgw.yaml"),
    *,
    address: Annotated[
        str | None,
        typer.Option("--address", help="unix:/path or host:port for Envoy; overrides the file."),
    ] = None,
    http_address: Annotated[
        str | None,
        typer.Option("--http-address", help="host:port of /ready and /metrics, likewise."),
    ] = None,
    steering: SteeringOption = None,
    request_log: Annotated[
        bool, typer.Option("--request-log", help="Print a line for every request.")
    ] = False,
) -> None:
    """Run the service: decisions over gRPC, health, readiness and metrics over HTTP.

    SIGTERM drains and ends; a second one ends at once.
    """
    # The first process of a container never sees a signal that it has no handler for.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    from extproc.serve.app import run  # noqa: PLC0415 - keeps gRPC out of the other commands

    # The keys of endpoints are Envoy's business; this process need not see them.
    loaded = _load(config)
    service = replace(
        loaded.service,
        address=address or loaded.service.address,
        http_address=http_address or loaded.service.http_address,
    )
    loaded = replace(loaded, service=service, steering=steering or loaded.steering)
    sys.exit(run(loaded, has_request_log=request_log))


@app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The configuration file.")],
) -> None:
    """Say everything that is wrong with a configuration; exit 0 when nothing is."""
    loaded = _load(file)
    _require_secrets(loaded)
    within_reach = {info.id for info in reachable(loaded)}
    for info in loaded.endpoints:
        if info.id not in within_reach:
            typer.echo(
                f"{file}: endpoints.{info.id}: warning: {loaded.steering} never sends there: it "
                "reaches our own engines with an IP address and one common key",
                err=True,
            )
    typer.echo(
        f"{file}: ok, {_count(loaded.endpoints, 'endpoint')}, {_count(loaded.models, 'model')}, "
        f"steering {loaded.steering}"
    )


@app.command("envoy-config")
def envoy_config(
    config: ConfigFile = Path("llmgw.yaml"),
    steering: SteeringOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write here instead.")
    ] = None,
) -> None:
    """Render the Envoy configuration that belongs to a configuration."""
    text = render(_load(config), steering)
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text)


@app.command()
def up(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", metavar="FILE", help="Your own engines, instead of simulated ones."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", "-p", help="Where Envoy listens; 0 takes a free port.")
    ] = None,
    engines: Annotated[
        int, typer.Option("--engines", min=1, max=64, help="How many simulated engines.")
    ] = 3,
    steering: SteeringOption = None,
) -> None:
    """Run Envoy, the service and three simulated engines in this terminal.

    Prints a curl line to paste, then a line for every request. Ctrl-C ends everything.
    """
    from extproc.lab.up import run  # noqa: PLC0415 - keeps aiohttp out of the other commands

    if config is not None:
        _require_secrets(_load(config))
    sys.exit(run(config, port=port, engines=engines, steering=steering))


def _leave(_number: int, _frame: FrameType | None) -> None:
    """The process ends, for nothing has begun yet."""
    sys.exit(0)


def _count(things: Sized, name: str) -> str:
    return f"{len(things)} {name}" + ("" if len(things) == 1 else "s")


def _load(file: Path) -> Config:
    """The configuration in `file`; what is wrong with it goes to standard error and ends us."""
    try:
        loaded = read(file)
    except ConfigErrors as errors:
        typer.echo(f"{errors}", err=True)
        raise typer.Exit(1) from None
    shown = loaded.warnings[:_SHOWN_WARNINGS]
    for warning in shown:
        place = f"{loaded.file}:{warning.line}" if warning.line else loaded.file
        typer.echo(f"{place}: {warning.key}: warning: {warning.text}", err=True)
    if len(loaded.warnings) > len(shown):
        typer.echo(f"{loaded.file}: and {len(loaded.warnings) - len(shown)} more", err=True)
    return loaded


def _require_secrets(config: Config) -> None:
    problems = (*missing_files(config), *missing_secrets(config, os.environ))
    for problem in problems:
        typer.echo(f"{problem}", err=True)
    if problems:
        raise typer.Exit(1)


def main() -> None:
    """The command line is carried out."""
    app()


if __name__ == "__main__":
    main()
