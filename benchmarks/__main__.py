"""Runs comparisons: `python -m benchmarks [name ...] [--quick] [--rounds N] [--write]`; without a name all of them."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import time

import benchmarks

from . import measure, report

_NO_COMPARISONS = {"__main__", "charts", "measure", "notes", "report", "rivals", "server"}


def names() -> list[str]:
    """The comparisons there are: the other modules of this package, each with a ``main()``."""
    return sorted({module.name for module in pkgutil.iter_modules(benchmarks.__path__)} - _NO_COMPARISONS)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Compare with what else one would use.")
    parser.add_argument("name", nargs="*", help=f"one of: {', '.join(names())}")
    parser.add_argument("--quick", action="store_true", help="do little: checks that all runs, and measures nothing")
    parser.add_argument("--rounds", type=int, metavar="N", help="so many rounds of everything, however long they take")
    parser.add_argument("--write", action="store_true", help="keep the figures, and write RESULTS.md and the charts")
    parser.add_argument(
        "--report", action="store_true", help="measure nothing: rewrite RESULTS.md and the charts from the kept figures"
    )
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.name) - set(names())
    if unknown:
        parser.error(f"no such comparison: {', '.join(sorted(unknown))}; there are: {', '.join(names())}")
    if chosen.write and chosen.quick:
        parser.error("--quick measures nothing that is worth keeping")
    if chosen.rounds is not None and chosen.rounds < 1:
        parser.error("--rounds takes a number from 1")
    if chosen.quick:
        measure.set_quick()
    if chosen.rounds:
        measure.set_rounds(chosen.rounds)
    if not chosen.report:
        _measure(chosen.name or names(), write=chosen.write)
    if chosen.write or chosen.report:
        report.write()


def _measure(chosen: list[str], *, write: bool) -> None:
    measure.pin(measure.own_core())
    # A comparison that can be run by itself, with options of its own, is not to take these for its own.
    sys.argv[1:] = []
    for name in chosen:
        began = time.perf_counter()
        module = importlib.import_module(f"benchmarks.{name}")
        module.main()
        found = report.collected((module.__doc__ or "").partition("\n\n")[0])
        if write:
            report.keep(name, found, names())
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
