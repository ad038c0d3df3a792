"""`verify-sealed` as a user runs it: its words, its JSON, its exit codes, and the example of its help."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from signing_async import cli
from tests import pdfs
from tests.sealed.cases import edited, fill_form
from tests.sealed.pdfs import cms, sandbox_authority, sealed_by_sandbox, signed_pdf


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files of every sort, in which the command is run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lease-signed.pdf").write_bytes(sealed_by_sandbox())
    (tmp_path / "lasting.pdf").write_bytes(sealed_by_sandbox("B-LTA"))
    (tmp_path / "changed.pdf").write_bytes(pdfs.update(sealed_by_sandbox(), {5: pdfs.stream_object(b"")}))
    (tmp_path / "filled.pdf").write_bytes(edited(sealed_by_sandbox(original=pdfs.with_form()), fill_form))
    (tmp_path / "unsigned.pdf").write_bytes(pdfs.make_pdf())
    (tmp_path / "letter.txt").write_text("Dear Sir or Madam")
    (tmp_path / "roots.pem").write_bytes(sandbox_authority().certificate_pem)
    return tmp_path


def test_the_example_of_its_help(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Is run as it stands there: a sealed file is sound."""
    cli.run(["verify-sealed", "--help"])
    _, _, example = capsys.readouterr().out.partition("Example:\n")
    line = example.splitlines()[0].strip()
    assert cli.run(shlex.split(line)[1:]) == 0
    told = capsys.readouterr()
    assert told.out.startswith(
        "lease-signed.pdf: sound\n  signature by Signing Sandbox Seal (no legal value), 2026-03-04"
    )
    assert "the whole file, up to revision 2 of 2" in told.out
    assert "no legal opinion. Whose certificates they are was not checked" in told.err


TRUST = ["--trust", "roots.pem"]


@pytest.mark.parametrize(
    ("files", "code", "out", "err"),
    [
        (["changed.pdf"], 7, "changed.pdf: NOT SOUND\n  wrong: its signature: it was followed by changes", ""),
        (["unsigned.pdf"], 7, "unsigned.pdf: NOT SOUND\n  wrong: it is not signed\n", ""),
        (["letter.txt"], 2, "", "Error: 'letter.txt': not a PDF\n"),
        (["none.pdf"], 2, "", "Error: cannot open 'none.pdf': No such file or directory\n"),
        (["lease-signed.pdf", "letter.txt"], 2, "lease-signed.pdf: sound\n", "not a PDF"),
        (["changed.pdf", "letter.txt", "lease-signed.pdf"], 7, "NOT SOUND", "not a PDF"),
        (["lease-signed.pdf", *TRUST], 0, "lease-signed.pdf: sound, trusted\n", "not revoked by what the file carries"),
        (
            ["lease-signed.pdf", "--trust", "system"],
            8,
            "sound, NOT TRUSTED\n  not trusted: its signature: the cert",
            "",
        ),
        (["changed.pdf", "lease-signed.pdf", "--trust", "system"], 7, "changed.pdf: NOT SOUND\n", ""),
        (["lease-signed.pdf", "--trust", "none.pem"], 2, "", "trust: cannot read 'none.pem'"),
        (["lease-signed.pdf", "--fetch"], 2, "", "--fetch is of use only with --trust"),
        (["lease-signed.pdf", "--fetch", *TRUST], 0, "sound, trusted\n", "and the services that they name say"),
        (
            ["filled.pdf"],
            0,
            "    shown   NOT only what it covers\n    since   the form field 'remark' was filled in\n",
            "",
        ),
        (["filled.pdf", "--no-form-filling"], 7, "wrong: its signature: form fields were filled in after it", ""),
        (["lasting.pdf"], 0, "05:06:07+00:00 by a timestamp\n", ""),
        (["lasting.pdf"], 0, "    level   B-LTA\n", ""),
        (["lasting.pdf", *TRUST], 0, "    revoked no\n", ""),
        (["lease-signed.pdf", *TRUST], 0, "    revoked unknown: there are no data on it\n", ""),
    ],
)
def test_what_it_says_and_how_it_ends(
    files: list[str], code: int, out: str, err: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0: sound. 7: not sound. 8: not trusted. 2: no PDF. Of several files the worst counts, and each is told of."""
    assert cli.run(["verify-sealed", *files]) == code
    told = capsys.readouterr()
    assert out in told.out
    assert err in told.err


def test_a_file_larger_than_any_sealed_one(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same setting that bounds a download."""
    (folder / "tenant.toml").write_text("max_sealed_bytes = 100")
    monkeypatch.setenv("SIGNING_ASSUMPTIONS", "tenant.toml")
    assert cli.run(["verify-sealed", "changed.pdf"]) == 2
    assert "Error: 'changed.pdf' is larger than 100 bytes (max_sealed_bytes)\n" in capsys.readouterr().err


def test_what_it_says_of_a_signature(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is right, what is wrong and what was not checked; of a signer without a name too."""
    (folder / "odd.pdf").write_bytes(signed_pdf(lambda data: cms(b"other", certificates=False), entries=b""))
    assert cli.run(["verify-sealed", "odd.pdf"]) == 7
    told = capsys.readouterr().out
    assert "signature by somebody unknown\n" in told
    assert "digest  not checked (sha256)" in told
    assert "key     not checked" in told
    assert "shown   cannot be told" in told
    (folder / "odd.pdf").write_bytes(signed_pdf(lambda data: cms(b"other")))
    assert cli.run(["verify-sealed", "odd.pdf"]) == 7
    told = capsys.readouterr().out
    assert "digest  WRONG (sha256)" in told
    assert "key     right" in told
    (folder / "odd.pdf").write_bytes(pdfs.with_signature_field(b"/V 7 0 R"))
    cli.run(["verify-sealed", "odd.pdf"])
    told = capsys.readouterr().out
    assert "signature by somebody unknown\n    covers  its first 0 of" in told
    assert "digest  not checked\n" in told


def test_a_name_that_could_pass_for_a_verdict(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a file is called stays on one line."""
    name = "a\nlease.pdf: sound\nb.pdf"
    (folder / name).write_bytes(pdfs.make_pdf())
    assert cli.run(["verify-sealed", name]) == 7
    assert capsys.readouterr().out.startswith("a lease.pdf: sound b.pdf: NOT SOUND\n")


def test_for_machines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An object a line for each file, and nothing else on standard output."""
    assert cli.run(["verify-sealed", "--json", *TRUST, "lease-signed.pdf", "changed.pdf", "letter.txt"]) == 7
    sound, changed, letter = map(json.loads, capsys.readouterr().out.splitlines())
    assert (sound["file"], sound["sound"], sound["trusted"], sound["problems"]) == ("lease-signed.pdf", True, True, [])
    assert "no legal opinion" in sound["note"]
    assert (changed["sound"], changed["trusted"], changed["revisions"]) == (False, False, 3)
    assert (letter["sound"], letter["error"]["reason"]) == (None, "not_pdf")


def test_without_the_extra(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence on what to install."""
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.delitem(sys.modules, "signing_async.sealed")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pyhanko" else found(name))
    assert cli.run(["verify-sealed", "lease-signed.pdf"]) == 1
    said = "Error: signing_async.sealed needs pyHanko: pip install 'signing-async[verify]'\n"
    assert capsys.readouterr().err == said
