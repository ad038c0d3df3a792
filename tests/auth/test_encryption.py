"""Encryption of what a store keeps: what opens it, and what does not."""

from __future__ import annotations

import base64
import sys

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from signing_async import ConfigurationError
from signing_async.auth.encryption import Sealer

KEY, OTHER = b"k" * 32, b"o" * 32
SECRET = b'{"access_token": "very-secret"}'


def test_what_is_sealed_is_opened_and_shows_nothing() -> None:
    """It comes back whole; what is kept holds nothing of it, and is another each time."""
    sealer = Sealer(KEY, owner="Store")
    kept = sealer.seal(SECRET, "tokens/anna")
    assert sealer.unseal(kept, "tokens/anna") == SECRET
    assert b"secret" not in kept
    assert sealer.seal(SECRET, "tokens/anna") != kept
    assert KEY.decode() not in repr(sealer)


@pytest.mark.parametrize("text", [base64.b64encode(b"\xff" * 32), base64.urlsafe_b64encode(b"\xff" * 32)])
def test_a_key_may_be_written_in_base64(text: bytes) -> None:
    """Of either alphabet, and is the same key."""
    kept = Sealer(text.decode(), owner="Store").seal(SECRET, "x")
    assert Sealer(b"\xff" * 32, owner="Store").unseal(kept, "x") == SECRET


def test_keys_are_changed_without_a_pause() -> None:
    """The first key seals, every key opens; a key that is taken away opens nothing any more."""
    old = Sealer(KEY, owner="Store").seal(SECRET, "x")
    both = Sealer([OTHER, KEY], owner="Store")
    assert both.unseal(old, "x") == SECRET
    new = both.seal(SECRET, "x")
    assert Sealer(OTHER, owner="Store").unseal(new, "x") == SECRET
    with pytest.raises(ValueError, match="no key that was given opens it"):
        Sealer(KEY, owner="Store").unseal(new, "x")


@pytest.mark.parametrize("size", [16, 20, 28, 44])
def test_what_is_elsewhere_changed_or_cut_is_not_opened(size: int) -> None:
    """One tenant's row put in another's place is no token, nor is one that was touched."""
    sealer = Sealer(KEY, owner="Store")
    kept = sealer.seal(SECRET, "anna")
    for wrong, place in ((kept, "bert"), (kept[:-1] + b"\0", "anna"), (kept[:size], "anna")):
        with pytest.raises(ValueError, match="no key that was given opens it"):
            sealer.unseal(wrong, place)


def test_plain_and_sealed_are_not_mixed_up() -> None:
    """Without a key nothing is changed, and what is sealed is told; with a key, what is plain is refused."""
    plain, sealer = Sealer(None, owner="Store"), Sealer(KEY, owner="Store")
    assert plain.unseal(plain.seal(SECRET, "x"), "x") == SECRET
    with pytest.raises(ValueError, match="it is encrypted, and no key was given"):
        plain.unseal(sealer.seal(SECRET, "x"), "x")
    with pytest.raises(ValueError, match="it is not encrypted, though a key was given"):
        sealer.unseal(SECRET, "x")


def test_what_was_sealed_stays_readable() -> None:
    """The layout of what is kept, which the next version has to open: a mark, a nonce of 12 bytes, AES-256-GCM."""
    kept = b"signing-async:1:" + b"n" * 12 + AESGCM(KEY).encrypt(b"n" * 12, SECRET, b"tokens/anna")
    assert Sealer(KEY, owner="Store").unseal(kept, "tokens/anna") == SECRET
    assert len(Sealer(KEY, owner="Store").seal(SECRET, "tokens/anna")) == len(kept)


@pytest.mark.parametrize(
    "key",
    [
        b"short",
        "c2hvcnQ=",
        "not base64 at all!",
        "!" + base64.b64encode(KEY).decode(),
        [KEY, "short"],
        [list(KEY)],
        5 * [b""],
        [],
        "",
    ],
)
def test_a_key_that_is_none_is_refused_and_not_shown(key: object) -> None:
    """The error names the store, and never the key."""
    with pytest.raises(ConfigurationError) as refused:
        Sealer(key, owner="RedisTokenStore")  # type: ignore[arg-type]  # what a caller may get wrong
    assert str(refused.value) == "RedisTokenStore: an encryption key must be 32 bytes, or their base64"


def test_without_cryptography(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what to install; without a key nothing is needed."""
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    Sealer(None, owner="Store")
    with pytest.raises(ConfigurationError, match="Store: encryption needs cryptography: pip install cryptography"):
        Sealer(KEY, owner="Store")
