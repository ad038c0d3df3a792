"""Encryption of what a store keeps: what opens it, and what does not."""

from __future__ import annotations

import base64
import sys

import pytest

from signing_async import ConfigurationError
from signing_async.encryption import Encryption, is_encrypted, new_key

KEY, OTHER = new_key(), new_key()
SECRET = b'{"access_token": "very-secret"}'


def test_what_is_encrypted_is_read_and_shows_nothing() -> None:
    """It comes back whole; what is kept holds nothing of it, and is another each time."""
    encryption = Encryption("Store", KEY)
    kept = encryption.encrypt(SECRET, "tokens/anna")
    assert encryption.decrypt(kept, "tokens/anna") == SECRET
    assert is_encrypted(kept)
    assert not is_encrypted(SECRET.decode())
    assert b"very-secret" not in base64.urlsafe_b64decode(kept.partition(".")[2])
    assert encryption.encrypt(SECRET, "tokens/anna") != kept


def test_keys_are_changed_without_a_pause() -> None:
    """The first key encrypts, every key decrypts; a key that is taken away opens nothing any more."""
    old = Encryption("Store", KEY).encrypt(SECRET, "x")
    both = Encryption("Store", [OTHER, KEY])
    assert both.decrypt(old, "x") == SECRET
    new = both.encrypt(SECRET, "x")
    assert Encryption("Store", OTHER).decrypt(new, "x") == SECRET
    with pytest.raises(ValueError, match="was encrypted with another key, or altered"):
        Encryption("Store", KEY).decrypt(new, "x")


def test_what_is_elsewhere_changed_or_cut_is_not_read() -> None:
    """One tenant's row put in another's place is no token, nor is one that was touched."""
    encryption = Encryption("Store", KEY)
    kept = encryption.encrypt(SECRET, "anna")
    changed = kept[:-8] + ("AAAAAAAA" if kept[-8:] != "AAAAAAAA" else "BBBBBBBB")
    for wrong, place in (
        (kept, "bert"),
        (changed, "anna"),
        (kept[:20], "anna"),
        (kept[:11], "anna"),
        (kept[:-3], "anna"),
    ):
        with pytest.raises(ValueError, match="was encrypted with another key, or altered"):
            encryption.decrypt(wrong, place)


def test_what_is_plain_is_refused() -> None:
    """Whoever can write to the engine alone cannot put a token of his own there."""
    with pytest.raises(ValueError, match="is not encrypted, though keys are given"):
        Encryption("Store", KEY).decrypt(SECRET.decode(), "x")


@pytest.mark.parametrize("keys", ["short", "c2hvcnQ=", "not base64 at all!", [KEY, "short"], [], [5], "é" * 44])
def test_a_key_that_is_none_is_refused_and_not_shown(keys: object) -> None:
    """The error names the store and what makes a key, and never the key."""
    with pytest.raises(ConfigurationError) as refused:
        Encryption("RedisTokenStore", keys)  # type: ignore[arg-type]  # what a caller may get wrong
    words = "RedisTokenStore: each of keys must be 32 bytes in URL-safe base64, such as new_key() makes"
    assert str(refused.value) == words


def test_without_cryptography(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what to install."""
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigurationError, match="Store: keys need the package cryptography: pip install cryptography"):
        Encryption("Store", KEY)
