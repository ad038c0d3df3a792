"""Encryption of tokens at rest with the caller's keys: the contents of a database are useless without them."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Sequence
from typing import Any

from .errors import ConfigurationError

__all__ = ["Sealer"]

_MARK = b"signing-async:1:"
_NONCE = 12


class Sealer:
    """Encrypts with AES-256-GCM under the first key, and decrypts with any of the keys, which allows rotation.

    A key is 32 random bytes, or their base64. The ciphertext is bound to a place (the store and the name in it) and
    does not decrypt elsewhere. Without keys, data stays as it is.
    """

    def __init__(self, keys: str | bytes | Sequence[str | bytes] | None, *, owner: str) -> None:
        is_wanted = keys is not None
        given = [keys] if isinstance(keys, str | bytes) else list(keys or ())
        decoded = [_decode_key(key) for key in given]
        # Tracebacks may show local variables.
        del keys, given
        if None in decoded or (is_wanted and not decoded):
            raise ConfigurationError(f"{owner}: an encryption key must be 32 bytes, or their base64")
        self._ciphers = [_cipher(key, owner) for key in decoded if key is not None]

    def __repr__(self) -> str:
        return f"Sealer({len(self._ciphers)} keys)"

    def seal(self, data: bytes, place: str) -> bytes:
        """Return the data to store: encrypted, if there are keys."""
        if not self._ciphers:
            return data
        nonce = os.urandom(_NONCE)
        sealed: bytes = self._ciphers[0].encrypt(nonce, data, place.encode())
        return _MARK + nonce + sealed

    def unseal(self, stored: bytes, place: str) -> bytes:
        """Return the data; raise a `ValueError` if it cannot be decrypted or, with keys, was never encrypted."""
        if not self._ciphers:
            if stored.startswith(_MARK):
                raise ValueError("it is encrypted, and no key was given")
            return stored
        if not stored.startswith(_MARK):
            raise ValueError("it is not encrypted, though a key was given")
        nonce, sealed = stored[len(_MARK) :][:_NONCE], stored[len(_MARK) + _NONCE :]
        for cipher in self._ciphers:
            data = _decrypt(cipher, nonce, sealed, place)
            if data is not None:
                return data
        raise ValueError("none of the given keys decrypts it")


def _decode_key(key: object) -> bytes | None:
    if isinstance(key, str):
        try:
            key = base64.b64decode(key.replace("-", "+").replace("_", "/"), validate=True)
        except ValueError:
            return None
    return key if isinstance(key, bytes) and len(key) == 32 else None


def _cipher(key: bytes, owner: str) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ModuleNotFoundError:
        raise ConfigurationError(f"{owner}: encryption needs cryptography: pip install cryptography") from None
    return AESGCM(key)


def _decrypt(cipher: Any, nonce: bytes, sealed: bytes, place: str) -> bytes | None:
    from cryptography.exceptions import InvalidTag

    # ValueError: the data is too short.
    with contextlib.suppress(InvalidTag, ValueError):
        data: bytes = cipher.decrypt(nonce, sealed, place.encode())
        return data
    return None
