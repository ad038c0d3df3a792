"""Read what the signature in a sealed PDF (CMS, RFC 5652) says: its digest, who made it, when; nothing is trusted.

A minimal reader of DER, and of BER as some signers write it. Lengths lead from one element to the next, so that what is
not asked for costs nothing.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Final, NamedTuple

__all__ = ["BROKEN_HASHES", "Certificate", "Cms", "MalformedCms", "key_signed", "read_cms", "read_time"]

_HASHES = {
    "1.2.840.113549.2.5": "md5",
    "1.3.14.3.2.26": "sha1",
    "2.16.840.1.101.3.4.2.1": "sha256",
    "2.16.840.1.101.3.4.2.2": "sha384",
    "2.16.840.1.101.3.4.2.3": "sha512",
    "2.16.840.1.101.3.4.2.4": "sha224",
    "2.16.840.1.101.3.4.2.8": "sha3_256",
    "2.16.840.1.101.3.4.2.9": "sha3_384",
    "2.16.840.1.101.3.4.2.10": "sha3_512",
}
BROKEN_HASHES: Final = frozenset({"md5", "sha1"})

_SIGNED_DATA = "1.2.840.113549.1.7.2"
_TIMESTAMP = "1.2.840.113549.1.9.16.1.4"
_MESSAGE_DIGEST = "1.2.840.113549.1.9.4"
_SIGNING_TIME = "1.2.840.113549.1.9.5"
_KEY_IDENTIFIER = "2.5.29.14"
_PSS = "1.2.840.113549.1.1.10"
_NAMES = {
    "2.5.4.3": "CN",
    "2.5.4.4": "SN",
    "2.5.4.5": "serialNumber",
    "2.5.4.6": "C",
    "2.5.4.10": "O",
    "2.5.4.11": "OU",
    "2.5.4.42": "GN",
    "2.5.4.97": "organizationIdentifier",
    "1.2.840.113549.1.9.1": "E",
}
_ENCODINGS = {12: "utf-8", 28: "utf-32-be", 30: "utf-16-be"}  # of the others, Latin-1 holds all that they can
_TIME = re.compile(
    r"(?:D:)?(\d{4})(\d\d)?(\d\d)?(\d\d)?(\d\d)?(\d\d)?(?:\.\d+)?(?:([Z+-])(?:(\d\d)'?(?:(\d\d)'?)?)?)?", re.ASCII
)
_BOOLEAN, _INTEGER, _OCTETS, _OID, _UTC_TIME = 1, 2, 4, 6, 23
_SEQUENCE, _SET, _FIRST, _THIRD, _CONSTRUCTED = 0x30, 0x31, 0xA0, 0xA3, 0x20
_IDENTIFIER = 0x80
_MOST_NAMES = 30
_LONGEST = 200


class MalformedCms(Exception):  # stays inside the package
    """It is no signature that can be read; the text says why."""


class _Head(NamedTuple):
    """An element's tag, where its content begins, and its length (None: up to a mark)."""

    tag: int
    start: int
    size: int | None


def _head(data: bytes, at: int, end: int) -> _Head:
    if end - at < 2:
        raise MalformedCms("it breaks off")
    tag, size = data[at], data[at + 1]
    start = at + 2
    if tag & 31 == 31:
        raise MalformedCms("it holds an element of an unknown kind")
    if size == 0x80 and tag & _CONSTRUCTED:
        return _Head(tag, start, None)
    if size & 0x80:
        width = size & 0x7F
        size = int.from_bytes(data[start : start + width], "big") if width else end
        start += width
    if size > end - start:
        raise MalformedCms("it breaks off")
    return _Head(tag, start, size)


def _marked_end(data: bytes, at: int, end: int) -> int:
    """Where the mark is that ends an element of no stated length."""
    depth = 1
    while True:
        head = _head(data, at, end)
        if head.size is None:
            depth += 1
        elif not head.tag and not head.size:
            depth -= 1
            if not depth:
                return at
        at = head.start + (head.size or 0)


@dataclass(frozen=True)
class _Element:
    """One element: its content is from ``start`` to ``end``, the next one begins at ``after``."""

    data: bytes
    at: int
    tag: int
    start: int
    end: int
    after: int

    @classmethod
    def read(cls, data: bytes, at: int, limit: int) -> _Element:
        head = _head(data, at, limit)
        if head.size is None:
            end = _marked_end(data, head.start, limit)
            return cls(data, at, head.tag, head.start, end, end + 2)
        end = head.start + head.size
        return cls(data, at, head.tag, head.start, end, end)

    @property
    def content(self) -> bytes:
        return self.data[self.start : self.end]

    @property
    def whole(self) -> bytes:
        return self.data[self.at : self.after]

    def __iter__(self) -> Iterator[_Element]:
        at = self.start
        while at < self.end:
            element = _Element.read(self.data, at, self.end)
            yield element
            at = element.after

    def expect(self, tag: int) -> _Element:
        if self.tag != tag:
            raise MalformedCms(f"it holds an element of kind {self.tag} where one of kind {tag} belongs")
        return self

    def first(self) -> _Element:
        for element in self:
            return element
        raise MalformedCms("an element of it is empty")

    def oid(self) -> str:
        """An object identifier, in dots."""
        numbers: list[int] = []
        value = 0
        for byte in self.expect(_OID).content[:64]:
            value = value << 7 | byte & 0x7F
            if not byte & 0x80:
                numbers.append(value)
                value = 0
        if not numbers:
            raise MalformedCms("an identifier in it is empty")
        top = min(numbers[0] // 40, 2)
        return ".".join(map(str, [top, numbers[0] - 40 * top, *numbers[1:]]))

    def octets(self) -> bytes:
        """An octet string's bytes, which BER may give in pieces."""
        if self.tag == _OCTETS | _CONSTRUCTED:
            return b"".join(piece.expect(_OCTETS).content for piece in self)
        return self.expect(_OCTETS).content


class _Parts:
    """The elements of a sequence, in their order; some of them may be absent."""

    def __init__(self, sequence: _Element) -> None:
        self._elements = iter(sequence)
        self._ahead = next(self._elements, None)

    def take(self, *tags: int) -> _Element:
        element = self._ahead
        if element is None:
            raise MalformedCms("an element is missing in it")
        if tags and element.tag not in tags:
            element.expect(tags[0])
        self._ahead = next(self._elements, None)
        return element

    def maybe(self, tag: int) -> _Element | None:
        return self.take() if self._ahead is not None and self._ahead.tag == tag else None


@dataclass(frozen=True)
class Certificate:
    """What a certificate says of its holder."""

    der: bytes
    issuer_der: bytes
    serial: bytes
    key_identifier: bytes | None
    common_name: str | None
    subject: str
    issuer: str


@dataclass(frozen=True)
class Cms:
    """One signature. ``covered`` is the digest that the signed bytes must have, with the name of its algorithm."""

    size: int
    is_timestamp: bool
    algorithm: str
    covered: tuple[str, bytes] | None
    wrapped_right: bool
    """Whether what is wrapped into the signature, if anything, is what was signed."""
    attributes: bytes | None
    signed_at: datetime | None
    signature_algorithm: str
    signature: bytes
    certificate: Certificate | None


def read_cms(data: bytes) -> Cms:
    """Read the signature at the start of ``data``; `MalformedCms` says what is wrong with it."""
    outer = _Element.read(data, 0, len(data)).expect(_SEQUENCE)
    parts = _Parts(outer)
    if parts.take(_OID).oid() != _SIGNED_DATA:
        raise MalformedCms("it is no signed data")
    signed = _Parts(parts.take(_FIRST).first().expect(_SEQUENCE))
    signed.take(_INTEGER)
    signed.take(_SET)
    wrapping = _Parts(signed.take(_SEQUENCE))
    kind = wrapping.take(_OID).oid()
    wrapped = wrapping.maybe(_FIRST)
    certificates = signed.maybe(_FIRST)
    signed.maybe(_FIRST + 1)
    signers = list(_at_most(signed.take(_SET), 2))
    if len(signers) != 1:
        raise MalformedCms("it has to have one signer, not " + ("none" if not signers else "several"))
    content = None if wrapped is None else wrapped.first().octets()
    return _read_signer(outer.after, _Parts(signers[0].expect(_SEQUENCE)), kind, content, certificates)


def _at_most(element: _Element, count: int) -> Iterator[_Element]:
    for _, each in zip(range(count), element, strict=False):
        yield each


def _read_signer(size: int, parts: _Parts, kind: str, content: bytes | None, certificates: _Element | None) -> Cms:
    parts.take(_INTEGER)
    identity = parts.take(_SEQUENCE, _IDENTIFIER)
    algorithm = _hash_name(parts.take(_SEQUENCE))
    attributes = parts.maybe(_FIRST)
    signature_algorithm = parts.take(_SEQUENCE).first().oid()
    signature = parts.take().octets()
    told = {} if attributes is None else _read_attributes(attributes)
    digest = told[_MESSAGE_DIGEST].octets() if _MESSAGE_DIGEST in told else None
    if attributes is not None and digest is None:
        raise MalformedCms("it does not say which digest it signs")
    is_timestamp = kind == _TIMESTAMP
    signed_at = _read_time(told[_SIGNING_TIME]) if _SIGNING_TIME in told else None
    covered = None if digest is None else (algorithm, digest)
    wrapped_right = True
    if content is not None:
        wrapped_right = digest in (None, hashlib.new(algorithm, content, usedforsecurity=False).digest())
        covered = ("sha1", content)
    if is_timestamp and content is not None:
        covered, signed_at = _read_timestamp(content)
    return Cms(
        size,
        is_timestamp,
        algorithm,
        covered,
        wrapped_right,
        # As it was signed: under the tag of a set, not under that of its place here.
        None if attributes is None else bytes([_SET]) + attributes.whole[1:],
        signed_at,
        signature_algorithm,
        signature,
        None if certificates is None else _find_certificate(certificates, identity),
    )


def _hash_name(algorithm: _Element) -> str:
    oid = algorithm.first().oid()
    if oid not in _HASHES:
        raise MalformedCms(f"its digest's algorithm is not known here ({oid})")
    return _HASHES[oid]


def _read_attributes(attributes: _Element) -> dict[str, _Element]:
    """The first value of each attribute that counts here; none of those may stand twice."""
    found: dict[str, _Element] = {}
    for attribute in attributes:
        parts = _Parts(attribute.expect(_SEQUENCE))
        oid = parts.take(_OID).oid()
        if oid in found:
            raise MalformedCms("an attribute stands in it twice")
        if oid in (_MESSAGE_DIGEST, _SIGNING_TIME):
            found[oid] = parts.take(_SET).first()
    return found


def _read_timestamp(content: bytes) -> tuple[tuple[str, bytes], datetime | None]:
    """What a timestamp's token (RFC 3161) is about, and when it was made."""
    token = _Parts(_Element.read(content, 0, len(content)).expect(_SEQUENCE))
    token.take(_INTEGER)
    token.take(_OID)
    imprint = _Parts(token.take(_SEQUENCE))
    algorithm = _hash_name(imprint.take(_SEQUENCE))
    digest = imprint.take().octets()
    token.take(_INTEGER)
    return (algorithm, digest), _read_time(token.take())


def _read_time(element: _Element) -> datetime | None:
    text = element.content[:40].decode("ascii", "replace")
    if element.tag == _UTC_TIME:
        text = ("19" if text[:2] >= "50" else "20") + text
    return read_time(text)


def read_time(text: str) -> datetime | None:
    """A moment as certificates and PDFs write it; None where it is none. Without a zone it is taken as UTC."""
    found = _TIME.match(text)
    if found is None:
        return None
    numbers = [int(part) if part else least for part, least in zip(found.groups()[:6], (0, 1, 1, 0, 0, 0), strict=True)]
    zone = UTC
    try:
        if found[7] in ("+", "-"):
            offset = timedelta(hours=int(found[8] or 0), minutes=int(found[9] or 0))
            zone = timezone(offset if found[7] == "+" else -offset)
        return datetime(*numbers, tzinfo=zone)  # type: ignore[misc, arg-type]  # six numbers: a day and its time
    except ValueError:
        return None


def _find_certificate(certificates: _Element, identity: _Element) -> Certificate | None:
    """The signer's certificate among those that came with the signature."""
    for element in certificates:
        if element.tag != _SEQUENCE:
            continue
        certificate = _read_certificate(element)
        if identity.tag == _IDENTIFIER:
            found = certificate.key_identifier == identity.content
        else:
            issued = _Parts(identity)
            name, serial = issued.take(_SEQUENCE).whole, issued.take(_INTEGER).content
            found = (certificate.issuer_der, certificate.serial) == (name, serial)
        if found:
            return certificate
    return None


def _read_certificate(element: _Element) -> Certificate:
    parts = _Parts(element.first().expect(_SEQUENCE))
    parts.maybe(_FIRST)
    serial = parts.take(_INTEGER).content
    parts.take(_SEQUENCE)
    issuer = parts.take(_SEQUENCE)
    parts.take(_SEQUENCE)
    subject = parts.take(_SEQUENCE)
    parts.take(_SEQUENCE)
    parts.maybe(_FIRST + 1)
    parts.maybe(_FIRST + 2)
    names = _read_name(subject)
    return Certificate(
        element.whole,
        issuer.whole,
        serial,
        _key_identifier(parts.maybe(_THIRD)),
        next((text for kind, text in names if kind == "CN"), None),
        _shown(names),
        _shown(_read_name(issuer)),
    )


def _key_identifier(extensions: _Element | None) -> bytes | None:
    for extension in () if extensions is None else extensions.first():
        parts = _Parts(extension)
        if parts.take(_OID).oid() == _KEY_IDENTIFIER:
            parts.maybe(_BOOLEAN)
            value = parts.take(_OCTETS).content
            return _Element.read(value, 0, len(value)).octets()
    return None


def _read_name(name: _Element) -> list[tuple[str, str]]:
    found = []
    for group in _at_most(name, _MOST_NAMES):
        for entry in _at_most(group, _MOST_NAMES):
            parts = _Parts(entry)
            oid = parts.take(_OID).oid()
            value = parts.take()
            text = value.content[: 4 * _LONGEST].decode(_ENCODINGS.get(value.tag, "latin-1"), "replace")
            plain = "".join(each if each.isprintable() else " " for each in text[:_LONGEST])
            found.append((_NAMES.get(oid, oid), plain))
    return found


def _shown(names: list[tuple[str, str]]) -> str:
    return ", ".join(f"{kind}={text}" for kind, text in names)


def key_signed(cms: Cms, digest: bytes) -> bool | None:
    """Whether the certificate's key made this signature; ``digest`` is that of the signed bytes.

    None where it cannot be told: `cryptography` is not installed, or does not know this kind of key or signature.
    """
    try:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, padding, rsa
        from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
        from cryptography.x509 import InvalidVersion, load_der_x509_certificate
    except ModuleNotFoundError:
        return None
    if cms.certificate is None:
        return None
    signed = cms.attributes
    if signed is not None:
        digest = hashlib.new(cms.algorithm, signed, usedforsecurity=False).digest()
    algorithm: hashes.HashAlgorithm = getattr(hashes, cms.algorithm.upper())()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of certificates that are odd, and work
            key = load_der_x509_certificate(cms.certificate.der).public_key()
        if isinstance(key, rsa.RSAPublicKey):
            pss = padding.PSS(padding.MGF1(algorithm), padding.PSS.AUTO)
            scheme = pss if cms.signature_algorithm == _PSS else padding.PKCS1v15()
            key.verify(cms.signature, digest, scheme, Prehashed(algorithm))
        elif isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(cms.signature, digest, ec.ECDSA(Prehashed(algorithm)))
        elif isinstance(key, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey) and signed is not None:
            key.verify(cms.signature, signed)
        else:
            return None
    except InvalidSignature:
        return False
    except (InvalidVersion, UnsupportedAlgorithm, ValueError, TypeError):
        return None
    return True
