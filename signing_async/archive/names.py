"""Names of archived files, from a template. No value from the service can lead out of the archive."""

from __future__ import annotations

import hashlib
import re
import string
import unicodedata
from collections import Counter
from datetime import UTC

from ..errors import ConfigurationError
from ..models import Document, Signing
from .manifest import MANIFEST

__all__ = ["DEFAULT_TEMPLATE", "Template"]

DEFAULT_TEMPLATE = "{year}/{signing.name}-{signing.id}/{document.name}"

_FIELDS = ("year", "month", "day", "signing.id", "signing.name", "document.id", "document.name")
_MAX_VALUE, _MAX_PART = 80, 200  # bytes; file systems allow 255 in one part
_RESERVED = re.compile(r"(CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(COM|LPT)[0-9¹²³])\s*(\.|\Z)", re.IGNORECASE)


class Template:
    """A template for the names of sealed documents.

    If another document could get the same name, a hash of the ids is added. ``year``, ``month`` and ``day`` are those
    of the document's completion, or of the signing's last update if that is not known, in UTC.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or not text:
            raise ConfigurationError(f"template: must be a non-empty string, got {text!r}")
        if any(not part or part.startswith(".") for part in text.split("/")):
            raise ConfigurationError(f"template: {text!r} has a part that is empty or begins with a dot")
        try:
            self._parts = [list(string.Formatter().parse(part)) for part in text.split("/")]
        except ValueError as error:
            raise ConfigurationError(f"template: {text!r}: {error}") from None
        pieces = [piece for part in self._parts for piece in part]
        for literal, field, spec, conversion in pieces:
            if any(map(_is_forbidden, literal)):
                raise ConfigurationError(f"template: {literal!r} has a character that file names must not have")
            if field is not None and (field not in _FIELDS or spec or conversion):
                known = ", ".join(f"{{{name}}}" for name in _FIELDS)
                raise ConfigurationError(f"template: unknown field {{{field}}} in {text!r}; use {known}")
        self._has_id = any(field == "signing.id" for _, field, _, _ in pieces)

    def names(self, service: str, signing: Signing) -> dict[str, str]:
        """Return a mapping of the ids of the signing's documents to their names."""
        parts = {document.id: self._fill(signing, document) for document in signing.documents}
        names = {id_: _join(each) for id_, each in parts.items()}
        # File systems may ignore case and Unicode normalization.
        folded = {id_: unicodedata.normalize("NFKC", name).casefold() for id_, name in names.items()}
        counts = Counter(folded.values())
        has_id = self._has_id and _clean(signing.id) == signing.id
        for document in signing.documents:
            is_cut = any(len(part.encode()) > _MAX_PART for part in parts[document.id])
            if not has_id or is_cut or counts[folded[document.id]] > 1:
                names[document.id] = self.unique_name(service, signing, document)
        return names

    def unique_name(self, service: str, signing: Signing, document: Document) -> str:
        """Return a name with a hash of the ids."""
        tag = hashlib.sha256("\0".join((service, signing.id, document.id)).encode()).hexdigest()[:16]
        return _join(self._fill(signing, document), f"-{tag}")

    def _fill(self, signing: Signing, document: Document) -> list[str]:
        """Return the parts of the path, of any length."""
        completed = document.completed_at or signing.updated_at
        day = ["undated"] * 3 if completed is None else f"{completed.astimezone(UTC):%Y %m %d}".split()
        texts = (*day, signing.id, signing.name, document.id, _without_suffix(document.name))
        values = dict(zip(_FIELDS, map(_clean, texts), strict=True))
        return ["".join(text + (values[field] if field else "") for text, field, *_ in part) for part in self._parts]


def _join(parts: list[str], tag: str = "") -> str:
    return f"{_without_suffix('/'.join(map(_safe_part, parts)))}{tag}.pdf"


def _without_suffix(name: str) -> str:
    return name[:-4] if name.lower().endswith(".pdf") else name


def _clean(value: str) -> str:
    """Replace the characters that a file name must not contain, and cut the value to a limit."""
    normal = unicodedata.normalize("NFC", value)
    spaced = "".join(" " if unicodedata.category(char) == "Zs" else char for char in normal)
    text = "".join("_" if _is_forbidden(char) else char for char in spaced)
    return _cut(re.sub(" +", " ", text).strip(" ."), _MAX_VALUE) or "unnamed"


def _is_forbidden(char: str) -> bool:
    # C: control, format (such as a change of the writing direction), surrogate, private use, unassigned. Z: separators.
    return char in '\\/:*?"<>|' or (char != " " and unicodedata.category(char)[0] in "CZ")


def _safe_part(text: str) -> str:
    """Return the text as a part of a path that no system treats specially."""
    part = _cut(text.strip(" ."), _MAX_PART) or "unnamed"
    return f"_{part}" if _RESERVED.match(part) or part.casefold().startswith(MANIFEST) else part


def _cut(text: str, limit: int) -> str:
    return text.encode()[:limit].decode(errors="ignore").rstrip(" .")
