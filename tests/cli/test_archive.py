"""archive: the sealed PDFs of all signings, each once; verify finds every change; status tells what is stuck."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import IO, Any
from unittest.mock import AsyncMock

import pytest

from signing_async import AuthError, SqliteJournal
from tests.archive.s3_server import CREDENTIALS, S3Server
from tests.cli.conftest import Run
from tests.cli.service import Service, listening
from tests.cli.terminal import start

Complete = Callable[..., None]


@pytest.fixture
def complete(service: Service) -> Complete:
    """Makes so many completed signings, with two documents each."""

    def make(count: int, name: str = "Lease") -> None:
        for number in range(count):
            service.draft("a.pdf", "b.pdf", to=("anna@example.com",), name=f"{name} {number}", completed=True)

    return make


@contextlib.contextmanager
def follow(folder: Path, *options: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run `archive --follow` in a process of its own, and kill it if it was not ended."""
    with start(
        *("archive", "contracts", "--follow", "--every", "1", "--json", *options),
        cwd=folder,
        environment={"SIGNING_MAX_ATTEMPTS": "1", **environment},
        # The process that runs the tests may ignore Ctrl-C, as in the background of a shell.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as following:
        try:
            yield following
        finally:
            following.kill()


def end(following: subprocess.Popen[str], number: signal.Signals, code: int) -> dict[str, int]:
    """End the process by a signal, and return its summary."""
    following.send_signal(number)
    out, err = following.communicate(timeout=30)
    assert (following.returncode, "Traceback" in err) == (code, False)
    summary: dict[str, int] = json.loads(out.splitlines()[-1])["summary"]
    return summary


def make_archive() -> None:
    """Make an archive without documents."""
    Path("contracts").mkdir()
    Path("contracts", "manifest.jsonl").touch()


def read(stream: IO[str] | None, count: int) -> list[dict[str, Any]]:
    assert stream is not None
    return [json.loads(stream.readline()) for _ in range(count)]


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
    assert service.requests_of("documents.download_signed") == 8
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


def completed(*sealed: Iterator[bytes | None]) -> Callable[[str, str], tuple[int, object]]:
    """Serve completed signings, whose documents are downloaded as these; None: not yet sealed."""
    signings = [
        {"id": f"s{number}", "name": f"Lease {number}", "is_draft": False, "is_completed": True}
        | {"documents": [{"id": f"d{number}", "name": "lease.pdf"}]}
        for number in range(len(sealed))
    ]
    pages: dict[str, object] = {"/me": {"id": "u1"}, "/signings": signings}
    pages |= {f"/signings/{signing['id']}": signing for signing in signings}
    files = {f"/signings/s{number}/documents/d{number}/download-signed": each for number, each in enumerate(sealed)}

    def respond(_: str, path: str) -> tuple[int, object]:
        found = next(files[path]) if path in files else pages.get(path)
        return (404, {"code": "not_found"}) if found is None else (200, found)

    return respond


def test_document_that_is_not_yet_sealed_is_counted_and_is_no_failure(run: Run) -> None:
    """A later run fetches it; until then status lists it. It does not hide the failures of others."""
    with listening(completed(repeat(None), repeat(b"no PDF"))) as origin:
        ran = run("archive", "contracts", "--name", "Lease 0", SIGNING_BASE_URL=origin)
        assert ran.code == 0
        assert "0 documents archived (0 bytes), 0 failed. Not yet sealed: 1; a later run fetches them." in ran.out
        ran = run("archive", "status", SIGNING_BASE_URL=origin)
        assert (ran.code, "not sealed" in ran.out, "lease.pdf" in ran.out) == (9, True, True)
        ran = run("archive", "contracts", "--concurrency", "1", SIGNING_BASE_URL=origin)
        assert (ran.code, "1 failed. Not yet sealed: 1" in ran.out, "Error: Lease 1: " in ran.err) == (1, True, True)


def test_follow_reports_a_failure_of_a_document_that_was_not_yet_sealed(run: Run, tmp_path: Path) -> None:
    sealed = chain([None], repeat(b"no PDF"))
    with listening(completed(sealed)) as origin, follow(tmp_path, SIGNING_BASE_URL=origin) as following:
        (line,) = read(following.stdout, 1)
        assert (line["signing"], line["error"]["type"]) == ("s0", "DecodeError")
        assert end(following, signal.SIGINT, 130)["failed"] == 1


def test_follow_goes_on_after_outages_archives_what_is_completed_later_and_ends_cleanly(
    run: Run, complete: Complete, service: Service, tmp_path: Path
) -> None:
    """With a summary, an archive that verifies, and nothing left behind."""
    make_archive()
    service.fault("signings.list", "500", times=None)
    with follow(tmp_path, "--remind-after", "0d") as following:
        missing = {"reminders are retried later: HTTP 500", "archiving continues after: HTTP 500"}
        while missing:
            warning = str(read(following.stderr, 1))
            missing = {text for text in missing if text not in warning}
        service.do(service.sandbox.faults.clear)
        documents = set()
        for _ in range(2):
            complete(1)
            documents |= {line["document"] for line in read(following.stdout, 2)}
        assert (len(documents), end(following, signal.SIGTERM, 143)["archived"]) == (4, 4)
    assert run("archive", "verify", "contracts").code == 0
    assert not list(tmp_path.rglob(".incoming/*"))


@pytest.mark.usefixtures("one_attempt")
def test_reminders_that_fail_end_a_single_run_with_the_error(
    run: Run, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one signing, or of all."""
    make_archive()
    service.draft("a.pdf", to=("anna@example.com",), sent=True)
    service.fault("recipients.list", "500")
    ran = run("archive", "contracts", "--remind-after", "0d")
    assert (ran.code, "HTTP 500" in ran.err) == (1, True)
    rejected = AsyncMock(side_effect=AuthError("the token is rejected"))
    monkeypatch.setattr("signing_async.archive.archive_status", rejected)
    ran = run("archive", "contracts", "--remind-after", "0d")
    assert (ran.code, "the token is rejected" in ran.err) == (4, True)


def test_reminders_are_sent_once_in_the_given_time(run: Run, service: Service) -> None:
    service.draft("a.pdf", to=("anna@example.com", "bo@example.com"), sent=True)
    assert run("archive", "contracts", "--remind-after", "7d", "--json").lines[-1]["summary"]["reminded"] == 0
    ran = run("archive", "contracts", "--remind-after", "0d")
    assert ran.out.count("Reminded ") == 2
    service.fault("recipients.remind", "drop-after-commit")
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
    service.fault("recipients.list", "not-json", times=None)
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


def test_archive_in_s3_is_archived_and_verified(run: Run, complete: Complete) -> None:
    complete(2)
    with S3Server() as server:
        environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": server.url, "SIGNING_JOURNAL": "s3.journal"}
        to = f"s3://{server.new_bucket()}/archive"
        assert run("archive", to, "--json", **environment).lines[-1]["summary"]["archived"] == 4
        assert run("archive", to, "--json", **environment).lines[-1]["summary"]["archived"] == 0
        assert run("archive", "verify", to, "--json", **environment).lines[-1]["summary"]["documents"] == 4


def test_failed_document_is_reported_and_the_others_are_archived(
    run: Run, complete: Complete, service: Service
) -> None:
    """A later run archives it."""
    complete(2)
    service.fault("documents.download_signed", "not-json")
    ran = run("archive", "contracts", "--json")
    assert (ran.code, ran.lines[-1]["summary"]["archived"], ran.lines[-1]["summary"]["failed"]) == (1, 3, 1)
    (failed,) = [line for line in ran.lines if "error" in line]
    assert failed["document"]
    ran = run("archive", "contracts")
    assert (ran.code, ran.out.startswith("1 document archived")) == (0, True)


def test_status_lists_dispatches_without_an_outcome(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = {"content": "x", "service": "y", "status": "draft", "signing": "s1", "error": "HTTP 500"}

    async def write() -> None:
        async with SqliteJournal(tmp_path / "leases.journal") as journal:
            for key in ("lease-1", "f" * 64):
                claim = await journal.claim(key)
                assert claim is not None
                await journal.write(claim, json.dumps(state))

    with monkeypatch.context() as patched:
        patched.setattr("time.time", lambda: 1_000_000.0)
        asyncio.run(write())
    ran = run("archive", "status", "--journal", "leases.journal")
    assert ran.code == 9
    for part in ("lease-1", "s1", "not dispatched", "HTTP 500", f"  {'f' * 12}…  "):
        assert part in ran.out
    lines = run("archive", "status", "--journal", "leases.journal", "--json").lines
    dispatches = [line["dispatch"] for line in lines]
    assert {each["key"]: each["may_be_sent"] for each in dispatches} == {"f" * 64: False, "lease-1": False}
