"""A certificate authority for tests of trust: certificates of any validity, revocation lists, timestamps."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from asn1crypto import crl, keys, x509
from cryptography import x509 as certificates
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from pyhanko.pdf_utils.incremental_writer import IncrementalPdfFileWriter
from pyhanko.sign import PdfSignatureMetadata, PdfSigner, SimpleSigner
from pyhanko.sign.fields import SigSeedSubFilter
from pyhanko.sign.signers.pdf_signer import PdfTimeStamper
from pyhanko.sign.timestamps import DummyTimeStamper
from pyhanko.sign.validation.dss import DocumentSecurityStore
from pyhanko_certvalidator.registry import SimpleCertificateStore

from tests import pdfs

NOW = datetime.now(UTC).replace(microsecond=0)
"""pyHanko's command requires OCSP responses of today."""
DER = serialization.Encoding.DER


def years(count: float) -> datetime:
    """Return the time in a number of years."""
    return NOW + timedelta(days=365 * count)


@dataclass
class Holder:
    """A key and its certificate, with its issuers."""

    key: Any
    certificate: Any
    issuer: Holder | None = None
    revoked: dict[int, datetime] = field(default_factory=dict)

    @property
    def der(self) -> bytes:
        data: bytes = self.certificate.public_bytes(DER)
        return data

    @property
    def asn1(self) -> Any:
        return x509.Certificate.load(self.der)

    @property
    def asn1_key(self) -> Any:
        private = self.key.private_bytes(DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return keys.PrivateKeyInfo.load(private)

    def issue(self, name: str, **settings: Any) -> Holder:
        """Issue a certificate, with the settings of `_holder`."""
        return _holder(name, self, **settings)

    def revocations(self, when: datetime = NOW) -> Any:
        """Return the revocation list."""
        builder = certificates.CertificateRevocationListBuilder().issuer_name(self.certificate.subject)
        builder = builder.last_update(when).next_update(when + timedelta(days=7))
        for serial, at in self.revoked.items():
            one = certificates.RevokedCertificateBuilder().serial_number(serial).revocation_date(at).build()
            builder = builder.add_revoked_certificate(one)
        return crl.CertificateList.load(builder.sign(self.key, hashes.SHA256()).public_bytes(DER))

    def revoke(self, other: Holder, at: datetime) -> None:
        """Revoke a certificate as of a time."""
        self.revoked[other.certificate.serial_number] = at

    def signer(self) -> Any:
        """Return a pyHanko signer; the signature includes the issuers except the root."""
        chain, each = [], self.issuer
        while each is not None and each.issuer is not None:
            chain.append(each.asn1)
            each = each.issuer
        return SimpleSigner(self.asn1, self.asn1_key, SimpleCertificateStore.from_certs(chain))

    def timestamper(self, when: datetime) -> Any:
        """Return a timestamp service in this process."""
        return DummyTimeStamper(self.asn1, self.asn1_key, fixed_dt=when)


def root(name: str = "Root") -> Holder:
    """Return a new authority."""
    return _holder(name, None, authority=True)


def _holder(
    name: str,
    issuer: Holder | None,
    *,
    start: datetime | None = None,
    end: datetime | None = None,
    authority: bool = False,
    stamping: bool = False,
    content_commitment: bool = True,
    crl_url: str | None = None,
) -> Holder:
    key: Any = rsa.generate_private_key(65537, 2048) if stamping else ec.generate_private_key(ec.SECP256R1())
    subject = certificates.Name([certificates.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = certificates.KeyUsage(True, content_commitment, False, False, False, authority, authority, False, False)
    builder = (
        certificates.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(certificates.random_serial_number())
        .not_valid_before(start or years(-20))
        .not_valid_after(end or years(20))
        .add_extension(certificates.BasicConstraints(authority, None), critical=True)
        .add_extension(usage, critical=True)
    )
    if stamping:
        stamps = certificates.ExtendedKeyUsage([ExtendedKeyUsageOID.TIME_STAMPING])
        builder = builder.add_extension(stamps, critical=True)
    if crl_url is not None:
        at = [certificates.UniformResourceIdentifier(crl_url)]
        point = certificates.DistributionPoint(at, None, None, None)
        builder = builder.add_extension(certificates.CRLDistributionPoints([point]), critical=False)
    return Holder(key, builder.sign((issuer.key if issuer else key), hashes.SHA256()), issuer)


def signed_by(
    holder: Holder, *, timestamper: Any = None, data: bytes | None = None, pades: bool = True, **settings: Any
) -> bytes:
    """Return a document with this signature."""
    subfilter = SigSeedSubFilter.PADES if pades else SigSeedSubFilter.ADOBE_PKCS7_DETACHED
    meta = PdfSignatureMetadata(field_name="Signature", subfilter=subfilter, md_algorithm="sha256", **settings)
    out = io.BytesIO()
    writer = IncrementalPdfFileWriter(io.BytesIO(data or pdfs.make_pdf()))
    PdfSigner(meta, holder.signer(), timestamper=timestamper).sign_pdf(writer, output=out)
    return out.getvalue()


def stamped(data: bytes, timestamper: Any) -> bytes:
    """Return the file with a document timestamp."""
    out = io.BytesIO()
    writer = IncrementalPdfFileWriter(io.BytesIO(data))
    PdfTimeStamper(timestamper).timestamp_pdf(writer, "sha256", bytes_reserved=16384, output=out)
    return out.getvalue()


def with_store(data: bytes, *, certs: Iterable[Holder] = (), crls: Iterable[Any] = ()) -> bytes:
    """Return the file with certificates and revocation lists appended."""
    out = io.BytesIO(data)
    DocumentSecurityStore.add_dss(out, None, certs=[each.asn1 for each in certs], crls=crls)
    return out.getvalue()
