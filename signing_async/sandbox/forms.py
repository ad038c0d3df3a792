"""Protection of the pages and the control API against other sites."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from urllib.parse import urlsplit

from aiohttp import web

from .addresses import is_loopback
from .refused import Refused
from .request_body import read_form

COOKIE = "signing_sandbox"
FIELD = "csrf_token"

_NEW_COOKIE: ContextVar[str] = ContextVar("new cookie")

PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'self'; img-src 'self' data:; "
        "frame-src 'self'; object-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Forms:
    """Forms that only pages of this sandbox can send."""

    def __init__(self, *, loopback_only: bool) -> None:
        self._key = secrets.token_bytes(32)
        self._loopback_only = loopback_only

    def page(self, request: web.Request, html: str, status: int = 200) -> web.Response:
        """Return a page as a response that sets the browser's cookie if it has none."""
        body = html.encode("utf-8", "replace")  # a lone surrogate cannot be encoded
        response = web.Response(
            body=body, status=status, content_type="text/html", charset="utf-8", headers=PAGE_HEADERS
        )
        if not request.cookies.get(COOKIE):
            response.set_cookie(COOKIE, self._cookie(request), httponly=True, samesite="Lax")
        return response

    def token(self, request: web.Request) -> str:
        """Return the value of the hidden field `csrf_token` for forms on the page of this request."""
        return hmac.new(self._key, self._cookie(request).encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()

    def _cookie(self, request: web.Request) -> str:
        """Return the browser's cookie, or the one that this response sets."""
        cookie = request.cookies.get(COOKIE)
        return cookie or _NEW_COOKIE.get()

    @web.middleware
    async def new_cookies(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Prepare a cookie for a browser that has none."""
        _NEW_COOKIE.set(secrets.token_urlsafe(24))
        return await handler(request)

    async def read(self, request: web.Request) -> dict[str, str]:
        """Return the fields of a form that a page of this sandbox sent; refuse any other form."""
        fields = await read_form(request)
        if not hmac.compare_digest(fields.get(FIELD, "").encode(), self.token(request).encode()):
            raise Refused(
                403, "forgery", "This form is not from a page of this sandbox, or the page is too old: reload it."
            )
        return fields

    def check_site(self, request: web.Request) -> None:
        """Refuse requests that another site makes a browser send: a foreign Origin or host name (DNS rebinding)."""
        try:
            host = urlsplit(f"//{request.host}").hostname or ""
        except ValueError:
            host = ""
        if self._loopback_only and not is_loopback(host):
            raise Refused(421, "foreign_host", "This sandbox responds only to host names of this machine.")
        origin = request.headers.get("Origin")
        if (
            origin is not None
            and request.method not in {"GET", "HEAD"}
            and origin != f"{request.scheme}://{request.host}"
        ):
            raise Refused(403, "foreign_origin", "Requests from another site are not allowed.")
