"""Names of archived files: a template's fields, cleaned so that no name from the service leads out of the archive."""

from __future__ import annotations

import hashlib
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

from ..errors import ConfigurationError
from ..models import Document, Signing
from .manifest import MANIFEST

__all__ = ["DEFAULT_TEMPLATE", "Template"]

DEFAULT_TEMPLATE = "{year}/{signing.name}-{signing.id}/{document.name}"

_SUFFIX = ".pdf"
_MAX_VALUE = 80  # bytes of one field
_MAX_PART = 200  # bytes of one part; file systems allow 255
_FORBIDDEN = re.compile(r'[\\/:*?"<>|\x00-\x1f]')
_RESERVED = re.compile(r"(CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(COM|LPT)[0-9¹²³])\s*(\.|\Z)", re.IGNORECASE)

_Value = Callable[[Signing, Document, datetime | None], str]
_FIELDS: dict[str, _Value] = {
    "year": lambda _, __, day: f"{day:%Y}" if day else "undated",
    "month": lambda _, __, day: f"{day:%m}" if day else "undated",
    "day": lambda _, __, day: f"{day:%d}" if day else "undated",
    "signing.id": lambda signing, _, __: signing.id,
    "signing.name": lambda signing, _, __: signing.name,
    "document.id": lambda _, document, __: document.id,
    "document.name": lambda _, document, __: _without_suffix(document.name),
}


class Template:
    """A template for the names of sealed documents.

    If another document could get the same name, a hash of the ids is added. ``year``, ``month`` and ``day`` are those
    of the document's completion, or of the signing's last update if that is not known, in UTC.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or not text:
            raise ConfigurationError(f"template: must be a non-empty string, got {text!r}")
        self.text: str = text
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
        self._fields = {field for _, field, _, _ in pieces}
        self._parts = [list(string.Formatter().parse(part)) for part in text.split("/")]
        if not all(self._parts) or any(part[0][0].startswith(".") for part in self._parts):
            raise ConfigurationError(f"template: {text!r} has a part that is empty or begins with a dot")

    def names(self, service: str, signing: Signing) -> dict[str, str]:
        """Return a mapping of the ids of the signing's documents to their names."""
        plain = {document.id: self._render(signing, document) for document in signing.documents}
        counts = Counter(_fold(name) for name in plain.values() if name is not None)
        return {
            document.id: self.unique_name(service, signing, document)
            if (name := plain[document.id]) is None or counts[_fold(name)] > 1
            else name
            for document in signing.documents
        }

    def unique_name(self, service: str, signing: Signing, document: Document) -> str:
        """Return a name with a hash of the ids."""
        parts = self._clean_parts(signing, document)
        tag = hashlib.sha256("\0".join((service, signing.id, document.id)).encode()).hexdigest()[:16]
        return "/".join([*parts[:-1], f"{_without_suffix(parts[-1])}-{tag}{_SUFFIX}"])

    def _render(self, signing: Signing, document: Document) -> str | None:
        """Return the name without a hash; None if a document of another signing could get the same name."""
        if "signing.id" not in self._fields or _clean(signing.id) != signing.id:
            return None
        parts = self._clean_parts(signing, document)
        is_cut = any(len(part.encode()) >= _MAX_PART for part in parts)
        return None if is_cut else "/".join([*parts[:-1], _without_suffix(parts[-1]) + _SUFFIX])

    def _clean_parts(self, signing: Signing, document: Document) -> list[str]:
        completed = document.completed_at or signing.updated_at
        day = None if completed is None else completed.astimezone(UTC)
        return [
            _safe_part(
                "".join(
                    text + (_clean(_FIELDS[field](signing, document, day)) if field else "")
                    for text, field, _, _ in part
                )
            )
            for part in self._parts
        ]


def _without_suffix(name: str) -> str:
    return name[: -len(_SUFFIX)] if name.lower().endswith(_SUFFIX) else name


def _clean(value: str) -> str:
    """Replace the characters that a file name must not contain, and cut the value to a limit."""
    text = "".join(_safe_char(char) for char in unicodedata.normalize("NFC", value))
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
    special = _RESERVED.match(part) or part.casefold().startswith(MANIFEST)
    return f"_{part}" if special else part


def _cut(text: str, limit: int) -> str:
    return text.encode()[:limit].decode(errors="ignore").rstrip(" .")


def _fold(name: str) -> str:
    """Return a key that compares names as a file system may: without regard to case and Unicode normalization."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFKC", name).casefold())
