"""The loopback server that the browser is sent back to at the end of a login."""

from __future__ import annotations

import asyncio
import contextlib
import html
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import SplitResult, urlsplit

from aiohttp import web

from ..errors import ConfigurationError, InvalidRequest, SigningError, StateMismatch

__all__ = ["Callback", "is_loopback", "listening"]

Finish = Callable[[str], Awaitable[str]]
"""Takes the callback's query to its end, and says what to tell the user."""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 17px/1.5 system-ui, sans-serif; display: grid; place-items: center; min-height: 90vh; margin: 0 1.5rem; }}
main {{ max-width: 30rem; }}
h1 {{ font-size: 1.6rem; margin: 0 0 .5rem; }}
p {{ margin: 0; opacity: .8; }}
</style>
</head>
<body><main><h1>{title}</h1><p>{text}</p></main></body>
</html>
"""
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def is_loopback(redirect_uri: str) -> bool:
    """Whether a server on this machine can be behind it."""
    try:
        parts = urlsplit(redirect_uri)
        _ = parts.port  # looked at here, since a wrong one is an error only then
    except ValueError:
        raise ConfigurationError(f"redirect_uri is not a URL: {redirect_uri!r}") from None
    if parts.scheme != "http" or not parts.hostname:
        return False
    if parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname).is_loopback
    except ValueError:
        return False


class Callback:
    """What came of the browser's return; ``redirect_uri`` is where it is awaited."""

    def __init__(self, redirect_uri: str) -> None:
        self.redirect_uri = redirect_uri
        self.outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._finish: Finish | None = None
        self._busy = asyncio.Lock()

    async def wait(self, finish: Finish) -> None:
        """Return when ``finish`` has taken a callback to its end; raise what that raised."""
        self._finish = finish
        await self.outcome

    async def answer(self, request: web.Request) -> web.Response:
        async with self._busy:
            if self.outcome.done() or self._finish is None:
                return _page("Nothing to do", "This login is over. You can close this window.", 410)
            try:
                # Not the whole URL, to which the Host header belongs: any program here may send what it likes.
                said = await self._finish(f"?{request.rel_url.raw_query_string}")
            except (StateMismatch, InvalidRequest):
                # Without the state, which is looked for first, it is not the callback: that may still come.
                return _page("Not logged in", "This answer does not belong to the login that is under way.", 400)
            except SigningError as error:
                self.outcome.set_exception(error)
                return _page("Not logged in", f"{error}. The terminal says more; you can close this window.", 400)
            self.outcome.set_result(None)
            return _page("You are logged in", f"{said} You can close this window and go back to the terminal.", 200)


@contextlib.asynccontextmanager
async def listening(redirect_uri: str) -> AsyncIterator[Callback]:
    """A server at a loopback redirect URI; at a free port where that names none."""
    parts = urlsplit(redirect_uri)
    app = web.Application()
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
    # The router has to be filled before it is known which port it will be. The state tells what is meant for it.
    callback = Callback(redirect_uri)
    app.router.add_get("/{path:.*}", callback.answer)
    await runner.setup()
    try:
        site = web.TCPSite(runner, parts.hostname, parts.port or 0)
        try:
            await site.start()
        except OSError as error:
            words = f"cannot listen at {redirect_uri}: {error.strerror or error}; free it, or use --no-browser"
            raise ConfigurationError(words) from None
        if not parts.port:
            callback.redirect_uri = _with_port(parts, runner.addresses[0][1])
        yield callback
    finally:
        await runner.cleanup()


def _with_port(parts: SplitResult, port: int) -> str:
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return parts._replace(netloc=f"{host}:{port}").geturl()


def _page(title: str, text: str, status: int) -> web.Response:
    content = _PAGE.format(title=html.escape(title), text=html.escape(text))
    return web.Response(text=content, status=status, content_type="text/html", headers=_HEADERS)
