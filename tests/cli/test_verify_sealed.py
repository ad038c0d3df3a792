"""`verify-sealed`: its output, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from signing_async.cli import app as cli
from tests import pdfs
from tests.cli.terminal import screen
from tests.sealed.cases import edited, fill_form
from tests.sealed.pdfs import sandbox_authority, sealed_by_sandbox


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with files of every kind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lease-signed.pdf").write_bytes(sealed_by_sandbox())
    (tmp_path / "lasting.pdf").write_bytes(sealed_by_sandbox("B-LTA"))
    (tmp_path / "changed.pdf").write_bytes(pdfs.update(sealed_by_sandbox(), {5: pdfs.stream_object(b"")}))
    (tmp_path / "filled.pdf").write_bytes(edited(sealed_by_sandbox(original=pdfs.with_form()), fill_form))
    (tmp_path / "unsigned.pdf").write_bytes(pdfs.make_pdf())
    (tmp_path / "letter.txt").write_text("Dear Sir or Madam")
    (tmp_path / "roots.pem").write_bytes(sandbox_authority().certificate_pem)
    return tmp_path


TRUST = ["--trust", "roots.pem"]


UNREVOKED = "not revoked according to the data in the file"
SHOWN = "    shown   NOT only what it covers\n    since   the form field 'remark' was filled in\n"
UNTRUSTED = "sound, NOT TRUSTED\n  not trusted: its signature: the cert"


@pytest.mark.parametrize(
    ("files", "code", "out", "err"),
    [
        (["changed.pdf"], 7, "changed.pdf: NOT SOUND\n  problem: its signature: it was followed by changes", ""),
        (["unsigned.pdf"], 7, "unsigned.pdf: NOT SOUND\n  problem: it is not signed\n", ""),
        (["letter.txt"], 2, "", "Error: 'letter.txt': not a PDF\n"),
        (["none.pdf"], 2, "", "Error: cannot open 'none.pdf': No such file or directory\n"),
        (["changed.pdf", "letter.txt", "lease-signed.pdf"], 7, "NOT SOUND", "not a PDF"),
        (["lease-signed.pdf", *TRUST], 0, "lease-signed.pdf: sound, trusted\n", UNREVOKED),
        (["lease-signed.pdf", *TRUST], 0, "    revoked unknown: no revocation data\n", ""),
        (["lease-signed.pdf", "--trust", "system"], 8, UNTRUSTED, ""),
        (["lease-signed.pdf", "--trust", "none.pem"], 2, "", "trust: cannot read 'none.pem'"),
        (["lease-signed.pdf", "--fetch", *TRUST], 0, "sound, trusted\n", "and the services that they name"),
        (["filled.pdf"], 0, SHOWN, ""),
        (["filled.pdf", "--no-form-filling"], 7, "problem: its signature: form fields were filled in after it", ""),
        (["lasting.pdf"], 0, "05:06:07+00:00 by a timestamp\n", ""),
        (["lasting.pdf", *TRUST], 0, "    level   B-LTA\n", ""),
        (["lasting.pdf", *TRUST], 0, "    revoked no\n", ""),
    ],
)
def test_verdict_and_exit_code(
    files: list[str], code: int, out: str, err: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0: sound. 7: not sound. 8: not trusted. 2: not a PDF. The worst of several files counts."""
    assert cli.run(["verify-sealed", *files]) == code
    printed = capsys.readouterr()
    assert out in printed.out
    assert err in printed.err


def test_files_are_separated_by_an_empty_line_and_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.run(["verify-sealed", "lease-signed.pdf"])
    (one, _) = capsys.readouterr()
    cli.run(["verify-sealed", "none.pdf", "lease-signed.pdf", "letter.txt", "lease-signed.pdf", "unsigned.pdf"])
    unsigned = "unsigned.pdf: NOT SOUND\n  problem: it is not signed\n"
    assert capsys.readouterr().out == f"{one}\n{one}\n{unsigned}\n2 of 5 sound\n"


def test_verdicts_are_coloured_on_a_terminal(folder: Path) -> None:
    files = [str(folder / name) for name in ("lease-signed.pdf", "unsigned.pdf")]
    raw = screen("verify-sealed", *files).raw.decode()
    assert f"\x1b[32m\x1b[1m{files[0]}: sound\x1b[0m" in raw
    assert f"\x1b[31m\x1b[1m{files[1]}: NOT SOUND\x1b[0m" in raw
    assert "\x1b[31m1 of 2 sound\x1b[0m" in raw
    assert "\x1b[33m\x1b[1m" in screen("verify-sealed", files[0], "--trust", "system").raw.decode()


def test_newlines_in_a_file_name_cannot_forge_a_verdict(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\nlease.pdf: sound\nb.pdf"
    (folder / name).write_bytes(pdfs.make_pdf())
    assert cli.run(["verify-sealed", name]) == 7
    assert capsys.readouterr().out.startswith("a lease.pdf: sound b.pdf: NOT SOUND\n")


def test_json_prints_one_object_per_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verify-sealed", "--json", *TRUST, "lease-signed.pdf", "changed.pdf", "letter.txt"]) == 7
    sound, changed, letter = map(json.loads, capsys.readouterr().out.splitlines())
    assert (sound["file"], sound["sound"], sound["trusted"], sound["problems"]) == ("lease-signed.pdf", True, True, [])
    assert "not a legal opinion" in sound["note"]
    assert (changed["sound"], changed["trusted"], changed["revisions"]) == (False, False, 3)
    assert (letter["sound"], letter["error"]["reason"]) == (None, "not_pdf")
