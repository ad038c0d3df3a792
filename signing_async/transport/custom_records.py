"""Decodes parsed JSON to the caller's own types: attrs classes, dataclasses, and containers of them, with cattrs.

The hooks here are stricter than those of the package's own records in `decode`: a number is not accepted for a string,
nor a string for a number.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from collections.abc import Set as AbstractSet
from datetime import date, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_origin

import attrs

from ..assumptions import Assumptions
from ..errors import InvalidRequest
from . import decode
from .decode import Unreadable, describe
from .lookup import look_up

if TYPE_CHECKING:
    import cattrs

__all__ = ["converter", "decode_each", "decode_to", "hook_of", "prepare", "unwrap"]

T = TypeVar("T")

_MAX_TEXT = 200
_SEQUENCES: dict[Any, Callable[[Any], Any]] = {
    list: list,
    MutableSequence: list,
    tuple: tuple,
    Sequence: tuple,
    set: set,
    frozenset: frozenset,
    AbstractSet: frozenset,
}
_MAPPINGS = frozenset({dict, Mapping, MutableMapping})


async def prepare() -> None:
    """Make the converter before the first request, in a thread: importing cattrs would block the event loop."""
    if not converter.cache_info().currsize:
        await asyncio.to_thread(converter)


def hook_of(cls: object) -> Callable[[Any, Any], Any]:
    """Return the function that decodes parsed JSON to this type; raise `InvalidRequest` if there is none."""
    try:
        return _hook(cls)
    except Exception as error:
        # cattrs, and Python when it resolves annotations, raise exceptions of many kinds.
        reason = f"{type(error).__name__}: {error}"
    raise InvalidRequest(
        f"into: cannot decode JSON to {cls!r}: pass an attrs class, a dataclass, dict, or a list of these ({reason})"
    )


def decode_to(data: Any, cls: type[T]) -> T:
    """Decode parsed JSON to a type; raise `Unreadable` if it does not fit. The data is used up."""
    return cast("T", hook_of(cls)(data, cls))


def decode_each(items: Any, cls: type[T]) -> tuple[T, ...]:
    """Decode each item of a parsed list."""
    return decode.decode_all(items, hook_of(cls))


def unwrap(data: Any, cls: Any, assumptions: Assumptions) -> Any:
    """Return the record, or the list, that parsed JSON wraps, unless the class has a field for the wrapper."""
    origin = get_origin(cls) or cls
    if not isinstance(data, dict) or cls is Any or origin in _MAPPINGS:
        return data
    is_list = origin in _SEQUENCES
    if "id" in data and not is_list:
        return data
    names = {field.name for field in _fields(cls)}
    for path in assumptions.item_paths if is_list else assumptions.record_paths:
        found = look_up(data, path)
        if isinstance(found, list if is_list else dict) and path.partition(".")[0] not in names:
            return found
    return data


def _fields(cls: Any) -> tuple[Any, ...]:
    if attrs.has(cls):
        return tuple(attrs.fields(get_origin(cls) or cls))
    found: tuple[Any, ...] = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return found


@cache
def _hook(cls: Any) -> Callable[[Any, Any], Any]:
    return converter().get_structure_hook(cls)


@cache
def converter() -> cattrs.Converter:
    """Return a copy of the converter in `decode`, with the hooks of this module."""
    from cattrs.strategies import configure_union_passthrough

    result = decode.converter().copy(detailed_validation=True)
    # cattrs itself would take a string for a list of characters, and null for the string "None".
    result.register_structure_hook(str, _decode_string)
    result.register_structure_hook(bool, lambda value, _: _checked(value, bool, "true or false"))
    result.register_structure_hook(int, _decode_integer)
    result.register_structure_hook(float, lambda value, _: float(_checked(value, (int, float), "a number")))
    result.register_structure_hook(datetime, _decode_timestamp)
    result.register_structure_hook(date, lambda value, cls: _decode_timestamp(value, cls).date())
    result.register_structure_hook(datetime | None, lambda value, _: decode.timestamp(value))
    result.register_structure_hook(date | None, _decode_optional_date)
    configure_union_passthrough(str | int | float | bool | None, result)
    result.register_structure_hook_factory(_is_sequence, _sequence_hook)
    result.register_structure_hook_factory(_is_mapping, _mapping_hook)
    result.register_structure_hook_factory(_is_class, _class_hook)
    return result


def _checked(value: Any, kind: type | tuple[type, ...], expected: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise Unreadable(f"expected {expected}, got {describe(value)}")
    return value


# The class may be an enumeration: cattrs uses the hooks of str and int for StrEnum and IntEnum too.


def _decode_string(value: Any, cls: Any) -> str:
    _checked(value, str, "a string")
    return cast("str", value if cls is str else cls(value))


def _decode_integer(value: Any, cls: Any) -> int:
    _checked(value, int, "an integer")
    return cast("int", value if cls is int else cls(value))


def _decode_timestamp(value: Any, _: Any) -> datetime:
    moment = decode.timestamp(value)
    if moment is None:
        raise Unreadable(f"expected a timestamp, got {describe(value)}")
    return moment


def _decode_optional_date(value: Any, _: Any) -> date | None:
    moment = decode.timestamp(value)
    return None if moment is None else moment.date()


# Containers


def _is_sequence(cls: Any) -> bool:
    origin, items = get_origin(cls) or cls, get_args(cls)
    # A tuple such as tuple[str, int] is left to cattrs.
    return origin in _SEQUENCES and (origin is not tuple or not items or items[1:] == (...,))


def _is_mapping(cls: Any) -> bool:
    return (get_origin(cls) or cls) in _MAPPINGS


def _sequence_hook(cls: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    make = _SEQUENCES[get_origin(cls) or cls]
    item_class = (get_args(cls) or (Any,))[0]
    item_hook = converter.get_structure_hook(item_class)

    def hook(data: Any, _: Any) -> Any:
        return make(decode.decode_all(data, lambda item, _: item_hook(item, item_class)))

    return hook


def _mapping_hook(cls: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    key_class, value_class = get_args(cls) or (Any, Any)
    key_hook, value_hook = converter.get_structure_hook(key_class), converter.get_structure_hook(value_class)

    def hook(data: Any, _: Any) -> dict[Any, Any]:
        _checked(data, dict, "an object")
        decoded = {}
        for key, value in data.items():
            try:
                decoded[key_hook(key, key_class)] = value_hook(value, value_class)
            except Unreadable as error:
                raise error.under(key) from None
        return decoded

    return hook


# Classes


def _is_class(cls: Any) -> bool:
    return attrs.has(cls) or dataclasses.is_dataclass(cls)


def _class_hook(cls: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    from cattrs.errors import ClassValidationError
    from cattrs.gen import make_dict_structure_fn

    fill = make_dict_structure_fn(cls, converter)
    names = {field.name for field in _fields(cls)}

    def hook(data: Any, _: Any) -> Any:
        _checked(data, dict, "an object")
        if "extra" in names:
            known = {name: value for name, value in data.items() if name in names and name != "extra"}
            data = {**known, "extra": {name: value for name, value in data.items() if name not in known}}
        try:
            return fill(data, cls)
        except ClassValidationError as group:
            problem = _first_problem(group.exceptions[0])
        raise problem

    return hook


def _first_problem(error: Exception) -> Unreadable:
    """Return the problem of a field, or the reason why the class itself refused its values."""
    from cattrs.errors import AttributeValidationNote

    name = next(
        (note.name for note in getattr(error, "__notes__", ()) if isinstance(note, AttributeValidationNote)), ""
    )
    if isinstance(error, Unreadable):
        return error.under(name)
    if isinstance(error, KeyError) and name:
        return Unreadable("missing", name)
    # Whole or not at all: redaction does not recognize half of a secret.
    text = str(error) if len(str(error)) <= _MAX_TEXT else type(error).__name__
    return Unreadable(f"refused by the class: {text}", name)
