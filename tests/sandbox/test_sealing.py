"""Sealing: independent validators accept the result, for any readable original."""

from __future__ import annotations

import io
import random
import re
import subprocess
import warnings
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pikepdf
import pytest

from signing_async.sandbox import Refused
from tests import pdfs
from tests.full_disk import full_disk
from tests.sandbox.seals import LEVELS, NAMES, WHEN, Authority, Level, accepts, make_panel, seal

ORIGINALS = {
    "small": pdfs.make_pdf,
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


@pytest.mark.parametrize(("make", "damaged"), [
    *(pytest.param(make, False, id=name) for name, make in ORIGINALS.items()),
    *(pytest.param(make, True, id=name) for name, make in DAMAGED.items()),
])  # fmt: skip
def test_seal_adds_a_page_to_the_original_bytes_keeps_forms_and_validates(
    make: Callable[[], bytes],
    damaged: bool,  # a damaged original is rewritten
    sealed: Callable[..., bytes],
    authority: Authority,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    data = make()
    result = sealed(data)
    assert damaged or result.startswith(data)
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
        path = tmp_path / "documents" / "sealed.pdf"
        said = pdfs.run("pdfsig", "-nssdir", request.getfixturevalue("nss"), path).stdout
        for words in ("Signature is Valid.", "Certificate is Trusted.", "Total document signed"):
            assert words in said
        checked = pdfs.run("qpdf", "--check", path)
        assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("level", LEVELS)
def test_every_pades_level_adds_to_the_one_before(level: Level, tmp_path: Path, authority: Authority) -> None:
    import click.testing
    from pyhanko.cli import cli_root

    source, target, roots = tmp_path / "a.pdf", tmp_path / "b.pdf", tmp_path / "roots.pem"
    source.write_bytes(pdfs.with_form())
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


def test_changed_byte_or_appended_update_invalidates_the_seal(
    sealed: Callable[..., bytes], authority: Authority
) -> None:
    result = sealed(pdfs.by_reportlab())
    found = re.findall(rb"/ByteRange ?\[(\d+) (\d+) (\d+) (\d+)", result)
    start, first, second, rest = map(int, found[-1])
    assert (start, second + rest) == (0, len(result))
    edges = [0, first - 1, second, len(result) - 1]
    pick = random.Random(7).sample([*range(first), *range(second, len(result))], 8)
    for at in edges + pick:
        changed = bytearray(result)
        changed[at] ^= 1
        assert not accepts(bytes(changed), authority), at
    assert not accepts(pdfs.update(result, {5: pdfs.stream_object(b"BT ET")}, size=40), authority)


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
    "no page tree": pdfs.assemble({1: b"<</Type/Catalog>>"}),
    "encrypted": pdfs.encrypted(pdfs.make_pdf(), user="secret"),
}


@pytest.mark.parametrize("name", BEYOND_HELP)
def test_unrepairable_document_is_one_error_and_leaves_no_file(name: str, tmp_path: Path, authority: Authority) -> None:
    source, target = tmp_path / "a.pdf", tmp_path / "b.pdf"
    source.write_bytes(BEYOND_HELP[name])
    message = (
        r"The document 'Agreement\.pdf' cannot be sealed: the PDF is damaged \(.+\)\. Repair it, .* upload it again\."
    )
    with pytest.raises(Refused, match=message) as caught:
        seal(source, target, panel=make_panel("Anna"), authority=authority, when=WHEN)
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


def test_authority_is_created_once_in_a_private_file_without_the_ca_key(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "authority"
    first = Authority.open(folder, WHEN)
    assert first.certificate_pem == Authority.open(folder, WHEN + timedelta(days=900)).certificate_pem
    assert first.certificate_pem.startswith(b"-----BEGIN CERTIFICATE-----")
    assert b"PRIVATE" not in first.certificate_pem
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes().count(b"BEGIN PRIVATE KEY") == 3


@pytest.mark.parametrize("now", [WHEN - timedelta(days=20_000), WHEN + timedelta(days=20_000)])
def test_certificates_cover_the_sandboxs_clock_2020_and_today(tmp_path: Path, now: datetime) -> None:
    from cryptography import x509

    Authority.open(tmp_path, now)
    certificates = x509.load_pem_x509_certificates((tmp_path / "authority.pem").read_bytes())
    assert len(certificates) == 6
    for certificate in certificates:
        certificate.verify_directly_issued_by(certificates[1])
        for moment in (now, now + timedelta(days=10_000), datetime(2020, 1, 1, tzinfo=UTC), datetime.now(UTC)):
            assert certificate.not_valid_before_utc <= moment <= certificate.not_valid_after_utc
