"""Webhooks out: one event for each change, signed, delivered in order to each endpoint, and again until it arrives."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from .accounts import is_loopback
from .responses import Answers
from .clock import Clock
from .database import Database
from .faults import DELIVERY, Fault, Faults
from .ids import Ids
from .profile import Profile
from .records import Attempt, Delivery, Endpoint, Event, Signing
from .refused import invalid, not_found

if TYPE_CHECKING:
    import aiohttp

BACK_OFF = (5, 30, 120, 600, 3600, 6 * 3600, 24 * 3600)
"""Seconds before each repetition; after the last one a delivery has failed."""

TIMEOUT = 10.0
"""Seconds a receiver has to answer."""


class Deliveries:
    """The events, where they go, and how that went."""

    def __init__(
        self, database: Database, clock: Clock, ids: Ids, profile: Profile, faults: Faults, *, allow_remote: bool
    ) -> None:
        self._database = database
        self._clock = clock
        self._ids = ids
        self._profile = profile
        self._faults = faults
        self._allow_remote = allow_remote
        self._answers = Answers(profile)
        self._couriers: dict[str, tuple[asyncio.Task[None], asyncio.Event]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    # endpoints

    def register(self, url: str, secret: str | None = None) -> Endpoint:
        """Deliver every event from now on to this address; without a secret one is made."""
        self._check(url, secret)
        now = self._clock.micros()
        with self._database.transaction():
            secret = secret or self._ids.secret("webhook secret", "whsec_")
            endpoint = Endpoint(self._ids.new("endpoint"), url, secret, now)
            self._database.insert("endpoints", id=endpoint.id, url=url, secret=endpoint.secret, created_at=now)
        return endpoint

    def keep(self, url: str, secret: str | None = None) -> None:
        """Register this address unless it is there already; then it keeps its secret, or gets the one given."""
        if all(endpoint.url != url for endpoint in self.endpoints()):
            self.register(url, secret)
            return
        self._check(url, secret)
        self._database.run("UPDATE endpoints SET secret = coalesce(?, secret) WHERE url = ?", secret, url)

    def _check(self, url: str, secret: str | None) -> None:
        errors: dict[str, list[str]] = {}
        if problem := self._problem(url):
            errors["url"] = [problem]
        if secret is not None and not secret:
            errors["secret"] = ["The secret must not be empty."]
        if errors:
            raise invalid(errors)

    def remove(self, endpoint_id: str) -> None:
        """Deliver nothing more to this endpoint, also not what is pending."""
        with self._database.transaction():
            if not self._database.run("DELETE FROM endpoints WHERE id = ?", endpoint_id).rowcount:
                raise not_found("webhook endpoint")
            sql = """UPDATE deliveries SET due_at = NULL, state = 'failed', last_error = 'the endpoint was removed'
                     WHERE endpoint_id = ? AND state = 'pending'"""
            self._database.run(sql, endpoint_id)
        if endpoint_id in self._couriers:
            self._couriers.pop(endpoint_id)[0].cancel()

    def endpoints(self) -> list[Endpoint]:
        """Where events go."""
        return self._database.select(Endpoint, "endpoints", "1 ORDER BY created_at, id")

    def _problem(self, url: str) -> str | None:
        try:
            parts = urlsplit(url)
            host = parts.hostname or ""
            _ = parts.port
        except ValueError:
            return f"{url!r} is not an address."
        if parts.scheme not in {"http", "https"} or not host or any(ord(c) <= 32 or ord(c) >= 127 for c in url):
            return f"{url!r} must be a full http or https address."
        if not self._allow_remote and not is_loopback(host):
            return f"{url!r} is not on this machine; start the sandbox with allow_remote_webhooks to allow that."
        return None

    # events

    def emit(self, kind: str, signing: Signing, more: Mapping[str, Any]) -> None:
        """Write down an event and its deliveries, within the change's own transaction."""
        event_id = self._ids.new("event")
        name = self._event_name(kind)
        now = self._clock.micros()
        body = self._payload(event_id, name, signing, more, now)
        self._database.insert("events", id=event_id, type=name, signing_id=signing.id, body=body, created_at=now)
        for endpoint in self.endpoints():
            self._schedule(event_id, name, endpoint, now)

    def _event_name(self, kind: str) -> str:
        if self._profile.event_names == "dotted":
            return kind
        name = kind.replace(".", "_")
        return name.upper() if self._profile.event_names == "upper" else name

    def _payload(self, event_id: str, name: str, signing: Signing, more: Mapping[str, Any], now: int) -> bytes:
        event = {"id": event_id, "type": name, "created_at": self._answers.time(now)}
        payload: dict[str, Any] = {"event": event}
        if self._profile.event_shape == "flat":
            payload = {f"event.{key}": value for key, value in event.items()}
        shown = self._answers.signing(signing, None)
        data = {"id": signing.id, "state": signing.state} | {
            key: shown[key] for key in ("name", "is_draft", "is_completed", "cancelled_at", "updated_at")
        }
        return json.dumps({**payload, "signing": data, **more}, ensure_ascii=False).encode()

    def _schedule(self, event_id: str, name: str, endpoint: Endpoint, now: int) -> str:
        delivery_id = self._ids.new("delivery")
        self._database.insert(
            "deliveries",
            id=delivery_id,
            event_id=event_id,
            event_type=name,
            endpoint_id=endpoint.id,
            url=endpoint.url,
            due_at=now,
        )
        self._wake(endpoint.id)
        return delivery_id

    def events(self) -> list[Event]:
        """All events, oldest first."""
        return self._database.select(Event, "events", "1 ORDER BY seq")

    def deliveries(self, last: int | None = None) -> list[Delivery]:
        """The deliveries, oldest first: all of them, or the last so many."""
        return self._database.select(Delivery, "deliveries", "1 ORDER BY seq DESC LIMIT ?", last or -1)[::-1]

    def attempts(self, last: int | None = None) -> list[Attempt]:
        """Every try at a delivery, oldest first: all of them, or the last so many."""
        return self._database.select(Attempt, "attempts", "1 ORDER BY seq DESC LIMIT ?", last or -1)[::-1]

    def delivery(self, delivery_id: str) -> Delivery:
        """The delivery of that id."""
        found = self._database.get(Delivery, "deliveries", "id = ?", delivery_id)
        if found is None:
            raise not_found("delivery")
        return found

    def attempts_of(self, delivery_id: str) -> list[Attempt]:
        """Every try at one delivery, oldest first."""
        return self._database.select(Attempt, "attempts", "delivery_id = ? ORDER BY seq", delivery_id)

    def event(self, event_id: str) -> Event:
        """The event of that id."""
        found = self._database.get(Event, "events", "id = ?", event_id)
        if found is None:
            raise not_found("event")
        return found

    def events_of(self, signing_id: str) -> list[Event]:
        """What happened to one signing, oldest first."""
        return self._database.select(Event, "events", "signing_id = ? ORDER BY seq", signing_id)

    def resend(self, delivery_id: str) -> Delivery:
        """Deliver the same event to the same endpoint once more, as a new delivery."""
        old = self.delivery(delivery_id)
        endpoint = self._database.get(Endpoint, "endpoints", "id = ?", old.endpoint_id)
        if endpoint is None:
            raise not_found("webhook endpoint any more")
        with self._database.transaction():
            new = self._schedule(old.event_id, old.event_type, endpoint, self._clock.micros())
        return self.delivery(new)

    # on their way

    def start(self) -> None:
        """Send what is pending, from now on."""
        for endpoint in self.endpoints():
            self._wake(endpoint.id)

    async def close(self) -> None:
        """Stop; what is pending stays pending, and so does what requests in flight still add."""
        self._closed = True
        tasks = [task for task, _ in self._couriers.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._couriers.clear()
        if self._session is not None:
            await self._session.close()

    async def settled(self) -> None:
        """Return when nothing is due now: all was delivered, has failed, or waits for its repetition."""
        while self._database.value("SELECT 1 FROM deliveries WHERE due_at <= ? LIMIT 1", self._clock.micros()):
            await asyncio.sleep(0.005)

    def _wake(self, endpoint_id: str) -> None:
        if self._closed:
            return
        if endpoint_id not in self._couriers:
            wake = asyncio.Event()
            self._couriers[endpoint_id] = (asyncio.create_task(self._carry(endpoint_id, wake)), wake)
        self._couriers[endpoint_id][1].set()

    def wake_all(self) -> None:
        """Look again at what is due: the database was replaced."""
        self.start()
        for _, wake in self._couriers.values():
            wake.set()

    async def _carry(self, endpoint_id: str, wake: asyncio.Event) -> None:
        while True:
            wake.clear()
            sql = "SELECT min(due_at) FROM deliveries WHERE endpoint_id = ? AND due_at IS NOT NULL"
            await self._clock.wait(self._database.value(sql, endpoint_id), wake)
            await self._carry_one(endpoint_id)

    async def _carry_one(self, endpoint_id: str) -> None:
        where = "endpoint_id = ? AND due_at <= ? ORDER BY due_at, seq LIMIT 2"
        due = self._database.select(Delivery, "deliveries", where, endpoint_id, self._clock.micros())
        endpoint = self._database.get(Endpoint, "endpoints", "id = ?", endpoint_id)
        if due and endpoint:
            await self._deliver(due, endpoint)

    async def _deliver(self, due: list[Delivery], endpoint: Endpoint) -> None:
        delivery, fault = due[0], self._faults.take(DELIVERY)
        if fault is None:
            await self._attempt(delivery, endpoint, None)
        elif fault.kind == "lose":
            sql = "UPDATE deliveries SET state = 'lost', due_at = NULL, last_error = 'lost on purpose' WHERE id = ?"
            self._database.run(sql, delivery.id)
        elif fault.kind == "reorder":
            due = due if len(due) > 1 else await self._with_next(delivery)
            for one in reversed(due):
                await self._attempt(one, endpoint, fault)
        else:
            await self._attempt(delivery, endpoint, fault)
            if fault.kind == "duplicate":
                await self._attempt(delivery, endpoint, fault)

    async def _with_next(self, delivery: Delivery) -> list[Delivery]:
        """This one and the next to the same endpoint, which may take a second to come."""
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
            return  # the sandbox was restored to an earlier moment; so below
        status, error = await self._post(event, endpoint, fault)
        if self._database.get(Delivery, "deliveries", "id = ?", delivery.id) is None:
            return
        now = self._clock.micros()
        with self._database.transaction():
            self._database.insert(
                "attempts",
                delivery_id=delivery.id,
                event_id=delivery.event_id,
                at=now,
                status=status,
                error=error,
                fault=fault and fault.kind,
            )
            self._conclude(delivery, status, error, now)

    def _conclude(self, delivery: Delivery, status: int | None, error: str | None, now: int) -> None:
        state, due_at = "delivered", None
        if status is None or not 200 <= status < 300:
            state = "failed"
            if delivery.attempts < len(BACK_OFF):
                state, due_at = "pending", now + BACK_OFF[delivery.attempts] * 1_000_000
        sql = """UPDATE deliveries SET attempts = attempts + 1, state = ?, due_at = ?, last_status = ?, last_error = ?
                 WHERE id = ? AND state = 'pending'"""
        self._database.run(sql, state, due_at, status, error, delivery.id)

    async def _post(self, event: Event, endpoint: Endpoint, fault: Fault | None) -> tuple[int | None, str | None]:
        import aiohttp

        if problem := self._problem(endpoint.url):  # it may be kept from a run that allowed more
            return None, problem
        kind = fault.kind if fault else ""
        secret = endpoint.secret + ("-but-not-this-one" if kind == "wrong-signature" else "")
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(event.body)),
            "User-Agent": "signing-sandbox",
            "X-Signature": signature(event.body, secret, self._profile.signature),
        }
        body: bytes | AsyncIterator[bytes] = event.body
        if fault and kind in {"slow", "drop"}:
            body = _in_halves(event.body, None if kind == "drop" else float(fault.details.get("seconds", 1.0)))
        session = self._connect()
        try:
            async with session.post(
                endpoint.url, data=body, headers=headers, allow_redirects=False, raise_for_status=False
            ) as response:
                await response.content.read(64 * 1024)
                return response.status, None
        except TimeoutError:
            return None, f"no answer within {TIMEOUT:g} seconds"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return None, f"{type(error).__name__}: {error}"[:300]

    def _connect(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            resolver = None if self._allow_remote else _this_machine()
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=TIMEOUT),
                connector=aiohttp.TCPConnector(resolver=resolver),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def signature(body: bytes, secret: str, encoding: str) -> str:
    """The X-Signature of a body: HMAC-SHA256 under the shared secret, in one of the profile's encodings."""
    key = secret.encode()
    if encoding == "timestamped":
        moment = int(time.time())  # real time: a receiver compares it with its own clock
        return f"t={moment},v1={hmac.new(key, b'%d.%s' % (moment, body), hashlib.sha256).hexdigest()}"
    digest = hmac.new(key, body, hashlib.sha256)
    if encoding == "base64":
        return base64.b64encode(digest.digest()).decode()
    return ("sha256=" if encoding == "sha256" else "") + digest.hexdigest()


async def _in_halves(body: bytes, pause: float | None) -> AsyncIterator[bytes]:
    """The body with a pause in its middle; None: it breaks off there."""
    half = len(body) // 2
    yield body[:half]
    await asyncio.sleep(0.01 if pause is None else pause)
    if pause is None:
        raise ConnectionResetError("broken off on purpose")
    yield body[half:]


def _this_machine() -> Any:
    """A resolver for names of this machine that asks nobody."""
    import socket

    from aiohttp.abc import AbstractResolver, ResolveResult

    class ThisMachine(AbstractResolver):
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
            """Nothing is held open."""

    return ThisMachine()
