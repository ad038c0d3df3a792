"""`OAuth`: gets tokens by the OAuth 2.0 authorization code flow, and keeps them fresh."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Any, Literal, Self

import aiohttp

from .. import _checks
from ..assumptions import Assumptions
from ..errors import AuthError, ConfigurationError, SigningError
from ..models import Token
from ..transport import wire
from ..transport.retry import RetryPolicy
from .authorization import AuthorizationRequest, authorization_request, read_callback
from .refresh import CurrentToken
from .token_endpoint import TokenEndpoint, TokenForm
from .token_stores import MemoryTokenStore, TokenStore

__all__ = ["AuthorizationRequest", "OAuth", "leave"]

_DEFAULT_RETRY = RetryPolicy()
_DEFAULT_ASSUMPTIONS = Assumptions()


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
        store = MemoryTokenStore() if store is None else store
        kinds = (
            ("store", store, TokenStore),
            ("retry", retry, RetryPolicy),
            ("assumptions", assumptions, Assumptions),
        )
        for name, value, kind in kinds:
            if isinstance(value, type) or not isinstance(value, kind):
                raise ConfigurationError(f"OAuth: {name} must be {kind.__name__}, not {type(value).__name__}")
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
        """Let a token request that is under way finish, so that its token is saved; close the session if it made one.

        A token that could not be saved is saved now; if that fails again, an `AuthError` says so. Cancelled while it
        waits, it leaves the session open for that request: call it again.
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
        """A URL to send the user to, with a new random state.

        ``pkce=True`` adds a code challenge (RFC 7636, S256): the code is then of use only with the ``code_verifier``.
        """
        return authorization_request(self.origin, self.client_id, self.redirect_uri, pkce=pkce)

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
        return await self._current.exchange(form)

    def _code_form(
        self, callback_url_or_code: str, state: str | None, code_verifier: str | None
    ) -> TokenForm | SigningError:
        code = read_callback(callback_url_or_code, state)
        if isinstance(code, SigningError):
            return code
        proof = {} if code_verifier is None else {"code_verifier": code_verifier}
        return self._endpoint.form(grant_type="authorization_code", redirect_uri=self.redirect_uri, code=code, **proof)

    async def access_token(self) -> str:
        """An access token to use now, refreshed first if it is about to expire."""
        return (await self.token()).access_token

    async def token(self) -> Token:
        """The token to use now: loaded from the store once, and refreshed first if it is about to expire."""
        return await self._current.token()

    async def refresh(self, rejected: Token | str | None = None) -> Token:
        """A token other than ``rejected`` (None: than the present one).

        Where the present one is another already, it is returned. However many ask, one refresh runs at a time, in a
        task of its own: a caller that is cancelled neither stops it nor takes the others along.
        """
        if isinstance(rejected, str):
            # Variables are shown in some tracebacks; a `Token` shows nothing.
            rejected = Token(rejected)
        return await self._current.refresh(rejected)

    async def renewed(self, rejected: Token) -> bool:
        """Replace a token that the service rejected, where there is a way to."""
        return await self._current.renewed(rejected)

    def secrets(self) -> Iterable[str]:
        """What must appear in no text."""
        return self._endpoint.secrets()

    def lend(self, sessions: wire.Sessions) -> None:
        """Use a client's session for as long as that is open."""
        self._endpoint.lend(sessions)

    async def settle(self) -> None:
        """Return when no token request is under way and all tokens are saved; an `AuthError` if one cannot be."""
        await self._current.settle()


async def leave(closing: Coroutine[Any, Any, None], error: BaseException | None) -> None:
    """Close at the end of an ``async with``: what the block raised is not hidden by the loss of a token."""
    try:
        await closing
    except AuthError as lost:
        if error is None:
            raise
        error.add_note(str(lost))
