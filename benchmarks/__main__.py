"""Runs comparisons: `python -m benchmarks [name ...] [--quick]`; without a name all of them, one after the other."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys

import benchmarks

from . import measure

_NO_COMPARISONS = {"__main__", "measure", "server"}


def names() -> list[str]:
    """The comparisons there are: the other modules of this package, each with a ``main()``."""
    return sorted({module.name for module in pkgutil.iter_modules(benchmarks.__path__)} - _NO_COMPARISONS)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Compare with what else one would use.")
    parser.add_argument("name", nargs="*", help=f"one of: {', '.join(names())}")
    parser.add_argument("--quick", action="store_true", help="do little: checks that all runs, and measures nothing")
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.name) - set(names())
    if unknown:
        parser.error(f"no such comparison: {', '.join(sorted(unknown))}; there are: {', '.join(names())}")
    if chosen.quick:
        measure.set_quick()
    measure.pin(measure.own_core())
    # A comparison that can be run by itself, with options of its own, is not to take these for its own.
    sys.argv[1:] = []
    for name in chosen.name or names():
        importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
