"""The current token: loaded once, refreshed by one task for all callers, saved before it is published."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import attrs

from .._foreign import is_transient, safe_text
from ..errors import AuthError, ConfigurationError, RefreshRejected, SigningError, TokenSuperseded
from ..models import Token
from ..telemetry import switch
from ..transport import urls
from ..transport.operation import CallContext
from .token_endpoint import TokenEndpoint, TokenForm
from .token_stores import TokenStore

__all__ = ["CurrentToken"]

T = TypeVar("T")

log: logging.Logger = logging.getLogger("signing_async")

_EARLY_REFRESH_TIMEOUT = 5.0
_MAX_MARGIN_SHARE = 0.1


async def _await_store(operation: Awaitable[T]) -> T:
    """Await an operation of any token store; raise its unexpected errors as `AuthError`."""
    try:
        return await operation
    except SigningError:
        raise
    except Exception as error:
        name, transient = type(error).__name__, is_transient(error)
    # Raised here, the error does not have the store's error, whose text may contain secrets, as its context.
    raise AuthError(f"the token store failed: {name}", transient=transient)


class _StoreLock:
    """The lock of any token store, whose unexpected errors are raised as `AuthError`."""

    _lock: AbstractAsyncContextManager[None]

    def __init__(self, store: TokenStore) -> None:
        self._store = store

    async def __aenter__(self) -> None:
        await _await_store(self._acquire())

    async def _acquire(self) -> None:
        self._lock = self._store.lock()
        await self._lock.__aenter__()

    async def __aexit__(self, *raised: Any) -> bool | None:
        return await _await_store(self._lock.__aexit__(*raised))


class CurrentToken:
    """The token that all clients of one `OAuth` use, and its single-flight refresh."""

    def __init__(self, endpoint: TokenEndpoint, store: TokenStore) -> None:
        self._endpoint = endpoint
        self._store = store
        self._token: Token | None = None
        self._fresh_until = 0.0
        self._tasks: set[asyncio.Task[Token]] = set()
        self._refreshing: asyncio.Task[Token] | None = None
        self._replacing: str | None = None
        self._unsaved: tuple[str | None, Token] | None = None
        """The access token in the store to replace (None after a login: any), and the token that is not saved yet."""
        self._rejected: tuple[str, RefreshRejected] | None = None
        """The refresh token that the service rejected last, and its error."""

    async def token(self) -> Token:
        """Return the token to use now, refreshed first if it is about to expire."""
        if self._unsaved is not None and self._unsaved[0] is None:
            # This saves the token of the login. The current token may be another user's.
            return await self.refresh(self._token)
        token = await self._current()
        if token is None:
            raise AuthError("there is no token yet: send the user to authorization_request().url, then call exchange()")
        if time.time() < self._fresh_until:
            return token
        left = _seconds_left(token)
        if left <= 0:
            return await self.refresh(token)
        return token if token.refresh_token is None else await self._refresh_early(token, left)

    async def refresh(self, rejected: Token | None = None) -> Token:
        """Return a token other than ``rejected``; None means the current token.

        Concurrent callers share one refresh, which runs in a task of its own: cancelling a caller cancels neither the
        refresh nor the other callers. Raises a `ConfigurationError` while a refresh runs in another thread.
        """
        if rejected is None:
            rejected = await self._current()
        while True:
            if rejected is not None and self._token is not None and self._token.access_token != rejected.access_token:
                return self._token
            if self._refreshing is None or not _is_pending(self._refreshing):
                self._replacing = None if rejected is None else rejected.access_token
                self._refreshing = self._start(self._refresh(rejected), "signing_async token refresh")
            if rejected is None or self._replacing == rejected.access_token:
                return await _result_for(self._endpoint.call_context(), self._refreshing)
            # This refresh replaces a different token than the caller's.
            await asyncio.wait([self._refreshing])

    async def renewed(self, rejected: Token) -> bool:
        """Replace a rejected token; return False if the user must authorize again."""
        if rejected.refresh_token is None:
            stored = await self._load()
            if stored is not None and stored.access_token == rejected.access_token:
                return False
        await self.refresh(rejected)
        return True

    async def exchange(self, form: TokenForm) -> Token:
        """Exchange the code in the form for a token and save it, even if the caller is cancelled: a code works once."""
        return await _result(self._start(self._exchange(form), "signing_async code exchange"))

    async def settle(self) -> None:
        """Wait until no token request is pending and every token is saved; raise an `AuthError` if a save fails."""
        while pending := [task for task in self._tasks if _is_pending(task)]:
            await asyncio.wait(pending)
        if self._unsaved is not None:
            await _result(self._start(self._save_again(self._unsaved[1]), "signing_async token save"))

    # Background tasks

    def _start(self, work: Coroutine[Any, Any, Token], name: str) -> asyncio.Task[Token]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._discard)
        return task

    def _discard(self, task: asyncio.Task[Token]) -> None:
        self._tasks.discard(task)
        # Retrieve the exception: otherwise asyncio logs it if every caller was cancelled.
        if not task.cancelled():
            task.exception()

    async def _exchange(self, form: TokenForm) -> Token:
        # Acquire the lock first: a code works only once, so it is not used unless its token can be saved.
        token: Token | None = None
        try:
            async with self._locked():
                token = await self._endpoint.request("oauth.exchange", form)
                self._unsaved = (None, token)
                await self._save(token)
            log.debug("token obtained")
            return token
        except SigningError as error:
            if token is None:
                raise
            if isinstance(error, TokenSuperseded):
                error.effect, error.client_wide = "unknown", False
                raise
            raise _exchange_unsaved(error) from None

    async def _refresh(self, rejected: Token | None) -> Token:
        telemetry = switch.active() if self._endpoint.call_context().telemetry else None
        if telemetry is None:
            return (await self._refresh_or_adopt(rejected))[0]
        from ..telemetry.work import Refresh

        with Refresh(telemetry) as refresh:
            token, is_adopted = await self._refresh_or_adopt(rejected)
            if is_adopted:
                refresh.result = "adopted"
            return token

    async def _refresh_or_adopt(self, rejected: Token | None) -> tuple[Token, bool]:
        """Return a new token, and whether it is one that another process has saved."""
        # If the lock expired and another worker saved a newer token, the store refuses the save: adopt that token.
        with contextlib.suppress(TokenSuperseded):
            return await self._refresh_once(rejected)
        try:
            return await self._refresh_once(rejected)
        except TokenSuperseded as error:
            # The same save would be refused again, but the next refresh adopts the newer token.
            error.transient = True
            raise

    async def _refresh_once(self, rejected: Token | None) -> tuple[Token, bool]:
        async with self._locked():
            stored = await self._load()
            token = self._unsaved_successor(stored)
            if token is None:
                if stored is None:
                    raise self._no_token()
                is_other = rejected is None or stored.access_token != rejected.access_token
                if is_other and not _expired(stored):
                    # Another process has refreshed the token: adopt its token.
                    self._publish(stored)
                    return stored, True
                token = await self._request_refresh(stored)
                self._unsaved = (stored.access_token, token)
            await self._save(token)
        log.debug("token refreshed")
        return token, False

    async def _request_refresh(self, stored: Token) -> Token:
        if stored.refresh_token is None:
            raise AuthError("cannot refresh the access token: there is no refresh token; authorize again")
        if self._rejected is not None and self._rejected[0] == stored.refresh_token:
            raise copy.copy(self._rejected[1])
        self._endpoint.remember(stored)
        form = self._endpoint.form(grant_type="refresh_token", refresh_token=stored.refresh_token)
        try:
            token = await self._endpoint.request("oauth.refresh", form)
        except RefreshRejected as error:
            # Final for this refresh token: it is not sent again.
            self._rejected = (stored.refresh_token, copy.copy(error))
            raise
        return token if token.refresh_token else attrs.evolve(token, refresh_token=stored.refresh_token)

    async def _refresh_early(self, token: Token, left: float) -> Token:
        """Return a new token; if the refresh fails or is slow, the old one, which is valid for ``left`` seconds."""
        try:
            async with asyncio.timeout(min(left / 2, _EARLY_REFRESH_TIMEOUT)):
                return await self.refresh(token)
        except Exception as error:
            if self._token is None:
                # The token was removed from its store.
                raise
            # Try again in half of the remaining time, not on every call.
            if self._token is token and time.time() >= self._fresh_until:
                self._fresh_until = time.time() + _seconds_left(token) / 2
                log.warning(
                    "early token refresh failed or is slow; the current token stays in use: %s", safe_text(error)
                )
            return token

    @contextlib.asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        """Hold the store's lock; raise an `AuthError` if its holder keeps it for longer than a refresh can take."""
        timeout = 2 * self._endpoint.timeout
        async with contextlib.AsyncExitStack() as stack:
            locked = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await stack.enter_async_context(_StoreLock(self._store))
                    locked = True
            if not locked:
                message = f"could not acquire the token store's lock within {timeout:g} s: its holder may hang"
                raise AuthError(message, transient=True)
            yield

    # The store and the token in memory

    async def _current(self) -> Token | None:
        if self._token is None:
            stored = await self._load()
            # A token that was published during the load is newer.
            if stored is not None and self._token is None:
                self._publish(stored)
        return self._token

    async def _load(self) -> Token | None:
        """Load the token from the store; raise an `AuthError` if another tenant issued it."""
        token = await _await_store(self._store.load())
        if token is not None and not _is_for(token, self._endpoint.origin):
            raise AuthError(
                f"the stored token is for {token.origin}, not for {self._endpoint.origin}:"
                " use another token store, or authorize again"
            )
        return token

    async def _save(self, token: Token) -> None:
        """Save the token, then publish it. If the save fails, the token stays in `_unsaved` for the next attempt."""
        try:
            await _await_store(self._store.save(token))
        except TokenSuperseded:
            self._unsaved = None
            raise
        self._unsaved = None
        self._publish(token)

    def _publish(self, token: Token) -> None:
        self._endpoint.remember(token)
        self._token = token
        left = _seconds_left(token)
        margin = min(self._endpoint.assumptions.refresh_margin, _MAX_MARGIN_SHARE * max(left, 0.0))
        self._fresh_until = time.time() + left - margin

    def _unsaved_successor(self, stored: Token | None) -> Token | None:
        """Return the token that could not be saved, if it is still the successor of the stored one."""
        replaces, token = self._unsaved or (None, None)
        if replaces is None or (stored is not None and replaces == stored.access_token):
            return token
        # The save succeeded after all, another process has saved a newer token, or the user has logged out.
        self._unsaved = None
        return None

    async def _save_again(self, token: Token) -> Token:
        """Repeat a failed save; raise and log an error if the token is lost."""
        try:
            async with self._locked():
                stored = await self._load()
                if self._unsaved_successor(stored) is not None:
                    await self._save(token)
            return token
        except Exception as error:
            lost = _lost(error)
        log.error("%s", lost)
        raise lost

    def _no_token(self) -> AuthError:
        """Return the error for an empty store, and forget the token in memory."""
        if self._token is None:
            return AuthError("there is no token to refresh: authorize first")
        self._token = None
        return AuthError("the token was removed from its store (logout): authorize again")


def _exchange_unsaved(error: SigningError) -> AuthError:
    """Return the error of an exchange whose token could not be saved."""
    unsaved = AuthError(
        f"{error}; the code was used and its token is kept in memory: do not repeat the exchange, because the next"
        " call, settle() or aclose() saves the token"
    )
    unsaved.effect = "unknown"
    # Other calls fail only if they cannot save the token either.
    unsaved.client_wide = False
    return unsaved


def _lost(error: Exception) -> AuthError:
    """Return the error for a token whose save failed for the last time."""
    return AuthError(
        "a new token could not be saved and is lost with this process, so the user may have to authorize again:"
        f" {safe_text(error)}",
        transient=isinstance(error, SigningError) and error.transient,
    )


async def _result_for(context: CallContext, refreshing: asyncio.Task[Token]) -> Token:
    """Wait for a refresh that other calls may wait for too, and record the wait in the telemetry of this call."""
    observed = context.observed
    if observed is None:
        return await _result(refreshing)
    began, result = time.perf_counter(), "cancelled"
    try:
        token = await _result(refreshing)
        result = "succeeded"
        return token
    except Exception:
        result = "failed"
        raise
    finally:
        observed.note_refresh(result, time.perf_counter() - began)


async def _result(task: asyncio.Task[Token]) -> Token:
    """Wait for the task's result. Cancelling the caller does not cancel the task."""
    await asyncio.wait([task])
    if task.cancelled():
        raise AuthError("the token request was cancelled", transient=True)
    error = task.exception()
    if isinstance(error, SigningError):
        # A copy for each caller: a shared exception would collect the tracebacks of all of them.
        raise copy.copy(error)
    return task.result()


def _is_pending(task: asyncio.Task[Token]) -> bool:
    """Return whether the task is pending; a task that an earlier event loop left undone is not.

    Raise `ConfigurationError` if the task runs in the event loop of another thread: no other loop can wait for it.
    """
    if task.done():
        return False
    loop = task.get_loop()
    if loop is not asyncio.get_running_loop() and loop.is_running():
        raise ConfigurationError(
            "the OAuth is in use in another thread: make one OAuth for each thread, and share the token store"
        )
    return loop is asyncio.get_running_loop()


def _is_for(token: Token, origin: str) -> bool:
    """Return whether the token may be sent to the origin. `Token.origin` may be written in another form."""
    if token.origin is None or token.origin == origin:
        return True
    with contextlib.suppress(ConfigurationError):
        return urls.check_origin(token.origin) == origin
    return False


def _seconds_left(token: Token) -> float:
    return math.inf if token.expires_at is None else token.expires_at.timestamp() - time.time()


def _expired(token: Token) -> bool:
    return _seconds_left(token) <= 0
