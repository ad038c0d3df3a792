"""JSON is decoded to the caller's own classes as strictly as to the package's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from enum import Enum, IntEnum, StrEnum
from typing import Any, Optional

import attrs
import pytest

from signing_async import Assumptions, Document, InvalidRequest, Language, Signing
from signing_async.transport.custom_records import decode_each, decode_to, hook_of, unwrap
from signing_async.transport.decode import Unreadable


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


def test_every_kind_of_field_is_decoded() -> None:
    data = {
        "id": "t1",
        "pages": 2,
        "active": False,
        "color": "red",
        "level": 1,
        "kind": "lease",
        "language": "FI",
        "created_at": "2026-01-31T09:00:00Z",
        "day": "2026-01-31",
        "fields": [{"label": "a", "width": 2, "unit": "cm"}],
        "document": {"id": "d1", "size": 5},
        "tags": ["x"],
        "pair": ["a", 1],
        "widths": {"a": [1, 2.5]},
        "either": "b",
        "anything": [1, {}],
    }
    assert decode_to(data, Template) == Template(
        "t1",
        2,
        False,
        Color.RED,
        Level.LOW,
        Kind.LEASE,
        Language("FI"),
        datetime(2026, 1, 31, 9, tzinfo=UTC),
        date(2026, 1, 31),
        (Field("a", 2.0, {"unit": "cm"}),),
        Document("d1", extra={"size": 5}),
        frozenset({"x"}),
        ("a", 1),
        {"a": [1.0, 2.5]},
        "b",
        [1, {}],
    )


def test_unknown_fields_are_kept_in_extra_or_dropped_without_one() -> None:
    @attrs.frozen
    class Plain:
        id: str

    data = {"id": "t1", "new": [1], "extra": 5}
    assert decode_to(dict(data), Template).extra == {"new": [1], "extra": 5}
    assert decode_to(dict(data), Plain) == Plain("t1")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "id: missing"),
        ({"id": None}, "id: expected a string, got null"),
        ({"id": 5}, "id: expected a string, got 5"),
        ({"id": "t", "pages": "2"}, "pages: expected an integer, got '2'"),
        ({"id": "t", "pages": True}, "pages: expected an integer, got true"),
        ({"id": "t", "pages": 3}, "refused by the class: 3 is odd"),
        ({"id": "t", "active": 1}, "active: expected true or false, got 1"),
        ({"id": "t", "color": "blue"}, "color: refused by the class: 'blue' is not a valid Color"),
        ({"id": "t", "kind": "x" * 300}, "kind: refused by the class: ValueError"),
        ({"id": "t", "created_at": "soon"}, "created_at: expected a timestamp, got 'soon'"),
        ({"id": "t", "fields": "abc"}, "fields: expected a list, got 'abc'"),
        ({"id": "t", "fields": [{"label": "a"}, {}]}, "fields[1].label: missing"),
        ({"id": "t", "fields": [{"label": "a", "width": True}]}, "fields[0].width: expected a number, got true"),
        ({"id": "t", "document": {}}, "document.id: missing"),
        ({"id": "t", "widths": {"a": ["x"]}}, "widths.a[0]: expected a number, got 'x'"),
        ({"id": "t", "widths": []}, "widths: expected an object, got a list"),
        ([], "expected an object, got a list"),
        ("t", "expected an object, got 't'"),
        (None, "expected an object, got null"),
    ],
)
def test_problem_names_the_place_and_the_value(data: Any, said: str) -> None:
    with pytest.raises(Unreadable) as caught:
        decode_to(data, Template)
    assert str(caught.value) == said


@attrs.frozen
class Visit:
    at: datetime | None
    day: Optional[date] = None  # noqa: UP045  # the older notation is tested
    all: Sequence[datetime | None] = ()


@pytest.mark.parametrize("empty", ["", " ", None])
def test_empty_text_is_no_timestamp_in_an_optional_field(empty: str | None) -> None:
    moment = datetime(2026, 1, 31, 9, tzinfo=UTC)
    rows = [{"at": empty, "day": empty, "all": [empty]}, {"at": "2026-01-31T09:00:00Z", "day": "2026-01-31"}]
    assert decode_each(rows, Visit) == (Visit(None, None, (None,)), Visit(moment, moment.date()))


@pytest.mark.parametrize("empty", ["", " "])
def test_empty_text_in_a_required_timestamp_is_refused(empty: str) -> None:
    for cls in (datetime, date):
        with pytest.raises(Unreadable, match=f"^expected a timestamp, got '{empty}'$"):
            decode_to(empty, cls)
    assert decode_to("2026-01-31T09:00:00Z", datetime) == datetime(2026, 1, 31, 9, tzinfo=UTC)
    assert decode_to("2026-01-31T09:00:00Z", date) == date(2026, 1, 31)


def test_other_text_in_an_optional_timestamp_is_refused() -> None:
    for field in ("at", "day"):
        with pytest.raises(Unreadable, match=f"^{field}: expected a timestamp, got 'soon'$"):
            decode_to({"at": None, field: "soon"}, Visit)


def test_containers_are_decoded_and_nothing_else_passes_for_them() -> None:
    assert decode_to([{"id": "t"}], list[Template]) == [Template("t")]
    assert decode_to(["a"], tuple[str, ...]) == ("a",)
    assert decode_to([1, "a"], list) == [1, "a"]
    assert decode_to({"a": 1}, dict) == {"a": 1}
    assert decode_to({"a": {"id": "t"}}, dict[str, Template]) == {"a": Template("t")}
    assert decode_each([{"id": "s"}], Signing) == (Signing("s"),)
    for data, cls in (("abc", list[str]), ({"a": 1}, list[str]), ([["a", 1]], dict)):
        with pytest.raises(Unreadable, match="expected"):
            decode_to(data, cls)


@pytest.mark.parametrize("cls", [object, 5, {}, list[object], "Template"])
def test_type_that_cannot_be_decoded_is_refused_by_name(cls: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^into: cannot decode JSON to .*: pass an attrs class, a dataclass"):
        hook_of(cls)


def test_class_with_such_a_field_is_refused() -> None:
    @attrs.frozen
    class Odd:
        id: object

    with pytest.raises(InvalidRequest, match="Odd"):
        hook_of(Odd)


def test_wrapped_record_or_list_is_unwrapped_unless_the_class_has_a_field_for_it() -> None:
    @attrs.frozen
    class Usage:
        user: dict[str, Any]
        count: int

    record = {"id": "t"}
    names = Assumptions()
    assert unwrap({"data": record}, Template, names) == record
    assert unwrap({"data": record}, Field, names) == record
    assert unwrap({"id": "x", "data": record}, Template, names) == {"id": "x", "data": record}
    assert unwrap({"user": {}, "count": 1}, Usage, names) == {"user": {}, "count": 1}
    assert unwrap({"items": [record]}, list[Template], names) == [record]
    assert unwrap({"id": "x", "items": [record]}, list[Template], names) == [record]
    assert unwrap({"other": 1}, list[Template], names) == {"other": 1}
    assert unwrap({"data": record}, dict, names) == {"data": record}
    assert unwrap({"data": record}, Any, names) == {"data": record}
    assert unwrap([record], list[Template], names) == [record]
    assert unwrap({"data": 5}, int, names) == {"data": 5}
