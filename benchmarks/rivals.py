"""The HTTP clients that the comparisons are made with, made in one way each, so that none is slow for its settings."""

from __future__ import annotations

import shutil
import ssl
from typing import Any

import aiohttp

from .measure import peer

__all__ = ["HEADERS", "TOKEN", "aiohttp_session", "has_curl", "httpx", "httpx_client", "niquests", "niquests_session"]

TOKEN = "benchmark"
HEADERS = {"Accept": "application/json", "Authorization": f"Bearer {TOKEN}"}

httpx = peer("httpx")
niquests = peer("niquests")


def aiohttp_session(context: ssl.SSLContext | None = None) -> aiohttp.ClientSession:
    """As the package's client makes its own: no cookies, no deadline and no limit of aiohttp's own."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=context or True),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
    )


def httpx_client(context: ssl.SSLContext | None = None) -> Any:
    """Without the environment's proxies and authorities, and without a deadline."""
    assert httpx is not None
    return httpx.AsyncClient(verify=context or True, timeout=None, trust_env=False, headers=HEADERS)


def niquests_session() -> Any:
    """An asynchronous session that speaks HTTP/1.1, as all the others here do."""
    assert niquests is not None
    session = niquests.AsyncSession(disable_http2=True, disable_http3=True)
    session.trust_env = False
    session.headers.update(HEADERS)
    return session


def has_curl() -> bool:
    return shutil.which("curl") is not None
