"""From a genuine body to an event: tolerant of what is new, strict with what is dangerous."""

from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from signing_async.webhooks import (
    Event,
    InvalidSignature,
    MalformedEvent,
    Scheme,
    WebhookVerifier,
)
from signing_async.webhooks.event import MAX_DEPTH, MAX_DIGITS, parse_event
from tests.webhooks.deliveries import SECRET, event_body, hex_of

VERIFIER = WebhookVerifier(SECRET, Scheme(clock=lambda: 1_700_000_000.5))


def parse(body: bytes) -> Event:
    """Parse a body with its right signature."""
    return VERIFIER.parse(body, hex_of(body))


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"event": {"id": "evt_1", "type": "signing.completed"}, "more": [1]}, ("evt_1", "signing.completed")),
        ({"id": "evt_2", "type": "never.seen.before"}, ("evt_2", "never.seen.before")),
        ({"event": {"id": "evt_3"}, "type": "outside"}, ("evt_3", "outside")),
        ({"event": {"type": "inside"}, "id": "evt_4"}, ("evt_4", "inside")),
        ({"event": {"id": "inner", "type": "a"}, "id": "outer", "type": "b"}, ("inner", "a")),
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
def test_id_and_type_are_found_where_they_may_be(payload: dict[str, Any], expected: tuple[str, str]) -> None:
    """In the member event, dotted, or at the top; an unknown or missing type is fine; the payload is kept whole."""
    event = parse(json.dumps(payload).encode())
    assert (event.id, event.type) == expected
    assert event.payload == payload
    assert event.received_at == datetime.fromtimestamp(1_700_000_000.5, UTC)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"nonsense", "not JSON"),
        (b'{"id": "x"', "not JSON"),
        (b'{"id": "x"} {}', "not JSON"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8"),
        ('{"id": "x"}'.encode("utf-16"), "not UTF-8"),
        (b'{"id": "\xff"}', "not UTF-8"),
        (b"[]", "no object but an array"),
        (b'"evt"', "no object but a string"),
        (b"null", "no object but null"),
        (b"true", "no object but a boolean"),
        (b"12", "no object but a number"),
        (b"{}", "no id"),
        (b'{"event": {}}', "no id"),
        (b'{"event": {"id": null}}', "no id"),
        (b'{"event.id": null}', "no id"),
        (b'{"event.id": []}', "is an array"),
        (b'{"id": ""}', "is empty"),
        (b'{"id": "  "}', "is empty"),
        (b'{"id": true}', "is a boolean"),
        (b'{"id": 1.5}', "is a number"),
        (b'{"id": {}}', "is an object"),
        (b'{"id": "a\\u0000b"}', "cannot be printed"),
        (b'{"id": "\\ud800"}', "cannot be printed"),
        (b'{"id": "' + b"x" * 513 + b'"}', "513 characters"),
        (b'{"id": "a", "id": "b"}', "the member 'id' twice"),
        (b'{"id": "a", "data": {"x": 1, "x": 1}}', "the member 'x' twice"),
        (b'{"id": "a", "n": NaN}', "NaN"),
        (b'{"id": "a", "n": -Infinity}', "-Infinity"),
        (b'{"id": "a", "n": 1e999}', "cannot be held"),
        (b'{"id": "a", "n": 0.' + b"0" * 2000 + b"1}", "cannot be held"),
        (b'{"id": "a", "n": ' + b"9" * 641 + b"}", "641 digits"),
        (b'{"id": "a", "n": ' + b"9" * 900_000 + b"}", "digits"),
        (b'{"id": "a", "d": ' + b"[" * 65 + b"]" * 65 + b"}", "deeper than 64"),
        (b"[" * 1_000_000, "deeper than 64"),
        (b'{"a":' * 200_000, "deeper than 64"),
        (b'["' + b'\\"' * 100 + b"[" * 500_000, "not JSON"),
        (b'{"id": "a"}' + b" " * 2**20, "at most 1048576"),
    ],
)
def test_what_is_no_event_is_malformed(body: bytes, words: str) -> None:
    """Each kind of bad body is a MalformedEvent that says what is wrong, and nothing else happens."""
    with pytest.raises(MalformedEvent, match=words) as caught:
        parse(body)
    assert len(str(caught.value)) < 200


def test_a_byte_order_mark_is_read_over() -> None:
    """Some senders put one before the JSON."""
    assert parse(b"\xef\xbb\xbf" + event_body("evt_1")).id == "evt_1"


def test_nesting_is_counted_outside_strings_only() -> None:
    """Brackets in a text, and many beside each other, are no depth."""
    event = parse(json.dumps({"id": "a", "text": '[[["\\' * 100, "many": [[{}]] * 100}).encode())
    assert len(event.payload["many"]) == 100
    deep: Any = "bottom"
    for _ in range(63):
        deep = [deep]
    assert parse(json.dumps({"id": "a", "d": deep, "text": "[" * 100}).encode()).id == "a"


def test_numbers_that_can_be_held_are_exact() -> None:
    """Large integers stay integers."""
    event = parse(b'{"id": 7, "n": ' + b"9" * 640 + b', "f": 1.5e300}')
    assert event.payload["n"] == int("9" * 640)
    assert event.payload["f"] == 1.5e300
    assert event.id == "7"


def test_one_repeated_member_among_very_many_is_found_in_linear_time() -> None:
    """Comparing every name with every other would take minutes here, and the process would do nothing else."""
    names = [*(f'"{number}":0' for number in range(90_000)), '"89999":0']
    with pytest.raises(MalformedEvent, match="the member '89999' twice"):
        parse(f"{{{','.join(names)}}}".encode())


def test_a_limit_of_ones_own() -> None:
    """max_body is the verifier's."""
    verifier = WebhookVerifier(SECRET, max_body=100)
    small, large = event_body("a"), event_body("a", pad="x" * 100)
    assert verifier.parse(small, hex_of(small)).id == "a"
    with pytest.raises(MalformedEvent, match="at most 100"):
        verifier.parse(large, hex_of(large))


def test_nothing_is_parsed_before_it_is_verified() -> None:
    """A forged delivery is InvalidSignature even where its body is no JSON."""
    with pytest.raises(InvalidSignature):
        VERIFIER.parse(b"nonsense", hex_of(b"other"))
    with pytest.raises(InvalidSignature):
        VERIFIER.parse(b"nonsense")


def test_an_event_is_a_value() -> None:
    """Frozen, equal by content, hashable, pickled; its repr shows no payload, which may hold personal data."""
    event = parse(event_body("evt_1", email="person@example.com"))
    assert pickle.loads(pickle.dumps(event)) == event
    assert {event: 1}[parse(event_body("evt_1", email="person@example.com"))] == 1
    assert "person@example.com" not in repr(event)
    with pytest.raises(FrozenInstanceError):
        event.id = "other"  # type: ignore[misc]  # that is the point


def test_bytes_like_bodies_are_parsed() -> None:
    """As verify takes them."""
    body = event_body("evt_1")
    assert VERIFIER.parse(memoryview(body), hex_of(body)).id == "evt_1"  # type: ignore[arg-type]  # bytes-like is enough


@given(
    st.one_of(
        st.binary(max_size=300), st.text(alphabet='{}[]":,\\0123456789.eE-+truefalsn ', max_size=200).map(str.encode)
    )
)
def test_any_genuine_body_is_an_event_or_malformed(body: bytes) -> None:
    """Whatever the bytes are, nothing but an Event or a MalformedEvent comes out."""
    try:
        event = parse(body)
    except MalformedEvent:
        return
    assert event.id


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=5), st.booleans())
def test_payloads_come_through_unchanged(payload: dict[str, Any], ascii_only: bool) -> None:
    """Every JSON object with an id is read as the json module wrote it."""
    payload = {**payload, "event": {"id": "evt_1", "type": "t"}}
    body = json.dumps(payload, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert parse(body).payload == payload


def test_a_null_inside_is_made_good_at_the_top() -> None:
    """A member that is null in ``event`` counts as lacking."""
    event = parse(b'{"event": {"id": null, "type": null}, "id": "top", "type": "signing.sent"}')
    assert (event.id, event.type) == ("top", "signing.sent")


NOW = datetime(2026, 1, 2, tzinfo=UTC)


def _parse(body: bytes, **limits: int) -> Event:
    return parse_event(body, NOW, **limits)


def test_sizes_of_an_event_are_exact() -> None:
    """What is just small enough is read, and one more of anything is not."""
    body = event_body("e")
    assert _parse(body, max_body=len(body)).id == "e"
    with pytest.raises(MalformedEvent, match=f"the body has {len(body)} bytes; at most {len(body) - 1} are read"):
        _parse(body, max_body=len(body) - 1)
    number = b"1." + b"0" * (MAX_DIGITS - 2)
    assert _parse(b'{"id": "e", "x": %s}' % number).id == "e"
    with pytest.raises(MalformedEvent) as caught:
        _parse(b'{"id": "e", "x": %s0}' % number)
    assert str(caught.value) == f"the body has a number that cannot be held: {number[:40].decode()}"
    with pytest.raises(MalformedEvent) as caught:
        _parse(b'{"%s": 1, "%s": 2}' % (b"n" * 100, b"n" * 100))
    twice = "n" * 80
    assert str(caught.value) == f"the body has the member '{twice}' twice: which one counts cannot be told"


def test_depth_is_counted_through_siblings() -> None:
    """What was closed counts no more, and what is still open does."""
    deep = b"[" * (MAX_DEPTH - 2) + b"[],{},[]," * 40
    assert _parse(b'{"id": "e", "x": ' + deep + b"1" + b"]" * (MAX_DEPTH - 2) + b"}").id == "e"
    with pytest.raises(MalformedEvent, match=f"deeper than {MAX_DEPTH} levels"):
        _parse(b'{"id": "e", "x": ' + deep + b"[[1]]" + b"]" * (MAX_DEPTH - 2) + b"}")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{}", "the event has no id"),
        (b'{"id": " "}', "the event's id is empty"),
        (b"[]", "the body is JSON, and no object but an array"),
    ],
)
def test_the_words_about_an_event(body: bytes, words: str) -> None:
    """They are for whoever sends it."""
    with pytest.raises(MalformedEvent) as caught:
        _parse(body)
    assert str(caught.value) == words
