"""Parsing a genuine body into an event."""

from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from signing_async.webhooks import Event, InvalidSignature, MalformedEvent, Scheme, WebhookVerifier
from tests.webhooks.deliveries import SECRET, event_body, hex_of

VERIFIER = WebhookVerifier(SECRET, Scheme(clock=lambda: 1_700_000_000.5))


def parse(body: bytes) -> Event:
    """Parse a body together with its valid signature."""
    return VERIFIER.parse(body, hex_of(body))


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"event": {"id": "evt_1", "type": "signing.completed"}, "more": [1]}, ("evt_1", "signing.completed")),
        ({"id": "evt_2", "type": "unknown.type"}, ("evt_2", "unknown.type")),
        ({"event": {"id": "evt_3"}, "type": "outside"}, ("evt_3", "outside")),
        ({"event": {"type": "inside"}, "id": "evt_4"}, ("evt_4", "inside")),
        ({"event": {"id": "inner", "type": "a"}, "id": "outer", "type": "b"}, ("inner", "a")),
        ({"event": {"id": None, "type": None}, "id": "outer", "type": "b"}, ("outer", "b")),
        ({"event": "signing.sent", "id": "evt_5"}, ("evt_5", "")),
        ({"event": {"id": 12345, "type": None}}, ("12345", "")),
        ({"id": "evt 6 – å", "type": 7}, ("evt 6 – å", "")),
        ({"id": "x" * 512}, ("x" * 512, "")),
        ({"event.id": "evt_7", "event.type": "signing.completed"}, ("evt_7", "signing.completed")),
        ({"event.id": 8, "id": "outer", "type": "b"}, ("8", "b")),
        ({"event": {"id": "inner"}, "event.id": "dotted", "event.type": "a"}, ("inner", "a")),
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
        ({"event": {"id": "evt_1"}, "signing": {"id": "sig_1", "name": "Lease"}}, "sig_1"),
        ({"event": {"id": "evt_1"}, "signing_id": "sig_1"}, "sig_1"),
        ({"event": {"id": "evt_1", "signing_id": "sig_1"}}, "sig_1"),
        ({"event": {"id": "evt_1", "signing": {"id": "sig_1"}}}, "sig_1"),
        ({"event.id": "evt_1", "event.signing_id": "sig_1"}, "sig_1"),
        ({"event.id": "evt_1", "event.signing.id": "sig_1"}, "sig_1"),
        ({"event.id": "evt_1", "signing.id": "sig_1"}, "sig_1"),
        ({"event.id": "evt_1", "event.signing": {"id": "sig_1"}}, "sig_1"),
        ({"id": "evt_1", "signing": {"id": 17}}, "17"),
        ({"event": {"id": "evt_1", "signing_id": "inner"}, "signing_id": "outer", "signing": {"id": "other"}}, "inner"),
        ({"event": {"id": "evt_1", "signing_id": None}, "signing_id": "", "signing": {"id": "sig_1"}}, "sig_1"),
        ({"event": {"id": "evt_1"}, "recipient_id": "rec_1"}, None),
        ({"event": {"id": "evt_1"}, "signing": "sig_1", "signing_id": True}, None),
        ({"event": {"id": "evt_1"}, "signing_id": ["sig_1"], "signing": {"id": "a\0b"}}, None),
        ({"event": {"id": "evt_1"}, "signing_id": "x" * 513}, None),
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
        (b"nonsense", "the body is not JSON"),
        (b'{"id": "x"', "the body is not JSON"),
        (b'{"id": "x"} {}', "the body is not JSON"),
        (b"\xff\xfe{\x00}\x00", "the body is not UTF-8 (byte 0)"),
        ('{"id": "x"}'.encode("utf-16"), "the body is not UTF-8"),
        (b'{"id": "\xff"}', "the body is not UTF-8 (byte 8)"),
        (b"[]", "the body must be a JSON object, got an array"),
        (b'"evt"', "the body must be a JSON object, got a string"),
        (b"null", "the body must be a JSON object, got null"),
        (b"true", "the body must be a JSON object, got a boolean"),
        (b"12", "the body must be a JSON object, got a number"),
        (b"{}", "the event id is missing"),
        (b'{"event": {}}', "the event id is missing"),
        (b'{"event": {"id": null}}', "the event id is missing"),
        (b'{"event.id": null}', "the event id is missing"),
        (b'{"event.id": []}', "the event id must be a printable string"),
        (b'{"id": ""}', "the event id must be a printable string"),
        (b'{"id": "  "}', "the event id must be a printable string"),
        (b'{"id": true}', "the event id must be a printable string"),
        (b'{"id": 1.5}', "the event id must be a printable string"),
        (b'{"id": {}}', "the event id must be a printable string"),
        (b'{"id": "a\\u0000b"}', "the event id must be a printable string"),
        (b'{"id": "\\ud800"}', "the event id must be a printable string"),
        (b'{"id": "' + b"x" * 513 + b'"}', "the event id must be a printable string"),
        (b'{"id": "a", "id": "b"}', "an object with a duplicate member"),
        (b'{"id": "a", "data": {"x": 1, "x": 1}}', "an object with a duplicate member"),
        (b'{"id": "a", "n": NaN}', "the body contains NaN, which"),
        (b'{"id": "a", "n": -Infinity}', "the body contains -Infinity, which"),
        (b'{"id": "a", "n": 1e999}', "the body contains 1e999, which"),
        (b'{"id": "a", "n": ' + b"9" * 900_000 + b"}", "the body is not JSON: Exceeds the limit"),
        (b'{"id": "a", "d": ' + b"[" * 65 + b"]" * 65 + b"}", "the body nests deeper than 64 levels"),
        (b"[" * 1_000_000, "the body nests deeper than 64 levels"),
        (b'{"a":' * 200_000, "the body nests deeper than 64 levels"),
        (b'["' + b'\\"' * 100 + b"[" * 500_000, "the body is not JSON"),
        (b'{"id": "a"}' + b" " * 2**20, "the body has 1048587 bytes; the limit is 1048576"),
    ],
)
def test_malformed_body_is_refused_with_its_cause(body: bytes, message: str) -> None:
    with pytest.raises(MalformedEvent) as caught:
        parse(body)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 200


def test_byte_order_mark_before_the_json_is_skipped() -> None:
    assert parse(b"\xef\xbb\xbf" + event_body("evt_1")).id == "evt_1"


def test_numbers_up_to_the_limit_are_exact() -> None:
    event = parse(b'{"id": 7, "n": ' + b"9" * 640 + b', "f": 1.5e300}')
    assert event.payload["n"] == int("9" * 640)
    assert event.payload["f"] == 1.5e300
    assert event.id == "7"


def test_duplicate_member_among_very_many_is_found_in_linear_time() -> None:
    """A quadratic comparison would take minutes here and block the process."""
    names = [*(f'"{number}":0' for number in range(90_000)), '"89999":0']
    with pytest.raises(MalformedEvent, match="duplicate member"):
        parse(f"{{{','.join(names)}}}".encode())


def test_body_is_not_parsed_before_it_is_verified() -> None:
    with pytest.raises(InvalidSignature):
        VERIFIER.parse(b"nonsense", hex_of(b"other"))
    with pytest.raises(InvalidSignature):
        VERIFIER.parse(b"nonsense")


def test_event_is_a_frozen_value_whose_repr_hides_the_payload() -> None:
    event = parse(event_body("evt_1", email="person@example.com"))
    assert pickle.loads(pickle.dumps(event)) == event
    assert {event: 1}[parse(event_body("evt_1", email="person@example.com"))] == 1
    assert "person@example.com" not in repr(event)
    with pytest.raises(FrozenInstanceError):
        event.id = "other"  # type: ignore[misc]  # assigning is the test


@given(
    st.one_of(
        st.binary(max_size=300), st.text(alphabet='{}[]":,\\0123456789.eE-+truefalsn ', max_size=200).map(str.encode)
    )
)
def test_any_genuine_body_is_an_event_or_malformed(body: bytes) -> None:
    try:
        event = parse(body)
    except MalformedEvent:
        return
    assert event.id
    assert event.signing_id is None or event.signing_id.isprintable()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=5), st.booleans())
def test_payload_is_what_the_json_module_wrote(payload: dict[str, Any], ascii_only: bool) -> None:
    payload = {**payload, "event": {"id": "evt_1", "type": "t"}}
    body = json.dumps(payload, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert parse(body).payload == payload
