"""The pages in Chromium: from registering an app to the sealed document, and the script that refreshes pages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from signing_async import MemoryTokenStore, OAuth, SigningClient
from signing_async.sandbox import Sandbox
from tests.needs import needs, needs_module
from tests.pdfs import make_pdf

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, ConsoleMessage, Page

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">" + "W" * 150


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[BrowserContext]:
    """Chromium with a new profile, for all tests."""
    needs_module("playwright")
    chromium = needs("chromium")
    from playwright.async_api import async_playwright

    profile = tmp_path_factory.mktemp("profile")
    async with async_playwright() as playwright:
        context = await playwright.chromium.launch_persistent_context(
            profile, executable_path=chromium, args=ARGUMENTS, viewport={"width": 1280, "height": 900}
        )
        context.set_default_timeout(30_000)
        yield context
        await context.close()


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    """A sandbox in the browser's event loop."""
    async with Sandbox(seed=7) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def page(sandbox: Sandbox, browser: BrowserContext) -> AsyncIterator[Page]:
    """A page of the browser. It logs no error on the sandbox's pages, such as violations of their policy."""
    problems: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type == "error" and message.location["url"].startswith(sandbox.base_url):
            problems.append(message.text)

    page = await browser.new_page()
    page.on("console", note)
    page.on("pageerror", lambda error: problems.append(str(error)))
    yield page
    await page.close()
    assert [problem for problem in problems if "404" not in problem and "400" not in problem] == []


async def test_app_is_registered_authorized_and_its_signing_signed_in_three_ways(
    sandbox: Sandbox, page: Page, tmp_path: Path
) -> None:
    redirect_uri = f"{sandbox.base_url.replace('127.0.0.1', 'localhost')}/callback"  # of another site
    await page.goto(f"{sandbox.base_url}/developer/my-apps")
    await page.get_by_label("Name").fill("Contract robot")
    await page.get_by_label("Redirect URI").fill(redirect_uri)
    await page.get_by_role("button", name="Register").click()
    client_id = await page.locator("#client-id").inner_text()
    client_secret = await page.locator("#client-secret").inner_text()

    app = {"client_id": client_id, "client_secret": client_secret, "redirect_uri": redirect_uri}
    oauth = OAuth(sandbox.base_url, **app, store=MemoryTokenStore())
    async with SigningClient(sandbox.base_url, oauth) as client:
        asked = oauth.authorization_request()
        await page.goto(asked.url)
        assert await page.get_by_role("heading", level=1).inner_text() == "Allow Contract robot?"
        await page.get_by_role("button", name="Allow").click()
        await page.wait_for_url(f"{redirect_uri}?*")
        await oauth.exchange(page.url, state=asked.state)
        assert (await client.me()).email == "user@sandbox.example"

        signing = await client.signings.create(
            name="Lease <b>2026</b>", language="EN", signing_order="sequential", message="Please sign."
        )
        original = make_pdf(20_000, pages=2, text="The lease")
        document = await client.documents.upload(signing.id, original, filename="lease.pdf")
        for method, first_name in (("email", "Anna"), ("bankid", "Björn"), ("approval", "Cleo")):
            await client.recipients.add(
                signing.id,
                email="family@example.com",
                first_name=first_name,
                last_name="Berg",
                signing_method=method,
                extra={"personal_number": "19900101-2384"},
            )
        await client.signings.send(signing.id)

        for first_name, press in (("Anna", "Sign"), ("Björn", "Continue with simulated BankID"), ("Cleo", "Approve")):
            await page.goto(f"{sandbox.base_url}/sandbox/inbox")
            await page.get_by_role("article").first.get_by_text(f"{first_name} Berg").wait_for()
            await page.get_by_role("link", name="Open the signing page").first.click()
            assert await page.get_by_role("heading", level=1).inner_text() == "Lease <b>2026</b>"
            await page.locator("object").first.wait_for()
            assert not await page.get_by_text("This browser cannot show a PDF").is_visible()
            await page.get_by_role("checkbox").check()
            await page.get_by_role("button", name=press, exact=True).click()
            if first_name == "Björn":
                await page.get_by_role("button", name="Confirm in simulated BankID").click()
            assert "Signed" in await page.locator("#state").inner_text()

        assert "the documents are sealed" in await page.locator("#state").inner_text()
        sealed = await client.documents.download_signed(signing.id, document.id, tmp_path / "sealed.pdf")

    assert sealed.path.read_bytes().startswith(original)
    await page.get_by_role("link", name="Open the sealed document").wait_for()
    await page.goto(f"{sandbox.base_url}/sandbox")
    assert "Completed" in await page.get_by_role("table", name="Signings").inner_text()


async def test_no_page_is_wider_than_the_screen_and_no_input_runs_as_script(sandbox: Sandbox, page: Page) -> None:
    app = sandbox.register_app("https://example.com/a/long/path/" + "x" * 100, HOSTILE[:200])
    sandbox.webhooks.register("http://127.0.0.1:9/" + "y" * 100)
    sandbox.faults.add("documents.download_signed", "truncate-after-commit", times=None)
    async with SigningClient(sandbox.base_url, sandbox.access_token()) as client:
        signing = await client.signings.create(name=HOSTILE, language="SV", message=HOSTILE)
        await client.documents.upload(signing.id, make_pdf(), filename=f"{'z' * 150}.pdf")
        email = f"{'e' * 60}@{'d' * 60}.example"
        recipient = await client.recipients.add(signing.id, email=email, first_name=HOSTILE, last_name="B")
        await client.signings.send(signing.id)
    [event, *_] = sandbox.webhooks.deliveries()
    sections = [f"/sandbox{name}" for name in ("", "/inbox", "/webhooks", "/requests?show=all", "/faults")]
    details = [f"/sandbox/signings/{signing.id}", f"/sandbox/sign/{recipient.id}"]
    details += [f"/sandbox/requests/{sandbox.requests[-1].id}", f"/sandbox/webhooks/deliveries/{event.id}"]
    consent = f"/oauth/authorize?client_id={app.client_id}&redirect_uri={app.redirect_uri}&response_type=code"
    for path in (*sections, *details, consent, "/oauth/authorize?client_id=" + "c" * 200, "/developer/my-apps"):
        await page.goto(sandbox.base_url + path)
        assert "Signing sandbox" in await page.title(), path
        for width in (1280, 320):
            await page.set_viewport_size({"width": width, "height": 800})
            assert await page.evaluate("document.documentElement.scrollWidth") <= width, (path, width)
    current = await page.get_by_role("link", name="My apps").bounding_box()
    assert current
    assert current["x"] + current["width"] <= 320
    links = page.get_by_role("navigation", name="Sandbox").get_by_role("link")
    tops = await links.evaluate_all("links => links.map(link => link.getBoundingClientRect().y)")
    assert len(tops) > 1
    assert set(tops) == {tops[0]}


async def test_dashboard_refreshes_itself_and_keeps_what_is_being_typed(sandbox: Sandbox, page: Page) -> None:
    await page.clock.install()
    await page.goto(f"{sandbox.base_url}/sandbox")
    await page.get_by_text("No signings yet.").wait_for()
    await page.get_by_label("Advance by").fill("12")
    await page.get_by_label("Search by").fill("half a wor")
    async with SigningClient(sandbox.base_url, sandbox.access_token()) as client:
        signing = await client.signings.create(name="Lease", language="EN")
    await page.clock.run_for(2000)
    await page.get_by_role("link", name="Lease", exact=True).wait_for()
    assert await page.get_by_label("Advance by").input_value() == "12"
    assert await page.get_by_label("Search by").input_value() == "half a wor"
    await sandbox.cancel(signing.id)
    await page.clock.run_for(2000)
    await page.get_by_role("table", name="Signings").get_by_text("Cancelled").wait_for()
