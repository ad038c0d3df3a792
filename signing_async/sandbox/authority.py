"""The sandbox's own certificate authority: certificates for seals, timestamps and OCSP responses, all offline."""

from __future__ import annotations

import os
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asn1crypto.keys
import asn1crypto.ocsp
import asn1crypto.pem
import asn1crypto.x509
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509 import ocsp, oid
from pyhanko.sign.signers.pdf_cms import SimpleSigner
from pyhanko.sign.timestamps import DummyTimeStamper
from pyhanko_certvalidator.registry import SimpleCertificateStore

from .._files import sync_folder

LIFETIME = timedelta(days=36525)
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
OCSP_LIFETIME = timedelta(days=7)
OCSP_URL = "http://ocsp.signing-sandbox.invalid/"  # .invalid never resolves (RFC 2606)
NAME = "Signing Sandbox {} (no legal value)"


class Authority:
    """A disposable certificate authority and the certificates it issued: for seals, timestamps and OCSP responses.

    The authority's own key is then discarded, so `certificate_pem` never vouches for any other certificate.

    The keys for seals and for timestamps have two certificates each. The certificate for B-LT and B-LTA names an OCSP
    service, because otherwise validators ignore OCSP responses. The certificate for B-B and B-T names none, because
    validators would wait for a service that does not exist.
    """

    def __init__(self, content: bytes) -> None:
        ders = [der for _, _, der in asn1crypto.pem.unarmor(content, multiple=True)]
        seal_key, seal, root, lasting_seal, time_key, time, lasting_time, self._ocsp_key, self._responder = ders
        self.certificate_pem: bytes = asn1crypto.pem.armor("CERTIFICATE", root)
        self._root = asn1crypto.x509.Certificate.load(root)
        self._seal_key, self._time_key = map(asn1crypto.keys.PrivateKeyInfo.load, (seal_key, time_key))
        self._plain = [asn1crypto.x509.Certificate.load(der) for der in (seal, time)]
        self._lasting = [asn1crypto.x509.Certificate.load(der) for der in (lasting_seal, lasting_time)]

    @classmethod
    def open(cls, folder: Path, now: datetime) -> Authority:
        """Return the authority kept in a folder, created on first use.

        Its certificates are valid from 2020 (or a year before `now`, if earlier) until a century after `now`: for
        validators that use real time, and for a sandbox whose clock was advanced by years.
        """
        path = folder / "authority.pem"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=folder)  # only its owner can read it
            with os.fdopen(descriptor, "wb") as file:
                file.write(_new_authority(now))
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
            sync_folder(folder)
        return cls(path.read_bytes())

    def signer(self, level: str) -> SimpleSigner:
        """Return the pyHanko signer that seals at this level."""
        registry = SimpleCertificateStore.from_certs([self._root])
        return SimpleSigner(
            signing_cert=self._certificates(level)[0], signing_key=self._seal_key, cert_registry=registry
        )

    def timestamper(self, level: str, when: datetime) -> Any:
        """Return an in-process timestamp service (RFC 3161) with a fixed time, or None for B-B."""
        if level == "B-B":
            return None
        root: Any = [self._root]
        return DummyTimeStamper(self._certificates(level)[1], self._time_key, root, fixed_dt=when)

    def evidence(self, when: datetime) -> dict[str, Any]:
        """Return the validation data of B-LT: the certificates, and OCSP responses for seals and timestamps."""
        root, responder = map(x509.load_der_x509_certificate, (self._root.dump(), self._responder))
        key: Any = serialization.load_der_private_key(self._ocsp_key, None)
        responses = []
        for certificate in self._lasting:
            response = (
                ocsp.OCSPResponseBuilder()
                .add_response(
                    cert=x509.load_der_x509_certificate(certificate.dump()),
                    issuer=root,
                    algorithm=hashes.SHA256(),
                    cert_status=ocsp.OCSPCertStatus.GOOD,
                    this_update=when,
                    next_update=when + OCSP_LIFETIME,
                    revocation_time=None,
                    revocation_reason=None,
                )
                .responder_id(ocsp.OCSPResponderEncoding.HASH, responder)
                .certificates([responder])
                .sign(key, hashes.SHA256())
            )
            der = response.public_bytes(serialization.Encoding.DER)
            responses.append(asn1crypto.ocsp.OCSPResponse.load(der))
        return {"certs": [*self._lasting, self._root], "ocsps": responses}

    def _certificates(self, level: str) -> list[Any]:
        """Return the certificates for seals and for timestamps."""
        return self._lasting if level in ("B-LT", "B-LTA") else self._plain


def _new_authority(now: datetime) -> bytes:
    """Return all keys and certificates in PEM, in the order that `Authority` expects."""
    root_key, seal_key, responder_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    time_key = rsa.generate_private_key(65537, 2048)  # pyHanko's DummyTimeStamper supports RSA only
    root = _certificate("CA", root_key, root_key, now, None)
    service = x509.AccessDescription(oid.AuthorityInformationAccessOID.OCSP, x509.UniformResourceIdentifier(OCSP_URL))
    lasting = (x509.AuthorityInformationAccess([service]), False)
    stamping = (x509.ExtendedKeyUsage([oid.ExtendedKeyUsageOID.TIME_STAMPING]), True)
    responding = (x509.ExtendedKeyUsage([oid.ExtendedKeyUsageOID.OCSP_SIGNING]), False)

    def issue(name: str, key: Any, *extensions: tuple[Any, bool]) -> Any:
        return _certificate(name, key, root_key, now, root, *extensions)

    def pem(key: Any, *certificates: Any) -> bytes:
        encoding = serialization.Encoding.PEM
        private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return b"".join([private, *(certificate.public_bytes(encoding) for certificate in certificates)])

    return (
        pem(seal_key, issue("Seal", seal_key), root, issue("Seal", seal_key, lasting))
        + pem(time_key, issue("TSA", time_key, stamping), issue("TSA", time_key, stamping, lasting))
        + pem(responder_key, issue("OCSP", responder_key, responding, (x509.OCSPNoCheck(), False)))
    )


def _certificate(
    name: str, key: Any, issuing_key: Any, now: datetime, issuer: Any, *extensions: tuple[Any, bool]
) -> Any:
    """Return a certificate of the key, issued by `issuer` or self-signed. Each extension is paired with `critical`."""
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME.format(name))])
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
    builder = x509.CertificateBuilder(
        subject_name=subject,
        issuer_name=subject if is_root else issuer.subject,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=min(LONG_AGO, now - timedelta(days=366)),
        not_valid_after=max(LONG_AGO, now) + LIFETIME,
    )
    for extension, critical in (
        (x509.BasicConstraints(ca=is_root, path_length=0 if is_root else None), True),
        (usage, True),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(issuing_key.public_key()), False),
        *extensions,
    ):
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(issuing_key, hashes.SHA256())
