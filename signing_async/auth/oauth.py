"""`OAuth`: obtains tokens by the OAuth 2.0 authorization code flow and keeps them fresh."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Any, Literal, Self

import aiohttp

from .. import _checks
from ..assumptions import Assumptions
from ..errors import AuthError, ConfigurationError, SigningError
from ..models import Token
from ..transport import urls, wire
from ..transport.retry import RetryPolicy
from .authorization import AuthorizationRequest, authorization_request, read_callback
from .refresh import CurrentToken
from .token_endpoint import TokenEndpoint, TokenForm
from .token_stores import MemoryTokenStore, TokenStore

__all__ = ["AuthorizationRequest", "OAuth", "leave"]

_DEFAULT_RETRY = RetryPolicy()
_DEFAULT_ASSUMPTIONS = Assumptions()


class OAuth:
    """Obtains and refreshes the token of one user, for any number of clients.

    ::

        store = FileTokenStore("token.json")
        async with OAuth(base_url, client_id=..., client_secret=..., redirect_uri=..., store=store) as oauth:
            request = oauth.authorization_request()     # redirect the browser to request.url, keep request.state
            await oauth.exchange(callback_url, state=kept_state)
            async with SigningClient(base_url, oauth) as client:
                ...

    ``session`` is the caller's own `aiohttp.ClientSession`, and is never closed here; by default, the `OAuth`
    uses the session of an open client, or creates its own. ``token_format`` is the encoding of token
    requests; the specification allows both. ``timeout`` limits one token request with its retries.
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
        # Tracebacks may show variables.
        del client_secret
        self.origin = urls.check_origin(base_url)
        for name in ("client_id", "redirect_uri"):
            _checks.string(f"OAuth: {name}", getattr(self, name))
        if not _checks.is_text(self._client_secret):
            raise ConfigurationError("OAuth: client_secret: must be a non-empty string (its value is not shown)")
        if token_format not in ("form", "json"):
            raise ConfigurationError(f"OAuth: token_format: must be 'form' or 'json', got {token_format!r}")
        _checks.number("OAuth: timeout", timeout, above=0)
        if session is not None and not isinstance(session, aiohttp.ClientSession):
            raise ConfigurationError(f"OAuth: session: must be an aiohttp.ClientSession, got {type(session).__name__}")
        store = MemoryTokenStore() if store is None else store
        kinds = (
            ("store", store, TokenStore),
            ("retry", retry, RetryPolicy),
            ("assumptions", assumptions, Assumptions),
        )
        for name, value, kind in kinds:
            if isinstance(value, type) or not isinstance(value, kind):
                raise ConfigurationError(f"OAuth: {name}: must be of type {kind.__name__}, got {type(value).__name__}")
        self._endpoint = TokenEndpoint(
            self.origin,
            client_id,
            self._client_secret,
            as_json=token_format == "json",
            retry=retry,
            timeout=timeout,
            assumptions=assumptions,
            session=session,
        )
        self._current = CurrentToken(self._endpoint, store)

    def __repr__(self) -> str:
        return f"OAuth({self.origin!r}, client_id={self.client_id!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await leave(self.aclose(), error)

    async def aclose(self) -> None:
        """Wait for a pending token request, so that its token is saved; close the session unless it is the caller's.

        A save that failed is repeated. If it fails again, an `AuthError` is raised, and everything is closed. If the
        wait is cancelled, the session stays open for the request; call this again.
        """
        try:
            await self.settle()
        except AuthError:
            await self._endpoint.sessions.close()
            raise
        await self._endpoint.sessions.close()

    def __del__(self) -> None:
        if hasattr(self, "_endpoint"):
            self._endpoint.sessions.warn_if_open(self)

    def authorization_request(self, *, pkce: bool = False) -> AuthorizationRequest:
        """Return the URL to redirect the user's browser to, with a new random state.

        ``pkce=True`` adds a code challenge (RFC 7636, S256): the code then works only with the ``code_verifier``.
        """
        return authorization_request(self.origin, self.client_id, self.redirect_uri, pkce=pkce)

    async def exchange(
        self, callback_url_or_code: str, state: str | None = None, code_verifier: str | None = None
    ) -> Token:
        """Exchange the code of a callback for a token, and save it.

        Pass the callback's whole URL with the ``state`` and, with PKCE, the ``code_verifier`` of the authorization
        request. Raise `StateMismatch` if the states differ, and `AuthError` if the callback reports an error. A bare
        code has no state: pass one only after checking the state. The exchange is completed even if the caller is
        cancelled, since a code works only once.
        """
        form = self._code_form(callback_url_or_code, state, code_verifier)
        # Tracebacks may show variables.
        del callback_url_or_code, state, code_verifier
        if isinstance(form, SigningError):
            raise form
        return await self._current.exchange(form)

    def _code_form(
        self, callback_url_or_code: str, state: str | None, code_verifier: str | None
    ) -> TokenForm | SigningError:
        code = read_callback(callback_url_or_code, state)
        if isinstance(code, SigningError):
            # Other calls still have the current token, and a later callback may be genuine.
            code.client_wide = False
            return code
        proof = {} if code_verifier is None else {"code_verifier": code_verifier}
        return self._endpoint.form(grant_type="authorization_code", redirect_uri=self.redirect_uri, code=code, **proof)

    async def access_token(self) -> str:
        """Return the access token to use now, refreshed first if it is about to expire."""
        return (await self.token()).access_token

    async def token(self) -> Token:
        """Return the token to use now: loaded from the store once, and refreshed first if it is about to expire."""
        return await self._current.token()

    async def refresh(self, rejected: Token | str | None = None) -> Token:
        """Return a token other than ``rejected``; None stands for the current token.

        If the current token is already another one, it is returned. Concurrent callers share one refresh, which runs in
        a task of its own: cancelling a caller cancels neither the refresh nor the other callers.
        """
        if isinstance(rejected, str):
            # Tracebacks may show variables; the repr of a `Token` hides its secrets.
            rejected = Token(rejected)
        return await self._current.refresh(rejected)

    async def renewed(self, rejected: Token) -> bool:
        """Replace a token that the service rejected; return False if that is impossible without the user."""
        return await self._current.renewed(rejected)

    def secrets(self) -> Iterable[str]:
        """Return the strings that must be redacted from every text."""
        return self._endpoint.secrets()

    def lend(self, sessions: wire.Sessions) -> None:
        """Use a client's session for as long as it is open."""
        self._endpoint.lend(sessions)

    async def settle(self) -> None:
        """Wait until no token request is pending and every token is saved; raise an `AuthError` if a save fails."""
        await self._current.settle()


async def leave(closing: Coroutine[Any, Any, None], error: BaseException | None) -> None:
    """Await ``closing`` at the end of ``async with``. If the block raised, a lost token becomes a note on its error."""
    try:
        await closing
    except AuthError as lost:
        if error is None:
            raise
        error.add_note(str(lost))
