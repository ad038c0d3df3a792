"""Decoding a page of 100 signings as typed records: pydantic, cattrs as one uses it by hand, and orjson alone.

Every candidate makes records of equal classes, with timestamps parsed and unknown fields kept; orjson alone makes
dicts, which is the limit.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, get_type_hints

import attrs
import cattrs
import orjson

from signing_async import Signing
from signing_async.transport.decode import decode_each, parse

from .charts import Chart
from .measure import Run, Samples, comparison, in_process, interleaved, panel, peer, quick, ratio
from .report import OURS, draw, judge, show

pydantic: Any = peer("pydantic")

_NOON = datetime(2026, 1, 31, 12, 30, 15, tzinfo=UTC)
_PYDANTIC, _CATTRS, _DICTS = "pydantic v2, validate_json", "cattrs, defaults", "orjson, dicts only"


_SIGNINGS, _TIMES = (10, 1) if quick() else (100, 50)


def page() -> bytes:
    """Return the response to decode: a bare list, so that candidates do nothing but decode."""
    return json.dumps([_signing(number) for number in range(_SIGNINGS)]).encode()


def _signing(number: int) -> dict[str, Any]:
    document = {"name": "lease.pdf", "completed_at": "2026-01-31T12:30:15Z", "signed_file_path": "/f", "size": 48_213}
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
        "documents": [{"id": f"{number}-{which}", **document} for which in range(2)],
        **_UNKNOWN,
    }


_UNKNOWN = {"created_at": "2026-01-30T08:00:00Z"}


# The rivals' classes, with the same fields; pydantic's are made of them.


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
    return decode_each(parse(body), Signing)


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
    document = pydantic.create_model("Document", __config__=keeping, **_fields(PlainDocument))
    fields = {**_fields(PlainSigning), "documents": (tuple[document, ...], ())}
    signing = pydantic.create_model("Signing", __config__=keeping, **fields)
    decode: Callable[[bytes], Any] = pydantic.TypeAdapter(list[signing]).validate_json
    return decode


def _fields(cls: type[Any]) -> dict[str, Any]:
    """Type and default of each field; a default of ``...`` is none."""
    kinds = get_type_hints(cls)
    fields = [field for field in attrs.fields(cls) if field.name != "extra"]
    return {
        field.name: (kinds[field.name], ... if field.default is attrs.NOTHING else field.default) for field in fields
    }


def candidates() -> dict[str, Callable[[bytes], Any] | None]:
    """Name and function of each; None for one that is not installed."""
    return {
        OURS: ours,
        _PYDANTIC: _pydantic() if pydantic else None,
        _CATTRS: _cattrs_defaults(),
        _DICTS: orjson.loads,
    }


def check(name: str, made: Any) -> None:
    """Every candidate has to have done its work: the last signing, its documents, timestamps and unknown fields."""
    last, expected = made[-1], _signing(_SIGNINGS - 1)
    if name == _DICTS:
        assert last == expected
        return
    assert (len(made), last.id, last.is_completed, last.updated_at) == (_SIGNINGS, expected["id"], True, _NOON)
    assert [document.completed_at for document in last.documents] == [_NOON] * 2
    assert (last.model_extra if name == _PYDANTIC else last.extra) == _UNKNOWN


def main() -> None:
    samples = asyncio.run(_sampled())
    title = f"{_SIGNINGS} signings with two documents each"
    base = _PYDANTIC if samples[_PYDANTIC] else OURS
    show(comparison(f"Decoding {title}", samples, base, count=_SIGNINGS * _TIMES))
    if samples[_PYDANTIC]:
        judge(f"decoding {title}: CPU, of pydantic v2", ratio(samples, OURS, base, "cpu"), at_most=1.0)
    axis = f"CPU time relative to {base.partition(',')[0]}; shorter is better"
    draw(Chart("decoding", "Decoding", axis, [panel(title, samples, base, "cpu")]))


async def _sampled() -> Samples:
    runs: dict[str, Run | None] = {
        name: in_process(partial(_repeated, name, candidate)) if candidate else None
        for name, candidate in candidates().items()
    }
    return await interleaved(runs, rounds=31, seconds=8.0, expect=_SIGNINGS)


def _repeated(name: str, decode: Callable[[bytes], Any]) -> int:
    body, made = _BODY, ()
    for _ in range(_TIMES):
        made = decode(body)
    check(name, made)
    return len(made)


_BODY = page()
