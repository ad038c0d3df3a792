"""A package is sent once, with just what belongs to it, whatever goes wrong and whenever it does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from signing_async import (
    Document,
    DraftChanged,
    InvalidRequest,
    NewRecipient,
    OutcomeUnknown,
    OutcomeUnknownTimeout,
    PdfSource,
    Progress,
    Recipient,
    RetryPolicy,
    Signing,
    SigningClient,
    SigningPackage,
    SigningState,
    SqliteJournal,
    Unauthorized,
)
from signing_async.dispatch.journal import Claim
from signing_async.dispatch.package import prepare
from signing_async.documents.resource import Documents
from signing_async.recipients import Recipients
from signing_async.sandbox import Sandbox
from signing_async.signings import Signings
from tests.dispatch.deaths import Died, Fate, Fated, MemoryJournal, fated_client
from tests.dispatch.parcels import Parcel, judge
from tests.pdfs import make_pdf

COMMITTED = ["500-after-commit", "502-html-after-commit", "drop-after-commit", "truncate"]
NOT_COMMITTED = ["500", "503", "502-html", "drop-before-commit", "429"]
STEPS = ["signings.create", "documents.upload", "recipients.add", "signings.send"]
READINGS = ["signings.get", "recipients.list"]


def parcel_of(documents: int = 2, recipients: int = 2, name: str = "Lease", **fields: object) -> Parcel:
    """A package with so many documents and recipients."""
    files = tuple((f"part {number}.pdf", make_pdf(text=f"{name} {number}")) for number in range(documents))
    people = tuple((f"r{number}@example.com", number + 1) for number in range(recipients))
    package = SigningPackage(
        name,
        "EN",
        [PdfSource(data, filename) for filename, data in files],
        [NewRecipient(email, "Anna", "Berg") for email, _ in people],
        **{"signing_order": "sequential", **fields},  # type: ignore[arg-type]  # the fields of a package
    )
    return Parcel(package, files, people)


def sent_well(sandbox: Sandbox, *parcels: Parcel, spare: int = 0) -> None:
    """Each was sent once, with what belongs to it, and no more drafts than so many were made in vain."""
    verdict = judge(sandbox, parcels)
    assert verdict.wrong == []
    assert verdict.sent == len(parcels)
    assert verdict.spare <= spare


async def moments_of(parcel: Parcel) -> int:
    """How many moments a run over this package has."""
    fate = Fate()
    async with Sandbox(seed=7) as sandbox, fated_client(sandbox, fate) as client:
        await client.dispatch(parcel.package, Fated(MemoryJournal(), fate))
    return fate.moments


# What goes wrong at the service


@pytest.mark.parametrize("kind", COMMITTED + NOT_COMMITTED)
@pytest.mark.parametrize("step", STEPS + READINGS)
async def test_package_is_sent_once_whatever_fault_a_step_has(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, step: str, kind: str
) -> None:
    parcel = parcel_of()
    sandbox.faults.add(step, kind, **({"retry_after": 0} if kind == "429" else {}))
    signing = await client.dispatch(parcel.package, tmp_path / "journal")
    assert signing.is_draft is False
    sent_well(sandbox, parcel, spare=1)


async def test_package_is_sent_once_if_the_first_response_of_every_step_is_lost(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel = parcel_of()
    for step, times in zip(STEPS, (1, 2, 2, 1), strict=True):
        sandbox.faults.add(step, "drop-after-commit", times=times)
    await client.dispatch(parcel.package, tmp_path / "journal")
    sent_well(sandbox, parcel, spare=1)


# Death at every moment


async def test_run_killed_at_any_moment_is_completed_by_the_next(tmp_path: Path) -> None:
    parcel = parcel_of()
    moments = await moments_of(parcel)
    assert moments > 20
    async with Sandbox(seed=7) as sandbox:
        for at in range(1, moments + 1):
            each = parcel_of(name=f"Lease {at}")
            path, fate = tmp_path / f"{at}", Fate(at)
            async with SqliteJournal(path) as journal, fated_client(sandbox, fate) as client:
                with pytest.raises(Died):
                    await client.dispatch(each.package, Fated(journal, fate))
            async with fated_client(sandbox, Fate()) as client:
                signing = await client.dispatch(each.package, path)
            assert signing.is_draft is False
            sent_well(sandbox, each, spare=1)


async def test_run_paused_at_any_moment_while_another_takes_over_sends_nothing_twice() -> None:
    parcel = parcel_of()
    moments = await moments_of(parcel)
    async with Sandbox(seed=7) as sandbox:
        for at in range(1, moments + 1):
            each, journal = parcel_of(name=f"Lease {at}"), MemoryJournal()
            fate = Fate(at, pause=True)
            async with fated_client(sandbox, fate) as slow, fated_client(sandbox, Fate()) as quick:
                first = asyncio.create_task(slow.dispatch(each.package, Fated(journal, fate)))
                await fate.paused.wait()
                journal.expire()
                second = await quick.dispatch(each.package, journal)
                fate.resumed.set()
                assert (await first).id == second.id
            sent_well(sandbox, each, spare=1)


async def test_runs_killed_repeatedly_are_completed_by_the_last(tmp_path: Path) -> None:
    moments = await moments_of(parcel_of())
    chance = random.Random(5)
    async with Sandbox(seed=7) as sandbox:
        for number in range(8):
            each, path = parcel_of(name=f"Lease {number}"), tmp_path / f"{number}"
            deaths = 0
            for at in [chance.randint(1, moments) for _ in range(5)]:
                fate = Fate(at)
                async with SqliteJournal(path) as journal, fated_client(sandbox, fate) as client:
                    with contextlib.suppress(Died):
                        await client.dispatch(each.package, Fated(journal, fate))
                deaths += fate.is_dead
            async with fated_client(sandbox, Fate()) as client:
                await client.dispatch(each.package, path)
            sent_well(sandbox, each, spare=deaths)


async def test_upload_of_a_killed_run_that_arrives_late_is_not_in_the_signing_that_is_sent(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel, fate = parcel_of(), Fate()
    path = tmp_path / "journal"
    async with SqliteJournal(path) as journal, fated_client(sandbox, fate) as dying:
        sandbox.faults.add("documents.upload", "hang")
        run = asyncio.create_task(dying.dispatch(parcel.package, Fated(journal, fate)))
        while not run.done() and not sandbox.requests_of("documents.upload"):
            await asyncio.sleep(0.005)
        fate.is_dead = True
        run.cancel()
        with pytest.raises((Died, asyncio.CancelledError)):
            await run
    await client.dispatch(parcel.package, path)
    (old,) = [signing for signing in sandbox.signings if signing.state == "draft"]
    await client.documents.upload(old.id, make_pdf(), "late.pdf")
    sent_well(sandbox, parcel, spare=1)
    assert state_of(path)["abandoned"] == [old.id]


# What the journal knows


def state_of(path: Path) -> dict[str, Any]:
    """The state of the only package in a journal."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        ((state,),) = database.execute("SELECT state FROM packages").fetchall()
    found: dict[str, Any] = json.loads(state)
    return found


async def key_of(package: SigningPackage) -> str:
    """The name that a package gets by its content."""
    prepared = await prepare(package, 2**20)
    prepared.close()
    return prepared.key


def count(sandbox: Sandbox) -> Counter[str | None]:
    """How many requests there were of each kind."""
    return Counter(record.operation for record in sandbox.requests)


async def test_sent_package_is_returned_from_the_journal_without_a_request(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel = parcel_of(message="Please sign")
    first = await client.dispatch(parcel.package, tmp_path / "journal")
    before = len(sandbox.requests)
    second = await client.dispatch(parcel.package, tmp_path / "journal")
    assert len(sandbox.requests) == before
    assert (second.id, second.name, second.language, second.signing_order, second.message, second.is_draft) == (
        first.id,
        "Lease",
        "EN",
        "sequential",
        "Please sign",
        False,
    )
    assert isinstance(second.documents, tuple)
    assert sorted(document.id for document in second.documents) == sorted(document.id for document in first.documents)
    assert second.state is SigningState.SENT
    assert state_of(tmp_path / "journal")["status"] == "sent"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {
            "documents": {"0": "d0", "1": "d1"},
            "recipients": {"0": "r0"},
            "error": "HTTP 401",
            "abandoned": ["an earlier draft"],
        },
    ],
)
async def test_journal_entries_of_earlier_versions_are_read(
    sandbox: Sandbox, client: SigningClient, more: dict[str, Any]
) -> None:
    journal, package = MemoryJournal(), parcel_of().package
    key = await key_of(package)
    known = {"content": key, "service": sandbox.base_url, "status": "sent", "signing": "an id", **more}
    journal.states[key] = json.dumps(known)
    signing = await client.dispatch(package, journal)
    assert (signing.id, signing.is_draft) == ("an id", False)
    assert [document.id for document in signing.documents] == list(more.get("documents", {}).values())
    assert sandbox.requests == []
    assert json.loads(journal.states[key]) == known


async def test_journal_entry_has_a_fixed_format(sandbox: Sandbox, client: SigningClient) -> None:
    journal, package = MemoryJournal(), parcel_of(1, 1, key="lease").package
    signing = await client.dispatch(package, journal)
    assert json.loads(journal.states["lease"]) == {
        "content": await key_of(attrs.evolve(package, key=None)),
        "service": sandbox.base_url,
        "status": "sent",
        "signing": signing.id,
        "documents": {"0": sandbox.documents(signing.id)[0].id},
        "recipients": {"0": sandbox.recipients(signing.id)[0].id},
        "error": None,
        "abandoned": [],
    }


async def test_unset_fields_of_a_sent_package_stay_unset(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    package = parcel_of(signing_order=None).package
    await client.dispatch(package, tmp_path / "journal")
    known = await client.dispatch(package, tmp_path / "journal")
    assert (known.signing_order, known.message) == (None, None)


async def test_dispatch_without_a_journal_sends_each_time(sandbox: Sandbox, client: SigningClient) -> None:
    parcel = parcel_of()
    first, second = [await client.dispatch(parcel.package) for _ in range(2)]
    assert first.id != second.id
    assert [signing.state for signing in sandbox.signings] == ["sent", "sent"]


async def test_package_without_faults_costs_no_extra_request(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    await client.dispatch(parcel_of(3, 2).package, tmp_path / "journal")
    assert count(sandbox) == {
        "signings.create": 1,
        "documents.upload": 3,
        "recipients.add": 2,
        "signings.send": 1,
        "signings.get": 1,
    }


@attrs.define
class Uploads:
    """The uploads under way, and the most at any time."""

    current: int = 0
    most: int = 0


@contextlib.contextmanager
def concurrent_uploads() -> Iterator[Uploads]:
    uploads, upload = Uploads(), Documents.upload

    async def counted(*given: Any, **named: Any) -> Document:
        uploads.current += 1
        uploads.most = max(uploads.most, uploads.current)
        try:
            return await upload(*given, **named)
        finally:
            uploads.current -= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Documents, "upload", counted)
        yield uploads


async def test_documents_are_uploaded_one_after_the_other_in_the_callers_order(
    sandbox: Sandbox, client: SigningClient
) -> None:
    parcel = parcel_of(6, 1)
    sandbox.faults.add("documents.upload", "slow", seconds=0.1)
    with concurrent_uploads() as uploads:
        signing = await client.dispatch(parcel.package)
    assert uploads.most == 1
    assert [document.name for document in signing.documents] == [name for name, _ in parcel.documents]
    sent_well(sandbox, parcel)


async def test_documents_are_uploaded_side_by_side_if_not_ordered(sandbox: Sandbox, client: SigningClient) -> None:
    sandbox.faults.add("documents.upload", "slow", times=None, seconds=0.05)
    with concurrent_uploads() as uploads:
        await client.dispatch(parcel_of(20, 1).package, ordered=False)
    assert uploads.most == 8


async def test_draft_whose_documents_are_out_of_order_is_abandoned_by_an_ordered_run(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parcel, path = parcel_of(3), tmp_path / "journal"
    sandbox.faults.add("documents.upload", "expired-token")
    with pytest.raises(Unauthorized):
        await client.dispatch(parcel.package, path, ordered=False)
    draft = state_of(path)["signing"]
    assert state_of(path)["documents"].keys() & {"1", "2"}
    signing = await client.dispatch(parcel.package, path)
    assert [document.name for document in signing.documents] == [name for name, _ in parcel.documents]
    (message,) = abandoned(caplog)
    assert message.endswith(f"draft {draft} was abandoned: its documents are out of order")
    sent_well(sandbox, parcel, spare=1)


async def test_abandoned_drafts_are_in_the_result_and_in_the_notes_of_the_error(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel, path = parcel_of(1, 1), tmp_path / "journal"
    sandbox.faults.add("documents.upload", "drop-before-commit")
    sandbox.faults.add("recipients.add", "expired-token")
    with pytest.raises(Unauthorized) as caught:
        await client.with_options(retry=RetryPolicy.none()).dispatch(parcel.package, path)
    old, current = [signing.id for signing in sandbox.signings]
    notes = [f"its signing is {current}; status 'draft'", f"abandoned drafts: {old}"]
    assert [note.partition(": ")[2] for note in caught.value.__notes__] == notes
    for _ in range(2):
        (result,) = [result async for result in client.dispatch_many([parcel.package], path)]
        assert (result.error, result.abandoned) == (None, (old,))


async def test_ordered_upload_that_fails_is_resumed_in_the_same_draft(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel, path = parcel_of(4), tmp_path / "journal"
    sandbox.faults.add("documents.upload", "expired-token", skip=2)
    with pytest.raises(Unauthorized):
        await client.dispatch(parcel.package, path)
    assert count(sandbox)["documents.upload"] == 3
    assert state_of(path)["documents"].keys() == {"0", "1"}
    signing = await client.dispatch(parcel.package, path)
    assert [document.name for document in signing.documents] == [name for name, _ in parcel.documents]
    sent_well(sandbox, parcel)


async def test_draft_with_a_refused_document_is_kept_and_completed_later(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel, path = parcel_of(3), tmp_path / "journal"
    sandbox.faults.add("documents.upload", "expired-token", skip=1)
    with pytest.raises(Unauthorized) as caught:
        await client.dispatch(parcel.package, path)
    (draft,) = sandbox.signings
    assert any(draft.id in note and "'draft'" in note for note in caught.value.__notes__)
    sandbox.faults.add("documents.upload", "expired-token")
    (result,) = [result async for result in client.dispatch_many([parcel.package], path)]
    held = {one.id for one in sandbox.documents(draft.id)}
    assert result.signing is not None
    assert (result.signing.id, result.signing.is_draft) == (draft.id, True)
    assert {document.id for document in result.signing.documents} == held
    assert state_of(path)["signing"] == draft.id
    assert state_of(path)["documents"].keys() == {"0"}
    assert "401" in state_of(path)["error"]
    signing = await client.dispatch(parcel.package, path)
    assert signing.id == draft.id
    assert count(sandbox)["documents.upload"] == 5
    assert state_of(path)["error"] is None
    sent_well(sandbox, parcel)


async def test_refused_upload_stops_further_uploads_and_leaves_the_others_unambiguous(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel, path = parcel_of(20), tmp_path / "journal"
    sandbox.faults.add("documents.upload", "expired-token")
    with pytest.raises(Unauthorized):
        await client.dispatch(parcel.package, path, ordered=False)
    assert count(sandbox)["documents.upload"] < 20
    assert None not in state_of(path)["documents"].values()
    await client.dispatch(parcel.package, path, ordered=False)
    sent_well(sandbox, parcel)


@pytest.mark.parametrize("step", ["documents.upload", "recipients.add"])
async def test_step_with_an_unreadable_response_is_read_back(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, step: str
) -> None:
    """It took effect, and a reading shows the record: the draft is sent."""
    parcel, path = parcel_of(1, 1), tmp_path / "journal"
    sandbox.faults.add(step, "not-json")
    await client.dispatch(parcel.package, path)
    sent_well(sandbox, parcel)


@pytest.mark.parametrize("step", ["documents.upload", "recipients.add"])
@pytest.mark.parametrize("kind", ["500", "502-html", "drop-before-commit"])
async def test_step_with_an_unknown_outcome_is_done_in_a_new_draft(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, step: str, kind: str
) -> None:
    """Without retries nothing is read: the draft is abandoned within the same run."""
    parcel, path = parcel_of(1, 1), tmp_path / "journal"
    sandbox.faults.add(step, kind)
    await client.with_options(retry=RetryPolicy.none()).dispatch(parcel.package, path)
    sent_well(sandbox, parcel, spare=1)


@pytest.mark.parametrize("step", ["recipients.add", "signings.send"])
async def test_draft_with_a_refused_step_is_resumed(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, step: str
) -> None:
    parcel, path = parcel_of(), tmp_path / "journal"
    sandbox.faults.add(step, "expired-token", skip=1 if step == "recipients.add" else 0)
    with pytest.raises(Unauthorized):
        await client.dispatch(parcel.package, path)
    assert state_of(path)["status"] == "draft"
    assert None not in state_of(path)["recipients"].values()
    before = count(sandbox)
    await client.dispatch(parcel.package, path)
    sent_well(sandbox, parcel)
    asked = {"signings.send": 1, "signings.get": 2, "recipients.list": 1}
    missing = {"recipients.add": 1, "signings.get": 3, "recipients.list": 2}
    assert count(sandbox) - before == (asked if step == "signings.send" else asked | missing)


async def test_refused_create_leaves_no_draft_and_is_repeated_later(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    sandbox.faults.add("signings.create", "expired-token")
    package = parcel_of(key="lease").package
    (result,) = [result async for result in client.dispatch_many([package], tmp_path / "journal")]
    assert isinstance(result.error, Unauthorized)
    assert result.error.__notes__ == ["package 'lease': it has no draft; status 'draft'"]
    assert result.signing is None
    await client.dispatch(package, tmp_path / "journal")
    sent_well(sandbox, parcel_of())


async def test_refusal_after_an_ambiguous_attempt_leaves_the_draft_ambiguous(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parcel, path = parcel_of(1, 1), tmp_path / "journal"
    sandbox.faults.add("documents.upload", "drop-before-commit")
    sandbox.faults.add("documents.upload", "expired-token")
    with pytest.raises(Unauthorized):
        await client.dispatch(parcel.package, path)
    assert state_of(path)["documents"] == {"0": None}
    (draft,) = sandbox.signings
    signing = await client.dispatch(parcel.package, path)
    assert signing.id != draft.id
    (message,) = abandoned(caplog)
    assert message.endswith(f": draft {draft.id} was abandoned: the outcome of one of its steps is unknown")
    sent_well(sandbox, parcel, spare=1)


def abandoned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log tells of drafts that are not used."""
    return [message for message in caplog.messages if "abandoned" in message]


async def test_changed_package_replaces_an_unsent_version_and_is_refused_after_the_sending(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal"
    sandbox.faults.add("recipients.add", "expired-token")
    with pytest.raises(Unauthorized):
        await client.dispatch(parcel_of(name="First", key="lease").package, path)
    (draft,) = sandbox.signings
    second = parcel_of(name="Second", key="lease")
    signing = await client.dispatch(second.package, path)
    assert state_of(path)["abandoned"] == [draft.id]
    assert abandoned(caplog) == [f"package 'lease': draft {draft.id} was abandoned: the package was changed"]
    assert (await client.dispatch(second.package, path)).id == signing.id
    sent_well(sandbox, second)
    third = client.dispatch_many([parcel_of(name="Third", key="lease").package], path)
    (result,) = [result async for result in third]
    assert result.signing == Signing(signing.id)
    assert "key: 'lease' names another package, which was sent as signing" in str(result.error)
    assert isinstance(result.error, InvalidRequest)
    assert state_of(path)["error"] is None


async def test_changed_package_without_a_draft_abandons_nothing(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox.faults.add("signings.create", "expired-token")
    with pytest.raises(Unauthorized):
        await client.dispatch(parcel_of(name="First", key="lease").package, tmp_path / "journal")
    second = parcel_of(name="Second", key="lease")
    await client.dispatch(second.package, tmp_path / "journal")
    assert state_of(tmp_path / "journal")["abandoned"] == []
    assert abandoned(caplog) == []
    sent_well(sandbox, second)


async def test_journaled_error_is_cleared_by_the_next_run(sandbox: Sandbox, client: SigningClient) -> None:
    parcel, journal, errors = parcel_of(), MemoryJournal(), list[str | None]()
    write = journal.write

    async def noted(claim: Claim, state: str) -> None:
        errors.append(json.loads(state)["error"])
        await write(claim, state)

    journal.write = noted  # type: ignore[method-assign]  # one that takes notes
    sandbox.faults.add("recipients.add", "expired-token")
    with pytest.raises(Unauthorized):
        await client.dispatch(parcel.package, journal)
    assert "401" in str(errors.pop())
    await client.dispatch(parcel.package, journal)
    assert set(errors) == {None}


async def test_concurrent_saves_of_a_package_share_a_write(sandbox: Sandbox, client: SigningClient) -> None:
    journal = MemoryJournal()
    write, under_way = journal.write, 0

    async def slow(claim: Claim, state: str) -> None:
        nonlocal under_way
        under_way += 1
        assert under_way == 1
        await asyncio.sleep(0.05)
        await write(claim, state)
        under_way -= 1

    journal.write = slow  # type: ignore[method-assign]  # a slow one
    await client.dispatch(parcel_of(8, 1).package, journal, ordered=False)
    # Begun, created, some of the eight documents at a time, the recipient, the sending, sent.
    assert journal.writes < 5 + 7
    sent_well(sandbox, parcel_of(8, 1))


async def test_on_attempt_receives_every_request_of_a_dispatch(sandbox: Sandbox, client: SigningClient) -> None:
    told: list[str] = []
    watched = client.with_options(on_attempt=lambda attempt: told.append(attempt.operation))
    await watched.dispatch(parcel_of().package)
    assert Counter(told) == count(sandbox)


async def test_changed_package_is_refused_if_the_earlier_version_may_have_been_sent(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    await _leave_in_doubt(sandbox, client, parcel_of(key="lease").package, tmp_path / "journal")
    with pytest.raises(InvalidRequest, match="which may have been sent"):
        await client.dispatch(parcel_of(name="Other", key="lease").package, tmp_path / "journal")


# The sending


async def _leave_in_doubt(sandbox: Sandbox, client: SigningClient, package: SigningPackage, path: Path) -> None:
    """It is not known whether the package was sent (it was not)."""
    fault = sandbox.faults.add("signings.send", "500")
    reading = sandbox.faults.add("signings.get", "503", times=None)
    with pytest.raises(OutcomeUnknown):
        await client.dispatch(package, path)
    fault.remove()
    reading.remove()
    assert state_of(path)["status"] == "sending"


async def test_unknown_sending_that_had_no_effect_is_sent_again_with_the_same_draft(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel, path = parcel_of(), tmp_path / "journal"
    await _leave_in_doubt(sandbox, client, parcel.package, path)
    reading = sandbox.faults.add("signings.get", "503", times=None)
    words = r"it is not known whether this took effect: the service could not be read: HTTP 503"
    with pytest.raises(OutcomeUnknown, match=words) as caught:
        await client.dispatch(parcel.package, path)
    draft, key = sandbox.signings[0].id, await key_of(parcel.package)
    assert caught.value.transient
    assert caught.value.__notes__ == [f"package {key[:12]!r}: its signing is {draft}; status 'sending'"]
    (result,) = [result async for result in client.dispatch_many([parcel.package], path)]
    assert isinstance(result.error, OutcomeUnknown)
    assert result.signing is not None
    assert (result.signing.id, result.signing.is_draft) == (draft, None)
    reading.remove()
    await client.dispatch(parcel.package, path)
    sent_well(sandbox, parcel)


async def test_unknown_sending_that_took_effect_is_not_repeated(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel, path = parcel_of(), tmp_path / "journal"
    await _leave_in_doubt(sandbox, client, parcel.package, path)
    await client.signings.send(sandbox.signings[0].id)
    sends, told = count(sandbox)["signings.send"], list[Progress]()
    (result,) = [one async for one in client.dispatch_many([parcel.package], path, on_progress=told.append)]
    assert result.error is None
    assert count(sandbox)["signings.send"] == sends
    assert told[-1].files_done == told[-1].files_total == 2
    sent_well(sandbox, parcel)


async def test_unknown_sending_that_took_effect_with_other_documents_is_logged_as_an_error(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parcel, path = parcel_of(), tmp_path / "journal"
    await _leave_in_doubt(sandbox, client, parcel.package, path)
    draft = sandbox.signings[0].id
    await client.documents.upload(draft, make_pdf(), "other.pdf")
    await client.signings.send(draft)
    assert (await client.dispatch(parcel.package, path)).id == draft
    assert state_of(path)["status"] == "sent"
    assert f"signing {draft} was sent with documents that are not of its package" in caplog.text


async def test_unknown_sending_that_takes_effect_before_the_repeat_counts_as_sent(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel, path = parcel_of(), tmp_path / "journal"
    await _leave_in_doubt(sandbox, client, parcel.package, path)
    sandbox.faults.add("signings.send", "slow", seconds=0.3)
    run = asyncio.create_task(client.dispatch(parcel.package, path))
    while not run.done() and count(sandbox)["signings.send"] < 2:
        await asyncio.sleep(0.005)
    await client.signings.send(sandbox.signings[0].id)
    assert (await run).is_draft is False
    sent_well(sandbox, parcel)


async def test_refused_repeat_leaves_an_unknown_sending_unknown(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel, path = parcel_of(), tmp_path / "journal"
    await _leave_in_doubt(sandbox, client, parcel.package, path)
    sandbox.faults.add("signings.send", "expired-token")
    with pytest.raises(Unauthorized):
        await client.dispatch(parcel.package, path)
    assert state_of(path)["status"] == "sending"
    await client.dispatch(parcel.package, path)
    sent_well(sandbox, parcel)


@pytest.mark.parametrize("kind", ["500", "drop-before-commit"])
async def test_send_refused_after_an_ambiguous_attempt_stays_unknown(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, kind: str
) -> None:
    parcel, path = parcel_of(), tmp_path / "journal"
    sandbox.faults.add("signings.send", kind)
    sandbox.faults.add("signings.send", "expired-token")
    with pytest.raises(Unauthorized):
        await client.dispatch(parcel.package, path)
    assert state_of(path)["status"] == "sending"
    await client.signings.send(sandbox.signings[0].id)
    await client.dispatch(parcel.package, path)
    sent_well(sandbox, parcel)


async def test_unknown_sending_whose_draft_was_changed_is_not_repeated(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel, path = parcel_of(), tmp_path / "journal"
    await _leave_in_doubt(sandbox, client, parcel.package, path)
    await client.documents.upload(sandbox.signings[0].id, make_pdf(), "other.pdf")
    with pytest.raises(DraftChanged, match="holds more or less than this package; it was not sent") as caught:
        await client.dispatch(parcel.package, path)
    assert caught.value.signing.id == sandbox.signings[0].id
    assert caught.value.effect == "none"
    assert [signing.state for signing in sandbox.signings] == ["draft"]


async def test_unknown_sending_of_a_cancelled_signing_is_an_unknown_outcome(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel, path = parcel_of(), tmp_path / "journal"
    await _leave_in_doubt(sandbox, client, parcel.package, path)
    await sandbox.cancel(sandbox.signings[0].id)
    with pytest.raises(OutcomeUnknown, match="the signing is cancelled, and may have been sent before") as caught:
        await client.dispatch(parcel.package, path)
    assert [one.id for one in caught.value.known if isinstance(one, Signing)] == [sandbox.signings[0].id]


@pytest.mark.parametrize(("kind", "most"), [("503", 1), ("not-json", 1), ("drop-after-commit", 2)])
async def test_sent_signing_that_cannot_be_read_is_returned_from_the_journal(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, most: int
) -> None:
    parcel = parcel_of()
    sandbox.faults.add("signings.get", kind, times=5)
    signing = await client.dispatch(parcel.package, tmp_path / "journal")
    assert signing.is_draft is False
    assert signing.name == "Lease"
    assert sorted(document.name for document in signing.documents) == ["part 0.pdf", "part 1.pdf"]
    # aiohttp by itself asks once more when a connection breaks.
    assert 1 <= count(sandbox)["signings.get"] <= most
    assert f"signing {signing.id} was sent, and could not be read: " in caplog.text


# Others who touch the draft


async def _leave_a_draft(sandbox: Sandbox, client: SigningClient, parcel: Parcel, path: Path, step: str) -> str:
    """A draft that is known to hold what it holds."""
    sandbox.faults.add(step, "expired-token", skip=1 if step == "recipients.add" else 0)
    with pytest.raises(Unauthorized):
        await client.dispatch(parcel.package, path)
    return sandbox.signings[0].id


@pytest.mark.parametrize("step", ["recipients.add", "signings.send"])
@pytest.mark.parametrize("what", ["document", "recipient"])
async def test_draft_that_another_client_added_to_is_abandoned(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, caplog: pytest.LogCaptureFixture, step: str, what: str
) -> None:
    parcel, path = parcel_of(), tmp_path / "journal"
    draft = await _leave_a_draft(sandbox, client, parcel, path, step)
    if what == "document":
        await client.documents.upload(draft, make_pdf(), "other.pdf")
    else:
        await client.recipients.add(draft, email="eve@example.com", order=9)
    signing = await client.dispatch(parcel.package, path)
    assert signing.id != draft
    (message,) = abandoned(caplog)
    assert message.endswith(f"{draft} was abandoned: it may hold more or less than the package")
    sent_well(sandbox, parcel, spare=1)


@pytest.mark.parametrize("end", ["sent", "cancelled"])
async def test_draft_that_another_client_sent_or_cancelled_is_an_unknown_outcome(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, end: str
) -> None:
    parcel, path = parcel_of(), tmp_path / "journal"
    draft = await _leave_a_draft(sandbox, client, parcel, path, "signings.send")
    await (client.signings.send(draft) if end == "sent" else sandbox.cancel(draft))
    with pytest.raises(OutcomeUnknown, match=r"^another client has sent or cancelled the draft\n") as caught:
        await client.dispatch(parcel.package, path)
    assert [signing.id for signing in caught.value.known if isinstance(signing, Signing)] == [draft]
    assert [signing.state for signing in sandbox.signings] == [end]


@pytest.mark.parametrize("step", ["documents.upload", "recipients.add", "signings.send"])
async def test_draft_that_is_gone_is_replaced(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, step: str
) -> None:
    parcel, path = parcel_of(), tmp_path / "journal"
    await _leave_a_draft(sandbox, client, parcel, path, step)
    sandbox._database.run("DELETE FROM signings")
    await client.dispatch(parcel.package, path)
    sent_well(sandbox, parcel)


async def test_two_drafts_changed_by_another_client_raise_draft_changed_and_nothing_is_sent(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parcel, path = parcel_of(1, 1), tmp_path / "journal"
    add = Recipients.add

    async def twice(self: Recipients, signing_id: str, **fields: Any) -> Recipient:
        await add(self, signing_id, email="eve@example.com", order=9)
        return await add(self, signing_id, **fields)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recipients, "add", twice)
        # After an ambiguous attempt a draft is read before it is sent.
        sandbox.faults.add("recipients.add", "503")
        sandbox.faults.add("recipients.add", "503", skip=2)
        with pytest.raises(DraftChanged, match="two drafts held more or less than this package") as caught:
            await client.dispatch(parcel.package, path)
    assert (caught.value.effect, caught.value.transient) == ("none", False)
    assert [message.rpartition(" was abandoned: ")[2] for message in abandoned(caplog)] == [
        "it may hold more or less than the package",
        "it holds more or less than the package",
    ]
    assert [signing.state for signing in sandbox.signings] == ["draft", "draft"]
    assert len(state_of(path)["abandoned"]) == 2
    sandbox.faults.clear()
    await client.dispatch(parcel.package, path)
    sent_well(sandbox, parcel, spare=2)


async def test_upload_of_unknown_outcome_is_repeated_in_one_more_draft(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel, path = parcel_of(), tmp_path / "journal"
    sandbox.faults.add("documents.upload", "drop-before-commit")
    sandbox.faults.add("signings.get", "503", times=5)
    await client.dispatch(parcel.package, path)
    sent_well(sandbox, parcel, spare=1)
    other = parcel_of(name="Other")
    sandbox.faults.add("documents.upload", "drop-before-commit", times=None)
    sandbox.faults.add("signings.get", "503", times=None)
    with pytest.raises(OutcomeUnknown, match=r"documents\.upload"):
        await client.dispatch(other.package, tmp_path / "other")
    sandbox.faults.clear()
    await client.dispatch(other.package, tmp_path / "other")
    sent_well(sandbox, other, spare=3)


async def test_timeout_in_a_step_is_raised_and_the_next_run_creates_a_new_draft(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel, path = parcel_of(1, 1), tmp_path / "journal"
    sandbox.faults.add("recipients.add", "hang", times=None)
    with pytest.raises(OutcomeUnknownTimeout):
        await client.with_options(timeout=0.4).dispatch(parcel.package, path)
    (draft,) = sandbox.signings
    sandbox.faults.clear()
    assert (await client.dispatch(parcel.package, path)).id != draft.id
    sent_well(sandbox, parcel, spare=1)


async def test_recipient_of_an_earlier_run_is_not_taken_for_an_equal_one_of_this_run(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    anna = NewRecipient("anna@example.com", "Anna", "Berg")
    package = SigningPackage("Lease", "EN", [PdfSource(make_pdf(), "a.pdf")], [anna, anna])
    parcel = Parcel(package, (("a.pdf", make_pdf()),), (("anna@example.com", None),) * 2)
    await _leave_a_draft(sandbox, client, parcel, tmp_path / "journal", "recipients.add")
    async with SigningClient(
        sandbox.base_url, sandbox.access_token(), retry=RetryPolicy(base_delay=0.01, settle=0.1)
    ) as fresh:
        sandbox.faults.add("recipients.add", "500")
        await fresh.dispatch(package, tmp_path / "journal")
    sent_well(sandbox, parcel)


@pytest.mark.parametrize("step", ["documents.upload", "recipients.add"])
@pytest.mark.parametrize(("kind", "spare"), [("drop-before-commit", 1), ("502-html", 1), ("500", 0), ("503", 0)])
async def test_draft_is_not_sent_while_a_lost_request_may_still_add_to_it(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, step: str, kind: str, spare: int
) -> None:
    send, parcel = Signings.send_own, parcel_of(1, 1)
    sandbox.faults.add(step, kind)

    async def late(self: Signings, signing_id: str) -> Signing | None:
        if spare and signing_id == sandbox.signings[0].id:
            if step == "documents.upload":
                await client.documents.upload(signing_id, make_pdf(text="Lease 0"), "part 0.pdf")
            else:
                await client.recipients.add(signing_id, email="r0@example.com", order=2)
        return await send(self, signing_id)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Signings, "send_own", late)
        await client.dispatch(parcel.package, tmp_path / "journal")
    sent_well(sandbox, parcel, spare=spare)


@pytest.mark.parametrize("step", ["documents.upload", "recipients.add"])
async def test_late_effect_of_a_repeated_step_is_found_before_the_sending(
    sandbox: Sandbox, client: SigningClient, step: str
) -> None:
    add, parcel = Recipients.add, parcel_of(1, 2)
    sandbox.faults.add(step, "500")

    async def late(self: Recipients, signing_id: str, **fields: Any) -> Recipient:
        added = await add(self, signing_id, **fields)
        if signing_id == sandbox.signings[0].id and fields["order"] == 2:
            if step == "documents.upload":
                await client.documents.upload(signing_id, make_pdf(text="Lease 0"), "part 0.pdf")
            else:
                await add(client.recipients, signing_id, email="r0@example.com", order=3)
        return added

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recipients, "add", late)
        await client.dispatch(parcel.package)
    sent_well(sandbox, parcel, spare=1)


async def test_rate_limited_step_is_not_ambiguous(sandbox: Sandbox, client: SigningClient, tmp_path: Path) -> None:
    parcel, path = parcel_of(1, 1), tmp_path / "journal"
    for step in STEPS:
        sandbox.faults.add(step, "429", retry_after=0)
    await client.dispatch(parcel.package, path)
    assert count(sandbox) == {**dict.fromkeys(STEPS, 2), "signings.get": 1}
    other = parcel_of(1, 1, name="Other")
    for step in STEPS[1:]:
        sandbox.faults.add(step, "429", retry_after=0)
        sandbox.faults.add(step, "expired-token")
        with pytest.raises(Unauthorized):
            await client.dispatch(other.package, path)
    await client.dispatch(other.package, path)
    sent_well(sandbox, parcel, other)


async def test_draft_with_a_lost_request_is_abandoned_by_the_next_run(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel = parcel_of(1, 1)
    sandbox.faults.add("documents.upload", "drop-before-commit")
    sandbox.faults.add("recipients.add", "expired-token")
    with pytest.raises(Unauthorized):
        await client.dispatch(parcel.package, tmp_path / "journal")
    draft = sandbox.signings[0].id
    assert (await client.dispatch(parcel.package, tmp_path / "journal")).id != draft
    sent_well(sandbox, parcel, spare=1)


async def test_document_added_just_before_the_sending_is_logged_as_an_error(
    sandbox: Sandbox, client: SigningClient, caplog: pytest.LogCaptureFixture
) -> None:
    send = Signings.send_own

    async def late(self: Signings, signing_id: str) -> Signing | None:
        await client.documents.upload(signing_id, make_pdf(), "late.pdf")
        return await send(self, signing_id)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Signings, "send_own", late)
        signing = await client.dispatch(parcel_of().package)
    assert len(signing.documents) == 3
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        f"signing {signing.id} was sent with documents that are not of its package"
    ]


def lagging(patch: pytest.MonkeyPatch, times: float) -> list[float]:
    """So many readings of a signing that was sent show a draft; when each reading of it was."""
    decode, moments = Signings._decode, list[float]()

    def lag(self: Signings, data: Any, response: Any) -> Signing:
        signing = decode(self, data, response)
        if signing.is_draft:
            return signing
        moments.append(asyncio.get_running_loop().time())
        return attrs.evolve(signing, is_draft=len(moments) <= times)

    patch.setattr(Signings, "_decode", lag)
    return moments


async def test_success_whose_reading_lags_is_read_again(sandbox: Sandbox, client: SigningClient) -> None:
    """The service accepted the sending, and its next readings still show a draft."""
    with pytest.MonkeyPatch.context() as patch:
        moments = lagging(patch, 2)
        signing = await client.with_options(retry=RetryPolicy()).dispatch(parcel_of().package)
    assert signing.is_draft is False
    assert len(signing.documents) == 2
    assert len(moments) == 3
    assert moments[2] - moments[1] > 0.1


async def test_success_that_does_not_show_is_an_unknown_outcome_until_the_next_run(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    """No reading bears out that the package was sent."""
    parcel, path = parcel_of(), tmp_path / "journal"
    with pytest.MonkeyPatch.context() as patch:
        lagging(patch, math.inf)
        with pytest.raises(OutcomeUnknown, match="could not be verified: the service still shows a draft") as caught:
            await client.dispatch(parcel.package, path)
    assert [one.id for one in caught.value.known if isinstance(one, Signing)] == [sandbox.signings[0].id]
    assert state_of(path)["status"] == "sending"
    await client.dispatch(parcel.package, path)
    sent_well(sandbox, parcel)


async def test_unknown_sending_stays_unknown_without_is_draft(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel, path = parcel_of(), tmp_path / "journal"
    await _leave_in_doubt(sandbox, client, parcel.package, path)
    decode = Signings._decode

    def silent(self: Signings, data: Any, response: Any) -> Signing:
        return attrs.evolve(decode(self, data, response), is_draft=None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Signings, "_decode", silent)
        with pytest.raises(OutcomeUnknown, match="does not say whether the signing is still a draft"):
            await client.dispatch(parcel.package, path)


# The package itself


async def test_invalid_package_makes_no_request_and_no_journal(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    package = SigningPackage("", "DE", [b"text"], [NewRecipient("anna")])
    with pytest.raises(InvalidRequest) as caught:
        await client.dispatch(package, tmp_path / "journal")
    assert len(caught.value.problems) == 4
    assert sandbox.requests == []
    assert not (tmp_path / "journal").exists()


@pytest.mark.parametrize("size", [1500, 600_000])
async def test_file_changed_after_the_check_is_not_uploaded(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, size: int
) -> None:
    file = tmp_path / "a.pdf"
    file.write_bytes(make_pdf(size))
    create = Signings.create

    async def change(self: Signings, **fields: Any) -> Signing:
        file.write_bytes(make_pdf(size, seed=1))
        return await create(self, **fields)

    package = SigningPackage("Lease", "EN", [file], [NewRecipient("a@example.com")], key="lease")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Signings, "create", change)
        with pytest.raises(InvalidRequest, match=r"a\.pdf changed after it was checked"):
            await client.dispatch(package, tmp_path / "journal")
    assert count(sandbox) == {"signings.create": 1}
    assert state_of(tmp_path / "journal")["documents"] == {}
    await client.dispatch(package, tmp_path / "journal")
    assert [sandbox.document_bytes(one.id) for one in sandbox.documents()] == [make_pdf(size, seed=1)]


async def test_stream_is_uploaded_again_to_a_second_draft(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    data = make_pdf(600_000)

    async def stream() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 50_000):
            yield data[at : at + 50_000]

    package = SigningPackage("Lease", "EN", [PdfSource(stream(), "a.pdf")], [NewRecipient("a@example.com")])
    sandbox.faults.add("documents.upload", "drop-before-commit")
    sandbox.faults.add("signings.get", "503", times=5)
    await client.dispatch(package, tmp_path / "journal")
    sent_well(sandbox, Parcel(package, (("a.pdf", data),), (("a@example.com", None),)), spare=1)
