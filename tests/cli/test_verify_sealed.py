"""`verify-sealed`: its output, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from signing_async.cli import app as cli
from tests import pdfs
from tests.cli.terminal import screen
from tests.sealed.cases import edited, fill_form
from tests.sealed.pdfs import judge_here, sandbox_authority, sealed_by_sandbox
from tests.sealed.pki import root, signed_by

EVIL = "a\nlease.pdf: sound\nb.pdf"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with files of every kind."""
    folder = tmp_path_factory.mktemp("sealed")
    (folder / "lease-signed.pdf").write_bytes(sealed_by_sandbox())
    (folder / "lasting.pdf").write_bytes(sealed_by_sandbox("B-LTA"))
    (folder / "changed.pdf").write_bytes(pdfs.update(sealed_by_sandbox(), {5: pdfs.stream_object(b"")}))
    (folder / "filled.pdf").write_bytes(edited(sealed_by_sandbox(original=pdfs.with_form()), fill_form))
    for name in ("unsigned.pdf", EVIL):
        (folder / name).write_bytes(pdfs.make_pdf())
    (folder / "hostile.pdf").write_bytes(signed_by(root("Root\x1b[2J").issue("Anna\x1b[31m")))
    (folder / "letter.txt").write_text("Dear Sir or Madam")
    (folder / "roots.pem").write_bytes(sandbox_authority().certificate_pem)
    return folder


@pytest.fixture(autouse=True)
def folder(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to the folder, and judge the files in this process: a worker process takes half a second for each."""
    monkeypatch.chdir(files)
    monkeypatch.setattr("signing_async.sealed.run_worker", judge_here)


TRUST = ["--trust", "roots.pem"]
UNREVOKED = "not revoked according to the data in the file"
SHOWN = "    shown   NOT only what it covers\n    since   the form field 'remark' was filled in\n"
UNTRUSTED = "sound, NOT TRUSTED\n  not trusted: its signature: the cert"
LASTING = ("05:06:07+00:00 by a timestamp\n", "    level   B-LTA\n", "    revoked no\n")


@pytest.mark.parametrize(
    ("files_and_options", "code", "out", "err"),
    [
        (["changed.pdf"], 7, ["changed.pdf: NOT SOUND\n  problem: its signature: it was followed by changes"], ""),
        ([EVIL], 7, ["a lease.pdf: sound b.pdf: NOT SOUND\n  problem: it is not signed\n"], ""),
        (["hostile.pdf"], 0, ["  signature by Anna [31m, ", "    issuer  CN=Root [2J\n"], ""),
        (["letter.txt"], 2, [], "Error: 'letter.txt': not a PDF\n"),
        (
            ["lease-signed.pdf", *TRUST],
            0,
            ["lease-signed.pdf: sound, trusted\n", "    revoked unknown: no revocation data\n"],
            UNREVOKED,
        ),
        (["lease-signed.pdf", "--trust", "system"], 8, [UNTRUSTED], ""),
        (["lease-signed.pdf", "--fetch", *TRUST], 0, ["sound, trusted\n"], "and the services that they name"),
        (["filled.pdf"], 0, [SHOWN], ""),
        (["filled.pdf", "--no-form-filling"], 7, ["problem: its signature: form fields were filled in after it"], ""),
        (["lasting.pdf", *TRUST], 0, LASTING, ""),
    ],
)
def test_verdict_and_exit_code(
    files_and_options: list[str], code: int, out: list[str], err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """0: sound. 7: not sound. 8: not trusted. 2: not a PDF."""
    assert cli.run(["verify-sealed", *files_and_options]) == code
    printed = capsys.readouterr()
    assert bool(printed.out) is bool(out)
    assert all(part in printed.out for part in out)
    assert err in printed.err


def test_files_are_separated_by_an_empty_line_and_counted_and_the_worst_counts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["verify-sealed", "lease-signed.pdf"]) == 0
    (one, _) = capsys.readouterr()
    names = ("none.pdf", "lease-signed.pdf", "letter.txt", "lease-signed.pdf", "unsigned.pdf")
    assert cli.run(["verify-sealed", *names]) == 7
    unsigned = "unsigned.pdf: NOT SOUND\n  problem: it is not signed\n"
    assert capsys.readouterr().out == f"{one}\n{one}\n{unsigned}\n2 of 5 sound\n"


def test_verdicts_are_coloured_on_a_terminal() -> None:
    raw = screen("verify-sealed", "lease-signed.pdf", "unsigned.pdf").raw.decode()
    assert "\x1b[32m\x1b[1mlease-signed.pdf: sound\x1b[0m" in raw
    assert "\x1b[31m\x1b[1munsigned.pdf: NOT SOUND\x1b[0m" in raw
    assert "\x1b[31m1 of 2 sound\x1b[0m" in raw
    assert b"\x1b[33m\x1b[1m" in screen("verify-sealed", "lease-signed.pdf", "--trust", "system").raw


def test_json_prints_one_object_per_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verify-sealed", "--json", *TRUST, "lease-signed.pdf", "changed.pdf", "letter.txt"]) == 7
    sound, changed, letter = map(json.loads, capsys.readouterr().out.splitlines())
    assert (sound["file"], sound["sound"], sound["trusted"], sound["problems"]) == ("lease-signed.pdf", True, True, [])
    assert "not a legal opinion" in sound["note"]
    assert (changed["sound"], changed["trusted"], changed["revisions"]) == (False, False, 3)
    assert (letter["sound"], letter["error"]["reason"]) == (None, "not_pdf")
