"""The error table (section 7) and the limits table (section 8) of the specification, row by row, with real files."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from signing_async.sandbox import Sandbox
from tests import pdfs
from tests.sandbox.serving import API, Caller

# errors


async def test_400_on_creating_a_signing_has_validation_messages(call: Caller) -> None:
    body = {"name": "A", "language": "FR", "message": "x" * 401}
    status, response = await call("POST", f"{API}/signings", json=body)
    assert (status, response["code"]) == (400, "validation_failed")
    assert response["errors"] == {
        "language": ["The language must be one of EN, SV."],
        "message": ["The message has 401 characters; at most 400 are allowed."],
    }


async def test_400_on_creating_a_recipient_has_validation_messages(call: Caller) -> None:
    path = f"{API}/signings/{await call.draft()}/recipients"
    status, response = await call("POST", path, json={"email": "nope", "order": 0})
    assert (status, set(response["errors"])) == (400, {"email", "order"})


async def test_400_cannot_be_sent_without_document_or_recipient_or_if_not_editable(call: Caller) -> None:
    signing_id = await call.draft()
    messages = []
    for step in (
        call.upload(signing_id),
        call.recipient(signing_id),
        call("POST", f"{API}/signings/{signing_id}/send"),
    ):
        status, body = await call("POST", f"{API}/signings/{signing_id}/send")
        assert (status, body.get("code")) in {(400, "cannot_be_sent"), (200, None)}
        messages.append(body.get("message", ""))
        await step
    status, body = await call("POST", f"{API}/signings/{signing_id}/send")
    assert (status, body["code"]) == (400, "cannot_be_sent")
    assert "no document" in messages[0]
    assert "no recipient" in messages[1]


@pytest.fixture(scope="module")
def refused_files() -> dict[str, tuple[str, bytes]]:
    """Files that the service does not take, and the codes."""
    report = pdfs.by_reportlab()
    return {
        **{f"encrypted with {m}": ("protected", pdfs.encrypted(report, m)) for m in ("AES-256", "RC4-128", "RC4-40")},
        "password protected": ("protected", pdfs.encrypted(report, "AES-256", user="secret")),
        "signed": ("already_signed", pdfs.signed_by_pyhanko(report)),
        "too large": ("too_large", pdfs.make_pdf(10 * 2**20 + 1)),
        "far too large": ("too_large", pdfs.make_pdf(30 * 2**20)),
        **{f"no PDF: {name}": ("not_pdf", data) for name, data in pdfs.not_pdfs().items()},
    }


async def test_422_for_protected_large_signed_or_invalid_files_keeps_nothing(
    call: Caller, signing_sandbox: Sandbox, refused_files: dict[str, Any]
) -> None:
    signing_id = await call.draft()
    for name, (code, data) in refused_files.items():
        status, body = await call.upload(signing_id, data)
        assert (status, body["code"]) == (422, code), name
        assert body["message"]
    assert signing_sandbox.documents(signing_id) == []
    folder = signing_sandbox.service.incoming().path.parent
    assert list(folder.iterdir()) == []


async def test_files_of_other_tools_and_slightly_damaged_ones_are_accepted_and_sealed(
    call: Caller, signing_sandbox: Sandbox
) -> None:
    good = {
        "reportlab": pdfs.by_reportlab(),
        "fpdf2": pdfs.by_fpdf2(),
        "linearized": pdfs.rewritten(pdfs.by_reportlab(), linearize=True),
        "object streams": pdfs.rewritten(pdfs.by_fpdf2(), object_streams=True),
    }
    signing_id = await call.draft()
    for name, data in good.items():
        status, document = await call.upload(signing_id, data, filename=f"{name}.pdf")
        assert status == 201, name
        assert signing_sandbox.document_bytes(document["id"]) == data
    await call.recipient(signing_id)
    await call.ok("POST", f"{API}/signings/{signing_id}/send")
    assert (await signing_sandbox.complete(signing_id)).is_completed
    for document, data in zip(signing_sandbox.documents(signing_id), good.values(), strict=True):
        status, sealed = await call("GET", f"{API}/signings/{signing_id}/documents/{document.id}/download-signed")
        assert status == 200
        assert sealed.startswith(data)


async def test_404_on_download_until_the_document_is_fully_signed(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_id, document_id, people = await call.sent(recipients=2)
    path = f"{API}/signings/{signing_id}/documents/{document_id}/download-signed"
    for person in people:
        status, body = await call("GET", path)
        assert (status, body["code"]) == (404, "not_signed")
        await signing_sandbox.sign(person)
    assert (await call("GET", path))[0] == 200


async def test_429_has_retry_after(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_sandbox.rate_limit(rate=0.1, burst=1)
    responses = [await call("GET", f"{API}/me") for _ in range(2)]
    assert [status for status, _ in responses] == [200, 429]
    assert responses[1][1]["code"] == "too_many_requests"
    assert int(call.headers["retry-after"]) == 10


async def test_5xx_on_demand_and_the_next_request_succeeds(call: Caller, signing_sandbox: Sandbox) -> None:
    for kind in ("500", "502-html", "503"):
        signing_sandbox.faults.add("me", kind)
        assert (await call("GET", f"{API}/me"))[0] == int(kind[:3])
    assert (await call("GET", f"{API}/me"))[0] == 200


# limits


async def test_limit_of_10_mb_is_inclusive(call: Caller) -> None:
    signing_id = await call.draft()
    assert (await call.upload(signing_id, pdfs.make_pdf(10 * 2**20)))[0] == 201
    assert (await call.upload(signing_id, pdfs.make_pdf(10 * 2**20 + 1)))[0] == 422


async def test_limit_no_password_and_no_existing_signature(call: Caller) -> None:
    signing_id = await call.draft()
    data = pdfs.by_fpdf2()
    assert (await call.upload(signing_id, data))[0] == 201
    assert (await call.upload(signing_id, pdfs.encrypted(data)))[1]["code"] == "protected"
    signed = await asyncio.to_thread(pdfs.signed_by_pyhanko, data)
    assert (await call.upload(signing_id, signed))[1]["code"] == "already_signed"


async def test_limit_of_400_counts_characters_not_bytes(call: Caller) -> None:
    assert await call.draft(message="ö" * 400)
    body = {"name": "A", "language": "EN", "message": "ö" * 401}
    assert (await call("POST", f"{API}/signings", json=body))[0] == 400


async def test_limit_of_14_days_starts_with_the_invitation(call: Caller, signing_sandbox: Sandbox) -> None:
    _, _, people = await call.sent(recipients=2, signing_order="sequential")
    signing_sandbox.clock.advance(days=10)
    await signing_sandbox.sign(people[0])
    signing_sandbox.clock.advance(days=10)
    assert (await signing_sandbox.sign(people[1])).is_completed


async def test_limit_recipient_order_is_unique_and_starts_at_1(call: Caller) -> None:
    signing_id = await call.draft(signing_order="sequential")
    path = f"{API}/signings/{signing_id}/recipients"
    statuses = [
        (await call("POST", path, json={"email": "a@b.example", "order": order}))[0] for order in (0, 1, 1, 2, 2, 3)
    ]
    assert statuses == [400, 201, 400, 201, 400, 201]


async def test_limit_access_token_lasts_for_expires_in(call: Caller, signing_sandbox: Sandbox) -> None:
    app = signing_sandbox.register_app("http://127.0.0.1:1/")
    parameters = {"grant_type": "authorization_code", "client_id": app.client_id, "redirect_uri": app.redirect_uri}
    secret = {"client_secret": app.client_secret, "code": signing_sandbox.authorize(app)}
    token = await call.ok("POST", "/api/oauth/token", data=parameters | secret)
    headers = {"Authorization": f"Bearer {token['access_token']}"}
    signing_sandbox.clock.advance(seconds=token["expires_in"] - 30)
    assert (await call("GET", f"{API}/me", headers=headers))[0] == 200
    signing_sandbox.clock.advance(seconds=30)
    assert (await call("GET", f"{API}/me", headers=headers))[0] == 401
