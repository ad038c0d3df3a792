"""Judge the signatures of a PDF with pyHanko and with checks that pyHanko lacks.

They require that a byte range excludes only the hexadecimal digits of its signature, a placeholder contains only its
signature, no signature is ignored because of its format, visible fields are signed, and nothing follows the last
revision.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

from asn1crypto import parser, x509
from pyhanko.pdf_utils.generic import DictionaryObject, IndirectObject
from pyhanko.pdf_utils.misc import PdfStrictReadError
from pyhanko.pdf_utils.reader import PdfFileReader
from pyhanko.sign.diff_analysis import DiffResult, ModificationLevel
from pyhanko.sign.fields import enumerate_sig_fields
from pyhanko.sign.validation.pdf_embedded import EmbeddedPdfSignature, read_certification_data
from pyhanko.sign.validation.status import SignatureCoverageLevel

from .trust import Validator, indication

__all__ = ["judge"]

LONGEST = 400
"""The maximum number of characters shown of a text from the file."""

_SHORT = {"common_name": "CN", "organization_name": "O", "organizational_unit_name": "OU", "country_name": "C"}


async def judge(
    data: bytes, roots: Sequence[bytes] | None = None, *, fetch: bool = False, form_filling: bool = True
) -> dict[str, Any]:
    """Return the fields of a `sealed.Report` for any file. ``roots`` are certificates in DER; None means no trust.

    A file that violates the format is read a second time, as tolerantly as PDF readers do. What was appended to such a
    file cannot be determined, so one signature must cover all of it.
    """
    certificates = None if roots is None else [x509.Certificate.load(root) for root in roots]
    for strict in (True, False):
        try:
            reader = PdfFileReader(io.BytesIO(data), strict=strict)
            if not (strict and reader.xrefs.hybrid_xrefs_present):
                return await _Judge(data, reader, Validator(reader, certificates, fetch), form_filling).report()
        except MemoryError:
            raise
        except Exception as error:  # pyHanko raises many types for hostile or broken files and documents none
            reason = str(error) or type(error).__name__
    problem = f"its structure cannot be parsed: the file is damaged, truncated or misleading ({_plain(reason)})"
    return {"revisions": 0, "seals": [], "problems": [problem], "trust_problems": []}


@dataclasses.dataclass
class Signature:
    """The findings on one signature, filled in step by step: pyHanko's objects, and the fields of `sealed.Seal`."""

    value: Any
    kind: str
    field: str
    subfilter: str
    embedded: Any = None
    status: Any = None
    """pyHanko's verdict without roots; None if the signature cannot be validated."""
    signer: str | None = None
    subject: str | None = None
    issuer: str | None = None
    signed_at: Any = None
    time_source: str | None = None
    covers: int = 0
    revision: int = 0
    digest_algorithm: str | None = None
    digest_right: bool | None = None
    key_right: bool | None = None
    level: str | None = None
    certification: int | None = None
    changes: list[str] = dataclasses.field(default_factory=list)
    shown: bool | None = None
    trusted: bool | None = None
    revocation: str | None = None
    problems: list[str] = dataclasses.field(default_factory=list)
    trust_problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_valid(self) -> bool:
        return bool(self.digest_right and self.key_right)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of `sealed.Seal`."""
        fields = {name: value for name, value in vars(self).items() if name not in ("value", "embedded", "status")}
        return {**fields, "signed_at": None if self.signed_at is None else self.signed_at.isoformat()}


class _Judge:
    """The verification of one file."""

    def __init__(self, data: bytes, reader: PdfFileReader, validator: Validator, form_filling: bool) -> None:
        self._data = data
        self._reader = reader
        self._validator = validator
        self._form_filling = form_filling

    async def report(self) -> dict[str, Any]:
        found = []
        for name, reference, holder in enumerate_sig_fields(self._reader, filled_status=True):
            value = reference.get_object()
            if isinstance(value, DictionaryObject):
                found.append(await self._examine(name, value, holder.get_object()))
        signatures = sorted(found, key=lambda signature: signature.covers)
        for signature in signatures:
            self._check_certification(signature, signatures)
            if signature.status is not None:
                self._check_changes(signature, signatures)
        await self._validator.judge_trust(signatures)
        await self._validator.judge_levels(signatures)
        problems = _labelled(signatures, "problems")
        if not signatures:
            problems.append("it is not signed")
        elif all(signature.kind == "timestamp" for signature in signatures):
            problems.append("it is timestamped, not signed")
        if signatures and (trailing := self._bytes_after(signatures)):
            problems.append(f"{trailing} bytes after its last revision are not covered by any signature")
        return {
            "revisions": self._reader.xrefs.total_revisions,
            "seals": [signature.as_dict() for signature in signatures],
            "problems": problems,
            "trust_problems": _labelled(signatures, "trust_problems"),
        }

    async def _examine(self, name: str, value: Any, holder: Any) -> Signature:
        kind = "timestamp" if _entry(value, "/Type") == "/DocTimeStamp" else "signature"
        subfilter = _plain(str(_entry(value, "/SubFilter", "")).lstrip("/"))
        signature = Signature(value, kind, _plain(name), subfilter)
        try:
            signature.embedded = EmbeddedPdfSignature(self._reader, _with_reference(holder), name)
            signature.revision = signature.embedded.signed_revision + 1
            signature.digest_algorithm = signature.embedded.external_md_algorithm
            self._check_range(signature)
            status = await self._validator.check_integrity(signature)
            _check_status(signature, status)
            _record_names(signature, status.signing_cert)
            signature.status, signature.digest_right, signature.key_right = status, status.intact, status.valid
        except (MemoryError, PdfStrictReadError):
            raise
        except Exception as error:  # of many types, as in `judge`
            signature.problems.append(f"it cannot be validated: {_plain(str(error) or type(error).__name__)}")
        return signature

    def _check_range(self, signature: Signature) -> None:
        """Check that the byte range covers the file up to some end, except the hexadecimal digits of the signature.

        pyHanko compares lengths only if the range ends with the file. It also accepts shorter encodings of the
        signature, such as a literal string, which leave room for unsigned bytes.
        """
        numbers = [int(number) for number in signature.embedded.byte_range]
        contents = signature.embedded.pkcs7_content
        if len(numbers) != 4 or numbers[0] != 0 or min(numbers) < 0:
            signature.problems.append(f"its byte range is invalid: {_plain(str(numbers))}")
            return
        start, end, covers = numbers[1], numbers[2], numbers[2] + numbers[3]
        missing = covers - len(self._data)
        if self._data[start:end].lower() != b"<%b>" % contents.hex().encode():
            signature.problems.append("its byte range excludes more or other bytes than the signature itself")
        elif missing > 0:
            signature.problems.append(f"its byte range ends {missing} bytes past the file's end")
        else:
            signature.covers = covers
        if contents[parser.peek(contents) :].strip(b"\0"):
            signature.problems.append("its placeholder contains data after the signature, not covered by any signature")

    def _check_changes(self, signature: Signature, signatures: Sequence[Signature]) -> None:
        """Record the changes after the signature and whether they are visible."""
        status, embedded = signature.status, signature.embedded
        result, changes, problems = status.diff_result, signature.changes, signature.problems
        signature.shown = signature.is_valid and signature.covers > 0 and isinstance(result, DiffResult)
        if not isinstance(result, DiffResult):
            problems.append(f"it was followed by changes that are not allowed: {_plain(str(result))}")
            return
        if not self._reader.strict and status.coverage != SignatureCoverageLevel.ENTIRE_FILE:
            problems.append("the file violates the PDF format, so later changes cannot be determined")
        store = _entry(self._reader.root, "/DSS")
        if store is not None and self._reader.xrefs.get_last_change(store.container_ref) > embedded.signed_revision:
            changes.append("validation data was added")
        for other in signatures:
            if other.kind == "timestamp" and other.covers > signature.covers:
                changes.append(f"a document timestamp was added in the field {other.field!r}")
        filled = self._record_fields(signature, sorted(result.changed_form_fields))
        if filled and not self._form_filling:
            problems.append(f"form fields were filled in after it: {', '.join(filled)}")
        if status.modification_level >= ModificationLevel.LTA_UPDATES and not changes:
            changes.append("document information was changed")
        if getattr(status, "docmdp_ok", None) is False:
            problems.append(f"more was changed than the certification permits: {'; '.join(changes)}")

    def _record_fields(self, signature: Signature, names: Sequence[str]) -> list[str]:
        """Record the changed form fields, and return those filled in with something other than a signature."""
        filled = []
        signed = {name: (value, holder) for name, value, holder in enumerate_sig_fields(self._reader)}
        for name in names:
            shown = repr(_plain(name))
            value, holder = signed.get(name, (None, None))
            if holder is None:
                signature.changes.append(f"the form field {shown} was filled in")
                filled.append(shown)
            elif not _is_visible(holder.get_object()):
                signature.changes.append(f"a signature was added in the field {shown}")
                continue
            elif value is None:
                signature.problems.append(f"the visible field {shown} was added after it and is not signed")
            else:
                signature.changes.append(f"a visible signature was added in the field {shown}")
            signature.shown = False
        return filled

    def _check_certification(self, signature: Signature, signatures: Sequence[Signature]) -> None:
        certification = read_certification_data(self._reader)
        if certification is None or certification.author_sig != signature.value:
            return
        signature.certification = certification.permission and certification.permission.value
        if any(other.covers < signature.covers for other in signatures if other.kind == "signature"):
            signature.problems.append("it certifies the document but is not its first signature")

    def _bytes_after(self, signatures: Sequence[Signature]) -> int:
        """Count the bytes after the last revision; white space counts only after a signature that covers the end."""
        end = self._data.find(b"%%EOF", self._data.rfind(b"startxref")) + len(b"%%EOF")
        covers = signatures[-1].covers
        return len(self._data) - covers if covers >= end else len(self._data[end:].strip(b"\0\t\n\f\r "))


class _DirectValue:
    """A stand-in for the reference to a signature that is written directly into its field."""

    def __init__(self, value: Any, reference: Any) -> None:
        self._value = value
        self.reference = reference

    def get_object(self) -> Any:
        return self._value


def _with_reference(holder: Any) -> Any:
    """Return the field with a value that pyHanko accepts as a reference."""
    value = holder.raw_get("/V")
    if isinstance(value, IndirectObject):
        return holder
    copy = DictionaryObject(holder)
    dict.__setitem__(copy, "/V", _DirectValue(value, holder.container_ref))
    return copy


def _check_status(signature: Signature, status: Any) -> None:
    """Record the problems that pyHanko found in the signature itself, and its time."""
    problems = signature.problems
    if not status.intact:
        problems.append("its digest is wrong: the signed content was changed")
    if not status.valid:
        problems.append("its signature does not match the key of its certificate")
    if indication(status) == "CERTIFICATE_CHAIN_GENERAL_FAILURE":
        problems.append("a certificate in it cannot be read")
    if indication(status).startswith("CRYPTO_CONSTRAINTS"):
        problems.append(f"its algorithms are too weak: {status.md_algorithm} and {status.pkcs7_signature_mechanism}")
    if signature.kind == "timestamp":
        signature.signed_at, signature.time_source = status.timestamp, "timestamp"
        return
    signature.signed_at, signature.time_source = signature.embedded.self_reported_timestamp, "signer"
    for token in (status.timestamp_validity, status.content_timestamp_validity):
        if token is not None and not (token.intact and token.valid):
            problems.append("its timestamp was changed or belongs to other data")
    if status.timestamp_validity is not None:
        signature.signed_at, signature.time_source = status.timestamp_validity.timestamp, "timestamp"
    if not status.seed_value_ok:
        problems.append(f"it violates the constraints of its field: {_plain(str(status.seed_value_constraint_error))}")


def _record_names(signature: Signature, certificate: Any) -> None:
    signature.subject, signature.issuer = _name(certificate.subject), _name(certificate.issuer)
    signature.signer = _plain(str(certificate.subject.native.get("common_name", signature.subject))) or None


def _name(name: Any) -> str:
    """Return a certificate's name, such as ``C=SE, CN=Anna Berg``."""
    return _plain(", ".join(f"{_SHORT.get(kind, kind)}={text}" for kind, text in name.native.items()))


def _is_visible(holder: Any) -> bool:
    """Return whether the field or one of its widgets has an area on a page."""
    for widget in (holder, *(kid.get_object() for kid in _entry(holder, "/Kids", ()))):
        left, bottom, right, top = _entry(widget, "/Rect", (0, 0, 0, 0))
        if left != right and bottom != top:
            return True
    return False


def _labelled(signatures: Sequence[Signature], name: str) -> list[str]:
    """Return these problems of all signatures, each with its signature."""
    return [
        f"its {signature.kind}: {text}" if len(signatures) == 1 else f"{signature.kind} {number}: {text}"
        for number, signature in enumerate(signatures, start=1)
        for text in getattr(signature, name)
    ]


def _entry(entries: Any, key: str, default: Any = None) -> Any:
    """Return an entry of a dictionary. pyHanko's `get` may return a reference to it instead."""
    try:
        return entries[key]
    except KeyError:
        return default


def _plain(text: str) -> str:
    """Return a text from the file as one line of printable characters of limited length."""
    return "".join(each if each.isprintable() else " " for each in text[:LONGEST])
