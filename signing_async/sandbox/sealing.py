"""Seal completed documents: a visible panel and a PAdES signature by the sandbox's own authority.

pyHanko is imported when the first document is sealed.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from .._files import sync_folder
from .authority import Authority, Level, SealingFailed
from .inspection import HEADER_WINDOW, load_pikepdf
from .panel import SEAL_BOX, Drawn, Panel, Signer, as_pdf, draw

if TYPE_CHECKING:
    from pyhanko.pdf_utils.incremental_writer import IncrementalPdfFileWriter

__all__ = ["Authority", "Panel", "SealingFailed", "Signer", "seal"]

RESERVED: Final[dict[Level, int]] = {"B-B": 8192, "B-T": 16384, "B-LT": 16384, "B-LTA": 16384}
"""Hexadecimal digits reserved for a signature. It needs about 3,000, or 7,000 with a timestamp."""

FIELD_NAME: Final = "SandboxSeal"

_asn1_lock = threading.Lock()  # asn1crypto builds the tables of its classes at their first use: it is not thread-safe
_rebuild_lock = threading.Lock()  # `catch_warnings` changes the filters of the whole process: it is not thread-safe


def seal(
    source: Path, target: Path, *, panel: Panel, authority: Authority, when: datetime, level: Level = "B-B"
) -> None:
    """Write the sealed copy of `source` to `target` atomically. Blocking and thread-safe.

    The original's bytes come first, unchanged (without anything before the `%PDF-` header); one incremental update
    adds the panel's pages and the signature. Levels above B-B add a timestamp to the signature. B-LT and B-LTA append
    an update with certificates and OCSP responses; B-LTA appends another with a document timestamp. A damaged file is
    first repaired by an update that repeats its objects. Raise `SealingFailed` if it cannot be repaired.
    """
    with _replacing(target) as path:
        _copy_from_header(source, path)
        size = path.stat().st_size
        try:
            _seal_checked(path, panel, authority, when, level, repaired=False)
        except _DamagedError:
            os.truncate(path, size)
            try:
                _rebuild(path)
                _seal_checked(path, panel, authority, when, level, repaired=True)
            except _DamagedError as error:
                raise SealingFailed(
                    f"The document {panel.document_name!r} cannot be sealed: the PDF is damaged ({error}). Repair it,"
                    " for example with qpdf, and upload it again."
                ) from None


class _DamagedError(Exception):
    """A file that must be repaired before it can be sealed."""


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces the target on success and is deleted on failure."""
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.")
    path = Path(name)
    try:
        with os.fdopen(descriptor, "r+b") as file:
            yield path
            os.fsync(file.fileno())
        path.replace(target)
    except BaseException:
        path.unlink()
        raise
    sync_folder(target.parent)


def _copy_from_header(source: Path, path: Path) -> None:
    with source.open("rb") as original, path.open("wb") as copy:
        start = original.read(HEADER_WINDOW).find(b"%PDF-")
        original.seek(max(0, start))
        shutil.copyfileobj(original, copy, 2**18)


def _seal_checked(
    path: Path, panel: Panel, authority: Authority, when: datetime, level: Level, *, repaired: bool
) -> None:
    """Seal the file in place; raise if the file or the result is damaged."""
    pages = _count_pages(path, strict=not repaired)
    try:
        with path.open("r+b") as file, _asn1_lock:
            added = asyncio.run(_seal_in_place(file, panel, authority, when, level))
    except OSError:
        raise
    except Exception as error:  # pyHanko raises many exception types for broken files
        raise _DamagedError(f"{type(error).__name__}: {error}") from error
    if _count_pages(path, strict=not repaired) != pages + added:
        raise _DamagedError("its page tree is inconsistent")


def _count_pages(path: Path, *, strict: bool) -> int:
    """Return how many pages a reader finds; raise if the file is unreadable or, with `strict`, damaged."""
    pikepdf = load_pikepdf()
    try:
        with pikepdf.open(path) as pdf:
            count = len(pdf.pages)
            problems = pdf.get_warnings()
    except Exception as error:
        raise _DamagedError(str(error).replace(str(path), "the file")) from None
    if strict and problems:
        raise _DamagedError(str(problems[-1]).replace(str(path), "the file"))
    return count


def _rebuild(path: Path) -> None:
    """Append an incremental update that rewrites every object as a tolerant parser reads it."""
    pikepdf = load_pikepdf()
    out = io.BytesIO()
    try:
        with pikepdf.open(path) as pdf, _rebuild_lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about other defects, which are not repaired
            pdf.trailer["/Size"] = 0  # pikepdf rewrites it only if it is present
            pdf.save(out, object_stream_mode=pikepdf.ObjectStreamMode.disable)
    except Exception as error:
        raise _DamagedError(str(error).replace(str(path), "the file")) from None
    whole = out.getvalue()
    tail = whole.rindex(b"startxref")
    table = int(whole[tail + len(b"startxref") : whole.rindex(b"%%EOF")])
    with path.open("ab") as file:
        file.write(b"\n")
        shift = file.tell()
        head, rows, trailer = whole[:table], *whole[table:tail].split(b"trailer", 1)
        lines = rows.splitlines(keepends=True)
        moved = [b"%010d" % (int(row[:10]) + shift) + row[10:] if row[17:18] == b"n" else row for row in lines]
        file.writelines([head, *moved, b"trailer", trailer, b"startxref\n%d\n%%%%EOF\n" % (table + shift)])


async def _seal_in_place(file: IO[bytes], panel: Panel, authority: Authority, when: datetime, level: Level) -> int:
    """Append the panel and the signature to the file; return how many pages were added."""
    from pyhanko.pdf_utils.incremental_writer import IncrementalPdfFileWriter
    from pyhanko.sign.fields import SigSeedSubFilter
    from pyhanko.sign.signers.cms_embedder import PdfCMSEmbedder, SigIOSetup, SigObjSetup
    from pyhanko.sign.signers.pdf_byterange import SignatureObject
    from pyhanko.sign.signers.pdf_signer import PdfTimeStamper
    from pyhanko.sign.validation.dss import DocumentSecurityStore

    writer = IncrementalPdfFileWriter(file, strict=False)
    drawn = draw(panel, writer, when)
    _append_pages(writer, drawn)
    name = _add_field(writer, drawn)
    _drop_usage_rights(writer)
    placeholder = SignatureObject(
        timestamp=when,
        subfilter=SigSeedSubFilter.PADES,
        reason="Signed by all recipients (sandbox, no legal value)",
        bytes_reserved=RESERVED[level],
    )
    embedding = PdfCMSEmbedder().write_cms(name, writer, existing_fields_only=True)
    next(embedding)
    embedding.send(SigObjSetup(sig_placeholder=placeholder))
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
        await stamper.async_timestamp_pdf(writer, "sha256", bytes_reserved=RESERVED[level], in_place=True)
    return len(drawn.pages)


def _append_pages(writer: IncrementalPdfFileWriter, drawn: Drawn) -> None:
    """Append the panel's pages to the root of the page tree."""
    tree = writer.root["/Pages"]
    kids = tree["/Kids"]
    for page in drawn.pages:
        page.get_object().update(as_pdf({"/Parent": writer.root.raw_get("/Pages")}))
        kids.append(page)
    tree.update(as_pdf({"/Count": int(tree["/Count"]) + len(drawn.pages)}))
    writer.update_container(kids)
    writer.update_container(tree)


def _add_field(writer: IncrementalPdfFileWriter, drawn: Drawn) -> str:
    """Add a signature field with the seal to the last page and the form; return its name."""
    generic: Any = import_module("pyhanko.pdf_utils.generic")
    form = _get_or_create(writer, writer.root, "/AcroForm", {})
    fields = _get_or_create(writer, form, "/Fields", [])
    present = [field.get_object() for field in fields]
    taken = {_entry(field, "/T") for field in present if isinstance(field, dict)}
    names = (FIELD_NAME + number for number in itertools.chain([""], map(str, itertools.count(2))))
    name = next(each for each in names if each not in taken)
    page = drawn.pages[-1]
    entries = {
        "/Type": "/Annot",
        "/Subtype": "/Widget",
        "/FT": "/Sig",
        "/T": generic.pdf_string(name),
        "/Rect": SEAL_BOX,
        "/F": 132,  # print, locked
        "/P": page,
        "/AP": {"/N": drawn.seal},
    }
    field = writer.add_object(as_pdf(entries))
    page.get_object().update(as_pdf({"/Annots": [field]}))
    fields.append(field)
    form.update(as_pdf({"/SigFlags": 3}))  # signatures exist, append only
    writer.update_container(fields)
    writer.update_container(form)
    return name


def _get_or_create(writer: IncrementalPdfFileWriter, holder: Any, key: str, empty: dict[str, Any] | list[Any]) -> Any:
    """Return the holder's entry if it has the type of `empty`; otherwise replace it with `empty`."""
    entry = _entry(holder, key)
    if not isinstance(entry, type(empty)):
        entry = as_pdf(empty)
        holder.update({as_pdf(key): entry})
        writer.update_container(holder)
    return entry


def _entry(holder: Any, key: str) -> Any:
    """Return a dictionary's entry, dereferenced, or None. pyHanko's `get` would return a reference."""
    try:
        return holder[key]
    except KeyError:
        return None


def _drop_usage_rights(writer: IncrementalPdfFileWriter) -> None:
    """Remove usage rights: PDF readers warn about them in a changed file."""
    generic: Any = import_module("pyhanko.pdf_utils.generic")
    rights = _entry(writer.root, "/Perms")
    if isinstance(rights, generic.DictionaryObject):
        for key in ("/UR", "/UR3"):
            rights.pop(key, None)
        writer.update_container(rights)
