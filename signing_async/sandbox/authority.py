"""The sandbox's own certificate authority: certificates for seals, timestamps and OCSP responses, all offline.

pyHanko and cryptography are imported on first use.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

from .._files import sync_folder

__all__ = ["LEVELS", "Authority", "Level", "SealingFailed"]

Level: TypeAlias = Literal["B-B", "B-T", "B-LT", "B-LTA"]
LEVELS: Final[tuple[Level, ...]] = get_args(Level)
"""The PAdES levels; each adds to the previous level."""

AUTHORITY_FILE: Final = "authority.pem"
LIFETIME: Final = timedelta(days=36525)
LONG_AGO: Final = datetime(2020, 1, 1, tzinfo=UTC)
OCSP_LIFETIME: Final = timedelta(days=7)
OCSP_URL: Final = "http://ocsp.signing-sandbox.invalid/"  # .invalid never resolves (RFC 2606)
NAME: Final = "Signing Sandbox {} (no legal value)"


@dataclass(frozen=True)
class _Identity:
    """A key and its two certificates."""

    key: Any
    plain: Any
    lasting: Any

    def certificate(self, level: Level) -> Any:
        return self.lasting if level in ("B-LT", "B-LTA") else self.plain


class SealingFailed(Exception):
    """Raised if a document cannot be sealed or the authority is invalid; the message says why."""


@dataclass(frozen=True)
class Authority:
    """A disposable certificate authority and the certificates it issued: for seals, timestamps and OCSP responses.

    The authority's own key is then discarded, so `certificate_pem` never vouches for any other certificate.

    The keys for seals and for timestamps have two certificates each. The certificate for B-LT and B-LTA names an OCSP
    service, because otherwise validators ignore OCSP responses. The certificate for B-B and B-T names none, because
    validators would wait for a service that does not exist.
    """

    certificate_pem: bytes
    _root: Any
    _seal: _Identity
    _timestamps: _Identity
    _responder: tuple[bytes, bytes]

    @classmethod
    def open(cls, folder: Path, now: datetime) -> Authority:
        """Return the authority kept in a folder, created on first use; any number of processes may open it at once.

        Its certificates are valid from 2020 (or a year before `now`, if earlier) until a century after `now`: for
        validators that use real time, and for a sandbox whose clock was advanced by years.
        """
        path = folder / AUTHORITY_FILE
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _create(path, _new_authority(now))
        return cls._load(path)

    @classmethod
    def _load(cls, path: Path) -> Authority:
        pem, x509, keys = (import_module(f"asn1crypto.{name}") for name in ("pem", "x509", "keys"))
        try:
            ders = [der for _, _, der in pem.unarmor(path.read_bytes(), multiple=True)]
            seal_key, seal, root, lasting_seal, timestamp_key, timestamp, lasting_timestamp, key, responder = ders
            certificates = [x509.Certificate.load(der, strict=True) for der in (seal, lasting_seal)]
            stamps = [x509.Certificate.load(der, strict=True) for der in (timestamp, lasting_timestamp)]
            return cls(
                pem.armor("CERTIFICATE", root),
                x509.Certificate.load(root, strict=True),
                _Identity(keys.PrivateKeyInfo.load(seal_key, strict=True), *certificates),
                _Identity(keys.PrivateKeyInfo.load(timestamp_key, strict=True), *stamps),
                (key, responder),
            )
        except ValueError as error:
            message = (
                f"{path}: expected the 3 keys and 6 certificates of an authority ({error}); delete it to get a new one"
            )
            raise SealingFailed(message) from None

    def signer(self, level: Level) -> Any:
        """Return the pyHanko signer that seals at this level."""
        from pyhanko.sign.signers.pdf_cms import SimpleSigner

        registry: Any = import_module("pyhanko_certvalidator.registry")
        return SimpleSigner(
            signing_cert=self._seal.certificate(level),
            signing_key=self._seal.key,
            cert_registry=registry.SimpleCertificateStore.from_certs([self._root]),
        )

    def timestamper(self, level: Level, when: datetime) -> Any:
        """Return an in-process timestamp service (RFC 3161) with a fixed time, or None for B-B."""
        from pyhanko.sign.timestamps import DummyTimeStamper

        if level == "B-B":
            return None
        root: Any = [self._root]
        return DummyTimeStamper(self._timestamps.certificate(level), self._timestamps.key, root, fixed_dt=when)

    def evidence(self, when: datetime) -> dict[str, Any]:
        """Return the validation data of B-LT: the certificates, and OCSP responses for seals and timestamps."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization

        asn1: Any = import_module("asn1crypto.ocsp")
        ocsp: Any = import_module("cryptography.x509.ocsp")
        key, responder = self._responder
        certificates = [self._seal.lasting, self._timestamps.lasting]
        root, certificate = map(x509.load_der_x509_certificate, (self._root.dump(), responder))
        responses = []
        for each in certificates:
            response = (
                ocsp.OCSPResponseBuilder()
                .add_response(
                    cert=x509.load_der_x509_certificate(each.dump()),
                    issuer=root,
                    algorithm=hashes.SHA256(),
                    cert_status=ocsp.OCSPCertStatus.GOOD,
                    this_update=when,
                    next_update=when + OCSP_LIFETIME,
                    revocation_time=None,
                    revocation_reason=None,
                )
                .responder_id(ocsp.OCSPResponderEncoding.HASH, certificate)
                .certificates([certificate])
                .sign(serialization.load_der_private_key(key, None), hashes.SHA256())
            )
            responses.append(asn1.OCSPResponse.load(response.public_bytes(serialization.Encoding.DER)))
        return {"certs": [*certificates, self._root], "ocsps": responses}


def _create(path: Path, content: bytes) -> None:
    """Write a private file atomically; the first of several writers wins."""
    # mkstemp creates a file that only its owner can read.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
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
    """Return all keys and certificates in PEM, in the order that `_load` expects."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, rsa
    from cryptography.x509 import oid

    root_key, seal_key, responder_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    timestamp_key = rsa.generate_private_key(65537, 2048)  # pyHanko's DummyTimeStamper supports RSA only
    root = _certificate("CA", root_key, root_key, now)
    url = x509.UniformResourceIdentifier(OCSP_URL)
    access = x509.AccessDescription(oid.AuthorityInformationAccessOID.OCSP, url)
    lasting = (x509.AuthorityInformationAccess([access]), False)
    stamping = (x509.ExtendedKeyUsage([oid.ExtendedKeyUsageOID.TIME_STAMPING]), True)
    responding = (x509.ExtendedKeyUsage([oid.ExtendedKeyUsageOID.OCSP_SIGNING]), False)

    def issue(name: str, key: Any, *extensions: tuple[Any, bool]) -> Any:
        return _certificate(name, key, root_key, now, issuer=root, extensions=extensions)

    def pem(key: Any, *certificates: Any) -> bytes:
        encoding = serialization.Encoding.PEM
        private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return b"".join([private, *(certificate.public_bytes(encoding) for certificate in certificates)])

    return (
        pem(seal_key, issue("Seal", seal_key), root, issue("Seal", seal_key, lasting))
        + pem(timestamp_key, issue("TSA", timestamp_key, stamping), issue("TSA", timestamp_key, stamping, lasting))
        + pem(responder_key, issue("OCSP", responder_key, responding, (x509.OCSPNoCheck(), False)))
    )


def _certificate(
    name: str,
    key: Any,
    issuing_key: Any,
    now: datetime,
    *,
    issuer: Any = None,
    extensions: Iterable[tuple[Any, bool]] = (),
) -> Any:
    """Return a certificate of the key, issued by `issuer` or self-signed. Each extension is paired with `critical`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME.format(name))])
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
    builder = (
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
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(issuing_key, hashes.SHA256())
