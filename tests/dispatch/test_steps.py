"""Each step of a package: what is requested, journaled, resumed and abandoned."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import ANY

import pytest

from signing_async import (
    InvalidRequest,
    RetryPolicy,
    Signing,
    SigningClient,
    SigningState,
    Unauthorized,
)
from signing_async.sandbox import Sandbox
from tests.dispatch.deaths import MemoryJournal
from tests.dispatch.observing import abandoned, count, parcel_of, sent_well, state_of


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
    note = f"package 'Lease': its signing is {current}; status 'draft'; abandoned drafts: {old}"
    assert caught.value.__notes__ == [note]
    for _ in range(2):
        (result,) = [result async for result in client.dispatch_many([parcel.package], path)]
        assert (result.error, result.abandoned) == (None, (old,))


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
    # The draft is read before it is completed and before it is sent, and the signing after it was sent.
    added = {"recipients.add": 1} if step == "recipients.add" else {}
    assert count(sandbox) - before == {**added, "signings.send": 1, "signings.get": 3, "recipients.list": 2}


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
    assert result.signing == Signing(signing.id, is_draft=False)
    assert "key: 'lease' names another package, which was sent as signing" in str(result.error)
    assert isinstance(result.error, InvalidRequest)
    assert state_of(path)["error"] is None


# The package itself
