"""The dashboard, one signing, the inbox and the request log."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE
from urllib.parse import urlencode

import aiohttp
import pytest

from signing_async.sandbox import Profile
from tests.sandbox.browsing import Page, Visitor
from tests.sandbox.pages.checks import CALLBACK, check_document, full
from tests.sandbox.serving import API, Caller
from tests.sandbox.token_requests import exchange


def titles(page: Page) -> list[str]:
    """Return the names of the listed signings."""
    links = [a for a in page.main.every("a") if a.attributes.get("class") == "title"]
    return [a.text for a in links if "signings" in a.attributes["href"]]


def link(page: Page, label: str) -> str:
    """Return where a link of the pager leads."""
    [found] = [a for a in page.main.find("nav", aria_label="Pages").every("a") if a.text == label]
    return found.attributes["href"]


async def test_dashboard_shows_signings_deliveries_requests_endpoints_faults_and_the_clock(
    visitor: Visitor, call: Caller, receiver: str
) -> None:
    await full(call, receiver)
    page = await visitor.get("/sandbox")
    rows = page.main.find("section", aria_labelledby="signings")
    states = [row.every("td")[0].text for row in rows.every("tr")[1:]]
    assert states == ["Draft", "Draft", "Completed", "Cancelled", "Sent", "Sent"]
    for words in ("and 2 more", "contract.pdf", "Draft none none", "2 draft · 2 sent · 1 completed · 1 cancelled"):
        assert words in rows.text
    for state in ("Declined", "Signed", "Not invited yet", "Invited", "Draft"):
        assert f"Anna Berg {state}" in rows.text
    for words in (f"{receiver}/ok", "503", "retry_after=3", "more", "probability 50%", "404",
                  f"GET {API}/signings/none", "Real time", "Delivered", "Retrying", "HTTP status 500"):  # fmt: skip
        assert words in page.main.text, words
    assert "A page of the sandbox only" in page.main.text


async def test_commands_of_an_empty_dashboard_create_a_signing(visitor: Visitor) -> None:
    commands = (await visitor.get("/sandbox")).main.find("pre").raw
    process = await asyncio.create_subprocess_exec("sh", "-c", commands, stdout=PIPE, stderr=PIPE)
    async with asyncio.timeout(30):
        output, _ = await process.communicate()
    [signing] = visitor.sandbox.signings
    assert signing.id in output.decode()


async def test_older_signings_are_on_the_following_pages(visitor: Visitor, call: Caller) -> None:
    for number in range(22):
        await call.draft(name=f"Draft {number}")
    first = await visitor.get("/sandbox?search=Draft&state=draft")
    assert "Page 1 of 2, 22 signings" in first.main.text
    assert (len(titles(first)), titles(first)[0]) == (20, "Draft 21")
    second = await visitor.get(link(first, "Older"))
    assert titles(second) == ["Draft 1", "Draft 0"]
    assert link(first, "Oldest") == link(first, "Older")
    assert titles(await visitor.get(link(second, "Newest"))) == titles(first)
    assert titles(await visitor.get(link(second, "Newer"))) == titles(first)
    strange = await visitor.get("/sandbox?page=x&state=nonsense&done=%3Cb%3Eowned")
    assert titles(strange) == titles(first)
    assert "owned" not in strange.html
    assert "No signing matches." in (await visitor.get("/sandbox?page=3")).main.text


async def test_search_finds_signings_by_name_document_recipient_address_or_id(visitor: Visitor, call: Caller) -> None:
    lease = await call.draft(name="Lease of Åsögatan")
    person = await call.recipient(lease, first_name="Björn", last_name="Lind", email="bjorn@example.com")
    await call.upload(await call.draft(name="100% agreed"), filename="Annex.pdf")
    for text, found in (
        *((text, ["Lease of Åsögatan"]) for text in ("ÅSÖ", "björn lind", "bjorn@example.com", lease, person)),
        ("%", ["100% agreed"]),
        ("annex.pdf", ["100% agreed"]),
        ("_", []),
        ("", ["100% agreed", "Lease of Åsögatan"]),
    ):
        page = await visitor.get(f"/sandbox?{urlencode({'search': text})}")
        check_document(page)
        assert titles(page) == found, text
        assert page.main.find("input", name="search").attributes["value"] == text
    assert titles(await visitor.get("/sandbox?state=sent")) == []


async def test_clock_is_advanced_by_an_amount_or_a_usual_step(visitor: Visitor) -> None:
    page = await visitor.get("/sandbox")
    page = await visitor.send(page, "/sandbox/clock", press="Advance", amount="0.5", unit="seconds")
    assert "less than a second ahead" in page.main.text
    page = await visitor.send(page, "/sandbox/clock", press="Advance", amount=" 1,5 ", unit="hours")
    assert page.main.find("p", role="status").text == "The clock was advanced."
    assert "1 hour 30 minutes ahead of real time" in page.main.text
    page = await visitor.send(page, "/sandbox/clock", press="+14 days")
    assert "14 days 1 hour ahead of real time" in page.main.text
    assert visitor.sandbox.clock.offset.total_seconds() == 14 * 86400 + 5400.5


@pytest.mark.parametrize(
    ("amount", "unit", "wrong"), [("-1", "days", "amount"), ("0", "days", "amount"), ("1", "weeks", "unit")]
)
async def test_invalid_step_of_the_clock_stays_in_the_form(
    visitor: Visitor, amount: str, unit: str, wrong: str
) -> None:
    page = await visitor.send(
        await visitor.get("/sandbox"), "/sandbox/clock", press="Advance", amount=amount, unit=unit
    )
    assert page.status == 400
    check_document(page)
    assert page.main.find("input", id="amount-field").attributes["value"] == amount
    assert page.main.find("p", id=f"{wrong}-error")
    assert visitor.sandbox.clock.offset.total_seconds() == 0


# one signing


@pytest.mark.parametrize(
    ("label", "state", "notice", "shown"),
    [
        ("Complete", "completed", "All recipients have signed; the documents are sealed.", "/sandbox"),
        ("Cancel", "cancelled", "The signing was cancelled.", "/sandbox/signings/{id}"),
    ],
)
async def test_complete_and_cancel_buttons_work_once_and_say_what_they_did(
    visitor: Visitor, call: Caller, label: str, state: str, notice: str, shown: str
) -> None:
    signing_id, _, _ = await call.sent(2, signing_order="sequential")
    address, shown = f"/sandbox/signings/{signing_id}", shown.format(id=signing_id)
    page = await visitor.get(shown)
    done = await visitor.send(page, f"{address}/{label.lower()}")
    assert done.path == f"{shown}?done={state}"
    assert done.main.find("p", role="status").text == notice
    assert visitor.sandbox.signing(signing_id).state == state
    assert not [b for b in done.main.every("button") if b.text.startswith(("Complete", "Cancel"))]
    late = await visitor.send(page, f"{address}/{label.lower()}")
    assert late.status == 400
    assert state in late.main.find("p", role="alert").text


@pytest.mark.signing_sandbox(profile=Profile(decline_effect="nothing"))
async def test_signing_that_somebody_declined_cannot_be_completed(visitor: Visitor, call: Caller) -> None:
    signing_id, _, (first, _) = await call.sent(2)
    await call.sandbox.decline(first)
    page = await visitor.get(f"/sandbox/signings/{signing_id}")
    done = await visitor.send(page, f"/sandbox/signings/{signing_id}/complete")
    assert done.status == 400
    assert "a recipient declined" in done.main.find("p", role="alert").text


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


async def test_inbox_shows_messages_newest_first_in_the_signings_language(visitor: Visitor, call: Caller) -> None:
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
    mails = (await visitor.get("/sandbox/inbox")).main.every("article")
    assert "Signed" in mails[1].text
    assert "valid until" not in mails[1].text


async def test_inbox_is_filtered_by_address(visitor: Visitor, call: Caller) -> None:
    await call.sent(3)
    page = await visitor.get("/sandbox/inbox?to=p1%40example.com")
    [mail] = page.main.every("article")
    assert "p1@example.com" in mail.text
    options = page.main.find("select", name="to").every("option")
    assert [o.text for o in options] == ["Everybody", "p0@example.com", "p1@example.com", "p2@example.com"]
    assert [o.text for o in options if "selected" in o.attributes] == ["p1@example.com"]
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


async def test_request_opens_to_its_headers_and_bodies(visitor: Visitor, call: Caller) -> None:
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
    await call("GET", f"{API}/nowhere?code=abc&x=1&state=def")
    page = await details(visitor)
    assert f"GET {API}/nowhere?code=[redacted]&x=1&state=[redacted]" in page.main.text
    assert "abc" not in page.html
    await call("GET", f"{API}/me")
    assert "The body was not read" in (await details(visitor)).main.text
    call.sandbox.faults.add("signings.create", "drop-after-commit")
    with pytest.raises(aiohttp.ClientError):
        await call("POST", f"{API}/signings", json={})
    assert "closed the connection without a response" in (await details(visitor)).main.text
    assert (await visitor.get("/sandbox/requests/req_x")).status == 404


async def test_request_of_a_file_describes_the_file(visitor: Visitor, call: Caller) -> None:
    signing_id, document_id, _ = await call.sent()
    body = block(await details(visitor, 1), "Request body")
    assert body == "[multipart/form-data: selected_file 'contract.pdf', 1500 bytes]"
    await call.sandbox.complete(signing_id)
    await call("GET", f"{API}/signings/{signing_id}/documents/{document_id}/download-signed")
    assert block(await details(visitor), "Response body") == "[a file of application/pdf]"


@pytest.mark.parametrize("kind", ["json", "data"])
async def test_secrets_of_requests_and_responses_are_redacted(visitor: Visitor, call: Caller, kind: str) -> None:
    app = call.sandbox.register_app(CALLBACK)
    fields = exchange(call.sandbox, app, redirect_uri=CALLBACK)
    token = await call.ok("POST", "/api/oauth/token", **{kind: fields})
    page = await details(visitor)
    secrets = (fields["client_secret"], fields["code"], token["access_token"], token["refresh_token"])
    assert not [secret for secret in secrets if secret in page.html]
    assert "[redacted]" in block(page, "Request body")
    assert block(page, "Response body").count("[redacted]") == 2
    assert app.client_id in page.main.text
    cut = b'{"client_secret": "abc\\"def", "code": 7, "x": [{"refresh_token": "unfinished'
    await call("POST", "/api/oauth/token", data=cut, headers={"Content-Type": "application/json"})
    shown = block(await details(visitor), "Request body")
    assert not [secret for secret in ("abc", "def", "7", "unfinished") if secret in shown]
