"""The field tables of the specification (section 2), row by row."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from signing_async.sandbox import Profile, Refused, Sandbox
from tests.sandbox.serving import API, Caller


async def refused(call: Caller, path: str, body: dict[str, Any], field: str) -> str:
    """The message about the field that is refused with a 400."""
    status, answer = await call("POST", f"{API}{path}", json=body)
    assert (status, answer["code"]) == (400, "validation_failed")
    assert list(answer["errors"]) == [field]
    return str(answer["errors"][field][0])


# signing


async def test_signing_id(call: Caller) -> None:
    """id: a UUID that the service assigned; another one each time."""
    first, second = await call.draft(), await call.draft()
    assert uuid.UUID(first) != uuid.UUID(second)


@pytest.mark.parametrize("name", [None, "", "   ", 7, ["x"], {}, True])
async def test_signing_name_is_required(call: Caller, name: object) -> None:
    """name: required on creation."""
    assert "name" in await refused(call, "/signings", {"name": name, "language": "EN"}, "name")
    await refused(call, "/signings", {"language": "EN"}, "name")


@pytest.mark.parametrize("name", ["a", "Avtal åäö 漢字 🖋", "<script>", "x" * 5000, "a\x00b", "' OR 1=1 --"])
async def test_signing_name_comes_back(call: Caller, name: str) -> None:
    """name: whatever the text, it comes back as it was."""
    signing_id = await call.draft(name=name)
    assert (await call.ok("GET", f"{API}/signings/{signing_id}"))["name"] == name


@pytest.mark.parametrize("language", ["EN", "SV"])
async def test_signing_language_allowed(call: Caller, language: str) -> None:
    """language: EN and SV."""
    signing_id = await call.draft(language=language)
    assert (await call.ok("GET", f"{API}/signings/{signing_id}"))["language"] == language


@pytest.mark.parametrize("language", [None, "", "en", "sv", "DE", "EN ", 1, ["EN"], {"EN": 1}])
async def test_signing_language_refused(call: Caller, language: object) -> None:
    """language: any other value gives a 400."""
    await refused(call, "/signings", {"name": "A", "language": language}, "language")


@pytest.mark.parametrize("order", ["sequential", "parallel"])
async def test_signing_order_allowed(call: Caller, order: str) -> None:
    """signing_order: sequential and parallel."""
    signing_id = await call.draft(signing_order=order)
    assert (await call.ok("GET", f"{API}/signings/{signing_id}"))["signing_order"] == order


@pytest.mark.parametrize("order", ["", "random", "PARALLEL", 1, [], {}])
async def test_signing_order_refused(call: Caller, order: object) -> None:
    """signing_order: nothing else."""
    body = {"name": "A", "language": "EN", "signing_order": order}
    await refused(call, "/signings", body, "signing_order")


@pytest.mark.parametrize("message", [None, "", "Hello", "x" * 400, "🖋" * 400])
async def test_signing_message_allowed(call: Caller, message: str | None) -> None:
    """message: up to 400 characters."""
    signing_id = await call.draft(message=message)
    assert (await call.ok("GET", f"{API}/signings/{signing_id}"))["message"] == message


@pytest.mark.parametrize("message", ["x" * 401, "🖋" * 401, " " * 401, 5, ["x"]])
async def test_signing_message_refused(call: Caller, message: object) -> None:
    """message: longer gives a 400."""
    await refused(call, "/signings", {"name": "A", "language": "EN", "message": message}, "message")


async def test_all_wrong_fields_are_told_at_once(call: Caller) -> None:
    """A 400 names every field that is wrong."""
    body = {"language": "DE", "signing_order": "up", "message": "x" * 401}
    status, answer = await call("POST", f"{API}/signings", json=body)
    assert status == 400
    assert set(answer["errors"]) == {"name", "language", "signing_order", "message"}


async def test_signing_is_draft(call: Caller) -> None:
    """is_draft: true while the signing is editable and unsent."""
    signing_id = await call.draft()
    assert (await call.ok("GET", f"{API}/signings/{signing_id}"))["is_draft"] is True
    sent, _, _ = await call.sent()
    assert (await call.ok("GET", f"{API}/signings/{sent}"))["is_draft"] is False


async def test_signing_is_completed(call: Caller) -> None:
    """is_completed: true once all recipients have finished, not before."""
    signing_id, _, people = await call.sent(recipients=2)
    for person, expected in zip(people, (False, True), strict=True):
        await call.sandbox.sign(person)
        assert (await call.ok("GET", f"{API}/signings/{signing_id}"))["is_completed"] is expected


async def test_signing_cancelled_at(call: Caller) -> None:
    """cancelled_at: null, and a time once the signing is cancelled."""
    signing_id, _, _ = await call.sent()
    assert (await call.ok("GET", f"{API}/signings/{signing_id}"))["cancelled_at"] is None
    await call.sandbox.cancel(signing_id)
    moment = (await call.ok("GET", f"{API}/signings/{signing_id}"))["cancelled_at"]
    assert abs(datetime.fromisoformat(moment) - datetime.now(UTC)) < timedelta(minutes=1)


async def test_signing_updated_at(call: Caller, signing_sandbox: Sandbox) -> None:
    """updated_at: moves with every change of the signing, its documents and its recipients."""
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


async def test_signing_documents(call: Caller) -> None:
    """documents: embedded in the signing read, in the order of their uploads."""
    signing_id = await call.draft()
    for name in ("a.pdf", "b.pdf", "c.pdf"):
        await call.upload(signing_id, filename=name)
    documents = (await call.ok("GET", f"{API}/signings/{signing_id}"))["documents"]
    assert [document["name"] for document in documents] == ["a.pdf", "b.pdf", "c.pdf"]


# document


async def test_document_id(call: Caller) -> None:
    """id: assigned by the service, used in paths."""
    signing_id = await call.draft()
    _, document = await call.upload(signing_id)
    assert uuid.UUID(document["id"])
    status, _ = await call("GET", f"{API}/signings/{signing_id}/documents/{document['id']}/download-signed")
    assert status == 404


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
async def test_document_name(signing_sandbox: Sandbox, call: Caller, filename: str, name: str) -> None:
    """name: the file's, without folders and control characters."""
    from tests.sandbox.serving import body_of

    signing_id = await call.draft()
    body, kind = body_of([("selected_file", filename, None)])
    path = f"{API}/signings/{signing_id}/documents"
    document = await call.ok("POST", path, data=body, headers={"Content-Type": kind})
    assert document["name"] == name


async def test_document_completed_at(call: Caller) -> None:
    """completed_at: empty until the document is fully signed."""
    signing_id, _, people = await call.sent(recipients=2)
    await call.sandbox.sign(people[0])
    before = (await call.ok("GET", f"{API}/signings/{signing_id}"))["documents"][0]
    await call.sandbox.sign(people[1])
    after = (await call.ok("GET", f"{API}/signings/{signing_id}"))["documents"][0]
    assert before["completed_at"] is None
    assert datetime.fromisoformat(after["completed_at"]).tzinfo is not None


async def test_document_signed_file_path(call: Caller) -> None:
    """signed_file_path: absent until the document is fully signed; then the download works."""
    signing_id, document_id, [person] = await call.sent()
    before = (await call.ok("GET", f"{API}/signings/{signing_id}"))["documents"][0]
    await call.sandbox.sign(person)
    after = (await call.ok("GET", f"{API}/signings/{signing_id}"))["documents"][0]
    assert "signed_file_path" not in before
    assert after["signed_file_path"].endswith(f"{document_id}/download-signed")
    assert (await call("GET", after["signed_file_path"]))[0] == 200


async def test_unknown_documents(signing_sandbox: Sandbox) -> None:
    """The bytes of a document that does not exist are refused."""
    with pytest.raises(Refused, match="no such document"):
        signing_sandbox.document_bytes("nope")


# recipient


async def test_recipient_id(call: Caller) -> None:
    """id: assigned by the service."""
    assert uuid.UUID(await call.recipient(await call.draft()))


@pytest.mark.parametrize("field", ["first_name", "last_name"])
@pytest.mark.parametrize("value", [None, "", "Åsa", "O'Neil", "<b>"])
async def test_recipient_names(call: Caller, field: str, value: str | None) -> None:
    """first_name, last_name: any text or none."""
    signing_id = await call.draft()
    await call.recipient(signing_id, **{field: value})
    rows = await call.ok("GET", f"{API}/signings/{signing_id}/recipients")
    assert rows["data"][0][field] == value


@pytest.mark.parametrize("field", ["first_name", "last_name", "email", "signing_method", "phone", "personal_number"])
async def test_recipient_texts_are_texts(call: Caller, field: str) -> None:
    """Every text of a recipient is a string."""
    path = f"/signings/{await call.draft()}/recipients"
    await refused(call, path, {"email": "a@b.example"} | {field: 5}, field)


NO_ADDRESSES = (
    *("anna", "@example.com", "anna@", "a b@c.d", "a@b@c", "a@b\n", ".a@b.se", "a.@b.se", "a..b@c.se", "a,b@c.se"),
    *("a@.se", "a@b.", "a@b..se", "a@-b.se", "a@b-.se", "a@b_c.se", "a@b c.se", "Anna <a@b.se>", "a@b.se,c@d.se"),
    *(f"{'a' * 65}@b.se", f"a@{'b' * 253}"),
)
ADDRESSES = (
    *("a@b", "Anna.Berg+x@sub.example.co.uk", "o'neil@example.com", "a_b-c!#$%&*/=?^`{|}~@x-y.se"),
    *("åsa@exempel.se", "anna@räksmörgås.se", "用户@例子.公司", f"{'a' * 64}@b.se", f"a@{'b' * 252}"),
)


@pytest.mark.parametrize("email", ADDRESSES)
async def test_recipient_email_is_any_address(call: Caller, email: str) -> None:
    """email: words and dots at a host's name, in any script, kept as they came."""
    person = await call.recipient(await call.draft(), email=email)
    assert call.sandbox.service.recipient(person).email == email


@pytest.mark.parametrize("email", [None, "", " ", *NO_ADDRESSES])
async def test_recipient_email(call: Caller, email: str | None) -> None:
    """email: required, and an address."""
    path = f"/signings/{await call.draft()}/recipients"
    assert "email" in await refused(call, path, {"email": email}, "email")


@pytest.mark.parametrize(
    ("method", "extra"),
    [("email", {}), ("approval", {}), ("bankid", {"personal_number": "19121212-1212"}), ("sms", {"phone": "+46701"})],
)
async def test_recipient_signing_method(call: Caller, method: str, extra: dict[str, str]) -> None:
    """signing_method: email, bankid, approval (and the profile's); some need a further field, which comes back."""
    signing_id = await call.draft()
    await call.recipient(signing_id, signing_method=method, **extra)
    row = (await call.ok("GET", f"{API}/signings/{signing_id}/recipients"))["data"][0]
    assert {"signing_method": method, **extra}.items() <= row.items()
    for field in extra:
        body = {"email": "a@b.example", "signing_method": method}
        assert "required" in await refused(call, f"/signings/{signing_id}/recipients", body, field)


@pytest.mark.parametrize("method", ["", "fax", "EMAIL", ["email"], {}])
async def test_recipient_signing_method_refused(call: Caller, method: object) -> None:
    """signing_method: an unknown one is a 400."""
    path = f"/signings/{await call.draft()}/recipients"
    await refused(call, path, {"email": "a@b.example", "signing_method": method}, "signing_method")


@pytest.mark.parametrize("order", [0, -1, 1.5, "1", True, 2**31, 1e300, [], {}])
async def test_recipient_order_starts_at_1(call: Caller, order: object) -> None:
    """order: a whole number from 1."""
    path = f"/signings/{await call.draft()}/recipients"
    await refused(call, path, {"email": "a@b.example", "order": order}, "order")


async def test_recipient_order_is_unique(call: Caller) -> None:
    """order: unique in a sequential signing; without one the next is taken."""
    signing_id = await call.draft(signing_order="sequential")
    await call.recipient(signing_id, order=2)
    await call.recipient(signing_id)
    path = f"/signings/{signing_id}/recipients"
    assert "2" in await refused(call, path, {"email": "a@b.example", "order": 2}, "order")
    await call.recipient(signing_id, order=1.0)
    rows = (await call.ok("GET", f"{API}{path}"))["data"]
    assert [row["order"] for row in rows] == [2, 3, 1]


async def test_recipient_order_of_parallel_signings(call: Caller) -> None:
    """order: means nothing in a parallel signing, and need not be there."""
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
async def test_required_fields_of_the_profile(call: Caller) -> None:
    """What is left open to be required can be required."""
    status, answer = await call("POST", f"{API}/signings", json={"name": "A", "language": "EN"})
    assert (status, set(answer["errors"])) == (400, {"signing_order", "message"})
    signing_id = await call.draft(signing_order="parallel", message="Hi")
    path = f"{API}/signings/{signing_id}/recipients"
    status, answer = await call("POST", path, json={"email": "a@b.example"})
    assert (status, set(answer["errors"])) == (400, {"first_name", "last_name", "order", "signing_method"})
    await call.recipient(signing_id, order=1, signing_method="email")
    full = {"email": "a@b.example", "first_name": "A", "last_name": "B", "signing_method": "email", "order": 1}
    status, answer = await call("POST", path, json=full)
    assert (status, set(answer["errors"])) == (400, {"order"})


# common members


async def test_request_id(call: Caller, signing_sandbox: Sandbox) -> None:
    """request_id: the same in the body and the header, and in the sandbox's log; another one each time."""
    first = (await call.ok("GET", f"{API}/me"))["request_id"]
    assert call.headers["request_id"] == first == signing_sandbox.requests[-1].id
    _, body = await call("GET", f"{API}/nope")
    assert call.headers["request_id"] == body["request_id"] != first
