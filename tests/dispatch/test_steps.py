"""Each step of a package: what is requested, journaled, resumed and abandoned."""

from __future__ import annotations

import json
from unittest.mock import ANY

import pytest

from signing_async import InvalidRequest, RetryPolicy, Signing, SigningClient, SigningState, Unauthorized
from signing_async.sandbox import Sandbox
from tests.dispatch.deaths import MemoryJournal
from tests.dispatch.observing import Office, abandoned, parcel_of


async def test_sent_package_is_returned_from_the_journal_without_a_request(office: Office) -> None:
    parcel = parcel_of(message="Please sign")
    first = await office.dispatch(parcel)
    before = len(office.sandbox.requests)
    second = await office.dispatch(parcel)
    assert len(office.sandbox.requests) == before
    assert (second.id, second.name, second.language, second.is_draft) == (first.id, "Lease", "EN", False)
    assert (second.signing_order, second.message, second.state) == ("sequential", "Please sign", SigningState.SENT)
    assert sorted(document.id for document in second.documents) == sorted(document.id for document in first.documents)
    assert office.state()["status"] == "sent"


async def test_journal_entry_has_a_fixed_format(sandbox: Sandbox, client: SigningClient) -> None:
    journal, package = MemoryJournal(), parcel_of(1, 1, key="lease").package
    signing = await client.dispatch(package, journal)
    assert json.loads(journal.states["lease"]) == {
        "content": ANY,
        "service": sandbox.base_url,
        "status": "sent",
        "signing": signing.id,
        "documents": {"0": sandbox.documents(signing.id)[0].id},
        "recipients": {"0": sandbox.recipients(signing.id)[0].id},
        "error": None,
        "abandoned": [],
    }


async def test_dispatch_without_a_journal_sends_each_time(sandbox: Sandbox, client: SigningClient) -> None:
    parcel = parcel_of()
    first, second = [await client.dispatch(parcel.package) for _ in range(2)]
    assert first.id != second.id
    assert [signing.state for signing in sandbox.signings] == ["sent", "sent"]


async def test_draft_whose_documents_are_out_of_order_is_abandoned_by_an_ordered_run(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    parcel = parcel_of(3)
    office.fail("documents.upload", "expired-token")
    with pytest.raises(Unauthorized):
        await office.dispatch(parcel, ordered=False)
    draft = office.state()["signing"]
    assert office.state()["documents"].keys() & {"1", "2"}
    signing = await office.dispatch(parcel)
    assert [document.name for document in signing.documents] == [name for name, _ in parcel.documents]
    (message,) = abandoned(caplog)
    assert message.endswith(f"draft {draft} was abandoned: its documents are out of order")
    office.sent_well(parcel, spare=1)


async def test_abandoned_drafts_are_in_the_result_and_in_the_notes_of_the_error(office: Office) -> None:
    parcel = parcel_of(1, 1)
    office.fail("documents.upload", "drop-before-commit")
    office.fail("recipients.add", "expired-token")
    with pytest.raises(Unauthorized) as caught:
        await office.client.with_options(retry=RetryPolicy.none()).dispatch(parcel.package, office.path)
    old, current = [signing.id for signing in office.sandbox.signings]
    note = f"package 'Lease': its signing is {current}; status 'draft'; abandoned drafts: {old}"
    assert caught.value.__notes__ == [note]
    for _ in range(2):
        (result,) = await office.dispatch_many(parcel)
        assert (result.error, result.abandoned) == (None, (old,))


@pytest.mark.parametrize("step", ["documents.upload", "recipients.add", "signings.send"])
async def test_draft_with_a_refused_step_is_kept_and_resumed(office: Office, step: str) -> None:
    parcel = parcel_of()
    for skipped in (0 if step == "signings.send" else 1, 0):
        office.fail(step, "expired-token", skip=skipped)
        (result,) = await office.dispatch_many(parcel)
        assert isinstance(result.error, Unauthorized)
        (draft,) = office.sandbox.signings
        assert any(draft.id in note and "'draft'" in note for note in result.error.__notes__)
    assert result.signing is not None
    assert (result.signing.id, result.signing.is_draft) == (draft.id, True)
    held = {document.id for document in office.sandbox.documents(draft.id)}
    assert {document.id for document in result.signing.documents} == held
    state = office.state()
    assert (state["status"], state["signing"], "401" in state["error"]) == ("draft", draft.id, True)
    assert None not in [*state["documents"].values(), *state["recipients"].values()]
    before = office.count()
    assert (await office.dispatch(parcel)).id == draft.id
    assert office.state()["error"] is None
    office.sent_well(parcel)
    # The draft is read before it is completed and before it is sent, and the signing after it was sent.
    missing = {"documents.upload": {step: 1, "recipients.add": 2}, "recipients.add": {step: 1}, "signings.send": {}}
    added = {**missing[step], "signings.send": 1, "signings.get": 3, "recipients.list": 2}
    assert office.count() - before == added


async def test_refusal_after_an_ambiguous_attempt_leaves_the_draft_ambiguous(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    parcel = parcel_of(1, 1)
    office.fail("documents.upload", "drop-before-commit")
    office.fail("documents.upload", "expired-token")
    with pytest.raises(Unauthorized):
        await office.dispatch(parcel)
    assert office.state()["documents"] == {"0": None}
    (draft,) = office.sandbox.signings
    signing = await office.dispatch(parcel)
    assert signing.id != draft.id
    (message,) = abandoned(caplog)
    assert message.endswith(f": draft {draft.id} was abandoned: the outcome of one of its steps is unknown")
    office.sent_well(parcel, spare=1)


async def test_changed_package_replaces_an_unsent_version_and_is_refused_after_the_sending(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    office.fail("recipients.add", "expired-token")
    with pytest.raises(Unauthorized):
        await office.dispatch(parcel_of(name="First", key="lease"))
    (draft,) = office.sandbox.signings
    second = parcel_of(name="Second", key="lease")
    signing = await office.dispatch(second)
    assert office.state()["abandoned"] == [draft.id]
    assert abandoned(caplog) == [f"package 'lease': draft {draft.id} was abandoned: the package was changed"]
    assert (await office.dispatch(second)).id == signing.id
    office.sent_well(second)
    third = office.client.dispatch_many([parcel_of(name="Third", key="lease").package], office.path)
    (result,) = [result async for result in third]
    assert result.signing == Signing(signing.id, is_draft=False)
    assert "key: 'lease' names another package, which was sent as signing" in str(result.error)
    assert isinstance(result.error, InvalidRequest)
    assert office.state()["error"] is None
