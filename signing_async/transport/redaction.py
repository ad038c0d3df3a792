"""Redacts secrets in texts, parsed JSON and bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote, quote_plus

__all__ = ["redact", "redact_bytes", "redact_data"]

_REDACTED = "[redacted]"
_HARMLESS_LENGTH = 4  # a prefix this short reveals nothing
_PLACEHOLDER = "\ufdd0"  # replaced by _REDACTED at the end: _REDACTED contains secrets such as "red"
# The same as html.escape. Importing html would take a twentieth of a client's import time.
_HTML_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})
# A word of plain letters after "bearer" is part of a sentence: "Bearer authentication is required".
_BEARER = re.compile(r"(\bbearer[ +])(?=[a-z._~+/=-]*\d|[\w.~+/=-]{20})[\w.~+/=-]{8,}", re.ASCII | re.IGNORECASE)


def redact(text: str, secrets: Iterable[str]) -> str:
    """Return the text with the secrets redacted, and lone surrogates replaced."""
    return _redact_spellings(text, _spellings(secrets))


def redact_data(data: Any, secrets: Iterable[str]) -> Any:
    """Return a copy of parsed JSON with the secrets redacted in every string and key."""
    spellings = _spellings(secrets)

    def redacted(value: Any) -> Any:
        if isinstance(value, str):
            return _redact_spellings(value, spellings)
        if isinstance(value, list):
            return [redacted(each) for each in value]
        if isinstance(value, dict):
            return {redacted(name): redacted(each) for name, each in value.items()}
        return value

    return redacted(data)


def redact_bytes(body: bytes, secrets: Iterable[str]) -> bytes:
    """Return the bytes with the secrets redacted, in UTF-16 and in every superset of ASCII.

    A secret that is cut off at the end of the body is removed.
    """
    spellings = _spellings(secrets)
    for spelling in spellings:
        whole = spelling.encode("utf-8", "replace")
        sizes = range(len(whole) - 1, _HARMLESS_LENGTH, -1)
        cut_off = next((size for size in sizes if body.endswith(whole[:size])), 0)
        body = body[: len(body) - cut_off]
        for encoding in ("utf-16-le", "utf-16-be"):
            body = body.replace(spelling.encode(encoding, "replace"), _REDACTED.encode(encoding))
    # Latin-1 maps every byte to a character and back.
    in_latin_1 = [spelling.encode("utf-8", "replace").decode("latin-1") for spelling in spellings]
    return _redact_spellings(body.decode("latin-1"), in_latin_1).encode("latin-1")


def _spellings(secrets: Iterable[str]) -> list[str]:
    """Return each secret as it is and as escaped in JSON, HTML and URLs; longest first: one may contain another."""
    found = set()
    for secret in filter(None, secrets):
        texts = {secret, json.dumps(secret)[1:-1]}
        urls = {quote(secret, safe, errors="replace") for safe in ("", "/")} | {quote_plus(secret, errors="replace")}
        urls |= {re.sub(r"%[0-9A-F]{2}", lambda escape: escape[0].lower(), text) for text in urls}
        found |= texts | urls | {text.replace("/", "\\/") for text in texts} | {secret.translate(_HTML_ESCAPES)}
    return sorted(found, key=len, reverse=True)


def _redact_spellings(text: str, spellings: Iterable[str]) -> str:
    for spelling in spellings:
        text = text.replace(spelling, _PLACEHOLDER)
    text = _BEARER.sub(rf"\1{_PLACEHOLDER}", text).replace(_PLACEHOLDER, _REDACTED)
    return text.encode("utf-8", "replace").decode("utf-8")
