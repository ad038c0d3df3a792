"""Services whose answers do not say enough: what cannot be told is never guessed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from signing_async import (
    LocalRateLimiter,
    OutcomeUnknown,
    RetryPolicy,
    SigningClient,
    TransportError,
)
from tests.pdfs import make_pdf
from tests.servers import Web, serving

QUICK = RetryPolicy(base_delay=0.01, settle=0.1)


@asynccontextmanager
async def _failing(**reads: Any) -> AsyncIterator[tuple[SigningClient, Web]]:
    """A service whose writes end in 500, and whose reads answer with what is given by the end of their path."""

    async def handle(request: web.Request) -> web.Response:
        if request.method == "POST":
            await request.read()
            return web.Response(status=500)
        name = request.path.rsplit("/", 1)[-1]
        return web.Response(body=json.dumps(reads[name]), content_type="application/json")

    async with serving(handle) as server, SigningClient(server.origin, "token", retry=QUICK) as client:
        yield client, server


def _writes(server: Web) -> int:
    return sum(request.method == "POST" for request in server.requests)


async def test_send_is_undecidable_without_is_draft() -> None:
    async with _failing(s1={"id": "s1", "name": "x"}) as (client, server):
        with pytest.raises(OutcomeUnknown, match="whether the signing is still a draft") as caught:
            await client.signings.send("s1")
        assert caught.value.known[0].id == "s1"  # type: ignore[attr-defined]  # the record that was read
        assert _writes(server) == 1


async def test_send_is_undecidable_if_the_signing_is_cancelled() -> None:
    signing = {"id": "s1", "is_draft": False, "cancelled_at": "2026-01-31T12:00:00Z"}
    async with _failing(s1=signing) as (client, server):
        with pytest.raises(OutcomeUnknown, match="the signing is cancelled, and may have been sent before"):
            await client.signings.send("s1")
        assert _writes(server) == 1


async def test_upload_is_undecidable_if_the_signing_does_not_list_its_documents() -> None:
    async with _failing(s1={"id": "s1", "is_draft": True}) as (client, server):
        with pytest.raises(OutcomeUnknown, match="does not list the signing's documents"):
            await client.documents.upload("s1", make_pdf(), "a.pdf")
        assert _writes(server) == 1


async def test_write_that_was_not_sent_is_repeated_without_a_reading() -> None:
    async with SigningClient("http://127.0.0.1:9", "token", retry=QUICK) as client:
        with pytest.raises(TransportError, match="could not connect") as caught:
            await client.recipients.add("s1", email="a@example.com")
    assert not isinstance(caught.value, OutcomeUnknown)
    assert caught.value.attempts == 5


async def test_timeout_error_of_a_rate_limiter_is_not_taken_for_the_deadline() -> None:
    class Failing(LocalRateLimiter):
        async def acquire(self, deadline: float) -> bool:
            raise TimeoutError("the limiter's own")

    async with SigningClient("http://127.0.0.1:9", "token", rate_limiter=Failing()) as client:
        with pytest.raises(TimeoutError, match="the limiter's own"):
            await client.me()
        with pytest.raises(TimeoutError, match="the limiter's own"):
            await client.signings.wait_until_completed("id", timeout=60)
