"""What the handlers of one simulated engine share: its options and its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from extproc.lab.engine import EngineSettings
from extproc.lab.faults import Faults
from extproc.lab.pages import Dialect, Pages
from extproc.lab.pump import Pump
from extproc.lab.records import Records
from extproc.lab.tally import Reading


@dataclass(frozen=True, slots=True)
class Options:
    """How one simulated engine behaves while nothing goes wrong.

    `models` are served under all of their names, the first is the default. `key` is demanded on
    `/v1/` paths: as a bearer token in `authorization`, as the bare value of any other
    `key_header`. `output_tokens` is the length of an answer whose request sets no limit (a
    request that sets one gets exactly so many). `stamps` puts the monotonic time into every
    stream event. `headers_at_once` false holds a stream's headers back until its first token.
    `ranks` is the number of data-parallel engines behind the one address.
    """

    name: str = "engine"
    models: tuple[str, ...] = ("m",)
    dialect: Dialect = Dialect.VLLM
    settings: EngineSettings = field(default_factory=EngineSettings)
    ranks: int = 1
    output_tokens: int = 16
    token_bytes: int = 4
    stamps: bool = False
    headers_at_once: bool = True
    key: str | None = None
    key_header: str = "authorization"
    echo: bool = False
    is_bulky: bool = False
    max_body_bytes: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        """Refuses an engine without a model, without ranks, or with unreadable tokens."""
        if not self.models:
            raise ValueError("an engine has at least one model")
        if self.ranks < 1 or self.token_bytes < 2:
            raise ValueError("ranks starts at 1 and token_bytes at 2")


@dataclass(frozen=True, slots=True)
class Shown:
    """Numbers that the metrics page shows in place of the true ones; None shows the truth."""

    running: int | None = None
    waiting: int | None = None
    kv_usage_ratio: float | None = None

    def over(self, reading: Reading) -> Reading:
        """The reading with these numbers in it."""
        if self.running is not None:
            reading = replace(reading, running=self.running)
        if self.waiting is not None:
            reading = replace(reading, waiting=self.waiting)
        if self.kv_usage_ratio is not None:
            used = round(self.kv_usage_ratio * reading.kv_tokens)
            reading = replace(reading, kv_usage_ratio=self.kv_usage_ratio, kv_used_tokens=used)
        return reading


@dataclass(slots=True)
class Desk:
    """The state of one running engine. `adapters` are LoRA adapters by name, with their base."""

    options: Options
    pump: Pump
    records: Records
    faults: Faults
    adapters: dict[str, str] = field(default_factory=dict)
    shown: Shown = field(default_factory=Shown)
    is_healthy: bool = True

    @property
    def name(self) -> str:
        """The engine's name, which every answer carries."""
        return self.options.name

    def serves(self) -> frozenset[str]:
        """Every name under which a model can be asked for."""
        return frozenset((*self.options.models, *self.adapters))

    def readings(self) -> Sequence[Reading]:
        """What the metrics page shows, one per rank."""
        return [self.shown.over(engine.reading()) for engine in self.pump.engines]

    def page(self) -> bytes | None:
        """The metrics page now; None where the dialect has none."""
        options = self.options
        pages = Pages(options.dialect, options.models[0], is_bulky=options.is_bulky)
        return pages.render(self.readings())
