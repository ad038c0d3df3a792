"""The token endpoint: a form is posted, and its response is decoded into a `Token` or an error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
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
from ..errors import (
    AuthError,
    ClientClosed,
    ConfigurationError,
    NotFound,
    RefreshRejected,
    RequestTimeout,
    TransportError,
)
from ..models import Token
from ..transport import retry, wire
from ..transport.decode import Unreadable, parse
from ..transport.error_response import error_from, look_up, one_line, request_id
from ..transport.rate_limit import Pause
from ..transport.redaction import redact
from ..transport.retry import Outcome, Repeat, RetryPolicy, Step, Trouble

__all__ = ["TokenEndpoint", "TokenForm", "decode_token"]

log: logging.Logger = logging.getLogger("signing_async")

_LARGEST_ANSWER = 1024 * 1024
_REMEMBERED_SECRETS = 16


class TokenEndpoint:
    """The token endpoint of one tenant, as one registered app uses it."""

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
        self.origin = origin
        self.client_id = client_id
        self._client_secret = client_secret
        self.as_json = as_json
        self.retry = retry
        self.timeout = timeout
        self.assumptions = assumptions
        self.gate = Pause()
        self.sessions = wire.Sessions(session)
        self._prefers_own = session is not None
        self._lent: weakref.WeakSet[wire.Sessions] = weakref.WeakSet()
        # Tokens of a while ago may still be echoed by a server.
        self._secrets: deque[str] = deque(maxlen=_REMEMBERED_SECRETS)

    def form(self, **fields: str) -> TokenForm:
        """Return a form with the app's credentials."""
        return TokenForm({"client_id": self.client_id, "client_secret": self._client_secret, **fields})

    async def request(self, form: TokenForm, operation: str) -> Token:
        """Post the form and return the token of the response."""
        return await retry.run(_TokenRequest(self, form, operation).attempt)

    def secrets(self) -> Iterable[str]:
        """What must appear in no text."""
        return (self._client_secret, *self._secrets)

    def remember(self, token: Token) -> None:
        """Redact this token from all that the endpoint and the service respond."""
        for secret in (token.access_token, token.refresh_token):
            if secret is not None and secret not in self._secrets:
                self._secrets.append(secret)

    def lend(self, sessions: wire.Sessions) -> None:
        """Use a client's session for as long as that is open."""
        self._lent.add(sessions)

    def usable_sessions(self) -> wire.Sessions:
        """Return the session of an open client, else the endpoint's own."""
        if not self._prefers_own:
            for sessions in tuple(self._lent):
                # A client may be closed, or of an earlier event loop.
                with contextlib.suppress(ClientClosed, ConfigurationError):
                    sessions.get()
                    return sessions
            if self.sessions.belong_elsewhere():
                self.sessions = wire.Sessions()
        return self.sessions


@attrs.frozen
class TokenForm:
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

    def __init__(self, endpoint: TokenEndpoint, form: TokenForm, operation: str) -> None:
        self._endpoint = endpoint
        self._form = form
        self._operation = operation
        self._deadline = asyncio.get_running_loop().time() + endpoint.timeout
        self._attempts = 0
        self._lost = 0

    async def attempt(self) -> Token:
        self._attempts += 1
        result = await self._exchange()
        if isinstance(result, Token):
            log.debug("%s attempt %d: a token came", self._operation, self._attempts)
            return result
        decision = self._decide(result)
        again = "" if decision.delay is None else f"; again in {decision.delay:.3f} s"
        log.debug("%s attempt %d: %s%s", self._operation, self._attempts, result.error, again)
        if decision.delay is None:
            raise result.error
        raise retry.Again(decision.delay)

    def _decide(self, trouble: Trouble) -> retry.Decision:
        if not trouble.passing:
            return retry.Decision(None)
        following = retry.step(trouble.outcome, Repeat.TOKEN)
        self._lost += following is Step.RETRY_ONCE
        if self._lost > 1 and following is Step.RETRY_ONCE:
            return retry.Decision(None)
        policy = self._endpoint.retry
        decision = retry.decide(
            policy,
            attempt=self._attempts,
            retry_after=trouble.retry_after,
            remaining=self._deadline - asyncio.get_running_loop().time(),
            chance=random.random(),
        )
        if trouble.outcome is Outcome.THROTTLED:
            wait = decision.delay if decision.delay is not None else trouble.retry_after
            self._endpoint.gate.close(min(wait or 0.0, policy.max_retry_after))
        return decision

    async def _exchange(self) -> Token | Trouble:
        endpoint = self._endpoint
        if not await endpoint.gate.passed(self._deadline):
            return self._gated()
        try:
            async with asyncio.timeout_at(self._deadline) as bound:
                began = time.time()
                body = self._form.body(as_json=endpoint.as_json)
                request = wire.Request("POST", endpoint.origin, "/api/oauth/token", body=body)
                response = await wire.send(endpoint.usable_sessions(), request, None, connect=0.5 * endpoint.timeout)
                return await self._receive(response, began)
        except TimeoutError:
            if not bound.expired():
                raise
        words = f"{self._operation}: no answer came within {endpoint.timeout:g} s"
        error = RequestTimeout(words, operation=self._operation, attempts=self._attempts)
        return Trouble(Outcome.LOST, error, passing=False)

    async def _receive(self, response: wire.Response | wire.Failure, began: float) -> Token | Trouble:
        if isinstance(response, wire.Failure):
            return self._failed(response)
        try:
            body = await (response.read(_LARGEST_ANSWER) if response.ok else response.start())
            return self._understand(response, body, began)
        except wire.Broken as broken:
            return self._failed(broken.failure, response)
        finally:
            response.close()

    def _gated(self) -> Trouble:
        wait = self._endpoint.gate.opens_at - asyncio.get_running_loop().time()
        words = f"{self._operation}: the service asked to wait for {wait:.0f} s; nothing was sent (HTTP 429)"
        return Trouble(Outcome.THROTTLED, AuthError(words, status=429, retry_after=wait), passing=False)

    def _failed(self, failure: wire.Failure, response: wire.Response | None = None) -> Trouble:
        identity = None if response is None else self._identity(response, None)
        error = TransportError(
            f"{self._operation}: {failure.words}" + (f" (request id {identity})" if identity else ""),
            operation=self._operation,
            attempts=self._attempts,
            status=None if response is None else response.status,
            request_id=identity,
        )
        return Trouble(failure.outcome, error, passing=failure.passing)

    def _understand(self, response: wire.Response, text: bytes, began: float) -> Token | Trouble:
        try:
            data = parse(text)
        except Unreadable:
            data = None
        if response.ok:
            token = decode_token(data, began, self._endpoint.assumptions, self._endpoint.origin)
            return self._unusable(response, data) if token is None else token
        error = self._refusal(response, text, data)
        if response.status == 429:
            return Trouble(Outcome.THROTTLED, error, error.retry_after)
        return Trouble(Outcome.FAILED, error, error.retry_after, passing=response.status >= 500)

    def _unusable(self, response: wire.Response, data: Any) -> Trouble:
        identity = self._identity(response, data)
        facts = f"HTTP {response.status}" + (f", request id {identity}" if identity else "")
        words = f"{self._operation}: the answer holds no token ({facts})"
        return Trouble(Outcome.FAILED, AuthError(words, status=response.status, request_id=identity), passing=False)

    def _refusal(self, response: wire.Response, text: bytes, data: Any) -> AuthError:
        secrets = (*self._endpoint.secrets(), *self._form.secrets())
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
            assumptions=self._endpoint.assumptions,
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
        found = request_id(response.headers, data, self._endpoint.assumptions)
        return None if found is None else redact(found, (*self._endpoint.secrets(), *self._form.secrets()))


def decode_token(data: Any, began: float, assumptions: Assumptions, origin: str) -> Token | None:
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
