"""Webhook deliveries: any header is refused or right, any genuine body is an event or malformed; the doctor too."""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from signing_async.webhooks import (
    SLACK,
    STANDARD_WEBHOOKS,
    STRIPE,
    InvalidSignature,
    MalformedEvent,
    Scheme,
    WebhookVerifier,
    diagnose,
)
from signing_async.webhooks import decide as decide_on
from tests.fuzz.promises import check_text, parted
from tests.fuzz.running import Attack, Target

SECRET = b"a secret that is in no input"
SCHEMES = (Scheme(), STRIPE, SLACK, STANDARD_WEBHOOKS)
VERIFIERS = tuple(WebhookVerifier([b"another", SECRET], scheme) for scheme in SCHEMES)


@contextmanager
def attacking() -> Iterator[Attack]:
    log = logging.getLogger("signing_async.webhooks")
    before, log.disabled = log.disabled, True
    try:
        yield attack
    finally:
        log.disabled = before


def attack(data: bytes) -> None:
    choice, data = data[:1], data[1:]
    pairs, body = parted(data)
    verifier = VERIFIERS[(choice or b"\0")[0] % 4]
    _forged(verifier, body, pairs)
    _genuine(body)
    if choice > b"\x80":
        given = next((value for name, value in pairs if name.lower() == verifier.scheme.header.lower()), None)
        found = diagnose(SECRET, body, given, headers=pairs, scheme=verifier.scheme)
        assert not found.accepted
        assert SECRET.decode() not in str(found)


def _forged(verifier: WebhookVerifier, body: bytes, pairs: list[tuple[str, str]]) -> None:
    try:
        verifier.verify(body, None, headers=pairs)
    except InvalidSignature as error:
        check_text(str(error))
    else:
        raise AssertionError("a forged delivery was accepted")
    decision = decide_on(verifier, pairs, body)
    assert decision.event is None
    assert decision.status in (400, 401, 413, 415)
    assert json.loads(decision.body)


def _genuine(body: bytes) -> None:
    header = hmac.digest(SECRET, body, "sha256").hex()
    try:
        event = VERIFIERS[0].parse(body, header)
    except MalformedEvent as error:
        check_text(str(error))
        return
    assert event.id.isprintable()
    assert 0 < len(event.id) <= 512
    assert isinstance(event.type, str)
    assert repr(event)
    assert decide_on(VERIFIERS[0], {"X-Signature": header}, body).event is not None


EVENT = b'{"event": {"id": "evt_1", "type": "signing.completed"}, "signing": {"id": "s1", "x": [1, 2.5, null]}}'
SEEDS = (
    b"\x00X-Signature: sha256=" + b"a" * 64 + b"\n\n" + EVENT,
    b"\x81Stripe-Signature: t=1700000000,v1=" + b"b" * 64 + b"\n\n" + EVENT,
    b"\x82X-Slack-Signature: v0=" + b"c" * 64 + b"\nX-Slack-Request-Timestamp: 1700000000\n\n" + EVENT,
    b"\x83webhook-signature: v1," + b"d" * 43 + b"=\nwebhook-id: msg_1\nwebhook-timestamp: 1700000000\n\n" + EVENT,
    b"\x84X-Signature: " + b"e" * 43 + b"\nContent-Length: 10\nContent-Encoding: gzip\n\n\xef\xbb\xbf" + EVENT,
)
WORDS = (
    b"sha256=", b"v1=", b"v1,", b"v0=", b"t=", b",", b" ", b"=", b"a" * 64, b"A" * 43, b"-_", b"\n", b"\n\n",
    b"x-id: ", b"X-Signature: ", b"Content-Length: ", b"\xff", b"\xc3\xa9", b"\xd9\xa3", b"9" * 20, b"9" * 700,
    b"[" * 70, b"{", b"}", b"[", b"]", b'"', b":", b"null", b"true", b"NaN", b"1e999", b"-0", b'"id":', b'"type":',
    b'"event":', b"\\ud800", b"\\u0000", b"\xef\xbb\xbf", b"\x00", b"{}", b"\xe2\x80\xae",
)  # fmt: skip
TARGET = Target("webhooks", attacking, SEEDS, WORDS)
