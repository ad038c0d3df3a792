"""The sandbox's own HTTP interface under /sandbox/api, and its protection against other sites."""

from __future__ import annotations

from typing import Any

import pytest

from signing_async.sandbox import Sandbox
from tests.sandbox.serving import API, Caller

OWN = "/sandbox/api"


async def test_people_sign(call: Caller, signing_sandbox: Sandbox) -> None:
    """A recipient signs, another declines, a third signing is completed and a fourth cancelled."""
    first, second, third, fourth = [await call.sent() for _ in range(4)]
    assert await call.ok("POST", f"{OWN}/recipients/{first[2][0]}/sign", json={}) == {"state": "completed"}
    assert await call.ok("POST", f"{OWN}/recipients/{second[2][0]}/decline", json={}) == {"state": "cancelled"}
    assert await call.ok("POST", f"{OWN}/signings/{third[0]}/complete", json={}) == {"state": "completed"}
    assert await call.ok("POST", f"{OWN}/signings/{fourth[0]}/cancel", json={}) == {"state": "cancelled"}
    state = await call.ok("GET", f"{OWN}/state")
    assert [row["state"] for row in state["signings"]] == ["completed", "cancelled", "completed", "cancelled"]


@pytest.mark.parametrize(
    "path", ["recipients/x/sign", "recipients/x/decline", "signings/x/complete", "signings/x/cancel"]
)
async def test_unknown_ids(call: Caller, path: str) -> None:
    """What does not exist is a 404 in the profile's shape."""
    status, body = await call("POST", f"{OWN}/{path}", json={})
    assert (status, body["code"]) == (404, "not_found")


async def test_the_clock(call: Caller, signing_sandbox: Sandbox) -> None:
    """The clock is advanced by any units; what is no number, or leads nowhere, is a 400."""
    await call.ok("POST", f"{OWN}/clock/advance", json={"days": 1, "seconds": 30})
    assert signing_sandbox.clock.offset.total_seconds() == 86_430
    assert (await call.ok("GET", f"{OWN}/state"))["ahead_seconds"] == 86_430
    for body in ({"days": "1"}, {"weeks": 1}, {}, {"days": -1}, {"days": 1e9}, {"days": True}):
        assert (await call("POST", f"{OWN}/clock/advance", json=body))[0] == 400
    assert signing_sandbox.clock.offset.total_seconds() == 86_430


async def test_faults(call: Caller, signing_sandbox: Sandbox) -> None:
    """Faults are arranged, listed and cleared; mistakes are told as in Python."""
    fault = {"operation": "me", "kind": "429", "retry_after": 3}
    shown = await call.ok("POST", f"{OWN}/faults", json=fault)
    assert shown["details"] == {"retry_after": 3}
    assert (await call("GET", f"{API}/me"))[0] == 429
    assert [row["hits"] for row in await call.ok("GET", f"{OWN}/faults")] == [1]
    mistakes: list[dict[str, Any]] = [
        {}, {"operation": "me"}, {"operation": 1, "kind": []}, {"operation": "x", "kind": "500"},
        {"operation": "me", "kind": "500", "x": 1}, {"operation": "me", "kind": "500", "times": "1"},
    ]  # fmt: skip
    for mistake in mistakes:
        assert (await call("POST", f"{OWN}/faults", json=mistake))[0] == 400
    assert await call.ok("DELETE", f"{OWN}/faults") == []
    assert signing_sandbox.faults.arranged == []


async def test_rate_limit(call: Caller) -> None:
    """The rate limit is set and lifted."""
    await call.ok("POST", f"{OWN}/rate-limit", json={"rate": 0.01, "burst": 1})
    assert [(await call("GET", f"{API}/me"))[0] for _ in range(2)] == [200, 429]
    await call.ok("POST", f"{OWN}/rate-limit", json={"rate": None})
    assert (await call("GET", f"{API}/me"))[0] == 200
    for mistake in ({}, {"rate": -1}, {"rate": 1, "x": 2}):
        assert (await call("POST", f"{OWN}/rate-limit", json=mistake))[0] == 400


async def test_what_happened(call: Caller, signing_sandbox: Sandbox) -> None:
    """Requests, notifications and deliveries can be read."""
    _, _, [person] = await call.sent()
    signing_sandbox.webhooks.register("http://127.0.0.1:1/")
    await signing_sandbox.sign(person)
    requests = await call.ok("GET", f"{OWN}/requests")
    assert [row["operation"] for row in requests][:2] == ["signings.create", "documents.upload"]
    assert "Bearer" not in str(requests)
    assert [row["recipient_id"] for row in await call.ok("GET", f"{OWN}/notifications")] == [person]
    kinds = [row["event_type"] for row in await call.ok("GET", f"{OWN}/deliveries")]
    assert kinds == ["recipient.signed", "signing.completed"]


async def test_webhooks(call: Caller, signing_sandbox: Sandbox) -> None:
    """Endpoints are registered, listed without their secrets, and removed; deliveries are sent again."""
    made = await call.ok("POST", f"{OWN}/webhooks", json={"url": "http://127.0.0.1:1/hook"})
    assert made["secret"].startswith("whsec_")
    listed = await call.ok("GET", f"{OWN}/webhooks")
    assert [row["url"] for row in listed] == ["http://127.0.0.1:1/hook"]
    assert made["secret"] not in str(listed)
    await call.draft()
    [delivery] = signing_sandbox.webhooks.deliveries()
    again = await call.ok("POST", f"{OWN}/deliveries/{delivery.id}/resend", json={})
    assert again["event_id"] == delivery.event_id
    await call.ok("DELETE", f"{OWN}/webhooks/{made['id']}")
    assert signing_sandbox.webhooks.endpoints() == []
    for mistake in ({}, {"url": 1}, {"url": "http://127.0.0.1/", "secret": 1}, {"url": "http://192.0.2.1/"}):
        assert (await call("POST", f"{OWN}/webhooks", json=mistake))[0] == 400


async def test_the_authority(call: Caller) -> None:
    """The certificate that seals can be downloaded."""
    status, pem = await call("GET", "/sandbox/authority.pem")
    assert status == 200
    assert pem.startswith(b"-----BEGIN CERTIFICATE-----")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"headers": {"Host": "evil.example"}, "json": {}}, 421),
        ({"headers": {"Origin": "https://evil.example"}, "json": {}}, 403),
        ({"headers": {"Sec-Fetch-Site": "cross-site"}, "json": {}}, 403),
        ({"data": {"a": "b"}}, 415),
        ({"headers": {"Content-Type": "text/plain"}, "data": b"{}"}, 415),
    ],
)
async def test_other_sites(call: Caller, signing_sandbox: Sandbox, options: dict[str, Any], expected: int) -> None:
    """What another site makes a browser send is refused, and nothing is done."""
    signing_id, _, _ = await call.sent()
    assert (await call("POST", f"{OWN}/signings/{signing_id}/complete", **options))[0] == expected
    assert signing_sandbox.signing(signing_id).state == "sent"


@pytest.mark.signing_sandbox(host="0.0.0.0")
async def test_listening_for_others(call: Caller, signing_sandbox: Sandbox) -> None:
    """A sandbox that is told to listen for other machines answers to other names."""
    assert (await call("GET", f"{OWN}/state", headers={"Host": "sandbox.lan"}))[0] == 200
