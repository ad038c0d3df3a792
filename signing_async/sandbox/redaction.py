"""Removes secrets from the headers, queries and bodies that are kept for people to read."""

from __future__ import annotations

import re
from collections.abc import Mapping

REDACTED = "[redacted]"
SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization", "set-cookie", "x-signature"})
URL_HEADERS = frozenset({"location", "referer"})  # in OAuth, their queries hold the state or a code

_NAMES = "access_token|refresh_token|client_secret|code_verifier|csrf_token|secret"
_VALUE = r'"(?:[^"\\]|\\.)*"?|[^\s,}\]]+'
_IN_RESPONSE = re.compile(rf'("(?:{_NAMES})"\s*:\s*)(?:{_VALUE})')
_IN_REQUEST = re.compile(rf'("(?:{_NAMES}|code)"\s*:\s*)(?:{_VALUE})')  # in a response, `code` names an error
_IN_FORM = re.compile(rf"(^|&)({_NAMES}|code|state)=[^&]*")
_CODE = re.compile(r"\bcode_[\w-]{20,}")


def redact_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers without credentials, signatures, and the queries of URLs."""
    redacted = dict(headers)
    for name, value in headers.items():
        if name.lower() in SECRET_HEADERS:
            redacted[name] = REDACTED
        elif name.lower() in URL_HEADERS:
            redacted[name] = value.partition("?")[0]
    return redacted


def redact_body(body: bytes, *, of_request: bool = False) -> str:
    """Return a JSON or form body as text without secrets. JSON may be malformed or truncated."""
    text = _CODE.sub(REDACTED, body.decode("utf-8", "replace"))
    if text.lstrip()[:1] in {"{", "["}:
        return (_IN_REQUEST if of_request else _IN_RESPONSE).sub(rf'\1"{REDACTED}"', text)
    return redact_form(text)


def redact_form(text: str) -> str:
    """Return a form or a query without secrets."""
    return _IN_FORM.sub(rf"\1\2={REDACTED}", text)
