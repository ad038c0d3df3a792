"""Decoding a page of 100 signings, each with two documents, as typed records: ours beside what else one would use.

Every candidate makes records of equal classes, with timestamps parsed and unknown fields kept, except the two that say
otherwise: orjson alone makes dicts, which is the floor, and msgspec has no way to keep unknown fields.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, cast

import attrs
import cattrs
import orjson
import pydantic

from signing_async import Signing, convert
from signing_async.convert import parse, structure_all

from .measure import COMPARED, Table, compared, in_process, interleaved, quick, show

try:
    import msgspec
except ModuleNotFoundError:  # it is compared with where it is installed
    msgspec = None  # type: ignore[assignment]  # a module's type does not allow None

SIGNINGS = 100
_NOON = datetime(2026, 1, 31, 12, 30, 15, tzinfo=UTC)


def page() -> bytes:
    """The answer that is decoded: a bare list, so that every candidate does nothing but decode."""
    return json.dumps([_signing(number) for number in range(SIGNINGS)]).encode()


def _signing(number: int) -> dict[str, Any]:
    document = {"name": "lease.pdf", "size": 48_213, "completed_at": "2026-01-31T12:30:15Z", "signed_file_path": "/f"}
    return {
        "id": f"5f1b2c3d-0000-4000-8000-{number:012}",
        "name": f"Lease {number}",
        "language": "EN",
        "signing_order": "sequential",
        "message": "Please sign before Friday.",
        "is_draft": False,
        "is_completed": True,
        "cancelled_at": None,
        "created_at": "2026-01-30T08:00:00Z",
        "updated_at": "2026-01-31T12:30:15Z",
        "documents": [{"id": f"{number}-{which}", **document} for which in (1, 2)],
    }


# The rivals' classes: the same fields.


class PydanticDocument(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", frozen=True)
    id: str
    name: str = ""
    completed_at: datetime | None = None
    signed_file_path: str | None = None


class PydanticSigning(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", frozen=True)
    id: str
    name: str = ""
    language: str | None = None
    signing_order: str | None = None
    message: str | None = None
    is_draft: bool | None = None
    is_completed: bool | None = None
    cancelled_at: datetime | None = None
    updated_at: datetime | None = None
    documents: tuple[PydanticDocument, ...] = ()


@attrs.frozen
class PlainDocument:
    id: str
    name: str = ""
    completed_at: datetime | None = None
    signed_file_path: str | None = None
    extra: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class PlainSigning:
    id: str
    name: str = ""
    language: str | None = None
    signing_order: str | None = None
    message: str | None = None
    is_draft: bool | None = None
    is_completed: bool | None = None
    cancelled_at: datetime | None = None
    updated_at: datetime | None = None
    documents: tuple[PlainDocument, ...] = ()
    extra: Mapping[str, Any] = attrs.field(factory=dict)


def ours(body: bytes) -> tuple[Signing, ...]:
    return structure_all(parse(body), Signing)


def _ours_without_orjson(body: bytes) -> tuple[Signing, ...]:
    reader, convert.orjson = convert.orjson, None  # type: ignore[assignment,attr-defined]  # as if it were not there
    try:
        return ours(body)
    finally:
        convert.orjson = reader  # type: ignore[attr-defined]  # put back


def _cattrs_defaults() -> Callable[[bytes], Any]:
    """Cattrs as it comes, with the two hooks that it cannot do without: timestamps, and what is left over."""
    converter = cattrs.Converter()
    converter.register_structure_hook(datetime, lambda text, _: datetime.fromisoformat(text))
    for cls in (PlainDocument, PlainSigning):
        converter.register_structure_hook(cls, _keeping_extra(converter, cls))
    return lambda body: converter.structure(orjson.loads(body), list[PlainSigning])


def _keeping_extra(converter: cattrs.Converter, cls: type[Any]) -> Callable[[Any, Any], Any]:
    make = cattrs.gen.make_dict_structure_fn(cls, converter)
    names = {field.name for field in attrs.fields(cls)}

    def hook(data: Any, kind: Any) -> Any:
        return make({**data, "extra": {name: data[name] for name in data if name not in names}}, kind)

    return hook


def _msgspec() -> Callable[[bytes], Any]:
    document = msgspec.defstruct("Document", _fields(PlainDocument), frozen=True)
    fields = [field for field in _fields(PlainSigning) if field[0] != "documents"]
    signing = msgspec.defstruct("Signing", [*fields, ("documents", tuple[document, ...], ())], frozen=True)  # type: ignore[valid-type]  # it is made right here
    return cast("Callable[[bytes], Any]", msgspec.json.Decoder(list[signing]).decode)  # type: ignore[valid-type]  # the same


def _fields(cls: type[Any]) -> list[Any]:
    kinds = {"is_draft": bool | None, "is_completed": bool | None}
    return [
        (field.name, str)
        if field.name == "id"
        else (field.name, datetime | None if field.name.endswith("_at") else kinds.get(field.name, str | None), None)
        for field in attrs.fields(cls)
        if field.name != "extra"
    ]


def candidates() -> dict[str, Callable[[bytes], Any]]:
    """Name and function of each."""
    found: dict[str, Callable[[bytes], Any]] = {
        "signing_async": ours,
        "pydantic v2, validate_json": pydantic.TypeAdapter(list[PydanticSigning]).validate_json,
        "cattrs, defaults": _cattrs_defaults(),
        "signing_async without orjson": _ours_without_orjson,
        "orjson, dicts only": orjson.loads,
    }
    if msgspec is not None:
        found["msgspec, unknown fields dropped"] = _msgspec()
    return found


def check(name: str, made: Any) -> None:
    """Every candidate has to have done its work: the last signing, its documents, timestamps and unknown fields."""
    last = made[-1]
    if name.startswith("orjson"):
        assert last == _signing(SIGNINGS - 1)
        return
    assert (len(made), last.id, last.is_completed, last.updated_at) == (SIGNINGS, _signing(99)["id"], True, _NOON)
    assert [document.completed_at for document in last.documents] == [_NOON, _NOON]
    if not name.startswith("msgspec"):
        extra = last.model_extra if name.startswith("pydantic") else last.extra
        assert extra == {"created_at": "2026-01-30T08:00:00Z"}


def main() -> None:
    body = page()
    times = 1 if quick() else 50
    rounds = 1 if quick() else 31
    runs = {}
    for name, decode in candidates().items():
        check(name, decode(body))
        runs[name] = in_process(_repeated(decode, body, times))
    samples = asyncio.run(interleaved(runs, rounds=rounds, expect=SIGNINGS))
    rows = compared(samples, "pydantic v2, validate_json", count=SIGNINGS * times)
    title = f"Decoding {SIGNINGS} signings with two documents each (relative to pydantic v2; a piece is a signing)"
    show(Table(title, COMPARED, rows))


def _repeated(decode: Callable[[bytes], Any], body: bytes, times: int) -> Callable[[], int]:
    def run() -> int:
        made: Any = ()
        for _ in range(times):
            made = decode(body)
        return len(made)

    return run


if __name__ == "__main__":
    main()
