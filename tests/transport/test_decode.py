"""JSON bytes become records: whatever the bytes are, a record comes out or `Unreadable` says where it went wrong."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import math
import pickle
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import cattrs
import orjson
import pytest
from aiohttp import web
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from signing_async import (
    DecodeError,
    Document,
    Language,
    Recipient,
    RetryPolicy,
    Signing,
    SigningClient,
    SigningOrder,
    SigningState,
    TransportError,
    User,
)
from signing_async.sandbox import Profile, Sandbox
from signing_async.transport import decode
from signing_async.transport.decode import Unreadable, parse, structure, structure_all, timestamp
from tests.pdfs import make_pdf
from tests.servers import serving

_FAST = orjson
_RECORDS = (Signing, Document, Recipient, User)


@pytest.fixture(params=["orjson", "json"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the two JSON readers in turn."""
    monkeypatch.setattr(decode, "orjson", _FAST if request.param == "orjson" else None)
    return str(request.param)


def _outcome(call: Callable[[], Any]) -> Any:
    """What a call gives, or that it is unreadable."""
    try:
        return call()
    except Unreadable:
        return Unreadable


# Bytes


@pytest.mark.parametrize(
    ("body", "data"),
    [
        (b'{"a": [1, 2.5, true, null, "x"]}', {"a": [1, 2.5, True, None, "x"]}),
        (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
        (b' \r\n\t{"a": 1}\n', {"a": 1}),
        (b'{"a": 1, "a": 2}', {"a": 2}),
        ('{"a": "Åsa 😀"}'.encode(), {"a": "Åsa 😀"}),
        (b'"\\u00c5sa \\ud83d\\ude00"', "Åsa 😀"),
        (b'"\\\\ud800"', "\\ud800"),
        (b"18446744073709551615", 2**64 - 1),
        (b"-9223372036854775808", -(2**63)),
        (b"18446744073709551616", float(2**64)),
        (b"-9223372036854775809", -float(2**63)),
        (b"1" * 300, float("1" * 300)),
        (b"1e5", 1e5),
        (b"1e-999", 0.0),
    ],
)
def test_json_is_read(reader: str, body: bytes, data: Any) -> None:
    """What is JSON is read, and alike with and without orjson."""
    found = parse(body)
    assert found == data
    assert type(found) is type(data)


def test_depth_that_somebody_could_mean_is_read(reader: str) -> None:
    """A hundred levels are no attack; one more is what nobody means, and no brackets in a text are levels."""
    data, depth = parse(b"[" * 100 + b"]" * 100), 1
    while data:
        (data,), depth = data, depth + 1
    assert depth == 100
    with pytest.raises(Unreadable, match="nested too deeply"):
        parse(b"[" * 101 + b"]" * 101)
    assert parse(b'["%b", [], {}]' % (b"[" * 500)) == ["[" * 500, [], {}]


@pytest.mark.parametrize("kinds", ["[", "{", "[{", "{{["])
def test_levels_of_every_kind_count(reader: str, kinds: str) -> None:
    """Lists and objects alike, and in whatever order."""

    def nested(depth: int) -> bytes:
        data: Any = 1
        for kind in itertools.islice(itertools.cycle(kinds), depth):
            data = [data] if kind == "[" else {"a": data}
        return json.dumps(data).encode()

    assert parse(nested(100)) == json.loads(nested(100))
    with pytest.raises(Unreadable, match="nested too deeply"):
        parse(nested(101))


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[1,]",
        b"01",
        b"nul",
        b"true false",
        b"{'a': 1}",
        b"<html>",
        b"\x00",
        b'{"a": "\x01"}',
        b"NaN",
        b"[Infinity]",
        b'{"a": -Infinity}',
        b"1e999",
        b"[-1e999]",
        b"9" * 400,
        b"9" * 5000,
        b"\xff",
        b'"\xc0\x80"',
        b'"\xed\xa0\x80"',
        b'"\\ud800"',
        b'{"\\uDC00x": 1}',
        b'["\\ude00\\ud83d"]',
        b"\xef\xbb\xbf\xef\xbb\xbf{}",
        '{"a": 1}'.encode("utf-16"),
        '{"a": 1}'.encode("utf-16-le"),
        '{"a": 1}'.encode("utf-32"),
        b"\xc2\xa0[]",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[" * 2000 + b"]" * 2000,
    ],
)
def test_what_is_no_json_is_unreadable(reader: str, body: bytes) -> None:
    """Bytes that are not JSON, or that no text, number or depth can hold, are `Unreadable` with a short reason."""
    with pytest.raises(Unreadable) as caught:
        parse(body)
    assert "JSON" in str(caught.value) or "nested too deeply" in str(caught.value) or "UTF-8" in str(caught.value)
    assert len(str(caught.value)) < 200
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("body", [b"", b" \n", b"\xef\xbb\xbf"])
def test_an_empty_body_is_called_empty(reader: str, body: bytes) -> None:
    """An empty body is told from a broken one."""
    with pytest.raises(Unreadable, match=r"^empty$"):
        parse(body)


def test_orjson_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra `speed` the standard library reads."""
    monkeypatch.setitem(sys.modules, "orjson", None)
    spec = importlib.util.find_spec("signing_async.transport.decode")
    assert spec is not None
    assert spec.loader is not None
    slow = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(slow)
    assert slow.orjson is None
    assert slow.structure(slow.parse(b'{"id": "d"}'), Document) == Document("d")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode) | _JSON.map(json.dumps).map(str.encode))
@example(b"[-0.0]")
@example(b'{"":1e400}')
def test_both_readers_agree(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    """With and without orjson the same bytes give the same data, or are unreadable; nothing else is ever raised."""
    found = []
    for reader in (_FAST, None):
        monkeypatch.setattr(decode, "orjson", reader)
        found.append(_outcome(lambda: parse(body)))
    assert found[0] == found[1]
    assert repr(found[0]) == repr(found[1])


# Records


def test_a_signing_is_read_whole(reader: str) -> None:
    """Every documented field lands in its attribute, and everything else in ``extra``."""
    body = json.dumps(
        {
            "id": "s1",
            "name": "Lease",
            "language": "SV",
            "signing_order": "sequential",
            "message": "Hej",
            "is_draft": False,
            "is_completed": True,
            "cancelled_at": None,
            "updated_at": "2026-01-31T12:00:00Z",
            "documents": [
                {"id": "d1", "name": "a.pdf", "completed_at": 1769860800, "signed_file_path": "/f", "size": 5},
                {"id": "d2", "name": "b.pdf", "completed_at": None},
            ],
            "owner": {"id": "u1"},
            "extra": "theirs",
        }
    ).encode()
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    expected = Signing(
        id="s1",
        name="Lease",
        language=Language.SV,
        signing_order=SigningOrder.SEQUENTIAL,
        message="Hej",
        is_draft=False,
        is_completed=True,
        cancelled_at=None,
        updated_at=noon,
        documents=(Document("d1", "a.pdf", noon, "/f", {"size": 5}), Document("d2", "b.pdf")),
        extra={"owner": {"id": "u1"}, "extra": "theirs"},
    )
    signing = structure(parse(body), Signing)
    assert signing == expected
    assert signing.language is Language.SV
    assert signing.signing_order is SigningOrder.SEQUENTIAL
    assert hash(signing) == hash(expected)


@pytest.mark.parametrize("cls", [Signing, Document, Recipient])
def test_an_id_is_all_that_is_needed(cls: type[Any]) -> None:
    """Absent and null fields are the same: the class's own defaults."""
    names = [name for name in cls.__annotations__ if name not in ("id", "extra")]
    assert structure({"id": "x"}, cls) == structure({"id": "x", **dict.fromkeys(names)}, cls) == cls(id="x")


def test_a_user_needs_nothing() -> None:
    """The specification names no field of a user."""
    assert structure({}, User) == User()
    assert structure({"id": 7, "tenant": "t"}, User) == User(id="7", extra={"tenant": "t"})


def test_numbers_are_taken_where_they_mean_the_same() -> None:
    """Numeric ids become texts; 0 and 1 become flags; digits and whole floats become an order."""
    assert structure({"id": 42}, Document).id == "42"
    assert structure({"id": "s", "is_draft": 1, "is_completed": 0}, Signing).is_draft is True
    assert structure({"id": "s", "is_draft": 1, "is_completed": 0}, Signing).is_completed is False
    assert structure({"id": "r", "order": "2"}, Recipient).order == 2
    assert structure({"id": "r", "order": 2.0}, Recipient).order == 2


def test_an_unknown_choice_is_kept() -> None:
    """A language, order or method that this package does not list arrives as it came."""
    signing = structure({"id": "s", "language": "FI", "signing_order": ""}, Signing)
    assert (signing.language, signing.signing_order) == ("FI", "")
    assert isinstance(signing.language, Language)
    assert structure({"id": "r", "signing_method": "sms"}, Recipient).signing_method == "sms"


@pytest.mark.parametrize("empty", [None, [], {}])
def test_no_documents_in_any_spelling(empty: Any) -> None:
    """Null, an empty list, and the empty object that PHP writes are all no documents."""
    assert structure({"id": "s", "documents": empty}, Signing).documents == ()


@pytest.mark.parametrize(
    ("data", "cls", "message"),
    [
        ({}, Signing, "id: missing"),
        ({"id": None}, Document, "id: missing"),
        ({"id": True}, Recipient, "id: expected a text, got true"),
        ({"id": 1.5}, Recipient, "id: expected a text, got 1.5"),
        ({"id": ["x"]}, Recipient, "id: expected a text, got a list"),
        ({"id": "s", "name": {"en": "x"}}, Signing, "name: expected a text, got an object"),
        ({"id": "s", "message": False}, Signing, "message: expected a text, got false"),
        ({"id": "s", "is_draft": "false"}, Signing, "is_draft: expected true or false, got 'false'"),
        ({"id": "s", "is_draft": 2}, Signing, "is_draft: expected true or false, got 2"),
        ({"id": "s", "is_completed": []}, Signing, "is_completed: expected true or false, got a list"),
        ({"id": "s", "language": 7}, Signing, "language: expected a text, got 7"),
        ({"id": "s", "language": True}, Signing, "language: expected a text, got true"),
        ({"id": "s", "signing_order": []}, Signing, "signing_order: expected a text, got a list"),
        ({"id": "s", "documents": "d"}, Signing, "documents: expected a list, got 'd'"),
        ({"id": "s", "documents": {"0": {}}}, Signing, "documents: expected a list, got an object"),
        ({"id": "s", "documents": [{"id": "d"}, None]}, Signing, "documents[1]: expected an object, got null"),
        ({"id": "s", "documents": [{"name": "d"}]}, Signing, "documents[0].id: missing"),
        ({"id": "r", "order": "first"}, Recipient, "order: expected a whole number, got 'first'"),
        ({"id": "r", "order": 1.5}, Recipient, "order: expected a whole number, got 1.5"),
        ({"id": "r", "order": True}, Recipient, "order: expected a whole number, got true"),
        ({"id": "r", "email": {}}, Recipient, "email: expected a text, got an object"),
        ({"email": 1.5}, User, "email: expected a text, got 1.5"),
        ([], Signing, "expected an object, got a list"),
        ("x" * 100, User, "expected an object, got a text of 100 characters"),
        (None, Signing, "expected an object, got null"),
    ],
)
def test_a_wrong_type_is_named_with_its_place(data: Any, cls: type[Any], message: str) -> None:
    """The error names the path in the answer, what was expected there, and what stood there."""
    with pytest.raises(Unreadable) as caught:
        structure(data, cls)
    assert str(caught.value) == message


def test_a_list_is_read_item_by_item() -> None:
    """Every item becomes a record, and the first wrong one is named by its position."""
    assert structure_all([{"id": "a"}, {"id": "b"}], Document) == (Document("a"), Document("b"))
    assert structure_all([], Document) == ()
    with pytest.raises(Unreadable, match=r"^\[1\]\.id: missing$"):
        structure_all([{"id": "a"}, {}], Document)
    with pytest.raises(Unreadable, match=r"^expected a list, got 5$"):
        structure_all(5, Document)


def test_the_converter_makes_the_same_records() -> None:
    """The generated functions are the hooks of the cattrs converter, nested records included."""
    data = {"id": "s", "documents": [{"id": "d", "size": 1}], "language": "EN", "x": 1}
    assert isinstance(decode.converter(), cattrs.Converter)
    assert decode.converter().structure(copy.deepcopy(data), Signing) == structure(data, Signing)


_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        name: _JSON | st.lists(st.fixed_dictionaries({}, optional={"id": st.text(), "completed_at": _JSON}), max_size=3)
        for name in {name for cls in _RECORDS for name in cls.__annotations__}
    },
)


@settings(deadline=None)
@given(_JSON | _FIELDS, st.sampled_from(_RECORDS))
def test_any_data_gives_a_record_or_unreadable(data: Any, cls: type[Any]) -> None:
    """No JSON value raises anything but `Unreadable`, and a record that comes out holds what its types promise."""
    made = _outcome(lambda: structure(copy.deepcopy(data), cls))
    if made is Unreadable:
        return
    assert type(made) is cls
    given = set(data) - set(cls.__annotations__)
    moments = {"completed_at", "cancelled_at", "updated_at"} & set(cls.__annotations__)
    assert set(made.extra) - moments == given | ({"extra"} & set(data))
    for name in moments:
        assert name not in made.extra or (getattr(made, name) is None and made.extra[name] == data[name])
        moment = getattr(made, name, None)
        assert moment is None or (isinstance(moment, datetime) and moment.utcoffset() is not None)
    assert isinstance(getattr(made, "documents", ()), tuple)
    hash(made)
    assert copy.deepcopy(made) == made


# Timestamps

_NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-01-31T12:00:00Z", _NOON),
        ("2026-01-31T12:00:00+00:00", _NOON),
        ("2026-01-31T12:00:00-00:00", _NOON),
        ("2026-01-31T13:00:00+01:00", _NOON),
        ("2026-01-31T13:00:00+0100", _NOON),
        ("2026-01-31T13:00:00+01", _NOON),
        ("2026-01-31T06:30:00-05:30", _NOON),
        ("2026-01-31T06:30:00\u221205:30", _NOON),
        ("2026-01-31T13:00:00 +01:00", _NOON),
        ("2026-01-31T12:00:00 Z", _NOON),
        ("2026-01-31 12:00:00 UTC", _NOON),
        ("2026-01-31 12:00:00 GMT", _NOON),
        ("2026-01-31T12:00Z", _NOON),
        ("2026-01-31T12Z", _NOON),
        ("2026-01-31T12:00:00", _NOON),
        ("2026-01-31 12:00:00", _NOON),
        ("2026-01-31 12:00:00Z", _NOON),
        ("2026-01-31t12:00:00z", _NOON),
        ("2026-01-31T12:00:00z", _NOON),
        (" 2026-01-31T12:00:00Z\n", _NOON),
        ("20260131T120000Z", _NOON),
        ("20260131T130000+0100", _NOON),
        ("20260131T1200Z", _NOON),
        ("20260131t120000z", _NOON),
        ("2026-W05-6T12:00:00Z", _NOON),
        ("2026W056T120000Z", _NOON),
        ("2026-w05-6t12:00:00z", _NOON),
        ("2026-W05-6", _NOON - timedelta(hours=12)),
        ("2026-01-31", _NOON - timedelta(hours=12)),
        ("20260131", _NOON - timedelta(hours=12)),
        ("2026-01-31T12:00:00.5Z", _NOON + timedelta(milliseconds=500)),
        ("2026-01-31T12:00:00,5Z", _NOON + timedelta(milliseconds=500)),
        ("2026-01-31T12:00:00,5z", _NOON + timedelta(milliseconds=500)),
        ("20260131T120000.25Z", _NOON + timedelta(milliseconds=250)),
        ("20260131T120000,25z", _NOON + timedelta(milliseconds=250)),
        ("2026-01-31 12:00:00.000001", _NOON + timedelta(microseconds=1)),
        ("2026-01-31T12:00:00.123456Z", _NOON + timedelta(microseconds=123456)),
        ("2026-01-31T12:00:00.123456789Z", _NOON + timedelta(microseconds=123456)),
        ("2026-01-31T12:00:00.123456789z", _NOON + timedelta(microseconds=123456)),
        ("2026-01-31T12:00:00." + "1" * 5000 + "Z", _NOON + timedelta(microseconds=111111)),
        ("2026-01-31T24:00:00Z", _NOON + timedelta(hours=12)),
        ("2026-01-31T24:00Z", _NOON + timedelta(hours=12)),
        ("2026-01-31T24Z", _NOON + timedelta(hours=12)),
        ("2026-01-31T24:00:00.000Z", _NOON + timedelta(hours=12)),
        ("20260131T240000+0000", _NOON + timedelta(hours=12)),
        ("2016-12-31T23:59:60Z", datetime(2017, 1, 1, tzinfo=UTC)),
        ("2016-12-31T23:59:60", datetime(2017, 1, 1, tzinfo=UTC)),
        ("2016-12-31T23:59:60.5+00:00", datetime(2017, 1, 1, 0, 0, 0, 500000, tzinfo=UTC)),
        ("20161231T235960Z", datetime(2017, 1, 1, tzinfo=UTC)),
        ("2017-01-01T00:59:60+01:00", datetime(2017, 1, 1, tzinfo=UTC)),
        (1769860800, _NOON),
        (1769860800.25, _NOON + timedelta(milliseconds=250)),
        (1769860800000, _NOON),
        (1769860800250.5, _NOON + timedelta(microseconds=250500)),
        (1769860800123456, _NOON + timedelta(microseconds=123456)),
        ("1769860800", _NOON),
        ("1769860800.25", _NOON + timedelta(milliseconds=250)),
        ("1769860800000", _NOON),
        ("1769860800123456", _NOON + timedelta(microseconds=123456)),
        ("-1769860800", datetime(1913, 12, 1, 12, tzinfo=UTC)),
        ("1712010812345", datetime(2024, 4, 1, 22, 33, 32, 345000, tzinfo=UTC)),
        ("Sat, 31 Jan 2026 12:00:00 GMT", _NOON),
        ("Sat, 31 Jan 2026 13:00:00 +0100", _NOON),
        ("sat, 31 jan 2026 12:00:00 utc", _NOON),
        ("31 Jan 2026 12:00", _NOON),
        ("1 Feb 2026 00:00:00 +1200", _NOON),
        ("/Date(1769860800000)/", _NOON),
        ("/Date(1769860800000+0100)/", _NOON),
        ("/Date(-62135596800000)/", datetime(1, 1, 1, tzinfo=UTC)),
        (0, datetime(1970, 1, 1, tzinfo=UTC)),
        (-1.5, datetime(1969, 12, 31, 23, 59, 58, 500000, tzinfo=UTC)),
    ],
)
def test_a_timestamp_is_read(text: Any, moment: datetime) -> None:
    """ISO 8601 in its variants and seconds, milli- or microseconds since 1970 give an aware datetime."""
    found = timestamp(text)
    assert found == moment
    assert found is not None
    assert found.utcoffset() is not None


def test_an_offset_is_kept() -> None:
    """The zone that the service wrote is not lost."""
    for text in (
        "2026-01-31T13:00:00+01:00",
        "2026-01-31T13:00:00.5 +0100",
        "Sat, 31 Jan 2026 13:00:00 +0100",
        "/Date(1769860800000+0100)/",
    ):
        found = timestamp(text)
        assert found is not None
        assert found.utcoffset() == timedelta(hours=1)
        assert found.hour == 13


@pytest.mark.parametrize("empty", [None, "", "  "])
def test_no_timestamp(empty: Any) -> None:
    """Null and an empty text are no timestamp: "empty until the document is fully signed"."""
    assert timestamp(empty) is None


@pytest.mark.parametrize(
    "value",
    [
        "x",
        "null",
        "2026",
        "2026-01",
        "2026-13-01T00:00:00Z",
        "2026-02-30",
        "2026-02-30T00:00:00",
        "2026-01-31T25:00:00Z",
        "2026-01-31T12:60:00Z",
        "2026-01-31T12:00:61Z",
        "2026-01-31T12:00:60Z",
        "2026-01-31T24:00:01Z",
        "2026-01-31T24:00:00.5Z",
        "2026-01-31T24:30:00Z",
        "2026-01-31T24:00:60Z",
        "2026-01-31T12.5Z",
        "2026-01-31T12:30.5Z",
        "20260131T1230.5Z",
        "2026-01-31T12,5",
        "2026-01-31T12:00:00+25:00",
        "2026-01-31T12:00:00z+25:00",
        "2026-01-31 12:00:00 +25:00",
        "2026-01-31T12:00:00+01:00[Europe/Stockholm]",
        "2026-W54-1T00:00:00",
        "0000-01-01T00:00:00",
        "0000-00-00 00:00:00",
        "Sat, 31 Jan 2026 12:00:00 CET",
        "Sat, 32 Jan 2026 12:00:00 GMT",
        "Sat, 31 Now 2026 12:00:00 GMT",
        "31 Jan 2026",
        "/Date(99999999999999999)/",
        "/Date()/",
        "/Date(1769860800000+9999)/",
        "Sat, " + "1" * 1_000_000,
        "9999-12-31T24:00:00Z",
        "9999-12-31T23:59:60Z",
        "２０２６-01-31T12:00:00",
        "2026-01-31T12:00:00." + "1" * 100 + "later",
        "1_000_000_000",
        "1e9",
        "9" * 5000,
        "+",
        " " * 100_000 + "x",
        "2026-01-31T12:00:00" + " " * 100_000 + "x",
        "2026-01-31T12:00:00." + "1" * 1_000_000,
        "1" * 1_000_000 + "." + "1" * 1_000_000,
        "-" * 1_000_000,
        10**400,
        -(10**400),
        10**5000,
        1e308,
        math.nan,
        math.inf,
        1769860800123456789,
        True,
        False,
        [],
        {},
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, int) else str(value)[:40],
)
@pytest.mark.timeout(30)
def test_what_is_no_timestamp_is_unreadable(value: Any) -> None:
    """Impossible moments and hostile texts are refused in no time, with at most the start of what stood there."""
    if isinstance(value, str) and len(value) == 1_000_020:
        assert timestamp(value) == _NOON + timedelta(microseconds=111111)
        return
    with pytest.raises(Unreadable, match=r"^expected a timestamp, got ") as caught:
        timestamp(value)
    assert len(str(caught.value)) < 80


_ZONES = st.integers(-23 * 60 - 59, 23 * 60 + 59).map(lambda minutes: timezone(timedelta(minutes=minutes)))
_MOMENTS = st.datetimes(datetime(1902, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC) | _ZONES)


@settings(deadline=None)
@given(
    _MOMENTS, st.sampled_from("T t"), st.booleans(), st.booleans(), st.sampled_from(["Z", "z", "+00:00", " UTC", ""])
)
def test_iso_round_trip(moment: datetime, separator: str, basic: bool, comma: bool, zulu: str) -> None:
    """Whatever a moment's spelling in ISO 8601, the same moment is read."""
    text = moment.replace(tzinfo=None).isoformat() + zulu if moment.tzinfo is UTC else moment.isoformat()
    if basic:
        date, _, rest = text.partition("T")
        text = date.replace("-", "") + "T" + rest.replace(":", "")
    if comma:
        text = text.replace(".", ",")
    assert timestamp(text.replace("T", separator, 1)) == moment


@settings(deadline=None)
@given(st.datetimes(datetime(1974, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)))
def test_epoch_round_trip(moment: datetime) -> None:
    """Seconds, milliseconds and microseconds since 1970, as number or digits, give the moment back."""
    micros = (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    tolerance = timedelta(microseconds=1)
    second, milli = moment.replace(microsecond=0), moment.replace(microsecond=moment.microsecond // 1000 * 1000)
    assert timestamp(micros // 10**6) == timestamp(str(micros // 10**6)) == second
    assert abs((timestamp(micros // 1000) or moment) - milli) <= tolerance
    assert abs((timestamp(micros) or second) - moment) <= tolerance
    assert abs((timestamp(micros / 1e6) or second) - moment) <= tolerance
    assert abs((timestamp(f"{micros // 10**6}.{micros % 10**6:06}") or second) - moment) <= tolerance


@settings(deadline=None)
@given(st.text(max_size=40) | st.from_regex(r"\d{4}-?\d\d-?\d\d[T ]?[\d:.,+zZ -]*", fullmatch=True) | _JSON)
@example("2026-01-31T12:00:00.5+01:00:00.5")
def test_any_value_is_a_timestamp_or_unreadable(value: Any) -> None:
    """Nothing but an aware datetime, None or `Unreadable` comes of any value."""
    moment = _outcome(lambda: timestamp(value))
    assert moment is Unreadable or moment is None or moment.utcoffset() is not None


@pytest.mark.parametrize(
    "value", ["soon", "0000-00-00 00:00:00", "31/01/2026 12:00", "2026", True, False, 1e300, ["x"], {"date": "x"}]
)
def test_unreadable_timestamp_is_none_and_its_value_is_kept_in_extra(value: Any) -> None:
    """A form that nobody foresaw does not cost the record."""
    data = {"id": "s", "name": "Lease", "updated_at": value, "documents": [{"id": "d", "completed_at": value}]}
    signing = structure(copy.deepcopy(data), Signing)
    assert (signing.id, signing.name, signing.updated_at) == ("s", "Lease", None)
    assert signing.extra == {"updated_at": value}
    assert signing.documents == (Document("d", extra={"completed_at": value}),)


@pytest.mark.parametrize(
    ("value", "state"),
    [
        ("on Saturday", SigningState.CANCELLED),
        (True, SigningState.CANCELLED),
        ("0000-00-00 00:00:00", SigningState.SENT),
        (False, SigningState.SENT),
        ({}, SigningState.SENT),
    ],
)
def test_signing_with_unreadable_cancelled_at_is_cancelled(value: Any, state: SigningState) -> None:
    """Only what stands for null does not count."""
    signing = structure({"id": "s", "is_draft": False, "cancelled_at": value}, Signing)
    assert (signing.state, signing.cancelled_at) == (state, None)


# Through the client


@pytest.mark.parametrize(
    "moment", ["Sat, 31 Jan 2026 12:00:00 GMT", "0000-00-00 00:00:00", "/Date(1769860800000)/", "?"]
)
async def test_created_signing_is_returned_whatever_its_timestamps(moment: str) -> None:
    """The id of what was created is not lost, and a row with such a timestamp does not fail its page."""

    async def handler(request: web.Request) -> web.Response:
        signing = {"id": "s9", "is_draft": True, "updated_at": moment}
        if request.method == "POST":
            return web.json_response(signing, status=201)
        return web.json_response({"data": [{"id": "s8"}, signing]})

    async with serving(handler) as server, SigningClient(server.origin, "secret-token") as client:
        created = await client.signings.create(name="Lease", language="EN")
        page = await client.signings.list()
    readable = moment[0] in "S/"
    assert created.id == "s9"
    assert created.updated_at == (_NOON if readable else None)
    assert created.extra.get("updated_at") == (None if readable else moment)
    assert [signing.id for signing in page.items] == ["s8", "s9"]


async def test_decode_error_carries_the_parsed_body_without_secrets() -> None:
    """What was created can be found by it; nothing of it is in any text, and no token in the body."""

    async def handler(request: web.Request) -> web.Response:
        answer = {"id": "s9", "is_draft": "perhaps", "message": "by secret-token", "secret-token": [{"x": 1}]}
        return web.json_response({"data": answer}, status=201)

    async with serving(handler) as server, SigningClient(server.origin, "secret-token") as client:
        with pytest.raises(DecodeError, match="is_draft: expected true or false, got 'perhaps'") as caught:
            await client.signings.create(name="Lease", language="EN")
    expected = {"id": "s9", "is_draft": "perhaps", "message": "by [redacted]", "[redacted]": [{"x": 1}]}
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value)), copy.copy(caught.value)):
        assert error.body == {"data": expected}
        assert error.effect == "unknown"
        assert "s9" not in f"{error} {error!r} {error.args}"


async def test_decode_error_of_what_is_not_json_has_no_body() -> None:
    """There is nothing parsed to carry."""

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=b"<html>", content_type="application/json")

    async with serving(handler) as server, SigningClient(server.origin, "secret-token") as client:
        with pytest.raises(DecodeError) as caught:
            await client.me()
    assert caught.value.body is None
    assert caught.value.effect == "none"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "empty"),
        (b"<html>502</html>", "not JSON"),
        (b'{"data": [', "not JSON"),
        (b"\xff\xfe", "not"),
        (b"[" * 100_000, "depth|nested"),
        (b'{"data": {"x": 1}}', "no list of items: neither the answer itself nor any of data, signings, items"),
        (b"null", "no list of items"),
        (b'{"data": [{"id": "a"}, {"id": "b", "is_draft": "x"}]}', r"data\[1\]\.is_draft: expected true or false"),
        (
            b'{"items": [{"id": 1}, {"id": 2}, {"id": 3}, {"id": 4, "documents": [{"id": 1, "name": false}]}]}',
            r"items\[3\]\.documents\[0\]\.name: expected a text, got false \(HTTP 200, request id req-1\)$",
        ),
        (b'[{"id": "a"}, 5]', r"signings\.list: the response cannot be read: \[1\]: expected an object, got 5 \("),
    ],
)
async def test_an_unreadable_answer_is_a_decode_error(body: bytes, problem: str) -> None:
    """An answer of status 200 that cannot be read says which call, where in the answer, status and request id."""

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json", headers={"X-Request-Id": "req-1"})

    async with serving(handler) as server, SigningClient(server.origin, "secret-token") as client:
        with pytest.raises(DecodeError, match=problem) as caught:
            await client.signings.list()
    assert (caught.value.status, caught.value.request_id) == (200, "req-1")
    assert caught.value.operation == "signings.list"
    assert str(caught.value).startswith("signings.list: the response cannot be read: ")
    assert len(server.requests) == 1


async def test_a_decode_error_takes_the_request_id_from_the_body() -> None:
    """Without a header the body's request id is told; and a secret that the answer echoes is not."""

    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"id": "u", "email": ["x"], "name": "x", "request_id": "req-2"})

    async def echo(request: web.Request) -> web.Response:
        return web.json_response({"id": "s", "is_draft": "secret-token"})

    async with serving(handler) as server, SigningClient(server.origin, "secret-token") as client:
        with pytest.raises(
            DecodeError, match=r"^me: .* email: expected a text, got a list \(HTTP 200, request id req-2"
        ):
            await client.me()
    async with serving(echo) as server, SigningClient(server.origin, "secret-token") as client:
        with pytest.raises(DecodeError, match=r"got '\[redacted\]'") as caught:
            await client.signings.get("s")
    assert caught.value.request_id is None


@pytest.mark.parametrize("kind", ["empty", "not-json", "truncate"])
async def test_broken_answers_of_the_sandbox(sandbox: Sandbox, kind: str) -> None:
    """What the sandbox breaks on purpose is an error of the package, after a retry where that can help."""
    sandbox.faults.add("me", kind, times=None)
    async with SigningClient(sandbox.base_url, sandbox.access_token(), retry=RetryPolicy.none()) as client:
        with pytest.raises(TransportError if kind == "truncate" else DecodeError):
            await client.me()


@pytest.mark.parametrize("timestamps", ["iso_z", "iso_micros", "iso_offset", "epoch_seconds", "epoch_millis"])
@pytest.mark.parametrize("ids", ["uuid", "ulid", "integer"])
async def test_every_timestamp_and_id_format_of_the_sandbox(timestamps: Any, ids: Any) -> None:
    """Whatever format the service chose, records come out the same."""
    async with (
        Sandbox(seed=1, profile=Profile(timestamps=timestamps, ids=ids, documents_in_list=True)) as sandbox,
        SigningClient(sandbox.base_url, sandbox.access_token()) as client,
    ):
        before = sandbox.clock.now()
        signing = await client.signings.create(name="Lease", language="EN")
        document = await client.documents.upload(signing, make_pdf(), "lease.pdf")
        recipient = await client.recipients.add(signing, email="anna@example.com", first_name="A", last_name="B")
        await client.signings.send(signing)
        await sandbox.complete(signing.id)
        after = sandbox.clock.now()
        done = await client.signings.get(signing)
        (listed,) = (await client.signings.list()).items
        assert (done.id, listed.id) == (signing.id, signing.id)
        assert [each.id for each in done.documents] == [each.id for each in listed.documents] == [document.id]
        assert [each.id async for each in client.recipients.list(signing)] == [recipient.id]
        slack = timedelta(seconds=1)
        for moment in (done.updated_at, done.documents[0].completed_at, listed.updated_at):
            assert moment is not None
            assert before - slack <= moment <= after + slack
        assert done.documents[0].signed_file_path
        assert "created_at" in done.extra
        assert "size" in done.documents[0].extra
