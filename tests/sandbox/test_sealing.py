"""Sealing: independent validators accept the result, for any readable original."""

from __future__ import annotations

import io
import os
import random
import re
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pikepdf
import pytest

from signing_async.sandbox import sealing
from signing_async.sandbox.authority import LEVELS, Level
from signing_async.sandbox.sealing import Authority, SealingFailed, seal
from tests import pdfs
from tests.full_disk import full_disk
from tests.sandbox.seals import WHEN, accepts, make_panel

ORIGINALS = {
    "small": pdfs.make_pdf,
    "large": lambda: pdfs.make_pdf(2_000_000, pages=120),
    "nested, rotated, odd boxes": pdfs.nested_pages,
    "a form": pdfs.with_form,
    "an empty signature field": pdfs.with_signature_field,
    "a form that is none": lambda: pdfs.with_catalog(b"/AcroForm[]"),
    "a form without fields": lambda: pdfs.with_catalog(b"/AcroForm<</Fields 6 0 R>>", {6: b"(none)"}),
    "the seal's name taken": lambda: pdfs.with_signature_field(field=pdfs.FIELD.replace(b"(seal)", b"(SandboxSeal)")),
    "usage rights": pdfs.with_usage_rights,
    "reportlab": pdfs.by_reportlab,
    "fpdf2": pdfs.by_fpdf2,
    "linearized": lambda: pdfs.rewritten(pdfs.by_reportlab(), linearize=True),
    "object streams": lambda: pdfs.rewritten(pdfs.by_reportlab(), object_streams=True),
    "linearized object streams": lambda: pdfs.rewritten(pdfs.by_reportlab(), object_streams=True, linearize=True),
    "a cross-reference stream": pdfs.xref_stream_pdf,
    "a predicted cross-reference stream": lambda: pdfs.xref_stream_pdf(predictor=True),
    "hybrid": pdfs.hybrid_pdf,
    "updated": lambda: pdfs.update(pdfs.make_pdf(), {5: pdfs.stream_object(b"")}, size=7),
    "words after the end": lambda: pdfs.decoys()["words after the end"],
    "words in a content stream": lambda: pdfs.decoys()["words in a content stream"],
    **{name: lambda name=name: pdfs.damaged()[name] for name in pdfs.damaged()},
}


@pytest.mark.parametrize("make", ORIGINALS.values(), ids=ORIGINALS)
def test_seal_keeps_the_original_bytes_and_adds_a_page_and_validates(
    make: Callable[[], bytes], sealed: Callable[..., bytes], authority: Authority
) -> None:
    """The original comes first and unchanged, one page is added, and pyHanko's validator is content."""
    data = make()
    result = sealed(data)
    assert result.startswith(data)
    assert accepts(result, authority)
    with pikepdf.open(io.BytesIO(data)) as before, pikepdf.open(io.BytesIO(result)) as after:
        assert len(after.pages) == len(before.pages) + 1
        assert not after.get_warnings()
        last = after.pages[-1]
        assert [int(edge) for edge in last.mediabox] == [0, 0, 595, 842]
        assert int(last.obj["/Rotate"]) == 0
        assert "/UserUnit" not in last.obj
        assert last.obj["/Parent"].objgen == after.Root["/Pages"].objgen
        assert "/UR3" not in after.Root.get("/Perms", {})


@pytest.mark.skipif(not pdfs.have("pdfsig", "certutil", "qpdf"), reason="needs poppler-utils, libnss3-tools and qpdf")
@pytest.mark.parametrize("make", ORIGINALS.values(), ids=ORIGINALS)
def test_poppler_and_qpdf_accept_the_seal(
    make: Callable[[], bytes], sealed: Callable[..., bytes], nss: Path, tmp_path: Path
) -> None:
    sealed(make())
    path = tmp_path / "documents" / "sealed.pdf"
    said = pdfs.run("pdfsig", "-nssdir", nss, path).stdout
    assert "Signature is Valid." in said
    assert "Certificate is Trusted." in said
    assert "Total document signed" in said
    checked = pdfs.run("qpdf", "--check", path)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def by_pikepdf(*, direct: bool) -> bytes:
    """Return a form written by pikepdf, in the catalog or as an indirect object."""
    pdf = pikepdf.new()
    pdf.add_blank_page(page_size=(595, 842))
    field = pikepdf.Dictionary(
        Type=pikepdf.Name.Annot,
        Subtype=pikepdf.Name.Widget,
        FT=pikepdf.Name.Tx,
        T=pikepdf.String("remark"),
        V=pikepdf.String("none"),
        Rect=[72, 600, 300, 620],
        P=pdf.pages[0].obj,
    )
    widget = pdf.make_indirect(field)
    pdf.pages[0].Annots = pdf.make_indirect(pikepdf.Array([widget]))
    fields = pikepdf.Array([widget])
    form = pikepdf.Dictionary(Fields=fields if direct else pdf.make_indirect(fields), DA=pikepdf.String("/F1 12 Tf"))
    pdf.Root.AcroForm = form if direct else pdf.make_indirect(form)
    out = io.BytesIO()
    pdf.save(out)
    return out.getvalue()


FORMS: dict[str, tuple[Callable[[], bytes], list[str]]] = {
    "by hand": (pdfs.with_form, ["remark"]),
    "an empty signature field": (pdfs.with_signature_field, ["seal"]),
    "reportlab": (pdfs.by_reportlab, ["remark0", "remark1", "remark2"]),
    "reportlab, object streams": (
        lambda: pdfs.rewritten(pdfs.by_reportlab(), object_streams=True),
        ["remark0", "remark1", "remark2"],
    ),
    "fpdf2, without a form": (pdfs.by_fpdf2, []),
    "pikepdf": (lambda: by_pikepdf(direct=False), ["remark"]),
    "pikepdf, in the catalog": (lambda: by_pikepdf(direct=True), ["remark"]),
}


@pytest.mark.parametrize(("make", "names"), FORMS.values(), ids=FORMS)
def test_fields_of_a_form_are_kept_with_their_values(
    make: Callable[[], bytes], names: list[str], sealed: Callable[..., bytes]
) -> None:
    data = make()
    with pikepdf.open(io.BytesIO(data)) as before, pikepdf.open(io.BytesIO(sealed(data))) as after:
        assert [str(field.T) for field in after.Root.AcroForm.Fields] == [*names, "SandboxSeal"]
        for old, new in zip(
            before.Root.get("/AcroForm", {}).get("/Fields", []), after.Root.AcroForm.Fields, strict=False
        ):
            assert old.unparse() == new.unparse()
        for key in before.Root.get("/AcroForm", pikepdf.Dictionary()).keys() - {"/Fields", "/SigFlags"}:
            assert after.Root.AcroForm[key].unparse() == before.Root.AcroForm[key].unparse()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["small", "a form", "reportlab", "object streams", "a shifted table", "hybrid"])
def test_every_pades_level_adds_to_the_one_before(
    level: Level, name: str, tmp_path: Path, authority: Authority
) -> None:
    import click.testing
    from pyhanko.cli import cli_root

    source, target, roots = tmp_path / "a.pdf", tmp_path / "b.pdf", tmp_path / "roots.pem"
    source.write_bytes(ORIGINALS[name]())
    roots.write_bytes(authority.certificate_pem)
    seal(source, target, panel=make_panel("Anna"), authority=authority, when=datetime.now(UTC), level=level)
    data = target.read_bytes()
    assert data.startswith(source.read_bytes())
    assert (b"/DSS" in data, b"/DocTimeStamp" in data) == (level in ("B-LT", "B-LTA"), level == "B-LTA")
    options = ["--soft-revocation-check", "--no-strict-syntax", "--trust-replace", "--trust", str(roots)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what pyHanko's next version will drop
        ran = click.testing.CliRunner().invoke(cli_root, ["sign", "validate", *options, str(target)])
    assert ran.exit_code == 0, ran.output
    assert ("TIMESTAMP_TOKEN<INTACT:TRUSTED>" in ran.output) == (level != "B-B")
    assert ("EXTENDED_WITH_LTA_UPDATES" in ran.output) == (level in ("B-LT", "B-LTA"))


@pytest.mark.parametrize("absolute", [False, True])
def test_bytes_before_the_header_are_not_sealed(
    absolute: bool, sealed: Callable[..., bytes], authority: Authority
) -> None:
    junk = b"HTTP/1.1 200 OK\r\n\r\n"
    data = pdfs.prefixed(junk, absolute=absolute)
    result = sealed(data)
    assert result.startswith(data.removeprefix(junk))
    assert accepts(result, authority)


SLOWLY = """
import sys, threading, time
from pathlib import Path
from asn1crypto import algos, core
from signing_async.sandbox.authority import Authority
from signing_async.sandbox.sealing import seal
from tests.sandbox.seals import WHEN, make_panel

class Slow(dict):
    def items(self):
        for item in super().items():
            time.sleep(0.01)
            yield item

folder = Path(sys.argv[1])
authority = Authority.open(folder, WHEN)
algos.DigestAlgorithmId._map = Slow(algos.DigestAlgorithmId._map)
algos.DigestAlgorithmId._reverse_map = None
core._SETUP_CLASSES.pop(algos.DigestAlgorithmId, None)
started = threading.Barrier(4)

def work(number):
    started.wait()
    seal(folder / "a.pdf", folder / f"{number}.pdf", panel=make_panel("Anna"), authority=authority, when=WHEN)

threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_first_seals_of_a_process_may_be_made_at_the_same_time(tmp_path: Path) -> None:
    """asn1crypto builds the tables of its classes at their first use, and threads would see half of one."""
    (tmp_path / "a.pdf").write_bytes(pdfs.make_pdf())
    command = [sys.executable, "-c", SLOWLY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert all((tmp_path / f"{number}.pdf").exists() for number in range(4))


def test_changed_byte_invalidates_the_seal(sealed: Callable[..., bytes], authority: Authority) -> None:
    result = sealed(pdfs.by_reportlab())
    assert accepts(result, authority)
    found = re.findall(rb"/ByteRange ?\[(\d+) (\d+) (\d+) (\d+)", result)
    start, first, second, rest = map(int, found[-1])
    assert (start, second + rest) == (0, len(result))
    edges = [0, first - 1, second, len(result) - 1]
    pick = random.Random(7).sample([*range(first), *range(second, len(result))], 60)
    for at in edges + pick:
        changed = bytearray(result)
        changed[at] ^= 1
        assert not accepts(bytes(changed), authority), at


def test_appended_update_is_not_covered_by_the_seal(sealed: Callable[..., bytes], authority: Authority) -> None:
    result = sealed(pdfs.make_pdf())
    later = pdfs.update(result, {5: pdfs.stream_object(b"BT ET")}, size=40)
    assert not accepts(later, authority)


def test_seal_field_never_takes_the_name_of_an_existing_field(sealed: Callable[..., bytes]) -> None:
    data = pdfs.with_signature_field(field=pdfs.FIELD.replace(b"(seal)", b"(SandboxSeal)"))
    with pikepdf.open(io.BytesIO(sealed(data))) as pdf:
        fields = list(pdf.Root["/AcroForm"]["/Fields"])
        assert [str(field["/T"]) for field in fields] == ["SandboxSeal", "SandboxSeal2"]
        assert int(pdf.Root["/AcroForm"]["/SigFlags"]) == 3
        assert "/V" not in fields[0]
        assert "/V" in fields[1]


def test_signature_has_the_sandboxs_time_and_validates_years_ahead(
    sealed: Callable[..., bytes], authority: Authority
) -> None:
    later = WHEN + timedelta(days=9 * 365)
    result = sealed(pdfs.make_pdf(), when=later)
    assert accepts(result, authority)
    with pikepdf.open(io.BytesIO(result)) as pdf:
        assert str(pdf.Root["/AcroForm"]["/Fields"][0]["/V"]["/M"]).startswith("D:20350302050607")


BEYOND_HELP = {
    "no PDF": b"Dear Sir or Madam",
    "nothing": b"",
    "no page tree": pdfs.assemble({1: b"<</Type/Catalog>>"}),
    "pages in a circle": pdfs.hostile()["pages in a circle"],
    "encrypted": pdfs.encrypted(pdfs.make_pdf(), user="secret"),
}


@pytest.mark.parametrize("name", BEYOND_HELP)
def test_unrepairable_document_is_one_error_and_leaves_no_file(name: str, tmp_path: Path, authority: Authority) -> None:
    source, target = tmp_path / "a.pdf", tmp_path / "b.pdf"
    source.write_bytes(BEYOND_HELP[name])
    target.write_bytes(b"before")
    message = (
        r"The document 'Agreement\.pdf' cannot be sealed: the PDF is damaged \(.+\)\. Repair it, .* upload it again\."
    )
    with pytest.raises(SealingFailed, match=f"^{message}$") as caught:
        seal(source, target, panel=make_panel("Anna"), authority=authority, when=WHEN)
    assert str(tmp_path) not in str(caught.value)
    assert target.read_bytes() == b"before"
    assert sorted(tmp_path.iterdir()) == [source, target]


@pytest.mark.parametrize(
    "name", ["fields in a circle", "a field that is its own value", "deep nesting", "a compressed bomb"]
)
def test_hostile_file_that_is_accepted_is_sealed(name: str, sealed: Callable[..., bytes], authority: Authority) -> None:
    result = sealed(pdfs.hostile()[name])
    with pikepdf.open(io.BytesIO(result)) as pdf:
        assert len(pdf.pages) == 2
    assert accepts(result, authority) or name == "fields in a circle"  # in which pyHanko's validator loses itself


@pytest.mark.skipif(
    not hasattr(pikepdf.settings, "set_qpdf_limits"), reason="qpdf before pikepdf 10.14 does not repair the count"
)
def test_inconsistent_page_tree_is_rebuilt(sealed: Callable[..., bytes], authority: Authority) -> None:
    data = pdfs.make_pdf(pages=2).replace(b"/Count 2", b"/Count(x")  # as long as before: offsets stay right
    assert pdfs.make_pdf(pages=2) != data
    data = data.replace(b"/Count(x>>", b"/Count/x>>")
    result = sealed(data)
    assert result.startswith(data)
    assert accepts(result, authority)


def test_seal_that_loses_pages_is_an_error(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "_append_pages", lambda writer, drawn: None)
    source = tmp_path / "a.pdf"
    source.write_bytes(pdfs.make_pdf())
    with pytest.raises(SealingFailed, match="page tree"):
        seal(source, tmp_path / "b.pdf", panel=make_panel("Anna"), authority=authority, when=WHEN)
    assert list(tmp_path.iterdir()) == [source]


# The second is enough for a repair of the file, which is not tried.
@pytest.mark.parametrize("free", [-100, 6000], ids=["for the copy", "for the seal"])
def test_full_disk_is_an_os_error_and_leaves_no_file(free: int, tmp_path: Path, authority: Authority) -> None:
    source = tmp_path / "a.pdf"
    source.write_bytes(pdfs.make_pdf())
    with full_disk(source.stat().st_size + free), pytest.raises(OSError, match="File too large"):
        seal(source, tmp_path / "b.pdf", panel=make_panel("Anna"), authority=authority, when=WHEN)
    assert list(tmp_path.iterdir()) == [source]


def test_importing_the_modules_imports_no_heavy_libraries() -> None:
    code = (
        "import sys, signing_async.sandbox.sealing, signing_async.sandbox.inspection\n"
        "print([name for name in ('pyhanko', 'pikepdf', 'cryptography', 'fontTools') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_sealed_file_is_synced_before_it_is_renamed(
    sealed: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def note_sync(descriptor: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def note_replace(path: Path, target: Path) -> Path:
        steps.append("replace")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    sealed(pdfs.make_pdf())
    assert steps == ["file", "replace", "folder"]
