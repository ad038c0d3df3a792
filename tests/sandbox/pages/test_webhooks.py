"""Webhook endpoints and deliveries; faults and the rate limit."""

from __future__ import annotations

import hashlib
import hmac
import re

import pytest

from tests.sandbox.browsing import Visitor
from tests.sandbox.pages.checks import check_document
from tests.sandbox.serving import API, Caller

WEBHOOKS, FAULTS = "/sandbox/webhooks", "/sandbox/faults"


async def test_endpoint_is_registered_gets_deliveries_and_resends_and_is_removed(
    visitor: Visitor, call: Caller, receiver: str
) -> None:
    webhooks = visitor.sandbox.webhooks
    page = await visitor.send(await visitor.get(WEBHOOKS), WEBHOOKS, url=f" {receiver}/ok ", secret="")
    check_document(page)
    secret = page.main.find("code", id="webhook-secret").text
    [endpoint] = webhooks.endpoints()
    assert (endpoint.url, endpoint.secret) == (f"{receiver}/ok", secret)
    await call.draft()
    await webhooks.settled()
    page = await visitor.get(WEBHOOKS)
    assert secret not in page.html
    assert "signing.created" in page.main.text
    assert "Delivered 1 attempt" in page.main.text
    [first] = webhooks.deliveries()
    page = await visitor.send(page, f"{WEBHOOKS}/deliveries/{first.id}/resend")
    assert page.main.find("p", role="status").text == "The event is sent again, as a new delivery."
    await webhooks.settled()
    page = await visitor.get(page.path.partition("?")[0])
    assert first.event_id in page.main.text
    assert '"type": "signing.created"' in page.main.find("pre", aria_label="The event as JSON").raw
    assert "Response 202" in page.main.text
    page = await visitor.get(WEBHOOKS)
    page = await visitor.send(page, f"{WEBHOOKS}/endpoints/{endpoint.id}/remove")
    assert "it gets no more events" in page.main.find("p", role="status").text
    late = await visitor.send(page, f"{WEBHOOKS}/deliveries/{first.id}/resend")
    assert late.status == 404
    assert "no such webhook endpoint any more" in late.main.find("p", role="alert").text


async def test_given_secret_is_used_and_typed_unseen(visitor: Visitor, receiver: str) -> None:
    page = await visitor.get(WEBHOOKS)
    assert page.main.find("input", name="secret").attributes["type"] == "password"
    refused = await visitor.send(page, WEBHOOKS, url="https://example.com/hook", secret="my own")
    assert refused.status == 400
    assert refused.main.find("input", name="url").attributes["value"] == "https://example.com/hook"
    assert "is not on this machine" in refused.main.find("p", id="url-error").text
    assert "my own" not in refused.html
    first, second = [await visitor.send(page, WEBHOOKS, url=f"{receiver}/ok", secret="my own") for _ in range(2)]
    assert first.main.find("code", id="webhook-secret").text == "my own"
    assert "registered before" not in first.main.text
    assert "This URL was registered before: it gets every event once more." in second.main.text


async def test_failed_unreachable_and_lost_deliveries_show_the_reason_and_the_next_attempt(
    visitor: Visitor, call: Caller, receiver: str
) -> None:
    for url in (f"{receiver}/bad", f"{receiver}/ok", "http://127.0.0.1:9/none"):
        call.sandbox.webhooks.register(url)
    for kind in ("lose", "wrong-signature"):
        call.sandbox.faults.clear()
        call.sandbox.faults.add("webhooks.deliver", kind, times=None)
        await call.draft()
        await call.sandbox.webhooks.settled()
    page = await visitor.get(WEBHOOKS)
    for words in ("Lost", "lost on purpose", "HTTP status 500", "retry at", "Retrying", "could not connect: "):
        assert words in page.main.text
    seen = ""
    for delivery in call.sandbox.webhooks.deliveries():
        one = await visitor.get(f"{WEBHOOKS}/deliveries/{delivery.id}")
        check_document(one)
        seen += one.main.text
    for words in ("None yet.", "wrong-signature", "Next attempt", "Last error", "500"):
        assert words in seen


async def test_delivery_opens_to_its_signature_and_the_endpoints_response(
    visitor: Visitor, call: Caller, receiver: str
) -> None:
    call.sandbox.webhooks.register(f"{receiver}/verbose", "s3cret")
    await call.draft()
    await call.sandbox.webhooks.settled()
    [delivery], [event] = call.sandbox.webhooks.deliveries(), call.sandbox.webhooks.events()
    page = await visitor.get(f"{WEBHOOKS}/deliveries/{delivery.id}")
    check_document(page)
    assert hmac.new(b"s3cret", event.body, hashlib.sha256).hexdigest() in page.main.text
    headers = page.main.find("pre", aria_label="Headers of the response").raw
    assert "X-Reply: yes" in headers
    assert "Set-Cookie: [redacted]" in headers
    assert "<taken>" in page.main.find("pre", aria_label="Body of the response").raw
    assert re.search(r"Duration \d+ ms", page.main.text)
    assert "s3cret" not in page.html


async def test_older_deliveries_are_on_the_following_page(visitor: Visitor, call: Caller, receiver: str) -> None:
    call.sandbox.webhooks.register(f"{receiver}/ok")
    for _ in range(26):
        await call.draft()
    first, second = [await visitor.get(f"{WEBHOOKS}?page={number}") for number in (1, 2)]
    assert "Page 1 of 2, 26 deliveries" in first.main.text
    oldest, *_, newest = call.sandbox.webhooks.deliveries()
    assert (newest.id in first.html, oldest.id in first.html) == (True, False)
    assert (newest.id in second.html, oldest.id in second.html) == (False, True)


# faults


async def test_fault_of_the_form_is_applied_counted_and_removed(visitor: Visitor, call: Caller) -> None:
    page = await visitor.get(FAULTS)
    check_document(page)
    kinds = [option.attributes["value"] for option in page.main.find("select", name="kind").every("option")]
    assert [term.text for term in page.main.every("dt")] == kinds
    page = await visitor.send(page, FAULTS, operation="me", kind="429", times="1", seconds="7")
    assert page.main.find("p", role="status").text == "The fault was added."
    status, _ = await call("GET", f"{API}/me")
    assert (status, call.headers["retry-after"]) == (429, "7")
    slow = {"operation": "webhooks.deliver", "kind": "slow", "times": "", "seconds": "0.5"}
    page = await visitor.send(page, FAULTS, slow)
    for words in ("1 of 1 – used up", "0 times, no limit", "seconds=0.5"):
        assert words in page.main.find("table").text
    page = await visitor.send(page, f"{FAULTS}/remove", press="Remove the fault 429")
    assert [fault.kind for fault in visitor.sandbox.faults.arranged] == ["slow"]
    page = await visitor.send(page, f"{FAULTS}/clear")
    assert page.main.find("p", role="status").text == "All faults were removed."
    assert not visitor.sandbox.faults.arranged


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "duplicate"}, "kind: * has no fault 'duplicate'"),
        ({"times": "many"}, "times: must be a number or empty, got 'many'"),
        ({"times": "0"}, "times: must be an integer of at least 1, got 0"),
        ({"kind": "500", "seconds": "1"}, "seconds: unknown detail of the fault '500'"),
    ],
)
async def test_invalid_fault_is_refused_and_the_form_keeps_its_input(
    visitor: Visitor, fields: dict[str, str], words: str
) -> None:
    page = await visitor.send(await visitor.get(FAULTS), FAULTS, fields)
    assert page.status == 400
    check_document(page)
    assert words in page.main.find("p", role="alert").text
    for name in fields.keys() & {"times", "seconds"}:
        assert page.main.find("input", name=name).attributes["value"] == fields[name]
    assert not visitor.sandbox.faults.arranged


async def test_rate_limit_of_the_form_is_set_and_removed(visitor: Visitor, call: Caller) -> None:
    page, action = await visitor.get(FAULTS), f"{FAULTS}/rate-limit"
    page = await visitor.send(page, action, rate="0.01", burst="1")
    assert "0.01 per second, 1 at once" in page.main.text
    assert [(await call("GET", f"{API}/me"))[0] for _ in range(2)] == [200, 429]
    wrong = await visitor.send(page, action, rate="0", burst="1")
    assert wrong.status == 400
    assert "rate: must be a number of at least 1e-06" in wrong.main.find("p", role="alert").text
    page = await visitor.send(page, action, rate="5", burst="")
    assert "5 per second, 5 at once" in page.main.text
    page = await visitor.send(page, action, rate="", burst="")
    assert page.main.find("p", role="status").text == "The rate limit was removed."
    assert (await call("GET", f"{API}/me"))[0] == 200
