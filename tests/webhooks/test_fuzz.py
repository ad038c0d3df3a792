"""The fuzzer, for a few thousand cases, and against two broken verifiers."""

from __future__ import annotations

import hmac

import pytest

from signing_async.webhooks import InvalidSignature
from tests.webhooks.fuzz import KEY, TARGETS, Target, fuzz, verify


def test_no_mutation_is_accepted() -> None:
    """CI runs a million."""
    assert fuzz(20_000, seed=7) is None


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_delivery_is_accepted_before_the_mutation(target: Target) -> None:
    body = b"{}"
    for text in target.spellings(hmac.digest(KEY, target.prefix + body, "sha256")):
        for label in target.labels:
            verify(target, body, target.before + label + text)


def _forgetful(target: Target, body: bytes, header: str) -> None:
    """Ignore the last character of the signature."""
    for last in "0123456789abcdefABCDEF=":
        try:
            return verify(target, body, header[:-1] + last)
        except InvalidSignature:
            continue
    raise InvalidSignature("no")


def _fragile(target: Target, body: bytes, header: str) -> None:
    """Crash on non-ASCII text."""
    header.encode("ascii")
    raise InvalidSignature("no")


@pytest.mark.parametrize(("broken", "words"), [(_forgetful, "accepted for"), (_fragile, "UnicodeEncodeError")])
def test_fuzzer_finds_a_verifier_that_accepts_too_much_or_crashes(broken: object, words: str) -> None:
    found = fuzz(20_000, seed=7, verify=broken)  # type: ignore[arg-type]  # either of the two above
    assert found is not None
    assert words in found
