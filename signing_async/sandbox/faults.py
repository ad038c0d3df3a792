"""Faults on demand: which requests they apply to, and what they do to them. The rate limit."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import itertools
import math
import random
import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from .. import _checks
from .clock import Clock
from .refused import Refused
from .request_body import chunks_of
from .responses import Encoder

SERVICE = (
    "me", "signings.create", "signings.list", "signings.get", "signings.send", "documents.upload",
    "documents.download_signed", "recipients.add", "recipients.list", "recipients.remind",
)  # fmt: skip
"""The operations under /api/1.0 that the specification names: the faults of "*" apply to them."""
OPERATIONS = (*SERVICE, "oauth.authorize", "oauth.token", "signings.cancel", "signings.delete")
DELIVERY = "webhooks.deliver"

KINDS = (
    "429", "503", "500", "500-after-commit", "502-html", "502-html-after-commit", "drop-before-commit",
    "drop-after-commit", "truncate", "truncate-after-commit", "slow", "expired-token", "empty", "not-json", "hang",
)  # fmt: skip
"""The kinds of request faults. `truncate`, `empty` and `not-json` apply after the effect."""

DELIVERY_KINDS = ("duplicate", "reorder", "wrong-signature", "slow", "drop", "lose")
"""The kinds of faults of webhook deliveries: sent twice, sent after the next delivery, with a wrong signature, with a
pause in the body, dropped halfway (and retried), never sent."""

DETAILS: dict[str, tuple[str, ...]] = {
    "429": ("retry_after", "http_date"),
    "503": ("retry_after", "http_date"),
    "slow": ("seconds",),
}
"""The details of the kinds that have any."""

HTML_502 = (
    b"<html>\r\n<head><title>502 Bad Gateway</title></head>\r\n<body><h1>502 Bad Gateway</h1></body>\r\n</html>\r\n"
)


@dataclass(eq=False)
class Fault:
    """One arranged fault; `hits` counts the requests it was applied to."""

    operation: str
    kind: str
    times: int | None
    probability: float
    skip: int
    details: dict[str, Any]
    _random: random.Random
    _owner: Faults
    id: str
    hits: int = field(default=0, init=False)

    def remove(self) -> None:
        """Remove the fault."""
        if self in self._owner.arranged:
            self._owner.arranged.remove(self)

    def takes(self, operation: str) -> bool:
        """Return whether the fault applies to this request; if so, count it."""
        is_meant = self.operation == operation or (self.operation == "*" and operation in SERVICE)
        if not is_meant or (self.times is not None and self.hits >= self.times):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        is_hit = self._random.random() < self.probability
        self.hits += is_hit
        return is_hit


class Faults:
    """The arranged faults; the first that matches a request applies."""

    def __init__(self) -> None:
        self.arranged: list[Fault] = []
        self._ids = itertools.count(1)

    def add(
        self,
        operation: str,
        kind: str,
        times: int | None = 1,
        probability: float = 1.0,
        seed: int | str | None = None,
        *,
        skip: int = 0,
        **details: Any,
    ) -> Fault:
        """Arrange a fault for the next `times` requests of an operation (None: all), after `skip` requests.

        With a probability below 1, each request is chosen at random; the same `seed` makes the same choices in every
        run. Details: `retry_after=` (429, 503) is seconds, text, or None for no header; `http_date=True` sends the
        seconds as a date; `seconds=` (slow) is the delay. Raise ValueError for an unknown or invalid argument.
        """
        kinds = DELIVERY_KINDS if operation == DELIVERY else KINDS
        operations = (*OPERATIONS, DELIVERY, "*")
        if operation not in operations:
            raise ValueError(f"operation: unknown operation {operation!r}; use one of {', '.join(operations)}")
        if kind not in kinds:
            raise ValueError(f"kind: {operation} has no fault {kind!r}; use one of {', '.join(kinds)}")
        if kind == "expired-token" and operation.startswith("oauth."):
            raise ValueError(f"kind: 'expired-token' needs an operation that takes a token, got {operation}")
        if times is not None:
            _checks.integer("times", times, error=ValueError)
        _checks.number("probability", probability, at_least=0, at_most=1, error=ValueError)
        _checks.integer("skip", skip, at_least=0, error=ValueError)
        for name, value in details.items():
            if name not in DETAILS.get(kind, ()):
                known = ", ".join(DETAILS.get(kind, ())) or "none"
                raise ValueError(f"{name}: unknown detail of the fault {kind!r}; its details: {known}")
            if name == "http_date":
                if not isinstance(value, bool):
                    raise ValueError(f"http_date: must be True or False, got {value!r}")
            elif name == "seconds" or not isinstance(value, str | None):
                _checks.number(name, value, at_least=0, at_most=1e9, error=ValueError)
        if details.get("http_date") and isinstance(details.get("retry_after"), str):
            raise ValueError("retry_after: must be a number with http_date=True, got a string")
        chance = random.Random(seed)
        fault = Fault(operation, kind, times, probability, skip, details, chance, self, str(next(self._ids)))
        self.arranged.append(fault)
        return fault

    def clear(self) -> None:
        """Remove all faults."""
        self.arranged.clear()

    def take(self, operation: str) -> Fault | None:
        """Return the fault that applies to this request, or None, and count it."""
        return next((fault for fault in self.arranged if fault.takes(operation)), None)


class FaultInjector:
    """Applies faults to requests, before and after they take effect."""

    def __init__(self, encoder: Encoder, closing: asyncio.Event) -> None:
        self._encoder = encoder
        self._closing = closing

    async def before(self, fault: Fault, request: web.Request) -> web.Response | None:
        """Return the response if the request must not take effect."""
        if fault.kind in {"drop-before-commit", "hang"}:
            async for _ in chunks_of(request):
                pass
            while fault.kind == "hang" and not self._closing.is_set() and not _is_closed(request):
                await self._pause(0.02)
            return _hang_up(request)
        if fault.kind == "slow":
            await self._pause(float(fault.details.get("seconds", 1.0)))
        return self._error(fault.kind, request, _retry_after(fault))

    async def after(self, fault: Fault, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        """Return the response with the fault applied; the request has taken effect."""
        kind = fault.kind.removesuffix("-after-commit")
        if kind == "drop":
            return _hang_up(request)
        if kind == "truncate":
            return await _truncate(request, response)
        if kind in {"empty", "not-json"}:
            body = b"" if kind == "empty" else b"Done; everything went well {"
            return self._encoder.respond(request, response.status, body, {"Content-Type": "application/json"})
        return self._error(kind, request, {}) or response

    def _error(self, kind: str, request: web.Request, headers: dict[str, str]) -> web.Response | None:
        if kind == "502-html":
            return self._encoder.respond(request, 502, HTML_502, {"Content-Type": "text/html"})
        errors = {
            "429": ("too_many_requests", "Too many requests."),
            "500": ("server_error", "Something went wrong."),
            "503": ("unavailable", "Unavailable."),
        }
        return (
            self._encoder.error(request, Refused(int(kind), *errors[kind], headers=headers)) if kind in errors else None
        )

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()


async def _truncate(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    assert isinstance(response, web.Response)
    assert isinstance(response.body, bytes)
    body = response.body
    truncated = web.StreamResponse(status=response.status, headers=response.headers)
    truncated.content_length = len(body)
    with contextlib.suppress(ConnectionError):  # the client may have disconnected
        await truncated.prepare(request)
        await truncated.write(body[: len(body) // 2])
    request.protocol.force_close()
    return truncated


def _hang_up(request: web.Request) -> web.Response:
    """Close the connection; return a response that is never sent."""
    request.protocol.force_close()
    return web.Response(status=0)


def _is_closed(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _retry_after(fault: Fault) -> dict[str, str]:
    value = fault.details.get("retry_after", 1 if fault.kind == "429" else None)
    if value is None:
        return {}
    if fault.details.get("http_date"):
        return {"Retry-After": email.utils.formatdate(time.time() + float(value), usegmt=True)}
    return {"Retry-After": value if isinstance(value, str) else f"{value:g}"}


class RateLimit:
    """Requests per second, and how many may arrive at once; `retry_after` replaces the computed Retry-After."""

    def __init__(self, rate: float, burst: int | None, retry_after: float | None, clock: Clock) -> None:
        self.rate: float = _checks.number("rate", rate, at_least=1e-6, at_most=1e9, error=ValueError)
        default = max(1, int(rate)) if burst is None else burst
        self.burst: int = _checks.integer("burst", default, at_most=10**9, error=ValueError)
        if retry_after is not None:
            _checks.number("retry_after", retry_after, at_least=0, at_most=1e9, error=ValueError)
        self.retry_after = retry_after
        self._clock = clock
        self._tokens, self._at = float(self.burst), clock.seconds()

    def check(self) -> None:
        """Admit a request, or refuse it with 429 and the seconds until the next one would be admitted."""
        now = self._clock.seconds()
        passed = max(0.0, now - self._at)  # restoring a snapshot may set the clock back
        self._tokens = min(float(self.burst), self._tokens + passed * self.rate)
        self._at = now
        if self._tokens < 1:
            wait = max(1, math.ceil((1 - self._tokens) / self.rate))
            seconds = wait if self.retry_after is None else self.retry_after
            raise Refused(429, "too_many_requests", "Too many requests.", headers={"Retry-After": f"{seconds:g}"})
        self._tokens -= 1
