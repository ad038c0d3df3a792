"""Protection of the pages and the control API against other sites."""

from __future__ import annotations

import hmac
import secrets

from aiohttp import web
from yarl import URL

from .addresses import is_loopback
from .refused import Refused
from .request_body import read_form

COOKIE = "signing_sandbox"
FIELD = "csrf_token"
_TOKEN: web.RequestKey[str] = web.RequestKey("token", str)

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
    """Forms that only pages of this sandbox can send: their token is also in the browser's cookie."""

    def __init__(self, *, loopback_only: bool) -> None:
        self._loopback_only = loopback_only

    def page(self, request: web.Request, html: str, status: int = 200) -> web.Response:
        """Return a page as a response that sets the browser's cookie if it has none."""
        body = html.encode("utf-8", "replace")  # a lone surrogate cannot be encoded
        response = web.Response(
            body=body, status=status, content_type="text/html", charset="utf-8", headers=PAGE_HEADERS
        )
        if not request.cookies.get(COOKIE):
            response.set_cookie(COOKIE, self.token(request), httponly=True, samesite="Lax")
        return response

    def token(self, request: web.Request) -> str:
        """Return the value of the hidden field `csrf_token` for forms on the page of this request."""
        if _TOKEN not in request:
            request[_TOKEN] = request.cookies.get(COOKIE) or secrets.token_urlsafe(24)
        return request[_TOKEN]

    async def read(self, request: web.Request) -> dict[str, str]:
        """Return the fields of a form that a page of this sandbox sent; refuse any other form."""
        fields = await read_form(request)
        sent, token = fields.get(FIELD, ""), self.token(request)
        if not hmac.compare_digest(sent.encode(), token.encode("utf-8", "surrogateescape")):
            message = "This form is not from a page of this sandbox, or the page is too old: reload it."
            raise Refused(403, "forgery", message)
        return fields

    def check_site(self, request: web.Request) -> None:
        """Refuse requests that another site makes a browser send: a foreign Origin or host name (DNS rebinding)."""
        own = f"{request.scheme}://{request.host}"
        try:
            host = URL(own).host or ""
        except ValueError:
            host = ""
        if self._loopback_only and not is_loopback(host):
            raise Refused(421, "foreign_host", "This sandbox responds only to host names of this machine.")
        if request.method not in {"GET", "HEAD"} and request.headers.get("Origin", own) != own:
            raise Refused(403, "foreign_origin", "Requests from another site are not allowed.")
