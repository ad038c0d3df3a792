"""Inspect an uploaded file as the service does: it must be a PDF, small enough, not protected and not signed yet.

pikepdf reads the file; it is imported at the first upload. If pikepdf cannot read the file, the file is searched for
`/Encrypt`: it may be protected in a way that pikepdf does not support.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pikepdf

HEADER_WINDOW = 1024
"""How many bytes PDF readers search for `%PDF-`."""

MAX_INFLATED = 128 * 2**20
"""How many bytes a compressed stream may inflate to during inspection."""

_ENCRYPT = re.compile(rb"/Encrypt(?![0-9A-Za-z#._-])")
_loading = threading.Lock()


@dataclass(frozen=True)
class Rejection:
    """Why a file is refused."""

    code: Literal["not_pdf", "too_large", "protected", "already_signed"]
    message: str


NOT_PDF = Rejection("not_pdf", "The file is not a readable PDF.")
PROTECTED = Rejection("protected", "The PDF is password protected.")
SIGNED = Rejection("already_signed", "The PDF is already signed.")


def inspect(path: Path, *, max_bytes: int) -> Rejection | None:
    """Return why the file is refused, or None.

    Raise `OSError` if the file cannot be read, but nothing because of its content. An empty user password counts
    as protection. Adobe's usage rights and empty signature fields are not signatures.
    """
    size = path.stat().st_size
    if size > max_bytes:
        return Rejection("too_large", f"The file is {size} bytes; at most {max_bytes} bytes are accepted.")
    with path.open("rb") as file:
        head = file.read(HEADER_WINDOW)
    if b"%PDF-" not in head:
        return NOT_PDF
    pikepdf = load_pikepdf()
    try:
        with pikepdf.open(path) as pdf:
            return _inspect(pdf)
    except pikepdf.PasswordError:
        return PROTECTED
    except Exception:  # libqpdf reports a broken file with many exception types
        return PROTECTED if _ENCRYPT.search(path.read_bytes()) else NOT_PDF


def load_pikepdf() -> ModuleType:
    """Return pikepdf. From 10.14 on, limit inflated streams, unless the process has set its own limits."""
    with _loading:  # libqpdf's limits are global, and setting them is not thread-safe
        return _load()


@cache
def _load() -> ModuleType:
    import pikepdf
    from pikepdf import settings

    if not hasattr(settings, "set_qpdf_limits"):
        return pikepdf  # 10.13 is the last version with wheels for macOS on Intel and before macOS 15
    current = settings.get_qpdf_limits()
    settings.set_qpdf_limits(
        flate_max_memory=int(current["flate_max_memory"]) or MAX_INFLATED,
        png_max_memory=int(current["png_max_memory"]) or MAX_INFLATED,
        run_length_max_memory=int(current["run_length_max_memory"]) or MAX_INFLATED,
        tiff_max_memory=int(current["tiff_max_memory"]) or MAX_INFLATED,
    )
    return pikepdf


def _inspect(pdf: pikepdf.Pdf) -> Rejection | None:
    if pdf.is_encrypted:
        return PROTECTED
    if not len(pdf.pages):
        return NOT_PDF
    return SIGNED if _is_signed(pdf) else None


def _is_signed(pdf: pikepdf.Pdf) -> bool:
    permissions = _get(pdf.Root, "/Perms")
    if _is_filled(_get(permissions, "/DocMDP")):
        return True
    rights = {_identity(_get(permissions, key)) for key in ("/UR", "/UR3")} - {None}
    return any(_identity(value) not in rights for value in _signatures(pdf))


def _signatures(pdf: pikepdf.Pdf) -> Iterator[Any]:
    """Yield the values of the signature fields, each field once even if the tree has cycles."""
    seen: set[tuple[int, int]] = set()
    waiting = [(_get(_get(pdf.Root, "/AcroForm"), "/Fields"), False)]
    while waiting:
        fields, inherits = waiting.pop()
        for field in _unseen([fields], seen) and _unseen(_items(fields), seen):
            kind = _get(field, "/FT")
            is_signature = inherits if kind is None else str(kind) == "/Sig"
            if is_signature and _is_filled(value := _get(field, "/V")):
                yield value
            waiting.append((_get(field, "/Kids"), is_signature))


def _unseen(objects: list[Any], seen: set[tuple[int, int]]) -> list[Any]:
    """Return the objects that are not in `seen`, and add them."""
    new = []
    for value in objects:
        identity = _identity(value)
        if identity not in seen:
            new.append(value)
        if identity:
            seen.add(identity)
    return new


def _get(holder: Any, key: str) -> Any:
    """Return a dictionary's entry, or None if it is missing or the holder is not a dictionary."""
    return holder.get(key) if _is_filled(holder) else None


def _items(array: Any) -> list[Any]:
    from pikepdf import Array

    return list(array) if isinstance(array, Array) else []


def _is_filled(value: Any) -> bool:
    from pikepdf import Dictionary

    return isinstance(value, Dictionary) and len(value) > 0


def _identity(value: Any) -> tuple[int, int] | None:
    """Return the number and generation of an indirect object, or None."""
    number: tuple[int, int] = getattr(value, "objgen", (0, 0))
    return number if number != (0, 0) else None
