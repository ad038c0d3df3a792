"""The benchmarks run and check their work, in a configuration so small that its figures mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from benchmarks import notes, report
from benchmarks.__main__ import main, names
from benchmarks.charts import Bar, Chart, Panel
from benchmarks.measure import MISSING, Sample, comparison, in_process, interleaved, peer, ratio
from benchmarks.report import OURS, Section, Table, Target, keep, write

_ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(300)
def test_benchmarks_run_and_their_work_is_checked() -> None:
    """Each runs to its table; work that was not done would have ended it with an error."""
    command = [sys.executable, "-m", "benchmarks", *names(), "--quick"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("### ") >= len(names())
    assert "Traceback" not in done.stderr


def test_unknown_benchmark_is_rejected_with_the_known_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["calls", "nosuch"])
    said = capsys.readouterr().err
    assert "no such comparison: nosuch" in said
    assert "listing" in said


async def test_rounds_of_candidates_are_interleaved() -> None:
    """Rounds are interleaved, every second one backwards, and the warm-up leaves no samples."""
    ran: list[str] = []
    candidates = {name: in_process(partial(ran.append, name)) for name in "ab"}
    samples = await interleaved(candidates, rounds=2, warm_up=1)
    assert "".join(ran) == "ba" + "ab" + "ba"
    assert [len(taken) for taken in samples.values()] == [2, 2]


async def test_candidate_that_did_not_do_its_work_ends_the_comparison() -> None:
    with pytest.raises(AssertionError, match=r"lazy did not do its work: expected 3, got 2"):
        await interleaved({"honest": in_process(lambda: 3), "lazy": in_process(lambda: 2)}, rounds=1, expect=3)


def test_ratio_is_the_median_of_paired_rounds_and_a_missing_peer_keeps_its_row() -> None:
    """A round in which the machine was slow for both does not move the ratio."""
    samples = {
        OURS: [Sample(2, 3), Sample(40, 60), Sample(2, 3)],
        "floor": [Sample(1, 2), Sample(20, 40), Sample(1, 2)],
    }
    assert (ratio(samples, OURS, "floor"), ratio(samples, OURS, "floor", "cpu")) == (2, 1.5)
    assert peer("no_such_peer") is None
    ours, floor, missing = comparison("calls", {**samples, "no_such_peer": []}, "floor").rows
    assert [ours[:3], floor[:3]] == [[OURS, "2.00", "1.50"], ["floor", "1.00", "1.00"]]
    assert missing == ["no_such_peer", MISSING, "", "", "", "", "", ""]


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
    for text, speed in (("Lists.", 2), ("Lists again.", 1.7)):
        keep("lists", Section(text, [], [Target("lists: speed", speed, at_least=1.8)], []), there, tmp_path)
    write(tmp_path)
    page = (tmp_path / "RESULTS.md").read_text()
    for shown in (
        "# Figures\n\nA call takes 9 µs.\n\n0 of 2 targets are met.\n\n",
        "- Missed: calls: cost: 1.20 (≤ 1.15). Why: Calls are work.\n",
        "- Missed: lists: speed: 1.70 (≥ 1.8). Why: not explained yet\n",
        *("![A call & more](charts/calls.svg)", str(table), "Lists again."),
    ):
        assert shown in page
    assert not [gone for gone in ("Lists.\n", "gone") if gone in page]
    assert "A call &amp; more" in (tmp_path / "charts" / "calls.svg").read_text()


def test_every_explanation_belongs_to_a_target() -> None:
    """Its words are those of a target that was judged; one that was renamed would lose what explains it."""
    kept = json.loads(Path(report.__file__).with_name("results.json").read_text())["sections"].values()
    judged = {target["what"] for section in kept for target in section["targets"]}
    assert set(notes.NOTES) <= judged
