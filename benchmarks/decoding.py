"""Decoding pages of signings of several shapes as typed records, beside what else one would use.

Every candidate makes records of equal classes, with timestamps parsed and unknown fields kept, except those that say
otherwise: orjson alone makes dicts, which is the floor; msgspec and mashumaro (no extra) can but drop unknown fields.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, get_type_hints
from unittest import mock

import attrs
import cattrs
import orjson

from signing_async import Signing
from signing_async.transport import decode
from signing_async.transport.custom_records import decode_each
from signing_async.transport.decode import parse

from .charts import Chart
from .measure import Run, Samples, comparison, in_process, interleaved, panel, peer, quick, ratio
from .report import OURS, draw, judge, show

pydantic: Any = peer("pydantic")
msgspec: Any = peer("msgspec")
mashumaro: Any = peer("mashumaro.codecs.json")

_NOON = datetime(2026, 1, 31, 12, 30, 15, tzinfo=UTC)
_PYDANTIC, _CATTRS, _DICTS = "pydantic v2, validate_json", "cattrs, defaults", "orjson, dicts only"
_STRUCTS, _MSGSPEC_ATTRS = "msgspec Struct, no extra", "msgspec attrs, no extra"
_MASHUMARO, _WITHOUT = "mashumaro + orjson, no extra", f"{OURS} without orjson"


@attrs.frozen
class Shape:
    """What each signing of a page holds."""

    title: str
    documents: int = 2
    recipients: int = 0
    """Recipients are an unknown field: the specification lists them elsewhere."""
    unknown: bool = True
    """Whether there are further unknown fields, in signings and documents."""


_USUAL = Shape("two documents each")
SHAPES = (
    _USUAL,
    Shape("two documents each, no unknown field", unknown=False),
    Shape("two documents and two recipients each", recipients=2),
    Shape("no documents", documents=0),
)


def page(signings: int, shape: Shape) -> bytes:
    """Return the response to decode: a bare list, so that candidates do nothing but decode."""
    return json.dumps([_signing(number, shape) for number in range(signings)]).encode()


def _signing(number: int, shape: Shape) -> dict[str, Any]:
    document: dict[str, Any] = {"name": "lease.pdf", "completed_at": "2026-01-31T12:30:15Z", "signed_file_path": "/f"}
    if shape.unknown:
        document["size"] = 48_213
    return {
        "id": f"5f1b2c3d-0000-4000-8000-{number:012}",
        "name": f"Lease {number}",
        "language": "EN",
        "signing_order": "sequential",
        "message": "Please sign before Friday.",
        "is_draft": False,
        "is_completed": True,
        "cancelled_at": None,
        "updated_at": "2026-01-31T12:30:15Z",
        "documents": [{"id": f"{number}-{which}", **document} for which in range(shape.documents)],
        **_unknown(number, shape),
    }


def _unknown(number: int, shape: Shape) -> dict[str, Any]:
    recipient = {"email": "anna@example.com", "first_name": "Anna", "last_name": "Berg", "signing_method": "email"}
    fields: dict[str, Any] = {"created_at": "2026-01-30T08:00:00Z"} if shape.unknown else {}
    if shape.recipients:
        fields["recipients"] = [{"id": f"{number}-{which}", **recipient} for which in range(shape.recipients)]
    return fields


# The rivals' classes, with the same fields. Only those of attrs can keep unknown fields, in `extra`.


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


@dataclass(frozen=True)
class DataDocument:
    id: str
    name: str = ""
    completed_at: datetime | None = None
    signed_file_path: str | None = None


@dataclass(frozen=True)
class DataSigning:
    id: str
    name: str = ""
    language: str | None = None
    signing_order: str | None = None
    message: str | None = None
    is_draft: bool | None = None
    is_completed: bool | None = None
    cancelled_at: datetime | None = None
    updated_at: datetime | None = None
    documents: tuple[DataDocument, ...] = ()


@attrs.frozen
class DroppingSigning:
    """msgspec takes attrs classes, but one with a mapping for the rest would only look for a member of that name."""

    id: str
    name: str = ""
    language: str | None = None
    signing_order: str | None = None
    message: str | None = None
    is_draft: bool | None = None
    is_completed: bool | None = None
    cancelled_at: datetime | None = None
    updated_at: datetime | None = None
    documents: tuple[DataDocument, ...] = ()


def ours(body: bytes) -> tuple[Signing, ...]:
    return decode_each(parse(body), Signing)


def _ours_without_orjson(body: bytes) -> tuple[Signing, ...]:
    with mock.patch.object(decode, "orjson", None):
        return ours(body)


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


def _pydantic() -> Callable[[bytes], Any]:
    keeping = pydantic.ConfigDict(extra="allow", frozen=True)
    document = pydantic.create_model("Document", __config__=keeping, **_fields(DataDocument))
    fields = {**_fields(DataSigning), "documents": (tuple[document, ...], ())}
    signing = pydantic.create_model("Signing", __config__=keeping, **fields)
    decode: Callable[[bytes], Any] = pydantic.TypeAdapter(list[signing]).validate_json
    return decode


def _structs() -> Callable[[bytes], Any]:
    document = msgspec.defstruct("Document", _listed(_fields(DataDocument)), frozen=True)
    fields = {**_fields(DataSigning), "documents": (tuple[document, ...], ())}
    signing = msgspec.defstruct("Signing", _listed(fields), frozen=True)
    decode: Callable[[bytes], Any] = msgspec.json.Decoder(list[signing]).decode
    return decode


def _fields(cls: type[Any]) -> dict[str, Any]:
    """Type and default of each field; a default of ``...`` is none."""
    kinds = get_type_hints(cls)
    return {
        field.name: (kinds[field.name], ... if field.default is dataclasses.MISSING else field.default)
        for field in dataclasses.fields(cls)
    }


def _listed(fields: dict[str, Any]) -> list[Any]:
    return [(name, kind) if default is ... else (name, kind, default) for name, (kind, default) in fields.items()]


def _mashumaro() -> Callable[[bytes], Any]:
    decoder = mashumaro.JSONDecoder(list[DataSigning], pre_decoder_func=orjson.loads)
    decode: Callable[[bytes], Any] = decoder.decode
    return decode


def candidates() -> dict[str, Callable[[bytes], Any] | None]:
    """Name and function of each; None for one that is not installed."""
    return {
        OURS: ours,
        _PYDANTIC: _pydantic() if pydantic else None,
        _MASHUMARO: _mashumaro() if mashumaro else None,
        _CATTRS: _cattrs_defaults(),
        _STRUCTS: _structs() if msgspec else None,
        _MSGSPEC_ATTRS: msgspec.json.Decoder(list[DroppingSigning]).decode if msgspec else None,
        _DICTS: orjson.loads,
        _WITHOUT: _ours_without_orjson,
    }


def check(name: str, made: Any, signings: int, shape: Shape) -> None:
    """Every candidate has to have done its work: the last signing, its documents, timestamps and unknown fields."""
    last, expected = made[-1], _signing(signings - 1, shape)
    if name == _DICTS:
        assert last == expected
        return
    assert (len(made), last.id, last.is_completed, last.updated_at) == (signings, expected["id"], True, _NOON)
    assert [document.completed_at for document in last.documents] == [_NOON] * shape.documents
    if name in (OURS, _PYDANTIC, _CATTRS, _WITHOUT):
        extra = last.model_extra if name == _PYDANTIC else last.extra
        assert extra == _unknown(signings - 1, shape)


def main() -> None:
    panels = []
    pages = (
        ((10, 1, shape) for shape in SHAPES)
        if quick()
        else [*((100, 50, shape) for shape in SHAPES), (1000, 5, _USUAL)]
    )
    for signings, times, shape in pages:
        samples = asyncio.run(_sampled(signings, times, shape))
        title = f"{signings} signings with {shape.title}"
        base = _PYDANTIC if samples[_PYDANTIC] else OURS
        show(comparison(f"Decoding {title} (a piece is a signing)", samples, base, count=signings * times))
        if samples[_PYDANTIC]:
            judge(f"decoding {title}: CPU, of pydantic v2", ratio(samples, OURS, base, "cpu"), at_most=1.1)
        panels.append(panel(title, samples, base, "cpu"))
    draw(Chart("decoding", "Decoding", f"CPU time relative to {base.partition(',')[0]}; shorter is better", panels))


async def _sampled(signings: int, times: int, shape: Shape) -> Samples:
    body = page(signings, shape)
    runs: dict[str, Run | None] = {}
    for name, candidate in candidates().items():
        runs[name] = (
            in_process(partial(_repeated, name, candidate, body, signings, times, shape)) if candidate else None
        )
    return await interleaved(runs, rounds=31, seconds=8.0, expect=signings)


def _repeated(name: str, decode: Callable[[bytes], Any], body: bytes, signings: int, times: int, shape: Shape) -> int:
    made: Any = ()
    for _ in range(times):
        made = decode(body)
    check(name, made, signings, shape)
    return len(made)


if __name__ == "__main__":
    main()
