"""Load the certificates that a caller trusts."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from .._files import unusable
from ..errors import InvalidRequest

__all__ = ["Roots", "Trust", "load_roots"]

Trust: TypeAlias = str | os.PathLike[str] | bytes
"""Certificates to trust: a PEM or DER file, a folder of such files, their bytes, or "system" for the system's."""

SUFFIXES = frozenset({".pem", ".crt", ".cer", ".der"})


class Roots(tuple[bytes, ...]):
    """Loaded certificates in DER; `load_roots` does not parse them again."""

    __slots__ = ()


def load_roots(trust: Trust | Iterable[Trust]) -> Roots:
    """Return the authorities' certificates among those given.

    A certificate that is neither an authority's nor self-signed is ignored: the sandbox's file, for example, contains
    one. Raise `InvalidRequest` if a file contains no other certificate, or none is given.
    """
    if isinstance(trust, Roots):
        return trust
    roots: list[bytes] = []
    for given in [trust] if isinstance(trust, str | os.PathLike | bytes) else trust:
        if given == "system":
            # Not parsed here: OpenSSL has read them, and also reads some that `cryptography` refuses.
            roots += ssl.create_default_context().get_ca_certs(binary_form=True)
        elif isinstance(given, bytes):
            roots += _load_authorities("the given bytes", given)
        elif isinstance(given, str | os.PathLike):
            roots += _load_files(Path(given))
        else:
            raise InvalidRequest(f"trust: must be paths or bytes, got {type(given).__name__}")
    if not roots:
        raise InvalidRequest("trust: no certificate given")
    return Roots(roots)


def _load_files(path: Path) -> list[bytes]:
    try:
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
        contents = [(repr(str(file)), file.read_bytes()) for file in files]
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise unusable(f"trust: cannot read {str(path)!r}: {why}", error) from None
    return [root for shown, content in contents for root in _load_authorities(shown, content)]


def _load_authorities(shown: str, content: bytes) -> list[bytes]:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    def is_authority(certificate: Any) -> bool:
        if certificate.issuer == certificate.subject:
            return True  # without a look at its extensions: those of old roots may be unreadable
        constraints = [each.value for each in certificate.extensions if isinstance(each.value, x509.BasicConstraints)]
        return any(each.ca for each in constraints)

    try:
        is_pem = b"-----BEGIN" in content
        found = x509.load_pem_x509_certificates(content) if is_pem else [x509.load_der_x509_certificate(content)]
        authorities = [certificate.public_bytes(Encoding.DER) for certificate in found if is_authority(certificate)]
    except ValueError as error:
        raise InvalidRequest(f"trust: no readable certificate in {shown}: {error}") from None
    if not authorities:
        raise InvalidRequest(f"trust: no authority's certificate in {shown}; pass that of the issuer")
    return authorities
