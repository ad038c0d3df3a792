"""The doctor finds the cause, explains it, and discloses nothing."""

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
ODD = '{"z":  "\u20ac", "a": [1]}'.encode()
KEY = bytes(range(40, 60))
SPELLED = base64.b64encode(KEY).decode()
RAW = "hex of the raw body"
CHANGED = "hex of a changed body"
NOT = "instead of HMAC-SHA256"
STAMPED = 'timestamp_header="x-time"'
NAMED = 'id_header="x-webhook-id"'


@pytest.mark.parametrize(
    ("secret", "signature", "words"),
    [
        (SECRET, hex_of(BODY), "valid: hex of the raw body"),
        (SECRET, base64_of(BODY), "valid: base64 of the raw body"),
        (SECRET.encode(), "sha256=" + base64_of(BODY), "valid: base64 of the raw body"),
        (b"\xe5\xff", hex_of(BODY, b"\xe5\xff"), "valid: hex of the raw body"),
    ],
)
def test_valid_delivery_is_reported_with_its_encoding(secret: Any, signature: str, words: str) -> None:
    found = diagnose(secret, BODY, signature)
    assert (found.accepted, found.explained, str(found)) == (True, True, words)


@pytest.mark.parametrize(
    ("secret", "signature", "words"),
    [
        (SECRET + "\n", hex_of(BODY), f"{RAW}; the secret has a trailing newline"),
        (SECRET + "\r\n", hex_of(BODY), f"{RAW}; the secret has a trailing newline"),
        (SECRET + " \n", hex_of(BODY, SECRET + " "), f"{RAW}; the secret has a trailing newline"),
        (SECRET.encode() + b"\r\n", hex_of(BODY), f"{RAW}; the secret has a trailing newline"),
        (" " + SECRET, hex_of(BODY), f"{RAW}; the secret has whitespace around it"),
        (f'"{SECRET}"', hex_of(BODY), f"{RAW}; the secret has quotes around it"),
        (f" '{SECRET}'\n", hex_of(BODY), f"{RAW}; the secret has quotes around it"),
        (
            SECRET,
            hex_of(BODY, SECRET + "\n"),
            f"{RAW}; the sender's secret has a trailing newline that yours lacks",
        ),
        ("whsec_" + SECRET, hex_of(BODY), f"{RAW}; the secret's prefix is not part of the key"),
        (SPELLED, hex_of(BODY, KEY), f"{RAW}; the secret must be base64-decoded"),
        (
            SPELLED + "\n",
            hex_of(BODY, KEY),
            f"{RAW}; the secret has a trailing newline; the secret must be base64-decoded",
        ),
        (SPELLED.encode(), hex_of(BODY, KEY), f"{RAW}; the secret must be base64-decoded"),
        (
            "whsec_" + SPELLED,
            hex_of(BODY, KEY),
            f"{RAW}; the secret's prefix is not part of the key; the secret must be base64-decoded",
        ),
        (KEY.hex(), hex_of(BODY, KEY), f"{RAW}; the secret must be hex-decoded"),
        (b"\xe5\xff\n", hex_of(BODY, b"\xe5\xff"), f"{RAW}; the secret has a trailing newline"),
        ("\u00e5\u20ac\n", hex_of(BODY, "\u00e5\u20ac"), f"{RAW}; the secret has a trailing newline"),
        (
            SECRET,
            "t=1700000000,v1=" + hex_of(b"1700000000." + BODY),
            f"{RAW}; signed with timestamp: Scheme(signed='{{timestamp}}.{{body}}', timestamp_label=\"t=\")",
        ),
        (SECRET, "hmac-sha256=" + hex_of(BODY), RAW),
        (SECRET, base64.b64encode(hex_of(BODY).encode()).decode(), "base64 of the hex of the raw body"),
        *(
            (SECRET, hmac.new(SECRET.encode(), BODY, name).hexdigest(), f"{RAW}; signed with {words} {NOT}")
            for name, words in (
                ("sha1", "HMAC-SHA1"),
                ("sha512", "HMAC-SHA512"),
                ("sha384", "HMAC-SHA384"),
                ("md5", "HMAC-MD5"),
            )
        ),
        (
            SECRET,
            hashlib.sha256(SECRET.encode() + BODY).hexdigest(),
            f"{RAW}; signed with SHA-256 of secret and body, which is not an HMAC",
        ),
        (
            SECRET,
            hashlib.sha256(BODY + SECRET.encode()).hexdigest(),
            f"{RAW}; signed with SHA-256 of body and secret, which is not an HMAC",
        ),
        (
            SECRET,
            hashlib.sha256(BODY).hexdigest(),
            f"{RAW}; a SHA-256 without any secret, which proves nothing",
        ),
        (
            SECRET + "\n",
            hex_of(BODY + b"\n"),
            f"{CHANGED}; the body lost its final newline in transit; the secret has a trailing newline",
        ),
    ],
)
def test_each_common_mistake_is_explained_but_not_accepted(secret: Any, signature: str, words: str) -> None:
    found = diagnose(secret, BODY, signature)
    assert (found.accepted, found.explained) == (False, True)
    assert found.findings[0] == words
    assert found.findings[1].startswith("the verifier says: ")
    assert str(found) == "\n".join(found.findings)
    assert len(found.findings) == 2


@pytest.mark.parametrize(
    ("got", "sent", "words"),
    [
        (BODY, BODY + b"\n", "the body lost its final newline in transit"),
        (BODY, BODY + b"\r\n", "the body lost its final newline in transit"),
        (BODY + b"\n", BODY, "the body gained a final newline in transit"),
        (BODY + b"\r\n", BODY, "the body gained a final newline in transit"),
        (b'{"id":\r\n"a"}\r\n', b'{"id":\n"a"}\n', "the body's newlines were changed in transit"),
        (b'{"id":\n"a"}\n', b'{"id":\r\n"a"}\r\n', "the body's newlines were changed in transit"),
        (b"\xef\xbb\xbf" + BODY, BODY, "the body gained a byte order mark in transit"),
        (BODY, b"\xef\xbb\xbf" + BODY, "the body lost its byte order mark in transit"),
        (
            'é "x'.encode().decode("latin-1").encode(),
            'é "x'.encode(),
            "the body was decoded with the wrong charset",
        ),
        (
            "\u20ac".encode() + b"\xff",
            b"??",
            "the body was decoded with the wrong charset",
        ),
        *(
            (
                ODD,
                json.dumps(json.loads(ODD), ensure_ascii=ascii_only, sort_keys=order, **layout).encode(),
                "matches after re-encoding the JSON: your framework changed the body",
            )
            for layout in (
                {"separators": (",", ":")},
                {"separators": (", ", ": ")},
                {"indent": 2},
                {"indent": 4},
                {"indent": "\t"},
            )
            for ascii_only in (True, False)
            for order in (True, False)
        ),
    ],
)
def test_body_changed_in_transit_is_recognised(got: bytes, sent: bytes, words: str) -> None:
    found = diagnose(SECRET, got, base64_of(sent))
    assert found.findings[0] == f"base64 of a changed body; {words}"
    assert (found.accepted, found.explained) == (False, True)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{timestamp}.{body}", STAMPED),
        ("{timestamp}{body}", STAMPED),
        ("{timestamp}:{body}", STAMPED),
        ("v0:{timestamp}:{body}", STAMPED),
        ("{timestamp}\n{body}", STAMPED),
        ("{body}.{timestamp}", STAMPED),
        ("{body}{timestamp}", STAMPED),
        ("{id}.{timestamp}.{body}", f"{STAMPED}, {NAMED}"),
        ("{timestamp}.{id}.{body}", f"{STAMPED}, {NAMED}"),
        ("{id}{timestamp}{body}", f"{STAMPED}, {NAMED}"),
        ("{id}.{body}", NAMED),
        ("{id}{body}", NAMED),
    ],
)
def test_signed_timestamp_and_id_are_found_in_the_headers_with_the_scheme_to_use(template: str, words: str) -> None:
    headers = {"X-Time": "1700000000", "X-Webhook-Id": "msg_7", "Date": "today"}
    content = template.format(timestamp=1_700_000_000, id="msg_7", body=BODY.decode()).encode()
    found = diagnose(SECRET, BODY, hex_of(content), headers=headers)
    covers = "signed with timestamp" if "{timestamp}" in template else "signed with an id"
    assert found.findings[0] == f"{RAW}; {covers}: Scheme(signed={template!r}, {words})"
    assert not found.accepted


def test_signature_is_found_among_the_headers() -> None:
    assert diagnose(SECRET, BODY, None, headers={"x-signature": hex_of(BODY)}).accepted
    several = [("X-Signature", "ab" * 32), ("x-signature", hex_of(BODY)), ("X-Signature", "cd" * 32)]
    assert str(diagnose(SECRET, BODY, None, headers=several)) == f"valid: {RAW}"


def test_headers_and_label_of_the_scheme_are_tried_first() -> None:
    others = [(f"x-{number}-id", str(1_700_000_000 + number)) for number in range(9)]
    scheme = Scheme(signed="{id}.{timestamp}.{body}", id_header="X-Nonce", timestamp_header="X-When")
    headers = [*others, *sign(SECRET, BODY, scheme, id="msg_1").items()]
    assert str(diagnose(SECRET, BODY, None, headers=headers, scheme=scheme)) == f"valid: {RAW}"
    found = diagnose(SECRET + "\n", BODY, None, headers=headers, scheme=scheme)
    assert found.findings[0] == f"{RAW}; the secret has a trailing newline"
    scheme = Scheme(signed="{timestamp}.{body}", timestamp_label="ts=")
    headers = list(sign(SECRET, BODY, scheme).items())
    assert str(diagnose(SECRET, BODY, None, headers=headers, scheme=scheme)) == f"valid: {RAW}"
    found = diagnose(SECRET, BODY, None, headers=headers)
    assert not found.explained
    found = diagnose(SECRET, BODY, f"ts=1,t=2,{hex_of(b'2:' + BODY)}", scheme=scheme)
    assert found.findings[0] == (
        f"{RAW}; signed with timestamp: Scheme(signed='{{timestamp}}:{{body}}', timestamp_label=\"t=\")"
    )


def test_delivery_that_only_the_verifier_understands_is_valid() -> None:
    scheme = Scheme(labels=("sha256-",))
    assert str(diagnose(SECRET, BODY, "sha256-" + hex_of(BODY), scheme=scheme)) == "valid: signed as the scheme says"


def test_diagnosis_is_relative_to_the_given_scheme() -> None:
    headers = sign(KEY, BODY, STANDARD_WEBHOOKS, id="msg_1", timestamp=1_700_000_000)
    found = diagnose(KEY, BODY, None, headers=headers, scheme=STANDARD_WEBHOOKS)
    assert found.explained
    assert "base64 of the raw body" in str(found)
    assert "older than the tolerance" in str(found)
    fresh = sign(KEY, BODY, STANDARD_WEBHOOKS, id="msg_1")
    taken = diagnose(KEY, BODY, None, headers=fresh, scheme=STANDARD_WEBHOOKS)
    assert (taken.accepted, str(taken)) == (True, "valid: base64 of the raw body")
    alone = diagnose("k", BODY, hex_of(BODY, "k"), scheme=Scheme(signed="{timestamp}.{body}", timestamp_header="x"))
    assert "signed without a timestamp: Scheme(signed='{body}')" in str(alone)
    text = base64.b64encode(KEY).decode()
    raw = diagnose(text, BODY, hex_of(BODY, text), scheme=Scheme(key_encoding="base64"))
    assert raw.findings[0] == f"{RAW}; the secret must be used as it is, without decoding"
    odd = "h\u00e5ll\u20ac"
    raw = diagnose(odd, BODY, hex_of(BODY, odd), scheme=Scheme(key_encoding="base64"))
    assert raw.findings[0] == f"{RAW}; the secret must be used as it is, without decoding"
    assert not diagnose(SECRET, BODY, hex_of(BODY), scheme=GITHUB).accepted


@pytest.mark.parametrize(
    ("body", "header", "words"),
    [
        (BODY, hex_of(BODY, "another"), "is this the secret of this endpoint"),
        (BODY, None, "nothing that could be a signature"),
        (BODY, "", "missing or empty"),
        (BODY, "é\x00", "nothing that could be a signature"),
        (BODY, b"\xff" * 40, "nothing that could be a signature"),
        (BODY, "ab" * 20, "20 bytes (SHA-1)"),
        (BODY, "ab" * 21, "not a known digest"),
        (b"", hex_of(BODY), "the body is empty"),
        (b"[" * 100_000, hex_of(BODY), "nothing matches"),
        (b"not json \xff", hex_of(BODY), "nothing matches"),
        (b'{"half": "\\ud800"}', hex_of(BODY), "nothing matches"),
        (BODY, hex_of(b"." + BODY), "nothing matches"),
    ],
)
def test_nothing_matches_comes_with_hints_and_the_verifiers_refusal(body: bytes, header: Any, words: str) -> None:
    found = diagnose(SECRET, body, header)
    assert (found.accepted, found.explained) == (False, False)
    assert str(found).startswith("nothing matches\n")
    assert found.findings[-1].startswith("the verifier says: ")
    assert words in str(found)


def test_unusable_secret_is_a_diagnosis_and_not_an_error() -> None:
    assert "webhook secret: must not be empty" in str(diagnose("", BODY, hex_of(BODY)))
    for secret in ("\n", "key_", "''"):
        assert not diagnose(secret, BODY, hex_of(BODY, b"")).explained


def test_diagnosis_shows_neither_secret_nor_expected_signature() -> None:
    """A diagnosis may be pasted into a ticket."""
    for found in (diagnose(SECRET, BODY, hex_of(BODY, "another")), diagnose(SECRET + "\n", BODY, hex_of(BODY + b" "))):
        for hidden in (SECRET, hex_of(BODY), base64_of(BODY), hex_of(BODY, SECRET + "\n")):
            assert hidden not in str(found) + repr(found)


def test_body_must_be_bytes() -> None:
    with pytest.raises(TypeError, match="bytes as received"):
        diagnose(SECRET, BODY.decode(), hex_of(BODY))  # type: ignore[arg-type]  # passing text is the test
