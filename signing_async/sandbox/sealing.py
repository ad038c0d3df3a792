"""Seal a completed document: a visible panel and a PAdES signature by the sandbox's own authority."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from datetime import datetime
from pathlib import Path
from typing import IO

import pikepdf
from pyhanko.pdf_utils.incremental_writer import IncrementalPdfFileWriter
from pyhanko.sign.fields import SigFieldSpec, SigSeedSubFilter
from pyhanko.sign.signers.cms_embedder import PdfCMSEmbedder, SigAppearanceSetup, SigIOSetup, SigObjSetup
from pyhanko.sign.signers.pdf_byterange import SignatureObject
from pyhanko.sign.signers.pdf_signer import PdfTimeStamper
from pyhanko.sign.validation.dss import DocumentSecurityStore
from pyhanko.stamp import TextStampStyle

from .._files import sync_folder
from .authority import Authority
from .inspection import HEADER_WINDOW
from .panel import SEAL_BOX, Panel, draw
from .refused import Refused

RESERVED = 16384  # hexadecimal digits; a signature needs about 3,000, or 7,000 with a timestamp
FIELD_NAME = "SandboxSeal"
_STAMP = TextStampStyle(stamp_text="Sealed electronically by the signing sandbox\n%(ts)s", background=None)

_lock = threading.Lock()  # asn1crypto builds the tables of its classes at their first use: it is not thread-safe


def seal(source: Path, target: Path, *, panel: Panel, authority: Authority, when: datetime, level: str = "B-B") -> None:
    """Write the sealed copy of `source` to `target`. Blocking and thread-safe.

    The original's bytes come first, unchanged (without anything before the `%PDF-` header); one incremental update
    adds the panel's pages and the signature. Levels above B-B add a timestamp to the signature. B-LT and B-LTA append
    an update with certificates and OCSP responses; B-LTA appends another with a document timestamp. A damaged file is
    first rewritten, which repairs it. Raise `Refused`, and leave no file, if it cannot be repaired.
    """
    for repair in (False, True):
        try:
            _copy(source, target, repair=repair)
            with target.open("r+b") as file, _lock:
                asyncio.run(_sign(file, panel, authority, when, level))
                os.fsync(file.fileno())
            sync_folder(target.parent)
            return
        except OSError:
            target.unlink(missing_ok=True)
            raise
        except Exception as error:  # pikepdf and pyHanko raise many exception types for damaged files
            target.unlink(missing_ok=True)
            problem = f"{type(error).__name__}: {error}".replace(str(source), "the file")
    message = f"The document {panel.document_name!r} cannot be sealed: the PDF is damaged ({problem}). Repair it,"
    raise Refused(409, "cannot_be_sealed", f"{message} for example with qpdf, and upload it again.")


def _copy(source: Path, target: Path, *, repair: bool) -> None:
    """Copy the file from its header on, or rewrite it. Raise if it is damaged and not to be repaired."""
    with pikepdf.open(source) as pdf:
        _ = len(pdf.pages)  # reads the page tree
        if repair:
            pdf.trailer["/Size"] = 0  # pikepdf rewrites it only if it is present
            pdf.save(target)
            return
        if problems := pdf.get_warnings():
            raise ValueError(problems[0])
    with source.open("rb") as original, target.open("wb") as copy:
        original.seek(original.read(HEADER_WINDOW).find(b"%PDF-"))
        shutil.copyfileobj(original, copy, 2**18)


async def _sign(file: IO[bytes], panel: Panel, authority: Authority, when: datetime, level: str) -> None:
    """Append the panel and the signature to the file."""
    writer = IncrementalPdfFileWriter(file, strict=False)
    draw(panel, writer, when)
    field = SigFieldSpec(FIELD_NAME, on_page=-1, box=SEAL_BOX)
    embedding = PdfCMSEmbedder(new_field_spec=field).write_cms(FIELD_NAME, writer)
    next(embedding)
    placeholder = SignatureObject(
        timestamp=when,
        subfilter=SigSeedSubFilter.PADES,
        reason="Signed by all recipients (sandbox, no legal value)",
        bytes_reserved=RESERVED,
    )
    appearance = SigAppearanceSetup(style=_STAMP, timestamp=when, name=None)
    embedding.send(SigObjSetup(sig_placeholder=placeholder, appearance_setup=appearance))
    digest, _ = embedding.send(SigIOSetup(md_algorithm="sha256", in_place=True))
    signature = await authority.signer(level).async_sign(
        digest.document_digest,
        digest_algorithm="sha256",
        use_pades=True,
        timestamper=authority.timestamper(level, when),
    )
    contents = embedding.send(signature)
    if level in ("B-LT", "B-LTA"):
        DocumentSecurityStore.add_dss(file, contents, **authority.evidence(when), strict=False)
    if level == "B-LTA":
        writer = IncrementalPdfFileWriter(file, strict=False)
        stamper = PdfTimeStamper(authority.timestamper(level, when))
        await stamper.async_timestamp_pdf(writer, "sha256", bytes_reserved=RESERVED, in_place=True)
