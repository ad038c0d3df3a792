"""The endpoints of the specification (sections 2, 4, 7 and 8): fields, limits, and requests that are refused."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from yarl import URL

from signing_async.sandbox import Refused, Sandbox
from tests import pdfs
from tests.pdfs import make_pdf
from tests.sandbox.receiving import until
from tests.sandbox.serving import API, Caller, begin_upload, multipart

FORM = 'form-data; name="selected_file"; filename='


async def operations(call: Caller) -> list[tuple[str, str]]:
    """Return the methods and paths of the service's operations, and of the sandbox's own."""
    paths = (await call.ok("GET", "/openapi.json"))["paths"].items()
    found = [(method.upper(), path) for path, methods in paths if path.startswith(API) for method in methods]
    assert len(found) >= 12
    return found


def body_for(method: str, path: str) -> dict[str, Any]:
    """Return a well-formed body."""
    if path.endswith("/documents"):
        return multipart(f"{FORM}a.pdf")
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


async def test_missing_wrong_or_expired_token_is_401_everywhere(signing_sandbox: Sandbox, call: Caller) -> None:
    signing, document, [recipient] = await call.sent()
    expired = signing_sandbox.access_token(lifetime=60)
    signing_sandbox.clock.advance(seconds=61)
    wrong = (None, "", "Bearer ", "Basic YTpi", "Bearer \udcff", f"Bearer {expired}")
    for method, path in await operations(call):
        address = path.format(signing_id=signing, document_id=document, recipient_id=recipient)
        for header in wrong:
            body = body_for(method, path)
            headers = body.pop("headers", {}) | ({} if header is None else {"Authorization": header})
            async with aiohttp.ClientSession(signing_sandbox.base_url, headers=headers) as session:
                status, response = await Caller(signing_sandbox, session)(method, address, **body)
            assert (status, bool(response["message"])) == (401, True), (method, path, header)
    assert [signing.state for signing in signing_sandbox.signings] == ["sent"]


async def test_signing_document_or_recipient_of_others_does_not_exist(signing_sandbox: Sandbox, call: Caller) -> None:
    stranger = signing_sandbox.add_user("Eve", "eve@other.example", tenant="other")
    headers = {"Authorization": f"Bearer {signing_sandbox.access_token(user=stranger)}"}
    signing, document, [recipient] = await call.sent()
    draft = await call.draft()
    wrong = ["nope", "0", "%00", "%F0%9F%98%80", "a" * 3000, "..%2F..%2Fetc"]
    for method, path in [row for row in await operations(call) if "{signing_id}" in row[1]]:
        body = body_for(method, path)
        address = path.format(signing_id=signing, document_id=document, recipient_id=recipient)
        refusal = await call.refusal(method, address, **body | {"headers": headers | body.get("headers", {})})
        assert refusal == (404, "not_found"), path
        cases = [path.format(signing_id=one, document_id=one, recipient_id=one) for one in wrong]
        if "{recipient_id}" in path or "{document_id}" in path:
            cases.append(path.format(signing_id=draft, document_id=document, recipient_id=recipient))
        for case in cases:
            assert await call.refusal(method, URL(case, encoded=True), **body) == (404, "not_found"), case
    assert (await call.ok("GET", f"{API}/signings", headers=headers))["data"] == []
    assert signing_sandbox.recipients()[0].reminders == 0


async def test_unknown_path_is_404_a_wrong_method_405_and_the_request_id_that_of_the_log(call: Caller) -> None:
    for path in (API, f"{API}/nope", "/api/2.0/me", f"{API}/me/", "/%2e%2e/x"):
        assert await call.refusal("GET", path) == (404, "not_found")
    for method in ("PUT", "OPTIONS", "HEAD"):
        assert (await call(method, f"{API}/signings"))[0] == 405
        assert call.headers["allow"] == "GET, POST"
    first = (await call.ok("GET", f"{API}/me"))["request_id"]
    assert call.headers["request_id"] == first == call.sandbox.requests[-1].id
    _, body = await call("GET", f"{API}/nope")
    assert call.headers["request_id"] == body["request_id"] != first


BAD_BODIES = [
    *(b"", b"{", b"nonsense", b"[]", b"null", b'"text"', b"\xff\xfe{}", b'{"name": "\\ud800", "language": "EN"}'),
    *(b'{"name": NaN}', b"[" * 100_000, b'{"a":' * 50_000, b'{"order": ' + b"9" * 5000 + b"}"),
]


async def test_malformed_large_or_undecodable_json_and_other_content_types_are_refused(call: Caller) -> None:
    address, headers = f"{API}/signings", {"Content-Type": "application/json"}
    signing = f"{address}/{await call.draft()}"
    for path in (address, f"{signing}/recipients"):
        for body in BAD_BODIES:
            assert await call.refusal("POST", path, data=body, headers=headers) == (400, "malformed_json"), body[:20]
    for path in (address, f"{signing}/recipients", f"{signing}/documents"):
        for kind in ("text/plain", "application/xml", "multipart/form-data", "application/x-json;;;", ""):
            refusal = await call.refusal("POST", path, data=b"{}", headers={"Content-Type": kind})
            assert refusal == (415, "unsupported_media_type")
    large = io.BytesIO(json.dumps({"name": "x" * 2_000_000, "language": "EN"}).encode())
    assert await call.refusal("POST", address, data=large, headers=headers) == (413, "body_too_large")
    packed = headers | {"Content-Encoding": "gzip"}
    refusal = await call.refusal("POST", address, data=b"not gzip", headers=packed, compress=None)
    assert refusal == (400, "incomplete_body")


async def test_invalid_page_size_or_cursor_is_400_and_named(call: Caller) -> None:
    for name, values in (
        ("limit", ["0", "-1", "x", "", "1.5", "1e3", "٣", "9" * 30]),
        ("cursor", ["", "x", "!!!", "czA", "cy0x", "s1", "czEK", "é", "A" * 5000]),
    ):
        for value in values:
            status, body = await call("GET", f"{API}/signings", params={name: value})
            assert (status, list(body["errors"])) == (400, [name]), value


async def test_internal_error_is_500_and_logged(
    call: Caller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(call.sandbox.service, "list_signings", fail)
    assert await call.refusal("GET", f"{API}/signings") == (500, "server_error")
    assert "a bug" in caplog.text


# signings


async def test_cursor_neither_repeats_nor_skips_while_signings_are_created(call: Caller) -> None:
    first = [await call.draft() for _ in range(4)]
    page = await call.ok("GET", f"{API}/signings", params={"limit": "2"})
    await call.draft()
    rest = await call.ok("GET", f"{API}/signings", params={"limit": "9", "cursor": page["meta"]["next_cursor"]})
    assert [row["id"] for row in page["data"] + rest["data"]] == first[::-1]
    assert {"name", "is_draft", "is_completed", "updated_at"} <= set(page["data"][0])


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
    path, other = f"{API}/signings/{await call.draft()}/documents", 'form-data; name="other"'
    for header, name in NAMES.items():
        upload = multipart(other, header, other)
        document = await call.ok("POST", path, **upload | {"data": b"preamble\r\n" + upload["data"]})
        assert document["name"] == name
        assert call.sandbox.document_bytes(document["id"]) == make_pdf()


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
        refusal = await call.refusal("POST", path, data=body, headers={"Content-Type": kind})
        assert refusal == (400, "malformed_multipart"), body[:60]


async def test_upload_needs_exactly_one_file_named_selected_file(call: Caller) -> None:
    path, file = f"{API}/signings/{await call.draft()}/documents", f"{FORM}a.pdf"
    others = ('form-data; name="other"; filename="a.pdf"', 'form-data; name="selected_file"', 'form-data; filename="a"')
    for parts in ([], *([other] for other in others), [file, file]):
        status, response = await call("POST", path, **multipart(*parts))
        assert (status, list(response["errors"])) == (400, ["selected_file"]), parts


async def test_client_that_disconnects_during_an_upload_leaves_nothing_behind(call: Caller) -> None:
    signing_id = await call.draft()
    _, writer = await begin_upload(call.sandbox, signing_id)
    writer.close()
    await until(lambda: call.sandbox.requests[-1].seconds is not None)
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


FIELDS: list[tuple[str, str, Sequence[object], list[object]]] = [
    ("signings", "name", ["A"], [None, "", "   ", 7, ["x"]]),
    ("signings", "language", ["EN", "SV"], [None, "", "en", []]),
    ("signings", "signing_order", ["sequential", "parallel"], ["", "random", 1, {}]),
    ("signings", "message", [None, "", "ö" * 400, "🖋" * 400], ["🖋" * 401, " " * 401, 5]),
    ("recipients", "email", ADDRESSES, [None, "", " ", 5, *NO_ADDRESSES]),
    ("recipients", "first_name", [None, "", "Åsa", "O'Neil", "<b>"], [5]),
    ("recipients", "last_name", [None, "", "Åsa", "O'Neil", "<b>"], [5]),
    ("recipients", "signing_method", ["email", "approval"], ["", "fax", "EMAIL", ["email"]]),
    ("recipients", "order", [None, 1, 1.0, 7, 7], [0, 1.5, "1", True, 2**31, 1e300, []]),
    ("recipients", "phone", ["+46701"], [5]),
    ("recipients", "personal_number", ["19121212-1212"], [5]),
]


async def test_allowed_values_are_returned_and_others_refused_by_name(call: Caller) -> None:
    for kind, field, allowed, others in FIELDS:
        path = "/signings" if kind == "signings" else f"/signings/{await call.draft()}/recipients"
        valid = {"name": "A", "language": "EN", "email": "a@b.example"}
        for value in allowed:
            created = await call.ok("POST", f"{API}{path}", json=valid | {field: value})
            assert created[field] == value
        for value in others:
            await refused(call, path, valid | {field: value}, field)
    for method, field in (("bankid", "personal_number"), ("sms", "phone")):
        assert "required" in await refused(call, path, valid | {"signing_method": method}, field)


async def test_recipient_order_is_unique_in_a_sequential_signing_and_defaults_to_the_next(call: Caller) -> None:
    signing_id = await call.draft(signing_order="sequential")
    path = f"/signings/{signing_id}/recipients"
    for order in (2, None, 1.0):
        await call.recipient(signing_id, order=order)
        assert "2" in await refused(call, path, {"email": "a@b.example", "order": 2}, "order")
    assert [row["order"] for row in (await call.ok("GET", f"{API}{path}"))["data"]] == [2, 3, 1]
