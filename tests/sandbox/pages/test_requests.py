"""The request log, and one request with its headers and bodies."""

from __future__ import annotations

import aiohttp
import pytest

from signing_async.sandbox import request_log
from tests.sandbox.browsing import Page, Visitor
from tests.sandbox.pages.checks import CALLBACK, check_document
from tests.sandbox.serving import API, Caller


async def test_log_lists_api_requests_with_status_and_fault_and_on_demand_those_for_pages(
    visitor: Visitor, call: Caller
) -> None:
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
    assert "no response fault: drop-before-commit" in rows[3]
    assert "/sandbox/requests" not in page.main.find("table").text
    everything = await visitor.get("/sandbox/requests?show=all")
    assert "GET /sandbox/requests – in progress" in everything.main.find("table").text
    assert everything.main.find("a", aria_current="true").text == "All, including pages"


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
    await call("GET", f"{API}/signings", params={"limit": "1"})
    page = await details(visitor)
    assert f"GET {API}/signings?limit=1" in page.main.text
    assert "The body was not read" in page.main.text


async def test_request_of_a_file_or_without_a_response_says_so(visitor: Visitor, call: Caller) -> None:
    signing_id, document_id, _ = await call.sent()
    page = await details(visitor, 1)
    assert block(page, "Request body") == "[multipart/form-data: selected_file 'contract.pdf', 1500 bytes]"
    await call.sandbox.complete(signing_id)
    await call("GET", f"{API}/signings/{signing_id}/documents/{document_id}/download-signed")
    assert block(await details(visitor), "Response body") == "[a file of application/pdf]"
    call.sandbox.faults.add("signings.create", "drop-after-commit")
    with pytest.raises(aiohttp.ClientError):
        await call("POST", f"{API}/signings", json={})
    assert "closed the connection without a response" in (await details(visitor)).main.text
    call.sandbox.faults.add("me", "truncate")
    with pytest.raises(aiohttp.ClientError):
        await call("GET", f"{API}/me")
    assert block(await details(visitor), "Response body") == "[a part of the body]"
    assert (await visitor.get("/sandbox/requests/req_x")).status == 404


@pytest.mark.parametrize("as_json", [True, False])
async def test_secrets_of_requests_and_responses_are_redacted(visitor: Visitor, call: Caller, as_json: bool) -> None:
    app = call.sandbox.register_app(CALLBACK)
    code = call.sandbox.authorize(app)
    fields = {"grant_type": "authorization_code", "client_id": app.client_id, "client_secret": app.client_secret or ""}
    fields |= {"redirect_uri": CALLBACK, "code": code}
    body = {"json": fields} if as_json else {"data": fields}
    token = await call.ok("POST", "/api/oauth/token", **body)
    page = await details(visitor)
    secrets = (app.client_secret or "", code, token["access_token"], token["refresh_token"])
    assert not [secret for secret in secrets if secret in page.html]
    assert "[redacted]" in block(page, "Request body")
    assert block(page, "Response body").count("[redacted]") == 2
    assert app.client_id in page.main.text
    call.sandbox.faults.add("oauth.token", "not-json")
    cut = b'{"client_secret": "abc\\"def", "code": 7, "x": [{"refresh_token": "unfinished'
    async with call.session.post("/api/oauth/token", data=cut, headers={"Content-Type": "application/json"}):
        pass
    shown = block(await details(visitor), "Request body")
    assert not [secret for secret in ("abc", "def", "7", "unfinished") if secret in shown]


async def test_bodies_are_kept_of_the_newest_requests_only_and_cut(
    visitor: Visitor, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "BODIES", 2)
    monkeypatch.setattr(request_log, "LONGEST_BODY", 10)
    for _ in range(2):
        await call.draft()
    assert "[and " in block(await details(visitor), "Request body")
    await call("GET", f"{API}/me")
    await call("GET", f"{API}/me")
    assert "no longer kept" in (await details(visitor, 0)).main.text


async def test_query_of_a_request_is_without_code_and_state(visitor: Visitor, call: Caller) -> None:
    await call("GET", f"{API}/nowhere?code=abc&x=1&state=def")
    record = call.sandbox.requests[-1]
    assert record.query == "code=[redacted]&x=1&state=[redacted]"
    assert "abc" not in (await details(visitor)).html


async def test_older_requests_are_on_the_following_page(visitor: Visitor, call: Caller) -> None:
    for _ in range(26):
        await call("GET", f"{API}/me")
    first, second = [await visitor.get(f"/sandbox/requests?page={number}") for number in (1, 2)]
    assert "Page 1 of 2, 26 requests" in first.main.text
    oldest, *_, newest = call.sandbox.requests_of("me")
    assert (newest.id in first.html, oldest.id in first.html) == (True, False)
    assert (newest.id in second.html, oldest.id in second.html) == (False, True)
    assert "show=all&amp;page=2" in (await visitor.get("/sandbox/requests?show=all")).html
