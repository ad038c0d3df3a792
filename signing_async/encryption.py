"""Encryption at rest: AES-256-GCM, bound to the place it is kept in, with keys that can be replaced."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from typing import Any

from .errors import ConfigurationError

__all__ = ["Encryption", "is_encrypted", "new_key"]

_MARK = "aes256gcm."
_NONCE = 12


def new_key() -> str:
    """A new random key for a store's ``keys``: keep it where secrets are kept, and away from the store."""
    return base64.urlsafe_b64encode(os.urandom(32)).decode()


class Encryption:
    """Encrypts with the first key, and reads what any of the keys encrypted."""

    def __init__(self, part: str, keys: str | Sequence[str]) -> None:
        listed = [keys] if isinstance(keys, str) else list(keys)
        # Variables are shown in some tracebacks.
        del keys
        cipher = _cipher()
        if cipher is None:
            raise ConfigurationError(f"{part}: keys need the package cryptography: pip install cryptography")
        raw = [_raw_key(key) for key in listed]
        del listed
        if not raw or None in raw:
            raise ConfigurationError(
                f"{part}: each of keys must be 32 bytes in URL-safe base64, such as new_key() makes"
            )
        self._ciphers: list[Any] = [cipher(key) for key in raw if key is not None]

    def encrypt(self, data: bytes, place: str) -> str:
        """The text to keep at this place."""
        nonce = os.urandom(_NONCE)
        sealed: bytes = nonce + self._ciphers[0].encrypt(nonce, data, place.encode())
        return _MARK + base64.urlsafe_b64encode(sealed).decode()

    def decrypt(self, text: str, place: str) -> bytes:
        """What was encrypted for this place; a ValueError says in words why it cannot be had."""
        if not text.startswith(_MARK):
            raise ValueError("is not encrypted, though keys are given")
        try:
            sealed = base64.urlsafe_b64decode(text.removeprefix(_MARK))
        except ValueError:
            sealed = b""
        for cipher in self._ciphers:
            data = _opened(cipher, sealed, place)
            if data is not None:
                return data
        raise ValueError("was encrypted with another key, or altered")


def is_encrypted(text: str) -> bool:
    """Whether this was made by `Encryption`."""
    return text.startswith(_MARK)


def _cipher() -> Any:
    """None where it is not installed."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ModuleNotFoundError:
        return None
    return AESGCM


def _opened(cipher: Any, sealed: bytes, place: str) -> bytes | None:
    from cryptography.exceptions import InvalidTag

    try:
        data: bytes = cipher.decrypt(sealed[:_NONCE], sealed[_NONCE:], place.encode())
    except (InvalidTag, ValueError):
        return None
    return data


def _raw_key(key: object) -> bytes | None:
    try:
        raw = base64.b64decode(key, altchars=b"-_", validate=True) if isinstance(key, str) else b""
    except ValueError:
        return None
    return raw if len(raw) == 32 else None
