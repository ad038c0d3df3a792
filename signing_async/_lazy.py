"""Load the public names of a package when they are first used (PEP 562). Standard library only."""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False  # see `signing_async`
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


def attach(
    package: str, names: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package, from the names in each of its modules."""
    modules = {name: module for module, defined in names.items() for name in defined}
    namespace = vars(sys.modules[package])

    def load(name: str) -> object:
        if f".{name}" in names:
            return import_module(f".{name}", package)
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = namespace[name] = getattr(import_module(modules[name], package), name)
        return value

    return load, lambda: sorted({*namespace, *modules}), sorted(modules)
