"""Inspection of uploads: files of many tools, damaged and hostile ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from pikepdf import settings

from tests import pdfs
from tests.sandbox.serving import Caller

Judge = Callable[[bytes], Awaitable[str | None]]


@pytest.fixture
async def judge(call: Caller) -> Judge:
    """Upload a file of these bytes; return the code that refuses it, or None."""
    signing_id = await call.draft()

    async def upload(data: bytes) -> str | None:
        status, body = await call.upload(signing_id, data)
        assert status in (201, 422)
        return body["code"] if status == 422 else None

    return upload


ACCEPTED = {
    "one page": pdfs.make_pdf,
    "many pages": lambda: pdfs.make_pdf(200_000, pages=300),
    "of exactly the limit": lambda: pdfs.make_pdf(10 * 2**20),
    "a nested page tree": pdfs.nested_pages,
    "a form": pdfs.with_form,
    "reportlab": pdfs.by_reportlab,
    "fpdf2": pdfs.by_fpdf2,
    "linearized": lambda: pdfs.rewritten(pdfs.by_reportlab(), linearize=True),
    "object streams": lambda: pdfs.rewritten(pdfs.by_reportlab(), object_streams=True, linearize=True),
    "a cross-reference stream": pdfs.xref_stream_pdf,
    "a predicted cross-reference stream": lambda: pdfs.xref_stream_pdf(predictor=True),
    "hybrid": pdfs.hybrid_pdf,
    "updated": lambda: pdfs.update(pdfs.make_pdf(), {5: pdfs.stream_object(b"")}, size=7),
    "an empty signature field": pdfs.with_signature_field,
    "a field whose signature is empty": lambda: pdfs.with_signature_field(b"/V<<>>"),
    "usage rights": pdfs.with_usage_rights,
    "old usage rights": lambda: pdfs.with_usage_rights(key=b"UR"),
    "usage rights in a field": lambda: pdfs.with_usage_rights(in_field=True),
    "junk before the header": lambda: pdfs.prefixed(b"HTTP/1.1 200 OK\r\n\r\n", absolute=False),
    "counted junk before the header": lambda: pdfs.prefixed(b"\n" * 900, absolute=True),
    **{name: lambda name=name: pdfs.decoys()[name] for name in pdfs.decoys()},
    **{name: lambda name=name: pdfs.damaged()[name] for name in pdfs.damaged()},
}


@pytest.mark.parametrize("make", ACCEPTED.values(), ids=ACCEPTED)
async def test_open_unsigned_readable_pdf_is_accepted(make: Callable[[], bytes], judge: Judge) -> None:
    assert await judge(await asyncio.to_thread(make)) is None


@pytest.mark.parametrize("name", pdfs.not_pdfs())
async def test_unreadable_file_is_refused_as_not_pdf(name: str, judge: Judge) -> None:
    assert await judge(pdfs.not_pdfs()[name]) == "not_pdf"


@pytest.mark.parametrize("method", ["AES-256", "AES-128", "RC4-128", "RC4-40"])
@pytest.mark.parametrize("user", ["", "secret"])
@pytest.mark.parametrize("object_streams", [False, True])
async def test_encrypted_pdf_is_refused_even_with_an_empty_password(
    method: str, user: str, object_streams: bool, judge: Judge
) -> None:
    data = pdfs.encrypted(pdfs.by_reportlab(), method, user=user, object_streams=object_streams)
    assert await judge(data) == "protected"


async def test_unreadable_pdf_with_an_encrypt_entry_is_refused_as_protected(judge: Judge) -> None:
    broken = b"%PDF-1.7\n1 0 obj\n<</Type/Catalog>>\nendobj\ntrailer\n<</Root 1 0 R/Encrypt 9"
    assert await judge(broken) == "protected"
    assert await judge(broken.replace(b"/Encrypt", b"/EncryptMetadata")) == "not_pdf"
    unknown = pdfs.with_catalog(b"", {6: b"<</Filter/Acme.Lock/V 9>>"}, trailer=b"/Encrypt 6 0 R")
    assert await judge(unknown) == "protected"


SIGNED = {
    "by pyHanko": lambda: pdfs.signed_by_pyhanko(pdfs.by_reportlab()),
    "certified": lambda: pdfs.signed_by_pyhanko(pdfs.make_pdf(), certify=True),
    "and rewritten": lambda: pdfs.rewritten(pdfs.signed_by_pyhanko(pdfs.by_reportlab()), object_streams=True),
    "and linearized": lambda: pdfs.rewritten(pdfs.signed_by_pyhanko(pdfs.by_reportlab()), linearize=True),
    "and updated": lambda: pdfs.update(
        pdfs.with_signature_field(b"/V 7 0 R"), {5: pdfs.stream_object(b"later")}, size=9
    ),
    "in place": lambda: pdfs.with_signature_field(b"/V " + pdfs.SIGNATURE),
    "with the kind inherited": lambda: pdfs.with_catalog(
        b"/AcroForm<</Fields[6 0 R]>>",
        {6: b"<</FT/Sig/T(a)/Kids[8 0 R]>>", 7: pdfs.SIGNATURE, 8: b"<</Parent 6 0 R/V 7 0 R>>"},
    ),
    "with usage rights too": lambda: pdfs.with_signature_field(
        b"/V 7 0 R", catalog=b"/Perms<</UR3<</Type/Sig/ByteRange[0 1 2 3]/Contents<00>>>>>"
    ),
    "in the permissions alone": lambda: pdfs.with_signature_field(catalog=b"/Perms<</DocMDP 7 0 R>>"),
}


@pytest.mark.parametrize("make", SIGNED.values(), ids=SIGNED)
async def test_pdf_with_a_signature_value_is_refused_as_signed(make: Callable[[], bytes], judge: Judge) -> None:
    assert await judge(await asyncio.to_thread(make)) == "already_signed"


@pytest.mark.skipif(not pdfs.have("pdfsig", "certutil"), reason="needs poppler-utils and libnss3-tools")
async def test_pdf_signed_by_poppler_is_refused(tmp_path: Path, judge: Judge) -> None:
    assert await judge(pdfs.signed_by_pdfsig(pdfs.by_reportlab(), tmp_path)) == "already_signed"


@pytest.mark.skipif(not pdfs.have("mutool"), reason="needs mupdf-tools")
async def test_pdf_signed_by_mupdf_is_refused(tmp_path: Path, judge: Judge) -> None:
    assert await judge(pdfs.signed_by_mutool(tmp_path)) == "already_signed"


@pytest.mark.parametrize("name", pdfs.hostile())
async def test_hostile_file_gets_a_verdict_and_no_exception(name: str, judge: Judge) -> None:
    assert await judge(pdfs.hostile()[name]) in (None, "not_pdf", "protected")


@pytest.mark.skipif(not hasattr(settings, "set_qpdf_limits"), reason="needs pikepdf 10.14")
async def test_decompression_bomb_is_refused(judge: Judge) -> None:
    assert await judge(pdfs.hostile()["an object stream bomb"]) == "not_pdf"
