"""The current token: loaded once, refreshed by one task for all callers, saved before it is published."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

import attrs

from .. import telemetry
from .._foreign import is_transient, safe_text
from .._secret import Secret
from .._tasks import finish
from ..errors import AuthError, RefreshRejected, SigningError, TokenSuperseded, amended
from ..models import Token
from ..telemetry.names import REFRESH_RESULT, REFRESH_SPAN
from ..transport import wire
from ..transport.operation import Observer
from .token_endpoint import Form, TokenEndpoint
from .token_stores import TokenStore

__all__ = ["CurrentToken"]

T = TypeVar("T")

log: logging.Logger = logging.getLogger("signing_async")

_EARLY_REFRESH_TIMEOUT = 5.0
_MAX_MARGIN_SHARE = 0.1
_SAVE_INTERVAL = 1.0
_NO_TOKEN = "no token is stored: send the user to authorization_request().url, then call exchange()"
_NOT_SAVED_YET = "the token of the last exchange is not saved yet: try again"


class CurrentToken:
    """The token that all clients of one `OAuth` use, and its single-flight refresh.

    ``observer`` is that of the call that needs the token. A refresh reports to the observer of its first caller.
    """

    def __init__(self, endpoint: TokenEndpoint, store: TokenStore) -> None:
        self.endpoint: TokenEndpoint = endpoint
        self.observer: Observer = Observer(telemetry=telemetry.is_enabled())
        """The observer of token requests that no client causes."""
        self._store = store
        self._token: Token | None = None
        self._fresh_until = 0.0
        self._tasks: set[asyncio.Task[Token]] = set()
        self._refreshing: tuple[Token | None, asyncio.Task[Token]] | None = None
        """The token that the last refresh replaces, and the task."""
        self._unsaved: tuple[Token | None, Token] | None = None
        """The token in the store to replace (None after a login: any), and the token that is not saved yet."""
        self._saving: asyncio.Task[None] | None = None
        """Repeats a failed save."""
        self._rejected: tuple[Token, RefreshRejected] | None = None
        """The token whose refresh token the service rejected last, and the error."""

    async def token(self, observer: Observer) -> Token:
        """Return the token to use now, refreshed first if it is about to expire."""
        token = await self._current()
        if token is None:
            raise AuthError(_NO_TOKEN) if self._unsaved is None else AuthError(_NOT_SAVED_YET, transient=True)
        if time.time() < self._fresh_until:
            return token
        left = _seconds_left(token)
        if left <= 0:
            return await self.refresh(token, observer)
        return token if token.refresh_token is None else await self._refresh_early(token, left, observer)

    async def refresh(self, rejected: Token | None, observer: Observer) -> Token:
        """Return a token other than ``rejected``, as `OAuth.refresh` does."""
        rejected = await self._current() if rejected is None else rejected
        while self._token is None or _is_same(self._token, rejected):
            if self._refreshing is None or not _is_pending(self._refreshing[1]):
                task = self._start(self._refresh(rejected, observer), "signing_async token refresh")
                self._refreshing = rejected, task
            replaced, task = self._refreshing
            if _is_same(replaced, rejected):
                return await _result(task, observer)
            await asyncio.wait([task])
        return self._token

    async def renewed(self, rejected: Token, observer: Observer) -> bool:
        """Replace a rejected token; return False if the user must authorize again."""
        if rejected.refresh_token is None and _is_same(await self._load(), rejected):
            return False
        await self.refresh(rejected, observer)
        return True

    def secrets(self) -> Iterable[str]:
        return self.endpoint.secrets()

    async def exchange(self, form: Form, observer: Observer) -> Token:
        """Exchange the code in the form for a token and save it, even if the caller is cancelled: a code works once."""
        return await _result(self._start(self._exchange(form, observer), "signing_async code exchange"), observer)

    async def settle(self) -> None:
        """Wait until no token request is pending and every token is saved; raise an `AuthError` if a save fails.

        A cancellation is raised only then, or after the timeout of a token request: a new refresh token must be saved.
        """
        await finish(self._settle(), self.endpoint.timeout)

    async def close(self, sessions: wire.Sessions) -> None:
        """Settle, then close the sessions, even if a save failed or the caller was cancelled."""
        try:
            await self.settle()
        finally:
            if self._saving is not None and _is_pending(self._saving):
                self._saving.cancel()
            await sessions.close()

    # Background tasks

    def _start(self, work: Coroutine[Any, Any, Token], name: str) -> asyncio.Task[Token]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[Token]) -> None:
        self._tasks.discard(task)
        if self._unsaved is not None and (self._saving is None or self._saving.done()):
            self._saving = asyncio.create_task(self._keep_saving(), name="signing_async token save")
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs it if every caller was cancelled

    async def _keep_saving(self) -> None:
        while self._unsaved is not None:
            await asyncio.sleep(_SAVE_INTERVAL)
            with contextlib.suppress(Exception):
                await self._save_again()

    async def _save_again(self) -> None:
        if self._unsaved is not None:
            async with self._locked():
                await self._save_unsaved(await self._load())

    async def _settle(self) -> None:
        while pending := [task for task in self._tasks if _is_pending(task)]:
            await asyncio.wait(pending)
        try:
            return await self._save_again()
        except Exception as error:
            text = (
                "a new token could not be saved and is lost with this process, so the user may have to authorize again"
            )
            lost = AuthError(f"{text}: {safe_text(error)}", transient=is_transient(error))
        log.error("%s", lost)
        raise lost

    async def _exchange(self, form: Form, observer: Observer) -> Token:
        # Acquire the lock first: a code works only once, so it is not used unless its token can be saved.
        token: Token | None = None
        try:
            async with self._locked():
                token = await self.endpoint.request("oauth.exchange", form, observer)
                self._unsaved = (None, token)
                await self._save(token)
        except AuthError as error:
            raise error if token is None else _after_exchange(error) from None
        log.debug("token obtained")
        return token

    async def _refresh(self, rejected: Token | None, observer: Observer) -> Token:
        with telemetry.active(observer.telemetry).span(REFRESH_SPAN, {REFRESH_RESULT: "failed"}) as span:
            # If the lock expired and another worker saved a newer token, the store refuses the save: adopt that token.
            with contextlib.suppress(TokenSuperseded):
                return await self._refresh_once(rejected, observer, span)
            return await self._refresh_once(rejected, observer, span)

    async def _refresh_once(self, rejected: Token | None, observer: Observer, span: telemetry.Span) -> Token:
        async with self._locked():
            stored = await self._load()
            token = await self._save_unsaved(stored)
            if token is None:
                if stored is None:
                    self._token = None
                    raise AuthError(_NO_TOKEN)
                if not _is_same(stored, rejected) and _seconds_left(stored) > 0:
                    # Another process has refreshed the token.
                    self._publish(stored)
                    span.set({REFRESH_RESULT: "adopted"})
                    return stored
                token = await self._request_refresh(stored, observer, span)
                self._unsaved = (stored, token)
                await self._save(token)
        span.set({REFRESH_RESULT: "refreshed"})
        log.debug("token refreshed")
        return token

    async def _request_refresh(self, stored: Token, observer: Observer, span: telemetry.Span) -> Token:
        if stored.refresh_token is None:
            raise AuthError("cannot refresh the access token: there is no refresh token; authorize again")
        if self._rejected is None or self._rejected[0].refresh_token != stored.refresh_token:
            self.endpoint.remember(stored)
            form: Form = {"grant_type": "refresh_token", "refresh_token": Secret(stored.refresh_token)}
            try:
                token = await self.endpoint.request("oauth.refresh", form, observer)
                return token if token.refresh_token else attrs.evolve(token, refresh_token=stored.refresh_token)
            except RefreshRejected as error:
                # Final for this refresh token: it is not sent again.
                self._rejected = stored, error
        span.set({REFRESH_RESULT: "rejected"})
        raise self._rejected[1].with_traceback(None)

    async def _refresh_early(self, token: Token, left: float, observer: Observer) -> Token:
        """Return a new token; if the refresh fails or is slow, the old one, which is valid for ``left`` seconds."""
        try:
            async with asyncio.timeout(min(left / 2, _EARLY_REFRESH_TIMEOUT)):
                return await self.refresh(token, observer)
        except Exception as error:
            if self._token is None:
                # The token was removed from its store.
                raise
            # Try again in half of the remaining time, not on every call.
            if self._token is token and time.time() >= self._fresh_until:
                self._fresh_until = time.time() + _seconds_left(token) / 2
                text = "early token refresh failed or is slow; the current token stays in use: %s"
                log.warning(text, safe_text(error))
            return token

    # The store and the token in memory

    @contextlib.asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        """Hold the store's lock; raise an `AuthError` if its holder keeps it for longer than a refresh can take."""
        timeout = 2 * self.endpoint.timeout
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(timeout):
                    await stack.enter_async_context(self._store.lock())
            except TimeoutError:
                message = f"could not acquire the token store's lock within {timeout:g} s: its holder may hang"
                raise AuthError(message, transient=True) from None
            yield

    async def _current(self) -> Token | None:
        if self._token is None:
            stored = await self._load()
            # A token that was published during the load is newer.
            if stored is not None and self._token is None:
                self._publish(stored)
        return self._token

    async def _load(self) -> Token | None:
        token = await _await_store(self._store.load())
        if token is not None and token.origin not in (None, self.endpoint.origin):
            raise AuthError(
                f"the stored token is for {token.origin}, not for {self.endpoint.origin}:"
                " use another token store, or authorize again"
            )
        return token

    async def _save_unsaved(self, stored: Token | None) -> Token | None:
        """Save the token that could not be saved, if it is still the successor of the stored one, and return it."""
        if self._unsaved is None:
            return None
        replaced, token = self._unsaved
        if replaced is not None and not _is_same(stored, replaced):
            # The save succeeded after all, another process has saved a newer token, or the user has logged out.
            self._unsaved = None
            return None
        await self._save(token)
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
        self.endpoint.remember(token)
        self._token = token
        left = _seconds_left(token)
        margin = min(self.endpoint.assumptions.refresh_margin, _MAX_MARGIN_SHARE * max(left, 0.0))
        self._fresh_until = time.time() + left - margin


async def _await_store(operation: Awaitable[T]) -> T:
    try:
        return await operation
    except Exception as error:
        failure = _as_own(error)
    # Not in the handler: the text of the store's error may contain secrets.
    raise failure


def _as_own(error: Exception) -> SigningError:
    """Return the error, or an `AuthError` for an error of a token store that is not this package's.

    A copy for each caller: a shared exception would collect the tracebacks of all of them.
    """
    if isinstance(error, SigningError):
        return copy.copy(error)
    return AuthError(f"the token store failed: {type(error).__name__}", transient=is_transient(error))


async def _result(task: asyncio.Task[Token], observer: Observer) -> Token:
    """Wait for the task's result, and record the wait. Cancelling the caller does not cancel the task."""
    began, result = time.perf_counter(), "cancelled"
    try:
        await asyncio.wait([task])
        result = "failed" if task.cancelled() or task.exception() else "succeeded"
    finally:
        observer.span.refresh(result, time.perf_counter() - began)
    if task.cancelled():
        raise AuthError("the token request was cancelled", transient=True)
    if isinstance(error := task.exception(), Exception):
        raise _as_own(error)
    return task.result()


def _is_pending(task: asyncio.Task[Any]) -> bool:
    """Return whether the task is pending; a task that an earlier event loop left undone is not."""
    return not task.done() and task.get_loop() is asyncio.get_running_loop()


def _is_same(one: Token | None, other: Token | None) -> bool:
    return one is other or (one is not None and other is not None and one.access_token == other.access_token)


def _seconds_left(token: Token) -> float:
    return math.inf if token.expires_at is None else token.expires_at.timestamp() - time.time()


def _after_exchange(error: AuthError) -> AuthError:
    """Return the error for a code that was exchanged for a token, which could not be saved."""
    if isinstance(error, TokenSuperseded):
        return amended(error, transient=False, effect="unknown", client_wide=False)
    text = "the code was used, so do not repeat the exchange: its token is saved as soon as the store works"
    return AuthError(f"{error}; {text}", effect="unknown", client_wide=False)
