"""The dashboard, one signing, the inbox and the request log."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE

import aiohttp
import pytest

from signing_async.sandbox import Profile
from tests.sandbox.browsing import Page, Visitor
from tests.sandbox.pages.checks import CALLBACK, check_document
from tests.sandbox.receiving import Receiver
from tests.sandbox.serving import API, TOKEN, Caller, exchange


def titles(page: Page) -> list[str]:
    """Return the names of the listed signings."""
    links = [a for a in page.main.every("a") if a.attributes.get("class") == "title"]
    return [a.text for a in links if "signings" in a.attributes["href"]]


def link(page: Page, label: str) -> str:
    """Return where a link of the pager leads."""
    [found] = [a for a in page.main.find("nav", aria_label="Pages").every("a") if a.text == label]
    return found.attributes["href"]


async def test_commands_of_an_empty_dashboard_create_a_signing(visitor: Visitor) -> None:
    commands = (await visitor.get("/sandbox")).main.find("pre").raw
    process = await asyncio.create_subprocess_exec("sh", "-c", commands, stdout=PIPE, stderr=PIPE)
    async with asyncio.timeout(30):
        output, _ = await process.communicate()
    [signing] = visitor.sandbox.signings
    assert signing.id in output.decode()


async def test_older_signings_and_deliveries_are_on_the_following_pages(
    visitor: Visitor, call: Caller, receiver: Receiver
) -> None:
    call.sandbox.webhooks.register(receiver.url)
    for number in range(26):
        await call.draft(name=f"Draft {number}")
    first = await visitor.get("/sandbox?search=Draft&state=draft")
    assert "Page 1 of 2, 26 signings" in first.main.text
    assert first.main.find("input", name="search").attributes["value"] == "Draft"
    assert titles(await visitor.get("/sandbox?state=sent")) == []
    assert (len(titles(first)), titles(first)[0]) == (20, "Draft 25")
    second = await visitor.get(link(first, "Older"))
    assert titles(second) == [f"Draft {number}" for number in (5, 4, 3, 2, 1, 0)]
    assert titles(await visitor.get(link(second, "Newer"))) == titles(first)
    strange = await visitor.get("/sandbox?page=x&state=nonsense&done=%3Cb%3Eowned")
    assert titles(strange) == titles(first)
    assert "owned" not in strange.html
    assert "No signing matches." in (await visitor.get("/sandbox?page=3")).main.text
    first, second = [await visitor.get(f"/sandbox/webhooks?page={number}") for number in (1, 2)]
    assert "Page 1 of 2, 26 deliveries" in first.main.text
    oldest, *_, newest = call.sandbox.webhooks.deliveries()
    assert (newest.id in first.html, oldest.id in first.html) == (True, False)
    assert (newest.id in second.html, oldest.id in second.html) == (False, True)


async def test_clock_is_advanced_by_an_amount_or_a_usual_step_and_not_by_another(visitor: Visitor) -> None:
    page = await visitor.get("/sandbox")
    page = await visitor.send(page, "/sandbox/clock", press="Advance", amount="0.5", unit="seconds")
    assert "less than a second ahead" in page.main.text
    page = await visitor.send(page, "/sandbox/clock", press="Advance", amount=" 1,5 ", unit="hours")
    assert page.notice == "The clock was advanced."
    assert "1 hour 30 minutes ahead of real time" in page.main.text
    page = await visitor.send(page, "/sandbox/clock", press="+14 days")
    assert "14 days 1 hour ahead of real time" in page.main.text
    for amount, unit, wrong in (("-1", "days", "amount"), ("0", "days", "amount"), ("1", "weeks", "unit")):
        refused = await visitor.send(page, "/sandbox/clock", press="Advance", amount=amount, unit=unit)
        check_document(refused)
        assert "Nothing was done." in refused.refusal
        assert refused.main.find("input", id="amount-field").attributes["value"] == amount
        assert refused.main.find("p", id=f"{wrong}-error")
    assert visitor.sandbox.clock.offset.total_seconds() == 14 * 86400 + 5400.5


# one signing


BUTTONS = {
    "Complete": ("completed", "All recipients have signed; the documents are sealed.", "/sandbox"),
    "Cancel": ("cancelled", "The signing was cancelled.", "/sandbox/signings/{id}"),
}


@pytest.mark.signing_sandbox(profile=Profile(decline_effect="nothing"))
async def test_complete_and_cancel_buttons_work_once_and_say_what_they_did(visitor: Visitor, call: Caller) -> None:
    for label, (state, notice, shown) in BUTTONS.items():
        signing_id, _, _ = await call.sent(2, signing_order="sequential")
        address, shown = f"/sandbox/signings/{signing_id}", shown.format(id=signing_id)
        page = await visitor.get(shown)
        done = await visitor.send(page, f"{address}/{label.lower()}")
        assert done.path == f"{shown}?done={state}"
        assert done.notice == notice
        assert visitor.sandbox.signing(signing_id).state == state
        assert not [b for b in done.main.every("button") if b.text.startswith(("Complete", "Cancel"))]
        late = await visitor.send(page, f"{address}/{label.lower()}")
        assert state in late.refusal
    signing_id, _, (first, _) = await call.sent(2)
    await call.sandbox.decline(first)
    page = await visitor.get(f"/sandbox/signings/{signing_id}")
    done = await visitor.send(page, f"/sandbox/signings/{signing_id}/complete")
    assert "a recipient declined" in done.refusal


async def test_page_of_a_signing_shows_fields_documents_recipients_and_events(visitor: Visitor, call: Caller) -> None:
    page = await visitor.get(f"/sandbox/signings/{await call.draft()}")
    assert "No documents yet." in page.main.text
    assert "No recipients yet." in page.main.text
    signing_id, document_id, people = await call.sent(2, message="Two\nlines", signing_order="sequential")
    for _ in range(2):
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


# the inbox


async def test_inbox_shows_all_messages_or_those_to_one_address_in_the_signings_language(
    visitor: Visitor, call: Caller
) -> None:
    english, _, (anna,) = await call.sent(name="A contract", message="Please")
    await call.ok("POST", f"{API}/signings/{english}/recipients/{anna}/remind")
    _, _, (first, _) = await call.sent(2, name="Ett avtal", language="SV", signing_order="sequential")
    mails = (await visitor.get("/sandbox/inbox")).main.every("article")
    assert [mail.find("h2").text for mail in mails] == [
        "Vänligen signera: Ett avtal",
        "Reminder: please sign: A contract",
        "Please sign: A contract",
    ]
    assert [mail.attributes["lang"] for mail in mails] == ["sv", "en", "en"]
    assert "Sandbox User bjuder in dig att signera." in mails[0].text
    for words in ("Sandbox User reminds you", "Anna Berg <p0@example.com>", "The invitation is valid until"):
        assert words in mails[1].text
    assert [mail.find("a").attributes["href"] for mail in mails] == [f"/sandbox/sign/{r}" for r in (first, anna, anna)]
    await call.sandbox.sign(anna)
    page = await visitor.get("/sandbox/inbox?to=p0%40example.com")
    mail = page.main.every("article")[1]
    assert "Signed" in mail.text
    assert "valid until" not in mail.text
    options = page.main.find("select", name="to").every("option")
    assert [o.text for o in options] == ["Everybody", "p0@example.com"]
    assert [o.text for o in options if "selected" in o.attributes] == ["p0@example.com"]
    page = await visitor.get("/sandbox/inbox?to=nobody%40example.com")
    assert "Nothing was sent to nobody@example.com." in page.main.text


# the request log


async def details(visitor: Visitor, number: int = -1) -> Page:
    """Open one of the requests to the API."""
    asked = [record for record in visitor.sandbox.requests if record.path.startswith("/api/")]
    page = await visitor.get(f"/sandbox/requests/{asked[number].id}")
    assert page.status == 200
    check_document(page)
    return page


def block(page: Page, label: str) -> str:
    """Return the text of one box."""
    return page.main.find("pre", aria_label=label).raw


async def test_log_lists_api_requests_with_status_and_fault_and_on_demand_those_for_pages(
    visitor: Visitor, call: Caller
) -> None:
    call.sandbox.faults.add("signings.create", "drop-before-commit")
    with pytest.raises(aiohttp.ClientError):
        await call("POST", f"{API}/signings", json={})
    call.sandbox.faults.add("signings.list", "500")
    await call("GET", f"{API}/signings")
    await call("GET", f"{API}/me")
    page = await visitor.get("/sandbox/requests")
    rows = [row.text for row in page.main.every("tr")[1:]]
    for row, words in zip(rows, ("/me me 200", "500 fault: 500", "no response fault: drop-before-commit"), strict=True):
        assert words in row
    everything = await visitor.get("/sandbox/requests?show=all")
    assert "GET /sandbox/requests – in progress" in everything.main.find("table").text
    assert everything.main.find("a", aria_current="true").text == "All, including pages"
    for _ in range(18):
        await call("GET", f"{API}/me")
    page = await visitor.get("/sandbox/requests?page=2")
    assert "Page 2 of 2, 21 requests" in page.main.text
    assert "drop-before-commit" in page.main.find("table").text
    assert "show=all&amp;page=2" in (await visitor.get("/sandbox/requests?show=all")).html


async def test_request_opens_to_its_headers_and_bodies_or_a_description_of_its_file(
    visitor: Visitor, call: Caller
) -> None:
    call.sandbox.faults.add("signings.create", "slow", seconds=0)
    signing_id = await call.draft(name="Lease", message="<b>Åsa</b>")
    page = await details(visitor)
    assert page.main.find("h1").text == f"POST {API}/signings"
    assert '"message": "<b>Åsa</b>"' in block(page, "Request body")
    assert f'"id": "{signing_id}"' in block(page, "Response body")
    assert "Authorization: [redacted]" in block(page, "Request headers")
    assert "Content-Type: application/json; charset=utf-8" in block(page, "Response headers")
    for words in ("201", "signings.create", "slow", " ms"):
        assert words in page.main.text, words
    await call("GET", f"{API}/nowhere?code=not-to-be-shown&x=1&state=def")
    page = await details(visitor)
    assert f"GET {API}/nowhere?code=[redacted]&x=1&state=[redacted]" in page.main.text
    assert "not-to-be-shown" not in page.html
    await call("GET", f"{API}/me")
    shown = (await details(visitor)).main.text
    assert "No body." in shown
    assert "The body was not read" not in shown
    call.sandbox.faults.add("signings.create", "drop-after-commit")
    with pytest.raises(aiohttp.ClientError):
        await call("POST", f"{API}/signings", json={})
    assert "closed the connection without a response" in (await details(visitor)).main.text
    assert (await visitor.get("/sandbox/requests/req_x")).status == 404
    signing_id, document_id, _ = await call.sent()
    assert "The body was not read" in (await details(visitor)).main.text
    body = block(await details(visitor, -3), "Request body")
    assert body == "[multipart/form-data: selected_file 'contract.pdf', 1500 bytes]"
    await call.sandbox.complete(signing_id)
    await call("GET", f"{API}/signings/{signing_id}/documents/{document_id}/download-signed")
    assert block(await details(visitor), "Response body") == "[a file of application/pdf]"


@pytest.mark.parametrize("kind", ["json", "data"])
async def test_secrets_of_requests_and_responses_are_redacted(visitor: Visitor, call: Caller, kind: str) -> None:
    app = call.sandbox.register_app(CALLBACK)
    fields = exchange(call.sandbox, app, redirect_uri=CALLBACK)
    token = await call.ok("POST", TOKEN, **{kind: fields})
    page = await details(visitor)
    secrets = (fields["client_secret"], fields["code"], token["access_token"], token["refresh_token"])
    assert not [secret for secret in secrets if secret in page.html]
    assert "[redacted]" in block(page, "Request body")
    assert block(page, "Response body").count("[redacted]") == 2
    assert app.client_id in page.main.text
    cut = b'{"client_secret": "abc\\"def", "code": 7, "x": [{"refresh_token": "unfinished'
    await call("POST", TOKEN, data=cut, headers={"Content-Type": "application/json"})
    shown = block(await details(visitor), "Request body")
    assert not [secret for secret in ("abc", "def", "7", "unfinished") if secret in shown]
