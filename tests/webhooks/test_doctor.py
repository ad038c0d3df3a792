"""The doctor finds the cause, explains it, and discloses nothing."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from typing import Any

import pytest

from signing_async.webhooks import GITHUB, STANDARD_WEBHOOKS, Scheme, diagnose, sign
from tests.webhooks.deliveries import SECRET, base64_of, event_body, hex_of

BODY = event_body("evt_1", name="Å, \u20ac", number=1.5)
ODD = '{"z":  "\u20ac", "a": [1]}'.encode()
KEY = bytes(range(40, 60))
SPELLED = base64.b64encode(KEY).decode()
RAW = "hex of the raw body"
STAMPED = 'timestamp_header="x-time"'
NAMED = 'id_header="x-webhook-id"'


def test_valid_delivery_is_reported_with_its_encoding() -> None:
    odd = b"\xe5\xff"
    for secret, signature, encoding in (
        (SECRET, hex_of(BODY), "hex"),
        (odd, "sha256=" + base64_of(BODY, odd), "base64"),
    ):
        found = diagnose(secret, BODY, signature)
        assert (found.accepted, found.explained, str(found)) == (True, True, f"valid: {encoding} of the raw body")


@pytest.mark.parametrize(
    ("secret", "signature", "words"),
    [
        (SECRET + "\n", hex_of(BODY), "the secret has a trailing newline"),
        (f" '{SECRET}'\n", hex_of(BODY), "the secret has whitespace or quotes around it"),
        (SECRET, hex_of(BODY, SECRET + "\n"), "the sender's secret has a trailing newline that yours lacks"),
        ("whsec_" + SECRET, hex_of(BODY), "the secret's prefix is not part of the key"),
        (SPELLED, hex_of(BODY, KEY), "the secret must be base64-decoded"),
        (SPELLED.encode() + b"\n", hex_of(BODY, KEY), "the secret has a trailing newline; the secret must be .*"),
        (KEY.hex(), hex_of(BODY, KEY), "the secret must be hex-decoded"),
        (
            SECRET,
            "t=1700000000,v1=" + hex_of(b"1700000000." + BODY),
            r"signed with timestamp: Scheme\(signed='{timestamp}\.{body}', timestamp_label=\"t=\"\)",
        ),
        *(
            (SECRET, hmac.new(SECRET.encode(), BODY, name).hexdigest(), f"signed with {words} instead of HMAC-SHA256")
            for name, words in (("sha1", "HMAC-SHA1"), ("sha512", "HMAC-SHA512"))
        ),
        (
            SECRET,
            hashlib.sha256(SECRET.encode() + BODY).hexdigest(),
            "signed with .* secret and body, which is no HMAC",
        ),
        (SECRET, hashlib.sha256(BODY).hexdigest(), "a SHA-256 without any secret, which proves nothing"),
    ],
)
def test_each_common_mistake_is_explained_but_not_accepted(secret: Any, signature: str, words: str) -> None:
    found = diagnose(secret, BODY, signature)
    assert (found.accepted, found.explained) == (False, True)
    cause, refusal = found.findings
    assert re.fullmatch(f"{RAW}; {words}", cause)
    assert refusal.startswith("the verifier says: ")
    assert str(found) == f"{cause}\n{refusal}"


@pytest.mark.parametrize(
    ("got", "sent", "words"),
    [
        (BODY, BODY + b"\r\n", "the body lost its final newline in transit"),
        (BODY + b"\n", BODY, "the body gained a final newline in transit"),
        (b'{"id":\r\n"a"}\r\n', b'{"id":\n"a"}\n', "the body's newlines were changed in transit"),
        (b'{"id":\n"a"}\n', b'{"id":\r\n"a"}\r\n', "the body's newlines were changed in transit"),
        (b"\xef\xbb\xbf" + BODY, BODY, "the body gained a byte order mark in transit"),
        *(
            (ODD, json.dumps(json.loads(ODD), **layout).encode(), "matches after re-encoding the JSON: .*")
            for layout in ({"separators": (",", ":")}, {"ensure_ascii": False}, {"indent": 2, "sort_keys": True})
        ),
    ],
)
def test_body_changed_in_transit_is_recognised(got: bytes, sent: bytes, words: str) -> None:
    found = diagnose(SECRET, got, base64_of(sent))
    assert re.fullmatch(f"base64 of a changed body; {words}", found.findings[0])
    assert (found.accepted, found.explained) == (False, True)
    both = diagnose(SECRET + "\n", got, base64_of(sent))
    assert re.fullmatch(f"base64 of a changed body; {words}; the secret has a trailing newline", both.findings[0])


@pytest.mark.parametrize(
    ("template", "words"),
    [("v0:{timestamp}:{body}", STAMPED), ("{id}.{timestamp}.{body}", f"{STAMPED}, {NAMED}"), ("{id}.{body}", NAMED)],
)
def test_signed_timestamp_and_id_are_found_in_the_headers_with_the_scheme_to_use(template: str, words: str) -> None:
    headers = {"X-Time": "1700000000", "X-Webhook-Id": "msg_7", "Date": "today"}
    content = template.format(timestamp=1_700_000_000, id="msg_7", body=BODY.decode()).encode()
    found = diagnose(SECRET, BODY, hex_of(content), headers=headers)
    covers = "signed with timestamp" if "{timestamp}" in template else "signed with an id"
    assert found.findings[0] == f"{RAW}; {covers}: Scheme(signed={template!r}, {words})"
    assert not found.accepted


def test_headers_and_label_of_the_scheme_are_what_it_expects() -> None:
    for scheme in (
        Scheme(signed="{id}.{timestamp}.{body}", id_header="X-Nonce", timestamp_header="X-When"),
        Scheme(signed="{timestamp}.{body}", timestamp_label="ts="),
    ):
        headers = sign(SECRET, BODY, scheme, id="msg_1")
        assert str(diagnose(SECRET, BODY, None, headers=headers, scheme=scheme)) == f"valid: {RAW}"
    assert not diagnose(SECRET, BODY, None, headers=headers).explained


def test_diagnosis_is_relative_to_the_given_scheme() -> None:
    headers = sign(KEY, BODY, STANDARD_WEBHOOKS, id="msg_1", timestamp=1_700_000_000)
    found = diagnose(KEY, BODY, None, headers=headers, scheme=STANDARD_WEBHOOKS)
    assert found.findings[0] == "base64 of the raw body"
    assert "older than the tolerance" in found.findings[1]
    alone = diagnose("k", BODY, hex_of(BODY, "k"), scheme=Scheme(signed="{timestamp}.{body}", timestamp_header="x"))
    assert "signed without a timestamp: Scheme(signed='{body}')" in str(alone)
    odd = "h\u00e5ll\u20ac"
    raw = diagnose(odd, BODY, hex_of(BODY, odd), scheme=Scheme(key_encoding="base64"))
    assert raw.findings[0] == f"{RAW}; the secret must be used as it is, without decoding"
    assert not diagnose(SECRET, BODY, hex_of(BODY), scheme=GITHUB).accepted


@pytest.mark.parametrize(
    ("body", "header", "words"),
    [
        (BODY, hex_of(BODY, "another"), "is this the secret of this endpoint"),
        (BODY, b"\xff" * 40, "nothing that could be a signature"),
        (b"", hex_of(BODY), "the body is empty"),
        (b"[" * 100_000, hex_of(BODY), "nothing matches"),
        (b'{"half": "\\ud800"}', hex_of(BODY), "nothing matches"),
    ],
)
def test_nothing_matches_comes_with_hints_and_the_verifiers_refusal(body: bytes, header: Any, words: str) -> None:
    found = diagnose(SECRET, body, header)
    assert (found.accepted, found.explained) == (False, False)
    assert str(found).startswith("nothing matches\n")
    assert found.findings[-1].startswith("the verifier says: ")
    assert words in str(found)
    assert not any(hidden in str(found) + repr(found) for hidden in (SECRET, hex_of(body), base64_of(body)))


def test_unusable_secret_is_a_diagnosis_and_not_an_error() -> None:
    assert "webhook secret: must not be empty" in str(diagnose("", BODY, hex_of(BODY)))
    for secret in ("\n", "key_", "''"):
        assert not diagnose(secret, BODY, hex_of(BODY, b"")).explained
