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
_FORBIDDEN = re.compile(r'[\\/:*?"<>|\x00-\x1f]')
_RESERVED = re.compile(r"(CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(COM|LPT)[0-9¹²³])\s*(\.|\Z)", re.IGNORECASE)


class Template:
    """A template for the names of sealed documents.

    If another document could get the same name, a hash of the ids is added. ``year``, ``month`` and ``day`` are those
    of the document's completion, or of the signing's last update if that is not known, in UTC.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or not text:
            raise ConfigurationError(f"template: must be a non-empty string, got {text!r}")
        try:
            pieces = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ConfigurationError(f"template: {text!r}: {error}") from None
        for literal, field, spec, conversion in pieces:
            if _FORBIDDEN.search(literal.replace("/", "")):
                raise ConfigurationError(f"template: {literal!r} has a character that file names must not have")
            if field is not None and (field not in _FIELDS or spec or conversion):
                known = ", ".join(f"{{{name}}}" for name in _FIELDS)
                raise ConfigurationError(f"template: unknown field {{{field}}} in {text!r}; use {known}")
        if any(not part or part.startswith(".") for part in text.split("/")):
            raise ConfigurationError(f"template: {text!r} has a part that is empty or begins with a dot")
        self.text: str = text
        self._has_id = any(field == "signing.id" for _, field, _, _ in pieces)

    def names(self, service: str, signing: Signing) -> dict[str, str]:
        """Return a mapping of the ids of the signing's documents to their names."""
        parts = {document.id: self._parts(signing, document) for document in signing.documents}
        names = {id_: _join(each) for id_, each in parts.items()}
        counts = Counter(map(_fold, names.values()))
        has_id = self._has_id and _clean(signing.id) == signing.id
        for document in signing.documents:
            is_whole = all(len(part.encode()) <= _MAX_PART for part in parts[document.id])
            # Otherwise a document of this or of another signing could get the same name.
            if not (has_id and is_whole and counts[_fold(_join(parts[document.id]))] == 1):
                names[document.id] = self.unique_name(service, signing, document)
        return names

    def unique_name(self, service: str, signing: Signing, document: Document) -> str:
        """Return a name with a hash of the ids."""
        tag = hashlib.sha256("\0".join((service, signing.id, document.id)).encode()).hexdigest()[:16]
        return _join(self._parts(signing, document), f"-{tag}")

    def _parts(self, signing: Signing, document: Document) -> list[str]:
        """Return the parts of the path, of any length."""
        completed = document.completed_at or signing.updated_at
        day = ["undated"] * 3 if completed is None else f"{completed.astimezone(UTC):%Y %m %d}".split()
        name = _without_suffix(document.name)
        values = dict(zip(_FIELDS, [*day, signing.id, signing.name, document.id, name], strict=True))
        pieces = [string.Formatter().parse(part) for part in self.text.split("/")]
        return ["".join(text + (_clean(values[field]) if field else "") for text, field, *_ in part) for part in pieces]


def _join(parts: list[str], tag: str = "") -> str:
    return f"{_without_suffix('/'.join(map(_safe_part, parts)))}{tag}.pdf"


def _without_suffix(name: str) -> str:
    return name[:-4] if name.lower().endswith(".pdf") else name


def _clean(value: str) -> str:
    """Replace the characters that a file name must not contain, and cut the value to a limit."""
    text = "".join(map(_safe_char, unicodedata.normalize("NFC", value)))
    return _cut(re.sub(" +", " ", text).strip(" ."), _MAX_VALUE) or "unnamed"


def _safe_char(char: str) -> str:
    category = unicodedata.category(char)
    if category == "Zs":
        return " "
    # C: control, format (such as a change of the writing direction), surrogate, private use, unassigned. Z: separators.
    return "_" if category[0] in "CZ" or _FORBIDDEN.match(char) else char


def _safe_part(text: str) -> str:
    """Return the text as a part of a path that no system treats specially."""
    part = _cut(text.strip(" ."), _MAX_PART) or "unnamed"
    return f"_{part}" if _RESERVED.match(part) or part.casefold().startswith(MANIFEST) else part


def _cut(text: str, limit: int) -> str:
    return text.encode()[:limit].decode(errors="ignore").rstrip(" .")


def _fold(name: str) -> str:
    """Return a key that compares names as a file system may: without regard to case and Unicode normalization."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFKC", name).casefold())
