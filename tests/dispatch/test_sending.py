"""The sending of a draft: unknown outcomes, late effects, and other clients that change the draft."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from signing_async import (
    DecodeError,
    DraftChanged,
    InvalidRequest,
    NewRecipient,
    OutcomeUnknown,
    PdfSource,
    Progress,
    RequestTimeout,
    RetryPolicy,
    Signing,
    SigningClient,
    SigningPackage,
    TransportError,
    Unauthorized,
)
from signing_async.sandbox import Sandbox
from tests.dispatch.altering import Proxy, replacing, running_proxy
from tests.dispatch.observing import abandoned, count, parcel_of, sent_well, state_of
from tests.dispatch.parcels import Parcel
from tests.pdfs import make_pdf

# The sending


@pytest.fixture
async def proxy(sandbox: Sandbox) -> AsyncIterator[Proxy]:
    """A proxy of the sandbox, which alters nothing yet."""
    async with running_proxy(sandbox) as running:
        yield running


async def _leave_in_doubt(sandbox: Sandbox, client: SigningClient, package: SigningPackage, path: Path) -> None:
    """It is not known whether the package was sent (it was not)."""
    fault = sandbox.faults.add("signings.send", "500")
    reading = sandbox.faults.add("signings.get", "503", times=None)
    with pytest.raises(OutcomeUnknown) as caught:
        await client.dispatch(package, path)
    assert caught.value.transient  # a run with this journal reads the service before it sends
    fault.remove()
    reading.remove()
    assert state_of(path)["status"] == "sending"


async def test_unknown_sending_that_had_no_effect_is_sent_again_with_the_same_draft(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel, path = parcel_of(), tmp_path / "journal"
    await _leave_in_doubt(sandbox, client, parcel.package, path)
    reading = sandbox.faults.add("signings.get", "503", times=None)
    words = r"the outcome is unknown: the service could not be read: HTTP 503"
    with pytest.raises(OutcomeUnknown, match=words) as caught:
        await client.dispatch(parcel.package, path)
    draft = sandbox.signings[0].id
    assert caught.value.transient
    assert caught.value.__notes__ == [f"package {parcel.package.name!r}: its signing is {draft}; status 'sending'"]
    (result,) = [result async for result in client.dispatch_many([parcel.package], path)]
    assert isinstance(result.error, OutcomeUnknown)
    assert result.signing is not None
    assert (result.signing.id, result.signing.is_draft, result.sent_earlier) == (draft, None, False)
    reading.remove()
    (result,) = [result async for result in client.dispatch_many([parcel.package], path)]
    assert (result.error, result.sent_earlier) == (None, False)
    sent_well(sandbox, parcel)


@pytest.mark.parametrize("how", ["no journal", "a reading that says nothing"])
async def test_unknown_sending_is_not_transient_where_another_run_would_not_know_more(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, how: str
) -> None:
    """Without a journal the next call would send a second signing."""
    sandbox.faults.add("signings.send", "500-after-commit")
    sandbox.faults.add("signings.get", "503" if how == "no journal" else "not-json", times=None)
    journal = None if how == "no journal" else tmp_path / "journal"
    with pytest.raises(OutcomeUnknown) as caught:
        await client.dispatch(parcel_of().package, journal)
    assert not caught.value.transient


async def test_unknown_sending_that_took_effect_is_not_repeated(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel, path = parcel_of(), tmp_path / "journal"
    await _leave_in_doubt(sandbox, client, parcel.package, path)
    await client.signings.send(sandbox.signings[0].id)
    sends, told = count(sandbox)["signings.send"], list[Progress]()
    (result,) = [one async for one in client.dispatch_many([parcel.package], path, on_progress=told.append)]
    assert (result.error, result.sent_earlier) == (None, True)
    assert count(sandbox)["signings.send"] == sends
    assert told[-1].files_done == told[-1].files_total == 2
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


async def test_unknown_sending_whose_draft_was_changed_is_not_repeated(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel, path = parcel_of(), tmp_path / "journal"
    await _leave_in_doubt(sandbox, client, parcel.package, path)
    await client.documents.upload(sandbox.signings[0].id, make_pdf(), "other.pdf")
    words = "holds more or less than this package; it was not sent by this run"
    with pytest.raises(DraftChanged, match=words) as caught:
        await client.dispatch(parcel.package, path)
    assert caught.value.signing.id == sandbox.signings[0].id
    assert [signing.state for signing in sandbox.signings] == ["draft"]
    # The request of the run before may still send it.
    assert (caught.value.effect, state_of(path)["status"]) == ("unknown", "sending")


@pytest.mark.parametrize("kind", ["500", "drop-before-commit"])
async def test_changed_package_gets_no_second_draft_after_an_ambiguous_attempt_that_was_refused(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path, kind: str
) -> None:
    """If the first draft were given up, it could be sent beside the second one."""
    path = tmp_path / "journal"
    sandbox.faults.add("signings.send", kind)
    sandbox.faults.add("signings.send", "expired-token")
    with pytest.raises(Unauthorized):
        await client.dispatch(parcel_of(key="lease").package, path)
    with pytest.raises(InvalidRequest, match="which may have been sent"):
        await client.dispatch(parcel_of(name="Other", key="lease").package, path)
    assert [signing.name for signing in sandbox.signings] == ["Lease"]


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
    assert f"signing {signing.id} was sent but could not be read: " in caplog.text


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
    with pytest.raises(OutcomeUnknown, match=f"^the draft is {end}: another client may have sent it") as caught:
        await client.dispatch(parcel.package, path)
    assert [signing.id for signing in caught.value.known if isinstance(signing, Signing)] == [draft]
    assert [signing.state for signing in sandbox.signings] == [end]


@pytest.mark.parametrize("step", ["documents.upload", "recipients.add", "signings.send"])
async def test_draft_that_is_gone_is_replaced(sandbox: Sandbox, proxy: Proxy, tmp_path: Path, step: str) -> None:
    parcel, path = parcel_of(), tmp_path / "journal"
    draft = await _leave_a_draft(sandbox, proxy.client, parcel, path, step)
    proxy.missing.add(draft)
    assert (await proxy.client.dispatch(parcel.package, path)).id != draft
    sent_well(sandbox, parcel, spare=1)


async def test_lost_uploads_of_two_drafts_are_a_transient_failure_and_nothing_is_sent(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    """No other client has changed them: the same package may be dispatched again."""
    parcel, path = parcel_of(1, 1), tmp_path / "journal"
    sandbox.faults.add("documents.upload", "drop-before-commit")
    sandbox.faults.add("documents.upload", "drop-before-commit", skip=1)
    with pytest.raises(TransportError, match="may still add to the draft; nothing was sent; dispatch again") as caught:
        await client.dispatch(parcel.package, path)
    assert (caught.value.effect, caught.value.transient) == ("none", True)
    assert len(state_of(path)["abandoned"]) == 1
    drafts = {signing.id for signing in sandbox.signings}
    # Another process knows of the lost requests from the journal alone.
    retry = RetryPolicy(base_delay=0.01, settle=0.1)
    async with SigningClient(sandbox.base_url, sandbox.access_token(), retry=retry) as fresh:
        assert (await fresh.dispatch(parcel.package, path)).id not in drafts
    sent_well(sandbox, parcel, spare=2)


async def test_upload_whose_response_cannot_be_decoded_is_a_permanent_failure_if_reading_cannot_tell(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    """Another draft would meet the same response: a worker must not create drafts without end."""
    parcel, path = parcel_of(1, 1), tmp_path / "journal"
    sandbox.faults.add("documents.upload", "not-json", times=None)
    sandbox.faults.add("signings.get", "not-json", times=None)
    with pytest.raises(TransportError, match=r"(?m)^documents\.upload: .*; nothing was sent$") as caught:
        await client.dispatch(parcel.package, path)
    assert (caught.value.effect, caught.value.transient, caught.value.client_wide) == ("none", False, False)
    assert len(sandbox.signings) == 1
    sandbox.faults.clear()
    await client.dispatch(parcel.package, path)
    sent_well(sandbox, parcel, spare=1)


async def test_draft_whose_creation_cannot_be_decoded_has_no_effect(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    """The next run creates another draft."""
    parcel = parcel_of(1, 1)
    sandbox.faults.add("signings.create", "not-json")
    with pytest.raises(DecodeError) as caught:
        await client.dispatch(parcel.package, tmp_path / "journal")
    assert caught.value.effect == "none"
    await client.dispatch(parcel.package, tmp_path / "journal")
    sent_well(sandbox, parcel, spare=1)


async def test_two_drafts_that_another_client_adds_to_raise_draft_changed_and_nothing_is_sent(
    sandbox: Sandbox, proxy: Proxy, tmp_path: Path
) -> None:
    parcel, path = parcel_of(1, 1), tmp_path / "journal"
    proxy.alter = lambda one: one | {"documents": [*one.get("documents", ()), {"id": "other", "name": "other.pdf"}]}
    # After an ambiguous attempt a draft is read before it is sent.
    sandbox.faults.add("recipients.add", "503")
    sandbox.faults.add("recipients.add", "503", skip=1)
    with pytest.raises(DraftChanged, match="two drafts held more or less than this package") as caught:
        await proxy.client.dispatch(parcel.package, path)
    assert (caught.value.effect, caught.value.transient) == ("none", False)
    assert [signing.state for signing in sandbox.signings] == ["draft", "draft"]
    assert len(state_of(path)["abandoned"]) == 2
    proxy.alter = dict
    await proxy.client.dispatch(parcel.package, path)
    sent_well(sandbox, parcel, spare=2)


async def test_timeout_in_a_step_is_raised_and_the_next_run_creates_a_new_draft(
    sandbox: Sandbox, client: SigningClient, tmp_path: Path
) -> None:
    parcel, path = parcel_of(1, 1), tmp_path / "journal"
    sandbox.faults.add("recipients.add", "hang", times=None)
    with pytest.raises(RequestTimeout, match=r"^recipients\.add: ") as caught:
        await client.with_options(timeout=3).dispatch(parcel.package, path)
    assert (caught.value.effect, caught.value.transient) == ("none", True)
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


async def test_document_added_just_before_the_sending_is_logged_as_an_error(
    sandbox: Sandbox, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    late = {"id": "late", "name": "late.pdf"}
    proxy.alter = lambda one: one if one["is_draft"] else one | {"documents": [*one["documents"], late]}
    signing = await proxy.client.dispatch(parcel_of().package)
    assert len(signing.documents) == 3
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        f"signing {signing.id} was sent with documents that are not of its package"
    ]


async def test_success_that_does_not_show_is_an_unknown_outcome_until_the_next_run(
    sandbox: Sandbox, proxy: Proxy, tmp_path: Path
) -> None:
    """No reading bears out that the package was sent."""
    parcel, path = parcel_of(), tmp_path / "journal"
    proxy.alter = replacing(is_draft=True)
    with pytest.raises(OutcomeUnknown, match="could not be verified: the service still shows a draft") as caught:
        await proxy.client.dispatch(parcel.package, path)
    assert [one.id for one in caught.value.known if isinstance(one, Signing)] == [sandbox.signings[0].id]
    assert (caught.value.may_clear, caught.value.transient) == (True, True)
    assert state_of(path)["status"] == "sending"
    proxy.alter = dict
    await proxy.client.dispatch(parcel.package, path)
    sent_well(sandbox, parcel)


@pytest.mark.parametrize("fields", [{"is_draft": None}, {"is_draft": True, "cancelled_at": "2031-01-01T00:00:00Z"}])
async def test_draft_that_may_be_sent_is_not_sent_again(
    sandbox: Sandbox, proxy: Proxy, tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Resuming a draft reads it as reconciling a sending does."""
    parcel, path = parcel_of(), tmp_path / "journal"
    await _leave_a_draft(sandbox, proxy.client, parcel, path, "signings.send")
    before = count(sandbox)["signings.send"]
    proxy.alter = replacing(**fields)
    with pytest.raises(OutcomeUnknown, match="another client may have sent it"):
        await proxy.client.dispatch(parcel.package, path)
    assert count(sandbox)["signings.send"] == before


@pytest.mark.parametrize("fields", [{"is_draft": None}, {"is_draft": True, "cancelled_at": "2031-01-01T00:00:00Z"}])
async def test_accepted_sending_is_a_success_unless_the_service_shows_a_draft(
    sandbox: Sandbox, proxy: Proxy, tmp_path: Path, fields: dict[str, Any]
) -> None:
    parcel = parcel_of()
    proxy.alter = replacing(**fields)
    await proxy.client.dispatch(parcel.package, tmp_path / "journal")
    sent_well(sandbox, parcel)
