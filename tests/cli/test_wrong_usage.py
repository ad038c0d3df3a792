"""Wrong usage: one sentence with the option or argument and the value, exit code 2, and nothing is sent or written."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.service import Service, running
from tests.pdfs import make_pdf
from tests.webhooks.deliveries import SECRET

REFUSED = {
    "create x --message-file binary": "binary is not UTF-8",
    "add-recipient 1 a@b --fields text": "the file does not contain a JSON object",
    "add-recipient 1 a@b --fields list.json": "the file does not contain a JSON object",
    "download x lease.pdf --verify -o -": "--output -: not with --verify",
    "sandbox --app a=http://127.0.0.1/a --app b=http://127.0.0.1/b": "--app: only one app can be registered",
    "sandbox --app http://127.0.0.1/a": "--app: must have the form NAME=REDIRECT_URI, got 'http://127.0.0.1/a'",
    "dispatch x.csv --journal ./x.csv": "--journal: must not be the manifest, nor the report of failures",
    "dispatch x.csv --journal j --failures ./j": "--journal: must not be the manifest, nor the report of failures",
    "dispatch x.csv --wait": "--wait and --for need --broker",
    "archive text": "FOLDER: could not create the folder 'text'",
    "inbox purge --older-than 2931-01-01": "2931-01-01 is in the future",
    "login --wait inf": "'--wait': 'inf' is not a finite number",
    # Signings and recipients
    "list --cursor abc": "--cursor: must be a cursor that `list` printed, got 'abc'",
    "list --updated-since soon": "7d or 2w, or a date such as 2031-03-31, got 'soon'",
    "create x --message a --message-file text": "use either --message or --message-file, not both",
    "add-recipient 1 nobody": "email: must be an e-mail address, got 'nobody'",
    "add-recipient 1 a@b --field x": "must have the form NAME=VALUE, got 'x'",
    "doctor --output ''": "Error: --output: '.' is a folder",
    "doctor --output text": "Error: --output: text exists: use --force to replace it",
    "remind x anna@example.com --all-pending": "use either RECIPIENT or --all-pending",
    "download x lease.pdf --all": "use either DOCUMENTS or --all, not both",
    # Dispatch
    "dispatch none.csv": "Error: none.csv: cannot be opened: No such file or directory",
    "dispatch .": "Error: .: not a regular file",
    "dispatch x.csv --journal ''": "Error: --journal: must not be empty",
    "dispatch x.csv --journal none/x": "Error: --journal: the folder of 'none/x' does not exist",
    "dispatch x.csv --journal .": "Error: --journal: '.' is a folder",
    "dispatch x.csv --journal redis://x": "--journal: must be a path or postgresql://..., got redis://...",
    "dispatch x.csv --journal x://[geheim": "must be a path or postgresql://..., got x://...",
    "dispatch x.csv --journal postgresql://u:geheim@h/db": "in an argument; put the URL into SIGNING_JOURNAL",
    "dispatch x.csv --failures x.csv": "--failures: must not be the manifest itself",
    "dispatch x.csv --failures none/f.csv": "'none/f.csv' cannot be written: No such file or directory",
    "dispatch x.csv --failures /dev/null": "'/dev/null' exists and is not a report of failures",
    "dispatch x.csv --failures text": "'text' exists and is not a report of failures",
    "dispatch x.csv --broker redis://r --journal j": "--broker: needs a journal that all workers can reach",
    "dispatch x.csv --broker env:NOT_SET": "--broker: NOT_SET is not set",
    "dispatch x.csv --broker redis://h?password=geheim": "use --broker env:SIGNING_BROKER",
    # Archive
    "archive verfy": "No such command 'verfy'; did you mean 'verify'? To archive into a new folder of that name, use",
    "archive sync": "No such command 'sync'; the commands are status and verify. To archive into",
    "archive --follow verify": 'put options after "verify"; for a folder of that name use ./verify',
    "archive verify missing": "missing is not an archive: it has no manifest.jsonl",
    "archive c --remind-after 2031-01-01": "must be a duration such as 90min, 12h, 7d or 2w, got '2031-01-01'",
    "archive s3://bucket/c": "--journal: an archive in S3 needs one",
    "archive c --object-lock COMPLIANCE 30": "--object-lock: only S3 retains objects, and 'c' is a folder",
    "archive status --journal typo.db": "--journal: the file 'typo.db' does not exist",
    # Inbox
    "inbox list": "no inbox: use --inbox PATH, or set SIGNING_INBOX",
    "inbox list --inbox postgresql://u:geheim@h/d": "put the URL into SIGNING_INBOX",
    "inbox list --inbox no/such.db": "Error: the inbox 'no/such.db' does not exist",
    "inbox retry": "give either ids of events or at least one of --dead, --type, --since and --until",
    # Webhooks
    "webhook verify text": "no signature: use --signature VALUE, or --header 'X-Signature: VALUE'",
    "webhook verify text -H nonsense": "must have the form 'NAME: VALUE'",
    "webhook verify text --signature x --secret geheim": "every process can read a secret",
    "webhook verify text --signature x --secret env:NOT_SET": "set NOT_SET",
    "webhook verify - --signature x --secret -": "either the body or the secret",
    "verify-sealed text --fetch": "--fetch requires --trust",
}  # fmt: skip


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A sandbox for all of these tests, which send no request."""
    with running() as started:
        yield started


@pytest.mark.parametrize("line", REFUSED)
def test_wrong_usage_is_refused_with_what_is_wrong(
    line: str, run: Run, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGNING_WEBHOOK_SECRET", SECRET)
    (tmp_path / "text").write_text("mine")
    (tmp_path / "binary").write_bytes(b"\xff")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "a.pdf").write_bytes(make_pdf())
    (tmp_path / "x.csv").write_text("name,language,documents,recipient1_email\nLease,EN,a.pdf,anna@example.com\n")
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    ran = run(*shlex.split(line))
    assert (ran.code, ran.out) == (2, "")
    assert REFUSED[line] in " ".join(ran.err.split())
    assert "geheim" not in ran.err
    assert service.sandbox.requests == []
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
