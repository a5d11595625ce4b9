"""The command `llmgwctl`: what a running service knows about its endpoints, in a terminal."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

import typer
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from rich.console import Console
from rich.table import Table

from extproc.telemetry import families
from extproc.telemetry.families import Family

DEFAULT_ADDRESS: Final = "127.0.0.1:9090"
_TIMEOUT_SECONDS: Final = 10.0
_UNKNOWN: Final = "-"

app = typer.Typer(
    name="llmgwctl",
    help="Looks into a running llmgw service.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Address = Annotated[
    str,
    typer.Option("--address", "-a", metavar="HOST:PORT", help="The service's http_address."),
]


@app.callback()
def commands() -> None:
    """Looks into a running llmgw service."""


@app.command()
def endpoints(address: Address = DEFAULT_ADDRESS) -> None:
    """Show every endpoint: load, breaker, what keeps it out of routing, outcomes.

    A hyphen is a number that is not known.
    """
    try:
        page = _read(f"http://{address}/metrics")
    except (OSError, ValueError) as error:
        typer.echo(f"{address} does not answer: {error}; give the service's http_address", err=True)
        raise typer.Exit(1) from None
    # Narrower, the table would break words; a terminal wraps or scrolls it.
    Console(width=max(Console().width, 120)).print(as_table(rows(page)))


@dataclass(slots=True)
class Row:
    """One endpoint as the metrics show it; a number that is missing is not known."""

    kind: str = ""
    engine: str = ""
    breaker: str = ""
    out: list[str] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)


def rows(page: str) -> Mapping[str, Row]:
    """The endpoints of a metrics page, sorted by id."""
    found: dict[str, Row] = {}
    for sample in _samples(page):
        name = sample.labels.get("endpoint")
        if name is not None:
            _note(found.setdefault(name, Row()), sample)
    return dict(sorted(found.items()))


def as_table(found: Mapping[str, Row]) -> Table:
    """The rows for a terminal."""
    table = Table(box=None, pad_edge=False)
    for title in ("endpoint", "kind", "engine", "breaker", "kept out by"):
        table.add_column(title)
    for title in ("in-flight", "running", "waiting", "kv", "age s"):
        table.add_column(title, justify="right")
    table.add_column("outcomes")
    for name, row in found.items():
        table.add_row(
            name,
            row.kind,
            row.engine,
            row.breaker,
            ", ".join(row.out) or _UNKNOWN,
            _whole(row, families.INFLIGHT),
            _whole(row, families.RUNNING),
            _whole(row, families.WAITING),
            _shown(row, families.KV_USAGE, "{:.0%}"),
            _shown(row, families.AGE, "{:.1f}"),
            ", ".join(f"{outcome} {count}" for outcome, count in row.outcomes.items()) or _UNKNOWN,
        )
    return table


def _note(row: Row, sample: Sample) -> None:
    """The row knows what the sample says."""
    labels = sample.labels
    if sample.name == families.INFO.name:
        row.kind, row.engine = labels["kind"], labels["engine"]
    elif sample.name == families.BREAKER.name:
        if sample.value:
            row.breaker = labels["state"]
    elif sample.name == families.EXCLUDED.name:
        if sample.value:
            row.out.append(labels["why"])
    elif sample.name == families.ATTEMPTS.name:
        row.outcomes[labels["outcome"]] = int(sample.value)
    else:
        row.numbers[sample.name] = sample.value


def _whole(row: Row, family: Family) -> str:
    return _shown(row, family, "{:.0f}")


def _shown(row: Row, family: Family, layout: str) -> str:
    value = row.numbers.get(family.name)
    return _UNKNOWN if value is None else layout.format(value)


def _samples(page: str) -> Iterable[Sample]:
    for metric in text_string_to_metric_families(page):
        yield from metric.samples


def _read(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:  # noqa: S310 - the scheme is ours
            raw: bytes = response.read()
    except urllib.error.URLError as error:
        raise OSError(str(error.reason)) from None
    return raw.decode()


def main() -> None:
    """The command line is carried out."""
    app()


if __name__ == "__main__":
    main()
