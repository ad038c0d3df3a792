"""Encryption of tokens and events at rest. `tests.storage.test_tokens` has stores with keys, and their rotation."""

from __future__ import annotations

import base64
import sys

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from signing_async import ConfigurationError
from signing_async._encryption import Sealer  # private: stored data must stay readable in later versions

KEY = b"\xff" * 32
SECRET = b'{"access_token": "very-secret"}'


@pytest.mark.parametrize(
    "key", [KEY, base64.b64encode(KEY).decode(), [b"o" * 32, base64.urlsafe_b64encode(KEY).decode()]]
)
def test_stored_format_is_mark_nonce_and_aes_256_gcm(key: object) -> None:
    """Later versions must be able to read it."""
    kept = b"signing-async:1:" + b"n" * 12 + AESGCM(KEY).encrypt(b"n" * 12, SECRET, b"tokens/anna")
    sealer = Sealer(key, owner="Store")  # type: ignore[arg-type]  # of several types
    assert sealer.unseal(kept, "tokens/anna") == SECRET
    sealed = sealer.seal(SECRET, "tokens/anna")
    assert len(sealed) == len(kept)
    assert sealer.unseal(sealed, "tokens/anna") == SECRET
    assert b"secret" not in sealed
    assert sealer.seal(SECRET, "tokens/anna") != sealed
    assert repr(KEY)[2:-1] not in repr(sealer)


def test_data_that_was_moved_changed_cut_or_never_encrypted_does_not_decrypt() -> None:
    sealer = Sealer(KEY, owner="Store")
    kept = sealer.seal(SECRET, "anna")
    changed = kept[:-1] + bytes([kept[-1] ^ 1])
    for wrong, place in ((kept, "bert"), *((data, "anna") for data in (changed, kept[:16], kept[:20], kept[:44]))):
        with pytest.raises(ValueError, match="none of the given keys decrypts it"):
            sealer.unseal(wrong, place)
    with pytest.raises(ValueError, match="it is not encrypted, though a key was given"):
        sealer.unseal(SECRET, "anna")


@pytest.mark.parametrize("key", [b"short", "c2hvcnQ=", [KEY, "short"], [list(KEY)]])
def test_invalid_key_is_refused_and_not_shown(key: object) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Sealer(key, owner="RedisTokenStore")  # type: ignore[arg-type]  # what a caller may get wrong
    assert str(refused.value) == "RedisTokenStore: an encryption key must be 32 bytes, or their base64"


def test_missing_cryptography_is_an_error_only_with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    Sealer(None, owner="Store")
    with pytest.raises(ConfigurationError, match="Store: encryption needs cryptography: pip install cryptography"):
        Sealer(KEY, owner="Store")
