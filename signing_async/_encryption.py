"""Encryption at rest with the caller's keys: the contents of a database are useless without them."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Sequence
from typing import Any, TypeAlias

from ._secret import Secret
from .errors import ConfigurationError

__all__ = ["Keys", "Sealer", "hide_keys"]

_MARK = b"signing-async:1:"
_NONCE = 12

Keys: TypeAlias = str | bytes | Sequence[str | bytes] | Secret[Any] | None


def hide_keys(keys: Keys) -> Secret[Any]:
    """Return the keys in a holder. A public function rebinds its argument to it first."""
    return keys if isinstance(keys, Secret) else Secret(keys)


class Sealer:
    """Encrypts with AES-256-GCM under the first key, and decrypts with any of the keys, which allows rotation.

    A key is 32 random bytes, or their base64. The ciphertext is bound to a place (the store and the name in it) and
    does not decrypt elsewhere. Without keys, data stays as it is.
    """

    def __init__(self, keys: Keys, *, owner: str) -> None:
        keys = hide_keys(keys)
        self._ciphers: list[Any] = []
        if keys.reveal() is None:
            return
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ModuleNotFoundError:
            raise ConfigurationError(f"{owner}: encryption needs cryptography: pip install cryptography") from None
        with contextlib.suppress(ValueError):
            self._ciphers = [AESGCM(key) for key in _decode_keys(keys.reveal())]
        if not self._ciphers:
            raise ConfigurationError(f"{owner}: an encryption key must be 32 bytes, or their base64")

    def __repr__(self) -> str:
        return f"Sealer({len(self._ciphers)} keys)"

    def __bool__(self) -> bool:
        return bool(self._ciphers)

    def seal(self, data: bytes, place: str) -> bytes:
        """Return the data to store: encrypted, if there are keys."""
        if not self:
            return data
        nonce = os.urandom(_NONCE)
        sealed: bytes = self._ciphers[0].encrypt(nonce, data, place.encode())
        return _MARK + nonce + sealed

    def unseal(self, stored: bytes, place: str) -> bytes:
        """Return the data; raise a `ValueError` if it cannot be decrypted or, with keys, was never encrypted."""
        if stored.startswith(_MARK) != bool(self):
            raise ValueError(
                "it is not encrypted, though a key was given" if self else "it is encrypted, and no key was given"
            )
        if not self:
            return stored
        from cryptography.exceptions import InvalidTag

        nonce, sealed = stored[len(_MARK) :][:_NONCE], stored[len(_MARK) + _NONCE :]
        for cipher in self._ciphers:
            # ValueError: the data is too short.
            with contextlib.suppress(InvalidTag, ValueError):
                data: bytes = cipher.decrypt(nonce, sealed, place.encode())
                return data
        raise ValueError("none of the given keys decrypts it")


def _decode_keys(keys: str | bytes | Sequence[object]) -> list[bytes]:
    """Return the keys; raise a `ValueError` if one is unusable."""
    decoded = [
        base64.b64decode(key.replace("-", "+").replace("_", "/"), validate=True) if isinstance(key, str) else key
        for key in ([keys] if isinstance(keys, str | bytes) else keys)
    ]
    usable = [key for key in decoded if isinstance(key, bytes) and len(key) == 32]
    if len(usable) != len(decoded):
        raise ValueError
    return usable
