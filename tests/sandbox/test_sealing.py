"""Sealed documents hold up before other people's validators, look right, and come from any readable original."""

from __future__ import annotations

import io
import multiprocessing
import os
import random
import re
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pikepdf
import pytest

from signing_async.sandbox import authority as authorities
from signing_async.sandbox import panel as panels
from signing_async.sandbox import sealing
from signing_async.sandbox.authority import LEVELS, Level
from signing_async.sandbox.sealing import Authority, Panel, SealingFailed, Signer, seal
from tests import pdfs

WHEN = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
NAMES = ("Anna Andersson", "Björn Åkesson Östling", "Maria Fernández (Castañeda)")


def make_panel(*names: str, document: str = "Agreement.pdf") -> Panel:
    """A panel with one signer for each name."""
    methods = ("email", "bankid", "approval", "smartcard", "sms")
    signers = [
        Signer(name, f"person{index}@example.com", methods[index % len(methods)], WHEN - timedelta(hours=index))
        for index, name in enumerate(names)
    ]
    return Panel("Employment of Anna", document, "ref-2c1f", signers)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """One authority for all tests."""
    return Authority.open(tmp_path_factory.mktemp("authority"), WHEN)


@pytest.fixture
def sealed(tmp_path: Path, authority: Authority) -> Callable[..., bytes]:
    """Seals a document's bytes; leaves the result in tmp_path/sealed.pdf and nothing else beside it."""

    def make(data: bytes, panel: Panel | None = None, when: datetime = WHEN) -> bytes:
        folder = tmp_path / "documents"
        folder.mkdir(exist_ok=True)
        source, target = folder / "original.pdf", folder / "sealed.pdf"
        source.write_bytes(data)
        seal(source, target, panel=panel or make_panel(*NAMES), authority=authority, when=when)
        assert sorted(folder.iterdir()) == [source, target]
        assert source.read_bytes() == data
        return target.read_bytes()

    return make


@pytest.fixture(scope="module")
def nss(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Path:
    """An NSS database that trusts the authority."""
    folder = tmp_path_factory.mktemp("nss")
    (folder / "ca.pem").write_bytes(authority.certificate_pem)
    pdfs.run("certutil", "-N", "-d", folder, "--empty-password")
    done = pdfs.run("certutil", "-A", "-d", folder, "-n", "ca", "-t", "CT,C,C", "-a", "-i", folder / "ca.pem")
    assert done.returncode == 0, done.stderr
    return folder


def accepts(data: bytes, authority: Authority) -> bool:
    """Whether pyHanko's validator calls the seal valid, trusted and covering the whole file."""
    from asn1crypto import pem, x509  # type: ignore[import-untyped]  # asn1crypto has no type hints
    from pyhanko.pdf_utils.reader import PdfFileReader
    from pyhanko.sign.validation import SignatureCoverageLevel, validate_pdf_signature
    from pyhanko_certvalidator import ValidationContext

    root = x509.Certificate.load(pem.unarmor(authority.certificate_pem)[2])
    try:
        signature = PdfFileReader(io.BytesIO(data), strict=False).embedded_signatures[-1]
        status = validate_pdf_signature(signature, ValidationContext(trust_roots=[root], allow_fetching=False))
    except Exception:
        return False
    assert str(signature.sig_object["/SubFilter"]) == "/ETSI.CAdES.detached"
    return status.bottom_line and status.coverage == SignatureCoverageLevel.ENTIRE_FILE


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
def test_seals_any_readable_original(
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
def test_pdfsig_and_qpdf_call_it_valid(
    make: Callable[[], bytes], sealed: Callable[..., bytes], nss: Path, tmp_path: Path
) -> None:
    """Poppler trusts the seal and sees the total document signed; qpdf finds nothing to complain about."""
    sealed(make())
    path = tmp_path / "documents" / "sealed.pdf"
    said = pdfs.run("pdfsig", "-nssdir", nss, path).stdout
    assert "Signature is Valid." in said
    assert "Certificate is Trusted." in said
    assert "Total document signed" in said
    checked = pdfs.run("qpdf", "--check", path)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def by_pikepdf(*, direct: bool) -> bytes:
    """A form as pikepdf writes it, in the catalog itself or as an object of its own."""
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
def test_the_fields_of_a_form_are_kept(
    make: Callable[[], bytes], names: list[str], sealed: Callable[..., bytes]
) -> None:
    """With their values and the form's other entries; the seal's own field is the last one."""
    data = make()
    with pikepdf.open(io.BytesIO(data)) as before, pikepdf.open(io.BytesIO(sealed(data))) as after:
        assert [str(field.T) for field in after.Root.AcroForm.Fields] == [*names, "SandboxSeal"]
        for old, new in zip(
            before.Root.get("/AcroForm", {}).get("/Fields", []), after.Root.AcroForm.Fields, strict=False
        ):
            assert old.unparse() == new.unparse()
        for key in before.Root.get("/AcroForm", pikepdf.Dictionary()).keys() - {"/Fields", "/SigFlags"}:
            assert after.Root.AcroForm[key].unparse() == before.Root.AcroForm[key].unparse()


def test_a_second_seal_takes_another_name(sealed: Callable[..., bytes]) -> None:
    """Where a field of the form has the seal's name already, be it an object of its own."""
    taken = pdfs.with_signature_field(field=pdfs.FIELD.replace(b"(seal)", b" 8 0 R"), more={8: b"(SandboxSeal)"})
    with pikepdf.open(io.BytesIO(sealed(taken))) as pdf:
        assert [str(field.T) for field in pdf.Root.AcroForm.Fields] == ["SandboxSeal", "SandboxSeal2"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["small", "a form", "reportlab", "object streams", "a shifted table", "hybrid"])
def test_seals_at_every_level(level: Level, name: str, tmp_path: Path, authority: Authority) -> None:
    """Each adds what the one before it has; pyHanko's command finds the signature and its timestamps in order."""
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
def test_leaves_out_what_precedes_the_header(
    absolute: bool, sealed: Callable[..., bytes], authority: Authority
) -> None:
    """Junk before the header, which readers skip and validators choke on, is not sealed."""
    junk = b"HTTP/1.1 200 OK\r\n\r\n"
    data = pdfs.prefixed(junk, absolute=absolute)
    result = sealed(data)
    assert result.startswith(data.removeprefix(junk))
    assert accepts(result, authority)


def test_a_changed_byte_is_noticed(sealed: Callable[..., bytes], authority: Authority) -> None:
    """A changed byte anywhere in the signed ranges makes pyHanko's validator reject the seal."""
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


@pytest.mark.skipif(not pdfs.have("pdfsig", "certutil"), reason="needs poppler-utils and libnss3-tools")
def test_pdfsig_notices_a_changed_byte(sealed: Callable[..., bytes], nss: Path, tmp_path: Path) -> None:
    """Poppler too rejects a document whose text was changed under the seal."""
    result = sealed(pdfs.make_pdf(text="ten thousand"))
    path = tmp_path / "changed.pdf"
    path.write_bytes(result.replace(b"ten thousand", b"two thousand", 1))
    said = pdfs.run("pdfsig", "-nssdir", nss, path).stdout
    assert "Signature is Valid." not in said
    assert "Digest Mismatch" in said


def test_something_appended_is_not_covered(sealed: Callable[..., bytes], authority: Authority) -> None:
    """An update behind the seal is outside of it, and a validator that wants the whole file says no."""
    result = sealed(pdfs.make_pdf())
    later = pdfs.update(result, {5: pdfs.stream_object(b"BT ET")}, size=40)
    assert not accepts(later, authority)


def text_of(result: bytes, page: int = -1) -> str:
    """The text that a page shows, by Poppler."""
    with pikepdf.open(io.BytesIO(result)) as pdf:
        number = str(page if page > 0 else len(pdf.pages))
    command = ["pdftotext", "-layout", "-f", number, "-l", number, "-", "-"]
    return subprocess.run(command, input=result, capture_output=True, check=True, timeout=60).stdout.decode()


needs_poppler = pytest.mark.skipif(not pdfs.have("pdftotext"), reason="needs poppler-utils")


@needs_poppler
def test_the_panel_names_everything(sealed: Callable[..., bytes]) -> None:
    """The added page names each signer with address, method and time, and says that the seal is worth nothing."""
    shown = text_of(sealed(pdfs.make_pdf(), make_panel(*NAMES, "Per (Pelle) \\ Ek", "Lo Ek")))
    for expected in (*NAMES, "Per (Pelle) \\ Ek", "person3@example.com"):
        assert expected in shown
    for expected in ("E-mail", "BankID", "Approval", "smartcard", "SMS"):
        assert expected in shown
    for expected in ("Signed by 5 people", "Agreement.pdf", "Employment of Anna", "ref-2c1f", "no legal value"):
        assert expected in shown
    assert "2026-03-04 05:06:07 UTC" in shown
    assert "2026-03-04 02:06:07 UTC" in shown
    assert "Page 1 of 1" in shown


@needs_poppler
def test_times_are_shown_in_utc(sealed: Callable[..., bytes]) -> None:
    """A time from another zone is converted, not relabelled."""
    signer = Signer("Anna", "anna@example.com", "email", WHEN.astimezone(timezone(timedelta(hours=9))))
    shown = text_of(sealed(pdfs.make_pdf(), Panel("Signing", "Document", "ref", [signer])))
    assert shown.count("2026-03-04 05:06:07 UTC") == 3
    assert "Signed by 1 person" in shown


@needs_poppler
def test_many_signers_take_several_pages(sealed: Callable[..., bytes], authority: Authority) -> None:
    """Thirty signers are all shown, page by page, and the seal is on the last page."""
    names = [f"Signer Number {number}" for number in range(30)]
    result = sealed(pdfs.make_pdf(), make_panel(*names))
    assert accepts(result, authority)
    with pikepdf.open(io.BytesIO(result)) as pdf:
        count = len(pdf.pages)
        assert "/Annots" in pdf.pages[-1].obj
        assert all("/Annots" not in page.obj for page in list(pdf.pages)[:-1])
    shown = [text_of(result, page) for page in range(2, count + 1)]
    assert len(shown) == 3
    assert re.findall(r"Signer Number \d+", "".join(shown)) == names
    assert all("no legal value" in page for page in shown)
    assert "Page 3 of 3" in shown[-1]


@needs_poppler
def test_a_long_name_is_wrapped_and_a_very_long_one_cut_visibly(sealed: Callable[..., bytes]) -> None:
    """A long name is shown whole on several lines; what cannot be shown is marked by dots."""
    long = "Maria del Carmen Fernández Villaverde Castañeda Frontera Senior Vice President"
    shown = text_of(sealed(pdfs.make_pdf(), make_panel(long, "x" * 1000)))
    words = iter(re.findall(r"\S+", shown))
    assert all(word in words for word in long.split())
    assert re.search(r"x{20}\.\.\.", shown)


@needs_poppler
def test_other_scripts_are_set_in_a_font_that_has_them(sealed: Callable[..., bytes], authority: Authority) -> None:
    """Names beyond Latin-1 are shown in their letters when this machine has a font for them, decomposed ones too."""
    if not panels._fonts():
        pytest.skip("needs fonts-dejavu-core and pyHanko's opentype extra")
    from fontTools.ttLib import TTFont  # type: ignore[import-untyped]  # fontTools has no type hints

    names = ("Łukasz Żółć", "Дмитрий Иванов", "Ελένη Παπαδοπούλου", "A\u030ake Stro\u0308m")
    result = sealed(pdfs.make_pdf(), make_panel(*names))
    shown = text_of(result)
    for expected in ("Łukasz Żółć", "Дмитрий Иванов", "Ελένη Παπαδοπούλου", "Åke Ström"):
        assert expected in shown
    with pikepdf.open(io.BytesIO(result)) as pdf:
        (font,) = [font for font in pdf.pages[-1].resources["/Font"].values() if font["/Subtype"] == "/Type0"]
        program = font["/DescendantFonts"][0]["/FontDescriptor"]["/FontFile2"].read_bytes()
    with TTFont(io.BytesIO(program)) as embedded:
        assert embedded["head"].unitsPerEm == 1000  # the unit of the widths that pyHanko writes beside it
    assert len(program) < 40_000
    assert accepts(result, authority)


@needs_poppler
def test_hidden_and_unknown_characters_are_spelled_out(
    sealed: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A character that would hide something, or that no font has, is shown by its code point."""
    name = "Zoë\u202eneila\n\tand \ue123"
    assert "Zoë U+202E neila and U+E123" in text_of(sealed(pdfs.make_pdf(), make_panel(name)))
    monkeypatch.setattr(panels, "_fonts", tuple)
    assert "U+5C71 U+7530" in text_of(sealed(pdfs.make_pdf(), make_panel("山田")))


def test_without_the_font_libraries_every_name_is_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without pyHanko's opentype extra seals all the same; it finds no font."""
    panels._fonts.cache_clear()
    try:
        monkeypatch.setitem(sys.modules, "uharfbuzz", None)
        assert panels._fonts() == ()
    finally:
        panels._fonts.cache_clear()


def test_a_broken_font_file_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that bears a font's name and is none is not used; folders are searched in depth."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "DejaVuSans.ttf").write_bytes(b"not a font")
    monkeypatch.setattr(panels, "FONT_FOLDERS", (str(tmp_path), str(tmp_path / "missing")))
    assert panels._font_files() == [tmp_path / "deep" / "DejaVuSans.ttf"]
    panels._fonts.cache_clear()
    try:
        assert panels._fonts() == ()
    finally:
        panels._fonts.cache_clear()


def test_the_field_gets_a_name_of_its_own(sealed: Callable[..., bytes]) -> None:
    """An existing form keeps its fields, and the seal's field never takes the name of one of them."""
    data = pdfs.with_signature_field(field=pdfs.FIELD.replace(b"(seal)", b"(SandboxSeal)"))
    with pikepdf.open(io.BytesIO(sealed(data))) as pdf:
        fields = list(pdf.Root["/AcroForm"]["/Fields"])
        assert [str(field["/T"]) for field in fields] == ["SandboxSeal", "SandboxSeal2"]
        assert int(pdf.Root["/AcroForm"]["/SigFlags"]) == 3
        assert "/V" not in fields[0]
        assert "/V" in fields[1]


def test_the_signature_states_the_time_given(sealed: Callable[..., bytes], authority: Authority) -> None:
    """The signature's own time is the sandbox's, also when its clock is years ahead, and it still validates."""
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
def test_what_cannot_be_sealed_says_so(name: str, tmp_path: Path, authority: Authority) -> None:
    """A document beyond repair gives one clear error and leaves an existing target, and no temporary file, alone."""
    source, target = tmp_path / "a.pdf", tmp_path / "b.pdf"
    source.write_bytes(BEYOND_HELP[name])
    target.write_bytes(b"before")
    with pytest.raises(SealingFailed, match=r"The document 'Agreement\.pdf' cannot be sealed, ") as caught:
        seal(source, target, panel=make_panel("Anna"), authority=authority, when=WHEN)
    assert str(tmp_path) not in str(caught.value)
    assert target.read_bytes() == b"before"
    assert sorted(tmp_path.iterdir()) == [source, target]


@pytest.mark.parametrize(
    "name", ["fields in a circle", "a field that is its own value", "deep nesting", "a compressed bomb"]
)
def test_hostile_files_that_are_accepted_are_sealed(
    name: str, sealed: Callable[..., bytes], authority: Authority
) -> None:
    """A strange file that the sandbox accepts can also be sealed."""
    result = sealed(pdfs.hostile()[name])
    with pikepdf.open(io.BytesIO(result)) as pdf:
        assert len(pdf.pages) == 2
    assert accepts(result, authority) or name == "fields in a circle"  # in which pyHanko's validator loses itself


def test_a_page_tree_that_lies_is_rebuilt(sealed: Callable[..., bytes], authority: Authority) -> None:
    """When the sealed file would not hold together, the original's objects are repeated behind it, and it does."""
    data = pdfs.make_pdf(pages=2).replace(b"/Count 2", b"/Count(x")  # as long as before: offsets stay right
    assert pdfs.make_pdf(pages=2) != data
    data = data.replace(b"/Count(x>>", b"/Count/x>>")
    result = sealed(data)
    assert result.startswith(data)
    assert accepts(result, authority)


def test_a_failed_attempt_leaves_nothing_in_the_result(
    sealed: Callable[..., bytes], authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the first attempt does not hold together, the second starts from the original again."""
    attempts: list[int] = []
    append = sealing._append_pages

    def forgetful(writer: Any, drawn: Any) -> None:
        attempts.append(len(drawn.pages))
        if len(attempts) > 1:
            append(writer, drawn)

    monkeypatch.setattr(sealing, "_append_pages", forgetful)
    data = pdfs.make_pdf()
    result = sealed(data)
    assert len(attempts) == 2
    assert result.startswith(data)
    assert result.count(b"/ByteRange") == 1
    assert accepts(result, authority)


def test_a_seal_that_breaks_the_file_is_not_kept(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is read again before it counts: pages that are missing in it are an error."""
    monkeypatch.setattr(sealing, "_append_pages", lambda writer, drawn: None)
    source = tmp_path / "a.pdf"
    source.write_bytes(pdfs.make_pdf())
    with pytest.raises(SealingFailed, match="page tree"):
        seal(source, tmp_path / "b.pdf", panel=make_panel("Anna"), authority=authority, when=WHEN)
    assert list(tmp_path.iterdir()) == [source]


def test_a_full_disk_is_no_damage(tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's errors come through as what they are, and nothing is left behind."""

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sealing, "_seal_in_place", full)
    source = tmp_path / "a.pdf"
    source.write_bytes(pdfs.make_pdf())
    with pytest.raises(OSError, match="No space left"):
        seal(source, tmp_path / "b.pdf", panel=make_panel("Anna"), authority=authority, when=WHEN)
    assert list(tmp_path.iterdir()) == [source]


def test_threads_seal_at_once(tmp_path: Path, authority: Authority) -> None:
    """Twenty documents sealed by four threads with one authority are twenty valid documents."""

    def work(number: int) -> bytes:
        source, target = tmp_path / f"{number}.pdf", tmp_path / f"{number}-sealed.pdf"
        source.write_bytes(pdfs.make_pdf(seed=number))
        seal(source, target, panel=make_panel(f"Żaneta {number}"), authority=authority, when=WHEN)
        return target.read_bytes()

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(20)))
    assert all(accepts(result, authority) for result in results)
    assert len(set(results)) == 20


def test_an_authority_is_made_once_and_kept_private(tmp_path: Path) -> None:
    """The same certificate comes back on every opening; its file is readable by the owner alone and has no CA key."""
    folder = tmp_path / "new" / "authority"
    first = Authority.open(folder, WHEN)
    again = Authority.open(folder, WHEN + timedelta(days=900))
    assert first.certificate_pem == again.certificate_pem
    assert first.certificate_pem.startswith(b"-----BEGIN CERTIFICATE-----")
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes().count(b"BEGIN PRIVATE KEY") == 3
    assert b"PRIVATE" not in first.certificate_pem


@pytest.mark.parametrize("now", [WHEN, WHEN - timedelta(days=20_000), WHEN + timedelta(days=20_000)])
def test_certificates_are_valid_by_any_clock(tmp_path: Path, now: datetime) -> None:
    """Made by a clock years off, the certificates cover that clock's time, 2020, and today."""
    from cryptography import x509

    Authority.open(tmp_path, now)
    certificates = x509.load_pem_x509_certificates((tmp_path / "authority.pem").read_bytes())
    assert len(certificates) == 6
    for certificate in certificates:
        certificate.verify_directly_issued_by(certificates[1])
        for moment in (now, now + timedelta(days=10_000), datetime(2020, 1, 1, tzinfo=UTC), datetime.now(UTC)):
            assert certificate.not_valid_before_utc <= moment <= certificate.not_valid_after_utc


def test_processes_that_open_at_once_agree(tmp_path: Path) -> None:
    """Of several processes that make the authority at the same moment, one wins and all use its certificate."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(4) as pool:
        pems = pool.map(_certificate_of, [tmp_path] * 4)
    assert len(set(pems)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["authority.pem"]


def _certificate_of(folder: Path) -> bytes:
    return Authority.open(folder, WHEN).certificate_pem


def test_the_second_maker_of_an_authority_yields(tmp_path: Path) -> None:
    """A file that appeared meanwhile is kept, and the loser leaves nothing behind."""
    path = tmp_path / "authority.pem"
    authorities._create(path, b"first")
    authorities._create(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"nonsense", b"-----BEGIN X-----\nAAAA\n-----END X-----\n" * 3])
def test_a_damaged_authority_file_is_named(tmp_path: Path, content: bytes) -> None:
    """A file that holds no authority gives an error with its path and what to do."""
    (tmp_path / "authority.pem").write_bytes(content)
    with pytest.raises(
        SealingFailed, match=r"authority\.pem expected the 3 keys and 6 certificates of an authority .* delete it"
    ):
        Authority.open(tmp_path, WHEN)


def test_heavy_libraries_come_with_the_first_seal() -> None:
    """Importing the modules imports neither pyHanko nor pikepdf nor cryptography."""
    code = (
        "import sys, signing_async.sandbox.sealing, signing_async.sandbox.inspection\n"
        "print([name for name in ('pyhanko', 'pikepdf', 'cryptography', 'fontTools') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_sealed_file_is_on_disk_before_it_is_in_place(
    sealed: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content is synced before the name appears, and the folder after."""
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
