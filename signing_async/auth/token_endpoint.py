"""The token endpoint: a token request is an operation like every other, with errors of its own."""

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

import attrs

from .._secret import Secret
from ..assumptions import Assumptions
from ..errors import (
    APIError,
    AuthError,
    ClientClosed,
    ConfigurationError,
    DecodeError,
    RefreshRejected,
    SigningError,
    TransportError,
    amended,
)
from ..models import Token
from ..transport import wire
from ..transport.attempt import Bearer
from ..transport.call import Transport
from ..transport.decode import Unreadable, parse
from ..transport.operation import Observer, Operation, Options, Shared, Timeouts
from ..transport.rate_limit import LocalRateLimiter
from ..transport.response import Response
from ..transport.retry import RetryPolicy, Safety

__all__ = ["Form", "TokenEndpoint"]

_MAX_RESPONSE_BYTES = 1024 * 1024
_REMEMBERED_SECRETS = 16

Form = Mapping[str, str | Secret[str]]
"""The fields of a token request, without the app's credentials."""


class TokenEndpoint:
    """The token endpoint of one tenant, as used by one registered app."""

    def __init__(
        self,
        origin: str,
        app: Form,
        *,
        as_json: bool,
        retry: RetryPolicy,
        timeout: float,
        assumptions: Assumptions,
        sessions: wire.Sessions,
    ) -> None:
        self.origin: str = origin
        self.timeout: float = timeout
        self.assumptions: Assumptions = attrs.evolve(
            assumptions,
            max_answer_bytes=min(_MAX_RESPONSE_BYTES, assumptions.max_answer_bytes),
            # OAuth's own member takes precedence over other common places for a code.
            error_paths={"code": "error", **assumptions.error_paths},
        )
        self.sessions: wire.Sessions = sessions
        self._app = app
        self._as_json = as_json
        # Connecting takes at most half of the time, so another attempt fits into the other half.
        self._options = Options(retry, Timeouts(timeout, timeout, 0.5 * timeout), self.assumptions)
        self._limiter = LocalRateLimiter()
        self._lent: weakref.WeakSet[wire.Sessions] = weakref.WeakSet()
        self._recent: deque[Secret[str]] = deque(maxlen=_REMEMBERED_SECRETS)

    async def request(self, name: str, form: Form, observer: Observer) -> Token:
        """Post the form and return the token of the response.

        Raise `RefreshRejected` if the service refuses the refresh token for good, another `AuthError` if it refuses
        the request or its response holds no token, and a `TransportError` if there is no response.
        """
        shared = Shared(self.origin, Bearer(None, lambda: self.secrets(form)), self._usable_sessions(), self._limiter)
        options = attrs.evolve(self._options, on_attempt=observer.on_attempt, telemetry=observer.telemetry)
        try:
            return await Transport(shared, options).call(self._operation(name, form))
        except (APIError, DecodeError, TransportError) as error:
            failure = self._failure(error, is_refresh="refresh_token" in form)
        # Not in the handler: the body and the frames of the original error may hold tokens.
        raise failure

    def secrets(self, form: Mapping[str, object] = {}) -> Iterable[str]:
        """Return what to redact: the client secret, recent tokens and those of the form, which a server may echo."""
        held = (*self._app.values(), *self._recent, *form.values())
        return [value.reveal() for value in held if isinstance(value, Secret)]

    def remember(self, token: Token) -> None:
        """Redact this token from now on."""
        known = self.secrets()
        self._recent += [
            Secret(text) for text in (token.access_token, token.refresh_token) if text and text not in known
        ]

    def lend(self, sessions: wire.Sessions) -> None:
        """Use a client's session for as long as it is open."""
        self._lent.add(sessions)

    def _usable_sessions(self) -> wire.Sessions:
        if not self.sessions.are_given:
            for sessions in tuple(self._lent):
                # A client may be closed, or belong to an earlier event loop.
                with contextlib.suppress(ClientClosed, ConfigurationError):
                    sessions.get()
                    return sessions
            if self.sessions.belong_elsewhere():
                self.sessions = self.sessions.renew()
        return self.sessions

    def _operation(self, name: str, form: Form) -> Operation[Token]:
        sent_at = 0.0

        def body() -> wire.Body:
            # The lifetime counts from here: the token must never seem valid for longer than it is.
            nonlocal sent_at
            sent_at = time.time()
            fields = {
                name: value.reveal() if isinstance(value, Secret) else value
                for name, value in {**self._app, **form}.items()
            }
            if self._as_json:
                return wire.bytes_body(json.dumps(fields).encode(), wire.JSON)
            return wire.bytes_body(urlencode(fields).encode(), "application/x-www-form-urlencoded")

        def decode(response: Response) -> Token:
            data = parse(response.bytes)
            if isinstance(data, dict):
                expires_at = _expiry(data.get("expires_in"), sent_at, self.assumptions.expires_in_seconds)
                with contextlib.suppress(ConfigurationError):
                    return Token(
                        data.get("access_token", ""), data.get("refresh_token") or None, expires_at, origin=self.origin
                    )
            raise Unreadable("no usable token")

        return Operation(name, "POST", "/api/oauth/token", Safety.TOKEN, body=body, decode=decode)

    def _failure(self, error: APIError | DecodeError | TransportError, *, is_refresh: bool) -> SigningError:
        """Return the error without the body of the response. After a failed exchange, calls have the current token."""
        if isinstance(error, TransportError):
            return amended(error, client_wide=is_refresh).with_traceback(None)
        if isinstance(error, DecodeError):
            facts = f"HTTP {error.status}" + (f", request id {error.request_id}" if error.request_id else "")
            text = f"{error.operation}: the response holds no usable token ({facts})"
            return AuthError(text, status=error.status, request_id=error.request_id, client_wide=is_refresh)
        code = error.code or ""
        rejecting = map(str.lower, self.assumptions.refresh_rejected_codes)
        # A failing or busy endpoint's verdict on the refresh token is not final.
        is_final = is_refresh and not error.transient and code.lower() in rejecting
        return (RefreshRejected if is_final else AuthError)(
            str(error),
            code=code or None,
            status=error.status,
            request_id=error.request_id,
            retry_after=error.retry_after,
            transient=error.transient,
            client_wide=is_refresh,
        )


def _expiry(expires_in: Any, sent_at: float, unit: float) -> datetime | None:
    """Return when a token that was requested at ``sent_at`` expires; None if its lifetime is missing or unusable."""
    with contextlib.suppress(TypeError, ValueError, OverflowError, OSError):
        lifetime = 0.0 if isinstance(expires_in, bool) else float(expires_in) * unit
        return datetime.fromtimestamp(sent_at + lifetime, UTC) if lifetime > 0 else None
    return None
