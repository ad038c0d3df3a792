"""Every setting of the profile in each alternative, as its responses show it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from signing_async.sandbox import Profile, Sandbox
from tests.pdfs import make_pdf
from tests.sandbox.serving import API, Caller, caller
from tests.sandbox.token_requests import TOKEN, exchange

PRESETS = ("default", "laravel", "rfc9457", "numeric")


def run(**settings: Any) -> pytest.MarkDecorator:
    """Mark a test to run with this profile."""
    return pytest.mark.signing_sandbox(profile=Profile(**settings))


def each(name: str, *values: Any, **more: Any) -> pytest.MarkDecorator:
    """Run a test once for each value of a setting."""
    return pytest.mark.parametrize(
        name, [pytest.param(value, marks=run(**{name: value}, **more), id=str(value)) for value in values]
    )


# lists


async def walk(call: Caller, path: str, limit: int) -> list[Any]:
    """Return the ids of a list, page by page, as a client of the profile's style reads it."""
    profile = call.sandbox.profile
    ids: list[Any] = []
    url, query = path, {profile.limit_param: str(limit)}
    while True:
        body = await call.ok("GET", url, params=query)
        page = body if isinstance(body, list) else body[profile.items_field]
        assert len(page) <= limit
        ids += [item["id"] for item in page]
        if profile.pagination in {"next_url", "link_header"}:
            link = call.headers.get("link", "").partition(">")[0].removeprefix("<")
            following = link if isinstance(body, list) else body["links"]["next"]
            url, query = (following or "").removeprefix(call.sandbox.base_url), {}
        else:
            last = page[-1]["id"] if body.get("has_more") else None
            following = body.get("next_cursor", body.get("meta", {}).get("next_cursor", last))
            query = {profile.limit_param: str(limit), profile.cursor_param: following}
        if not following:
            return ids


PAGING = {"cursor_param": "after", "limit_param": "per_page", "items_field": "results", "recipients_list": "paged"}


@each("pagination", "meta_cursor", "top_cursor", "next_url", "link_header", "has_more", **PAGING)
async def test_every_style_of_paging_leads_through_a_list_once_and_refuses_a_wrong_cursor(
    call: Caller, pagination: str
) -> None:
    created = [await call.draft() for _ in range(7)]
    for limit in (3, 7):
        assert await walk(call, f"{API}/signings", limit) == created[::-1]
    people = [await call.recipient(created[0]) for _ in range(5)]
    path = f"{API}/signings/{created[0]}/recipients"
    assert await walk(call, path, 2) == people
    for address in (f"{API}/signings", path):
        status, body = await call("GET", address, params={"after": "nope"})
        assert (status, list(body["errors"])) == (400, ["after"])


@run(pagination="bare", recipients_list="paged")
async def test_bare_list_has_everything_at_once(call: Caller) -> None:
    created = [await call.draft() for _ in range(40)]
    assert [row["id"] for row in await call.ok("GET", f"{API}/signings")] == created[::-1]
    assert (await call.ok("GET", f"{API}/signings/{created[0]}/recipients"))["data"] == []


@each("list_order", "newest_first", "oldest_first", documents_in_list=True)
async def test_list_is_in_order_of_creation_from_either_end_with_documents_if_wanted(
    call: Caller, list_order: str
) -> None:
    created = [await call.draft() for _ in range(5)]
    expected = created if list_order == "oldest_first" else created[::-1]
    assert await walk(call, f"{API}/signings", 2) == expected
    assert (await call.ok("GET", f"{API}/signings"))["data"][0]["documents"] == []


@each("over_page_size", "clamp", "refuse", page_size=2, max_page_size=3)
async def test_page_size_has_a_default_and_a_maximum(call: Caller, over_page_size: str) -> None:
    for _ in range(5):
        await call.draft()
    assert len((await call.ok("GET", f"{API}/signings"))["data"]) == 2
    assert len((await call.ok("GET", f"{API}/signings?limit=3"))["data"]) == 3
    status, body = await call("GET", f"{API}/signings?limit=999")
    assert (status, len(body.get("data", []))) == ((200, 3) if over_page_size == "clamp" else (400, 0))


@run(record_field="data", recipients_list="bare", request_id_header="X-Request-Id")
async def test_record_is_wrapped_beside_its_request_id_and_recipients_are_a_bare_list(call: Caller) -> None:
    body = await call.ok("GET", f"{API}/me")
    assert set(body) == {"data", "request_id"}
    assert call.headers["x-request-id"] == body["request_id"]
    created = await call.ok("POST", f"{API}/signings", json={"name": "A", "language": "EN"})
    path = f"{API}/signings/{created['data']['id']}/recipients"
    person = await call.ok("POST", path, json={"email": "a@b.example"})
    assert [row["id"] for row in await call.ok("GET", path)] == [person["data"]["id"]]


# errors


LANGUAGE = "The language must be one of EN, SV."
DRAFT = "The signing cannot be sent: it has no document."
ERRORS: dict[str, tuple[Any, Any]] = {
    "flat": (
        {"code": "validation_failed", "message": "The given data was invalid.", "errors": {"language": [LANGUAGE]}},
        {"code": "cannot_be_sent", "message": DRAFT},
    ),
    "nested": (
        {"error": {"code": "validation_failed", "message": "The given data was invalid.",
                   "details": [{"field": "language", "message": LANGUAGE}]}},
        {"error": {"code": "cannot_be_sent", "message": DRAFT}},
    ),
    "rfc9457": (
        {"type": "about:blank", "title": "Validation failed", "status": 400, "detail": "The given data was invalid.",
         "code": "validation_failed", "errors": [{"pointer": "#/language", "detail": LANGUAGE}]},
        {"type": "about:blank", "title": "Cannot be sent", "status": 400, "detail": DRAFT, "code": "cannot_be_sent"},
    ),
    "list": (
        {"errors": [{"code": "validation_failed", "message": LANGUAGE, "field": "language"}]},
        {"errors": [{"code": "cannot_be_sent", "message": DRAFT}]},
    ),
}  # fmt: skip


@each("error_shape", *ERRORS, request_id="header")
async def test_errors_have_the_profiles_shape(call: Caller, error_shape: str) -> None:
    first = await call("POST", f"{API}/signings", json={"name": "A", "language": "DE"})
    second = await call("POST", f"{API}/signings/{await call.draft()}/send")
    assert (first, second) == tuple((400, body) for body in ERRORS[error_shape])
    assert call.headers["content-type"].startswith("application/problem+json") == (error_shape == "rfc9457")


# statuses


@pytest.mark.parametrize(
    "statuses",
    [
        {"missing_token": 401, "expired_token": 401, "created": 201, "send": 200, "remind": 200, "not_editable": 400},
        {"missing_token": 403, "expired_token": 400, "created": 200, "send": 202, "remind": 204, "not_editable": 409},
        {"missing_token": 400, "expired_token": 403, "created": 200, "send": 204, "remind": 202, "not_editable": 422},
    ],
)
async def test_every_status_is_the_profiles(statuses: dict[str, int]) -> None:
    settings: dict[str, Any] = {f"{name}_status": status for name, status in statuses.items()}
    shape = "oauth" if statuses["created"] == 201 else "profile"
    async with Sandbox(profile=Profile(**settings, token_error_shape=shape)) as sandbox, caller(sandbox) as call:
        seen: dict[str, int] = {}
        expired = {"Authorization": f"Bearer {sandbox.access_token(lifetime=1)}"}
        sandbox.clock.advance(seconds=2)
        for name, headers in (("missing_token", {"Authorization": ""}), ("expired_token", expired)):
            seen[name], _ = await call("GET", f"{API}/me", headers=headers)
            assert ("www-authenticate" in call.headers) == (seen[name] == 401)
        seen["created"], signing = await call("POST", f"{API}/signings", json={"name": "A", "language": "EN"})
        path = f"{API}/signings/{signing['id']}"
        assert (await call.upload(signing["id"]))[0] == seen["created"]
        status, person = await call("POST", f"{path}/recipients", json={"email": "a@b.example"})
        assert status == seen["created"]
        for name, address in (("send", f"{path}/send"), ("remind", f"{path}/recipients/{person['id']}/remind")):
            seen[name], body = await call("POST", address)
            assert (body == b"") == (seen[name] == 204)
        seen["not_editable"], _ = await call.upload(signing["id"])
        assert seen == statuses
        status, body = await call("POST", TOKEN, data={})
        assert (status, body["error" if shape == "oauth" else "code"]) == (400, "invalid_request")


# formats


@each("timestamps", "iso_z", "iso_micros", "iso_offset", "epoch_seconds", "epoch_millis")
async def test_every_timestamp_format_is_the_same_time(call: Caller, timestamps: str) -> None:
    signing = await call.ok("GET", f"{API}/signings/{await call.draft()}")
    value, now = signing["created_at"], datetime.now(UTC)
    if timestamps.startswith("epoch"):
        assert isinstance(value, int)
        moment = datetime.fromtimestamp(value / (1000 if timestamps == "epoch_millis" else 1), UTC)
    else:
        moment = datetime.fromisoformat(value)
        assert value.endswith("+01:00" if timestamps == "iso_offset" else "Z")
        assert ("." in value) == (timestamps == "iso_micros")
    assert abs((moment - now).total_seconds()) < 30
    assert signing["cancelled_at"] is None


@each("request_id", "both", "header", "body", "none")
async def test_request_id_is_in_the_body_or_header_of_successes_and_errors(call: Caller, request_id: str) -> None:
    for path in (f"{API}/me", "/nope"):
        _, body = await call("GET", path)
        assert ("request_id" in body) == (request_id in {"both", "body"})
        assert ("request_id" in call.headers) == (request_id in {"both", "header"})


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        pytest.param(unit, expected, marks=run(expires_in_unit=unit, access_token_lifetime=600))
        for unit, expected in (("seconds", 600), ("minutes", 10), ("milliseconds", 600_000))
    ],
)
async def test_expires_in_has_the_profiles_unit(call: Caller, unit: str, expected: int) -> None:
    app = call.sandbox.register_app("http://127.0.0.1:1/")
    assert (await call.ok("POST", TOKEN, data=exchange(call.sandbox, app)))["expires_in"] == expected


# names of fields


@run(recipient_completed_field="signed_at", phone_field="mobile", identification_field="ssn")
async def test_recipient_fields_have_the_profiles_names(call: Caller) -> None:
    signing_id = await call.draft()
    await call.upload(signing_id)
    person = await call.recipient(signing_id, signing_method="sms", mobile="+4670", ssn="1212")
    await call.ok("POST", f"{API}/signings/{signing_id}/send")
    await call.sandbox.sign(person)
    [row] = (await call.ok("GET", f"{API}/signings/{signing_id}/recipients"))["data"]
    assert (row["mobile"], row["ssn"]) == ("+4670", "1212")
    assert row["signed_at"]
    assert "completed_at" not in row


@run(
    signing_methods=("approval", "fax"),
    phone_methods=("fax",),
    identification_methods=(),
    default_signing_order="sequential",
)
async def test_signing_methods_are_the_profiles_and_the_first_is_the_default(call: Caller) -> None:
    signing_id = await call.draft()
    await call.recipient(signing_id)
    [row] = (await call.ok("GET", f"{API}/signings/{signing_id}/recipients"))["data"]
    assert (row["signing_method"], row["order"]) == ("approval", 1)
    path = f"{API}/signings/{signing_id}/recipients"
    status, body = await call("POST", path, json={"email": "a@b.example", "signing_method": "fax"})
    assert (status, list(body["errors"])) == (400, ["phone"])
    assert (await call("POST", path, json={"email": "a@b.example", "signing_method": "bankid"}))[0] == 400


@each("document_name", "filename", "stem")
async def test_document_name_is_the_files_with_or_without_pdf(call: Caller, document_name: str) -> None:
    signing_id = await call.draft()
    names = [(await call.upload(signing_id, filename=name))[1]["name"] for name in ("Lease.PDF", "lease", ".pdf")]
    assert names == (["Lease.PDF", "lease", ".pdf"] if document_name == "filename" else ["Lease", "lease", ".pdf"])


# limits


@pytest.mark.parametrize(
    ("megabyte", "accept_exact_limit"),
    [pytest.param(size, exact, marks=run(megabyte=size, accept_exact_limit=exact), id=f"{size} {exact}")
     for size, exact in ((2**20, True), (10**6, False))],
)  # fmt: skip
async def test_ten_megabytes_follow_the_profile_and_exactly_that_is_accepted_or_not(
    call: Caller, megabyte: int, accept_exact_limit: bool
) -> None:
    signing_id = await call.draft()
    for size, accepted in ((-1, True), (0, accept_exact_limit), (1, False)):
        data = make_pdf(10 * megabyte + size)
        assert len(data) == 10 * megabyte + size
        status, body = await call.upload(signing_id, data)
        assert (status, body.get("code")) == ((201, None) if accepted else (422, "too_large"))
    assert len(call.sandbox.documents(signing_id)) == 1 + accept_exact_limit


@run(max_documents=2, max_recipients=1)
async def test_documents_and_recipients_are_limited_by_the_profile(call: Caller) -> None:
    signing_id = await call.draft()
    assert [(await call.upload(signing_id))[0] for _ in range(3)] == [201, 201, 400]
    await call.recipient(signing_id)
    path = f"{API}/signings/{signing_id}/recipients"
    assert (await call("POST", path, json={"email": "b@b.example"}))[0] == 400


# the profile itself


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("pagination", "offset"), ("timestamps", []), ("expired_token_status", 404), ("created_status", True),
        ("cursor_param", ""), ("limit_param", "a b"), ("items_field", 5), ("cursor_param", "limit"), ("page_size", 101),
        ("page_size", True), ("max_page_size", 10**7), ("max_documents", 0), ("record_field", ""), ("replay_grace", -1),
        ("access_token_lifetime", float("inf")), ("code_lifetime", "600"), ("rotate_refresh_tokens", 1),
        ("required_signing_fields", "message"), ("required_signing_fields", ("name",)), ("signing_methods", ()),
        ("signing_methods", (1,)), ("phone_methods", ("fax",)), ("phone_field", "completed_at"),
        ("invitation_days", None), ("megabyte", 1024),
    ],
)  # fmt: skip
def test_invalid_setting_is_a_value_error_that_names_it_and_the_value(setting: str, value: object) -> None:
    with pytest.raises(ValueError, match=setting) as caught:
        Profile(**{setting: value})  # type: ignore[arg-type]  # that is the point
    shown = value[0] if isinstance(value, tuple) and value else value
    assert repr(shown) in str(caught.value) or isinstance(value, tuple)


def test_presets_can_be_changed_and_unknown_ones_are_refused() -> None:
    profiles = [Profile.preset(name) for name in PRESETS]
    assert profiles == [Profile(), Profile.laravel(), Profile.rfc9457(), Profile.numeric()]
    assert len(set(profiles)) == 4
    assert Profile.laravel(page_size=7).page_size == 7
    assert Profile.numeric().replace(ids="uuid").ids == "uuid"
    with pytest.raises(ValueError, match=r"'nope'.*laravel"):
        Profile.preset("nope")
    profile = Profile(signing_methods=["email"])  # type: ignore[arg-type]  # lists will do
    assert profile == Profile(signing_methods=("email",))
    assert (profile.phone_methods, profile.identification_methods) == ((), ())
