"""Decoding: a response gives a record of the package or of the caller's class, or a `DecodeError` with the place."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import itertools
import json
import pickle
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from enum import Enum, IntEnum, StrEnum
from typing import Any

import attrs
import pytest
from aiohttp import web

from signing_async import (
    Assumptions,
    DecodeError,
    Document,
    InvalidRequest,
    Language,
    Recipient,
    Response,
    Signing,
    SigningClient,
    SigningError,
    SigningOrder,
    SigningState,
    User,
)
from tests.servers import serving

_FAST = sys.modules["signing_async.transport.decode"].orjson


@pytest.fixture(params=["orjson", "json"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with each of the two JSON parsers."""
    monkeypatch.setattr("signing_async.transport.decode.orjson", _FAST if request.param == "orjson" else None)


@asynccontextmanager
async def _responding(
    data: Any, *, status: int = 200, headers: Mapping[str, str] | None = None, **options: Any
) -> AsyncIterator[SigningClient]:
    """A client whose requests get this body: bytes as they are, anything else as JSON."""

    async def handler(request: web.Request) -> web.Response:
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        return web.Response(status=status, body=body, headers=headers)

    async with serving(handler) as server, SigningClient(server.origin, "secret-token", **options) as client:
        yield client


async def _decode(data: Any, cls: Any) -> Any:
    """Return what a client decodes a body to."""
    async with _responding(data) as client:
        return await client.request("GET", "/x", into=cls)


async def _problem(data: Any, cls: Any) -> str:
    with pytest.raises(DecodeError) as caught:
        await _decode(data, cls)
    return str(caught.value).removeprefix("GET /x: the response cannot be read: ").removesuffix(" (HTTP 200)")


# JSON


@pytest.mark.parametrize(
    ("body", "data"),
    [
        (b'{"a": [1, 2.5, true, null, "x"]}', {"a": [1, 2.5, True, None, "x"]}),
        ('\ufeff{"a": "Åsa 😀", "b": 18446744073709551615}'.encode(), {"a": "Åsa 😀", "b": 2**64 - 1}),
    ],
)
async def test_json_is_parsed_alike_with_and_without_orjson(parser: None, body: bytes, data: Any) -> None:
    assert await _decode(body, dict) == data


@pytest.mark.parametrize(
    "body", [b"[NaN]", b"[1e999]", b"[" * 100_000, b'["\\ud800"]', b"\xff", b"{", b""], ids=lambda body: body[:9]
)
async def test_other_bytes_are_unreadable_with_and_without_orjson(parser: None, body: bytes) -> None:
    problem = await _problem(body, list)
    assert problem.startswith(("not JSON: ", "not UTF-8", "nested too deeply", "empty"))


def test_json_is_parsed_where_orjson_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "orjson", None)
    spec = importlib.util.find_spec("signing_async.transport.decode")
    assert spec is not None
    assert spec.loader is not None
    slow = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(slow)
    assert slow.decode_record(slow.parse(b'{"id": "d"}'), Document) == Document("d")


# Records

_NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)

LEASE = b"""{
    "id": "s1", "name": "Lease", "language": "SV", "signing_order": "sequential", "message": "Hej", "is_draft": false,
    "is_completed": true, "cancelled_at": null, "updated_at": "2026-01-31T12:00:00Z",
    "documents": [
        {"id": "d1", "name": "a.pdf", "completed_at": 1769860800, "signed_file_path": "/f", "size": 5},
        {"id": "d2", "name": "b.pdf", "completed_at": null}
    ],
    "owner": {"id": "u1"}, "extra": "theirs"
}"""


async def test_documented_fields_become_attributes_and_the_rest_extra(parser: None) -> None:
    expected = Signing(
        id="s1",
        name="Lease",
        language=Language.SV,
        signing_order=SigningOrder.SEQUENTIAL,
        message="Hej",
        is_draft=False,
        is_completed=True,
        updated_at=_NOON,
        documents=(Document("d1", "a.pdf", _NOON, "/f", {"size": 5}), Document("d2", "b.pdf")),
        extra={"owner": {"id": "u1"}, "extra": "theirs"},
    )
    signing = await _decode(LEASE, Signing)
    assert signing == expected
    assert (signing.language is Language.SV, hash(signing)) == (True, hash(expected))


@pytest.mark.parametrize("cls", [Signing, Document, Recipient])
async def test_record_needs_only_an_id(cls: type[Any]) -> None:
    """Absent and null fields have the defaults of the class."""
    names = [field.name for field in attrs.fields(cls) if field.name not in ("id", "extra") and not field.kw_only]
    assert await _decode({"id": "x"}, cls) == await _decode({"id": "x", **dict.fromkeys(names)}, cls) == cls(id="x")


# Timestamps


@pytest.mark.parametrize(
    ("value", "moment"),
    [
        ("2026-01-31T12:00:00Z", _NOON),
        ("2026-01-31T13:00:00+01:00", _NOON),
        ("2026-01-31", _NOON - timedelta(hours=12)),  # without a zone: UTC
        ("2026-01-31T12:00:00.123456789Z", _NOON + timedelta(microseconds=123456)),
        (1769860800, _NOON),
        ("1769860800", _NOON),
        ("1712010812345", datetime(2024, 4, 1, 22, 33, 32, 345000, tzinfo=UTC)),
        (-1.5, datetime(1969, 12, 31, 23, 59, 58, 500000, tzinfo=UTC)),
    ],
)
async def test_timestamp_is_parsed_to_an_aware_datetime(value: Any, moment: datetime) -> None:
    found = (await _decode({"id": "d", "completed_at": value}, Document)).completed_at
    assert found == moment
    assert found.utcoffset() is not None
    assert await _decode({"id": "d", "day": value}, Template) == Template("d", day=moment.date())


async def test_empty_string_is_no_timestamp() -> None:
    """The specification says "empty until the document is fully signed"."""
    assert await _decode({"id": "d", "completed_at": " "}, Document) == Document("d")


@pytest.mark.parametrize(
    "value",
    ["2026-02-30", " " * 100_000 + "x", "1" * 1_000_000, 10**17, True, {"date": "x"}],
    ids=lambda value: type(value).__name__ if isinstance(value, int) else str(value)[:40],
)
@pytest.mark.timeout(30)
async def test_other_timestamp_is_unreadable_and_kept_in_extra_of_a_record(value: Any) -> None:
    assert len(await _problem({"id": "t", "created_at": value}, Template)) < 80
    data = {"id": "s", "name": "Lease", "updated_at": value, "documents": [{"id": "d", "completed_at": value}]}
    signing = await _decode(data, Signing)
    assert (signing.id, signing.name, signing.updated_at) == ("s", "Lease", None)
    assert signing.extra == {"updated_at": value}
    assert signing.documents == (Document("d", extra={"completed_at": value}),)


@pytest.mark.parametrize(
    ("value", "state"),
    [("on Saturday", SigningState.CANCELLED), ("0000-00-00 00:00:00", SigningState.SENT), ({}, SigningState.SENT)],
)
async def test_signing_with_unreadable_cancelled_at_is_cancelled(value: Any, state: SigningState) -> None:
    """Unless the value stands for null."""
    signing = await _decode({"id": "s", "is_draft": False, "cancelled_at": value}, Signing)
    assert (signing.state, signing.cancelled_at) == (state, None)


# The caller's classes


class Color(StrEnum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


class Kind(Enum):
    LEASE = "lease"


@dataclasses.dataclass(frozen=True)
class Field:
    label: str
    width: float = 1.0
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


def _even(instance: object, attribute: object, value: int | None) -> None:
    if value is not None and value % 2:
        raise ValueError(f"{value} is odd")


@attrs.frozen
class Template:
    id: str
    pages: int | None = attrs.field(default=None, validator=_even)
    active: bool = True
    color: Color | None = None
    level: Level | None = None
    kind: Kind | None = None
    language: Language | None = None
    created_at: datetime | None = None
    day: date | None = None
    fields: Sequence[Field] = ()
    document: Document | None = None
    tags: frozenset[str] = frozenset()
    pair: tuple[str, int] = ("", 0)
    widths: Mapping[str, list[float]] = {}
    either: int | str = 0
    anything: Any = None
    extra: Mapping[str, Any] = attrs.field(factory=dict)


TEMPLATE = b"""{
    "id": "t1", "pages": 2, "active": false, "color": "red", "level": 1, "kind": "lease", "language": "FI",
    "created_at": "2026-01-31T12:00:00Z", "day": "2026-01-31", "fields": [{"label": "a", "width": 2, "unit": "cm"}],
    "document": {"id": "d1", "size": 5}, "tags": ["x"], "pair": ["a", 1], "widths": {"a": [1, 2.5]}, "either": "b",
    "anything": [1, {}]
}"""


async def test_every_kind_of_field_is_decoded() -> None:
    assert await _decode(TEMPLATE, Template) == Template(
        *("t1", 2, False, Color.RED, Level.LOW, Kind.LEASE, Language("FI"), _NOON, date(2026, 1, 31)),
        *((Field("a", 2.0, {"unit": "cm"}),), Document("d1", extra={"size": 5})),
        *(frozenset({"x"}), ("a", 1), {"a": [1.0, 2.5]}, "b", [1, {}]),
    )


@pytest.mark.parametrize(
    ("data", "cls", "said"),
    [
        ({}, Signing, "id: missing"),
        ({"id": None}, Template, "id: expected a string, got null"),
        ({"id": "s", "name": {"en": "x"}}, Signing, "name: expected a string, got an object"),
        ({"id": "s", "is_draft": "false"}, Signing, "is_draft: expected true or false, got 'false'"),
        ({"id": "s", "signing_order": []}, Signing, "signing_order: expected a string, got a list"),
        ({"id": "s", "documents": "d"}, Signing, "documents: expected a list, got 'd'"),
        ({"id": "s", "documents": [{"id": "d"}, None]}, Signing, "documents[1]: expected an object, got null"),
        ({"id": "s", "documents": [{"name": "d"}]}, Signing, "documents[0].id: missing"),
        ({"id": "r", "order": True}, Recipient, "order: expected an integer, got true"),
        ([], Signing, "expected an object, got a list"),
        ("x" * 100, User, "expected an object, got a string of 100 characters"),
        ({"id": "t", "pages": 3}, Template, "refused by the class: 3 is odd"),
        ({"id": "t", "color": "blue"}, Template, "color: refused by the class: 'blue' is not a valid Color"),
        ({"id": "t", "kind": "x" * 300}, Template, "kind: refused by the class: ValueError"),
        ({"id": "t", "created_at": "soon"}, Template, "created_at: expected a timestamp, got 'soon'"),
        ({"id": "t", "fields": [{"label": "a"}, {}]}, Template, "fields[1].label: missing"),
        ({"id": "t", "widths": {"a": ["x"]}}, Template, "widths['a'][0]: expected a number, got 'x'"),
    ],
)
async def test_problem_names_the_place_the_expected_type_and_the_value(data: Any, cls: type[Any], said: str) -> None:
    assert await _problem(data, cls) == said


@pytest.mark.parametrize(
    ("data", "cls", "value"),
    [
        ([{"id": "t"}], list[Template], [Template("t")]),
        (["a"], tuple[str, ...], ("a",)),
        ([1, "a"], list, [1, "a"]),
        ({"a": 1}, dict, {"a": 1}),
        ({"a": {"id": "t"}}, dict[str, Template], {"a": Template("t")}),
    ],
)
async def test_containers_are_decoded(data: Any, cls: Any, value: Any) -> None:
    assert await _decode(data, cls) == value


@pytest.mark.parametrize(
    ("data", "cls"), [("abc", set[str]), ([1], dict[str, int]), ("abc", list[str]), ([["a", 1]], dict), ("", date)]
)
async def test_nothing_else_passes_for_a_container_or_a_date(data: Any, cls: Any) -> None:
    assert (await _problem(data, cls)).startswith("expected")


@pytest.mark.parametrize("cls", [object, list[object], "Template"])
async def test_type_that_cannot_be_decoded_is_refused_by_name(cls: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^into: cannot decode JSON to .*: pass an attrs class, a dataclass"):
        await _decode({}, cls)


async def test_wrapped_record_or_list_is_unwrapped_unless_the_class_has_a_field_for_it() -> None:
    @attrs.frozen
    class Usage:
        user: dict[str, Any]
        count: int

    record = {"id": "t"}
    assert await _decode({"data": record}, Template) == Template("t")
    assert (await _decode({"id": "x", "data": record}, Template)).id == "x"
    assert await _decode({"user": {}, "count": 1}, Usage) == Usage({}, 1)
    for wrapped in ([record], {"items": [record]}, {"id": "x", "items": [record]}):
        assert await _decode(wrapped, list[Template]) == [Template("t")]
    assert await _problem({"other": 1}, list[Template]) == "expected a list, got an object"
    assert await _decode({"data": record}, dict) == await _decode({"data": record}, Any) == {"data": record}


# Through the client


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({"X-Request-Id": "h"}, {"request_id": "b"}, "h"),
        ({}, {"meta": {"request_id": 7}}, "7"),
        ({}, {"request_id": True, "error": {"request_id": {}}}, None),
        ({"X-Trace": "t"}, {}, "t"),
    ],
)
async def test_request_id_comes_from_a_header_before_the_body(
    headers: dict[str, str], body: Any, expected: str | None
) -> None:
    assumptions = Assumptions(request_id_headers=("request_id", "X-Request-Id", "X-Trace"))
    async with _responding(body, headers=headers, assumptions=assumptions) as client:
        assert (await client.request("GET", "/x")).request_id == expected


async def test_records_of_an_unchanged_signing_are_equal_and_errors_carry_the_request_id() -> None:
    """The service gives every response another id."""
    seen: list[str | None] = []
    numbers = itertools.count(1)

    async def handler(request: web.Request) -> web.Response:
        body = {"id": "s1", "name": "Lease", "owner": {"request_id": "kept"}, "request_id": f"req-{next(numbers)}"}
        return web.json_response(body, status=400 if request.method == "POST" else 200)

    async with serving(handler) as server, SigningClient(server.origin, "secret-token") as client:
        client = client.with_options(on_response=lambda response: seen.append(response.request_id))
        first, second = await client.signings.get("s1"), await client.signings.get("s1")
        with pytest.raises(SigningError) as caught:
            await client.signings.create(name="Lease", language="EN")
        mine = await client.request("GET", "/templates/{id}", path={"id": "t"}, into=Template)
    assert first == second == Signing("s1", "Lease", extra={"owner": {"request_id": "kept"}})
    assert mine.extra == {"name": "Lease", "owner": {"request_id": "kept"}}
    assert caught.value.request_id == "req-3"
    assert seen == ["req-1", "req-2", "req-3", "req-4"]


async def test_decode_error_carries_the_parsed_body_without_secrets() -> None:
    """It helps to find what was created; none of it is in any text."""
    record = {"id": "s9", "is_draft": "perhaps", "message": "by secret-token", "secret-token": [{"x": 1}]}
    async with _responding({"data": record}, status=201) as client:
        with pytest.raises(DecodeError, match="is_draft: expected true or false, got 'perhaps'") as caught:
            await client.signings.create(name="Lease", language="EN")
    expected = {"id": "s9", "is_draft": "perhaps", "message": "by [redacted]", "[redacted]": [{"x": 1}]}
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value)), copy.copy(caught.value)):
        assert error.body == {"data": expected}
        assert error.effect == "unknown"
        assert "s9" not in f"{error} {error!r} {error.args}"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "empty"),
        ({"data": {"x": 1}}, "no list of items: neither the response itself nor any of data, signings, items"),
        (
            {"items": [{"id": 1}, {"id": 2, "documents": [{"id": 1, "name": False}]}]},
            r"items\[1\]\.documents\[0\]\.name: expected a string, got false \(HTTP 200, request id req-1\)$",
        ),
    ],
)
async def test_decode_error_names_operation_place_status_and_request_id(data: Any, problem: str) -> None:
    seen: list[Response] = []
    async with _responding(data, headers={"X-Request-Id": "req-1"}, on_response=seen.append) as client:
        with pytest.raises(DecodeError, match=problem) as caught:
            await client.signings.list()
    assert (caught.value.status, caught.value.request_id, len(seen)) == (200, "req-1", 1)
    assert caught.value.operation == "signings.list"
    assert str(caught.value).startswith("signings.list: the response cannot be read: ")
