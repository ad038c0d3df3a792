"""Thousands of uploads through `upload_many`: the memory of the process, and its speed against aiohttp's FormData."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from signing_async import PdfSource, SigningClient

from .charts import Bar, Chart, Panel
from .measure import comparison, in_child, interleaved, quick, ratio
from .report import OURS, Table, draw, judge, show

if TYPE_CHECKING:
    from .server import Server

_AT_ONCE = 8
_NUMBERS = (50, 100) if quick() else (1000, 10_000)
_SIZE = 50_000
_FILES, _FILE_SIZE = (8, 1_000_000) if quick() else (500, 1_000_000)
_FORM = "aiohttp FormData"
_PATH = "/api/1.0/signings/s1/documents"
_TOKEN = "benchmark"


def main() -> None:
    # Not above: the process whose memory is measured imports this module too, and no rivals.
    from .server import running

    with running() as server, tempfile.TemporaryDirectory() as folder:
        _measure_memory(server, Path(folder))
        asyncio.run(_compare(server, Path(folder)))


def _measure_memory(server: Server, folder: Path) -> None:
    from .server import pdf_bytes

    path = folder / "lease.pdf"
    path.write_bytes(pdf_bytes(_SIZE))
    rows, bars = [], []
    for number in _NUMBERS:
        for signings in (1, number):
            server.configure()
            child = in_child(upload_number, server.plain, str(path), number, signings)
            assert server.counts()["uploads"] == number == child.work
            name = f"{number} uploads to {'one signing' if signings == 1 else 'as many signings'}"
            rows.append([name, f"{child.imported / 1e6:.1f}", f"{child.peak / 1e6:.1f}", f"{child.grown / 1e6:.1f}"])
            bars.append(Bar(name, child.peak / 1e6, ours=True))
            if number == _NUMBERS[-1]:
                judge(f"memory of {name}", child.peak / 1e6, at_most=80, unit=" MB")
    note = f"Resident memory in MB (peak: VmHWM) of a process of its own, {_AT_ONCE} uploads at a time."
    show(Table(f"Memory: uploads of {_SIZE // 1000} KB", ("work", "imported", "peak", "more"), rows, note))
    panel = Panel(f"uploads of {_SIZE // 1000} KB, {_AT_ONCE} at a time", bars, 80)
    draw(Chart("bulk-memory", "Memory of many uploads", "MB at the peak; shorter is better", [panel]))


async def upload_number(origin: str, path: str, number: int, signings: int) -> int:
    """For a process of its own."""

    def sources() -> Iterator[tuple[str, PdfSource]]:
        for index in range(number):
            yield f"s{index % signings}", PdfSource(path, f"lease-{index}.pdf")

    done = 0
    async with SigningClient(origin, _TOKEN) as client:
        async for result in client.documents.upload_many(None, sources(), concurrency=_AT_ONCE):
            if result.error is not None:
                raise result.error
            done += 1
    return done


async def _compare(server: Server, folder: Path) -> None:
    from .rivals import aiohttp_session
    from .server import pdf_bytes

    server.configure()
    paths = [folder / f"lease-{number}.pdf" for number in range(_FILES)]
    for number, path in enumerate(paths):
        path.write_bytes(pdf_bytes(_FILE_SIZE, number))
    async with aiohttp_session() as session:
        client = SigningClient(server.plain, _TOKEN, session=session)
        runs: dict[str, Callable[[], Awaitable[int]]] = {
            OURS: lambda: _ours(client, paths),
            _FORM: lambda: _form(session, server.plain + _PATH, paths),
        }
        samples = await interleaved(runs, rounds=9, seconds=15.0, expect=_FILES, server=server.cpu)
    title = f"{_FILES * _FILE_SIZE // 10**6} MB in files of 1 MB, {_AT_ONCE} at a time"
    show(comparison(title, samples, _FORM, count=_FILES))
    judge("upload_many: speed, of FormData's", ratio(samples, _FORM, OURS), at_least=1.8)


async def _ours(client: SigningClient, paths: Sequence[Path]) -> int:
    done = 0
    async for result in client.documents.upload_many("s1", paths, concurrency=_AT_ONCE):
        done += result.document is not None
    return done


async def _form(session: aiohttp.ClientSession, url: str, paths: Sequence[Path]) -> int:
    from .rivals import HEADERS

    waiting, done = iter(paths), 0

    async def work() -> None:
        nonlocal done
        for path in waiting:
            with path.open("rb") as file:
                form = aiohttp.FormData()
                form.add_field("selected_file", file, filename=path.name, content_type="application/pdf")
                async with session.post(url, data=form, headers=HEADERS) as response:
                    response.raise_for_status()
                    await response.json()
            done += 1

    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
    return done
