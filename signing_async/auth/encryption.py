"""Encryption of tokens at rest, with keys that the caller keeps: what an engine holds is then of no use alone."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigurationError

__all__ = ["Sealer"]

_MARK = b"signing-async:1:"
_NONCE = 12


class Sealer:
    """AES-256-GCM under the first of its keys; whatever any of them sealed is read, so that keys can be changed.

    A key is 32 random bytes, or their base64. What is sealed belongs to a place (the store and the name in it): put
    elsewhere it is not read. Without keys, `seal` leaves everything as it is.
    """

    def __init__(self, keys: str | bytes | Sequence[str | bytes] | None, *, owner: str) -> None:
        wanted = keys is not None
        given = [keys] if isinstance(keys, str | bytes) else list(keys or ())
        found = [_key(key) for key in given]
        # Variables are shown in some tracebacks.
        del keys, given
        if None in found or (wanted and not found):
            raise ConfigurationError(f"{owner}: an encryption key must be 32 bytes, or their base64")
        self._ciphers = [_cipher(key, owner) for key in found if key is not None]

    def __repr__(self) -> str:
        return f"Sealer({len(self._ciphers)} keys)"

    def seal(self, data: bytes, place: str) -> bytes:
        """The data as it may be kept."""
        if not self._ciphers:
            return data
        nonce = os.urandom(_NONCE)
        sealed: bytes = self._ciphers[0].encrypt(nonce, data, place.encode())
        return _MARK + nonce + sealed

    def unseal(self, kept: bytes, place: str) -> bytes:
        """The data again, or a ValueError that says why not. With keys, what was never sealed is not read either."""
        if not self._ciphers:
            if kept.startswith(_MARK):
                raise ValueError("it is encrypted, and no key was given")
            return kept
        if not kept.startswith(_MARK):
            raise ValueError("it is not encrypted, though a key was given")
        nonce, sealed = kept[len(_MARK) :][:_NONCE], kept[len(_MARK) + _NONCE :]
        for cipher in self._ciphers:
            data = _opened(cipher, nonce, sealed, place)
            if data is not None:
                return data
        raise ValueError("no key that was given opens it")


def _key(given: object) -> bytes | None:
    if isinstance(given, str):
        try:
            given = base64.b64decode(given.replace("-", "+").replace("_", "/"), validate=True)
        except ValueError:
            return None
    return given if isinstance(given, bytes) and len(given) == 32 else None


def _cipher(key: bytes, owner: str) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ModuleNotFoundError:
        raise ConfigurationError(f"{owner}: encryption needs cryptography: pip install cryptography") from None
    return AESGCM(key)


def _opened(cipher: Any, nonce: bytes, sealed: bytes, place: str) -> bytes | None:
    from cryptography.exceptions import InvalidTag

    # ValueError: too short to be anything.
    with contextlib.suppress(InvalidTag, ValueError):
        data: bytes = cipher.decrypt(nonce, sealed, place.encode())
        return data
    return None
