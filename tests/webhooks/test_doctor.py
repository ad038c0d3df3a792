"""The doctor finds the cause, says it in words, and gives nothing away."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

import pytest

from signing_async.webhooks import GITHUB, STANDARD_WEBHOOKS, Scheme, diagnose, sign
from tests.webhooks.deliveries import SECRET, base64_of, event_body, hex_of

BODY = event_body("evt_1", name="Å, \u20ac", number=1.5)
KEY = bytes(range(40, 60))


@pytest.mark.parametrize(
    ("secret", "signature", "words"),
    [
        (SECRET, hex_of(BODY), "valid: hex of the raw body"),
        (SECRET, base64_of(BODY), "valid: base64 of the raw body"),
        (SECRET.encode(), "sha256=" + base64_of(BODY), "valid: base64 of the raw body"),
    ],
)
def test_a_valid_delivery_is_told_with_how_it_is_signed(secret: Any, signature: str, words: str) -> None:
    """It says which encoding it was."""
    found = diagnose(secret, BODY, signature)
    assert (found.accepted, found.explained, str(found)) == (True, True, words)


@pytest.mark.parametrize(
    ("secret", "signature", "words"),
    [
        (SECRET + "\n", hex_of(BODY), "the secret has a trailing newline"),
        (SECRET.encode() + b"\r\n", hex_of(BODY), "the secret has a trailing newline"),
        (" " + SECRET, hex_of(BODY), "the secret has white space around it"),
        (f'"{SECRET}"', hex_of(BODY), "the secret has quotes around it"),
        (SECRET, hex_of(BODY, SECRET + "\n"), "the sender's secret has a trailing newline"),
        (base64.b64encode(KEY).decode(), hex_of(BODY, KEY), "the secret must be base64-decoded"),
        (
            base64.b64encode(KEY).decode() + "\n",
            hex_of(BODY, KEY),
            "a trailing newline; the secret must be base64-decoded",
        ),
        (base64.b64encode(KEY), hex_of(BODY, KEY), "the secret must be base64-decoded"),
        (
            "whsec_" + base64.b64encode(KEY).decode(),
            hex_of(BODY, KEY),
            "prefix is no part of the key; the secret must be base64-decoded",
        ),
        (KEY.hex(), hex_of(BODY, KEY), "the secret must be hex-decoded"),
        (
            SECRET,
            hex_of(json.dumps(json.loads(BODY), separators=(",", ":")).encode()),
            "matches after re-encoding the JSON: your framework changed the body",
        ),
        (
            SECRET,
            hex_of(json.dumps(json.loads(BODY), indent=2, ensure_ascii=False).encode()),
            "your framework changed the body",
        ),
        (SECRET, hex_of(BODY + b"\n"), "the body lost its last line end"),
        (SECRET, base64_of(b"\xef\xbb\xbf" + BODY), "base64 of a changed body; the body lost its byte order mark"),
        (
            SECRET,
            "t=1700000000,v1=" + hex_of(b"1700000000." + BODY),
            "signed with timestamp: Scheme(signed='{timestamp}.{body}', timestamp_label=\"t=\")",
        ),
        (SECRET, "hmac-sha256=" + hex_of(BODY), "hex of the raw body\nthe verifier says: X-Signature holds no"),
        (SECRET, base64.b64encode(hex_of(BODY).encode()).decode(), "base64 of the hex of the raw body"),
        (SECRET, hmac.new(SECRET.encode(), BODY, "sha1").hexdigest(), "signed with HMAC-SHA1"),
        (SECRET, hmac.new(SECRET.encode(), BODY, "sha512").hexdigest(), "signed with HMAC-SHA512"),
        (SECRET, hashlib.sha256(SECRET.encode() + BODY).hexdigest(), "SHA-256 of secret and body, which is no HMAC"),
        (SECRET, hashlib.sha256(BODY + SECRET.encode()).hexdigest(), "SHA-256 of body and secret, which is no HMAC"),
        (SECRET, hashlib.sha256(BODY).hexdigest(), "without any secret"),
    ],
)
def test_the_cause_is_named(secret: Any, signature: str, words: str) -> None:
    """Each common mistake is recognised, in words, and what is known is not accepted for it."""
    found = diagnose(secret, BODY, signature)
    assert not found.accepted
    assert found.explained
    assert words in str(found)


def test_a_body_changed_on_the_way_is_recognised() -> None:
    """Line ends, and a text that was decoded with the wrong charset."""
    unix = b'{"id":\n"a"}\n'
    assert "line ends were changed" in str(diagnose(SECRET, unix.replace(b"\n", b"\r\n"), hex_of(unix)))
    assert "line ends were changed" in str(diagnose(SECRET, unix, hex_of(unix.replace(b"\n", b"\r\n"))))
    assert "gained a line end" in str(diagnose(SECRET, BODY + b"\n", hex_of(BODY)))
    assert "gained a byte order mark" in str(diagnose(SECRET, b"\xef\xbb\xbf" + BODY, hex_of(BODY)))
    assert "wrong charset" in str(diagnose(SECRET, 'é "x'.encode().decode("latin-1").encode(), hex_of('é "x'.encode())))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            b"1700000000" + BODY,
            "signed with timestamp: Scheme(signed='{timestamp}{body}', timestamp_header=\"x-time\")",
        ),
        (b"v0:1700000000:" + BODY, "signed with timestamp"),
        (b"msg_7.1700000000." + BODY, 'id_header="x-webhook-id"'),
        (b"msg_7." + BODY, "signed with an id"),
    ],
)
def test_signed_headers_are_found(content: bytes, words: str) -> None:
    """A timestamp and an id are looked for among the other headers."""
    headers = {"X-Time": "1700000000", "X-Webhook-Id": "msg_7", "Date": "today"}
    found = diagnose(SECRET, BODY, hex_of(content), headers=headers)
    assert words in str(found)
    assert not found.accepted


def test_the_signature_may_be_among_the_headers() -> None:
    """As verify finds it."""
    assert diagnose(SECRET, BODY, None, headers={"x-signature": hex_of(BODY)}).accepted


def test_a_ready_made_scheme_is_diagnosed() -> None:
    """With another scheme as what is expected: what it says is normal, and an old timestamp is named."""
    headers = sign(KEY, BODY, STANDARD_WEBHOOKS, id="msg_1", timestamp=1_700_000_000)
    found = diagnose(KEY, BODY, None, headers=headers, scheme=STANDARD_WEBHOOKS)
    assert found.explained
    assert "base64 of the raw body" in str(found)
    assert "too long" in str(found)
    fresh = sign(KEY, BODY, STANDARD_WEBHOOKS, id="msg_1")
    assert diagnose(KEY, BODY, None, headers=fresh, scheme=STANDARD_WEBHOOKS).accepted
    alone = diagnose("k", BODY, hex_of(BODY, "k"), scheme=Scheme(signed="{timestamp}.{body}", timestamp_header="x"))
    assert "signed without a timestamp: Scheme(signed='{body}')" in str(alone)
    text = base64.b64encode(KEY).decode()
    raw = diagnose(text, BODY, hex_of(BODY, text), scheme=Scheme(key_encoding="base64"))
    assert "taken as it is, without decoding" in str(raw)
    assert not diagnose(SECRET, BODY, hex_of(BODY), scheme=GITHUB).accepted


@pytest.mark.parametrize(
    ("body", "header", "words"),
    [
        (BODY, hex_of(BODY, "another"), "is the secret the one of this endpoint"),
        (BODY, None, "nothing that could be a signature"),
        (BODY, "", "missing or empty"),
        (BODY, "é\x00", "nothing that could be a signature"),
        (BODY, b"\xff" * 40, "nothing that could be a signature"),
        (BODY, "ab" * 20, "20 bytes (SHA-1)"),
        (BODY, "ab" * 21, "no known digest"),
        (b"", hex_of(BODY), "the body is empty"),
        (b"[" * 100_000, hex_of(BODY), "nothing matches"),
        (b"not json \xff", hex_of(BODY), "nothing matches"),
    ],
)
def test_nothing_matches_comes_with_what_can_be_seen(body: bytes, header: Any, words: str) -> None:
    """No cause found: it says so first, and then the facts that help to look on."""
    found = diagnose(SECRET, body, header)
    assert (found.accepted, found.explained) == (False, False)
    assert str(found).startswith("nothing matches\n")
    assert words in str(found)


def test_an_unusable_secret_is_told() -> None:
    """Also what no verifier can be made with gets words instead of an error."""
    assert "the webhook secret is empty" in str(diagnose("", BODY, hex_of(BODY)))


def test_neither_secret_nor_right_signature_is_told() -> None:
    """The words may be put into a ticket."""
    for found in (diagnose(SECRET, BODY, hex_of(BODY, "another")), diagnose(SECRET + "\n", BODY, hex_of(BODY + b" "))):
        for hidden in (SECRET, hex_of(BODY), base64_of(BODY), hex_of(BODY, SECRET + "\n")):
            assert hidden not in str(found) + repr(found)


def test_a_body_must_be_bytes_here_too() -> None:
    """A text body is what the doctor would warn of."""
    with pytest.raises(TypeError, match="bytes as they were received"):
        diagnose(SECRET, BODY.decode(), hex_of(BODY))  # type: ignore[arg-type]  # that is the point
