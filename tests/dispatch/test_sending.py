"""The sending of a draft: unknown outcomes, late effects, and other clients that change the draft."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from signing_async import (
    DraftChanged,
    InvalidRequest,
    NewRecipient,
    OutcomeUnknown,
    PdfSource,
    Progress,
    RequestTimeout,
    Signing,
    SigningPackage,
    TransportError,
    Unauthorized,
)
from signing_async.sandbox import Sandbox
from tests.dispatch.altering import Proxy, replacing, running_proxy
from tests.dispatch.deaths import Fate, fated_client
from tests.dispatch.observing import Office, abandoned, parcel_of
from tests.dispatch.parcels import Parcel
from tests.pdfs import make_pdf

# The sending


@pytest.fixture
async def proxy(sandbox: Sandbox, path: Path) -> AsyncIterator[Proxy]:
    """A proxy of the sandbox, which alters nothing yet."""
    async with running_proxy(sandbox, path) as running:
        yield running


async def _leave_ambiguous(office: Office, parcel: Parcel) -> None:
    """It is not known whether the package was sent (it was not)."""
    fault = office.fail("signings.send", "500")
    reading = office.fail("signings.get", "503", times=None)
    with pytest.raises(OutcomeUnknown) as caught:
        await office.dispatch(parcel)
    assert caught.value.transient  # a run with this journal reads the service before it sends
    fault.remove()
    reading.remove()
    assert office.state()["status"] == "sending"


async def test_unknown_sending_that_had_no_effect_is_sent_again_with_the_same_draft(office: Office) -> None:
    parcel = parcel_of()
    await _leave_ambiguous(office, parcel)
    reading = office.fail("signings.get", "503", times=None)
    words = r"the outcome is unknown: the service could not be read: HTTP 503"
    with pytest.raises(OutcomeUnknown, match=words) as caught:
        await office.dispatch(parcel)
    draft = office.sandbox.signings[0].id
    assert caught.value.transient
    assert caught.value.__notes__ == [f"package {parcel.package.name!r}: its signing is {draft}; status 'sending'"]
    (result,) = await office.dispatch_many(parcel)
    assert isinstance(result.error, OutcomeUnknown)
    assert result.signing is not None
    assert (result.signing.id, result.signing.is_draft, result.sent_earlier) == (draft, None, False)
    reading.remove()
    office.fail("signings.send", "expired-token")
    with pytest.raises(Unauthorized):
        await office.dispatch(parcel)
    assert office.state()["status"] == "sending"  # also after a repeat that was refused
    (result,) = await office.dispatch_many(parcel)
    assert (result.error, result.sent_earlier) == (None, False)
    office.sent_well(parcel)


@pytest.mark.parametrize("how", ["no journal", "a reading that says nothing"])
async def test_unknown_sending_is_not_transient_where_another_run_would_not_know_more(office: Office, how: str) -> None:
    """Without a journal the next call would send a second signing."""
    office.fail("signings.send", "500-after-commit")
    office.fail("signings.get", "503" if how == "no journal" else "not-json", times=None)
    journal = None if how == "no journal" else office.path
    with pytest.raises(OutcomeUnknown) as caught:
        await office.client.dispatch(parcel_of().package, journal)
    assert not caught.value.transient


async def test_unknown_sending_that_took_effect_is_not_repeated(office: Office) -> None:
    parcel = parcel_of()
    await _leave_ambiguous(office, parcel)
    await office.client.signings.send(office.sandbox.signings[0].id)
    sends, told = office.count()["signings.send"], list[Progress]()
    (result,) = await office.dispatch_many(parcel, on_progress=told.append)
    assert (result.error, result.sent_earlier) == (None, True)
    assert office.count()["signings.send"] == sends
    assert told[-1].files_done == told[-1].files_total == 2
    office.sent_well(parcel)


async def test_unknown_sending_whose_draft_was_changed_is_not_repeated(office: Office) -> None:
    parcel = parcel_of()
    await _leave_ambiguous(office, parcel)
    await office.client.documents.upload(office.sandbox.signings[0].id, make_pdf(), "other.pdf")
    words = "holds more or less than this package; it was not sent by this run"
    with pytest.raises(DraftChanged, match=words) as caught:
        await office.dispatch(parcel)
    assert caught.value.signing.id == office.sandbox.signings[0].id
    assert [signing.state for signing in office.sandbox.signings] == ["draft"]
    # The request of the run before may still send it.
    assert (caught.value.effect, office.state()["status"]) == ("unknown", "sending")


async def test_changed_package_gets_no_second_draft_after_an_ambiguous_attempt_that_was_refused(office: Office) -> None:
    """If the first draft were given up, it could be sent beside the second one."""
    office.fail("signings.send", "500")
    office.fail("signings.send", "expired-token")
    with pytest.raises(Unauthorized):
        await office.dispatch(parcel_of(key="lease"))
    with pytest.raises(InvalidRequest, match="which may have been sent"):
        await office.dispatch(parcel_of(name="Other", key="lease"))
    assert [signing.name for signing in office.sandbox.signings] == ["Lease"]


@pytest.mark.parametrize(("kind", "most"), [("not-json", 1), ("drop-after-commit", 2)])
async def test_sent_signing_that_cannot_be_read_is_returned_from_the_journal(
    office: Office, caplog: pytest.LogCaptureFixture, kind: str, most: int
) -> None:
    parcel = parcel_of()
    office.fail("signings.get", kind, times=5)
    signing = await office.dispatch(parcel)
    assert signing.is_draft is False
    assert signing.name == "Lease"
    assert sorted(document.name for document in signing.documents) == ["part 0.pdf", "part 1.pdf"]
    # aiohttp by itself asks once more when a connection breaks.
    assert 1 <= office.count()["signings.get"] <= most
    assert f"signing {signing.id} was sent but could not be read: " in caplog.text


# Others who touch the draft


async def _leave_a_draft(office: Office, parcel: Parcel, step: str) -> str:
    """A draft that is known to hold what it holds."""
    office.fail(step, "expired-token", skip=1 if step == "recipients.add" else 0)
    with pytest.raises(Unauthorized):
        await office.dispatch(parcel)
    return office.sandbox.signings[0].id


@pytest.mark.parametrize(("step", "what"), [("recipients.add", "document"), ("signings.send", "recipient")])
async def test_draft_that_another_client_added_to_is_abandoned(
    office: Office, caplog: pytest.LogCaptureFixture, step: str, what: str
) -> None:
    parcel = parcel_of()
    draft = await _leave_a_draft(office, parcel, step)
    if what == "document":
        await office.client.documents.upload(draft, make_pdf(), "other.pdf")
    else:
        await office.client.recipients.add(draft, email="eve@example.com", order=9)
    signing = await office.dispatch(parcel)
    assert signing.id != draft
    (message,) = abandoned(caplog)
    assert message.endswith(f"{draft} was abandoned: it may hold more or less than the package")
    office.sent_well(parcel, spare=1)


@pytest.mark.parametrize("end", ["sent", "cancelled"])
async def test_draft_that_another_client_sent_or_cancelled_is_an_unknown_outcome(office: Office, end: str) -> None:
    parcel = parcel_of()
    draft = await _leave_a_draft(office, parcel, "signings.send")
    await (office.client.signings.send(draft) if end == "sent" else office.sandbox.cancel(draft))
    with pytest.raises(OutcomeUnknown, match=f"^the draft is {end}: another client may have sent it") as caught:
        await office.dispatch(parcel)
    assert [signing.id for signing in caught.value.known if isinstance(signing, Signing)] == [draft]
    assert [signing.state for signing in office.sandbox.signings] == [end]


@pytest.mark.parametrize("step", ["documents.upload", "signings.send"])
async def test_draft_that_is_gone_is_replaced(proxy: Proxy, step: str) -> None:
    parcel = parcel_of()
    draft = await _leave_a_draft(proxy.office, parcel, step)
    proxy.missing.add(draft)
    assert (await proxy.office.dispatch(parcel)).id != draft
    proxy.office.sent_well(parcel, spare=1)


async def test_lost_uploads_of_two_drafts_are_a_transient_failure_and_nothing_is_sent(office: Office) -> None:
    """No other client has changed them: the same package may be dispatched again."""
    parcel = parcel_of(1, 1)
    office.fail("documents.upload", "drop-before-commit")
    office.fail("documents.upload", "drop-before-commit", skip=1)
    with pytest.raises(TransportError, match="may still add to the draft; nothing was sent; dispatch again") as caught:
        await office.dispatch(parcel)
    assert (caught.value.effect, caught.value.transient) == ("none", True)
    assert len(office.state()["abandoned"]) == 1
    drafts = {signing.id for signing in office.sandbox.signings}
    # Another process knows of the lost requests from the journal alone.
    async with fated_client(office.sandbox, Fate()) as fresh:
        assert (await fresh.dispatch(parcel.package, office.path)).id not in drafts
    office.sent_well(parcel, spare=2)


async def test_upload_whose_response_cannot_be_decoded_is_a_permanent_failure_if_reading_cannot_tell(
    office: Office,
) -> None:
    """Another draft would meet the same response: a worker must not create drafts without end."""
    parcel = parcel_of(1, 1)
    office.fail("documents.upload", "not-json", times=None)
    office.fail("signings.get", "not-json", times=None)
    with pytest.raises(TransportError, match=r"(?m)^documents\.upload: .*; nothing was sent$") as caught:
        await office.dispatch(parcel)
    assert (caught.value.effect, caught.value.transient, caught.value.client_wide) == ("none", False, False)
    assert len(office.sandbox.signings) == 1
    office.sandbox.faults.clear()
    await office.dispatch(parcel)
    office.sent_well(parcel, spare=1)


async def test_two_drafts_that_another_client_adds_to_raise_draft_changed_and_nothing_is_sent(proxy: Proxy) -> None:
    parcel = parcel_of(1, 1)
    proxy.alter = lambda one: one | {"documents": [*one.get("documents", ()), {"id": "other", "name": "other.pdf"}]}
    # After an ambiguous attempt a draft is read before it is sent.
    proxy.office.fail("recipients.add", "503")
    proxy.office.fail("recipients.add", "503", skip=1)
    with pytest.raises(DraftChanged, match="two drafts held more or less than this package") as caught:
        await proxy.office.dispatch(parcel)
    assert (caught.value.effect, caught.value.transient) == ("none", False)
    assert [signing.state for signing in proxy.office.sandbox.signings] == ["draft", "draft"]
    assert len(proxy.office.state()["abandoned"]) == 2
    proxy.alter = dict
    await proxy.office.dispatch(parcel)
    proxy.office.sent_well(parcel, spare=2)


async def test_timeout_in_a_step_is_raised_and_the_next_run_creates_a_new_draft(office: Office) -> None:
    parcel = parcel_of(1, 1)
    office.fail("recipients.add", "hang", times=None)
    with pytest.raises(RequestTimeout, match=r"^recipients\.add: ") as caught:
        await office.client.with_options(timeout=3).dispatch(parcel.package, office.path)
    assert (caught.value.effect, caught.value.transient) == ("none", True)
    (draft,) = office.sandbox.signings
    office.sandbox.faults.clear()
    assert (await office.dispatch(parcel)).id != draft.id
    office.sent_well(parcel, spare=1)


async def test_recipient_of_an_earlier_run_is_not_taken_for_an_equal_one_of_this_run(office: Office) -> None:
    anna = NewRecipient("anna@example.com", "Anna", "Berg")
    package = SigningPackage("Lease", "EN", [PdfSource(make_pdf(), "a.pdf")], [anna, anna])
    parcel = Parcel(package, (("a.pdf", make_pdf()),), (("anna@example.com", None),) * 2)
    await _leave_a_draft(office, parcel, "recipients.add")
    async with fated_client(office.sandbox, Fate()) as fresh:
        office.fail("recipients.add", "500")
        await fresh.dispatch(parcel.package, office.path)
    office.sent_well(parcel)


async def test_document_added_just_before_the_sending_is_logged_as_an_error(
    proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    late = {"id": "late", "name": "late.pdf"}
    proxy.alter = lambda one: one if one["is_draft"] else one | {"documents": [*one["documents"], late]}
    signing = await proxy.office.dispatch(parcel_of())
    assert len(signing.documents) == 3
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        f"signing {signing.id} was sent with documents that are not of its package"
    ]


async def test_success_that_does_not_show_is_an_unknown_outcome_until_the_next_run(proxy: Proxy) -> None:
    """No reading bears out that the package was sent."""
    parcel = parcel_of()
    proxy.alter = replacing(is_draft=True)
    with pytest.raises(OutcomeUnknown, match="could not be verified: the service still shows a draft") as caught:
        await proxy.office.dispatch(parcel)
    assert [one.id for one in caught.value.known if isinstance(one, Signing)] == [proxy.office.sandbox.signings[0].id]
    assert (caught.value.may_clear, caught.value.transient) == (True, True)
    assert proxy.office.state()["status"] == "sending"
    proxy.alter = dict
    await proxy.office.dispatch(parcel)
    proxy.office.sent_well(parcel)


@pytest.mark.parametrize("fields", [{"is_draft": None}, {"is_draft": True, "cancelled_at": "2031-01-01T00:00:00Z"}])
async def test_draft_that_may_be_sent_is_not_sent_again_and_an_accepted_sending_is_a_success(
    proxy: Proxy, fields: dict[str, Any]
) -> None:
    """Resuming a draft reads it as reconciling a sending does. A success is doubted only if a draft is shown."""
    parcel = parcel_of()
    await _leave_a_draft(proxy.office, parcel, "signings.send")
    before = proxy.office.count()["signings.send"]
    proxy.alter = replacing(**fields)
    with pytest.raises(OutcomeUnknown, match="another client may have sent it"):
        await proxy.office.dispatch(parcel)
    assert proxy.office.count()["signings.send"] == before
    accepted = parcel_of(name="Other")
    await proxy.office.dispatch(accepted)
    proxy.office.sent_well(accepted)
