"""Imports run one way: no module imports itself through others, not even for type checking or in a function."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import signing_async

ROOT = Path(signing_async.__file__).parent


def _name(path: Path) -> str:
    return ".".join((ROOT.name, *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {_name(path): path for path in ROOT.rglob("*.py")}


def _imported(name: str, path: Path) -> set[str]:
    """Return the modules of the package that this one imports, wherever the import stands."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
            base += f".{node.module}" if node.module else ""
            targets = {f"{base}.{alias.name}" for alias in node.names}
            found |= {target if target in MODULES else base for target in targets}
    return found - {name}


def test_imports_form_no_circle() -> None:
    """Type-checking imports count too: a reader follows them as well."""
    graph = {name: _imported(name, path) for name, path in MODULES.items()}
    assert "signing_async.transport.call" in graph["signing_async.signings"]
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the circle
