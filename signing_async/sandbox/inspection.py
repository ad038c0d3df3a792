"""Inspect an uploaded file as the service does: it must be a PDF, small enough, not protected and not signed yet."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pikepdf
from pikepdf import Array, Dictionary, settings

HEADER_WINDOW = 1024
"""How many bytes PDF readers search for `%PDF-`."""

MAX_INFLATED = 128 * 2**20
"""How many bytes a compressed stream may inflate to during inspection."""

_ENCRYPT = re.compile(rb"/Encrypt(?![0-9A-Za-z#._-])")

with suppress(AttributeError):  # pikepdf 10.13 is the last version with wheels for macOS before 15
    settings.set_qpdf_limits(flate_max_memory=MAX_INFLATED, png_max_memory=MAX_INFLATED)
    settings.set_qpdf_limits(run_length_max_memory=MAX_INFLATED, tiff_max_memory=MAX_INFLATED)


@dataclass(frozen=True)
class Rejection:
    """Why a file is refused."""

    code: Literal["not_pdf", "protected", "already_signed"]
    message: str


NOT_PDF = Rejection("not_pdf", "The file is not a readable PDF.")
PROTECTED = Rejection("protected", "The PDF is password protected.")
SIGNED = Rejection("already_signed", "The PDF is already signed.")


def inspect(path: Path) -> Rejection | None:
    """Return why the file is refused, or None.

    Raise `OSError` if the file cannot be read, but nothing because of its content. An empty user password counts
    as protection. Adobe's usage rights and empty signature fields are not signatures.
    """
    with path.open("rb") as file:
        if b"%PDF-" not in file.read(HEADER_WINDOW):
            return NOT_PDF
    try:
        with pikepdf.open(path) as pdf:
            if pdf.is_encrypted:
                return PROTECTED
            if not len(pdf.pages):
                return NOT_PDF
            return SIGNED if _is_signed(pdf) else None
    except pikepdf.PasswordError:
        return PROTECTED
    except Exception:  # libqpdf reports a broken file with many exception types
        # The file may be protected in a way that libqpdf does not support.
        return PROTECTED if _ENCRYPT.search(path.read_bytes()) else NOT_PDF


def _is_signed(pdf: pikepdf.Pdf) -> bool:
    permissions = _get(pdf.Root, "/Perms")
    rights = {_get(permissions, key).objgen for key in ("/UR", "/UR3") if _get(permissions, key)}
    signatures = _signatures(_get(_get(pdf.Root, "/AcroForm"), "/Fields"), set(), inherits=False)
    return bool(_get(permissions, "/DocMDP")) or any(value.objgen not in rights - {(0, 0)} for value in signatures)


def _signatures(fields: Any, seen: set[tuple[int, int]], *, inherits: bool) -> Iterator[Any]:
    """Yield the values of the signature fields, each field once even if the tree has cycles or shares its branches."""
    if not isinstance(fields, Array) or fields.objgen in seen:
        return
    seen |= {fields.objgen} - {(0, 0)}
    for field in fields:
        if field.objgen in seen:
            continue
        seen |= {field.objgen} - {(0, 0)}
        kind = _get(field, "/FT")
        is_signature = inherits if kind is None else str(kind) == "/Sig"
        if is_signature and isinstance(value := _get(field, "/V"), Dictionary) and len(value):
            yield value
        yield from _signatures(_get(field, "/Kids"), seen, inherits=is_signature)


def _get(holder: Any, key: str) -> Any:
    """Return a dictionary's entry, or None if it is missing or the holder is not a dictionary."""
    return holder.get(key) if isinstance(holder, Dictionary) else None
