"""Sealed PDFs of every kind, with known attacks on them. The table of the guide has their verdicts."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding
from pyhanko.pdf_utils.generic import ArrayObject, DictionaryObject, FloatObject, StreamObject, pdf_name, pdf_string
from pyhanko.pdf_utils.incremental_writer import IncrementalPdfFileWriter
from pyhanko.sign import PdfSignatureMetadata, PdfSigner, SimpleSigner
from pyhanko.sign.fields import MDPPerm, SigFieldSpec, append_signature_field
from pyhanko.sign.signers.cms_embedder import PdfCMSEmbedder, SigIOSetup, SigMDPSetup, SigObjSetup
from pyhanko.sign.signers.pdf_byterange import PdfByteRangeDigest, SignatureObject

from tests import pdfs
from tests.sealed.pdfs import cms, key_and_certificate, sandbox_authority, sealed_by_sandbox, signed_pdf
from tests.sealed.pki import NOW, stamped


@dataclass(frozen=True)
class Case:
    """A file and its verdict."""

    make: Callable[[], bytes]
    words: str = ""
    """Part of the problem; empty if the file is sound."""
    shown: bool = True
    """Whether the first signature covers what the document shows."""


def roots() -> list[bytes]:
    """Return the trusted certificates: the sandbox's authority and the makers of other signatures."""
    others = [pdfs._signing_material()[1], *(key_and_certificate(kind)[1] for kind in ("ec", "rsa"))]
    return [sandbox_authority().certificate_pem, *(each.public_bytes(Encoding.PEM) for each in others)]


def edited(data: bytes, edit: Callable[[Any], None]) -> bytes:
    """Return the file with an incremental update by pyHanko's writer."""
    out = io.BytesIO()
    writer = IncrementalPdfFileWriter(io.BytesIO(data))
    edit(writer)
    writer.write(out)
    return out.getvalue()


def signed(
    data: bytes, field: str = "Other", *, box: tuple[int, ...] | None = None, new: bool = False, **settings: Any
) -> bytes:
    """Return the file signed by another signer; with a box the signature is visible."""
    signer = SimpleSigner.load_pkcs12_data(pdfs._pkcs12(), other_certs=[], passphrase=b"pw")
    spec = SigFieldSpec(field, box=box) if box or new else None
    out = io.BytesIO()
    meta = PdfSignatureMetadata(field_name=field, **settings)
    PdfSigner(meta, signer, new_field_spec=spec).sign_pdf(IncrementalPdfFileWriter(io.BytesIO(data)), output=out)
    return out.getvalue()


def certified(permission: int, original: bytes | None = None) -> bytes:
    """Return a document with a certifying first signature."""
    return signed(original or pdfs.with_form(), "Author", certify=True, docmdp_permissions=MDPPerm(permission))


def signed_in_spite(data: bytes, field: str = "Second", *, certify: bool = False) -> bytes:
    """Return the file signed with the sandbox's key, against its certification and the constraints of its field."""
    out = io.BytesIO(data)
    embedding = PdfCMSEmbedder().write_cms(field, IncrementalPdfFileWriter(out))
    next(embedding)
    forms = MDPPerm.FILL_FORMS
    rules = SigMDPSetup(md_algorithm="sha256", certify=True, docmdp_perms=forms) if certify else None
    embedding.send(SigObjSetup(sig_placeholder=SignatureObject(bytes_reserved=8192), mdp_setup=rules))
    prepared: tuple[PdfByteRangeDigest, Any] = embedding.send(SigIOSetup(md_algorithm="sha256", in_place=True))
    signer = sandbox_authority().signer("B-B")
    embedding.send(asyncio.run(signer.async_sign(prepared[0].document_digest, digest_algorithm="sha256")))
    return out.getvalue()


def timestamped(data: bytes) -> bytes:
    """Return the file with a document timestamp of the sandbox's service."""
    return stamped(data, sandbox_authority().timestamper("B-T", NOW))


def replace_page(writer: Any) -> None:
    """Replace the content of the first page."""
    content = StreamObject(stream_data=b"BT /F1 18 Tf 72 760 Td (You owe 10,000,000) Tj ET")
    page = writer.root["/Pages"]["/Kids"][0]
    page[pdf_name("/Contents")] = writer.add_object(content)
    writer.update_container(page)


def add_annotation(writer: Any) -> None:
    """Put an annotation over the first page."""
    rectangle = ArrayObject(map(FloatObject, (72, 700, 300, 780)))
    kind = {"/Type": pdf_name("/Annot"), "/Subtype": pdf_name("/FreeText")}
    entries = {**kind, "/Rect": rectangle, "/Contents": pdf_string("Paid")}
    page = writer.root["/Pages"]["/Kids"][0]
    page[pdf_name("/Annots")] = ArrayObject([writer.add_object(_dictionary(entries))])
    writer.update_container(page)


def add_empty_field(writer: Any) -> None:
    """Add a visible, unsigned signature field."""
    append_signature_field(writer, SigFieldSpec("Stamp", box=(72, 600, 300, 780)))


def fill_form(writer: Any) -> None:
    """Fill in the form's first field."""
    field = writer.root["/AcroForm"]["/Fields"][0]
    field[pdf_name("/V")] = pdf_string("ten million")
    writer.update_container(field)


def replace_appearance(writer: Any) -> None:
    """Make a form field show something other than its value (the shadow attack "replace")."""
    field = writer.root["/AcroForm"]["/Fields"][0]
    shown = StreamObject(stream_data=b"BT /F1 12 Tf (ten million) Tj ET")
    field[pdf_name("/AP")] = _dictionary({"/N": writer.add_object(shown)})
    writer.update_container(field)


def change_title(writer: Any) -> None:
    """Change the document information."""
    writer.set_info(_dictionary({"/Title": pdf_string("Another title")}))


def _dictionary(entries: Mapping[str, Any]) -> Any:
    return DictionaryObject({pdf_name(key): value for key, value in entries.items()})


def hide_by_emptying() -> bytes:
    """Hide the text of a page by an overlay, and write the overlay's object again, empty (the shadow attack "hide")."""
    overlay = b"<</Type/XObject/Subtype/Form/BBox[0 0 595 842]"
    objects = pdfs.basic_objects("You owe 10,000,000")
    objects[4] = objects[4].replace(b"/Resources<<", b"/Resources<</XObject<</Over 6 0 R>>")
    objects[5] = pdfs.stream_object(b"BT /F1 18 Tf 72 760 Td (You owe 10,000,000) Tj ET /Over Do")
    objects[6] = pdfs.stream_object(b"1 g 0 0 595 842 re f", overlay[2:])
    data = sealed_by_sandbox(original=pdfs.assemble(objects), when=NOW)
    return pdfs.update(data, {6: pdfs.stream_object(b"", b"/Type/XObject/Subtype/Form/BBox[0 0 1 1]")}, size=60)


def hide_and_replace() -> bytes:
    """Return a signed file with an unused second page tree, used by the table of the update (hide and replace)."""
    objects = pdfs.basic_objects("You owe 10")
    objects[1] = b"<</Type/Catalog/Pages 2 0 R/AcroForm 10 0 R>>"
    objects[10] = b"<</Fields[]>>"
    objects[6] = objects[1].replace(b"2 0 R", b"7 0 R")
    objects[7] = b"<</Type/Pages/Kids[8 0 R]/Count 1>>"
    objects[8] = objects[4].replace(b"/Parent 2", b"/Parent 7").replace(b"5 0 R", b"9 0 R")
    objects[9] = pdfs.stream_object(b"BT /F1 18 Tf 72 760 Td (You owe 10,000,000) Tj ET")
    data = sealed_by_sandbox(original=pdfs.assemble(objects), when=NOW)
    return pdfs.update(data, {50: b"<<>>"}, root=6)


@dataclass(frozen=True)
class Parts:
    """The parts of a signed file around its signature."""

    before: bytes
    contents: bytes
    after: bytes

    @classmethod
    def of(cls, data: bytes) -> Parts:
        """Return the parts around the last signature, by its byte range."""
        start, end = map(int, re.findall(rb"/ByteRange ?\[ ?0 (\d+) (\d+)", data)[-1])
        return cls(data[:start], data[start:end], data[end:])


def renamed(data: bytes, old: bytes, new: bytes) -> bytes:
    """Return the file with a changed name in the certificate of its signature."""
    parts = Parts.of(data)
    contents = parts.contents.lower()
    assert old.hex().encode() in contents
    return parts.before + contents.replace(old.hex().encode(), new.hex().encode()) + parts.after


def with_junk_in_padding(data: bytes) -> bytes:
    """Return the file with other data after the signature in its placeholder."""
    parts = Parts.of(data)
    return parts.before + parts.contents[:-9] + b"deadbeef>" + parts.after


def without_contents() -> bytes:
    """Return a signed file without the content of its signature (universal signature forgery)."""
    parts = Parts.of(signed_pdf(cms))
    return parts.before + b"<>".ljust(len(parts.contents)) + parts.after


@cache
def sealed() -> bytes:
    """Return a document with a form, sealed by the sandbox."""
    return sealed_by_sandbox(original=pdfs.with_form(), when=NOW)


RANGE = "its byte range"
CHANGED = "changes that are not allowed"
FORBIDDEN = "more was changed than the certification permits"

CASES: dict[str, Case] = {
    # sound
    "sealed, B-B": Case(partial(sealed_by_sandbox, "B-B", when=NOW)),
    "sealed, B-LTA": Case(partial(sealed_by_sandbox, "B-LTA", when=NOW)),
    "signed again": Case(lambda: signed(sealed())),
    "signed again, visibly": Case(lambda: signed(sealed(), box=(72, 600, 300, 700)), shown=False),
    "a form filled in": Case(lambda: edited(sealed(), fill_form), shown=False),
    "certified (2), then signed": Case(lambda: signed(certified(2))),
    "document information changed": Case(lambda: edited(sealed(), change_title)),
    "a damaged original, sealed": Case(lambda: sealed_by_sandbox(original=pdfs.damaged()["a shifted table"], when=NOW)),
    "a signature written into its field": Case(lambda: signed_pdf(cms, direct=True)),
    "a hybrid original, sealed": Case(lambda: sealed_by_sandbox(original=pdfs.hybrid_pdf(), when=NOW)),
    # forged
    "page replaced, then signed by anybody": Case(lambda: signed(edited(sealed(), replace_page)), CHANGED, shown=False),
    "page replaced": Case(lambda: edited(sealed(), replace_page), CHANGED, shown=False),
    "annotation added": Case(lambda: edited(sealed(), add_annotation), CHANGED, shown=False),
    "signer renamed": Case(
        lambda: renamed(sealed(), b"Signing Sandbox Seal", b"Acme Bank Board Inc."), "cannot be validated"
    ),
    "certified (1), then filled in": Case(lambda: edited(certified(1), fill_form), FORBIDDEN, shown=False),
    "certified (2), then a visible signature in a new field": Case(
        lambda: signed(certified(2), box=(72, 600, 300, 700)), CHANGED, shown=False
    ),
    "shadow attack: hide, by emptying": Case(hide_by_emptying, CHANGED, shown=False),
    "shadow attack: replace": Case(lambda: edited(sealed(), replace_appearance), shown=False),
    "shadow attack: hide and replace": Case(hide_and_replace, CHANGED, shown=False),
    "an empty visible field added": Case(lambda: edited(sealed(), add_empty_field), "is not signed", shown=False),
    "empty byte range": Case(lambda: signed_pdf(cms, ranged=lambda *_: ()), RANGE),
    "byte range past the end": Case(
        lambda: signed_pdf(cms, ranged=lambda start, end, size: (0, start, end, size)), RANGE
    ),
    "a larger gap in the byte range": Case(
        lambda: signed_pdf(cms, ranged=lambda start, end, size: (0, start - 20, end, size - end)), RANGE
    ),
    "empty contents": Case(without_contents, "cannot be validated"),
    "junk in the padding": Case(lambda: with_junk_in_padding(sealed()), "its placeholder contains data"),
    "a line feed appended": Case(lambda: sealed() + b"\n", "1 byte"),
    "text and an end appended": Case(lambda: sealed() + b"You owe 10,000,000\n%%EOF\n", "structure cannot be parsed"),
    "digest made with SHA-1": Case(lambda: signed_pdf(partial(cms, algorithm="sha1")), "too weak"),
    "a byte changed": Case(lambda: sealed()[:400] + b"!" + sealed()[401:], "digest is wrong"),
}
