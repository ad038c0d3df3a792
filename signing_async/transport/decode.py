"""The one cattrs converter: from the JSON bytes of an answer to models.

For each record class one function is generated, straight-line code that takes the known fields out of the parsed object
and leaves the rest as ``extra``; it is registered as the class's structure hook.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import attrs

from ..models import Document, Recipient, Signing, User

try:
    import orjson
except ModuleNotFoundError:  # the extra `speed` is not installed
    orjson = None  # type: ignore[assignment]  # a module's type does not allow None

if TYPE_CHECKING:
    import cattrs

__all__ = ["Unreadable", "converter", "is_ready", "parse", "structure", "structure_all", "timestamp"]

T = TypeVar("T")

_BOM = b"\xef\xbb\xbf"
_DEEPEST = 100
_SMALL = 2000
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ANY_DAY = "2000-01-01T00:00"
_DIGITS = re.compile(r"[+-]?\d{9,}(\.\d+)?", re.ASCII)  # eight digits are a date
_ISO = re.compile(
    r"(\d{4}-\d\d-\d\d|\d{8}|\d{4}-W\d\d(?:-\d)?|\d{4}W\d\d\d?)"
    r"(?:[T ](\d\d)(?::?(\d\d)(?::?(\d\d)(?:[.,](\d+))?)?)?(?:\s?(Z|UTC|GMT|[+-]\d\d(?::?\d\d)?))?)?",
    re.ASCII,
)
_MONTHS = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]
_HTTP_DATE = re.compile(  # also that of an e-mail
    r"(?:[A-Z]{3}, )?(\d\d?) ([A-Z]{3}) (\d{4}) (\d\d:\d\d(?::\d\d)?)(?: (Z|UTC|GMT|[+-]\d{4}))?", re.ASCII
)
_DOTNET_DATE = re.compile(r"/DATE\((-?\d{1,17})([+-]\d{4})?\)/", re.ASCII)


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


def parse(body: bytes) -> Any:
    """Read JSON, whatever the bytes are; what is none is `Unreadable`."""
    if body.startswith(_BOM):
        body = body[len(_BOM) :]
    try:
        data = _loads(body) if orjson is None else orjson.loads(body)
        if _may_be_deep(body):
            _check_depth(data)
        return data
    except UnicodeError:
        raise Unreadable("not UTF-8") from None
    except RecursionError:
        raise Unreadable("nested too deeply") from None
    except ValueError as error:
        raise Unreadable(f"not JSON: {error}" if body.strip() else "empty") from None


def _may_be_deep(body: bytes) -> bool:
    """Whether containers may nest deeper than is taken; brackets in strings count as if they were some.

    At a small part of what reading it costs: this looks at nothing but the brackets, a level at a time.
    """
    # For what is small this is quicker still.
    if len(body) <= _SMALL and body.count(b"{") + body.count(b"[") <= _DEEPEST:
        return False
    brackets = body.translate(_ONE_KIND, _NO_BRACKETS)
    for _ in range(_DEEPEST):
        outer = brackets.replace(b"[]", b"")
        if len(outer) == len(brackets):
            break
        brackets = outer
    return bool(brackets)


def _check_depth(data: Any) -> None:
    """Refuse what nests so deeply that a record that holds it could not be printed, copied or pickled."""
    level = _containers((data,))
    for _ in range(_DEEPEST):
        level = _containers(itertools.chain.from_iterable(map(_members, level)))
        if not level:
            return
    raise Unreadable("nested too deeply")


def _containers(values: Iterable[Any]) -> list[Any]:
    return [each for each in values if type(each) is dict or type(each) is list]


def _members(container: Any) -> Iterable[Any]:
    return container.values() if type(container) is dict else container


def _loads(body: bytes) -> Any:
    """As strict as orjson, and with the same numbers: what is read must not depend on what is installed."""
    data = json.loads(body.decode(), parse_constant=_number, parse_float=_number, parse_int=_whole)
    if _SURROGATE.search(body):
        json.dumps(data, ensure_ascii=False).encode()  # fails for half a pair, which no text can hold
    return data


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is too large, or none")
    return number


def _whole(text: str) -> float:
    number = int(text) if len(text) <= 20 else None
    return number if number is not None and -(2**63) <= number < 2**64 else _number(text)


def structure(data: Any, cls: type[T]) -> T:
    """Make one record of a parsed object. The object is used up: what is left in it becomes ``extra``."""
    hook: Callable[[Any, Any], T] = _hook(cls)  # type: ignore[arg-type]  # a class is hashable
    return hook(data, cls)


def structure_all(items: Any, cls: type[T]) -> tuple[T, ...]:
    """Make a record of each object of a list."""
    return _made(items, _hook(cls))  # type: ignore[arg-type]  # a class is hashable


def _made(items: Any, hook: Callable[[Any, Any], T]) -> tuple[T, ...]:
    made: list[T] = []
    if not isinstance(items, list):
        raise Unreadable(f"expected a list, got {_shown(items)}")
    try:
        for item in items:
            made.append(hook(item, None))
    except Unreadable as error:
        raise error.under(f"[{len(made)}]") from None
    return tuple(made)


def timestamp(value: Any) -> datetime | None:
    """Return an aware datetime; a text without zone is UTC.

    ISO 8601, (milli-, micro-)seconds since 1970, HTTP's dates, and ``/Date(1769860800000)/`` are read.
    """
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return _odd_timestamp(value)
    # Python takes a fraction of an hour or of a minute for one of a second.
    plain = moment.tzinfo is not None and (not moment.microsecond or value[19:20] == ".")
    return moment if plain else _odd_timestamp(value)


def _odd_timestamp(value: Any) -> datetime | None:
    """What Python does not read by itself, or reads wrong."""
    if value is None:
        return None
    if isinstance(value, str):
        value = value.strip()
        if not value:
            return None
    moment = None
    with contextlib.suppress(ValueError, OverflowError):
        if isinstance(value, str) and not _DIGITS.fullmatch(value):
            moment = _from_text(value.upper())
        elif isinstance(value, str | int | float) and not isinstance(value, bool):
            moment = _from_epoch(float(value))
    if moment is None:
        raise Unreadable(f"expected a timestamp, got {_shown(value)}")
    return moment


def _readable_timestamp(value: Any, name: str, rest: dict[str, Any]) -> datetime | None:
    """As `_odd_timestamp`; None for what is no timestamp, whose value goes to the ``rest`` of the record."""
    try:
        return _odd_timestamp(value)
    except Unreadable:
        rest[name] = value
        return None


def _from_text(text: str) -> datetime | None:
    if (found := _HTTP_DATE.fullmatch(text)) and found[2] in _MONTHS:
        day, month, year, time, zone = found.groups("")
        text = f"{year}-{_MONTHS.index(month) + 1:02}-{day:0>2}T{time}{zone}"
    elif found := _DOTNET_DATE.fullmatch(text):
        moment = _EPOCH + timedelta(milliseconds=int(found[1]))
        return moment.astimezone(_zone(found[2])) if found[2] else moment
    return _from_iso(text)


def _from_iso(text: str) -> datetime | None:
    found = _ISO.fullmatch(text.replace("\u2212", "-"))
    if found is None:
        return None
    hour, minute, second = (int(digits or 0) for digits in found.group(2, 3, 4))
    micros = int((found[5] or "")[:6].ljust(6, "0"))
    last_second = minute == 59 and second == 60  # a leap second; it ends a minute, in whatever zone
    end_of_day = hour == 24 and not (minute or second or micros)
    if (hour > 23 and not end_of_day) or minute > 59 or (second > 59 and not last_second):
        return None
    zone = UTC if found[6] in (None, "Z", "UTC", "GMT") else _zone(found[6])
    day = datetime.fromisoformat(found[1]).replace(tzinfo=zone)
    return day + timedelta(hours=hour, minutes=minute, seconds=second, microseconds=micros)


def _zone(offset: str) -> tzinfo | None:
    return datetime.fromisoformat(f"{_ANY_DAY}{offset}").tzinfo


def _from_epoch(number: float) -> datetime:
    # Seconds reach 1e11 in the year 5138; milliseconds reach it in 1973.
    size = abs(number)
    return _EPOCH + timedelta(seconds=number if size < 1e11 else number / 1e3 if size < 1e14 else number / 1e6)


def _shown(value: Any) -> str:
    """A value for an error's text, where it can be long or large: then its kind alone."""
    if isinstance(value, str):
        # Whole or not at all: half of a secret would not be recognised as one.
        return repr(value) if len(value) <= 40 else f"a text of {len(value)} characters"
    if isinstance(value, int) and abs(value) >= 2**64:
        return "a number"
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else json.dumps(value)


# What each kind of field takes when its value is not simply right already.


def _text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise Unreadable(f"expected a text, got {_shown(value)}")


def _flag(value: Any) -> bool:
    if type(value) is int and value in (0, 1):
        return bool(value)
    raise Unreadable(f"expected true or false, got {_shown(value)}")


def _integer(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,15}", value, re.ASCII):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise Unreadable(f"expected a whole number, got {_shown(value)}")


def _choice(cls: type[Enum]) -> Callable[[Any], Any]:
    def choose(value: Any) -> Any:
        if type(value) is not str:
            raise Unreadable(f"expected a text, got {_shown(value)}")
        return cls(value)

    return choose


def _generate(cls: type[T], hooks: Mapping[Any, Callable[[Any, Any], Any]]) -> Callable[[Any, Any], T]:
    """Write the function that makes a ``cls`` of a parsed object, and compile it; ``hooks`` make what it holds."""
    scope: dict[str, Any] = {
        "cls": cls,
        "new": cls.__new__,
        "Unreadable": Unreadable,
        "shown": _shown,
        "read_iso": datetime.fromisoformat,
        "odd_timestamp": _readable_timestamp,
        "made_all": _made,
        "hooks": hooks,
    }
    record: Any = attrs.resolve_types(cls)  # type: ignore[type-var]  # every class given here is one of attrs
    fields = [field for field in attrs.fields(record) if field.name != "extra"]
    scope["names"] = [field.name for field in fields]
    lines = [
        "def make(data, _):",
        " if type(data) is not dict: raise Unreadable('expected an object, got ' + shown(data))",
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
    if kind in scope["hooks"]:
        scope["hook"] = scope["hooks"][kind]
        return ["  value = made_all(value, hook) if value else ()"]
    if kind is datetime:
        # `timestamp`, written out: a page holds hundreds of them.
        return [
            "  if value is not None:",
            "   try: moment = read_iso(value)",
            f"   except (TypeError, ValueError): value = odd_timestamp(value, {field.name!r}, data)",
            "   else:",
            "    plain = moment.tzinfo is not None and (not moment.microsecond or value[19:20] == '.')",
            f"    value = moment if plain else odd_timestamp(value, {field.name!r}, data)",
        ]
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


@cache
def converter() -> cattrs.Converter:
    """The converter with a hook for each record class, made before the first request: cattrs is slow to import."""
    import cattrs

    made = cattrs.Converter(detailed_validation=False)
    hooks: dict[Any, Callable[[Any, Any], Any]] = {}
    for cls in (Document, Signing, Recipient, User):
        hooks[cls] = _generate(cls, hooks)
        made.register_structure_hook(cls, hooks[cls])
    return made


def is_ready() -> bool:
    """Return whether the converter has been made."""
    return converter.cache_info().currsize > 0


@cache
def _hook(cls: Any) -> Callable[[Any, Any], Any]:
    return converter().get_structure_hook(cls)
