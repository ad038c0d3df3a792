"""dispatch: a manifest is checked whole, sent once whatever ends the command, and what failed can be run again."""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import re
import stat
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from signing_async.sandbox import Sandbox
from tests.cli.conftest import Run
from tests.cli.service import Service
from tests.cli.terminal import Terminal, screen, start
from tests.pdfs import make_pdf


def write_manifest(count: int) -> Path:
    """Write a manifest of so many packages, with a document each, into the folder where the command runs."""
    rows = ["key;name;language;documents;recipient1_email"]
    for number in range(count):
        Path(f"{number}.pdf").write_bytes(make_pdf(text=f"lease {number}", seed=number))
        rows.append(f"lease-{number};Lease {number};EN;{number}.pdf;anna{number}@example.com")
    path = Path("leases.csv")
    path.write_text("\n".join(rows) + "\n", "utf-8-sig")
    return path


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


def test_packages_are_sent_once_however_often_the_command_is_run(run: Run, service: Service, tmp_path: Path) -> None:
    write_manifest(12)
    assert run("dispatch", "leases.csv").out == "12 sent: 0 earlier, 12 now.\n"
    write_manifest(20)
    ran = run("dispatch", "leases.csv")
    assert ran.code == 0
    assert ran.out == "20 sent: 12 earlier, 8 now.\n"
    assert ran.err == "Journal: leases.journal\n"
    assert sent(service) == once(20)
    before = service.requests_of()
    assert run("dispatch", "leases.csv").out == "20 sent: 20 earlier, 0 now.\n"
    assert service.requests_of() == before + 1  # `GET /me`, which checks the token
    assert sent(service) == once(20)
    assert not list(tmp_path.glob("*fail*"))


def test_json_output_has_a_line_per_package_and_a_summary(run: Run, service: Service) -> None:
    write_manifest(1)
    row = {"name": "Lease 0", "language": "EN", "documents": ["0.pdf"], "recipients": [{"email": "anna0@example.com"}]}
    Path("leases.jsonl").write_text(json.dumps(row) + "\n")
    ran = run("dispatch", "--json", "leases.jsonl")
    line, summary = ran.lines
    assert (ran.code, line["line"], line["name"], line["sent_earlier"]) == (0, 1, "Lease 0", False)
    assert re.fullmatch("[0-9a-f]{64}", line["key"])
    assert service.do(service.sandbox.signing, line["signing"]).name == "Lease 0"
    facts = {"packages": 1, "sent": 1, "sent_earlier": 0, "failed": 0, "left": 0, "abandoned": 0}
    facts |= {"interrupted": False, "failures": None}
    assert summary["summary"] == {**facts, "journal": "leases.journal"}
    assert [json.loads(told) for told in ran.err.splitlines()] == [{"journal": "leases.journal"}]
    assert run("dispatch", "--json", "leases.jsonl").lines[0] == {**line, "sent_earlier": True}


def test_dry_run_needs_no_token_sends_nothing_and_leaves_no_file(run: Run, service: Service, tmp_path: Path) -> None:
    write_manifest(3)
    before = sorted(tmp_path.iterdir())
    ran = run("dispatch", "leases.csv", "--dry-run")
    size = sum(path.stat().st_size for path in tmp_path.glob("*.pdf"))
    words = f"leases.csv: 3 packages with 3 documents ({size} bytes): all valid. Nothing was sent.\n"
    assert (ran.code, ran.out, ran.err) == (0, words, "")
    assert run("dispatch", "leases.csv", "--dry-run", "--json").lines[0]["dry_run"]["packages"] == 3
    assert (service.requests_of(), sorted(tmp_path.iterdir())) == (0, before)


# What fails


@pytest.mark.usefixtures("one_attempt")
def test_report_of_failures_is_a_manifest_that_sends_the_rest_and_is_removed(
    run: Run, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures beyond a limit are in the report only. A report that cannot be written is a warning."""
    monkeypatch.setattr("signing_async.cli.dispatch.MAX_SHOWN", 1)
    report = tmp_path / "leases.failures.csv"
    write_manifest(6).chmod(0o640)
    service.fault("signings.create", "500", times=2)
    with monkeypatch.context() as patched:
        full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        patched.setattr("signing_async.cli.manifest.replace_file", full)
        ran = run("dispatch", "leases.csv", "--concurrency", "1")
    assert (ran.code, ran.out) == (1, "4 sent: 0 earlier, 4 now, 2 failed.\n")
    words = "Warning: --failures: 'leases.failures.csv' cannot be written: No space left on device;"
    assert f"{words} to retry the failed packages, dispatch leases.csv again\n" in ran.err
    assert not report.exists()
    service.fault("signings.create", "500", times=2)
    ran = run("dispatch", "leases.csv", "--concurrency", "1")
    assert (ran.code, stat.S_IMODE(report.stat().st_mode)) == (1, 0o640)
    words = "Failed packages and their errors are in leases.failures.csv; dispatch it to retry them.\n"
    assert ran.out == f"4 sent: 4 earlier, 0 now, 2 failed.\n{words}"
    errors = [line.partition(" on ")[0] for line in ran.err.splitlines()[1:]]
    assert errors == ["Error: leases.csv, line 2: HTTP 500"]
    with report.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file, delimiter=";"))
    assert [row["key"] for row in rows] == ["lease-0", "lease-1"]
    assert all(row["error"].startswith("HTTP 500 on signings.create") for row in rows)
    again = run("dispatch", "leases.failures.csv")
    words = "2 sent: 0 earlier, 2 now.\nleases.failures.csv was removed: no package of this run failed.\n"
    assert (again.code, again.out) == (0, words)
    assert "Journal: leases.journal\n" in again.err
    assert not report.exists()
    assert sent(service) == once(6)
    assert run("dispatch", "leases.csv").code == 0
    assert sent(service) == once(6)


@pytest.mark.usefixtures("one_attempt")
def test_row_that_was_corrected_in_the_report_counts_as_sent_in_the_original_manifest(
    run: Run, service: Service, tmp_path: Path
) -> None:
    """A row without a key of its own. The same manifest may be run for ever."""
    Path("0.pdf").write_bytes(make_pdf(text="lease 0"))
    Path("leases.csv").write_text("name,language,documents,recipient1_email\nLeese 0,EN,0.pdf,anna0@example.com\n")
    service.fault("signings.create", "500")
    assert run("dispatch", "leases.csv").code == 1
    report = tmp_path / "leases.failures.csv"
    report.write_text(report.read_text("utf-8-sig").replace("Leese", "Lease"), "utf-8-sig")
    assert run("dispatch", "leases.failures.csv").code == 0
    for _ in range(2):
        ran = run("dispatch", "leases.csv")
        assert (ran.code, ran.out) == (0, "1 sent: 1 earlier, 0 now.\n")
    assert sent(service) == once(1)


@pytest.mark.usefixtures("one_attempt")
def test_abandoned_drafts_are_reported_by_line(run: Run, service: Service) -> None:
    write_manifest(3)
    service.fault("documents.upload", "drop-before-commit", skip=1)
    ran = run("dispatch", "leases.csv", "--concurrency", "1")
    (draft,) = service.do(lambda: [one.id for one in service.sandbox.signings if not one.times_sent])
    assert (ran.code, ran.err.count(draft)) == (0, 1)
    assert f"leases.csv, line 3: draft {draft} was abandoned" in ran.err
    assert ran.out == "3 sent: 0 earlier, 3 now.\nAbandoned drafts, left unsent at the service: 1.\n"
    lines = run("dispatch", "leases.csv", "--json", "--concurrency", "1").lines
    assert [line.get("abandoned") for line in lines] == [[], [draft], [], None]
    assert lines[-1]["summary"]["abandoned"] == 1


@pytest.mark.usefixtures("one_attempt")
def test_unknown_outcome_exits_with_3_names_the_signing_and_the_next_run_resolves_it(
    run: Run, service: Service
) -> None:
    write_manifest(1)
    service.fault("signings.send", "drop-after-commit")
    service.fault("signings.get", "500", times=None)
    ran = run("dispatch", "leases.csv")
    (signing,) = service.do(lambda: service.sandbox.signings)
    assert (ran.code, f"leases.csv, line 2: its signing at the service is {signing.id}" in ran.err) == (3, True)
    service.do(service.sandbox.faults.clear)
    assert run("dispatch", "leases.csv").code == 0
    assert sent(service) == once(1)


# On the way


def test_progress_is_printed_in_lines_without_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signing_async.cli.output.SECONDS_BETWEEN_LINES", 0.0)
    write_manifest(2)
    lines = run("dispatch", "leases.csv").err.splitlines()
    assert re.fullmatch(r"Checking: 1/\? \d+\.\d/s", lines[0])
    assert re.fullmatch(r"Sending: 1/2 \d+\.\d/s", lines[3])
    last = run("dispatch", "leases.csv", "--json").err.splitlines()[-1]
    assert json.loads(last) == {"progress": {"done": 2, "total": 2, "failed": 0}}


def test_terminal_shows_progress_failures_and_unknown_outcomes(run: Run, service: Service) -> None:
    write_manifest(3)
    service.fault("signings.create", "500", times=2)
    service.fault("signings.send", "drop-after-commit")
    service.fault("signings.get", "slow", times=None, seconds=0.4)  # the readings, longer than the bar's next refresh
    service.fault("*", "slow", times=None, seconds=0.08)
    environment = {**service.environment, "SIGNING_MAX_ATTEMPTS": "2"}
    shown = screen("dispatch", "leases.csv", "--concurrency", "1", environment=environment)
    assert shown.code == 1
    assert re.search(r"Sending [━╸╺ ]+ +\d+/3 \d+\.\d/s 1 failed \d:\d\d:\d\d", shown.text)
    assert "settling an unknown outcome" in shown.text
    assert "Error: leases.csv, line 2: HTTP 500 on signings.create" in shown.text
    assert shown.text.rstrip().endswith("dispatch it to retry them.")
    assert b"\x1b[?25h" in shown.raw  # the cursor is shown again
    assert "\x1b[36m━".encode() in shown.raw
    assert b"249;38;114" not in shown.raw  # rich's own colour of a running bar is red
    assert b"38;5;197" not in shown.raw


def test_ctrl_c_finishes_the_packages_under_way_and_shows_the_command_to_resume(
    run: Run, service: Service, tmp_path: Path
) -> None:
    write_manifest(20)
    service.fault("signings.create", "slow", times=None, seconds=0.3)
    arguments = ("dispatch", "leases.csv", "--concurrency", "2", "--journal", "my.journal")
    terminal = Terminal(*arguments, cwd=tmp_path, environment=service.environment)
    wait_for_requests(service, 20)
    terminal.type("\x03")
    screen = terminal.end()
    assert (screen.code, "Stopping: finishing the packages under way." in screen.text) == (130, True)
    found = re.search(r"(\d+) sent: 0 earlier, \1 now", screen.text)
    assert found
    done = int(found[1])
    assert 2 <= done < 20
    assert f"Interrupted: {20 - done} left. To resume, run the same command:" in screen.text
    assert "\n  signing-async dispatch leases.csv --concurrency 2 --journal my.journal\n" in screen.text
    drafts = service.do(lambda: [one for one in service.sandbox.signings if not one.times_sent])
    assert (len(sent(service)), drafts) == (done, [])
    service.do(service.sandbox.faults.clear)
    assert run("dispatch", "leases.csv", "--journal", "my.journal").code == 0
    assert sent(service) == once(20)


def test_second_ctrl_c_stops_at_once_and_keeps_an_earlier_report(run: Run, service: Service, tmp_path: Path) -> None:
    """Its rows may be mended by hand, and may not have been tried in this run."""
    write_manifest(5)
    report = tmp_path / "leases.failures.csv"
    report.write_text("name,key,error\nLease 9,k9,mended by hand\n")
    before = report.read_bytes()
    service.fault("signings.create", "500")
    service.fault("signings.create", "hang", times=None, skip=2)
    environment = {**service.environment, "SIGNING_MAX_ATTEMPTS": "1"}
    terminal = Terminal("dispatch", "leases.csv", "--concurrency", "1", cwd=tmp_path, environment=environment)
    terminal.wait_for("3/5")
    terminal.type("\x03")
    terminal.wait_for("Stopping")
    terminal.type("\x03")
    screen = terminal.end()
    assert (screen.code, report.read_bytes()) == (130, before)
    assert "leases.failures.csv is kept until a run has sent its packages" in screen.text
    assert not list(tmp_path.glob(".*.part"))
    service.do(service.sandbox.faults.clear)
    assert run("dispatch", "leases.csv").code == 0
    assert not report.exists()
    assert sent(service) == once(5)


def wait_for_requests(service: Service, count: int) -> None:
    end = time.monotonic() + 30
    while service.requests_of() < count:
        assert time.monotonic() < end
        time.sleep(0.005)


@contextlib.contextmanager
def dispatching(service: Service, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run `dispatch` in a process of its own, and kill it if it has not ended."""
    with start("dispatch", "leases.csv", cwd=folder, environment=service.environment) as process:
        try:
            yield process
        finally:
            process.kill()


def test_killed_run_and_two_concurrent_runs_send_each_package_once(run: Run, service: Service, tmp_path: Path) -> None:
    write_manifest(12)
    for operation, kind in (("signings.create", "500-after-commit"), ("signings.send", "drop-after-commit")):
        service.fault(operation, kind, times=None, probability=0.1, seed=operation)
    with dispatching(service, tmp_path):
        wait_for_requests(service, 30)
    service.do(service.sandbox.faults.clear)
    now = 0
    with dispatching(service, tmp_path) as first, dispatching(service, tmp_path) as second:
        for process in (first, second):
            out, err = process.communicate(timeout=60)
            counts = re.match(r"12 sent: (\d+) earlier, (\d+) now\.\n", out)
            assert process.returncode == 0, err
            assert counts is not None, out
            now += int(counts[2])
    assert now <= 12
    assert sent(service) == once(12)


def test_sigterm_stops_at_once(run: Run, service: Service, tmp_path: Path) -> None:
    write_manifest(1)
    service.fault("signings.create", "hang", times=None)
    with dispatching(service, tmp_path) as process:
        wait_for_requests(service, 2)
        process.terminate()
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (143, "", "Journal: leases.journal\n")
