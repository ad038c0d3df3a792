"""The sandbox's pages over HTTP: what people read on them, and what their forms do."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

import signing_async.sandbox.pages as pages
from signing_async.sandbox import Profile, Sandbox, sealing
from signing_async.sandbox.pages import dashboard, inbox
from signing_async.sandbox.pages.markup import isolated, render, tag
from signing_async.sandbox.pages.site import NOTICES
from signing_async.sandbox.pages.texts import ENGLISH, LANGUAGES, SWEDISH, Words
from signing_async.sandbox.records import App
from tests import needs as needs_of_tests
from tests.pdfs import make_pdf
from tests.sandbox.browsing import Page, Visitor
from tests.sandbox.serving import API, Caller

CALLBACK = "http://127.0.0.1:9/callback"
HOSTILE = {
    "markup": "<script>alert(1)</script></title></textarea><img src=x onerror=alert(1)>",
    "quotes": """ "onmouseover="alert(1)' onfocus='alert(1) `&quot;&amp;&lt;""".strip(),
    "bidi": "\u202eevil\u202c \u2066left\u2069 שלום",
    "long": "Verylongword" * 16,
    "emoji": "👩‍👩‍👧‍👦 😀 é",
    "template": "{{7*7}} {sender} %s ${x} \\u003cscript\\u003e",
}


@pytest_asyncio.fixture
async def visitor(signing_sandbox: Sandbox) -> AsyncIterator[Visitor]:
    """Somebody with a browser."""
    jar = aiohttp.CookieJar(unsafe=True)  # the sandbox's host is an address, which has cookies in browsers too
    async with aiohttp.ClientSession(signing_sandbox.base_url, cookie_jar=jar) as session:
        yield Visitor(signing_sandbox, session)


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[str]:
    """A webhook receiver that takes everything at /ok, and nothing at /bad."""

    async def ok(_: web.Request) -> web.Response:
        return web.Response(status=202)

    async def bad(_: web.Request) -> web.Response:
        return web.Response(status=500)

    app = web.Application()
    app.add_routes([web.post("/ok", ok), web.post("/bad", bad)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def consent(app: App, **changes: str) -> str:
    """The address that an application sends its user to."""
    query = {"client_id": app.client_id, "redirect_uri": app.redirect_uri, "response_type": "code", "state": "s1"}
    return f"/oauth/authorize?{urlencode(query | changes)}"


async def full(call: Caller, receiver: str) -> None:
    """Fill the sandbox with something of everything."""
    sandbox = call.sandbox
    sandbox.webhooks.register(f"{receiver}/ok")
    sandbox.webhooks.register(f"{receiver}/bad")
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


def addresses(page: Page) -> set[str]:
    """Where the page's links, forms, styles and documents are."""
    named = {"a": "href", "form": "action", "object": "data", "link": "href"}
    return {e.attributes[named[e.name]] for e in page.root.every(*named) if e.attributes[named[e.name]][:1] == "/"}


async def crawl(visitor: Visitor) -> dict[str, Page]:
    """Every page that links lead to, from the dashboard on."""
    found: dict[str, Page] = {}
    waiting = ["/sandbox"]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = page = await visitor.get(path)
        forms = {form.attributes["action"] for form in page.root.every("form") if form.attributes["method"] == "post"}
        waiting += [link.partition("#")[0] for link in addresses(page) - forms if link not in found]
    return found


def check_document(page: Page) -> None:
    """What every page owes to those who cannot see it, and to its readers."""
    root = page.root
    assert root.find("html").attributes["lang"] in {"en", "sv"}
    assert root.find("title").text.endswith("Signing sandbox")
    assert "This is no legal signing service" in root.find("header").text
    for landmark in ("header", "main", "footer"):
        assert root.find(landmark)
    assert root.find("a", class_="skip").attributes["href"] == "#main"
    levels = [int(heading.name[1]) for heading in root.every("h1", "h2", "h3")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    ids = [element.attributes["id"] for element in root.every() if "id" in element.attributes]
    assert len(ids) == len(set(ids)), sorted(ids)
    labelled = {label.attributes.get("for") for label in root.every("label")}
    for control in root.every("input", "select"):
        inside_label = control.parent is not None and control.parent.name == "label"
        hidden = control.attributes.get("type") == "hidden"
        assert hidden or inside_label or control.attributes["id"] in labelled, control.attributes
    for element in root.every():
        for name in ("aria-describedby", "aria-labelledby", "for"):
            assert set(element.attributes.get(name, "").split()) <= set(ids), element.attributes
        assert not [name for name in element.attributes if name.startswith("on") or name == "style"]
    for clickable in root.every("a", "button", "summary"):
        assert clickable.text, clickable.attributes
    for table in root.every("table"):
        assert table.find("caption").text
    for named in root.every("object", "nav"):
        assert named.attributes["aria-label"]
    assert not root.every("script", "iframe", "style", "img")


def check_headers(page: Page) -> None:
    """What keeps other sites out."""
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "script-src" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["x-frame-options"] == "DENY"
    assert page.headers["cache-control"] == "no-store"
    assert page.headers["referrer-policy"] == "same-origin"


# all pages


async def test_every_empty_page_is_sound(visitor: Visitor) -> None:
    """A fresh sandbox has sound pages that say what there will be."""
    found = await crawl(visitor)
    assert {"/sandbox", "/sandbox/inbox", "/sandbox/webhooks", "/sandbox/requests", "/sandbox/faults"} <= found.keys()
    assert "/developer/my-apps" in found
    for path, page in found.items():
        assert page.status == 200, path
        if page.headers["content-type"].startswith("text/html"):
            check_document(page)
            check_headers(page)
    for path, words in {
        "/sandbox": "No signing yet.",
        "/sandbox/inbox": "No message yet.",
        "/sandbox/webhooks": "No endpoint yet.",
        "/sandbox/requests": "No request yet.",
        "/sandbox/faults": "None: everything works.",
        "/developer/my-apps": "No application yet.",
    }.items():
        assert words in found[path].main.text


async def test_every_full_page_is_sound(visitor: Visitor, call: Caller, receiver: str) -> None:
    """With something of everything no link is dead, and each page stands up to the checks."""
    await full(call, receiver)
    found = await crawl(visitor)
    assert len(found) > 40
    kinds = {re.sub(r"[0-9a-f]{8}-[-0-9a-f]{27}", "ID", path.partition("?")[0]) for path in found}
    assert {
        "/sandbox/signings/ID",
        "/sandbox/sign/ID",
        "/sandbox/webhooks/deliveries/ID",
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


@pytest.mark.parametrize("kind", HOSTILE)
async def test_what_people_type_is_text(visitor: Visitor, call: Caller, receiver: str, kind: str) -> None:
    """Whatever names, messages and files are called, it is shown as it is and is never markup."""
    text = HOSTILE[kind]
    before: set[str] = set()
    for name in ("Plain", text):
        call.sandbox.register_app(CALLBACK, name)
        call.sandbox.add_user(name, f"{kind}@x.example")
        signing_id = await call.draft(name=name, message=name)
        await call.upload(signing_id, filename="plain.pdf" if name == "Plain" else f"{text}.pdf")
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
                assert isolated(text) in title.raw or text not in title.raw, path
    for path in ("/sandbox", "/sandbox/inbox", "/developer/my-apps", f"/sandbox/signings/{signing_id}"):
        chosen = [e.raw for e in shown[path].root.every("bdi", "option")]
        assert any(text in one for one in chosen), path
        for one in shown[path].main.every():
            own = "".join(child for child in one.children if isinstance(child, str))
            assert one.name == "bdi" or text not in own.replace(isolated(text), ""), path


async def test_what_people_type_wrong_comes_back_as_text(visitor: Visitor) -> None:
    """Input that is refused is put back into its field, and into the message, without harm."""
    for text in HOSTILE.values():
        page = await visitor.get("/developer/my-apps")
        page = await visitor.send(page, "/developer/my-apps", name=text, redirect_uri=text)
        assert page.status == 400
        check_document(page)
        assert page.main.find("input", name="name").attributes["value"] == text
        assert page.main.find("input", name="redirect_uri").attributes["value"] == text
        page = await visitor.get(f"/sandbox/inbox?{urlencode({'to': text})}")
        check_document(page)
        assert text in page.main.find("strong").raw
        page = await visitor.get(consent(App("app_x", "", text, "", 0), state=text))
        assert page.status == 400
        check_document(page)


def test_half_characters_do_not_break_a_page() -> None:
    """Half a surrogate pair, which cannot be sent, is replaced."""
    assert render(tag("p", "a\ud800b", title="\udfff")).encode() == b'<p title="?">a?b</p>'


def test_elements() -> None:
    """Attributes and children of all kinds."""
    made = tag("input", "no child", type="text", required=True, hidden=False, value=None, data_label='"', class_="a")
    assert render(made) == '<input type="text" required data-label="&quot;" class="a">'
    assert render(tag("p", "a<", 1, None, [tag("b", "&"), ("x",)])) == "<p>a&lt;1<b>&amp;</b>x</p>"


async def test_the_root_leads_to_the_dashboard(visitor: Visitor) -> None:
    """Who types in the address alone sees the dashboard."""
    page = await visitor.get("/")
    assert page.path == "/sandbox"
    assert page.main.find("h1").text == "Dashboard"


async def test_unknown_pages(visitor: Visitor, call: Caller) -> None:
    """A browser gets a page that says so; a program gets the profile's error; the API never a page."""
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
        status, body = await call("GET", path, headers=accept)
        assert (status, body["code"]) == (404, "not_found")


async def test_wrong_methods(visitor: Visitor) -> None:
    """A page says which methods it knows."""
    page = await visitor.request("DELETE", "/sandbox")
    assert page.status == 405
    assert page.headers["allow"] == "GET, HEAD"
    assert "DELETE is not allowed here" in page.main.text
    check_document(page)


async def test_other_sites_are_kept_out(visitor: Visitor) -> None:
    """Neither a foreign origin nor a foreign name of this address gets anything; no form works without its token."""
    page = await visitor.get("/sandbox")
    foreign = {"Host": "evil.example"}
    for path in ("/sandbox", "/developer/my-apps", "/sandbox/nowhere", "/oauth/authorize"):
        refused = await visitor.get(path, headers=foreign)
        assert refused.status == 421
        assert "names of this machine only" in refused.main.text
    token = page.form("/sandbox/clock", "Advance").find("input", type="hidden").attributes["value"]
    fields = {"amount": "1", "unit": "days", "csrf_token": token}
    assert (await visitor.post("/sandbox/clock", fields, Origin="https://evil.example")).status == 403
    for token in ("", "0" * 64, "é"):
        refused = await visitor.post("/sandbox/clock", fields | {"csrf_token": token})
        assert refused.status == 403
        assert "did not come from a page of this sandbox" in refused.main.text
    visitor.session.cookie_jar.clear()
    assert (await visitor.post("/sandbox/clock", fields)).status == 403
    assert visitor.sandbox.clock.offset.total_seconds() == 0


async def test_every_form_is_protected(visitor: Visitor, call: Caller, receiver: str) -> None:
    """No form of any page does anything without its token."""
    await full(call, receiver)
    found = await crawl(visitor)
    forms = [form for page in found.values() for form in page.root.every("form")]
    actions = {form.attributes["action"] for form in forms if form.attributes["method"] == "post"}
    assert len({re.sub(r"[0-9a-f]{8}-[-0-9a-f]{27}", "ID", action).partition("?")[0] for action in actions}) == 13
    before = _rows(call.sandbox), len(call.sandbox.faults.arranged)
    for action in actions:
        assert (await visitor.post(action, {"decision": "allow"})).status == 403, action
    assert (_rows(call.sandbox), len(call.sandbox.faults.arranged)) == before


def _rows(sandbox: Sandbox) -> dict[str, list[Any]]:
    """All that the sandbox holds, except deliveries, which are retried meanwhile."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.deserialize(sandbox.snapshot().database)
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        kept = [name for name in tables if name not in ("deliveries", "attempts", "counters")]
        assert len(kept) == len(tables) - 3
        return {name: database.execute(f'SELECT * FROM "{name}"').fetchall() for name in kept}


async def test_the_style_is_readable() -> None:
    """Text has a contrast of 4.5 and edges of 3 to whatever is behind them, in light and dark."""
    css = Path(pages.__file__).with_name("style.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", css, re.S)
    schemes = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in blocks]
    assert len(schemes) == 2
    texts = [(ink, ground, 4.5) for ink in ("ink", "quiet", "accent-ink") for ground in ("ground", "paper", "raised")]
    texts += [(tone, f"{tone}-soft", 4.5) for tone in ("good", "busy", "warn", "bad")]
    texts += [("bad", "paper", 4.5), ("on-accent", "accent", 4.5), ("band-ink", "band", 4.5), ("edge", "paper", 3)]
    texts += [("accent-ink", "accent-soft", 4.5), ("edge", "ground", 3), ("ink", "accent-soft", 4.5)]
    for scheme in schemes:
        for ink, ground, least in texts:
            assert contrast(scheme[ink], scheme[ground]) >= least, (ink, ground)


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of two colours."""
    lights = []
    for colour in (one, other):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        lights.append(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    return (max(lights) + 0.05) / (min(lights) + 0.05)


async def test_the_style_is_kept_by_browsers(visitor: Visitor) -> None:
    """The address of the style carries its version, and may be kept for good."""
    page = await visitor.get("/sandbox")
    address = page.root.find("link", rel="stylesheet").attributes["href"]
    assert re.fullmatch(r"/sandbox/style\.css\?v=[0-9a-f]{12}", address)
    style = await visitor.get(address)
    assert style.headers["content-type"] == "text/css; charset=utf-8"
    assert "immutable" in style.headers["cache-control"]


# my apps


async def test_registering_an_app_shows_its_secret_once(visitor: Visitor) -> None:
    """The id and the secret are shown, they work, and the secret is never seen again."""
    page = await visitor.get("/developer/my-apps")
    page = await visitor.send(page, "/developer/my-apps", name="My tool", redirect_uri=CALLBACK)
    assert page.status == 200
    check_document(page)
    client_id, secret = page.main.find("code", id="client-id").text, page.main.find("code", id="client-secret").text
    assert page.html.count(secret) == 1
    assert "shown this once" in page.main.text
    again = await visitor.get("/developer/my-apps")
    assert client_id in again.main.text
    assert not [path for path, seen in (await crawl(visitor)).items() if secret in seen.html]
    [app] = visitor.sandbox.apps
    code = visitor.sandbox.authorize(app)
    token = visitor.sandbox.accounts.token(
        {"grant_type": "authorization_code", "client_id": client_id, "client_secret": secret,
         "redirect_uri": CALLBACK, "code": code}
    )  # fmt: skip
    assert token["access_token"]


async def test_a_wrong_app_is_told_field_by_field(visitor: Visitor) -> None:
    """Each wrong field has its message, tied to it, and keeps what was typed."""
    page = await visitor.get("/developer/my-apps")
    page = await visitor.send(page, "/developer/my-apps", name=" ", redirect_uri="http://example.com/cb")
    assert page.status == 400
    address = page.main.find("input", name="redirect_uri")
    assert address.attributes["value"] == "http://example.com/cb"
    assert address.attributes["aria-invalid"] == "true"
    said = page.main.find("p", id="redirect_uri-error")
    assert said.attributes["id"] in address.attributes["aria-describedby"].split()
    assert "'http://example.com/cb' must begin with https://" in said.text
    assert "1 to 200 characters" in page.main.find("p", id="name-error").text
    links = [link.attributes["href"] for link in page.main.find("p", role="alert").every("a")]
    assert links == ["#name-field", "#redirect_uri-field"]
    assert not visitor.sandbox.apps


async def test_an_app_belongs_to_the_chosen_user(visitor: Visitor) -> None:
    """Where there are several users, one is chosen; the default one unless somebody else is."""
    other = visitor.sandbox.add_user("Other", "other@x.example", "a-tenant")
    page = await visitor.get("/developer/my-apps")
    await visitor.send(page, "/developer/my-apps", name="Mine", redirect_uri=CALLBACK)
    await visitor.send(page, "/developer/my-apps", name="Theirs", redirect_uri=CALLBACK, user=other.id)
    owners = {app.name: app.user_id for app in visitor.sandbox.apps}
    assert owners == {"Mine": visitor.sandbox.accounts.default_user().id, "Theirs": other.id}
    page = await visitor.send(page, "/developer/my-apps", name="Whose", redirect_uri=CALLBACK, user="nobody")
    assert page.status == 400
    assert "There is no such user" in page.main.find("p", role="alert").text


# consent


async def test_the_consent_page_says_who_asks_for_whom(visitor: Visitor) -> None:
    """The application, where it sends the browser, and the user are named."""
    app = visitor.sandbox.register_app(CALLBACK, "My tool")
    page = await visitor.get(consent(app))
    check_document(page)
    check_headers(page)
    assert page.main.find("h1").text == "Allow My tool?"
    assert "Sandbox User (user@sandbox.example)" in page.main.text
    assert CALLBACK in page.main.text
    assert app.client_id in page.main.text
    assert "form-action" not in page.headers["content-security-policy"]  # the application may send its user on
    assert "form-action 'self'" in (await visitor.get("/sandbox")).headers["content-security-policy"]


async def test_agreeing_gives_a_code(visitor: Visitor) -> None:
    """The browser goes to the application with a code that works and the state as it came."""
    app = visitor.sandbox.register_app(f"{CALLBACK}?kept=1", "My tool")
    address = consent(app, state="a b&c=é")
    page = await visitor.get(address)
    done = await visitor.send(page, address, press="Agree", follow=False)
    assert done.status == 302
    target = urlsplit(done.headers["location"])
    query = parse_qs(target.query)
    assert f"{target.scheme}://{target.netloc}{target.path}" == CALLBACK
    assert (query["kept"], query["state"]) == (["1"], ["a b&c=é"])
    token = visitor.sandbox.accounts.token(
        {"grant_type": "authorization_code", "client_id": app.client_id, "client_secret": app.client_secret,
         "redirect_uri": app.redirect_uri, "code": query["code"][0]}
    )  # fmt: skip
    user = visitor.sandbox.accounts.authenticate(f"Bearer {token['access_token']}")
    assert user == visitor.sandbox.accounts.default_user()


async def test_declining_gives_an_error(visitor: Visitor) -> None:
    """The browser goes to the application with access_denied and the state, and without a code."""
    app = visitor.sandbox.register_app(CALLBACK)
    page = await visitor.get(consent(app))
    done = await visitor.send(page, consent(app), press="Decline", follow=False)
    assert done.headers["location"] == f"{CALLBACK}?error=access_denied&state=s1"


async def test_consent_is_given_by_the_chosen_user(visitor: Visitor) -> None:
    """With several users the page asks who is there, and the token is theirs."""
    app = visitor.sandbox.register_app(CALLBACK)
    other = visitor.sandbox.add_user("Other", "other@x.example", "a-tenant")
    page = await visitor.get(consent(app))
    [option] = [o for o in page.main.every("option") if "selected" in o.attributes]
    assert option.attributes["value"] == visitor.sandbox.accounts.default_user().id
    done = await visitor.send(page, consent(app), user=other.id, follow=False)
    code = parse_qs(urlsplit(done.headers["location"]).query)["code"][0]
    token = visitor.sandbox.accounts.token(
        {"grant_type": "authorization_code", "client_id": app.client_id, "client_secret": app.client_secret,
         "redirect_uri": CALLBACK, "code": code}
    )  # fmt: skip
    assert visitor.sandbox.accounts.authenticate(f"Bearer {token['access_token']}") == other
    refused = await visitor.send(page, consent(app), user="nobody")
    assert refused.status == 400
    assert "There is no such user" in refused.main.find("p", role="alert").text


async def test_no_decision_is_asked_again(visitor: Visitor) -> None:
    """A form without a decision is shown once more, with what is missing."""
    app = visitor.sandbox.register_app(CALLBACK)
    page = await visitor.get(consent(app))
    token = page.main.find("input", name="csrf_token").attributes["value"]
    again = await visitor.post(consent(app), {"csrf_token": token})
    assert again.status == 400
    assert "Choose whether to agree or to decline." in again.main.find("p", role="alert").text


@pytest.mark.parametrize("changes", [{"client_id": "app_x"}, {"redirect_uri": "http://127.0.0.1:9/elsewhere"}])
async def test_an_untrusted_application_is_not_redirected_to(visitor: Visitor, changes: dict[str, str]) -> None:
    """An unknown application or address gets no redirect, before and after the decision; the page shows what came."""
    app = visitor.sandbox.register_app(CALLBACK)
    page = await visitor.get(consent(app))
    fields = {"csrf_token": page.main.find("input", name="csrf_token").attributes["value"], "decision": "allow"}
    for answer in (await visitor.get(consent(app, **changes)), await visitor.post(consent(app, **changes), fields)):
        assert answer.status == 400
        check_document(answer)
        assert answer.main.find("h1").text == "This application cannot be let in"
        assert next(iter(changes.values())) in answer.main.text
    assert "response_type missing" in (await visitor.get("/oauth/authorize?state=s1")).main.text


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_another_response_type_is_the_applications_error(visitor: Visitor, method: str) -> None:
    """Only code is offered; the application is told."""
    app = visitor.sandbox.register_app(CALLBACK)
    page = await visitor.get(consent(app))
    token = page.main.find("input", name="csrf_token").attributes["value"]
    data = {"csrf_token": token, "decision": "allow"} if method == "POST" else None
    address = consent(app, response_type="token")
    answer = await visitor.request(method, address, data=data, allow_redirects=False, headers={})
    assert answer.headers["location"] == f"{CALLBACK}?error=unsupported_response_type&state=s1"


# the dashboard


async def test_the_dashboard_shows_everything(visitor: Visitor, call: Caller, receiver: str) -> None:
    """Signings with states, documents and recipients; deliveries, requests, endpoints, faults, clock."""
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
    for words in (f"{receiver}/ok", "503", "retry_after=3", "more", "by 50% chance", "404",
                  f"GET {API}/signings/none", "Real time", "Delivered", "Pending", "HTTP status 500"):  # fmt: skip
        assert words in page.main.text, words
    assert "The sandbox's own page" in page.main.text


@pytest.mark.parametrize("back", ["list", "page"])
@pytest.mark.parametrize(("label", "state"), [("Complete", "completed"), ("Cancel", "cancelled")])
async def test_completing_and_cancelling(visitor: Visitor, call: Caller, label: str, state: str, back: str) -> None:
    """One button signs for everybody, another one cancels; then both are gone and the page says what happened."""
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
async def test_completing_in_vain_is_told(visitor: Visitor, call: Caller) -> None:
    """Where somebody declined and that cancels nothing, nobody can complete the signing."""
    signing_id, _, (first, _) = await call.sent(2)
    await call.sandbox.decline(first)
    page = await visitor.get(f"/sandbox/signings/{signing_id}")
    done = await visitor.send(page, f"/sandbox/signings/{signing_id}/complete")
    assert done.status == 400
    assert "somebody declined" in done.main.find("p", role="alert").text


async def test_a_notice_is_one_of_ours(visitor: Visitor) -> None:
    """What an address says that was done is not repeated."""
    assert not (await visitor.get("/sandbox?done=%3Cb%3Eowned")).main.every("b")
    assert "owned" not in (await visitor.get("/sandbox?done=owned")).text


async def test_older_signings_are_a_page_further(visitor: Visitor, call: Caller) -> None:
    """The list goes back page by page, and a made-up place is the beginning."""
    for number in range(dashboard.PAGE + 2):
        await call.draft(name=f"Signing number {number}")
    first = await visitor.get("/sandbox")
    assert "Signing number 21" in first.main.text
    assert "Signing number 1 " not in first.main.text
    [older] = [a for a in first.main.every("a") if a.text == "Older signings"]
    second = await visitor.get(older.attributes["href"])
    titles = [a.text for a in second.main.every("a") if a.attributes.get("class") == "title"]
    assert titles == ["Signing number 1", "Signing number 0"]
    assert "Newest" in second.main.text
    assert "Signing number 21" in (await visitor.get("/sandbox?before=x")).main.text


async def test_the_clock_is_moved_on(visitor: Visitor) -> None:
    """An amount and a unit, or a button for the usual steps; the page says how far ahead it is."""
    page = await visitor.get("/sandbox")
    page = await visitor.send(page, "/sandbox/clock", press="Advance", amount=" 1,5 ", unit="hours")
    assert page.main.find("p", role="status").text == NOTICES["clock"]
    assert "1 hour 30 minutes ahead of real time" in page.main.text
    page = await visitor.send(page, "/sandbox/clock", press="+14 days")
    assert "14 days 1 hour ahead of real time" in page.main.text
    assert visitor.sandbox.clock.offset.total_seconds() == 14 * 86400 + 5400


@pytest.mark.parametrize("amount", ["", "-1", "x", "0", "nan", "999999999", "1e3"])
async def test_the_clock_is_not_moved_by_nonsense(visitor: Visitor, amount: str) -> None:
    """What is no positive amount is refused with the input kept."""
    page = await visitor.get("/sandbox")
    page = await visitor.send(page, "/sandbox/clock", press="Advance", amount=amount, unit="days")
    assert page.status == 400
    check_document(page)
    assert page.main.find("input", id="amount-field").attributes["value"] == amount
    assert amount in page.main.find("p", id="amount-error").text
    assert visitor.sandbox.clock.offset.total_seconds() == 0


async def test_the_clock_knows_its_units(visitor: Visitor) -> None:
    """An unknown unit is refused."""
    page = await visitor.get("/sandbox")
    page = await visitor.send(page, "/sandbox/clock", press="Advance", amount="1", unit="weeks")
    assert page.status == 400
    assert page.main.find("p", id="unit-error").text == "Choose a unit."


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.5, "less than a second"), (86400, "1 day"), (7261, "2 hours 1 minute")]
)
def test_durations(seconds: float, words: str) -> None:
    """The two largest units are told."""
    assert dashboard._duration(seconds) == words


async def test_a_signing_whole(visitor: Visitor, call: Caller) -> None:
    """Its page has its fields, documents with their files, recipients with their states, and its events."""
    signing_id, document_id, people = await call.sent(2, message="Two\nlines", signing_order="sequential")
    await call.ok("POST", f"{API}/signings/{signing_id}/recipients/{people[0]}/remind")
    await call.ok("POST", f"{API}/signings/{signing_id}/recipients/{people[0]}/remind")
    page = await visitor.get(f"/sandbox/signings/{signing_id}")
    for words in (signing_id, document_id, *people, "sequential", "EN", "Sandbox User", "1,500 bytes", "signing.sent",
                  "invited, 2 reminders", "valid until", "tenant sandbox"):  # fmt: skip
        assert words in page.main.text, words
    assert page.main.find("p", class_="said").raw == "Two\nlines"
    assert "Sealed" not in page.main.text
    await call.sandbox.complete(signing_id)
    page = await visitor.get(f"/sandbox/signings/{signing_id}")
    assert "Sealed" in page.main.text
    assert "recipient.signed" in page.main.text


async def test_a_bare_draft(visitor: Visitor, call: Caller) -> None:
    """What is missing before it can be sent is said."""
    page = await visitor.get(f"/sandbox/signings/{await call.draft()}")
    assert "No document yet." in page.main.text
    assert "No recipient yet." in page.main.text
    assert [b.text.split()[0] for b in page.main.every("button")] == ["Cancel"]


# the request log


async def test_the_request_log(visitor: Visitor, call: Caller) -> None:
    """Requests to the API are listed with their answers and faults; those for pages on demand."""
    call.sandbox.faults.add("signings.create", "drop-before-commit")
    with pytest.raises(aiohttp.ClientError):
        await call("POST", f"{API}/signings", json={})
    call.sandbox.faults.add("signings.list", "500")
    await call("GET", f"{API}/signings")
    await call("GET", f"{API}/me")
    await call("GET", "/api/nowhere")
    page = await visitor.get("/sandbox/requests")
    rows = [row.text for row in page.main.every("tr")[1:]]
    assert ["/api/nowhere – 404" in rows[0], "/me me 200" in rows[1], "500 fault: 500" in rows[2]] == [True] * 3
    assert "no answer fault: drop-before-commit" in rows[3]
    assert "/sandbox/requests" not in page.main.find("table").text
    everything = await visitor.get("/sandbox/requests?show=all")
    assert "GET /sandbox/requests – in progress" in everything.main.find("table").text
    assert everything.main.find("a", aria_current="true").text == "All, these pages included"


# faults


async def test_arranging_and_removing_faults(visitor: Visitor, call: Caller) -> None:
    """A fault from the form strikes as arranged, is counted, and goes away."""
    page = await visitor.get("/sandbox/faults")
    page = await visitor.send(page, "/sandbox/faults", operation="me", kind="429", times="1", seconds="7")
    assert page.main.find("p", role="status").text == NOTICES["fault"]
    status, _ = await call("GET", f"{API}/me")
    assert (status, call.headers["retry-after"]) == (429, "7")
    page = await visitor.get("/sandbox/faults")
    assert "1 of 1 – used up" in page.main.find("table").text
    slow = {"operation": "webhooks.deliver", "kind": "slow", "times": "", "seconds": "0.5"}
    page = await visitor.send(page, "/sandbox/faults", slow)
    assert "0 times, without end" in page.main.find("table").text
    assert "seconds=0.5" in page.main.find("table").text
    page = await visitor.send(page, "/sandbox/faults/remove", press="Remove the fault 429")
    assert [fault.kind for fault in visitor.sandbox.faults.arranged] == ["slow"]
    page = await visitor.send(page, "/sandbox/faults/clear")
    assert page.main.find("p", role="status").text == NOTICES["faults-cleared"]
    assert not visitor.sandbox.faults.arranged
    assert "Remove all" not in page.main.text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "duplicate"}, "there is no fault 'duplicate' for *"),
        ({"times": "many"}, "times must be a number, or empty, not 'many'"),
        ({"times": "0"}, "times must be a whole number from 1"),
        ({"seconds": "-1"}, "seconds must be a number, or empty, not '-1'"),
        ({"kind": "500", "seconds": "1"}, "the fault '500' has no detail 'seconds'"),
    ],
)
async def test_a_wrong_fault_is_told(visitor: Visitor, fields: dict[str, str], words: str) -> None:
    """What cannot be arranged is refused, and the form keeps what was typed."""
    page = await visitor.get("/sandbox/faults")
    page = await visitor.send(page, "/sandbox/faults", fields)
    assert page.status == 400
    check_document(page)
    assert words in page.main.find("p", role="alert").text
    for name in fields.keys() & {"times", "seconds"}:
        assert page.main.find("input", name=name).attributes["value"] == fields[name]
    assert not visitor.sandbox.faults.arranged


async def test_the_rate_limit(visitor: Visitor, call: Caller) -> None:
    """Set in the form it holds, wrong input is refused, and empty lifts it."""
    page = await visitor.get("/sandbox/faults")
    page = await visitor.send(page, "/sandbox/faults/rate-limit", rate="0.01", burst="1")
    assert "0.01 a second, 1 at once" in page.main.text
    assert [(await call("GET", f"{API}/me"))[0] for _ in range(2)] == [200, 429]
    wrong = await visitor.send(page, "/sandbox/faults/rate-limit", rate="0", burst="1")
    assert wrong.status == 400
    assert "rate must be a number from 1e-06" in wrong.main.find("p", role="alert").text
    page = await visitor.send(page, "/sandbox/faults/rate-limit", rate="5", burst="")
    assert "5 a second, 5 at once" in page.main.text
    page = await visitor.send(page, "/sandbox/faults/rate-limit", rate="", burst="")
    assert page.main.find("p", role="status").text == NOTICES["limit-lifted"]
    assert (await call("GET", f"{API}/me"))[0] == 200


# webhooks


async def test_an_endpoint_from_registration_to_removal(visitor: Visitor, call: Caller, receiver: str) -> None:
    """The secret is shown once, deliveries are listed and resent with the same event, and then nothing more comes."""
    page = await visitor.get("/sandbox/webhooks")
    page = await visitor.send(page, "/sandbox/webhooks", url=f" {receiver}/ok ", secret="")
    check_document(page)
    secret = page.main.find("code", id="webhook-secret").text
    [endpoint] = visitor.sandbox.webhooks.endpoints()
    assert (endpoint.url, endpoint.secret) == (f"{receiver}/ok", secret)
    await call.draft()
    await visitor.sandbox.webhooks.settled()
    page = await visitor.get("/sandbox/webhooks")
    assert secret not in page.html
    assert "signing.created" in page.main.text
    assert "Delivered 1 try" in page.main.text
    [first] = visitor.sandbox.webhooks.deliveries()
    page = await visitor.send(page, f"/sandbox/webhooks/deliveries/{first.id}/resend")
    assert page.main.find("p", role="status").text == NOTICES["resent"]
    await visitor.sandbox.webhooks.settled()
    page = await visitor.get(page.path.partition("?")[0])
    assert first.event_id in page.main.text
    assert '"type": "signing.created"' in page.main.find("pre").raw
    assert "202" in page.main.find("table").text
    assert {d.event_id for d in visitor.sandbox.webhooks.deliveries()} == {first.event_id}
    page = await visitor.get("/sandbox/webhooks")
    page = await visitor.send(page, f"/sandbox/webhooks/endpoints/{endpoint.id}/remove")
    assert page.main.find("p", role="status").text == NOTICES["endpoint-removed"]
    late = await visitor.send(page, f"/sandbox/webhooks/deliveries/{first.id}/resend")
    assert late.status == 404
    assert "no such webhook endpoint any more" in late.main.find("p", role="alert").text


async def test_an_endpoint_with_a_secret_of_ones_own(visitor: Visitor, receiver: str) -> None:
    """The given secret is taken, and typed unseen."""
    page = await visitor.get("/sandbox/webhooks")
    assert page.main.find("input", name="secret").attributes["type"] == "password"
    page = await visitor.send(page, "/sandbox/webhooks", url=f"{receiver}/ok", secret="my own")
    assert page.main.find("code", id="webhook-secret").text == "my own"


async def test_a_wrong_endpoint_is_told(visitor: Visitor) -> None:
    """An address elsewhere is refused; the address is kept in the form, the secret is not."""
    page = await visitor.get("/sandbox/webhooks")
    page = await visitor.send(page, "/sandbox/webhooks", url="https://example.com/hook", secret="my own")
    assert page.status == 400
    assert page.main.find("input", name="url").attributes["value"] == "https://example.com/hook"
    assert "is not on this machine" in page.main.find("p", id="url-error").text
    assert "my own" not in page.html


async def test_deliveries_that_fail(visitor: Visitor, call: Caller, receiver: str) -> None:
    """A refusal, an unreachable receiver and a lost delivery are told with their reasons and next tries."""
    for path in ("/bad", "/ok"):
        call.sandbox.webhooks.register(receiver + path)
    call.sandbox.webhooks.register("http://127.0.0.1:9/none")
    call.sandbox.faults.add("webhooks.deliver", "lose", times=None)
    await call.draft()
    await call.sandbox.webhooks.settled()
    call.sandbox.faults.clear()
    call.sandbox.faults.add("webhooks.deliver", "wrong-signature", times=None)
    await call.draft()
    await call.sandbox.webhooks.settled()
    page = await visitor.get("/sandbox/webhooks")
    for words in ("Lost", "lost on purpose", "HTTP status 500", "again at", "Pending"):
        assert words in page.main.text
    assert re.search(r"ClientConnectorError|Cannot connect", page.main.text)
    seen = ""
    for delivery in call.sandbox.webhooks.deliveries():
        one = await visitor.get(f"/sandbox/webhooks/deliveries/{delivery.id}")
        check_document(one)
        seen += one.main.text
    for words in ("Not tried yet.", "wrong-signature", "Next try", "Last problem", "500"):
        assert words in seen


# the inbox


async def test_the_inbox(visitor: Visitor, call: Caller) -> None:
    """Invitations and reminders, newest first, in the signing's language, each with a link to the signing page."""
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


async def test_the_inbox_of_one_address(visitor: Visitor, call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages of one address alone; and no more than so many."""
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
    monkeypatch.setattr(inbox, "MOST", 2)
    page = await visitor.get("/sandbox/inbox")
    assert len(page.main.every("article")) == 2
    assert "1 older messages are not shown." in page.main.text


# the signing page


def signing_page(recipient_id: str) -> str:
    """Its address."""
    return f"/sandbox/sign/{recipient_id}"


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("method", ["email", "approval", "sms", "bankid"])
async def test_signing(visitor: Visitor, call: Caller, method: str, language: str) -> None:
    """A recipient reads, ticks, signs, and then finds the sealed document; in the signing's language."""
    words = LANGUAGES[language]
    signing_id = await call.draft(language=language, message="Read this")
    _, document = await call.upload(signing_id)
    extra = {"phone": "+46 70 1", "personal_number": "19900101-2384"}
    recipient = await call.recipient(signing_id, signing_method=method, **extra)
    await call.ok("POST", f"{API}/signings/{signing_id}/send")
    page = await visitor.get(signing_page(recipient))
    check_document(page)
    assert page.root.find("html").attributes["lang"] == words.code
    assert words.simulated in page.main.text
    assert words.own_page in page.main.text
    assert "Read this" in page.main.text
    assert "Sandbox User" in page.main.text
    assert words.valid_until in page.main.find("p", id="state").text
    if method == "sms":
        assert "+46 70 1" in page.main.text
    folder = f"/sandbox/signings/{signing_id}/documents/{document['id']}"
    assert page.main.find("object").attributes["data"].startswith(f"{folder}/original.pdf")
    label = {"approval": words.approve, "bankid": words.to_bankid}.get(method, words.sign)
    page = await visitor.send(page, signing_page(recipient), press=label, agree="on")
    if method == "bankid":
        assert page.path == f"{signing_page(recipient)}/bankid"
        check_document(page)
        assert words.bankid_plays in page.main.text
        assert "19900101-2384" in page.main.text
        assert visitor.sandbox.signing(signing_id).state == "sent"
        page = await visitor.send(page, signing_page(recipient), press=words.bankid_confirm)
    assert (page.status, page.path) == (200, signing_page(recipient))
    assert words.state_completed in page.main.find("p", id="state").text
    assert not page.main.every("form")
    assert page.main.find("object").attributes["data"].startswith(f"{folder}/sealed.pdf")
    assert visitor.sandbox.signing(signing_id).is_completed
    again = await visitor.get(f"{signing_page(recipient)}/bankid")
    assert again.path == signing_page(recipient)


async def test_the_documents_are_served_as_they_are(visitor: Visitor, call: Caller) -> None:
    """Original and sealed file, to be shown within these pages only, under their names."""
    signing_id = await call.draft()
    form = aiohttp.FormData(quote_fields=False)
    data = make_pdf(3000)
    form.add_field("selected_file", data, filename='Avtal "1".PDF', content_type="application/pdf")
    document = await call.ok("POST", f"{API}/signings/{signing_id}/documents", data=form)
    recipient = await call.recipient(signing_id)
    await call.ok("POST", f"{API}/signings/{signing_id}/send")
    folder = f"/sandbox/signings/{signing_id}/documents/{document['id']}"
    assert (await visitor.get(f"{folder}/sealed.pdf")).status == 404
    await call.sandbox.sign(recipient)
    for name, begins in (("original", data), ("sealed", data)):
        async with visitor.session.get(f"{folder}/{name}.pdf") as response:
            body = await response.read()
            assert response.content_type == "application/pdf"
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["Content-Security-Policy"] == "frame-ancestors 'self'"
            assert "filename*=UTF-8''Avtal%20%221%22.PDF" in response.headers["Content-Disposition"]
            assert response.headers["Content-Disposition"].startswith("inline")
            assert body.startswith(begins)
            assert (body == data) == (name == "original")


@pytest.mark.signing_sandbox(profile=Profile(document_name="stem"))
async def test_a_document_without_an_ending_is_served_with_one(visitor: Visitor, call: Caller) -> None:
    """Browsers save it as a PDF all the same."""
    signing_id, document_id, _ = await call.sent()
    async with visitor.session.get(f"/sandbox/signings/{signing_id}/documents/{document_id}/original.pdf") as response:
        assert response.headers["Content-Disposition"].endswith("contract.pdf")


@pytest.mark.signing_sandbox(
    profile=Profile(signing_methods=("carrier_pigeon",), phone_methods=(), identification_methods=())
)
async def test_an_unknown_method_is_one_click(visitor: Visitor, call: Caller) -> None:
    """A method of the profile's own is named and simulated."""
    _, _, (recipient,) = await call.sent()
    page = await visitor.get(signing_page(recipient))
    assert "The method carrier_pigeon is simulated here by one click." in page.main.text
    page = await visitor.send(page, signing_page(recipient), agree="on")
    assert ENGLISH.state_completed in page.main.text


@pytest.mark.signing_sandbox(profile=Profile(phone_methods=(), identification_methods=()))
async def test_methods_without_their_fields(visitor: Visitor, call: Caller) -> None:
    """Where the profile asks for no phone and no identification, the pages do without."""
    signing_id = await call.draft()
    await call.upload(signing_id)
    by_phone = await call.recipient(signing_id, signing_method="sms")
    by_bankid = await call.recipient(signing_id, signing_method="bankid")
    await call.ok("POST", f"{API}/signings/{signing_id}/send")
    assert "send a code to –" in (await visitor.get(signing_page(by_phone))).main.text
    assert "Identification" not in (await visitor.get(f"{signing_page(by_bankid)}/bankid")).main.text


@pytest.mark.parametrize("method", ["email", "bankid"])
async def test_nobody_signs_without_ticking(visitor: Visitor, call: Caller, method: str) -> None:
    """The box must be ticked; the page says so at the top and at the box."""
    signing_id = await call.draft()
    await call.upload(signing_id)
    recipient = await call.recipient(signing_id, signing_method=method, personal_number="1")
    await call.ok("POST", f"{API}/signings/{signing_id}/send")
    page = await visitor.get(signing_page(recipient))
    page = await visitor.send(page, signing_page(recipient))
    assert page.status == 400
    check_document(page)
    assert page.main.find("p", role="alert").text == ENGLISH.must_read
    box = page.main.find("input", id="agree")
    assert (box.attributes["aria-invalid"], box.attributes["aria-describedby"]) == ("true", "agree-error")
    assert visitor.sandbox.signing(signing_id).state == "sent"


async def test_a_form_without_a_decision(visitor: Visitor, call: Caller) -> None:
    """Neither signed nor declined: asked again."""
    _, _, (recipient,) = await call.sent()
    page = await visitor.get(signing_page(recipient))
    token = page.main.every("input")[0].attributes["value"]
    page = await visitor.post(signing_page(recipient), {"csrf_token": token, "decision": "perhaps"})
    assert page.status == 400
    assert "Sign or decline." in page.main.find("p", role="alert").text


async def test_declining(visitor: Visitor, call: Caller) -> None:
    """Declining says what it leads to, and cancels the signing for the others."""
    signing_id, _, (first, second) = await call.sent(2)
    page = await visitor.get(signing_page(first))
    assert ENGLISH.decline_cancels in page.main.text
    page = await visitor.send(page, signing_page(first), press=ENGLISH.decline)
    assert ENGLISH.state_declined in page.main.find("p", id="state").text
    assert visitor.sandbox.signing(signing_id).state == "cancelled"
    page = await visitor.get(signing_page(second))
    assert ENGLISH.state_cancelled in page.main.find("p", id="state").text
    assert not page.main.every("form")


@pytest.mark.signing_sandbox(profile=Profile(decline_effect="nothing"))
async def test_declining_where_it_cancels_nothing(visitor: Visitor, call: Caller) -> None:
    """Then the page says that, and the others still sign."""
    _, _, (first, second) = await call.sent(2)
    page = await visitor.get(signing_page(first))
    assert ENGLISH.decline_stays in page.main.text
    await visitor.send(page, signing_page(first), press=ENGLISH.decline)
    page = await visitor.get(signing_page(second))
    page = await visitor.send(page, signing_page(second), agree="on")
    assert ENGLISH.state_signed in page.main.find("p", id="state").text


async def test_one_after_the_other(visitor: Visitor, call: Caller) -> None:
    """In a sequential signing the page says whose turn it is, and lets only that one sign."""
    signing_id = await call.draft(signing_order="sequential")
    await call.upload(signing_id)
    second = await call.recipient(signing_id, first_name="Second", email="b@x.example", order=2)
    first = await call.recipient(signing_id, first_name="First", email="a@x.example", order=1)
    page = await visitor.get(signing_page(first))
    assert ENGLISH.state_draft in page.main.find("p", id="state").text
    await call.ok("POST", f"{API}/signings/{signing_id}/send")
    page = await visitor.get(signing_page(second))
    assert ENGLISH.state_waiting in page.main.find("p", id="state").text
    assert "It is the turn of First Berg." in page.main.text
    assert [item.text for item in page.main.find("ol", class_="signers").every("li")] == [
        "First Berg Invited",
        "Second Berg (you) Not invited yet",
    ]
    [marked] = [e for e in page.main.every("li") if e.attributes.get("aria-current") == "step"]
    assert marked.text.startswith("First")
    assert not page.main.every("form")
    page = await visitor.get(signing_page(first))
    assert "It is the turn of" not in page.main.text
    await visitor.send(page, signing_page(first), agree="on")
    page = await visitor.get(signing_page(second))
    page = await visitor.send(page, signing_page(second), agree="on")
    assert visitor.sandbox.signing(signing_id).is_completed


async def test_too_late(visitor: Visitor, call: Caller) -> None:
    """An expired invitation says so; a form from before is refused with the reason."""
    _, _, (recipient,) = await call.sent()
    page = await visitor.get(signing_page(recipient))
    call.sandbox.clock.advance(days=14)
    late = await visitor.send(page, signing_page(recipient), agree="on")
    assert late.status == 400
    assert "The invitation has expired." in late.main.find("p", role="alert").text
    assert ENGLISH.state_expired in late.main.find("p", id="state").text
    assert not late.main.every("form")
    assert "Invitation expired" in (await visitor.get("/sandbox")).main.text


@pytest.mark.parametrize("words", [ENGLISH, SWEDISH])
async def test_why_not_in_the_signings_language(visitor: Visitor, call: Caller, words: Words) -> None:
    """A form that comes too late or too early is refused in the language of the page, which shows what is so by now."""
    draft = await call.draft(language=words.code.upper())
    await call.upload(draft)
    person = await call.recipient(draft)
    _, _, (first, second) = await call.sent(2, language=words.code.upper(), signing_order="sequential")
    token = {"csrf_token": (await visitor.get(signing_page(first))).main.every("input")[0].attributes["value"]}
    signs, declines = token | {"decision": "sign", "agree": "on"}, token | {"decision": "decline"}

    async def refused(recipient: str, standing: str) -> None:
        page = await visitor.post(signing_page(recipient), signs)
        assert page.status == 400
        assert page.main.find("p", role="alert").text == words.refusals[standing]
        assert words.standings[standing] in page.main.find("p", id="state").text
        assert not page.main.every("form")

    await refused(person, "draft")
    await refused(second, "waiting")
    await visitor.post(signing_page(first), signs)
    await refused(first, "signed")
    await visitor.post(signing_page(second), declines)
    await refused(second, "declined")
    await call.sandbox.cancel(draft)
    await refused(person, "cancelled")
    _, _, (late,) = await call.sent(language=words.code.upper())
    call.sandbox.clock.advance(days=14)
    await refused(late, "expired")


async def test_two_clicks_at_once(visitor: Visitor, call: Caller) -> None:
    """The second of two clicks is refused, and its page shows that the first one signed."""
    _, _, (recipient,) = await call.sent()
    page = await visitor.get(signing_page(recipient))
    pages = await asyncio.gather(*(visitor.send(page, signing_page(recipient), agree="on") for _ in range(2)))
    [late] = [page for page in pages if page.status == 400]
    assert late.main.find("p", role="alert").text == ENGLISH.refusals["signed"]
    assert not late.main.every("form")


async def test_a_document_that_cannot_be_sealed(
    visitor: Visitor, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why sealing failed is said, and it can be tried again."""

    def fail(*_: object, **__: object) -> None:
        raise sealing.SealingFailed("It is damaged.")

    _, _, (recipient,) = await call.sent()
    monkeypatch.setattr(sealing, "seal", fail)
    page = await visitor.get(signing_page(recipient))
    page = await visitor.send(page, signing_page(recipient), agree="on")
    assert (page.status, page.main.find("p", role="alert").text) == (409, "It is damaged.")
    assert page.form(signing_page(recipient), ENGLISH.sign)


async def test_without_a_display_name(visitor: Visitor, call: Caller) -> None:
    """Who has no name is called by the address."""
    signing_id = await call.draft()
    await call.upload(signing_id)
    recipient = await call.recipient(signing_id, first_name=None, last_name=None)
    await call.ok("POST", f"{API}/signings/{signing_id}/send")
    assert "anna@example.com (you)" in (await visitor.get(signing_page(recipient))).main.text


def test_both_languages_say_the_same() -> None:
    """Each text is there in both, differs, and has the same gaps to fill in."""
    for name in Words.__dataclass_fields__:
        english, swedish = getattr(ENGLISH, name), getattr(SWEDISH, name)
        assert english != swedish, name
        if isinstance(english, str):
            assert re.findall(r"\{\w+\}", english) == re.findall(r"\{\w+\}", swedish), name
        else:
            assert english.keys() == swedish.keys()


def test_a_missing_program_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is skipped elsewhere fails where CI=true."""
    assert needs_of_tests.needs("sh").endswith("/sh")
    needs_of_tests.needs_module("json")
    for ask in (needs_of_tests.needs, needs_of_tests.needs_module):
        monkeypatch.setenv("CI", "true")
        with pytest.raises(pytest.fail.Exception, match="no-such-thing is missing here, and in CI"):
            ask("no-such-thing")
        monkeypatch.delenv("CI")
        with pytest.raises(pytest.skip.Exception, match="no-such-thing is missing here"):
            ask("no-such-thing")
