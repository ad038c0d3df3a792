"""The control API under /sandbox/api, and its protection against other sites."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from aiohttp import web

from signing_async import MemoryTokenStore, OAuth, SigningClient
from signing_async.sandbox import Profile, Sandbox
from signing_async.sandbox.openapi import document
from tests.sandbox.serving import API, Caller, caller

CONTROL = "/sandbox/api"


async def test_recipients_sign_and_decline_and_signings_are_completed_and_cancelled(call: Caller) -> None:
    first, second, third, fourth = [await call.sent() for _ in range(4)]
    done = await call.ok("POST", f"{CONTROL}/recipients/{first[2][0]}/sign")
    assert (done["state"], done["recipients"][0]["id"]) == ("completed", first[2][0])
    assert (await call.ok("POST", f"{CONTROL}/recipients/{second[2][0]}/decline", json={}))["state"] == "cancelled"
    assert (await call.ok("POST", f"{CONTROL}/signings/{third[0]}/complete"))["state"] == "completed"
    assert (await call.ok("POST", f"{CONTROL}/signings/{fourth[0]}/cancel"))["state"] == "cancelled"
    listed = await call.ok("GET", f"{CONTROL}/signings")
    assert [row["state"] for row in listed["items"]] == ["cancelled", "completed", "cancelled", "completed"]
    assert listed["total"] == 4


async def test_signings_are_found_by_search_and_state(call: Caller) -> None:
    signing_id, document_id, [person] = await call.sent(name="Lease")
    await call.draft(name="Other")
    for query in ("search=lease", "state=sent", "search=P0@EXAMPLE.com", f"search={person}", "limit=1&state=sent"):
        found = await call.ok("GET", f"{CONTROL}/signings?{query}")
        assert [row["id"] for row in found["items"]] == [signing_id], query
    signing = await call.ok("GET", f"{CONTROL}/signings/{signing_id}")
    assert [row["id"] for row in signing["documents"]] == [document_id]
    assert signing["recipients"][0]["signing_page"] == f"{call.sandbox.base_url}/sandbox/sign/{person}"
    for query in ("state=gone", "limit=0", "limit=x", "limit=1001"):
        assert (await call("GET", f"{CONTROL}/signings?{query}"))[0] == 400


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "recipients/x/sign"),
        ("POST", "recipients/x/decline"),
        ("POST", "signings/x/complete"),
        ("POST", "signings/x/cancel"),
        ("GET", "signings/x"),
        ("GET", "requests/x"),
        ("GET", "deliveries/x"),
        ("POST", "deliveries/x/resend"),
        ("DELETE", "faults/x"),
        ("DELETE", "webhooks/x"),
        ("GET", "nowhere"),
    ],
)
@pytest.mark.parametrize("preset", ["default", "rfc9457"])
async def test_errors_have_one_shape_in_every_profile(method: str, path: str, preset: str) -> None:
    async with Sandbox(profile=Profile.preset(preset)) as sandbox, caller(sandbox) as call:
        status, body = await call(method, f"{CONTROL}/{path}")
        assert (status, body["code"], body["errors"]) == (404, "not_found", {})
        assert body.keys() == {"code", "message", "errors"}


async def test_app_is_registered_and_authorized_without_a_browser(call: Caller) -> None:
    redirect_uri = "http://127.0.0.1:3000/callback?next=1"
    app = await call.ok("POST", f"{CONTROL}/apps", json={"name": "My app", "redirect_uri": redirect_uri})
    base_url, store = call.sandbox.base_url, MemoryTokenStore()
    secret = {"client_id": app["client_id"], "client_secret": app["client_secret"]}
    async with OAuth(base_url, **secret, redirect_uri=redirect_uri, store=store) as oauth:
        request = oauth.authorization_request()
        query = dict(parse_qsl(urlsplit(request.url).query))
        given = {name: query[name] for name in ("state", "code_challenge", "code_challenge_method")}
        granted = await call.ok("POST", f"{CONTROL}/apps/{app['client_id']}/authorize", json=given)
        assert granted["callback_url"] == f"{redirect_uri}&code={granted['code']}&state={request.state}"
        assert granted["code"] not in "".join(str(record.response_body) for record in call.sandbox.requests)
        await oauth.exchange(granted["callback_url"], request.state, request.code_verifier)
        async with SigningClient(base_url, oauth) as client:
            assert (await client.me()).email
    granted = await call.ok("POST", f"{CONTROL}/apps/{app['client_id']}/authorize")
    assert granted["callback_url"] == f"{redirect_uri}&code={granted['code']}"


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("apps", {"name": "My app"}, 400, "redirect_uri"),
        ("apps", {"name": 1, "redirect_uri": "http://127.0.0.1/"}, 400, "name"),
        ("apps", {"name": "My app", "redirect_uri": "nowhere"}, 400, "redirect_uri"),
        ("apps/x/authorize", {}, 404, None),
        ("apps/{app}/authorize", {"state": 1}, 400, "state"),
        ("apps/{app}/authorize", {"code_challenge": "short"}, 400, None),
    ],
)
async def test_invalid_registration_or_authorization_names_the_field(
    call: Caller, path: str, body: dict[str, Any], status: int, field: str | None
) -> None:
    app = call.sandbox.register_app(redirect_uri="http://127.0.0.1:3000/callback")
    found, answer = await call("POST", f"{CONTROL}/{path.format(app=app.client_id)}", json=body)
    assert (found, list(answer["errors"])) == (status, [field] if field else [])


async def test_clock_is_advanced_by_any_units(call: Caller, signing_sandbox: Sandbox) -> None:
    advanced = await call.ok("POST", f"{CONTROL}/clock/advance", json={"days": 1, "seconds": 30})
    assert advanced["ahead_seconds"] == 86_430
    assert signing_sandbox.clock.offset.total_seconds() == 86_430
    assert (await call.ok("GET", f"{CONTROL}/clock"))["ahead_seconds"] == 86_430
    mistakes: list[dict[str, Any]] = [
        {"days": "1"}, {"weeks": 1}, {}, {"days": -1}, {"days": 1e9}, {"days": True},
    ]  # fmt: skip
    for body in mistakes:
        assert (await call("POST", f"{CONTROL}/clock/advance", json=body))[0] == 400
    assert signing_sandbox.clock.offset.total_seconds() == 86_430


async def test_faults_are_arranged_listed_and_removed(call: Caller, signing_sandbox: Sandbox) -> None:
    fault = {"operation": "me", "kind": "429", "retry_after": 3}
    shown = await call.ok("POST", f"{CONTROL}/faults", json=fault)
    assert shown["details"] == {"retry_after": 3}
    assert (await call("GET", f"{API}/me"))[0] == 429
    assert [row["hits"] for row in (await call.ok("GET", f"{CONTROL}/faults"))["items"]] == [1]
    second = await call.ok("POST", f"{CONTROL}/faults", json={"operation": "*", "kind": "500"})
    await call.ok("POST", f"{CONTROL}/faults", json={"operation": "*", "kind": "empty"})
    await call.ok("DELETE", f"{CONTROL}/faults/{second['id']}")
    assert [row.kind for row in signing_sandbox.faults.arranged] == ["429", "empty"]
    await call.ok("DELETE", f"{CONTROL}/faults")
    assert signing_sandbox.faults.arranged == []


@pytest.mark.parametrize(
    ("mistake", "field"),
    [
        ({}, "operation"),
        ({"operation": "me"}, "kind"),
        ({"operation": 1, "kind": []}, "operation"),
        ({"operation": "x", "kind": "500"}, "operation"),
        ({"operation": "me", "kind": "x"}, "kind"),
        ({"operation": "me", "kind": "500", "x": 1}, "x"),
        ({"operation": "me", "kind": "500", "times": "1"}, "times"),
        ({"operation": "me", "kind": "500", "self": "1"}, None),
    ],
)
async def test_invalid_fault_names_the_field(call: Caller, mistake: dict[str, Any], field: str | None) -> None:
    status, body = await call("POST", f"{CONTROL}/faults", json=mistake)
    assert (status, body["code"], list(body["errors"])) == (400, "validation_failed", [field] if field else [])
    assert call.sandbox.faults.arranged == []


async def test_rate_limit_is_set_and_lifted(call: Caller) -> None:
    assert await call.ok("GET", f"{CONTROL}/rate-limit") == {"rate": None, "burst": None, "retry_after": None}
    limit = await call.ok("PUT", f"{CONTROL}/rate-limit", json={"rate": 0.01, "burst": 1})
    assert limit == {"rate": 0.01, "burst": 1, "retry_after": None}
    assert [(await call("GET", f"{API}/me"))[0] for _ in range(2)] == [200, 429]
    await call.ok("PUT", f"{CONTROL}/rate-limit", json={"rate": None})
    assert (await call("GET", f"{API}/me"))[0] == 200
    for mistake in ({}, {"rate": -1}, {"rate": "x"}, {"rate": 1, "x": 2}):
        assert (await call("PUT", f"{CONTROL}/rate-limit", json=mistake))[0] == 400


async def test_requests_notifications_and_deliveries_are_listed_newest_first(
    call: Caller, signing_sandbox: Sandbox
) -> None:
    _, _, [person] = await call.sent()
    signing_sandbox.webhooks.register("http://127.0.0.1:1/")
    await signing_sandbox.sign(person)
    requests = (await call.ok("GET", f"{CONTROL}/requests?limit=4"))["items"]
    assert [row["operation"] for row in requests][1:3] == ["signings.send", "recipients.add"]
    assert "Bearer" not in str(requests)
    [created] = (await call.ok("GET", f"{CONTROL}/requests?operation=signings.create"))["items"]
    whole = await call.ok("GET", f"{CONTROL}/requests/{created['id']}")
    assert '"name": "A contract"' in whole["request_body"]
    assert whole["headers"]["Authorization"] == "[redacted]"
    notifications = await call.ok("GET", f"{CONTROL}/notifications?email=p0@example.com")
    assert [row["recipient_id"] for row in notifications["items"]] == [person]
    assert (await call.ok("GET", f"{CONTROL}/notifications?email=x@example.com"))["items"] == []
    deliveries = (await call.ok("GET", f"{CONTROL}/deliveries"))["items"]
    assert [row["event_type"] for row in deliveries] == ["signing.completed", "recipient.signed"]


async def test_webhooks_are_registered_and_removed_and_deliveries_resent(
    call: Caller, signing_sandbox: Sandbox
) -> None:
    async def accept(_: web.Request) -> web.Response:
        return web.Response(status=202, text='{"secret": "x", "ok": true}', content_type="application/json")

    app = web.Application()
    app.add_routes([web.post("/hook", accept)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    made = await call.ok("POST", f"{CONTROL}/webhooks", json={"url": url})
    assert made["secret"].startswith("whsec_")
    listed = await call.ok("GET", f"{CONTROL}/webhooks")
    assert [row["url"] for row in listed["items"]] == [url]
    assert made["secret"] not in str(listed)
    await call.draft()
    await signing_sandbox.webhooks.settled()
    [delivery] = signing_sandbox.webhooks.deliveries()
    whole = await call.ok("GET", f"{CONTROL}/deliveries/{delivery.id}")
    assert (whole["state"], whole["attempt_count"]) == ("delivered", 1)
    [attempt] = whole["attempts"]
    assert (attempt["status"], attempt["response_body"]) == (202, '{"secret": "[redacted]", "ok": true}')
    assert attempt["signature"]
    again = await call.ok("POST", f"{CONTROL}/deliveries/{delivery.id}/resend")
    assert (again["event_id"], again["attempts"]) == (delivery.event_id, [])
    await call.ok("DELETE", f"{CONTROL}/webhooks/{made['id']}")
    assert signing_sandbox.webhooks.endpoints() == []
    for mistake in ({}, {"url": 1}, {"url": "http://127.0.0.1/", "secret": 1}, {"url": "http://192.0.2.1/"}):
        assert (await call("POST", f"{CONTROL}/webhooks", json=mistake))[0] == 400
    await runner.cleanup()


async def test_access_token_is_created_for_the_default_user(call: Caller, signing_sandbox: Sandbox) -> None:
    token = (await call.ok("POST", f"{CONTROL}/access-tokens", json={"lifetime": 60}))["access_token"]
    headers = {"Authorization": f"Bearer {token}"}
    assert (await call("GET", f"{API}/me", headers=headers))[0] == 200
    signing_sandbox.clock.advance(seconds=61)
    assert (await call("GET", f"{API}/me", headers=headers))[0] == 401
    assert (await call.ok("POST", f"{CONTROL}/access-tokens"))["access_token"]
    for lifetime in (0, -1, "1", True, 1e10):
        assert (await call("POST", f"{CONTROL}/access-tokens", json={"lifetime": lifetime}))[0] == 400


async def test_reset_deletes_signings_faults_and_the_log_and_keeps_users_and_endpoints(
    call: Caller, signing_sandbox: Sandbox
) -> None:
    signing_sandbox.webhooks.register("http://127.0.0.1:1/")
    await call.sent()
    signing_sandbox.clock.advance(days=1)
    signing_sandbox.faults.add("me", "500")
    signing_sandbox.rate_limit(1)
    await call.ok("POST", f"{CONTROL}/reset")
    assert (signing_sandbox.signings, signing_sandbox.documents(), signing_sandbox.recipients()) == ([], [], [])
    assert (signing_sandbox.notifications, signing_sandbox.webhooks.deliveries()) == ([], [])
    assert (signing_sandbox.faults.arranged, signing_sandbox.current_rate_limit) == ([], None)
    assert signing_sandbox.clock.offset.total_seconds() == 0
    assert signing_sandbox.requests == []
    assert len(signing_sandbox.webhooks.endpoints()) == 1
    await call.sent()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"headers": {"Host": "evil.example"}, "json": {}}, 421),
        ({"headers": {"Host": "[::1"}, "json": {}}, 421),
        ({"headers": {"Origin": "https://evil.example"}, "json": {}}, 403),
        ({"headers": {"Origin": "https://evil.example"}}, 403),
        ({"headers": {"Sec-Fetch-Site": "cross-site"}, "json": {}}, 403),
        ({"data": {"a": "b"}}, 415),
        ({"headers": {"Content-Type": "text/plain"}, "data": b"{}"}, 415),
    ],
)
async def test_requests_that_another_site_makes_a_browser_send_are_refused(
    call: Caller, signing_sandbox: Sandbox, options: dict[str, Any], expected: int
) -> None:
    signing_id, _, _ = await call.sent()
    assert (await call("POST", f"{CONTROL}/signings/{signing_id}/complete", **options))[0] == expected
    assert signing_sandbox.signing(signing_id).state == "sent"


@pytest.mark.signing_sandbox(host="0.0.0.0")
async def test_sandbox_that_listens_for_other_machines_accepts_other_host_names(call: Caller) -> None:
    assert (await call("GET", f"{CONTROL}/clock", headers={"Host": "sandbox.lan"}))[0] == 200


def test_control_api_is_documented_apart_from_the_service() -> None:
    operations = [op for path in document(Profile())["paths"].values() for op in path.values()]
    tags = {operation["operationId"]: operation["tags"] for operation in operations}
    assert tags["signings.send"] == ["service"]
    assert tags["control.signAsRecipient"] == ["control"]
    assert len([name for name in tags if name.startswith("control.")]) == 27
