"""The benchmarks run and check their work, in a configuration so small that its figures mean nothing."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from benchmarks import notes, report
from benchmarks.__main__ import names
from benchmarks.measure import MISSING, Sample, comparison, in_process, interleaved, peer, ratio
from benchmarks.report import OURS, Target

_ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(300)
def test_benchmarks_run_and_their_work_is_checked() -> None:
    """Each runs to its table; work that was not done would have ended it with an error."""
    command = [sys.executable, "-m", "benchmarks", *names(), "--quick"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("### ") >= len(names())
    assert "Traceback" not in done.stderr


async def test_rounds_of_candidates_are_interleaved_and_each_must_do_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second round is run backwards, and the warm-up leaves no samples."""
    monkeypatch.setattr(gc, "collect", int)  # it takes long where many tests have run
    ran: list[str] = []
    candidates = {name: in_process(partial(ran.append, name)) for name in "ab"}
    samples = await interleaved(candidates, rounds=2, warm_up=1)
    assert "".join(ran) == "ba" + "ab" + "ba"
    assert [len(taken) for taken in samples.values()] == [2, 2]
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


def test_target_is_judged_by_its_rounded_figure() -> None:
    """To two decimals, so that the page never shows a bound reached and calls it missed."""
    judged = {speed: Target("speed", speed, at_least=1.8) for speed in (1.796, 1.79)}
    judged |= {size: Target("memory", size, at_most=10, unit=" MB") for size in (10.004, 10.01)}
    assert [target.met for target in judged.values()] == [True, False, True, False]
    assert ["met" in str(target) for target in judged.values()] == [True, False, True, False]


def test_every_explanation_belongs_to_a_target() -> None:
    """Its words are those of a target that was judged; one that was renamed would lose what explains it."""
    kept = json.loads(Path(report.__file__).with_name("results.json").read_text())["sections"].values()
    judged = {target["what"] for section in kept for target in section["targets"]}
    assert set(notes.NOTES) <= judged
