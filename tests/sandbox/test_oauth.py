"""OAuth 2.0 (section 5 of the specification): codes, tokens, rotation and replay, and the pages in front of it."""

from __future__ import annotations

import html
import re
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import aiohttp
import pytest

from signing_async.sandbox import Profile, Refused, Sandbox
from signing_async.sandbox.records import App
from tests.sandbox.serving import API, Caller

CALLBACK = "http://127.0.0.1:1/callback"
TOKEN = "/api/oauth/token"


@pytest.fixture
def app(signing_sandbox: Sandbox) -> App:
    """A registered application."""
    return signing_sandbox.register_app(redirect_uri=CALLBACK, name="My app")


def exchange(sandbox: Sandbox, app: App, **changes: str | None) -> dict[str, str]:
    """The parameters of a right code exchange, with these changes (None: left out)."""
    parameters = {
        "grant_type": "authorization_code",
        "client_id": app.client_id,
        "client_secret": app.client_secret,
        "redirect_uri": app.redirect_uri,
        "code": sandbox.authorize(app),
    } | changes
    return {name: value for name, value in parameters.items() if value is not None}


def refresh(app: App, token: str, **changes: str | None) -> dict[str, str]:
    """The parameters of a refresh, with these changes (None: left out)."""
    parameters = {
        "grant_type": "refresh_token",
        "client_id": app.client_id,
        "client_secret": app.client_secret,
        "refresh_token": token,
    } | changes
    return {name: value for name, value in parameters.items() if value is not None}


async def works(call: Caller, access_token: str) -> bool:
    """Whether the API takes this access token."""
    headers = {"Authorization": f"Bearer {access_token}"}
    async with call.session.get(f"{API}/me", headers=headers) as response:
        return response.status == 200


# the code exchange


@pytest.mark.parametrize("way", ["data", "json"])
async def test_token_response(call: Caller, signing_sandbox: Sandbox, app: App, way: str) -> None:
    """A code becomes access_token, token_type Bearer, expires_in and refresh_token, asked for as form or as JSON."""
    options: dict[str, Any] = {way: exchange(signing_sandbox, app)}
    status, token = await call("POST", TOKEN, **options)
    assert status == 200
    assert (token["token_type"], token["expires_in"]) == ("Bearer", 3600)
    assert token["refresh_token"]
    assert call.headers["cache-control"] == "no-store"
    assert await works(call, token["access_token"])


@pytest.mark.parametrize("name", ["grant_type", "client_id", "client_secret", "redirect_uri", "code"])
@pytest.mark.parametrize("value", [None, ""])
async def test_every_parameter_is_required(
    call: Caller, signing_sandbox: Sandbox, app: App, name: str, value: str | None
) -> None:
    """Each parameter of the exchange must be there."""
    status, body = await call("POST", TOKEN, data=exchange(signing_sandbox, app, **{name: value}))
    assert (status, body["error"]) == (400, "invalid_request")
    assert name in body["error_description"]


@pytest.mark.parametrize("value", [5, [], {}, True])
async def test_parameters_are_strings(call: Caller, signing_sandbox: Sandbox, app: App, value: object) -> None:
    """In JSON a parameter of another type is refused."""
    body: dict[str, object] = {**exchange(signing_sandbox, app), "code": value}
    status, answer = await call("POST", TOKEN, json=body)
    assert (status, answer["error"]) == (400, "invalid_request")


@pytest.mark.parametrize("kind", ["password", "client_credentials", "AUTHORIZATION_CODE", "ö"])
async def test_other_grant_types(call: Caller, signing_sandbox: Sandbox, app: App, kind: str) -> None:
    """grant_type must be authorization_code or refresh_token."""
    status, body = await call("POST", TOKEN, data=exchange(signing_sandbox, app, grant_type=kind))
    assert (status, body["error"]) == (400, "unsupported_grant_type")


@pytest.mark.parametrize("name", ["client_id", "client_secret"])
async def test_wrong_client(call: Caller, signing_sandbox: Sandbox, app: App, name: str) -> None:
    """A wrong client_id or client_secret is a 401, and does not use up the code."""
    right = exchange(signing_sandbox, app)
    status, body = await call("POST", TOKEN, data=right | {name: "wrong"})
    assert (status, body["error"]) == (401, "invalid_client")
    assert (await call("POST", TOKEN, data=right))[0] == 200


async def test_a_code_works_once(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    """A code used again is refused, and ends what it gave before."""
    parameters = exchange(signing_sandbox, app)
    token = await call.ok("POST", TOKEN, data=parameters)
    status, body = await call("POST", TOKEN, data=parameters)
    assert (status, body["error"]) == (400, "invalid_grant")
    assert not await works(call, token["access_token"])


async def test_a_code_works_only_with_its_redirect_uri(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    """The redirect_uri of the exchange must be the registered one, to the letter."""
    for uri in (CALLBACK + "/", CALLBACK + "?x=1", "https://evil.example/callback", CALLBACK.upper()):
        status, body = await call("POST", TOKEN, data=exchange(signing_sandbox, app, redirect_uri=uri))
        assert (status, body["error"]) == (400, "invalid_grant")


async def test_a_code_works_only_for_its_client(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    """Another application cannot use a code, also with the same redirect URI."""
    other = signing_sandbox.register_app(redirect_uri=CALLBACK, name="Other")
    code = signing_sandbox.authorize(app)
    status, body = await call("POST", TOKEN, data=exchange(signing_sandbox, other, code=code))
    assert (status, body["error"]) == (400, "invalid_grant")


async def test_a_code_expires(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    """A code is good until its time is over, by the sandbox's clock."""
    late, soon = exchange(signing_sandbox, app), exchange(signing_sandbox, app)
    signing_sandbox.clock.advance(seconds=590)
    assert (await call("POST", TOKEN, data=soon))[0] == 200
    signing_sandbox.clock.advance(seconds=11)
    status, body = await call("POST", TOKEN, data=late)
    assert (status, body["error"]) == (400, "invalid_grant")


VERIFIER = "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk"
CHALLENGE = "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM"  # both are RFC 7636's example


@pytest.mark.parametrize(
    ("verifier", "expected"),
    [(VERIFIER, 200), (None, 400), ("", 400), (VERIFIER + "x", 400), (CHALLENGE, 400), (5, 400)],
)
async def test_a_code_with_a_challenge_needs_its_verifier(
    call: Caller, signing_sandbox: Sandbox, app: App, verifier: Any, expected: int
) -> None:
    """PKCE (RFC 7636, S256); a wrong verifier does not use up the code."""
    right = exchange(signing_sandbox, app, code=signing_sandbox.accounts.authorize(app, challenge=CHALLENGE))
    body: dict[str, Any] = right if verifier is None else {**right, "code_verifier": verifier}
    status, answer = await call("POST", TOKEN, json=body)
    assert (status, answer.get("error")) == (expected, None if expected == 200 else "invalid_grant")
    if expected != 200:
        assert (await call("POST", TOKEN, data={**right, "code_verifier": VERIFIER}))[0] == 200


async def test_a_verifier_without_a_challenge_is_ignored(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    """As by a service that does not know PKCE."""
    assert (await call("POST", TOKEN, data=exchange(signing_sandbox, app, code_verifier="x")))[0] == 200


async def test_malformed_token_requests(call: Caller) -> None:
    """Bodies that are none are clean errors in OAuth's shape."""
    for kind, data, expected in (
        ("application/json", b"{", 400),
        ("application/json", b"[]", 400),
        ("application/x-www-form-urlencoded", b"%ff=%ff", 400),
        ("application/x-www-form-urlencoded", b"\xff=1", 400),
        ("application/x-www-form-urlencoded", b"a=1&" * 200, 400),
        ("application/x-www-form-urlencoded", b"", 400),
        ("text/plain", b"x", 415),
    ):
        status, body = await call("POST", TOKEN, data=data, headers={"Content-Type": kind})
        assert status == expected
        assert body["error"]
    assert (await call("GET", TOKEN))[0] == 405


# refresh


async def test_a_refresh_rotates(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    """A refresh gives a new access token and a new refresh token; the access token of before stays good."""
    first = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app))
    second = await call.ok("POST", TOKEN, data=refresh(app, first["refresh_token"]))
    assert len({first["access_token"], second["access_token"], first["refresh_token"], second["refresh_token"]}) == 4
    assert await works(call, first["access_token"])
    assert await works(call, second["access_token"])


async def test_replaying_a_refresh_token_ends_the_family(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    """An old refresh token, used again, ends all that came from the same consent, and nothing else."""
    first = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app))
    other = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app))
    second = await call.ok("POST", TOKEN, data=refresh(app, first["refresh_token"]))
    status, body = await call("POST", TOKEN, data=refresh(app, first["refresh_token"]))
    assert (status, body["error"]) == (400, "invalid_grant")
    assert (await call("POST", TOKEN, data=refresh(app, second["refresh_token"])))[0] == 400
    assert not await works(call, second["access_token"])
    assert await works(call, other["access_token"])


@pytest.mark.signing_sandbox(profile=Profile(revoke_family_on_replay=False))
async def test_replay_without_revoking(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    """Switched off, an old refresh token is refused and harms nobody."""
    first = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app))
    second = await call.ok("POST", TOKEN, data=refresh(app, first["refresh_token"]))
    assert (await call("POST", TOKEN, data=refresh(app, first["refresh_token"])))[0] == 400
    assert (await call("POST", TOKEN, data=refresh(app, second["refresh_token"])))[0] == 200


@pytest.mark.signing_sandbox(profile=Profile(replay_grace=10))
async def test_replay_within_the_grace(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    """Within the grace an old refresh token works again; after it, counted from its first use, it ends the family."""
    first = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app))
    for _ in range(3):
        second = await call.ok("POST", TOKEN, data=refresh(app, first["refresh_token"]))
        signing_sandbox.clock.advance(seconds=3)
    signing_sandbox.clock.advance(seconds=2)
    assert (await call("POST", TOKEN, data=refresh(app, first["refresh_token"])))[0] == 400
    assert not await works(call, second["access_token"])


@pytest.mark.signing_sandbox(profile=Profile(rotate_refresh_tokens=False, refresh_revokes_access_tokens=True))
async def test_without_rotation(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    """With another profile the refresh token stays, and each refresh ends the access token of before."""
    first = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app))
    second = await call.ok("POST", TOKEN, data=refresh(app, first["refresh_token"]))
    third = await call.ok("POST", TOKEN, data=refresh(app, first["refresh_token"]))
    assert "refresh_token" not in second
    assert not await works(call, first["access_token"])
    assert not await works(call, second["access_token"])
    assert await works(call, third["access_token"])


@pytest.mark.signing_sandbox(profile=Profile(issue_refresh_tokens=False))
async def test_without_refresh_tokens(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    """With another profile there are no refresh tokens."""
    token = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app))
    assert "refresh_token" not in token


async def test_a_refresh_token_expires(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    """A refresh token is good for its 30 days."""
    token = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app))
    signing_sandbox.clock.advance(days=30)
    status, body = await call("POST", TOKEN, data=refresh(app, token["refresh_token"]))
    assert (status, body["error"]) == (400, "invalid_grant")


@pytest.mark.parametrize("name", ["client_id", "client_secret", "refresh_token"])
async def test_refresh_parameters(call: Caller, signing_sandbox: Sandbox, app: App, name: str) -> None:
    """Each parameter of a refresh must be there and right; a wrong one harms nothing."""
    token = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app))
    assert (await call("POST", TOKEN, data=refresh(app, token["refresh_token"], **{name: None})))[0] == 400
    assert (await call("POST", TOKEN, data=refresh(app, token["refresh_token"], **{name: "wrong"})))[0] in {400, 401}
    assert (await call("POST", TOKEN, data=refresh(app, token["access_token"])))[0] == 400
    assert (await call("POST", TOKEN, data=refresh(app, token["refresh_token"])))[0] == 200


async def test_an_access_token_expires(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    """expires_in is kept to, by the sandbox's clock; a refresh token is no access token."""
    token = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app))
    signing_sandbox.clock.advance(seconds=3590)
    assert await works(call, token["access_token"])
    assert not await works(call, token["refresh_token"])
    signing_sandbox.clock.advance(seconds=11)
    assert not await works(call, token["access_token"])


async def test_secrets_are_kept_as_hashes(signing_sandbox: Sandbox, app: App, call: Caller) -> None:
    """Nothing that was shown once stands in the database: no secret, no code, no token."""
    parameters = exchange(signing_sandbox, app)
    token = await call.ok("POST", TOKEN, data=parameters)
    dump = signing_sandbox.snapshot().database
    for secret in (parameters["client_secret"], parameters["code"], token["access_token"], token["refresh_token"]):
        assert secret.encode() not in dump
    assert signing_sandbox.apps[0].client_secret is None


# registering an application


@pytest.mark.parametrize(
    "uri",
    [
        "https://app.example/cb",
        "http://localhost:8000/cb",
        "http://127.0.0.1/cb?x=1",
        "http://[::1]:9/",
        "http://a.localhost/",
    ],
)
async def test_redirect_uris_allowed(signing_sandbox: Sandbox, uri: str) -> None:
    """https anywhere, http on this machine."""
    assert signing_sandbox.register_app(uri).redirect_uri == uri


@pytest.mark.parametrize(
    "uri",
    ["", "nope", "http://app.example/cb", "javascript:alert(1)", "https://", "https://a.example/#x", "https://a b/",
     "https://a.example:99999/", "https://[::1", "https://ö.example/"],
)  # fmt: skip
async def test_redirect_uris_refused(signing_sandbox: Sandbox, uri: str) -> None:
    """Anything else is refused with a reason."""
    with pytest.raises(Refused) as caught:
        signing_sandbox.register_app(uri, " ")
    assert set(caught.value.errors) == {"redirect_uri", "name"}
    assert signing_sandbox.apps == []


# the pages


class Browser:
    """A browser that fills in forms."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def get(self, path: str, **options: Any) -> tuple[int, str, str]:
        """Status, page, and where it redirects to."""
        async with self.session.get(path, allow_redirects=False, **options) as response:
            return response.status, await response.text(), response.headers.get("Location", "")

    async def submit(self, path: str, fields: dict[str, str], headers: Any = None, **get: Any) -> tuple[int, str, str]:
        """Open the page and send its form."""
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
    """The query of a right authorization request, with these changes (None: left out)."""
    query = {"client_id": app.client_id, "redirect_uri": app.redirect_uri, "response_type": "code", "state": "s&=ö"}
    return {name: value for name, value in (query | changes).items() if value is not None}


async def test_my_apps(browser: Browser, signing_sandbox: Sandbox) -> None:
    """/developer/my-apps: an app is registered; its secret is displayed once."""
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


async def test_my_apps_refuses(browser: Browser, signing_sandbox: Sandbox) -> None:
    """A wrong redirect URI is told on the page."""
    fields = {"name": "Shop", "redirect_uri": "http://evil.example/<script>"}
    status, page, _ = await browser.submit("/developer/my-apps", fields)
    assert status == 400
    assert "<script>" not in page
    assert signing_sandbox.apps == []


@pytest.mark.parametrize("fields", [{"csrf_token": "wrong"}, {"csrf_token": ""}, {"csrf_token": "ö"}])
async def test_forms_from_elsewhere(browser: Browser, signing_sandbox: Sandbox, fields: dict[str, str]) -> None:
    """A form without this sandbox's token is refused."""
    status, _, _ = await browser.submit("/developer/my-apps", {"name": "A", "redirect_uri": CALLBACK, **fields})
    assert status == 403
    assert signing_sandbox.apps == []


async def test_forms_without_the_cookie(browser: Browser, signing_sandbox: Sandbox) -> None:
    """The token is worth nothing in another browser."""
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
async def test_other_sites(browser: Browser, signing_sandbox: Sandbox, headers: dict[str, str], expected: int) -> None:
    """A foreign origin, or a foreign name for this address, is refused."""
    fields = {"name": "A", "redirect_uri": CALLBACK}
    status, _, _ = await browser.submit("/developer/my-apps", fields, headers=headers)
    assert status == expected
    assert signing_sandbox.apps == []


async def test_consent(browser: Browser, signing_sandbox: Sandbox, app: App, call: Caller) -> None:
    """/oauth/authorize: the user agrees, and the browser goes to the redirect URI with a code and the state."""
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


async def test_consent_keeps_the_challenge(browser: Browser, signing_sandbox: Sandbox, app: App) -> None:
    """The page's form carries it, and the code is bound to it."""
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
async def test_consent_with_a_challenge_that_is_none(browser: Browser, app: App, change: dict[str, str | None]) -> None:
    """It is the application's mistake, and the application is told so."""
    status, _, location = await browser.get("/oauth/authorize", params=request_of(app, **{**S256, **change}))
    assert (status, parse_qs(urlsplit(location).query)["error"]) == (302, ["invalid_request"])


async def test_a_service_that_does_not_know_pkce() -> None:
    """It ignores the parameters, as OAuth wants it."""
    async with Sandbox(profile=Profile(pkce=False)) as sandbox:
        assert sandbox.accounts.code_challenge(S256) is None


async def test_denial(browser: Browser, app: App) -> None:
    """A user who does not agree is sent back with access_denied."""
    _, _, location = await browser.submit("/oauth/authorize", {"decision": "deny"}, params=request_of(app))
    assert parse_qs(urlsplit(location).query) == {"error": ["access_denied"], "state": ["s&=ö"]}


@pytest.mark.parametrize("kind", [None, "token", ""])
async def test_response_type_must_be_code(browser: Browser, app: App, kind: str | None) -> None:
    """Another response_type is reported to the application."""
    status, _, location = await browser.get("/oauth/authorize", params=request_of(app, response_type=kind))
    assert status in {302, 303}
    assert parse_qs(urlsplit(location).query)["error"] == ["unsupported_response_type"]


@pytest.mark.parametrize(
    "change",
    [{"client_id": None}, {"client_id": "x"}, {"redirect_uri": None}, {"redirect_uri": "https://evil.example"}],
)
async def test_untrusted_requests_are_not_redirected(browser: Browser, app: App, change: dict[str, str | None]) -> None:
    """With a wrong client or redirect URI nobody is redirected anywhere."""
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


async def test_a_redirect_uri_with_a_query(browser: Browser, signing_sandbox: Sandbox) -> None:
    """A redirect URI's own query stays; without a state none is added."""
    app = signing_sandbox.register_app("http://127.0.0.1:1/cb?tenant=7")
    _, _, location = await browser.submit("/oauth/authorize", {"decision": "allow"}, params=request_of(app, state=None))
    query = parse_qs(urlsplit(location).query)
    assert query.pop("code")
    assert query == {"tenant": ["7"]}


async def test_users_and_tenants(call: Caller, signing_sandbox: Sandbox, app: App) -> None:
    """A code may be another user's; the token then is."""
    eve = signing_sandbox.add_user("Eve", "eve@other.example", tenant="other")
    code = signing_sandbox.authorize(app, user=eve)
    token = await call.ok("POST", TOKEN, data=exchange(signing_sandbox, app, code=code))
    me = await call.ok("GET", f"{API}/me", headers={"Authorization": f"Bearer {token['access_token']}"})
    assert (me["email"], me["tenant"]) == ("eve@other.example", "other")
    with pytest.raises(KeyError, match="nope"):
        signing_sandbox.accounts.user("nope")
