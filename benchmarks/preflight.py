"""The check of a PDF before its upload: files of several producers, with tables, streams and forms."""

from __future__ import annotations

import asyncio
from functools import partial

from signing_async.documents.preflight import preflight
from tests.pdfs import (
    by_fpdf2,
    by_reportlab,
    encrypted,
    hybrid_pdf,
    rewritten,
    signed_by_pyhanko,
    stream_object,
    with_signature_field,
    xref_stream_pdf,
)

from .measure import in_process, interleaved, median, quick
from .report import Table, judge, show
from .server import pdf_bytes

_TIMES = 2 if quick() else 50
_LARGE = ", 10 MB"


def main() -> None:
    rows = []
    for name, data in _files().items():
        cost = asyncio.run(_measured(data))
        rows.append([name, str(len(data)), f"{cost:.1f}"])
        judge(f"preflight: {name}", cost, at_most=5000 if name.endswith(_LARGE) else 30, unit=" µs of CPU")
    show(Table("a preflight", ("file", "bytes", "µs of CPU"), rows, "A file is searched in blocks of 1 MiB."))


def _files() -> dict[str, bytes]:
    plain = pdf_bytes(50_000)
    if quick():
        return {"a table, 50 KB": plain}
    form, large = by_reportlab(50), pdf_bytes(10_000_000)
    return {
        "a table, 50 KB": plain,
        "fpdf2": by_fpdf2(),
        "reportlab, 50 fields": form,
        "pikepdf, object streams": rewritten(plain, object_streams=True),
        "pikepdf, object streams, 50 fields": rewritten(form, object_streams=True),
        "pikepdf, linearized": rewritten(plain, linearize=True, object_streams=True),
        "pikepdf, encrypted": encrypted(plain),
        "pyHanko, signed": signed_by_pyhanko(plain),
        "a hybrid of table and stream": hybrid_pdf(),
        "a cross-reference stream": xref_stream_pdf(),
        f"a table{_LARGE}": large,
        f"pyHanko, signed{_LARGE}": signed_by_pyhanko(large),
        f"usage rights{_LARGE}": with_signature_field(
            catalog=b"/Perms<</UR3 7 0 R>>", more={5: stream_object(large[:10_000_000])}
        ),
    }


async def _measured(data: bytes) -> float:
    samples = await interleaved({"": in_process(partial(_repeated, data))}, rounds=31, seconds=3.0)
    return median(samples[""], "cpu") / _TIMES * 1e6


def _repeated(data: bytes) -> None:
    for _ in range(_TIMES):
        preflight(lambda at, count: data[at : at + count], len(data))
