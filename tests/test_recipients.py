"""`client.recipients`: a recipient is a `NewRecipient` or its fields."""

from __future__ import annotations

from typing import Any

import pytest

from signing_async import InvalidRequest, NewRecipient, SigningClient
from signing_async.sandbox import Sandbox


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
