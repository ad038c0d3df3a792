"""Webhook deliveries: only genuine ones are accepted, a genuine body is an event or malformed; the doctor agrees."""

from __future__ import annotations

import base64
import hmac
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from signing_async.webhooks import (
    SLACK,
    STANDARD_WEBHOOKS,
    STRIPE,
    InvalidSignature,
    MalformedEvent,
    Scheme,
    WebhookVerifier,
    diagnose,
    sign,
)
from signing_async.webhooks import decide as decide_on
from tests.fuzz.promises import check_text, parted
from tests.fuzz.running import Attack, Target

SECRET = b"a secret that is in no input"
NOW = 1_700_000_000
SCHEMES = tuple(replace(scheme, clock=lambda: NOW) for scheme in (Scheme(), STRIPE, SLACK, STANDARD_WEBHOOKS))
VERIFIERS = tuple(WebhookVerifier([b"another", SECRET], scheme) for scheme in SCHEMES)
STANDARD_ALPHABET = str.maketrans("-_", "+/")


@contextmanager
def attacking() -> Iterator[Attack]:
    log = logging.getLogger("signing_async.webhooks")
    before, log.disabled = log.disabled, True
    try:
        yield attack
    finally:
        log.disabled = before


def attack(data: bytes) -> None:
    choice, rest = data[:1], data[1:]
    pairs, body = parted(rest)
    verifier = VERIFIERS[(choice or b"\0")[0] % 4]
    accepted = _accepts(verifier, body, pairs)
    assert accepted or data not in GENUINE
    assert not accepted or _is_genuine(verifier.scheme, body, pairs), "a forged delivery was accepted"
    decision = decide_on(verifier, pairs, body)
    assert decision.event is None or accepted
    assert decision.status in ((202, 400, 413, 415) if accepted else (400, 401, 413, 415))
    assert json.loads(decision.body)
    _parse(body)
    if choice > b"\x80":
        found = diagnose(SECRET, body, None, headers=pairs, scheme=verifier.scheme)
        assert not found.accepted or accepted
        assert SECRET.decode() not in str(found)


def _accepts(verifier: WebhookVerifier, body: bytes, pairs: list[tuple[str, str]]) -> bool:
    try:
        verifier.verify(body, None, headers=pairs)
    except InvalidSignature as error:
        check_text(str(error))
        return False
    return True


def _is_genuine(scheme: Scheme, body: bytes, pairs: list[tuple[str, str]]) -> bool:
    """Return whether a word of the signature's header is the HMAC of what the scheme covers."""
    headers = {name.lower(): value.strip() for name, value in pairs}
    signature = ",".join(value.strip() for name, value in pairs if name.lower() == scheme.header.lower())

    def labelled(label: str) -> list[str]:
        return re.findall(rf"(?<![^ \t,]){re.escape(label)}([^ \t,]+)", signature, re.IGNORECASE)

    stamp = headers.get(scheme.timestamp_header.lower(), "")
    if scheme.timestamp_label:
        (stamp,) = re.findall(rf"(?<![^ \t,]){scheme.timestamp_label}([^ \t,]*)", signature)
    if "{timestamp}" in scheme.signed and abs(int(stamp) - NOW) > scheme.tolerance:
        return False
    covered = scheme.signed.replace("{timestamp}", stamp).replace("{id}", headers.get(scheme.id_header.lower(), ""))
    before, after = covered.encode().split(b"{body}")
    mac = hmac.digest(SECRET, before + body + after, "sha256")
    as_base64 = base64.b64encode(mac).decode().rstrip("=")
    return any(
        (value.lower() == mac.hex() and "hex" in scheme.encodings)
        or (value.rstrip("=").translate(STANDARD_ALPHABET) == as_base64 and "base64" in scheme.encodings)
        for label in scheme.labels
        for value in labelled(label)
    )


def _parse(body: bytes) -> None:
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
GENUINE = tuple(
    b"%c%s\n\n%s" % (number, b"\n".join(f"{name}: {value}".encode() for name, value in headers.items()), EVENT)
    for number, scheme in enumerate(SCHEMES * 2)
    for headers in [
        sign(SECRET, EVENT, replace(scheme, encodings=scheme.encodings[-1:]) if number > 3 else scheme, id="msg_1")
    ]
)
SEEDS = (
    *GENUINE,
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
