"""Judge the signatures of a PDF with pyHanko and with checks that pyHanko lacks.

They require that a byte range excludes only the hexadecimal digits of its signature, a placeholder contains only its
signature, no signature is ignored because of its format, visible fields are signed, and nothing follows the last
revision.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

from asn1crypto import parser
from pyhanko.pdf_utils.generic import DictionaryObject, IndirectObject
from pyhanko.pdf_utils.misc import PdfStrictReadError
from pyhanko.pdf_utils.reader import PdfFileReader
from pyhanko.sign.diff_analysis import DiffResult, ModificationLevel
from pyhanko.sign.fields import enumerate_sig_fields
from pyhanko.sign.validation.pdf_embedded import EmbeddedPdfSignature, read_certification_data
from pyhanko.sign.validation.status import SignatureCoverageLevel

from .signature import Options, Signature, byte_count, entry, indication, plain
from .trust import Validator

__all__ = ["judge"]

_PERMITTED = {1: "no changes", 2: "form filling and signatures only", 3: "form filling, signatures and comments only"}


async def judge(data: bytes, options: Options) -> dict[str, Any]:
    """Return the fields of a `sealed.Report` for any file.

    A file that violates the format is read a second time, as tolerantly as PDF readers do. What was appended to such a
    file cannot be determined, so one signature must cover all of it.
    """
    for strict in (True, False):
        try:
            reader = PdfFileReader(io.BytesIO(data), strict=strict)
            if not (strict and reader.xrefs.hybrid_xrefs_present):
                return await _Judge(data, reader, options).report()
        except MemoryError:
            raise
        except Exception as error:  # pyHanko raises many types for hostile or broken files and documents none
            reason = str(error) or type(error).__name__
    problem = f"its structure cannot be parsed: the file is damaged, truncated or misleading ({plain(reason)})"
    return {"revisions": 0, "seals": [], "problems": [problem], "trust_problems": []}


class _Judge:
    """The verification of one file."""

    def __init__(self, data: bytes, reader: PdfFileReader, options: Options) -> None:
        self._data = data
        self._reader = reader
        self._form_filling = options.form_filling
        self._validator = Validator(reader, options)

    async def report(self) -> dict[str, Any]:
        found = [await self._examine(*each) for each in self._fields()]
        signatures = sorted(found, key=lambda signature: signature.covers)
        for signature in signatures:
            self._check_certification(signature, signatures)
            if signature.status is not None:
                self._check_changes(signature, signatures)
        await self._validator.judge_trust(signatures)
        for signature in signatures:
            await self._validator.judge_level(signature, signatures)
        problems = [f"{_label(each, signatures)}: {text}" for each in signatures for text in each.problems]
        if not signatures:
            rights = entry(self._reader.root, "/Perms", {}).keys() & {"/UR", "/UR3"}
            problems.append("it has usage rights but no signature" if rights else "it is not signed")
        elif all(each.kind == "timestamp" for each in signatures):
            problems.append("it is timestamped, not signed")
        if signatures and (trailing := self._bytes_after(signatures)):
            problems.append(f"{byte_count(trailing)} after its last revision, not covered by any signature")
        return {
            "revisions": self._reader.xrefs.total_revisions,
            "seals": [signature.as_dict() for signature in signatures],
            "problems": problems,
            "trust_problems": [
                f"{_label(each, signatures)}: {text}" for each in signatures for text in each.trust_problems
            ],
        }

    def _fields(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield the names, values and fields of all filled signature fields."""
        for name, value, field in enumerate_sig_fields(self._reader, filled_status=True):
            found = value.get_object()
            if isinstance(found, DictionaryObject):
                yield name, found, field.get_object()

    async def _examine(self, name: str, value: Any, field: Any) -> Signature:
        kind = "timestamp" if entry(value, "/Type") == "/DocTimeStamp" else "signature"
        signature = Signature(kind, name, value)
        try:
            signature.embedded = EmbeddedPdfSignature(self._reader, _with_reference(field), name)
            self._check_range(signature)
            signature.status = await self._validator.check_integrity(signature)
            _check_status(signature)
        except (MemoryError, PdfStrictReadError):
            raise
        except Exception as error:  # of many types, as in `judge`
            signature.problems.append(f"it cannot be validated: {plain(str(error) or type(error).__name__)}")
            signature.status = None
        return signature

    def _check_range(self, signature: Signature) -> None:
        """Check that the byte range covers the file up to some end, except the hexadecimal digits of the signature.

        pyHanko compares lengths only if the range ends with the file. It also accepts shorter encodings of the
        signature, such as a literal string, which leave room for unsigned bytes.
        """
        numbers = [int(number) for number in signature.embedded.byte_range]
        contents = signature.embedded.pkcs7_content
        if len(numbers) != 4 or numbers[0] != 0 or min(numbers) < 0:
            signature.problems.append(f"its byte range is invalid: {plain(str(numbers))}")
            return
        start, end, covers = numbers[1], numbers[2], numbers[2] + numbers[3]
        if self._data[start:end].lower() != b"<%b>" % contents.hex().encode():
            signature.problems.append("its byte range excludes more or other bytes than the signature itself")
        elif covers > len(self._data):
            signature.problems.append(f"its byte range ends {byte_count(covers - len(self._data))} past the file's end")
        else:
            signature.covers = covers
        if contents[parser.peek(contents) :].strip(b"\0"):
            signature.problems.append("its placeholder contains data after the signature, not covered by any signature")

    def _check_changes(self, signature: Signature, signatures: Sequence[Signature]) -> None:
        """Record the changes after the signature and whether they are visible."""
        status, embedded = signature.status, signature.embedded
        result, level = status.diff_result, status.modification_level
        signature.shown = signature.is_valid and signature.covers > 0 and isinstance(result, DiffResult)
        if not isinstance(result, DiffResult):
            signature.problems.append(f"it was followed by changes that are not allowed: {plain(str(result))}")
            return
        if not self._reader.strict and status.coverage != SignatureCoverageLevel.ENTIRE_FILE:
            signature.problems.append("the file violates the PDF format, so later changes cannot be determined")
        if self._has_newer_store(embedded.signed_revision):
            signature.changes.append("validation data was added")
        stamps = [other for other in signatures if other.kind == "timestamp" and other.covers > signature.covers]
        signature.changes += [
            f"a document timestamp was added in the field {plain(each.field_name)!r}" for each in stamps
        ]
        filled = self._record_fields(signature, sorted(result.changed_form_fields))
        if filled and not self._form_filling:
            signature.problems.append(f"form fields were filled in after it: {', '.join(filled)}")
        if level >= ModificationLevel.LTA_UPDATES and not signature.changes:
            signature.changes.append("document information was changed")
        if getattr(status, "docmdp_ok", None) is False:
            permitted = _PERMITTED[embedded.docmdp_level.value]
            signature.problems.append(f"it permits {permitted}, but more was changed: {'; '.join(signature.changes)}")

    def _record_fields(self, signature: Signature, names: Sequence[str]) -> list[str]:
        """Record the changed form fields, and return those filled in with something other than a signature."""
        filled = []
        signed = {name: (value, field) for name, value, field in enumerate_sig_fields(self._reader)}
        for name in names:
            shown = repr(plain(name))
            value, field = signed.get(name, (None, None))
            if field is None:
                signature.changes.append(f"the form field {shown} was filled in")
                filled.append(shown)
            elif not _is_visible(field.get_object()):
                signature.changes.append(f"a signature was added in the field {shown}")
                continue
            elif value is None:
                signature.problems.append(f"the visible field {shown} was added after it and is not signed")
            else:
                signature.changes.append(f"a visible signature was added in the field {shown}")
            signature.shown = False
        return filled

    def _has_newer_store(self, revision: int) -> bool:
        store = entry(self._reader.root, "/DSS")
        return store is not None and self._reader.xrefs.get_last_change(store.container_ref) > revision

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


def _with_reference(field: Any) -> Any:
    """Return the field with a value that pyHanko accepts as a reference."""
    value = field.raw_get("/V")
    if isinstance(value, IndirectObject):
        return field
    copy = DictionaryObject(field)
    dict.__setitem__(copy, "/V", _DirectValue(value, field.container_ref))
    return copy


def _check_status(signature: Signature) -> None:
    """Record the problems that pyHanko found in the signature itself, and its time."""
    status, problems = signature.status, signature.problems
    if not status.intact:
        problems.append("its digest is wrong: the signed content was changed")
    if not status.valid:
        problems.append("its signature does not match the key of its certificate")
    if indication(status) == "CERTIFICATE_CHAIN_GENERAL_FAILURE":
        problems.append("a certificate in it cannot be read")
    if indication(status).startswith("CRYPTO_CONSTRAINTS"):
        problems.append(f"its algorithms are too weak: {status.md_algorithm} and {status.pkcs7_signature_mechanism}")
    if signature.kind == "timestamp":
        signature.time, signature.time_source = status.timestamp, "timestamp"
        return
    signature.time, signature.time_source = signature.embedded.self_reported_timestamp, "signer"
    for token in (status.timestamp_validity, status.content_timestamp_validity):
        if token is not None and not (token.intact and token.valid):
            problems.append("its timestamp was changed or belongs to other data")
    if status.timestamp_validity is not None:
        signature.time, signature.time_source = status.timestamp_validity.timestamp, "timestamp"
    if not status.seed_value_ok:
        problems.append(f"it violates the constraints of its field: {plain(str(status.seed_value_constraint_error))}")


def _is_visible(field: Any) -> bool:
    """Return whether the field or one of its widgets has an area on a page."""
    for widget in (field, *(kid.get_object() for kid in entry(field, "/Kids", ()))):
        left, bottom, right, top = entry(widget, "/Rect", (0, 0, 0, 0))
        if left != right and bottom != top:
            return True
    return False


def _label(signature: Signature, signatures: Sequence[Signature]) -> str:
    return f"its {signature.kind}" if len(signatures) == 1 else f"{signature.kind} {signatures.index(signature) + 1}"
