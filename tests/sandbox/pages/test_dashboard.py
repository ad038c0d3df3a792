"""The dashboard: signings, search, paging, the clock."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE
from urllib.parse import urlencode

import pytest

from signing_async.sandbox.pages import dashboard, site
from tests.sandbox.browsing import Page, Visitor
from tests.sandbox.pages.checks import check_document, full
from tests.sandbox.serving import API, Caller


async def test_dashboard_shows_signings_deliveries_requests_endpoints_faults_and_the_clock(
    visitor: Visitor, call: Caller, receiver: str
) -> None:
    await full(call, receiver)
    page = await visitor.get("/sandbox")
    rows = page.main.find("section", aria_labelledby="signings")
    states = [row.every("td")[0].text for row in rows.every("tr")[1:]]
    assert states == ["Draft", "Draft", "Completed", "Cancelled", "Sent", "Sent"]
    assert "and 2 more" in rows.text
    assert "contract.pdf" in rows.text
    for state in ("Declined", "Signed", "Not invited yet", "Invited", "Draft"):
        assert f"Anna Berg {state}" in rows.text
    assert "Draft none none" in rows.text
    for words in (f"{receiver}/ok", "503", "retry_after=3", "more", "probability 50%", "404",
                  f"GET {API}/signings/none", "Real time", "Delivered", "Retrying", "HTTP status 500"):  # fmt: skip
        assert words in page.main.text, words
    assert "A page of the sandbox only" in page.main.text


async def test_signings_are_counted_by_state(visitor: Visitor, call: Caller) -> None:
    await call.draft()
    await call.draft()
    await call.sent()
    assert "2 draft · 1 sent" in (await visitor.get("/sandbox")).main.text


async def test_commands_of_an_empty_dashboard_create_a_signing(visitor: Visitor) -> None:
    page = await visitor.get("/sandbox")
    check_document(page)
    commands = page.main.find("pre").raw
    process = await asyncio.create_subprocess_exec("sh", "-c", commands, stdout=PIPE, stderr=PIPE)
    async with asyncio.timeout(30):
        output, _ = await process.communicate()
    [signing] = visitor.sandbox.signings
    assert signing.id in output.decode()


async def test_notice_of_the_url_is_never_echoed(visitor: Visitor) -> None:
    assert not (await visitor.get("/sandbox?done=%3Cb%3Eowned")).main.every("b")
    assert "owned" not in (await visitor.get("/sandbox?done=owned")).text


async def test_older_signings_are_on_the_following_pages(visitor: Visitor, call: Caller) -> None:
    for number in range(dashboard.PAGE + 2):
        await call.draft(name=f"Signing number {number}")
    first = await visitor.get("/sandbox")
    assert f"Page 1 of 2, {dashboard.PAGE + 2} signings" in first.main.text
    assert titles(first)[0] == "Signing number 21"
    second = await visitor.get(link(first, "Older"))
    assert titles(second) == ["Signing number 1", "Signing number 0"]
    assert link(first, "Oldest") == link(first, "Older")
    assert titles(await visitor.get(link(second, "Newest"))) == titles(first)
    assert titles(await visitor.get(link(second, "Newer"))) == titles(first)
    assert titles(await visitor.get("/sandbox?page=x")) == titles(first)
    assert "No signing matches." in (await visitor.get("/sandbox?page=3")).main.text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("lease", ["Lease of Åsögatan"]),
        ("ÅSÖ", ["Lease of Åsögatan"]),
        ("100%", ["100% agreed"]),
        ("%", ["100% agreed"]),
        ("_", []),
        ("annex.pdf", ["100% agreed"]),
        ("björn lind", ["Lease of Åsögatan"]),
        ("bjorn@example.com", ["Lease of Åsögatan"]),
        ("nothing of the kind", []),
        ("", ["Other", "100% agreed", "Lease of Åsögatan"]),
    ],
)
async def test_search_finds_signings_by_name_document_recipient_or_address(
    visitor: Visitor, call: Caller, text: str, found: list[str]
) -> None:
    lease = await call.draft(name="Lease of Åsögatan")
    await call.recipient(lease, first_name="Björn", last_name="Lind", email="bjorn@example.com")
    await call.upload(await call.draft(name="100% agreed"), filename="Annex.pdf")
    await call.draft(name="Other")
    page = await visitor.get(f"/sandbox?{urlencode({'search': text})}")
    check_document(page)
    assert titles(page) == found
    assert page.main.find("input", name="search").attributes["value"] == text


async def test_search_finds_signings_by_id_and_state_and_keeps_both_on_further_pages(
    visitor: Visitor, call: Caller
) -> None:
    for number in range(dashboard.PAGE + 1):
        await call.draft(name=f"Draft {number}")
    signing_id, _, [person] = await call.sent(name="Sent")
    assert titles(await visitor.get(f"/sandbox?search={signing_id}")) == ["Sent"]
    assert titles(await visitor.get(f"/sandbox?search={person}")) == ["Sent"]
    assert titles(await visitor.get("/sandbox?state=sent")) == ["Sent"]
    page = await visitor.get("/sandbox?search=Draft&state=draft")
    assert titles(await visitor.get(link(page, "Older"))) == ["Draft 0"]
    assert len(titles(await visitor.get("/sandbox?state=nonsense"))) == dashboard.PAGE


async def test_script_refreshes_parts_without_forms(visitor: Visitor, call: Caller) -> None:
    await call.sent()
    page = await visitor.get("/sandbox", headers={"Accept": "text/html", "X-Refresh": "1"})
    parts = [element for element in page.main.every() if element.attributes.get("class") == "live"]
    assert {part.attributes["id"] for part in parts} == {
        "signings-list", "latest-requests", "latest-deliveries", "time",
    }  # fmt: skip
    typed = [control for part in parts for control in part.every("input") if control.attributes["type"] != "hidden"]
    assert not typed
    assert not [record for record in call.sandbox.requests if record.path == "/sandbox"]
    await call("GET", f"{API}/me", headers={"X-Refresh": "1"})
    assert call.sandbox.requests[-1].operation == "me"


def titles(page: Page) -> list[str]:
    """Return the names of the listed signings."""
    return [
        a.text
        for a in page.main.every("a")
        if a.attributes.get("class") == "title" and "signings" in a.attributes["href"]
    ]


def link(page: Page, label: str) -> str:
    """Return where a link of the pager leads."""
    [found] = [a for a in page.main.find("nav", aria_label="Pages").every("a") if a.text == label]
    return found.attributes["href"]


async def test_clock_is_advanced_by_an_amount_or_a_usual_step(visitor: Visitor) -> None:
    page = await visitor.get("/sandbox")
    page = await visitor.send(page, "/sandbox/clock", press="Advance", amount=" 1,5 ", unit="hours")
    assert page.main.find("p", role="status").text == site.NOTICES["clock"]
    assert "1 hour 30 minutes ahead of real time" in page.main.text
    page = await visitor.send(page, "/sandbox/clock", press="+14 days")
    assert "14 days 1 hour ahead of real time" in page.main.text
    assert visitor.sandbox.clock.offset.total_seconds() == 14 * 86400 + 5400


@pytest.mark.parametrize("amount", ["", "-1", "x", "0", "nan", "999999999", "1e3"])
async def test_invalid_amount_does_not_advance_the_clock_and_stays_in_the_form(visitor: Visitor, amount: str) -> None:
    page = await visitor.get("/sandbox")
    page = await visitor.send(page, "/sandbox/clock", press="Advance", amount=amount, unit="days")
    assert page.status == 400
    check_document(page)
    assert page.main.find("input", id="amount-field").attributes["value"] == amount
    assert amount in page.main.find("p", id="amount-error").text
    assert visitor.sandbox.clock.offset.total_seconds() == 0


async def test_unknown_unit_is_refused(visitor: Visitor) -> None:
    page = await visitor.get("/sandbox")
    page = await visitor.send(page, "/sandbox/clock", press="Advance", amount="1", unit="weeks")
    assert page.status == 400
    assert page.main.find("p", id="unit-error").text == "Choose a unit."


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.5, "less than a second"), (86400, "1 day"), (7261, "2 hours 1 minute")]
)
def test_duration_has_its_two_largest_units(seconds: float, words: str) -> None:
    assert site.duration(seconds) == words
