"""What came of all requests, every error with its cause, and what it all looks like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from extproc.lab.soak.asking import Result
from extproc.lab.soak.troubles import Window, explain

UNEXPLAINED: Final = "UNEXPLAINED"
_MEGABYTE: Final = 1024 * 1024


@dataclass(slots=True)
class Account:
    """Counts of requests, answers and errors; the first unexplained ones are kept whole."""

    requests: int = 0
    asked: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    errors: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, result: Result, windows: Iterable[Window]) -> None:
        """One more request is over; `windows` are the troubles that could have to do with it."""
        self.requests += 1
        self.asked[result.plan.ask] += 1
        self.answers[result.kind] += 1
        if result.has_left and result.plan.leaving is not None:
            self.left[result.plan.leaving] += 1
        problem = result.problem
        if problem is None:
            return
        trouble = explain(result, windows)
        cause = UNEXPLAINED if trouble is None else str(trouble)
        self.errors[problem, str(result.plan.ask), cause] += 1
        if trouble is None and len(self.examples) < _KEPT_EXAMPLES:
            self.examples.append(_told(result, windows))

    @property
    def unexplained(self) -> int:
        """How many errors nothing explains."""
        return sum(n for (_, _, cause), n in self.errors.items() if cause == UNEXPLAINED)

    def brief(self) -> str:
        """The errors so far on one line."""
        found: Counter[str] = Counter()
        for (problem, _, cause), number in self.errors.items():
            found[f"{problem}{' ' + UNEXPLAINED if cause == UNEXPLAINED else ''}"] += number
        return ", ".join(f"{name} {number}" for name, number in sorted(found.items())) or "none"


_KEPT_EXAMPLES: Final = 20


def _told(result: Result, windows: Iterable[Window]) -> str:
    """What happened, and the last troubles before it: how long ago they began and ended."""
    before = [
        f"{one.episode.trouble} {one.episode.engine or ''} {result.ended - one.began:.2f} to"
        f" {result.ended - one.ended:.2f} s earlier"
        for one in windows
        if one.began <= result.ended
    ]
    return (
        f"{result.problem} to {result.plan.ask} from {result.served_by or 'nobody'}, took"
        f" {result.ended - result.began:.2f} s; {'; '.join(before[-2:]) or 'no trouble before'}"
    )


@dataclass(frozen=True, slots=True)
class Memory:
    """The resident memory of one process over requests: pairs of requests done and bytes."""

    samples: Sequence[tuple[int, int]]

    @property
    def first(self) -> int:
        """Bytes at the first sample, which is after the warm-up."""
        return self.samples[0][1]

    @property
    def last(self) -> int:
        """Bytes at the end."""
        return self.samples[-1][1]

    @property
    def largest(self) -> int:
        """The most bytes that were seen."""
        return max(value for _, value in self.samples)

    @property
    def growth_percent(self) -> float:
        """By how much the last is above the first."""
        return 100.0 * (self.last - self.first) / self.first

    @property
    def slope(self) -> float:
        """Bytes per request: the line of least squares through the samples; 0 of a single one."""
        number = len(self.samples)
        mean_x = sum(x for x, _ in self.samples) / number
        mean_y = sum(y for _, y in self.samples) / number
        spread = sum((x - mean_x) ** 2 for x, _ in self.samples)
        if spread == 0:
            return 0.0
        return sum((x - mean_x) * (y - mean_y) for x, y in self.samples) / spread


@dataclass(frozen=True, slots=True)
class Verdict:
    """Everything that is known at the end of a run."""

    account: Account
    seconds: float
    troubles: Mapping[str, int]
    inflight: Mapping[str, int]
    defects: Mapping[str, int]
    streams: int
    service: Memory
    envoy: Memory
    spread: Mapping[str, int]
    alike: frozenset[str]

    @property
    def is_even(self) -> bool:
        """Whether the last requests were spread evenly: a leaked count would keep some away.

        Evenly over the engines that are `alike`. Another has numbers of its own, which may speak
        against it; it must have got some.
        """
        alike = [number for name, number in self.spread.items() if name in self.alike]
        share = sum(alike) / max(1, len(alike))
        are_even = all(0.6 * share <= number <= 1.4 * share for number in alike)
        return are_even and all(self.spread.values())

    @property
    def left_over(self) -> int:
        """How many requests still count as in flight."""
        return sum(abs(number) for number in self.inflight.values())

    @property
    def is_good(self) -> bool:
        """Whether nothing is left over and everything is explained."""
        return (
            self.left_over == 0
            and self.streams == 0
            and self.account.unexplained == 0
            and not any(self.defects.values())
            and self.is_even
        )

    def table(self) -> str:
        """The account in full; its last line is the verdict."""
        account = self.account
        rate = account.requests / max(self.seconds, 1e-9)
        verdict = (
            f"soak: {account.requests} requests, {account.unexplained} unexplained,"
            f" in-flight {self.left_over}, rss {self.service.growth_percent:+.1f} %"
        )
        lines = [
            f"requests {account.requests} in {self.seconds:.0f} s, {rate:.0f} a second",
            *_section("asked", account.asked),
            *_section("answers", account.answers),
            *_section("clients that left", account.left),
            *_section("troubles", self.troubles),
            *_section(
                "errors", {" | ".join(key): number for key, number in account.errors.items()}
            ),
            *(f"  {UNEXPLAINED}: {example}" for example in account.examples),
            *_section("in flight at the end", self.inflight),
            f"open streams at the end: {self.streams}",
            *_section("defects", self.defects),
            _memory("service", self.service),
            _memory("Envoy", self.envoy),
            *_section("the next requests, held all at once", self.spread),
            f"spread: {'even' if self.is_even else 'NOT EVEN'}",
            verdict,
        ]
        return "\n".join(lines)


def _section(title: str, counts: Mapping[str, int]) -> list[str]:
    rows = sorted(counts.items(), key=lambda row: (-row[1], row[0]))
    return [f"{title}:", *(f"  {number:>9}  {name}" for name, number in rows)]


def _memory(name: str, memory: Memory) -> str:
    begin, end = memory.samples[0][0], memory.samples[-1][0]
    return (
        f"rss of {name} from request {begin} to {end}: first {memory.first / _MEGABYTE:.1f} MB,"
        f" max {memory.largest / _MEGABYTE:.1f}, last {memory.last / _MEGABYTE:.1f},"
        f" {memory.growth_percent:+.1f} %, slope {memory.slope:+.1f} bytes a request"
    )
