"""Measures candidates side by side: interleaved rounds, medians of paired ratios, tables, peak memory of a process.

Machines differ and are noisy, so nothing here is judged by its seconds: a candidate runs in turn with its rivals
(ABAB...), each round gives one ratio of two runs made next to each other, and the median of those ratios counts. ::

    samples = await interleaved({"ours": ours, "theirs": theirs}, rounds=11, expect=100)
    show(Table("calls", ("candidate", "wall", "CPU"), compared(samples, "theirs")))

A benchmark module has a ``main()`` that measures and calls `show`; it does little where `quick` says so, for the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

__all__ = [
    "COMPARED",
    "Child",
    "Sample",
    "Table",
    "compared",
    "in_child",
    "in_process",
    "in_thread",
    "interleaved",
    "median",
    "other_core",
    "own_core",
    "peak_memory",
    "pin",
    "quick",
    "ratio",
    "set_quick",
    "show",
    "shown",
]

_QUICK = "SIGNING_BENCHMARKS_QUICK"


def quick() -> bool:
    """Whether only a small part is to be done, as the tests do: the figures then mean nothing, the checks still do."""
    return bool(os.environ.get(_QUICK))


def set_quick() -> None:
    """From now on, and in the processes that are started, only a small part is done."""
    os.environ[_QUICK] = "1"


# Cores

_CORES = sorted(os.sched_getaffinity(0))


def own_core() -> int:
    """The core for what is measured."""
    return _CORES[0]


def other_core() -> int:
    """The core for the server: another one, where there is one."""
    return _CORES[-1]


def pin(core: int) -> None:
    """Keep this process, and what it starts from now on, on one core."""
    os.sched_setaffinity(0, {core})


# Time

Time = Literal["wall", "cpu"]


@attrs.frozen
class Sample:
    """One run: seconds on the clock, and seconds of this process's CPU time (children that it waited for included)."""

    wall: float
    cpu: float

    def seconds(self, what: Time) -> float:
        return self.wall if what == "wall" else self.cpu


def _cpu() -> float:
    used = (resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


async def interleaved(
    candidates: Mapping[str, Callable[[], Awaitable[object]]],
    *,
    rounds: int,
    warm_up: int = 1,
    expect: object = None,
) -> dict[str, list[Sample]]:
    """Run the candidates in turn, in every second round backwards, and give the samples of each, round by round.

    What a run returns is its proof of work: it has to equal ``expect`` each time, where that is given.
    Garbage is collected before a run, not during it.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in candidates}
    for index in range(-warm_up, rounds):
        order = list(candidates.items())
        for name, run in order if index % 2 == 0 else reversed(order):
            sample, work = await _run(run)
            if expect is not None and work != expect:
                raise AssertionError(f"{name} did not do its work: expected {expect!r}, got {work!r}")
            if index >= 0:
                samples[name].append(sample)
    return samples


async def _run(run: Callable[[], Awaitable[object]]) -> tuple[Sample, object]:
    gc.collect()
    with _no_collection():
        cpu, wall = _cpu(), time.perf_counter()
        work = await run()
        return Sample(time.perf_counter() - wall, _cpu() - cpu), work


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def in_process(run: Callable[[], object]) -> Callable[[], Awaitable[object]]:
    """A candidate of `interleaved` from a plain function; the event loop stands still meanwhile."""

    async def candidate() -> object:
        return run()

    return candidate


def in_thread(run: Callable[[], object]) -> Callable[[], Awaitable[object]]:
    """A candidate of `interleaved` from a plain function that runs in a thread of its own."""

    async def candidate() -> object:
        return await asyncio.to_thread(run)

    return candidate


def ratio(samples: Mapping[str, Sequence[Sample]], name: str, to: str, what: Time = "wall") -> float:
    """The median, over the rounds, of what ``name`` took for each unit that ``to`` took; ``what`` is wall or cpu."""
    pairs = zip(samples[name], samples[to], strict=True)
    return statistics.median(one.seconds(what) / other.seconds(what) for one, other in pairs)


def median(samples: Sequence[Sample], what: Time = "wall") -> float:
    """The median of wall or cpu seconds."""
    return statistics.median(sample.seconds(what) for sample in samples)


# Memory


@attrs.frozen
class Child:
    """What a function did in a process of its own: what it returned, its time, and its memory in bytes."""

    work: Any
    sample: Sample
    imported: int
    """Resident when the module was imported and the function not yet called."""
    peak: int
    """The most that was resident while the function ran."""

    @property
    def grown(self) -> int:
        return self.peak - self.imported


def in_child(function: Callable[..., Any], *arguments: Any) -> Child:
    """Call a module's function (plain or async, arguments and result as JSON) in a fresh process, on the own core."""
    target = f"{function.__module__}:{function.__qualname__}"
    command = [sys.executable, "-m", "benchmarks.measure", target, json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    return Child(told["work"], Sample(told["wall"], told["cpu"]), told["imported"], told["peak"])


def peak_memory() -> int:
    """The most bytes that were ever resident in this process, or since the peak was last forgotten."""
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def _child(target: str, arguments: str) -> None:
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    pin(own_core())
    gc.collect()
    imported = _status("VmRSS")
    # Forgets the peak of importing. Where that is not allowed the peak still is an upper bound.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    cpu, wall = _cpu(), time.perf_counter()
    work = function(*json.loads(arguments))
    if asyncio.iscoroutine(work):
        work = asyncio.run(work)
    told = {"work": work, "wall": time.perf_counter() - wall, "cpu": _cpu() - cpu}
    print("\n" + json.dumps({**told, "imported": imported, "peak": peak_memory()}))


# Tables


@attrs.frozen
class Table:
    """Figures to show: the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def __str__(self) -> str:
        lines = [list(self.columns), *(list(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.columns))]
        head, *body = (_line(line, widths) for line in lines)
        rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
        parts = [f"### {self.title}", "", head, rule, *body]
        return "\n".join([*parts, "", self.note] if self.note else parts)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.rjust(width) if index else cell.ljust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "| " + " | ".join([first, *others]) + " |"


def compared(samples: Mapping[str, Sequence[Sample]], base: str, *, count: int = 1) -> list[list[str]]:
    """Rows for a table: candidate, wall and CPU time relative to ``base``, and µs of wall and CPU time a piece."""
    return [
        [
            name,
            f"{ratio(samples, name, base):.2f}",
            f"{ratio(samples, name, base, 'cpu'):.2f}",
            f"{median(taken) / count * 1e6:.1f}",
            f"{median(taken, 'cpu') / count * 1e6:.1f}",
        ]
        for name, taken in samples.items()
    ]


COMPARED = ("candidate", "wall, relative", "CPU, relative", "µs a piece", "µs of CPU a piece")

shown: list[Table] = []


def show(table: Table) -> None:
    """Print a table, and keep it in ``shown``."""
    shown.append(table)
    print(table, end="\n\n", flush=True)


if __name__ == "__main__":
    _child(*sys.argv[1:])
