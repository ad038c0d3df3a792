"""PDFs of several producers, with tables, streams and forms."""

from __future__ import annotations

import io
from typing import Any

import pikepdf
from pyhanko.pdf_utils.incremental_writer import IncrementalPdfFileWriter
from pyhanko.sign.fields import SigFieldSpec, append_signature_field

from .measure import peer
from .server import pdf_bytes

__all__ = ["FORM", "STREAMS", "files"]

canvas: Any = peer("reportlab.pdfgen.canvas")
fpdf: Any = peer("fpdf")

_FIELDS = 50
STREAMS, FORM = "pikepdf, object streams", f"pikepdf, object streams, {_FIELDS} fields"


def files() -> dict[str, bytes | None]:
    """Return a file from each producer, or None if the producer is not installed."""
    plain = pdf_bytes(50_000)
    form = _reportlab(fields=_FIELDS) if canvas else None
    return {
        "a table, 50 KB": plain,
        "reportlab": _reportlab(fields=0) if canvas else None,
        f"reportlab, {_FIELDS} fields": form,
        "fpdf2": _fpdf2() if fpdf else None,
        STREAMS: _object_streams(plain),
        FORM: _object_streams(form) if form else None,
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
