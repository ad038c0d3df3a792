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
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from signing_async.sandbox import Sandbox
from tests.cli.conftest import Run
from tests.cli.service import Service
from tests.cli.terminal import Terminal, screen, start
from tests.pdfs import make_pdf

Office = Callable[[int], Path]


@pytest.fixture
def office(tmp_path: Path) -> Office:
    """Writes a manifest of so many packages, with a document each."""

    def write(count: int) -> Path:
        path = tmp_path / "leases.csv"
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.writer(file, delimiter=";")
            writer.writerow(("key", "name", "language", "documents", "recipient1_email"))
            for number in range(count):
                (tmp_path / f"{number}.pdf").write_bytes(make_pdf(text=f"lease {number}", seed=number))
                row = (f"lease-{number}", f"Lease {number}", "EN", f"{number}.pdf", f"anna{number}@example.com")
                writer.writerow(row)
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
    facts = {"packages": 1, "sent": 1, "sent_earlier": 0, "failed": 0, "left": 0, "abandoned": 0}
    facts |= {"interrupted": False, "failures": None}
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
    (tmp_path / "notes.pdf").write_text("no PDF at all")
    with office(2).open("a", newline="") as file:
        rows = csv.writer(file, delimiter=";")
        rows.writerow(["lease-0", "Lease 7", "EN", "0.pdf", "anna@example.com"])
        rows.writerow(["", "Lease 8", "DE", "none.pdf;notes.pdf", "nobody"])
        rows.writerows([["", "Lease 10", "EN", "1.pdf", "a@example.com"]] * 2)
    told = [
        "leases.csv, line 4, key: 'lease-0' is also the key of line 2",
        "leases.csv, line 5, language: must be EN or SV, got 'DE'",
        "leases.csv, line 5, recipient1_email: must be an e-mail address, got 'nobody'",
        f"leases.csv, line 5, documents: cannot open '{tmp_path}/none.pdf': No such file or directory",
        "leases.csv, line 5, documents: notes.pdf: not a PDF",
        "leases.csv, line 7, key: missing, and this is the same package as line 6; if both are to be sent, "
        "give each a key",
    ]
    ran = run("dispatch", "leases.csv")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "\n  ".join(["Error: 6 problems in leases.csv; nothing was sent:", *told]) + "\n"
    assert run("dispatch", "leases.csv", "--json").error["problems"] == told
    assert requests(service) == 0
    assert not (tmp_path / "leases.journal").exists()


# What fails


@pytest.mark.usefixtures("one_attempt")
def test_report_of_failures_is_a_manifest_that_sends_the_rest_and_is_removed(
    run: Run, service: Service, office: Office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures beyond a limit are in the report only."""
    monkeypatch.setattr("signing_async.cli.dispatch.MAX_SHOWN", 1)
    office(6).chmod(0o640)
    service.fault("signings.create", "500", times=2)
    ran = run("dispatch", "leases.csv", "--concurrency", "1")
    assert ran.code == 1
    assert stat.S_IMODE((tmp_path / "leases.failures.csv").stat().st_mode) == 0o640
    assert ran.out == (
        "4 sent: 0 earlier, 4 now, 2 failed.\n"
        "Failed packages and their errors are in leases.failures.csv; dispatch it to retry them.\n"
    )
    errors = [line.partition(" on ")[0] for line in ran.err.splitlines()[1:]]
    assert errors == ["Error: leases.csv, line 2: HTTP 500"]
    with (tmp_path / "leases.failures.csv").open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file, delimiter=";"))
    assert [row["key"] for row in rows] == ["lease-0", "lease-1"]
    assert all(row["error"].startswith("HTTP 500 on signings.create") for row in rows)
    again = run("dispatch", "leases.failures.csv")
    assert (again.code, again.out) == (
        0,
        "2 sent: 0 earlier, 2 now.\nleases.failures.csv was removed: no package of this run failed.\n",
    )
    assert "Journal: leases.journal\n" in again.err
    assert not (tmp_path / "leases.failures.csv").exists()
    assert sent(service) == once(6)
    assert run("dispatch", "leases.csv").code == 0
    assert sent(service) == once(6)


@pytest.mark.usefixtures("one_attempt")
def test_abandoned_drafts_are_reported_by_line(run: Run, service: Service, office: Office) -> None:
    office(3)
    service.fault("documents.upload", "drop-before-commit", skip=1)
    ran = run("dispatch", "leases.csv", "--concurrency", "1")
    (draft,) = service.do(lambda: [one.id for one in service.sandbox.signings if not one.times_sent])
    assert (ran.code, ran.err.count(draft)) == (0, 1)
    assert f"leases.csv, line 3: draft {draft} was abandoned" in ran.err
    assert ran.out == "3 sent: 0 earlier, 3 now.\nAbandoned drafts, left unsent at the service: 1.\n"
    lines = run("dispatch", "leases.csv", "--json").lines
    assert [line.get("abandoned") for line in lines] == [[], [draft], [], None]
    assert lines[-1]["summary"]["abandoned"] == 1


@pytest.mark.usefixtures("one_attempt")
def test_unknown_outcome_exits_with_3_names_the_signing_and_the_next_run_resolves_it(
    run: Run, service: Service, office: Office
) -> None:
    office(1)
    service.fault("signings.send", "drop-after-commit")
    service.fault("signings.get", "500", times=None)
    ran = run("dispatch", "leases.csv")
    (signing,) = service.do(lambda: service.sandbox.signings)
    assert (ran.code, f"leases.csv, line 2: its signing at the service is {signing.id}" in ran.err) == (3, True)
    service.do(service.sandbox.faults.clear)
    assert run("dispatch", "leases.csv").code == 0
    assert sent(service) == once(1)


# On the way


def test_progress_is_printed_in_lines_without_a_terminal(
    run: Run, office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signing_async.cli.output.SECONDS_BETWEEN_LINES", 0.0)
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


def test_terminal_shows_progress_failures_and_unknown_outcomes(
    service: Service, office: Office, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    office(8)
    service.fault("signings.create", "500", times=2)
    service.fault("signings.send", "drop-after-commit", skip=3)
    service.fault("signings.get", "slow", times=None, seconds=0.4)  # the readings, longer than the bar's next refresh
    service.fault("*", "slow", times=None, seconds=0.08)
    environment = {**service.environment, "SIGNING_MAX_ATTEMPTS": "2"}
    shown = screen("dispatch", "leases.csv", "--concurrency", "1", environment=environment)
    assert shown.code == 1
    assert re.search(r"Sending [━╸╺ ]+ +\d+/8 \d+\.\d/s 1 failed \d:\d\d:\d\d", shown.text)
    assert "settling an unknown outcome" in shown.text
    assert "Error: leases.csv, line 2: HTTP 500 on signings.create" in shown.text
    assert shown.text.rstrip().endswith("dispatch it to retry them.")
    assert b"\x1b[?25h" in shown.raw  # the cursor is shown again
    assert "\x1b[36m━".encode() in shown.raw
    assert b"249;38;114" not in shown.raw  # rich's own colour of a running bar is red
    assert b"38;5;197" not in shown.raw


def test_ctrl_c_finishes_the_packages_under_way_and_shows_the_command_to_resume(
    run: Run, service: Service, office: Office, tmp_path: Path
) -> None:
    office(20)
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


def test_second_ctrl_c_stops_at_once_and_keeps_an_earlier_report(
    run: Run, service: Service, office: Office, tmp_path: Path
) -> None:
    """Its rows may be mended by hand, and may not have been tried in this run."""
    office(5)
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
    while requests(service) < count:
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


def test_killed_run_and_two_concurrent_runs_send_each_package_once(
    service: Service, office: Office, tmp_path: Path
) -> None:
    office(20)
    for operation, kind in (("signings.create", "500-after-commit"), ("signings.send", "drop-after-commit")):
        service.fault(operation, kind, times=None, probability=0.1, seed=operation)
    with dispatching(service, tmp_path):
        wait_for_requests(service, 30)
    service.do(service.sandbox.faults.clear)
    now = 0
    with dispatching(service, tmp_path) as first, dispatching(service, tmp_path) as second:
        for process in (first, second):
            out, err = process.communicate(timeout=60)
            counts = re.match(r"20 sent: (\d+) earlier, (\d+) now\.\n", out)
            assert process.returncode == 0, err
            assert counts is not None, out
            now += int(counts[2])
    assert now <= 20
    assert sent(service) == once(20)


def test_sigterm_stops_at_once(service: Service, office: Office, tmp_path: Path) -> None:
    office(1)
    hanging = service.fault("signings.create", "hang", times=None)
    with dispatching(service, tmp_path) as process:
        while not hanging.hits:
            assert process.poll() is None
            time.sleep(0.02)
        process.terminate()
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (143, "", "Journal: leases.journal\n")


@pytest.mark.usefixtures("one_attempt")
def test_report_that_cannot_be_written_is_a_warning(
    run: Run, service: Service, office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("signing_async.cli.manifest.replace_file", full)
    office(3)
    service.fault("signings.create", "500")
    ran = run("dispatch", "leases.csv", "--concurrency", "1")
    assert (ran.code, ran.out) == (1, "2 sent: 0 earlier, 2 now, 1 failed.\n")
    assert (
        "Warning: --failures: 'leases.failures.csv' cannot be written: No space left on device;"
        " to retry the failed packages, dispatch leases.csv again\n"
    ) in ran.err
    assert not Path("leases.failures.csv").exists()
