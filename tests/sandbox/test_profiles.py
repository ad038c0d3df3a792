"""Every setting of the profile in each alternative, as its responses show it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from signing_async import Assumptions, SigningClient
from signing_async.sandbox import Profile, Sandbox
from tests.pdfs import make_pdf
from tests.sandbox.serving import API, TOKEN, Caller, caller, exchange

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

PAGING = {"cursor_param": "after", "limit_param": "per_page", "items_field": "results", "recipients_list": "paged"}


@each("pagination", "meta_cursor", "top_cursor", "next_url", "link_header", "has_more", **PAGING, page_size=2)
async def test_every_style_of_paging_leads_through_a_list_once_and_refuses_a_wrong_cursor(
    call: Caller, pagination: str
) -> None:
    created = [await call.draft() for _ in range(7)]
    people = [await call.recipient(created[0]) for _ in range(5)]
    names = Assumptions(cursor_param="after", limit_param="per_page")
    async with SigningClient(call.sandbox.base_url, call.sandbox.access_token(), assumptions=names) as client:
        for limit, sizes in ((3, [3, 3, 1]), (7, [7])):
            pages = [page.items async for page in client.signings.list(limit=limit).pages()]
            assert [len(items) for items in pages] == sizes
            assert [signing.id for items in pages for signing in items] == created[::-1]
        pages = [page.items async for page in client.recipients.list(created[0]).pages()]
        assert [len(items) for items in pages] == [2, 2, 1]
        assert [recipient.id for items in pages for recipient in items] == people
    for address in (f"{API}/signings", f"{API}/signings/{created[0]}/recipients"):
        status, body = await call("GET", address, params={"after": "nope"})
        assert (status, list(body["errors"])) == (400, ["after"])


@run(pagination="bare", recipients_list="paged")
async def test_bare_list_has_everything_at_once(call: Caller) -> None:
    created = [await call.draft() for _ in range(40)]
    assert [row["id"] for row in await call.ok("GET", f"{API}/signings")] == created[::-1]
    assert (await call.ok("GET", f"{API}/signings/{created[0]}/recipients"))["data"] == []


@run(list_order="oldest_first", documents_in_list=True)
async def test_list_begins_with_the_oldest_and_has_the_documents_if_wanted(call: Caller) -> None:
    created = [await call.draft() for _ in range(5)]
    first = await call.ok("GET", f"{API}/signings?limit=2")
    rest = await call.ok("GET", f"{API}/signings?cursor={first['meta']['next_cursor']}")
    assert [row["id"] for row in first["data"] + rest["data"]] == created
    assert first["data"][0]["documents"] == []


@each("over_page_size", "clamp", "refuse", page_size=2, max_page_size=3)
async def test_page_size_has_a_default_and_a_maximum(call: Caller, over_page_size: str) -> None:
    for _ in range(5):
        await call.draft()
    lengths = [len((await call.ok("GET", f"{API}/signings{query}"))["data"]) for query in ("", "?limit=3")]
    assert lengths == [2, 3]
    status, body = await call("GET", f"{API}/signings?limit=999")
    assert (status, len(body.get("data", []))) == ((200, 3) if over_page_size == "clamp" else (400, 0))


# errors and statuses


LANGUAGE = "The language must be one of EN, SV."
INVALID = {"code": "validation_failed", "message": "The given data was invalid."}
PROBLEM = {"type": "about:blank", "title": "Validation failed", "status": 400, "detail": INVALID["message"]}
ERRORS: dict[str, Any] = {
    "flat": INVALID | {"errors": {"language": [LANGUAGE]}},
    "nested": {"error": INVALID | {"details": [{"field": "language", "message": LANGUAGE}]}},
    "rfc9457": PROBLEM | {"code": "validation_failed", "errors": [{"pointer": "#/language", "detail": LANGUAGE}]},
    "list": {"errors": [{"code": "validation_failed", "message": LANGUAGE, "field": "language"}]},
}


@each("error_shape", *ERRORS, request_id="header")
async def test_errors_have_the_profiles_shape(call: Caller, error_shape: str) -> None:
    refused = await call("POST", f"{API}/signings", json={"name": "A", "language": "DE"})
    assert refused == (400, ERRORS[error_shape])
    status, body = await call("POST", f"{API}/signings/{await call.draft()}/send")
    assert (status, "'code': 'cannot_be_sent'" in str(body), "field" in str(body)) == (400, True, False)
    assert call.headers["content-type"].startswith("application/problem+json") == (error_shape == "rfc9457")


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


# formats and names


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


@each("expires_in_unit", "seconds", "minutes", "milliseconds", access_token_lifetime=600)
async def test_expires_in_has_the_profiles_unit(call: Caller, expires_in_unit: str) -> None:
    app = call.sandbox.register_app("http://127.0.0.1:1/")
    expected = {"seconds": 600, "minutes": 10, "milliseconds": 600_000}[expires_in_unit]
    assert (await call.ok("POST", TOKEN, data=exchange(call.sandbox, app)))["expires_in"] == expected


@run(
    recipient_completed_field="signed_at",
    phone_field="mobile",
    identification_field="ssn",
    signing_methods=("approval", "fax"),
    phone_methods=("fax",),
    identification_methods=(),
    default_signing_order="sequential",
    document_name="stem",
)
async def test_fields_names_and_signing_methods_are_the_profiles(call: Caller) -> None:
    signing_id = await call.draft()
    names = [(await call.upload(signing_id, filename=name))[1]["name"] for name in ("Lease.PDF", "lease", ".pdf")]
    assert names == ["Lease", "lease", ".pdf"]
    person = await call.recipient(signing_id, mobile="+4670", ssn="1212")
    path = f"{API}/signings/{signing_id}/recipients"
    status, body = await call("POST", path, json={"email": "a@b.example", "signing_method": "fax"})
    assert (status, list(body["errors"])) == (400, ["mobile"])
    assert (await call("POST", path, json={"email": "a@b.example", "signing_method": "bankid"}))[0] == 400
    await call.ok("POST", f"{API}/signings/{signing_id}/send")
    await call.sandbox.sign(person)
    [row] = (await call.ok("GET", path))["data"]
    assert (row["mobile"], row["ssn"]) == ("+4670", "1212")
    assert (row["signing_method"], row["order"]) == ("approval", 1)
    assert row["signed_at"]
    assert "completed_at" not in row


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


@run(
    max_documents=2,
    max_recipients=1,
    unique_order="always",
    required_signing_fields=("signing_order", "message"),
    required_recipient_fields=("first_name", "last_name", "order", "signing_method"),
)
async def test_documents_and_recipients_are_limited_and_further_fields_required(call: Caller) -> None:
    status, response = await call("POST", f"{API}/signings", json={"name": "A", "language": "EN"})
    assert (status, set(response["errors"])) == (400, {"signing_order", "message"})
    signing_id = await call.draft(signing_order="parallel", message="Hi")
    assert [(await call.upload(signing_id))[0] for _ in range(3)] == [201, 201, 400]
    path = f"{API}/signings/{signing_id}/recipients"
    status, response = await call("POST", path, json={"email": "a@b.example"})
    assert (status, set(response["errors"])) == (400, {"first_name", "last_name", "order", "signing_method"})
    full = {"email": "a@b.example", "first_name": "A", "last_name": "B", "signing_method": "email"}
    for order, expected in ((1, (201, [])), (1, (400, ["order"])), (2, (400, ["email"]))):
        status, response = await call("POST", path, json=full | {"order": order})
        assert (status, list(response.get("errors", {}))) == expected


# the profile itself


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("pagination", "offset"), ("timestamps", []), ("created_status", True), ("cursor_param", ""),
        ("limit_param", "a b"), ("items_field", 5), ("cursor_param", "limit"), ("page_size", 101), ("page_size", True),
        ("max_page_size", 10**7), ("max_documents", 0), ("replay_grace", -1), ("access_token_lifetime", float("inf")),
        ("code_lifetime", "600"), ("rotate_refresh_tokens", 1), ("required_signing_fields", "message"),
        ("required_signing_fields", ("name",)), ("signing_methods", ()), ("signing_methods", (1,)),
        ("phone_methods", ("fax",)), ("phone_field", "completed_at"), ("invitation_days", None), ("megabyte", 1024),
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
