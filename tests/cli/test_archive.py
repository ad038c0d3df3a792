"""archive: the sealed PDFs of all signings, each once; verify finds every change; status tells what is stuck."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from itertools import chain, repeat
from pathlib import Path

import pytest

from signing_async import AuthError, SqliteJournal
from tests.archive.s3_server import CREDENTIALS, S3Server
from tests.cli.conftest import Run
from tests.cli.service import Service, listening
from tests.cli.terminal import COMMAND, ROOT

Complete = Callable[..., list[str]]
# The process that runs the tests may ignore it, as in the background of a shell.
END_ON_SIGINT = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def complete(service: Service) -> Complete:
    """Makes so many completed signings, with two documents each."""

    def make(count: int, name: str = "Lease") -> list[str]:
        made = []
        for number in range(count):
            signing = service.draft("a.pdf", "b.pdf", to=("anna@example.com",), name=f"{name} {number}", sent=True)
            service.call(service.sandbox.complete(signing))
            made.append(signing)
        return made

    return make


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


def follow(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start `archive --follow` in a process of its own."""
    return subprocess.Popen(
        [*COMMAND, "archive", "contracts", "--follow", "--every", "1", "--json", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SIGNING_MAX_ATTEMPTS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=END_ON_SIGINT,
    )


def downloads(service: Service) -> int:
    records = service.do(lambda: list(service.sandbox.requests))
    return len([one for one in records if one.operation == "documents.download_signed"])


def test_every_document_is_archived_once_and_the_folder_verifies(
    run: Run, complete: Complete, service: Service, tmp_path: Path
) -> None:
    complete(3)
    ran = run("archive", "contracts")
    assert (ran.code, ran.out.splitlines()[-1][:22]) == (0, "6 documents archived (")
    assert len(list((tmp_path / "contracts").rglob("*.pdf"))) == 6
    again = run("archive", "contracts", "--json")
    summary = {"archived": 0, "already_there": 6, "bytes": 0, "failed": 0, "not_yet_sealed": 0, "reminded": 0}
    assert again.lines == [{"summary": summary}]
    complete(1)
    ran = run("archive", "contracts")
    assert re.fullmatch(r"2 documents archived \(\d+ bytes\), 0 failed\. Already there: 6\.\n", ran.out)
    assert downloads(service) == 8
    ran = run("archive", "verify", "contracts")
    assert ran.code == 0
    assert "8 documents" in ran.out
    assert "the archive matches its manifest. Head: " in ran.out


def test_filters_select_signings(run: Run, complete: Complete) -> None:
    complete(1, "Lease")
    complete(1, "Loan")
    assert run("archive", "leases", "--name", "lease *", "--json").lines[-1]["summary"]["archived"] == 2
    assert run("archive", "new", "--since", "2999-01-01", "--json").lines[-1]["summary"]["archived"] == 0
    assert run("archive", "new", "--since", "30d", "--json").lines[-1]["summary"]["archived"] == 4
    assert run("archive", "named", "--template", "{signing.id}-{document.name}", "--json").code == 0


def test_verify_finds_every_change(run: Run, complete: Complete, tmp_path: Path) -> None:
    complete(2)
    assert run("archive", "contracts").code == 0
    folder = tmp_path / "contracts"
    changed, removed, *_ = sorted(folder.rglob("*.pdf"))
    changed.write_bytes(changed.read_bytes()[:-1] + b"?")
    removed.unlink()
    (folder / "extra.pdf").write_bytes(b"%PDF-")
    manifest = folder / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes().replace(b"Lease 1", b"Loan 1", 1))
    ran = run("archive", "verify", "contracts", "--json")
    assert (ran.code, ran.lines[-1]["summary"]["ok"]) == (7, False)
    kinds = {"changed_file", "changed_line", "extra_file", "missing_file"}
    assert kinds <= {line.get("finding") for line in ran.lines}
    printed = run("archive", "verify", "contracts").out
    assert all(kind.replace("_", " ") in printed for kind in kinds)


def completed(*sealed: Iterator[str | None]) -> type[BaseHTTPRequestHandler]:
    """Make a service with completed signings, whose documents are downloaded as these; None: not yet sealed."""
    signings = [
        {"id": f"s{number}", "name": f"Lease {number}", "is_draft": False, "is_completed": True}
        | {"documents": [{"id": f"d{number}", "name": "lease.pdf"}]}
        for number in range(len(sealed))
    ]
    pages: dict[str, object] = {"/me": {"id": "u1"}, "/signings": signings}
    pages |= {f"/signings/{signing['id']}": signing for signing in signings}
    downloads = {f"/signings/s{n}/documents/d{n}/download-signed": each for n, each in enumerate(sealed)}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0].removeprefix("/api/1.0")
            found = next(downloads[path]) if path in downloads else pages.get(path)
            self.send_response(404 if found is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(found or {"code": "not_found"}).encode())

        def log_message(self, *args: object) -> None: ...

    return Handler


def test_document_that_is_not_yet_sealed_is_counted_and_is_no_failure(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later run fetches it; status tells if that does not come."""
    with listening(completed(repeat(None))) as origin:
        monkeypatch.setenv("SIGNING_BASE_URL", origin)
        ran = run("archive", "contracts")
        assert ran.code == 0
        assert "0 documents archived (0 bytes), 0 failed. Not yet sealed: 1; a later run fetches them." in ran.out
        ran = run("archive", "status")
        assert (ran.code, "not sealed" in ran.out, "lease.pdf" in ran.out) == (9, True, True)


def test_documents_that_are_not_yet_sealed_do_not_hide_failures(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(completed(repeat(None), repeat("no PDF"))) as origin:
        monkeypatch.setenv("SIGNING_BASE_URL", origin)
        ran = run("archive", "contracts", "--concurrency", "1")
    assert (ran.code, "1 failed. Not yet sealed: 1" in ran.out, "Error: Lease 1: " in ran.err) == (1, True, True)


def test_follow_reports_a_failure_of_a_document_that_was_not_yet_sealed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with listening(completed(chain([None], repeat("no PDF")))) as origin:
        monkeypatch.setenv("SIGNING_BASE_URL", origin)
        monkeypatch.setenv("SIGNING_ACCESS_TOKEN", "token")
        following = follow(tmp_path)
        assert following.stdout is not None
        line = json.loads(following.stdout.readline())
        assert (line["signing"], line["error"]["type"]) == ("s0", "DecodeError")
        following.send_signal(signal.SIGINT)
        out, _ = following.communicate(timeout=30)
    assert json.loads(out.splitlines()[-1])["summary"]["failed"] == 1


def test_follow_archives_what_is_completed_later_and_ends_cleanly(
    run: Run, complete: Complete, service: Service, tmp_path: Path
) -> None:
    """On Ctrl-C and on SIGTERM, with a summary, an archive that verifies, and nothing left behind."""
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        complete(1, f"Before {code}")
        following = follow(tmp_path)
        assert following.stdout is not None
        lines = [json.loads(following.stdout.readline()) for _ in range(2)]
        complete(1, f"After {code}")
        lines += [json.loads(following.stdout.readline()) for _ in range(2)]
        following.send_signal(number)
        out, err = following.communicate(timeout=30)
        assert following.returncode == code
        assert json.loads(out.splitlines()[-1])["summary"]["archived"] == 4
        assert "Traceback" not in err
        assert len({line["document"] for line in lines}) == 4
        assert run("archive", "verify", "contracts").code == 0
    assert not list(tmp_path.rglob(".incoming/*"))


@pytest.mark.parametrize("operation", ["recipients.list", "signings.list"])
def test_follow_goes_on_after_reminders_failed(
    run: Run, complete: Complete, service: Service, tmp_path: Path, operation: str
) -> None:
    """Of one signing, which is a result, or of all."""
    waiting = service.draft("a.pdf", to=("anna@example.com",), sent=True)
    service.do(service.sandbox.faults.add, operation, "500", times=None)
    following = follow(tmp_path, "--remind-after", "0d")
    assert following.stdout is not None
    assert following.stderr is not None
    if operation == "recipients.list":
        line = json.loads(following.stdout.readline())
        assert (line["signing"], line["reminded"], line["error"]["status"]) == (waiting, False, 500)
    else:
        missing = {"reminders are retried later: HTTP 500", "archiving continues after: HTTP 500"}
        while missing:
            line = following.stderr.readline()
            assert line
            missing = {each for each in missing if each not in line}
        service.do(service.sandbox.faults.clear)
    complete(1)
    assert [json.loads(following.stdout.readline())["document"] is not None for _ in range(2)] == [True, True]
    following.send_signal(signal.SIGINT)
    out, _ = following.communicate(timeout=30)
    assert (following.returncode, json.loads(out.splitlines()[-1])["summary"]["archived"]) == (130, 2)


def test_reminders_are_sent_once_in_the_given_time(run: Run, service: Service) -> None:
    service.draft("a.pdf", to=("anna@example.com", "bo@example.com"), sent=True)
    assert run("archive", "contracts", "--remind-after", "7d", "--json").lines[-1]["summary"]["reminded"] == 0
    ran = run("archive", "contracts", "--remind-after", "0d")
    assert ran.out.count("Reminded ") == 2
    service.do(service.sandbox.faults.add, "recipients.remind", "drop-after-commit", times=1)
    ran = run("archive", "contracts", "--remind-after", "0d", "--json")
    assert ran.code == 3
    assert [line["reminded"] for line in ran.lines if "reminded" in line] == [False, True]


def test_status_tells_what_is_stuck(run: Run, complete: Complete, service: Service, tmp_path: Path) -> None:
    """Exit code 9; for machines a JSON object each."""
    assert run("archive", "status", "--after", "0d").code == 0
    complete(1)
    draft = service.draft("lease.pdf", name="Forgotten")
    waiting = service.draft("a.pdf", to=("anna@example.com",), name="Waiting", sent=True)
    ran = run("archive", "status", "--after", "0d")
    assert ran.code == 9
    head, *rows = ran.out.splitlines()
    assert head.split() == ["ID", "NAME", "PROBLEM", "SINCE", "DETAILS"]
    assert [row.split()[:2] for row in rows] == [[waiting, "Waiting"], [draft, "Forgotten"]]
    assert "anna@example.com" in rows[0]
    assert "lease.pdf" in rows[1]
    assert run("archive", "status").code == 0
    ran = run("archive", "status", "--after", "0d", "--json")
    assert [line["stuck"] for line in ran.lines] == ["no_progress", "not_sent"]
    assert [recipient["email"] for recipient in ran.lines[0]["pending"]] == ["anna@example.com"]


def test_status_shows_a_signing_that_could_not_be_examined(run: Run, service: Service) -> None:
    """Exit code 1, unless another signing is stuck."""
    service.draft("a.pdf", to=("anna@example.com",), name="Waiting", sent=True)
    service.do(service.sandbox.faults.add, "recipients.list", "not-json", times=None)
    ran = run("archive", "status", "--after", "0d")
    assert ran.code == 1
    row = ran.out.splitlines()[1]
    assert "could not be examined" in row
    assert "recipients.list" in row
    service.draft("lease.pdf", name="Forgotten")
    ran = run("archive", "status", "--after", "0d", "--json")
    assert ran.code == 9
    assert [(line["stuck"], "error" in line) for line in ran.lines] == [("not_examined", True), ("not_sent", False)]
    assert ran.lines[0]["error"]["type"] == "DecodeError"


def test_archive_in_s3_is_archived_and_verified(
    run: Run, complete: Complete, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": s3_server.url}.items():
        monkeypatch.setenv(name, value)
    complete(2)
    to = f"s3://{s3_server.new_bucket()}/archive"
    ran = run("archive", to)
    assert (ran.code, "--journal: an archive in S3 needs one" in ran.err) == (2, True)
    assert run("archive", to, "--journal", "s3.journal", "--json").lines[-1]["summary"]["archived"] == 4
    assert run("archive", to, "--journal", "s3.journal", "--json").lines[-1]["summary"]["archived"] == 0
    assert run("archive", "verify", to, "--json").lines[-1]["summary"]["documents"] == 4


def test_failed_document_is_reported_and_the_others_are_archived(
    run: Run, complete: Complete, service: Service
) -> None:
    """A later run archives it."""
    complete(2)
    service.do(service.sandbox.faults.add, "documents.download_signed", "not-json", times=1)
    ran = run("archive", "contracts", "--json")
    assert (ran.code, ran.lines[-1]["summary"]["archived"], ran.lines[-1]["summary"]["failed"]) == (1, 3, 1)
    (failed,) = [line for line in ran.lines if "error" in line]
    assert failed["document"]
    ran = run("archive", "contracts")
    assert (ran.code, ran.out.startswith("1 document archived")) == (0, True)


def test_status_lists_dispatches_without_an_outcome(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def write() -> None:
        async with SqliteJournal(tmp_path / "leases.journal") as journal:
            for key in ("lease-1", "f" * 64):
                claim = await journal.claim(key)
                assert claim is not None
                state = {"content": "x", "service": "y", "status": "draft", "signing": "s1", "error": "HTTP 500"}
                with monkeypatch.context() as patched:
                    patched.setattr("time.time", lambda: 1_000_000.0)
                    await journal.write(claim, json.dumps(state))

    asyncio.run(write())
    assert '"may_be_sent": false' in run("archive", "status", "--journal", "leases.journal", "--json").out
    ran = run("archive", "status", "--journal", "leases.journal")
    assert ran.code == 9
    for part in ("lease-1", "s1", "not dispatched", "HTTP 500", f"  {'f' * 12}…  "):
        assert part in ran.out
    lines = run("archive", "status", "--journal", "leases.journal", "--json").lines
    assert sorted(line["dispatch"]["key"] for line in lines) == ["f" * 64, "lease-1"]


def make_archive(folder: Path) -> None:
    """Make an archive without documents."""
    folder.mkdir()
    (folder / "manifest.jsonl").touch()


def test_reminders_that_fail_end_a_single_run_with_the_error(
    run: Run, service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SIGNING_MAX_ATTEMPTS", "1")
    make_archive(tmp_path / "contracts")
    service.draft("a.pdf", to=("anna@example.com",), sent=True)
    service.do(service.sandbox.faults.add, "recipients.list", "500", times=None)
    ran = run("archive", "contracts", "--remind-after", "0d")
    assert (ran.code, "HTTP 500" in ran.err) == (1, True)


def test_help_shows_the_options_and_the_commands(run: Run) -> None:
    shown = run("archive", "--help").out
    assert all(part in shown for part in ("FOLDER|s3://BUCKET/PREFIX", "--follow", "verify", "status", "Example:"))


def test_folder_that_is_no_archive_is_not_verified(run: Run, tmp_path: Path) -> None:
    make_archive(tmp_path / "empty")
    ran = run("archive", "verify", "empty")
    assert (ran.code, "empty is not an archive: it has no manifest.jsonl" in ran.err) == (2, True)


def test_token_that_is_rejected_for_reminders_ends_a_single_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_archive(tmp_path / "contracts")

    async def rejected(*_: object, **__: object) -> None:
        raise AuthError("the token is rejected")

    monkeypatch.setattr("signing_async.archive.archive_status", rejected)
    ran = run("archive", "contracts", "--remind-after", "0d")
    assert (ran.code, "the token is rejected" in ran.err) == (4, True)
