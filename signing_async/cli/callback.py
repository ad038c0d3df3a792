"""The loopback server that the browser is redirected to at the end of a login."""

from __future__ import annotations

import asyncio
import contextlib
import html
import ipaddress
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web

from ..errors import ConfigurationError, InvalidRequest, SigningError, StateMismatch

_silent = logging.Logger(__name__, logging.CRITICAL + 1)  # any local program can send malformed HTTP

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>body {{ font: 17px/1.5 system-ui, sans-serif; max-width: 30rem; margin: 25vh auto 0 }}</style>
<h1>{title}</h1>
<p>{text}</p>
</html>
"""
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def is_loopback(redirect_uri: str) -> bool:
    """Return whether a server on this machine can receive the redirect."""
    try:
        parts = urlsplit(redirect_uri)
        _ = parts.port  # an invalid port raises here
    except ValueError:
        raise ConfigurationError(f"redirect_uri is not a URL: {redirect_uri!r}") from None
    with contextlib.suppress(ValueError):
        local = parts.hostname == "localhost" or ipaddress.ip_address(parts.hostname or "").is_loopback
        return parts.scheme == "http" and local
    return False


class Callback:
    """Waits for the browser's redirect to ``redirect_uri``."""

    def __init__(self, redirect_uri: str) -> None:
        self.redirect_uri: str = redirect_uri
        self._outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._exchange: asyncio.Future[Callable[[str], Awaitable[str]]] = asyncio.Future()
        self._lock = asyncio.Lock()

    async def wait(self, exchange: Callable[[str], Awaitable[str]]) -> None:
        """Wait until ``exchange`` accepts a callback's query; raise its error if the login fails."""
        self._exchange.set_result(exchange)
        await self._outcome

    async def respond(self, request: web.Request) -> web.Response:
        async with self._lock:
            exchange = await self._exchange
            if self._outcome.done():
                return _page("Nothing to do", "This login is over. You can close this window.", 410)
            try:
                # Not the whole URL: it includes the Host header, which any local program can choose.
                message = await exchange(f"?{request.rel_url.raw_query_string}")
            except (StateMismatch, InvalidRequest):
                # The exchange checks the state first. Without it, this is not the callback, which may still come.
                return _page("Not logged in", "This request does not belong to the current login.", 400)
            except SigningError as error:
                self._outcome.set_exception(error)
                return _page("Not logged in", f"{error}. See the terminal for details; you can close this window.", 400)
            self._outcome.set_result(None)
            return _page("You are logged in", f"{message} You can close this window and return to the terminal.", 200)


@contextlib.asynccontextmanager
async def listen(redirect_uri: str) -> AsyncIterator[Callback]:
    """Run a server at a loopback redirect URI, on a free port if it names none."""
    parts, callback, app = urlsplit(redirect_uri), Callback(redirect_uri), web.Application()
    app.router.add_get("/{path:.*}", callback.respond)  # the state identifies the callback
    runner = web.AppRunner(app, access_log=None, logger=_silent, shutdown_timeout=2.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, parts.hostname, parts.port or 0).start()
        except OSError as error:
            message = f"cannot listen at {redirect_uri}: {error.strerror or error}; free the port, or use --no-browser"
            raise ConfigurationError(message) from None
        if not parts.port:
            netloc = f"{parts.netloc.removesuffix(':0').rstrip(':')}:{runner.addresses[0][1]}"
            callback.redirect_uri = parts._replace(netloc=netloc).geturl()
        yield callback
    finally:
        await runner.cleanup()


def _page(title: str, text: str, status: int) -> web.Response:
    content = _PAGE.format(title=html.escape(title), text=html.escape(text))
    return web.Response(text=content, status=status, content_type="text/html", headers=_HEADERS)
