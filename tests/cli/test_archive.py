"""archive: the sealed PDFs of all signings, each once; verify finds every change; status tells what is stuck."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from aiohttp import web

from signing_async import AuthError, SqliteJournal
from tests.archive.s3_server import CREDENTIALS, S3Server
from tests.cli.conftest import Run
from tests.cli.service import Service, api_path, listening
from tests.cli.terminal import start
from tests.pdfs import make_pdf


def complete(service: Service, count: int, name: str = "Lease") -> None:
    """Make so many completed signings, with two documents each."""
    for number in range(count):
        service.draft("a.pdf", "b.pdf", to=("anna@example.com",), name=f"{name} {number}", completed=True)


def make_archive() -> None:
    """Make an archive without documents."""
    Path("contracts").mkdir()
    Path("contracts", "manifest.jsonl").touch()


def test_every_document_is_archived_once_and_verify_finds_every_change(
    run: Run, service: Service, tmp_path: Path
) -> None:
    """A document that fails is reported, and does not keep the others from the archive; a later run archives it."""
    complete(service, 2)
    service.fault("documents.download_signed", "not-json")
    ran = run("archive", "contracts", "--json")
    assert (ran.code, ran.lines[-1]["summary"]["archived"], ran.lines[-1]["summary"]["failed"]) == (1, 3, 1)
    (failed,) = [line for line in ran.lines if "error" in line]
    assert failed["document"]
    ran = run("archive", "contracts")
    assert ran.code == 0
    assert re.fullmatch(r"1 document archived \(\d+ bytes\), 0 failed\. Already there: 3\.\n", ran.out)
    summary = {"archived": 0, "already_there": 4, "bytes": 0, "failed": 0, "not_yet_sealed": 0, "reminded": 0}
    assert run("archive", "contracts", "--json").lines == [{"summary": summary}]
    assert service.requests_of("documents.download_signed") == 5
    ran = run("archive", "verify", "contracts")
    assert (ran.code, "4 documents" in ran.out) == (0, True)
    assert "the archive matches its manifest. Head: " in ran.out

    folder = tmp_path / "contracts"
    changed, removed, *others = sorted(folder.rglob("*.pdf"))
    assert len(others) == 2
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


def test_filters_select_signings(run: Run, service: Service) -> None:
    complete(service, 1, "Lease")
    complete(service, 1, "Loan")
    assert run("archive", "leases", "--name", "lease *", "--json").lines[-1]["summary"]["archived"] == 2
    assert run("archive", "new", "--since", "2999-01-01", "--json").lines[-1]["summary"]["archived"] == 0
    assert run("archive", "new", "--since", "30d", "--json").lines[-1]["summary"]["archived"] == 4
    assert run("archive", "named", "--template", "{signing.id}-{document.name}", "--json").code == 0


def completed(*sealed: Iterator[bytes | None]) -> Callable[[web.Request], Any]:
    """Serve completed signings, whose documents are downloaded as these; None: not yet sealed."""
    signings = [
        {"id": f"s{number}", "name": f"Lease {number}", "is_draft": False, "is_completed": True}
        | {"documents": [{"id": f"d{number}", "name": "lease.pdf"}]}
        for number in range(len(sealed))
    ]
    pages: dict[str, object] = {"/me": {"id": "u1"}, "/signings": signings}
    pages |= {f"/signings/{signing['id']}": signing for signing in signings}
    files = {f"/signings/s{number}/documents/d{number}/download-signed": each for number, each in enumerate(sealed)}

    def respond(request: web.Request) -> Any:
        path = api_path(request)
        return next(files[path]) if path in files else pages.get(path)

    return respond


def test_document_that_is_not_yet_sealed_is_counted_and_is_no_failure(run: Run) -> None:
    """A later run fetches it; until then status lists it. It does not hide the failures of others."""
    with listening(completed(repeat(None), repeat(b"no PDF"))) as server:
        ran = run("archive", "contracts", "--name", "Lease 0", SIGNING_BASE_URL=server.origin)
        assert ran.code == 0
        assert "0 documents archived (0 bytes), 0 failed. Not yet sealed: 1; a later run fetches them." in ran.out
        ran = run("archive", "status", SIGNING_BASE_URL=server.origin)
        assert (ran.code, "not sealed" in ran.out, "lease.pdf" in ran.out) == (9, True, True)
        ran = run("archive", "contracts", "--concurrency", "1", SIGNING_BASE_URL=server.origin)
        assert (ran.code, "1 failed. Not yet sealed: 1" in ran.out, "Error: Lease 1: " in ran.err) == (1, True, True)


def test_follow_goes_on_after_outages_reports_what_fails_and_archives_what_is_sealed_later(
    run: Run, tmp_path: Path
) -> None:
    """It ends with a summary, an archive that verifies, and nothing left behind."""
    make_archive()
    outage = threading.Event()
    outage.set()
    serve = completed(chain([None], repeat(b"no PDF")), chain([None], repeat(make_pdf())))

    def respond(request: web.Request) -> Any:
        is_out = outage.is_set() and api_path(request) == "/signings"
        return web.Response(status=500) if is_out else serve(request)

    command = ("archive", "contracts", "--follow", "--every", "1", "--remind-after", "0d", "--json")
    with (
        listening(respond) as server,
        start(
            *command,
            cwd=tmp_path,
            environment={"SIGNING_MAX_ATTEMPTS": "1", "SIGNING_BASE_URL": server.origin},
        ) as following,
    ):
        assert following.stdout
        assert following.stderr
        try:
            missing = {"reminders are retried later: HTTP 500", "archiving continues after: HTTP 500"}
            while missing:
                warning = following.stderr.readline()
                missing = {text for text in missing if text not in warning}
            outage.clear()
            lines = {line["signing"]: line for line in (json.loads(following.stdout.readline()) for _ in range(2))}
            assert lines["s0"]["error"]["type"] == "DecodeError"
            assert lines["s1"]["size"] == len(make_pdf())
            following.send_signal(signal.SIGTERM)
            out, err = following.communicate(timeout=30)
        finally:
            following.kill()
    assert (following.returncode, "Traceback" in err) == (143, False)
    summary = json.loads(out.splitlines()[-1])["summary"]
    assert (summary["archived"], summary["failed"]) == (1, 1)
    assert run("archive", "verify", "contracts").code == 0
    assert not list(tmp_path.rglob(".incoming/*"))


def test_reminders_are_sent_once_and_an_error_ends_a_single_run(
    run: Run, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error concerns one signing, or every signing."""
    make_archive()
    assert run("archive", "verify", "contracts").code == 2
    service.draft("a.pdf", to=("anna@example.com", "bo@example.com"), sent=True)
    assert run("archive", "contracts", "--remind-after", "7d", "--json").lines[-1]["summary"]["reminded"] == 0
    remind = ("archive", "contracts", "--remind-after", "0d")
    assert run(*remind).out.count("Reminded ") == 2
    service.fault("recipients.remind", "drop-after-commit")
    ran = run(*remind, "--json")
    assert ran.code == 3
    assert [line["reminded"] for line in ran.lines if "reminded" in line] == [False, True]
    service.fault("recipients.list", "500")
    ran = run(*remind, SIGNING_MAX_ATTEMPTS="1")
    assert (ran.code, "HTTP 500" in ran.err) == (1, True)
    rejected = AsyncMock(side_effect=AuthError("the token is rejected"))
    monkeypatch.setattr("signing_async.archive.archive_status", rejected)
    ran = run(*remind)
    assert (ran.code, "the token is rejected" in ran.err) == (4, True)


def test_status_tells_what_is_stuck_and_what_could_not_be_examined(run: Run, service: Service) -> None:
    """Exit code 9, or 1 if nothing else is stuck; for machines a JSON object each."""
    status = ("archive", "status", "--after", "0d")
    complete(service, 1)
    assert run(*status).code == 0
    waiting = service.draft("a.pdf", to=("anna@example.com",), name="Waiting", sent=True)
    service.fault("recipients.list", "not-json", times=None)
    ran = run(*status)
    assert ran.code == 1
    assert "could not be examined" in ran.out.splitlines()[1]
    assert "recipients.list" in ran.out.splitlines()[1]
    draft = service.draft("lease.pdf", name="Forgotten")
    ran = run(*status, "--json")
    assert (ran.code, [line["stuck"] for line in ran.lines]) == (9, ["not_examined", "not_sent"])
    assert (ran.lines[0]["error"]["type"], "error" in ran.lines[1]) == ("DecodeError", False)

    service.do(service.sandbox.faults.clear)
    ran = run(*status)
    assert ran.code == 9
    head, *rows = ran.out.splitlines()
    assert head.split() == ["ID", "NAME", "PROBLEM", "SINCE", "DETAILS"]
    assert [row.split()[:2] for row in rows] == [[waiting, "Waiting"], [draft, "Forgotten"]]
    assert "anna@example.com" in rows[0]
    assert "lease.pdf" in rows[1]
    assert run("archive", "status").code == 0
    ran = run(*status, "--json")
    assert [line["stuck"] for line in ran.lines] == ["no_progress", "not_sent"]
    assert [recipient["email"] for recipient in ran.lines[0]["pending"]] == ["anna@example.com"]


def test_archive_in_s3_is_archived_and_verified(run: Run, service: Service) -> None:
    complete(service, 1)
    with S3Server() as server:
        environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": server.url, "SIGNING_JOURNAL": "s3.journal"}
        to = f"s3://{server.new_bucket()}/archive"
        assert run("archive", to, "--json", **environment).lines[-1]["summary"]["archived"] == 2
        assert run("archive", to, "--json", **environment).lines[-1]["summary"]["archived"] == 0
        assert run("archive", "verify", to, "--json", **environment).lines[-1]["summary"]["documents"] == 2


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
