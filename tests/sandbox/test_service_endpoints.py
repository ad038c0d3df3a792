"""The endpoint table of the specification (section 4), row by row, and requests outside of it."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import aiohttp
import pytest
from aiohttp.http_parser import HttpRequestParserPy

from signing_async.sandbox import Sandbox
from tests.pdfs import make_pdf
from tests.sandbox.serving import API, Caller


async def test_get_me_returns_the_authenticated_user(call: Caller) -> None:
    status, body = await call("GET", f"{API}/me")
    assert status == 200
    assert body["email"] == "user@sandbox.example"


async def test_post_signings_creates_a_draft(call: Caller) -> None:
    body = {"name": "Lease", "language": "SV", "signing_order": "sequential", "message": "Please sign"}
    status, signing = await call("POST", f"{API}/signings", json=body)
    assert status == 201
    assert signing["id"]
    assert signing["is_draft"] is True
    assert {name: signing[name] for name in body} == body


async def test_get_signings_returns_each_signing_once_in_pages(call: Caller) -> None:
    created = [await call.draft(name=f"Contract {n}") for n in range(7)]
    seen: list[Any] = []
    cursor = None
    while True:
        query = {"limit": "3"} | ({"cursor": cursor} if cursor else {})
        page = await call.ok("GET", f"{API}/signings", params=query)
        assert len(page["data"]) <= 3
        seen += page["data"]
        if (cursor := page["meta"]["next_cursor"]) is None:
            break
    assert [signing["id"] for signing in seen] == created[::-1]
    assert {"name", "is_draft", "is_completed", "updated_at"} <= set(seen[0])


async def test_cursor_neither_repeats_nor_skips_while_signings_are_created(call: Caller) -> None:
    first = [await call.draft() for _ in range(4)]
    page = await call.ok("GET", f"{API}/signings", params={"limit": "2"})
    await call.draft()
    rest = await call.ok("GET", f"{API}/signings", params={"limit": "9", "cursor": page["meta"]["next_cursor"]})
    assert [row["id"] for row in page["data"] + rest["data"]] == first[::-1]


async def test_post_documents_stores_the_exact_bytes(call: Caller, signing_sandbox: Sandbox) -> None:
    data = make_pdf(200_000)
    signing_id = await call.draft()
    status, document = await call.upload(signing_id, data)
    assert status == 201
    assert signing_sandbox.document_bytes(document["id"]) == data


async def test_post_recipients_returns_the_recipient_with_its_id(call: Caller) -> None:
    signing_id = await call.draft()
    body = {"first_name": "Anna", "last_name": "Berg", "email": "anna@example.com", "order": 1}
    status, recipient = await call(
        "POST", f"{API}/signings/{signing_id}/recipients", json=body | {"signing_method": "approval"}
    )
    assert status == 201
    assert recipient["id"]
    assert {name: recipient[name] for name in body} == body


# errors of every endpoint

EVERY_OPERATION = [
    ("GET", "/me"),
    ("POST", "/signings"),
    ("GET", "/signings"),
    ("GET", "/signings/{signing}"),
    ("POST", "/signings/{signing}/documents"),
    ("POST", "/signings/{signing}/recipients"),
    ("GET", "/signings/{signing}/recipients"),
    ("POST", "/signings/{signing}/send"),
    ("POST", "/signings/{signing}/recipients/{recipient}/remind"),
    ("GET", "/signings/{signing}/documents/{document}/download-signed"),
]
WITH_AN_ID = [row for row in EVERY_OPERATION if "{signing}" in row[1]]


def request_for(method: str, path: str) -> dict[str, Any]:
    """Return a well-formed request."""
    if path.endswith("/documents"):
        form = aiohttp.FormData()
        form.add_field("selected_file", make_pdf(), filename="a.pdf", content_type="application/pdf")
        return {"data": form}
    if method == "POST" and path.endswith(("signings", "recipients")):
        return {"json": {"name": "A", "language": "EN", "email": "a@b.example"}}
    return {}


async def fill(call: Caller, path: str) -> str:
    """Return the path with the ids of a sent signing."""
    signing, document, [recipient] = await call.sent()
    return API + path.format(signing=signing, document=document, recipient=recipient)


@pytest.mark.parametrize(("method", "path"), EVERY_OPERATION)
@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic YTpi", "Bearer wrong", "Bearer \udcff"])
async def test_missing_or_wrong_token_is_401_everywhere(
    signing_sandbox: Sandbox, call: Caller, method: str, path: str, header: str | None
) -> None:
    address = await fill(call, path)
    headers = {} if header is None else {"Authorization": header}
    async with aiohttp.ClientSession(signing_sandbox.base_url, headers=headers) as session:
        status, body = await Caller(signing_sandbox, session)(method, address, **request_for(method, path))
    assert (status, bool(body["message"])) == (401, True)


@pytest.mark.parametrize(("method", "path"), EVERY_OPERATION)
async def test_expired_token_is_refused_everywhere(
    signing_sandbox: Sandbox, call: Caller, method: str, path: str
) -> None:
    address = await fill(call, path)
    token = signing_sandbox.access_token(lifetime=60)
    signing_sandbox.clock.advance(seconds=61)
    async with aiohttp.ClientSession(signing_sandbox.base_url, headers={"Authorization": f"Bearer {token}"}) as session:
        status, body = await Caller(signing_sandbox, session)(method, address, **request_for(method, path))
    assert (status, body["code"]) == (401, "invalid_token")


@pytest.mark.parametrize(("method", "path"), WITH_AN_ID)
async def test_signing_of_another_tenant_does_not_exist(
    signing_sandbox: Sandbox, call: Caller, method: str, path: str
) -> None:
    address = await fill(call, path)
    stranger = signing_sandbox.add_user("Eve", "eve@other.example", tenant="other")
    headers = {"Authorization": f"Bearer {signing_sandbox.access_token(user=stranger)}"}
    async with aiohttp.ClientSession(signing_sandbox.base_url, headers=headers) as session:
        other = Caller(signing_sandbox, session)
        status, body = await other(method, address, **request_for(method, path))
        assert (status, body["code"]) == (404, "not_found")
        assert (await other.ok("GET", f"{API}/signings"))["data"] == []
    assert signing_sandbox.recipients()[0].reminders == 0


@pytest.mark.parametrize(("method", "path"), WITH_AN_ID)
@pytest.mark.parametrize("wrong", ["nope", "0", "%00", "%F0%9F%98%80", "a" * 3000, "..%2F..%2Fetc"])
async def test_unknown_id_is_404_whatever_it_looks_like(call: Caller, method: str, path: str, wrong: str) -> None:
    from yarl import URL

    address = API + path.format(signing=wrong, document=wrong, recipient=wrong)
    status, body = await call(method, URL(address, encoded=True), **request_for(method, path))  # type: ignore[arg-type]  # aiohttp takes both
    assert (status, body["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path"), [row for row in WITH_AN_ID if "recipient}" in row[1] or "document}" in row[1]]
)
async def test_document_or_recipient_of_another_signing_does_not_exist(call: Caller, method: str, path: str) -> None:
    signing, _, _ = await call.sent()
    _, document, [recipient] = await call.sent()
    address = API + path.format(signing=signing, document=document, recipient=recipient)
    status, body = await call(method, address)
    assert (status, body["code"]) == (404, "not_found")


@pytest.mark.parametrize(("method", "path"), EVERY_OPERATION)
@pytest.mark.parametrize("wrong", ["PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"])
async def test_wrong_method_is_405_and_names_the_allowed_ones(call: Caller, method: str, path: str, wrong: str) -> None:
    if (wrong, path) == ("DELETE", "/signings/{signing}"):
        pytest.skip("the sandbox deletes drafts")
    status, _ = await call(wrong, API + path.format(signing="x", document="x", recipient="x"))
    assert status == 405
    assert method in call.headers["allow"].split(", ")


@pytest.mark.parametrize("path", ["/", f"{API}", f"{API}/nope", "/api/2.0/me", f"{API}/me/", "/%2e%2e/x"])
async def test_unknown_path_is_404(call: Caller, path: str) -> None:
    status, body = await call("GET", path)
    assert status == 404 or path == "/"
    assert path == "/" or body["code"] == "not_found"


BAD_BODIES = [
    b"",
    b"{",
    b"nonsense",
    b"[]",
    b"null",
    b'"text"',
    b"\xff\xfe{}",
    b'{"name": "\\ud800", "language": "EN"}',
    b'{"name": NaN}',
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"order": ' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("path", ["/signings", "/signings/{signing}/recipients"])
@pytest.mark.parametrize("body", BAD_BODIES, ids=range(len(BAD_BODIES)))
async def test_malformed_json_is_400(call: Caller, path: str, body: bytes) -> None:
    address = API + path.format(signing=await call.draft())
    status, response = await call("POST", address, data=body, headers={"Content-Type": "application/json"})
    assert (status, response["code"]) == (400, "malformed_json")


@pytest.mark.parametrize("path", ["/signings", "/signings/{signing}/recipients", "/signings/{signing}/documents"])
@pytest.mark.parametrize("kind", ["text/plain", "application/xml", "multipart/form-data", "application/x-json;;;", ""])
async def test_wrong_content_type_is_415(call: Caller, path: str, kind: str) -> None:
    address = API + path.format(signing=await call.draft())
    status, response = await call("POST", address, data=b"{}", headers={"Content-Type": kind})
    assert (status, response["code"]) == (415, "unsupported_media_type")


async def test_json_over_a_megabyte_is_413(call: Caller) -> None:
    body = io.BytesIO(json.dumps({"name": "x" * 2_000_000, "language": "EN"}).encode())
    status, response = await call("POST", f"{API}/signings", data=body, headers={"Content-Type": "application/json"})
    assert (status, response["code"]) == (413, "body_too_large")


async def test_body_that_cannot_be_decompressed_is_400(call: Caller) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with call.session.post(f"{API}/signings", data=b"not gzip", headers=headers, compress=None) as response:
        assert response.status == 400
        assert (await response.json())["code"] == "incomplete_body"


@pytest.mark.parametrize("limit", ["0", "-1", "x", "", "1.5", "1e3", "٣", "9" * 30])
async def test_invalid_page_size_is_400_and_named(call: Caller, limit: str) -> None:
    status, body = await call("GET", f"{API}/signings", params={"limit": limit})
    assert status == 400
    assert "limit" in body["errors"]


@pytest.mark.parametrize("cursor", ["", "x", "!!!", "czA", "cy0x", "s1", "czEK", "é", "A" * 5000])
async def test_invalid_cursor_is_400_and_named(call: Caller, cursor: str) -> None:
    status, body = await call("GET", f"{API}/signings", params={"cursor": cursor})
    assert status == 400
    assert "cursor" in body["errors"]


@pytest.mark.parametrize(
    "address", [b"/signings/\xff\xfe", b"/signings?cursor=\xff", b"/signings/\xed\xa0\x80?limit=1"]
)
async def test_url_that_is_not_utf_8_is_400(
    call: Caller, signing_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, address: bytes
) -> None:
    monkeypatch.setattr("aiohttp.web_protocol.HttpRequestParser", HttpRequestParserPy)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(signing_sandbox.base_url.rpartition(":")[2]))
    token = signing_sandbox.access_token().encode()
    writer.write(b"GET /api/1.0" + address + b" HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + token + b"\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 400")
    assert b"application/json" in head


async def test_client_that_disconnects_during_an_upload_leaves_nothing_behind(
    signing_sandbox: Sandbox, call: Caller
) -> None:
    signing_id = await call.draft()
    port = int(signing_sandbox.base_url.rpartition(":")[2])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {API}/signings/{signing_id}/documents HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\n"
    head += f"Authorization: Bearer {signing_sandbox.access_token()}\r\n"
    head += "Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
    writer.write(head.encode())
    await writer.drain()
    writer.close()
    async with asyncio.timeout(5):
        while not (records := signing_sandbox.requests_of("documents.upload")) or records[0].seconds is None:
            await asyncio.sleep(0.01)
    assert signing_sandbox.documents(signing_id) == []
    assert (await call("GET", f"{API}/me"))[0] == 200


async def test_internal_error_is_500_and_logged(
    call: Caller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(call.sandbox.service, "list_signings", fail)
    status, body = await call("GET", f"{API}/signings")
    assert (status, body["code"]) == (500, "server_error")
    assert "a bug" in caplog.text
