"""Signature schemes: published vectors, the signers and verifiers of other projects, and bad settings."""

from __future__ import annotations

import base64
import hashlib
import hmac
import pickle
from dataclasses import FrozenInstanceError, replace
from datetime import UTC, datetime
from typing import Any

import pytest
from gidgethub.sansio import validate_event
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook
from stripe import WebhookSignature

from signing_async.errors import ConfigurationError
from signing_async.webhooks import (
    GITHUB,
    SLACK,
    STANDARD_WEBHOOKS,
    STRIPE,
    SVIX,
    InvalidSignature,
    Scheme,
    WebhookVerifier,
    sign,
)
from signing_async.webhooks.scheme import decode_base64
from tests.webhooks.deliveries import SECRET, base64_of, event_body, hex_of

NOW = 1_700_000_000
TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=200)

PUBLISHED = [
    # GitHub's documentation, validating webhook deliveries
    (
        "It's a Secret to Everybody",
        b"Hello, World!",
        "757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17",
    ),
    # Coinify's documentation, webhook signature
    (
        "my-shared-secret",
        b'{"examplePayload":true}',
        "bcdbb89e3031905f3cc1a20d16b5f969a17a7d8fa0c26e4a807c2193402d66f4",
    ),
    # Datasaur's documentation, webhook signature
    ("secret", b'{"body":"sample"}', "0278b1a603de4c561ac0feb960354d0d00e8846b74813d81bddb43ad45bff767"),
    # RFC 4231, section 4: test cases 1 to 4, 6 and 7 (5 is a truncated MAC)
    (b"\x0b" * 20, b"Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
    ("Jefe", b"what do ya want for nothing?", "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"),
    (b"\xaa" * 20, b"\xdd" * 50, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"),
    (bytes(range(1, 26)), b"\xcd" * 50, "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"),
    (
        b"\xaa" * 131,
        b"Test Using Larger Than Block-Size Key - Hash Key First",
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
    ),
    (
        b"\xaa" * 131,
        b"This is a test using a larger than block-size key and a larger than block-size data."
        b" The key needs to be hashed before being used by the HMAC algorithm.",
        "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2",
    ),
]


@pytest.mark.parametrize(("secret", "body", "expected"), PUBLISHED)
def test_published_vectors_are_accepted_and_one_changed_digit_is_not(secret: Any, body: bytes, expected: str) -> None:
    verifier = WebhookVerifier(secret)
    verifier.verify(body, expected)
    verifier.verify(body, "sha256=" + expected.upper())
    WebhookVerifier(secret, GITHUB).verify(body, "sha256=" + expected)
    changed = expected[:-1] + ("0" if expected[-1] != "0" else "1")
    with pytest.raises(InvalidSignature):
        verifier.verify(body, changed)
    assert sign(secret, body) == {"X-Signature": expected}


@given(
    body=TEXT, secret=st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=1, max_size=80)
)
def test_gidgethub_accepts_what_sign_makes(body: str, secret: str) -> None:
    signature = sign(secret, body.encode(), GITHUB)["X-Hub-Signature-256"]
    validate_event(body.encode(), signature=signature, secret=secret)
    made = "sha256=" + hmac.new(secret.encode(), body.encode(), hashlib.sha256).hexdigest()
    WebhookVerifier(secret, GITHUB).verify(body.encode(), made)


@given(
    body=TEXT,
    key=st.binary(min_size=1, max_size=80).filter(lambda key: key.strip(b" \t\r\n")),
    name=st.from_regex(r"msg_[0-9A-Za-z]{1,30}", fullmatch=True),
)
def test_standardwebhooks_and_this_package_accept_each_others_signatures(body: str, key: bytes, name: str) -> None:
    moment = datetime.now(UTC).replace(microsecond=0)
    stamp = str(int(moment.timestamp()))
    theirs = Webhook(key)
    headers = {"webhook-id": name, "webhook-timestamp": stamp, "webhook-signature": theirs.sign(name, moment, body)}
    for scheme in (
        STANDARD_WEBHOOKS,
        replace(SVIX, header="webhook-signature", id_header="webhook-id", timestamp_header="webhook-timestamp"),
    ):
        WebhookVerifier(key, scheme).verify(body.encode(), None, headers=headers)
    ours = sign(key, body.encode(), STANDARD_WEBHOOKS, id=name, timestamp=int(stamp))
    theirs.verify(body.encode(), ours, json_parse=False)
    with pytest.raises(InvalidSignature):
        WebhookVerifier(key, STANDARD_WEBHOOKS).verify(
            body.encode(), None, headers={**headers, "webhook-id": name + "x"}
        )


def test_standard_webhooks_secret_prefix_rotation_and_other_versions() -> None:
    text = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    moment = datetime.now(UTC).replace(microsecond=0)
    good = Webhook(text).sign("msg_1", moment, "{}")
    headers = {"webhook-id": "msg_1", "webhook-timestamp": str(int(moment.timestamp()))}
    verifier = WebhookVerifier(text, STANDARD_WEBHOOKS)
    verifier.verify(b"{}", f"v1a,AAAA v1,{'A' * 43}= {good}", headers=headers)
    WebhookVerifier(text.removeprefix("whsec_"), STANDARD_WEBHOOKS).verify(b"{}", good, headers=headers)
    with pytest.raises(InvalidSignature):
        verifier.verify(b"{}", good.replace("v1,", "v1a,"), headers=headers)
    with pytest.raises(InvalidSignature):
        verifier.verify(b"{}", good.replace("v1,", ""), headers=headers)


@given(
    body=TEXT, secret=st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=1, max_size=80)
)
def test_stripe_and_this_package_accept_each_others_signatures(body: str, secret: str) -> None:
    scheme = replace(STRIPE, clock=lambda: NOW)
    verifier = WebhookVerifier(secret, scheme)
    verifier.verify(body.encode(), WebhookSignature.generate_signature_header(body, secret, NOW))
    WebhookSignature.verify_header(body, sign(secret, body.encode(), scheme)["Stripe-Signature"], secret)
    with pytest.raises(InvalidSignature):
        verifier.verify(body.encode(), WebhookSignature.generate_signature_header(body, secret, NOW - 301))


def test_worked_example_of_slacks_documentation_is_accepted() -> None:
    body = (
        b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V"
        b"&channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text="
        b"&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN"
        b"&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c"
    )
    signature = "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503"
    scheme = replace(SLACK, clock=lambda: 1531420618)
    verifier = WebhookVerifier("8f742231b10e8888abcd99yyyzzz85a5", scheme)
    headers = {"X-Slack-Request-Timestamp": "1531420618", "X-Slack-Signature": signature}
    verifier.verify(body, signature, headers=headers)
    verifier.verify(body, None, headers=headers)
    with pytest.raises(InvalidSignature):
        verifier.verify(body, signature, headers={"X-Slack-Request-Timestamp": "1531420619"})


BODY = event_body("evt_1")


HEX = hex_of(BODY)


def accepts(body: bytes, signature: Any, scheme: Scheme | None = None, secret: Any = SECRET, **options: Any) -> bool:
    """Return whether the verifier accepts; any error but InvalidSignature propagates."""
    try:
        WebhookVerifier(secret, scheme or Scheme()).verify(body, signature, **options)
    except InvalidSignature:
        return False
    return True


@pytest.mark.parametrize(
    ("encoding", "secret"),
    [
        ("hex", "0b" * 20),
        ("hex", " 0B0B0b0b" + "0b" * 16),
        ("base64", base64.b64encode(b"\x0b" * 20).decode()),
        ("base64", base64.urlsafe_b64encode(b"\x0b" * 20).decode().rstrip("=")),
        ("utf-8", "\x0b" * 20),
        ("hex", b"\x0b" * 20),
    ],
)
def test_secret_given_as_text_is_decoded_and_as_bytes_is_the_key(encoding: Any, secret: Any) -> None:
    assert accepts(BODY, hex_of(BODY, b"\x0b" * 20), Scheme(key_encoding=encoding), secret)


@pytest.mark.parametrize(
    ("encoding", "secret"),
    [
        ("hex", "0g"),
        ("hex", "abc"),
        ("hex", "é"),
        ("base64", "!!!!"),
        ("base64", "zzzzz"),
        ("base64", "é"),
        ("utf-8", "\ud800"),
        ("hex", ""),
        ("base64", "===="),
    ],
)
def test_secret_that_cannot_be_decoded_is_refused_without_being_shown(encoding: Any, secret: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        WebhookVerifier(secret, Scheme(key_encoding=encoding))
    assert "secret" in str(caught.value)
    assert not secret or secret not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"header": ""}, "header"),
        ({"header": "X Signature"}, "header"),
        ({"id_header": "a:b"}, "id_header"),
        ({"header": None}, "header"),
        ({"key_encoding": "rot13"}, "key_encoding"),
        ({"encodings": ()}, "encodings"),
        ({"encodings": "hex"}, "encodings"),
        ({"encodings": ("hex", "base58")}, "base58"),
        ({"labels": "v1="}, "labels"),
        ({"labels": ("v1 ",)}, "labels"),
        ({"labels": (None,)}, "labels"),
        ({"signed": "{timestamp}"}, "signed"),
        ({"signed": "{body}{body}"}, "signed"),
        ({"signed": "{body}{url}"}, "url"),
        ({"signed": 5}, "signed"),
        ({"signed": "{id}{body}"}, "id_header"),
        ({"signed": "{timestamp}{body}"}, "timestamp_header"),
        ({"signed": "{timestamp}{body}", "timestamp_header": "a", "timestamp_label": "t="}, "timestamp_header"),
        ({"tolerance": 0}, "tolerance"),
        ({"tolerance": float("nan")}, "tolerance"),
        ({"tolerance": "5"}, "tolerance"),
    ],
)
def test_bad_scheme_is_refused_by_field(setting: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Scheme(**setting)


def test_scheme_is_frozen_hashable_and_pickles() -> None:
    scheme = Scheme(labels=["v1="], encodings=["hex"])  # type: ignore[arg-type]  # what users pass
    assert scheme.labels == ("v1=",)
    assert {scheme: 1}[pickle.loads(pickle.dumps(scheme))] == 1
    with pytest.raises(FrozenInstanceError):
        scheme.header = "other"  # type: ignore[misc]  # assigning is the test


def test_sign_makes_headers_that_the_verifier_accepts() -> None:
    assert sign(SECRET, BODY) == {"X-Signature": HEX}
    assert sign("k", BODY, STRIPE, timestamp=5) == {"Stripe-Signature": "t=5,v1=" + hex_of(b"5." + BODY, "k")}
    assert sign(SECRET, BODY, Scheme(encodings=("base64", "hex"))) == {"X-Signature": base64_of(BODY)}
    headers = sign("whsec_a2V5", BODY, STANDARD_WEBHOOKS, id="msg_1")
    WebhookVerifier(b"key", STANDARD_WEBHOOKS).verify(BODY, None, headers=headers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"header": ""}, "Scheme.header: must not be empty"),
        (
            {"signed": "{id}.{body}"},
            "Scheme.signed: contains {id}, so set Scheme.id_header",
        ),
        (
            {"signed": "{timestamp}.{body}"},
            "Scheme.signed: contains {timestamp}, so set either timestamp_header or timestamp_label",
        ),
    ],
)
def test_message_about_a_scheme_says_what_to_set(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Scheme(**settings)
    assert str(caught.value).startswith(message)


def test_base64_key_may_be_standard_or_url_safe_with_any_padding_and_nothing_else() -> None:
    for key in (b"\xfb\xff\xfe!", b"\x00\x00\x17", b"abcd", b"abcde"):
        text = base64.b64encode(key).decode()
        for spelled in (text, text.rstrip("="), text + "==", text.replace("+", "-").replace("/", "_")):
            assert decode_base64(spelled) == key
    assert decode_base64("AAAX") == b"\x00\x00\x17"
    for bad in ("==AAAX", "AA AX", "AA\nAX", "AAAX!", "A", "ÄAAX"):
        with pytest.raises(ValueError):
            decode_base64(bad)
