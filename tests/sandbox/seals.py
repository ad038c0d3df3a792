"""Panels to seal with, and a check by pyHanko."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta

# The one way to seal at a chosen time, with a chosen panel and level, without a service around it.
from signing_async.sandbox.authority import Authority
from signing_async.sandbox.panel import Panel, Signer
from signing_async.sandbox.sealer import LEVELS, Level
from signing_async.sandbox.sealing import seal

__all__ = ["LEVELS", "NAMES", "WHEN", "Authority", "Level", "Panel", "Signer", "accepts", "make_panel", "seal"]

WHEN = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)


NAMES = ("Anna Andersson", "Björn Åkesson Östling", "Maria Fernández (Castañeda)")


def make_panel(*names: str, document: str = "Agreement.pdf") -> Panel:
    """Return a panel with a signer for each name."""
    methods = ("email", "bankid", "approval", "smartcard", "sms")
    signers = [
        Signer(name, f"person{index}@example.com", methods[index % len(methods)], WHEN - timedelta(hours=index))
        for index, name in enumerate(names)
    ]
    return Panel("Employment of Anna", document, "ref-2c1f", signers)


def accepts(data: bytes, authority: Authority) -> bool:
    """Return whether pyHanko finds the seal valid, trusted and covering the whole file."""
    from asn1crypto import pem, x509
    from pyhanko.pdf_utils.reader import PdfFileReader
    from pyhanko.sign.validation import SignatureCoverageLevel, validate_pdf_signature
    from pyhanko_certvalidator import ValidationContext

    root = x509.Certificate.load(pem.unarmor(authority.certificate_pem)[2])
    try:
        signature = PdfFileReader(io.BytesIO(data), strict=False).embedded_signatures[-1]
        status = validate_pdf_signature(signature, ValidationContext(trust_roots=[root], allow_fetching=False))
    except Exception:
        return False
    assert str(signature.sig_object["/SubFilter"]) == "/ETSI.CAdES.detached"
    return status.bottom_line and status.coverage == SignatureCoverageLevel.ENTIRE_FILE
