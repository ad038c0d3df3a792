"""`upload` and `download`."""

from __future__ import annotations

import importlib.util
import json
import os
import stat
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.service import Service, listening
from tests.cli.terminal import COMMAND, ROOT, screen
from tests.pdfs import make_pdf


@pytest.fixture
def completed(service: Service) -> str:
    """Return the id of a completed signing with two documents."""
    signing = service.draft("lease.pdf", "inventory.pdf", to=("anna@example.com",), sent=True)
    service.call(service.sandbox.complete(signing))
    return signing


def test_upload_prints_a_line_with_the_document_id_for_each_file(run: Run, service: Service, tmp_path: Path) -> None:
    (tmp_path / "lease.pdf").write_bytes(make_pdf(text="lease"))
    (tmp_path / "inventory.pdf").write_bytes(make_pdf(text="inventory"))
    signing = service.draft()
    ran = run("upload", signing, "lease.pdf", "inventory.pdf")
    assert (ran.code, ran.err) == (0, "")
    ids = {line.split("  ")[1]: line.split("  ")[0] for line in ran.out.splitlines()}
    for name, document in ids.items():
        assert service.do(service.sandbox.document_bytes, document) == (tmp_path / name).read_bytes()
    (facts,) = run("upload", service.draft(), str(tmp_path / "lease.pdf"), "--json").lines
    assert (facts["file"], facts["name"]) == (str(tmp_path / "lease.pdf"), "lease.pdf")


def test_failed_upload_does_not_stop_the_others_and_sets_the_exit_code(
    run: Run, service: Service, tmp_path: Path
) -> None:
    (tmp_path / "lease.pdf").write_bytes(make_pdf())
    (tmp_path / "notes.txt").write_text("no PDF at all")
    signing = service.draft()
    ran = run("upload", signing, "none.pdf", "notes.txt", "lease.pdf")
    assert ran.code == 1
    assert ran.out.endswith("  lease.pdf\n")
    assert "Error: cannot open 'none.pdf'" in ran.err
    assert "Error: notes.txt: " in ran.err
    assert ran.err.endswith("1 uploaded, 2 failed.\n")
    assert len(service.do(service.sandbox.documents, signing)) == 1
    ran = run("upload", signing, "notes.txt", "--json")
    assert (ran.code, ran.lines[0]["error"]["reason"]) == (2, "not_pdf")


def test_file_that_the_draft_already_holds_is_uploaded_only_with_again(
    run: Run, service: Service, tmp_path: Path
) -> None:
    (tmp_path / "lease.pdf").write_bytes(make_pdf(text="lease"))
    (tmp_path / "inventory.pdf").write_bytes(make_pdf(text="inventory"))
    signing = service.draft()
    held = run("upload", signing, "lease.pdf").out.split("  ")[0]
    ran = run("upload", signing, "lease.pdf", "inventory.pdf")
    assert (ran.code, ran.err) == (0, "1 uploaded, 1 already there.\n")
    assert ran.out.startswith(f"{held}  lease.pdf  (already there)\n")
    assert ran.out.endswith("  inventory.pdf\n")
    ran = run("upload", signing, "lease.pdf", "inventory.pdf", "--json")
    assert (ran.code, [line["already_there"] for line in ran.lines]) == (0, [True, True])
    assert len(service.do(service.sandbox.documents, signing)) == 2
    assert run("upload", signing, "lease.pdf", "--again").code == 0
    assert len(service.do(service.sandbox.documents, signing)) == 3


def test_download_all_creates_the_folder_and_prints_the_paths(
    run: Run, completed: str, tmp_path: Path, service: Service
) -> None:
    ran = run("download", completed, "--all", "--output", "signed/here")
    assert (ran.code, ran.err) == (0, "")
    assert sorted(ran.out.splitlines()) == ["signed/here/inventory-signed.pdf", "signed/here/lease-signed.pdf"]
    for line in run("download", completed, "--all", "--json", "--output", "again").lines:
        content = Path(line["path"]).read_bytes()
        assert (len(content), content[:5]) == (line["size"], b"%PDF-")


def test_download_by_name_or_id_to_a_file_or_folder(run: Run, completed: str, tmp_path: Path) -> None:
    assert run("download", completed, "lease.pdf").out == "lease-signed.pdf\n"
    assert run("download", completed, "lease.pdf", "--output", "kept.pdf").out == "kept.pdf\n"
    (facts,) = run("download", completed, "lease.pdf", "--output", f"{tmp_path}/new/", "--json").lines
    assert facts["path"] == f"{tmp_path}/new/lease-signed.pdf"
    ran = run("download", completed, facts["id"], facts["id"], "lease.pdf", "-o", ".", "--force")
    assert ran.out == "lease-signed.pdf\n"
    assert stat.S_ISREG((tmp_path / "kept.pdf").stat().st_mode)


def test_output_with_all_is_always_a_folder(run: Run, service: Service, tmp_path: Path) -> None:
    signing = service.draft("only.pdf", to=("anna@example.com",), sent=True)
    service.call(service.sandbox.complete(signing))
    assert run("download", signing, "--all", "--output", "signed").out == "signed/only-signed.pdf\n"
    (tmp_path / "file").write_text("mine")
    ran = run("download", signing, "--all", "--output", "file")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "Error: --output: could not create the folder 'file': File exists\n"
    assert (tmp_path / "file").read_text() == "mine"


def test_verify_keeps_only_sound_files_and_exits_with_7(run: Run, service: Service, tmp_path: Path) -> None:
    signing = service.draft("lease.pdf", to=("anna@example.com",), sent=True)
    service.call(service.sandbox.complete(signing))
    assert run("download", signing, "--verify", "--output", "sound.pdf").code == 0
    (document,) = service.do(service.sandbox.documents, signing)
    sealed = service.do(service.sandbox.service.signed_path, signing, document.id)
    sealed.write_bytes(sealed.read_bytes() + b"x")
    ran = run("download", signing, "--verify", "--output", "changed.pdf")
    assert (ran.code, ran.out) == (7, "")
    assert "the sealed file is not sound" in ran.err
    assert not (tmp_path / "changed.pdf").exists()
    assert run("download", signing).code == 0
    ran = run("download", signing, "--verify")
    assert (ran.code, ran.out) == (7, "")
    assert "lease-signed.pdf already exists and is not sound: " in ran.err


def test_verify_is_refused_for_standard_output_and_without_its_extra(
    run: Run, completed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = run("download", completed, "lease.pdf", "--verify", "--output", "-")
    assert ran.code == 2
    assert "--output -: not with --verify" in ran.err
    find_spec = importlib.util.find_spec
    monkeypatch.delitem(sys.modules, "signing_async.sealed", raising=False)
    monkeypatch.delattr("signing_async.sealed", raising=False)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "pyhanko" else find_spec(name, *rest)
    )
    ran = run("download", completed, "lease.pdf", "--verify")
    assert ran.code == 1
    assert ran.err == "Error: signing_async.sealed needs pyHanko: pip install 'signing-async[verify]'\n"


def test_ambiguous_or_unknown_document_is_refused_before_any_download(
    run: Run, service: Service, completed: str
) -> None:
    twice = service.draft("a.pdf", "a.pdf", to=("anna@example.com",), sent=True)
    for arguments, message in (
        ([completed], "has 2 documents: use --all, or name one of 'lease.pdf', 'inventory.pdf'"),
        ([completed, "x.pdf"], "no document of the signing with the id or name 'x.pdf'"),
        ([twice, "a.pdf"], "2 documents of the signing with the id or name 'a.pdf': use an id"),
        ([service.draft()], "the signing has no documents"),
        ([completed, "lease.pdf", "--all"], "use either DOCUMENTS or --all, not both"),
        ([completed, "--all", "--output", "-"], "only one document can go to standard output, got 2"),
        (
            [completed, "--all", "--output", "/dev/null/x"],
            "--output: could not create the folder '/dev/null/x': Not a directory",
        ),
    ):
        ran = run("download", *arguments)
        assert (ran.code, ran.out) == (2, ""), arguments
        assert message in ran.err
    assert service.do(service.sandbox.requests_of, "documents.download_signed") == []


def test_existing_file_is_kept_without_force_and_others_are_downloaded(
    run: Run, completed: str, tmp_path: Path, service: Service
) -> None:
    (tmp_path / "lease-signed.pdf").write_text("mine")
    ran = run("download", completed, "--all")
    assert (ran.code, ran.err) == (0, "1 downloaded, 1 already there.\n")
    assert sorted(ran.out.splitlines()) == ["inventory-signed.pdf", "lease-signed.pdf  (already there)"]
    assert (tmp_path / "lease-signed.pdf").read_text() == "mine"
    again = run("download", completed, "--all", "--json")
    assert (again.code, [line["already_there"] for line in again.lines]) == (0, [True, True])
    assert len(service.do(service.sandbox.requests_of, "documents.download_signed")) == 1
    ran = run("download", completed, "--all", "--verify")
    assert ran.code == 1
    assert ran.err.startswith("Error: lease.pdf: ")
    assert ran.out == "inventory-signed.pdf  (already there)\n"
    ran = run("download", completed, "lease.pdf", "--output", "lease-signed.pdf")
    assert ran.code == 2
    assert "Error: lease.pdf: lease-signed.pdf already exists: use --force to replace it\n" in ran.err
    assert run("download", completed, "lease.pdf", "--force").code == 0
    assert (tmp_path / "lease-signed.pdf").read_bytes().startswith(b"%PDF-")


def test_rejected_token_ends_the_downloads(run: Run, service: Service) -> None:
    names = [f"{number}.pdf" for number in range(12)]
    signing = service.draft(*names, to=("anna@example.com",), sent=True)
    service.call(service.sandbox.complete(signing))
    service.do(service.sandbox.faults.add, "documents.download_signed", "expired-token", times=None)
    ran = run("download", signing, "--all")
    assert (ran.code, ran.out) == (4, "")
    assert "HTTP 401" in ran.err
    assert len(service.do(service.sandbox.requests_of, "documents.download_signed")) <= 4


def test_download_to_standard_output_is_the_pdf_alone_and_refused_on_a_terminal(
    completed: str, service: Service, tmp_path: Path
) -> None:
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
    assert "nor to a terminal" in shown.text


NAMES = {
    "lease.pdf": "lease",
    "Lease 2031.PDF": "Lease 2031",
    "Lease.pdf": "Lease-signed-2",
    "../../etc/passwd": "passwd",
    "C:\\Windows\\evil.pdf": "evil",
    "..": "d5",
    ".bashrc": "bashrc",
    "-rf.pdf": "rf",
    "a\nb\x1b[31m": "a_b_[31m",
    "fdp\u202efdp.exe.pdf": "fdp_fdp.exe",
    'a<b>c:d"e|f?g*h': "a_b_c_d_e_f_g_h",
    "CON.pdf": "_CON",
    "aux.x": "_aux.x",
    "../": "d13",
    "å" * 200: "å" * 90,
}


class Named(BaseHTTPRequestHandler):
    """A service whose documents have names that must not become paths."""

    def do_GET(self) -> None:
        documents = [{"id": f"d{number}", "name": name} for number, name in enumerate(NAMES)]
        body = json.dumps({"id": "s", "name": "Lease", "documents": documents}).encode()
        if self.path.endswith("download-signed"):
            body = make_pdf()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


def test_names_from_the_service_become_plain_different_file_names(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening(Named) as origin:
        monkeypatch.setenv("SIGNING_BASE_URL", origin)
        ran = run("download", "s", "--all", "--output", "signed")
    assert ran.code == 0, ran.err
    expected = {f"{stem}-signed.pdf" for stem in NAMES.values()} - {"Lease-signed-2-signed.pdf"}
    expected |= {"Lease-signed-2.pdf"}
    assert {path.name for path in (tmp_path / "signed").iterdir()} == expected


def test_unsealed_documents_are_reported_once(run: Run, service: Service) -> None:
    signing = service.draft("lease.pdf", "inventory.pdf", to=("anna@example.com",), sent=True)
    ran = run("download", signing, "--all")
    names = "lease.pdf, inventory.pdf"
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith(f"Error: not sealed yet, since not all recipients have signed: {names}\n")
    assert "404" not in ran.err
    assert [line["error"]["type"] for line in run("download", signing, "--all", "--json").lines] == ["NotYetSigned"] * 2


def test_all_documents_are_downloaded_side_by_side(run: Run, service: Service) -> None:
    signing = service.draft(*(f"{number}.pdf" for number in range(4)), to=("anna@example.com",), sent=True)
    service.call(service.sandbox.complete(signing))
    service.do(service.sandbox.faults.add, "documents.download_signed", "slow", None, seconds=1)
    began = time.monotonic()
    assert run("download", signing, "--all").code == 0
    assert 1 <= time.monotonic() - began < 3


def test_terminal_shows_a_bar_with_the_bytes_of_an_upload(service: Service, tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(make_pdf(3_000_000))
    shown = screen("upload", service.draft(), str(tmp_path / "a.pdf"), environment=service.environment)
    assert (shown.code, b"Uploading" in shown.raw) == (0, True)
