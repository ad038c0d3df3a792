"""The holder of secrets."""

from __future__ import annotations

import pickle

import pytest

from signing_async._secret import Secret, hide  # every secret is held by it


def test_secret_is_hidden_until_it_is_revealed() -> None:
    secret = Secret("S3CR3T")
    shown = [repr(secret), str(secret), f"{secret}", repr([secret]), repr(vars(type(secret)))]
    assert not [text for text in shown if "S3CR3T" in text]
    assert secret.reveal() == "S3CR3T"
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(secret)


def test_hide_holds_strings_only() -> None:
    secret = Secret("S3CR3T")
    assert hide("S3CR3T").reveal() == "S3CR3T"
    assert (hide(secret), hide(None), hide(5)) == (secret, None, 5)
