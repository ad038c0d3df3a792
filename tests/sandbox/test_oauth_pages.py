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
from tests.sandbox.serving import API, Caller
from tests.sandbox.token_requests import CALLBACK, CHALLENGE, TOKEN, exchange, works


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


async def test_registered_app_shows_its_secret_once(browser: Browser, signing_sandbox: Sandbox) -> None:
    fields = {"name": "<b>Shop</b>", "redirect_uri": CALLBACK}
    status, page, _ = await browser.submit("/developer/my-apps", fields)
    [app] = signing_sandbox.apps
    assert status == 200
    assert app.client_id in page
    secret = re.search(r"secret_[\w-]+", page)
    assert secret
    assert "<b>Shop" not in page
    _, later, _ = await browser.get("/developer/my-apps")
    assert app.client_id in later
    assert secret[0] not in later
    assert "<b>Shop" not in later


async def test_invalid_redirect_uri_is_reported_on_the_page(browser: Browser, signing_sandbox: Sandbox) -> None:
    fields = {"name": "Shop", "redirect_uri": "http://evil.example/<script>"}
    status, page, _ = await browser.submit("/developer/my-apps", fields)
    assert status == 400
    assert "<script>" not in page
    assert signing_sandbox.apps == []


@pytest.mark.parametrize("fields", [{"csrf_token": "wrong"}, {"csrf_token": ""}, {"csrf_token": "ö"}])
async def test_form_without_a_token_is_refused(
    browser: Browser, signing_sandbox: Sandbox, fields: dict[str, str]
) -> None:
    status, _, _ = await browser.submit("/developer/my-apps", {"name": "A", "redirect_uri": CALLBACK, **fields})
    assert status == 403
    assert signing_sandbox.apps == []


async def test_token_of_a_form_is_worthless_in_another_browser(browser: Browser, signing_sandbox: Sandbox) -> None:
    _, page, _ = await browser.get("/developer/my-apps")
    token = re.search(r'csrf_token"?[^>]*value="([^"]+)"', page)
    assert token
    browser.session.cookie_jar.clear()
    fields = {"name": "A", "redirect_uri": CALLBACK, "csrf_token": token[1]}
    async with browser.session.post("/developer/my-apps", data=fields) as response:
        assert response.status == 403


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example"}, 421),
        ({"Host": "[::1"}, 421),
    ],
)
async def test_foreign_origin_and_host_are_refused(
    browser: Browser, signing_sandbox: Sandbox, headers: dict[str, str], expected: int
) -> None:
    fields = {"name": "A", "redirect_uri": CALLBACK}
    status, _, _ = await browser.submit("/developer/my-apps", fields, headers=headers)
    assert status == expected
    assert signing_sandbox.apps == []


async def test_consent_redirects_with_a_code_and_the_state(
    browser: Browser, signing_sandbox: Sandbox, app: App, call: Caller
) -> None:
    status, page, location = await browser.submit("/oauth/authorize", {"decision": "allow"}, params=request_of(app))
    assert status in {302, 303}, page
    assert location.startswith(CALLBACK + "?")
    query = parse_qs(urlsplit(location).query)
    assert query["state"] == ["s&=ö"]
    token = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app, code=query["code"][0]))
    assert await works(call, token["access_token"])
    assert len(signing_sandbox.requests_of("oauth.authorize")) == 1
    assert query["code"][0] not in repr(signing_sandbox.requests)


S256 = {"code_challenge": CHALLENGE, "code_challenge_method": "S256"}


async def test_consent_page_binds_the_code_to_the_challenge(
    browser: Browser, signing_sandbox: Sandbox, app: App
) -> None:
    query = request_of(app, **S256)
    _, page, _ = await browser.get("/oauth/authorize", params=query)
    assert urlencode(S256) in html.unescape(page)
    _, _, location = await browser.submit("/oauth/authorize", {"decision": "allow"}, params=query)
    assert "code=" in location
    assert signing_sandbox._database.value("SELECT challenge FROM codes") == CHALLENGE


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


async def test_denied_consent_redirects_with_access_denied(browser: Browser, app: App) -> None:
    _, _, location = await browser.submit("/oauth/authorize", {"decision": "deny"}, params=request_of(app))
    assert parse_qs(urlsplit(location).query) == {"error": ["access_denied"], "state": ["s&=ö"]}


@pytest.mark.parametrize("kind", [None, "token", ""])
async def test_other_response_type_is_reported_to_the_app(browser: Browser, app: App, kind: str | None) -> None:
    status, _, location = await browser.get("/oauth/authorize", params=request_of(app, response_type=kind))
    assert status in {302, 303}
    assert parse_qs(urlsplit(location).query)["error"] == ["unsupported_response_type"]


@pytest.mark.parametrize(
    "change",
    [{"client_id": None}, {"client_id": "x"}, {"redirect_uri": None}, {"redirect_uri": "https://evil.example"}],
)
async def test_wrong_client_or_redirect_uri_is_never_redirected(
    browser: Browser, app: App, change: dict[str, str | None]
) -> None:
    status, page, location = await browser.get("/oauth/authorize", params=request_of(app, **change))
    assert (status, location) == (400, "")
    assert "decision" not in page
    _, page, _ = await browser.get("/oauth/authorize", params=request_of(app))
    token = re.search(r'csrf_token"?[^>]*value="([^"]+)"', page)
    assert token
    async with browser.session.post(
        "/oauth/authorize",
        params=request_of(app, **change),
        data={"decision": "allow", "csrf_token": token[1]},
        allow_redirects=False,
    ) as response:
        assert response.status == 400


async def test_redirect_uri_keeps_its_query_and_gets_no_state_unless_given(
    browser: Browser, signing_sandbox: Sandbox
) -> None:
    app = signing_sandbox.register_app("http://127.0.0.1:1/cb?tenant=7")
    _, _, location = await browser.submit("/oauth/authorize", {"decision": "allow"}, params=request_of(app, state=None))
    query = parse_qs(urlsplit(location).query)
    assert query.pop("code")
    assert query == {"tenant": ["7"]}


async def test_code_and_token_belong_to_the_chosen_user(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    eve = signing_sandbox.add_user("Eve", "eve@other.example", tenant="other")
    code = signing_sandbox.authorize(app, user=eve)
    token = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app, code=code))
    me = await call.ok("GET", f"{API}/me", headers={"Authorization": f"Bearer {token['access_token']}"})
    assert (me["email"], me["tenant"]) == ("eve@other.example", "other")
    with pytest.raises(KeyError, match="nope"):
        signing_sandbox.accounts.user("nope")
