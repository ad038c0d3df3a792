"""Sends webhook deliveries: signed, in order for each endpoint, retried with back-off, with faults on demand."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .addresses import is_loopback, split_url
from .clock import Clock
from .database import Database
from .faults import DELIVERY, Fault, Faults
from .profile import Profile
from .records import Delivery, Endpoint, Event
from .redaction import redact_headers

if TYPE_CHECKING:
    import aiohttp

logger: logging.Logger = logging.getLogger("signing_async.sandbox")

BACK_OFF = (5, 30, 120, 600, 3600, 6 * 3600, 24 * 3600)
"""Seconds before each retry; if the last retry fails, so does the delivery."""

TIMEOUT = 10.0
"""Seconds for an endpoint to respond."""

LONGEST_BODY = 16 * 1024
"""The maximum number of bytes kept of an endpoint's response body."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result of one attempt: the endpoint's response, or an error."""

    signature: str | None = None
    status: int | None = None
    headers: str | None = None
    body: bytes | None = None
    error: str | None = None

    @property
    def is_delivered(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    @property
    def summary(self) -> str:
        """The status or the error, for the log."""
        if self.status is None:
            return self.error or "no response"
        return f"{self.status} {self.error}" if self.error else f"{self.status}"


class Courier:
    """Sends due deliveries, in one task per endpoint."""

    def __init__(
        self, database: Database, clock: Clock, profile: Profile, faults: Faults, *, allow_remote: bool
    ) -> None:
        self._database = database
        self._clock = clock
        self._profile = profile
        self._faults = faults
        self._allow_remote = allow_remote
        self._tasks: dict[str, tuple[asyncio.Task[None], asyncio.Event]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    def wake(self, endpoint_id: str) -> None:
        """Send the due deliveries of this endpoint; the first call starts its task."""
        if self._closed:
            return
        if endpoint_id not in self._tasks:
            wake = asyncio.Event()
            self._tasks[endpoint_id] = (asyncio.create_task(self._run(endpoint_id, wake)), wake)
        self._tasks[endpoint_id][1].set()

    def wake_all(self) -> None:
        """Send the due deliveries of every endpoint that has a task."""
        for _, wake in self._tasks.values():
            wake.set()

    def forget(self, endpoint_id: str) -> None:
        """Send nothing more to this endpoint."""
        if endpoint_id in self._tasks:
            self._tasks.pop(endpoint_id)[0].cancel()

    async def close(self) -> None:
        """Stop. Pending deliveries stay pending."""
        self._closed = True
        tasks = [task for task, _ in self._tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._tasks.clear()
        if self._session is not None:
            await self._session.close()

    def problem_of(self, url: str) -> str | None:
        """Return why this URL is refused, or None."""
        parts = split_url(url)
        if parts is None or parts.scheme not in {"http", "https"}:
            return f"{url!r} must be an absolute http or https URL."
        if not self._allow_remote and not is_loopback(parts.hostname or ""):
            return f"{url!r} is not on this machine; start the sandbox with allow_remote_webhooks to allow that."
        return None

    async def _run(self, endpoint_id: str, wake: asyncio.Event) -> None:
        while True:
            wake.clear()
            sql = "SELECT min(due_at) FROM deliveries WHERE endpoint_id = ? AND due_at IS NOT NULL"
            await self._clock.wait(self._database.value(sql, endpoint_id), wake)
            await self._deliver_next(endpoint_id)

    async def _deliver_next(self, endpoint_id: str) -> None:
        where = "endpoint_id = ? AND due_at <= ? ORDER BY due_at, seq LIMIT 2"
        due = self._database.select(Delivery, "deliveries", where, endpoint_id, self._clock.micros())
        endpoint = self._database.get(Endpoint, "endpoints", "id = ?", endpoint_id)
        if not due or not endpoint:
            return
        delivery, fault = due[0], self._faults.take(DELIVERY)
        if fault is None:
            await self._attempt(delivery, endpoint, None)
        elif fault.kind == "lose":
            sql = "UPDATE deliveries SET state = 'lost', due_at = NULL, last_error = 'lost on purpose' WHERE id = ?"
            self._database.run(sql, delivery.id)
            logger.info("deliver %s -> %s lost on purpose", delivery.event_type, _address(endpoint))
        elif fault.kind == "reorder":
            due = due if len(due) > 1 else await self._with_next(delivery)
            for delivery in reversed(due):
                await self._attempt(delivery, endpoint, fault)
        else:
            await self._attempt(delivery, endpoint, fault)
            if fault.kind == "duplicate":
                await self._attempt(delivery, endpoint, fault)

    async def _with_next(self, delivery: Delivery) -> list[Delivery]:
        """Return this delivery and the next to the same endpoint, if one is due within a second."""
        for _ in range(100):
            where = "endpoint_id = ? AND due_at <= ? AND id <> ? ORDER BY seq LIMIT 1"
            values = (delivery.endpoint_id, self._clock.micros(), delivery.id)
            if found := self._database.select(Delivery, "deliveries", where, *values):
                return [delivery, *found]
            await asyncio.sleep(0.01)
        return [delivery]

    async def _attempt(self, delivery: Delivery, endpoint: Endpoint, fault: Fault | None) -> None:
        event = self._database.get(Event, "events", "id = ?", delivery.event_id)
        if event is None:
            return  # a reset or a restored snapshot removed the event
        started = time.perf_counter()
        outcome = await self._post(event, endpoint, fault)
        seconds = time.perf_counter() - started
        if self._database.get(Delivery, "deliveries", "id = ?", delivery.id) is None:
            return  # removed during the attempt
        now = self._clock.micros()
        with self._database.transaction():
            self._database.insert(
                "attempts",
                delivery_id=delivery.id,
                event_id=delivery.event_id,
                at=now,
                status=outcome.status,
                error=outcome.error,
                fault=fault and fault.kind,
                seconds=seconds,
                signature=outcome.signature,
                response_headers=outcome.headers,
                response_body=outcome.body,
            )
            self._conclude(delivery, outcome, now)
        after = ""
        if not outcome.is_delivered:
            last = delivery.attempts >= len(BACK_OFF)
            after = ", no more retries" if last else f", retry in {_span(BACK_OFF[delivery.attempts])}"
        marked = f" (fault: {fault.kind})" if fault else ""
        logger.info("deliver %s -> %s %s%s%s", event.type, _address(endpoint), outcome.summary, after, marked)

    def _conclude(self, delivery: Delivery, outcome: _Outcome, now: int) -> None:
        state, due_at = "delivered", None
        if not outcome.is_delivered:
            state = "failed"
            if delivery.attempts < len(BACK_OFF):
                state, due_at = "pending", now + BACK_OFF[delivery.attempts] * 1_000_000
        sql = """UPDATE deliveries SET attempts = attempts + 1, state = ?, due_at = ?, last_status = ?, last_error = ?
                 WHERE id = ? AND state = 'pending'"""
        self._database.run(sql, state, due_at, outcome.status, outcome.error, delivery.id)

    async def _post(self, event: Event, endpoint: Endpoint, fault: Fault | None) -> _Outcome:
        import aiohttp

        if problem := self.problem_of(endpoint.url):  # an earlier run may have allowed this URL
            return _Outcome(error=problem)
        kind = fault.kind if fault else ""
        secret = endpoint.secret + ("-but-not-this-one" if kind == "wrong-signature" else "")
        signature = sign(event.body, secret, self._profile.signature)
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(event.body)),
            "User-Agent": "signing-sandbox",
            "X-Signature": signature,
        }
        body: bytes | AsyncIterator[bytes] = event.body
        if fault and kind in {"slow", "drop"}:
            body = _in_halves(event.body, None if kind == "drop" else float(fault.details.get("seconds", 1.0)))
        session = self._connect()
        try:
            async with session.post(
                endpoint.url, data=body, headers=headers, allow_redirects=False, raise_for_status=False
            ) as response:
                content = await response.content.read(LONGEST_BODY)
                kept = json.dumps(redact_headers(response.headers))
                return _Outcome(signature, response.status, kept, content, _redirection(response))
        except TimeoutError:
            return _Outcome(signature, error=f"no response within {TIMEOUT:g} seconds")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return _Outcome(signature, error=_describe(error))

    def _connect(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            resolver = None if self._allow_remote else _loopback_resolver()
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=TIMEOUT),
                connector=aiohttp.TCPConnector(resolver=resolver),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def _redirection(response: aiohttp.ClientResponse) -> str | None:
    """Return where the endpoint redirects to, as a phrase."""
    location = response.headers.get("Location")
    if location is None or not 300 <= response.status < 400:
        return None
    return f"redirected to {ascii(location.partition('?')[0])[1:-1][:200]}: not followed"


def _describe(error: Exception) -> str:
    """Return why there was no response, as a phrase."""
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0
        reason = os.strerror(number) if number > 0 else str(error.os_error)  # asyncio's text repeats the address
        return f"could not connect: {reason}"[:300]
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the endpoint closed the connection without a response"
    return f"the delivery failed: {type(error).__name__}: {error}"[:300]


def _address(endpoint: Endpoint) -> str:
    """Return the URL for the log: a query or user information may hold a secret."""
    scheme, _, rest = endpoint.url.partition("?")[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def _span(seconds: int) -> str:
    """Return a span of time in its largest unit, such as `2 min`."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def sign(body: bytes, secret: str, encoding: str) -> str:
    """Return the X-Signature of a body: HMAC-SHA256 with the shared secret, in one of the profile's encodings."""
    key = secret.encode()
    if encoding == "timestamped":
        moment = int(time.time())  # real time: receivers compare it with their own clock
        return f"t={moment},v1={hmac.new(key, b'%d.%s' % (moment, body), hashlib.sha256).hexdigest()}"
    digest = hmac.new(key, body, hashlib.sha256)
    if encoding == "base64":
        return base64.b64encode(digest.digest()).decode()
    return ("sha256=" if encoding == "sha256" else "") + digest.hexdigest()


async def _in_halves(body: bytes, pause: float | None) -> AsyncIterator[bytes]:
    """Yield the body with a pause in the middle; if `pause` is None, drop the connection there."""
    half = len(body) // 2
    yield body[:half]
    await asyncio.sleep(0.01 if pause is None else pause)
    if pause is None:
        raise ConnectionResetError("dropped on purpose")
    yield body[half:]


def _loopback_resolver() -> Any:
    """Return a resolver that resolves only loopback names, without DNS."""
    import socket

    from aiohttp.abc import AbstractResolver, ResolveResult

    class LoopbackResolver(AbstractResolver):
        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
        ) -> list[ResolveResult]:
            pairs = [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]
            return [
                ResolveResult(hostname=host, host=address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST)
                for address, kind in pairs
                if is_loopback(host) and family in (kind, socket.AF_UNSPEC)
            ]

        async def close(self) -> None:
            """Close nothing: the base class requires the method."""

    return LoopbackResolver()
