"""The benchmarks run and check their work, in a configuration so small that its figures mean nothing."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import aiohttp
import pytest

from benchmarks import notes, report, webhooks
from benchmarks.__main__ import main, names
from benchmarks.charts import Bar, Chart, Panel, svg
from benchmarks.measure import (
    MISSING,
    Sample,
    compared,
    comparison,
    in_child,
    in_process,
    in_thread,
    interleaved,
    median,
    on_both_cores,
    other_core,
    own_core,
    panel,
    peer,
    pin,
    process_cpu,
    quick,
    ratio,
    spread,
)
from benchmarks.report import OURS, Section, Table, Target, collected, draw, judge, keep, show, shown, write
from benchmarks.server import Server, pdf_bytes, running
from signing_async import RateLimited, RetryPolicy, SigningClient
from tests.needs import needs

_ROOT = Path(__file__).parent.parent
_SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The benchmarks' server, in its own process."""
    with running() as server:
        yield server


@pytest.mark.parametrize("name", names())
def test_benchmark_runs_and_its_work_is_checked(name: str) -> None:
    """Each runs to its table; work that was not done would have ended it with an error."""
    if name == "shared":
        needs("redis-server")
    command = [sys.executable, "-m", "benchmarks", name, "--quick"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "### " in done.stdout
    assert "Traceback" not in done.stderr


def test_unknown_benchmark_is_rejected_with_the_known_names(capsys: pytest.CaptureFixture[str]) -> None:
    """The error lists what there is."""
    with pytest.raises(SystemExit):
        main(["calls", "nosuch"])
    said = capsys.readouterr().err
    assert "no such comparison: nosuch" in said
    assert "listing" in said


@pytest.mark.parametrize("options", [["--quick", "--write"], ["--rounds", "0"]])
def test_useless_options_are_rejected(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Figures of a quick run are not worth keeping, and no rounds measure nothing."""
    with pytest.raises(SystemExit):
        main(["clients", *options])
    assert options[0] in capsys.readouterr().err


async def test_rounds_of_candidates_are_interleaved() -> None:
    """Rounds are interleaved, every second one backwards, and the warm-up leaves no samples."""
    ran: list[str] = []
    candidates = {name: in_process(partial(ran.append, name)) for name in "ab"}
    samples = await interleaved(candidates, rounds=3, warm_up=1)
    assert "".join(ran) == "ba" + "ab" + "ba" + "ab"
    assert [len(taken) for taken in samples.values()] == [3, 3]


async def test_candidate_that_did_not_do_its_work_ends_the_comparison() -> None:
    """A candidate whose proof of work differs ends the comparison, by name."""
    with pytest.raises(AssertionError, match=r"lazy did not do its work: expected 3, got 2"):
        await interleaved({"honest": in_thread(lambda: 3), "lazy": in_process(lambda: 2)}, rounds=1, expect=3)


def test_ratio_is_the_median_of_paired_rounds() -> None:
    """A round in which the machine was slow for both does not move the ratio."""
    samples = {"one": [Sample(2, 3), Sample(40, 60), Sample(2, 3)], "two": [Sample(1, 2), Sample(20, 40), Sample(1, 2)]}
    assert ratio(samples, "one", "two") == 2
    assert ratio(samples, "one", "two", "cpu") == 1.5
    assert median(samples["one"]) == 2
    assert compared(samples, "two", count=2) == [
        ["one", "2.00", "1.50", "1000000.0", "1500000.0"],
        ["two", "1.00", "1.00", "500000.0", "1000000.0"],
    ]


def test_table_is_printed_as_markdown_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_missing_peer_keeps_its_row_and_bar() -> None:
    """A peer that is not installed keeps its row and its bar, without a figure."""
    assert peer("no_such_peer") is None
    samples = {OURS: [Sample(2, 2, 1)], "floor": [Sample(1, 1, 1)], "no_such_peer": []}
    table = comparison("calls", samples, "floor")
    assert table.rows == [
        [OURS, "2.00", "2.00", "2000000.0", "2000000.0", "1.00", "1.00 to 1.00", "50%"],
        ["floor", "1.00", "1.00", "1000000.0", "1000000.0", "0.50", "0.50 to 0.50", "100%"],
        ["no_such_peer", MISSING, "", "", "", "", "", ""],
    ]
    bars = panel("calls", samples, "floor").bars
    assert bars == [Bar(OURS, 2, ours=True), Bar("floor", 1), Bar("no_such_peer", None)]
    assert MISSING in svg(Chart("calls", "Calls", "time", [Panel("calls", bars)]))


def test_peer_that_cannot_be_imported_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of another package may break a peer; the others are still compared."""
    (tmp_path / "broken_peer.py").write_text("from json import no_such_name")
    monkeypatch.syspath_prepend(tmp_path)
    assert peer("broken_peer") is None

    def broken(body: bytes) -> webhooks.Run:
        module: webhooks.Run = importlib.import_module("broken_peer").verify
        return module

    monkeypatch.setattr(webhooks, "PEERS", (broken,))
    assert webhooks.contestants(webhooks.body_of(300))["broken"] is None


async def test_missing_candidate_has_no_samples() -> None:
    """It has no samples; the others have theirs, as many as the time allows but a few at least."""
    candidates = {"here": in_process(lambda: time.sleep(0.01)), "missing": None}
    samples = await interleaved(candidates, rounds=100, seconds=0)
    assert len(samples["here"]) == 3
    assert samples["missing"] == []


def test_spread_is_the_middle_half_of_the_ratios() -> None:
    """A single round has no spread."""
    samples = {"one": [Sample(wall, 1) for wall in (1, 2, 3, 4, 5)], "two": [Sample(1, 1)] * 5}
    assert spread(samples, "one", "two") == (2, 4)
    assert spread({name: taken[:1] for name, taken in samples.items()}, "one", "two") == (1, 1)


def test_cpu_time_counts_all_threads_of_a_process() -> None:
    """It grows while a process works, and all its threads count."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        before = process_cpu(process.pid)
        while process_cpu(process.pid) < before + 0.02:
            time.sleep(0.01)
        process.kill()


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (Target("speed", 1.796, at_least=1.8), True),
        (Target("speed", 1.79, at_least=1.8), False),
        (Target("memory", 10.004, at_most=10, unit=" MB"), True),
        (Target("memory", 10.01, at_most=10, unit=" MB"), False),
    ],
)
def test_target_is_judged_by_its_rounded_figure(target: Target, met: bool) -> None:
    """To two decimals, so that the page never shows a bound reached and calls it missed."""
    assert target.met is met
    assert ("met" in str(target)) is met


def test_page_is_written_from_the_kept_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison replaces its own section alone; what is missed is explained, or said not to be."""
    monkeypatch.setattr(report, "NOTES", {"calls: cost": "Calls are work."})
    monkeypatch.setattr(report, "CHANGES", {"lists": "Lists are longer."})
    table = Table("Calls", ("candidate", "wall"), [[OURS, "1.20"]])
    chart = Chart("calls", "A call & more", "time", [Panel("me()", [Bar(OURS, 1.2, ours=True)], target=1.15)])
    there = ["lists", "calls", "others"]
    keep("gone", Section("It is there no more."), ["gone"], tmp_path)
    keep("calls", Section("Calls.", [table], [Target("calls: cost", 1.2, at_most=1.15)], [chart]), there, tmp_path)
    keep("lists", Section("Lists.", [], [Target("lists: speed", 2, at_least=1.8)], []), there, tmp_path)
    keep("lists", Section("Lists again.", [], [Target("lists: speed", 1.7, at_least=1.8)], []), there, tmp_path)
    write(tmp_path)
    page = (tmp_path / "RESULTS.md").read_text()
    assert "0 of 2 targets are met." in page
    assert "![A call & more](charts/calls.svg)" in page
    assert str(table) in page
    assert "- Missed, calls: cost: Calls are work." in page
    assert "- Missed, lists: speed: not explained yet" in page
    assert "Lists again.\n\nSince the former figures: Lists are longer.\n" in page
    assert "Lists again." in page
    assert "Lists.\n" not in page
    assert "gone" not in page
    drawn = ElementTree.parse(tmp_path / "charts" / "calls.svg").getroot()
    assert drawn.attrib["aria-label"] == "A call & more"
    write(tmp_path)
    assert (tmp_path / "RESULTS.md").read_text() == page


def test_findings_of_a_comparison_are_collected_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Everything since the last time, and then it begins anew."""
    collected("")
    chart = Chart("calls", "Calls", "time", [])
    judge("speed", 2, at_least=1)
    draw(chart)
    found = collected("About.")
    assert (found.about, found.targets, found.charts) == ("About.", [Target("speed", 2, at_least=1)], [chart])
    assert collected("") == Section()
    assert "speed: 2.00 (≥ 1: met)" in capsys.readouterr().out


def test_bars_begin_at_zero_and_are_in_proportion() -> None:
    """A bar twice as long stands for twice as much, and the axis is labelled from 0 past the longest."""
    bars = [Bar(OURS, 1, ours=True), Bar("other", 2), Bar("third", 4.5)]
    drawn = ElementTree.fromstring(svg(Chart("x", "X", "time", [Panel("panel", bars)])))
    shapes = [one for one in drawn.iter(f"{_SVG}rect") if "bar" in one.attrib["class"]]
    widths = [float(one.attrib["width"]) for one in shapes]
    assert widths[1] / widths[0] == pytest.approx(2, rel=0.01)
    assert widths[2] / widths[0] == pytest.approx(4.5, rel=0.01)
    assert [one.attrib["class"] for one in shapes] == ["bar ours", "bar", "bar"]
    texts = [one.text for one in drawn.iter(f"{_SVG}text")]
    assert [text for text in texts if text in ("0", "1", "2", "3", "4", "5")] == ["0", "1", "2", "3", "4", "5"]


def test_labels_of_the_charts_fit() -> None:
    """A label that is longer than the room beside its bar would be cut off."""
    kept = json.loads(Path(report.__file__).with_name("results.json").read_text())["sections"].values()
    labels = {
        bar["label"] for one in kept for chart in one["charts"] for panel in chart["panels"] for bar in panel["bars"]
    }
    assert max(map(len, labels)) <= 36


def test_every_explanation_belongs_to_a_target() -> None:
    """Its words are those of a target that was judged; one that was renamed would lose what explains it."""
    kept = json.loads(Path(report.__file__).with_name("results.json").read_text())["sections"].values()
    judged = {target["what"] for section in kept for target in section["targets"]}
    assert set(notes.NOTES) <= judged


def test_every_change_belongs_to_a_comparison() -> None:
    """What changed in a comparison that was renamed would be shown nowhere."""
    assert set(notes.CHANGES) <= set(names())


def test_both_cores_are_used_only_within_the_block() -> None:
    """What is measured on two cores leaves the others on one, also if the process was pinned before."""
    allowed = os.sched_getaffinity(0)
    try:
        pin(own_core())
        with on_both_cores():
            assert os.sched_getaffinity(0) == {own_core(), other_core()}
        assert os.sched_getaffinity(0) == {own_core()}
    finally:
        pin(*allowed)


def test_receiver_of_deliveries_uses_both_cores() -> None:
    """The module is imported after the process was pinned to one core."""
    needs("wrk")
    code = """
import os
from benchmarks import measure
measure.pin(measure.own_core())
from benchmarks import inbox
inbox.deliveries = lambda kind: print("cores:", sorted(os.sched_getaffinity(0))) or (1.0, 1.0)
inbox.main()
"""
    environment = {**os.environ, "SIGNING_BENCHMARKS_QUICK": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    assert f"cores: {sorted({own_core(), other_core()})}" in done.stdout, done.stderr


def allocate(size: int) -> int:
    """Run in a child by the next test."""
    return len(bytearray(b"x" * 1024) * (size // 1024))


async def count(names: list[str]) -> int:
    """Run in a child by the next test."""
    return len(names)


def test_peak_memory_counts_what_is_freed_before_the_end() -> None:
    """What a function allocates shows as growth, though it is freed before the end."""
    child = in_child(allocate, 64 * 1024 * 1024)
    assert child.work == 64 * 1024 * 1024
    assert 60 * 1024 * 1024 < child.grown < 80 * 1024 * 1024
    assert in_child(count, ["a", "b"]).work == 2


def test_quick_is_inherited_by_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that processes that are started inherit it."""
    monkeypatch.delenv("SIGNING_BENCHMARKS_QUICK", raising=False)
    assert not quick()
    monkeypatch.setenv("SIGNING_BENCHMARKS_QUICK", "1")
    assert quick()


@pytest.mark.parametrize("size", [1000, 50_000, 1_000_000])
def test_files_have_the_requested_size(size: int) -> None:
    """To the byte, and the same each time; an upload below shows that the preflight takes them."""
    assert len(pdf_bytes(size)) == size
    assert pdf_bytes(size) == pdf_bytes(size)


@pytest.mark.parametrize("kind", ["plain", "tls"])
async def test_server_counts_what_it_receives(server: Server, kind: str) -> None:
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


async def test_server_limits_the_rate(server: Server) -> None:
    """Requests beyond the rate are refused, and counted as refused."""
    server.configure(rate=2)
    async with SigningClient(server.plain, "token", retry=RetryPolicy.none()) as client:
        answers = await asyncio.gather(*(client.me() for _ in range(10)), return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, RateLimited)]
    assert refused
    assert refused[0].retry_after == 1
    assert server.counts()["refused"] >= 1


async def test_server_responds_after_its_latency(server: Server) -> None:
    """The latency asked for is kept at least, and a client that has gone away by then does no harm."""
    server.configure(latency=0.2)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.05)) as session:
        with pytest.raises(TimeoutError):
            await session.get(f"{server.plain}/api/1.0/me")
    async with SigningClient(server.plain, "token") as client:
        started = time.monotonic()
        await client.me()
    assert time.monotonic() - started > 0.15


async def test_server_rejects_chunked_uploads(server: Server) -> None:
    """A chunked upload is refused: its bytes would not be counted."""
    server.configure()

    async def chunks() -> AsyncIterator[bytes]:
        yield b"x"

    async with aiohttp.ClientSession() as session:
        response = await session.post(f"{server.plain}/api/1.0/signings/s1/documents", data=chunks())
        assert response.status == 411
