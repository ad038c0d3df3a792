"""Services whose answers do not say enough: what cannot be told is never guessed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web

from signing_async import (
    LocalRateLimiter,
    MemoryTokenStore,
    NotFound,
    OAuth,
    OutcomeUnknown,
    RequestTimeout,
    RetryPolicy,
    SigningClient,
    Token,
    TransportError,
)
from signing_async.sandbox import Sandbox
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


async def test_upload_is_undecidable_if_the_signing_does_not_list_its_documents() -> None:
    async with _failing(s1={"id": "s1", "is_draft": True}) as (client, server):
        with pytest.raises(OutcomeUnknown, match="does not list the signing's documents"):
            await client.documents.upload("s1", make_pdf(), "a.pdf")
        assert _writes(server) == 1


async def test_add_is_undecidable_if_recipients_have_no_addresses() -> None:
    async with _failing(recipients=[{"id": "r1"}]) as (client, server):
        with pytest.raises(OutcomeUnknown, match="does not give the recipients' e-mail addresses"):
            await client.recipients.add("s1", email="a@example.com")
        assert _writes(server) == 1


async def test_add_is_undecidable_if_two_recipients_match() -> None:
    twins = [{"id": "r1", "email": "A@example.com"}, {"id": "r2", "email": "a@example.com "}]
    async with _failing(recipients=twins) as (client, server):
        with pytest.raises(OutcomeUnknown, match="more than one request") as caught:
            await client.recipients.add("s1", email="a@example.com", first_name="Anna")
        assert [one.id for one in caught.value.known] == ["r1", "r2"]  # type: ignore[attr-defined]  # records
        assert _writes(server) == 1


@pytest.mark.parametrize(
    "held",
    [
        {"email": "anna@example.com"},
        {"email": "ANNA@example.com ", "first_name": "anna-maria", "phone": "070 123 45 67"},
        {"email": "anna@example.com", "order": 2, "first_name": None, "last_name": ""},
    ],
)
async def test_recipient_with_normalized_fields_is_the_effect(held: dict[str, Any]) -> None:
    async with _failing(recipients=[{"id": "r1", **held}]) as (client, server):
        found = await client.recipients.add(
            "s1",
            email="anna@example.com",
            first_name="Anna Maria",
            last_name="Berg",
            order=2,
            extra={"phone": "0701234567"},
        )
        assert found.id == "r1"
        assert _writes(server) == 1


@pytest.mark.parametrize("phone", ["+46701234567", 46, "***4567", {"number": "070 123 45 67", "country": "SE"}])
async def test_recipient_with_other_extra_fields_is_undecidable(phone: Any) -> None:
    held = {"id": "r1", "email": "anna@example.com", "order": 1, "phone": phone}
    async with _failing(recipients=[held]) as (client, server):
        with pytest.raises(OutcomeUnknown, match="a similar record differs"):
            await client.recipients.add("s1", email="anna@example.com", order=1, extra={"phone": "0701234567"})
        assert _writes(server) == 1


async def test_fields_that_the_service_fills_in_do_not_count() -> None:
    held = {
        "id": "r1",
        "email": "a@example.com",
        "first_name": "A",
        "order": 1,
        "phone": "1",
        "signing_method": "email",
    }
    async with _failing(recipients=[held]) as (client, server):
        assert (await client.recipients.add("s1", email="a@example.com", extra={"phone": None})).id == "r1"
        assert _writes(server) == 1


@pytest.mark.parametrize(
    ("sent", "held"),
    [(701234567, "701234567"), ({"number": "070", "country": "SE"}, {"country": "SE", "number": "070"})],
)
async def test_extra_field_in_another_notation_matches(sent: Any, held: Any) -> None:
    async with _failing(recipients=[{"id": "r1", "email": "a@example.com", "phone": held}]) as (client, _):
        assert (await client.recipients.add("s1", email="a@example.com", extra={"phone": sent})).id == "r1"


@pytest.mark.parametrize(
    "held",
    [{"order": 1}, {"first_name": "Bo"}, {"last_name": "Aberg"}, {"signing_method": "se_bankid"}],
)
async def test_recipient_with_the_address_and_other_fields_is_undecidable(held: dict[str, Any]) -> None:
    """The service may have normalized what was sent; another client may have added the recipient."""
    async with _failing(recipients=[{"id": "r1", "email": "anna@example.com", **held}]) as (client, server):
        with pytest.raises(OutcomeUnknown, match="a similar record differs"):
            await client.recipients.add(
                "s1", email="anna@example.com", first_name="Anna", last_name="Åberg", signing_method="bankid", order=2
            )
        assert _writes(server) == 1


@pytest.mark.parametrize("held", [{"first_name": "Anna"}, {"first_name": "Anna", "last_name": "Berg"}])
async def test_recipient_with_the_name_and_another_address_is_undecidable(held: dict[str, Any]) -> None:
    """The service may have changed the address."""
    async with _failing(recipients=[{"id": "r1", "email": "annaberg@example.com", **held}]) as (client, server):
        with pytest.raises(OutcomeUnknown, match="a new recipient of this name with another address") as caught:
            await client.recipients.add("s1", email="anna.berg@example.com", first_name="Anna", last_name="Berg")
        assert [recipient.id for recipient in caught.value.known] == ["r1"]  # type: ignore[attr-defined]  # recipients
        assert _writes(server) == 1


@pytest.mark.parametrize("held", [{}, {"first_name": "Bo"}, {"first_name": "Anna", "last_name": "Ek"}])
async def test_recipient_with_another_address_and_name_is_not_the_effect(held: dict[str, Any]) -> None:
    async with _failing(recipients=[{"id": "r1", "email": "annaberg@example.com", **held}]) as (client, server):
        with pytest.raises(Exception, match="5 attempts"):
            await client.recipients.add("s1", email="anna@example.com", first_name="Anna", last_name="Berg")
        assert _writes(server) == 5


@pytest.mark.parametrize(
    ("sent", "held"),
    [
        ("anna@bücher.example", "anna@xn--bcher-kva.example"),
        ("anna@bu\u0308cher.example", "anna@b\u00fccher.example"),
        ("Anna@EXAMPLE.com", "anna@example.com"),
    ],
)
async def test_address_in_another_notation_matches(sent: str, held: str) -> None:
    async with _failing(recipients=[{"id": "r1", "email": held}]) as (client, server):
        assert (await client.recipients.add("s1", email=sent)).id == "r1"
        assert _writes(server) == 1


async def test_write_that_was_not_sent_is_repeated_without_a_reading() -> None:
    async with SigningClient("http://127.0.0.1:9", "token", retry=QUICK) as client:
        with pytest.raises(TransportError, match="could not connect") as caught:
            await client.recipients.add("s1", email="a@example.com")
    assert not isinstance(caught.value, OutcomeUnknown)
    assert caught.value.attempts == 5


async def test_address_too_long_for_a_normal_form_is_compared_as_it_is() -> None:
    address = "a\u0301" * 600 + "@example.com"
    async with _failing(recipients=[{"id": "r1", "email": address}]) as (client, _):
        assert (await client.recipients.add("s1", email=address)).id == "r1"


@pytest.mark.parametrize("size", [5, None])
async def test_document_of_another_size_is_undecidable(size: int | None) -> None:
    """It may be the file in another form; without a size the name decides."""
    documents: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        if request.method == "POST":
            await request.read()
            documents.append({"id": "d1", "name": "a.pdf", "size": size})
            return web.Response(status=500)
        return web.json_response({"id": "s1", "is_draft": True, "documents": documents})

    async with serving(handle) as server, SigningClient(server.origin, "token", retry=QUICK) as client:
        if size is None:
            assert (await client.documents.upload("s1", make_pdf(), "a.pdf")).id == "d1"
        else:
            with pytest.raises(OutcomeUnknown, match="a similar record differs"):
                await client.documents.upload("s1", make_pdf(), "a.pdf")
        assert _writes(server) == 1


async def test_client_forgets_the_least_recently_used_signing(
    sandbox: Sandbox, client: SigningClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its documents are read before the next upload."""
    monkeypatch.setattr("signing_async.reconcile._MAX_SIGNINGS", 2)
    first, *_, last = [await client.signings.create(name="x", language="EN") for _ in range(3)]
    await client.documents.upload(last, make_pdf(), "a.pdf")
    assert len(sandbox.requests_of("signings.get")) == 0
    await client.documents.upload(first, make_pdf(), "a.pdf")
    assert len(sandbox.requests_of("signings.get")) == 1


async def test_cancelled_signing_may_have_been_sent_before() -> None:
    cancelled = {"id": "s1", "is_draft": True, "cancelled_at": "2031-01-01T00:00:00Z"}
    async with _failing(s1=cancelled) as (client, server):
        with pytest.raises(OutcomeUnknown, match="is cancelled, and may have been sent"):
            await client.signings.send("s1")
        assert _writes(server) == 1


async def test_documents_are_read_once_before_the_first_uploads(sandbox: Sandbox, client: SigningClient) -> None:
    signing = await client.signings.create(name="x", language="EN")
    async with SigningClient(sandbox.base_url, sandbox.access_token()) as other:
        await asyncio.gather(*(other.documents.upload(signing, make_pdf(), f"{name}.pdf") for name in "abc"))
        assert len(sandbox.requests_of("signings.get")) == 1
        with pytest.raises(NotFound):
            await other.documents.upload("missing", make_pdf(), "a.pdf")


async def test_success_beside_a_late_record_in_another_form_is_undecidable() -> None:
    stored = [{"id": name, "email": "a@example.com", "last_name": "Aberg"} for name in ("r1", "r2")]
    posts = 0

    async def handle(request: web.Request) -> web.Response:
        nonlocal posts
        if request.method == "POST":
            posts += 1
            return web.json_response(stored[1], status=201) if posts == 2 else web.Response(status=500)
        return web.json_response(stored if posts == 2 else [])

    async with serving(handle) as server, SigningClient(server.origin, "token", retry=QUICK) as client:
        with pytest.raises(OutcomeUnknown, match="a similar record differs"):
            await client.recipients.add("s1", email="a@example.com", last_name="Åberg")
        assert _writes(server) == 2


async def test_timeout_of_a_token_request_is_not_taken_for_the_deadline() -> None:
    async def hang(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    store = MemoryTokenStore(Token("access", "refresh", datetime(2000, 1, 1, tzinfo=UTC)))
    settings: Any = {"client_id": "x", "client_secret": "y", "redirect_uri": "z", "store": store, "timeout": 0.3}
    async with (
        serving(hang) as server,
        OAuth(server.origin, **settings) as oauth,
        SigningClient(server.origin, oauth) as client,
    ):
        with pytest.raises(RequestTimeout, match=r"^oauth\.refresh: no response within its timeout of 0\.3 s"):
            await client.me()


async def test_timeout_error_of_a_rate_limiter_is_not_taken_for_the_deadline() -> None:
    class Failing(LocalRateLimiter):
        async def acquire(self, deadline: float) -> bool:
            raise TimeoutError("the limiter's own")

    async with SigningClient("http://127.0.0.1:9", "token", rate_limiter=Failing()) as client:
        with pytest.raises(TimeoutError, match="the limiter's own"):
            await client.me()
        with pytest.raises(TimeoutError, match="the limiter's own"):
            await client.signings.wait_until_completed("id", timeout=60)
