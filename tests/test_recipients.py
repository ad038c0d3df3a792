"""`client.recipients`: a recipient is a `NewRecipient` or its fields."""

from __future__ import annotations

from typing import Any

import pytest

from signing_async import InvalidRequest, NewRecipient, SigningClient, Unauthorized
from signing_async.sandbox import Sandbox
from tests.pdfs import make_pdf


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
    with pytest.raises(InvalidRequest, match=r"^recipient: must be a NewRecipient, got str$"):
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
