"""OAuth at its limits and to the letter: what only a changed program would get wrong."""

from __future__ import annotations

import asyncio
import email.utils
import logging
import random
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from signing_async import (
    AuthError,
    InvalidRequest,
    MemoryTokenStore,
    OAuth,
    RefreshRejected,
    RequestTimeout,
    RetryPolicy,
    StateMismatch,
    Token,
    TransportError,
)
from signing_async.auth.oauth import _expired, _expiry, _read_callback
from signing_async.transport import wire
from tests.auth.oauth_servers import SECRET, Scripted, drops, grants, hangs, oauth_for, raw, says

NOW = 1_900_000_000.0


def _in(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def test_the_state_is_long_enough() -> None:
    """256 random bits, in 43 characters, and others each time."""
    oauth = OAuth("https://a.example", client_id="a", client_secret="s", redirect_uri="https://b.example")
    states = {oauth.authorization_request().state for _ in range(50)}
    assert len(states) == 50
    assert {len(state) for state in states} == {43}


def test_a_token_expires_at_its_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a moment earlier, and not later."""
    monkeypatch.setattr(time, "time", lambda: NOW)
    assert _expired(Token("t", expires_at=datetime.fromtimestamp(NOW, UTC)))
    assert not _expired(Token("t", expires_at=datetime.fromtimestamp(NOW + 0.5, UTC)))
    assert not _expired(Token("t"))


@pytest.mark.parametrize(
    ("said", "unit", "lifetime"),
    [
        (1, 1.0, 1.0),
        (0.5, 1.0, 0.5),
        ("60", 60.0, 3600.0),
        (0, 1.0, None),
        (-1, 1.0, None),
        (True, 1.0, None),
        (None, 1.0, None),
        ("soon", 1.0, None),
        ("nan", 1.0, None),
        ("inf", 1.0, None),
        (1e300, 1.0, None),
        ({}, 1.0, None),
    ],
)
def test_a_lifetime(said: Any, unit: float, lifetime: float | None) -> None:
    """A number above 0, in text too; anything else says nothing."""
    found = _expiry(said, NOW, unit)
    assert found == (None if lifetime is None else datetime.fromtimestamp(NOW + lifetime, UTC))


async def test_a_state_that_is_no_text() -> None:
    """Half a character pair, from wherever it was kept, is simply not the state that came back."""
    oauth = oauth_for("http://127.0.0.1:9")
    with pytest.raises(StateMismatch):
        await oauth.exchange("https://app.example.com/callback?code=c&state=%ed%a0%80", state="\ud800")
    await oauth.aclose()


async def test_a_token_is_used_until_its_last_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it cannot be renewed early it serves on for the half second that is left, and at its end no more."""
    token = Token("old", "refresh-old", datetime.fromtimestamp(NOW, UTC))
    once = RetryPolicy.none()
    limits: list[float | None] = []
    timeout = asyncio.timeout

    def watched(delay: float | None) -> asyncio.Timeout:
        limits.append(delay)
        return timeout(10)

    async with (
        Scripted(says({}, 503)) as server,
        oauth_for(server.base_url, store=MemoryTokenStore(token), retry=once) as oauth,
    ):
        monkeypatch.setattr(time, "time", lambda: NOW - 100)
        assert await oauth.access_token() == "old"
        monkeypatch.setattr(time, "time", lambda: NOW - 0.5)
        monkeypatch.setattr(asyncio, "timeout", watched)
        assert await oauth.access_token() == "old"
        assert len(server.token_requests) == 1
        # An endpoint that hangs would not hold the call up until the token has expired.
        assert limits[0] == 0.25
        monkeypatch.setattr(time, "time", lambda: NOW)
        with pytest.raises(AuthError, match="HTTP 503"):
            await oauth.access_token()


async def test_without_settings_a_fault_that_passes_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is the usual one where none is given."""
    monkeypatch.setattr(random, "random", lambda: 0.0)
    async with (
        Scripted(*[raw(503)] * 4, grants()) as server,
        OAuth(server.base_url, client_id="a", client_secret="s", redirect_uri="https://b.example") as oauth,
    ):
        assert (await oauth.exchange("a-code")).access_token == "access-new"
        assert len(server.token_requests) == 5


async def test_the_tokens_of_long_ago_are_not_remembered() -> None:
    """However long it runs, it holds the newest eight pairs of tokens and the client secret, and no more."""
    async with (
        Scripted(*(grants(str(number)) for number in range(20))) as server,
        oauth_for(server.base_url) as oauth,
    ):
        await oauth.exchange("a-code")
        for _ in range(19):
            await oauth.refresh()
        held = set(oauth.secrets())
        server.answers = [says({"access_token": "access-alone"})]
        await oauth.exchange("a-code")
        assert set(oauth.secrets()) == held - {"access-12"} | {"access-alone"}
    assert held == {SECRET} | {f"{kind}-{number}" for kind in ("access", "refresh") for number in range(12, 20)}


async def test_a_rejected_token_is_replaced() -> None:
    """By a new one from the service; the one that was rejected is not taken from the store again."""
    token = Token("old", "refresh-old", _in(3600))
    async with Scripted(grants()) as server, oauth_for(server.base_url, store=MemoryTokenStore(token)) as oauth:
        assert await oauth.access_token() == "old"
        assert await oauth.renewed(token) is True
        assert await oauth.access_token() == "access-new"
        # Whoever comes late with the old one gets the new one, without another request.
        assert await oauth.renewed(token) is True
        assert len(server.token_requests) == 1


async def test_a_rejected_token_without_a_refresh_token() -> None:
    """It is replaced where another token came; else nothing can be done."""
    old, store = Token("old"), MemoryTokenStore(Token("old"))
    async with (
        Scripted(says({"access_token": "newer"})) as server,
        oauth_for(server.base_url, store=store) as oauth,
    ):
        with pytest.raises(AuthError, match="there is no token to refresh"):
            await oauth_for(server.base_url).renewed(old)
        assert await oauth.token() == old
        assert await oauth.renewed(old) is False
        newer = await oauth.exchange("a-code")
        store._token = None
        assert await oauth.renewed(old) is True
        assert await oauth.token() == newer
        assert len(server.token_requests) == 1


async def test_after_a_failed_early_refresh(caplog: pytest.LogCaptureFixture) -> None:
    """The present token serves on, the log says why, and half of what is left passes before the next try."""
    token = Token("old", "refresh-old", _in(20))
    failing = oauth_for("http://127.0.0.1:9", store=MemoryTokenStore(token))
    async with failing as oauth:
        oauth._token = token
        oauth._fresh_until = 0.0
        assert await oauth.access_token() == "old"
        assert 8.0 < oauth._fresh_until - time.time() < 10.5
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.getMessage().startswith(
        "a token refresh ahead of expiry failed or takes long, the present token serves on: oauth.refresh: could"
    )


async def test_a_closed_gate_ends_a_token_request(caplog: pytest.LogCaptureFixture) -> None:
    """At once, in one attempt, with the time to wait."""
    async with oauth_for("http://127.0.0.1:9", timeout=5.0) as oauth:
        oauth._gate.close(100.0)
        with caplog.at_level(logging.DEBUG, "signing_async"), pytest.raises(AuthError) as caught:
            await oauth.exchange("a-code")
    assert str(caught.value) == "oauth.exchange: the service asked to wait for 100 s; nothing was sent (HTTP 429)"
    assert caught.value.status == 429
    assert 99 < (caught.value.retry_after or 0) <= 100
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == ["oauth.exchange attempt 1"]


async def test_the_words_of_a_failure() -> None:
    """Without a request id nothing is said of one; what the status line says is told where nothing else is."""
    async with Scripted(drops) as server, oauth_for(server.base_url) as oauth:
        with pytest.raises(TransportError) as lost:
            await oauth.exchange("a-code")
        assert str(lost.value).startswith("oauth.exchange: the connection was closed before a response came (")
        assert "request id" not in str(lost.value)
        assert str(lost.value).endswith(")")
        assert len(server.token_requests) == 2
    async with Scripted(raw(418)) as server, oauth_for(server.base_url) as oauth:
        with pytest.raises(AuthError) as refused:
            await oauth.exchange("a-code")
        assert str(refused.value) == "HTTP 418 on oauth.exchange: I'm a Teapot"
    async with Scripted(says({"id": 1}, request_id="r1")) as server, oauth_for(server.base_url) as oauth:
        with pytest.raises(AuthError) as empty:
            await oauth.exchange("a-code")
        assert str(empty.value) == "oauth.exchange: the answer holds no token (HTTP 200, request id r1)"
        assert (empty.value.status, empty.value.request_id) == (200, "r1")


@pytest.mark.parametrize("ahead", [0.0, 7200.0])
async def test_a_date_to_come_back(ahead: float) -> None:
    """A Retry-After date is taken by the server's own clock, where it tells that, else by this one's."""
    dated = {"Date": email.utils.formatdate(time.time() + ahead, usegmt=True)} if ahead else {}
    later = email.utils.formatdate(time.time() + ahead + 1800, usegmt=True)
    async with Scripted(raw(429, b"", Retry_After=later, **dated)) as server, oauth_for(server.base_url) as oauth:
        with pytest.raises(AuthError) as caught:
            await oauth.exchange("a-code")
        assert 1700 < (caught.value.retry_after or 0) < 1810
        assert len(server.token_requests) == 1


async def test_oauths_own_place_for_the_code_counts() -> None:
    """Whatever other code an answer holds; and it is cut where it is endless."""
    body = {"code": "other", "message": "No.", "error": "invalid_grant"}
    store = MemoryTokenStore(Token("old", "refresh-old", _in(-1)))
    async with Scripted(says(body, status=400)) as server, oauth_for(server.base_url, store=store) as oauth:
        with pytest.raises(RefreshRejected) as refused:
            await oauth.access_token()
        assert refused.value.code == "invalid_grant"
    async with Scripted(says({"error": "e" * 500}, status=400)) as server, oauth_for(server.base_url) as oauth:
        with pytest.raises(AuthError) as endless:
            await oauth.exchange("a-code")
        assert endless.value.code == "e" * 100


async def test_a_429_that_names_no_time_closes_the_gate_for_none() -> None:
    """Where nothing is repeated, the next token request goes out at once."""
    once = RetryPolicy.none()
    async with Scripted(raw(429), grants()) as server, oauth_for(server.base_url, retry=once) as oauth:
        with pytest.raises(AuthError):
            await oauth.exchange("a-code")
        assert oauth._gate.opens_at <= asyncio.get_running_loop().time()
        assert (await oauth.exchange("a-code")).access_token == "access-new"


async def test_a_429_closes_the_gate_for_the_whole_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the delay that was drawn, where that is longer than the service's own time."""
    monkeypatch.setattr(random, "random", lambda: 0.999)
    policy = RetryPolicy(base_delay=0.3)
    async with (
        Scripted(raw(429, b"", Retry_After="0.01"), grants()) as server,
        oauth_for(server.base_url, retry=policy) as oauth,
    ):
        began = asyncio.get_running_loop().time()
        await oauth.exchange("a-code")
        assert oauth._gate.opens_at >= began + 0.29


async def test_a_5xx_leaves_the_gate_open() -> None:
    """Whatever time it names: the next token request goes out at once."""
    once = RetryPolicy.none()
    async with (
        Scripted(raw(503, b"", Retry_After="30"), grants()) as server,
        oauth_for(server.base_url, retry=once) as oauth,
    ):
        with pytest.raises(AuthError):
            await oauth.exchange("a-code")
        assert (await oauth.exchange("a-code")).access_token == "access-new"


@pytest.mark.parametrize(("retry_after", "requests"), [("61", 1), ("0", 5)])
async def test_a_5xx_that_names_a_time(retry_after: str, requests: int) -> None:
    """It is tried again after that time, and not at all where it is more than may be waited."""
    async with Scripted(raw(503, b"", Retry_After=retry_after)) as server, oauth_for(server.base_url) as oauth:
        with pytest.raises(AuthError, match="HTTP 503") as caught:
            await oauth.exchange("a-code")
        assert caught.value.retry_after == float(retry_after)
        assert len(server.token_requests) == requests


async def test_a_huge_error() -> None:
    """Of an error only the beginning is read: it stays the service's refusal, with its status."""
    async with Scripted(raw(400, b"x" * 3_000_000)) as server, oauth_for(server.base_url) as oauth:
        with pytest.raises(AuthError, match=r"^HTTP 400 on oauth\.exchange") as caught:
            await oauth.exchange("a-code")
        assert caught.value.status == 400
        assert len(server.token_requests) == 1


async def test_a_timeout_in_a_later_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells which that was; and no attempt spends more than half of the time on connecting, so that another can."""
    connects: list[float] = []
    send = wire.send

    async def watched(*arguments: Any, connect: float, **more: Any) -> Any:
        connects.append(connect)
        return await send(*arguments, connect=connect, **more)

    monkeypatch.setattr(wire, "send", watched)
    async with Scripted(raw(503), hangs) as server, oauth_for(server.base_url, timeout=1.5) as oauth:
        with pytest.raises(RequestTimeout, match=r"no answer came within 1\.5 s") as caught:
            await oauth.exchange("a-code")
        assert caught.value.attempts == 2
    assert connects == [0.75, 0.75]


async def test_what_is_logged_of_a_token_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line for each attempt: what came of it, and when it is tried again."""
    monkeypatch.setattr(random, "random", lambda: 0.5)
    answers = [raw(503, request_id="r1"), grants(), says({"error": "no"}, status=400)]
    async with Scripted(*answers) as server, oauth_for(server.base_url) as oauth:
        with caplog.at_level(logging.DEBUG, "signing_async"):
            await oauth.exchange("a-code")
            with pytest.raises(AuthError):
                await oauth.refresh()
    assert [record.getMessage() for record in caplog.records if record.name == "signing_async"] == [
        "oauth.exchange attempt 1: HTTP 503 on oauth.exchange: Service Unavailable (request id r1); again in 0.005 s",
        "oauth.exchange attempt 2: a token came",
        "oauth.refresh attempt 1: HTTP 400 on oauth.refresh: Bad Request (code no)",
    ]


STATE = "the-state"
MISSING = "exchange: the callback URL or code is missing"
SPACE = "exchange: neither a callback URL nor a code: there is white space in it"
UNREADABLE = "exchange: the callback is not a URL that can be read"
NO_STATE = "exchange: state is missing: give the state that was kept when the user was sent away"
FORGED = "the callback's state is not the one that was sent: it may be forged, so it is not used"


@pytest.mark.parametrize(
    ("callback", "state", "kind", "words"),
    [
        (None, STATE, InvalidRequest, MISSING),
        (" ", STATE, InvalidRequest, MISSING),
        ("https://a/?code=c d&state=the-state", STATE, InvalidRequest, SPACE),
        ("https://a/?code=c\td&state=the-state", STATE, InvalidRequest, SPACE),
        ("https://[a/?code=c&state=the-state", STATE, InvalidRequest, UNREADABLE),
        ("https://a/?code=c&state=the-state" + "&a=b" * 99, STATE, InvalidRequest, UNREADABLE),
        ("https://a/?code=c&state=the-state", None, InvalidRequest, NO_STATE),
        ("https://a/?code=c&state=the-state", "", InvalidRequest, NO_STATE),
        ("https://a/?code=c&state=the-State", STATE, StateMismatch, FORGED),
        ("https://a/?code=c", STATE, StateMismatch, FORGED),
        ("https://a/?code=c&state=the-state&state=the-state", STATE, StateMismatch, FORGED),
        ("https://a/?code=c&code=d&state=the-state", STATE, AuthError, "the callback carries more than one code"),
        ("https://a/?state=the-state", STATE, AuthError, "the callback carries no code"),
        (
            "https://a/?state=the-state&error=no&error_description=not&error_description=now",
            STATE,
            AuthError,
            "authorization was refused: not now (code no)",
        ),
        ("https://a/?state=the-state&error=no", STATE, AuthError, "authorization was refused: no (code no)"),
    ],
)
def test_the_words_about_a_callback(callback: Any, state: Any, kind: type[Exception], words: str) -> None:
    """They say what to do, and show nothing of the callback but what the service says."""
    found = _read_callback(callback, state)
    assert (type(found), str(found)) == (kind, words)


def test_a_callback_of_just_so_many_parts() -> None:
    """A hundred are read, and of what is said of an error so much is shown."""
    assert _read_callback("https://a/?code=c&state=the-state" + "&a=b" * 98, STATE) == "c"
    found = _read_callback(f"https://a/?state=the-state&error={'e' * 200}&error_description={'d' * 900}", STATE)
    assert str(found) == f"authorization was refused: {'d' * 500} (code {'e' * 100})"


async def test_the_words_about_a_token_that_is_not_there() -> None:
    """They say what to do about it."""
    async with oauth_for("http://127.0.0.1:9") as oauth:
        with pytest.raises(AuthError) as missing:
            await oauth.token()
    assert str(missing.value) == (
        "there is no token yet: send the user to authorization_request().url, then call exchange()"
    )
    only = MemoryTokenStore(Token("old", None, _in(-1)))
    async with oauth_for("http://127.0.0.1:9", store=only) as oauth:
        with pytest.raises(AuthError) as alone:
            await oauth.token()
    assert str(alone.value) == ("the access token cannot be refreshed: there is no refresh token; authorize again")
