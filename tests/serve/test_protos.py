"""The committed modules against what the compiler makes of the protos."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def compiler() -> ModuleType:
    """The script `protos/compile.py` as a module."""
    spec = importlib.util.spec_from_file_location("compile_protos", ROOT / "protos" / "compile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("folder", "package"), compiler().OUTPUTS.items())
def test_generated_modules_are_current(folder: str, package: str) -> None:
    """Compiling the protos again changes nothing."""
    fresh = compiler().compile_folder(folder, package)
    committed = {path.name: path.read_text() for path in (ROOT / package).glob("*_pb2.py*")}
    assert committed == fresh
