"""Brokers for ``taskiq worker``, such as ``tests.taskiq_workers:broker``, that soon notice the end of a worker."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from signing_async import RetryPolicy, SigningClient
from signing_async.postgres import PostgresInbox, PostgresJournal
from signing_async.taskiq import add_dispatch, event_task, redis_streams
from signing_async.webhooks import Event


def client() -> SigningClient:
    """Return a client that retries often."""
    quick = RetryPolicy(max_attempts=8, base_delay=0.02, max_delay=0.2, settle=0.3)
    return SigningClient(os.environ["SIGNING_BASE_URL"], os.environ["SIGNING_ACCESS_TOKEN"], retry=quick)


def journal() -> PostgresJournal:
    """Return a journal with a short lease."""
    return PostgresJournal(os.environ["SIGNING_JOURNAL"], lease=1.5, timeout=0.5)


def broker() -> Any:
    """Return a broker that soon redelivers."""
    streams = redis_streams(os.environ["SIGNING_BROKER"], redeliver_after=1.0)
    return add_dispatch(streams, client=client, journal=journal)


def events() -> Any:
    """Return the broker of an inbox."""
    return events_and_inbox()[0]


def events_and_inbox() -> tuple[Any, PostgresInbox]:
    """Return an inbox, and a broker whose workers handle its events.

    The handler notes its start in a file, and ends when there is a file called after the event.
    """
    folder = Path(os.environ["SIGNING_TEST_FOLDER"])
    broker = redis_streams(os.environ["SIGNING_BROKER"], queue="signing-events", redeliver_after=1.0)
    inbox = PostgresInbox(os.environ["SIGNING_INBOX"], lease=3, timeout=1)

    @event_task(broker, inbox, "*")
    async def handle(event: Event) -> None:
        with (folder / "started").open("a") as notes:
            notes.write(f"{event.id} {os.getpid()}\n")
        while not (folder / event.id).exists():
            await asyncio.sleep(0.02)

    return broker, inbox
