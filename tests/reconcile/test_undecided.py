"""Services whose responses do not say enough: what cannot be told is never guessed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from signing_async import LocalRateLimiter, OutcomeUnknown, RetryPolicy, ServerError, SigningClient
from signing_async.sandbox import Sandbox
from tests.pdfs import make_pdf
from tests.servers import Web, serving

QUICK = RetryPolicy(base_delay=0.01, settle=0.1)


@asynccontextmanager
async def _failing(**reads: Any) -> AsyncIterator[tuple[SigningClient, Web]]:
    """A service whose writes end in 500, and whose reads respond with what is given by the end of their path."""

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


ANNA = {"email": "anna@example.com", "first_name": "Anna", "last_name": "Åberg", "signing_method": "bankid", "order": 2}


def _anna(**held: Any) -> list[dict[str, Any]]:
    return [{"id": "r1", "email": "anna@example.com", **held}]


@pytest.mark.parametrize(
    ("signing", "said"),
    [
        ({"id": "s1", "name": "x"}, "whether the signing is still a draft"),
        (
            {"id": "s1", "is_draft": True, "cancelled_at": "2031-01-01T00:00:00Z"},
            "is cancelled, and may have been sent",
        ),
    ],
)
async def test_send_is_undecidable(signing: dict[str, Any], said: str) -> None:
    async with _failing(s1=signing) as (client, server):
        with pytest.raises(OutcomeUnknown, match=said) as caught:
            await client.signings.send("s1")
        assert caught.value.known[0].id == "s1"  # type: ignore[attr-defined]  # the record that was read
        assert _writes(server) == 1


async def test_upload_is_undecidable_if_the_signing_does_not_list_its_documents() -> None:
    async with _failing(s1={"id": "s1", "is_draft": True}) as (client, server):
        with pytest.raises(OutcomeUnknown, match="does not list the signing's documents"):
            await client.documents.upload("s1", make_pdf(), "a.pdf")
        assert _writes(server) == 1


SIMILAR, OTHER_ADDRESS = "a similar record differs", "a new recipient of this name with another address"


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([{"id": "r1"}], "does not give the recipients' e-mail addresses"),
        ([*_anna(email="ANNA@example.com"), *_anna(id="r2", email="anna@example.com ")], "more than one request"),
        # The service may have normalized what was sent; another client may have added the recipient.
        (_anna(order=1), SIMILAR),
        (_anna(last_name="Aberg"), SIMILAR),
        (_anna(signing_method="se_bankid"), SIMILAR),
        (_anna(phone={"number": "070 123 45 67", "country": "SE"}), SIMILAR),
        # The service may have changed the address.
        (_anna(email="annaaberg@example.com", first_name="Anna"), OTHER_ADDRESS),
    ],
    ids=str,
)
async def test_add_is_undecidable(held: list[dict[str, Any]], said: str) -> None:
    async with _failing(recipients=held) as (client, server):
        with pytest.raises(OutcomeUnknown, match=said) as caught:
            await client.recipients.add("s1", **ANNA, extra={"phone": "0701234567"})
        assert [one.id for one in caught.value.known] == [one["id"] for one in held]  # type: ignore[attr-defined]  # records
        assert _writes(server) == 1


LONG = "a\u0301" * 600 + "@example.com"  # too long for a normal form


@pytest.mark.parametrize(
    ("sent", "held"),
    [
        (ANNA, {"email": "ANNA@example.com ", "first_name": "anna", "phone": "070 123 45 67"}),
        (ANNA, {"order": 2, "first_name": None, "last_name": ""}),
        # The service fills in fields.
        ({"extra": {"phone": None}}, {"first_name": "A", "order": 1, "phone": "1", "signing_method": "email"}),
        ({"extra": {"phone": 701234567}}, {"phone": "701234567"}),
        ({"extra": {"phone": {"number": "070", "to": "SE"}}}, {"phone": {"to": "SE", "number": "070"}}),
        ({"email": "anna@bücher.example"}, {"email": "anna@xn--bcher-kva.example"}),
        ({"email": "anna@bu\u0308cher.example"}, {"email": "anna@b\u00fccher.example"}),
        ({"email": LONG}, {"email": LONG}),
    ],
    ids=lambda value: str(value)[:80],
)
async def test_recipient_in_another_notation_is_the_effect(sent: dict[str, Any], held: dict[str, Any]) -> None:
    async with _failing(recipients=_anna(**held)) as (client, server):
        arguments = {"email": "anna@example.com", "extra": {"phone": "0701234567"}, **sent}
        assert (await client.recipients.add("s1", **arguments)).id == "r1"
        assert _writes(server) == 1


@pytest.mark.parametrize("held", [{}, {"first_name": "Anna", "last_name": "Ek"}])
async def test_recipient_with_another_address_and_name_is_not_the_effect(held: dict[str, Any]) -> None:
    async with _failing(recipients=_anna(email="annaberg@example.com", **held)) as (client, server):
        with pytest.raises(ServerError, match="5 attempts"):
            await client.recipients.add("s1", email="anna@example.com", first_name="Anna", last_name="Berg")
        assert _writes(server) == 5


async def test_document_of_another_size_is_undecidable() -> None:
    """The service may have stored the file in another form."""
    documents: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        if request.method == "POST":
            await request.read()
            documents.append({"id": "d1", "name": "a.pdf", "size": 5})
            return web.Response(status=500)
        return web.json_response({"id": "s1", "is_draft": True, "documents": documents})

    async with serving(handle) as server, SigningClient(server.origin, "token", retry=QUICK) as client:
        with pytest.raises(OutcomeUnknown, match=SIMILAR):
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
        with pytest.raises(OutcomeUnknown, match=SIMILAR):
            await client.recipients.add("s1", email="a@example.com", last_name="Åberg")
        assert _writes(server) == 2


async def test_timeout_error_of_a_rate_limiter_is_not_taken_for_the_deadline() -> None:
    class Failing(LocalRateLimiter):
        async def acquire(self, deadline: float) -> bool:
            raise TimeoutError("the limiter's own")

    async with SigningClient("http://127.0.0.1:9", "token", rate_limiter=Failing()) as client:
        with pytest.raises(TimeoutError, match="the limiter's own"):
            await client.me()
        with pytest.raises(TimeoutError, match="the limiter's own"):
            await client.signings.wait_until_completed("id", timeout=60)
