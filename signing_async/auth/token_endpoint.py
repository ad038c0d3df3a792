"""The token endpoint: posts a form and decodes the response, as an `Operation` of the one request loop."""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

import aiohttp
import attrs

from ..assumptions import Assumptions
from ..errors import APIError, AuthError, ClientClosed, ConfigurationError, RefreshRejected, TransportError
from ..models import Token
from ..telemetry.switch import is_enabled
from ..transport import wire
from ..transport.call import Anonymous, Operation, Options, Shared, Timeouts, Transport
from ..transport.decode import Unreadable, parse
from ..transport.error_response import one_line
from ..transport.lookup import look_up, request_id
from ..transport.operation import CallContext, current_call_context
from ..transport.rate_limit import Pause
from ..transport.redaction import redact
from ..transport.retry import Repeat, RetryPolicy

__all__ = ["TokenEndpoint", "TokenForm", "decode_token"]

_PATH = "/api/oauth/token"
_MAX_RESPONSE_BYTES = 1024 * 1024
_REMEMBERED_SECRETS = 16
_MAX_CODE_LENGTH = 100
_CREDENTIAL_FIELDS = ("code", "code_verifier", "refresh_token")


class TokenEndpoint:
    """The token endpoint of one tenant, as used by one registered app."""

    def __init__(
        self,
        origin: str,
        client_id: str,
        client_secret: str,
        *,
        as_json: bool,
        retry: RetryPolicy,
        timeout: float,
        assumptions: Assumptions,
        session: aiohttp.ClientSession | None,
    ) -> None:
        self.origin: str = origin
        self.timeout: float = timeout
        self.assumptions: Assumptions = assumptions
        self.sessions: wire.Sessions = wire.Sessions(session)
        self._client_id = client_id
        self._client_secret = client_secret
        self._as_json = as_json
        # Connecting takes at most half of the time, so another attempt fits into the other half.
        timeouts = Timeouts(call=timeout, transfer=timeout, connect=0.5 * timeout)
        self._options = Options(retry, timeouts, assumptions, on_attempt=None)
        self._default_context = CallContext(None, telemetry=is_enabled())
        self._pause = Pause()
        self._has_given_session = session is not None
        self._lent: weakref.WeakSet[wire.Sessions] = weakref.WeakSet()
        self._recent_secrets: deque[str] = deque(maxlen=_REMEMBERED_SECRETS)

    def form(self, **fields: str) -> TokenForm:
        """Return a form with the app's credentials and these fields."""
        return TokenForm({"client_id": self._client_id, "client_secret": self._client_secret, **fields})

    async def request(self, name: str, form: TokenForm) -> Token:
        """Post the form and return the token of the response.

        Raise `RefreshRejected` if the service refuses the refresh token for good, another `AuthError` if it refuses
        the request or its response holds no token, and a `TransportError` if there is no response.
        """
        request = _TokenRequest(self, name, form)
        operation = Operation(
            name,
            "POST",
            _PATH,
            Repeat.TOKEN,
            body=request.body,
            receive=request.receive,
            convert_error=request.convert_error,
        )
        shared = Shared(self.origin, Anonymous(request.secrets), self._usable_sessions(), self._pause)
        context = self.call_context()
        options = attrs.evolve(self._options, on_attempt=context.on_attempt, telemetry=context.telemetry)
        try:
            return await Transport(shared, options).call(operation)
        except (AuthError, TransportError) as error:
            # After a failed exchange, other calls still have the current token.
            error.client_wide = form.is_refresh
            raise

    def call_context(self) -> CallContext:
        """Return the context of the current call; without a call, the environment decides about telemetry."""
        return current_call_context() or self._default_context

    def encode(self, form: TokenForm) -> wire.Body:
        """Return the form as a request body."""
        if self._as_json:
            return wire.bytes_body(json.dumps(form.fields).encode(), wire.JSON)
        return wire.bytes_body(urlencode(form.fields).encode(), "application/x-www-form-urlencoded")

    def secrets(self) -> Iterable[str]:
        """Return what to redact: the client secret and recent tokens, which a server may echo."""
        return (self._client_secret, *self._recent_secrets)

    def remember(self, token: Token) -> None:
        """Redact this token from now on."""
        for secret in (token.access_token, token.refresh_token):
            if secret is not None and secret not in self._recent_secrets:
                self._recent_secrets.append(secret)

    def lend(self, sessions: wire.Sessions) -> None:
        """Use a client's session for as long as it is open."""
        self._lent.add(sessions)

    def _usable_sessions(self) -> wire.Sessions:
        if not self._has_given_session:
            for sessions in tuple(self._lent):
                # A client may be closed, or belong to an earlier event loop.
                with contextlib.suppress(ClientClosed, ConfigurationError):
                    sessions.get()
                    return sessions
            if self.sessions.belong_elsewhere():
                self.sessions = wire.Sessions()
        return self.sessions


@attrs.frozen
class TokenForm:
    """The fields of a token request; its repr shows none of them."""

    fields: Mapping[str, str] = attrs.field(repr=False)

    @property
    def is_refresh(self) -> bool:
        return "refresh_token" in self.fields


class _TokenRequest:
    """One token request: its body, the token in its response, and the errors.

    Tracebacks may show variables and fields. No field holds any part of a response, and errors are raised only in
    functions whose variables hold none.
    """

    def __init__(self, endpoint: TokenEndpoint, name: str, form: TokenForm) -> None:
        self._endpoint = endpoint
        self._name = name
        self._form = form
        self._sent_at = 0.0

    def body(self) -> wire.Body:
        # The lifetime counts from here: the token must never seem valid for longer than it is.
        self._sent_at = time.time()
        return self._endpoint.encode(self._form)

    def secrets(self) -> Iterable[str]:
        fields = self._form.fields
        return (*self._endpoint.secrets(), *(fields[name] for name in _CREDENTIAL_FIELDS if name in fields))

    async def receive(self, response: wire.Response) -> Token:
        token = self._decode(await response.read(_MAX_RESPONSE_BYTES), response)
        if isinstance(token, AuthError):
            raise token
        return token

    def _decode(self, body: bytes, response: wire.Response) -> Token | AuthError:
        data = _parse(body)
        token = decode_token(data, self._sent_at, self._endpoint.assumptions, self._endpoint.origin)
        if token is not None:
            return token
        identity = request_id(response.headers, data, self._endpoint.assumptions)
        identity = None if identity is None else redact(identity, self.secrets())
        facts = f"HTTP {response.status}" + (f", request id {identity}" if identity else "")
        message = f"{self._name}: the response holds no usable token ({facts})"
        return AuthError(message, status=response.status, request_id=identity)

    def convert_error(self, error: APIError, headers: Mapping[str, str]) -> AuthError:
        # OAuth's own member takes precedence over other places for a code.
        named = look_up(_parse(error.body), "error")
        code = error.code
        if isinstance(named, str) and named:
            code = one_line(redact(named, self.secrets()))[:_MAX_CODE_LENGTH]
        # A failing or busy endpoint's verdict on the refresh token or the code is not final.
        final_codes = map(str.lower, self._endpoint.assumptions.refresh_rejected_codes)
        refused = not error.transient and (code or "").lower() in final_codes
        return (RefreshRejected if refused and self._form.is_refresh else AuthError)(
            str(error),
            code=code,
            status=error.status,
            request_id=error.request_id,
            retry_after=error.retry_after,
            transient=error.transient,
        )


def _parse(body: bytes) -> Any:
    try:
        return parse(body)
    except Unreadable:
        return None


def decode_token(data: Any, sent_at: float, assumptions: Assumptions, origin: str) -> Token | None:
    """Return the token of a parsed token response; None if there is no usable one in it."""
    if not isinstance(data, dict):
        return None
    try:
        return Token(
            data.get("access_token", ""),
            data.get("refresh_token") or None,
            _expiry(data.get("expires_in"), sent_at, assumptions.expires_in_seconds),
            _token_type(data.get("token_type")),
            origin=origin,
        )
    except ConfigurationError:
        return None


def _expiry(expires_in: Any, sent_at: float, unit: float) -> datetime | None:
    """Return when a token that was requested at ``sent_at`` expires; None if its lifetime is missing or unusable."""
    try:
        lifetime = 0.0 if isinstance(expires_in, bool) else float(expires_in) * unit
        return datetime.fromtimestamp(sent_at + lifetime, UTC) if lifetime > 0 else None
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _token_type(named: Any) -> str:
    usable = isinstance(named, str) and named.isascii() and named.isalnum() and named.lower() != "bearer"
    return named if usable else "Bearer"
