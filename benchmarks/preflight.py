"""The check of a PDF before its upload: files of several producers, with tables, streams and forms."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pikepdf
from pyhanko.pdf_utils.incremental_writer import IncrementalPdfFileWriter
from pyhanko.sign.fields import SigFieldSpec, append_signature_field

from signing_async.documents.preflight import glance, preflight

from .measure import MISSING, in_process, interleaved, median, peer, quick
from .report import Table, judge, show
from .server import pdf_bytes

canvas: Any = peer("reportlab.pdfgen.canvas")
fpdf: Any = peer("fpdf")

_FIELDS = 50
_TIMES = 2 if quick() else 50
_STREAMS, _FORM = "pikepdf, object streams", f"pikepdf, object streams, {_FIELDS} fields"


def main() -> None:
    rows = asyncio.run(_measured())
    note = "The glance is the check of a large file in the event loop; it reads a few kilobytes."
    show(Table("a preflight", ("file", "bytes", "µs of a preflight", "µs of a glance"), rows, note))
    preflights = {row[0]: float(row[2]) for row in rows if row[1] != MISSING}
    judge(f"preflight: {_STREAMS}", preflights[_STREAMS], at_most=30, unit=" µs")
    if _FORM in preflights:
        judge(f"preflight: {_FORM}", preflights[_FORM], at_most=150, unit=" µs")


async def _measured() -> list[list[str]]:
    rows = []
    for name, data in _files().items():
        if data is None:
            rows.append([name, MISSING, "", ""])
            continue
        runs = {
            "preflight": in_process(partial(_repeated, partial(preflight, data))),
            "glance": in_process(partial(_repeated, partial(glance, partial(_part, data), len(data)))),
        }
        samples = await interleaved(runs, rounds=31, seconds=3.0)
        rows.append([name, str(len(data)), *(f"{median(taken) / _TIMES * 1e6:.1f}" for taken in samples.values())])
    return rows


def _repeated(check: Callable[[], object]) -> None:
    for _ in range(_TIMES):
        check()


def _part(data: bytes, at: int, size: int) -> bytes:
    return data[at : at + size]


def _files() -> dict[str, bytes | None]:
    """Files by producer; None for one that is not installed."""
    plain = pdf_bytes(50_000)
    form = _reportlab(fields=_FIELDS) if canvas else None
    return {
        "a table, 50 KB": plain,
        "reportlab": _reportlab(fields=0) if canvas else None,
        f"reportlab, {_FIELDS} fields": form,
        "fpdf2": _fpdf2() if fpdf else None,
        _STREAMS: _object_streams(plain),
        _FORM: _object_streams(form) if form else None,
        "pyHanko, 2 signature fields": _pyhanko(plain, 2),
        f"pyHanko, object streams, {_FIELDS} signature fields": _pyhanko(_object_streams(plain), _FIELDS),
    }


def _reportlab(*, fields: int) -> bytes:
    out = io.BytesIO()
    made = canvas.Canvas(out)
    made.drawString(100, 700, "A lease")
    for number in range(fields):
        made.acroForm.textfield(name=f"field {number}", x=50 + number % 5 * 100, y=50 + number // 5 * 60)
    made.save()
    return out.getvalue()


def _fpdf2() -> bytes:
    made = fpdf.FPDF()
    made.set_font("helvetica", size=12)
    made.add_page()
    made.cell(text="A lease")
    return bytes(made.output())


def _object_streams(data: bytes) -> bytes:
    out = io.BytesIO()
    with pikepdf.open(io.BytesIO(data)) as pdf:
        pdf.save(out, object_stream_mode=pikepdf.ObjectStreamMode.generate)
    return out.getvalue()


def _pyhanko(data: bytes, fields: int) -> bytes:
    writer = IncrementalPdfFileWriter(io.BytesIO(data))
    for number in range(fields):
        append_signature_field(writer, SigFieldSpec(f"seal {number}", box=(10, 10 + 20 * number, 60, 25 + 20 * number)))
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()
