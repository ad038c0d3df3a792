"""Measures candidates side by side: interleaved rounds, medians of paired ratios.

Machines differ and are noisy, so nothing here is judged by its seconds: a candidate runs in turn with its rivals
(ABAB...), each round gives one ratio of two runs made next to each other, and the median of those ratios counts. ::

    samples = await interleaved({OURS: ours, "theirs": theirs}, rounds=11, expect=100)
    show(comparison("calls", samples, "theirs", count=100))

A peer that is not installed is a candidate ``None``, and is shown as missing. A benchmark module has a ``main()`` that
measures and calls `report.show`; it does little where `quick` says so, for the tests.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Literal

import attrs

from .charts import Bar, Panel
from .report import OURS, Table

_QUICK = "SIGNING_BENCHMARKS_QUICK"
_ROUNDS = "SIGNING_BENCHMARKS_ROUNDS"
_FEWEST = 3


def quick() -> bool:
    """Whether only a small part is to be done, as the tests do: the figures then mean nothing, the checks still do."""
    return bool(os.environ.get(_QUICK))


def set_quick() -> None:
    """From now on, and in the processes that are started, only a small part is done."""
    os.environ[_QUICK] = "1"


def set_rounds(rounds: int) -> None:
    """From now on every comparison takes so many rounds, however long they take."""
    os.environ[_ROUNDS] = str(rounds)


def peer(module: str) -> ModuleType | None:
    """A module of something to compare with; None where it is not installed, or cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


# Cores

_CORES = sorted(os.sched_getaffinity(0))


def own_core() -> int:
    """The core for what is measured."""
    return _CORES[0]


def other_core() -> int:
    """The core for the server: another one, where there is one."""
    return _CORES[-1]


def pin(*cores: int) -> None:
    """Keep this thread, and the threads and processes that it starts from now on, on these cores."""
    os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def on_both_cores() -> Iterator[None]:
    """Let this thread, and what it starts in the block, use the server's core too."""
    before = os.sched_getaffinity(0)
    pin(own_core(), other_core())
    try:
        yield
    finally:
        pin(*before)


# Time

Time = Literal["wall", "cpu"]
Run = Callable[[], Awaitable[object]]
Candidates = Mapping[str, Run | None]


@attrs.frozen
class Sample:
    """One run: seconds on the clock, and seconds of this process's CPU time (children that it waited for included)."""

    wall: float
    cpu: float
    server: float = 0.0
    """Seconds of the server's CPU time, where it was asked for."""

    def seconds(self, what: Time) -> float:
        return self.wall if what == "wall" else self.cpu


Samples = Mapping[str, Sequence[Sample]]
"""By candidate and round; none for one that is missing."""


def process_cpu(pid: int) -> float:
    """Seconds of CPU time that the threads of a process have used so far, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def _cpu() -> float:
    used = (resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


async def interleaved(
    candidates: Candidates,
    *,
    rounds: int,
    warm_up: int = 1,
    expect: object = None,
    seconds: float | None = None,
    server: Callable[[], float] | None = None,
    prepare: Callable[[], object] = lambda: None,
) -> dict[str, list[Sample]]:
    """Run the candidates interleaved, in reverse order in every second round; return their samples by round.

    What a run returns is its proof of work: it has to equal ``expect`` each time, where that is given.
    Garbage is collected before a run, not during it. After ``seconds`` no round is begun, but for the first few.
    ``server`` tells the CPU time that the server has used so far; ``prepare`` is called before a run and not timed.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in candidates}
    present = [(name, run) for name, run in candidates.items() if run is not None]
    fixed = 1 if quick() else int(os.environ.get(_ROUNDS, 0))
    warm_up = 0 if quick() else warm_up
    end = time.perf_counter() + (seconds if seconds is not None and not fixed else float("inf"))
    for index in range(-warm_up, fixed or rounds):
        if index >= _FEWEST and time.perf_counter() > end:
            break
        for name, run in present if index % 2 == 0 else reversed(present):
            prepare()
            sample, work = await _run(run, server or (lambda: 0.0))
            if expect is not None and work != expect:
                raise AssertionError(f"{name} did not do its work: expected {expect!r}, got {work!r}")
            if index >= 0:
                samples[name].append(sample)
    return samples


async def _run(run: Run, server: Callable[[], float]) -> tuple[Sample, object]:
    gc.collect()
    with _no_collection():
        served, cpu, wall = server(), _cpu(), time.perf_counter()
        work = await run()
        return Sample(time.perf_counter() - wall, _cpu() - cpu, server() - served), work


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


def ratio(samples: Samples, name: str, to: str, what: Time = "wall") -> float:
    """The median, over the rounds, of what ``name`` took for each unit that ``to`` took; ``what`` is wall or cpu."""
    return statistics.median(_ratios(samples, name, to, what))


def spread(samples: Samples, name: str, to: str, what: Time = "wall") -> tuple[float, float]:
    """Between which ratios the middle half of the rounds lies."""
    ratios = _ratios(samples, name, to, what)
    if len(ratios) == 1:
        return ratios[0], ratios[0]
    first, _, last = statistics.quantiles(ratios, n=4, method="inclusive")
    return first, last


def _ratios(samples: Samples, name: str, to: str, what: Time) -> list[float]:
    pairs = zip(samples[name], samples[to], strict=True)
    return [one.seconds(what) / other.seconds(what) for one, other in pairs]


def median(samples: Sequence[Sample], what: Time = "wall") -> float:
    """The median of wall or cpu seconds."""
    return statistics.median(sample.seconds(what) for sample in samples)


# Tables and charts

MISSING = "not installed"


def comparison(title: str, samples: Samples, base: str, *, count: int = 1) -> Table:
    """Wall and CPU time of each candidate relative to ``base``, µs a piece, how many times what this package takes it
    takes with the spread over the rounds, and the share of a core that the server was busy."""
    columns = ("candidate", "wall", "CPU", "µs", "µs of CPU", f"to {OURS}", "middle half", "server busy")
    rows = [
        [
            name,
            f"{ratio(samples, name, base):.2f}",
            f"{ratio(samples, name, base, 'cpu'):.2f}",
            f"{median(taken) / count * 1e6:.1f}",
            f"{median(taken, 'cpu') / count * 1e6:.1f}",
            f"{ratio(samples, name, OURS):.2f}",
            "{:.2f} to {:.2f}".format(*spread(samples, name, OURS)),
            f"{statistics.median(one.server / one.wall for one in taken):.0%}",
        ]
        if taken
        else [name, MISSING, *[""] * 6]
        for name, taken in samples.items()
    ]
    rounds = max(len(taken) for taken in samples.values())
    note = f"Wall and CPU are relative to {base}; µs are those of a piece. Medians of {rounds} rounds."
    return Table(title, columns, rows, note)


def panel(
    title: str,
    samples: Samples,
    base: str,
    what: Time = "wall",
    *,
    names: Sequence[str] = (),
    target: float | None = None,
) -> Panel:
    """A panel of a chart: the time that each takes, relative to ``base``."""
    bars = [
        Bar(name, ratio(samples, name, base, what) if samples[name] else None, name.startswith(OURS))
        for name in names or samples
    ]
    return Panel(title, bars, target)
