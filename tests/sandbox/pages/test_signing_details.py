"""A signing's page for developers."""

from __future__ import annotations

import pytest

from signing_async.sandbox import Profile
from signing_async.sandbox.pages.site import NOTICES
from tests.sandbox.browsing import Visitor
from tests.sandbox.serving import API, Caller


@pytest.mark.parametrize("back", ["list", "page"])
@pytest.mark.parametrize(("label", "state"), [("Complete", "completed"), ("Cancel", "cancelled")])
async def test_complete_and_cancel_buttons_work_once_and_say_what_they_did(
    visitor: Visitor, call: Caller, label: str, state: str, back: str
) -> None:
    signing_id, _, _ = await call.sent(2, signing_order="sequential")
    address = f"/sandbox/signings/{signing_id}"
    page = await visitor.get("/sandbox" if back == "list" else address)
    done = await visitor.send(page, f"{address}/{label.lower()}")
    assert done.path == ("/sandbox" if back == "list" else address) + f"?done={state}"
    assert done.main.find("p", role="status").text == NOTICES[state]
    assert visitor.sandbox.signing(signing_id).state == state
    assert not [b for b in done.main.every("button") if b.text.startswith((label, "Complete", "Cancel"))]
    late = await visitor.send(page, f"{address}/{label.lower()}")
    assert late.status == 400
    assert state in late.main.find("p", role="alert").text
    assert f"?done={state}" not in late.path


@pytest.mark.signing_sandbox(profile=Profile(decline_effect="nothing"))
async def test_signing_that_somebody_declined_cannot_be_completed(visitor: Visitor, call: Caller) -> None:
    signing_id, _, (first, _) = await call.sent(2)
    await call.sandbox.decline(first)
    page = await visitor.get(f"/sandbox/signings/{signing_id}")
    done = await visitor.send(page, f"/sandbox/signings/{signing_id}/complete")
    assert done.status == 400
    assert "a recipient declined" in done.main.find("p", role="alert").text


async def test_page_shows_fields_documents_recipients_events_and_requests(visitor: Visitor, call: Caller) -> None:
    signing_id, document_id, people = await call.sent(2, message="Two\nlines", signing_order="sequential")
    await call.ok("POST", f"{API}/signings/{signing_id}/recipients/{people[0]}/remind")
    await call.ok("POST", f"{API}/signings/{signing_id}/recipients/{people[0]}/remind")
    page = await visitor.get(f"/sandbox/signings/{signing_id}")
    for words in (signing_id, document_id, *people, "sequential", "EN", "Sandbox User", "1,500 bytes", "signing.sent",
                  "2 reminders", "valid until", "tenant sandbox"):  # fmt: skip
        assert words in page.main.text, words
    assert page.main.find("p", class_="said").raw == "Two\nlines"
    assert "Sealed" not in page.main.text
    await call.sandbox.complete(signing_id)
    page = await visitor.get(f"/sandbox/signings/{signing_id}")
    assert "Sealed" in page.main.text
    assert "recipient.signed" in page.main.text


async def test_empty_draft_says_what_it_needs_before_it_can_be_sent(visitor: Visitor, call: Caller) -> None:
    page = await visitor.get(f"/sandbox/signings/{await call.draft()}")
    assert "No documents yet." in page.main.text
    assert "No recipients yet." in page.main.text
    assert [b.text.split()[0] for b in page.main.every("button")] == ["Cancel"]
