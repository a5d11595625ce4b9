"""The rooms of the package: who may import whom, what the core never touches, file lengths."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "extproc"
GENERATED = PACKAGE / "serve" / "pb"

VALUES = {"errors", "headers", "paths", "clusters"}
# What each room may import from the package, itself and the values aside.
ROOMS: dict[str, set[str]] = {
    "routing": set(),
    "exchange": {"routing"},
    "engines": {"routing"},
    "config": {"routing"},
    "telemetry": {"routing", "exchange"},
    "xds": {"routing", "exchange", "config"},
    "serve": {"routing", "exchange", "engines", "config", "telemetry"},
    "lab": {"routing", "exchange", "engines", "config", "telemetry", "serve", "xds", "cli"},
    "cli": {"routing", "exchange", "engines", "config", "telemetry", "serve", "xds", "lab"},
}
CORE = {"routing", "exchange", "engines", "config"}
SHELLS_IN_CORE = {"engines/scrape.py", "config/read.py"}
FORBIDDEN_IN_CORE = {
    "aiohttp",
    "asyncio",
    "google",
    "grpc",
    "logging",
    "prometheus_client",
    "selectors",
    "socket",
    "ssl",
    "threading",
    "time",
}
MAY_SEE_PROTOBUF = {"serve", "xds", "control"}
POLICIES = {"filters", "scorers", "pickers"}
# Who reads the wall clock, how often, and only to show it: the age of a model in the list.
SHOWS_WALL_CLOCK = {"serve/app.py": 1, "lab/inference.py": 1}
WALL_CLOCK = {
    "time": {"time", "time_ns", "localtime", "gmtime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}
MUTABLE_CALLS = {
    "dict",
    "list",
    "set",
    "defaultdict",
    "deque",
    "OrderedDict",
    "Counter",
    "bytearray",
}


def modules() -> list[Path]:
    """Every module of the package that people write."""
    return sorted(path for path in PACKAGE.rglob("*.py") if GENERATED not in path.parents)


def name_of(path: Path) -> str:
    """`routing/ring.py` for the module of that path."""
    return path.relative_to(PACKAGE).as_posix()


def room_of(path: Path) -> str:
    """The folder of a module, or its own name at the top level."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


def imports(path: Path) -> Iterator[str]:
    """The dotted names that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)} has a relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_room_imports_only_what_is_below_it(path: Path) -> None:
    """Imports go one way: transport, exchange, routing, values."""
    room = room_of(path)
    allowed = VALUES | ROOMS.get(room, set()) | {room}
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "extproc" and len(parts) > 1:
            assert parts[1] in allowed, f"{name_of(path)} imports {name}"


@pytest.mark.parametrize(
    "path",
    [p for p in modules() if room_of(p) in CORE | VALUES and name_of(p) not in SHELLS_IN_CORE],
    ids=name_of,
)
def test_the_core_does_no_io(path: Path) -> None:
    """The core has no clock, no socket, no log and no randomness of its own."""
    for name in imports(path):
        top = name.split(".")[0]
        assert top not in FORBIDDEN_IN_CORE, f"{name_of(path)} imports {name}"
        if top == "random":
            assert name in {"random", "random.Random"}, f"{name_of(path)} imports {name}"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert all(alias.name != "random" for alias in node.names), name_of(path)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_no_decision_reads_the_wall_clock(path: Path) -> None:
    """It jumps; what passes is measured by the monotonic clock."""
    assert not {"time.time", "time.time_ns"} & set(imports(path)), name_of(path)
    reads = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.attr in WALL_CLOCK.get(node.value.id, ())
    ]
    assert len(reads) == SHOWS_WALL_CLOCK.get(name_of(path), 0), name_of(path)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_protobuf_stays_in_the_shells_that_speak_it(path: Path) -> None:
    """Only the rooms with a wire format see protobuf."""
    if room_of(path) not in MAY_SEE_PROTOBUF:
        assert not any(name.startswith("google.protobuf") for name in imports(path)), name_of(path)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_policies_do_not_import_each_other(name: str) -> None:
    """Filters, scorers and pickers meet in the scheduler only."""
    others = {f"extproc.routing.{other}" for other in POLICIES - {name}}
    assert not others & set(imports(PACKAGE / "routing" / f"{name}.py"))


def test_no_module_imports_itself_through_others() -> None:
    """The import graph has no cycle."""
    known = {
        ".".join(("extproc", *path.relative_to(PACKAGE).with_suffix("").parts))
        for path in modules()
    }
    graph = {
        ".".join(("extproc", *path.relative_to(PACKAGE).with_suffix("").parts)): {
            name for name in imports(path) if name in known
        }
        for path in modules()
    }
    assert list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_no_import_hides_behind_type_checking(path: Path) -> None:
    """An import that only types need is still a dependency."""
    assert "TYPE_CHECKING" not in path.read_text()


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_modules_hold_no_mutable_state(path: Path) -> None:
    """Nothing at module level can be changed by a call."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            if names == {"__all__"}:
                continue
            value = node.value
            mutable = isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp)
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
                mutable = value.func.id in MUTABLE_CALLS
            assert not mutable, f"{name_of(path)}:{node.lineno} is mutable"


def test_modules_stay_short() -> None:
    """No module is over 600 lines and half of them are at most 200."""
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in modules()}
    assert {name: count for name, count in lengths.items() if count > 600} == {}
    assert median(count for count in lengths.values() if count > 1) <= 200
