"""`OAuth`: obtains tokens by the OAuth 2.0 authorization code flow and keeps them fresh."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets as random_secrets
from typing import Literal, Self
from urllib.parse import parse_qs, urlencode

import aiohttp
import attrs

from .. import _checks
from .._secret import Secret, hide
from .._tasks import leave
from ..assumptions import Assumptions
from ..errors import AuthError, ConfigurationError, InvalidRequest, StateMismatch
from ..models import Token
from ..transport import urls, wire
from ..transport.problems import one_line
from ..transport.proxy import parse_proxy
from ..transport.redaction import redact
from ..transport.retry import RetryPolicy
from .refresh import CurrentToken
from .token_endpoint import Form, TokenEndpoint
from .token_stores import MemoryTokenStore, TokenStore

__all__ = ["AuthorizationRequest", "OAuth"]

_DEFAULT_RETRY = RetryPolicy()
_DEFAULT_ASSUMPTIONS = Assumptions()
_MAX_VERIFIERS = 1000
_QUERY = re.compile(r"\?|://|(^|&)(code|state|error)=")


@attrs.frozen
class AuthorizationRequest:
    """The start of a login: redirect the user's browser to ``url``.

    Keep ``state`` and ``code_verifier`` (None without PKCE) in the user's session, and pass them to `OAuth.exchange`.
    """

    url: str = attrs.field(repr=lambda url: repr(url.partition("&state=")[0] + "&state=..."))
    state: str = attrs.field(repr=False)
    code_verifier: str | None = attrs.field(default=None, repr=False)


class OAuth:
    """Obtains and refreshes the token of one user, for any number of clients.

    ::

        store = FileTokenStore("token.json")
        async with OAuth(base_url, client_id=..., client_secret=..., redirect_uri=..., store=store) as oauth:
            request = oauth.authorization_request()     # redirect the browser to request.url, keep request.state
            await oauth.exchange(callback_url, state=kept_state)
            async with SigningClient(base_url, oauth) as client:
                ...

    ``session`` is the caller's own `aiohttp.ClientSession`, and is never closed here; by default, the `OAuth` uses the
    session of an open client, or creates its own. ``proxy`` is as for a `SigningClient`. ``token_format`` is the
    encoding of token requests; the specification allows both. ``timeout`` limits one token request with its retries.
    """

    current: CurrentToken
    """Internal: what a client's transport uses."""
    # Some tracebacks show an object whose constructor raised.
    origin: str = "?"
    client_id: str = "?"

    def __init__(
        self,
        base_url: str,
        *,
        client_id: str,
        client_secret: str | Secret[str],
        redirect_uri: str,
        store: TokenStore | None = None,
        session: aiohttp.ClientSession | None = None,
        proxy: str | Secret[str] | None = None,
        token_format: Literal["form", "json"] = "form",
        retry: RetryPolicy = _DEFAULT_RETRY,
        timeout: float = 30.0,
        assumptions: Assumptions = _DEFAULT_ASSUMPTIONS,
    ) -> None:
        client_secret, proxy = hide(client_secret), hide(proxy)
        self.origin = urls.check_origin(base_url)
        self.client_id = _checks.string("OAuth: client_id", client_id)
        self.redirect_uri: str = _checks.string("OAuth: redirect_uri", redirect_uri)
        if not isinstance(client_secret, Secret) or not _checks.is_text(client_secret.reveal()):
            raise ConfigurationError("OAuth: client_secret: must be a non-empty string (its value is not shown)")
        if token_format not in ("form", "json"):
            raise ConfigurationError(f"OAuth: token_format: must be 'form' or 'json', got {token_format!r}")
        store = MemoryTokenStore() if store is None else store
        kinds = {"store": (store, TokenStore), "retry": (retry, RetryPolicy), "assumptions": (assumptions, Assumptions)}
        if session is not None:
            kinds["session"] = session, aiohttp.ClientSession
        for name, (value, kind) in kinds.items():
            if isinstance(value, type) or not isinstance(value, kind):
                raise ConfigurationError(f"OAuth: {name}: must be of type {kind.__name__}, got {type(value).__name__}")
        endpoint = TokenEndpoint(
            self.origin,
            {"client_id": client_id, "client_secret": client_secret},
            as_json=token_format == "json",
            retry=retry,
            timeout=_checks.number("OAuth: timeout", timeout, above=0),
            assumptions=assumptions,
            sessions=wire.Sessions(session, self.origin, None if proxy is None else parse_proxy("OAuth: proxy", proxy)),
        )
        self.current = CurrentToken(endpoint, store)
        self._verifiers: dict[str, Secret[str]] = {}
        """The code verifiers of logins that are under way, by their states."""

    def __repr__(self) -> str:
        return f"OAuth({self.origin!r}, client_id={self.client_id!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await leave(self.aclose(), error)

    async def aclose(self) -> None:
        """Wait for a pending token request, so that its token is saved; close the session unless it is the caller's.

        A save that failed is repeated. If it fails again, an `AuthError` is raised after everything is closed. A
        cancellation is raised then too: it shortens the wait at most to ``timeout`` seconds.
        """
        await self.current.close(self.current.endpoint.sessions)

    def __del__(self) -> None:
        if hasattr(self, "current"):
            self.current.endpoint.sessions.warn_if_open(self)

    def authorization_request(self, *, pkce: bool | None = None) -> AuthorizationRequest:
        """Return the URL to redirect the user's browser to, with a new random state.

        With PKCE (RFC 7636, S256) the code works only with the ``code_verifier``; the default is `Assumptions.pkce`.
        """
        query = {"client_id": self.client_id, "redirect_uri": self.redirect_uri, "response_type": "code"}
        state, verifier = random_secrets.token_urlsafe(32), None
        if self.current.endpoint.assumptions.pkce if pkce is None else pkce:
            verifier = random_secrets.token_urlsafe(32)
            digest = hashlib.sha256(verifier.encode()).digest()
            query["code_challenge"] = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            query["code_challenge_method"] = "S256"
            self._verifiers[state] = Secret(verifier)
            if len(self._verifiers) > _MAX_VERIFIERS:
                del self._verifiers[next(iter(self._verifiers))]
        query["state"] = state
        return AuthorizationRequest(f"{self.origin}/oauth/authorize?{urlencode(query)}", state, verifier)

    async def exchange(
        self,
        callback_url_or_code: str | Secret[str],
        state: str | Secret[str] | None = None,
        code_verifier: str | Secret[str] | None = None,
    ) -> Token:
        """Exchange the code of a callback for a token, and save it.

        Pass the callback's whole URL with the ``state`` and the ``code_verifier`` of the authorization request. This
        object remembers the verifiers of its own last thousand requests by their states. Raise `StateMismatch` if the
        states differ, `InvalidRequest` if no ``state`` is passed, `AuthError` if the callback reports an error, and
        `TransportError` if the service cannot be reached. A bare code has no state: pass one only after checking the
        state. The exchange is completed even if the caller is cancelled, since a code works only once. If the token
        cannot be saved, an `AuthError` with the effect ``"unknown"`` is raised, and the token is saved later.
        """
        callback_url_or_code, state, code_verifier = hide(callback_url_or_code), hide(state), hide(code_verifier)
        code = _read_callback(callback_url_or_code, state)
        if code_verifier is None and isinstance(state, Secret):
            code_verifier = self._verifiers.get(state.reveal())
        form: Form = {
            "grant_type": "authorization_code",
            "redirect_uri": self.redirect_uri,
            "code": code,
            **({} if code_verifier is None else {"code_verifier": code_verifier}),
        }
        return await self.current.exchange(form, self.current.observer)

    async def access_token(self) -> str:
        """Return the access token to use now, refreshed first if it is about to expire."""
        return (await self.token()).access_token

    async def token(self) -> Token:
        """Return the token to use now: loaded from the store once, and refreshed first if it is about to expire."""
        return await self.current.token(self.current.observer)

    async def refresh(self, rejected: Token | str | None = None) -> Token:
        """Return a token other than ``rejected``; None stands for the current token.

        If the current token is already another one, it is returned. Concurrent callers share one refresh, which runs in
        a task of its own: cancelling a caller cancels neither the refresh nor the other callers.
        """
        rejected = Token(rejected) if isinstance(rejected, str) else rejected
        return await self.current.refresh(rejected, self.current.observer)

    async def settle(self) -> None:
        """Wait until no token request is pending and every token is saved; raise an `AuthError` if a save fails.

        A cancellation is raised only then, or after ``timeout`` seconds.
        """
        await self.current.settle()


def _read_callback(callback: object, state: object) -> Secret[str]:
    """Return the code of a callback URL, or the bare code; raise an error if the callback is invalid.

    The error is not ``client_wide``: other calls still have the current token, and a later callback may be genuine.
    """
    if not isinstance(callback, Secret) or not callback.reveal().strip():
        raise InvalidRequest("exchange: the callback URL or code is missing")
    callback = Secret(callback.reveal().strip())
    if not callback.reveal().isprintable() or " " in callback.reveal():
        raise InvalidRequest("exchange: not a callback URL or code: it contains whitespace or control characters")
    if not _QUERY.search(callback.reveal()):
        return callback
    if not isinstance(state, Secret) or not state.reveal():
        raise InvalidRequest("exchange: state is missing: pass the state of the authorization request")
    fields = {
        name: [Secret(value) for value in values]
        for name, values in parse_qs(callback.reveal().split("?", 1)[-1].partition("#")[0]).items()
    }
    returned, codes = fields.get("state", []), fields.get("code", [])
    if len(returned) != 1 or not hmac.compare_digest(*(_to_bytes(each) for each in (returned[0], state))):
        text = "the callback's state does not match the authorization request: it may be forged"
        raise StateMismatch(text, client_wide=False)
    if "error" in fields:
        code, description = (
            _redact(fields.get(name, []), (state, *codes))[:500] for name in ("error", "error_description")
        )
        text = f"authorization was refused: {description or code} (code {code})"
        raise AuthError(text, code=code, client_wide=False)
    if len(codes) != 1:
        text = "the callback has more than one code" if codes else "the callback has no code"
        raise AuthError(text, client_wide=False)
    return codes[0]


def _redact(texts: list[Secret[str]], secrets: tuple[Secret[str], ...]) -> str:
    return one_line(redact(" ".join(text.reveal() for text in texts), [secret.reveal() for secret in secrets]))


def _to_bytes(text: Secret[str]) -> bytes:
    return text.reveal().encode("utf-8", "surrogatepass")
