"""The states and transitions of the specification (section 3), rule by rule."""

from __future__ import annotations

import asyncio

import pytest

from signing_async.sandbox import Profile, Refused, Sandbox
from tests.sandbox.serving import API, Caller, begin_upload, multipart


async def state(call: Caller, signing_id: str) -> tuple[bool, bool, bool]:
    """Return is_draft, is_completed, and whether cancelled_at is set."""
    body = await call.ok("GET", f"{API}/signings/{signing_id}")
    return body["is_draft"], body["is_completed"], body["cancelled_at"] is not None


async def cannot_be_sent(call: Caller, signing_id: str, why: str) -> None:
    """Assert that sending is refused and changes nothing."""
    before = call.sandbox.signing(signing_id)
    status, body = await call("POST", f"{API}/signings/{signing_id}/send")
    assert (status, body["code"]) == (400, "cannot_be_sent")
    assert why in body["message"]
    assert call.sandbox.signing(signing_id) == before


async def test_only_a_draft_with_a_document_and_a_recipient_can_be_sent(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_id, other = await call.draft(), await call.draft()
    await call.recipient(other)
    for one in (signing_id, other):
        await cannot_be_sent(call, one, "no document")
    await call.upload(signing_id)
    await cannot_be_sent(call, signing_id, "no recipient")
    sent, _, _ = await call.sent()
    await cannot_be_sent(call, sent, "sent")
    await signing_sandbox.complete(sent)
    await cannot_be_sent(call, sent, "completed")
    await signing_sandbox.cancel(other)
    await cannot_be_sent(call, other, "cancelled")
    assert len(signing_sandbox.notifications) == 1


async def test_one_of_many_concurrent_sends_succeeds_and_invites_the_recipients(call: Caller) -> None:
    signing_id = await call.draft()
    await call.upload(signing_id)
    people = [await call.recipient(signing_id) for _ in range(3)]
    responses = await asyncio.gather(*(call("POST", f"{API}/signings/{signing_id}/send") for _ in range(8)))
    assert sorted(status for status, _ in responses) == [200] + [400] * 7
    assert call.sandbox.signing(signing_id).times_sent == 1
    assert await state(call, signing_id) == (False, False, False)
    assert [(n.kind, n.recipient_id) for n in call.sandbox.notifications] == [("invitation", p) for p in people]


async def test_last_signature_completes_the_signing_and_seals_its_documents(call: Caller) -> None:
    signing_id = await call.draft()
    first, _ = [(await call.upload(signing_id))[1]["id"] for _ in range(2)]
    person = await call.recipient(signing_id)
    await call.ok("POST", f"{API}/signings/{signing_id}/send")
    documents = (await call.ok("GET", f"{API}/signings/{signing_id}"))["documents"]
    assert [("signed_file_path" in document, document["completed_at"]) for document in documents] == [(False, None)] * 2
    path = f"{API}/signings/{signing_id}/documents/{first}/download-signed"
    assert (await call("GET", path))[0] == 404
    await call.sandbox.sign(person)
    assert await state(call, signing_id) == (False, True, False)
    documents = (await call.ok("GET", f"{API}/signings/{signing_id}"))["documents"]
    assert documents[0]["signed_file_path"] == path
    for document in documents:
        assert document["completed_at"] is not None
        assert (await call("GET", document["signed_file_path"]))[0] == 200


async def test_nothing_is_added_or_deleted_once_not_editable(call: Caller, signing_sandbox: Sandbox) -> None:
    (sent, _, _), (completed, _, _), cancelled = await call.sent(), await call.sent(), await call.draft()
    await signing_sandbox.complete(completed)
    await signing_sandbox.cancel(cancelled)
    for signing_id, count in ((sent, 1), (completed, 1), (cancelled, 0)):
        path = f"{API}/signings/{signing_id}"
        added = await call("POST", f"{path}/recipients", json={"email": "a@b.example"})
        for status, body in (await call.upload(signing_id), added, await call("DELETE", path)):
            assert (status, body["code"]) == (400, "not_editable")
        assert len(signing_sandbox.documents(signing_id)) == len(signing_sandbox.recipients(signing_id)) == count


async def test_updated_at_changes_with_every_change_of_the_signing(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_id = await call.draft()
    seen = [signing_sandbox.signing(signing_id).updated_at]
    for change in ("upload", "recipient", "send", "complete"):
        signing_sandbox.clock.advance(seconds=5)
        if change == "send":
            await call.ok("POST", f"{API}/signings/{signing_id}/send")
        else:
            await getattr(signing_sandbox if change == "complete" else call, change)(signing_id)
        seen.append(signing_sandbox.signing(signing_id).updated_at)
    assert seen == sorted(set(seen))


async def test_nothing_is_added_by_an_upload_in_flight(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_id = await call.draft()
    await call.upload(signing_id)
    await call.recipient(signing_id)
    body = multipart("form-data; name=selected_file; filename=late.pdf")["data"]
    reader, writer = await begin_upload(call.sandbox, signing_id, body[:100], len(body))
    await call.ok("POST", f"{API}/signings/{signing_id}/send")
    writer.write(body[100:])
    response = await reader.readuntil(b"\r\n")
    writer.close()
    assert b" 400 " in response
    assert len(signing_sandbox.documents(signing_id)) == 1
    assert len(list(signing_sandbox.service.incoming().path.parent.iterdir())) == 1


async def test_reminder_skips_finished_recipients_and_respects_the_14_days(call: Caller) -> None:
    signing_id, _, people = await call.sent(recipients=2)
    await call.sandbox.sign(people[0])
    call.sandbox.clock.advance(days=13, hours=23)
    for person in people:
        await call.ok("POST", f"{API}/signings/{signing_id}/recipients/{person}/remind")
    call.sandbox.clock.advance(hours=1)
    refusal = await call.refusal("POST", f"{API}/signings/{signing_id}/recipients/{people[1]}/remind")
    assert refusal == (400, "invitation_expired")
    assert [n.recipient_id for n in call.sandbox.notifications if n.kind == "reminder"] == [people[1]]
    assert [recipient.reminders for recipient in call.sandbox.recipients(signing_id)] == [0, 1]


@pytest.mark.signing_sandbox(profile=Profile(remind_expired="renew", invitation_days=3, remind_finished="refuse"))
async def test_reminder_renews_an_expired_invitation_and_refuses_others_if_the_profile_says_so(call: Caller) -> None:
    signing_id, _, people = await call.sent(recipients=3, signing_order="sequential")
    await call.sandbox.sign(people[0])
    call.sandbox.clock.advance(days=3)
    with pytest.raises(Refused, match="expired"):
        await call.sandbox.sign(people[1])
    for person, expected in zip(people, (400, 200, 400), strict=True):
        status, _ = await call("POST", f"{API}/signings/{signing_id}/recipients/{person}/remind")
        assert status == expected
    assert (await call.sandbox.sign(people[1])).state == "sent"


async def test_draft_and_cancelled_signings_allow_no_reminder_signature_or_completion(call: Caller) -> None:
    signing_id = await call.draft()
    person = await call.recipient(signing_id)
    for words in ("draft", "cancelled"):
        refusal = await call.refusal("POST", f"{API}/signings/{signing_id}/recipients/{person}/remind")
        assert refusal == (400, "cannot_be_reminded")
        for act, target in (("sign", person), ("decline", person), ("complete", signing_id)):
            with pytest.raises(Refused, match=words):
                await getattr(call.sandbox, act)(target)
        if words == "draft":
            await call.sandbox.cancel(signing_id)


async def test_draft_and_sent_signings_can_be_cancelled_and_completed_ones_cannot(call: Caller) -> None:
    draft, (sent, _, _), (done, _, _) = await call.draft(), await call.sent(), await call.sent()
    await call.sandbox.cancel(draft)
    assert await state(call, draft) == (False, False, True)
    assert (await call.ok("POST", f"{API}/signings/{sent}/cancel", json={"reason": "sold"}))["cancelled_at"]
    await call.sandbox.complete(done)
    for signing_id, why in ((draft, "cancelled"), (sent, "cancelled"), (done, "completed")):
        with pytest.raises(Refused, match=why):
            await call.sandbox.cancel(signing_id)
        assert await call.refusal("POST", f"{API}/signings/{signing_id}/cancel") == (400, "cannot_be_cancelled")


async def test_sequential_signing_invites_one_recipient_after_another(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_id = await call.draft(signing_order="sequential")
    await call.upload(signing_id)
    third, first, second = [await call.recipient(signing_id, order=order) for order in (7, 1, 3)]
    await call.ok("POST", f"{API}/signings/{signing_id}/send")
    for early in (second, third):
        with pytest.raises(Refused, match="turn"):
            await signing_sandbox.sign(early)
    for person in (first, second, third):
        await signing_sandbox.sign(person)
        with pytest.raises(Refused):
            await signing_sandbox.sign(person)
    assert [n.recipient_id for n in signing_sandbox.notifications] == [first, second, third]
    assert signing_sandbox.signing(signing_id).is_completed


async def test_concurrent_signatures_count_once_each_and_complete_the_signing_once(call: Caller) -> None:
    signing_id, document_id, people = await call.sent(recipients=4)
    clicks = [call.sandbox.sign(person) for person in people for _ in range(2)]
    results = await asyncio.gather(*clicks, return_exceptions=True)
    assert [isinstance(result, Refused) for result in results] == [False, True] * 4
    assert call.sandbox.signing(signing_id).is_completed
    kinds = [event.type for event in call.sandbox.webhooks.events()]
    assert (kinds.count("recipient.signed"), kinds.count("signing.completed")) == (4, 1)
    assert (await call("GET", f"{API}/signings/{signing_id}/documents/{document_id}/download-signed"))[0] == 200


async def test_failed_or_cancelled_sealing_leaves_no_sealed_file(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_id = await call.draft()
    documents = [(await call.upload(signing_id))[1]["id"] for _ in range(2)]
    person = await call.recipient(signing_id)
    await call.ok("POST", f"{API}/signings/{signing_id}/send")
    second = signing_sandbox.service.document_path(documents[1])
    before, intact = sorted(second.parent.iterdir()), second.read_bytes()
    second.write_bytes(b"damaged after the first one was sealed")
    with pytest.raises(Refused, match="damaged"):
        await signing_sandbox.sign(person)
    assert sorted(second.parent.iterdir()) == before
    second.write_bytes(intact)
    signature = asyncio.create_task(signing_sandbox.sign(person))
    await asyncio.sleep(0)
    await signing_sandbox.cancel(signing_id)
    with pytest.raises(Refused, match="cancelled"):
        await signature
    assert sorted(second.parent.iterdir()) == before
    assert await state(call, signing_id) == (False, False, True)


@pytest.mark.signing_sandbox(profile=Profile(decline_effect="nothing", expiry_blocks_signing=False))
async def test_declining_invites_the_next_recipient_and_nothing_expires_if_the_profile_says_so(call: Caller) -> None:
    signing_id, _, (first, second, third) = await call.sent(recipients=3, signing_order="sequential")
    await call.sandbox.decline(first)
    with pytest.raises(Refused, match="finished"):
        await call.sandbox.decline(first)
    assert [n.recipient_id for n in call.sandbox.notifications] == [first, second]
    call.sandbox.clock.advance(days=100)
    assert (await call.sandbox.complete(signing_id)).state == "sent"
    assert [n.recipient_id for n in call.sandbox.notifications] == [first, second, third]
    assert [r.completed_at is not None for r in call.sandbox.recipients(signing_id)] == [False, True, True]


async def test_draft_is_deleted_with_its_documents_and_recipients(call: Caller, signing_sandbox: Sandbox) -> None:
    kept, signing_id = await call.draft(), await call.draft()
    await call.upload(signing_id)
    await call.recipient(signing_id)
    assert await call("DELETE", f"{API}/signings/{signing_id}") == (204, b"")
    for method in ("GET", "DELETE"):
        assert (await call(method, f"{API}/signings/{signing_id}"))[0] == 404
    assert [signing.id for signing in signing_sandbox.signings] == [kept]
    assert (signing_sandbox.documents(), signing_sandbox.recipients()) == ([], [])
