"""Make signed PDFs that are correct or wrong in any part: what a signature covers, and what it contains."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from asn1crypto import cms as asn1
from asn1crypto import tsp
from asn1crypto import x509 as asn1_x509
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding

from signing_async._verify.judge import judge  # a worker process for each of many files would take too long
from signing_async.sealed import Report, inspect_sealed
from tests import pdfs

WHEN = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
TIMESTAMP = b"/Type/DocTimeStamp/Filter/Adobe.PPKLite/SubFilter/ETSI.RFC3161"
BLANK = b"[0000000000 0000000000 0000000000 0000000000]"


def judged(source: Any, trust: Any = None, **settings: Any) -> Report:
    """Return the report on a file, made in this process: for many files this is faster than a process for each."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("signing_async.sealed.run_worker", judge_here)
        return inspect_sealed(source, trust=trust, **settings)


def judge_here(content: bytes, roots: list[str] | None, settings: Mapping[str, bool], timeout: float) -> Any:
    """Judge a file as the worker process does."""
    certificates = None if roots is None else [bytes.fromhex(root) for root in roots]
    return json.loads(json.dumps(asyncio.run(judge(content, certificates, **settings))))


@cache
def sandbox_authority() -> Any:
    """Return the authority of a sandbox."""
    from signing_async.sandbox.authority import Authority  # seals without a server, in any event loop

    with tempfile.TemporaryDirectory() as name:
        return Authority.open(Path(name), WHEN)


@cache
def sealed_by_sandbox(level: Any = "B-B", original: bytes | None = None, when: datetime = WHEN) -> bytes:
    """Return a PDF sealed by the sandbox."""
    from signing_async.sandbox.panel import Panel, Signer  # for the same reason
    from signing_async.sandbox.sealing import seal  # for the same reason

    panel = Panel("Lease", "lease.pdf", "ref-1", [Signer("Anna Berg", "anna@example.com", "bankid", when)])
    with tempfile.TemporaryDirectory() as name:
        source, target = Path(name, "lease.pdf"), Path(name, "sealed.pdf")
        source.write_bytes(pdfs.make_pdf(3000) if original is None else original)
        seal(source, target, panel=panel, authority=sandbox_authority(), when=when, level=level)
        return target.read_bytes()


def signed_pdf(
    sign: Callable[[bytes], bytes],
    *,
    room: int = 6000,
    entries: bytes = b"/M(D:20260304050607Z)",
    ranged: Callable[[int, int, int], Sequence[object]] = lambda start, end, size: (0, start, end, size - end),
    kind: bytes = b"/Type/Sig/Filter/Adobe.PPKLite/SubFilter/adbe.pkcs7.detached",
    direct: bool = False,
) -> bytes:
    """Return a document whose form has one signature, made by ``sign`` from the bytes around it.

    ``ranged`` says what the byte range is to be, from where the signature starts and ends and the file's size.
    With ``direct`` the signature is written into its field.
    """
    value = b"<<" + kind + b"/ByteRange" + BLANK + entries + b"/Contents<" + b"0" * room + b">>>"
    made = (
        pdfs.with_signature_field(b"/V" + value) if direct else pdfs.with_signature_field(b"/V 7 0 R", more={7: value})
    )
    data = bytearray(pdfs.in_one_table(made))
    start = data.index(b"/Contents<0") + len(b"/Contents")
    end = start + room + 2
    numbers = b"[" + b" ".join(str(number).encode() for number in ranged(start, end, len(data))) + b"]"
    at = data.index(BLANK)
    data[at : at + len(BLANK)] = numbers.ljust(len(BLANK))
    digits = sign(bytes(data[:start] + data[end:])).hex().encode()
    data[start + 1 : start + 1 + len(digits)] = digits
    return bytes(data)


@cache
def key_and_certificate(kind: str = "ec") -> tuple[Any, Any]:
    """Return a temporary key and its certificate."""
    makers: dict[str, Callable[[], Any]] = {
        "ec": lambda: ec.generate_private_key(ec.SECP256R1()),
        "rsa": lambda: rsa.generate_private_key(65537, 2048),
        "ed25519": ed25519.Ed25519PrivateKey.generate,
    }
    key = makers[kind]()
    oids = x509.NameOID
    names = [(oids.COUNTRY_NAME, "SE"), (oids.ORGANIZATION_NAME, "Åkesson AB"), (oids.COMMON_NAME, "Björn Åkesson")]
    name = x509.Name([x509.NameAttribute(oid, text) for oid, text in names])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(4711).not_valid_before(WHEN).not_valid_after(WHEN.replace(year=2050))
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return key, builder.sign(key, None if kind == "ed25519" else hashes.SHA256())


def cms(
    data: bytes,
    *,
    kind: str = "ec",
    algorithm: str = "sha256",
    attributes: bool = True,
    by_key: bool = False,
    certificates: bool = True,
    content: bytes | None = None,
    content_type: str = "data",
    pss: bool = False,
    edit: Callable[[Any], None] = lambda signed: None,
) -> bytes:
    """Return a signature of ``data``, or of the ``content`` that it wraps; ``edit`` may change it afterwards."""
    key, certificate = key_and_certificate(kind)
    holder = asn1_x509.Certificate.load(certificate.public_bytes(Encoding.DER))
    digest = hashlib.new(algorithm, data if content is None else content).digest()
    attached = [{"type": "content_type", "values": [content_type]}, {"type": "message_digest", "values": [digest]}]
    attached.append({"type": "signing_time", "values": [asn1.Time({"utc_time": WHEN})]})
    attached.append({"type": "1.2.3.4", "values": [asn1.Any(asn1.OctetString(b"x"))]})
    signed_attributes = asn1.CMSAttributes(attached)
    to_sign = signed_attributes.dump() if attributes else (data if content is None else content)
    issuer = {"issuer": holder.issuer, "serial_number": holder.serial_number}
    signer = {
        "version": "v3" if by_key else "v1",
        "sid": asn1.SignerIdentifier("subject_key_identifier", holder.key_identifier)
        if by_key
        else asn1.SignerIdentifier("issuer_and_serial_number", asn1.IssuerAndSerialNumber(issuer)),
        "digest_algorithm": {"algorithm": algorithm},
        "signature_algorithm": _scheme(kind, algorithm, pss),
        "signature": _sign(key, kind, to_sign, algorithm, pss),
    }
    if attributes:
        signer["signed_attrs"] = signed_attributes
    signed = {
        "version": "v3",
        "digest_algorithms": [{"algorithm": algorithm}],
        "encap_content_info": {"content_type": content_type}
        if content is None
        else {"content_type": content_type, "content": asn1.ParsableOctetString(content)},
        "signer_infos": [signer],
    }
    if certificates:
        authority = pdfs._signing_material()[1].public_bytes(Encoding.DER)
        signed["certificates"] = [asn1_x509.Certificate.load(authority), holder]
    made = asn1.SignedData(signed)
    edit(made)
    return bytes(asn1.ContentInfo({"content_type": "signed_data", "content": made}).dump(force=True))


def _scheme(kind: str, algorithm: str, pss: bool) -> dict[str, Any]:
    if pss:
        mask = {"algorithm": "mgf1", "parameters": {"algorithm": algorithm}}
        chosen = {"hash_algorithm": {"algorithm": algorithm}, "mask_gen_algorithm": mask, "salt_length": 32}
        return {"algorithm": "rsassa_pss", "parameters": chosen}
    names = {"ec": f"{algorithm}_ecdsa", "ed25519": "ed25519", "rsa": "rsassa_pkcs1v15"}
    return {"algorithm": names[kind]}


def _sign(key: Any, kind: str, data: bytes, algorithm: str, pss: bool) -> bytes:
    if kind == "ed25519":
        return bytes(key.sign(data))
    hashing = getattr(hashes, algorithm.upper())()
    if kind == "rsa":
        scheme = padding.PSS(padding.MGF1(hashing), 32) if pss else padding.PKCS1v15()
        return bytes(key.sign(data, scheme, hashing))
    return bytes(key.sign(data, ec.ECDSA(hashing) if kind == "ec" else hashing))


def timestamp(data: bytes, *, algorithm: str = "sha256") -> bytes:
    """Return a timestamp of ``data`` (RFC 3161)."""
    imprint = {"hash_algorithm": {"algorithm": algorithm}, "hashed_message": hashlib.new(algorithm, data).digest()}
    token = {"version": "v1", "policy": "1.2.3", "message_imprint": imprint, "serial_number": 1, "gen_time": WHEN}
    return cms(data, content=tsp.TSTInfo(token).dump(), content_type="tst_info")


def as_ber(der: bytes) -> bytes:
    """Return the same in BER as BouncyCastle writes it: indefinite outer lengths, and wrapped content in pieces."""
    kind, wrapper = elements(der)
    version, algorithms, content, *rest = elements(elements(wrapper)[0])
    if len(parts := elements(content)) == 2:
        octets = elements(elements(parts[1])[0], primitive=True)[0]
        pieces = b"".join(bytes([4, len(piece)]) + piece for piece in (octets[:5], octets[5:]))
        content = b"\x30\x80" + parts[0] + b"\xa0\x80\x24\x80" + pieces + b"\0\0" * 3
    return b"\x30\x80" + kind + b"\xa0\x80\x30\x80" + version + algorithms + content + b"".join(rest) + b"\0\0" * 3


def elements(der: bytes, *, primitive: bool = False) -> list[bytes]:
    """Return the elements in a DER element, or its content."""
    start, end = _content(der, 0)
    found = [der[start:end]] if primitive else []
    while not primitive and start < end:
        after = _content(der, start)[1]
        found.append(der[start:after])
        start = after
    return found


def _content(der: bytes, at: int) -> tuple[int, int]:
    size, start = der[at + 1], at + 2
    if size & 0x80:
        width = size & 0x7F
        size, start = int.from_bytes(der[start : start + width], "big"), start + width
    return start, start + size
