"""The fuzzer, for a few thousand cases, and that it would find a hole."""

from __future__ import annotations

import hmac

import pytest

from signing_async.webhooks import InvalidSignature
from tests.webhooks.fuzz import KEY, TARGETS, Target, fuzz, verify


def test_no_mutation_is_accepted() -> None:
    """A small run of what CI does a million times."""
    assert fuzz(20_000, seed=7) is None


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_what_is_mutated_is_genuine(target: Target) -> None:
    """Before the mutation every spelling is accepted: it is the mutation that is refused."""
    body = b"{}"
    for text in target.spellings(hmac.digest(KEY, target.prefix + body, "sha256")):
        for label in target.labels:
            verify(target, body, target.before + label + text)


def _forgetful(target: Target, body: bytes, header: str) -> None:
    """A verifier that leaves the last character of the signature out of the comparison."""
    for last in "0123456789abcdefABCDEF=":
        try:
            return verify(target, body, header[:-1] + last)
        except InvalidSignature:
            continue
    raise InvalidSignature("no")


def _fragile(target: Target, body: bytes, header: str) -> None:
    """A verifier that stumbles over what is not ASCII."""
    header.encode("ascii")
    raise InvalidSignature("no")


@pytest.mark.parametrize(("broken", "words"), [(_forgetful, "accepted for"), (_fragile, "UnicodeEncodeError")])
def test_a_hole_is_found(broken: object, words: str) -> None:
    """A verifier that accepts too much, or raises something else, does not get through."""
    found = fuzz(20_000, seed=7, verify=broken)  # type: ignore[arg-type]  # either of the two above
    assert found is not None
    assert words in found
