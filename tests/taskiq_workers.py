"""The broker of ``taskiq worker tests.taskiq_workers:broker``: its workers soon notice the end of others."""

from __future__ import annotations

import os
from typing import Any

from signing_async import RetryPolicy, SigningClient
from signing_async.postgres import PostgresJournal
from signing_async.taskiq import add_dispatch, redis_streams


def client() -> SigningClient:
    """Return a client that retries often."""
    quick = RetryPolicy(max_attempts=8, base_delay=0.02, max_delay=0.2, settle=0.3)
    return SigningClient(os.environ["SIGNING_BASE_URL"], os.environ["SIGNING_ACCESS_TOKEN"], retry=quick)


def journal() -> PostgresJournal:
    """Return a journal with a short lease."""
    return PostgresJournal(os.environ["SIGNING_JOURNAL"], lease=1.5, timeout=0.5)


def broker() -> Any:
    """Return a broker that soon redelivers."""
    return add_dispatch(
        redis_streams(os.environ["SIGNING_BROKER"], redeliver_after=2.0), client=client, journal=journal
    )
