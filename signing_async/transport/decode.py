"""Decodes JSON bytes to records, with one cattrs converter.

Each record class has a handwritten structure hook, which takes the known fields out of the parsed object and leaves the
rest as ``extra``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta, tzinfo
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from ..models import Document, Language, Recipient, Signing, SigningMethod, SigningOrder, User

try:
    import orjson
except ModuleNotFoundError:  # the extra `speed` is not installed
    orjson = None  # type: ignore[assignment]  # a module's type does not allow None

if TYPE_CHECKING:
    import cattrs

__all__ = [
    "Unreadable",
    "converter",
    "decode_all",
    "decode_record",
    "describe",
    "parse",
    "timestamp",
]

T = TypeVar("T")

_BOM = b"\xef\xbb\xbf"
_MAX_DEPTH = 100
_SMALL = 2000
_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Unreadable(ValueError):  # stays inside the package: callers see a DecodeError
    """A response does not hold what the service promises; ``path`` says where."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" if self.path else self.problem

    def under(self, name: str) -> Unreadable:
        """Return the same error with a path that starts one level further out."""
        separator = "." if self.path and not self.path.startswith("[") else ""
        return Unreadable(self.problem, f"{name}{separator}{self.path}")


# JSON


def parse(body: bytes) -> Any:
    """Parse JSON; raise `Unreadable` for any other bytes."""
    if body.startswith(_BOM):
        body = body[len(_BOM) :]
    try:
        data = _loads(body) if orjson is None else orjson.loads(body)
        if _may_be_too_deep(body):
            _check_depth(data)
        return data
    except UnicodeError:
        raise Unreadable("not UTF-8") from None
    except RecursionError:
        raise Unreadable("nested too deeply") from None
    except ValueError as error:
        raise Unreadable(f"not JSON: {error}" if body.strip() else "empty") from None


def _may_be_too_deep(body: bytes) -> bool:
    """Return whether containers may nest too deeply. Brackets in strings count too.

    It removes the innermost brackets, level by level, which is cheap compared with parsing.
    """
    # Even faster for small bodies.
    if len(body) <= _SMALL and body.count(b"{") + body.count(b"[") <= _MAX_DEPTH:
        return False
    brackets = body.translate(_TO_BRACKETS, _NO_BRACKETS)
    for _ in range(_MAX_DEPTH):
        outer = brackets.replace(b"[]", b"")
        if len(outer) == len(brackets):
            break
        brackets = outer
    return bool(brackets)


def _check_depth(data: Any) -> None:
    """Refuse data so deep that a record with it in ``extra`` could not be printed, copied or pickled."""
    level = _containers((data,))
    for _ in range(_MAX_DEPTH):
        level = _containers(itertools.chain.from_iterable(map(_members, level)))
        if not level:
            return
    raise Unreadable("nested too deeply")


def _containers(values: Iterable[Any]) -> list[Any]:
    return [each for each in values if type(each) is dict or type(each) is list]


def _members(container: Any) -> Iterable[Any]:
    return container.values() if type(container) is dict else container


def _loads(body: bytes) -> Any:
    """Parse as strictly as orjson, to the same numbers: results do not depend on what is installed."""
    data = json.loads(body.decode(), parse_constant=_parse_float, parse_float=_parse_float, parse_int=_parse_int)
    if _SURROGATE.search(body):
        json.dumps(data, ensure_ascii=False).encode()  # fails for a lone surrogate
    return data


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is not finite")
    return number


def _parse_int(text: str) -> float:
    number = int(text) if len(text) <= 20 else None
    return number if number is not None and -(2**63) <= number < 2**64 else _parse_float(text)


# Records


def decode_record(data: Any, cls: type[T]) -> T:
    """Decode a parsed object. The object is used up: what is left in it becomes ``extra``."""
    hook: Callable[[Any, Any], T] = _hook(cls)  # type: ignore[arg-type]  # a class is hashable
    return hook(data, cls)


@cache
def converter() -> cattrs.Converter:
    """Return the converter with a hook for each record class. Importing cattrs is slow."""
    import cattrs

    result = cattrs.Converter(detailed_validation=False)
    result.register_structure_hook(Document, _decode_document)
    result.register_structure_hook(Signing, _decode_signing)
    result.register_structure_hook(Recipient, _decode_recipient)
    result.register_structure_hook(User, _decode_user)
    return result


@cache
def _hook(cls: Any) -> Callable[[Any, Any], Any]:
    return converter().get_structure_hook(cls)


def decode_all(items: Any, hook: Callable[[Any, Any], T]) -> tuple[T, ...]:
    """Decode each item of a parsed list."""
    records: list[T] = []
    if not isinstance(items, list):
        raise Unreadable(f"expected a list, got {describe(items)}")
    try:
        for item in items:
            records.append(hook(item, None))
    except Unreadable as error:
        raise error.under(f"[{len(records)}]") from None
    return tuple(records)


# A list may hold thousands of records. The hooks fill the instance's dict: a frozen class's own `__init__` does so too,
# and costs a third more. They call a function only for a value that does not have the field's type.

_new = object.__new__
_from_iso = datetime.fromisoformat
_LANGUAGES: dict[str, Language] = {each.value: each for each in Language}
_ORDERS: dict[str, SigningOrder] = {each.value: each for each in SigningOrder}
_METHODS: dict[str, SigningMethod] = {each.value: each for each in SigningMethod}


def _decode_document(data: Any, _: Any) -> Document:
    if type(data) is not dict:
        raise Unreadable(f"expected an object, got {describe(data)}")
    take = data.pop
    document = _new(Document)
    fields = document.__dict__
    value = take("id", None)
    fields["id"] = value if type(value) is str else _decode_id(value)
    value = take("name", None)
    fields["name"] = value if type(value) is str else "" if value is None else _decode_string("name", value)
    value = take("completed_at", None)
    fields["completed_at"] = None if value is None else timestamp(value, "completed_at", data)
    value = take("signed_file_path", None)
    fields["signed_file_path"] = (
        value if type(value) is str or value is None else _decode_string("signed_file_path", value)
    )
    fields["extra"] = data
    return document


def _decode_signing(data: Any, _: Any) -> Signing:
    if type(data) is not dict:
        raise Unreadable(f"expected an object, got {describe(data)}")
    take = data.pop
    signing = _new(Signing)
    fields = signing.__dict__
    value = take("id", None)
    fields["id"] = value if type(value) is str else _decode_id(value)
    value = take("name", None)
    fields["name"] = value if type(value) is str else "" if value is None else _decode_string("name", value)
    value = take("language", None)
    if value is not None:
        value = (type(value) is str and _LANGUAGES.get(value)) or _decode_choice("language", value, Language)
    fields["language"] = value
    value = take("signing_order", None)
    if value is not None:
        value = (type(value) is str and _ORDERS.get(value)) or _decode_choice("signing_order", value, SigningOrder)
    fields["signing_order"] = value
    value = take("message", None)
    fields["message"] = value if type(value) is str or value is None else _decode_string("message", value)
    value = take("is_draft", None)
    fields["is_draft"] = value if type(value) is bool or value is None else _decode_flag("is_draft", value)
    value = take("is_completed", None)
    fields["is_completed"] = value if type(value) is bool or value is None else _decode_flag("is_completed", value)
    value = take("cancelled_at", None)
    fields["cancelled_at"] = None if value is None else timestamp(value, "cancelled_at", data)
    value = take("updated_at", None)
    fields["updated_at"] = None if value is None else timestamp(value, "updated_at", data)
    value = take("documents", None)
    fields["documents"] = _decode_documents(value) if value else ()
    fields["extra"] = data
    return signing


def _decode_recipient(data: Any, _: Any) -> Recipient:
    if type(data) is not dict:
        raise Unreadable(f"expected an object, got {describe(data)}")
    take = data.pop
    recipient = _new(Recipient)
    fields = recipient.__dict__
    value = take("id", None)
    fields["id"] = value if type(value) is str else _decode_id(value)
    value = take("email", None)
    fields["email"] = value if type(value) is str else "" if value is None else _decode_string("email", value)
    value = take("first_name", None)
    fields["first_name"] = value if type(value) is str or value is None else _decode_string("first_name", value)
    value = take("last_name", None)
    fields["last_name"] = value if type(value) is str or value is None else _decode_string("last_name", value)
    value = take("signing_method", None)
    if value is not None:
        value = (type(value) is str and _METHODS.get(value)) or _decode_choice("signing_method", value, SigningMethod)
    fields["signing_method"] = value
    value = take("order", None)
    fields["order"] = value if type(value) is int or value is None else _decode_integer("order", value)
    fields["extra"] = data
    return recipient


def _decode_user(data: Any, _: Any) -> User:
    if type(data) is not dict:
        raise Unreadable(f"expected an object, got {describe(data)}")
    take = data.pop
    user = _new(User)
    fields = user.__dict__
    for name in ("id", "email", "name"):
        value = take(name, None)
        fields[name] = value if type(value) is str or value is None else _decode_string(name, value)
    fields["extra"] = data
    return user


def _decode_documents(value: Any) -> tuple[Document, ...]:
    try:
        return decode_all(value, _decode_document)
    except Unreadable as error:
        raise error.under("documents") from None


# Values that do not have the type of their field


def _decode_id(value: Any) -> str:
    if value is None:
        raise Unreadable("missing", "id")
    return _decode_string("id", value)


def _decode_string(name: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise _unexpected(name, "a string", value)


def _decode_flag(name: str, value: Any) -> bool:
    if type(value) is int and value in (0, 1):
        return bool(value)
    raise _unexpected(name, "true or false", value)


def _decode_integer(name: str, value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,15}", value, re.ASCII):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise _unexpected(name, "an integer", value)


def _decode_choice(name: str, value: Any, cls: type[Enum]) -> Any:
    if type(value) is str:
        return cls(value)
    raise _unexpected(name, "a string", value)


def _unexpected(name: str, expected: str, value: Any) -> Unreadable:
    return Unreadable(f"expected {expected}, got {describe(value)}", name)


def describe(value: Any) -> str:
    """Return a value for an error message, or only its kind if it may be long."""
    if isinstance(value, str):
        # Whole or not at all: redaction does not recognize half of a secret.
        return repr(value) if len(value) <= 40 else f"a string of {len(value)} characters"
    if isinstance(value, int) and abs(value) >= 2**64:
        return "a number"
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else json.dumps(value)


# Timestamps

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ANY_DAY = "2000-01-01T00:00"
_DIGITS = re.compile(r"[+-]?\d{9,}(\.\d+)?", re.ASCII)  # eight digits are a date
_ISO = re.compile(
    r"(\d{4}-\d\d-\d\d|\d{8}|\d{4}-W\d\d(?:-\d)?|\d{4}W\d\d\d?)"
    r"(?:[T ](\d\d)(?::?(\d\d)(?::?(\d\d)(?:[.,](\d+))?)?)?(?:\s?(Z|UTC|GMT|[+-]\d\d(?::?\d\d)?))?)?",
    re.ASCII,
)
_MONTHS = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]
_HTTP_DATE = re.compile(  # also the date format of e-mail
    r"(?:[A-Z]{3}, )?(\d\d?) ([A-Z]{3}) (\d{4}) (\d\d:\d\d(?::\d\d)?)(?: (Z|UTC|GMT|[+-]\d{4}))?", re.ASCII
)
_DOTNET_DATE = re.compile(r"/DATE\((-?\d{1,17})([+-]\d{4})?\)/", re.ASCII)


def timestamp(value: Any, name: str = "", rest: dict[str, Any] | None = None) -> datetime | None:
    """Parse a timestamp to an aware datetime, in UTC if it names no zone; return None if it is null or empty.

    ISO 8601, (milli-, micro-)seconds since 1970, HTTP dates, and ``/Date(1769860800000)/`` are understood. Anything
    else raises `Unreadable`. If ``rest`` is given, it is kept there under ``name`` instead, and None is returned.
    """
    try:
        moment = _from_iso(value)
    except (TypeError, ValueError):
        pass
    else:
        # Python reads a fraction of an hour or of a minute as a fraction of a second.
        if moment.tzinfo is not None and (not moment.microsecond or value[19:20] == "."):
            return moment
    try:
        return _parse_timestamp(value)
    except Unreadable:
        if rest is None:
            raise
        rest[name] = value
        return None


def _parse_timestamp(value: Any) -> datetime | None:
    """Parse a timestamp that Python does not parse, or parses wrongly."""
    if value is None:
        return None
    if isinstance(value, str):
        value = value.strip()
        if not value:
            return None
    moment = None
    with contextlib.suppress(ValueError, OverflowError):
        if isinstance(value, str) and not _DIGITS.fullmatch(value):
            moment = _parse_date_string(value.upper())
        elif isinstance(value, str | int | float) and not isinstance(value, bool):
            moment = _from_epoch(float(value))
    if moment is None:
        raise Unreadable(f"expected a timestamp, got {describe(value)}")
    return moment


def _parse_date_string(text: str) -> datetime | None:
    if (found := _HTTP_DATE.fullmatch(text)) and found[2] in _MONTHS:
        day, month, year, time, zone = found.groups("")
        text = f"{year}-{_MONTHS.index(month) + 1:02}-{day:0>2}T{time}{zone}"
    elif found := _DOTNET_DATE.fullmatch(text):
        moment = _EPOCH + timedelta(milliseconds=int(found[1]))
        return moment.astimezone(_parse_zone(found[2])) if found[2] else moment
    return _parse_iso(text)


def _parse_iso(text: str) -> datetime | None:
    found = _ISO.fullmatch(text.replace("\u2212", "-"))
    if found is None:
        return None
    hour, minute, second = (int(digits or 0) for digits in found.group(2, 3, 4))
    micros = int((found[5] or "")[:6].ljust(6, "0"))
    is_leap_second = minute == 59 and second == 60  # it ends a minute in any zone
    is_end_of_day = hour == 24 and not (minute or second or micros)
    if (hour > 23 and not is_end_of_day) or minute > 59 or (second > 59 and not is_leap_second):
        return None
    zone = UTC if found[6] in (None, "Z", "UTC", "GMT") else _parse_zone(found[6])
    day = datetime.fromisoformat(found[1]).replace(tzinfo=zone)
    return day + timedelta(hours=hour, minutes=minute, seconds=second, microseconds=micros)


def _parse_zone(offset: str) -> tzinfo | None:
    return datetime.fromisoformat(f"{_ANY_DAY}{offset}").tzinfo


def _from_epoch(number: float) -> datetime:
    # Seconds reach 1e11 in the year 5138; milliseconds reach it in 1973.
    size = abs(number)
    return _EPOCH + timedelta(seconds=number if size < 1e11 else number / 1e3 if size < 1e14 else number / 1e6)
