"""Decodes JSON to the package's records, and by cattrs to the caller's classes and to containers of them.

The package's records are decoded by generated code, because a list may hold thousands.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, date, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast, get_args, get_origin

import attrs

from ..assumptions import Assumptions
from ..errors import InvalidRequest
from ..models import RECORDS, Document, Language, SigningMethod, SigningOrder

try:
    import orjson
except ModuleNotFoundError:  # the extra `speed` is not installed
    orjson = None  # type: ignore[assignment]  # a module's type does not allow None

if TYPE_CHECKING:
    import cattrs

__all__ = [
    "Unreadable",
    "decode_each",
    "decode_record",
    "describe",
    "hook_of",
    "look_up",
    "parse",
    "record",
    "record_decoder",
    "request_id",
    "timestamp",
    "unwrap",
]

T = TypeVar("T")

_MAX_DEPTH = 100
_MAX_TEXT = 200
_MAX_REQUEST_ID = 500
_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_KINDS: dict[Any, tuple[Any, str]] = {  # what JSON holds for a type
    str: (str, "a string"),
    bool: (bool, "true or false"),
    int: (int, "an integer"),
    float: ((int, float), "a number"),
    list: (list, "a list"),
    dict: (dict, "an object"),
}


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
        separator = "." if name and self.path and not self.path.startswith("[") else ""
        return Unreadable(self.problem, f"{name}{separator}{self.path}")


# JSON


def parse(body: bytes) -> Any:
    """Parse JSON; raise `Unreadable` for any other bytes, and for containers nested too deeply."""
    body = body.removeprefix(b"\xef\xbb\xbf")
    try:
        data = _loads(body) if orjson is None else orjson.loads(body)
    except UnicodeError:
        raise Unreadable("not UTF-8") from None
    except RecursionError:
        raise Unreadable("nested too deeply") from None
    except ValueError as error:
        raise Unreadable(f"not JSON: {error}" if body.strip() else "empty") from None
    # A record with deeper data in its ``extra`` could not be printed, copied or pickled.
    if len(body) > _MAX_DEPTH and _may_be_too_deep(body) and _may_be_too_deep(_STRING.sub(b"", body)):
        raise Unreadable("nested too deeply")
    return data


def _may_be_too_deep(body: bytes) -> bool:
    """Return whether containers may nest too deeply. Brackets in strings count too."""
    # Remove the innermost brackets, level by level, which is cheap compared with parsing.
    brackets = body.translate(_TO_BRACKETS, _NO_BRACKETS)
    for _ in range(_MAX_DEPTH):
        size, brackets = len(brackets), brackets.replace(b"[]", b"")
        if len(brackets) == size:
            break
    return bool(brackets)


def _loads(body: bytes) -> Any:
    """Parse as strictly as orjson."""
    data = json.loads(body.decode())
    json.dumps(data, ensure_ascii=False, allow_nan=False).encode()  # fails for NaN and for a lone surrogate
    return data


def look_up(data: Any, path: str) -> Any:
    """Return the value at a dotted path of parsed JSON, or None."""
    for name in path.split("."):
        if isinstance(data, Mapping):
            data = data.get(name)
        elif isinstance(data, list) and name.isdecimal():
            data = data[int(name)] if int(name) < len(data) else None
        else:
            return None
    return data


def record(data: Any, assumptions: Assumptions, names: AbstractSet[str] = frozenset()) -> Any:
    """Return the record of a response: the parsed JSON itself, or the object that it wraps.

    It has no request id, so that the same record is equal in two responses. Members with the ``names`` of the record's
    fields are neither wrappers nor request ids.
    """
    if not isinstance(data, dict):
        return data
    if "id" not in data:
        for path in assumptions.record_paths:
            found = look_up(data, path)
            if isinstance(found, dict) and path.partition(".")[0] not in names:
                return found
    if data.keys().isdisjoint(assumptions.request_id_paths):
        return data
    ids = set(assumptions.request_id_paths) - names
    return {name: value for name, value in data.items() if name not in ids}


def unwrap(data: Any, cls: Any, assumptions: Assumptions) -> Any:
    """Return the record, or the list, that parsed JSON wraps, unless the class has a field for the wrapper."""
    if cls is Any or _is_mapping(cls):
        return data
    if (get_origin(cls) or cls) in _SEQUENCES:
        found = (look_up(data, path) for path in assumptions.item_paths) if isinstance(data, dict) else ()
        return next((each for each in found if isinstance(each, list)), data)
    return record(data, assumptions, _field_names(cls))


def request_id(headers: Mapping[str, str], data: Any, assumptions: Assumptions) -> str | None:
    """Return the id by which the service's support finds the request: from a header, else from the body."""
    found: list[Any] = [headers.get(name) for name in assumptions.request_id_headers]
    found += [look_up(data, path) for path in assumptions.request_id_paths]
    texts = [str(value) for value in found if isinstance(value, str | int) and not isinstance(value, bool)]
    # A longer value is not truncated but ignored: half a secret that a server echoes would not be recognized.
    return next((text for text in texts if 0 < len(text) <= _MAX_REQUEST_ID and text.isprintable()), None)


# Records of any class


def decode_record(data: Any, cls: type[T]) -> T:
    """Decode parsed JSON to a record, or a container of records; raise `Unreadable` if it does not fit.

    The data is used up: what is left in it becomes ``extra``.
    """
    return cast("T", hook_of(cls)(data))


def decode_each(items: Any, cls: type[T]) -> tuple[T, ...]:
    """Decode each item of a parsed list."""
    return _decode_list(items, hook_of(cls))


def record_decoder(cls: type[T], assumptions: Assumptions) -> Callable[[Any], T]:
    """Return the function that decodes the record of a response, for `Operation.decode`."""
    decode = hook_of(cls)
    return lambda response: decode(record(parse(response.bytes), assumptions))


def hook_of(cls: object) -> Callable[[Any], Any]:
    """Return a function that decodes parsed JSON to this type. Raise `InvalidRequest` for an unsupported type."""
    try:
        return _hook(cls)
    except Exception as error:  # of many kinds: from cattrs, and from Python when it resolves annotations
        raise InvalidRequest(
            f"into: cannot decode JSON to {cls!r}: pass an attrs class, a dataclass, dict, or a list of these "
            f"({type(error).__name__}: {error})"
        ) from None


@cache
def _hook(cls: Any) -> Callable[[Any], Any]:
    return _record_hook(cls) if cls in RECORDS else _foreign_hook(cls)


def _decode_list(items: Any, hook: Callable[[Any], Any], name: str = "") -> tuple[Any, ...]:
    decoded: list[Any] = []
    try:
        for item in _checked(items, list):
            decoded.append(hook(item))  # not a comprehension: the error needs the index
    except Unreadable as error:
        raise error.under(f"{name}[{len(decoded)}]" if isinstance(items, list) else name) from None
    return tuple(decoded)


def _checked(value: Any, cls: type, name: str = "") -> Any:
    kind, expected = _KINDS.get(cls, _KINDS[str])
    if not isinstance(value, kind) or (isinstance(value, bool) and cls is not bool):
        raise Unreadable(f"expected {expected}, got {describe(value)}", name)
    return value


def describe(value: Any) -> str:
    """Return a value for an error message, or only its kind if it may be long."""
    if isinstance(value, str):
        # Whole or not at all: redaction does not recognize half of a secret.
        return repr(value) if len(value) <= 40 else f"a string of {len(value)} characters"
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else json.dumps(value)


def timestamp(value: Any) -> datetime | None:
    """Return an aware datetime for ISO 8601 as Python reads it, UTC without a zone, or for (milli)seconds since 1970.

    Return None if the value is null or empty; raise `Unreadable` for any other.
    """
    if value is None or (type(value) is str and not value.strip()):
        return None
    try:
        number = int(value) if type(value) is str and len(value) > 8 and value.isdecimal() else value
        if type(number) in (int, float):
            # Seconds reach 1e11 in the year 5138; milliseconds reach it in 1973.
            return _EPOCH + timedelta(seconds=number if abs(number) < 1e11 else number / 1000)
        moment = datetime.fromisoformat(value)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    except (TypeError, ValueError, OverflowError):
        raise Unreadable(f"expected a timestamp, got {describe(value)}") from None


# The package's records: one generated function for each class. It fills the record's ``__dict__``, and calls no further
# function for a usual value.

_FUNCTION = """
def decode(data):
    if type(data) is not dict:
        _checked(data, dict)
    pop, record = data.pop, _new(cls)
    fields = record.__dict__
    {0}
    fields["extra"] = data
    return record
"""
_FIELD = "value = pop('{0}', None)\n    if {1}\n    fields['{0}'] = value"
_SCALAR = "type(value) is not {1} and value is not None: value = _convert('{0}', value, {1})"
_MEMBER = "value is not None: value = type(value) is str and {1}_members.get(value) or _convert('{0}', value, {1})"
_TIMESTAMP = """\
value is not None:
        try:
            moment = _from_iso(value)
            zone = moment.tzinfo
        except (TypeError, ValueError):
            zone = None
        value = moment if zone else _to_datetime('{0}', value, data)"""
_RULES = {  # by the annotation of a field: which values are converted, and how
    "str": "type(value) is not str: value = _convert('{0}', value, str)",
    "tuple[Document, ...]": "True: value = _decode_list(value, decode_document, '{0}') if value else ()",
    "datetime | None": _TIMESTAMP,
    **dict.fromkeys(("str | None", "bool | None", "int | None"), _SCALAR),
    **dict.fromkeys(("Language | None", "SigningMethod | None", "SigningOrder | None"), _MEMBER),
}


def _record_hook(cls: Any) -> Callable[[Any], Any]:
    derived = [each.name for each in attrs.fields(cls) if each.kw_only]  # not members of the response
    # Not the types of attrs: cattrs resolves these.
    kinds = {name: kind for name, kind in cls.__annotations__.items() if name not in ("extra", *derived)}
    rules = {name: _RULES[kind].format(name, kind.removesuffix(" | None")) for name, kind in kinds.items()}
    lines = [_FIELD.format(*each) for each in rules.items()] + [f"fields['{name}'] = None" for name in derived]
    namespace = {**globals(), "cls": cls, "_new": object.__new__, "_from_iso": datetime.fromisoformat}
    for each in (Language, SigningMethod, SigningOrder):
        namespace[f"{each.__name__}_members"] = {member.value: member for member in each}
    if "documents" in kinds:
        namespace["decode_document"] = _hook(Document)
    exec(_FUNCTION.format("\n    ".join(lines)), namespace)  # noqa: S102  # made of this module's text and field names
    return cast("Callable[[Any], Any]", namespace["decode"])


def _convert(name: str, value: Any, cls: Any) -> Any:
    """Convert a value that does not have the type of its field; raise `Unreadable` if it means something else."""
    if value is None:
        if name == "id":
            raise Unreadable("missing", name)
        return ""
    kind = type(value)
    if (
        (kind is int and (cls is str or (cls is bool and value in (0, 1))))
        or (kind is float and cls is int and value.is_integer())
        or (kind is str and cls is int and re.fullmatch(r"[+-]?\d{1,15}", value, re.ASCII))
    ):
        return cls(value)
    return cls(_checked(value, cls, name))  # an unknown value of an enumeration


def _to_datetime(name: str, value: Any, rest: dict[str, Any]) -> datetime | None:
    """Parse a timestamp. If it is unreadable, keep it in ``rest`` and return None."""
    try:
        return timestamp(value)
    except Unreadable:
        rest[name] = value
        return None


# The caller's classes, by cattrs, but more strictly: cattrs itself would take a string for a list of characters, and
# null for the string "None".

_SEQUENCES: dict[Any, Callable[[Any], Any]] = {
    Sequence: tuple,
    list: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
}


def _foreign_hook(cls: Any) -> Callable[[Any], Any]:
    structure = _converter().get_structure_hook(cls)

    def hook(data: Any) -> Any:
        try:
            return structure(data, cls)
        except ExceptionGroup as group:
            raise _first_problem(group) from None

    return hook


@cache
def _converter() -> cattrs.Converter:
    import cattrs  # most clients decode only the package's records
    from cattrs.cols import list_structure_factory
    from cattrs.gen import make_dict_structure_fn, mapping_structure_factory
    from cattrs.strategies import configure_union_passthrough

    def refuse(cls: Any) -> NoReturn:
        raise TypeError(f"unsupported type: {cls!r}")

    def sequence_hook(cls: Any) -> Callable[[Any, Any], Any]:
        make, decode = _SEQUENCES[get_origin(cls) or cls], list_structure_factory(cls, result)
        return lambda data, _: make(decode(_checked(data, list), cls))

    def mapping_hook(cls: Any) -> Callable[[Any, Any], Any]:
        decode = mapping_structure_factory(cls, result, dict)
        return lambda data, _: decode(_checked(data, dict), cls)

    def class_hook(cls: Any) -> Callable[[Any, Any], Any]:
        decode, names = make_dict_structure_fn(cls, result), _field_names(cls)

        def with_extra(data: dict[str, Any]) -> dict[str, Any]:
            known = {name: value for name, value in data.items() if name in names and name != "extra"}
            return {**known, "extra": {name: value for name, value in data.items() if name not in known}}

        if "extra" not in names:
            return lambda data, _: decode(_checked(data, dict), cls)
        return lambda data, _: decode(with_extra(_checked(data, dict)), cls)

    def decode_scalar(value: Any, cls: Any) -> Any:
        # Used for enumerations too: cattrs takes the hooks of str and int for StrEnum and IntEnum.
        kind = next(kind for kind in (bool, int, float, str) if issubclass(cls, kind))
        return cls(_checked(value, kind))

    result = cattrs.Converter(structure_fallback_factory=refuse)
    for cls in RECORDS:
        result.register_structure_hook(cls, lambda data, cls: _hook(cls)(data))
    for cls in (str, bool, int, float):
        result.register_structure_hook(cls, decode_scalar)
    for each in (datetime, date, datetime | None, date | None):
        result.register_structure_hook(each, _decode_moment)
    configure_union_passthrough(str | int | float | bool | None, result)
    result.register_structure_hook_factory(_is_sequence, sequence_hook)
    result.register_structure_hook_factory(_is_mapping, mapping_hook)
    result.register_structure_hook_factory(lambda cls: bool(_field_names(cls)), class_hook)
    return result


def _is_sequence(cls: Any) -> bool:
    origin, items = get_origin(cls) or cls, get_args(cls)
    # A tuple such as tuple[str, int] is left to cattrs.
    return origin in _SEQUENCES and (origin is not tuple or not items or items[1:] == (...,))


def _is_mapping(cls: Any) -> bool:
    return (get_origin(cls) or cls) in (dict, Mapping)


def _decode_moment(value: Any, cls: Any) -> datetime | date | None:
    moment = timestamp(value)
    if moment is None and cls in (datetime, date):
        raise Unreadable(f"expected a timestamp, got {describe(value)}")
    return moment if moment is None or datetime in (cls, *get_args(cls)) else moment.date()


def _field_names(cls: Any) -> frozenset[str]:
    """Return the names of the fields of a class; empty for any other type."""
    cls = get_origin(cls) or cls
    fields = attrs.fields(cls) if attrs.has(cls) else dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return frozenset(field.name for field in fields)


def _first_problem(group: ExceptionGroup) -> Unreadable:
    from cattrs import transform_error

    problem, _, place = transform_error(group, "", _describe_problem)[0].rpartition(" @ ")
    return Unreadable(problem, place.removeprefix("."))


def _describe_problem(error: BaseException, _: object) -> str:
    if isinstance(error, Unreadable):
        return str(error)
    if isinstance(error, KeyError):
        return "missing"
    # Whole or not at all: redaction does not recognize half of a secret.
    text = str(error) if len(str(error)) <= _MAX_TEXT else type(error).__name__
    return f"refused by the class: {text}"
