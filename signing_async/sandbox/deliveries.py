"""Webhooks: endpoints, events, and the deliveries of each event to each endpoint."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

from .clock import Clock
from .courier import Courier
from .database import Database
from .ids import Ids
from .profile import Profile
from .records import Attempt, Delivery, Endpoint, Event, Signing
from .refused import invalid, not_found
from .responses import Encoder

logger: logging.Logger = logging.getLogger("signing_async.sandbox")


class Deliveries:
    """The registered endpoints, the events, and their deliveries."""

    def __init__(self, database: Database, clock: Clock, ids: Ids, profile: Profile, courier: Courier) -> None:
        self._database = database
        self._clock = clock
        self._ids = ids
        self._profile = profile
        self._courier = courier
        self._encoder = Encoder(profile)

    # endpoints

    def register(self, url: str, secret: str | None = None) -> Endpoint:
        """Register an endpoint for all events from now on; generate a secret if none is given.

        If the URL is registered already, log a warning: the URL gets every event once per registration.
        """
        self._check(url, secret)
        if self.is_registered(url):
            logger.warning("webhook endpoint registered twice: %s gets every event once more", url)
        now = self._clock.micros()
        with self._database.transaction():
            secret = secret or self._ids.secret("webhook secret", "whsec_")
            endpoint = Endpoint(self._ids.new("endpoint"), url, secret, now)
            self._database.insert("endpoints", id=endpoint.id, url=url, secret=endpoint.secret, created_at=now)
        return endpoint

    def keep(self, url: str, secret: str | None = None) -> None:
        """Register an endpoint. If the URL is registered already, replace only its secret, if one is given."""
        if not self.is_registered(url):
            self.register(url, secret)
            return
        self._check(url, secret)
        self._database.run("UPDATE endpoints SET secret = coalesce(?, secret) WHERE url = ?", secret, url)

    def is_registered(self, url: str) -> bool:
        """Return whether there is an endpoint with this URL."""
        return self._database.get(Endpoint, "endpoints", "url = ?", url) is not None

    def _check(self, url: str, secret: str | None) -> None:
        errors: dict[str, list[str]] = {}
        if problem := self._courier.problem_of(url):
            errors["url"] = [problem]
        if secret is not None and not secret:
            errors["secret"] = ["The secret must not be empty."]
        if errors:
            raise invalid(errors)

    def remove(self, endpoint_id: str) -> None:
        """Remove an endpoint; its pending deliveries fail."""
        with self._database.transaction():
            if not self._database.run("DELETE FROM endpoints WHERE id = ?", endpoint_id).rowcount:
                raise not_found("webhook endpoint")
            sql = """UPDATE deliveries SET due_at = NULL, state = 'failed', last_error = 'the endpoint was removed'
                     WHERE endpoint_id = ? AND state = 'pending'"""
            self._database.run(sql, endpoint_id)
        self._courier.forget(endpoint_id)

    def endpoints(self) -> list[Endpoint]:
        """Return the endpoints, oldest first."""
        return self._database.select(Endpoint, "endpoints", "1 ORDER BY created_at, id")

    # events

    def emit(self, kind: str, signing: Signing, more: Mapping[str, Any]) -> None:
        """Save an event and its deliveries, in the caller's transaction."""
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
        event = {"id": event_id, "type": name, "created_at": self._encoder.time(now)}
        payload: dict[str, Any] = {"event": event}
        if self._profile.event_shape == "flat":
            payload = {f"event.{key}": value for key, value in event.items()}
        shown = self._encoder.signing(signing, None)
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
        self._courier.wake(endpoint.id)
        return delivery_id

    def events(self) -> list[Event]:
        """Return all events, oldest first."""
        return self._database.select(Event, "events", "1 ORDER BY seq")

    def events_of(self, signing_id: str) -> list[Event]:
        """Return the events of one signing, oldest first."""
        return self._database.select(Event, "events", "signing_id = ? ORDER BY seq", signing_id)

    def event(self, event_id: str) -> Event:
        """Return the event with this id."""
        found = self._database.get(Event, "events", "id = ?", event_id)
        if found is None:
            raise not_found("event")
        return found

    # deliveries

    def deliveries(self, last: int | None = None) -> list[Delivery]:
        """Return the newest `last` deliveries (None: all), oldest first."""
        return self._database.select(Delivery, "deliveries", "1 ORDER BY seq DESC LIMIT ?", last or -1)[::-1]

    def page_of_deliveries(self, offset: int, limit: int) -> tuple[list[Delivery], int]:
        """Return up to `limit` deliveries, newest first, and how many there are in all."""
        return self._database.page(Delivery, "deliveries", "1", {}, offset, limit)

    def delivery(self, delivery_id: str) -> Delivery:
        """Return the delivery with this id."""
        found = self._database.get(Delivery, "deliveries", "id = ?", delivery_id)
        if found is None:
            raise not_found("delivery")
        return found

    def attempts(self, last: int | None = None) -> list[Attempt]:
        """Return the newest `last` attempts of all deliveries (None: all), oldest first."""
        return self._database.select(Attempt, "attempts", "1 ORDER BY seq DESC LIMIT ?", last or -1)[::-1]

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
            new = self._schedule(old.event_id, old.event_type, endpoint, self._clock.micros())
        return self.delivery(new)

    # sending

    def start(self) -> None:
        """Start sending pending deliveries."""
        for endpoint in self.endpoints():
            self._courier.wake(endpoint.id)

    def wake_all(self) -> None:
        """Send due deliveries after the database was replaced."""
        self.start()
        self._courier.wake_all()

    async def close(self) -> None:
        """Stop sending. Deliveries stay pending, including new ones from requests in flight."""
        await self._courier.close()

    async def settled(self) -> None:
        """Wait until no delivery is due: each was delivered, failed or lost, or waits for a retry."""
        while self._database.value("SELECT 1 FROM deliveries WHERE due_at <= ? LIMIT 1", self._clock.micros()):
            await asyncio.sleep(0.005)
