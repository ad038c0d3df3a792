"""The pages of OAuth: registering an application, and consent."""

from __future__ import annotations

import html
import re
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import aiohttp
import pytest

from signing_async.sandbox import Profile, Sandbox
from signing_async.sandbox.records import App
from tests.sandbox.token_requests import CALLBACK, CHALLENGE


class Browser:
    """A browser that fills in forms."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def get(self, path: str, **options: Any) -> tuple[int, str, str]:
        """Return status, page, and the redirect's location."""
        async with self.session.get(path, allow_redirects=False, **options) as response:
            return response.status, await response.text(), response.headers.get("Location", "")

    async def submit(self, path: str, fields: dict[str, str], headers: Any = None, **get: Any) -> tuple[int, str, str]:
        """Open the page and submit its form."""
        _, page, _ = await self.get(path, **get)
        token = re.search(r'name="?csrf_token"?[^>]*value="([^"]+)"', page)
        assert token, page
        fields = {"csrf_token": html.unescape(token[1])} | fields
        async with self.session.post(path, data=fields, allow_redirects=False, headers=headers, **get) as response:
            return response.status, await response.text(), response.headers.get("Location", "")


@pytest.fixture
async def browser(signing_sandbox: Sandbox) -> Any:
    """A browser with cookies."""
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(signing_sandbox.base_url, cookie_jar=jar) as session:
        yield Browser(session)


def request_of(app: App, **changes: str | None) -> dict[str, str]:
    """Return the query of a valid authorization request with changes (None: omitted)."""
    query = {"client_id": app.client_id, "redirect_uri": app.redirect_uri, "response_type": "code", "state": "s&=ö"}
    return {name: value for name, value in (query | changes).items() if value is not None}


async def test_token_of_a_form_is_worthless_in_another_browser(browser: Browser, signing_sandbox: Sandbox) -> None:
    _, page, _ = await browser.get("/developer/my-apps")
    token = re.search(r'csrf_token"?[^>]*value="([^"]+)"', page)
    assert token
    browser.session.cookie_jar.clear()
    fields = {"name": "A", "redirect_uri": CALLBACK, "csrf_token": token[1]}
    async with browser.session.post("/developer/my-apps", data=fields) as response:
        assert response.status == 403


S256 = {"code_challenge": CHALLENGE, "code_challenge_method": "S256"}


async def test_consent_page_binds_the_code_to_the_challenge(
    browser: Browser, signing_sandbox: Sandbox, app: App
) -> None:
    query = request_of(app, **S256)
    _, page, _ = await browser.get("/oauth/authorize", params=query)
    assert urlencode(S256) in html.unescape(page)
    _, _, location = await browser.submit("/oauth/authorize", {"decision": "allow"}, params=query)
    assert "code=" in location
    assert signing_sandbox._state.database.value("SELECT challenge FROM codes") == CHALLENGE


@pytest.mark.parametrize(
    "change",
    [
        {"code_challenge_method": "plain"},
        {"code_challenge_method": None},
        {"code_challenge": CHALLENGE + "="},
        {"code_challenge": ""},
    ],
)
async def test_invalid_challenge_is_reported_to_the_app(
    browser: Browser, app: App, change: dict[str, str | None]
) -> None:
    status, _, location = await browser.get("/oauth/authorize", params=request_of(app, **{**S256, **change}))
    assert (status, parse_qs(urlsplit(location).query)["error"]) == (302, ["invalid_request"])


async def test_service_without_pkce_ignores_the_parameters() -> None:
    async with Sandbox(profile=Profile(pkce=False)) as sandbox:
        assert sandbox.accounts.code_challenge(S256) is None
