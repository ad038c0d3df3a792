"""OAuth: the authorize URL, the callback, the exchange, one refresh for everybody, what a token request survives."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hmac
import http.server
import json
import logging
import math
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, quote, urlencode, urlsplit

import aiohttp
import pytest
from aiohttp import web

from signing_async import (
    Assumptions,
    AuthError,
    ClientClosed,
    ConfigurationError,
    FileTokenStore,
    InvalidRequest,
    MemoryTokenStore,
    OAuth,
    RefreshRejected,
    RequestTimeout,
    RetryPolicy,
    SigningClient,
    SigningError,
    StateMismatch,
    Token,
    TransportError,
    Unauthorized,
)
from signing_async.errors import TokenSuperseded
from signing_async.sandbox import Sandbox
from signing_async.sandbox.profile import Profile
from tests.auth.oauth_servers import (
    QUICK,
    REDIRECT,
    SECRET,
    Received,
    Scripted,
    WatchedStore,
    drops,
    grants,
    hangs,
    oauth_for,
    raw,
    says,
)

ROOT = Path(__file__).parents[2]
BASE = "https://tenant.example.com"


def in_seconds(seconds: float) -> datetime:
    """A moment that far from now."""
    return datetime.now(UTC) + timedelta(seconds=seconds)


def expired(name: str = "old") -> Token:
    """A token past its time, with the means to renew it."""
    return Token(f"access-{name}", f"refresh-{name}", in_seconds(-1))


def sandbox_oauth(sandbox: Sandbox, **settings: Any) -> tuple[OAuth, Callable[[], str]]:
    """An OAuth of a newly registered application, and a maker of codes."""
    app = sandbox.register_app(REDIRECT)
    assert app.client_secret is not None
    oauth = oauth_for(sandbox.base_url, client_id=app.client_id, client_secret=app.client_secret, **settings)
    return oauth, lambda: sandbox.authorize(app)


@pytest.fixture
def unused_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# Settings


@pytest.mark.parametrize("name", ["client_id", "client_secret", "redirect_uri"])
def test_what_cannot_be_sent_is_refused(name: str) -> None:
    """An environment variable that is not UTF-8 has halves of characters; it is not shown."""
    with pytest.raises(ConfigurationError, match=f"^OAuth: {name} is no text that can be sent") as caught:
        oauth_for(BASE, **{name: "https://x/\udcff-secret"})
    assert "secret" not in str(caught.value).removeprefix(f"OAuth: {name}")


@pytest.mark.parametrize("name", ["client_id", "client_secret", "redirect_uri"])
@pytest.mark.parametrize("value", ["", None, 5])
def test_what_is_missing_is_named(name: str, value: Any) -> None:
    """Each of the three is required, and its error names it."""
    with pytest.raises(ConfigurationError, match=f"^OAuth: {name} is missing$"):
        oauth_for(BASE, **{name: value})


@pytest.mark.parametrize(
    "settings", [{"token_format": "xml"}, {"timeout": 0}, {"timeout": math.inf}, {"timeout": "5"}, {"timeout": True}]
)
def test_settings_that_cannot_work(settings: dict[str, Any]) -> None:
    """The error names the setting and the value."""
    [(name, value)] = settings.items()
    with pytest.raises(ConfigurationError, match=rf"^OAuth: {name} must be .*, not {value!r}$"):
        oauth_for(BASE, **settings)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("store", "token.json", "TokenStore, not str"),
        ("store", MemoryTokenStore, "TokenStore, not type"),
        ("session", 5, "an aiohttp.ClientSession, not int"),
        ("retry", None, "RetryPolicy, not NoneType"),
        ("assumptions", {}, "Assumptions, not dict"),
    ],
)
def test_settings_of_another_kind(name: str, value: Any, words: str) -> None:
    """What is no store, such as the path of one, is refused at once and not at the first token."""
    with pytest.raises(ConfigurationError, match=f"^OAuth: {name} must be {words}$"):
        oauth_for(BASE, **{name: value})


def test_plain_http_is_for_loopback_alone() -> None:
    """The client secret travels to https, or stays on this machine."""
    with pytest.raises(ConfigurationError, match="must be https"):
        oauth_for("http://tenant.example.com")


# The authorize URL and the callback


def test_authorize_url_carries_all_parameters_encoded() -> None:
    """The four documented parameters are there, once each, and come out of the query as they were put in."""
    redirect = "https://app.example.com/call back?a=1&b=å"
    request = oauth_for(BASE, client_id="app &1/ö", redirect_uri=redirect).authorization_request()
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


def test_each_state_is_new_and_long() -> None:
    """A thousand states are a thousand different ones of at least 256 bits."""
    oauth = oauth_for(BASE)
    states = {oauth.authorization_request().state for _ in range(1000)}
    assert len(states) == 1000
    assert min(map(len, states)) >= 43


def test_the_text_of_a_request_hides_the_state() -> None:
    """Neither the state nor the URL's copy of it is in the text of an authorization request."""
    request = oauth_for(BASE).authorization_request()
    assert request.state not in repr(request)
    assert repr(request) == (
        f"AuthorizationRequest(url='{BASE}/oauth/authorize?client_id=app-1&redirect_uri={quote(REDIRECT, safe='')}"
        "&response_type=code&state=...')"
    )
    assert repr(oauth_for(BASE)) == f"OAuth('{BASE}', client_id='app-1')"


async def test_a_code_that_was_asked_for_with_pkce(sandbox: Sandbox) -> None:
    """It is of use only with the verifier, which no text shows."""
    oauth, _ = sandbox_oauth(sandbox)
    (app,) = sandbox.apps
    request = oauth.authorization_request(pkce=True)
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
    assert oauth.authorization_request().code_verifier is None


@pytest.mark.parametrize(
    "query",
    [
        "code=c",
        "code=c&state=",
        "code=c&state=other",
        "code=c&state=STATE",
        "code=c&state=state-",
        "code=c&state=state&state=state",
        "code=c&state=other&state=state",
        "code=c&state=st%C3%A5te",
        "code=c&state=%ff%fe",
        "error=access_denied",
        "error=access_denied&state=other",
    ],
)
@pytest.mark.parametrize("form", ["https://app.example.com/callback?{}", "/callback?{}", "?{}"])
async def test_a_wrong_state_is_a_mismatch(query: str, form: str) -> None:
    """Missing, empty, other, partial, repeated: the callback is not used, and nothing is sent."""
    async with Scripted(grants()) as server, oauth_for(server.base_url) as oauth:
        with pytest.raises(StateMismatch, match="may be forged"):
            await oauth.exchange(form.format(query), state="state")
        assert not server.requests


async def test_the_state_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is hmac's, which does not tell by its time how much was right."""
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def watched(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    with pytest.raises(StateMismatch):
        await oauth_for(BASE).exchange(f"{REDIRECT}?code=c&state=returned", state="kept-å")
    assert compared == [(b"returned", "kept-å".encode())]


@pytest.mark.parametrize("state", [None, "", 5])
async def test_a_callback_url_needs_the_state_that_was_kept(state: Any) -> None:
    """Without the kept state a callback is not used: that would be no check at all."""
    with pytest.raises(InvalidRequest, match="state is missing"):
        await oauth_for(BASE).exchange(f"{REDIRECT}?code=c&state=", state=state)


async def test_a_callback_that_says_error() -> None:
    """The callback's error is an AuthError with its code and description, and nothing is sent."""
    query = urlencode(
        {"error": "access_denied", "error_description": "The user said no", "state": "st4te", "code": "c0de"}
    )
    async with Scripted(grants()) as server, oauth_for(server.base_url) as oauth:
        with pytest.raises(
            AuthError, match=r"authorization was refused: The user said no \(code access_denied\)"
        ) as it:
            await oauth.exchange(f"{REDIRECT}?{query}", state="st4te")
        assert (type(it.value), it.value.code) == (AuthError, "access_denied")
        with pytest.raises(AuthError, match=r"refused: x \(code x\)"):
            await oauth.exchange(f"{REDIRECT}?error=x&state=st4te", state="st4te")
        assert not server.requests


@pytest.mark.parametrize(
    ("callback", "kind", "words"),
    [
        (f"{REDIRECT}?state=s", AuthError, "carries no code"),
        (f"{REDIRECT}?state=s&code=", AuthError, "carries no code"),
        (f"{REDIRECT}?state=s&code=a&code=b", AuthError, "more than one code"),
        ("state=s&x=1", AuthError, "carries no code"),
        (REDIRECT, StateMismatch, "forged"),
        ("", InvalidRequest, "is missing"),
        ("  \n", InvalidRequest, "is missing"),
        (None, InvalidRequest, "is missing"),
        (b"code", InvalidRequest, "is missing"),
        ("two words", InvalidRequest, "white space"),
        ("a\nb", InvalidRequest, "white space"),
        ("https://[oops?code=a&state=s", InvalidRequest, "not a URL that can be read"),
        (f"{REDIRECT}?" + "a=1&" * 200, InvalidRequest, "not a URL that can be read"),
    ],
    ids=range(13),
)
async def test_garbage_callbacks(callback: Any, kind: type[SigningError], words: str) -> None:
    """What is no callback is told as what it is; nothing is sent."""
    async with Scripted(grants()) as server, oauth_for(server.base_url) as oauth:
        with pytest.raises(kind, match=words):
            await oauth.exchange(callback, state="s")
        assert not server.requests


# The exchange


@pytest.mark.parametrize("token_format", ["form", "json"])
async def test_the_code_is_exchanged(token_format: Any) -> None:
    """The documented parameters are posted as a form or as JSON, characters intact, and no Authorization goes along."""
    async with (
        Scripted(grants()) as server,
        oauth_for(server.base_url, token_format=token_format, client_secret="s&c=r/å t") as oauth,
    ):
        token = await oauth.exchange(f"{REDIRECT}?code={quote('c+ö &/=')}&state=s", state="s")
        [request] = server.requests
    assert (request.method, request.path) == ("POST", "/api/oauth/token")
    assert "Authorization" not in request.headers
    assert request.headers["Accept"] == "application/json"
    if token_format == "json":
        assert request.headers["Content-Type"] == "application/json"
        sent = json.loads(request.body)
    else:
        assert request.headers["Content-Type"] == "application/x-www-form-urlencoded"
        sent = {name: values[0] for name, values in parse_qs(request.body.decode(), strict_parsing=True).items()}
    assert sent == {
        "grant_type": "authorization_code",
        "client_id": "app-1",
        "client_secret": "s&c=r/å t",
        "redirect_uri": REDIRECT,
        "code": "c+ö &/=",
    }
    assert token.access_token == "access-new"
    assert token.refresh_token == "refresh-new"


@pytest.mark.parametrize(
    "callback", ["the-code", " the-code\n", f"{REDIRECT}?code=the-code&state=s", "code=the-code&state=s"]
)
async def test_a_callback_or_the_bare_code(callback: str) -> None:
    """The callback's URL, its query, and the bare code all lead to the same request."""
    async with Scripted(grants()) as server, oauth_for(server.base_url) as oauth:
        await oauth.exchange(callback, state="s")
        assert parse_qs(server.requests[0].body.decode())["code"] == ["the-code"]


@pytest.mark.parametrize("token_format", ["form", "json"])
async def test_the_whole_flow_with_the_sandbox(sandbox: Sandbox, token_format: Any) -> None:
    """A code becomes a token that works, is kept in the store, and is there for the next process."""
    store = MemoryTokenStore()
    oauth, code = sandbox_oauth(sandbox, store=store, token_format=token_format)
    async with oauth, SigningClient(sandbox.base_url, oauth) as client:
        token = await oauth.exchange(code())
        assert (await client.me()).email
        assert await store.load() == token
        assert token.expires_at is not None
        assert abs((token.expires_at - in_seconds(3600)).total_seconds()) < 60
        again = oauth_for(sandbox.base_url, store=store)
        assert await again.access_token() == token.access_token


async def test_a_code_used_twice(sandbox: Sandbox) -> None:
    """The second use is refused with the service's code; it is no RefreshRejected, and the stored token stays."""
    store = MemoryTokenStore()
    oauth, code = sandbox_oauth(sandbox, store=store)
    async with oauth:
        used = code()
        token = await oauth.exchange(used)
        with pytest.raises(AuthError, match="used before") as caught:
            await oauth.exchange(used)
        assert type(caught.value) is AuthError
        assert (caught.value.code, caught.value.status) == ("invalid_grant", 400)
        assert caught.value.request_id is not None
        assert await store.load() == token
        assert len(sandbox.requests_of("oauth.token")) == 2


async def test_a_cancelled_exchange_still_saves() -> None:
    """A web request that is given up does not cost the code: the token is saved all the same."""
    begun, go = asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request, received: Received) -> web.StreamResponse:
        begun.set()
        await go.wait()
        return await grants()(request, received)

    store = MemoryTokenStore()
    async with Scripted(slow) as server, oauth_for(server.base_url, store=store) as oauth:
        task = asyncio.create_task(oauth.exchange("code"))
        await begun.wait()
        assert "signing_async code exchange" in {running.get_name() for running in asyncio.all_tasks()}
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()
        await oauth.settle()
        assert await oauth.access_token() == "access-new"
        assert await store.load() is not None


async def test_calls_before_anybody_authorized() -> None:
    """Without a token the error says what to do; nothing is sent."""
    async with Scripted(grants()) as server, oauth_for(server.base_url) as oauth:
        with pytest.raises(AuthError, match=r"there is no token yet: .*authorization_request\(\)\.url.*exchange\(\)"):
            await oauth.access_token()
        with pytest.raises(AuthError, match=r"^there is no token to refresh: authorize first$"):
            await oauth.refresh()
        assert not server.requests


# Expiry


@pytest.mark.parametrize(
    ("expires_in", "unit", "seconds"),
    [
        (3600, 1, 3600),
        ("3600", 1, 3600),
        (" 60.5 ", 1, 60.5),
        (60, 60, 3600),
        (3_600_000, 0.001, 3600),
        (None, 1, None),
        ("soon", 1, None),
        ("", 1, None),
        (0, 1, None),
        (-5, 1, None),
        (True, 1, None),
        ([3600], 1, None),
        (1e300, 1, None),
        (10**300, 1, None),
        (1e15, 1, None),
        ("nan", 1, None),
        ("inf", 1, None),
    ],
    ids=lambda value: str(value)[:12],
)
async def test_expires_in(expires_in: Any, unit: float, seconds: float | None) -> None:
    """A number or its text counts, in the assumed unit; what cannot be meant is as if it had not been said."""
    before = datetime.now(UTC)
    body = json.dumps({"access_token": "a", "expires_in": expires_in})
    async with (
        Scripted(raw(200, body)) as server,
        oauth_for(server.base_url, assumptions=Assumptions(expires_in_seconds=unit)) as oauth,
    ):
        token = await oauth.exchange("code")
        assert await oauth.access_token() == "a"
    if seconds is None:
        assert token.expires_at is None
    else:
        assert token.expires_at is not None
        assert timedelta(0) <= token.expires_at - before - timedelta(seconds=seconds) <= timedelta(seconds=30)


async def test_expires_in_missing() -> None:
    """A token without a lifetime is used until it is rejected."""
    async with (
        Scripted(says({"access_token": "a", "refresh_token": "r"})) as server,
        oauth_for(server.base_url) as oauth,
    ):
        assert (await oauth.exchange("code")).expires_at is None
        assert [await oauth.access_token() for _ in range(3)] == ["a"] * 3
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("named", "kept"),
    [
        ("Bearer", "Bearer"),
        ("bearer", "Bearer"),
        ("BEARER", "Bearer"),
        (None, "Bearer"),
        ("", "Bearer"),
        (5, "Bearer"),
        ("a b", "Bearer"),
        ("x\r\nEvil: 1", "Bearer"),
        ("Bärer", "Bearer"),
        ("DPoP", "DPoP"),
    ],
)
async def test_token_type(named: Any, kept: str) -> None:
    """The type goes before the token in the header: Bearer in any case, or another word as it is."""
    async with (
        Scripted(grants(token_type=named), says({"id": "u"})) as server,
        oauth_for(server.base_url) as oauth,
        SigningClient(server.base_url, oauth) as client,
    ):
        assert (await oauth.exchange("code")).token_type == kept
        await client.me()
        assert server.requests[1].headers["Authorization"] == f"{kept} access-new"


@pytest.mark.parametrize(
    ("lifetime", "refreshed"), [(3600, False), (100, False), (28, False), (5, False), (-1, True), (None, False)]
)
async def test_refreshed_when_the_margin_is_reached(lifetime: float | None, refreshed: bool) -> None:
    """A token from the store is used until its margin: 30 s, or a tenth of what it had left."""
    token = Token("access-old", "refresh-old", None if lifetime is None else in_seconds(lifetime))
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=MemoryTokenStore(token)) as oauth:
        assert await oauth.access_token() == ("access-new" if refreshed else "access-old")


@pytest.mark.parametrize(("passed", "refreshed"), [(0, False), (3560, False), (3575, True), (3700, True)])
async def test_the_margin_of_an_hour(passed: float, refreshed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour's token is refreshed in its last 30 seconds, and not before."""
    async with Scripted(grants("first"), grants("second")) as server, oauth_for(server.base_url) as oauth:
        await oauth.exchange("code")
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + passed)
        assert await oauth.access_token() == ("access-second" if refreshed else "access-first")


async def test_without_a_refresh_token_a_token_is_used_to_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is nothing to gain by the margin then, or to warn of; after the end the error says to authorize again."""
    token = Token("access-old", None, in_seconds(100))
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=MemoryTokenStore(token)) as oauth:
        assert await oauth.access_token() == "access-old"
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 95)
        assert await oauth.access_token() == "access-old"
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        monkeypatch.setattr(time, "time", lambda: now() + 105)
        with pytest.raises(AuthError, match="no refresh token; authorize again"):
            await oauth.access_token()
        assert not server.requests


# One refresh for everybody


async def test_200_calls_with_a_token_that_the_service_rejects(sandbox: Sandbox) -> None:
    """200 concurrent calls that get 401 make one refresh, and all of them succeed."""
    oauth, code = sandbox_oauth(sandbox)
    async with oauth, SigningClient(sandbox.base_url, oauth) as client:
        await oauth.exchange(code())
        sandbox.clock.advance(hours=2)
        users = await asyncio.gather(*(client.me() for _ in range(200)))
        assert len(users) == 200
        assert len(sandbox.requests_of("oauth.token")) == 2
        assert [record.status for record in sandbox.requests_of("me")].count(200) == 200


async def test_200_calls_with_a_token_that_has_expired_by_the_clock(sandbox: Sandbox, tmp_path: Path) -> None:
    """200 concurrent calls that know the token has expired make one refresh; none goes out with the old one."""
    store = FileTokenStore(tmp_path / "token.json")
    oauth, code = sandbox_oauth(sandbox, store=store)
    async with oauth:
        token = await oauth.exchange(code())
    await store.save(Token(token.access_token, token.refresh_token, in_seconds(-1)))
    again = oauth_for(sandbox.base_url, client_id=oauth.client_id, client_secret=oauth._client_secret, store=store)
    async with again, SigningClient(sandbox.base_url, again) as client:
        await asyncio.gather(*(client.me() for _ in range(200)))
        assert len(sandbox.requests_of("oauth.token")) == 2
        assert {record.status for record in sandbox.requests_of("me")} == {200}
        assert await store.load() == await again.token()


async def test_200_calls_take_the_lock_once() -> None:
    """What one refresh does to a store, which may be far away, is done once, however many wait for it."""
    store = WatchedStore(expired())
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=store) as oauth:
        await oauth.refresh(rejected="access-other")
        store._token = expired("new")
        store.done.clear()
        await asyncio.gather(*(oauth.refresh(rejected="access-new") for _ in range(200)))
        assert store.done == ["lock", "load", "save", "unlock"]


async def test_the_refresh_request() -> None:
    """It carries the documented parameters, and a refresh token that is not replaced is kept."""
    store = MemoryTokenStore(expired())
    async with (
        Scripted(says({"access_token": "access-new", "expires_in": 60})) as server,
        oauth_for(server.base_url, store=store) as oauth,
    ):
        assert await oauth.access_token() == "access-new"
        assert parse_qs(server.requests[0].body.decode(), strict_parsing=True) == {
            "grant_type": ["refresh_token"],
            "client_id": ["app-1"],
            "client_secret": [SECRET],
            "refresh_token": ["refresh-old"],
        }
        kept = await store.load()
        assert kept is not None
        assert kept.refresh_token == "refresh-old"


class Slow:
    """A token answer that waits to be let go."""

    def __init__(self, then: Callable[..., Awaitable[web.StreamResponse]]) -> None:
        self.then = then
        self.begun = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, request: web.Request, received: Received) -> web.StreamResponse:
        self.begun.set()
        await self.go.wait()
        return await self.then(request, received)


@pytest.mark.parametrize("cancelled", [[0], [3], [6], [0, 1, 2], list(range(7))], ids=str)
async def test_a_cancelled_caller_harms_nobody(cancelled: list[int]) -> None:
    """Whoever is cancelled, first, middle or all, the others get the new token, and it is saved."""
    store, slow = MemoryTokenStore(expired()), Slow(grants())
    async with Scripted(slow) as server, oauth_for(server.base_url, store=store) as oauth:
        tasks = [asyncio.create_task(oauth.token()) for _ in range(7)]
        await slow.begun.wait()
        for number in cancelled:
            tasks[number].cancel()
        await asyncio.sleep(0)
        slow.go.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await oauth.settle()
        for number, result in enumerate(results):
            if number in cancelled:
                assert isinstance(result, asyncio.CancelledError)
            else:
                assert isinstance(result, Token)
                assert result.access_token == "access-new"
        kept = await store.load()
        assert kept is not None
        assert kept.access_token == "access-new"
        assert await oauth.access_token() == "access-new"
        assert len(server.requests) == 1


async def test_a_failure_after_everybody_was_cancelled_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio has nothing to complain about when a refresh fails that nobody waits for any more."""
    slow = Slow(says({"error": "invalid_grant"}, 400))
    async with Scripted(slow) as server, oauth_for(server.base_url, store=MemoryTokenStore(expired())) as oauth:
        task = asyncio.create_task(oauth.token())
        await slow.begun.wait()
        task.cancel()
        slow.go.set()
        await oauth.settle()
    del task, oauth
    gc.collect()
    await asyncio.sleep(0)
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_a_failure_is_for_all_who_wait_and_is_not_cached() -> None:
    """All waiting callers get the error, each one of its own; the next call tries again and succeeds."""
    async with (
        Scripted(says({"error": "invalid_client"}, 401), grants()) as server,
        oauth_for(server.base_url, store=MemoryTokenStore(expired())) as oauth,
    ):
        errors = await asyncio.gather(*(oauth.token() for _ in range(20)), return_exceptions=True)
        assert {type(error) for error in errors} == {AuthError}
        assert {str(error) for error in errors} == {str(errors[0])}
        assert len({id(error) for error in errors}) == 20
        assert len(server.requests) == 1
        assert await oauth.access_token() == "access-new"


async def test_a_refresh_that_is_cancelled_itself_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """Callers who were not cancelled do not see a cancellation, the next one tries again, and asyncio is content."""
    slow = Slow(grants())
    async with (
        Scripted(slow, grants()) as server,
        oauth_for(server.base_url, store=MemoryTokenStore(expired())) as oauth,
    ):
        task = asyncio.create_task(oauth.token())
        await slow.begun.wait()
        [refresh] = [task for task in asyncio.all_tasks() if task.get_name() == "signing_async token refresh"]
        refresh.cancel()
        with pytest.raises(AuthError, match=r"^the token request was cancelled$"):
            await task
        slow.go.set()
        assert await oauth.access_token() == "access-new"
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_keyed_on_the_rejected_token() -> None:
    """Who reports a token that was replaced already gets the present one; only the present one leads to a request."""
    store = WatchedStore(expired("0"))
    async with (
        Scripted(grants("1"), grants("2"), grants("3")) as server,
        oauth_for(server.base_url, store=store) as oauth,
    ):
        first = await oauth.refresh(rejected="access-0")
        assert first.access_token == "access-1"
        store.done.clear()
        assert (await oauth.refresh(rejected=Token("access-0"))).access_token == "access-1"
        assert (await oauth.refresh(rejected="access-0")).access_token == "access-1"
        assert len(server.requests) == 1
        assert not store.done
        assert (await oauth.refresh(rejected=first)).access_token == "access-2"
        assert (await oauth.refresh()).access_token == "access-3"
        assert len(server.requests) == 3


async def test_refresh_by_force_loads_first() -> None:
    """A new object that is told to refresh replaces the stored token even where that is still good."""
    store = MemoryTokenStore(Token("access-old", "refresh-old", in_seconds(3600)))
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=store) as oauth:
        assert (await oauth.refresh()).access_token == "access-new"


async def test_a_refresh_of_another_token_is_waited_out() -> None:
    """Who reports the new token while the refresh of the old one is just ending gets a third one, not the new again."""
    slow = Slow(grants("2"))
    store = MemoryTokenStore(expired("0"))
    async with Scripted(slow, grants("3")) as server, oauth_for(server.base_url, store=store) as oauth:
        first = asyncio.create_task(oauth.refresh(rejected="access-0"))
        await slow.begun.wait()
        second = asyncio.create_task(oauth.refresh(rejected="access-2"))
        third = asyncio.create_task(oauth.refresh(rejected="access-0"))
        await asyncio.sleep(0)
        slow.go.set()
        assert (await first).access_token == "access-2"
        assert (await second).access_token == "access-3"
        assert (await third).access_token in {"access-2", "access-3"}
        assert len(server.requests) == 2


async def test_the_same_token_again_is_one_request() -> None:
    """A server that answers with the access token it had given before is asked once by everybody together."""
    old = Token("access-same", "refresh-old", in_seconds(-1))
    async with (
        Scripted(grants("same")) as server,
        oauth_for(server.base_url, store=MemoryTokenStore(old)) as oauth,
    ):
        await asyncio.gather(*(oauth.refresh(rejected=old) for _ in range(20)))
        assert len(server.requests) == 1


async def test_rejected_again_after_the_refresh(sandbox: Sandbox) -> None:
    """A service that rejects the new token too is not asked for ever: Unauthorized, after one refresh."""
    oauth, code = sandbox_oauth(sandbox)
    async with oauth, SigningClient(sandbox.base_url, oauth) as client:
        await oauth.exchange(code())
        sandbox.faults.add("me", "expired-token", times=None)
        with pytest.raises(Unauthorized):
            await client.me()
        assert len(sandbox.requests_of("oauth.token")) == 2
        assert len(sandbox.requests_of("me")) == 2


async def test_rejected_with_no_refresh_token() -> None:
    """Without a refresh token a rejection is Unauthorized, unless somebody authorized anew in another process."""
    store = MemoryTokenStore(Token("access-old"))
    async with (
        Scripted(says({"message": "no"}, 401), says({"message": "no"}, 401), says({"id": "u"})) as server,
        oauth_for(server.base_url, store=store) as oauth,
        SigningClient(server.base_url, oauth) as client,
    ):
        with pytest.raises(Unauthorized):
            await client.me()
        await store.save(Token("access-newer"))
        await client.me()
        assert [received.headers["Authorization"] for received in server.requests] == [
            "Bearer access-old",
            "Bearer access-old",
            "Bearer access-newer",
        ]


async def test_another_status_for_expired_tokens() -> None:
    """Where the service says 403 for an expired token, Assumptions make it refresh."""
    profile = Profile(expired_token_status=403)
    async with Sandbox(seed=3, profile=profile) as sandbox:
        oauth, code = sandbox_oauth(sandbox)
        assumptions = Assumptions(expired_token_statuses=frozenset({401, 403}))
        async with oauth, SigningClient(sandbox.base_url, oauth, assumptions=assumptions) as client:
            await oauth.exchange(code())
            sandbox.clock.advance(hours=2)
            await client.me()


async def test_a_load_that_ends_late_does_not_bring_back_an_old_token() -> None:
    """A token that came while the store was being read is not overwritten with what was read."""
    release = asyncio.Event()

    class Late(MemoryTokenStore):
        async def load(self) -> Token | None:
            kept = await super().load()
            await release.wait()
            return kept

    old = Token("access-old", "refresh-old", in_seconds(3600))
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=Late(old)) as oauth:
        loading = asyncio.create_task(oauth.token())
        await asyncio.sleep(0)
        await oauth.exchange("code")
        release.set()
        assert (await loading).access_token == "access-new"
        assert len(server.requests) == 1


# Early refreshes


def nearly_expired(monkeypatch: pytest.MonkeyPatch, passed: float = 3580) -> None:
    """Move the clock into the margin of an hour's token: 20 s are left."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + passed)


async def test_an_early_refresh_that_fails_serves_the_old_token(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """50 calls in the margin of an endpoint that is down make one try, use the old token, and warn once."""
    async with (
        Scripted(grants("old"), says({"error": "server_error"}, 503)) as server,
        oauth_for(server.base_url, retry=RetryPolicy.none()) as oauth,
    ):
        await oauth.exchange("code")
        nearly_expired(monkeypatch)
        tokens = await asyncio.gather(*(oauth.access_token() for _ in range(50)))
        assert set(tokens) == {"access-old"}
        assert await oauth.access_token() == "access-old"
        assert len(server.requests) == 2
        warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warned) == 1
        assert "HTTP 503" in warned[0]
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 11)
        assert await oauth.access_token() == "access-old"
        assert len(server.requests) == 3
        monkeypatch.setattr(time, "time", lambda: now() + 21)
        with pytest.raises(AuthError, match="HTTP 503"):
            await oauth.access_token()


async def test_an_early_refresh_that_takes_long_serves_the_old_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token endpoint that hangs holds nobody up for long while the token works; what comes at last is taken."""
    slow = Slow(grants())
    monkeypatch.setattr("signing_async.auth.refresh._EARLY_WAIT", 0.05)
    async with Scripted(grants("old"), slow) as server, oauth_for(server.base_url) as oauth:
        await oauth.exchange("code")
        nearly_expired(monkeypatch)
        async with asyncio.timeout(5):
            assert set(await asyncio.gather(*(oauth.access_token() for _ in range(20)))) == {"access-old"}
        slow.go.set()
        await oauth.settle()
        assert await oauth.access_token() == "access-new"
        assert len(server.requests) == 2


async def test_an_early_refresh_with_a_store_that_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the user's own store raises does not end a call while the token works, and its text is not logged."""
    store = WatchedStore()
    async with Scripted(grants("old"), grants("new")) as server, oauth_for(server.base_url, store=store) as oauth:
        await oauth.exchange("code")
        store.fail_saves = 1
        nearly_expired(monkeypatch)
        assert await oauth.access_token() == "access-old"
        assert "OSError" in caplog.text
        assert "no space" not in caplog.text


async def test_a_token_that_came_during_an_early_refresh_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """An early refresh that fails leaves the life of a token alone that came meanwhile past a store without a lock."""

    class Unlocked(MemoryTokenStore):
        def lock(self) -> AbstractAsyncContextManager[None]:
            return contextlib.nullcontext()

    slow = Slow(says({}, 503))
    async with (
        Scripted(grants("old"), slow, grants("brief", expires_in=0.01), grants("new")) as server,
        oauth_for(server.base_url, retry=RetryPolicy.none(), store=Unlocked()) as oauth,
    ):
        await oauth.exchange("code")
        nearly_expired(monkeypatch)
        task = asyncio.create_task(oauth.access_token())
        await slow.begun.wait()
        assert (await oauth.exchange("another")).access_token == "access-brief"
        await asyncio.sleep(0.02)
        slow.go.set()
        assert await task == "access-old"
        assert await oauth.access_token() == "access-new"
        assert len(server.requests) == 4


# Order: lock, read again, adopt or post, save, publish


async def test_the_order_of_a_refresh() -> None:
    """Under the lock the store is read again before the request and saved after it; then the lock is given up."""
    store = WatchedStore(expired())

    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        store.done.append("post")
        return await grants()(request, received)

    async with Scripted(answer) as server, oauth_for(server.base_url, store=store) as oauth:
        await oauth.token()
    assert store.done == ["load", "lock", "load", "post", "save", "unlock"]


async def test_a_store_is_read_once() -> None:
    """It may be far away: while the token is good it is not asked again."""
    store = WatchedStore(Token("access-old", "refresh-old", in_seconds(3600)))
    async with oauth_for(BASE, store=store) as oauth:
        assert [await oauth.access_token() for _ in range(3)] == ["access-old"] * 3
    assert store.done == ["load"]


async def test_a_first_token_of_another_process_is_adopted() -> None:
    """Who is told to refresh, and finds a token where there was none before, takes that without a request."""

    class Filled(WatchedStore):
        def lock(self) -> AbstractAsyncContextManager[None]:
            self._token = Token("access-theirs", "refresh-theirs", in_seconds(3600))
            return super().lock()

    async with Scripted(grants()) as server, oauth_for(server.base_url, store=Filled()) as oauth:
        assert (await oauth.refresh()).access_token == "access-theirs"
        assert not server.requests


async def test_a_store_that_keeps_a_newer_token_is_believed() -> None:
    """Where it refuses to save since another has saved a newer token, that one is used, and refreshed in its turn."""

    class Overtaken(WatchedStore):
        async def save(self, token: Token) -> None:
            if token.access_token == "access-late":
                self._token = Token("access-theirs", "refresh-theirs", in_seconds(3600))
                raise TokenSuperseded("another worker has saved a newer token")
            await super().save(token)

    store = Overtaken(expired())
    async with Scripted(grants("late"), grants("next")) as server, oauth_for(server.base_url, store=store) as oauth:
        assert await oauth.access_token() == "access-theirs"
        assert len(server.requests) == 1
        assert (await oauth.refresh(rejected="access-theirs")).access_token == "access-next"
        assert parse_qs(server.requests[1].body.decode())["refresh_token"] == ["refresh-theirs"]


async def test_a_token_is_not_used_before_it_is_saved() -> None:
    """While the save is still under way nobody gets the new token."""
    saving, go = asyncio.Event(), asyncio.Event()

    class Late(MemoryTokenStore):
        async def save(self, token: Token) -> None:
            saving.set()
            await go.wait()
            await super().save(token)

    token = Token("access-old", "refresh-old", in_seconds(3600))
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=Late(token)) as oauth:
        assert await oauth.access_token() == "access-old"
        refresh = asyncio.create_task(oauth.refresh(rejected="access-old"))
        await saving.wait()
        assert await oauth.access_token() == "access-old"
        go.set()
        await refresh
        assert await oauth.access_token() == "access-new"


async def test_a_save_that_fails_does_not_publish_and_loses_nothing() -> None:
    """The new token is not used before it is saved, and not lost: the next refresh saves it instead of asking again."""
    store = WatchedStore(expired())
    store.fail_saves = 2
    async with Scripted(grants("1"), grants("2")) as server, oauth_for(server.base_url, store=store) as oauth:
        for _ in range(2):
            with pytest.raises(OSError, match="no space left"):
                await oauth.access_token()
        kept = await MemoryTokenStore.load(store)
        assert kept is not None
        assert kept.access_token == "access-old"
        assert len(server.requests) == 1
        assert await oauth.access_token() == "access-1"
        assert len(server.requests) == 1
        assert (await oauth.refresh()).access_token == "access-2"


async def test_a_save_that_failed_is_forgotten_when_another_process_refreshed() -> None:
    """The unsaved token replaces only the token that it was got for."""
    store = WatchedStore(expired())
    store.fail_saves = 1
    async with Scripted(grants("1"), grants("2")) as server, oauth_for(server.base_url, store=store) as oauth:
        with pytest.raises(OSError, match="no space left"):
            await oauth.access_token()
        await store.save(Token("access-theirs", "refresh-theirs", in_seconds(-1)))
        assert await oauth.access_token() == "access-2"
        assert parse_qs(server.requests[1].body.decode())["refresh_token"] == ["refresh-theirs"]


async def test_an_exchange_that_cannot_be_saved_is_not_published() -> None:
    """The old token stays in use when the new one could not be kept."""
    store = WatchedStore(Token("access-old", "refresh-old", in_seconds(3600)))
    store.fail_saves = 1
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=store) as oauth:
        with pytest.raises(OSError, match="no space left"):
            await oauth.exchange("code")
        assert await oauth.access_token() == "access-old"
        assert store.done == ["lock", "save", "unlock", "load"]


async def test_the_newer_token_of_another_process_is_adopted(tmp_path: Path) -> None:
    """What another process saved meanwhile is taken without a request."""
    path = tmp_path / "token.json"
    await FileTokenStore(path).save(Token("access-old", "refresh-old", in_seconds(3600)))
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=FileTokenStore(path)) as oauth:
        old = await oauth.token()
        newer = Token("access-theirs", "refresh-theirs", in_seconds(3600))
        await FileTokenStore(path).save(newer)
        assert await oauth.refresh(rejected=old) == newer
        assert await oauth.token() == newer
        assert not server.requests


async def test_a_newer_token_that_has_expired_is_refreshed_with_its_own_refresh_token() -> None:
    """Never with the one this process remembers: that would be a replay."""
    store = MemoryTokenStore(Token("access-old", "refresh-old", in_seconds(3600)))
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=store) as oauth:
        old = await oauth.token()
        await store.save(expired("theirs"))
        assert (await oauth.refresh(rejected=old)).access_token == "access-new"
        assert parse_qs(server.requests[0].body.decode())["refresh_token"] == ["refresh-theirs"]


@pytest.mark.parametrize("early", [False, True], ids=["after expiry", "ahead of expiry"])
async def test_logout_ends_a_process_that_runs(early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next refresh notices that the token file is gone: it asks for nothing, and does not bring the file back."""
    path = tmp_path / "token.json"
    store = FileTokenStore(path)
    await store.save(Token("access-old", "refresh-old", in_seconds(3600)))
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=store) as oauth:
        assert await oauth.access_token() == "access-old"
        path.unlink()
        nearly_expired(monkeypatch, passed=3575 if early else 3605)
        results = await asyncio.gather(*(oauth.access_token() for _ in range(5)), return_exceptions=True)
        assert {str(error) for error in results} == {
            "the token was removed from its store, as a logout does: authorize again"
        }
        assert {type(error) for error in results} == {AuthError}
        with pytest.raises(AuthError, match="there is no token yet"):
            await oauth.access_token()
        assert not server.requests
        assert not path.exists()
        await store.save(Token("access-other", "refresh-other", in_seconds(7200)))
        assert await oauth.access_token() == "access-other"


async def test_logout_of_a_token_without_a_refresh_token() -> None:
    """It is an AuthError as well when the service rejects the token."""
    store = MemoryTokenStore(Token("access-old"))
    async with (
        Scripted(says({"message": "no"}, 401)) as server,
        oauth_for(server.base_url, store=store) as oauth,
        SigningClient(server.base_url, oauth) as client,
    ):
        assert await oauth.access_token() == "access-old"
        store._token = None
        with pytest.raises(AuthError, match="was removed from its store"):
            await client.me()


async def test_dead_refresh_token_is_sent_once() -> None:
    """A final rejection is remembered: 50 calls make one request, until the stored token is another one."""
    store = MemoryTokenStore(expired())
    answers = [says({"error": "invalid_grant"}, 400, request_id="req-9"), grants("1"), says({"error": "x"}, 400)]
    async with Scripted(*answers) as server, oauth_for(server.base_url, store=store) as oauth:
        rejections = []
        for _ in range(50):
            with pytest.raises(RefreshRejected, match="invalid_grant") as caught:
                await oauth.access_token()
            rejections.append(caught.value)
        assert len(server.requests) == 1
        assert {(error.code, error.request_id, str(error)) for error in rejections} == {
            ("invalid_grant", "req-9", str(rejections[0]))
        }
        assert len({id(error) for error in rejections}) == 50
        await store.save(expired("authorized-again"))
        assert await oauth.access_token() == "access-1"
        assert len(server.requests) == 2
        for _ in range(2):
            with pytest.raises(AuthError, match="code x"):
                await oauth.refresh()
        assert len(server.requests) == 4


@pytest.mark.parametrize("status", [429, 503])
async def test_rejection_by_a_failing_token_endpoint_is_not_final(status: int) -> None:
    """Whatever it says of the refresh token while it is down or busy, the next call asks again."""
    answers = [says({"error": "invalid_grant"}, status), grants()]
    async with (
        Scripted(*answers) as server,
        oauth_for(server.base_url, store=MemoryTokenStore(expired()), retry=RetryPolicy.none()) as oauth,
    ):
        with pytest.raises(AuthError, match="invalid_grant") as caught:
            await oauth.access_token()
        assert type(caught.value) is AuthError
        assert await oauth.access_token() == "access-new"


# A token whose save fails


@pytest.mark.parametrize("after", ["refresh", "exchange"])
@pytest.mark.parametrize("who", ["oauth", "client"])
async def test_token_whose_save_failed_is_saved_on_close(after: str, who: str) -> None:
    """A store that fails once costs no token, whoever is closed first."""
    store = WatchedStore(expired() if after == "refresh" else None)
    store.fail_saves = 1
    async with Scripted(grants()) as server:
        oauth = oauth_for(server.base_url, store=store)
        client = SigningClient(server.base_url, oauth)
        with pytest.raises(OSError, match="no space left"):
            await (oauth.access_token() if after == "refresh" else oauth.exchange("code"))
        await (client if who == "client" else oauth).aclose()
        kept = await store.load()
        assert kept is not None
        assert (kept.access_token, kept.refresh_token) == ("access-new", "refresh-new")
        store.done.clear()
        await client.aclose()
        await oauth.aclose()
        assert (store.done, len(server.requests)) == ([], 1)


async def test_exchanged_token_whose_save_failed_is_saved_by_the_next_refresh() -> None:
    """Even over a token that is there: the user has authorized anew."""
    store = WatchedStore(expired())
    store.fail_saves = 2
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=store) as oauth:
        with pytest.raises(OSError, match="no space left"):
            await oauth.exchange("code")
        with pytest.raises(OSError, match="no space left"):
            await oauth.access_token()
        assert await oauth.access_token() == "access-new"
        assert len(server.requests) == 1


@pytest.mark.parametrize("who", ["oauth", "client"])
async def test_token_that_cannot_be_saved_on_close_is_an_error_and_logged(
    who: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What is lost is said at ERROR and raised, without a secret; all is closed, and another close tries again."""
    store = WatchedStore(expired())
    store.fail_saves = 2
    async with Scripted(grants()) as server:
        oauth = oauth_for(server.base_url, store=store)
        client = SigningClient(server.base_url, oauth)
        with pytest.raises(OSError, match="no space left"):
            await oauth.access_token()
        words = r"^a new token could not be saved and is lost .* may have to authorize again: OSError$"
        with pytest.raises(AuthError, match=words) as caught:
            await (client if who == "client" else oauth).aclose()
        assert caught.value.__context__ is None
        assert (client._shared.sessions if who == "client" else oauth._endpoint.sessions).closed
        [logged] = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert logged == str(caught.value)
        await oauth.aclose()
        await client.aclose()
        kept = await store.load()
        assert kept is not None
        assert kept.refresh_token == "refresh-new"
        assert len(server.requests) == 1


async def test_loss_of_a_token_does_not_hide_what_the_block_raised() -> None:
    """It is a note of that exception; a block that ends well raises the loss."""
    store = WatchedStore(expired())
    store.fail_saves = 3
    async with Scripted(grants()) as server:
        with pytest.raises(OSError, match="no space left") as caught:
            async with oauth_for(server.base_url, store=store) as oauth:
                await oauth.access_token()
        assert "could not be saved and is lost" in caught.value.__notes__[0]
        with pytest.raises(AuthError, match="could not be saved and is lost"):
            async with oauth:
                pass


@pytest.mark.parametrize("stored", [None, "theirs"], ids=["logout", "another process"])
async def test_unsaved_token_is_not_saved_on_close_over_a_change_of_the_store(stored: str | None) -> None:
    """Neither after a logout nor over the newer token of another process."""
    store = WatchedStore(expired())
    store.fail_saves = 1
    async with Scripted(grants()) as server:
        async with oauth_for(server.base_url, store=store) as oauth:
            with pytest.raises(OSError, match="no space left"):
                await oauth.access_token()
            store._token = None if stored is None else expired(stored)
        kept = await store.load()
        assert kept is None if stored is None else kept is not None and kept.access_token == "access-theirs"


async def test_token_whose_save_failed_late_is_found_saved() -> None:
    """A store that kept the token and then failed holds it already: there is nothing left to do."""

    class Late(WatchedStore):
        async def save(self, token: Token) -> None:
            await super().save(token)
            raise OSError("the answer was lost")

    store = Late(expired())
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=store) as oauth:
        with pytest.raises(OSError, match="the answer was lost"):
            await oauth.access_token()
        assert await oauth.access_token() == "access-new"
        assert (store.done.count("save"), len(server.requests)) == (1, 1)


async def test_exchange_that_a_newer_token_superseded_is_not_saved_later() -> None:
    """The store's newer token stays."""

    class Overtaken(WatchedStore):
        async def save(self, token: Token) -> None:
            self.done.append("save")
            raise TokenSuperseded("another worker has saved a newer token")

    store = Overtaken(expired())
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=store) as oauth:
        with pytest.raises(TokenSuperseded):
            await oauth.exchange("code")
    assert store.done.count("save") == 1


async def test_a_lock_that_is_never_free() -> None:
    """A holder that hangs is an error that says so, not an endless wait."""
    store = MemoryTokenStore(expired())
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=store, timeout=0.05) as oauth:
        async with store.lock():
            with pytest.raises(AuthError, match=r"lock was not free for 0\.1 s") as caught:
                await oauth.access_token()
            assert caught.value.__context__ is None
        assert not server.requests


async def test_a_corrupt_file_stops_the_call_and_stays(tmp_path: Path) -> None:
    """A token file that cannot be read is neither refreshed nor written over."""
    path = tmp_path / "token.json"
    path.write_bytes(b"{broken")
    async with (
        Scripted(grants()) as server,
        oauth_for(server.base_url, store=FileTokenStore(path)) as oauth,
        SigningClient(server.base_url, oauth) as client,
    ):
        with pytest.raises(AuthError, match="holds no token; it was left as it is"):
            await client.me()
        assert not server.requests
    assert path.read_bytes() == b"{broken"


async def test_six_processes_on_one_store(tmp_path: Path) -> None:
    """Six processes with a token that lives a second make one refresh each expiry, and never replay a refresh token."""
    seconds, workers = 4.0, 6
    async with Sandbox(seed=5, profile=Profile(access_token_lifetime=1)) as sandbox:
        path = tmp_path / "token.json"
        oauth, code = sandbox_oauth(sandbox, store=FileTokenStore(path))
        async with oauth:
            await oauth.exchange(code())
        command = [
            *(sys.executable, "-m", "tests.auth.oauth_workers", "call"),
            *(str(path), sandbox.base_url, oauth.client_id, oauth._client_secret, str(seconds)),
        ]
        running = [
            await asyncio.create_subprocess_exec(
                *command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            for _ in range(workers)
        ]
        try:
            for process in running:
                assert process.stdout is not None
                assert await process.stdout.readline() == b"ready\n"
            began = time.monotonic()
            ended = await asyncio.gather(*(process.communicate(b"\n") for process in running))
            took = time.monotonic() - began
        finally:
            for process in running:
                if process.returncode is None:
                    process.kill()
        for process, (_, complaints) in zip(running, ended, strict=True):
            assert process.returncode == 0, complaints.decode()
        tokens = sandbox.requests_of("oauth.token")
        assert {record.status for record in tokens} == {200}
        refreshes = len(tokens) - 1
        # A token that lives one second is replaced after nine tenths of it.
        assert 2 <= refreshes <= took / 0.9 + 1
        used = [int(output.split()[1]) for output, _ in ended]
        assert max(used) > 1
        assert max(used) <= refreshes + 1
        async with oauth_for(
            sandbox.base_url,
            client_id=oauth.client_id,
            client_secret=oauth._client_secret,
            store=FileTokenStore(path),
        ) as again:
            assert (await again.refresh()).refresh_token


# The token endpoint's answers


async def test_no_connection_is_tried_again(sandbox: Sandbox) -> None:
    """While nothing listens it is tried as often as the policy says; then the error says so, and what was tried."""
    async with Scripted(grants()) as server:
        base_url = server.base_url
    store = MemoryTokenStore(expired())
    async with oauth_for(base_url, store=store, retry=RetryPolicy(max_attempts=3, base_delay=0.001)) as oauth:
        with pytest.raises(TransportError, match=r"oauth\.refresh: no connection could be made") as caught:
            await oauth.access_token()
        assert caught.value.attempts == 3
        assert caught.value.operation == "oauth.refresh"


async def test_a_connection_that_comes_to_be(unused_port: int) -> None:
    """A server that starts between two attempts is found."""
    base_url = f"http://127.0.0.1:{unused_port}"
    policy = RetryPolicy(max_attempts=1000, base_delay=0.02, max_delay=0.02)
    async with oauth_for(base_url, store=MemoryTokenStore(expired()), retry=policy) as oauth:
        task = asyncio.create_task(oauth.access_token())
        await asyncio.sleep(0.05)
        async with Sandbox(port=unused_port):
            with pytest.raises(AuthError, match="invalid_client"):
                await task


@pytest.mark.parametrize("http_date", [False, True], ids=["seconds", "date"])
async def test_429_is_tried_again_after_retry_after(sandbox: Sandbox, http_date: bool) -> None:
    """A 429 is waited out for as long as the service asked, and no shorter."""
    oauth, code = sandbox_oauth(sandbox)
    sandbox.faults.add("oauth.token", "429", retry_after=1, http_date=http_date)
    async with oauth:
        await oauth.exchange(code())
    first, second = sandbox.requests_of("oauth.token")
    assert (first.status, second.status) == (429, 200)
    # A date has whole seconds.
    assert (second.received_at - first.received_at).total_seconds() >= (0.0 if http_date else 1.0)


async def test_429_closes_the_gate_for_others() -> None:
    """A second token request of the same object does not go out while the first was told to wait."""
    async with (
        Scripted(says({}, 429, **{"Retry-After": "1"}), grants("1"), grants("2")) as server,
        oauth_for(server.base_url) as oauth,
    ):
        loop = asyncio.get_running_loop()
        first = asyncio.create_task(oauth.exchange("one"))
        while not server.requests:
            await asyncio.sleep(0.001)
        while oauth._endpoint._pause.opens_at == 0.0:
            await asyncio.sleep(0.001)
        opens_at = oauth._endpoint._pause.opens_at
        await oauth.exchange("two")
        assert loop.time() >= opens_at
        await first


@pytest.mark.parametrize(
    ("retry_after", "timeout"), [("61", 30.0), ("31", 30.0), ("86400", 30.0)], ids=["cap", "deadline", "a day"]
)
async def test_429_for_longer_than_may_be_waited(retry_after: str, timeout: float) -> None:
    """The error comes at once with retry_after, and the next call is told at once as well, without sending."""
    async with (
        Scripted(says({"error": "slow_down"}, 429, **{"Retry-After": retry_after})) as server,
        oauth_for(server.base_url, store=MemoryTokenStore(expired()), timeout=timeout) as oauth,
    ):
        with pytest.raises(AuthError) as caught:
            await oauth.access_token()
        assert (caught.value.status, caught.value.retry_after) == (429, float(retry_after))
        with pytest.raises(AuthError, match="nothing was sent") as caught:
            await oauth.access_token()
        assert caught.value.status == 429
        assert caught.value.retry_after is not None
        assert 20 < caught.value.retry_after <= 60
        assert len(server.requests) == 1


@pytest.mark.parametrize("kind", ["500", "503", "502-html", "429", "drop-before-commit"])
async def test_passing_faults_are_tried_again(sandbox: Sandbox, kind: str) -> None:
    """One fault that passes is not seen by the caller."""
    oauth, code = sandbox_oauth(sandbox)
    sandbox.faults.add("oauth.token", kind, **({"retry_after": 0} if kind in {"429", "503"} else {}))
    async with oauth:
        await oauth.exchange(code())
        assert len(sandbox.requests_of("oauth.token")) == 2


async def test_5xx_for_ever() -> None:
    """After the policy's attempts the error says what the server said."""
    body = "<html><head><title>502 Bad Gateway</title></head></html>"
    async with (
        Scripted(raw(502, body, request_id="req-77")) as server,
        oauth_for(server.base_url, store=MemoryTokenStore(expired())) as oauth,
    ):
        with pytest.raises(AuthError, match="502 Bad Gateway") as caught:
            await oauth.access_token()
        assert (caught.value.status, caught.value.request_id) == (502, "req-77")
        assert "req-77" in str(caught.value)
        assert len(server.requests) == QUICK.max_attempts


async def test_a_lost_answer_is_asked_for_again_once() -> None:
    """An answer that was lost after sending: one more request, and no third."""
    async with (
        Scripted(drops, grants()) as server,
        oauth_for(server.base_url, store=MemoryTokenStore(expired())) as oauth,
    ):
        assert await oauth.access_token() == "access-new"
        assert len(server.requests) == 2
    async with (
        Scripted(drops) as server,
        oauth_for(server.base_url, store=MemoryTokenStore(expired())) as oauth,
    ):
        with pytest.raises(TransportError, match=r"oauth\.refresh: the connection was closed") as caught:
            await oauth.access_token()
        assert caught.value.attempts == 2
        assert len(server.requests) == 2


async def test_a_lost_answer_after_others_failures() -> None:
    """A 500 between two lost answers does not give a third chance; after one, a 500 is tried again as ever."""
    async with (
        Scripted(drops, says({}, 500), grants()) as server,
        oauth_for(server.base_url, store=MemoryTokenStore(expired())) as oauth,
    ):
        assert await oauth.access_token() == "access-new"
    async with (
        Scripted(drops, says({}, 500), drops, grants()) as server,
        oauth_for(server.base_url, store=MemoryTokenStore(expired())) as oauth,
    ):
        with pytest.raises(TransportError):
            await oauth.access_token()
        assert len(server.requests) == 3


async def test_a_lost_answer_with_a_service_that_allows_grace() -> None:
    """Where the service allows a short grace for a refresh token used twice, a lost answer costs nothing."""
    async with Sandbox(seed=4, profile=Profile(replay_grace=30)) as sandbox:
        oauth, code = sandbox_oauth(sandbox)
        async with oauth, SigningClient(sandbox.base_url, oauth) as client:
            await oauth.exchange(code())
            sandbox.faults.add("oauth.token", "drop-after-commit")
            await oauth.refresh()
            await client.me()


async def test_truncated_answers_are_lost_answers(sandbox: Sandbox) -> None:
    """An answer that breaks off is asked for again, once; its error carries status."""
    oauth, code = sandbox_oauth(sandbox)
    sandbox.faults.add("oauth.token", "truncate", times=None)
    async with oauth:
        with pytest.raises((TransportError, AuthError)) as caught:
            await oauth.exchange(code())
        assert len(sandbox.requests_of("oauth.token")) == 2
        assert isinstance(caught.value, TransportError | AuthError)
        assert caught.value.status in {200, 400}


async def test_token_request_without_response_within_timeout_is_request_timeout() -> None:
    """An endpoint that hangs gets one request, and the token is not touched."""
    store = MemoryTokenStore(expired())
    async with Scripted(hangs) as server, oauth_for(server.base_url, store=store, timeout=0.2) as oauth:
        with pytest.raises(RequestTimeout, match=r"^oauth\.refresh: no .* 0\.2 s") as caught:
            await oauth.access_token()
        assert (caught.value.operation, caught.value.attempts) == ("oauth.refresh", 1)
        assert len(server.requests) == 1
        kept = await store.load()
        assert kept is not None
        assert kept.access_token == "access-old"


async def test_token_request_is_not_sent_when_no_time_for_its_response_is_left() -> None:
    """The endpoint's pause ends a moment before the timeout: a refresh token whose response is lost may be lost."""
    async with (
        Scripted(says({}, 429, **{"Retry-After": "1.9"}), grants()) as server,
        oauth_for(server.base_url, store=MemoryTokenStore(expired()), timeout=2.0, retry=RetryPolicy.none()) as oauth,
    ):
        for _ in range(2):
            with pytest.raises(AuthError) as caught:
                await oauth.access_token()
            assert caught.value.status == 429
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("answer", "kind", "code"),
    [
        (says({"error": "invalid_grant", "error_description": "gone"}, 400), RefreshRejected, "invalid_grant"),
        (says({"error": "invalid_grant", "code": 400}, 400), RefreshRejected, "invalid_grant"),
        (says({"code": "invalid_grant", "message": "gone"}, 401), RefreshRejected, "invalid_grant"),
        (says({"error": {"code": "invalid_grant", "message": "gone"}}, 400), RefreshRejected, "invalid_grant"),
        (says({"errors": [{"code": "invalid_grant", "message": "gone"}]}, 400), RefreshRejected, "invalid_grant"),
        (says({"error": "invalid_client"}, 401), AuthError, "invalid_client"),
        (says({"error": "", "code": "invalid_client"}, 401), AuthError, "invalid_client"),
        (says({"error": "unsupported_grant_type"}, 400), AuthError, "unsupported_grant_type"),
        (says(["odd"], 400), AuthError, None),
        (raw(400, b"\xff\xfe"), AuthError, None),
        (raw(403, b""), AuthError, None),
        (raw(302, b"", Location="https://elsewhere.example.com/"), AuthError, None),
        (raw(404, "<html><title>Not here</title>"), AuthError, None),
    ],
    ids=range(13),
)
async def test_refusals(answer: Any, kind: type[AuthError], code: str | None) -> None:
    """A refused refresh token is RefreshRejected, any other refusal an AuthError; one request, nothing wiped."""
    store = MemoryTokenStore(expired())
    async with Scripted(answer) as server, oauth_for(server.base_url, store=store) as oauth:
        with pytest.raises(AuthError, match=r"^HTTP \d+ on oauth\.refresh") as caught:
            await oauth.access_token()
        assert type(caught.value) is kind
        assert caught.value.code == code
        assert len(server.requests) == 1
        kept = await store.load()
        assert kept is not None
        assert kept.refresh_token == "refresh-old"


@pytest.mark.parametrize("shape", ["flat", "nested", "rfc9457", "list"])
async def test_the_error_shapes_of_the_sandbox(shape: Any) -> None:
    """Whatever shape the errors have, a revoked refresh token is RefreshRejected."""
    profile = Profile(token_error_shape="profile", error_shape=shape)
    async with Sandbox(seed=6, profile=profile) as sandbox:
        oauth, code = sandbox_oauth(sandbox)
        async with oauth:
            old = await oauth.exchange(code())
            await oauth.refresh()
            await oauth._current._store.save(Token(old.access_token, old.refresh_token, in_seconds(-1)))
            with pytest.raises(RefreshRejected, match="used before") as caught:
                await oauth.refresh()
            assert caught.value.code == "invalid_grant"
            assert caught.value.request_id


@pytest.mark.parametrize(
    "answer",
    [
        raw(200, b""),
        raw(200, b"<html>Hello</html>"),
        raw(200, b"\xff\xfe{}"),
        raw(200, b'{"access_token": "a'),
        says([]),
        says("text"),
        says({}),
        says({"access_token": None}),
        says({"access_token": ""}),
        says({"access_token": 5}),
        says({"access_token": "a\nb"}),
        says({"access_token": "a", "refresh_token": 5}),
        raw(204),
    ],
    ids=range(13),
)
async def test_success_without_a_token(answer: Any) -> None:
    """A success that carries no usable token is an AuthError with status; it is not repeated."""
    async with Scripted(answer) as server, oauth_for(server.base_url) as oauth:
        with pytest.raises(AuthError, match=r"^oauth\.exchange: the answer holds no token \(HTTP 20[04]\)$") as caught:
            await oauth.exchange("code")
        assert caught.value.status in {200, 204}
        assert len(server.requests) == 1


async def test_success_without_a_token_names_the_request() -> None:
    """The request id is there for the service's support."""
    async with Scripted(says({"request_id": "req-5"})) as server, oauth_for(server.base_url) as oauth:
        with pytest.raises(AuthError, match="request id req-5") as caught:
            await oauth.exchange("code")
        assert caught.value.request_id == "req-5"


async def test_a_huge_answer() -> None:
    """More than a mebibyte is not read: an error with status and request id, and no retry."""
    async with (
        Scripted(raw(200, b" " * 3_000_000, request_id="req-6")) as server,
        oauth_for(server.base_url) as oauth,
    ):
        with pytest.raises(TransportError, match="larger than 1048576 bytes") as caught:
            await oauth.exchange("code")
        assert (caught.value.status, caught.value.request_id) == (200, "req-6")
        assert len(server.requests) == 1


# Sessions


async def test_its_own_session_is_closed_with_it() -> None:
    """The session it made is closed by `async with`, and no connection stays open."""
    async with Scripted(grants()) as server:
        async with oauth_for(server.base_url) as oauth:
            await oauth.exchange("code")
            session = oauth._endpoint.sessions.get()
            assert isinstance(session.connector, aiohttp.TCPConnector)
        assert session.closed
        with pytest.raises(ClientClosed):
            await oauth.refresh()


async def test_a_session_of_the_callers_own() -> None:
    """A session given to OAuth is used, before a client's, and stays open."""
    async with Scripted(grants()) as server, aiohttp.ClientSession(headers={"X-Mine": "yes"}) as session:
        async with oauth_for(server.base_url, session=session) as oauth, SigningClient(server.base_url, oauth):
            await oauth.exchange("code")
        assert not session.closed
        assert server.requests[0].headers["X-Mine"] == "yes"


async def test_the_clients_session_is_used_while_it_is_open() -> None:
    """The session of any open client serves; after the last it makes its own, which it closes."""
    async with (
        Scripted(grants()) as server,
        aiohttp.ClientSession(headers={"X-Session": "one"}) as one,
        aiohttp.ClientSession(headers={"X-Session": "two"}) as two,
        oauth_for(server.base_url) as oauth,
    ):
        first = SigningClient(server.base_url, oauth, session=one)
        second = SigningClient(server.base_url, oauth, session=two)
        await first.aclose()
        await oauth.exchange("code")
        third = SigningClient(server.base_url, oauth, session=one)
        await second.aclose()
        await oauth.refresh()
        await one.close()
        await oauth.refresh()
        await third.aclose()
        await oauth.refresh()
        used = [received.headers.get("X-Session") for received in server.requests]
    assert used == ["two", "one", None, None]


class _Elsewhere(http.server.BaseHTTPRequestHandler):
    """A service that runs in a thread, and so outlives an event loop; its tokens are numbered."""

    tokens = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        _Elsewhere.tokens += 1
        self._answer({"access_token": f"access-{self.tokens}", "refresh_token": "refresh", "expires_in": 3600})

    def do_GET(self) -> None:
        self._answer({"id": self.headers["Authorization"]})

    def _answer(self, data: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(data).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The origin of a service outside of all event loops."""
    monkeypatch.setattr(_Elsewhere, "tokens", 0)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Elsewhere) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_oauth_shared_by_clients_of_several_event_loops(elsewhere: str) -> None:
    """Each loop's client refreshes through its own session, though those of earlier loops are still around."""
    store = MemoryTokenStore(expired())
    oauth = oauth_for(elsewhere, store=store)
    earlier = []

    async def work() -> str | None:
        client = SigningClient(elsewhere, oauth)
        earlier.append(client)
        # The lock is waited for in each of the loops.
        async with store.lock():
            refresh = asyncio.create_task(oauth.refresh())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await refresh
        user = await client.me()
        # Not the client: it is forgotten, and would be warned of.
        await client._shared.sessions.get().close()
        return user.id

    assert [asyncio.run(work()) for _ in range(3)] == ["Bearer access-1", "Bearer access-2", "Bearer access-3"]


def test_oauth_whose_own_session_belongs_to_an_earlier_event_loop(elsewhere: str) -> None:
    """It makes a new one."""
    oauth = oauth_for(elsewhere, store=MemoryTokenStore(expired()))

    async def work() -> str:
        token = await oauth.refresh()
        # Else aiohttp complains that it is left open.
        await oauth._endpoint.sessions.get().close()
        return token.access_token

    assert [asyncio.run(work()) for _ in range(2)] == ["access-1", "access-2"]


async def test_the_clients_own_session_is_lent() -> None:
    """With a client around, OAuth makes no session of its own: closing the client closes all there is."""
    async with Scripted(grants(), says({"id": "u"})) as server:
        oauth = oauth_for(server.base_url, store=MemoryTokenStore(expired()))
        async with SigningClient(server.base_url, oauth) as client:
            await client.me()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del client, oauth
            gc.collect()
        assert not caught


async def test_a_forgotten_session_is_warned_of() -> None:
    """Who does not close what made a session is told, with what to do, and no secret."""
    async with Scripted(grants()) as server:
        oauth = oauth_for(server.base_url)
        await oauth.exchange("code")
        session = oauth._endpoint.sessions.get()
        kept = [oauth]
        del oauth
        with pytest.warns(ResourceWarning, match=r"OAuth\(.*\) was not closed: use `async with`, or await aclose\(\)"):
            kept.clear()
        await session.close()


@pytest.mark.parametrize("who", ["client", "oauth"])
async def test_closing_waits_for_a_refresh(who: str) -> None:
    """Closed in the middle of a refresh, it lets that finish: the token is saved."""
    store, slow = MemoryTokenStore(expired()), Slow(grants())
    async with Scripted(slow) as server:
        oauth = oauth_for(server.base_url, store=store)
        client = SigningClient(server.base_url, oauth)
        task = asyncio.create_task(oauth.access_token())
        await slow.begun.wait()
        closing = asyncio.create_task(client.aclose() if who == "client" else oauth.aclose())
        await asyncio.sleep(0.02)
        assert not closing.done()
        slow.go.set()
        await closing
        assert await task == "access-new"
        kept = await store.load()
        assert kept is not None
        assert kept.access_token == "access-new"
        await client.aclose()
        await oauth.aclose()


async def test_a_cancelled_close_can_be_repeated() -> None:
    """A close that is cancelled while it waits leaves the refresh its session, and the next close does the rest."""
    store, slow = MemoryTokenStore(expired()), Slow(grants())
    async with Scripted(slow) as server:
        oauth = oauth_for(server.base_url, store=store)
        task = asyncio.create_task(oauth.access_token())
        await slow.begun.wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await oauth.aclose()
        slow.go.set()
        await oauth.aclose()
        assert await task == "access-new"


async def test_no_task_and_no_connection_is_left() -> None:
    """After refreshes that succeeded, failed, hung and were cancelled nothing is left running or connected."""
    answers = [
        grants("1"),
        says({"error": "x"}, 400),
        drops,
        drops,
        raw(200, b" " * 2_000_000),
        raw(200, b"<html>"),
        hangs,
    ]
    before = asyncio.all_tasks()
    async with (
        Scripted(*answers) as server,
        oauth_for(server.base_url, store=MemoryTokenStore(expired()), timeout=0.3) as oauth,
    ):
        await oauth.access_token()
        for _ in range(4):
            with pytest.raises(SigningError):
                await oauth.refresh()
        session = oauth._endpoint.sessions.get()
        task = asyncio.create_task(oauth.refresh())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await oauth.settle()
        assert isinstance(session.connector, aiohttp.TCPConnector)
        assert not session.connector._acquired
    await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() - before if "signing_async" in task.get_name()]
