"""Look a sealed PDF over: its signatures, what they cover, whether anything came after; it is no legal opinion.

The file is read by `pdf_reader`, through its cross-references, in bounded work; what the signatures cover is hashed in
one pass. Whether a certificate can be trusted is not looked at.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import attrs

from .assumptions import Assumptions
from .errors import InvalidRequest, PdfRejected
from .files import open_regular
from .pdf_reader import (
    HEADER_WINDOW,
    OBJECT,
    REGULAR,
    SPACE,
    TOKEN,
    Budget,
    Bytes,
    Dict,
    Document,
    Place,
    Ref,
    Text,
    UnreadablePdf,
    Value,
    signature_values,
    unescaped,
)
from .sealed_cms import BROKEN_HASHES, Cms, MalformedCms, key_signed, read_cms, read_time

__all__ = ["Seal", "SealedReport", "inspect_sealed"]

BUDGET = 32 * 2**20
MOST_SIGNATURES = 100
MOST_DIGITS = 4 * 2**20

_REST_OF_REFERENCE = re.compile(rb"%b++[0-9]{1,5}%b++R(?!%b)" % (SPACE, SPACE, REGULAR))
_TEXT = re.compile(rb"%b*+\(((?:[^()\\]|\\[0-7]{3}){1,40}+)\)" % SPACE)
_OCTAL = re.compile(rb"\\([0-7]{3})")
_BLANKS = b"\x00\t\n\f\r "
_USAGE = frozenset({b"/UR", b"/UR3"})


@attrs.frozen
class Seal:
    """One signature of a sealed PDF, by what the file itself says of it."""

    kind: Literal["signature", "timestamp"]
    signer: str | None
    """The common name in the signer's certificate, else the whole name; None where no certificate came along."""
    subject: str | None
    issuer: str | None
    signed_at: datetime | None
    """When it was made, as whoever made it says."""
    covers: int
    """How many bytes it covers, from the file's first one on."""
    revision: int
    """The last revision of the file that it covers, from 1."""
    digest_algorithm: str | None
    digest_right: bool | None
    """Whether the covered bytes are as they were signed; None where that could not be told."""
    key_right: bool | None
    """Whether the certificate's key made the signature; None where `cryptography` is not installed."""
    problems: tuple[str, ...]


@attrs.frozen
class SealedReport:
    """What `inspect_sealed` found. It is no legal opinion, and whether certificates can be trusted is not checked."""

    size: int
    revisions: int
    """How often the file was saved, each time behind what was there; 0 where its structure cannot be followed."""
    seals: tuple[Seal, ...]
    """Its signatures, by how much they cover."""
    problems: tuple[str, ...]
    """Sentences, each on one thing that is wrong with the file or with one of its signatures."""

    @property
    def sound(self) -> bool:
        """Signed, all signatures in order, and nothing changed or added since the last one."""
        return not self.problems

    @property
    def bytes_after(self) -> int:
        """How many bytes come behind what the last signature covers."""
        return self.size - max((seal.covers for seal in self.seals), default=0)

    @property
    def signers(self) -> tuple[str, ...]:
        """The names of those who signed, each once."""
        names = (seal.signer for seal in self.seals if seal.kind == "signature" and seal.signer)
        return tuple(dict.fromkeys(names))

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        told = attrs.asdict(self, value_serializer=lambda _, __, value: _plain(value))
        return {"sound": self.sound, "signers": list(self.signers), "bytes_after": self.bytes_after, **told}


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def inspect_sealed(
    source: str | os.PathLike[str] | bytes, *, max_bytes: int = Assumptions().max_sealed_bytes
) -> SealedReport:
    """Say what can be said of a sealed PDF (a path, or its bytes) by its structure and its digests.

    A file that cannot be read, or has more than ``max_bytes``, is an `InvalidRequest`, one that is no PDF a
    `PdfRejected`. The whole file is read into memory: in a coroutine call it as
    ``await asyncio.to_thread(inspect_sealed, path)``. ::

        report = inspect_sealed("archive/contract.pdf")
        if not report.sound:
            print(*report.problems, sep="\\n")
    """
    if isinstance(source, bytes):
        content, shown = source, "the file"
    elif isinstance(source, str | os.PathLike):
        content, shown = _read(source, max_bytes), repr(os.fspath(source))
    else:
        raise InvalidRequest(f"source: must be a path or bytes, not {type(source).__name__}")
    header = content[:HEADER_WINDOW].find(b"%PDF-")
    if header < 0:
        raise PdfRejected(f"{shown}: it is not a PDF", reason="not_pdf", filename=shown)
    with memoryview(content) as data:
        return _inspect(data, header)


def _read(path: str | os.PathLike[str], most: int) -> bytes:
    """The file as it is now. It is not mapped: one that is cut short meanwhile would end the process."""
    shown = repr(os.fspath(path))
    try:
        number = open_regular(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidRequest(f"source: {shown} cannot be opened: {why}") from None
    if number is None:
        raise InvalidRequest(f"source: {shown} is not a file")
    with os.fdopen(number, "rb") as file:
        try:
            content = file.read(most + 1)
        except OSError as error:
            raise InvalidRequest(f"source: {shown} cannot be read: {error.strerror}") from None
    if len(content) > most:
        raise InvalidRequest(f"source: {shown} has more than {most} bytes (max_sealed_bytes)")
    return content


def _inspect(data: memoryview, header: int) -> SealedReport:
    budget = Budget(BUDGET)
    for start in sorted({0, header}, reverse=True):  # offsets count from the header, or in sloppy files from 0
        with data[start:] as data_from_start:
            try:
                return _report(_Signed(data, start, Document(Text(data_from_start, budget))))
            except UnreadablePdf:
                continue
    said = "its structure cannot be followed: it is damaged, cut short, or made to mislead"
    if _contains(data, b"/ByteRange"):
        said += "; there is something like a signature in it"
    return SealedReport(len(data), 0, (), (said,))


def _contains(data: memoryview, words: bytes) -> bool:
    return re.search(re.escape(words), data) is not None


def _report(file: _Signed) -> SealedReport:
    offsets = file.revisions()
    found = sorted(file.signatures(), key=lambda signature: signature.covers)
    _hash(file.data, found)
    seals = tuple(signature.seal(offsets) for signature in found)
    problems = [f"{_called(number, seals)}: {text}" for number, seal in enumerate(seals) for text in seal.problems]
    if not seals:
        problems.append("it carries usage rights, and no signature" if file.has_usage_rights() else "it is not signed")
    elif (covers := seals[-1].covers) and (after := len(file.data) - covers):
        since = sum(offset >= covers for offset in offsets)
        saved = f", in {since} later revision{'s' * (since > 1)}" if since else ""
        # Long-term validation appends certificates and revocation lists; what else came with them is not told apart.
        saved += ", with data for long-term validation among it" if file.has_validation_data() else ""
        problems.append(f"it was changed after the last signature: {_bytes(after)} behind what it covers{saved}")
    return SealedReport(len(file.data), len(offsets), seals, tuple(problems))


def _called(number: int, seals: tuple[Seal, ...]) -> str:
    return f"its {seals[number].kind}" if len(seals) == 1 else f"{seals[number].kind} {number + 1}"


class _Signed:
    """The file's revisions and signatures, found through its cross-references and its form, as readers find them."""

    def __init__(self, data: memoryview, start: int, document: Document) -> None:
        self.data = data
        self._start = start
        self._document = document
        self._catalog = document.get_dict(document.trailer, b"/Root")
        self._rights = document.get_dict(self._catalog, b"/Perms")

    def revisions(self) -> list[int]:
        """Where the cross-references of each revision are, the newest first."""
        return [self._start + at for at in self._document.offsets()]

    def has_usage_rights(self) -> bool:
        return bool(self._rights.keys() & _USAGE)

    def has_validation_data(self) -> bool:
        return b"/DSS" in self._catalog

    def signatures(self) -> Iterator[_Signature]:
        """The values of the form's signature fields, and the certification; not Adobe's usage rights."""
        document, rights = self._document, self._rights
        values = [*signature_values(document, document.get_dict(self._catalog, b"/AcroForm")), rights.get(b"/DocMDP")]
        usage = [rights.get(key) for key in _USAGE]
        seen: list[Value] = []
        for value in values:
            entries = document.resolve(value)
            if not isinstance(entries, dict) or value in seen or value in usage:
                continue
            if len(seen) == MOST_SIGNATURES:
                raise UnreadablePdf
            seen.append(value)
            yield self._signature(value, entries)

    def _signature(self, value: Value, entries: Dict) -> _Signature:
        document = self._document
        place = document.find(value.number) if isinstance(value, Ref) else Place()
        kind = document.get(entries, b"/Type")
        signature = _Signature("timestamp" if kind == b"/DocTimeStamp" else "signature")
        if not place.offset:
            signature.problems.append("it is no object of its own in the file, so that no bytes can be around it")
            return signature
        head = _again(OBJECT, document.text.data, place.offset)
        spans = _spans(document.text, head.end())
        contents = signature.read(document.text.data, spans)
        if contents is not None:
            hole = self._start + contents[0], self._start + contents[1]
            signature.read_range(document.get(entries, b"/ByteRange"), hole, len(self.data))
        return signature


@dataclass
class _Signature:
    """One signature while it is looked over; ``hole`` is where it stands, which its byte range leaves out."""

    kind: Literal["signature", "timestamp"]
    problems: list[str] = field(default_factory=list)
    stated_at: datetime | None = None
    cms: Cms | None = None
    hole: tuple[int, int] = (0, 0)
    covers: int = 0
    digest: bytes | None = None
    digest_right: bool | None = None
    key_right: bool | None = None

    @property
    def algorithm(self) -> str | None:
        if self.cms is None:
            return None
        return self.cms.covered[0] if self.cms.covered else self.cms.algorithm

    def read(self, data: Bytes, spans: dict[bytes, list[int]]) -> tuple[int, int] | None:
        """Read the signature itself, and say where it stands."""
        for key in (b"/Contents", b"/ByteRange"):
            if len(spans.get(key, ())) != 1:
                self.problems.append(f"{key.decode()} stands in it {len(spans.get(key, ()))} times, not once")
                return None
        token = _again(TOKEN, data, spans[b"/Contents"][0])
        start, end = token.span(4)
        if not 0 <= start < end <= start + MOST_DIGITS:
            self.problems.append(f"its /Contents is no hexadecimal string of at most {MOST_DIGITS} digits")
            return None
        for at in spans.get(b"/M", ()):
            if moment := _TEXT.match(data, at):
                self.stated_at = read_time(_OCTAL.sub(_unescaped_octal, moment[1]).decode("latin-1"))
        digits = token[4][1:-1].translate(None, _BLANKS)
        signature = bytes.fromhex((digits + b"0" * (len(digits) % 2)).decode())
        try:
            self.cms = read_cms(signature)
        except MalformedCms as error:
            self.problems.append(f"it cannot be read: {error}")
        else:
            if signature[self.cms.size :].strip(b"\0"):
                self.problems.append("something else stands behind it in its place, which no signature covers")
        return start, end

    def read_range(self, value: Value, hole: tuple[int, int], size: int) -> None:
        """Read which bytes it covers: all from the first one to some end, but the signature itself."""
        match value:
            case [int(first), int(before), int(after), int(rest)]:
                problem = _range_problem((first, before, after, rest), hole, size)
            case [_, _, _, _, *_]:
                problem = f"its byte range has {len(value)} numbers, not 4"
            case _:
                problem = "its byte range is no list of 4 numbers"
        if problem:
            self.problems.append(problem)
            return
        self.hole = hole
        self.covers = after + rest

    def judge(self, digest: bytes) -> None:
        """Compare the digest of what it covers with what it says."""
        cms = self.cms
        assert cms is not None
        self.digest_right = None if cms.covered is None else cms.covered[1] == digest
        self.key_right = key_signed(cms, digest)
        if self.digest_right is False:
            self.problems.append("what it covers is not what was signed: its digest is wrong")
        if not cms.wrapped_right:
            self.problems.append("it was changed itself: the digest of what it wraps is wrong")
        if self.key_right is False:
            self.problems.append("the key of its certificate did not make it")
        if self.digest_right is None and self.key_right is None:
            self.problems.append("it names no digest, so that it cannot be checked here")
        if cms.certificate is None:
            self.problems.append("the certificate of its signer did not come with it")
        if {cms.algorithm, self.algorithm} & BROKEN_HASHES:
            self.problems.append(f"its digest is made with {self.algorithm}, which can be forged")

    def seal(self, offsets: list[int]) -> Seal:
        cms = self.cms
        certificate = cms.certificate if cms else None
        return Seal(
            kind="timestamp" if cms and cms.is_timestamp else self.kind,
            signer=(certificate.common_name or certificate.subject or None) if certificate else None,
            subject=certificate.subject if certificate else None,
            issuer=certificate.issuer if certificate else None,
            signed_at=(cms and cms.signed_at) or self.stated_at,
            covers=self.covers,
            revision=sum(offset < self.covers for offset in offsets),
            digest_algorithm=self.algorithm,
            digest_right=self.digest_right,
            key_right=self.key_right,
            problems=tuple(self.problems),
        )


def _range_problem(numbers: tuple[int, int, int, int], hole: tuple[int, int], size: int) -> str | None:
    first, before, after, rest = numbers
    if min(numbers) < 0 or after < first + before:
        return f"its byte range makes no sense: {list(numbers)}"
    if after + rest > size:
        return f"its byte range ends {_bytes(after + rest - size)} past the file's end: the file was cut short"
    if first:
        return f"its byte range leaves out the file's first {_bytes(first)}"
    if (before, after) != hole:
        return f"its byte range leaves out bytes {before} to {after}, and the signature is at {hole[0]} to {hole[1]}"
    return None


def _bytes(count: int) -> str:
    return "1 byte" if count == 1 else f"{count} bytes"


def _hash(data: memoryview, signatures: list[_Signature]) -> None:
    """Hash what the signatures cover, each byte at most twice for each algorithm."""
    ranged = [signature for signature in signatures if signature.covers and signature.algorithm]
    running = {name: hashlib.new(name, usedforsecurity=False) for name in {each.algorithm or "" for each in ranged}}
    hashed = covered = 0
    for signature in sorted(ranged, key=lambda signature: signature.hole):
        start, end = signature.hole
        if start < covered:
            signature.problems.append("it stands inside of what another signature covers")
            continue
        for each in running.values():
            each.update(data[hashed:start])
        hashed, covered = start, signature.covers
        digest = running[signature.algorithm or ""].copy()
        digest.update(data[end:covered])
        signature.judge(digest.digest())


def _spans(text: Text, at: int) -> dict[bytes, list[int]]:
    """Where the values stand in the dictionary that starts at an offset; a name may have several."""
    at = _again(TOKEN, text.data, at).end()
    spans: dict[bytes, list[int]] = {}
    while (key := _again(TOKEN, text.data, at))[3] != b">>":
        if not key[1]:
            raise UnreadablePdf
        spans.setdefault(unescaped(key[1]), []).append(key.end())
        _, at = text.value(key.end())
        if rest := _REST_OF_REFERENCE.match(text.data, at):
            at = rest.end()
    return spans


def _unescaped_octal(found: re.Match[bytes]) -> bytes:
    return bytes([int(found[1], 8) & 255])


def _again(pattern: re.Pattern[bytes], data: Bytes, at: int) -> re.Match[bytes]:
    """The match of what was read there before."""
    found = pattern.match(data, at)
    assert found is not None
    return found
