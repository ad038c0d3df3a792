"""All pages: sound documents, safe against injection and other sites."""

from __future__ import annotations

import re
from types import SimpleNamespace
from urllib.parse import urlencode

from tests.sandbox.browsing import Visitor
from tests.sandbox.pages.checks import CALLBACK, check_document, check_headers, consent, crawl
from tests.sandbox.receiving import Receiver
from tests.sandbox.serving import API, Caller, contents

HOSTILE = " ".join(
    (
        "<script>alert(1)</script></title></textarea><img src=x onerror=alert(1)>",
        """ "onmouseover="alert(1)' onfocus='alert(1) `&quot;&amp;&lt;""",
        "\u202eevil\u202c \u2066left\u2069 שלום",
        "{{7*7}} {sender} %s ${x} \\u003cscript\\u003e",
    )
)
"""Markup, quotes, characters that change the direction of text, and templates."""


def isolated(text: str) -> str:
    """Return the text in characters that keep its direction from the text around it."""
    return f"\u2068{text}\u2069"


async def test_every_page_of_a_new_sandbox_says_that_it_is_empty(visitor: Visitor) -> None:
    for path, words in {
        "/sandbox": "No signings yet.",
        "/sandbox/inbox": "No messages yet.",
        "/sandbox/webhooks": "No endpoints yet.",
        "/sandbox/requests": "No requests yet.",
        "/sandbox/faults": "None: everything works.",
        "/developer/my-apps": "No applications yet.",
    }.items():
        page = await visitor.get(path)
        check_document(page)
        assert words in page.main.text


async def full(call: Caller, receiver: Receiver) -> None:
    """Fill the sandbox with something for every page."""
    sandbox = call.sandbox
    sandbox.webhooks.register(f"{receiver.base}/ok")
    sandbox.webhooks.register(f"{receiver.base}/bad")
    sandbox.register_app(CALLBACK, "An app")
    sandbox.faults.add("signings.send", "503", times=2, retry_after=3, skip=500)
    sandbox.faults.add("*", "slow", times=None, probability=0.5, seconds=0)
    sandbox.rate_limit(1000)
    await call.sent()
    _, _, people = await call.sent(3, signing_order="sequential", language="SV", message="Hej!\nVälkommen")
    _, _, (declining,) = await call.sent()
    await sandbox.decline(declining)
    _, _, (only,) = await call.sent()
    await sandbox.sign(only)
    await sandbox.sign(people[0])
    await call.draft(name="Empty")
    many = await call.draft(name="Many")
    for number in range(6):
        await call.upload(many, filename=f"{number}.pdf")
    fields = {"phone": "+46 70 000 00 00", "personal_number": "19900101-0000"}
    await call.recipient(many, **fields, signing_method="sms")
    await call("GET", f"{API}/signings/none")
    await sandbox.webhooks.settled()


async def test_no_link_is_dead_every_page_is_accessible_and_every_form_needs_its_token(
    visitor: Visitor, call: Caller, receiver: Receiver
) -> None:
    await full(call, receiver)
    found = await crawl(visitor)
    assert len(found) > 40
    kinds = {re.sub(r"[0-9a-f]{8}-[-0-9a-f]{27}|req_[0-9a-f]+", "ID", path.partition("?")[0]) for path in found}
    assert {
        "/sandbox/signings/ID",
        "/sandbox/sign/ID",
        "/sandbox/webhooks/deliveries/ID",
        "/sandbox/requests/ID",
        "/sandbox/signings/ID/documents/ID/original.pdf",
        "/sandbox/signings/ID/documents/ID/sealed.pdf",
        "/oauth/authorize",
        "/sandbox/authority.pem",
    } <= kinds
    for path, page in found.items():
        assert page.status == 200, path
        if page.headers["content-type"].startswith("text/html"):
            check_document(page)
            check_headers(page)
    dashboard = found["/sandbox"].main
    rows = dashboard.find("section", aria_labelledby="signings")
    states = [row.every("td")[0].text for row in rows.every("tr")[1:]]
    in_rows = [button.attributes["class"] for cell in rows.every("td") for button in cell.every("button")]
    assert set(in_rows) == {"small plain"}
    assert states == ["Draft", "Draft", "Completed", "Cancelled", "Sent", "Sent"]
    for words in ("and 2 more", "contract.pdf", "Draft none none", "2 drafts · 2 sent · 1 completed · 1 cancelled"):
        assert words in rows.text
    for state in ("Declined", "Signed", "Not invited yet", "Invited", "Draft"):
        assert f"Anna Berg {state}" in rows.text
    for words in (f"{receiver.base}/ok", "503", "retry_after=3", "more", "probability 50%", "404",
                  f"GET {API}/signings/none", "Real time", "Delivered", "Retrying", "HTTP status 500"):  # fmt: skip
        assert words in dashboard.text, words
    assert "A page of the sandbox only" in dashboard.text
    forms = [form for page in found.values() for form in page.root.every("form")]
    actions = {form.attributes["action"] for form in forms if form.attributes["method"] == "post"}
    assert len({re.sub(r"[0-9a-f]{8}-[-0-9a-f]{27}", "ID", action).partition("?")[0] for action in actions}) == 13
    before = contents(call.sandbox), len(call.sandbox.faults.arranged)
    for action in actions:
        assert (await visitor.post(action, {"decision": "allow"})).status == 403, action
    assert (contents(call.sandbox), len(call.sandbox.faults.arranged)) == before


async def test_names_and_messages_are_shown_as_text_and_never_as_markup(visitor: Visitor, call: Caller) -> None:
    before: set[str] = set()
    for name in ("Plain", HOSTILE):
        call.sandbox.register_app(CALLBACK, name)
        call.sandbox.add_user(name, "other@x.example")
        signing_id = await call.draft(name=name, message=name)
        await call.upload(signing_id, filename=f"{name}.pdf")
        await call.recipient(signing_id, first_name=name, last_name=name, signing_method="sms", phone=name)
        await call.ok("POST", f"{API}/signings/{signing_id}/send")
        shown = await crawl(visitor)
        elements = {e.name for page in shown.values() for e in page.root.every()}
        before = before or elements
    assert elements == before
    for path, page in shown.items():
        if page.root.children:
            check_document(page)
            for title in page.root.every("title"):
                assert isolated(HOSTILE) in title.raw or HOSTILE not in title.raw, path
    for path in ("/sandbox", "/sandbox/inbox", "/developer/my-apps", f"/sandbox/signings/{signing_id}"):
        chosen = [e.raw for e in shown[path].root.every("bdi", "option")]
        assert any(HOSTILE in one for one in chosen), path
        for one in shown[path].main.every():
            own = "".join(child for child in one.children if isinstance(child, str))
            assert one.name == "bdi" or HOSTILE not in own.replace(isolated(HOSTILE), ""), path
    page = shown["/developer/my-apps"]
    page = await visitor.send(page, "/developer/my-apps", name=HOSTILE, redirect_uri=HOSTILE)
    check_document(page)
    assert page.main.find("input", name="name").attributes["value"] == HOSTILE
    assert page.main.find("input", name="redirect_uri").attributes["value"] == HOSTILE
    page = await visitor.get(f"/sandbox/inbox?{urlencode({'to': HOSTILE})}")
    assert HOSTILE in page.main.find("strong").raw
    check_document(await visitor.get(consent(SimpleNamespace(client_id="app_x", redirect_uri=HOSTILE), state=HOSTILE)))


async def test_error_is_a_page_for_browsers_and_json_for_programs(visitor: Visitor, call: Caller) -> None:
    assert (await visitor.get("/")).path == "/sandbox"
    for path in ("/sandbox/nowhere", "/nowhere", f"/sandbox/signings/{'0' * 8}", "/sandbox/sign/none",
                 "/sandbox/signings/a/documents/b/original.pdf", "/sandbox/webhooks/deliveries/none"):  # fmt: skip
        page = await visitor.get(path)
        assert page.status == 404
        check_document(page)
        check_headers(page)
        assert page.main.find("h1").text == "Not found"
    assert (await visitor.get("/sandbox/nowhere", headers={"Accept": "*/*"})).main
    for path in ("/nowhere", "/api/nowhere", "/api", "/sandbox/api/nowhere", f"{API}/signings/none"):
        accept = {"Accept": "application/json"} if path == "/nowhere" else {"Accept": "text/html"}
        assert await call.refusal("GET", path, headers=accept) == (404, "not_found")
    page = await visitor.request("DELETE", "/sandbox")
    assert (page.status, page.headers["allow"]) == (405, "GET, HEAD")
    assert "DELETE is not allowed here" in page.main.text
    check_document(page)


async def test_requests_of_other_sites_are_refused(visitor: Visitor) -> None:
    """A foreign Origin, a foreign Host, and a form without the page's token are refused."""
    page = await visitor.get("/sandbox")
    for path in ("/sandbox", "/developer/my-apps", "/sandbox/nowhere", "/oauth/authorize"):
        for host in ("evil.example", "["):
            refused = await visitor.get(path, headers={"Host": host})
            assert refused.status == 421
            assert "only to host names of this machine" in refused.main.text
    token = page.form("/sandbox/clock", "Advance").find("input", type="hidden").attributes["value"]
    fields = {"amount": "1", "unit": "days", "csrf_token": token}
    assert (await visitor.post("/sandbox/clock", fields, Origin="https://evil.example")).status == 403
    for wrong in ("", "0" * 64, "é"):
        refused = await visitor.post("/sandbox/clock", fields | {"csrf_token": wrong})
        assert refused.status == 403
        assert "not from a page of this sandbox" in refused.main.text
    visitor.session.cookie_jar.clear()  # the token of another browser
    assert (await visitor.post("/sandbox/clock", fields)).status == 403
    assert visitor.sandbox.clock.offset.total_seconds() == 0
