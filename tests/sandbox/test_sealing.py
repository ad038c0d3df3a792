"""Sealing: independent validators accept the result, for any readable original."""

from __future__ import annotations

import io
import subprocess
import warnings
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click.testing
import pikepdf
import pytest
from asn1crypto import pem
from asn1crypto import x509 as asn1
from cryptography import x509
from pyhanko.cli import cli_root
from pyhanko.pdf_utils.reader import PdfFileReader
from pyhanko.sign.validation import SignatureCoverageLevel, validate_pdf_signature
from pyhanko_certvalidator import ValidationContext

from signing_async.sandbox import Refused

# The one way to seal at a chosen time, with a chosen panel and level, without a service around it.
from signing_async.sandbox.authority import Authority
from signing_async.sandbox.panel import Panel, Signer
from signing_async.sandbox.sealer import LEVELS, Level
from signing_async.sandbox.sealing import seal
from tests import pdfs
from tests.full_disk import full_disk

WHEN = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
NAMES = ("Anna Andersson", "Björn Åkesson Östling", "Maria Fernández (Castañeda)")
METHODS = ("email", "bankid", "approval", "smartcard", "sms")


def make_panel(*names: str) -> Panel:
    """Return a panel with a signer for each name."""
    signers = [
        Signer(name, f"person{index}@example.com", METHODS[index % len(METHODS)], WHEN - timedelta(hours=index))
        for index, name in enumerate(names)
    ]
    return Panel("Employment of Anna", "Agreement.pdf", "ref-2c1f", signers)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """One authority for all tests."""
    return Authority.open(tmp_path_factory.mktemp("authority"), WHEN)


@pytest.fixture
def sealed(tmp_path: Path, authority: Authority) -> Callable[..., bytes]:
    """Return a function that seals bytes into tmp_path/sealed.pdf and leaves no other file."""
    source, target = tmp_path / "original.pdf", tmp_path / "sealed.pdf"

    def make(data: bytes, panel: Panel | None = None, when: datetime = WHEN, level: Level = "B-B") -> bytes:
        source.write_bytes(data)
        seal(source, target, panel=panel or make_panel(*NAMES), authority=authority, when=when, level=level)
        assert sorted(tmp_path.iterdir()) == [source, target]
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
    """Return whether pyHanko finds the seal valid, trusted and covering the whole file."""
    root = asn1.Certificate.load(pem.unarmor(authority.certificate_pem)[2])
    signature = PdfFileReader(io.BytesIO(data), strict=False).embedded_signatures[-1]
    assert str(signature.sig_object["/SubFilter"]) == "/ETSI.CAdES.detached"
    status = validate_pdf_signature(signature, ValidationContext(trust_roots=[root], allow_fetching=False))
    return status.bottom_line and status.coverage == SignatureCoverageLevel.ENTIRE_FILE


ORIGINALS = {
    "large": lambda: pdfs.make_pdf(2_000_000, pages=120),
    "nested, rotated, odd boxes": pdfs.nested_pages,
    "a form": pdfs.with_form,
    "an empty signature field": pdfs.with_signature_field,
    "usage rights": pdfs.with_usage_rights,
    "reportlab": pdfs.by_reportlab,
    "fpdf2": pdfs.by_fpdf2,
    "linearized": lambda: pdfs.rewritten(pdfs.by_reportlab(), linearize=True),
    "object streams": lambda: pdfs.rewritten(pdfs.by_reportlab(), object_streams=True),
    "a predicted cross-reference stream": lambda: pdfs.xref_stream_pdf(predictor=True),
    "hybrid": pdfs.hybrid_pdf,
    "updated": lambda: pdfs.update(pdfs.make_pdf(), {5: pdfs.stream_object(b"")}, size=7),
    "words in a content stream": lambda: pdfs.decoys()["words in a content stream"],
}
DAMAGED = {name: lambda name=name: pdfs.damaged()[name] for name in pdfs.damaged()}


@pytest.mark.parametrize("name", [*ORIGINALS, *DAMAGED])
def test_seal_adds_a_page_to_the_original_bytes_keeps_forms_and_validates(
    name: str, sealed: Callable[..., bytes], authority: Authority, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    data = (ORIGINALS | DAMAGED)[name]()
    result = sealed(data)
    assert name in DAMAGED or result.startswith(data)  # a damaged original is rewritten
    assert accepts(result, authority)
    with pikepdf.open(io.BytesIO(data)) as before, pikepdf.open(io.BytesIO(result)) as after:
        assert len(after.pages) == len(before.pages) + 1
        assert not after.get_warnings()
        last = after.pages[-1]
        assert [int(edge) for edge in last.mediabox] == [0, 0, 595, 842]
        assert int(last.obj["/Rotate"]) == 0
        form, sealed_form = before.Root.get("/AcroForm", pikepdf.Dictionary()), after.Root.AcroForm
        *kept, seal_field = sealed_form.Fields
        assert [field.unparse() for field in form.get("/Fields", [])] == [field.unparse() for field in kept]
        assert str(seal_field.T) == "SandboxSeal"
        for key in form.keys() - {"/Fields", "/SigFlags"}:
            assert sealed_form[key].unparse() == form[key].unparse()
    if pdfs.have("pdfsig", "certutil", "qpdf"):
        said = pdfs.run("pdfsig", "-nssdir", request.getfixturevalue("nss"), tmp_path / "sealed.pdf").stdout
        for words in ("Signature is Valid.", "Certificate is Trusted.", "Total document signed"):
            assert words in said
        checked = pdfs.run("qpdf", "--check", tmp_path / "sealed.pdf")
        assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("level", LEVELS)
def test_every_pades_level_adds_to_the_one_before(
    level: Level, sealed: Callable[..., bytes], tmp_path: Path, authority: Authority
) -> None:
    original = pdfs.with_form()
    data = sealed(original, when=datetime.now(UTC), level=level)
    assert data.startswith(original)
    assert (b"/DSS" in data, b"/DocTimeStamp" in data) == (level in ("B-LT", "B-LTA"), level == "B-LTA")
    roots = tmp_path / "roots.pem"
    roots.write_bytes(authority.certificate_pem)
    options = ["--soft-revocation-check", "--no-strict-syntax", "--trust-replace", "--trust", str(roots)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what pyHanko's next version will drop
        command = ["sign", "validate", *options, str(tmp_path / "sealed.pdf")]
        ran = click.testing.CliRunner().invoke(cli_root, command)
    assert ran.exit_code == 0, ran.output
    assert ("TIMESTAMP_TOKEN<INTACT:TRUSTED>" in ran.output) == (level != "B-B")
    assert ("EXTENDED_WITH_LTA_UPDATES" in ran.output) == (level in ("B-LT", "B-LTA"))


def test_unrepairable_document_is_one_error_and_leaves_no_file(tmp_path: Path, authority: Authority) -> None:
    source = tmp_path / "a.pdf"
    message = r"'Agreement\.pdf' cannot be sealed: the PDF is damaged \(.+\)\. Repair it, .* upload it again\."
    without_pages = pdfs.assemble({1: b"<</Type/Catalog>>"})
    for data in (b"Dear Sir or Madam", without_pages, pdfs.encrypted(pdfs.make_pdf(), user="secret")):
        source.write_bytes(data)
        with pytest.raises(Refused, match=message) as caught:
            seal(source, tmp_path / "b.pdf", panel=make_panel("Anna"), authority=authority, when=WHEN)
        assert str(tmp_path) not in str(caught.value)
        assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("free", [-100, 6000], ids=["for the copy", "for the seal"])
def test_full_disk_is_an_os_error_and_leaves_no_file(free: int, tmp_path: Path, authority: Authority) -> None:
    source = tmp_path / "a.pdf"
    source.write_bytes(pdfs.make_pdf())
    with full_disk(source.stat().st_size + free), pytest.raises(OSError, match="File too large"):
        seal(source, tmp_path / "b.pdf", panel=make_panel("Anna"), authority=authority, when=WHEN)
    assert list(tmp_path.iterdir()) == [source]


def text_of(result: bytes, page: int) -> str:
    """Return the text of a page, extracted by Poppler."""
    command = ["pdftotext", "-layout", "-f", f"{page}", "-l", f"{page}", "-", "-"]
    return subprocess.run(command, input=result, capture_output=True, check=True, timeout=60).stdout.decode()


@pytest.mark.skipif(not pdfs.have("pdftotext"), reason="needs poppler-utils")
def test_panel_names_each_signer_and_says_that_the_seal_has_no_legal_value(sealed: Callable[..., bytes]) -> None:
    names = (*NAMES, "Per (Pelle) \\ Ek", "Łukasz Żółć", "A\u030ake Stro\u0308m", "İpek Şahin", "Đorđe", "x" * 300,
             "Дмитрий Иванов", "Ελένη Παπαδοπούλου", "Zoë\u202eneila\n\tand \ue123", "山田")  # fmt: skip
    result = sealed(pdfs.make_pdf(), make_panel(*names))
    first, second = text_of(result, 2), text_of(result, 3)
    for expected in (*names[:5], "Åke Ström", *names[6:8], "person3@example.com", "E-mail", "BankID", "Approval",
                     "smartcard", "SMS", "Signed by 13 people", "Agreement.pdf", "Employment of Anna", "ref-2c1f",
                     "no legal value", "2026-03-04 05:06:07 UTC", "2026-03-04 02:06:07 UTC"):  # fmt: skip
        assert expected in first
    for expected in ("xxx...", *names[9:11], "Zoë U+202E neila and U+E123", "no legal value", "Page 2 of 2"):
        assert expected in second
    assert "U+5C71 U+7530" in " ".join(second.split())
    with pikepdf.open(io.BytesIO(result)) as pdf:
        assert ["/Annots" in page.obj for page in pdf.pages] == [False, False, True]


# the certificate authority


@pytest.mark.parametrize("now", [WHEN - timedelta(days=20_000), WHEN + timedelta(days=20_000)])
def test_authority_is_created_once_in_a_private_file_and_covers_the_sandboxs_clock_2020_and_today(
    tmp_path: Path, now: datetime
) -> None:
    folder = tmp_path / "new" / "authority"
    first = Authority.open(folder, now)
    assert first.certificate_pem == Authority.open(folder, now + timedelta(days=900)).certificate_pem
    assert first.certificate_pem.startswith(b"-----BEGIN CERTIFICATE-----")
    assert b"PRIVATE" not in first.certificate_pem
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes().count(b"BEGIN PRIVATE KEY") == 3  # the authority's own key is not kept
    certificates = x509.load_pem_x509_certificates(path.read_bytes())
    assert len(certificates) == 6
    for certificate in certificates:
        certificate.verify_directly_issued_by(certificates[1])
        for moment in (now, now + timedelta(days=10_000), datetime(2020, 1, 1, tzinfo=UTC), datetime.now(UTC)):
            assert certificate.not_valid_before_utc <= moment <= certificate.not_valid_after_utc
