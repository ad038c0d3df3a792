"""A small valid PDF for tests and demonstrations, made without any PDF library."""

from __future__ import annotations

__all__ = ["sample_pdf"]


def sample_pdf(title: str = "Sample contract") -> bytes:
    """Return a valid PDF of one page that shows ``title``. Characters beyond Latin-1 are shown as question marks."""
    escaped = title.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)").replace("\r", " ").replace("\n", " ")
    page = f"BT /F1 24 Tf 72 720 Td ({escaped}) Tj 0 -40 Td /F1 12 Tf (This is a sample, without legal value.) Tj ET"
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents 4 0 R /Resources 6 0 R >>",
        f"<< /Length {len(page)} >>\nstream\n{page}\nendstream",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
        "<< /Font << /F1 5 0 R >> >>",
    ]
    # One character is one byte in Latin-1, so lengths and offsets may be counted in characters.
    pdf, offsets = "%PDF-1.4\n", []
    for number, content in enumerate(objects, start=1):
        offsets.append(len(pdf))
        pdf += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    size, start = len(objects) + 1, len(pdf)
    pdf += f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R >>\n"
    return (pdf + f"startxref\n{start}\n%%EOF\n").encode("latin-1", "replace")
