"""The pure decision on a delivery: from method, headers and body to a status and an event."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from signing_async.webhooks import WebhookVerifier, decide
from tests.webhooks.deliveries import SECRET, event_body, hex_of, signed

VERIFIER = WebhookVerifier(SECRET, max_body=10_000)


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        (signed(event_body("a")), event_body("a"), 202),
        ([(b"x-signature", hex_of(event_body("a")).encode())], event_body("a"), 202),
        ({**signed(event_body("a")), "Content-Encoding": "identity"}, event_body("a"), 202),
        ({**signed(event_body("a")), "Content-Encoding": ""}, event_body("a"), 202),
        ({**signed(event_body("a")), "Content-Encoding": "gzip"}, event_body("a"), 415),
        ({**signed(event_body("a")), "content-length": "10000"}, event_body("a"), 202),
        ({**signed(event_body("a")), "content-length": "10001"}, event_body("a"), 413),
        ({**signed(event_body("a")), "content-length": "9" * 5000}, event_body("a"), 413),
        ({**signed(event_body("a")), "content-length": "nonsense"}, event_body("a"), 400),
        (signed(event_body("b")), event_body("a"), 401),
        ({}, event_body("a"), 401),
        ({"X-Signature": "é"}, event_body("a"), 401),
        (signed(b"nonsense"), b"nonsense", 400),
        (signed(b"{}"), b"{}", 400),
        (signed(b" " * 10_000), b" " * 10_000, 400),
        (signed(b" " * 10_001), b" " * 10_001, 413),
    ],
)
def test_decide_maps_a_delivery_to_a_status_and_an_event(headers: Any, body: bytes, status: int) -> None:
    decision = decide(VERIFIER, headers, body)
    assert decision.status == status
    assert (decision.event is not None) == (status == 202)
    assert json.loads(decision.body)["message" if status == 202 else "error"]


HEADERS = st.dictionaries(
    st.text(max_size=20).filter(lambda name: name.lower() != "x-signature"), st.text(max_size=80), max_size=5
)


@given(HEADERS, st.text(max_size=80), st.binary(max_size=200))
def test_decide_accepts_no_made_up_delivery_and_never_raises(
    headers: dict[str, str], signature: str, body: bytes
) -> None:
    assert decide(VERIFIER, {**headers, "X-Signature": signature}, body).status in (400, 401, 413, 415)
    assert decide(VERIFIER, {**headers, **signed(body)}, body).status in (400, 413, 415)


def test_rejections_are_logged_by_reason_without_secret_signature_or_body(caplog: pytest.LogCaptureFixture) -> None:
    body = event_body("a", email="person@example.com")
    with caplog.at_level(logging.INFO, "signing_async.webhooks"):
        assert decide(VERIFIER, signed(body, "another"), body).status == 401
        decision = decide(VERIFIER, signed(b'{"email": "person@example.com"}'), b'{"email": "person@example.com"}')
    assert (decision.status, decision.message) == (400, "the event id is missing")
    assert [record.getMessage() for record in caplog.records] == [
        "rejected a webhook delivery (mismatch): no secret matches the signature",
        "rejected a webhook delivery with a valid signature: the event id is missing",
    ]
    for hidden in (SECRET, hex_of(body), hex_of(body, "another"), "person@example.com"):
        assert hidden not in caplog.text
