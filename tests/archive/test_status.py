"""What is stuck is found, and nothing else; who has not signed is reminded, and not more often than asked."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

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
from signing_async.archive import Archive, archive_status
from signing_async.sandbox import Sandbox
from tests.archive.tenants import completed, count, sent
from tests.pdfs import make_pdf
from tests.servers import serving

NOW = timedelta(0)
WEEK = timedelta(days=7)


def package(name: str) -> SigningPackage:
    return SigningPackage(name, "EN", [make_pdf(text=name)], [NewRecipient("anna@example.com")], key=name)


@pytest.fixture
async def one_of_each(sandbox: Sandbox, client: SigningClient) -> None:
    """A draft with a document, an empty draft, and signings that were sent, completed and cancelled."""
    draft = await client.signings.create(name="draft", language="EN")
    await client.documents.upload(draft, make_pdf(), "lease.pdf")
    await client.signings.create(name="empty draft", language="EN")
    await sent(client, "sent")
    await completed(sandbox, client, "completed")
    await sandbox.cancel((await sent(client, "cancelled")).id)


async def test_drafts_with_documents_and_unfinished_signings_are_found(
    client: SigningClient, one_of_each: None
) -> None:
    """With what was never sent, and who has not signed."""
    status = await archive_status(client, after=NOW)
    assert [(stuck.kind, stuck.signing.name) for stuck in status.signings] == [
        ("no_progress", "sent"),
        ("not_sent", "draft"),
    ]
    waiting, draft = status.signings
    assert [recipient.email for recipient in waiting.pending] == ["anna@example.com"]
    assert [document.name for document in draft.documents] == ["lease.pdf"]
    assert waiting.reminders == ()
    assert not status.ok


async def test_signing_last_updated_before_since_is_left_out(client: SigningClient, one_of_each: None) -> None:
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    assert (await archive_status(client, after=NOW, since=tomorrow)).ok
    assert not (await archive_status(client, after=NOW, since=tomorrow - WEEK)).ok
    assert (await archive_status(client, after=NOW, since=timedelta(days=-1))).ok
    assert not (await archive_status(client, after=NOW, since=WEEK)).ok


async def test_only_signings_of_the_kinds_asked_for_are_read(
    sandbox: Sandbox, client: SigningClient, one_of_each: None
) -> None:
    before = count(sandbox)["signings.get"]
    status = await archive_status(client, after=NOW, kinds=["no_progress"])
    assert [stuck.kind for stuck in status.signings] == ["no_progress"]
    assert count(sandbox)["signings.get"] == before


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

    async def respond(request: web.Request) -> web.Response:
        if request.path.endswith("/signings"):
            return web.json_response({"data": listed})
        if request.path.endswith("/signings/s5"):
            return web.json_response({"id": "s5", "is_draft": False, "cancelled_at": old})
        assert request.path.endswith("/signings/s1")
        return web.json_response({**signing, "documents": [{"id": "d4", "name": "c.pdf"}]})

    async with serving(respond) as server, SigningClient(server.origin, "token") as client:
        status = await archive_status(client)
    found = {stuck.signing.id: [document.id for document in stuck.documents] for stuck in status.signings}
    assert found == {"s1": ["d4"], "s3": ["d2"]}
    assert {stuck.kind for stuck in status.signings} == {"not_sealed"}


async def test_signing_that_was_deleted_since_it_was_listed_is_not_stuck() -> None:
    listed = [
        {"id": "s1", "is_draft": True},
        {"id": "s2", "is_draft": False, "is_completed": False},
        {"id": "s3", "is_draft": True, "documents": [{"id": "d1"}]},
    ]

    async def respond(request: web.Request) -> web.Response:
        if request.path.endswith("/signings"):
            return web.json_response({"data": listed})
        return web.json_response({"code": "not_found"}, status=404)

    async with serving(respond) as server, SigningClient(server.origin, "token") as client:
        status = await archive_status(client)
    assert [stuck.signing.id for stuck in status.signings] == ["s3"]


@pytest.mark.parametrize("failure", ["403", "undecodable"])
async def test_signing_that_cannot_be_examined_is_reported_and_the_others_are_examined(failure: str) -> None:
    async def respond(request: web.Request) -> web.Response:
        if request.path.endswith("/signings"):
            listed = [{"id": f"s{number}", "is_draft": False, "is_completed": False} for number in range(3)]
            return web.json_response({"data": listed})
        if "s1" not in request.path.split("/"):
            return web.json_response([{"id": "r1", "email": "anna@example.com"}])
        if failure == "403":
            return web.json_response({"code": "forbidden"}, status=403)
        return web.json_response({"nope": 1})

    async with serving(respond) as server, SigningClient(server.origin, "token") as client:
        status = await archive_status(client, kinds=["no_progress"])
    found = {stuck.signing.id: stuck for stuck in status.signings}
    assert {id_: stuck.kind for id_, stuck in found.items()} == {
        "s0": "no_progress",
        "s1": "not_examined",
        "s2": "no_progress",
    }
    assert isinstance(found["s1"].error, Forbidden if failure == "403" else DecodeError)
    assert (found["s0"].error, found["s1"].pending) == (None, ())


async def test_error_that_other_signings_would_have_too_is_raised(
    sandbox: Sandbox, client: SigningClient, one_of_each: None
) -> None:
    sandbox.faults.add("recipients.list", "expired-token", times=None)
    with pytest.raises(Unauthorized):
        await archive_status(client, after=NOW)


async def test_pending_recipients_are_reminded_once_in_the_given_time(
    sandbox: Sandbox, client: SigningClient, one_of_each: None, journal: Path
) -> None:
    """However often it is asked, by any process that shares the journal."""

    async def remind(every: timedelta) -> list[str]:
        status = await archive_status(client, journal, after=NOW, remind_every=every)
        return [one.recipient.email for stuck in status.signings for one in stuck.reminders if one.error is None]

    assert await remind(WEEK) == ["anna@example.com"]
    assert await remind(WEEK) == []
    assert await remind(NOW) == ["anna@example.com"]
    assert len([one for one in sandbox.requests if one.operation == "recipients.remind"]) == 2


async def test_only_reminders_that_were_surely_not_sent_are_sent_by_the_next_run(
    sandbox: Sandbox, client: SigningClient, journal: Path
) -> None:
    """Of three recipients, one is reminded, the outcome of one is unknown, and one is rejected by a 429."""
    signing = await client.signings.create(name="Lease", language="EN", signing_order="parallel")
    await client.documents.upload(signing, make_pdf(), "lease.pdf")
    for order, name in enumerate(("anna", "bo", "cy"), start=1):
        await client.recipients.add(signing, email=f"{name}@example.com", order=order)
    await client.signings.send(signing)
    sandbox.faults.add("recipients.remind", "drop-after-commit", skip=1)
    sandbox.faults.add("recipients.remind", "429", times=None, skip=1)

    async def remind(every: timedelta) -> list[tuple[str, str | None]]:
        async with SigningClient(client.base_url, sandbox.access_token(), retry=RetryPolicy(max_attempts=1)) as hasty:
            (waiting,) = (await archive_status(hasty, journal, after=NOW, remind_every=every)).signings
        return [(one.recipient.email[:2], one.error and one.error.effect) for one in waiting.reminders]

    assert await remind(WEEK) == [("an", None), ("bo", "unknown"), ("cy", "none")]
    sandbox.faults.clear()
    assert await remind(WEEK) == [("cy", None)]
    assert await remind(WEEK) == []
    assert [name for name, _ in await remind(NOW)] == ["an", "bo", "cy"]


async def test_nobody_is_reminded_by_a_run_that_has_lost_its_claim(
    sandbox: Sandbox, client: SigningClient, one_of_each: None, journal: Path
) -> None:
    class Losing(SqliteJournal):
        async def write(self, claim: Claim, state: str) -> None:
            raise ClaimLost(claim.key)

    async with Losing(journal) as opened:
        waiting, _ = (await archive_status(client, opened, after=NOW, remind_every=WEEK)).signings
    assert (waiting.kind, waiting.reminders) == ("no_progress", ())
    assert count(sandbox)["recipients.remind"] == 0


async def test_nobody_is_reminded_while_another_run_does(
    client: SigningClient, one_of_each: None, journal: Path
) -> None:
    async with SqliteJournal(journal) as other:
        signing = next(one for one in [one async for one in client.signings.list()] if one.name == "sent")
        await other.claim(f"archive-remind:{client.base_url}:{signing.id}")
        waiting, _ = (await archive_status(client, journal, after=NOW, remind_every=WEEK)).signings
    assert waiting.reminders == ()


async def test_dispatch_without_an_outcome_is_found(sandbox: Sandbox, client: SigningClient, journal: Path) -> None:
    """Failed and interrupted dispatches are found; sent packages and other entries are not."""
    await client.dispatch(package("sent"), journal)
    sandbox.faults.add("recipients.add", "500", times=99)
    with pytest.raises(SigningError):
        await client.dispatch(package("failed"), journal)
    async with SqliteJournal(journal) as opened:
        text = next(record.state for record in [one async for one in opened.records()] if "failed" in record.key)
        for key, state in (
            ("other", "{}"),
            ("odd", "["),
            ("sending", text.replace('"draft"', '"sending"')),
        ):
            claim = await opened.claim(key)
            assert claim is not None
            await opened.write(claim, state)
        async with Archive(client, journal.parent / "archive", journal=opened) as archive:
            _ = [result async for result in archive.sweep()]
        status = await archive_status(client, opened, dispatches_after=NOW)
        tomorrow = datetime.now(UTC) + timedelta(days=1)
        assert (await archive_status(client, opened, dispatches_after=NOW, since=tomorrow)).ok
        assert (await archive_status(client, opened, dispatches_after=timedelta(hours=1))).ok
    found = {dispatch.key: dispatch for dispatch in status.dispatches}
    (failed,) = (dispatch for key, dispatch in found.items() if "failed" in key)
    assert set(found) == {failed.key, "sending"}
    assert "500" in (failed.error or "")
    assert (failed.may_be_sent, found["sending"].may_be_sent) == (False, True)
    assert failed.signing is not None
    assert not status.ok


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"after": 7}, "after: must be a timedelta, got 7"),
        ({"dispatches_after": None}, "dispatches_after: must be a timedelta, got None"),
        ({"remind_every": 7}, "remind_every: must be a timedelta, got 7"),
        ({"remind_every": WEEK}, "remind_every: needs a journal"),
        ({"since": datetime(2031, 1, 1)}, "since: must be a datetime with a time zone"),
        (
            {"journal": type("Silent", (), dict.fromkeys(("claim", "write", "release"), print))()},
            "must be a ListedJournal",
        ),
        ({"kinds": ["stuck"]}, "kinds: must be among not_sent, no_progress, not_sealed, got"),
    ],
)
async def test_bad_argument_is_refused(client: SigningClient, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await archive_status(client, **arguments)
