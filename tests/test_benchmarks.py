"""The benchmarks run and check their work, in a configuration so small that its figures mean nothing."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import aiohttp
import pytest

from benchmarks import notes, report
from benchmarks.__main__ import main, names
from benchmarks.charts import Bar, Chart, Panel, svg
from benchmarks.measure import (
    MISSING,
    Sample,
    comparison,
    in_process,
    interleaved,
    median,
    panel,
    peer,
    ratio,
)
from benchmarks.report import OURS, Section, Table, Target, keep, write
from benchmarks.server import Server, pdf_bytes, running
from signing_async import SigningClient

_ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The benchmarks' server, in its own process."""
    with running() as server:
        yield server


@pytest.mark.timeout(300)
def test_benchmarks_run_and_their_work_is_checked() -> None:
    """Each runs to its table; work that was not done would have ended it with an error."""
    command = [sys.executable, "-m", "benchmarks", *names(), "--quick"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("### ") >= len(names())
    assert "Traceback" not in done.stderr


def test_unknown_benchmark_is_rejected_with_the_known_names(capsys: pytest.CaptureFixture[str]) -> None:
    """The error lists what there is."""
    with pytest.raises(SystemExit):
        main(["calls", "nosuch"])
    said = capsys.readouterr().err
    assert "no such comparison: nosuch" in said
    assert "listing" in said


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
        await interleaved({"honest": in_process(lambda: 3), "lazy": in_process(lambda: 2)}, rounds=1, expect=3)


def test_ratio_is_the_median_of_paired_rounds() -> None:
    """A round in which the machine was slow for both does not move the ratio."""
    samples = {"one": [Sample(2, 3), Sample(40, 60), Sample(2, 3)], "two": [Sample(1, 2), Sample(20, 40), Sample(1, 2)]}
    assert ratio(samples, "one", "two") == 2
    assert ratio(samples, "one", "two", "cpu") == 1.5
    assert median(samples["one"]) == 2


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
    table = Table("Calls", ("candidate", "wall"), [[OURS, "1.20"]])
    chart = Chart("calls", "A call & more", "time", [Panel("me()", [Bar(OURS, 1.2, ours=True)], target=1.15)])
    there = ["lists", "calls", "others"]
    calls = Section("Calls.", [table], [Target("calls: cost", 1.2, at_most=1.15)], [chart], ["A call takes 9 µs."])
    keep("gone", Section("It is there no more."), ["gone"], tmp_path)
    keep("calls", calls, there, tmp_path)
    keep("lists", Section("Lists.", [], [Target("lists: speed", 2, at_least=1.8)], []), there, tmp_path)
    keep("lists", Section("Lists again.", [], [Target("lists: speed", 1.7, at_least=1.8)], []), there, tmp_path)
    write(tmp_path)
    page = (tmp_path / "RESULTS.md").read_text()
    assert page.startswith(
        "# Figures\n\nA call takes 9 µs.\n\n0 of 2 targets are met.\n\n"
        "- Missed: calls: cost: 1.20 (≤ 1.15). Why: Calls are work.\n"
        "- Missed: lists: speed: 1.70 (≥ 1.8). Why: not explained yet\n"
    )
    assert "![A call & more](charts/calls.svg)" in page
    assert str(table) in page
    assert "Lists again." in page
    assert "Lists.\n" not in page
    assert "gone" not in page
    drawn = ElementTree.parse(tmp_path / "charts" / "calls.svg").getroot()
    assert drawn.attrib["aria-label"] == "A call & more"
    write(tmp_path)
    assert (tmp_path / "RESULTS.md").read_text() == page


def test_every_explanation_belongs_to_a_target() -> None:
    """Its words are those of a target that was judged; one that was renamed would lose what explains it."""
    kept = json.loads(Path(report.__file__).with_name("results.json").read_text())["sections"].values()
    judged = {target["what"] for section in kept for target in section["targets"]}
    assert set(notes.NOTES) <= judged


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
