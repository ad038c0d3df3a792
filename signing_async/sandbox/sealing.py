"""Seal completed documents: an authority of the sandbox's own, a visible panel, and a PAdES-B-B signature over it all.

pyHanko and cryptography are imported when the first document is sealed or the first authority opened.
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
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from .files import sync_folder
from .inspection import HEADER_WINDOW, load_pikepdf
from .panel import SEAL_BOX, Drawn, Panel, Signer, as_pdf, draw

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from pyhanko.pdf_utils.incremental_writer import IncrementalPdfFileWriter

__all__ = ["Authority", "Panel", "SealingFailed", "Signer", "seal"]

AUTHORITY_FILE: Final = "authority.pem"
LIFETIME: Final = timedelta(days=36525)
LONG_AGO: Final = datetime(2020, 1, 1, tzinfo=UTC)
RESERVED: Final = 8192
"""Hexadecimal digits kept free for the signature: it takes some 3,000."""

FIELD_NAME: Final = "SandboxSeal"


_repairing = threading.Lock()


class SealingFailed(Exception):
    """The document cannot be sealed; the text says why."""


@dataclass(frozen=True)
class Authority:
    """Who seals: a throw-away certificate authority, and a signing certificate that it issued once.

    The authority's own key is forgotten as soon as it has issued that one certificate, so that trusting
    `certificate_pem` while trying things out means to trust nothing else.
    """

    certificate_pem: bytes
    signer: Any

    @classmethod
    def open(cls, folder: Path, now: datetime) -> Authority:
        """The authority kept in a folder, made on first use; any number of processes may open it at once.

        Its certificates are valid for validators that go by the wall clock and for a sandbox whose clock was moved
        by years: from 2020 (or a year before `now`) on for a century.
        """
        path = folder / AUTHORITY_FILE
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _create(path, _new_authority(now))
        return cls._load(path)

    @classmethod
    def _load(cls, path: Path) -> Authority:
        from pyhanko.sign.signers.pdf_cms import SimpleSigner

        pem, x509, keys = (import_module(f"asn1crypto.{name}") for name in ("pem", "x509", "keys"))
        registry: Any = import_module("pyhanko_certvalidator.registry")
        try:
            (_, _, key), (_, _, certificate), (_, _, root) = pem.unarmor(path.read_bytes(), multiple=True)
            signer = SimpleSigner(
                signing_cert=x509.Certificate.load(certificate, strict=True),
                signing_key=keys.PrivateKeyInfo.load(key, strict=True),
                cert_registry=registry.SimpleCertificateStore.from_certs([x509.Certificate.load(root, strict=True)]),
            )
        except ValueError as error:
            said = f"{path} holds no key with two certificates ({error}); remove it, and a new authority will be made."
            raise SealingFailed(said) from None
        return cls(pem.armor("CERTIFICATE", root), signer)


def _create(path: Path, content: bytes) -> None:
    """Write a private file that is either whole or absent; the first of several writers wins."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # readable by its owner alone
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(name, path)
        except FileExistsError:
            return
        sync_folder(path.parent)
    finally:
        Path(name).unlink()


def _new_authority(now: datetime) -> bytes:
    """A signing key, its certificate and the issuing authority's certificate, in PEM."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    root_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root = _certificate("Signing Sandbox CA (no legal value)", root_key, root_key, now)
    certificate = _certificate("Signing Sandbox Seal (no legal value)", key, root_key, now, issuer=root)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return b"".join([private, *(each.public_bytes(serialization.Encoding.PEM) for each in (certificate, root))])


def _certificate(
    name: str,
    key: EllipticCurvePrivateKey,
    issuing_key: EllipticCurvePrivateKey,
    now: datetime,
    *,
    issuer: Any = None,
) -> Any:
    """A certificate for the key: an authority's own, or one for signatures that `issuer` stands for."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    start = min(LONG_AGO, now - timedelta(days=366))
    is_root = issuer is None
    usage = x509.KeyUsage(
        digital_signature=not is_root,
        content_commitment=not is_root,
        key_cert_sign=is_root,
        crl_sign=is_root,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if is_root else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(max(LONG_AGO, now) + LIFETIME)
        .add_extension(x509.BasicConstraints(ca=is_root, path_length=0 if is_root else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuing_key.public_key()), critical=False)
        .sign(issuing_key, hashes.SHA256())
    )


def seal(source: Path, target: Path, *, panel: Panel, authority: Authority, when: datetime) -> None:
    """Write the sealed copy of `source` to `target`, whole or not at all; blocking, and safe in any thread.

    The original's bytes come first, unchanged (without what precedes its `%PDF-` header, if anything); one
    incremental update adds the panel's pages and the signature. A file that readers have to repair is first
    repaired the same way, by an update that repeats its objects. Raises `SealingFailed` when nothing helps.
    """
    with _replacing(target) as path:
        _copy_from_header(source, path)
        size = path.stat().st_size
        try:
            _seal_checked(path, panel, authority, when, repaired=False)
        except _DamagedError:
            os.truncate(path, size)
            try:
                _rebuild(path)
                _seal_checked(path, panel, authority, when, repaired=True)
            except _DamagedError as error:
                said = f"The document {panel.document_name!r} cannot be sealed, it is damaged: {error}"
                raise SealingFailed(said) from None


class _DamagedError(Exception):
    """The file has to be repaired before it can be sealed."""


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A file beside the target that takes its place when all went well, and is gone otherwise."""
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


def _seal_checked(path: Path, panel: Panel, authority: Authority, when: datetime, *, repaired: bool) -> None:
    """Seal the file in place; raises when it, or what became of it, needs repair."""
    pages = _count_pages(path, whole=not repaired)
    try:
        with path.open("r+b") as file:
            added = _seal_in_place(file, panel, authority, when)
    except OSError:
        raise
    except Exception as error:  # pyHanko meets a hostile or broken file with many types, and none is a promise
        raise _DamagedError(f"{type(error).__name__}: {error}") from error
    if _count_pages(path, whole=not repaired) != pages + added:
        raise _DamagedError("its page tree does not hold together.")


def _count_pages(path: Path, *, whole: bool) -> int:
    """How many pages a reader finds; raises when there are none to find, or the file that is to be whole is not."""
    pikepdf = load_pikepdf()
    try:
        with pikepdf.open(path) as pdf:
            count = len(pdf.pages)
            complaints = pdf.get_warnings()
    except Exception as error:
        raise _DamagedError(str(error).replace(str(path), "the file")) from None
    if whole and complaints:
        raise _DamagedError(str(complaints[-1]).replace(str(path), "the file"))
    return count


def _rebuild(path: Path) -> None:
    """Append an update that repeats all objects as a tolerant reader found them, and makes the damaged part moot."""
    pikepdf = load_pikepdf()
    out = io.BytesIO()
    try:
        with pikepdf.open(path) as pdf, _repairing, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what else is odd in the file, which is to stay as it is
            pdf.trailer["/Size"] = 0  # written anew, but only where it was not lost
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


def _seal_in_place(file: IO[bytes], panel: Panel, authority: Authority, when: datetime) -> int:
    """Append the panel and the signature to the file; returns how many pages were added."""
    from pyhanko.pdf_utils.incremental_writer import IncrementalPdfFileWriter
    from pyhanko.sign.fields import SigSeedSubFilter
    from pyhanko.sign.signers.cms_embedder import PdfCMSEmbedder, SigIOSetup, SigObjSetup
    from pyhanko.sign.signers.pdf_byterange import SignatureObject

    writer = IncrementalPdfFileWriter(file, strict=False)
    drawn = draw(panel, writer, when)
    _append_pages(writer, drawn)
    name = _add_field(writer, drawn)
    _drop_usage_rights(writer)
    placeholder = SignatureObject(
        timestamp=when,
        subfilter=SigSeedSubFilter.PADES,
        reason="Signed by all recipients (sandbox, no legal value)",
        bytes_reserved=RESERVED,
    )
    embedding = PdfCMSEmbedder().write_cms(name, writer, existing_fields_only=True)
    next(embedding)
    embedding.send(SigObjSetup(sig_placeholder=placeholder))
    digest, _ = embedding.send(SigIOSetup(md_algorithm="sha256", in_place=True))
    signature = authority.signer.async_sign(digest.document_digest, digest_algorithm="sha256", use_pades=True)
    embedding.send(asyncio.run(signature))
    return len(drawn.pages)


def _append_pages(writer: IncrementalPdfFileWriter, drawn: Drawn) -> None:
    """Put the panel's pages behind all others, as kids of the page tree's root."""
    tree = writer.root["/Pages"]
    kids = tree["/Kids"]
    for page in drawn.pages:
        page.get_object().update(as_pdf({"/Parent": writer.root.raw_get("/Pages")}))
        kids.append(page)
    tree.update(as_pdf({"/Count": int(tree["/Count"]) + len(drawn.pages)}))
    writer.update_container(kids)
    writer.update_container(tree)


def _add_field(writer: IncrementalPdfFileWriter, drawn: Drawn) -> str:
    """Put a signature field that shows the seal on the last page and into the form; returns its name."""
    generic: Any = import_module("pyhanko.pdf_utils.generic")
    form = _own(writer, writer.root, "/AcroForm", {})
    fields = _own(writer, form, "/Fields", [])
    present = [field.get_object() for field in fields]
    taken = {field.get("/T") for field in present if isinstance(field, dict)}
    names = (FIELD_NAME + number for number in itertools.chain([""], map(str, itertools.count(2))))
    name = next(each for each in names if each not in taken)
    page = drawn.pages[-1]
    entries = {
        "/Type": "/Annot",
        "/Subtype": "/Widget",
        "/FT": "/Sig",
        "/T": generic.pdf_string(name),
        "/Rect": SEAL_BOX,
        "/F": 132,  # printed, locked
        "/P": page,
        "/AP": {"/N": drawn.seal},
    }
    field = writer.add_object(as_pdf(entries))
    page.get_object().update(as_pdf({"/Annots": [field]}))
    fields.append(field)
    form.update(as_pdf({"/SigFlags": 3}))  # signed, and to be changed by appending only
    writer.update_container(fields)
    writer.update_container(form)
    return name


def _own(writer: IncrementalPdfFileWriter, holder: Any, key: str, empty: dict[str, Any] | list[Any]) -> Any:
    """The holder's entry when it is of the type of `empty`, else a new one in its place."""
    entry = holder.get(key)
    if not isinstance(entry, type(empty)):
        entry = as_pdf(empty)
        holder.update({as_pdf(key): entry})
        writer.update_container(holder)
    return entry


def _drop_usage_rights(writer: IncrementalPdfFileWriter) -> None:
    """Usage rights vouch for the file as it was: readers warn about a changed file that still claims them."""
    generic: Any = import_module("pyhanko.pdf_utils.generic")
    rights = writer.root.get("/Perms")
    if isinstance(rights, generic.DictionaryObject):
        for key in ("/UR", "/UR3"):
            rights.pop(key, None)
        writer.update_container(rights)
