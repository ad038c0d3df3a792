"""The authorize URL, its state and PKCE, and the callback."""

from __future__ import annotations

import traceback
from typing import Any
from urllib.parse import parse_qs, parse_qsl, quote, urlencode, urlsplit

import pytest

from signing_async import (
    Assumptions,
    AuthError,
    InvalidRequest,
    MemoryTokenStore,
    SigningError,
    StateMismatch,
    Token,
)
from signing_async.sandbox import Sandbox
from tests.auth.oauth_servers import (
    BASE,
    REDIRECT,
    Answer,
    Scripted,
    drops,
    grants,
    oauth_for,
    raw,
    sandbox_oauth,
    says,
)


def test_authorize_url_has_all_parameters_encoded() -> None:
    redirect = "https://app.example.com/call back?a=1&b=å"
    request = oauth_for(BASE, client_id="app &1/ö", redirect_uri=redirect).authorization_request(pkce=False)
    parts = urlsplit(request.url)
    assert (parts.scheme, parts.netloc, parts.path, parts.fragment) == (
        "https",
        "tenant.example.com",
        "/oauth/authorize",
        "",
    )
    assert parts.query.isascii()
    assert " " not in parts.query
    assert parse_qs(parts.query, strict_parsing=True) == {
        "client_id": ["app &1/ö"],
        "redirect_uri": [redirect],
        "response_type": ["code"],
        "state": [request.state],
    }


def test_repr_of_authorization_request_hides_the_state() -> None:
    request = oauth_for(BASE, assumptions=Assumptions(pkce=False)).authorization_request()
    assert request.state not in repr(request)
    assert repr(request) == (
        f"AuthorizationRequest(url='{BASE}/oauth/authorize?client_id=app-1&redirect_uri={quote(REDIRECT, safe='')}"
        "&response_type=code&state=...')"
    )
    assert repr(oauth_for(BASE)) == f"OAuth('{BASE}', client_id='app-1')"


async def test_pkce_code_works_only_with_its_verifier_which_no_text_shows(sandbox: Sandbox) -> None:
    oauth, _ = sandbox_oauth(sandbox)
    (app,) = sandbox.apps
    request = oauth.authorization_request()
    verifier = request.code_verifier
    assert verifier is not None
    assert verifier not in request.url + repr(request)
    asked = dict(parse_qsl(urlsplit(request.url).query))
    assert asked["code_challenge_method"] == "S256"
    code = sandbox.accounts.authorize(app, challenge=asked["code_challenge"])
    async with oauth:
        for wrong in (None, f"{verifier}-not"):
            with pytest.raises(AuthError, match="code_verifier") as caught:
                await oauth.exchange(code, code_verifier=wrong)
            assert verifier not in "".join(traceback.format_exception(caught.value))
        assert (await oauth.exchange(code, code_verifier=verifier)).access_token


async def test_object_that_made_the_request_remembers_its_verifier(sandbox: Sandbox) -> None:
    """Another process must be given it."""
    oauth, _ = sandbox_oauth(sandbox)
    (app,) = sandbox.apps
    first = oauth.authorization_request()
    requests = [oauth.authorization_request() for _ in range(999)]
    for request in (first, requests[-1]):
        asked = dict(parse_qsl(urlsplit(request.url).query))
        code = sandbox.accounts.authorize(app, challenge=asked["code_challenge"])
        callback = f"{app.redirect_uri}?{urlencode({'code': code, 'state': request.state})}"
        assert (await oauth.exchange(callback, request.state)).access_token
    oauth.authorization_request()
    code = sandbox.accounts.authorize(app, challenge=dict(parse_qsl(urlsplit(first.url).query))["code_challenge"])
    with pytest.raises(AuthError, match="code_verifier"):
        await oauth.exchange(f"{app.redirect_uri}?code={code}&state={first.state}", first.state)
    await oauth.aclose()


@pytest.mark.parametrize(
    "query",
    [
        "code=c",
        "code=c&state=",
        "code=c&state=other",
        "code=c&state=state&state=state",
        "code=c&state=%ed%a0%80",
        "",
        "error=access_denied",
        "error=access_denied&state=other",
    ],
)
@pytest.mark.parametrize("form", ["https://app.example.com/callback?{}", "?{}"])
async def test_wrong_state_is_state_mismatch_and_nothing_is_sent(query: str, form: str) -> None:
    async with Scripted(grants()) as server, oauth_for(server.base_url) as oauth:
        with pytest.raises(StateMismatch, match="may be forged") as caught:
            await oauth.exchange(form.format(query), state="state")
        assert not server.requests
        assert not caught.value.fatal


@pytest.mark.parametrize(
    ("answer", "transient"),
    [
        (says({"error": "invalid_grant"}, 400), False),
        (raw(503), True),
        (drops, True),
        (says({"hello": "world"}), False),
    ],
)
async def test_failed_exchange_does_not_concern_calls_with_the_current_token(answer: Answer, transient: bool) -> None:
    store = MemoryTokenStore(Token("valid", "refresh"))
    async with Scripted(answer) as server, oauth_for(server.base_url, store=store) as oauth:
        with pytest.raises(SigningError) as caught:
            await oauth.exchange("code")
        assert (caught.value.transient, caught.value.client_wide, caught.value.fatal) == (transient, False, False)
        assert await oauth.access_token() == "valid"


STATE = "the-state"


MISSING = "exchange: the callback URL or code is missing"
NO_STATE = "exchange: state is missing: pass the state of the authorization request"
SPACE = "exchange: not a callback URL or code: it contains whitespace or control characters"


@pytest.mark.parametrize(
    ("callback", "state", "kind", "words"),
    [
        (None, STATE, InvalidRequest, MISSING),
        (b"code", STATE, InvalidRequest, MISSING),
        (" ", STATE, InvalidRequest, MISSING),
        ("https://a/?code=c d&state=the-state", STATE, InvalidRequest, SPACE),
        ("https://a/?code=c&state=the-state", None, InvalidRequest, NO_STATE),
        ("https://a/?code=c&code=d&state=the-state", STATE, AuthError, "the callback has more than one code"),
        ("https://a/?state=the-state&code=", STATE, AuthError, "the callback has no code"),
        (
            "https://a/?state=the-state&error=no&error_description=not&error_description=now&code=c0de",
            STATE,
            AuthError,
            "authorization was refused: not now (code no)",
        ),
        ("https://a/?state=the-state&error=no", STATE, AuthError, "authorization was refused: no (code no)"),
        (
            f"https://a/?state=the-state&error={'e' * 200}&error_description={'d' * 900}",
            STATE,
            AuthError,
            f"authorization was refused: {'d' * 500} (code {'e' * 200})",
        ),
    ],
    ids=range(10),
)
async def test_callback_errors_show_nothing_but_what_the_service_says(
    callback: Any, state: Any, kind: type[SigningError], words: str
) -> None:
    store = MemoryTokenStore(Token("valid", "refresh"))
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=store) as oauth:
        with pytest.raises(kind) as caught:
            await oauth.exchange(callback, state)
        assert (type(caught.value), str(caught.value), caught.value.fatal) == (kind, words, False)
        assert await oauth.access_token() == "valid"
        assert not server.requests
