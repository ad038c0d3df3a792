"""The OAuth 2.0 authorization code flow in the browser: the authorize URL, its state and PKCE, and the callback."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets as random_secrets
from urllib.parse import parse_qs, urlencode, urlsplit

import attrs

from ..errors import AuthError, InvalidRequest, SigningError, StateMismatch
from ..transport.error_response import one_line
from ..transport.redaction import redact

__all__ = ["AuthorizationRequest", "authorization_request", "read_callback"]

_QUERY_FIELD = re.compile(r"(^|&)(code|state|error)=")


@attrs.frozen
class AuthorizationRequest:
    """The start of a login: redirect the user's browser to ``url``.

    Keep ``state``, and with PKCE ``code_verifier``, in the user's session, and pass them to `OAuth.exchange`.
    """

    url: str = attrs.field(repr=lambda url: repr(url.partition("&state=")[0] + "&state=..."))
    state: str = attrs.field(repr=False)
    code_verifier: str | None = attrs.field(default=None, repr=False)


def authorization_request(origin: str, client_id: str, redirect_uri: str, *, pkce: bool) -> AuthorizationRequest:
    """Return the URL for the browser, with a new random state and, with PKCE, a new code verifier."""
    state = random_secrets.token_urlsafe(32)
    verifier = random_secrets.token_urlsafe(32) if pkce else None
    query = {
        "client_id": client_id,
        "redirect_uri": redirect_uri,
        "response_type": "code",
        **({} if verifier is None else {"code_challenge": _challenge(verifier), "code_challenge_method": "S256"}),
        "state": state,
    }
    return AuthorizationRequest(f"{origin}/oauth/authorize?{urlencode(query)}", state, verifier)


def read_callback(callback: str, state: str | None) -> str | SigningError:
    """Return the code of a callback URL, or the bare code; return an error if the callback is invalid.

    Errors are returned, so that the caller can drop the code from its variables before it raises.
    """
    if not isinstance(callback, str) or not callback.strip():
        return InvalidRequest("exchange: the callback URL or code is missing")
    callback = callback.strip()
    if not callback.isprintable() or " " in callback:
        return InvalidRequest("exchange: not a callback URL or code: it contains whitespace or control characters")
    if "?" not in callback and "://" not in callback and not _QUERY_FIELD.search(callback):
        return callback
    try:
        query = parse_qs(urlsplit(callback).query if "?" in callback else callback, max_num_fields=100)
    except ValueError:
        return InvalidRequest("exchange: the callback is not a valid URL")
    if not isinstance(state, str) or not state:
        return InvalidRequest("exchange: state is missing: pass the state of the authorization request")
    returned = query.get("state", [])
    if len(returned) != 1 or not hmac.compare_digest(_bytes(returned[0]), _bytes(state)):
        return StateMismatch("the callback's state does not match the authorization request: it may be forged")
    codes = query.get("code", [])
    if "error" in query:
        secrets = (state, *codes)
        code = one_line(redact(query["error"][0], secrets))[:100]
        description = one_line(redact(" ".join(query.get("error_description", [])), secrets))[:500]
        return AuthError(f"authorization was refused: {description or code} (code {code})", code=code)
    if len(codes) != 1:
        return AuthError("the callback has more than one code" if codes else "the callback has no code")
    return codes[0]


def _challenge(verifier: str) -> str:
    """Return the S256 code challenge (RFC 7636)."""
    return base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
