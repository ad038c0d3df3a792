"""Deliveries for the tests, signed with the standard library so that the package does not check itself."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import json
from itertools import count
from typing import Any

SECRET = "a shared secret of the tests"
_numbers = count(1)


def mac(body: bytes, secret: str | bytes = SECRET) -> bytes:
    """Return the raw HMAC-SHA256."""
    key = secret.encode() if isinstance(secret, str) else secret
    return hmac.new(key, body, hashlib.sha256).digest()


def hex_of(body: bytes, secret: str | bytes = SECRET) -> str:
    """Return the signature in hex."""
    return mac(body, secret).hex()


def base64_of(body: bytes, secret: str | bytes = SECRET) -> str:
    """Return the signature in standard, padded base64."""
    return base64.b64encode(mac(body, secret)).decode()


def event_body(event_id: str | None = None, **members: Any) -> bytes:
    """Return a body as the specification documents it, with a new event id if none is given."""
    event = {"id": event_id or f"evt_{next(_numbers)}", "type": "signing.completed"}
    return json.dumps({"event": event, **members}).encode()


def signed(body: bytes, secret: str | bytes = SECRET) -> dict[str, str]:
    """Return the headers of a genuine delivery."""
    return {"X-Signature": hex_of(body, secret), "Content-Type": "application/json"}


def request(
    port: int, path: str, body: bytes, headers: dict[str, str], method: str = "POST"
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Send one request on a new connection; return the status, the headers and the body of the response."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
