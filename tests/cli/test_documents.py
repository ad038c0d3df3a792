"""upload and download."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from signing_async import Document
from signing_async.cli.documents import _names, safe_stem
from signing_async.documents import download, resource
from tests.cli.conftest import Run
from tests.cli.service import Service
from tests.cli.terminal import COMMAND, ROOT, Terminal, piped, screen
from tests.pdfs import make_pdf


@pytest.fixture
def completed(service: Service) -> str:
    """A signing with two sealed documents."""
    signing = service.draft("lease.pdf", "inventory.pdf", to=("anna@example.com",), sent=True)
    service.call(service.sandbox.complete(signing))
    return signing


def test_upload(run: Run, service: Service, tmp_path: Path) -> None:
    """A line for each file with its document's id; the bytes are the file's."""
    (tmp_path / "lease.pdf").write_bytes(make_pdf(text="lease"))
    (tmp_path / "inventory.pdf").write_bytes(make_pdf(text="inventory"))
    signing = service.draft()
    ran = run("upload", signing, "lease.pdf", "inventory.pdf")
    assert (ran.code, ran.err) == (0, "")
    ids = {line.split("  ")[1]: line.split("  ")[0] for line in ran.out.splitlines()}
    for name, document in ids.items():
        assert service.do(service.sandbox.document_bytes, document) == (tmp_path / name).read_bytes()
    (facts,) = run("upload", signing, str(tmp_path / "lease.pdf"), "--json").lines
    assert (facts["file"], facts["name"]) == (str(tmp_path / "lease.pdf"), "lease.pdf")


def test_one_upload_that_fails_does_not_stop_the_others(run: Run, service: Service, tmp_path: Path) -> None:
    """Each failure is told with its file; the exit code says that there was one."""
    (tmp_path / "lease.pdf").write_bytes(make_pdf())
    (tmp_path / "notes.txt").write_text("no PDF at all")
    signing = service.draft()
    ran = run("upload", signing, "none.pdf", "notes.txt", "lease.pdf")
    assert ran.code == 1
    assert ran.out.endswith("  lease.pdf\n")
    assert "Error: cannot open 'none.pdf'" in ran.err
    assert "Error: notes.txt: " in ran.err
    assert ran.err.endswith("2 of 3 files were not uploaded.\n")
    assert len(service.do(service.sandbox.documents, signing)) == 1
    ran = run("upload", signing, "notes.txt", "--json")
    assert (ran.code, ran.lines[0]["error"]["reason"]) == (2, "not_pdf")


def test_the_service_refuses_an_upload(run: Run, service: Service, tmp_path: Path) -> None:
    """Exit code 1 for what it says, 3 where it cannot be told whether a document arrived."""
    (tmp_path / "lease.pdf").write_bytes(make_pdf())
    signing = service.draft("a.pdf", to=("anna@example.com",), sent=True)
    ran = run("upload", signing, "lease.pdf")
    assert ran.code == 1
    assert "HTTP 400" in ran.err
    signing = service.draft()
    service.do(service.sandbox.faults.add, "documents.upload", "drop-after-commit")
    service.do(service.sandbox.faults.add, "signings.get", "500", None, skip=1)
    ran = run("upload", signing, "lease.pdf", "--timeout", "1")
    assert ran.code == 3


def test_an_upload_is_seen_on_a_terminal(service: Service, tmp_path: Path) -> None:
    """A bar that is gone at the end, and leaves the lines of the files."""
    path = tmp_path / "lease.pdf"
    path.write_bytes(make_pdf(2 * 2**20))
    shown = screen("upload", service.draft(), str(path), environment=service.environment)
    assert shown.code == 0
    assert "Uploading" in shown.text
    assert "1/1" in shown.text
    assert [line.split("  ")[1] for line in shown.lines if line] == [str(path)]
    assert shown.raw.count(b"\x1b[?25l") == shown.raw.count(b"\x1b[?25h") == 1
    narrow = screen("upload", service.draft(), str(path), columns=40, environment=service.environment)
    assert b"Uploading" in narrow.raw
    assert b"\x1b[1A\x1b[2K\x1b[1A" not in narrow.raw
    dumb = {**service.environment, "TERM": "dumb"}
    assert b"\x1b" not in screen("upload", service.draft(), str(path), environment=dumb).raw
    shown = screen("upload", service.draft(), "none.pdf", environment=service.environment)
    assert shown.lines[0] == "Error: cannot open 'none.pdf': No such file or directory"
    assert not "".join(shown.lines[1:])


def test_download_all(run: Run, completed: str, tmp_path: Path, service: Service) -> None:
    """Into a folder that is made for them; each line is a path; the files are what the service sealed."""
    ran = run("download", completed, "--all", "--output", "signed/here")
    assert (ran.code, ran.err) == (0, "")
    assert sorted(ran.out.splitlines()) == ["signed/here/inventory-signed.pdf", "signed/here/lease-signed.pdf"]
    for line in run("download", completed, "--all", "--json", "--output", "again").lines:
        content = Path(line["path"]).read_bytes()
        assert (len(content), content[:5]) == (line["size"], b"%PDF-")


def test_download_one(run: Run, completed: str, tmp_path: Path) -> None:
    """By name or id; to a file, a folder, or this one."""
    assert run("download", completed, "lease.pdf").out == "lease-signed.pdf\n"
    assert run("download", completed, "lease.pdf", "--output", "kept.pdf").out == "kept.pdf\n"
    (facts,) = run("download", completed, "lease.pdf", "--output", f"{tmp_path}/new/", "--json").lines
    assert facts["path"] == f"{tmp_path}/new/lease-signed.pdf"
    ran = run("download", completed, facts["id"], facts["id"], "lease.pdf", "-o", ".", "--force")
    assert ran.out == "lease-signed.pdf\n"
    assert stat.S_ISREG((tmp_path / "kept.pdf").stat().st_mode)


def test_the_only_document_needs_no_name(run: Run, service: Service) -> None:
    """Where there are several, they are listed."""
    signing = service.draft("only.pdf", to=("anna@example.com",), sent=True)
    service.call(service.sandbox.complete(signing))
    assert run("download", signing).out == "only-signed.pdf\n"


def test_which_document_there_is_no_telling(run: Run, service: Service, completed: str) -> None:
    """Each case says what can be done; nothing is downloaded."""
    twice = service.draft("a.pdf", "a.pdf", to=("anna@example.com",), sent=True)
    for arguments, words in (
        ([completed], "has 2 documents: say --all, or which: 'lease.pdf', 'inventory.pdf'"),
        ([completed, "x.pdf"], "no document of this signing has the id or the name 'x.pdf'"),
        ([twice, "a.pdf"], "2 documents of this signing are named 'a.pdf'"),
        ([service.draft()], "this signing has no documents"),
        ([completed, "lease.pdf", "--all"], "name documents, or say --all"),
        ([completed, "--all", "--output", "-"], "only one document can go to standard output, not 2"),
        ([completed, "--all", "--output", "/dev/null/x"], "--output: Not a directory: '/dev/null/x'"),
    ):
        ran = run("download", *arguments)
        assert (ran.code, ran.out) == (2, ""), arguments
        assert words in ran.err
    assert service.do(service.sandbox.requests_of, "documents.download_signed") == []


def test_a_file_that_is_there_is_left_alone(run: Run, completed: str, tmp_path: Path) -> None:
    """Without --force; the others are downloaded."""
    (tmp_path / "lease-signed.pdf").write_text("mine")
    ran = run("download", completed, "--all")
    assert (ran.code, ran.out) == (1, "inventory-signed.pdf\n")
    assert ran.err == "Error: lease.pdf: lease-signed.pdf is there already: --force replaces it\n"
    assert (tmp_path / "lease-signed.pdf").read_text() == "mine"
    assert run("download", completed, "lease.pdf", "--force").code == 0
    assert (tmp_path / "lease-signed.pdf").read_bytes().startswith(b"%PDF-")


def test_a_file_that_appears_meanwhile_is_left_alone(
    run: Run, completed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else made it while the PDF was on its way: only --force replaces it."""
    target, read = tmp_path / "lease-signed.pdf", download.checked_chunks

    async def checked(*arguments: Any) -> AsyncIterator[bytes]:
        async for chunk in read(*arguments):
            yield chunk
        target.write_text("mine")

    monkeypatch.setattr(resource, "checked_chunks", checked)
    ran = run("download", completed, "lease.pdf")
    assert (ran.code, ran.out, target.read_text()) == (2, "", "mine")
    assert "lease-signed.pdf' already exists" in ran.err
    assert run("download", completed, "lease.pdf", "--force").code == 0
    assert target.read_bytes().startswith(b"%PDF-")


def test_a_link_to_nowhere_is_a_file_that_is_there(run: Run, completed: str, tmp_path: Path) -> None:
    """Somebody put it there for something."""
    (tmp_path / "lease-signed.pdf").symlink_to("elsewhere")
    assert run("download", completed, "lease.pdf").code == 2
    assert (tmp_path / "lease-signed.pdf").is_symlink()


def test_not_signed_yet(run: Run, service: Service, tmp_path: Path) -> None:
    """Is what the service says, for each; no file is left."""
    signing = service.draft("a.pdf", "b.pdf", to=("anna@example.com",), sent=True)
    ran = run("download", signing, "--all", "--json")
    assert (ran.code, {line["error"]["type"] for line in ran.lines}) == (1, {"NotYetSigned"})
    assert list(tmp_path.iterdir()) == []


def test_to_standard_output(completed: str, service: Service, tmp_path: Path) -> None:
    """The PDF and nothing else; not into a terminal."""
    ran = subprocess.run(
        [*COMMAND, "download", completed, "lease.pdf", "--output", "-"],
        env={**os.environ, **service.environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout.startswith(b"%PDF-")
    assert ran.stdout.rstrip().endswith(b"%%EOF")
    shown = screen("download", completed, "lease.pdf", "--output", "-", environment=service.environment)
    assert shown.code == 2
    assert "a PDF is nothing for a terminal" in shown.text


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("lease.pdf", "lease"),
        ("Lease 2031.PDF", "Lease 2031"),
        ("Båthus", "Båthus"),
        ("../../etc/passwd", "passwd"),
        ("/etc/cron.d/x.pdf", "x"),
        ("C:\\Windows\\evil.pdf", "evil"),
        ("..", ""),
        ("", ""),
        (".pdf", "pdf"),
        (".bashrc", "bashrc"),
        ("-rf.pdf", "rf"),
        ("folder/", "folder"),
        ("a\nb\x00c\x1b[31m", "a_b_c_[31m"),
        ("fdp\u202efdp.exe.pdf", "fdp_fdp.exe"),
        ('a<b>c:d"e|f?g*h', "a_b_c_d_e_f_g_h"),
        ("CON.pdf", "_CON"),
        ("com1.txt", "_com1.txt"),
        ("x" * 300 + ".pdf", "x" * 180),
        ("å" * 200, "å" * 90),
        ("a\udcffb.pdf", "a_b"),
    ],
)
def test_names_from_the_service_make_no_path(name: str, stem: str) -> None:
    """What is left is a plain name in the folder that the user named."""
    assert safe_stem(name) == stem
    (made,) = _names([Document("doc-1", name)])
    assert Path(made).name == made
    assert re.fullmatch(r"[^/\\\x00-\x1f]+-signed\.pdf", made)


def test_every_document_has_a_name_of_its_own() -> None:
    """Also where the names are the same but for their case, or there are none."""
    documents = [Document("1", "Lease.pdf"), Document("2", "lease"), Document("3", "x/lease.pdf"), Document("/", "..")]
    names = ["Lease-signed.pdf", "lease-signed-2.pdf", "lease-signed-3.pdf", "document-signed.pdf"]
    assert list(_names(documents)) == names
    assert list(_names([Document("doc-1", "")])) == ["doc-1-signed.pdf"]


def test_a_download_is_seen_on_a_terminal(completed: str, service: Service, tmp_path: Path) -> None:
    """A bar while it lasts; through a pipe there is none."""
    output = ("--output", str(tmp_path / "signed"), "--force")
    shown = screen("download", completed, "--all", *output, environment=service.environment)
    assert (shown.code, "Downloading" in shown.text) == (0, True)
    ran = piped("download", completed, "--all", *output, environment=service.environment)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_results_go_to_a_file_while_a_terminal_shows_the_bar(service: Service, tmp_path: Path, completed: str) -> None:
    """Standard output is not the bar's; failures are shown above it, whole."""
    script = f"{sys.executable} -c 'from signing_async.cli import main; main()' download {completed} --all > results"
    terminal = Terminal("-c", script, command=("/bin/bash",), cwd=tmp_path, environment=service.environment)
    shown = terminal.end()
    assert (shown.code, "Downloading" in shown.text) == (0, True)
    assert sorted((tmp_path / "results").read_text().splitlines()) == ["inventory-signed.pdf", "lease-signed.pdf"]
    assert "inventory-signed.pdf" not in shown.text
