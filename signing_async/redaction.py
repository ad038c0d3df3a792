"""Takes secrets out of text before anybody sees it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import quote, quote_plus

__all__ = ["redact", "redact_bytes"]

_HIDDEN = "[redacted]"
_BEARER = re.compile(r"(\b[Bb]earer[ +])[A-Za-z0-9._~+/=-]{8,}")


def _spellings(secrets: Iterable[str]) -> list[str]:
    """Each secret as it is, escaped as in JSON, and encoded as in a URL; longest first, since one may hold another."""
    found = {
        spelling
        for secret in secrets
        if secret
        for spelling in (secret, secret.replace("/", "\\/"), quote(secret, safe=""), quote_plus(secret))
    }
    return sorted(found, key=len, reverse=True)


def redact(text: str, secrets: Iterable[str]) -> str:
    """``text`` without the secrets, and printable anywhere: what no encoding can hold is replaced."""
    for spelling in _spellings(secrets):
        text = text.replace(spelling, _HIDDEN)
    return _BEARER.sub(rf"\1{_HIDDEN}", text).encode("utf-8", "replace").decode("utf-8")


def redact_bytes(body: bytes, secrets: Iterable[str]) -> bytes:
    """The same for bytes of any encoding."""
    for spelling in _spellings(secrets):
        body = body.replace(spelling.encode(), _HIDDEN.encode())
    return body
