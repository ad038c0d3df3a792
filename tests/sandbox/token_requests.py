"""Token requests, and whether a token works."""

from __future__ import annotations

from typing import Any

from signing_async.sandbox import Sandbox
from tests.sandbox.serving import API, Caller

CALLBACK = "http://127.0.0.1:1/callback"
TOKEN = "/api/oauth/token"
VERIFIER = "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk"
CHALLENGE = "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM"  # both are RFC 7636's example


def exchange(sandbox: Sandbox, app: Any, **changes: str | None) -> dict[str, str]:
    """Return the parameters of a valid code exchange with changes (None: omitted)."""
    parameters = {
        "grant_type": "authorization_code",
        "client_id": app.client_id,
        "client_secret": app.client_secret,
        "redirect_uri": app.redirect_uri,
        "code": sandbox.authorize(app),
    } | changes
    return {name: value for name, value in parameters.items() if value is not None}


def refresh(app: Any, token: str, **changes: str | None) -> dict[str, str]:
    """Return the parameters of a valid refresh with changes (None: omitted)."""
    parameters = {
        "grant_type": "refresh_token",
        "client_id": app.client_id,
        "client_secret": app.client_secret,
        "refresh_token": token,
    } | changes
    return {name: value for name, value in parameters.items() if value is not None}


async def works(call: Caller, access_token: str) -> bool:
    """Return whether the API accepts this access token."""
    headers = {"Authorization": f"Bearer {access_token}"}
    async with call.session.get(f"{API}/me", headers=headers) as response:
        return response.status == 200
