"""CPU and memory of processes, from the kernel's accounting."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
# Positions in /proc/PID/stat after the command's name.
_PARENT: Final = 1
_OWN: Final = slice(11, 13)  # user and system time
_OF_CHILDREN: Final = slice(13, 15)  # both times of children that were waited for


def seconds(pid: int) -> float:
    """CPU seconds of every thread of `pid` so far, to the nanosecond where the kernel tells it."""
    tasks = Path(f"/proc/{pid}/task")
    total = 0
    for task in tasks.iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread ended between the listing and the read
    return total / 1e9


def tree_seconds(pid: int) -> float:
    """CPU seconds of `pid` and all its descendants so far, ended threads and children included.

    Of a process whose threads have not ended to the nanosecond, else to a tick (10 ms).
    """
    processes = _processes()
    return sum(_seconds(each, processes[each]) for each in _tree(pid, processes))


def _seconds(pid: int, process: _Process) -> float:
    """Ticks know of ended threads, the threads' own accounts of less than a tick: the larger."""
    try:
        alive = seconds(pid)
    except FileNotFoundError:
        alive = 0.0  # it ended after the listing
    return max(process.own_ticks / _TICKS_PER_SECOND, alive) + (
        process.children_ticks / _TICKS_PER_SECOND
    )


def tree_resident_mb(pid: int) -> float:
    """Resident memory of `pid` and all its descendants, pages that they share counted for each."""
    pages = 0
    for each in _tree(pid, _processes()):
        try:
            pages += int(Path(f"/proc/{each}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended after the listing
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    own_ticks: int
    children_ticks: int


def _processes() -> dict[int, _Process]:
    """Every process of this machine by its id."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                text = (folder / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended after the listing
            fields = text.rpartition(")")[2].split()
            found[int(folder.name)] = _Process(
                parent=int(fields[_PARENT]),
                own_ticks=sum(map(int, fields[_OWN])),
                children_ticks=sum(map(int, fields[_OF_CHILDREN])),
            )
    return found


def _tree(root: int, processes: dict[int, _Process]) -> list[int]:
    """`root`, where it runs, and its descendants."""
    children = defaultdict(list)
    for pid, process in processes.items():
        children[process.parent].append(pid)
    found = [root] if root in processes else []
    for pid in found:  # grows while it is walked
        found += children[pid]
    return found
