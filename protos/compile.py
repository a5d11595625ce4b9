# ruff: noqa: INP001 - a script beside the protos, not a package
"""Compiles every proto package of this folder into the Python package that uses it.

Usage: python protos/compile.py

The output is committed, so that an installation needs no compiler; a test compares it.
"""

from __future__ import annotations

import sysconfig
import tempfile
from pathlib import Path
from typing import Final

import grpc_tools  # type: ignore[import-untyped]  # the package has no stubs
from grpc_tools import protoc

_PROTOS: Final = Path(__file__).resolve().parent
_PROJECT: Final = _PROTOS.parent

OUTPUTS: Final = {"llmgw/wire": "extproc/serve/pb"}
"""Proto folder to the Python package that its generated modules become."""


def compile_folder(folder: str, package: str) -> dict[str, str]:
    """The generated modules of one proto folder, file name to text.

    The compiler names a module after its proto file; `package` (a path) is where it really lies,
    so imports between the modules are rewritten.

    Raises:
        RuntimeError: the compiler refused a file; it has printed why.
    """
    sources = sorted((_PROTOS / folder).glob("*.proto"))
    plugin = Path(sysconfig.get_path("scripts"), "protoc-gen-mypy")
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [
            "protoc",
            f"-I{_PROTOS}",
            f"-I{well_known}",
            f"--python_out={scratch}",
            f"--plugin=protoc-gen-mypy={plugin}",
            f"--mypy_out=quiet:{scratch}",
            *(str(source) for source in sources),
        ]
        if protoc.main(arguments) != 0:
            raise RuntimeError(f"the compiler refused {folder}")
        home = package.replace("/", ".")
        stranger = folder.replace("/", ".")
        return {
            path.name: path.read_text().replace(f"from {stranger} import", f"from {home} import")
            for path in sorted(Path(scratch, folder).iterdir())
        }


def main() -> None:
    """Every output package holds exactly what its protos say."""
    for folder, package in OUTPUTS.items():
        target = _PROJECT / package
        modules = compile_folder(folder, package)
        for stale in target.glob("*_pb2.py*"):
            if stale.name not in modules:
                stale.unlink()
        for name, text in modules.items():
            (target / name).write_text(text)


if __name__ == "__main__":
    main()
