"""Change the package in small ways, one at a time, and report the changes that no test notices.

``python -m tests.mutation --module transport/retry --sample 40`` works in a copy of the package.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = {
    "transport/retry": ["tests/simulation", "tests/transport", "tests/reconcile", "tests/auth"],
    "transport/call": ["tests/simulation", "tests/transport", "tests/reconcile"],
    "reconcile": ["tests/simulation", "tests/reconcile", "tests/documents"],
    "storage/claims": ["tests/storage", "tests/postgres", "tests/dispatch"],
    "webhooks/verifier": [f"tests/webhooks/test_{name}.py" for name in ("verifier", "scheme", "event")],
    "auth/refresh": ["tests/auth"],
}
_PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)]
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    one: other for each in _PAIRS for one, other in (each, each[::-1])
}


def mutations(tree: ast.Module) -> Iterator[tuple[int, str, ast.Module]]:
    """Yield each changed module with its line and what was changed."""
    for index, node in enumerate(ast.walk(tree)):
        for change in _changes(node):
            changed = copy.deepcopy(tree)
            target = list(ast.walk(changed))[index]
            before = ast.unparse(target)
            change(target)
            yield getattr(node, "lineno", 0), f"{before} -> {ast.unparse(target)}", changed


def _changes(node: ast.AST) -> Iterator[object]:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
            yield lambda target: setattr(target, "ops", [_COMPARISONS[type(operator)]()])
        case ast.BoolOp(op=operator):
            other = ast.Or if isinstance(operator, ast.And) else ast.And
            yield lambda target: setattr(target, "op", other())
        case ast.Constant(value=bool() as value):
            yield lambda target: setattr(target, "value", not value)
        case ast.Constant(value=int() | float() as value):
            yield lambda target: setattr(target, "value", value + 1)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield lambda target: setattr(target, "test", ast.UnaryOp(ast.Not(), test))
        case ast.Return(value=ast.expr()):
            yield lambda target: setattr(target, "value", ast.Constant(None))
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield lambda target: setattr(target, "value", ast.Constant(None))
        case ast.BinOp(op=ast.Add()):
            yield lambda target: setattr(target, "op", ast.Sub())
        case ast.BinOp(op=ast.Mult()):
            yield lambda target: setattr(target, "op", ast.Add())


def survives(folder: Path, tests: list[str]) -> bool:
    """Return whether all tests pass with the package in this folder."""
    run = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "-p", "no:cacheprovider", "--timeout=60", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(run, cwd=folder, env=environment, capture_output=True, check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--module", choices=MODULES, action="append", help="may be repeated; default: all")
    parser.add_argument("--sample", type=int, default=40, help="how many changes of each module are tried")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("signing_async", "tests"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        for module in options.module or MODULES:
            path = folder / "signing_async" / f"{module}.py"
            original = path.read_text("utf-8")
            found = list(mutations(ast.parse(original)))
            chosen = random.Random(options.seed).sample(found, min(options.sample, len(found)))
            survivors = 0
            for line, change, tree in sorted(chosen, key=lambda each: each[0]):
                path.write_text(ast.unparse(tree), "utf-8")
                if survives(folder, MODULES[module]):
                    survivors += 1
                    print(f"{module}.py:{line}: {change}", flush=True)
            path.write_text(original, "utf-8")
            print(f"{module}: {survivors} of {len(chosen)} changes survived ({len(found)} in all)", flush=True)


if __name__ == "__main__":
    main()
