"""`client.recipients`: a recipient is a `NewRecipient` or its fields."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web

from signing_async import Assumptions, InvalidRequest, NewRecipient, SigningClient, Unauthorized
from signing_async.sandbox import Sandbox
from tests.pdfs import make_pdf
from tests.servers import serving


async def test_add_takes_a_new_recipient(client: SigningClient) -> None:
    draft = await client.signings.create(name="Lease", language="EN")
    anna = NewRecipient("anna@example.com", "Anna", "Berg", "bankid", 1, {"personal_number": "199001011234"})
    added = await client.recipients.add(draft, anna)
    assert (added.email, added.first_name, added.last_name) == ("anna@example.com", "Anna", "Berg")
    assert (added.signing_method, added.order) == ("bankid", 1)
    assert added.extra["personal_number"] == "199001011234"
    assert [recipient.id async for recipient in client.recipients.list(draft)] == [added.id]


async def test_add_checks_a_new_recipient(sandbox: Sandbox, client: SigningClient) -> None:
    with pytest.raises(InvalidRequest, match=r"^email: must be .*, got 'anna'; order: must be an integer"):
        await client.recipients.add("s1", NewRecipient("anna", order=0))
    assert sandbox.requests == []


@pytest.mark.parametrize("fields", [{"email": "bo@example.com"}, {"order": 2}, {"extra": {"phone": "1"}}])
async def test_add_refuses_a_new_recipient_with_fields_beside_it(
    sandbox: Sandbox, client: SigningClient, fields: Any
) -> None:
    with pytest.raises(InvalidRequest, match=r"^recipient: pass a NewRecipient or its fields, not both$"):
        await client.recipients.add("s1", NewRecipient("anna@example.com"), **fields)
    assert sandbox.requests == []


async def test_add_refuses_a_positional_address(sandbox: Sandbox, client: SigningClient) -> None:
    add: Any = client.recipients.add
    hint = "pass an address as email="
    with pytest.raises(InvalidRequest, match=rf"^recipient: must be a NewRecipient, got str; {hint}$"):
        await add("s1", "anna@example.com")
    assert sandbox.requests == []


async def test_recipients_after_a_fatal_error_are_not_reminded_and_their_errors_say_so(
    sandbox: Sandbox, client: SigningClient
) -> None:
    """The first reminder may have been sent: a 503 came before the rejected token."""
    signing = await client.signings.create(name="Lease", language="EN")
    await client.documents.upload(signing, make_pdf(), "lease.pdf")
    for number in range(3):
        await client.recipients.add(signing, email=f"r{number}@example.com")
    await client.signings.send(signing)
    sandbox.faults.add("recipients.remind", "503")
    sandbox.faults.add("recipients.remind", "expired-token")
    errors = [result.error for result in await client.recipients.remind_pending(signing)]
    assert [type(error) for error in errors] == [Unauthorized] * 3
    assert [(error.effect, error.exit_code) for error in errors if error] == [("unknown", 3), ("none", 4), ("none", 4)]
    assert len(sandbox.requests_of("recipients.remind")) == 2


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("completed_at", "2026-01-31T12:30:15Z", datetime(2026, 1, 31, 12, 30, 15, tzinfo=UTC)),
        ("signed_at", "2026-01-31T12:30:15Z", datetime(2026, 1, 31, 12, 30, 15, tzinfo=UTC)),
        ("done_on", 1769862615, datetime(2026, 1, 31, 12, 30, 15, tzinfo=UTC)),
        ("completed_at", None, None),
        ("completed_at", True, None),
        ("other", "2026-01-31T12:30:15Z", None),
    ],
)
async def test_completed_at_is_the_field_that_the_service_uses(field: str, value: object, expected: object) -> None:
    async def handle(request: web.Request) -> web.Response:
        record = {"id": "r", "email": "anna@example.com", field: value}
        return web.json_response([record] if request.method == "GET" else record)

    assumptions = Assumptions(recipient_done_fields=("completed_at", "signed_at", "done_on"))
    async with serving(handle) as server, SigningClient(server.origin, "token", assumptions=assumptions) as client:
        (listed,) = (await client.recipients.list("s")).items
        assert listed.completed_at == expected
        assert listed.extra == {field: value}
        assert await client.recipients.add("s", email="anna@example.com") == listed
        assert (await client.recipients.pending("s") == []) == bool(value and field != "other")
