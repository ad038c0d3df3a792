"""The benchmarks run and check their work, in a configuration so small that its figures mean nothing."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from benchmarks.__main__ import main, names
from benchmarks.measure import (
    Sample,
    Table,
    compared,
    in_child,
    in_process,
    in_thread,
    interleaved,
    median,
    quick,
    ratio,
    show,
    shown,
)
from benchmarks.server import Server, pdf_bytes, running
from signing_async import RateLimited, RetryPolicy, SigningClient

_ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The benchmarks' server, in its own process."""
    with running() as server:
        yield server


@pytest.mark.parametrize("name", sorted(set(names()) - {"sandbox"}))
def test_a_benchmark_runs_and_does_its_work(name: str) -> None:
    """Each runs to its table; work that was not done would have ended it with an error."""
    command = [sys.executable, "-m", "benchmarks", name, "--quick"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "### " in done.stdout
    assert "Traceback" not in done.stderr


def test_the_figures_of_the_sandbox() -> None:
    """They have options of their own to do little."""
    command = [sys.executable, "-m", "benchmarks.sandbox", "--uploads", "20", "--signings", "2"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Whole signings" in done.stdout


def test_an_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The error lists what there is."""
    with pytest.raises(SystemExit):
        main(["calls", "nosuch"])
    said = capsys.readouterr().err
    assert "no such comparison: nosuch" in said
    assert "listing" in said


async def test_candidates_take_turns() -> None:
    """Rounds are interleaved, every second one backwards, and the warm-up leaves no samples."""
    ran: list[str] = []
    candidates = {name: in_process(partial(ran.append, name)) for name in "ab"}
    samples = await interleaved(candidates, rounds=3, warm_up=1)
    assert "".join(ran) == "ba" + "ab" + "ba" + "ab"
    assert [len(taken) for taken in samples.values()] == [3, 3]


async def test_work_that_was_not_done_is_noticed() -> None:
    """A candidate whose proof of work differs ends the comparison, by name."""
    with pytest.raises(AssertionError, match=r"lazy did not do its work: expected 3, got 2"):
        await interleaved({"honest": in_thread(lambda: 3), "lazy": in_process(lambda: 2)}, rounds=1, expect=3)


def test_the_median_of_paired_ratios() -> None:
    """A round in which the machine was slow for both does not move the ratio."""
    samples = {"one": [Sample(2, 3), Sample(40, 60), Sample(2, 3)], "two": [Sample(1, 2), Sample(20, 40), Sample(1, 2)]}
    assert ratio(samples, "one", "two") == 2
    assert ratio(samples, "one", "two", "cpu") == 1.5
    assert median(samples["one"]) == 2
    assert compared(samples, "two", count=2) == [
        ["one", "2.00", "1.50", "1000000.0", "1500000.0"],
        ["two", "1.00", "1.00", "500000.0", "1000000.0"],
    ]


def test_a_table_is_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    """It is printed, aligned, and kept."""
    table = Table("Figures", ("what", "µs"), [["short", "1"], ["a longer name", "10.5"]], "A note.")
    show(table)
    assert capsys.readouterr().out == (
        "### Figures\n"
        "\n"
        "| what          |   µs |\n"
        "|---------------|------|\n"
        "| short         |    1 |\n"
        "| a longer name | 10.5 |\n"
        "\n"
        "A note.\n"
        "\n"
    )
    assert shown.pop() is table


def allocate(size: int) -> int:
    """Run in a child by the next test."""
    return len(bytearray(b"x" * 1024) * (size // 1024))


async def count(names: list[str]) -> int:
    """Run in a child by the next test."""
    return len(names)


def test_the_peak_memory_of_a_child() -> None:
    """What a function allocates shows as growth, though it is freed before the end."""
    child = in_child(allocate, 64 * 1024 * 1024)
    assert child.work == 64 * 1024 * 1024
    assert 60 * 1024 * 1024 < child.grown < 80 * 1024 * 1024
    assert in_child(count, ["a", "b"]).work == 2


def test_quick_is_asked_for_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that processes that are started inherit it."""
    monkeypatch.delenv("SIGNING_BENCHMARKS_QUICK", raising=False)
    assert not quick()
    monkeypatch.setenv("SIGNING_BENCHMARKS_QUICK", "1")
    assert quick()


@pytest.mark.parametrize("size", [1000, 50_000, 1_000_000])
def test_the_files_have_the_size_asked_for(size: int) -> None:
    """To the byte, and the same each time; an upload below shows that the preflight takes them."""
    assert len(pdf_bytes(size)) == size
    assert pdf_bytes(size) == pdf_bytes(size)


@pytest.mark.parametrize("kind", ["plain", "tls"])
async def test_the_server_counts_what_it_is_sent(server: Server, kind: str) -> None:
    """Calls, pages, uploads and downloads arrive whole, over TLS too."""
    server.configure(pages=3, page_size=4, download_bytes=70_000, hashes=True)
    files = [pdf_bytes(size) for size in (1000, 400_000)]
    connector = aiohttp.TCPConnector(ssl=server.ssl_context())
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        SigningClient(getattr(server, kind), "token", session=session) as client,
    ):
        assert (await client.me()).email == "ada@example.com"
        ids = [signing.id async for signing in client.signings.list()]
        for data in files:
            await client.documents.upload(ids[0], data, filename="lease.pdf")
        assert await client.documents.read_signed(ids[0], "d1") == pdf_bytes(70_000)
    counts = server.counts()
    assert len(set(ids)) == 12
    assert counts["uploads"] == 2
    assert counts["downloads"] == 1
    assert counts["upload_bytes"] > 401_000
    assert counts["hashes"] == [hashlib.sha256(data).hexdigest() for data in files]


async def test_the_server_limits_the_rate(server: Server) -> None:
    """Requests beyond the rate are refused, and counted as refused."""
    server.configure(rate=2)
    async with SigningClient(server.plain, "token", retry=RetryPolicy.none()) as client:
        answers = await asyncio.gather(*(client.me() for _ in range(10)), return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, RateLimited)]
    assert refused
    assert refused[0].retry_after == 1
    assert server.counts()["refused"] >= 1


async def test_the_server_answers_late(server: Server) -> None:
    """The latency asked for is kept at least, and a client that has gone away by then does no harm."""
    server.configure(latency=0.2)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.05)) as session:
        with pytest.raises(TimeoutError):
            await session.get(f"{server.plain}/api/1.0/me")
    async with SigningClient(server.plain, "token") as client:
        started = time.monotonic()
        await client.me()
    assert time.monotonic() - started > 0.15


async def test_the_server_wants_a_length(server: Server) -> None:
    """A chunked upload is refused: its bytes would not be counted."""
    server.configure()

    async def chunks() -> AsyncIterator[bytes]:
        yield b"x"

    async with aiohttp.ClientSession() as session:
        response = await session.post(f"{server.plain}/api/1.0/signings/s1/documents", data=chunks())
        assert response.status == 411
