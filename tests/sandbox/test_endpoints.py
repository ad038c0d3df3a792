"""The endpoints of the specification (sections 2, 4, 7 and 8): fields, limits, and requests that are refused."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import aiohttp
import pytest
from yarl import URL

from signing_async.sandbox import Profile, Refused, Sandbox
from tests import pdfs
from tests.pdfs import make_pdf
from tests.sandbox.serving import API, Caller, Part, begin_upload, body_of, caller

OPERATIONS = [
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


def body_for(method: str, path: str) -> dict[str, Any]:
    """Return a well-formed body."""
    if path.endswith("/documents"):
        body, kind = body_of([("selected_file", "a.pdf", None)])
        return {"data": body, "headers": {"Content-Type": kind}}
    if method == "POST" and path.endswith(("signings", "recipients")):
        return {"json": {"name": "A", "language": "EN", "email": "a@b.example"}}
    return {}


async def refused(call: Caller, path: str, body: dict[str, Any], field: str) -> str:
    """Return the message of a field that is refused with 400."""
    status, response = await call("POST", f"{API}{path}", json=body)
    assert (status, response["code"]) == (400, "validation_failed"), body
    assert list(response["errors"]) == [field]
    assert field in response["errors"][field][0]
    return str(response["errors"][field][0])


# every endpoint


async def test_operations_are_those_of_the_document(call: Caller) -> None:
    paths = (await call.ok("GET", "/openapi.json"))["paths"].items()
    described = {
        (method.upper(), path.removeprefix(API).replace("_id}", "}"))
        for path, methods in paths
        for method, each in methods.items()
        if each["tags"] == ["service"] and path.startswith(API)
    }
    assert described == set(OPERATIONS)


async def test_missing_wrong_or_expired_token_is_401_everywhere(signing_sandbox: Sandbox, call: Caller) -> None:
    signing, document, [recipient] = await call.sent()
    expired = signing_sandbox.access_token(lifetime=60)
    signing_sandbox.clock.advance(seconds=61)
    wrong = (None, "", "Bearer ", "Basic YTpi", "Bearer \udcff", f"Bearer {expired}")
    for method, path in OPERATIONS:
        address = API + path.format(signing=signing, document=document, recipient=recipient)
        for header in wrong:
            body = body_for(method, path)
            headers = body.pop("headers", {}) | ({} if header is None else {"Authorization": header})
            async with aiohttp.ClientSession(signing_sandbox.base_url, headers=headers) as session:
                status, response = await Caller(signing_sandbox, session)(method, address, **body)
            assert (status, bool(response["message"])) == (401, True), (method, path, header)
    assert len(signing_sandbox.signings) == 1


async def test_signing_document_or_recipient_of_others_does_not_exist(signing_sandbox: Sandbox, call: Caller) -> None:
    stranger = signing_sandbox.add_user("Eve", "eve@other.example", tenant="other")
    headers = {"Authorization": f"Bearer {signing_sandbox.access_token(user=stranger)}"}
    signing, document, [recipient] = await call.sent()
    draft = await call.draft()
    wrong = ["nope", "0", "%00", "%F0%9F%98%80", "a" * 3000, "..%2F..%2Fetc"]
    own = [("DELETE", "/signings/{signing}"), ("POST", "/signings/{signing}/cancel")]
    for method, path in [row for row in (*OPERATIONS, *own) if "{signing}" in row[1]]:
        body = body_for(method, path)
        address = API + path.format(signing=signing, document=document, recipient=recipient)
        status, response = await call(method, address, **body | {"headers": headers | body.get("headers", {})})
        assert (status, response["code"]) == (404, "not_found"), path
        cases = [path.format(signing=one, document=one, recipient=one) for one in wrong]
        if "{recipient}" in path or "{document}" in path:
            cases.append(path.format(signing=draft, document=document, recipient=recipient))
        for case in cases:
            status, response = await call(method, URL(API + case, encoded=True), **body)  # type: ignore[arg-type]  # aiohttp takes both
            assert (status, response["code"]) == (404, "not_found"), case
    assert (await call.ok("GET", f"{API}/signings", headers=headers))["data"] == []
    assert signing_sandbox.recipients()[0].reminders == 0


async def test_unknown_path_is_404_and_a_wrong_method_405(call: Caller) -> None:
    for path in (API, f"{API}/nope", "/api/2.0/me", f"{API}/me/", "/%2e%2e/x"):
        status, body = await call("GET", path)
        assert (status, body["code"]) == (404, "not_found")
    for method in ("PUT", "OPTIONS", "HEAD"):
        assert (await call(method, f"{API}/signings"))[0] == 405
        assert call.headers["allow"] == "GET, POST"


async def test_request_id_is_the_same_in_body_header_and_log(call: Caller, signing_sandbox: Sandbox) -> None:
    first = (await call.ok("GET", f"{API}/me"))["request_id"]
    assert call.headers["request_id"] == first == signing_sandbox.requests[-1].id
    _, body = await call("GET", f"{API}/nope")
    assert call.headers["request_id"] == body["request_id"] != first


BAD_BODIES = [
    *(b"", b"{", b"nonsense", b"[]", b"null", b'"text"', b"\xff\xfe{}", b'{"name": "\\ud800", "language": "EN"}'),
    *(b'{"name": NaN}', b"[" * 100_000, b'{"a":' * 50_000, b'{"order": ' + b"9" * 5000 + b"}"),
]


@pytest.mark.parametrize("path", ["/signings", "/signings/{signing}/recipients"])
async def test_malformed_large_or_undecodable_json_is_refused(call: Caller, path: str) -> None:
    address, headers = API + path.format(signing=await call.draft()), {"Content-Type": "application/json"}
    for body in BAD_BODIES:
        status, response = await call("POST", address, data=body, headers=headers)
        assert (status, response["code"]) == (400, "malformed_json"), body[:20]
    large = io.BytesIO(json.dumps({"name": "x" * 2_000_000, "language": "EN"}).encode())
    status, response = await call("POST", address, data=large, headers=headers)
    assert (status, response["code"]) == (413, "body_too_large")
    packed = headers | {"Content-Encoding": "gzip"}
    status, response = await call("POST", address, data=b"not gzip", headers=packed, compress=None)
    assert (status, response["code"]) == (400, "incomplete_body")


@pytest.mark.parametrize("path", ["/signings", "/signings/{signing}/recipients", "/signings/{signing}/documents"])
async def test_wrong_content_type_is_415(call: Caller, path: str) -> None:
    address = API + path.format(signing=await call.draft())
    for kind in ("text/plain", "application/xml", "multipart/form-data", "application/x-json;;;", ""):
        status, response = await call("POST", address, data=b"{}", headers={"Content-Type": kind})
        assert (status, response["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("limit", ["0", "-1", "x", "", "1.5", "1e3", "٣", "9" * 30]),
        ("cursor", ["", "x", "!!!", "czA", "cy0x", "s1", "czEK", "é", "A" * 5000]),
    ],
)
async def test_invalid_page_size_or_cursor_is_400_and_named(call: Caller, name: str, values: list[str]) -> None:
    for value in values:
        status, body = await call("GET", f"{API}/signings", params={name: value})
        assert (status, list(body["errors"])) == (400, [name]), value


async def test_internal_error_is_500_and_logged(
    call: Caller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(call.sandbox.service, "list_signings", fail)
    status, body = await call("GET", f"{API}/signings")
    assert (status, body["code"]) == (500, "server_error")
    assert "a bug" in caplog.text


# signings


async def test_cursor_neither_repeats_nor_skips_while_signings_are_created(call: Caller) -> None:
    first = [await call.draft() for _ in range(4)]
    page = await call.ok("GET", f"{API}/signings", params={"limit": "2"})
    await call.draft()
    rest = await call.ok("GET", f"{API}/signings", params={"limit": "9", "cursor": page["meta"]["next_cursor"]})
    assert [row["id"] for row in page["data"] + rest["data"]] == first[::-1]
    assert {"name", "is_draft", "is_completed", "updated_at"} <= set(page["data"][0])


@pytest.mark.parametrize(
    ("field", "allowed", "others"),
    [
        ("name", ["A"], [None, "", "   ", 7, ["x"]]),
        ("language", ["EN", "SV"], [None, "", "en", []]),
        ("signing_order", ["sequential", "parallel"], ["", "random", 1, {}]),
        ("message", [None, "", "ö" * 400, "🖋" * 400], ["🖋" * 401, " " * 401, 5]),
    ],
)
async def test_allowed_values_of_a_signing_are_returned_and_others_refused_by_name(
    call: Caller, field: str, allowed: list[object], others: list[object]
) -> None:
    for value in allowed:
        signing_id = await call.draft(**{field: value})
        assert (await call.ok("GET", f"{API}/signings/{signing_id}"))[field] == value
    for value in others:
        await refused(call, "/signings", {"name": "A", "language": "EN"} | {field: value}, field)


# documents


async def test_422_for_protected_large_signed_or_invalid_files_keeps_nothing(call: Caller) -> None:
    """All kinds of files are in test_inspection.py."""
    signing_id = await call.draft()
    for code, data in (
        ("protected", pdfs.encrypted(pdfs.by_reportlab())),
        ("already_signed", pdfs.with_signature_field(b"/V 7 0 R")),
        ("too_large", pdfs.make_pdf(30 * 2**20)),
        ("not_pdf", b"hello"),
    ):
        status, body = await call.upload(signing_id, data)
        assert (status, body["code"]) == (422, code)
        assert body["message"]
    assert call.sandbox.documents(signing_id) == []
    assert list(call.sandbox.service.incoming().path.parent.iterdir()) == []
    with pytest.raises(Refused, match="no such document"):
        call.sandbox.document_bytes("nope")


FORM = 'form-data; name="selected_file"; filename='
NAMES = {
    f'{FORM}"../../etc/passwd"': "passwd",
    f'{FORM}"C:\\\\docs\\\\lease.pdf"': "lease.pdf",
    f'{FORM}"   "': "document.pdf",
    f'{FORM}""': "document.pdf",
    f'{FORM}"avtal åäö 漢字.pdf"': "avtal åäö 漢字.pdf",
    f'{FORM}"{"x" * 300}.pdf"': "x" * 255,
    f'{FORM}"a \\"b\\".pdf"': 'a "b".pdf',
    f'{FORM}"a%22b%0D%0A.pdf"': 'a"b.pdf',
    f"{FORM}\"x\"; filename*=UTF-8''%c3%a5.pdf": "å.pdf",
    "form-data; name=selected_file; filename=a.pdf": "a.pdf",
    'FORM-DATA;FILENAME="a;b=c.pdf";NAME="selected_file"': "a;b=c.pdf",
}


async def test_document_name_is_the_files_without_folders_however_it_is_written(call: Caller) -> None:
    path, data = f"{API}/signings/{await call.draft()}/documents", make_pdf()
    other = b'preamble\r\n--b\r\nContent-Disposition: form-data; name="other"\r\n\r\n1\r\n'
    for header, name in NAMES.items():
        part = f"--b\r\nContent-Disposition: {header}\r\n\r\n".encode() + data + b"\r\n"
        kind = {"Content-Type": "multipart/form-data; boundary=b"}
        body = other + part + other.removeprefix(b"preamble\r\n") + b"--b--\r\n"
        document = await call.ok("POST", path, data=body, headers=kind)
        assert document["name"] == name
        assert call.sandbox.document_bytes(document["id"]) == data


async def test_malformed_multipart_is_refused_with_400(call: Caller) -> None:
    path, kind = f"{API}/signings/{await call.draft()}/documents", "multipart/form-data; boundary=b"
    for body in (
        b"",
        b"hello",
        b'--b\r\nContent-Disposition: form-data; name="selected_file"; filename="a"\r\n\r\n%PDF',
        b"--b\r\nContent-Disposition: form-data",
        b"--b\r\nnonsense\r\n\r\nx\r\n--b--",
        b"--b\r\nA: " + b"x" * 40_000,
        b"--b\r\n" + b"A: b\r\n" * 3000 + b"\r\nx\r\n--b--",
        b"--b\r\nContent-Type: multipart/mixed; boundary=c\r\n\r\n--c\r\n\r\nx\r\n--c--\r\n--b--",
        b'--b\r\nContent-Disposition: form-data; name="_charset_"\r\n\r\n' + b"x" * 40 + b"\r\n--b--",
    ):
        status, response = await call("POST", path, data=body, headers={"Content-Type": kind})
        assert (status, response["code"]) == (400, "malformed_multipart"), body[:60]


async def test_upload_needs_exactly_one_file_named_selected_file(call: Caller) -> None:
    path, file = f"{API}/signings/{await call.draft()}/documents", ("selected_file", "a.pdf", None)
    cases: list[list[Part]] = [
        [],
        [("other", "a.pdf", None)],
        [("selected_file", None, None)],
        [(None, "a.pdf", None)],
        [file, file],
    ]
    for parts in cases:
        body, kind = body_of(parts)
        status, response = await call("POST", path, data=body or b"--bOuNdArY--\r\n", headers={"Content-Type": kind})
        assert (status, list(response["errors"])) == (400, ["selected_file"]), parts


async def test_client_that_disconnects_during_an_upload_leaves_nothing_behind(call: Caller) -> None:
    signing_id = await call.draft()
    _, writer = await begin_upload(call.sandbox, signing_id)
    writer.close()
    async with asyncio.timeout(10):
        while call.sandbox.requests[-1].seconds is None:
            await asyncio.sleep(0.01)
    assert call.sandbox.documents(signing_id) == []


# recipients

NO_ADDRESSES = (
    *("anna", "@example.com", "anna@", "a b@c.d", "a@b@c", "a@b\n", ".a@b.se", "a.@b.se", "a..b@c.se", "a,b@c.se"),
    *("a@.se", "a@b.", "a@b..se", "a@-b.se", "a@b-.se", "a@b_c.se", "a@b c.se", "Anna <a@b.se>", "a@b.se,c@d.se"),
    *(f"{'a' * 65}@b.se", f"a@{'b' * 253}"),
)
ADDRESSES = (
    *("a@b", "Anna.Berg+x@sub.example.co.uk", "o'neil@example.com", "a_b-c!#$%&*/=?^`{|}~@x-y.se"),
    *("åsa@exempel.se", "anna@räksmörgås.se", "用户@例子.公司", f"{'a' * 64}@b.se", f"a@{'b' * 252}"),
)


@pytest.mark.parametrize(
    ("field", "allowed", "others"),
    [
        ("email", ADDRESSES, [None, "", " ", 5, *NO_ADDRESSES]),
        ("first_name", [None, "", "Åsa", "O'Neil", "<b>"], [5]),
        ("last_name", [None, "", "Åsa", "O'Neil", "<b>"], [5]),
        ("signing_method", ["email", "approval"], ["", "fax", "EMAIL", ["email"]]),
        ("order", [None, 1, 1.0, 7, 7], [0, 1.5, "1", True, 2**31, 1e300, []]),
        ("phone", ["+46701"], [5]),
        ("personal_number", ["19121212-1212"], [5]),
    ],
)
async def test_allowed_values_of_a_recipient_are_returned_and_others_refused_by_name(
    call: Caller, field: str, allowed: list[object], others: list[object]
) -> None:
    signing_id = await call.draft()
    path = f"/signings/{signing_id}/recipients"
    for value in allowed:
        await call.recipient(signing_id, **{field: value})
    rows = (await call.ok("GET", f"{API}{path}"))["data"]
    assert [row[field] for row in rows] == list(allowed)
    for value in others:
        await refused(call, path, {"email": "a@b.example"} | {field: value}, field)


@pytest.mark.parametrize(("method", "field"), [("bankid", "personal_number"), ("sms", "phone")])
async def test_signing_method_may_need_a_further_field(call: Caller, method: str, field: str) -> None:
    signing_id = await call.draft()
    await call.recipient(signing_id, signing_method=method, **{field: "1"})
    body = {"email": "a@b.example", "signing_method": method}
    assert "required" in await refused(call, f"/signings/{signing_id}/recipients", body, field)


async def test_recipient_order_is_unique_in_a_sequential_signing_and_defaults_to_the_next(call: Caller) -> None:
    signing_id = await call.draft(signing_order="sequential")
    path = f"/signings/{signing_id}/recipients"
    for order in (2, None, 1.0):
        await call.recipient(signing_id, order=order)
        assert "2" in await refused(call, path, {"email": "a@b.example", "order": 2}, "order")
    assert [row["order"] for row in (await call.ok("GET", f"{API}{path}"))["data"]] == [2, 3, 1]


async def test_profile_can_require_further_fields() -> None:
    profile = Profile(
        required_signing_fields=("signing_order", "message"),
        required_recipient_fields=("first_name", "last_name", "order", "signing_method"),
        unique_order="always",
    )
    async with Sandbox(profile=profile) as sandbox, caller(sandbox) as call:
        status, response = await call("POST", f"{API}/signings", json={"name": "A", "language": "EN"})
        assert (status, set(response["errors"])) == (400, {"signing_order", "message"})
        signing_id = await call.draft(signing_order="parallel", message="Hi")
        path = f"{API}/signings/{signing_id}/recipients"
        status, response = await call("POST", path, json={"email": "a@b.example"})
        assert (status, set(response["errors"])) == (400, {"first_name", "last_name", "order", "signing_method"})
        await call.recipient(signing_id, order=1, signing_method="email")
        full = {"email": "a@b.example", "first_name": "A", "last_name": "B", "signing_method": "email", "order": 1}
        status, response = await call("POST", path, json=full)
        assert (status, set(response["errors"])) == (400, {"order"})
