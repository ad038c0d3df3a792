"""The control API under /sandbox/api, and its protection against other sites."""

from __future__ import annotations

import asyncio
import json
import os
import re
from asyncio.subprocess import PIPE
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from signing_async import MemoryTokenStore, OAuth, SigningClient
from signing_async.sandbox import Profile, Sandbox
from tests.guides import ROOT
from tests.needs import needs
from tests.sandbox.receiving import Receiver
from tests.sandbox.serving import API, Caller

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


async def test_signings_are_found_by_state_any_name_an_address_or_an_id(
    call: Caller,
) -> None:
    signing_id, document_id, [person] = await call.sent(name="Lease of Åsögatan")
    await call.recipient(other := await call.draft(name="100% agreed"), first_name="Björn", last_name="Lind")
    await call.upload(other, filename="Annex.pdf")
    for query, found in (
        *((query, [signing_id]) for query in ("search=ÅSÖ", "state=sent", "search=P0@EXAMPLE.com")),
        *((query, [signing_id]) for query in (f"search={signing_id}", f"search={person}", "limit=1&state=sent")),
        *((query, [other]) for query in ("search=%25", "search=annex.pdf", "search=björn lind")),
        *(("search=_", []), ("search=", [other, signing_id])),
    ):
        rows = (await call.ok("GET", f"{CONTROL}/signings?{query}"))["items"]
        assert [row["id"] for row in rows] == found, query
    signing = await call.ok("GET", f"{CONTROL}/signings/{signing_id}")
    assert [row["id"] for row in signing["documents"]] == [document_id]
    assert signing["recipients"][0]["signing_page"] == f"{call.sandbox.base_url}/sandbox/sign/{person}"


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


async def test_curl_lines_of_the_guide_are_accepted(call: Caller) -> None:
    """A shell runs them as printed, but for the port, with the values that earlier responses showed."""
    needs("curl")
    values: dict[str, str] = {}

    async def run(line: str) -> None:
        line = line.replace("localhost:8080", f"localhost:{call.sandbox.base_url.rpartition(':')[2]}")
        line = line.replace("curl", "curl -fsS", 1)
        process = await asyncio.create_subprocess_shell(line, env=os.environ | values, stdout=PIPE, stderr=PIPE)
        shown, errors = await process.communicate()
        assert process.returncode == 0, (line, errors)
        body = json.loads(shown)
        values.update({name.upper(): body[name] for name in body.keys() & {"client_id", "client_secret", "code"}})

    guide = (ROOT / "signing_async/sandbox/README.md").read_text("utf-8")
    reset, *lines = re.findall(r"^\$ (curl .*)$", guide, re.MULTILINE)
    await run(reset)
    call.sandbox.webhooks.register("http://127.0.0.1:1/")
    values["SIGNING"], _, [values["RECIPIENT"]] = await call.sent()
    values["DELIVERY"] = call.sandbox.webhooks.deliveries()[0].id
    for line in lines:
        await run(line)
    assert {"CLIENT_ID", "CLIENT_SECRET", "CODE"} <= values.keys()


INVALID: list[tuple[str, str, dict[str, Any], str | None]] = [
    ("POST", "apps", {"name": "My app"}, "redirect_uri"),
    ("POST", "apps/{app}/authorize", {"state": 1}, "state"),
    ("POST", "apps/{app}/authorize", {"code_challenge": "short"}, None),
    ("POST", "access-tokens", {"lifetime": 0}, "lifetime"),
    ("POST", "clock/advance", {}, None),
    ("POST", "clock/advance", {"days": -1}, None),
    ("POST", "clock/advance", {"days": 365 * 8000}, None),  # past the year 9999
    ("POST", "clock/advance", {"days": "1"}, "days"),
    ("POST", "clock/advance", {"weeks": 1}, "weeks"),
    ("POST", "faults", {}, "operation"),
    ("POST", "faults", {"operation": "me", "kind": "500", "times": "1"}, "times"),
    ("POST", "faults", {"operation": "me", "kind": "500", "self": "1"}, None),
    ("PUT", "rate-limit", {}, None),
    ("PUT", "rate-limit", {"rate": -1}, "rate"),
    ("POST", "webhooks", {"url": "http://127.0.0.1/", "secret": 1}, "secret"),
    ("POST", "webhooks", {"url": "http://192.0.2.1/"}, "url"),
    *(("GET", f"signings?{query}", {}, query.partition("=")[0]) for query in ("state=gone", "limit=0", "limit=1001")),
]
UNKNOWN = (
    *(("POST", "recipients/x/sign"), ("POST", "signings/x/complete"), ("GET", "requests/x"), ("DELETE", "faults/x")),
    *(("DELETE", "webhooks/x"), ("GET", "nowhere"), ("POST", "apps/x/authorize")),
)


@pytest.mark.signing_sandbox(profile=Profile.rfc9457())
async def test_errors_have_one_shape_in_every_profile_and_invalid_requests_change_nothing(call: Caller) -> None:
    sandbox = call.sandbox
    app = sandbox.register_app(redirect_uri="http://127.0.0.1:3000/callback")
    for method, path, body, field in INVALID:
        status, response = await call(method, f"{CONTROL}/{path.format(app=app.client_id)}", json=body)
        assert (status, list(response["errors"])) == (400, [field] if field else []), body
    for method, path in UNKNOWN:
        status, response = await call(method, f"{CONTROL}/{path}")
        assert (status, response["code"], response["errors"]) == (404, "not_found", {}), path
        assert response.keys() == {"code", "message", "errors"}
    assert (sandbox.faults.arranged, sandbox.current_rate_limit, len(sandbox.apps)) == ([], None, 1)
    assert (sandbox.webhooks.endpoints(), sandbox.clock.offset.total_seconds()) == ([], 0)


async def test_clock_is_advanced_and_expires_access_tokens(call: Caller, signing_sandbox: Sandbox) -> None:
    token = (await call.ok("POST", f"{CONTROL}/access-tokens", json={"lifetime": 86_430}))["access_token"]
    assert await call.works(token)
    advanced = await call.ok("POST", f"{CONTROL}/clock/advance", json={"days": 1, "seconds": 30})
    assert advanced["ahead_seconds"] == signing_sandbox.clock.offset.total_seconds() == 86_430
    assert (await call.ok("GET", f"{CONTROL}/clock"))["ahead_seconds"] == 86_430
    assert not await call.works(token)
    assert await call.works((await call.ok("POST", f"{CONTROL}/access-tokens"))["access_token"])


async def test_faults_and_the_rate_limit_are_set_listed_and_removed(call: Caller, signing_sandbox: Sandbox) -> None:
    shown = await call.ok("POST", f"{CONTROL}/faults", json={"operation": "me", "kind": "429", "retry_after": 3})
    assert shown["details"] == {"retry_after": 3}
    assert (await call("GET", f"{API}/me"))[0] == 429
    assert [row["hits"] for row in (await call.ok("GET", f"{CONTROL}/faults"))["items"]] == [1]
    second = await call.ok("POST", f"{CONTROL}/faults", json={"operation": "*", "kind": "500"})
    await call.ok("POST", f"{CONTROL}/faults", json={"operation": "*", "kind": "empty"})
    await call.ok("DELETE", f"{CONTROL}/faults/{second['id']}")
    assert [row.kind for row in signing_sandbox.faults.arranged] == ["429", "empty"]
    await call.ok("DELETE", f"{CONTROL}/faults")
    assert signing_sandbox.faults.arranged == []
    assert await call.ok("GET", f"{CONTROL}/rate-limit") == {"rate": None, "burst": None, "retry_after": None}
    limit = await call.ok("PUT", f"{CONTROL}/rate-limit", json={"rate": 0.01, "burst": 1})
    assert limit == {"rate": 0.01, "burst": 1, "retry_after": None}
    assert [(await call("GET", f"{API}/me"))[0] for _ in range(2)] == [200, 429]
    await call.ok("PUT", f"{CONTROL}/rate-limit", json={"rate": None})
    assert (await call("GET", f"{API}/me"))[0] == 200


async def test_requests_notifications_and_deliveries_are_listed_newest_first(call: Caller) -> None:
    _, _, [person] = await call.sent()
    call.sandbox.webhooks.register("http://127.0.0.1:1/")
    await call.sandbox.sign(person)
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
    call: Caller, signing_sandbox: Sandbox, receiver: Receiver
) -> None:
    receiver.location = "/hook?code=s3cret"
    made = await call.ok("POST", f"{CONTROL}/webhooks", json={"url": receiver.url})
    assert made["secret"].startswith("whsec_")
    listed = await call.ok("GET", f"{CONTROL}/webhooks")
    assert [row["url"] for row in listed["items"]] == [receiver.url]
    assert made["secret"] not in str(listed)
    await call.draft()
    await signing_sandbox.webhooks.settled()
    [delivery] = signing_sandbox.webhooks.deliveries()
    whole = await call.ok("GET", f"{CONTROL}/deliveries/{delivery.id}")
    assert (whole["state"], whole["attempt_count"]) == ("delivered", 1)
    assert whole["body"].encode() == receiver.bodies[0]
    [attempt] = whole["attempts"]
    assert (attempt["status"], attempt["signature"]) == (202, receiver.signatures[0])
    assert (attempt["response_headers"]["Location"], attempt["response_body"]) == ("/hook", "")
    again = await call.ok("POST", f"{CONTROL}/deliveries/{delivery.id}/resend")
    assert (again["event_id"], again["attempts"]) == (delivery.event_id, [])
    assert again["id"] != delivery.id
    await receiver.got(2)
    assert receiver.bodies[0] == receiver.bodies[1]
    await call.ok("DELETE", f"{CONTROL}/webhooks/{made['id']}")
    assert signing_sandbox.webhooks.endpoints() == []


async def test_reset_deletes_signings_faults_and_the_log_and_keeps_users_and_endpoints(call: Caller) -> None:
    call.sandbox.webhooks.register("http://127.0.0.1:1/")
    await call.sent()
    call.sandbox.clock.advance(days=1)
    call.sandbox.faults.add("me", "500")
    call.sandbox.rate_limit(1)
    await call.ok("POST", f"{CONTROL}/reset")
    assert (call.sandbox.signings, call.sandbox.documents(), call.sandbox.recipients()) == ([], [], [])
    assert (call.sandbox.notifications, call.sandbox.webhooks.deliveries()) == ([], [])
    assert (call.sandbox.faults.arranged, call.sandbox.current_rate_limit) == ([], None)
    assert (call.sandbox.clock.offset.total_seconds(), call.sandbox.requests) == (0, [])
    assert len(call.sandbox.webhooks.endpoints()) == 1
    await call.sent()


async def test_requests_that_another_site_makes_a_browser_send_are_refused(call: Caller) -> None:
    signing_id, _, _ = await call.sent()
    foreign: tuple[tuple[dict[str, Any], int], ...] = (
        ({"headers": {"Host": "evil.example"}, "json": {}}, 421),
        ({"headers": {"Host": "[::1"}, "json": {}}, 421),
        ({"headers": {"Origin": "https://evil.example"}}, 403),
        ({"headers": {"Sec-Fetch-Site": "cross-site"}, "json": {}}, 403),
        ({"data": {"a": "b"}}, 415),
        ({"headers": {"Content-Type": "text/plain"}, "data": b"{}"}, 415),
    )
    for options, expected in foreign:
        assert (await call("POST", f"{CONTROL}/signings/{signing_id}/complete", **options))[0] == expected
        assert call.sandbox.signing(signing_id).state == "sent"


@pytest.mark.signing_sandbox(host="0.0.0.0")
async def test_sandbox_that_listens_for_other_machines_accepts_other_host_names(call: Caller) -> None:
    assert (await call("GET", f"{CONTROL}/clock", headers={"Host": "sandbox.lan"}))[0] == 200
