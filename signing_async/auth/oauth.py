"""OAuth 2.0 authorization code flow: the authorize URL and its state, the code exchange, and single-flight refresh."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import hashlib
import hmac
import json
import logging
import math
import re
import secrets as random_secrets
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import parse_qs, urlencode, urlsplit

import aiohttp
import attrs

from .. import _checks
from ..assumptions import Assumptions
from ..errors import (
    AuthError,
    ClientClosed,
    ConfigurationError,
    InvalidRequest,
    NotFound,
    RefreshRejected,
    RequestTimeout,
    SigningError,
    StateMismatch,
    TokenSuperseded,
    TransportError,
)
from ..models import Token
from ..transport import retry, wire
from ..transport.decode import Unreadable, parse
from ..transport.error_response import error_from, look_up, one_line, request_id
from ..transport.rate_limit import Pause
from ..transport.redaction import redact
from ..transport.retry import FailedAttempt, Outcome, Repeat, Retries, RetryPolicy
from .token_stores import MemoryTokenStore, TokenStore

__all__ = ["AuthorizationRequest", "OAuth", "leave"]

log: logging.Logger = logging.getLogger("signing_async")

_LARGEST_ANSWER = 1024 * 1024
_REMEMBERED_SECRETS = 16
_EARLY_WAIT = 5.0
_QUERY = re.compile(r"(^|&)(code|state|error)=")
_DEFAULT_RETRY = RetryPolicy()
_DEFAULT_ASSUMPTIONS = Assumptions()


@attrs.frozen
class AuthorizationRequest:
    """Send the user's browser to ``url``; keep ``state`` in the user's session until the callback comes.

    Keep ``code_verifier`` there too, if PKCE was asked for, and give both to `OAuth.exchange`.
    """

    url: str = attrs.field(repr=lambda url: repr(url.partition("&state=")[0] + "&state=..."))
    state: str = attrs.field(repr=False)
    code_verifier: str | None = attrs.field(default=None, repr=False)


class OAuth:
    """Gets tokens and keeps them fresh. One object for each user of the service, shared by any number of clients.

    ::

        store = FileTokenStore("token.json")
        async with OAuth(base_url, client_id=..., client_secret=..., redirect_uri=..., store=store) as oauth:
            request = oauth.authorization_request()     # send the browser to request.url, remember request.state
            await oauth.exchange(callback_url, state=remembered_state)
            async with SigningClient(base_url, oauth) as client:
                ...

    ``session`` is the caller's own, and never closed here; without it the session of an open client is used, and one
    of its own where there is none. ``token_format`` is how the token endpoint is spoken to; the specification allows
    both. ``timeout`` bounds a token request with all its repeats.
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
        self.client_id = client_id
        self.redirect_uri = redirect_uri
        self._client_secret = client_secret
        self.origin: str = "?"
        # Variables are shown in some tracebacks.
        del client_secret
        self.origin = wire.check_origin(base_url)
        for name in ("client_id", "_client_secret", "redirect_uri"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigurationError(f"OAuth: {name.lstrip('_')} is missing")
            if not _checks.is_text(getattr(self, name)):
                raise ConfigurationError(f"OAuth: {name.lstrip('_')} is no text that can be sent: not whole characters")
        if token_format not in ("form", "json"):
            raise ConfigurationError(f"OAuth: token_format must be 'form' or 'json', not {token_format!r}")
        _checks.seconds("OAuth", "timeout", timeout)
        if session is not None and not isinstance(session, aiohttp.ClientSession):
            raise ConfigurationError(f"OAuth: session must be an aiohttp.ClientSession, not {type(session).__name__}")
        self._store = MemoryTokenStore() if store is None else store
        kinds = (
            ("store", self._store, TokenStore),
            ("retry", retry, RetryPolicy),
            ("assumptions", assumptions, Assumptions),
        )
        for name, value, kind in kinds:
            if isinstance(value, type) or not isinstance(value, kind):
                raise ConfigurationError(f"OAuth: {name} must be {kind.__name__}, not {type(value).__name__}")
        self._sessions = wire.Sessions(session)
        self._prefers_own = session is not None
        self._lent: weakref.WeakSet[wire.Sessions] = weakref.WeakSet()
        self._as_json = token_format == "json"
        self._retry = retry
        self._timeout = timeout
        self._assumptions = assumptions
        self._pause = Pause()
        self._token: Token | None = None
        self._fresh_until = 0.0
        self._tasks: set[asyncio.Task[Token]] = set()
        self._refreshing: asyncio.Task[Token] | None = None
        self._replacing: str | None = None
        self._unsaved: tuple[str | None, Token] | None = None
        """A token whose save failed, and the access token that it replaces in the store; None: whatever is there."""
        self._refused: tuple[str, RefreshRejected] | None = None
        """The refresh token that the service refused last, and its error."""
        # Tokens of a while ago may still be echoed by a server.
        self._secrets: deque[str] = deque(maxlen=_REMEMBERED_SECRETS)

    def __repr__(self) -> str:
        return f"OAuth({self.origin!r}, client_id={self.client_id!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await leave(self.aclose(), error)

    async def aclose(self) -> None:
        """Let a token request that is under way finish, so that its token is saved; close the session if it made one.

        A token that could not be saved is saved now; if that fails again, an `AuthError` says so. Cancelled while it
        waits, it leaves the session open for that request: call it again.
        """
        try:
            await self.settle()
        except AuthError:
            await self._sessions.close()
            raise
        await self._sessions.close()

    def __del__(self) -> None:
        if hasattr(self, "_sessions"):
            self._sessions.warn_if_open(self)

    # The flow

    def authorization_request(self, *, pkce: bool = False) -> AuthorizationRequest:
        """A URL to send the user to, with a new random state.

        ``pkce=True`` adds a code challenge (RFC 7636, S256): the code is then of use only with the ``code_verifier``.
        """
        state = random_secrets.token_urlsafe(32)
        verifier = random_secrets.token_urlsafe(32) if pkce else None
        query = {
            "client_id": self.client_id,
            "redirect_uri": self.redirect_uri,
            "response_type": "code",
            **({} if verifier is None else {"code_challenge": _challenge(verifier), "code_challenge_method": "S256"}),
            "state": state,
        }
        return AuthorizationRequest(f"{self.origin}/oauth/authorize?{urlencode(query)}", state, verifier)

    async def exchange(
        self, callback_url_or_code: str, state: str | None = None, code_verifier: str | None = None
    ) -> Token:
        """Trade the code of a callback for a token, and save it.

        Give the callback's whole URL and the ``state`` that was remembered: it is checked, and so is the callback's
        ``error``. A bare code carries no state, so give one only where the state was checked already. Give the
        ``code_verifier`` of the authorization request, if it has one. Once begun it is carried through, even if the
        caller is cancelled: a code works only once.
        """
        form = self._code_form(callback_url_or_code, state, code_verifier)
        # Variables are shown in some tracebacks.
        del callback_url_or_code, state, code_verifier
        if isinstance(form, SigningError):
            raise form
        return await _outcome(self._start(self._exchange(form), "signing_async code exchange"))

    async def access_token(self) -> str:
        """An access token to use now, refreshed first if it is about to expire."""
        return (await self.token()).access_token

    async def token(self) -> Token:
        """The token to use now: loaded from the store once, and refreshed first if it is about to expire."""
        token = await self._present()
        if token is None:
            raise AuthError("there is no token yet: send the user to authorization_request().url, then call exchange()")
        if time.time() < self._fresh_until:
            return token
        left = _seconds_left(token)
        if left <= 0:
            return await self.refresh(rejected=token)
        return token if token.refresh_token is None else await self._refreshed_early(token, left)

    async def refresh(self, rejected: Token | str | None = None) -> Token:
        """A token other than ``rejected`` (None: than the present one).

        Where the present one is another already, it is returned. However many ask, one refresh runs at a time, in a
        task of its own: a caller that is cancelled neither stops it nor takes the others along.
        """
        if rejected is None:
            rejected = await self._present()
        elif isinstance(rejected, str):
            rejected = Token(rejected)
        while True:
            if rejected is not None and self._token is not None and self._token.access_token != rejected.access_token:
                return self._token
            if self._refreshing is None or self._refreshing.done():
                self._replacing = None if rejected is None else rejected.access_token
                self._refreshing = self._start(self._refresh(rejected), "signing_async token refresh")
            if rejected is None or self._replacing == rejected.access_token:
                return await _outcome(self._refreshing)
            # It replaces another token than this caller's.
            await asyncio.wait([self._refreshing])

    async def renewed(self, rejected: Token) -> bool:
        """Replace a token that the service rejected, where there is a way to."""
        if rejected.refresh_token is None:
            stored = await self._stored()
            if stored is not None and stored.access_token == rejected.access_token:
                return False
        await self.refresh(rejected=rejected)
        return True

    def secrets(self) -> Iterable[str]:
        """What must appear in no text."""
        return (self._client_secret, *self._secrets)

    def lend(self, sessions: wire.Sessions) -> None:
        """Use a client's session for as long as that is open."""
        self._lent.add(sessions)

    async def settle(self) -> None:
        """Return when no token request is under way and all tokens are saved; an `AuthError` if one cannot be."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))
        if self._unsaved is not None:
            await _outcome(self._start(self._save_again(self._unsaved[1]), "signing_async token save"))

    # Tasks of their own

    def _start(self, work: Coroutine[Any, Any, Token], name: str) -> asyncio.Task[Token]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Token]) -> None:
        self._tasks.discard(task)
        # Looked at, so that asyncio does not complain where every caller was cancelled.
        if not task.cancelled():
            task.exception()

    async def _exchange(self, form: _Form) -> Token:
        # Locked first: a code works only once, so it is not used while the token could not be kept.
        async with self._locked():
            token = await self._request_token(form, "oauth.exchange")
            await self._save(token)
        return token

    async def _refresh(self, rejected: Token | None) -> Token:
        # A worker that took this one for dead may have saved a newer token: that is the one to go on with.
        with contextlib.suppress(TokenSuperseded):
            return await self._refresh_once(rejected)
        return await self._refresh_once(rejected)

    async def _refresh_once(self, rejected: Token | None) -> Token:
        async with self._locked():
            current = await self._stored()
            token = self._unsaved_over(current)
            if token is None:
                if current is None:
                    raise self._missing()
                other = rejected is None or current.access_token != rejected.access_token
                if other and not _expired(current):
                    # Another process was here first.
                    self._publish(current)
                    return current
                token = await self._renew(current)
            await self._save(token, replaces=current)
            return token

    def _missing(self) -> AuthError:
        """The error for a store without a token; one that was in use is forgotten."""
        if self._token is None:
            return AuthError("there is no token to refresh: authorize first")
        self._token = None
        return AuthError("the token was removed from its store, as a logout does: authorize again")

    def _unsaved_over(self, current: Token | None) -> Token | None:
        """Return the token that could not be saved, if it still is to replace what the store holds."""
        if self._unsaved is None:
            return None
        replaces, token = self._unsaved
        if replaces is None or (current is not None and replaces == current.access_token):
            return token
        # It was saved after all, another process has saved a newer one, or the user has logged out.
        self._unsaved = None
        return None

    async def _save(self, token: Token, replaces: Token | None = None) -> None:
        """Save a new token, then publish it."""
        # If this fails, the next refresh or `settle` tries again: the refresh token may have worked for the last time.
        self._unsaved = (None if replaces is None else replaces.access_token, token)
        try:
            await self._store.save(token)
        except TokenSuperseded:
            self._unsaved = None
            raise
        self._unsaved = None
        self._publish(token)

    async def _save_again(self, token: Token) -> Token:
        """Save what could not be saved before; an error, also in the log, if it is lost."""
        try:
            async with self._locked():
                current = await self._stored()
                if self._unsaved_over(current) is not None:
                    await self._save(token, replaces=current)
            return token
        except Exception as error:
            lost = AuthError(
                "a new token could not be saved and is lost with this process, so the user may have to authorize again:"
                f" {_words(error)}"
            )
        log.error("%s", lost)
        raise lost

    async def _renew(self, current: Token) -> Token:
        if current.refresh_token is None:
            raise AuthError("the access token cannot be refreshed: there is no refresh token; authorize again")
        if self._refused is not None and self._refused[0] == current.refresh_token:
            raise copy.copy(self._refused[1])
        self._remember(current)
        form = self._form(grant_type="refresh_token", refresh_token=current.refresh_token)
        try:
            token = await self._request_token(form, "oauth.refresh")
        except RefreshRejected as error:
            # Final for this refresh token: the service is not asked again until the store holds another one.
            self._refused = (current.refresh_token, copy.copy(error))
            raise
        return token if token.refresh_token else attrs.evolve(token, refresh_token=current.refresh_token)

    async def _refreshed_early(self, token: Token, left: float) -> Token:
        """A new token, or, should that fail or take long, the one that still works for the seconds that are left."""
        try:
            async with asyncio.timeout(min(left / 2, _EARLY_WAIT)):
                return await self.refresh(rejected=token)
        except Exception as error:
            if self._token is None:
                # The user has logged out.
                raise
            # Not tried on every call: half of what is left later is soon enough.
            if self._token is token and time.time() >= self._fresh_until:
                self._fresh_until = time.time() + _seconds_left(token) / 2
                log.warning(
                    "a token refresh ahead of expiry failed or takes long, the present token serves on: %s",
                    _words(error),
                )
            return token

    @contextlib.asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        """The store's lock; an error if its holder keeps it for longer than a refresh can take."""
        async with contextlib.AsyncExitStack() as held:
            locked = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * self._timeout):
                    await held.enter_async_context(self._store.lock())
                    locked = True
            if not locked:
                raise AuthError(f"the token store's lock was not free for {2 * self._timeout:g} s; who holds it?")
            yield

    # The present token

    async def _stored(self) -> Token | None:
        """Load the token from the store; an error if another tenant issued it."""
        token = await self._store.load()
        if token is not None and token.origin not in (None, self.origin):
            raise AuthError(
                f"the stored token is for {token.origin}, not for {self.origin}: authorize, or name its store"
            )
        return token

    async def _present(self) -> Token | None:
        if self._token is None:
            kept = await self._stored()
            # While it was read another may have come, and that is newer.
            if kept is not None and self._token is None:
                self._publish(kept)
        return self._token

    def _publish(self, token: Token) -> None:
        self._remember(token)
        self._token = token
        left = _seconds_left(token)
        self._fresh_until = time.time() + left - min(self._assumptions.refresh_margin, 0.1 * max(left, 0.0))

    def _remember(self, token: Token) -> None:
        for secret in (token.access_token, token.refresh_token):
            if secret is not None and secret not in self._secrets:
                self._secrets.append(secret)

    # The token endpoint

    def _code_form(
        self, callback_url_or_code: str, state: str | None, code_verifier: str | None
    ) -> _Form | SigningError:
        code = _read_callback(callback_url_or_code, state)
        if isinstance(code, SigningError):
            return code
        proof = {} if code_verifier is None else {"code_verifier": code_verifier}
        return self._form(grant_type="authorization_code", redirect_uri=self.redirect_uri, code=code, **proof)

    def _form(self, **fields: str) -> _Form:
        return _Form({"client_id": self.client_id, "client_secret": self._client_secret, **fields})

    async def _request_token(self, form: _Form, operation: str) -> Token:
        return await retry.run(_TokenRequest(self, form, operation).attempt)

    def _usable_sessions(self) -> wire.Sessions:
        if not self._prefers_own:
            for sessions in tuple(self._lent):
                # A client may be closed, or of an earlier event loop.
                with contextlib.suppress(ClientClosed, ConfigurationError):
                    sessions.get()
                    return sessions
            if self._sessions.belong_elsewhere():
                self._sessions = wire.Sessions()
        return self._sessions


@attrs.frozen
class _Form:
    """What is posted to the token endpoint; its text shows none of it."""

    fields: Mapping[str, str] = attrs.field(repr=False)

    def body(self, *, as_json: bool) -> wire.Body:
        if as_json:
            return wire.bytes_body(json.dumps(self.fields).encode(), "application/json")
        return wire.bytes_body(urlencode(self.fields).encode(), "application/x-www-form-urlencoded")

    def secrets(self) -> list[str]:
        return [self.fields[name] for name in ("code", "code_verifier", "refresh_token") if name in self.fields]


class _TokenRequest:
    """The attempts of one token request.

    What fails is handed up as a value, and raised where no variable holds any of the answer.
    """

    def __init__(self, oauth: OAuth, form: _Form, operation: str) -> None:
        self._oauth = oauth
        self._form = form
        self._operation = operation
        self._deadline = asyncio.get_running_loop().time() + oauth._timeout
        self._retries = Retries(oauth._retry, Repeat.TOKEN)

    async def attempt(self) -> Token:
        self._retries.attempts += 1
        result = await self._exchange()
        if isinstance(result, Token):
            log.debug("%s attempt %d: a token came", self._operation, self._retries.attempts)
            return result
        decision = self._decide(result)
        again = "" if decision.delay is None else f"; again in {decision.delay:.3f} s"
        log.debug("%s attempt %d: %s%s", self._operation, self._retries.attempts, result.error, again)
        if decision.delay is None:
            raise result.error
        raise retry.RetryRequested(decision.delay)

    def _decide(self, failed: FailedAttempt) -> retry.Decision:
        remaining = self._deadline - asyncio.get_running_loop().time()
        decision = self._retries.decide(failed, remaining=remaining)
        if decision.pause is not None:
            self._oauth._pause.pause(decision.pause)
        return decision

    async def _exchange(self) -> Token | FailedAttempt:
        oauth = self._oauth
        if not await oauth._pause.acquire(self._deadline):
            return self._gated()
        try:
            async with asyncio.timeout_at(self._deadline) as bound:
                began = time.time()
                body = self._form.body(as_json=oauth._as_json)
                request = wire.Request("POST", oauth.origin, "/api/oauth/token", body=body)
                response = await wire.send(oauth._usable_sessions(), request, None, connect=0.5 * oauth._timeout)
                return await self._receive(response, began)
        except TimeoutError:
            if not bound.expired():
                raise
        words = f"{self._operation}: no answer came within {oauth._timeout:g} s"
        error = RequestTimeout(words, operation=self._operation, attempts=self._retries.attempts)
        return FailedAttempt(Outcome.LOST, error, transient=False)

    async def _receive(self, response: wire.Response | wire.Failure, began: float) -> Token | FailedAttempt:
        if isinstance(response, wire.Failure):
            return self._failed(response)
        try:
            body = await (response.read(_LARGEST_ANSWER) if response.ok else response.read_start())
            return self._understand(response, body, began)
        except wire.BrokenResponse as broken:
            return self._failed(broken.failure, response)
        finally:
            response.close()

    def _gated(self) -> FailedAttempt:
        wait = self._oauth._pause.next_at - asyncio.get_running_loop().time()
        words = f"{self._operation}: the service asked to wait for {wait:.0f} s; nothing was sent (HTTP 429)"
        return FailedAttempt(Outcome.THROTTLED, AuthError(words, status=429, retry_after=wait), transient=False)

    def _failed(self, failure: wire.Failure, response: wire.Response | None = None) -> FailedAttempt:
        identity = None if response is None else self._identity(response, None)
        error = TransportError(
            f"{self._operation}: {failure.message}" + (f" (request id {identity})" if identity else ""),
            operation=self._operation,
            attempts=self._retries.attempts,
            status=None if response is None else response.status,
            request_id=identity,
        )
        return FailedAttempt(failure.outcome, error, transient=failure.transient)

    def _understand(self, response: wire.Response, text: bytes, began: float) -> Token | FailedAttempt:
        try:
            data = parse(text)
        except Unreadable:
            data = None
        if response.ok:
            token = _read_token(data, began, self._oauth._assumptions, self._oauth.origin)
            return self._unusable(response, data) if token is None else token
        error = self._refusal(response, text, data)
        if response.status == 429:
            return FailedAttempt(Outcome.THROTTLED, error, error.retry_after)
        return FailedAttempt(Outcome.FAILED, error, error.retry_after, transient=response.status >= 500)

    def _unusable(self, response: wire.Response, data: Any) -> FailedAttempt:
        identity = self._identity(response, data)
        facts = f"HTTP {response.status}" + (f", request id {identity}" if identity else "")
        words = f"{self._operation}: the answer holds no token ({facts})"
        return FailedAttempt(
            Outcome.FAILED, AuthError(words, status=response.status, request_id=identity), transient=False
        )

    def _refusal(self, response: wire.Response, text: bytes, data: Any) -> AuthError:
        secrets = (*self._oauth.secrets(), *self._form.secrets())
        said = error_from(
            response.status,
            response.headers,
            text,
            reason=response.reason,
            operation=self._operation,
            not_found=NotFound,
            retry_after=retry.read_retry_after(
                response.headers.get("Retry-After"), date=response.headers.get("Date"), now=time.time
            ),
            secrets=secrets,
            assumptions=self._oauth._assumptions,
        )
        # OAuth's own place for the code comes first.
        named = look_up(data, "error")
        code = one_line(redact(named, secrets))[:100] if isinstance(named, str) and named else said.code
        # What a failing or busy endpoint says of the refresh token is not final.
        final = response.status < 500 and response.status != 429
        refused = final and code == "invalid_grant" and "refresh_token" in self._form.fields
        return (RefreshRejected if refused else AuthError)(
            str(said), code=code, status=said.status, request_id=said.request_id, retry_after=said.retry_after
        )

    def _identity(self, response: wire.Response, data: Any) -> str | None:
        found = request_id(response.headers, data, self._oauth._assumptions)
        return None if found is None else redact(found, (*self._oauth.secrets(), *self._form.secrets()))


async def leave(closing: Coroutine[Any, Any, None], error: BaseException | None) -> None:
    """Close at the end of an ``async with``: what the block raised is not hidden by the loss of a token."""
    try:
        await closing
    except AuthError as lost:
        if error is None:
            raise
        error.add_note(str(lost))


def _words(error: Exception) -> str:
    """An error's text; of what a store of the user's raises the text is not known to be free of secrets."""
    return str(error) if isinstance(error, SigningError) else type(error).__name__


async def _outcome(task: asyncio.Task[Token]) -> Token:
    """What a task of its own comes to; it goes on when the caller who waits here is cancelled."""
    await asyncio.wait([task])
    if task.cancelled():
        raise AuthError("the token request was cancelled")
    error = task.exception()
    if isinstance(error, SigningError):
        # Each caller gets one to itself: raised in many places, one object would gather all their tracebacks.
        raise copy.copy(error)
    return task.result()


def _read_token(data: Any, began: float, assumptions: Assumptions, origin: str) -> Token | None:
    """The token of a token response; None where there is none in it."""
    if not isinstance(data, dict):
        return None
    try:
        return Token(
            data.get("access_token", ""),
            data.get("refresh_token") or None,
            _expiry(data.get("expires_in"), began, assumptions.expires_in_seconds),
            _token_type(data.get("token_type")),
            origin=origin,
        )
    except ConfigurationError:
        return None


def _expiry(expires_in: Any, began: float, unit: float) -> datetime | None:
    """When a token that was asked for at ``began`` expires; None where its lifetime is not said, or cannot be meant."""
    try:
        lifetime = 0.0 if isinstance(expires_in, bool) else float(expires_in) * unit
        return datetime.fromtimestamp(began + lifetime, UTC) if lifetime > 0 else None
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _token_type(named: Any) -> str:
    usable = isinstance(named, str) and named.isascii() and named.isalnum() and named.lower() != "bearer"
    return named if usable else "Bearer"


def _read_callback(given: str, state: str | None) -> str | SigningError:
    """The code of a callback whose state and error were checked, or the bare code; what is wrong is returned."""
    if not isinstance(given, str) or not given.strip():
        return InvalidRequest("exchange: the callback URL or code is missing")
    given = given.strip()
    if not given.isprintable() or " " in given:
        return InvalidRequest("exchange: neither a callback URL nor a code: there is white space in it")
    if "?" not in given and "://" not in given and not _QUERY.search(given):
        return given
    try:
        query = parse_qs(urlsplit(given).query if "?" in given else given, max_num_fields=100)
    except ValueError:
        return InvalidRequest("exchange: the callback is not a URL that can be read")
    if not isinstance(state, str) or not state:
        return InvalidRequest("exchange: state is missing: give the state that was kept when the user was sent away")
    returned = query.get("state", [])
    if len(returned) != 1 or not hmac.compare_digest(_bytes(returned[0]), _bytes(state)):
        return StateMismatch("the callback's state is not the one that was sent: it may be forged, so it is not used")
    codes = query.get("code", [])
    if "error" in query:
        secrets = (state, *codes)
        code = one_line(redact(query["error"][0], secrets))[:100]
        said = one_line(redact(" ".join(query.get("error_description", [])), secrets))[:500]
        return AuthError(f"authorization was refused: {said or code} (code {code})", code=code)
    if len(codes) != 1:
        return AuthError("the callback carries more than one code" if codes else "the callback carries no code")
    return codes[0]


def _challenge(verifier: str) -> str:
    """The S256 code challenge of RFC 7636."""
    return base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _seconds_left(token: Token) -> float:
    return math.inf if token.expires_at is None else token.expires_at.timestamp() - time.time()


def _expired(token: Token) -> bool:
    return _seconds_left(token) <= 0
