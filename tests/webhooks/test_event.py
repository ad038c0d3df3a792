"""Parsing a genuine body into an event."""

from __future__ import annotations

import json
import pickle
from datetime import UTC, datetime
from typing import Any

import pytest

from signing_async.webhooks import Event, InvalidSignature, MalformedEvent, Scheme, WebhookVerifier
from tests.webhooks.deliveries import SECRET, event_body, hex_of

VERIFIER = WebhookVerifier(SECRET, Scheme(clock=lambda: 1_700_000_000.5))
NOT_AN_ID = "the event id must be a printable string of 1 to 512 characters"


def parse(body: bytes) -> Event:
    """Parse a body together with its valid signature."""
    return VERIFIER.parse(body, hex_of(body))


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"event": {"id": "evt_1", "type": "signing.completed"}, "more": [1]}, ("evt_1", "signing.completed")),
        ({"event": {"id": None, "type": None}, "id": "outer", "type": "b"}, ("outer", "b")),
        ({"event": {"id": 12345, "type": None}}, ("12345", "")),
        ({"id": "evt 6 – å", "type": 7}, ("evt 6 – å", "")),
        ({"id": "x" * 512}, ("x" * 512, "")),
        ({"event.id": "evt_7", "event.type": "signing.completed"}, ("evt_7", "signing.completed")),
        ({"event": "signing.sent", "event.id": "evt_9", "event.type": None, "type": "b"}, ("evt_9", "b")),
    ],
)
def test_id_and_type_are_found_nested_dotted_and_at_the_top(payload: dict[str, Any], expected: tuple[str, str]) -> None:
    event = parse(json.dumps(payload).encode())
    assert (event.id, event.type) == expected
    assert event.payload == payload
    assert event.received_at == datetime.fromtimestamp(1_700_000_000.5, UTC)


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"event": {"id": "evt_1", "signing": {"id": "sig_1"}}}, "sig_1"),
        ({"event.id": "evt_1", "event.signing_id": "sig_1"}, "sig_1"),
        ({"event.id": "evt_1", "event.signing.id": "sig_1"}, "sig_1"),
        ({"id": "evt_1", "signing": {"id": 17}}, "17"),
        ({"event": {"id": "evt_1", "signing_id": "inner"}, "signing_id": "outer", "signing": {"id": "other"}}, "inner"),
        ({"event": {"id": "evt_1", "signing_id": None}, "signing_id": "", "signing": {"id": "sig_1"}}, "sig_1"),
        ({"event": {"id": "evt_1"}, "signing": "sig_1", "signing_id": True}, None),
        ({"event": {"id": "evt_1"}, "signing_id": ["sig_1"], "signing": {"id": "a\0b"}}, None),
    ],
)
def test_signing_id_is_found_nested_and_flat_and_is_none_where_there_is_none(
    payload: dict[str, Any], expected: str | None
) -> None:
    assert parse(json.dumps(payload).encode()).signing_id == expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not JSON"),
        (b'{"id": "\xff"}', "the body is not UTF-8 (byte 8)"),
        *((body, f"must be a JSON object, got a {kind}") for body, kind in ((b"[]", "list"), (b"12", "int"))),
        (b'{"event": {"id": null}}', "the event id is missing"),
        *(
            (b'{"id": ' + value + b"}", NOT_AN_ID)
            for value in (b'"  "', b"true", b"1.5", b"[]", b'"a\\u0000b"', b'"\\ud800"', b'"' + b"x" * 513 + b'"')
        ),
        *((b'{"id": "a", "n": ' + text + b"}", "which is not a finite number") for text in (b"NaN", b"-Infinity")),
        (b'{"id": "a", "n": ' + b"9" * 900_000 + b"}", "the body is not JSON: Exceeds the limit"),
        (b'{"id": "a", "d": ' + b"[" * 65 + b"]" * 65 + b"}", "the body nests deeper than 64 levels"),
        (b'{"a":' * 200_000, "the body nests deeper than 64 levels"),
        (b'{"id": "a"}' + b" " * 2**20, "the body has 1048587 bytes; the limit is 1048576"),
    ],
)
def test_malformed_body_is_refused_with_its_cause(body: bytes, message: str) -> None:
    with pytest.raises(MalformedEvent) as caught:
        parse(body)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 200


def test_body_is_not_parsed_before_it_is_verified() -> None:
    with pytest.raises(InvalidSignature):
        VERIFIER.parse(b"nonsense", hex_of(b"other"))


def test_event_is_a_value_whose_repr_hides_the_payload() -> None:
    event = parse(b"\xef\xbb\xbf" + event_body("evt_1", email="person@example.com"))
    assert {event: 1}[pickle.loads(pickle.dumps(event))] == 1
    assert "person@example.com" not in repr(event)
