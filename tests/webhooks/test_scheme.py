"""Signature schemes: the signers and verifiers of other projects, and bad settings."""

from __future__ import annotations

import base64
import pickle
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from gidgethub.sansio import validate_event
from hypothesis import given, settings
from hypothesis import strategies as st
from standardwebhooks import Webhook
from stripe import WebhookSignature

from signing_async import ConfigurationError
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
from tests.webhooks.deliveries import SECRET, base64_of, event_body, hex_of

NOW = 1_700_000_000
BODY = event_body("evt_1")
TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=200)
SECRETS = st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=1, max_size=80)


@settings(max_examples=15)
@given(body=TEXT, secret=SECRETS)
def test_gidgethub_and_stripe_and_this_package_accept_each_others_signatures(body: str, secret: str) -> None:
    signature = sign(secret, body.encode(), GITHUB)["X-Hub-Signature-256"]
    validate_event(body.encode(), signature=signature, secret=secret)
    scheme = replace(STRIPE, clock=lambda: NOW)
    verifier = WebhookVerifier(secret, scheme)
    verifier.verify(body.encode(), WebhookSignature.generate_signature_header(body, secret, NOW))
    WebhookSignature.verify_header(body, sign(secret, body.encode(), scheme)["Stripe-Signature"], secret)
    with pytest.raises(InvalidSignature):
        verifier.verify(body.encode(), WebhookSignature.generate_signature_header(body, secret, NOW - 301))


@settings(max_examples=15)
@given(
    body=TEXT,
    key=st.binary(min_size=1, max_size=80).filter(lambda key: key.strip(b" \t\r\n")),
    name=st.from_regex(r"msg_[0-9A-Za-z]{1,30}", fullmatch=True),
)
def test_standardwebhooks_and_this_package_accept_each_others_signatures(body: str, key: bytes, name: str) -> None:
    moment = datetime.now(UTC).replace(microsecond=0)
    stamp = str(int(moment.timestamp()))
    theirs = Webhook(key)
    signature = theirs.sign(name, moment, body)
    for scheme, prefix in ((STANDARD_WEBHOOKS, "webhook"), (SVIX, "svix")):
        headers = {f"{prefix}-id": name, f"{prefix}-timestamp": stamp, f"{prefix}-signature": signature}
        WebhookVerifier(key, scheme).verify(body.encode(), None, headers=headers)
        with pytest.raises(InvalidSignature):
            WebhookVerifier(key, scheme).verify(body.encode(), None, headers={**headers, f"{prefix}-id": name + "x"})
    ours = sign(key, body.encode(), STANDARD_WEBHOOKS, id=name, timestamp=int(stamp))
    theirs.verify(body.encode(), ours, json_parse=False)


def test_worked_example_of_slacks_documentation_is_accepted() -> None:
    body = (
        b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V"
        b"&channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text="
        b"&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN"
        b"&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c"
    )
    signature = "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503"
    verifier = WebhookVerifier("8f742231b10e8888abcd99yyyzzz85a5", replace(SLACK, clock=lambda: 1531420618))
    verifier.verify(body, None, headers={"X-Slack-Request-Timestamp": "1531420618", "X-Slack-Signature": signature})
    with pytest.raises(InvalidSignature):
        verifier.verify(body, signature, headers={"X-Slack-Request-Timestamp": "1531420619"})


@pytest.mark.parametrize(
    ("encoding", "secret"),
    [
        ("hex", " 0B0B0b0b" + "0b" * 16),
        ("base64", base64.b64encode(b"\x0b" * 20).decode()),
        ("base64", base64.urlsafe_b64encode(b"\x0b" * 20).decode().rstrip("=")),
        ("utf-8", "\x0b" * 20),
        ("hex", b"\x0b" * 20),
    ],
)
def test_secret_given_as_text_is_decoded_and_as_bytes_is_the_key(encoding: Any, secret: Any) -> None:
    WebhookVerifier(secret, Scheme(key_encoding=encoding)).verify(BODY, hex_of(BODY, b"\x0b" * 20))


@pytest.mark.parametrize(
    ("encoding", "secret"), [("hex", "0g"), ("base64", "!!!!"), ("base64", "===="), ("utf-8", "\ud800")]
)
def test_secret_that_cannot_be_decoded_is_refused_without_being_shown(encoding: Any, secret: str) -> None:
    with pytest.raises(ConfigurationError, match="webhook secret: ") as caught:
        WebhookVerifier(secret, Scheme(key_encoding=encoding))
    assert secret not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"header": ""}, r"Scheme\.header: must not be empty"),
        ({"header": "X Signature"}, r"Scheme\.header: must be a header name, got 'X Signature'"),
        ({"key_encoding": "rot13"}, r"Scheme\.key_encoding"),
        ({"encodings": ("hex", "base58")}, "base58"),
        ({"labels": "v1="}, r"Scheme\.labels"),
        ({"signed": "{timestamp}"}, r"Scheme\.signed: must contain {body} once"),
        ({"signed": "{body}{url}"}, "url"),
        ({"signed": "{id}{body}"}, r"contains {id}, so set Scheme\.id_header"),
        ({"signed": "{timestamp}{body}"}, "so set either timestamp_header or timestamp_label"),
        ({"tolerance": 0}, "tolerance"),
    ],
)
def test_bad_scheme_is_refused_by_field(setting: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Scheme(**setting)


def test_scheme_is_hashable_and_pickles() -> None:
    scheme = Scheme(labels=["v1="], encodings=["hex"])  # type: ignore[arg-type]  # what users pass
    assert {scheme: 1}[pickle.loads(pickle.dumps(scheme))] == 1


def test_sign_uses_the_first_label_and_encoding_of_the_scheme() -> None:
    assert sign("k", BODY, STRIPE, timestamp=5) == {"Stripe-Signature": "t=5,v1=" + hex_of(b"5." + BODY, "k")}
    assert sign(SECRET, BODY, Scheme(encodings=("base64", "hex"))) == {"X-Signature": base64_of(BODY)}


def test_key_longer_than_a_block_is_hashed_first() -> None:
    long = b"\xaa" * 131
    WebhookVerifier(long).verify(BODY, hex_of(BODY, long))
    assert sign(long, BODY) == {"X-Signature": hex_of(BODY, long)}
