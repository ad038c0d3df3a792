"""The inbox."""

from __future__ import annotations

import pytest

from signing_async.sandbox.pages import dashboard
from tests.sandbox.browsing import Visitor
from tests.sandbox.serving import API, Caller


async def test_inbox_shows_messages_newest_first_in_the_signings_language(visitor: Visitor, call: Caller) -> None:
    english, _, (anna,) = await call.sent(name="A contract", message="Please")
    await call.ok("POST", f"{API}/signings/{english}/recipients/{anna}/remind")
    _, _, (first, _) = await call.sent(2, name="Ett avtal", language="SV", signing_order="sequential")
    page = await visitor.get("/sandbox/inbox")
    mails = page.main.every("article")
    assert [mail.find("h2").text for mail in mails] == [
        "Vänligen signera: Ett avtal",
        "Reminder: please sign: A contract",
        "Please sign: A contract",
    ]
    assert [mail.attributes["lang"] for mail in mails] == ["sv", "en", "en"]
    assert "Sandbox User bjuder in dig att signera." in mails[0].text
    assert "Sandbox User reminds you" in mails[1].text
    assert "Anna Berg <p0@example.com>" in mails[1].text
    assert "The invitation is valid until" in mails[1].text
    assert [mail.find("a").attributes["href"] for mail in mails] == [f"/sandbox/sign/{r}" for r in (first, anna, anna)]
    await call.sandbox.sign(anna)
    mails = (await visitor.get("/sandbox/inbox")).main.every("article")
    assert "Signed" in mails[1].text
    assert "valid until" not in mails[1].text


async def test_inbox_is_filtered_by_address_and_bounded(
    visitor: Visitor, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    await call.sent(3)
    page = await visitor.get("/sandbox/inbox")
    options = [option.text for option in page.main.find("select", name="to").every("option")]
    assert options == ["Everybody", "p0@example.com", "p1@example.com", "p2@example.com"]
    page = await visitor.get("/sandbox/inbox?to=p1%40example.com")
    [mail] = page.main.every("article")
    assert "p1@example.com" in mail.text
    [chosen] = [o for o in page.main.every("option") if "selected" in o.attributes]
    assert chosen.text == "p1@example.com"
    page = await visitor.get("/sandbox/inbox?to=nobody%40example.com")
    assert "Nothing was sent to nobody@example.com." in page.main.text
    monkeypatch.setattr(dashboard, "MESSAGES", 2)
    page = await visitor.get("/sandbox/inbox")
    assert len(page.main.every("article")) == 2
    assert "1 older messages are not shown." in page.main.text
