"""Encryption of tokens at rest."""

from __future__ import annotations

import base64
import sys

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from signing_async import ConfigurationError
from signing_async._encryption import Sealer  # private: stored data must stay readable in later versions

KEY, OTHER = b"k" * 32, b"o" * 32
SECRET = b'{"access_token": "very-secret"}'


def test_encrypted_data_decrypts_and_shows_nothing() -> None:
    sealer = Sealer(KEY, owner="Store")
    kept = sealer.seal(SECRET, "tokens/anna")
    assert sealer.unseal(kept, "tokens/anna") == SECRET
    assert b"secret" not in kept
    assert sealer.seal(SECRET, "tokens/anna") != kept
    assert KEY.decode() not in repr(sealer)


@pytest.mark.parametrize("text", [base64.b64encode(b"\xff" * 32), base64.urlsafe_b64encode(b"\xff" * 32)])
def test_key_may_be_base64_of_either_alphabet(text: bytes) -> None:
    kept = Sealer(text.decode(), owner="Store").seal(SECRET, "x")
    assert Sealer(b"\xff" * 32, owner="Store").unseal(kept, "x") == SECRET


def test_first_key_encrypts_and_every_key_decrypts() -> None:
    old = Sealer(KEY, owner="Store").seal(SECRET, "x")
    both = Sealer([OTHER, KEY], owner="Store")
    assert both.unseal(old, "x") == SECRET
    new = both.seal(SECRET, "x")
    assert Sealer(OTHER, owner="Store").unseal(new, "x") == SECRET
    with pytest.raises(ValueError, match="none of the given keys decrypts it"):
        Sealer(KEY, owner="Store").unseal(new, "x")


@pytest.mark.parametrize("size", [16, 20, 28, 44])
def test_data_that_was_moved_changed_or_cut_does_not_decrypt(size: int) -> None:
    sealer = Sealer(KEY, owner="Store")
    kept = sealer.seal(SECRET, "anna")
    for wrong, place in ((kept, "bert"), (kept[:-1] + bytes([kept[-1] ^ 1]), "anna"), (kept[:size], "anna")):
        with pytest.raises(ValueError, match="none of the given keys decrypts it"):
            sealer.unseal(wrong, place)


def test_plain_data_is_refused_with_a_key_and_encrypted_data_without_one() -> None:
    plain, sealer = Sealer(None, owner="Store"), Sealer(KEY, owner="Store")
    assert plain.unseal(plain.seal(SECRET, "x"), "x") == SECRET
    with pytest.raises(ValueError, match="it is encrypted, and no key was given"):
        plain.unseal(sealer.seal(SECRET, "x"), "x")
    with pytest.raises(ValueError, match="it is not encrypted, though a key was given"):
        sealer.unseal(SECRET, "x")


def test_stored_format_is_mark_nonce_and_aes_256_gcm() -> None:
    """Later versions must be able to read it."""
    kept = b"signing-async:1:" + b"n" * 12 + AESGCM(KEY).encrypt(b"n" * 12, SECRET, b"tokens/anna")
    assert Sealer(KEY, owner="Store").unseal(kept, "tokens/anna") == SECRET
    assert len(Sealer(KEY, owner="Store").seal(SECRET, "tokens/anna")) == len(kept)


@pytest.mark.parametrize(
    "key",
    [
        b"short",
        "c2hvcnQ=",
        [KEY, "short"],
        [list(KEY)],
    ],
)
def test_invalid_key_is_refused_and_not_shown(key: object) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Sealer(key, owner="RedisTokenStore")  # type: ignore[arg-type]  # what a caller may get wrong
    assert str(refused.value) == "RedisTokenStore: an encryption key must be 32 bytes, or their base64"


def test_missing_cryptography_is_an_error_only_with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    Sealer(None, owner="Store")
    with pytest.raises(ConfigurationError, match="Store: encryption needs cryptography: pip install cryptography"):
        Sealer(KEY, owner="Store")
