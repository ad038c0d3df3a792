"""Decoding: any bytes give a record, or `Unreadable` with the place of the problem."""

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
from signing_async.transport.custom_records import decode_each
from signing_async.transport.decode import Unreadable, decode_record, parse, timestamp
from tests.pdfs import make_pdf
from tests.servers import serving

_FAST = orjson
_RECORDS = (Signing, Document, Recipient, User)


@pytest.fixture(params=["orjson", "json"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with each of the two JSON parsers."""
    monkeypatch.setattr(decode, "orjson", _FAST if request.param == "orjson" else None)
    return str(request.param)


def _outcome(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or `Unreadable` if it raises that."""
    try:
        return call()
    except Unreadable:
        return Unreadable


# JSON


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
def test_json_is_parsed_alike_with_and_without_orjson(parser: str, body: bytes, data: Any) -> None:
    found = parse(body)
    assert found == data
    assert type(found) is type(data)


def test_a_hundred_levels_are_parsed_and_one_more_is_refused(parser: str) -> None:
    """Brackets in strings are no levels."""
    data, depth = parse(b"[" * 100 + b"]" * 100), 1
    while data:
        (data,), depth = data, depth + 1
    assert depth == 100
    with pytest.raises(Unreadable, match="nested too deeply"):
        parse(b"[" * 101 + b"]" * 101)
    assert parse(b'["%b", [], {}]' % (b"[" * 500)) == ["[" * 500, [], {}]


@pytest.mark.parametrize("kinds", ["[", "{", "[{", "{{["])
def test_lists_and_objects_count_as_levels(parser: str, kinds: str) -> None:

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
def test_other_bytes_are_unreadable_for_a_short_reason(parser: str, body: bytes) -> None:
    with pytest.raises(Unreadable) as caught:
        parse(body)
    assert "JSON" in str(caught.value) or "nested too deeply" in str(caught.value) or "UTF-8" in str(caught.value)
    assert len(str(caught.value)) < 200
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("body", [b"", b" \n", b"\xef\xbb\xbf"])
def test_empty_body_is_unreadable_as_empty(parser: str, body: bytes) -> None:
    with pytest.raises(Unreadable, match=r"^empty$"):
        parse(body)


def test_json_is_parsed_where_orjson_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "orjson", None)
    spec = importlib.util.find_spec("signing_async.transport.decode")
    assert spec is not None
    assert spec.loader is not None
    slow = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(slow)
    assert slow.orjson is None
    assert slow.decode_record(slow.parse(b'{"id": "d"}'), Document) == Document("d")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode) | _JSON.map(json.dumps).map(str.encode))
@example(b"[-0.0]")
@example(b'{"":1e400}')
def test_both_parsers_agree_on_any_bytes(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    """Both give the same data, or both raise `Unreadable`."""
    found = []
    for orjson_or_none in (_FAST, None):
        monkeypatch.setattr(decode, "orjson", orjson_or_none)
        found.append(_outcome(lambda: parse(body)))
    assert found[0] == found[1]
    assert repr(found[0]) == repr(found[1])


# Records


def test_documented_fields_become_attributes_and_the_rest_extra(parser: str) -> None:
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
    signing = decode_record(parse(body), Signing)
    assert signing == expected
    assert signing.language is Language.SV
    assert signing.signing_order is SigningOrder.SEQUENTIAL
    assert hash(signing) == hash(expected)


@pytest.mark.parametrize("cls", [Signing, Document, Recipient])
def test_record_needs_only_an_id(cls: type[Any]) -> None:
    """Absent and null fields have the defaults of the class."""
    names = [name for name in cls.__annotations__ if name not in ("id", "extra")]
    assert decode_record({"id": "x"}, cls) == decode_record({"id": "x", **dict.fromkeys(names)}, cls) == cls(id="x")


def test_user_needs_no_field() -> None:
    """The specification names none."""
    assert decode_record({}, User) == User()
    assert decode_record({"id": 7, "tenant": "t"}, User) == User(id="7", extra={"tenant": "t"})


def test_numbers_and_digits_are_converted_where_they_mean_the_same() -> None:
    """Numeric ids become strings; 0 and 1 become flags; digits and whole floats become an order."""
    assert decode_record({"id": 42}, Document).id == "42"
    assert decode_record({"id": "s", "is_draft": 1, "is_completed": 0}, Signing).is_draft is True
    assert decode_record({"id": "s", "is_draft": 1, "is_completed": 0}, Signing).is_completed is False
    assert decode_record({"id": "r", "order": "2"}, Recipient).order == 2
    assert decode_record({"id": "r", "order": 2.0}, Recipient).order == 2


def test_unknown_enumeration_value_is_kept() -> None:
    signing = decode_record({"id": "s", "language": "FI", "signing_order": ""}, Signing)
    assert (signing.language, signing.signing_order) == ("FI", "")
    assert isinstance(signing.language, Language)
    assert decode_record({"id": "r", "signing_method": "sms"}, Recipient).signing_method == "sms"


@pytest.mark.parametrize("empty", [None, [], {}])
def test_null_empty_list_and_empty_object_are_no_documents(empty: Any) -> None:
    """PHP writes an empty list as an object."""
    assert decode_record({"id": "s", "documents": empty}, Signing).documents == ()


@pytest.mark.parametrize(
    ("data", "cls", "message"),
    [
        ({}, Signing, "id: missing"),
        ({"id": None}, Document, "id: missing"),
        ({"id": True}, Recipient, "id: expected a string, got true"),
        ({"id": 1.5}, Recipient, "id: expected a string, got 1.5"),
        ({"id": ["x"]}, Recipient, "id: expected a string, got a list"),
        ({"id": "s", "name": {"en": "x"}}, Signing, "name: expected a string, got an object"),
        ({"id": "s", "message": False}, Signing, "message: expected a string, got false"),
        ({"id": "s", "is_draft": "false"}, Signing, "is_draft: expected true or false, got 'false'"),
        ({"id": "s", "is_draft": 2}, Signing, "is_draft: expected true or false, got 2"),
        ({"id": "s", "is_completed": []}, Signing, "is_completed: expected true or false, got a list"),
        ({"id": "s", "language": 7}, Signing, "language: expected a string, got 7"),
        ({"id": "s", "language": True}, Signing, "language: expected a string, got true"),
        ({"id": "s", "signing_order": []}, Signing, "signing_order: expected a string, got a list"),
        ({"id": "s", "documents": "d"}, Signing, "documents: expected a list, got 'd'"),
        ({"id": "s", "documents": {"0": {}}}, Signing, "documents: expected a list, got an object"),
        ({"id": "s", "documents": [{"id": "d"}, None]}, Signing, "documents[1]: expected an object, got null"),
        ({"id": "s", "documents": [{"name": "d"}]}, Signing, "documents[0].id: missing"),
        ({"id": "r", "order": "first"}, Recipient, "order: expected an integer, got 'first'"),
        ({"id": "r", "order": 1.5}, Recipient, "order: expected an integer, got 1.5"),
        ({"id": "r", "order": True}, Recipient, "order: expected an integer, got true"),
        ({"id": "r", "email": {}}, Recipient, "email: expected a string, got an object"),
        ({"email": 1.5}, User, "email: expected a string, got 1.5"),
        ([], Signing, "expected an object, got a list"),
        (7, Recipient, "expected an object, got 7"),
        ("x" * 100, User, "expected an object, got a string of 100 characters"),
        (None, Signing, "expected an object, got null"),
    ],
)
def test_error_names_path_expected_type_and_value(data: Any, cls: type[Any], message: str) -> None:
    with pytest.raises(Unreadable) as caught:
        decode_record(data, cls)
    assert str(caught.value) == message


def test_error_in_a_list_names_the_index() -> None:
    assert decode_each([{"id": "a"}, {"id": "b"}], Document) == (Document("a"), Document("b"))
    assert decode_each([], Document) == ()
    with pytest.raises(Unreadable, match=r"^\[1\]\.id: missing$"):
        decode_each([{"id": "a"}, {}], Document)
    with pytest.raises(Unreadable, match=r"^expected a list, got 5$"):
        decode_each(5, Document)


def test_hooks_are_registered_with_cattrs() -> None:
    data = {"id": "s", "documents": [{"id": "d", "size": 1}], "language": "EN", "x": 1}
    assert isinstance(decode.converter(), cattrs.Converter)
    assert decode.converter().structure(copy.deepcopy(data), Signing) == decode_record(data, Signing)


_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        name: _JSON | st.lists(st.fixed_dictionaries({}, optional={"id": st.text(), "completed_at": _JSON}), max_size=3)
        for name in {name for cls in _RECORDS for name in cls.__annotations__}
    },
)


@given(_JSON | _FIELDS, st.sampled_from(_RECORDS))
def test_any_json_value_gives_a_record_of_its_types_or_unreadable(data: Any, cls: type[Any]) -> None:
    made = _outcome(lambda: decode_record(copy.deepcopy(data), cls))
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
def test_timestamp_is_parsed_to_an_aware_datetime(text: Any, moment: datetime) -> None:
    found = timestamp(text)
    assert found == moment
    assert found is not None
    assert found.utcoffset() is not None


def test_offset_of_a_timestamp_is_kept() -> None:
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
def test_null_and_empty_strings_are_no_timestamp(empty: Any) -> None:
    """The specification says "empty until the document is fully signed"."""
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
def test_impossible_and_hostile_timestamps_are_unreadable_at_once(value: Any) -> None:
    if isinstance(value, str) and len(value) == 1_000_020:
        assert timestamp(value) == _NOON + timedelta(microseconds=111111)
        return
    with pytest.raises(Unreadable, match=r"^expected a timestamp, got ") as caught:
        timestamp(value)
    assert len(str(caught.value)) < 80


_ZONES = st.integers(-23 * 60 - 59, 23 * 60 + 59).map(lambda minutes: timezone(timedelta(minutes=minutes)))
_MOMENTS = st.datetimes(datetime(1902, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC) | _ZONES)


@given(
    _MOMENTS, st.sampled_from("T t"), st.booleans(), st.booleans(), st.sampled_from(["Z", "z", "+00:00", " UTC", ""])
)
def test_any_iso_8601_form_is_parsed_to_the_same_moment(
    moment: datetime, separator: str, basic: bool, comma: bool, zulu: str
) -> None:
    text = moment.replace(tzinfo=None).isoformat() + zulu if moment.tzinfo is UTC else moment.isoformat()
    if basic:
        date, _, rest = text.partition("T")
        text = date.replace("-", "") + "T" + rest.replace(":", "")
    if comma:
        text = text.replace(".", ",")
    assert timestamp(text.replace("T", separator, 1)) == moment


@given(st.datetimes(datetime(1974, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)))
def test_epoch_seconds_milliseconds_and_microseconds_are_parsed(moment: datetime) -> None:
    """As numbers and as digits."""
    micros = (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    tolerance = timedelta(microseconds=1)
    second, milli = moment.replace(microsecond=0), moment.replace(microsecond=moment.microsecond // 1000 * 1000)
    assert timestamp(micros // 10**6) == timestamp(str(micros // 10**6)) == second
    assert abs((timestamp(micros // 1000) or moment) - milli) <= tolerance
    assert abs((timestamp(micros) or second) - moment) <= tolerance
    assert abs((timestamp(micros / 1e6) or second) - moment) <= tolerance
    assert abs((timestamp(f"{micros // 10**6}.{micros % 10**6:06}") or second) - moment) <= tolerance


@given(st.text(max_size=40) | st.from_regex(r"\d{4}-?\d\d-?\d\d[T ]?[\d:.,+zZ -]*", fullmatch=True) | _JSON)
@example("2026-01-31T12:00:00.5+01:00:00.5")
def test_any_value_is_an_aware_datetime_none_or_unreadable(value: Any) -> None:
    moment = _outcome(lambda: timestamp(value))
    assert moment is Unreadable or moment is None or moment.utcoffset() is not None


@pytest.mark.parametrize(
    "value", ["soon", "0000-00-00 00:00:00", "31/01/2026 12:00", "2026", True, False, 1e300, ["x"], {"date": "x"}]
)
def test_unreadable_timestamp_is_none_and_its_value_is_kept_in_extra(value: Any) -> None:
    data = {"id": "s", "name": "Lease", "updated_at": value, "documents": [{"id": "d", "completed_at": value}]}
    signing = decode_record(copy.deepcopy(data), Signing)
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
    """Unless the value stands for null."""
    signing = decode_record({"id": "s", "is_draft": False, "cancelled_at": value}, Signing)
    assert (signing.state, signing.cancelled_at) == (state, None)


# Through the client


@pytest.mark.parametrize(
    "moment", ["Sat, 31 Jan 2026 12:00:00 GMT", "0000-00-00 00:00:00", "/Date(1769860800000)/", "?"]
)
async def test_created_signing_is_returned_whatever_its_timestamps(moment: str) -> None:
    """Its id is not lost, and such a row does not fail its page."""

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
    """It helps to find what was created; none of it is in any text."""

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


async def test_decode_error_has_no_body_if_the_response_is_not_json() -> None:

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
        (b'{"data": {"x": 1}}', "no list of items: neither the response itself nor any of data, signings, items"),
        (b"null", "no list of items"),
        (b'{"data": [{"id": "a"}, {"id": "b", "is_draft": "x"}]}', r"data\[1\]\.is_draft: expected true or false"),
        (
            b'{"items": [{"id": 1}, {"id": 2}, {"id": 3}, {"id": 4, "documents": [{"id": 1, "name": false}]}]}',
            r"items\[3\]\.documents\[0\]\.name: expected a string, got false \(HTTP 200, request id req-1\)$",
        ),
        (b'[{"id": "a"}, 5]', r"signings\.list: the response cannot be read: \[1\]: expected an object, got 5 \("),
    ],
)
async def test_decode_error_names_operation_place_status_and_request_id(body: bytes, problem: str) -> None:

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json", headers={"X-Request-Id": "req-1"})

    async with serving(handler) as server, SigningClient(server.origin, "secret-token") as client:
        with pytest.raises(DecodeError, match=problem) as caught:
            await client.signings.list()
    assert (caught.value.status, caught.value.request_id) == (200, "req-1")
    assert caught.value.operation == "signings.list"
    assert str(caught.value).startswith("signings.list: the response cannot be read: ")
    assert len(server.requests) == 1


async def test_decode_error_takes_the_request_id_from_the_body_and_redacts_secrets() -> None:

    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"id": "u", "email": ["x"], "name": "x", "request_id": "req-2"})

    async def echo(request: web.Request) -> web.Response:
        return web.json_response({"id": "s", "is_draft": "secret-token"})

    async with serving(handler) as server, SigningClient(server.origin, "secret-token") as client:
        with pytest.raises(
            DecodeError, match=r"^me: .* email: expected a string, got a list \(HTTP 200, request id req-2"
        ):
            await client.me()
    async with serving(echo) as server, SigningClient(server.origin, "secret-token") as client:
        with pytest.raises(DecodeError, match=r"got '\[redacted\]'") as caught:
            await client.signings.get("s")
    assert caught.value.request_id is None


@pytest.mark.parametrize("kind", ["empty", "not-json", "truncate"])
async def test_broken_responses_of_the_sandbox_raise_errors_of_the_package(sandbox: Sandbox, kind: str) -> None:
    sandbox.faults.add("me", kind, times=None)
    async with SigningClient(sandbox.base_url, sandbox.access_token(), retry=RetryPolicy.none()) as client:
        with pytest.raises(TransportError if kind == "truncate" else DecodeError):
            await client.me()


@pytest.mark.parametrize("timestamps", ["iso_z", "iso_micros", "iso_offset", "epoch_seconds", "epoch_millis"])
@pytest.mark.parametrize("ids", ["uuid", "ulid", "integer"])
async def test_records_are_the_same_in_every_timestamp_and_id_format(timestamps: Any, ids: Any) -> None:
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
