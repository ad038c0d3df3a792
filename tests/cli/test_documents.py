"""`upload` and `download`."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.cli.conftest import Run
from tests.cli.service import Service, listening
from tests.cli.terminal import piped, screen
from tests.pdfs import make_pdf
from tests.sealed.pdfs import judge_here

DOWNLOAD = "documents.download_signed"


@pytest.fixture(autouse=True)
def files(run: Run) -> None:
    """Write files into the folder where the command runs."""
    Path("lease.pdf").write_bytes(make_pdf(text="lease"))
    Path("inventory.pdf").write_bytes(make_pdf(text="inventory"))
    Path("notes.txt").write_text("no PDF at all")


@pytest.fixture
def completed(service: Service) -> str:
    """Return the id of a completed signing with two documents."""
    return service.draft("lease.pdf", "inventory.pdf", to=("anna@example.com",), completed=True)


def test_upload_prints_a_line_with_the_document_id_for_each_file(run: Run, service: Service) -> None:
    """A file that the draft already holds is uploaded only with --again."""
    signing = service.draft()
    ran = run("upload", signing, "lease.pdf")
    assert (ran.code, ran.err) == (0, "")
    held, _, name = ran.out.strip().partition("  ")
    assert service.do(service.sandbox.document_bytes, held) == Path(name).read_bytes()
    ran = run("upload", signing, "lease.pdf", "inventory.pdf")
    assert (ran.code, ran.err) == (0, "1 uploaded, 1 already there.\n")
    assert ran.out.startswith(f"{held}  lease.pdf  (already there)\n")
    assert ran.out.endswith("  inventory.pdf\n")
    ran = run("upload", signing, "lease.pdf", str(Path("inventory.pdf").absolute()), "--json")
    assert (ran.code, [line["already_there"] for line in ran.lines]) == (0, [True, True])
    assert ran.lines[1]["file"] == str(Path("inventory.pdf").absolute())
    assert ran.lines[1]["name"] == "inventory.pdf"
    assert len(service.do(service.sandbox.documents, signing)) == 2
    assert run("upload", signing, "lease.pdf", "--again").code == 0
    assert len(service.do(service.sandbox.documents, signing)) == 3


def test_failed_upload_does_not_stop_the_others_and_sets_the_exit_code(run: Run, service: Service) -> None:
    signing = service.draft()
    ran = run("upload", signing, "none.pdf", "notes.txt", "lease.pdf")
    assert (ran.code, ran.out.endswith("  lease.pdf\n")) == (1, True)
    assert "Error: cannot open 'none.pdf'" in ran.err
    assert "Error: notes.txt: " in ran.err
    assert ran.err.endswith("1 uploaded, 2 failed.\n")
    assert len(service.do(service.sandbox.documents, signing)) == 1
    ran = run("upload", signing, "notes.txt", "--json")
    assert (ran.code, ran.lines[0]["error"]["reason"]) == (2, "not_pdf")


def test_terminal_shows_a_bar_with_the_bytes_of_an_upload(service: Service, tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(make_pdf(3_000_000))
    shown = screen("upload", service.draft(), str(tmp_path / "a.pdf"), environment=service.environment)
    assert (shown.code, b"Uploading" in shown.raw) == (0, True)


def test_download_by_name_or_id_to_a_file_or_folder(run: Run, service: Service, completed: str, tmp_path: Path) -> None:
    """With --all, the output is always a folder."""
    assert run("download", completed, "lease.pdf").out == "lease-signed.pdf\n"
    assert run("download", completed, "lease.pdf", "--output", "kept.pdf").out == "kept.pdf\n"
    assert Path("kept.pdf").is_file()
    (facts,) = run("download", completed, "lease.pdf", "--output", f"{tmp_path}/new/", "--json").lines
    content = Path(facts["path"]).read_bytes()
    assert facts["path"] == f"{tmp_path}/new/lease-signed.pdf"
    assert (len(content), content[:5]) == (facts["size"], b"%PDF-")
    ran = run("download", completed, facts["id"], facts["id"], "lease.pdf", "-o", ".", "--force")
    assert ran.out == "lease-signed.pdf\n"
    signing = service.draft("only.pdf", to=("anna@example.com",), completed=True)
    assert run("download", signing, "--all", "--output", "signed").out == "signed/only-signed.pdf\n"
    Path("file").write_text("mine")
    ran = run("download", signing, "--all", "--output", "file")
    words = "Error: --output: could not create the folder 'file': File exists\n"
    assert (ran.code, ran.out, ran.err, Path("file").read_text()) == (2, "", words, "mine")


def test_verify_keeps_only_sound_files_and_exits_with_7(
    run: Run, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signing_async.sealed.run_worker", judge_here)
    signing = service.draft("lease.pdf", to=("anna@example.com",), completed=True)
    assert run("download", signing, "--verify", "--output", "sound.pdf").code == 0
    (document,) = service.do(service.sandbox.documents, signing)
    sealed = service.do(service.sandbox.service.signed_path, signing, document.id)
    sealed.write_bytes(sealed.read_bytes() + b"x")
    ran = run("download", signing, "--verify", "--output", "changed.pdf")
    assert (ran.code, ran.out) == (7, "")
    assert "the sealed file is not sound" in ran.err
    assert not Path("changed.pdf").exists()
    assert run("download", signing).code == 0
    ran = run("download", signing, "--verify")
    assert (ran.code, ran.out) == (7, "")
    assert "the sealed file is not sound" in ran.err


def test_verify_without_its_extra_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.delitem(sys.modules, "signing_async.sealed", raising=False)
    monkeypatch.delattr("signing_async.sealed", raising=False)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "pyhanko" else find_spec(name, *rest)
    )
    ran = run("download", "x", "lease.pdf", "--verify")
    assert (ran.code, ran.err) == (
        1,
        "Error: signing_async.sealed needs pyHanko: pip install 'signing-async[verify]'\n",
    )


def test_ambiguous_or_unknown_document_is_refused_before_any_download(
    run: Run, service: Service, completed: str
) -> None:
    twice = service.draft("a.pdf", "a.pdf", to=("anna@example.com",), sent=True)
    for arguments, message in (
        ([completed], "has 2 documents: use --all, or name one of 'lease.pdf', 'inventory.pdf'"),
        ([completed, "x.pdf"], "no document of the signing with the id or name 'x.pdf'"),
        ([twice, "a.pdf"], "2 documents of the signing with the id or name 'a.pdf': use an id"),
        ([service.draft()], "the signing has no documents"),
        ([completed, "--all", "--output", "-"], "only one document can go to standard output, got 2"),
    ):
        ran = run("download", *arguments)
        assert (ran.code, ran.out) == (2, ""), arguments
        assert message in ran.err
    assert service.requests_of(DOWNLOAD) == 0


def test_repeated_download_keeps_what_is_there_and_intact_and_downloads_the_rest(
    run: Run, completed: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is not the document, or was changed, is neither counted as the document nor replaced."""
    monkeypatch.setattr("signing_async.sealed.run_worker", judge_here)
    Path("lease-signed.pdf").write_text("mine")
    ran = run("download", completed, "--all")
    assert (ran.code, ran.err) == (0, "")
    assert sorted(ran.out.splitlines()) == ["inventory-signed.pdf", "lease-signed-2.pdf"]
    assert Path("lease-signed.pdf").read_text() == "mine"
    again = run("download", completed, "--all", "--json")
    assert (again.code, [line["already_there"] for line in again.lines]) == (0, [True, True])
    assert {Path(line["path"]).name for line in again.lines} == {"inventory-signed.pdf", "lease-signed-2.pdf"}
    ran = run("download", completed, "--all", "--verify")
    assert (ran.code, ran.err) == (0, "0 downloaded, 2 already there.\n")
    Path("lease-signed-2.pdf").unlink()
    assert run("download", completed, "lease.pdf").out == "lease-signed-2.pdf\n"
    Path("inventory-signed.pdf").write_text("changed")
    ran = run("download", completed, "--all")
    assert (ran.code, ran.err) == (0, "1 downloaded, 1 already there.\n")
    assert sorted(ran.out.splitlines()) == ["inventory-signed-2.pdf", "lease-signed-2.pdf  (already there)"]
    ran = run("download", completed, "lease.pdf", "--output", "lease-signed.pdf")
    assert ran.code == 2
    assert "Error: lease.pdf: lease-signed.pdf already exists: use --force to replace it\n" in ran.err
    assert run("download", completed, "lease.pdf", "--force").out == "lease-signed.pdf\n"
    assert Path("lease-signed.pdf").read_bytes() == Path("lease-signed-2.pdf").read_bytes()
    assert {path.name for path in Path().glob("*-signed*")} == {
        *("lease-signed.pdf", "lease-signed-2.pdf", "inventory-signed.pdf", "inventory-signed-2.pdf")
    }


NAMES_OF_THREE = ("lease-signed.pdf", "lease-signed-2.pdf", "lease-signed-3.pdf")


def test_documents_with_the_same_name_and_id_in_two_signings_are_both_downloaded_and_recognized(run: Run) -> None:
    def respond(request: web.Request) -> Any:
        signing = request.path.split("/")[4]
        if request.path.endswith("download-signed"):
            return make_pdf(text=signing)
        return {"id": signing, "name": "Lease", "documents": [{"id": "1", "name": "lease.pdf"}]}

    with listening(respond) as server:
        for again in (False, True):
            for signing, name in (
                ("s1", "lease-signed.pdf"),
                ("s2", "lease-signed-2.pdf"),
                ("s3", "lease-signed-3.pdf"),
            ):
                ran = run("download", signing, "--all", "--output", "signed", "--json", SIGNING_BASE_URL=server.origin)
                assert (ran.code, ran.lines[0]["already_there"]) == (0, again)
                assert Path(ran.lines[0]["path"]) == Path("signed", name)
                assert Path("signed", name).read_bytes() == make_pdf(text=signing)
    assert {path.name for path in Path("signed").iterdir()} == set(NAMES_OF_THREE)


def test_document_gets_another_name_if_another_process_is_first(run: Run) -> None:
    """A folder that was removed meanwhile is an error."""
    other = Path("signed", "lease-signed.pdf")

    def respond(request: web.Request) -> Any:
        if not request.path.endswith("download-signed"):
            return {"id": "s", "name": "Lease", "documents": [{"id": "d", "name": "lease.pdf"}]}
        if removed:
            shutil.rmtree("signed")
        else:
            other.mkdir(exist_ok=True)
        return make_pdf()

    removed = False
    with listening(respond) as server:
        ran = run("download", "s", "--all", "--output", "signed", SIGNING_BASE_URL=server.origin)
        assert (ran.code, ran.out) == (0, f"{Path('signed', 'lease-signed-2.pdf')}\n")
        assert other.is_dir()
        removed = True
        ran = run("download", "s", "--all", "--output", "signed", SIGNING_BASE_URL=server.origin)
        assert (ran.code, ran.out) == (2, "")


def test_rejected_token_ends_the_downloads(run: Run, service: Service) -> None:
    signing = service.draft(*(f"{number}.pdf" for number in range(8)), to=("anna@example.com",), completed=True)
    service.fault(DOWNLOAD, "expired-token", times=None)
    ran = run("download", signing, "--all")
    assert (ran.code, ran.out, "HTTP 401" in ran.err) == (4, "", True)
    assert service.requests_of(DOWNLOAD) <= 4


def test_download_to_standard_output_is_the_pdf_alone_and_refused_on_a_terminal(
    completed: str, service: Service
) -> None:
    arguments = ("download", completed, "lease.pdf", "--output", "-")
    code, out, _ = piped(*arguments, environment=service.environment, text=False)
    assert (code, out[:5], out.rstrip()[-5:]) == (0, b"%PDF-", b"%%EOF")
    shown = screen(*arguments, environment=service.environment)
    assert (shown.code, "nor to a terminal" in shown.text) == (2, True)


NAMES = {
    "lease.pdf": "lease-signed",
    "Lease 2031.PDF": "Lease 2031-signed",
    "Lease.pdf": "Lease-signed-2",
    "../../etc/passwd": "passwd-signed",
    "C:\\Windows\\evil.pdf": "evil-signed",
    "..": "d5-signed",
    ".bashrc": "bashrc-signed",
    "-rf.pdf": "rf-signed",
    "fdp\u202efdp.exe.pdf": "fdp_fdp.exe-signed",
    'a<b>c:d"e|f?g*h\n\x1b': "a_b_c_d_e_f_g_h__-signed",
    "CON.pdf": "_CON-signed",
    "å" * 200: "å" * 90 + "-signed",
}


def test_all_documents_are_downloaded_side_by_side_under_plain_different_file_names(run: Run) -> None:
    """The server responds to no download before it has received another request."""
    documents = [{"id": f"d{number}", "name": name} for number, name in enumerate(NAMES)]
    two = threading.Barrier(2)

    def respond(request: web.Request) -> Any:
        if not request.path.endswith("download-signed"):
            return {"id": "s", "name": "Lease", "documents": documents}
        two.wait(20)
        return make_pdf()

    with listening(respond) as server:
        ran = run("download", "s", "--all", "--output", "signed/here", SIGNING_BASE_URL=server.origin)
    assert (ran.code, ran.err) == (0, "")
    names = {f"{name}.pdf" for name in NAMES.values()}
    assert {path.name for path in Path("signed/here").iterdir()} == names
    assert set(ran.out.splitlines()) == {f"signed/here/{name}" for name in names}


def test_unsealed_documents_are_reported_once(run: Run, service: Service) -> None:
    signing = service.draft("lease.pdf", "inventory.pdf", to=("anna@example.com",), sent=True)
    ran = run("download", signing, "--all")
    assert (ran.code, ran.out, "404" in ran.err) == (1, "", False)
    names = "lease.pdf, inventory.pdf"
    assert ran.err.startswith(f"Error: not sealed yet, since not all recipients have signed: {names}\n")
    assert [line["error"]["type"] for line in run("download", signing, "--all", "--json").lines] == ["NotYetSigned"] * 2
