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


def accepted() -> dict[str, bytes]:
    """Return open, unsigned, readable files."""
    report = pdfs.by_reportlab()
    return {
        "many pages": pdfs.make_pdf(200_000, pages=300),
        "of exactly the limit": pdfs.make_pdf(10 * 2**20),
        "a nested page tree": pdfs.nested_pages(),
        "a form": pdfs.with_form(),
        "reportlab": report,
        "fpdf2": pdfs.by_fpdf2(),
        "linearized": pdfs.rewritten(report, linearize=True),
        "object streams": pdfs.rewritten(report, object_streams=True, linearize=True),
        "a predicted cross-reference stream": pdfs.xref_stream_pdf(predictor=True),
        "hybrid": pdfs.hybrid_pdf(),
        "updated": pdfs.update(pdfs.make_pdf(), {5: pdfs.stream_object(b"")}, size=7),
        "an empty signature field": pdfs.with_signature_field(),
        "a field whose signature is empty": pdfs.with_signature_field(b"/V<<>>"),
        "usage rights": pdfs.with_usage_rights(),
        "old usage rights": pdfs.with_usage_rights(key=b"UR"),
        "usage rights in a field": pdfs.with_usage_rights(in_field=True),
        "junk before the header": pdfs.prefixed(b"HTTP/1.1 200 OK\r\n\r\n", absolute=False),
        "counted junk before the header": pdfs.prefixed(b"\n" * 900, absolute=True),
        **pdfs.decoys(),
        **pdfs.damaged(),
    }


def protected() -> dict[str, bytes]:
    """Return encrypted files: with and without a password, with an unknown filter, and cut off in the trailer."""
    broken = b"%PDF-1.7\n1 0 obj\n<</Type/Catalog>>\nendobj\ntrailer\n<</Root 1 0 R/Encrypt 9"
    lock = pdfs.with_catalog(b"", {6: b"<</Filter/Acme.Lock/V 9>>"}, trailer=b"/Encrypt 6 0 R")
    report = pdfs.by_reportlab()
    return {"unreadable": broken, "with an unknown filter": lock} | {
        f"{method}, password {user!r}": pdfs.encrypted(report, method, user=user, object_streams=bool(user))
        for method in ("AES-256", "AES-128", "RC4-128", "RC4-40")
        for user in ("", "secret")
    }


def signed() -> dict[str, bytes]:
    """Return files with a signature value."""
    report = pdfs.signed_by_pyhanko(pdfs.by_reportlab())
    later = {5: pdfs.stream_object(b"later")}
    parent, child = b"<</FT/Sig/T(a)/Kids[8 0 R]>>", b"<</Parent 6 0 R/V 7 0 R>>"
    rights = b"/Perms<</UR3<</Type/Sig/ByteRange[0 1 2 3]/Contents<00>>>>>"
    return {
        "by pyHanko": report,
        "certified": pdfs.signed_by_pyhanko(pdfs.make_pdf(), certify=True),
        "and rewritten": pdfs.rewritten(report, object_streams=True),
        "and linearized": pdfs.rewritten(report, linearize=True),
        "and updated": pdfs.update(pdfs.with_signature_field(b"/V 7 0 R"), later, size=9),
        "in place": pdfs.with_signature_field(b"/V " + pdfs.SIGNATURE),
        "with the kind inherited": pdfs.with_catalog(
            b"/AcroForm<</Fields[6 0 R]>>", {6: parent, 7: pdfs.SIGNATURE, 8: child}
        ),
        "with usage rights too": pdfs.with_signature_field(b"/V 7 0 R", catalog=rights),
        "in the permissions alone": pdfs.with_signature_field(catalog=b"/Perms<</DocMDP 7 0 R>>"),
    }


@pytest.mark.parametrize(
    ("make", "code"),
    [(accepted, None), (pdfs.not_pdfs, "not_pdf"), (protected, "protected"), (signed, "already_signed")],
)
async def test_every_file_gets_its_verdict(
    make: Callable[[], dict[str, bytes]], code: str | None, judge: Judge
) -> None:
    for name, data in (await asyncio.to_thread(make)).items():
        assert await judge(data) == code, name


@pytest.mark.skipif(not pdfs.have("pdfsig", "certutil", "mutool"), reason="needs poppler, NSS's tools and mupdf-tools")
async def test_pdf_signed_by_poppler_or_mupdf_is_refused(tmp_path: Path, judge: Judge) -> None:
    for data in (pdfs.signed_by_pdfsig(pdfs.by_reportlab(), tmp_path), pdfs.signed_by_mutool(tmp_path)):
        assert await judge(data) == "already_signed"


async def test_hostile_file_gets_a_verdict_and_no_exception(judge: Judge) -> None:
    hostile = dict(pdfs.hostile())
    if hasattr(settings, "set_qpdf_limits"):  # since pikepdf 10.14
        assert await judge(hostile.pop("an object stream bomb")) == "not_pdf"
    for name, data in hostile.items():
        assert await judge(data) in (None, "not_pdf", "protected"), name
