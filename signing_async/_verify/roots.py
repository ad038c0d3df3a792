"""Load the certificates that a caller trusts."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from .._files import unusable
from ..errors import InvalidRequest

__all__ = ["Roots", "Trust", "load_roots"]

Trust: TypeAlias = str | os.PathLike[str] | bytes
"""Certificates to trust: a PEM or DER file, a folder of such files, their bytes, or "system" for the system's."""

SUFFIXES = frozenset({".pem", ".crt", ".cer", ".der"})


@attrs.frozen
class Roots:
    """Loaded certificates in DER; `load_roots` does not parse them again."""

    certificates: tuple[bytes, ...]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.certificates)


def load_roots(trust: Trust | Iterable[Trust]) -> Roots:
    """Return the authorities' certificates among those given.

    A certificate that is neither an authority's nor self-signed is ignored: the sandbox's file, for example, contains
    one. Raise `InvalidRequest` if a file contains no other certificate, or none is given.
    """
    if isinstance(trust, Roots):
        return trust
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    given = [trust] if isinstance(trust, str | os.PathLike | bytes) else list(trust)
    roots: list[bytes] = []
    if "system" in given:
        # Not parsed here: OpenSSL has read them, and also reads some that `cryptography` refuses.
        roots += ssl.create_default_context().get_ca_certs(binary_form=True)
    for shown, content in _contents(each for each in given if each != "system"):
        try:
            is_pem = b"-----BEGIN" in content
            found = x509.load_pem_x509_certificates(content) if is_pem else [x509.load_der_x509_certificate(content)]
            authorities = [each for each in found if each.issuer == each.subject or _is_authority(each)]
        except ValueError as error:
            raise InvalidRequest(f"trust: no readable certificate in {shown}: {error}") from None
        if not authorities:
            raise InvalidRequest(f"trust: no authority's certificate in {shown}; pass that of the issuer")
        roots += [each.public_bytes(Encoding.DER) for each in authorities]
    if not roots:
        raise InvalidRequest("trust: no certificate given")
    return Roots(tuple(roots))


def _is_authority(certificate: Any) -> bool:
    from cryptography import x509

    constraints = x509.BasicConstraints
    return any(extension.value.ca for extension in certificate.extensions if isinstance(extension.value, constraints))


def _contents(trust: Iterable[Trust]) -> Iterator[tuple[str, bytes]]:
    for each in trust:
        if isinstance(each, bytes):
            yield "the given bytes", each
        elif isinstance(each, str | os.PathLike):
            yield from _files(Path(each))
        else:
            raise InvalidRequest(f"trust: must be paths or bytes, got {type(each).__name__}")


def _files(path: Path) -> list[tuple[str, bytes]]:
    try:
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
        return [(repr(str(file)), file.read_bytes()) for file in files]
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise unusable(f"trust: cannot read {str(path)!r}: {why}", error) from None
