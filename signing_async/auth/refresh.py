"""The current token: loaded once, refreshed by one task for all callers, saved before it is published."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import attrs

from ..errors import AuthError, RefreshRejected, SigningError, TokenSuperseded
from ..models import Token
from .token_endpoint import TokenEndpoint, TokenForm
from .token_stores import TokenStore

__all__ = ["CurrentToken"]

log: logging.Logger = logging.getLogger("signing_async")

_EARLY_WAIT = 5.0


class CurrentToken:
    """The token that an `OAuth` uses, kept in its store."""

    def __init__(self, endpoint: TokenEndpoint, store: TokenStore) -> None:
        self._endpoint = endpoint
        self._store = store
        self._token: Token | None = None
        self._fresh_until = 0.0
        self._tasks: set[asyncio.Task[Token]] = set()
        self._refreshing: asyncio.Task[Token] | None = None
        self._replacing: str | None = None
        self._unsaved: tuple[str | None, Token] | None = None
        """A token whose save failed, and the access token that it replaces in the store; None: whatever is there."""
        self._refused: tuple[str, RefreshRejected] | None = None
        """The refresh token that the service refused last, and its error."""

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

    async def refresh(self, rejected: Token | None = None) -> Token:
        """A token other than ``rejected`` (None: than the present one).

        Where the present one is another already, it is returned. However many ask, one refresh runs at a time, in a
        task of its own: a caller that is cancelled neither stops it nor takes the others along.
        """
        if rejected is None:
            rejected = await self._present()
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

    async def exchange(self, form: TokenForm) -> Token:
        """Trade the code in the form for a token, and save it, even if the caller is cancelled: a code works once."""
        return await _outcome(self._start(self._exchange(form), "signing_async code exchange"))

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

    async def _exchange(self, form: TokenForm) -> Token:
        # Locked first: a code works only once, so it is not used while the token could not be kept.
        async with self._locked():
            token = await self._endpoint.request("oauth.exchange", form)
            await self._save(token)
        log.debug("token obtained")
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
        log.debug("token refreshed")
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
        self._endpoint.remember(current)
        form = self._endpoint.form(grant_type="refresh_token", refresh_token=current.refresh_token)
        try:
            token = await self._endpoint.request("oauth.refresh", form)
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
        timeout = 2 * self._endpoint.timeout
        async with contextlib.AsyncExitStack() as held:
            locked = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await held.enter_async_context(self._store.lock())
                    locked = True
            if not locked:
                raise AuthError(f"the token store's lock was not free for {timeout:g} s; who holds it?")
            yield

    # The present token

    async def _stored(self) -> Token | None:
        """Load the token from the store; an error if another tenant issued it."""
        token = await self._store.load()
        if token is not None and token.origin not in (None, self._endpoint.origin):
            raise AuthError(
                f"the stored token is for {token.origin}, not for {self._endpoint.origin}: authorize, or name its store"
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
        self._endpoint.remember(token)
        self._token = token
        left = _seconds_left(token)
        self._fresh_until = time.time() + left - min(self._endpoint.assumptions.refresh_margin, 0.1 * max(left, 0.0))


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


def _seconds_left(token: Token) -> float:
    return math.inf if token.expires_at is None else token.expires_at.timestamp() - time.time()


def _expired(token: Token) -> bool:
    return _seconds_left(token) <= 0
