"""dispatch: a manifest is checked whole, sent once whatever ends the command, and what failed can be run again."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import stat
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from signing_async.cli import output
from signing_async.cli.manifest import FailureReport  # its file is removed while it is written
from signing_async.sandbox import Sandbox
from tests.cli.conftest import Run
from tests.cli.service import Service
from tests.cli.terminal import COMMAND, CONTROL, ROOT, Screen, Terminal
from tests.pdfs import make_pdf

Office = Callable[..., Path]
COLUMNS = ("key", "name", "language", "documents", "recipient1_email")


@pytest.fixture
def office(tmp_path: Path) -> Office:
    """Writes a manifest of so many packages, with a document each."""

    def write(count: int, name: str = "leases.csv", **changes: Any) -> Path:
        rows = []
        for number in range(count):
            (tmp_path / f"{number}.pdf").write_bytes(make_pdf(text=f"lease {number}", seed=number))
            row = {"key": f"lease-{number}", "name": f"Lease {number}", "language": "EN"}
            row |= {"documents": f"{number}.pdf", "recipient1_email": f"anna{number}@example.com"}
            rows.append({**row, **changes})
        path = tmp_path / name
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, COLUMNS, delimiter=";", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        return path

    return write


def sent(service: Service) -> dict[str, int]:
    """How often each package was sent, by its name; with its own document, to its own recipient."""

    def look(sandbox: Sandbox) -> dict[str, int]:
        found: Counter[str] = Counter()
        invited = Counter(one.recipient_id for one in sandbox.notifications)
        for signing in sandbox.signings:
            if not signing.times_sent:
                continue
            number = int(signing.name.split()[1])
            (document,) = sandbox.documents(signing.id)
            (recipient,) = sandbox.recipients(signing.id)
            assert sandbox.document_bytes(document.id) == make_pdf(text=f"lease {number}", seed=number)
            assert (recipient.email, invited[recipient.id]) == (f"anna{number}@example.com", 1)
            found[signing.name] += signing.times_sent
        return dict(found)

    return service.do(look, service.sandbox)


def once(count: int) -> dict[str, int]:
    return {f"Lease {number}": 1 for number in range(count)}


def requests(service: Service) -> int:
    return len(service.do(lambda: service.sandbox.requests))


def test_packages_are_sent_once_however_often_the_command_is_run(
    run: Run, service: Service, office: Office, tmp_path: Path
) -> None:
    office(20)
    ran = run("dispatch", "leases.csv")
    assert ran.code == 0
    assert ran.out == "20 sent: 0 earlier, 20 now.\n"
    assert ran.err == "Journal: leases.journal\n"
    assert sent(service) == once(20)
    before = requests(service)
    assert run("dispatch", "leases.csv").out == "20 sent: 20 earlier, 0 now.\n"
    assert requests(service) == before + 1  # who is logged in
    assert sent(service) == once(20)
    assert not list(tmp_path.glob("*fail*"))


def test_json_output_has_a_line_per_package_and_a_summary(run: Run, service: Service, office: Office) -> None:
    office(1)
    row = {"name": "Lease 0", "language": "EN", "documents": ["0.pdf"], "recipients": [{"email": "anna0@example.com"}]}
    Path("leases.jsonl").write_text(json.dumps(row) + "\n")
    ran = run("dispatch", "--json", "leases.jsonl")
    line, summary = ran.lines
    assert (ran.code, line["line"], line["name"]) == (0, 1, "Lease 0")
    assert re.fullmatch("[0-9a-f]{64}", line["key"])
    assert service.do(service.sandbox.signing, line["signing"]).name == "Lease 0"
    facts = {
        "packages": 1,
        "sent": 1,
        "sent_earlier": 0,
        "failed": 0,
        "left": 0,
        "abandoned": 0,
        "interrupted": False,
        "failures": None,
    }
    assert summary["summary"] == {**facts, "journal": "leases.journal"}
    assert [json.loads(told) for told in ran.err.splitlines()] == [{"journal": "leases.journal"}]
    assert run("dispatch", "--json", "leases.jsonl").lines[0]["signing"] == line["signing"]


def test_dry_run_needs_no_token_sends_nothing_and_leaves_no_file(
    run: Run, service: Service, office: Office, tmp_path: Path
) -> None:
    office(3)
    before = sorted(tmp_path.iterdir())
    ran = run("dispatch", "leases.csv", "--dry-run")
    size = sum(path.stat().st_size for path in tmp_path.glob("*.pdf"))
    words = f"leases.csv: 3 packages with 3 documents ({size} bytes): all valid. Nothing was sent.\n"
    assert (ran.code, ran.out, ran.err) == (0, words, "")
    assert run("dispatch", "leases.csv", "--dry-run", "--json").lines[0]["dry_run"]["packages"] == 3
    assert (requests(service), sorted(tmp_path.iterdir())) == (0, before)


def test_all_problems_are_reported_with_line_and_column_and_nothing_is_sent(
    run: Run, service: Service, office: Office, tmp_path: Path
) -> None:
    path = office(2)
    (tmp_path / "notes.pdf").write_text("no PDF at all")
    with path.open("a", newline="") as file:
        rows = csv.writer(file, delimiter=";")
        rows.writerow(["lease-0", "Lease 7", "EN", "0.pdf", "anna@example.com"])
        rows.writerow(["", "Lease 8", "DE", "none.pdf;notes.pdf", "nobody"])
        rows.writerow(["", "Lease 9", "EN", "1.pdf", "a@example.com", "surplus"])
        rows.writerow(["", "Lease 10", "EN", "1.pdf", "a@example.com"])
        rows.writerow(["", "Lease 10", "EN", "1.pdf", "a@example.com"])
    told = [
        "leases.csv, line 4, key: 'lease-0' is also the key of line 2",
        "leases.csv, line 5, language: must be EN or SV, got 'DE'",
        "leases.csv, line 5, recipient1_email: must be an e-mail address, got 'nobody'",
        f"leases.csv, line 5, documents: cannot open '{tmp_path}/none.pdf': No such file or directory",
        "leases.csv, line 5, documents: notes.pdf: not a PDF",
        "leases.csv, line 6, 'surplus' has no column",
        "leases.csv, line 8, key: missing, and this is the same package as line 7; if both are to be sent, "
        "give each a key",
    ]
    ran = run("dispatch", "leases.csv")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "\n  ".join(["Error: 7 problems in leases.csv; nothing was sent:", *told]) + "\n"
    machine = run("dispatch", "leases.csv", "--json")
    assert (machine.code, machine.error["problems"]) == (2, told)
    assert requests(service) == 0
    assert not (tmp_path / "leases.journal").exists()


# What fails


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """One attempt for each request."""
    monkeypatch.setenv("SIGNING_MAX_ATTEMPTS", "1")


@pytest.mark.usefixtures("impatient")
def test_report_of_failures_is_a_manifest_that_sends_the_rest_and_is_removed(
    run: Run, service: Service, office: Office, tmp_path: Path
) -> None:
    office(6).chmod(0o640)
    service.do(service.sandbox.faults.add, "signings.create", "500", times=2)
    ran = run("dispatch", "leases.csv", "--concurrency", "1")
    assert ran.code == 1
    assert stat.S_IMODE((tmp_path / "leases.failures.csv").stat().st_mode) == 0o640
    assert ran.out.startswith(
        "4 sent: 0 earlier, 4 now, 2 failed.\nFailed packages and their errors are in leases.failures.csv"
    )
    assert [line.partition(" on ")[0] for line in ran.err.splitlines()[1:]] == [
        "Error: leases.csv, line 2: HTTP 500",
        "Error: leases.csv, line 3: HTTP 500",
    ]
    with (tmp_path / "leases.failures.csv").open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file, delimiter=";"))
    assert [row["key"] for row in rows] == ["lease-0", "lease-1"]
    assert all(row["error"].startswith("HTTP 500 on signings.create") for row in rows)
    again = run("dispatch", "leases.failures.csv")
    assert (again.code, again.out) == (0, "2 sent: 0 earlier, 2 now.\n")
    assert "Journal: leases.journal\n" in again.err
    assert not (tmp_path / "leases.failures.csv").exists()
    assert sent(service) == once(6)
    assert run("dispatch", "leases.csv").code == 0
    assert sent(service) == once(6)


@pytest.mark.usefixtures("impatient")
def test_abandoned_drafts_are_reported_by_line(run: Run, service: Service, office: Office) -> None:
    office(3)
    service.do(service.sandbox.faults.add, "documents.upload", "drop-before-commit", skip=1)
    ran = run("dispatch", "leases.csv", "--concurrency", "1")
    (draft,) = service.do(lambda: [one.id for one in service.sandbox.signings if not one.times_sent])
    assert ran.code == 0
    assert f"leases.csv, line 3: draft {draft} was abandoned" in ran.err
    assert ran.err.count(draft) == 1
    assert ran.out == "3 sent: 0 earlier, 3 now.\nAbandoned drafts, left unsent at the service: 1.\n"
    lines = run("dispatch", "leases.csv", "--json").lines
    assert [line.get("abandoned") for line in lines] == [[], [draft], [], None]
    assert lines[-1]["summary"]["abandoned"] == 1


@pytest.mark.usefixtures("impatient")
def test_unknown_outcome_exits_with_3_and_the_next_run_resolves_it(run: Run, service: Service, office: Office) -> None:
    office(2)
    service.do(service.sandbox.faults.add, "signings.send", "drop-after-commit")
    service.do(service.sandbox.faults.add, "signings.get", "500", times=None)
    ran = run("dispatch", "leases.csv")
    assert ran.code == 3, ran.err
    service.do(service.sandbox.faults.clear)
    assert run("dispatch", "leases.csv").code == 0
    assert sent(service) == once(2)


# On the way


def test_progress_is_printed_in_lines_without_a_terminal(
    run: Run, office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "SECONDS_BETWEEN_LINES", 0.0)
    office(2)
    lines = run("dispatch", "leases.csv").err.splitlines()
    assert re.fullmatch(r"Checking: 1/\? \d+\.\d/s", lines[0])
    assert re.fullmatch(r"Sending: 1/2 \d+\.\d/s", lines[3])
    facts = [
        json.loads(line)["progress"]
        for line in run("dispatch", "leases.csv", "--json").err.splitlines()
        if "progress" in line
    ]
    assert facts[-1] == {"done": 2, "total": 2, "failed": 0}


def shown(screen: Screen) -> str:
    """What is on it; the terminal's own ^C may have split a sign of several bytes."""
    return CONTROL.sub(b"", screen.raw).decode("utf-8", "replace").replace("\r\n", "\n")


def test_terminal_shows_a_bar_with_rate_and_time_left_and_failures_above_it(
    service: Service, office: Office, tmp_path: Path
) -> None:
    office(12)
    service.do(service.sandbox.faults.add, "signings.create", "500", times=1)
    service.do(service.sandbox.faults.add, "signings.create", "slow", times=None, seconds=0.25)
    environment = {**service.environment, "SIGNING_MAX_ATTEMPTS": "1"}
    terminal = Terminal(
        "dispatch", "leases.csv", "--concurrency", "2", columns=100, cwd=tmp_path, environment=environment
    )
    terminal.wait_for("1 failed")
    screen = terminal.end()
    assert screen.code == 1
    assert re.search(r"Sending [━╸╺ ]+ +\d+/12 \d+\.\d/s 1 failed \d:\d\d:\d\d", screen.text)
    assert re.search(r"Error: leases\.csv, line \d+: HTTP 500 on signings\.create", screen.text)
    assert screen.text.rstrip().endswith("dispatch it to retry them.")
    assert b"\x1b[?25h" in screen.raw  # the cursor is shown again
    assert "\x1b[36m━".encode() in screen.raw
    assert b"249;38;114" not in screen.raw  # rich's own colour of a running bar is red
    assert b"38;5;197" not in screen.raw


def test_ctrl_c_finishes_the_packages_under_way_and_shows_the_command_to_resume(
    run: Run, service: Service, office: Office, tmp_path: Path
) -> None:
    office(40)
    service.do(service.sandbox.faults.add, "signings.create", "slow", times=None, seconds=0.3)
    terminal = Terminal(
        *("dispatch", "leases.csv", "--concurrency", "2", "--journal", "my.journal"),
        cwd=tmp_path,
        environment=service.environment,
    )
    wait_for_requests(service, 20)
    terminal.type("\x03")
    screen = terminal.end()
    assert screen.code == 130
    assert "Stopping: finishing the packages under way." in shown(screen)
    done = int(re.search(r"(\d+) sent: 0 earlier, \1 now", shown(screen))[1])  # type: ignore[index]  # it is there
    assert 2 <= done < 40
    assert f"Interrupted: {40 - done} left. To resume, run the same command:" in shown(screen)
    assert "\n  signing-async dispatch leases.csv --concurrency 2 --journal my.journal\n" in shown(screen)
    drafts = service.do(lambda: [one for one in service.sandbox.signings if not one.times_sent])
    assert (len(sent(service)), drafts) == (done, [])
    service.do(service.sandbox.faults.clear)
    assert run("dispatch", "leases.csv", "--journal", "my.journal").code == 0
    assert sent(service) == once(40)


def stopped_by_two_ctrl_c(service: Service, folder: Path, manifest: str) -> Screen:
    """Dispatch packages one after the other, of which the first fails and the fourth hangs; press Ctrl-C twice then."""
    service.do(service.sandbox.faults.add, "signings.create", "500", times=1)
    service.do(service.sandbox.faults.add, "signings.create", "hang", times=None, skip=2)
    environment = {**service.environment, "SIGNING_MAX_ATTEMPTS": "1"}
    terminal = Terminal("dispatch", manifest, "--concurrency", "1", cwd=folder, environment=environment)
    terminal.wait_for("3/10")
    terminal.type("\x03")
    terminal.wait_for("Stopping")
    terminal.type("\x03")
    return terminal.end()


def test_ctrl_c_keeps_an_earlier_report_until_a_run_has_tried_all_packages(
    run: Run, service: Service, office: Office, tmp_path: Path
) -> None:
    """Its rows may be mended by hand, and may not have been tried in this run."""
    office(10)
    report = tmp_path / "leases.failures.csv"
    report.write_text("name,key,error\nLease 9,k9,mended by hand\n")
    before = report.read_bytes()
    screen = stopped_by_two_ctrl_c(service, tmp_path, "leases.csv")
    assert (screen.code, report.read_bytes()) == (130, before)
    assert "leases.failures.csv is kept until a run has sent its packages" in shown(screen)
    assert not list(tmp_path.glob(".*.part"))
    service.do(service.sandbox.faults.clear)
    assert run("dispatch", "leases.csv").code == 0
    assert not report.exists()
    assert sent(service) == once(10)


def start(service: Service, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command as a process, with pipes."""
    return subprocess.Popen(
        [*COMMAND, "dispatch", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **service.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_requests(service: Service, count: int) -> None:
    end = time.monotonic() + 30
    while requests(service) < count:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_killed_runs_and_two_concurrent_runs_send_each_package_once(
    service: Service, office: Office, tmp_path: Path
) -> None:
    office(30)
    chance = random.Random(5)
    for operation, kind in (("signings.create", "500-after-commit"), ("signings.send", "drop-after-commit")):
        service.do(service.sandbox.faults.add, operation, kind, times=None, probability=0.1, seed=operation)
    for _ in range(3):
        process = start(service, tmp_path, "leases.csv")
        wait_for_requests(service, requests(service) + chance.randint(2, 60))
        process.kill()
        process.communicate(timeout=30)
    service.do(service.sandbox.faults.clear)
    both: Sequence[subprocess.Popen[str]] = [start(service, tmp_path, "leases.csv") for _ in range(2)]
    now = 0
    for process in both:
        out, err = process.communicate(timeout=60)
        counts = re.match(r"30 sent: (\d+) earlier, (\d+) now\.\n", out)
        assert process.returncode == 0, err
        assert counts is not None, out
        now += int(counts[2])
    assert now <= 30
    assert sent(service) == once(30)


def test_sigterm_stops_at_once(service: Service, office: Office, tmp_path: Path) -> None:
    office(1)
    hanging = service.do(service.sandbox.faults.add, "signings.create", "hang", times=None)
    process = start(service, tmp_path, "leases.csv")
    while not hanging.hits:
        assert process.poll() is None
        time.sleep(0.02)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (143, "", "Journal: leases.journal\n")


def test_terminal_says_that_an_unknown_outcome_is_settled(service: Service, office: Office, tmp_path: Path) -> None:
    office(1)
    service.do(service.sandbox.faults.add, "signings.send", "drop-after-commit")
    service.do(service.sandbox.faults.add, "signings.get", "slow", times=None, seconds=0.5)
    terminal = Terminal("dispatch", "leases.csv", columns=100, cwd=tmp_path, environment=service.environment)
    screen = terminal.end()
    assert "settling an unknown outcome" in screen.text


@pytest.mark.usefixtures("impatient")
def test_failed_package_is_shown_with_its_signing(run: Run, service: Service, office: Office) -> None:
    office(1)
    service.do(service.sandbox.faults.add, "documents.upload", "503", times=None)
    ran = run("dispatch", "leases.csv")
    last = service.do(lambda: service.sandbox.signings)[-1]
    assert f"leases.csv, line 2: its signing at the service is {last.id}" in ran.err


@pytest.mark.usefixtures("impatient")
def test_run_goes_on_after_the_folder_of_the_report_is_removed(
    run: Run, service: Service, office: Office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    office(5)
    (tmp_path / "out").mkdir()
    write = FailureReport.write

    def remove_folder_first(self: FailureReport) -> bool:
        (tmp_path / "out").rmdir()
        return write(self)

    monkeypatch.setattr(FailureReport, "write", remove_folder_first)
    service.do(service.sandbox.faults.add, "signings.create", "500", skip=1, times=2)
    ran = run("dispatch", "leases.csv", "--failures", "out/failed.csv", "--concurrency", "1")
    assert (ran.code, ran.out) == (1, "3 sent: 0 earlier, 3 now, 2 failed.\n")
    assert (
        "Warning: --failures: 'out/failed.csv' cannot be written: No such file or directory;"
        " to retry the failed packages, dispatch leases.csv again\n"
    ) in ran.err
    assert run("dispatch", "leases.csv").code == 0
    assert sent(service) == once(5)


@pytest.mark.usefixtures("impatient")
def test_failures_beyond_the_limit_are_in_the_report_only(
    run: Run, service: Service, office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signing_async.cli.dispatch.MAX_SHOWN", 2)
    office(5)
    service.do(service.sandbox.faults.add, "signings.create", "500", times=None)
    ran = run("dispatch", "leases.csv")
    assert ran.err.count("Error: leases.csv, line") == 2
    assert len(Path("leases.failures.csv").read_text().splitlines()) == 6
