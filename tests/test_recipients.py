"""`client.recipients`: a recipient is a `NewRecipient` or its fields."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web

from signing_async import Assumptions, InvalidRequest, NewRecipient, Recipient, Signing, SigningClient, Unauthorized
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


@pytest.mark.parametrize(
    ("recipient", "fields", "said"),
    [
        (
            NewRecipient("anna", order=0),
            {},
            r"email: must be .*, got 'anna'; order: must be an integer .* least 1, got 0",
        ),
        (NewRecipient("anna@example.com"), {"order": 2}, r"recipient: pass a NewRecipient or its fields, not both"),
        ("anna@example.com", {}, r"recipient: must be a NewRecipient, got str; pass an address as email="),
        (None, {"first_name": ""}, "first_name: must be a non-empty string, got ''"),
        (None, {"first_name": "\udcff"}, "first_name: must be valid UTF-8, without lone surrogates, got .*"),
        (None, {"signing_method": 5}, "signing_method: must be a non-empty string, got 5"),
        (None, {"extra": {"email": "x"}}, "extra: pass email as a separate argument"),
        (None, {"extra": {1: 2}}, "extra: must be a mapping with string keys, got {1: 2}"),
        (None, {"extra": {"phone": float("nan")}}, "extra: cannot encode as JSON.*"),
    ],
)
async def test_invalid_new_recipient_is_refused_before_sending(
    recipient: Any, fields: Any, said: str, sandbox: Sandbox, client: SigningClient
) -> None:
    if recipient is None:
        fields = {"email": "anna@example.com", **fields}
    with pytest.raises(InvalidRequest, match=f"^{said}$"):
        await client.recipients.add("s1", recipient, **fields)
    assert sandbox.requests == []


async def sent_to(count: int, client: SigningClient) -> tuple[Signing, list[Recipient]]:
    """Send a signing to so many recipients."""
    signing = await client.signings.create(name="Lease", language="EN", signing_order="parallel")
    await client.documents.upload(signing, make_pdf(), "lease.pdf")
    people = [await client.recipients.add(signing, email=f"p{n}@example.com") for n in range(count)]
    await client.signings.send(signing)
    return signing, people


async def test_remind_pending_continues_after_a_failure(sandbox: Sandbox, client: SigningClient) -> None:
    signing, people = await sent_to(3, client)
    await sandbox.sign(people[0].id)
    sandbox.faults.add("recipients.remind", "drop-before-commit")
    first, second = await client.recipients.remind_pending(signing)
    assert (first.recipient.id, type(first.error).__name__) == (people[1].id, "OutcomeUnknown")
    assert (second.recipient.id, second.error) == (people[2].id, None)
    reminded = [one.recipient_id for one in sandbox.notifications if one.kind == "reminder"]
    assert reminded == [people[2].id]


async def test_recipients_after_a_fatal_error_are_not_reminded_and_their_errors_say_so(
    sandbox: Sandbox, client: SigningClient
) -> None:
    """The first reminder may have been sent: a 503 came before the rejected token."""
    signing, _ = await sent_to(3, client)
    sandbox.faults.add("recipients.remind", "503")
    sandbox.faults.add("recipients.remind", "expired-token")
    errors = [result.error for result in await client.recipients.remind_pending(signing)]
    assert [type(error) for error in errors] == [Unauthorized] * 3
    assert len({id(error) for error in errors}) == 3
    assert [(error.effect, error.exit_code) for error in errors if error] == [("unknown", 3), ("none", 4), ("none", 4)]
    assert len(sandbox.requests_of("recipients.remind")) == 2


async def test_completed_at_is_the_field_that_the_service_uses() -> None:
    moment, text = datetime(2026, 1, 31, 12, 30, 15, tzinfo=UTC), "2026-01-31T12:30:15Z"
    cases: list[tuple[str, object, datetime | None]] = [
        *(("completed_at", text, moment), ("signed_at", text, moment), ("done_on", 1769862615, moment)),
        *(("completed_at", True, None), ("other", text, None)),
    ]

    async def handle(request: web.Request) -> web.Response:
        record = {"id": "r", "email": "anna@example.com", field: value}
        return web.json_response([record] if request.method == "GET" else record)

    assumptions = Assumptions(recipient_done_fields=("completed_at", "signed_at", "done_on"))
    async with serving(handle) as server, SigningClient(server.origin, "token", assumptions=assumptions) as client:
        for field, value, expected in cases:
            (listed,) = (await client.recipients.list("s")).items
            assert (listed.completed_at, listed.extra) == (expected, {field: value})
            assert await client.recipients.add(field, email="anna@example.com") == listed
            assert (await client.recipients.pending("s") == []) == (field != "other")
