"""Several threads, each with an event loop and a client, that share stores."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from signing_async import (
    FileTokenStore,
    MemoryTokenStore,
    NewRecipient,
    OAuth,
    SigningClient,
    SigningPackage,
    SqliteJournal,
    TokenStore,
)
from signing_async.webhooks import Claim, MemorySeenEvents, SQLiteSeenEvents
from tests.cli.service import Service, running
from tests.pdfs import make_pdf

THREADS = 6


@pytest.fixture
def service() -> Iterator[Service]:
    with running(seed=7) as service:
        yield service


def in_threads(work: Callable[[], Any]) -> list[Any]:
    """Call the function in all threads at the same moment, and return the results."""
    start = threading.Barrier(THREADS)

    def run(_: int) -> Any:
        start.wait(60)
        return work()

    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(run, range(THREADS)))


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_clients_of_several_threads_refresh_a_shared_token_once(service: Service, tmp_path: Path, kind: str) -> None:
    app = service.do(service.sandbox.register_app, redirect_uri="http://127.0.0.1:8000/callback")
    store: TokenStore = MemoryTokenStore() if kind == "memory" else FileTokenStore(tmp_path / "token.json")

    def make_oauth() -> OAuth:
        known = {"client_id": app.client_id, "redirect_uri": app.redirect_uri, "client_secret": app.client_secret or ""}
        return OAuth(service.sandbox.base_url, **known, store=store)

    async def login() -> None:
        async with make_oauth() as oauth:
            await oauth.exchange(service.do(service.sandbox.authorize, app))

    async def me() -> str | None:
        async with make_oauth() as oauth, SigningClient(service.sandbox.base_url, oauth) as client:
            return (await client.me()).email

    asyncio.run(login())
    service.do(service.sandbox.clock.advance, days=1)
    assert in_threads(lambda: asyncio.run(me())) == ["user@sandbox.example"] * THREADS
    assert [each.status for each in service.do(service.sandbox.requests_of, "oauth.token")] == [200, 200]


def test_clients_of_several_threads_share_a_journal(service: Service, tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal")
    token = service.do(service.sandbox.access_token)
    anna = NewRecipient("anna@example.com")
    packages = [
        SigningPackage(f"Lease {number}", "EN", [make_pdf(seed=number)], [anna], key=str(number)) for number in range(8)
    ]

    async def send() -> list[str]:
        async with SigningClient(service.sandbox.base_url, token) as client:
            results = [result async for result in client.dispatch_many(packages, journal)]
        assert [result.error for result in results] == [None] * len(packages)
        return sorted(result.signing.id for result in results if result.signing is not None)

    first, *others = in_threads(lambda: asyncio.run(send()))
    assert len(first) == len(packages)
    assert others == [first] * (THREADS - 1)
    asyncio.run(journal.aclose())
    invited = Counter(each.recipient_id for each in service.do(lambda: service.sandbox.notifications))
    assert sorted(invited.values()) == [1] * len(packages)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_event_is_new_to_one_thread(tmp_path: Path, kind: str) -> None:
    seen = MemorySeenEvents() if kind == "memory" else SQLiteSeenEvents(tmp_path / "seen.db")
    claims = in_threads(lambda: [seen.claim(f"evt_{number}") for number in range(120)])
    assert all(Counter(each)[Claim.NEW] == 1 for each in zip(*claims, strict=True))
    if isinstance(seen, SQLiteSeenEvents):
        seen.close()
