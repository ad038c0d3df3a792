"""Takes secrets out of text before anybody sees it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote, quote_plus

__all__ = ["redact", "redact_bytes", "redact_data"]

_HIDDEN = "[redacted]"
_SHORTEST_CUT = 4  # so few characters give nothing away
_MARK = "\ufdd0"  # stands for it meanwhile, so that a secret such as "red" is not found in it
# As html.escape does it, whose module takes a twentieth of the time that importing a client does.
_IN_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})
# A word of plain letters after "bearer" belongs to a sentence: "Bearer authentication is required".
_BEARER = re.compile(r"(\bbearer[ +])(?=[a-z._~+/=-]*\d|[\w.~+/=-]{20})[\w.~+/=-]{8,}", re.ASCII | re.IGNORECASE)


def _spellings(secrets: Iterable[str]) -> list[str]:
    """Each secret as it is, as in JSON, HTML, and a URL; longest first, since one may hold another."""
    found = set()
    for secret in filter(None, secrets):
        encoded = {quote(secret, safe=kept, errors="replace") for kept in ("", "/")}
        encoded.add(quote_plus(secret, errors="replace"))
        in_json = json.dumps(secret)[1:-1]
        found |= {
            secret,
            secret.replace("/", "\\/"),
            in_json,
            in_json.replace("/", "\\/"),
            secret.translate(_IN_HTML),
            *encoded,
        }
        found |= {re.sub(r"%[0-9A-F]{2}", lambda escape: escape[0].lower(), text) for text in encoded}
    return sorted(found, key=len, reverse=True)


def redact(text: str, secrets: Iterable[str]) -> str:
    """``text`` without the secrets, and printable anywhere: what no encoding can hold is replaced."""
    return _without(text, _spellings(secrets))


def redact_data(data: Any, secrets: Iterable[str]) -> Any:
    """Return a copy of parsed JSON with the secrets redacted in every string and key."""
    spellings = _spellings(secrets)

    def copied(value: Any) -> Any:
        if isinstance(value, str):
            return _without(value, spellings)
        if isinstance(value, list):
            return [copied(each) for each in value]
        if isinstance(value, dict):
            return {copied(name): copied(each) for name, each in value.items()}
        return value

    return copied(data)


def _without(text: str, spellings: Iterable[str]) -> str:
    for spelling in spellings:
        text = text.replace(spelling, _MARK)
    text = _BEARER.sub(rf"\1{_MARK}", text).replace(_MARK, _HIDDEN)
    return text.encode("utf-8", "replace").decode("utf-8")


def redact_bytes(body: bytes, secrets: Iterable[str]) -> bytes:
    """The same for bytes, in UTF-8 or any encoding that holds ASCII, or in UTF-16, perhaps cut off in a secret."""
    spellings = _spellings(secrets)
    for spelling in spellings:
        whole = spelling.encode("utf-8", "replace")
        cut = next((size for size in range(len(whole) - 1, _SHORTEST_CUT, -1) if body.endswith(whole[:size])), 0)
        body = body[: len(body) - cut]
    for encoding in ("utf-16-le", "utf-16-be"):
        for spelling in spellings:
            body = body.replace(spelling.encode(encoding, "replace"), _HIDDEN.encode(encoding))
    # Every byte is a character of Latin-1, and comes back as it was.
    text = redact(
        body.decode("latin-1"), [spelling.encode("utf-8", "replace").decode("latin-1") for spelling in spellings]
    )
    return text.encode("latin-1")
