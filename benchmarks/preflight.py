"""The check of a PDF before its upload: files of several producers, with tables, streams and forms."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from signing_async.documents.preflight import glance, preflight

from .measure import MISSING, in_process, interleaved, median, quick
from .producers import FORM, STREAMS, files
from .report import Table, judge, show

_TIMES = 2 if quick() else 50


def main() -> None:
    rows = asyncio.run(_measured())
    note = "The glance is the check of a large file in the event loop; it reads a few kilobytes."
    show(Table("a preflight", ("file", "bytes", "µs of CPU, preflight", "µs of CPU, glance"), rows, note))
    preflights = {row[0]: float(row[2]) for row in rows if row[1] != MISSING}
    judge(f"preflight: {STREAMS}", preflights[STREAMS], at_most=30, unit=" µs of CPU")
    if FORM in preflights:
        judge(f"preflight: {FORM}", preflights[FORM], at_most=150, unit=" µs of CPU")


async def _measured() -> list[list[str]]:
    rows = []
    for name, data in files().items():
        if data is None:
            rows.append([name, MISSING, "", ""])
            continue
        runs = {
            "preflight": in_process(partial(_repeated, partial(preflight, data))),
            "glance": in_process(partial(_repeated, partial(glance, partial(_part, data), len(data)))),
        }
        samples = await interleaved(runs, rounds=31, seconds=3.0)
        rows.append(
            [name, str(len(data)), *(f"{median(taken, 'cpu') / _TIMES * 1e6:.1f}" for taken in samples.values())]
        )
    return rows


def _repeated(check: Callable[[], object]) -> None:
    for _ in range(_TIMES):
        check()


def _part(data: bytes, at: int, size: int) -> bytes:
    return data[at : at + size]
