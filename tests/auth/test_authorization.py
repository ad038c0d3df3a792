"""The authorize URL, its state and PKCE, and the callback."""

from __future__ import annotations

import traceback
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import pytest

from signing_async import (
    Assumptions,
    AuthError,
    AuthorizationRequest,
    InvalidRequest,
    SigningError,
    StateMismatch,
    Token,
)
from signing_async.sandbox import Sandbox
from tests.auth.oauth_servers import (
    BASE,
    REDIRECT,
    ScriptedResponse,
    drops,
    grants,
    oauth_for,
    oauth_on,
    raw,
    sandbox_oauth,
    says,
)


def test_authorize_url_has_all_parameters_encoded_and_its_repr_hides_the_state() -> None:
    redirect = "https://app.example.com/call back?a=1&b=å"
    request = oauth_for(BASE, client_id="app &1/ö", redirect_uri=redirect).authorization_request(pkce=False)
    place, _, query = request.url.partition("?")
    assert place == f"{BASE}/oauth/authorize"
    assert query.isascii()
    assert " " not in query
    assert parse_qs(query, strict_parsing=True) == {
        "client_id": ["app &1/ö"],
        "redirect_uri": [redirect],
        "response_type": ["code"],
        "state": [request.state],
    }
    assert repr(request) == f"AuthorizationRequest(url='{request.url.replace(request.state, '...')}')"
    assert repr(oauth_for(BASE)) == f"OAuth('{BASE}', client_id='app-1')"
    assert "challenge" not in oauth_for(BASE, assumptions=Assumptions(pkce=False)).authorization_request().url


def code_for(sandbox: Sandbox, request: AuthorizationRequest) -> str:
    """Log the user in, and return the code."""
    (app,) = sandbox.apps
    asked = dict(parse_qsl(urlsplit(request.url).query))
    assert asked["code_challenge_method"] == "S256"
    return sandbox.accounts.authorize(app, challenge=asked["code_challenge"])


async def test_pkce_code_works_only_with_its_verifier_which_no_text_shows(sandbox: Sandbox) -> None:
    oauth, _ = sandbox_oauth(sandbox)
    request = oauth.authorization_request()
    verifier = request.code_verifier
    assert verifier is not None
    assert verifier not in request.url + repr(request)
    code = code_for(sandbox, request)
    async with oauth:
        for wrong in (None, f"{verifier}-not"):
            with pytest.raises(AuthError, match="code_verifier") as caught:
                await oauth.exchange(code, code_verifier=wrong)
            assert verifier not in "".join(traceback.format_exception(caught.value))
        assert (await oauth.exchange(code, code_verifier=verifier)).access_token


async def test_object_that_made_the_request_remembers_its_verifier(sandbox: Sandbox) -> None:
    """It remembers those of the last thousand requests. Another process must be given the verifier."""
    oauth, _ = sandbox_oauth(sandbox)
    first, *requests = [oauth.authorization_request() for _ in range(1000)]

    async def exchange(request: AuthorizationRequest) -> Token:
        query = urlencode({"code": code_for(sandbox, request), "state": request.state})
        return await oauth.exchange(f"{REDIRECT}?{query}", request.state)

    async with oauth:
        for request in (first, requests[-1]):
            assert (await exchange(request)).access_token
        oauth.authorization_request()
        with pytest.raises(AuthError, match="code_verifier"):
            await exchange(first)


@pytest.mark.parametrize(
    ("response", "transient"),
    [
        (says({"error": "invalid_grant"}, 400), False),
        (raw(503), True),
        (drops, True),
        (says({"hello": "world"}), False),
    ],
)
async def test_failed_exchange_does_not_concern_calls_with_the_current_token(
    response: ScriptedResponse, transient: bool
) -> None:
    async with oauth_on(response, token=Token("valid", "refresh")) as (oauth, _):
        with pytest.raises(SigningError) as caught:
            await oauth.exchange("code")
        assert (caught.value.transient, caught.value.client_wide, caught.value.fatal) == (transient, False, False)
        assert await oauth.access_token() == "valid"


STATE = "the-state"
CALLBACK = f"https://a/?state={STATE}&"
MISSING = "exchange: the callback URL or code is missing"
NO_STATE = "exchange: state is missing: pass the state of the authorization request"
SPACE = "exchange: not a callback URL or code: it contains whitespace or control characters"
FORGED = "the callback's state does not match the authorization request: it may be forged"


@pytest.mark.parametrize(
    ("callback", "state", "kind", "words"),
    [
        (b"code", STATE, InvalidRequest, MISSING),
        (" ", STATE, InvalidRequest, MISSING),
        (f"{CALLBACK}code=c d", STATE, InvalidRequest, SPACE),
        (f"{CALLBACK}code=c", None, InvalidRequest, NO_STATE),
        *(
            (query, STATE, StateMismatch, FORGED)
            for query in (
                "?code=c",
                "https://a/?code=c&state=other",
                f"{CALLBACK}code=c&state={STATE}",
                "?code=c&state=%ed%a0%80",
                "https://a/?error=access_denied&state=other",
            )
        ),
        (f"{CALLBACK}code=c&code=d", STATE, AuthError, "the callback has more than one code"),
        (f"{CALLBACK}code=", STATE, AuthError, "the callback has no code"),
        (
            f"{CALLBACK}error=no&error_description=not&error_description=now&code=c0de",
            STATE,
            AuthError,
            "authorization was refused: not now (code no)",
        ),
        (f"{CALLBACK}error=no", STATE, AuthError, "authorization was refused: no (code no)"),
        (
            f"{CALLBACK}error={'e' * 200}&error_description={'d' * 900}",
            STATE,
            AuthError,
            f"authorization was refused: {'d' * 500} (code {'e' * 200})",
        ),
    ],
    ids=range(14),
)
async def test_callback_errors_show_nothing_but_what_the_service_says(
    callback: Any, state: Any, kind: type[SigningError], words: str
) -> None:
    async with oauth_on(grants(), token=Token("valid", "refresh")) as (oauth, server):
        with pytest.raises(kind) as caught:
            await oauth.exchange(callback, state)
        assert (type(caught.value), str(caught.value), caught.value.fatal) == (kind, words, False)
        assert await oauth.access_token() == "valid"
        assert not server.requests
