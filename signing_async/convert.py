"""The one cattrs converter: from the JSON bytes of an answer to models.

For each record class one function is generated, straight-line code that takes the known fields out of the parsed object
and leaves the rest as ``extra``; it is registered as the class's structure hook.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, TypeVar, get_args

import attrs
import cattrs

from .models import Document, Recipient, Signing, User

try:
    import orjson
except ModuleNotFoundError:  # the extra `speed` is not installed
    orjson = None  # type: ignore[assignment]  # a module's type does not allow None

__all__ = ["Unreadable", "parse", "structure", "structure_all", "timestamp"]

T = TypeVar("T")

_BOM = b"\xef\xbb\xbf"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DIGITS = re.compile(r"[+-]?\d{9,}(\.\d+)?", re.ASCII)  # eight digits are a date


class Unreadable(ValueError):  # stays inside the package: callers see a DecodeError
    """What was read is not what was promised; ``path`` says where."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" if self.path else self.problem

    def under(self, name: str) -> Unreadable:
        """The same, seen from one level further out."""
        separator = "." if self.path and not self.path.startswith("[") else ""
        return Unreadable(self.problem, f"{name}{separator}{self.path}")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def parse(body: bytes) -> Any:
    """Read JSON, whatever the bytes are; what is none is `Unreadable`."""
    if body.startswith(_BOM):
        body = body[len(_BOM) :]
    try:
        return json.loads(body, parse_constant=_refuse_constant) if orjson is None else orjson.loads(body)
    except UnicodeDecodeError:
        raise Unreadable("not UTF-8") from None
    except RecursionError:
        raise Unreadable("nested too deeply") from None
    except ValueError as error:
        raise Unreadable(f"not JSON: {error}" if body.strip() else "empty") from None


def structure(data: Any, cls: type[T]) -> T:
    """Make one record of a parsed object. The object is used up: what is left in it becomes ``extra``."""
    return _HOOKS[cls](data, cls)  # type: ignore[no-any-return]  # each hook makes its class


def structure_all(items: Any, cls: type[T]) -> tuple[T, ...]:
    """Make a record of each object of a list."""
    hook = _HOOKS[cls]
    made: list[T] = []
    if not isinstance(items, list):
        raise Unreadable(f"expected a list, got {_kind(items)}")
    try:
        for item in items:
            made.append(hook(item, cls))
    except Unreadable as error:
        raise error.under(f"[{len(made)}]") from None
    return tuple(made)


def timestamp(value: Any) -> datetime | None:
    """An aware datetime from ISO 8601, or from (milli-, micro-)seconds since 1970; a text without zone is UTC."""
    try:
        moment = _read_iso(value)
    except (TypeError, ValueError):
        return _odd_timestamp(value)
    return moment if moment.tzinfo is not None else _odd_timestamp(value)


_read_iso = datetime.fromisoformat


def _odd_timestamp(value: Any) -> datetime | None:
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _from_epoch(value, value)
    if not isinstance(value, str):
        raise Unreadable(f"expected a timestamp, got {_kind(value)}")
    text = value.strip()
    if not text:
        return None
    if _DIGITS.fullmatch(text):
        return _from_epoch(float(text), text)
    # Python reads neither a leap second, nor a space before the zone, nor the end of a day as 24:00.
    text = re.sub(r"\s+(?=[+-]\d|[zZ]$)", "", text[:80], count=1).removesuffix(" UTC")
    text, leap = re.subn(r"(?<=:\d\d:)60\b", "59", text, count=1)
    text, midnight = re.subn(r"(?<=[Tt ])24(?=:?00|$)", "00", text, count=1)
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return moment + timedelta(seconds=leap, days=midnight)
    except (ValueError, OverflowError):
        raise Unreadable(f"expected a timestamp, got {value[:40]!r}") from None


def _from_epoch(number: float, shown: object) -> datetime:
    # Seconds reach 1e11 in the year 5138; milliseconds reach it in 1973.
    size = abs(number)
    seconds = number if size < 1e11 else number / 1e3 if size < 1e14 else number / 1e6
    try:
        return _EPOCH + timedelta(seconds=seconds)
    except (OverflowError, ValueError):
        raise Unreadable(f"expected a timestamp, got {str(shown)[:40]}") from None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number")


# What each kind of field takes when its value is not simply right already.


def _text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise Unreadable(f"expected a text, got {_kind(value)}")


def _flag(value: Any) -> bool:
    if type(value) is int and value in (0, 1):
        return bool(value)
    raise Unreadable(f"expected true or false, got {_kind(value) if not isinstance(value, str) else repr(value[:40])}")


def _integer(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,15}", value, re.ASCII):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise Unreadable(f"expected a whole number, got {_kind(value)}")


def _choice(cls: type[Enum]) -> Callable[[Any], Any]:
    def choose(value: Any) -> Any:
        if type(value) is not str:
            raise Unreadable(f"expected a text, got {_kind(value)}")
        return cls(value)

    return choose


def _generate(cls: type[T]) -> Callable[[Any, Any], T]:
    """Write the function that makes a ``cls`` of a parsed object, and compile it."""
    scope: dict[str, Any] = {
        "cls": cls,
        "new": cls.__new__,
        "Unreadable": Unreadable,
        "kind": _kind,
        "timestamp": timestamp,
        "structure_all": structure_all,
        "Document": Document,
    }
    record: Any = attrs.resolve_types(cls)  # type: ignore[type-var]  # every class given here is one of attrs
    fields = [field for field in attrs.fields(record) if field.name != "extra"]
    scope["names"] = [field.name for field in fields]
    lines = [
        "def make(data, _):",
        " if type(data) is not dict: raise Unreadable('expected an object, got ' + kind(data))",
        " take = data.pop",
        " made = new(cls)",
        " fill = made.__dict__",  # as the frozen class's own __init__ does, at three quarters of its cost
        " try:",
    ]
    for index, field in enumerate(fields):
        lines += [
            f"  at = {index}",
            f"  value = take({field.name!r}, None)",
            *_reading(field, scope),
            f"  fill[{field.name!r}] = value",
        ]
    lines += [" except Unreadable as error: raise error.under(names[at]) from None"]
    lines += [" fill['extra'] = data", " return made"]
    exec("\n".join(lines), scope)  # noqa: S102  # the source is made of the field names of this package's own classes
    make: Callable[[Any, Any], T] = scope["make"]
    return make


def _reading(field: attrs.Attribute[Any], scope: dict[str, Any]) -> list[str]:
    """The lines that turn ``value``, as parsed, into what the field's type promises."""
    kind = next(kind for kind in (get_args(field.type) or (field.type,)) if kind is not type(None))
    if kind is Document:
        return ["  value = structure_all(value, Document) if value else ()"]
    if kind is datetime:
        return ["  if value is not None: value = timestamp(value)"]
    read = f"read_{field.name}"
    if issubclass(kind, Enum):
        scope[read] = _choice(kind)
        scope[f"listed_{field.name}"] = {member.value: member for member in kind}.get
        listed = f"(type(value) is str and listed_{field.name}(value))"
        return [f"  if value is not None: value = {listed} or {read}(value)"]
    scope[read] = {str: _text, bool: _flag, int: _integer}[kind]
    lines = [f"  if type(value) is not {kind.__name__}:"]
    if field.default is attrs.NOTHING:
        return [*lines, "   if value is None: raise Unreadable('missing')", f"   value = {read}(value)"]
    return [*lines, f"   value = {field.default!r} if value is None else {read}(value)"]


converter: cattrs.Converter = cattrs.Converter(detailed_validation=False)
_HOOKS: dict[Any, Callable[[Any, Any], Any]] = {}
for _cls in (Document, Signing, Recipient, User):
    _HOOKS[_cls] = _generate(_cls)
    converter.register_structure_hook(_cls, _HOOKS[_cls])
