"""The browser's part of the OAuth 2.0 authorization code flow: the authorize URL, its state, and the callback."""

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

_QUERY = re.compile(r"(^|&)(code|state|error)=")


@attrs.frozen
class AuthorizationRequest:
    """Send the user's browser to ``url``; keep ``state`` in the user's session until the callback comes.

    Keep ``code_verifier`` there too, if PKCE was asked for, and give both to `OAuth.exchange`.
    """

    url: str = attrs.field(repr=lambda url: repr(url.partition("&state=")[0] + "&state=..."))
    state: str = attrs.field(repr=False)
    code_verifier: str | None = attrs.field(default=None, repr=False)


def authorization_request(origin: str, client_id: str, redirect_uri: str, *, pkce: bool) -> AuthorizationRequest:
    """Return the URL to send the user to, with a new random state and, for PKCE, a new code verifier."""
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


def read_callback(given: str, state: str | None) -> str | SigningError:
    """The code of a callback whose state and error were checked, or the bare code; what is wrong is returned."""
    if not isinstance(given, str) or not given.strip():
        return InvalidRequest("exchange: the callback URL or code is missing")
    given = given.strip()
    if not given.isprintable() or " " in given:
        return InvalidRequest("exchange: neither a callback URL nor a code: there is white space in it")
    if "?" not in given and "://" not in given and not _QUERY.search(given):
        return given
    try:
        query = parse_qs(urlsplit(given).query if "?" in given else given, max_num_fields=100)
    except ValueError:
        return InvalidRequest("exchange: the callback is not a URL that can be read")
    if not isinstance(state, str) or not state:
        return InvalidRequest("exchange: state is missing: give the state that was kept when the user was sent away")
    returned = query.get("state", [])
    if len(returned) != 1 or not hmac.compare_digest(_bytes(returned[0]), _bytes(state)):
        return StateMismatch("the callback's state is not the one that was sent: it may be forged, so it is not used")
    codes = query.get("code", [])
    if "error" in query:
        secrets = (state, *codes)
        code = one_line(redact(query["error"][0], secrets))[:100]
        said = one_line(redact(" ".join(query.get("error_description", [])), secrets))[:500]
        return AuthError(f"authorization was refused: {said or code} (code {code})", code=code)
    if len(codes) != 1:
        return AuthError("the callback carries more than one code" if codes else "the callback carries no code")
    return codes[0]


def _challenge(verifier: str) -> str:
    """The S256 code challenge of RFC 7636."""
    return base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
