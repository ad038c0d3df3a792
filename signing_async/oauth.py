"""OAuth 2.0 authorization code flow: the authorize URL and its state, the code exchange, and single-flight refresh."""

from __future__ import annotations

import asyncio
import hmac
import json
import random
import secrets as random_secrets
import time
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import parse_qs, urlencode, urlsplit

import aiohttp
import attrs

from . import retry, wire
from .answers import look_up, request_id
from .assumptions import Assumptions
from .convert import Unreadable, parse
from .errors import (
    AuthError,
    ConfigurationError,
    InvalidRequest,
    RefreshRejected,
    RequestTimeout,
    SigningError,
    StateMismatch,
    TransportError,
)
from .models import Token
from .redaction import redact
from .retry import Outcome, Repeat, RetryPolicy, Step
from .throttle import Gate
from .token_stores import MemoryTokenStore, TokenStore

__all__ = ["AuthorizationRequest", "OAuth"]

_LARGEST_ANSWER = 1024 * 1024
_REMEMBERED_SECRETS = 16
_DEFAULT_RETRY = RetryPolicy()
_DEFAULT_ASSUMPTIONS = Assumptions()


@attrs.frozen
class AuthorizationRequest:
    """Send the user's browser to ``url``; keep ``state`` in the user's session until the callback comes."""

    url: str
    state: str = attrs.field(repr=False)


class OAuth:
    """Gets tokens and keeps them fresh. One object for each user of the service, shared by any number of clients.

    ::

        oauth = OAuth(base_url, client_id=..., client_secret=..., redirect_uri=..., store=FileTokenStore("token.json"))
        request = oauth.authorization_request()     # send the browser to request.url, remember request.state
        await oauth.exchange(callback_url, state=remembered_state)
        async with SigningClient(base_url, oauth) as client:
            ...

    ``token_format`` is how the token endpoint is spoken to; the specification allows both. ``timeout`` bounds a token
    request with all its repeats.
    """

    def __init__(
        self,
        base_url: str,
        *,
        client_id: str,
        client_secret: str,
        redirect_uri: str,
        store: TokenStore | None = None,
        session: aiohttp.ClientSession | None = None,
        token_format: Literal["form", "json"] = "form",
        retry: RetryPolicy = _DEFAULT_RETRY,
        timeout: float = 30.0,
        assumptions: Assumptions = _DEFAULT_ASSUMPTIONS,
    ) -> None:
        self._origin = wire.check_origin(base_url)
        for name, value in (("client_id", client_id), ("client_secret", client_secret), ("redirect_uri", redirect_uri)):
            if not isinstance(value, str) or not value:
                raise ConfigurationError(f"OAuth: {name} is missing")
        if token_format not in ("form", "json"):
            raise ConfigurationError(f"OAuth: token_format must be 'form' or 'json', not {token_format!r}")
        if not isinstance(timeout, int | float) or not timeout > 0:
            raise ConfigurationError(f"OAuth: timeout must be seconds above 0, not {timeout!r}")
        self.client_id = client_id
        self.redirect_uri = redirect_uri
        self._client_secret = client_secret
        self._store = MemoryTokenStore() if store is None else store
        self._sessions = wire.Sessions(session)
        self._lent: wire.Sessions | None = None
        self._as_json = token_format == "json"
        self._retry = retry
        self._timeout = timeout
        self._assumptions = assumptions
        self._gate = Gate()
        self._token: Token | None = None
        self._fresh_until = 0.0
        self._refreshing: asyncio.Task[Token] | None = None
        # Tokens of a while ago may still be echoed by a server.
        self._secrets: deque[str] = deque([client_secret], maxlen=_REMEMBERED_SECRETS)

    def __repr__(self) -> str:
        return f"OAuth({self._origin!r}, client_id={self.client_id!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let a refresh that is under way finish, so that its token is saved; close the session if it is its own."""
        await self.settle()
        await self._sessions.close()

    def __del__(self) -> None:
        if hasattr(self, "_sessions"):
            self._sessions.warn_if_open(self)

    # The flow

    def authorization_request(self) -> AuthorizationRequest:
        """A URL to send the user to, with a new random state."""
        state = random_secrets.token_urlsafe(32)
        query = {
            "client_id": self.client_id,
            "redirect_uri": self.redirect_uri,
            "response_type": "code",
            "state": state,
        }
        return AuthorizationRequest(f"{self._origin}/oauth/authorize?{urlencode(query)}", state)

    async def exchange(self, callback_url_or_code: str, state: str | None = None) -> Token:
        """Trade the code of a callback for a token, and save it.

        Give the callback's whole URL and the ``state`` that was remembered: it is checked, and so is the callback's
        ``error``. A bare code carries no state, so give one only where the state was checked already.
        """
        code = _read_callback(callback_url_or_code, state)
        form = {
            "grant_type": "authorization_code",
            "client_id": self.client_id,
            "client_secret": self._client_secret,
            "redirect_uri": self.redirect_uri,
            "code": code,
        }
        token = await self._request_token(form, "oauth.exchange")
        async with self._store.lock():
            await self._store.save(token)
        self._publish(token)
        return token

    async def access_token(self) -> str:
        """An access token to use now, refreshed first if it is about to expire."""
        return (await self.token()).access_token

    async def token(self) -> Token:
        """The token to use now: loaded from the store once, and refreshed first if it is about to expire."""
        if self._token is None:
            self._adopt(await self._store.load())
        token = self._token
        if token is None:
            raise AuthError("there is no token yet: send the user to authorization_request().url, then call exchange()")
        if time.time() < self._fresh_until or (token.refresh_token is None and not _expired(token)):
            return token
        try:
            return await self.refresh(rejected=token)
        except SigningError:
            if _expired(token):
                raise
            # It was merely early. Not on every call, though: half of what is left later is soon enough.
            if self._token is token:
                self._fresh_until = time.time() + _seconds_left(token) / 2
            return token

    async def refresh(self, rejected: Token | str | None = None) -> Token:
        """A token other than ``rejected`` (None: than the present one).

        Where the present one is another already, it is returned. However many ask, one refresh runs at a time, in a
        task of its own: a caller that is cancelled neither stops it nor takes the others along.
        """
        stale = rejected.access_token if isinstance(rejected, Token) else rejected
        if stale is not None and self._token is not None and self._token.access_token != stale:
            return self._token
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh(stale), name="signing_async token refresh")
            self._refreshing.add_done_callback(_retrieve)
        return await asyncio.shield(self._refreshing)

    async def renewed(self, rejected: Token) -> bool:
        """Replace a token that the service rejected, where there is a refresh token to do it with."""
        if rejected.refresh_token is None and (
            self._token is None or self._token.access_token == rejected.access_token
        ):
            return False
        await self.refresh(rejected=rejected)
        return True

    def secrets(self) -> Iterable[str]:
        """What must appear in no text."""
        return tuple(self._secrets)

    def lend(self, sessions: wire.Sessions) -> None:
        """Use a client's session for as long as that is open."""
        self._lent = sessions

    async def settle(self) -> None:
        """Return when no refresh is under way."""
        if self._refreshing is not None and not self._refreshing.done():
            await asyncio.wait([self._refreshing])

    # Refreshing

    async def _refresh(self, stale: str | None) -> Token:
        async with self._store.lock():
            current = await self._store.load() or self._token
            if stale is None and self._token is not None:
                stale = self._token.access_token
            if current is not None and current.access_token != stale and not _expired(current):
                # Another process was here first.
                self._adopt(current)
                return current
            if current is None or current.refresh_token is None:
                raise AuthError("the access token cannot be refreshed: there is no refresh token; authorize again")
            self._remember(current)
            form = {
                "grant_type": "refresh_token",
                "client_id": self.client_id,
                "client_secret": self._client_secret,
                "refresh_token": current.refresh_token,
            }
            token = await self._request_token(form, "oauth.refresh")
            if token.refresh_token is None:
                token = attrs.evolve(token, refresh_token=current.refresh_token)
            await self._store.save(token)
            self._publish(token)
            return token

    def _adopt(self, token: Token | None) -> None:
        if token is not None:
            self._publish(token)

    def _publish(self, token: Token) -> None:
        self._remember(token)
        self._token = token
        left = _seconds_left(token)
        self._fresh_until = time.time() + left - min(self._assumptions.refresh_margin, 0.1 * max(left, 0.0))

    def _remember(self, token: Token) -> None:
        for secret in (token.access_token, token.refresh_token):
            if secret is not None and secret not in self._secrets:
                self._secrets.append(secret)
        if self._client_secret not in self._secrets:
            self._secrets.append(self._client_secret)

    # The token endpoint

    async def _request_token(self, form: Mapping[str, str], operation: str) -> Token:
        return await retry.run(_TokenRequest(self, form, operation, self._timeout).attempt)

    def _session(self) -> aiohttp.ClientSession:
        lent = self._lent
        return (self._sessions if lent is None or lent.closed else lent).get()


class _TokenRequest:
    """The attempts of one token request."""

    def __init__(self, oauth: OAuth, form: Mapping[str, str], operation: str, timeout: float) -> None:
        self._oauth = oauth
        self._form = form
        self._operation = operation
        self._timeout = timeout
        self._deadline = asyncio.get_running_loop().time() + timeout
        self._attempts = 0
        self._lost = 0

    async def attempt(self) -> Token:
        self._attempts += 1
        result = await self._exchange()
        if isinstance(result, Token):
            return result
        self._lost += result.outcome is Outcome.LOST
        decision = retry.decide(
            self._oauth._retry,
            attempt=self._attempts,
            retry_after=result.retry_after,
            remaining=self._deadline - asyncio.get_running_loop().time(),
            chance=random.random(),
        )
        if result.outcome is Outcome.THROTTLED:
            wait = decision.delay if decision.delay is not None else result.retry_after
            self._oauth._gate.close(min(wait or 0.0, self._oauth._retry.max_retry_after))
        once = retry.step(result.outcome, Repeat.TOKEN) is Step.AGAIN_ONCE
        if decision.delay is None or not result.passing or (once and self._lost > 1):
            raise result.error
        raise retry.Again(decision.delay)

    async def _exchange(self) -> Token | retry.Trouble:
        oauth = self._oauth
        began = time.time()
        body: wire.Body | None = None
        try:
            async with asyncio.timeout_at(self._deadline) as bound:
                await oauth._gate.passed()
                body = self._body()
                request = wire.Request("POST", oauth._origin, "/api/oauth/token", body=body)
                response = await wire.send(oauth._session(), request, None, connect=0.5 * self._timeout)
                if isinstance(response, wire.Failure):
                    return self._failed(response)
                try:
                    text = await response.read(_LARGEST_ANSWER)
                except wire.Broken as broken:
                    return self._failed(broken.failure)
                finally:
                    response.close()
                return self._understand(response, text, began)
        except TimeoutError:
            if not bound.expired():
                raise
        outcome = Outcome.LOST if body is not None and body.started else Outcome.UNSENT
        error = RequestTimeout(
            f"{self._operation}: no answer came within {self._timeout:g} s",
            operation=self._operation,
            attempts=self._attempts,
        )
        return retry.Trouble(outcome, error, passing=False)

    def _body(self) -> wire.Body:
        if self._oauth._as_json:
            return wire.bytes_body(json.dumps(dict(self._form)).encode(), "application/json")
        return wire.bytes_body(urlencode(self._form).encode(), "application/x-www-form-urlencoded")

    def _failed(self, failure: wire.Failure) -> retry.Trouble:
        error = TransportError(
            f"{self._operation}: {failure.words}", operation=self._operation, attempts=self._attempts
        )
        return retry.Trouble(failure.outcome, error, passing=failure.passing)

    def _understand(self, response: wire.Response, text: bytes, began: float) -> Token | retry.Trouble:
        try:
            data = parse(text)
        except Unreadable:
            data = None
        if response.ok:
            token = _read_token(data, began, self._oauth._assumptions)
            if token is not None:
                return token
        retry_after = retry.read_retry_after(
            response.headers.get("Retry-After"), date=response.headers.get("Date"), now=time.time
        )
        error = self._error(response, data, retry_after)
        if response.status == 429:
            return retry.Trouble(Outcome.THROTTLED, error, retry_after)
        if response.status >= 500:
            return retry.Trouble(Outcome.FAILED, error, retry_after)
        raise error

    def _error(self, response: wire.Response, data: Any, retry_after: float | None) -> AuthError:
        known = next(
            (found for path in ("error.code", "error", "code") if isinstance(found := look_up(data, path), str)), None
        )
        paths = ("error_description", "error.message", "message", "detail")
        said = next((found for path in paths if isinstance(found := look_up(data, path), str)), None)
        identity = request_id(response.headers, data, self._oauth._assumptions)
        what = "the answer holds no token" if response.ok else said or known or response.reason or "refused"
        facts = [f"HTTP {response.status}"]
        facts += [f"code {known}"] if known and known != what else []
        facts += [f"request id {identity}"] if identity else []
        secrets = (*self._oauth.secrets(), *(self._form.get(name, "") for name in ("code", "refresh_token")))
        text = redact(f"{self._operation}: {what[:500]} ({', '.join(facts)})", secrets)
        refused = known == "invalid_grant" and self._form["grant_type"] == "refresh_token"
        return (RefreshRejected if refused else AuthError)(
            text,
            code=None if known is None else redact(known[:100], secrets),
            status=response.status,
            request_id=None if identity is None else redact(identity, secrets),
            retry_after=retry_after,
        )


def _read_token(data: Any, began: float, assumptions: Assumptions) -> Token | None:
    """The token of a token response; None where there is none in it."""
    if not isinstance(data, dict):
        return None
    expires_at: float | None = None
    try:
        lifetime = float(data["expires_in"]) * assumptions.expires_in_seconds
        expires_at = began + lifetime
        datetime.fromtimestamp(expires_at, UTC)
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        expires_at = None
    try:
        return Token(data.get("access_token", ""), data.get("refresh_token") or None, expires_at, _token_type(data))
    except ConfigurationError:
        return None


def _token_type(data: Mapping[str, Any]) -> str:
    named = data.get("token_type")
    return named if isinstance(named, str) and named.isalnum() and named.lower() != "bearer" else "Bearer"


def _read_callback(callback_url_or_code: str, state: str | None) -> str:
    """The code of a callback whose state and error were checked; or the bare code."""
    if not isinstance(callback_url_or_code, str) or not callback_url_or_code.strip():
        raise InvalidRequest("exchange: the callback URL or code is missing")
    given = callback_url_or_code.strip()
    if "?" not in given and "://" not in given:
        return given
    try:
        query = parse_qs(urlsplit(given).query, max_num_fields=100)
    except ValueError:
        raise InvalidRequest("exchange: the callback is not a URL that can be read") from None
    if not state:
        raise InvalidRequest("exchange: state is missing: give the state that was kept when the user was sent away")
    returned = query.get("state", [])
    if len(returned) != 1 or not hmac.compare_digest(
        returned[0].encode("utf-8", "replace"), state.encode("utf-8", "replace")
    ):
        raise StateMismatch("the callback's state is not the one that was sent: it may be forged, so it is not used")
    if "error" in query:
        code, said = query["error"][0][:100], " ".join(query.get("error_description", []))[:500]
        raise AuthError(redact(f"authorization was refused: {said or code} (code {code})", [state]), code=code)
    codes = query.get("code", [])
    if len(codes) != 1:
        raise AuthError("the callback carries no code" if not codes else "the callback carries more than one code")
    return codes[0]


def _seconds_left(token: Token) -> float:
    return float("inf") if token.expires_at is None else token.expires_at.timestamp() - time.time()


def _expired(token: Token) -> bool:
    return _seconds_left(token) <= 0


def _retrieve(task: asyncio.Task[Token]) -> None:
    """Look at the outcome, so that asyncio does not complain where every caller was cancelled."""
    if not task.cancelled():
        task.exception()
