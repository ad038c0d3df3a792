"""Webhooks: endpoints, events, and the delivery of each event to each endpoint.

Each endpoint has a task that sends its deliveries: signed, in order, retried with back-off, with faults on demand.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import socket
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from .._connections import describe_failure
from .addresses import is_loopback, split_url
from .clock import Clock
from .database import Database
from .faults import DELIVERY, Fault, Faults
from .ids import Ids
from .profile import Profile
from .records import Attempt, Delivery, Endpoint, Event, Signing
from .redaction import redact_headers
from .refused import invalid, not_found
from .request_log import logger
from .responses import Encoder

BACK_OFF = {5: "5 s", 30: "30 s", 120: "2 min", 600: "10 min", 3600: "1 h", 6 * 3600: "6 h", 24 * 3600: "24 h"}
"""Seconds before each retry, and how the log shows them; if the last retry fails, so does the delivery."""

TIMEOUT = 10.0
"""Seconds for an endpoint to respond."""

LONGEST_BODY = 16 * 1024
"""The maximum number of bytes kept of an endpoint's response body."""


class Deliveries:
    """The registered endpoints, the events, and their deliveries."""

    def __init__(
        self, database: Database, clock: Clock, ids: Ids, profile: Profile, faults: Faults, *, allow_remote: bool
    ) -> None:
        self._database = database
        self._clock = clock
        self._ids = ids
        self._profile = profile
        self._faults = faults
        self._allow_remote = allow_remote
        self._encoder = Encoder(profile)
        self._tasks: dict[str, tuple[asyncio.Task[None], asyncio.Event]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    # endpoints

    def register(self, url: str, secret: str | None = None) -> Endpoint:
        """Register an endpoint for all events from now on; generate a secret if none is given.

        If the URL is registered already, log a warning: the URL gets every event once per registration.
        """
        self._check(url, secret)
        if self.is_registered(url):
            logger.warning("webhook endpoint registered twice: %s gets every event once more", url)
        with self._database.transaction():
            secret = secret or self._ids.secret("webhook secret", "whsec_")
            endpoint = Endpoint(self._ids.new("endpoint"), url, secret, self._clock.micros())
            self._database.run(
                "INSERT INTO endpoints VALUES (?, ?, ?, ?)", endpoint.id, url, secret, endpoint.created_at
            )
        return endpoint

    def keep(self, url: str, secret: str | None = None) -> None:
        """Register an endpoint. If the URL is registered already, replace only its secret, if one is given."""
        self._check(url, secret)
        if self.is_registered(url):
            self._database.run("UPDATE endpoints SET secret = coalesce(?, secret) WHERE url = ?", secret, url)
        else:
            self.register(url, secret)

    def is_registered(self, url: str) -> bool:
        """Return whether there is an endpoint with this URL."""
        return self._database.count("endpoints", "url = ?", url) > 0

    def _check(self, url: str, secret: str | None) -> None:
        errors: dict[str, list[str]] = {}
        if problem := self._problem_of(url):
            errors["url"] = [problem]
        if secret == "":
            errors["secret"] = ["The secret must not be empty."]
        if errors:
            raise invalid(errors)

    def _problem_of(self, url: str) -> str | None:
        """Return why this URL is refused, or None."""
        parts = split_url(url)
        if parts is None or parts.scheme not in {"http", "https"}:
            return f"{url!r} must be an absolute http or https URL."
        if not self._allow_remote and not is_loopback(parts.hostname or ""):
            return f"{url!r} is not on this machine; start the sandbox with allow_remote_webhooks to allow that."
        return None

    def remove(self, endpoint_id: str) -> None:
        """Remove an endpoint; its pending deliveries fail."""
        with self._database.transaction():
            if not self._database.run("DELETE FROM endpoints WHERE id = ?", endpoint_id).rowcount:
                raise not_found("webhook endpoint")
            sql = """UPDATE deliveries SET due_at = NULL, state = 'failed', last_error = 'the endpoint was removed'
                     WHERE endpoint_id = ? AND state = 'pending'"""
            self._database.run(sql, endpoint_id)
        if endpoint_id in self._tasks:
            self._tasks.pop(endpoint_id)[0].cancel()

    def endpoints(self) -> list[Endpoint]:
        """Return the endpoints, oldest first."""
        return self._database.select(Endpoint, "endpoints", "1 ORDER BY created_at, id")

    # events

    def emit(self, kind: str, signing: Signing, more: Mapping[str, Any]) -> None:
        """Save an event and its deliveries, in the caller's transaction."""
        event_id, now = self._ids.new("event"), self._clock.micros()
        name = kind if self._profile.event_names == "dotted" else kind.replace(".", "_")
        name = name.upper() if self._profile.event_names == "upper" else name
        event = {"id": event_id, "type": name, "created_at": self._encoder.time(now)}
        is_flat = self._profile.event_shape == "flat"
        shown = self._encoder.signing(signing, None) | {"state": signing.state}
        names = ("id", "state", "name", "is_draft", "is_completed", "cancelled_at", "updated_at")
        payload = {
            **({f"event.{key}": value for key, value in event.items()} if is_flat else {"event": event}),
            "signing": {key: shown[key] for key in names},
            **more,
        }
        body = json.dumps(payload, ensure_ascii=False).encode()
        self._database.insert("events", id=event_id, type=name, signing_id=signing.id, body=body, created_at=now)
        for endpoint in self.endpoints():
            self._schedule(event_id, name, endpoint)

    def _schedule(self, event_id: str, name: str, endpoint: Endpoint) -> str:
        delivery_id = self._ids.new("delivery")
        row = {"event_type": name, "endpoint_id": endpoint.id, "url": endpoint.url, "due_at": self._clock.micros()}
        self._database.insert("deliveries", id=delivery_id, event_id=event_id, **row)
        self._wake(endpoint.id)
        return delivery_id

    def events(self) -> list[Event]:
        """Return all events, oldest first."""
        return self._database.select(Event, "events", "1 ORDER BY seq")

    def events_of(self, signing_id: str) -> list[Event]:
        """Return the events of one signing, oldest first."""
        return self._database.select(Event, "events", "signing_id = ? ORDER BY seq", signing_id)

    def event(self, event_id: str) -> Event:
        """Return the event with this id."""
        return self._database.find(Event, "events", "id = ?", event_id)

    # deliveries

    def deliveries(self, last: int | None = None) -> list[Delivery]:
        """Return the newest `last` deliveries (None: all), oldest first."""
        limit = -1 if last is None else last
        return self._database.select(Delivery, "deliveries", "1 ORDER BY seq DESC LIMIT ?", limit)[::-1]

    def page_of_deliveries(self, offset: int, limit: int) -> tuple[list[Delivery], int]:
        """Return up to `limit` deliveries, newest first, and how many there are in all."""
        return self._database.page(Delivery, "deliveries", "1", {}, offset, limit)

    def delivery(self, delivery_id: str) -> Delivery:
        """Return the delivery with this id."""
        return self._database.find(Delivery, "deliveries", "id = ?", delivery_id)

    def attempts(self, last: int | None = None) -> list[Attempt]:
        """Return the newest `last` attempts of all deliveries (None: all), oldest first."""
        limit = -1 if last is None else last
        return self._database.select(Attempt, "attempts", "1 ORDER BY seq DESC LIMIT ?", limit)[::-1]

    def attempts_of(self, delivery_id: str) -> list[Attempt]:
        """Return the attempts of one delivery, oldest first."""
        return self._database.select(Attempt, "attempts", "delivery_id = ? ORDER BY seq", delivery_id)

    def resend(self, delivery_id: str) -> Delivery:
        """Deliver the same event to the same endpoint again, as a new delivery."""
        old = self.delivery(delivery_id)
        endpoint = self._database.get(Endpoint, "endpoints", "id = ?", old.endpoint_id)
        if endpoint is None:
            raise not_found("webhook endpoint any more")
        with self._database.transaction():
            return self.delivery(self._schedule(old.event_id, old.event_type, endpoint))

    # sending

    def wake(self) -> None:
        """Send pending deliveries that are due: at the start, and after a change of the clock or the database."""
        for endpoint in self.endpoints():
            self._wake(endpoint.id)

    def _wake(self, endpoint_id: str) -> None:
        if self._closed:
            return
        if endpoint_id not in self._tasks:
            wake = asyncio.Event()
            self._tasks[endpoint_id] = (asyncio.create_task(self._run(endpoint_id, wake)), wake)
        self._tasks[endpoint_id][1].set()

    async def close(self) -> None:
        """Stop sending. Deliveries stay pending, including new ones from requests in flight."""
        self._closed = True
        for task, _ in self._tasks.values():
            task.cancel()
        await asyncio.gather(*(task for task, _ in self._tasks.values()), return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def settled(self) -> None:
        """Wait until no delivery is due: each was delivered, failed or lost, or waits for a retry."""
        while self._database.count("deliveries", "due_at <= ?", self._clock.micros()):
            await asyncio.sleep(0.005)

    async def _run(self, endpoint_id: str, wake: asyncio.Event) -> None:
        while True:
            wake.clear()
            sql = "SELECT min(due_at) FROM deliveries WHERE endpoint_id = ? AND due_at IS NOT NULL"
            due_at = self._database.value(sql, endpoint_id)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if due_at is None else (due_at - self._clock.micros()) / 1e6):
                    await wake.wait()
            endpoint = self._database.get(Endpoint, "endpoints", "id = ?", endpoint_id)
            if endpoint and (delivery := self._next(endpoint_id)):
                await self._deliver(delivery, endpoint, self._faults.take(DELIVERY))

    def _next(self, endpoint_id: str, but: str = "") -> Delivery | None:
        where = "endpoint_id = ? AND due_at <= ? AND id <> ? ORDER BY due_at, seq"
        return self._database.get(Delivery, "deliveries", where, endpoint_id, self._clock.micros(), but)

    async def _deliver(self, delivery: Delivery, endpoint: Endpoint, fault: Fault | None) -> None:
        kind = fault.kind if fault else ""
        if kind == "lose":
            self._database.update("deliveries", delivery.id, state="lost", due_at=None, last_error="lost on purpose")
            logger.info("deliver %s -> %s lost on purpose", delivery.event_type, _address(endpoint))
            return
        if kind == "reorder":
            for _ in range(100):  # the following delivery may become due within a second
                if following := self._next(endpoint.id, but=delivery.id):
                    await self._attempt(following, endpoint, fault)
                    break
                await asyncio.sleep(0.01)
        await self._attempt(delivery, endpoint, fault)
        if kind == "duplicate":
            await self._attempt(delivery, endpoint, fault)

    async def _attempt(self, delivery: Delivery, endpoint: Endpoint, fault: Fault | None) -> None:
        event = self._database.get(Event, "events", "id = ?", delivery.event_id)
        if event is None:
            return  # a reset or a restored snapshot removed the event
        started = time.perf_counter()
        result = await self._post(event, endpoint, fault)
        row = result | {"seconds": time.perf_counter() - started, "fault": fault and fault.kind}
        if self._database.get(Delivery, "deliveries", "id = ?", delivery.id) is None:
            return  # removed during the attempt
        status, error, now = result.get("status"), result.get("error"), self._clock.micros()
        is_delivered = status is not None and 200 <= status < 300
        retry = None if is_delivered else next(iter(list(BACK_OFF)[delivery.attempts :]), None)
        state = "delivered" if is_delivered else "pending" if retry else "failed"
        with self._database.transaction():
            self._database.insert("attempts", delivery_id=delivery.id, event_id=event.id, at=now, **row)
            sql = """UPDATE deliveries SET attempts = attempts + 1, state = ?, due_at = ?, last_status = ?,
                     last_error = ? WHERE id = ? AND state = 'pending'"""
            self._database.run(sql, state, retry and now + retry * 1_000_000, status, error, delivery.id)
        summary = " ".join(str(part) for part in (status, error) if part is not None)
        after = {"delivered": "", "pending": f", retry in {BACK_OFF.get(retry or 0)}", "failed": ", no more retries"}
        marked = f" (fault: {fault.kind})" if fault else ""
        logger.info("deliver %s -> %s %s%s%s", event.type, _address(endpoint), summary, after[state], marked)

    async def _post(self, event: Event, endpoint: Endpoint, fault: Fault | None) -> dict[str, Any]:
        """Send one request; return the columns of the attempt: the endpoint's response, or the error."""
        if problem := self._problem_of(endpoint.url):  # an earlier run may have allowed this URL
            return {"error": problem}
        kind = fault.kind if fault else ""
        secret = endpoint.secret + ("-but-not-this-one" if kind == "wrong-signature" else "")
        result = {"signature": _sign(event.body, secret, self._profile.signature)}
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(event.body)),
            "User-Agent": "signing-sandbox",
            "X-Signature": result["signature"],
        }
        body: bytes | AsyncIterator[bytes] = event.body
        if fault and kind in {"slow", "drop"}:
            body = _in_halves(event.body, None if kind == "drop" else float(fault.details.get("seconds", 1.0)))
        if self._session is None:
            resolver = None if self._allow_remote else _LoopbackResolver()
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=TIMEOUT),
                connector=aiohttp.TCPConnector(resolver=resolver),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        try:
            async with self._session.post(endpoint.url, data=body, headers=headers, allow_redirects=False) as response:
                return result | {
                    "status": response.status,
                    "error": _redirection(response),
                    "response_headers": json.dumps(redact_headers(response.headers)),
                    "response_body": await response.content.read(LONGEST_BODY),
                }
        except TimeoutError:
            return result | {"error": f"no response within {TIMEOUT:g} seconds"}
        except aiohttp.ClientConnectorError as error:
            return result | {"error": f"could not connect: {describe_failure(error.os_error)}"}
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return result | {"error": f"the delivery failed: {type(error).__name__}: {error}"[:300]}


def _redirection(response: aiohttp.ClientResponse) -> str | None:
    """Return where the endpoint redirects to, as a phrase."""
    location = response.headers.get("Location")
    if location is None or not 300 <= response.status < 400:
        return None
    return f"redirected to {ascii(location.partition('?')[0])[1:-1][:200]}: not followed"


def _address(endpoint: Endpoint) -> str:
    """Return the URL for the log: a query or user information may hold a secret."""
    scheme, _, rest = endpoint.url.partition("?")[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def _sign(body: bytes, secret: str, encoding: str) -> str:
    """Return the X-Signature of a body: HMAC-SHA256 with the shared secret, in one of the profile's encodings."""
    if encoding == "timestamped":
        moment = int(time.time())  # real time: receivers compare it with their own clock
        return f"t={moment},v1={_sign(b'%d.%s' % (moment, body), secret, 'hex')}"
    digest = hmac.new(secret.encode(), body, hashlib.sha256)
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


class _LoopbackResolver(AbstractResolver):
    """Resolves every name to this machine, without DNS: only loopback names are accepted as endpoints."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the loopback addresses."""
        pairs = [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]
        return [
            ResolveResult(hostname=host, host=address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST)
            for address, kind in pairs
            if family in (kind, socket.AF_UNSPEC)
        ]

    async def close(self) -> None:
        """Close nothing: the base class requires the method."""
