"""What is stuck is found, and nothing else; who has not signed is reminded, and not more often than asked."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from signing_async import (
    Claim,
    ClaimLost,
    DecodeError,
    Forbidden,
    InvalidRequest,
    NewRecipient,
    RetryPolicy,
    SigningClient,
    SigningError,
    SigningPackage,
    SqliteJournal,
    Unauthorized,
)
from signing_async.archive import archive_status
from tests.archive.tenants import Tenant, listing, sent, sweep
from tests.pdfs import make_pdf

NOW = timedelta(0)
WEEK = timedelta(days=7)


def package(name: str) -> SigningPackage:
    return SigningPackage(name, "EN", [make_pdf(text=name)], [NewRecipient("anna@example.com")], key=name)


@pytest.fixture
async def one_of_each(tenant: Tenant) -> None:
    """A draft with a document, an empty draft, and signings that were sent, completed and cancelled."""
    draft = await tenant.client.signings.create(name="draft", language="EN")
    await tenant.client.documents.upload(draft, make_pdf(), "lease.pdf")
    await tenant.client.signings.create(name="empty draft", language="EN")
    await sent(tenant.client, "sent")
    await tenant.complete("completed")
    await tenant.sandbox.cancel((await sent(tenant.client, "cancelled")).id)


async def test_drafts_with_documents_and_unfinished_signings_are_found(tenant: Tenant, one_of_each: None) -> None:
    """Each comes with its documents, or with the recipients who have not signed. Other signings are not read."""
    status = await archive_status(tenant.client, after=NOW)
    assert [(stuck.kind, stuck.signing.name) for stuck in status.signings] == [
        ("no_progress", "sent"),
        ("not_sent", "draft"),
    ]
    waiting, draft = status.signings
    assert [recipient.email for recipient in waiting.pending] == ["anna@example.com"]
    assert [document.name for document in draft.documents] == ["lease.pdf"]
    assert waiting.reminders == ()
    assert not status.ok
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    for since, ok in ((tomorrow, True), (tomorrow - WEEK, False), (timedelta(days=-1), True), (WEEK, False)):
        assert (await archive_status(tenant.client, after=NOW, since=since)).ok is ok
    before = tenant.count("signings.get")
    status = await archive_status(tenant.client, after=NOW, kinds=["no_progress"])
    assert [stuck.kind for stuck in status.signings] == ["no_progress"]
    assert tenant.count("signings.get") == before


async def test_completed_signing_without_sealed_documents_is_found() -> None:
    """Whether or not the list holds the documents; a signing whose date is unknown is not missed."""
    old = "2031-01-01T00:00:00Z"
    sealed = {"id": "d1", "name": "a.pdf", "completed_at": old}
    signing = {"id": "s1", "name": "Lease", "is_draft": False, "is_completed": True}
    listed = [
        {**signing, "updated_at": None},
        {**signing, "id": "s2", "documents": [sealed]},
        {**signing, "id": "s3", "documents": [sealed, {"id": "d2", "name": "b.pdf"}]},
        {**signing, "id": "s4", "documents": [{"id": "d3", "signed_file_path": "/x.pdf"}]},
        {"id": "s5"},
    ]

    def respond(path: str) -> tuple[Any, int]:
        if path.endswith("/signings/s5"):
            return {"id": "s5", "is_draft": False, "cancelled_at": old}, 200
        assert path.endswith("/signings/s1")
        return {**signing, "documents": [{"id": "d4", "name": "c.pdf"}]}, 200

    async with listing(listed, respond) as client:
        status = await archive_status(client)
    found = {stuck.signing.id: [document.id for document in stuck.documents] for stuck in status.signings}
    assert found == {"s1": ["d4"], "s3": ["d2"]}
    assert {stuck.kind for stuck in status.signings} == {"not_sealed"}


async def test_signing_that_cannot_be_examined_is_reported_and_the_others_are_examined() -> None:
    """A signing that was deleted since it was listed is not stuck."""
    sent = {"is_draft": False, "is_completed": False}
    listed = [*({"id": f"s{number}", **sent} for number in range(4)), {"id": "s4", "is_draft": True}]
    gone = {"code": "not_found"}, 404
    responses: dict[str, tuple[Any, int]] = {
        "/s0/recipients": ([{"id": "r1", "email": "anna@example.com"}], 200),
        "/s1/recipients": ({"code": "forbidden"}, 403),
        "/s2/recipients": ({"nope": 1}, 200),
        "/s3/recipients": gone,
        "/signings/s4": gone,
    }

    def respond(path: str) -> tuple[Any, int]:
        return next(response for end, response in responses.items() if path.endswith(end))

    async with listing([*listed, {"id": "s5", "is_draft": True, "documents": [{"id": "d1"}]}], respond) as client:
        status = await archive_status(client)
    found = {stuck.signing.id: (stuck.kind, type(stuck.error), len(stuck.pending)) for stuck in status.signings}
    assert found == {
        "s0": ("no_progress", type(None), 1),
        "s1": ("not_examined", Forbidden, 0),
        "s2": ("not_examined", DecodeError, 0),
        "s5": ("not_sent", type(None), 0),
    }


async def test_error_that_other_signings_would_have_too_is_raised(tenant: Tenant, one_of_each: None) -> None:
    tenant.sandbox.faults.add("recipients.list", "expired-token", times=None)
    with pytest.raises(Unauthorized):
        await archive_status(tenant.client, after=NOW)


async def test_only_reminders_that_were_surely_not_sent_are_sent_by_the_next_run(tenant: Tenant) -> None:
    """Of three recipients, one is reminded, the outcome of one is unknown, and one is rejected by a 429."""
    signing = await tenant.client.signings.create(name="Lease", language="EN", signing_order="parallel")
    await tenant.client.documents.upload(signing, make_pdf(), "lease.pdf")
    for order, name in enumerate(("anna", "bo", "cy"), start=1):
        await tenant.client.recipients.add(signing, email=f"{name}@example.com", order=order)
    await tenant.client.signings.send(signing)
    tenant.sandbox.faults.add("recipients.remind", "drop-after-commit", skip=1)
    tenant.sandbox.faults.add("recipients.remind", "429", times=None, skip=1)

    async def remind(every: timedelta) -> list[tuple[str, str | None]]:
        async with SigningClient(
            tenant.client.base_url, tenant.sandbox.access_token(), retry=RetryPolicy(max_attempts=1)
        ) as hasty:
            (waiting,) = (await archive_status(hasty, tenant.journal, after=NOW, remind_every=every)).signings
        return [(one.recipient.email[:2], one.error and one.error.effect) for one in waiting.reminders]

    assert await remind(WEEK) == [("an", None), ("bo", "unknown"), ("cy", "none")]
    tenant.sandbox.faults.clear()
    assert await remind(WEEK) == [("cy", None)]
    assert await remind(WEEK) == []
    assert [name for name, _ in await remind(NOW)] == ["an", "bo", "cy"]


@pytest.mark.parametrize("holder", ["took over", "is working"])
async def test_nobody_is_reminded_by_a_run_without_the_claim(tenant: Tenant, one_of_each: None, holder: str) -> None:
    class Losing(SqliteJournal):
        async def write(self, claim: Claim, state: str) -> None:
            raise ClaimLost(claim.key)

    kind = Losing if holder == "took over" else SqliteJournal
    async with kind(tenant.journal) as opened, SqliteJournal(tenant.journal) as other:
        if holder == "is working":
            signing = next(one for one in tenant.sandbox.signings if one.name == "sent")
            assert await other.claim(f"archive-remind:{tenant.client.base_url}:{signing.id}")
        waiting, _ = (await archive_status(tenant.client, opened, after=NOW, remind_every=WEEK)).signings
    assert (waiting.kind, waiting.reminders) == ("no_progress", ())
    assert tenant.count("recipients.remind") == 0


async def test_dispatch_without_an_outcome_is_found(tenant: Tenant) -> None:
    """Failed and interrupted dispatches are found; sent packages and other entries are not."""
    await tenant.client.dispatch(package("sent"), tenant.journal)
    tenant.sandbox.faults.add("recipients.add", "500", times=99)
    with pytest.raises(SigningError):
        await tenant.client.dispatch(package("failed"), tenant.journal)
    async with SqliteJournal(tenant.journal) as opened:
        text = next(record.state for record in [one async for one in opened.records()] if "failed" in record.key)
        for key, state in (
            ("other", "{}"),
            ("odd", "["),
            ("sending", text.replace('"draft"', '"sending"')),
        ):
            claim = await opened.claim(key)
            assert claim is not None
            await opened.write(claim, state)
        async with tenant.archive(journal=opened) as archive:
            await sweep(archive)
        status = await archive_status(tenant.client, opened, dispatches_after=NOW)
        tomorrow = datetime.now(UTC) + timedelta(days=1)
        assert (await archive_status(tenant.client, opened, dispatches_after=NOW, since=tomorrow)).ok
        assert (await archive_status(tenant.client, opened, dispatches_after=timedelta(hours=1))).ok
    found = {dispatch.key: dispatch for dispatch in status.dispatches}
    (failed,) = (dispatch for key, dispatch in found.items() if "failed" in key)
    assert set(found) == {failed.key, "sending"}
    assert "500" in (failed.error or "")
    assert (failed.may_be_sent, found["sending"].may_be_sent) == (False, True)
    assert failed.signing is not None
    assert not status.ok


async def test_bad_argument_is_refused(client: SigningClient) -> None:
    silent = type("Silent", (), dict.fromkeys(("claim", "write", "release"), print))()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"after": 7}, "after: must be a timedelta, got 7"),
        ({"remind_every": WEEK}, "remind_every: needs a journal"),
        ({"since": datetime(2031, 1, 1)}, "since: must be a datetime with a time zone"),
        ({"journal": silent}, "must be a ListedJournal"),
        ({"kinds": ["stuck"]}, "kinds: must be among not_sent, no_progress, not_sealed, got"),
    ]
    for arguments, message in cases:
        with pytest.raises(InvalidRequest, match=message):
            await archive_status(client, **arguments)
