"""The field tables of the specification (section 2), row by row."""

from __future__ import annotations

from typing import Any

import pytest

from signing_async.sandbox import Profile, Refused, Sandbox
from tests.sandbox.serving import API, Caller


async def refused(call: Caller, path: str, body: dict[str, Any], field: str) -> str:
    """Return the message of a field that is refused with 400."""
    status, response = await call("POST", f"{API}{path}", json=body)
    assert (status, response["code"]) == (400, "validation_failed")
    assert list(response["errors"]) == [field]
    return str(response["errors"][field][0])


# signing


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("language", ["EN", "SV"]),
        ("signing_order", ["sequential", "parallel"]),
        ("message", [None, "", "Hello", "x" * 400, "🖋" * 400]),
    ],
)
async def test_allowed_values_of_a_signing_are_returned(call: Caller, field: str, values: list[str | None]) -> None:
    for value in values:
        signing_id = await call.draft(**{field: value})
        assert (await call.ok("GET", f"{API}/signings/{signing_id}"))[field] == value


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("name", [None, "", "   ", 7, ["x"], {}, True]),
        ("language", [None, "", "DE", "en", 1, []]),
        ("signing_order", ["", "random", "PARALLEL", 1, [], {}]),
        ("message", ["x" * 401, "🖋" * 401, " " * 401, 5, ["x"]]),
    ],
)
async def test_other_values_of_a_signing_are_refused_by_name(call: Caller, field: str, values: list[object]) -> None:
    for value in values:
        assert field in await refused(call, "/signings", {"name": "A", "language": "EN"} | {field: value}, field)


async def test_400_names_every_invalid_field(call: Caller) -> None:
    body = {"language": "DE", "signing_order": "up", "message": "x" * 401}
    status, response = await call("POST", f"{API}/signings", json=body)
    assert status == 400
    assert set(response["errors"]) == {"name", "language", "signing_order", "message"}


async def test_updated_at_changes_with_every_change_of_the_signing(call: Caller, signing_sandbox: Sandbox) -> None:
    signing_id = await call.draft()
    seen = []

    async def look() -> None:
        seen.append((await call.ok("GET", f"{API}/signings/{signing_id}"))["updated_at"])
        signing_sandbox.clock.advance(seconds=5)

    await look()
    await call.upload(signing_id)
    await look()
    person = await call.recipient(signing_id)
    await look()
    await call.ok("POST", f"{API}/signings/{signing_id}/send")
    await look()
    await signing_sandbox.sign(person)
    await look()
    assert seen == sorted(set(seen))


async def test_documents_are_embedded_in_order_of_upload(call: Caller) -> None:
    signing_id = await call.draft()
    for name in ("a.pdf", "b.pdf", "c.pdf"):
        await call.upload(signing_id, filename=name)
    documents = (await call.ok("GET", f"{API}/signings/{signing_id}"))["documents"]
    assert [document["name"] for document in documents] == ["a.pdf", "b.pdf", "c.pdf"]


# document


@pytest.mark.parametrize(
    ("filename", "name"),
    [
        ("lease.pdf", "lease.pdf"),
        ("Lease", "Lease"),
        ("../../etc/passwd", "passwd"),
        ("C:\\docs\\lease.pdf", "lease.pdf"),
        ("   ", "document.pdf"),
        ("avtal åäö 漢字.pdf", "avtal åäö 漢字.pdf"),
        ("x" * 300 + ".pdf", "x" * 255),
    ],
)
async def test_document_name_is_the_files_without_folders(
    signing_sandbox: Sandbox, call: Caller, filename: str, name: str
) -> None:
    from tests.sandbox.serving import body_of

    signing_id = await call.draft()
    body, kind = body_of([("selected_file", filename, None)])
    path = f"{API}/signings/{signing_id}/documents"
    document = await call.ok("POST", path, data=body, headers={"Content-Type": kind})
    assert document["name"] == name


async def test_signed_file_path_is_absent_until_fully_signed(call: Caller) -> None:
    signing_id, document_id, [person] = await call.sent()
    before = (await call.ok("GET", f"{API}/signings/{signing_id}"))["documents"][0]
    await call.sandbox.sign(person)
    after = (await call.ok("GET", f"{API}/signings/{signing_id}"))["documents"][0]
    assert "signed_file_path" not in before
    assert after["signed_file_path"].endswith(f"{document_id}/download-signed")
    assert (await call("GET", after["signed_file_path"]))[0] == 200


async def test_bytes_of_an_unknown_document_are_refused(signing_sandbox: Sandbox) -> None:
    with pytest.raises(Refused, match="no such document"):
        signing_sandbox.document_bytes("nope")


# recipient


@pytest.mark.parametrize("field", ["first_name", "last_name"])
@pytest.mark.parametrize("value", [None, "", "Åsa", "O'Neil", "<b>"])
async def test_recipient_names_are_any_text_or_none(call: Caller, field: str, value: str | None) -> None:
    signing_id = await call.draft()
    await call.recipient(signing_id, **{field: value})
    rows = await call.ok("GET", f"{API}/signings/{signing_id}/recipients")
    assert rows["data"][0][field] == value


NO_ADDRESSES = (
    *("anna", "@example.com", "anna@", "a b@c.d", "a@b@c", "a@b\n", ".a@b.se", "a.@b.se", "a..b@c.se", "a,b@c.se"),
    *("a@.se", "a@b.", "a@b..se", "a@-b.se", "a@b-.se", "a@b_c.se", "a@b c.se", "Anna <a@b.se>", "a@b.se,c@d.se"),
    *(f"{'a' * 65}@b.se", f"a@{'b' * 253}"),
)
ADDRESSES = (
    *("a@b", "Anna.Berg+x@sub.example.co.uk", "o'neil@example.com", "a_b-c!#$%&*/=?^`{|}~@x-y.se"),
    *("åsa@exempel.se", "anna@räksmörgås.se", "用户@例子.公司", f"{'a' * 64}@b.se", f"a@{'b' * 252}"),
)


async def test_recipient_email_in_any_script_is_accepted(call: Caller) -> None:
    signing_id = await call.draft()
    people = [await call.recipient(signing_id, email=email) for email in ADDRESSES]
    assert tuple(call.sandbox.service.recipient(person).email for person in people) == ADDRESSES


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("email", [None, "", " ", 5, *NO_ADDRESSES]),
        ("signing_method", ["", "fax", "EMAIL", ["email"], {}, 5]),
        ("order", [0, -1, 1.5, "1", True, 2**31, 1e300, [], {}]),
        *((field, [5]) for field in ("first_name", "last_name", "phone", "personal_number")),
    ],
)
async def test_other_values_of_a_recipient_are_refused_by_name(call: Caller, field: str, values: list[object]) -> None:
    path = f"/signings/{await call.draft()}/recipients"
    for value in values:
        assert field in await refused(call, path, {"email": "a@b.example"} | {field: value}, field)


@pytest.mark.parametrize(
    ("method", "extra"),
    [("email", {}), ("approval", {}), ("bankid", {"personal_number": "19121212-1212"}), ("sms", {"phone": "+46701"})],
)
async def test_signing_method_may_need_a_further_field(call: Caller, method: str, extra: dict[str, str]) -> None:
    signing_id = await call.draft()
    await call.recipient(signing_id, signing_method=method, **extra)
    row = (await call.ok("GET", f"{API}/signings/{signing_id}/recipients"))["data"][0]
    assert {"signing_method": method, **extra}.items() <= row.items()
    for field in extra:
        body = {"email": "a@b.example", "signing_method": method}
        assert "required" in await refused(call, f"/signings/{signing_id}/recipients", body, field)


async def test_recipient_order_is_unique_in_a_sequential_signing_and_defaults_to_the_next(call: Caller) -> None:
    signing_id = await call.draft(signing_order="sequential")
    await call.recipient(signing_id, order=2)
    await call.recipient(signing_id)
    path = f"/signings/{signing_id}/recipients"
    assert "2" in await refused(call, path, {"email": "a@b.example", "order": 2}, "order")
    await call.recipient(signing_id, order=1.0)
    rows = (await call.ok("GET", f"{API}{path}"))["data"]
    assert [row["order"] for row in rows] == [2, 3, 1]


async def test_recipient_order_is_ignored_in_a_parallel_signing(call: Caller) -> None:
    signing_id = await call.draft(signing_order="parallel")
    for order in (1, 1, None):
        await call.recipient(signing_id, order=order)
    rows = (await call.ok("GET", f"{API}/signings/{signing_id}/recipients"))["data"]
    assert [row["order"] for row in rows] == [1, 1, None]


@pytest.mark.signing_sandbox(
    profile=Profile(
        required_signing_fields=("signing_order", "message"),
        required_recipient_fields=("first_name", "last_name", "order", "signing_method"),
        unique_order="always",
    )
)
async def test_profile_can_require_further_fields(call: Caller) -> None:
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


# common members


async def test_request_id_is_the_same_in_body_header_and_log(call: Caller, signing_sandbox: Sandbox) -> None:
    first = (await call.ok("GET", f"{API}/me"))["request_id"]
    assert call.headers["request_id"] == first == signing_sandbox.requests[-1].id
    _, body = await call("GET", f"{API}/nope")
    assert call.headers["request_id"] == body["request_id"] != first
